"""Streams, threads and waiting on a CUDA device.

``pytest -m gpu tests/gpu`` runs the tests for devices alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

import fusestep
from fusestep import nn, ops

import gpu_arrays
from gpu_arrays import Maker, copies
from gpu_checks import ADAM_HP, F32, moments, parameters, problem, row_tensor
from helpers import assert_same_bits
from optimizers import BY_NAME

if lacking := gpu_arrays.missing():
    pytest.skip(lacking, allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    # Frameworks and drivers have warnings of their own; test_a_step_warns_of_nothing has ours.
    pytest.mark.filterwarnings("default"),
]


MANY = (1, 200, 2_000)  # tensors; the table of the last is more than 64 KiB
BUSY = 400  # milliseconds that a stream is kept busy: far more than a call takes
N_LATE = 4_096


def expected_late(make: Maker) -> list[np.ndarray]:
    on = copies(make, moments((N_LATE,)))
    ops.Adam()(*on, *ADAM_HP, make.put(np.full(N_LATE, 0.5, np.float32)))
    return [make.get(a) for a in on]


def assert_in_order(make: Maker, *, apart: bool) -> None:
    """A step on a gradient of a new stream, written there later than the call is made.

    The variables belong to that stream too, or ``apart``, to the default stream.
    """
    expected, stream = expected_late(make), make.stream()

    def given() -> tuple[list[Any], Any]:
        on, g = copies(make, moments((N_LATE,))), make.put(np.zeros(N_LATE, np.float32))
        if not apart:
            on = [make.bound(a, stream) for a in on]
        return on, make.bound(g, stream)

    # What allocates or compiles does so before the stream is busy.
    (before, g_before), (on, g) = given(), given()
    with make.using(stream):
        gpu_arrays.fill_later(stream.handle, g_before, 0.0)
        ops.Adam()(*before, *ADAM_HP, g_before)
        gpu_arrays.wait()
        begin = gpu_arrays.keep_busy(stream.handle, BUSY)
        gpu_arrays.fill_later(stream.handle, g, 0.5)
        ops.Adam()(*on, *ADAM_HP, g)
        assert not begin.query()  # otherwise the order has not been tested
        gpu_arrays.fill_later(stream.handle, g, 9.0)
    for a, b in zip(on, expected, strict=True):
        assert_same_bits(make.get(a), b)


def test_a_step_comes_after_what_is_on_its_stream(maker: Maker) -> None:
    """On a stream of the framework: first the gradient is written, later it is overwritten."""
    assert_in_order(maker, apart=False)


def test_a_step_waits_for_arrays_of_another_stream(numba_maker: Maker) -> None:
    """The parameter decides where it runs; that stream and the gradient's wait for each other."""
    assert_in_order(numba_maker, apart=True)


@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
def test_locked_steps_on_two_streams_have_some_order(maker: Maker, rows: bool) -> None:
    """The first one is late; the result is that of one after the other."""
    shape = (512, 8)
    start = moments(shape)
    gs = [np.random.default_rng(k).standard_normal(shape).astype(np.float32) for k in (1, 2)]
    operator = (ops.FusedSparseLazyAdam if rows else ops.Adam)(use_locking=True)
    extra = [np.arange(512)[::-1].copy()] if rows else []

    def serial(order: Sequence[int]) -> list[np.ndarray]:
        on = copies(maker, start)
        for k in order:
            operator(*on, *ADAM_HP, maker.put(gs[k]), *copies(maker, extra))
        return [maker.get(a) for a in on]

    orders = [serial((0, 1)), serial((1, 0))]
    streams = maker.stream(), maker.stream()
    for attempt in range(4):  # what allocates does so in the first one
        on = copies(maker, start)
        given = [copies(maker, [g, *extra]) for g in gs]
        gpu_arrays.wait()
        for k, stream in enumerate(streams):
            with maker.using(stream):
                if k == 0:
                    begin = gpu_arrays.keep_busy(stream.handle, BUSY // 4)
                bound = [[maker.bound(a, stream) for a in arrays] for arrays in (on, given[k])]
                operator(*bound[0], *ADAM_HP, *bound[1])
        assert attempt == 0 or not begin.query()
        found = [maker.get(a) for a in on]
        fusestep.synchronize()
        assert [a.tobytes() for a in found] in [[a.tobytes() for a in o] for o in orders]


def test_threads_with_streams_of_their_own_lose_no_update(maker: Maker) -> None:
    """Two threads on one optimizer: sums of powers of two are exact in any order."""
    p = nn.Parameter(maker.put(np.zeros((64, 8), np.float32)), "w")
    opt = nn.SGD([p], 1.0, use_locking=True)
    opt([maker.put(np.zeros((64, 8), np.float32))])
    gpu_arrays.wait()
    n, failures = 100, []

    def run(value: float) -> None:
        try:
            stream = maker.stream()
            g = maker.put(np.full((64, 8), value, np.float32))
            gpu_arrays.wait()
            with maker.using(stream):
                for _ in range(n):
                    opt([maker.bound(g, stream)])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(value,)) for value in (1.0, 0.0625)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert opt.global_step[0] == 2 * n + 1
    assert_same_bits(maker.get(p.data), np.full((64, 8), -1.0625 * n, np.float32))


def dense_steps(make: Maker, form: str, count: int) -> Callable[[], Any]:
    """A step of many small tensors."""
    start, (gs, *_) = problem({f"p{i}": (16,) for i in range(count)}, F32)
    opt = BY_NAME[form].make(parameters(make, start))
    given = copies(make, gs)
    return lambda: opt(given)


def row_steps(make: Maker, how: str, count: int) -> Callable[[], Any]:
    """A step on a table."""
    start, _ = problem({"table": (1_000, 16)}, F32)
    opt = nn.Adam(parameters(make, start), sparse_update=how)
    rng = np.random.default_rng(8)
    values = rng.standard_normal((count, 16)).astype(np.float32)
    rows = row_tensor(make, nn.RowTensor(rng.integers(0, 1_000, count), values, (1_000, 16)))
    return lambda: opt([rows])


STEPS: dict[str, Callable[[Maker], Callable[[], Any]]] = {
    **{f"{n} tensors": partial(dense_steps, form="Adam", count=n) for n in MANY},
    "LAMB": partial(dense_steps, form="Lamb", count=3),
    "lazy rows": partial(row_steps, how="lazy", count=3_000),
    "all rows": partial(row_steps, how="dense_equivalent", count=3_000),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_call_does_not_wait_for_the_device(maker: Maker, name: str) -> None:
    """It returns while work that was enqueued before it is still running."""
    step = STEPS[name](maker)
    for _ in range(3):
        step()
    gpu_arrays.wait()
    begin = gpu_arrays.keep_busy(0, BUSY)
    assert not begin.query()
    before = time.perf_counter()
    step()
    took, waited = time.perf_counter() - before, begin.query()
    gpu_arrays.wait()
    fusestep.synchronize()
    assert not waited, f"the call took {took * 1e3:.0f} ms"
