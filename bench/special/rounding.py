"""Weights of 16 bits in every form, beside PyTorch's passes over float32 masters.

AdamW in one process, the contestants in turn: `nn.torch` with float32 weights, and with bfloat16
weights that are rounded in each way, with moments in float32 where nothing else is said; PyTorch
with a float32 master, to which each gradient is cast and from which each weight is copied back, and
so with DeepSpeed's AdamW; torchao with random rounding and 16-bit moments (the last two where they
are installed). Gradients are bfloat16, but for float32 weights. Rows are those of a table, stepped
by SparseAdam. Processes have one thread each and step beside each other. At last
a thread counts while another one takes steps.

A form's limit is the time of float32 weights, at whose speed all that it moves has to pass through
memory, over the share that it should reach.
"""

from __future__ import annotations

import math
import multiprocessing
import threading
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import Any, NamedTuple

from ... import set_num_threads
from ..measure import one_by_one, seconds_of
from ..report.result import Progress, SpecialResult, tracked
from ..workers.worker_protocol import Job, before_step
from .training import torch_for


class Rows(NamedTuple):
    """Rows of a table, whose gradient has so many of them."""

    table: int
    dim: int
    batch: int


SIZES: dict[str, tuple[int, ...] | Rows] = {
    "16M": (1 << 24,),
    "200 of 16K": (1 << 14,) * 200,
    "64K rows of 500Kx64": Rows(500_000, 64, 1 << 16),
}
SCENARIOS = "loop", "pause20"
ROUNDS, WARM = 25, 4
PLAIN, NEW, KEPT = "float32", "torch, a new cast", "torch, a kept cast"
DEEPSPEED, TORCHAO = "DeepSpeed, a kept cast", "torchao, stochastic, 16-bit moments"
N_PROCESSES, OF_PROCESS = 8, (1 << 21,)
COUNT, COUNTING = 1_000_000, 0.6  # and the share of its speed that a counting thread keeps


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
OF_DEEPSPEED = 1 / 3
"""And beside other processes, in terms of the passes with DeepSpeed's."""

Step = Callable[[], Any]


def _ours(name: str, sizes: tuple[int, ...] | Rows) -> Step:
    torch, fused = import_module("torch"), import_module("fusestep.nn.torch")
    is_wide = name in (PLAIN, "copies")
    options = dict(FORMS[name].options)
    if not is_wide:
        options["state_dtype"] = torch.float32
    shapes = [sizes[:2]] if isinstance(sizes, Rows) else [(n,) for n in sizes]
    dtype = torch.float32 if is_wide else torch.bfloat16
    parameters = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    group: dict[str, Any] = {"params": parameters}
    if name == "copies":
        group["copies"] = [torch.ones(shape, dtype=torch.bfloat16) for shape in shapes]
    for parameter in parameters:
        parameter.grad_dtype = None
        shape = (sizes.batch, sizes.dim) if isinstance(sizes, Rows) else parameter.shape
        gradient = torch.full(shape, 0.01, dtype=torch.float32 if name == PLAIN else torch.bfloat16)
        if isinstance(sizes, Rows):
            ids = torch.randperm(sizes.table)[None, : sizes.batch]
            gradient = torch.sparse_coo_tensor(
                ids, gradient, parameter.shape, check_invariants=False
            )
        parameter.grad = gradient
    optimizer = fused.SparseAdam if isinstance(sizes, Rows) else fused.AdamW
    step: Step = optimizer([group], lr=1e-3, **options).step
    return step


def _passes(sizes: tuple[int, ...], make: Callable[[Any], Any], *, keeps: bool) -> Step:
    """A cast of each gradient, the step of float32 masters, and a copy to each weight."""
    torch = import_module("torch")
    weights = [torch.ones(n, dtype=torch.bfloat16) for n in sizes]
    gradients = [torch.full_like(w, 0.01) for w in weights]
    masters = [torch.nn.Parameter(w.float()) for w in weights]
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer = make(masters)

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


def _cpu_adam(masters: list[Any]) -> Any:
    return import_module("deepspeed.ops.adam").DeepSpeedCPUAdam(masters, lr=1e-3)


def _of_torchao(sizes: tuple[int, ...]) -> Step:
    torch, optim = import_module("torch"), import_module("torchao.optim")
    weights = [torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16)) for n in sizes]
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.01)
    step: Step = optim._AdamW(weights, lr=1e-3, bf16_stochastic_round=True).step
    return step


def _contestants(sizes: tuple[int, ...] | Rows) -> dict[str, Callable[[], Step]]:
    """Makers of steps, by name."""
    ours = {name: partial(_ours, name, sizes) for name in FORMS}
    if isinstance(sizes, Rows):
        return {**ours}
    adamw = partial(import_module("torch").optim.AdamW, lr=1e-3, fused=True)
    theirs = {name: partial(_passes, sizes, adamw, keeps=name == KEPT) for name in (NEW, KEPT)}
    found: dict[str, Callable[[], Step]] = {**ours, **theirs}
    if find_spec("deepspeed"):
        found[DEEPSPEED] = partial(_passes, sizes, _cpu_adam, keeps=True)
    if find_spec("torchao"):
        found[TORCHAO] = partial(_of_torchao, sizes)
    return found


def run(result: SpecialResult, threads: int, progress: Progress) -> None:
    """Measure all forms at all sizes, in all scenarios, then beside other processes.

    Raises:
        BenchError: there is no PyTorch.
    """
    torch_for(result.name, threads)
    in_one = [(size, scenario) for size in SIZES for scenario in SCENARIOS]
    in_many = [name for name in _contestants(OF_PROCESS) if name in IN_PROCESSES]
    for todo in tracked([*in_one, *in_many], progress):
        if isinstance(todo, str):
            result.add({f"{N_PROCESSES} processes: {todo}": _in_processes(todo)})
            continue
        size, scenario = todo
        before, steps = before_step(scenario, threads), _contestants(SIZES[size])
        jobs = {f"{size}, {scenario}: {name}": Job(make(), before) for name, make in steps.items()}
        result.add(one_by_one(jobs, ROUNDS, WARM))
        _limit(result, f"{size}, {scenario}: ")
    own, others = (f"{N_PROCESSES} processes: {name}" for name in ("master", DEEPSPEED))
    if others in result.times:
        result.limits[own] = OF_DEEPSPEED * result.times[others].median
    alone, beside = "another thread counts, alone", "another thread counts, beside steps"
    result.add({alone: _counting(None), beside: _counting(_ours("master", (1 << 24,)))})
    result.limits[beside] = result.times[alone].median / COUNTING


def _limit(result: SpecialResult, label: str) -> None:
    """Set the limits of all forms, from the times of float32 weights and of PyTorch."""
    medians = {name: x.median for name, x in result.times.items()}
    for name, form in FORMS.items():
        if form.share < 1.0:
            limit = medians[label + PLAIN] * form.n_bytes / FORMS[PLAIN].n_bytes / form.share
            result.limits[label + name] = limit
    of_torch = [x * medians.get(label + name, math.inf) for name, x in OF_TORCH.items()]
    result.limits[label + "master"] = min(result.limits[label + "master"], *of_torch)


# -- beside other threads and processes -----------------------------------------------------------

IN_PROCESSES = PLAIN, "master", NEW, KEPT, DEEPSPEED


def _counting(step: Step | None) -> list[float]:
    """Seconds in which a thread counts to a number, while this one takes steps on one thread."""
    found: list[float] = []

    def count() -> None:
        found.extend(seconds_of(lambda: sum(1 for _ in range(COUNT))) for _ in range(ROUNDS))

    set_num_threads(1)
    thread = threading.Thread(target=count)
    thread.start()
    while step is not None and thread.is_alive():
        step()
    thread.join()
    set_num_threads(None)
    return found


def _in_processes(name: str) -> list[float]:
    """Seconds of each step in each process."""
    context = multiprocessing.get_context("spawn")
    together, times = context.Barrier(N_PROCESSES), context.Queue()
    processes = [
        context.Process(target=_beside, args=(name, together, times)) for _ in range(N_PROCESSES)
    ]
    for process in processes:
        process.start()
    found = [times.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    return list(chain.from_iterable(found))


def _beside(name: str, together: Any, times: Any) -> None:
    torch_for("rounding", 1)
    set_num_threads(1)
    step = _contestants(OF_PROCESS)[name]()
    for _ in range(WARM):
        step()
    together.wait()
    times.put([seconds_of(step) for _ in range(ROUNDS)])
