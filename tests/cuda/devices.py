"""The device of a process of tests, and arrays on it.

One set of tests, `test_device_*.py`, has three kinds of devices:

- a GPU (`GPU`) runs everything, and has the sizes of real work;
- Numba's simulator (`SIMULATOR`), with ``NUMBA_ENABLE_CUDASIM=1`` in the environment, computes the
  numbers of short arrays, and tells nothing of launches;
- the driver without a device (`STUB`), with its folder in ``LD_LIBRARY_PATH``, takes every launch
  of the real stack above it, looks at its arguments, and computes nothing. There a test runs until
  it needs a number of the device: it ends as "not computed".
"""

import copy
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from fusestep import nn, synchronize
from fusestep.ops.runtime.device import DeviceArray
from helpers import BF16, EPSILON, assert_same_bits

SIMULATOR, STUB, GPU = "simulator", "stub", "GPU"


def _kind() -> tuple[str, str]:
    """The kind of device of this process, and why there is none."""
    if find_spec("numba_cuda") is None:
        return "", 'needs a CUDA device and numba-cuda: pip install ".[cuda13,test]" (or cuda12)'
    if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        import simulator  # noqa: F401  (changes the simulator)

        return SIMULATOR, ""
    from numba import cuda

    if not cuda.is_available():
        return "", "needs a CUDA device: Numba finds none"
    from watch import is_stub

    return STUB if is_stub() else GPU, ""


KIND, LACKS = _kind()
COMPUTES = KIND != STUB

F32, F64, F16 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16)
RNG = np.random.default_rng(11)
BETAS = (0.9, 0.99, 0.1, 0.9, 0.99, 1e-8)
"""Scalars of a call of Adam: powers, rate, betas, epsilon."""
# After some steps, of 1 + the value on the simulator, which computes some roots in double
# precision; on a GPU in units in the last place of the largest value. There both round each
# operation alike, but either compiler chooses for itself which products and sums become one FMA.
UNITS = {2: 2.0**-7, 4: 1e-5, 8: 1e-13}
RUN_ULPS = {False: 32.0, True: 4.0}  # in 16 bits (True) one rounding hides the others
MARKS = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("framework"),
    # Frameworks and drivers have warnings of their own; test_a_step_warns_of_nothing has ours.
    pytest.mark.filterwarnings("default"),
]
"""Marks of each file of the set."""


def only(*kinds: str, reason: str) -> pytest.MarkDecorator:
    """A test that makes sense on some kinds of devices."""
    return pytest.mark.skipif(KIND not in kinds, reason=f"on {' and '.join(kinds)} only: {reason}")


def sized(short: Any, long: Any) -> Any:
    """The short form, which simulated threads can do, or on a GPU the sizes of real work."""
    return long if KIND == GPU else short


def computed() -> None:
    """End the test as not computed, unless the device computes."""
    if not COMPUTES:
        pytest.skip("not computed")


# Frameworks


class Stream(NamedTuple):
    """A stream that does not wait for the default stream by itself, nor the other way round."""

    handle: int
    owner: Any


class Maker:
    """Makes device arrays of one framework; here of Numba."""

    def put(self, array: np.ndarray) -> Any:
        """A copy on the device."""
        from fusestep.bench.gpu import clock

        return clock.put(array)

    def stream(self) -> Stream:
        """A new stream."""
        from cuda.bindings import driver
        from numba import cuda

        cuda.current_context()
        error, made = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
        assert error == driver.CUresult.CUDA_SUCCESS
        return Stream(int(made), made)

    def using(self, stream: Stream) -> AbstractContextManager[Any]:
        """The framework's current stream, where it has one."""
        return nullcontext(stream)

    def bound(self, array: Any, stream: Stream) -> Any:
        """The array, as one that belongs to the stream, where arrays do."""
        return array.bind(numba_stream(stream.handle)) if hasattr(array, "bind") else array


class TorchMaker(Maker):
    """Makes arrays of torch; bfloat16 as torch has it."""

    def __init__(self) -> None:
        self._torch = pytest.importorskip("torch", reason="torch is not installed")
        if not self._torch.cuda.is_available():
            pytest.skip("this torch has no CUDA")

    def put(self, array: np.ndarray) -> Any:
        if array.dtype == BF16:
            bits = self._torch.from_numpy(array.view(np.int16).copy())
            return bits.to("cuda").view(self._torch.bfloat16)
        return self._torch.from_numpy(array.copy()).to("cuda")

    def stream(self) -> Stream:
        made = self._torch.cuda.Stream()
        return Stream(int(made.cuda_stream), made)

    def using(self, stream: Stream) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = self._torch.cuda.stream(stream.owner)
        return found


class CupyMaker(Maker):
    """Makes arrays of CuPy; bfloat16 where it has it."""

    def __init__(self) -> None:
        self._cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

    def put(self, array: np.ndarray) -> Any:
        try:
            return self._cupy.array(array)
        except (TypeError, ValueError) as error:
            if array.dtype == BF16:
                pytest.skip(f"this CuPy has no bfloat16: {error}")
            raise

    def stream(self) -> Stream:
        made = self._cupy.cuda.Stream(non_blocking=True)
        return Stream(int(made.ptr), made)

    def using(self, stream: Stream) -> AbstractContextManager[Any]:
        owner: AbstractContextManager[Any] = stream.owner
        return owner


_MAKERS = {"numba": Maker, "torch": TorchMaker, "cupy": CupyMaker}
FRAMEWORKS = {SIMULATOR: ("numba",), STUB: ("numba", "torch"), GPU: tuple(_MAKERS)}.get(KIND, ())
"""Frameworks whose arrays each test has in turn; `test_device_frameworks.py` has others."""
current = Maker()


@contextmanager
def using_framework(name: str) -> Iterator[Maker]:
    """Arrays on the device are those of a framework; what a failed test has left is dropped."""
    global current
    current = _MAKERS[name]()
    try:
        yield current
    finally:
        current = Maker()
        try:
            synchronize()
        except IndexError:
            warnings.warn("a test has left an index error pending", stacklevel=1)


def wait() -> None:
    """Until all work on the device is done; nothing is told of bad indices."""
    from numba import cuda

    cuda.synchronize()


def numba_stream(handle: int) -> Any:
    """The stream of Numba with this handle."""
    from numba import cuda

    return cuda.external_stream(handle) if handle else cuda.default_stream()


@contextmanager
def capture() -> Iterator[list[str]]:
    """A context in which the default stream is being captured, with what is enqueued meanwhile."""
    if KIND == SIMULATOR:
        from simulator import captured

        with captured() as enqueued:
            yield enqueued
        return
    from cuda.bindings import driver
    import watch

    stream, launched = Maker().stream(), watch.launched
    before = len(launched)
    driver.cuStreamBeginCapture(
        stream.owner, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    )
    enqueued = []
    try:
        yield enqueued
    finally:
        driver.cuStreamEndCapture(stream.owner)
        enqueued += launched[before:]


# Arrays


def positive(shape: tuple[int, ...], dtype: Any = F32) -> np.ndarray:
    return np.asarray(RNG.uniform(0.1, 1.0, shape)).astype(dtype)


def gradient(shape: tuple[int, ...], dtype: Any = F32) -> np.ndarray:
    return np.asarray(RNG.uniform(-1.0, 1.0, shape)).astype(dtype)


def rows(indices: Sequence[int], shape: tuple[int, ...], dtype: Any = F32) -> nn.RowTensor:
    values = gradient((len(indices), *shape[1:]), dtype)
    return nn.RowTensor(np.array(indices, np.int64), values, shape)


def on_device(value: Any) -> Any:
    """A copy on the device of an array, a `RowTensor`, None, or a list of these."""
    if isinstance(value, list | tuple):
        return [on_device(x) for x in value]
    if isinstance(value, nn.RowTensor):
        indices, values = on_device([value.indices, value.values])
        of_batch = {"positions": value.positions, "batch_length": value.batch_length}
        return nn.RowTensor(indices, values, value.dense_shape, **of_batch)
    return None if value is None else current.put(np.asarray(value))


def shifted(array: np.ndarray, shift: int) -> Any:
    """A copy on the device that begins ``shift`` elements past the start of its memory. That of a
    number begins at the start."""
    if not array.ndim:
        return on_device(array)
    room = np.concatenate(
        [np.zeros(shift, array.dtype), array.reshape(-1), np.zeros(1, array.dtype)]
    )
    return on_device(room)[shift : shift + array.size].reshape(array.shape)


def adopted(array: Any) -> DeviceArray:
    """An array of the device as the library sees it."""
    found = DeviceArray.adopt("test", "array", array)
    assert found is not None
    return found


_copy_out = DeviceArray.numpy  # which tests replace


def on_host(array: Any) -> np.ndarray:
    """A copy on the host, of what the array holds when all work on the device is done."""
    if KIND == GPU:
        wait()
    return _copy_out(array if isinstance(array, DeviceArray) else adopted(array))


def data_of(opt: Any) -> list[Any]:
    """The arrays of an optimizer's parameters."""
    return [p.data for p in opt.parameters]


def put(there: Any, value: Any) -> None:
    """Change what lies on the device."""
    array = there if isinstance(there, DeviceArray) else adopted(there)
    array.assign(np.asarray(value, array.dtype).reshape(array.shape))


def exchange(array: Any, content: np.ndarray | None = None) -> None:
    """Give an array of a framework the memory of another one; what it had is freed."""
    from fusestep.bench.gpu import clock

    other = on_device(on_host(array) if content is None else content)
    names = ("_ary",) if KIND == SIMULATOR else ("gpu_data", "shape", "strides", "size")
    for name in names if hasattr(array, names[0]) else ("data",):
        setattr(array, name, getattr(other, name))
    if KIND != SIMULATOR:
        clock.free_bytes()


# Comparisons


def pairs(found: Any, expected: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Arrays in lists, tuples and row-sparse gradients that are alike, as copies on the host."""
    if isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            yield from pairs(one, other)
    elif isinstance(expected, nn.RowTensor):
        assert found.dense_shape == expected.dense_shape
        if COMPUTES or found.values.shape == expected.values.shape:  # how many there are, it finds
            yield from pairs([found.indices, found.values], [expected.indices, expected.values])
    elif expected is None:
        assert found is None
    else:
        one, other = (
            np.asarray(a) if isinstance(a, np.ndarray | np.generic) else on_host(a)
            for a in (found, expected)
        )
        yield one, other


def assert_close(found: Any, expected: Any, label: str = "", narrow: Any = None) -> None:
    """Arrays are near after some steps, in which rounding to the ``narrow`` type has gone on."""
    __tracebackhide__ = True
    for a, b in pairs(found, expected):
        of = a.dtype
        if of.kind in "iub" or not COMPUTES:
            assert_same(a, b, label)
            continue
        assert (of, a.shape) == (b.dtype, b.shape), label
        a, b = a.astype(np.float64), b.astype(np.float64)
        relative = absolute = UNITS[of.itemsize]
        if KIND == GPU:
            epsilon = max(EPSILON[of], EPSILON[np.dtype(narrow or of)])
            bound = RUN_ULPS[epsilon > 1e-4] * epsilon * np.abs(b).max(initial=0.0)
            relative, absolute = 0.0, bound
        np.testing.assert_allclose(a, b, relative, absolute, err_msg=label)


def assert_same(found: Any, expected: Any, label: str = "") -> None:
    """Bits are the same, of arrays on the device or on the host."""
    __tracebackhide__ = True
    for a, b in pairs(found, expected):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), label
        if COMPUTES:
            assert_same_bits(a, b, label)


def assert_equal_runs(ours: Any, theirs: Any, same: Any = None) -> None:
    """Parameters and states of an optimizer on the device, and of another one. They are near, or as
    ``same`` compares two arrays."""
    __tracebackhide__ = True
    synchronize()
    narrow = max((p.dtype for p in ours.parameters), key=EPSILON.__getitem__)
    compare = same or (lambda *of: assert_close(*of, narrow))
    for p, q in zip(ours.parameters, theirs.parameters, strict=True):
        assert p.name == q.name
        compare(p.asnumpy(), q.asnumpy(), f"{ours!r} {p.name}")
    found, expected = ours.state_dict(), theirs.state_dict()
    assert list(found) == list(expected)
    for name, array in found.items():
        assert type(array) is np.ndarray
        compare(array, expected[name], f"{ours!r} {name}")


def assert_alike(
    make: Callable[[Any], Any], variables: Sequence[np.ndarray], steps: Sequence[Any],
    *, target: str = "",
) -> None:  # fmt: skip
    """An optimizer takes the same steps on the device and on the host, and writes no gradient. A
    step is the gradients, or a dict of options that are assigned to before the next one."""
    __tracebackhide__ = True
    on_cpu, on_gpu = make([w.copy() for w in variables]), make(on_device(variables))
    if target:
        on_gpu.target = target
    for step in steps:
        if isinstance(step, dict):
            for opt, (name, value) in product((on_cpu, on_gpu), step.items()):
                setattr(opt, name, value)
            continue
        given = on_device(step)
        taken = on_gpu(tuple(given))
        if COMPUTES:
            assert on_cpu(tuple(step)) == taken
        for ours, host in zip(given, step, strict=True):
            if isinstance(host, np.ndarray):
                assert_same(ours, host)
    assert_equal_runs(on_gpu, on_cpu)


def assert_calls_alike(call: Callable[..., Any], *given: Any, compare: Any = None) -> Any:
    """A call returns and changes the same on the device and on the host; what the host returns. All
    that it is given are arrays, row-sparse gradients, None, and lists of these."""
    __tracebackhide__ = True
    host, there = copy.deepcopy(list(given)), on_device(given)
    expected, found = call(*host), call(*there)
    synchronize()
    (compare or assert_same)([found, there], [expected, host])
    return expected


@contextmanager
def unchanged(*arrays: Any) -> Iterator[None]:
    """Every byte of some device arrays, in lists and gradients too, is the same afterwards."""
    __tracebackhide__ = True
    before = [array.tobytes() for array, _ in pairs(arrays, arrays)]
    yield
    assert [array.tobytes() for array, _ in pairs(arrays, arrays)] == before


@contextmanager
def refused(error: type[BaseException], text: str, *arrays: Any) -> Iterator[None]:
    """The block raises ``error``, with ``text`` in its message, and changes no array."""
    __tracebackhide__ = True
    with unchanged(*arrays), pytest.raises(error, match=re.escape(text)):
        yield


@contextmanager
def told(
    error: type[BaseException], text: str, *arrays: Any, by: Callable[[], Any] = synchronize
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The device finds out what is wrong, and the host hears of it in the block or in ``by``. A
    device that computes nothing finds nothing."""
    __tracebackhide__ = True
    with unchanged(*arrays):
        if not COMPUTES:
            said = text
            try:
                yield pytest.ExceptionInfo.for_later()
                by()
            except error as raised:  # the host has looked itself
                said = str(raised)
            assert text in said
            computed()
        with pytest.raises(error, match=re.escape(text)) as found:  # noqa: PT012 (not one alone)
            yield found
            by()


class Run:
    """LazyAdam on a table and a vector, with the arrays and states of its good steps."""

    def __init__(self, **options: Any) -> None:
        self.w = on_device([positive((5, 4)), positive((7,))])
        self.opt = nn.LazyAdam(self.w, 0.1, **options)
        self.step([1, 3])
        self.before = self.opt.state_dict()

    def step(self, indices: Sequence[int] | None, *, dense: bool = True) -> None:
        sparse = None if indices is None else on_device(rows(indices, (5, 4)))
        self.opt((sparse, on_device(gradient((7,))) if dense else None))

    def assert_as_before(self) -> None:
        assert_same([*self.opt.state_dict().values()], [*self.before.values()])
