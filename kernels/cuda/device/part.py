"""Parts of a step: launches whose tables lie on the device, ready to be enqueued again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from .backend import copy_in
from .memory import Places, room_of


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

    def words(self, place: int, hp: np.ndarray) -> np.ndarray:
        """The int64 tables, to lie at ``place``; addresses of the scalars of each tensor."""

    def enqueue(self, call: LaunchContext) -> None:
        """Enqueue the launches; the tables are there."""


@contextmanager
def placed(part: Any, hp: np.ndarray, hp_of: Any, call: LaunchContext) -> Iterator[LaunchContext]:
    """A part by itself in the room of the stream, of which the call gets the scratch memory.

    It has tables of ``n_words`` at most. ``hp`` are rows of scalars in the type of the arithmetic,
    on the host, and ``hp_of`` says which of them each tensor uses.
    """
    scalars, places = np.ascontiguousarray(hp), Places()
    n_bytes = scalars.nbytes
    places.add(n_bytes)
    at_words, at_scratch = places.add(8 * part.n_words), places.add(part.scratch_bytes)
    with room_of(call.stream) as room:
        base = room.take(places.size)
        words = part.words(base + at_words, base + np.asarray(hp_of) * scalars.strides[0])
        # Scalars and tables in one array: one copy to the device for a step.
        content = room.to_copy(at_words + words.nbytes)
        content[:n_bytes] = scalars.reshape(-1).view(np.uint8)
        content[at_words:] = words.view(np.uint8)
        copy_in(base, content, call.stream)
        yield call._replace(scratch=base + at_scratch)


def run(part: DevicePart, hp: np.ndarray, hp_of: Any, call: LaunchContext) -> None:
    """Enqueue a part by itself, unless it has nothing to do (``n_words`` is 0); as `placed`."""
    if part.n_words:
        with placed(part, hp, hp_of, call) as there:
            part.enqueue(there)
