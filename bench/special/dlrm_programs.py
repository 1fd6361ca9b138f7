"""Whole programs of a DLRM in PyTorch: its tables, FBGEMM's, hashed ones and growing ones.

They have the sizes and layers of `dlrm_training`, and see the same ids of 64 bits, one of a sample
in each table, or 20. All but growing tables look up remainders, in each iteration. Growing ones
are full: they have a row for each id; then one id of 20 (at most one for 20 rows) is new, comes
again in the next batch, is admitted, and takes the row that was used least recently. FBGEMM takes
part where it is installed.

Then they learn from the log of the example, in rows for a quarter of its ids: the area below the
curve (AUC) of held-out clicks, for each seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from ..cases import model_shapes
from ..report.result import Progress, SpecialResult, tracked
from .dlrm_training import BAG, SETS, batch_of
from .training import Program, measured, torch_for

NEW, SEEDS, PARTS = {"none new": 0.0, "5% new": 0.05}, 3, ("iteration", "processor")


def run(result: SpecialResult, threads: int, progress: Progress) -> None:
    """Measure iterations with each number of ids, then what is learned with each seed.

    Raises:
        BenchError: there is no PyTorch.
    """
    torch = torch_for(result.name, threads)
    of = import_module("fusestep.examples.click_model.programs")
    lengths = {"one id": 1, f"{BAG} ids": BAG}
    for todo in tracked([*lengths, *range(SEEDS)], progress):
        if isinstance(todo, str):
            _time(result, todo, partial(batch_of, torch, bag=lengths[todo]), threads)
            continue
        for name, area in of.learned(replace(of.SHORT, seed=todo)).items():
            result.scores.setdefault(name, []).append(area)


def _time(result: SpecialResult, label: str, batch: Callable[..., Any], threads: int) -> None:
    """Measure all programs in turn: with ids that have rows, then with new ones."""
    of = import_module("fusestep.examples.click_model.programs")
    sizes, (dim, *_) = zip(*model_shapes.click_log_tables(), strict=True)
    programs = {kind: of.Program(kind, sizes, dim) for kind in of.kinds_here(*of.KINDS, of.LAYERS)}
    for program in programs.values():
        of.admit(program.model, sizes)
    drawn = [of.hashed_batch(batch(sizes, seed)) for seed in range(SETS)]
    for news, share in NEW.items():
        turns = {k: _turn(one, of.with_new(drawn, sizes, share)) for k, one in programs.items()}
        samples = measured(turns, "loop", threads)
        times = {f"{kind}: {part}": samples[kind, part] for kind in programs for part in PARTS}
        result.add({f"{label}, {news}: {name}": seconds for name, seconds in times.items()})


def _turn(program: Any, batches: Iterator[Any]) -> Program:
    """The next batch is made before the time counts."""
    now: dict[str, Any] = {}
    loss, load = lambda: program.loss(now["batch"]), lambda: now.update(batch=next(batches))
    return program.optimizers, loss, load
