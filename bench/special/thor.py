"""What a step of THOR costs beside its linear algebra, on a dense and on a convolutional layer.

**Between refreshes** a step is two products with the stale inverses and one pass of Momentum; it is
measured in turn with the two products alone, on the same arrays.

**A refresh** is what comes before: the capture of inputs and output gradients, and a step that
inverts the factors. How much of it is spent inside of BLAS and LAPACK is found by timers around
every call of them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from timeit import timeit
from typing import Any

import numpy as np

from ... import nn
from ...nn.thor import factors as thor_factors
from ..report.result import Progress, SpecialResult

WARM_UP, ROUNDS = 3, 15
# What a step may take in terms of its products, and a refresh outside of BLAS and LAPACK.
OF_PRODUCTS, OUTSIDE = 1.3, 0.2


class Layer:
    """A layer with what goes through it.

    Args:
        record: THOR's.
        inputs: the shape of a batch.
        outputs: that of its output gradients.
    """

    def __init__(self, record: Any, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        rng = np.random.default_rng(1)
        self.record = record
        self.inputs = np.random.default_rng(0).standard_normal(inputs, np.float32)
        self.gradients = rng.standard_normal(outputs, np.float32) / np.float32(inputs[0])
        self.gradient = rng.standard_normal(record.weight.shape, np.float32)
        self.optimizer = nn.thor(
            record,
            batch_size=inputs[0],
            learning_rate=1e-6,
            damping=0.1,
            momentum=0.9,
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


LAYERS: dict[str, Callable[[], Layer]] = {
    "dense 1024 x 1024": lambda: Layer(
        nn.ThorDense(np.zeros((1024, 1024), np.float32)), (1024, 1024), (1024, 1024)
    ),
    "conv 128 x 128 x 3 x 3": lambda: Layer(
        nn.ThorConv2d(np.zeros((128, 128, 3, 3), np.float32), padding=1), *[(32, 128, 28, 28)] * 2
    ),
}


class Timers:
    """SciPy's LAPACK and NumPy's products, timed: in a ``with`` every call that THOR makes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._plain = thor_factors.matmul, thor_factors.load_lapack
        self._lapack = thor_factors.load_lapack()
        self.matmul = self._timed(thor_factors.matmul)

    def __enter__(self) -> Timers:
        thor_factors.matmul, thor_factors.load_lapack = self.matmul, lambda: self
        return self

    def __exit__(self, *_: object) -> None:
        thor_factors.matmul, thor_factors.load_lapack = self._plain

    def __getattr__(self, name: str) -> Any:
        return self._timed(getattr(self._lapack, name))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        return call


def run(result: SpecialResult, threads: int, progress: Progress) -> None:
    """Measure both layers, the contestants in turn.

    BLAS has as many threads where threadpoolctl is installed (scikit-learn brings it).
    """
    limits: Any = find_spec("threadpoolctl") and import_module("threadpoolctl").threadpool_limits
    total = len(LAYERS) * (WARM_UP + ROUNDS)
    with limits(threads, user_api="blas") if limits else nullcontext():
        for k, (name, make) in enumerate(LAYERS.items()):
            samples: dict[str, list[float]] = defaultdict(list)
            layer = make()
            layer.refresh()
            steps = {"two products": layer.products(), "step": layer.step}
            for index in range(WARM_UP + ROUNDS):
                if index == WARM_UP:
                    samples.clear()
                for label, step in steps.items():
                    samples[f"{name}: {label}"].append(timeit(step, number=1))
                with Timers() as timers:
                    whole = timeit(layer.refresh, number=1)
                samples[f"{name}: refresh"].append(whole)
                samples[f"{name}: refresh outside of BLAS"].append(whole - timers.seconds)
                progress((k * (WARM_UP + ROUNDS) + index + 1) / total)
            result.add(samples)
            of_products = OF_PRODUCTS * result.times[f"{name}: two products"].median
            outside = OUTSIDE * result.times[f"{name}: refresh"].median
            result.limits[f"{name}: step"] = of_products
            result.limits[f"{name}: refresh outside of BLAS"] = outside
