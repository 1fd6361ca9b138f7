"""What the demo says when it cannot go on."""

from __future__ import annotations


class DemoError(Exception):
    """A mistake that the user can mend; its text is the one line that the user sees."""
