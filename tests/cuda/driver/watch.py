"""Look at all that is enqueued under the driver without a device.

Of each launch: it has as many arguments as its loop, all of them ``int64``, and no address in them,
or in the tables that were copied there for it, is one of memory that was freed. Kernels are not
compiled: those of `test_driver.py` are.

Frameworks give the memory of an array that is gone to the next one on the same stream. So what
other streams have used of it must be behind what this stream has waited for (`Order`).
"""

import ctypes
import weakref
from functools import cache
from typing import Any

from cuda.core import ObjectCode
from numba import cuda
from numba.cuda.cudadrv.driver import Context, Event
from fusestep.kernels.cuda.device import backend, driver, memory
from stub import LIBRARY

STUB = "driver without a device"  # in the name of its device
FREED = 0  # what `stub_state` says
launched: list[str] = []
"""The loops and copies that were enqueued."""


def is_stub() -> bool:
    """Whether the driver is the one without a device."""
    name = cuda.get_current_device().name
    return STUB in (name.decode() if isinstance(name, bytes) else str(name))


def is_there(word: int) -> bool:
    """Whether it is an address in memory of the device."""
    return word > 0 and _library().stub_state(word) == 1


@cache
def _library() -> Any:
    library = ctypes.CDLL(LIBRARY)
    library.stub_state.argtypes = [ctypes.c_ulonglong]
    return library


class Order:
    """Counts by stream of all that each has enqueued, and of others waited for."""

    def __init__(self) -> None:
        self._behind: dict[int, dict[int, int]] = {}
        self._host: dict[int, int] = {}  # what the host has waited for
        self._uses: dict[tuple[int, int], dict[int, int]] = {}  # by begin and end of some memory

    def _of(self, stream: int) -> dict[int, int]:
        return self._behind.setdefault(stream, {**self._host, stream: 0})

    def use(self, stream: int, word: int) -> None:
        """A stream enqueues work with a word, which may be an address."""
        own = self._of(stream)
        own[stream] += 1
        for (begin, end), uses in self._uses.items():
            if begin <= word < end:
                uses[stream] = own[stream]

    def event(self, stream: int) -> dict[int, int]:
        """Counts that are behind an event that is recorded now."""
        return dict(self._of(stream))

    def wait(self, stream: int, event: dict[int, int]) -> None:
        """Later work on a stream comes after an event."""
        own = self._of(stream)
        own.update({other: max(count, own.get(other, 0)) for other, count in event.items()})

    def wait_on_host(self, event: dict[int, int]) -> None:
        """All later work comes after an event."""
        for stream in [*self._behind]:
            self.wait(stream, event)
        for stream, count in event.items():
            self._host[stream] = max(count, self._host.get(stream, 0))

    def wait_for_all(self) -> None:
        """The host has waited for the device."""
        for behind in [*self._behind.values()]:
            self.wait_on_host(dict(behind))

    def made(self, begin: int, n_bytes: int) -> None:
        """Memory of a framework is that of an array."""
        self._uses[begin, begin + n_bytes] = {}

    def left(self, begin: int, n_bytes: int, stream: int) -> None:
        """The array is gone, of which the memory belongs to a stream."""
        behind = self._of(stream)
        late = {
            other: count
            for other, count in self._uses.pop((begin, begin + n_bytes)).items()
            if other != stream and count > behind.get(other, 0)
        }
        if late:
            violations.append(f"stream {stream} has memory that {[*late]} may still use")


order = Order()
violations: list[str] = []
"""Found in finalizers, where nothing can be raised."""


def install() -> None:
    """Look at everything from now on."""
    library = _library()
    loops: dict[Any, Any] = {}
    kernels: dict[Any, Any] = {}
    launch, enqueue = driver.launch, driver._enqueue

    def prepare(loop: Any) -> Any:
        if loop not in kernels:
            name = loop.py_func.__qualname__.encode()
            kernels[loop] = ObjectCode.from_cubin(b"none").get_kernel(name)
            loops[kernels[loop]] = loop.py_func
        return kernels[loop]

    def look_at(stream: int, words: Any, what: str) -> None:
        for k, word in enumerate(words):
            if word > 0:
                assert library.stub_state(word) != FREED, f"{what}: memory at word {k} was freed"
                order.use(stream, word)

    def watched_launch(stream: Any, config: Any, kernel: Any, *arguments: int) -> None:
        loop = loops[kernel]
        name = loop.__qualname__
        assert len(arguments) == loop.__code__.co_argcount, name
        for k, argument in enumerate(arguments):
            assert type(argument) is int, (name, k, argument)
            assert -(1 << 63) <= argument < 1 << 63, (name, k, argument)
        look_at(int(stream.handle), arguments, name)
        launch(stream, config, kernel, *arguments)
        launched.append(name)

    def watched_copy(call: Any, n_bytes: int, stream: Any, *places: int) -> None:
        handle, name = driver.handle_of(stream), call.__name__
        look_at(handle, places, name)
        # Tables lie in rooms. Beside addresses they hold numbers that look otherwise.
        rooms = memory._rooms.values() if "HtoD" in name else ()
        if any(room._address <= places[0] < room._address + room._size for room in rooms):
            words = (ctypes.c_longlong * (n_bytes // 8)).from_address(places[1])
            look_at(handle, [word for word in words if word >> 44 == 7], "a table")
        enqueue(call, n_bytes, stream, *places)
        launched.append(name)

    to_copy = memory.Room.to_copy

    def to_copy_without_old_words(self: Any, n_bytes: int) -> Any:
        found = to_copy(self, n_bytes)
        found[:] = 0  # what lies between the tables is that of an earlier step
        return found

    memory.Room.to_copy = to_copy_without_old_words  # type: ignore[method-assign]
    driver.prepare = backend.prepare = prepare
    driver.launch, driver._enqueue = watched_launch, watched_copy
    events: Any = weakref.WeakKeyDictionary()
    record, wait = Event.record, Event.wait
    synchronize, synchronize_event = Context.synchronize, Event.synchronize

    def recorded(self: Any, stream: Any = 0) -> None:
        events[self] = order.event(driver.handle_of(stream) if stream else 0)
        record(self, stream)

    def waited(self: Any, stream: Any = 0) -> None:
        order.wait(driver.handle_of(stream) if stream else 0, events.get(self, {}))
        wait(self, stream)

    def synchronized_event(self: Any) -> None:
        order.wait_on_host(events.get(self, {}))
        synchronize_event(self)

    def synchronized(self: Any) -> None:
        order.wait_for_all()
        synchronize(self)

    Event.record, Event.wait = recorded, waited
    Context.synchronize, Event.synchronize = synchronized, synchronized_event
