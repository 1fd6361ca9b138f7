"""Weights of 16 bits in every form, beside PyTorch's passes over float32 masters.

AdamW in one process, the contestants in turn: `nn.torch` with float32 weights, and with bfloat16
weights that are rounded in each way, with moments in float32 where nothing else is said; PyTorch
with a float32 master, to which each gradient is cast and from which each weight is copied back.
Gradients are bfloat16, but for float32 weights. A form's limit is the time of float32 weights, at
whose speed all that it moves has to pass through memory, over the share that it should reach.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from ..report.result import Progress, SpecialResult, tracked
from ..workers.worker_protocol import before_step
from .training import torch_for

SIZES: dict[str, tuple[int, ...]] = {"16M": (1 << 24,), "200 of 16K": (1 << 14,) * 200}
SCENARIOS = "loop", "pause20"
ROUNDS, WARM = 25, 4
PLAIN, NEW, KEPT = "float32", "torch, a new cast", "torch, a kept cast"


class Form(NamedTuple):
    """A form of a weight: its options, bytes of an element in a step, and share of the speed."""

    options: Mapping[str, Any]
    n_bytes: int
    share: float = 1.0


FORMS = {
    PLAIN: Form({}, 28),
    "nearest": Form({"rounding": "nearest"}, 22),
    "master": Form({"rounding": "master"}, 28, 0.95),
    "kahan": Form({"rounding": "kahan"}, 26, 0.85),
    "stochastic": Form({"rounding": "stochastic"}, 22, 0.85),
    "copies": Form({}, 28, 0.95),
}
OF_TORCH = {NEW: 1 / 1.8, KEPT: 1 / 1.4}
"""What a step with a master may take in terms of PyTorch's passes."""


def _ours(torch: Any, name: str, sizes: tuple[int, ...]) -> Callable[[], Any]:
    fused, form = import_module("fusestep.nn.torch"), FORMS[name]
    is_wide = name in (PLAIN, "copies")
    dtype = torch.float32 if is_wide else torch.bfloat16
    parameters = [torch.nn.Parameter(torch.ones(n, dtype=dtype)) for n in sizes]
    group: dict[str, Any] = {"params": parameters}
    if name == "copies":
        group["copies"] = [torch.ones(n, dtype=torch.bfloat16) for n in sizes]
    for parameter in parameters:
        parameter.grad_dtype = None
        parameter.grad = torch.full_like(parameter, 0.01, requires_grad=False)
        if name != PLAIN:
            parameter.grad = parameter.grad.bfloat16()
    options = dict(form.options) if is_wide else {**form.options, "state_dtype": torch.float32}
    step: Callable[[], Any] = fused.AdamW([group], lr=1e-3, **options).step
    return step


def _theirs(torch: Any, sizes: tuple[int, ...], *, keeps: bool) -> Callable[[], Any]:
    weights = [torch.ones(n, dtype=torch.bfloat16) for n in sizes]
    gradients = [torch.full_like(w, 0.01) for w in weights]
    masters = [torch.nn.Parameter(w.float()) for w in weights]
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW(masters, lr=1e-3, fused=True)

    def step() -> None:
        with torch.no_grad():
            for master, gradient in zip(masters, gradients, strict=True):
                if keeps:
                    master.grad.copy_(gradient)
                else:
                    master.grad = gradient.float()
            optimizer.step()
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)

    return step


def run(result: SpecialResult, threads: int, progress: Progress) -> None:
    """Measure all forms at all sizes, in all scenarios.

    Raises:
        BenchError: there is no PyTorch.
    """
    torch = torch_for(result.name, threads)
    for size, scenario in tracked([(s, c) for s in SIZES for c in SCENARIOS], progress):
        steps = {name: _ours(torch, name, SIZES[size]) for name in FORMS}
        steps |= {name: _theirs(torch, SIZES[size], keeps=name == KEPT) for name in (NEW, KEPT)}
        samples: dict[str, list[float]] = {name: [] for name in steps}
        before = before_step(scenario, threads)
        for _ in range(WARM + ROUNDS):
            for name, step in steps.items():
                before()
                begin = time.perf_counter()
                step()
                samples[name].append(time.perf_counter() - begin)
        label = f"{size}, {scenario}: "
        result.add({label + name: every[WARM:] for name, every in samples.items()})
        medians = {name: result.times[label + name].median for name in steps}
        for name, form in FORMS.items():
            if form.share < 1.0:
                limit = medians[PLAIN] * form.n_bytes / FORMS[PLAIN].n_bytes / form.share
                result.limits[label + name] = limit
        of_torch = min(factor * medians[name] for name, factor in OF_TORCH.items())
        result.limits[label + "master"] = min(result.limits[label + "master"], of_torch)
