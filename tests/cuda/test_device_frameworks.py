"""Arrays of torch and CuPy on a device.

Tensors of the CPU say that they lie on a device, which is the host. The stand-in for CuPy has what
`fusestep.ops.runtime.frameworks` asks of it, around NumPy arrays.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import permutations
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import fusestep

from devices import (  # isort: skip
    BETAS, BF16, MARKS, SIMULATOR, adopted, assert_same, capture, on_device, only, positive,
    refused, told)  # fmt: skip
from fusestep import nn, ops
from fusestep.kernels.cuda.device import backend, memory
from fusestep.ops.runtime import device, frameworks, launch, locks
from fusestep.ops.runtime.device import launching
from helpers import at_once

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    *MARKS, only(SIMULATOR, reason="tensors of the CPU are given out as those of a device"),
]  # fmt: skip

events: list[str] = []
"""What is on streams, in order."""


# Stand-ins


class Current(threading.local):
    """The current stream of a framework: of a thread."""

    torch = 0
    cupy = 0


current = Current()


def tensor(array: np.ndarray) -> Any:
    """A tensor in the memory of an array."""
    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class Device(nullcontext[None]):
    """``cupy.cuda.Device``."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.id = number


class CuPyArray:
    """``cupy.ndarray``, which may lie between addresses."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.data = SimpleNamespace(ptr=array.ctypes.data, device_id=0)
        self.shape, self.strides, self.dtype = array.shape, array.strides, array.dtype
        self.flags = SimpleNamespace(c_contiguous=array.flags.c_contiguous)
        self.device = Device(0)

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")


def ascontiguousarray(array: CuPyArray) -> CuPyArray:
    is_contiguous = array.flags.c_contiguous
    return array if is_contiguous else CuPyArray(np.ascontiguousarray(array._array))


CUPY = SimpleNamespace(
    ndarray=CuPyArray,
    empty=lambda shape, dtype: CuPyArray(np.empty(shape, dtype)),
    ascontiguousarray=ascontiguousarray,
    cuda=SimpleNamespace(
        Device=Device, get_current_stream=lambda: SimpleNamespace(ptr=current.cupy)))  # fmt: skip


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of torch lie on the device, and CuPy is there."""
    current.torch = current.cupy = 0
    from simulator import give_out_tensors

    give_out_tensors(monkeypatch, lambda device: current.torch + 100 * device)
    monkeypatch.setitem(sys.modules, "cupy", CUPY)


class Interface:
    """An object with nothing but ``__cuda_array_interface__``."""

    def __init__(self, array: np.ndarray, **changed: Any) -> None:
        self._array = array
        strides = None if array.flags.c_contiguous else array.strides
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str,
            "data": (array.ctypes.data, not array.flags.writeable), "strides": strides,
            "version": 3, **changed,
        }  # fmt: skip


class Stream(int):
    """A stream of Numba, known by its handle."""


class Event:
    """An event that is never done, so that whoever has to wait does."""

    def record(self, stream: Any) -> None:
        self.at = int(stream) if isinstance(stream, Stream) else None
        if self.at is not None:
            events.append(f"record {self.at}")

    def wait(self, stream: Any) -> None:
        if isinstance(stream, Stream) and self.at is not None:  # both are the user's
            events.append(f"{int(stream)} waits for {self.at}")

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Streams have handles; the events on them, in order."""
    monkeypatch.setattr(device, "stream_of", lambda _, handle: Stream(handle))
    monkeypatch.setattr(backend, "new_event", Event)
    monkeypatch.setattr(memory, "new_event", Event)
    monkeypatch.setattr(launch, "_last", {})
    events.clear()
    return events


def on_streams(of_torch: int, of_cupy: int = 0) -> None:
    """Both frameworks have a current stream; what was on others is forgotten."""
    current.torch, current.cupy = of_torch, of_cupy
    events.clear()


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return positive(shape, dtype)


def assert_steps(
    kind: Callable[[Any], Any], make: Callable[[np.ndarray], Any], steps: Sequence[tuple[Any, Any]]
) -> None:
    """The steps of an array of a framework are those of one of the host, on its gradients."""
    w = array(5, 3)
    expected = w.copy()
    ours, theirs = kind([make(w)]), kind([expected])
    for given, on_cpu in steps:
        ours((given,))
        theirs((on_cpu,))
    fusestep.synchronize()
    np.testing.assert_allclose(w, expected, 1e-5)


# Checks


def test_places() -> None:
    """Address, shape, strides, dtype and device are those of the framework's array."""
    whole, cube = array(4, 6), array(2, 2, 2)
    turned = [cube.transpose(axes) for axes in permutations(range(3))]
    for make in (tensor, CuPyArray, Interface):
        for part in (whole, whole[1:3], whole[:, ::2], whole.T, whole[:0], array(), *turned):
            found = adopted(make(part))
            # A tensor without elements has no memory.
            at = 0 if make is tensor and not part.size else part.ctypes.data
            assert (found.address, found.shape) == (at, part.shape)
            assert (found.dtype, found.device) == (part.dtype, 0)
            assert found.flags == (part.flags.c_contiguous, True, True)
            assert found.size == part.size
            if part.size and not part.flags.c_contiguous:
                assert found.strides == part.strides
    # The stride of a dimension of one element does not matter.
    ones = np.lib.stride_tricks.as_strided(whole, (1, 6), (999, 4))
    assert adopted(Interface(ones, strides=(999, 4))).flags.c_contiguous
    read_only = array(3)
    read_only.flags.writeable = False
    assert not adopted(Interface(read_only)).flags.writeable
    assert adopted(Interface(array(0), data=(None, False))).address == 0
    assert not adopted(Interface(np.zeros(9, np.uint8)[1:].view(np.float32))).flags.aligned


def test_alike() -> None:
    """One that is like another that was seen is looked at no less."""
    w, good = array(3), tensor(array(3))
    opt = nn.SGD([tensor(w)], 0.1)
    for _ in range(2):
        opt((good,))
    freed, zero = torch.ones(3), torch._efficientzerotensor(3)
    freed.untyped_storage().resize_(0)
    opaque = torch.ones(3).to_mkldnn()
    nowhere = Interface(array(3))
    nowhere.__cuda_array_interface__["data"] = (0, False)
    before = w.copy()
    for bad in (freed, zero, opaque, nowhere):
        with refused(RuntimeError, "has no memory"):
            adopted(bad)
        with refused(RuntimeError, "has no memory"):
            opt((bad,))
    np.testing.assert_array_equal(w, before)
    assert opt.global_step == 2


def test_dtypes() -> None:
    """Every dtype that NumPy or ml_dtypes has; bfloat16 by its two bytes."""
    for name in ("float16", "float32", "float64", "bfloat16", "int32", "int64"):
        dtype = BF16 if name == "bfloat16" else np.dtype(name)
        assert adopted(tensor(np.zeros(3, dtype))).dtype == dtype
        assert adopted(CuPyArray(np.zeros(3, dtype))).dtype == dtype
    two_bytes = Interface(np.zeros(3, BF16), typestr="<V2")
    of_others = [Interface(np.zeros(3, np.uint64), typestr=name) for name in ("<c8", "|O8", "<M8")]
    for value, text in (
        *((one, "has a wrong dtype") for one in (two_bytes, *of_others)),
        *(
            (torch.empty(3, dtype=kind), f"expected a dtype that NumPy has, got {kind}")
            for kind in (torch.bits8, torch.bits16)),
        (Interface(array(3), mask=Interface(array(3))), "is masked"),
    ):  # fmt: skip
        with refused(TypeError, text):
            adopted(value)
    two_bytes.dtype = "bfloat16"  # type: ignore[attr-defined]
    assert adopted(two_bytes).dtype == BF16
    own = adopted(adopted(tensor(np.zeros(3, BF16))))
    assert own.__cuda_array_interface__["typestr"] == "<V2"
    assert frameworks.framework_of(own) is not None
    assert frameworks._INTERFACE.place("", "", own).dtype == BF16
    for kind in (np.complex64, np.int32, ">f4"):
        with refused(TypeError, "has a wrong dtype"):
            nn.Parameter(Interface(np.zeros(3, kind)))


def test_other_objects() -> None:
    """Arrays on the host are none of a device, nor are those of modules imported in part."""
    host = tensor(array(3))
    host.is_host = True
    for value in (host, array(3), 1.0, [1.0], None, np.float32(1), nn.Parameter(array(3))):
        assert frameworks.framework_of(value) is None
    modules = sys.modules["torch"], sys.modules["cupy"]
    for part in (ModuleType("torch"), None):
        sys.modules["torch"] = sys.modules["cupy"] = part  # type: ignore[assignment]
        try:
            assert frameworks.framework_of(array(3)) is None
            assert frameworks.framework_of(Interface(array(3))) is frameworks._INTERFACE
        finally:
            sys.modules["torch"], sys.modules["cupy"] = modules


def test_strided_gradients() -> None:
    """The framework copies what is not contiguous; where it cannot, that is an error."""
    wide, index = array(5, 6), np.array([4, 0, 1, 0])
    for make in (tensor, CuPyArray):
        parts = wide[:, ::2], wide[:, :3], wide.reshape(6, 5)[:3].T
        assert_steps(lambda p: nn.SGD(p, 0.1), make, [(make(part), part) for part in parts])
        rows = index[::2], wide[:2, 1::2]
        ours, theirs = (nn.RowTensor(*map(put, rows), (5, 3)) for put in (make, np.copy))
        assert_steps(nn.LazyAdam, make, [(ours, theirs)])
        with refused(ValueError, "is not contiguous"):
            nn.Parameter(make(wide.T))
    opt = nn.SGD([Interface(array(5, 3))], 0.1)
    with refused(ValueError, "is not contiguous: expected a C-contiguous array, got (24, 8)"):
        opt((Interface(wide[:, ::2]),))
    # CuPy gives an array back as it is where it is contiguous, between addresses or not.
    between = np.zeros(61, np.uint8)[1:].view(np.float32).reshape(5, 3)
    for make in (CuPyArray, Interface):
        opt = nn.SGD([make(array(5, 3))], 0.1)
        with refused(ValueError, "is not aligned"):
            opt((make(between),))
        assert opt.global_step == 0
    index, values = np.array([1, 2, 2]), array(3, 3)
    sparse = torch.sparse_coo_tensor(
        tensor(index[None]), tensor(values), (5, 3), check_invariants=False
    )
    assert_steps(nn.LazyAdam, tensor, [(sparse, nn.RowTensor(index, values, (5, 3)))])


def test_whole_gradients() -> None:
    """Arrays made out of a gradient are of its framework; in a step, of the parameter's."""
    for make, kind in ((tensor, torch.Tensor), (CuPyArray, CuPyArray)):
        index, wide = np.array([4, 1, 4, 0])[::2], array(2, 6)
        sparse = nn.RowTensor(make(index), make(wide[:, ::2]), (5, 3))
        host = nn.RowTensor(index.copy(), wide[:, ::2].copy(), (5, 3))
        dense, distinct = sparse.to_dense(), sparse.coalesce()
        made = dense, distinct.values.owner, distinct.indices.owner
        assert {type(one) for one in made} == {kind}
        assert_same(dense, host.to_dense())
        assert_same(distinct.values, host.coalesce().values)
        for dtype in (np.float32, BF16):
            g = array(5, 3, dtype=dtype)
            groups = [{"params": [make(array(5, 3, dtype=dtype))], "grad_centralization": True}]
            opt = nn.Optimizer(0.1, groups, weight_decay=0.1, loss_scale=2.0)
            for step in (opt.decay_weight, opt.gradients_centralization, opt.scale_grad):
                (found,) = step((make(g),))
                assert type(found) is kind and adopted(found).dtype == dtype
    # Of several frameworks: the step is that of the parameter's.
    for make, other in ((tensor, CuPyArray), (CuPyArray, tensor)):
        for decay in (0.0, 0.1):
            group = {"grad_centralization": True, "weight_decay": decay}
            g, rows = array(5, 3), (np.array([1, 4, 1]), array(3, 3))
            of_make, of_other, host = (
                nn.RowTensor(*map(put, rows), (5, 3)) for put in (make, other, np.copy)
            )
            assert_steps(
                lambda p, group=group: nn.LazyAdam([{"params": p, **group}], 0.1),
                make, [(other(g), g), (of_other, host), ([of_make, of_other], [host, host])],
            )  # fmt: skip


def test_streams(log: list[str]) -> None:
    """A call is launched on the current stream of the first array's framework and thread."""
    on_streams(7, 8)
    of_torch, of_cupy = adopted(tensor(array(3))), adopted(CuPyArray(array(3)))
    own = adopted(Interface(array(3), stream=9))
    for expected, arrays in (
        (7, [of_torch, adopted(tensor(array(3)))]), (8, [of_cupy]),
        (0, [adopted(Interface(array(3)))]), (9, [own]),
    ):  # fmt: skip
        with launching(arrays) as call:
            assert call.stream == expected
    assert log == []
    seen = []

    def elsewhere() -> None:
        with launching([of_torch]) as call:
            seen.append(int(call.stream))

    at_once([elsewhere])
    assert seen == [0]
    # Other streams wait for each other on the device, also when the call fails.
    after = ["record 7", "8 waits for 7", "record 7", "9 waits for 7"]
    with launching([of_torch, of_cupy, own, of_cupy]) as call:
        assert call.stream == 7
        assert log == ["record 8", "7 waits for 8", "record 9", "7 waits for 9"]
        log.clear()
    assert log == after
    with refused(RuntimeError, "in the middle"), launching([of_torch, of_cupy, own]):
        log.clear()
        raise RuntimeError("in the middle")
    assert log == after


def test_order_of_streams(log: list[str]) -> None:
    """Under use_locking a call waits for the last such call on its device."""
    w, m, v, g, *other = (tensor(array(5, 3)) for _ in range(7))
    index, bad = tensor(np.array([1, 2])), tensor(np.array([5, 0]))
    dense, lazy = ops.Adam(use_locking=True), ops.FusedSparseLazyAdam(use_locking=True)
    opt = nn.LazyAdam([w[1:], other[0]], use_locking=True)
    for stream, call, expected in (
        (1, lambda: dense(w, m, v, *BETAS, g), ["record 1"]),
        (1, lambda: ops.Adam()(w, m, v, *BETAS, g), []),
        (2, lambda: dense(*other, *BETAS, g), ["2 waits for 1", "record 2"]),
        (2, lambda: lazy(w, m, v, *BETAS, g[:2], index), ["2 waits for 2", "record 2"]),
        (3, lambda: opt((g[1:], None)), ["3 waits for 2", "record 3"]),
        (3, lambda: opt((g[1:], g)), ["3 waits for 3", "record 3"]),
    ):
        on_streams(stream)
        call()
        assert log == expected
    assert len(launch._last) == 1
    with told(IndexError, "got 5"):
        lazy(w, m, v, *BETAS, g[:2], bad)
    assert not locks._lock._is_owned()


def test_mixtures(log: list[str]) -> None:
    """Arrays of several frameworks work together, on the stream of the first."""
    makers = CuPyArray, Interface, on_device
    g = array(5, 3)
    assert_steps(lambda p: nn.Momentum(p, 0.1, 0.9), tensor, [(make(g), g) for make in makers])
    opt = nn.Momentum([tensor(array(5, 3))], 0.1, 0.9)
    on_streams(1, 2)
    opt((CuPyArray(g),))
    assert log == ["record 2", "1 waits for 2", "record 1", "2 waits for 1"]


def test_thor(log: list[str]) -> None:
    """Copies come to the host from each framework, and the parameters go back there."""
    wide, out, g = array(6, 8), array(6, 5), array(5, 4)
    for make, strided in ((tensor, True), (CuPyArray, True), (Interface, False)):
        x, w = wide[:, ::2] if strided else wide[:, ::2].copy(), array(5, 4)
        ours, theirs = nn.ThorDense(w.copy()), nn.ThorDense(make(w))
        for layer, given in ((ours, np.copy), (theirs, make)):
            opt = nn.thor(layer, 0.1, 0.1, 0.9, batch_size=6)
            for _ in range(2):
                layer.capture(given(x), given(out))
                opt((given(g),))
        np.testing.assert_array_equal(w, ours.weight.data)
    on_streams(1, 2)
    layers = [nn.ThorDense(tensor(array(5, 4))), nn.Parameter(CuPyArray(array(3)))]
    opt = nn.thor(layers, 0.1, 0.1, 0.9)
    before, after = ["record 2", "1 waits for 2"], ["record 1", "2 waits for 1"]
    layers[0].capture(CuPyArray(wide[:, :4]), tensor(out))
    assert log == [*after, *before]
    log.clear()
    # The step has the gradients, and in it the parameters come and go on one stream, after
    # which a stream of the step's own waits to copy them.
    opt((CuPyArray(g), tensor(array(3))))
    assert log == [*before, *before, "record 1", *after, *after]


def test_captures(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that cannot be captured copies nothing, and leaves other frameworks' graphs alone."""
    wide, narrow = array(5, 6), array(5, 3)
    for make in (tensor, CuPyArray):
        opt = nn.SGD([make(narrow)], 0.1)
        for g in (wide[:, ::2], narrow.copy()):
            opt((make(g),))
            with refused(RuntimeError, "is being captured"), capture() as enqueued:
                opt((make(g),))
            assert not enqueued
        assert opt.global_step == 2
    opt, of_cupy = nn.SGD([tensor(narrow)], 0.1), CuPyArray(narrow.copy())
    on_streams(1, 2)
    opt((of_cupy,))
    log.clear()
    monkeypatch.setattr(backend, "is_capturing", lambda stream: int(stream) == 2)
    with refused(RuntimeError, "a CUDA graph is being captured"):
        opt((of_cupy,))
    assert log == [] and opt.global_step == 1
