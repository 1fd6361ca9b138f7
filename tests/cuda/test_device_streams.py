"""Streams, threads, waiting, whose memory a stream may still use; PyTorch's form."""

import ctypes
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import fusestep

from devices import (  # isort: skip
    BETAS, GPU, MARKS, RNG, STUB, Maker, TorchMaker, adopted, assert_equal_runs, assert_same,
    capture, computed, exchange, gradient, numba_stream, on_device, on_host, only, positive,
    refused, rows, wait)  # fmt: skip
from fusestep import nn, ops
from fusestep.kernels.cuda.device import memory
from helpers import at_once
from optimizers import BY_NAME

pytestmark = MARKS
ON_GPU = only(GPU, reason="a driver without a device is never busy")
REAL = only(STUB, GPU, reason="the simulator has no streams, and no tensors of PyTorch")


MANY = (1, 200, 2_000)  # tensors; the table of the last is more than 64 KiB
BUSY = 400  # milliseconds that a stream is kept busy: far more than a call takes
N_LATE = 4_096
late = [positive((N_LATE,)) for _ in "wmv"]


def keep_busy(handle: int, milliseconds: int) -> Any:
    """Enqueue work of about so long; the event that comes after it. One thread sleeps, so other
    streams can work meanwhile. It may sleep up to twice as long."""
    from fusestep.bench.gpu import clock

    return clock.keep_busy(milliseconds / 1e3, numba_stream(handle))


def fill_later(handle: int, array: Any, value: float) -> None:
    """Enqueue filling an array, of a size divisible by 8, with one value."""
    from fusestep.kernels.cuda.device.arrays import fill

    found = adopted(array)
    assert found.size % 8 == 0
    fill(found.address, found.size, value, found.dtype, numba_stream(handle))


@pytest.mark.parametrize("apart", [False, True], ids=["one stream", "another stream"])
@ON_GPU
def test_a_step_comes_after_what_is_on_its_streams(framework: Maker, apart: bool) -> None:
    """A step on a gradient of a new stream, written there later than the call is made. The
    variables belong to that stream too, or ``apart``, to the default stream: the parameter decides
    where the step runs, and that stream and the gradient's wait for each other."""
    expected, stream = on_device(late), framework.stream()
    ops.Adam()(*expected, *BETAS, on_device(np.full(N_LATE, 0.5, np.float32)))

    def given() -> tuple[list[Any], Any]:
        on, g = on_device(late), on_device(np.zeros(N_LATE, np.float32))
        if not apart:
            on = [framework.bound(a, stream) for a in on]
        return on, framework.bound(g, stream)

    # What allocates or compiles does so before the stream is busy.
    (before, g_before), (on, g) = given(), given()
    with framework.using(stream):
        fill_later(stream.handle, g_before, 0.0)
        ops.Adam()(*before, *BETAS, g_before)
        wait()
        begin = keep_busy(stream.handle, BUSY)
        fill_later(stream.handle, g, 0.5)
        ops.Adam()(*on, *BETAS, g)
        assert not begin.query()  # otherwise the order has not been tested
        fill_later(stream.handle, g, 9.0)
    for a, b in zip(on, expected, strict=True):
        assert_same(on_host(a), on_host(b))


@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
@ON_GPU
def test_locked_steps_on_two_streams_have_some_order(framework: Maker, rows: bool) -> None:
    """The first one is late; the result is that of one after the other."""
    shape = (512, 8)
    start = [positive(shape) for _ in "wmv"]
    gs = [np.random.default_rng(k).standard_normal(shape).astype(np.float32) for k in (1, 2)]
    operator = (ops.FusedSparseLazyAdam if rows else ops.Adam)(use_locking=True)
    extra = [np.arange(512)[::-1].copy()] if rows else []

    def serial(order: Sequence[int]) -> list[np.ndarray]:
        on = on_device(start)
        for k in order:
            operator(*on, *BETAS, on_device(gs[k]), *on_device(extra))
        return [on_host(a) for a in on]

    orders = [serial((0, 1)), serial((1, 0))]
    streams = framework.stream(), framework.stream()
    for attempt in range(4):  # what allocates does so in the first one
        on = on_device(start)
        given = [on_device([g, *extra]) for g in gs]
        wait()
        for k, stream in enumerate(streams):
            with framework.using(stream):
                if k == 0:
                    begin = keep_busy(stream.handle, BUSY // 4)
                bound = [[framework.bound(a, stream) for a in arrays] for arrays in (on, given[k])]
                operator(*bound[0], *BETAS, *bound[1])
        assert attempt == 0 or not begin.query()
        found = [on_host(a) for a in on]
        fusestep.synchronize()
        assert [a.tobytes() for a in found] in [[a.tobytes() for a in o] for o in orders]


@REAL
def test_threads_with_streams_of_their_own_lose_no_update(framework: Maker) -> None:
    """Two threads on one optimizer: sums of powers of two are exact in any order."""
    p = nn.Parameter(on_device(np.zeros((64, 8), np.float32)), "w")
    opt = nn.SGD([p], 1.0, use_locking=True)
    opt([on_device(np.zeros((64, 8), np.float32))])
    wait()
    n = 100

    def run(value: float) -> None:
        stream = framework.stream()
        g = on_device(np.full((64, 8), value, np.float32))
        wait()
        with framework.using(stream):
            for _ in range(n):
                opt([framework.bound(g, stream)])

    at_once([partial(run, value) for value in (1.0, 0.0625)])
    assert opt.global_step[0] == 2 * n + 1
    assert_same(on_host(p.data), np.full((64, 8), -1.0625 * n, np.float32))


STEPS = (*(("Adam", n) for n in MANY), ("Lamb", 3), ("lazy", 3_000), ("dense_equivalent", 3_000))


@pytest.mark.parametrize(("name", "count"), STEPS)
@ON_GPU
def test_a_call_does_not_wait_for_the_device(name: str, count: int) -> None:
    """A call returns while work that was enqueued before it is still running."""
    if name in BY_NAME:
        opt = BY_NAME[name].make([nn.Parameter(on_device(positive((16,)))) for _ in range(count)])
        given = [on_device(gradient((16,))) for _ in range(count)]
    else:
        opt = nn.Adam([nn.Parameter(on_device(positive((1_000, 16))))], sparse_update=name)
        given = [on_device(rows(RNG.integers(0, 1_000, count), (1_000, 16)))]
    step = partial(opt, given)
    for _ in range(3):
        step()
    wait()
    begin = keep_busy(0, BUSY)
    assert not begin.query()
    before = time.perf_counter()
    step()
    took, waited = time.perf_counter() - before, begin.query()
    wait()
    fusestep.synchronize()
    assert not waited, f"the call took {took * 1e3:.0f} ms"


@only(STUB, reason="it knows which stream has waited for which")
def test_memory_of_other_streams_is_used_in_order(torch: Any) -> None:
    """A gradient that goes after the call goes to the next array on its stream."""
    other = torch.cuda.Stream()
    optimizers = [nn.Adam([Maker().put(positive((5, 3)))]) for _ in "ab"]
    optimizers += [nn.LazyAdam([Maker().put(positive((5, 3)))], use_locking=True)]
    for opt in optimizers:
        for _ in range(3):
            with torch.cuda.stream(other):
                g = TorchMaker().put(gradient((5, 3)))
                opt((g,))
                del g
                index, values = map(TorchMaker().put, (np.array([1, 2]), gradient((2, 3))))
                opt((nn.RowTensor(index, values, (5, 3)),))
                del index, values
    fusestep.synchronize()
    import watch

    assert not watch.violations
    # What breaks the rule is seen: work of one stream on memory of another, without a wait.
    with torch.cuda.stream(other):
        g = TorchMaker().put(gradient((5, 3)))
    watch.order.use(0, g.data_ptr())
    del g
    assert watch.violations.pop().startswith("stream")


def test_what_is_copied_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that a copy may still read are not given out again before the host has waited."""
    going: list[range] = []  # copies since the last event, then those that an event is behind of
    read: dict[Any, list[range]] = {}

    class Event:
        def record(self, _: Any) -> None:
            read[self], going[:] = [*going], []

        def synchronize(self) -> None:
            read.pop(self, None)

    def copy_from(_: int, source: int, n_bytes: int, __: Any) -> None:
        own = range(source, source + n_bytes)
        late = [*going, *(other for copies in read.values() for other in copies)]
        assert not any(max(own[0], x[0]) <= min(own[-1], x[-1]) for x in late)
        going.append(own)

    monkeypatch.setattr(memory, "new_event", Event)
    monkeypatch.setattr(memory, "copy_from", copy_from)
    room = memory.Room(numba_stream(0))
    sent = [np.full(int(n), k, np.uint8) for k, n in enumerate(RNG.integers(1, 50_000, 60))]
    for array in [*sent, np.zeros(300_000, np.uint8), *sent]:
        room.send(0, array)
        assert bytes((ctypes.c_char * len(array)).from_address(going[-1][0])) == array.tobytes()
    assert read


# PyTorch's form: the numbers of the host


def models(torch: Any, dtype: Any) -> list[list[Any]]:
    """Equal parameters on the host and on the device: dense ones and a table."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 4), (7,), (9, 3))]
    return [
        [torch.nn.Parameter(tensor.to(device, copy=True)) for tensor in made]
        for device in ("cpu", "cuda")
    ]


NAMES = ("SGD", "Adagrad", "RMSprop", "AdamW", "NAdam", "ASGD", "FTRL", "LazyAdam")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
@REAL
def test_steps_are_those_of_the_host(torch: Any, name: str, dtype: str) -> None:
    from fusestep.nn import torch as fused

    kind, generator = getattr(torch, dtype), torch.Generator().manual_seed(2)
    both = models(torch, kind)
    optimizers = [getattr(fused, name)(m, lr=0.1, weight_decay=0.1, sparse="touched") for m in both]
    for _ in range(5):
        for p, q in zip(*both, strict=True):
            if p.shape == (9, 3):
                indices = torch.randint(0, 9, (1, 6), generator=generator)
                values = torch.randn(6, 3, generator=generator).to(kind)
                p.grad = torch.sparse_coo_tensor(indices, values, p.shape, check_invariants=False)
            else:
                p.grad = torch.randn(p.shape, generator=generator).to(kind)
            q.grad = p.grad.cuda()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            optimizers[1].step()
            torch.cuda.synchronize()
        optimizers[0].step()
    computed()
    bound = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 2e-2}[dtype]
    for p, q in zip(*both, strict=True):
        torch.testing.assert_close(q.cpu(), p, rtol=bound, atol=bound)


@REAL
def test_what_a_device_refuses(torch: Any) -> None:
    """Options; and captures by one error, before PyTorch has copied, read or scaled anything."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from fusestep.nn import torch as fused

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, _: Any, args: Any, kwargs: Any) -> Any:
            made.append(str(function))
            return function(*args, **(kwargs or {}))

    made: list[str] = []
    dense, table = (torch.nn.Parameter(torch.ones(6, 4, device="cuda")) for _ in range(2))
    with refused(RuntimeError, "capturable"):
        fused.Adam([dense], capturable=True)
    dense.grad = torch.ones(6, 4, device="cuda")
    for name in ("LARS", "Adafactor"):
        with refused(RuntimeError, "on CUDA devices"):
            getattr(fused, name)([dense]).step()
    own = fused.Adam([dense, table], sparse="touched")
    unscaled, strict = fused.SGD([dense], fused=True), fused.SGD([dense], skip_nonfinite=True)
    unscaled.grad_scale, unscaled.found_inf = (
        torch.full((1,), x, device="cuda") for x in (2.0, 0.0)
    )
    calls = [
        own.step, own.step, unscaled.step, strict.step,
        lambda: fused.clip_grad_norm_([dense, table], 1.0),
        lambda: fused.clip_grad_norm_([dense, table], 1.0, np.inf, optimizer=own),
        lambda: fused.clip_grad_value_([dense, table], 1.0),
    ]  # fmt: skip
    for k, call in enumerate(calls):
        # Neither lies as kernels need it: they are copied.
        dense.grad = torch.ones(4, 6, device="cuda").T
        indices = torch.zeros(1, 3, dtype=torch.int64, device="cuda")
        values = torch.ones(4, 3, device="cuda").T
        table.grad = torch.sparse_coo_tensor(indices, values, (6, 4), check_invariants=False)
        before = len(own.state)
        made.clear()
        text = "a CUDA graph is being captured"
        with refused(RuntimeError, text), capture() as enqueued, Operations():
            call()
        assert (made, enqueued, len(own.state)) == ([], [], before), k
        call()


@pytest.mark.parametrize("name", ["Adam", "LazyAdam", "AdamOffload"])
def test_memory_is_exchanged(name: str) -> None:
    """A step works where parameters and states lie now, and refuses what they have become."""
    w = positive((5, 4))
    opt, on_cpu = (getattr(nn, name)([array], 0.1) for array in (on_device(w), w))
    own, *others = opt.parameters[0].array, *opt.states_by_name(0).values()
    states = [array for array in others if not isinstance(array, np.ndarray)]
    for step in range(5):
        g = rows([1, 3, 1], (5, 4)) if name == "LazyAdam" else gradient((5, 4))
        opt((on_device(g),))
        on_cpu((g,))
        assert_equal_runs(opt, on_cpu)
        for array in (own, *states)[step % 2 :]:
            exchange(array.owner)
    assert_equal_runs(opt, on_cpu)  # without a step
    for array in (own, *states):
        exchange(array.owner, np.ones(20, np.float32))
        with refused(ValueError, "has a wrong shape: expected (5, 4), got (20,)"):
            opt((on_device(g),))
        exchange(array.owner, w)
    assert opt.global_step == on_cpu.global_step


@REAL
def test_memory_of_states_of_pytorch_is_exchanged(torch: Any) -> None:
    """A step finds a state under its name, and the memory of the tensor that is there."""
    from fusestep.nn import torch as fused

    parameter = torch.nn.Parameter(torch.ones(5, 4, device="cuda"))
    parameter.grad = torch.ones(5, 4, device="cuda")
    opt = fused.AdamW([parameter], 0.1)
    opt.step()
    state = opt.state[parameter]
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = state[name].clone().to("cuda")
        opt.step()
        exchange(state[name])
        exchange(parameter)
        opt.step()
