"""Steps in CUDA graphs, and numbers that live on the device; on a real GPU.

``tests/cuda/device_graphs.py`` has the same under the simulator, in more cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import fusestep
from fusestep import nn

import gpu_arrays
from gpu_arrays import Maker, Stream

if lacking := gpu_arrays.missing():
    pytest.skip(lacking, allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
SHAPES = ((1_030, 65), (4_099,), (3,))
Replay = Callable[[], None]

DENSE: dict[str, Callable[[Any, Any], Any]] = {
    "Adam": lambda p, lr: nn.Adam(p, lr, weight_decay=0.1, loss_scale=4.0),
    "Lamb": lambda p, lr: nn.Lamb(p, lr, weight_decay=0.1),
    "LARS": lambda p, lr: nn.LARS(nn.Momentum(p, lr, 0.9, weight_decay=0.1), coefficient=0.1),
    "AdaFactor": lambda p, lr: nn.AdaFactor(p, lr, scale_parameter=False, relative_step=False),
}


@contextmanager
def captured(maker: Maker, stream: Stream) -> Iterator[list[Replay]]:
    """A graph of what is enqueued, as the framework's users capture it; gives what runs it."""
    made: list[Replay] = []
    if isinstance(maker, gpu_arrays.TorchMaker):
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream.owner):
            yield made
        made.append(graph.replay)
        return
    from cuda.bindings import driver

    def checked(result: tuple[Any, ...]) -> Any:
        assert result[0] == driver.CUresult.CUDA_SUCCESS, result[0]
        return result[1] if len(result) > 1 else None

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    with maker.using(stream):
        checked(driver.cuStreamBeginCapture(stream.handle, mode))
        try:
            yield made
        finally:
            found = driver.cuStreamEndCapture(stream.handle)
    runnable = checked(driver.cuGraphInstantiate(checked(found), 0))
    made.append(lambda: checked(driver.cuGraphLaunch(runnable, stream.handle)))


def numbers(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def same_bits(one: Any, other: Any) -> None:
    expected, found = other.state_dict(), one.state_dict()
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, name)
    for p, q in zip(one.parameters, other.parameters, strict=True):
        np.testing.assert_array_equal(p.asnumpy(), q.asnumpy())


def put(there: Any, value: Any) -> None:
    """Change what lies on the device, when all is done."""
    gpu_arrays.wait()
    gpu_arrays.adopted(there).assign(np.asarray(value, gpu_arrays.adopted(there).dtype))
    gpu_arrays.wait()


@pytest.mark.parametrize("name", DENSE)
def test_runs_of_a_graph_are_steps(maker: Maker, name: str) -> None:
    """With the gradients and the learning rate that are there when it runs; to the last bit."""
    stream = maker.stream()
    lr = maker.bound(maker.put(np.array([0.125], np.float32)), stream)
    one, other = (
        DENSE[name]([maker.bound(maker.put(w), stream) for w in numbers(0)], lr) for _ in range(2)
    )
    given = tuple(maker.bound(maker.put(g), stream) for g in numbers(1))
    gpu_arrays.wait()
    with maker.using(stream):
        one(given)
        other(given)
    gpu_arrays.wait()
    with captured(maker, stream) as replays:
        one(given)
    for k in range(4):
        for there, values in zip(given, numbers(2 + k), strict=True):
            put(there, values)
        put(lr, [0.5 / (k + 1)])
        replays[0]()
        gpu_arrays.wait()
        with maker.using(stream):
            other(given)
    fusestep.synchronize()
    assert getattr(one, "opt", one).global_step == 5
    same_bits(one, other)


@pytest.mark.parametrize("make", [nn.LazyAdam, nn.Adam])
def test_rows_in_a_graph(maker: Maker, make: Any) -> None:
    """Other indices in each run; one out of range keeps this run and later ones from writing."""
    if isinstance(maker, gpu_arrays.CupyMaker):
        pytest.skip("the memory of CuPy's sort is not kept for a graph")
    stream, shape, n = maker.stream(), (500, 24), 3_000
    rng = np.random.default_rng(5)
    table = rng.standard_normal(shape).astype(np.float32)
    one, other = (make([maker.bound(maker.put(table), stream)], 0.1) for _ in range(2))
    indices = maker.bound(maker.put(rng.integers(0, 500, n)), stream)
    values = maker.bound(maker.put(rng.standard_normal((n, 24)).astype(np.float32)), stream)
    gradient = nn.RowTensor(indices, values, shape)
    gpu_arrays.wait()
    with maker.using(stream):
        one((gradient,))
        other((gradient,))
    gpu_arrays.wait()
    with captured(maker, stream) as replays:
        one((gradient,))
    for _ in range(2):
        put(indices, rng.zipf(1.3, n) % 500)
        replays[0]()
        gpu_arrays.wait()
        with maker.using(stream):
            other((gradient,))
    fusestep.synchronize()
    same_bits(one, other)
    bad = rng.integers(0, 500, n)
    bad[[77, 2_000]] = 500, -3
    put(indices, bad)
    replays[0]()
    gpu_arrays.wait()
    put(indices, bad % 500)
    replays[0]()
    with pytest.raises(IndexError, match=r"indices\[77\] is out of range.*got 500"):
        fusestep.synchronize()
    same_bits(one, other)
    replays[0]()
    gpu_arrays.wait()
    with maker.using(stream):
        other((gradient,))
    same_bits(one, other)


def test_overflows_in_a_graph(maker: Maker) -> None:
    """A run in which `found_inf` is not 0, or a gradient is not finite, is no step."""
    stream = maker.stream()
    flag = maker.bound(maker.put(np.zeros(1, np.float32)), stream)
    opt = nn.Adam([maker.bound(maker.put(w), stream) for w in numbers(0)], 0.1, skip_nonfinite=True)
    opt.found_inf = flag
    given = tuple(maker.bound(maker.put(g), stream) for g in numbers(1))
    gpu_arrays.wait()
    with maker.using(stream):
        opt(given)
    gpu_arrays.wait()
    with captured(maker, stream) as replays:
        opt(given)
    before = [p.asnumpy() for p in opt.parameters]
    put(flag, [1])
    replays[0]()
    gpu_arrays.wait()
    put(flag, [0])
    put(given[1], np.where(np.arange(4_099) == 4_000, np.inf, numbers(1)[1]))
    replays[0]()
    assert opt.skipped_steps == 2 and opt.global_step == 1
    for p, w in zip(opt.parameters, before, strict=True):
        np.testing.assert_array_equal(p.asnumpy(), w)
    put(given[1], numbers(1)[1])
    replays[0]()
    fusestep.synchronize()
    assert opt.global_step == 2 and opt.skipped_steps == 2


def test_what_cannot_be_captured_says_so(maker: Maker) -> None:
    """And the capture that was tried is the user's to end."""
    stream = maker.stream()
    w = [maker.bound(maker.put(w), stream) for w in numbers(0)]
    given = tuple(maker.bound(maker.put(g), stream) for g in numbers(1))
    gpu_arrays.wait()
    for make, text in (
        (lambda: nn.Adam(w, [0.1, 0.2, 0.3]), "follows the number of the step"),
        (lambda: nn.Adam(w, use_locking=True), "without use_locking"),
    ):
        opt = make()
        with maker.using(stream):
            opt(given)
        gpu_arrays.wait()
        with captured(maker, stream), pytest.raises(RuntimeError, match=text):
            opt(given)
        gpu_arrays.wait()
        assert opt.global_step == 1
