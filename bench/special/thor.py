"""What a step of THOR costs beside its linear algebra, on a dense and on a convolutional layer.

**Between refreshes** a step is two products with the stale inverses and one pass of Momentum; it is
measured in turn with the two products alone, on the same arrays.

**A refresh** is what comes before: the capture of inputs and output gradients, and a step that
inverts the factors. How much of it is spent inside of BLAS and LAPACK is found by timers around
every call of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ... import nn
from ...nn.thor import factors as thor_factors
from ..cases.steps import THOR
from ..report.result import Progress, SpecialResult
from ..report.stats import Summary

WARM_UP, ROUNDS = 3, 15
# What a step may take in terms of its products, and a refresh outside of BLAS and LAPACK.
OF_PRODUCTS, OUTSIDE = 1.3, 0.2


class Layer:
    """A layer with what goes through it.

    Args:
        record: THOR's.
        inputs: a batch.
        outputs: the shape of its output gradients.
    """

    def __init__(self, record: Any, inputs: np.ndarray, outputs: tuple[int, ...]) -> None:
        rng = np.random.default_rng(1)
        self.record = record
        self.inputs = inputs
        self.gradients = rng.standard_normal(outputs, np.float32) / np.float32(len(inputs))
        self.gradient = rng.standard_normal(record.weight.shape, np.float32)
        self.optimizer = nn.thor(
            record,
            learning_rate=1e-6,
            damping=0.1,
            momentum=0.9,
            batch_size=len(inputs),
            frequency=1_000_000,
        )

    def refresh(self) -> None:
        """Capture, invert and step."""
        self.optimizer.request_refresh()
        self.record.capture(self.inputs, self.gradients)
        self.step()

    def step(self) -> None:
        """One step with the inverses as they are."""
        self.optimizer((self.gradient,))

    def products(self) -> Callable[[], None]:
        """The two products of a step, on arrays of their own."""
        state = self.optimizer.state_dict()
        name = self.record.weight.name
        a, g = (state[f"matrix_{factor}_inv.{name}"] for factor in "ag")
        matrix = self.gradient.reshape(len(g), -1)
        between, result = np.empty_like(matrix), np.empty_like(matrix)

        def run() -> None:
            thor_factors.times_packed(matrix, a, between)
            thor_factors.packed_times(g, between, result)

        return run


def _dense() -> Layer:
    rng = np.random.default_rng(0)
    record = nn.ThorDense(np.zeros((1024, 1024), np.float32))
    return Layer(record, rng.standard_normal((1024, 1024), np.float32), (1024, 1024))


def _conv() -> Layer:
    rng = np.random.default_rng(0)
    record = nn.ThorConv2d(np.zeros((128, 128, 3, 3), np.float32), padding=1)
    shape = (32, 128, 28, 28)
    return Layer(record, rng.standard_normal(shape, np.float32), shape)


LAYERS: dict[str, Callable[[], Layer]] = {
    "dense 1024 x 1024": _dense,
    "conv 128 x 128 x 3 x 3": _conv,
}


class _Timers:
    """SciPy's LAPACK and NumPy's products, timed."""

    def __init__(self, lapack: Any) -> None:
        self.seconds = 0.0
        self._lapack = lapack
        self.matmul = self._timed(thor_factors.matmul)

    def __getattr__(self, name: str) -> Any:
        return self._timed(getattr(self._lapack, name))

    def load(self) -> Any:
        """Stands in for ``load_lapack``."""
        return self

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds += time.perf_counter() - begin
            return result

        return call


@contextmanager
def _timers() -> Iterator[_Timers]:
    """Every call that THOR makes of BLAS and LAPACK is timed."""
    plain, load = thor_factors.matmul, thor_factors.load_lapack
    timers = _Timers(load())
    thor_factors.matmul, thor_factors.load_lapack = timers.matmul, timers.load
    try:
        yield timers
    finally:
        thor_factors.matmul, thor_factors.load_lapack = plain, load


def run(threads: int, progress: Progress) -> SpecialResult:
    """Measure both layers, the contestants in turn.

    Args:
        threads: of BLAS too, where threadpoolctl is installed (scikit-learn brings it).
        progress: told the share of the work that is done.
    """
    times: dict[str, Summary] = {}
    limits: dict[str, float] = {}
    with _blas_threads(threads):
        for k, (name, make) in enumerate(LAYERS.items()):
            samples = _measure(make(), _part(progress, k))
            found = {label: Summary.of(values) for label, values in samples.items()}
            times |= {f"{name}: {label}": summary for label, summary in found.items()}
            limits[f"{name}: step"] = OF_PRODUCTS * found["two products"].median
            limits[f"{name}: refresh outside of BLAS"] = OUTSIDE * found["refresh"].median
    return SpecialResult(THOR.name, THOR.summary, times, limits)


def _part(progress: Progress, k: int) -> Progress:
    return lambda done: progress((k + done) / len(LAYERS))


def _measure(layer: Layer, progress: Progress) -> dict[str, list[float]]:
    layer.refresh()
    products = layer.products()
    samples: dict[str, list[float]] = {}

    def sample(label: str, function: Callable[[], None]) -> float:
        begin = time.perf_counter()
        function()
        seconds = time.perf_counter() - begin
        samples.setdefault(label, []).append(seconds)
        return seconds

    for index in range(WARM_UP + ROUNDS):
        if index == WARM_UP:
            samples.clear()
        sample("two products", products)
        sample("step", layer.step)
        with _timers() as timers:
            whole = sample("refresh", layer.refresh)
        samples.setdefault("refresh outside of BLAS", []).append(whole - timers.seconds)
        progress((index + 1) / (WARM_UP + ROUNDS))
    return samples


@contextmanager
def _blas_threads(threads: int) -> Iterator[None]:
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        yield  # as many as BLAS takes by itself
        return
    with threadpool_limits(threads, user_api="blas"):
        yield
