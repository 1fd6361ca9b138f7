"""What the examples say when they cannot go on."""

from __future__ import annotations

import sys
from collections.abc import Callable


class DemoError(Exception):
    """A mistake that the user can mend; its text is the one line that the user sees."""


def status_of(who: str, run: Callable[[], None]) -> int:
    """The exit status of a run; a mistake of the user (2) is one line that begins with ``who``."""
    try:
        run()
    except DemoError as error:
        print(f"{who}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{who}: interrupted", file=sys.stderr)
        return 130
    return 0
