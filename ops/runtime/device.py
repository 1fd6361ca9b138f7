"""Arrays on CUDA devices, in one class for all frameworks, and the streams of their calls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from ...kernels.storage import STORAGES
from . import cuda
from .errors import RejectedValueError, reject
from .frameworks import (
    TORCH,
    Framework,
    Place,
    carrier_of,
    framework_of,
    known_framework,
    lacks,
    on_device,
    stream_of,
)  # fmt: skip


class Launch(NamedTuple):
    """The stream of a call, and the condition under which it writes."""

    stream: Any  # of Numba
    guard: int = 0  # its address on the device, or 0 for a call that cannot fail
    base: int = 0  # added to a bad position that it finds


class Flags(NamedTuple):
    """Properties of an array's memory, under NumPy's names."""

    c_contiguous: bool
    aligned: bool
    writeable: bool


class DeviceLayout(NamedTuple):
    """All of a device array but its memory."""

    framework: Framework
    stream: int | None
    device: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    flags: Flags
    ndim: int
    size: int
    nbytes: int

    @classmethod
    def of(cls, framework: Framework, place: Place) -> DeviceLayout:
        """The layout of an array at a place."""
        address, shape, strides, dtype, device, writable, stream = place
        size, n_bytes = math.prod(shape), dtype.itemsize
        compact = tuple(n_bytes * math.prod(shape[k + 1 :]) for k in range(len(shape)))
        strides = compact if strides is None else strides
        # The stride of a dimension of 1 does not matter.
        dimensions = zip(shape, strides, compact, strict=True)
        is_compact = 0 in shape or all(n == 1 or a == b for n, a, b in dimensions)
        flags = Flags(is_compact, address % n_bytes == 0, writable)
        kind = framework, stream, device, dtype, shape, strides, flags
        return cls(*kind, len(shape), size, size * n_bytes)


def _of_layout(name: str, doc: str) -> Any:
    return property(attrgetter(f"layout.{name}"), doc=doc)  # read without a call of Python


class DeviceArray:
    """An array on a CUDA device, adopted without a copy.

    It has the attributes of a NumPy array that describe it, and no arithmetic. ``owner`` is the
    adopted array of a framework, and ``base`` where that lay.
    """

    __slots__ = (
        "address", "base", "device", "dtype", "flags", "layout", "nbytes", "ndim", "owner", "shape",
    )  # fmt: skip

    framework = _of_layout("framework", "The framework of the adopted array.")
    stream = _of_layout("stream", "The handle of a stream of the array itself, or None.")
    strides = _of_layout("strides", "Bytes from one element to the next, by dimension.")
    size = _of_layout("size", "The number of elements.")
    itemsize = _of_layout("dtype.itemsize", "Bytes of an element.")

    def __init__(self, owner: Any, layout: DeviceLayout, address: int, base: int) -> None:
        self.owner, self.layout, self.address, self.base = owner, layout, address, base
        # What every call reads is found at once.
        _, _, self.device, self.dtype, self.shape, _, self.flags, self.ndim, _, self.nbytes = layout

    @classmethod
    def at(cls, owner: Any, framework: Framework, place: Place) -> DeviceArray:
        """An array in the memory of ``owner``, an array of a framework."""
        base = framework.address(owner) or 0
        return cls(owner, DeviceLayout.of(framework, place), place.address, base)

    @classmethod
    def adopt(cls, where: str, name: str, value: Any) -> DeviceArray | None:
        """``value`` as a device array, or None if it is none."""
        if type(value) is DeviceArray:
            return value.followed(where, name)
        framework = framework_of(value)
        if framework is None:
            return None
        if lacking := lacks():
            wrong, expected, got = "lives on a CUDA device", "an array on the host", type(value)
            reject(RuntimeError, where, name, wrong, expected, got.__name__, f"; {lacking}")
        kind = framework, framework.signature(value)
        layout = _known.get(kind)
        if layout is not None:
            address = framework.address(value)
            if lie_on(layout, (address,)):
                return cls(value, layout, address, address)
        made = cls.at(value, framework, framework.place(where, name, value))
        if made.address and made.flags.aligned:
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[kind] = made.layout
        return made

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array of 0 dimensions has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device={self.device})"

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the interface; bfloat16, which has no letter there, is two bytes."""
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, not self.flags.writeable),
            "strides": None if self.flags.c_contiguous else self.strides,
            "version": 3,
            "stream": self.stream,
        }

    @property
    def signature(self) -> Any:
        """The signature of the array for its framework; None if it was copied, or is a part."""
        is_whole = self.base == self.address and self.flags.c_contiguous
        return self.framework.signature(self.owner) if is_whole else None

    @property
    def has_moved(self) -> bool:
        """Whether the adopted array lies elsewhere now: a framework has exchanged its memory."""
        return bool((self.framework.address(self.owner) or 0) != self.base)

    def followed(self, where: str, name: str) -> DeviceArray:
        """This array, or one of its layout in the memory that was exchanged for its own.

        Raises:
            TypeError, ValueError, RuntimeError: that has another layout, or there is none.
        """
        if not self.has_moved:
            return self
        place = self.framework.place(where, name, self.owner)
        if place.shape != self.shape:
            reject(ValueError, where, name, "has a wrong shape", self.shape, place.shape)
        if place.dtype not in (self.dtype, carrier_of(self.dtype)):
            reject(TypeError, where, name, "has a wrong dtype", self.dtype, place.dtype)
        made = DeviceArray.at(self.owner, self.framework, place._replace(dtype=self.dtype))
        if made.layout != self.layout:
            wrong, got = "lies otherwise than before", f"{made.flags} on device {made.device}"
            reject(ValueError, where, name, wrong, f"{self.flags} on device {self.device}", got)
        return made

    def is_like(self, other: Any) -> bool:
        """Whether another array differs in its place alone."""
        layout = self.layout
        return type(other) is DeviceArray and (other.layout is layout or other.layout == layout)

    def without_owner(self) -> DeviceArray:
        """An array that tells the stream of this one, and does not keep it alive."""
        return DeviceArray(None, self.layout, 0, 0)

    def contiguous(self, where: str, name: str) -> DeviceArray:
        """This array, or a C-contiguous copy, if the framework can make one.

        Raises:
            ValueError, RuntimeError: it cannot.
        """
        if self.flags.c_contiguous and self.flags.aligned:
            return self
        refuse_capture(self)
        copied, made = self.framework.contiguous(self.owner), self
        if copied is not None:
            made = DeviceArray.at(copied, self.framework, self.framework.place(where, name, copied))
        if not (made.flags.c_contiguous and made.flags.aligned):
            wrong, expected, got = "is not contiguous", "a C-contiguous array", str(self.strides)
            if self.flags.c_contiguous:
                wrong, expected, got = "is not aligned", "aligned elements", hex(self.address)
            reject(RejectedValueError, where, name, wrong, expected, got, "; copy it first")
        return made

    def filled_like(
        self, value: float, dtype: np.dtype[Any], shape: tuple[int, ...] | None = None
    ) -> DeviceArray:
        """A new array of another dtype, filled with ``value``; of the same shape unless given."""
        made = self.empty_like(dtype, shape)
        with launching([self]) as launch:
            cuda.device.arrays.fill(made.address, made.size, value, dtype, launch.stream)
        return made

    def empty_like(
        self, dtype: np.dtype[Any] | None = None, shape: tuple[int, ...] | None = None
    ) -> DeviceArray:
        """A new array in the same framework, of the same dtype and shape unless given."""
        refuse_capture(self)
        shape = self.shape if shape is None else shape
        return _new(self.framework, shape, dtype or self.dtype, self.device)

    def holding(self, array: np.ndarray) -> DeviceArray:
        """A new array in the same framework with the contents of an array on the host."""
        made = self.empty_like(array.dtype, array.shape)
        made.assign(array)
        return made

    def copy(self) -> DeviceArray:
        """A copy in the same framework."""
        copied = self.empty_like()
        copied.assign(self.contiguous("DeviceArray", "array"))
        return copied

    def memory(self) -> DeviceArray:
        """The bytes of a contiguous array: a view."""
        like = self.device, self.flags.writeable, self.stream
        place = Place(self.address, (self.nbytes,), None, np.dtype(np.uint8), *like)
        return DeviceArray.at(self.owner, self.framework, place)

    def reshape(self, *lengths: Any) -> DeviceArray:
        """A view of a contiguous array in another shape, given as numbers or as one tuple."""
        shape = lengths[0] if isinstance(lengths[0], tuple) else lengths
        like = self.dtype, self.device, self.flags.writeable, self.stream
        return DeviceArray.at(self.owner, self.framework, Place(self.address, shape, None, *like))

    def part(self, elements: slice) -> DeviceArray:
        """A view of some consecutive elements of a contiguous array of 1 dimension."""
        n, like = elements.stop - elements.start, (self.dtype, self.device, self.flags.writeable)
        place = Place(self.address + elements.start * self.itemsize, (n,), None, *like, self.stream)
        return DeviceArray.at(self.owner, self.framework, place)

    def native(self) -> Any:
        """The array of the framework, or this one if the framework has no such dtype."""
        same = self.framework.place("", "", self.owner).dtype == self.dtype
        return self.owner if same else self

    def numpy(self) -> np.ndarray:
        """A copy on the host, which waits for it."""
        source = self.followed("DeviceArray", "array").contiguous("DeviceArray", "array")
        copied: np.ndarray = np.empty(self.shape, self.dtype)
        with launching([self]) as launch:
            cuda.device.backend.copy_out(copied, source.address, launch.stream)
        return copied

    def assign(self, array: np.ndarray | DeviceArray) -> None:
        """Copy an array of this shape and dtype, on the host or (contiguous) on the device."""
        backend, to = cuda.device.backend, self.followed("DeviceArray", "array").address
        if isinstance(array, DeviceArray):
            source = array.followed("DeviceArray", "array").address
            with launching([self, array]) as launch:
                backend.copy_within(to, source, self.nbytes, launch.stream)
            return
        with launching([self]) as launch:
            backend.copy_in(to, np.ascontiguousarray(array), launch.stream)

    def __deepcopy__(self, memo: dict[Any, Any]) -> DeviceArray:
        # An array that was adopted twice, by two groups of parameters say, is copied once.
        key = (DeviceArray, id(self.owner), self.address, self.shape, self.strides, self.dtype)
        if key not in memo:
            memo[key] = self.holding(self.numpy())
        copied: DeviceArray = memo[key]
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _to_device, (self.numpy(), self.device)


_known: dict[tuple[Framework, Any], DeviceLayout] = {}  # by framework and `Framework.signature`
_MOST_KNOWN = 1_024


def lie_on(layout: DeviceLayout, addresses: Sequence[int]) -> bool:
    """Whether arrays of a layout that is known, now at these addresses, are on its device still.

    Whether they have memory, and are aligned, is asked too, since no layout tells it.
    """
    n_bytes = layout.dtype.itemsize
    # Aligned are those that the size divides: a greatest common divisor is found by code of C.
    if not all(addresses) or math.gcd(n_bytes, *addresses) < n_bytes:
        return False
    return layout.framework.tells_device or cuda.device.backend.are_on(layout.device, addresses)


def _to_device(array: np.ndarray, device: int) -> DeviceArray:
    """An array in memory of Numba's with the contents of a pickled array."""
    made = _new(Framework(), array.shape, array.dtype, device)
    made.assign(array)
    return made


def _new(
    framework: Framework, shape: tuple[int, ...], dtype: np.dtype[Any], device: int
) -> DeviceArray:
    with on_device(device):
        owner, address = framework.empty(shape, dtype, device)
    made_by = framework_of(owner) or framework  # Numba's simulator has a framework of its own
    return DeviceArray.at(owner, made_by, Place(address, shape, None, dtype, device, True))


def alike_on_device(values: Sequence[Any]) -> list[DeviceArray] | None:
    """Arrays of one framework and one layout that was seen, if they can be updated in place.

    None says nothing: whatever is not known at once is adopted and checked one by one.
    """
    kind = type(values[0])
    framework = known_framework(kind)
    if framework is None or [*map(type, values)].count(kind) < len(values):
        return None
    if framework is TORCH and not values[0].is_cuda:
        return None
    signature_of, like = framework.signature, framework.signature(values[0])
    layout = _known.get((framework, like))
    if layout is None or layout.dtype not in STORAGES or layout.flags != _WHOLE:
        return None
    if [*map(signature_of, values)].count(like) < len(values):
        return None
    addresses = [*map(framework.address, values)]
    if not lie_on(layout, addresses):
        return None
    return [DeviceArray(x, layout, a, a) for x, a in zip(values, addresses, strict=True)]


_WHOLE = Flags(c_contiguous=True, aligned=True, writeable=True)


def is_on_device(array: Any) -> bool:
    """Whether an adopted array is on a CUDA device."""
    return isinstance(array, DeviceArray)


def device_of(where: str, named: dict[str, Any]) -> int | None:
    """The device on which all arrays lie; None for the host.

    Raises:
        ValueError, RuntimeError: they lie on different devices.
    """
    if DeviceArray not in map(type, named.values()):
        return None
    places = {
        name: array.device if isinstance(array, DeviceArray) else None
        for name, array in named.items()
    }
    first, place = next(iter(places.items()))
    for name, other in places.items():
        if other != place:
            wrong = f"lives elsewhere than {first}"
            reject(RejectedValueError, where, name, wrong, _named(place), _named(other))
    return place


def may_share_memory(a: Any, b: Any) -> bool:
    """Whether the bytes from the first to the last element of two arrays in one place overlap."""
    if not isinstance(a, DeviceArray):
        return np.may_share_memory(a, b)
    (begin, end), (other_begin, other_end) = _extent(a), _extent(b)
    return begin < other_end and other_begin < end


def _extent(array: DeviceArray) -> tuple[int, int]:
    """The address of the first byte, and of the byte after the last; (0, 0) if it is empty."""
    if array.size == 0:
        return 0, 0
    reach = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
    first = array.address + sum(step for step in reach if step < 0)
    return first, array.address + sum(step for step in reach if step > 0) + array.itemsize


def _named(device: int | None) -> str:
    return "the host" if device is None else f"CUDA device {device}"


class launching:  # noqa: N801  (used as a function)
    """The launch of a call on several arrays of one device, on the stream of the first array.

    If other arrays belong to other streams (of another framework, say), the call waits for earlier
    work on these, and later work there waits for the call. The host waits for nothing.
    """

    def __init__(self, arrays: Sequence[DeviceArray]) -> None:
        layouts = [array.layout for array in arrays]
        first = layouts[0]
        # Most arrays of a call share one layout.
        others = [layout for layout in layouts if layout is not first]
        self._kinds = dict.fromkeys([(f.framework, f.stream) for f in (first, *others)])
        self._device = first.device

    def __enter__(self) -> Launch:
        device = self._device
        is_current = cuda.device.backend.is_current(device)
        self._there = None if is_current else cuda.numba.gpus[device]
        if self._there is not None:
            self._there.__enter__()
        try:
            handles = dict.fromkeys(
                [
                    framework.stream(device) if stream is None else stream
                    for framework, stream in self._kinds
                ]
            )
            if any(map(cuda.device.backend.is_capturing, handles)):
                raise _captured()
            self._stream, *self._others = [stream_of(device, handle) for handle in handles]
            for other in self._others:
                cuda.device.memory.follow(self._stream, other)
        except BaseException as error:
            if self._there is not None:
                self._there.__exit__(type(error), error, error.__traceback__)
            raise
        return Launch(self._stream)

    def __exit__(self, *error: Any) -> None:
        try:  # after an error too, for the work that was enqueued before it
            for other in self._others:
                cuda.device.memory.follow(other, self._stream)
        finally:
            if self._there is not None:
                self._there.__exit__(*error)


def refuse_capture(array: DeviceArray) -> None:
    """Refuse a call that would become part of a CUDA graph.

    Raises:
        RuntimeError: the stream of the array is being captured.
    """
    with launching([array]):
        pass


def refuse_captures(devices: Iterable[Any]) -> None:
    """Refuse a call in which PyTorch works on some of its CUDA devices, as `refuse_capture`."""
    for device in devices:
        with on_device(device.index):
            if cuda.device.backend.is_capturing(TORCH.stream(device.index)):
                raise _captured()


def _captured() -> RuntimeError:
    # Scalars and tables come from the host; a replayed graph would use the old ones.
    return RuntimeError(
        "fusestep: a CUDA graph is being captured, of which no call of this package can be a "
        "part; capture forward and backward, and step after the replay"
    )
