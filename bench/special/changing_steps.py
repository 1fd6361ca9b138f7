"""Steps of PyTorch programs that differ from step to step, or whose tensors lie otherwise.

Mixtures of experts, stochastic depth and alternating losses give other parameters gradients in each
step; a model made channels_last, or parameters cut out of larger tensors, do not lie as the kernels
need them. AdamW of `nn.torch` steps beside PyTorch's in one process, in turn. Where PyTorch's fused
step is right it is the measure; elsewhere its loop over tensors is.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from ..measure import one_by_one
from ..report.result import Progress, SpecialResult, tracked
from ..workers.worker_protocol import Job
from .training import torch_for

OURS, FUSED, LOOP = "fusestep", "torch fused", "torch loop"
OF_FUSED, OF_LOOP = 1.5, 1.0  # what a step of ours may take in terms of theirs
TENSORS, WARM, ROUNDS = 200, 20, 60


class Program(NamedTuple):
    """Parameters, and what comes before step ``i``."""

    parameters: list[Any]
    before: Callable[[int], None]


def _taking_turns(torch: Any, has_gradient: Callable[[random.Random, int, int], bool]) -> Program:
    """Small tensors; ``has_gradient(rng, tensor, step)`` says which take part."""
    parameters = [torch.nn.Parameter(torch.randn(64)) for _ in range(TENSORS)]
    gradients, rng = [torch.randn(64) for _ in parameters], random.Random(0)

    def before(i: int) -> None:
        for k, parameter in enumerate(parameters):
            parameter.grad = gradients[k] if has_gradient(rng, k, i) else None

    return Program(parameters, before)


def _strided(torch: Any) -> Program:
    whole = torch.randn(TENSORS, 64, 2)
    parameters = [torch.nn.Parameter(whole[k, :, 0]) for k in range(TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.randn(64)
    return Program(parameters, lambda _: None)


def _channels_last(torch: Any, *, turns_late: bool) -> Program:
    """Convolutions whose gradients are channels_last, and soon the parameters too."""
    layers = [torch.nn.Conv2d(16, 16, 3, padding=1) for _ in range(TENSORS // 4)]
    model, other = torch.nn.Sequential(*layers), torch.channels_last
    parameters = list(model.parameters())
    gradients = [torch.randn_like(p) for p in parameters]

    def before(i: int) -> None:
        if i == 2 and turns_late:
            model.to(memory_format=other)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            is_filter = gradient.dim() == 4
            given = gradient.to(memory_format=other) if is_filter else gradient
            parameter.grad = given

    return Program(parameters, before)


_SETS: dict[str, Callable[[random.Random, int, int], bool]] = {
    f"a half of {TENSORS} tensors, drawn": lambda rng, *_: rng.random() < 0.5,
    "a 20th of them, drawn": lambda rng, *_: rng.random() < 0.05,
    "every 6th of them, in turn": lambda _, k, i: k % 6 == i % 6,
    "all of them": lambda *_: True,
}
PROGRAMS: dict[str, tuple[Callable[[Any], Program], str]] = {
    **{name: (partial(_taking_turns, has_gradient=own), FUSED) for name, own in _SETS.items()},
    "strided parameters": (_strided, LOOP),
    "channels_last gradients": (partial(_channels_last, turns_late=False), LOOP),
    "made channels_last late": (partial(_channels_last, turns_late=True), LOOP),
}


def run(result: SpecialResult, threads: int, progress: Progress) -> None:
    """Measure all programs.

    Raises:
        BenchError: there is no PyTorch.
    """
    torch = torch_for(result.name, threads)
    ours, theirs = import_module("fusestep.nn.torch").AdamW, torch.optim.AdamW
    for name, (make, measure) in tracked(list(PROGRAMS.items()), progress):
        optimizers = {OURS: (ours, {}), LOOP: (theirs, {"foreach": False})}
        if measure == FUSED:
            optimizers[FUSED] = theirs, {"fused": True}
        jobs = {}
        for label, (cls, options) in optimizers.items():
            program = make(torch)
            optimizer = cls(program.parameters, **options)
            before = map(program.before, itertools.count())
            jobs[f"{name}: {label}"] = Job(optimizer.step, before.__next__)
        result.add(one_by_one(jobs, ROUNDS, WARM))
        factor = OF_FUSED if measure == FUSED else OF_LOOP
        result.limits[f"{name}: {OURS}"] = factor * result.times[f"{name}: {measure}"].median
