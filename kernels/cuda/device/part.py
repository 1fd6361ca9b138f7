"""Parts of a step: launches whose tables lie on the device, ready to be enqueued again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from .memory import Room, aligned, room_of


class LaunchContext(NamedTuple):
    """The stream, the guard and the scratch memory of launches."""

    stream: Any  # of Numba
    guard: int = 0  # address of the guard (`guard`), or 0: the call cannot fail
    scratch: int = 0  # address of as much memory as is needed


class DevicePart(Protocol):
    """The launches of a batch of tensors after its scalars are there."""

    loops: list[Any]  # all that are launched
    n_words: int  # of its tables, at most

    @property
    def scratch_bytes(self) -> int:
        """Bytes of memory that the launches need for the time of the call."""

    def words(self, place: int, hp: Any) -> np.ndarray:
        """The int64 tables, to lie at ``place``; addresses of the scalars of each tensor."""

    def enqueue(self, call: LaunchContext) -> None:
        """Enqueue the launches; the tables are there."""


@contextmanager
def placed(part: Any, hp: np.ndarray, hp_of: Any, call: LaunchContext) -> Iterator[LaunchContext]:
    """A part by itself in the room of the stream, of which the call gets the scratch memory.

    It has tables of ``n_words`` at most. ``hp`` are rows of scalars in the type of the arithmetic,
    on the host, and ``hp_of`` says which of them each tensor uses.
    """
    with room_of(call.stream) as room:
        yield _put(part, hp, hp_of, call, room)


def run(part: DevicePart, hp: np.ndarray, hp_of: Any, call: Any) -> None:
    """Enqueue a part by itself, unless it has nothing to do (``n_words`` is 0); as `placed`.

    Of ``call`` the stream and the guard are used.
    """
    if part.n_words:
        with room_of(call.stream) as room:
            part.enqueue(_put(part, hp, hp_of, call, room))


def _put(part: Any, hp: np.ndarray, hp_of: Any, call: Any, room: Room) -> LaunchContext:
    scalars = np.ascontiguousarray(hp)
    at_words, row_bytes = aligned(scalars.nbytes), scalars.strides[0]
    at_scratch = at_words + aligned(8 * part.n_words)
    base = room.take(at_scratch + part.scratch_bytes)
    if type(hp_of) is list:  # NumPy takes longer for a few
        places: Any = [base + k * row_bytes for k in hp_of]
    else:
        places = base + hp_of * row_bytes
    words = part.words(base + at_words, places)
    # Scalars and tables in one array: one copy to the device for a step.
    content = room.to_copy(at_words + words.nbytes)
    content[: scalars.nbytes] = scalars.reshape(-1).view(np.uint8)
    content[at_words:] = words.view(np.uint8)
    room.copy(base, len(content))
    return LaunchContext(call.stream, call.guard, base + at_scratch)
