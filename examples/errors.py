"""What the examples say when they cannot go on."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


class DemoError(Exception):
    """A mistake that the user can mend; its text is the one line that the user sees."""


def require(who: str, needed: Mapping[str, str], extras: str) -> None:
    """Refuse to begin without a library.

    Args:
        who: needs it.
        needed: modules, each with the name to install.
        extras: of this package, which bring them.

    Raises:
        DemoError: one of them is not installed.
    """
    for module, name in needed.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            install = f'install it with pip install "fusestep[{extras}]"'
            raise DemoError(f"{who} needs {name}: {install}") from error


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
