"""Whole iterations of MindSpore programs, with its own optimizers and with `nn.mindspore`'s.

Both train one model in one process, some iterations in turn, each with states of its own, in
PyNative mode: multilayer perceptrons of L square layers (LxD, batch 64) and a table of N rows of D
(NxD, 256 lookups), whose gradient MindSpore makes dense. A step is done when nothing is queued.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from ..errors import BenchError
from ..report.result import Progress, SpecialResult, tracked
from .training import PARTS, in_turns, keep

OURS, THEIRS = "nn.mindspore", "mindspore"
_PERCEPTRONS = {f"{n}x{width}": (n, width) for n, width in ((4, 64), (24, 64), (4, 256), (3, 1024))}
_TABLES = {
    f"{rows // 1000}Kx{width}": (rows, width) for rows, width in ((10_000, 16), (100_000, 64))
}
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {}, "AdamWeightDecay": {"weight_decay": 0.01},
    "Momentum": {"learning_rate": 1e-5, "momentum": 0.9},
}  # fmt: skip


def run(result: SpecialResult, _threads: int, progress: Progress) -> None:
    """Measure all models, each with Adam, and one with other optimizers.

    Raises:
        BenchError: there is no MindSpore.
    """
    try:
        ms: Any = import_module("mindspore")
    except ImportError:
        raise BenchError(f"{result.name}: needs MindSpore here") from None
    ms.set_context(mode=ms.PYNATIVE_MODE)
    todo = [(model, "Adam") for model in (*_PERCEPTRONS, *_TABLES)]
    todo += [("4x256", name) for name in _OPTIMIZERS if name != "Adam"]
    for model, name in tracked(todo, progress):
        keep(result, f"{model} {name}", _measure(ms, model, name), dict.fromkeys(PARTS, 1.0))


def _measure(ms: Any, model: str, name: str) -> dict[tuple[str, str], list[float]]:
    """Seconds of each optimizer and part."""
    fused = import_module("fusestep.nn.mindspore")
    net, loss = _perceptron(ms, model) if model in _PERCEPTRONS else _table(ms, model)
    parameters = net.trainable_params()
    optimizers = {
        of: getattr(module, name)(parameters, **_OPTIMIZERS[name])
        for of, module in ((OURS, fused), (THEIRS, ms.nn))
    }
    gradients_of = ms.value_and_grad(loss, None, parameters)
    wait = import_module("fusestep.nn.mindspore.binding").synchronize

    def iterate(optimizer: Any) -> dict[str, float]:
        start = time.perf_counter()
        _, gradients = gradients_of()
        wait()
        middle = time.perf_counter()
        optimizer(gradients)
        wait()
        end = time.perf_counter()
        return {"step": end - middle, "iteration": end - start}

    return in_turns(optimizers, iterate)


def _perceptron(ms: Any, model: str) -> tuple[Any, Any]:
    nn, (layers, width) = ms.nn, _PERCEPTRONS[model]
    parts = [part for _ in range(layers) for part in (nn.Dense(width, width), nn.ReLU())]
    net, loss = nn.SequentialCell(*parts), nn.MSELoss()
    inputs, targets = ms.ops.randn(64, width), ms.ops.randn(64, width)
    return net, lambda: loss(net(inputs), targets)


def _table(ms: Any, model: str) -> tuple[Any, Any]:
    rows, width = _TABLES[model]
    table, head, loss = ms.nn.Embedding(rows, width), ms.nn.Dense(width, 1), ms.nn.MSELoss()
    ids = ms.ops.randint(0, rows, (256,))
    targets = ms.ops.randn(256, 1)
    return ms.nn.CellList([table, head]), lambda: loss(head(table(ids)), targets)
