"""Check that a file can be written at a path: nothing else stands there."""

from __future__ import annotations

import os
import stat

_KINDS = (
    (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
)  # fmt: skip


def check_target(
    what: str, path: str | os.PathLike[str], dir_fd: int | None = None, *, follows: bool = True
) -> os.stat_result | None:
    """The status of the regular file at ``path``, to which links may lead; None: there is none.

    Without ``follows`` a link is refused, and so is a file that another name leads to as well.

    A file that is renamed to its place would put an end to a pipe or a device there, as root even
    to those of the system. So whatever is written by its name is checked first.

    Raises:
        OSError: something else is there; ``what`` says in the message what the path is.
    """
    try:
        status = os.stat(path, dir_fd=dir_fd, follow_symlinks=follows)
    except FileNotFoundError:
        return None
    is_linked = not follows and status.st_nlink > 1
    if stat.S_ISREG(status.st_mode) and not is_linked:
        return status
    kind = next((name for fits, name in _KINDS if fits(status.st_mode)), "a link")
    error = IsADirectoryError if stat.S_ISDIR(status.st_mode) else OSError
    expected = "a regular file or a name that is free"
    raise error(f"{what} is {kind}: expected {expected}, got {os.fspath(path)!r}")
