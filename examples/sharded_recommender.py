"""The recommender with its tables divided over several processes, which share each batch.

    torchrun --nproc-per-node 2 -m fusestep.examples.sharded_recommender

Run with ``python -m`` it is one process. Losses do not depend on the number of processes but for
roundings: with ``--float64`` they agree in 15 digits, in float32 in 7 at first and, since roundings
grow from step to step, in 3 after a hundred. Each process makes the whole click log and takes its
part of every batch.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import recommender
from .click_model.clicks import ClickLog, table_sizes
from .click_model.runs import Run, Settings, figures, report_of
from .errors import DemoError, require, status_of
from .options import Parser
from .report import prepare_folder, write_files

WHO = "sharded_recommender"
FIGURES = f"{WHO}.json"
RUN = "run.json"  # the same in a checkpoint, which is whole when it is there


def main(options: Sequence[str] | None = None) -> int:
    """Trains, reports, saves; returns the exit status (2 for a mistake of the user).

    The first process reads the options and speaks; the others do as they are told.
    """
    needed = {module: name for module, name in recommender.NEEDED.items() if module != "matplotlib"}
    if status := status_of(WHO, lambda: require("this example", needed, "torch,demo")):
        return status
    import torch.distributed as dist

    from .click_model.sharded_training import process_group

    with process_group():
        told: list[Any] = [_asked(options) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(told)
        if isinstance(told[0], int):
            return told[0]
        return status_of(WHO, lambda: _run(*told[0]))


def _asked(options: Sequence[str] | None) -> Any:
    """What is asked for and the run as it stands, or the exit status if it cannot be."""
    parser = Parser(prog=WHO, description=(__doc__ or "").partition("\n")[0])
    recommender.add_shared(parser)
    parser.add_argument("--checkpoint", metavar="DIR", help="new folder for the trained model")
    parser.add_argument(
        "--resume",
        metavar="DIR",
        help="go on from a checkpoint, of any number of processes, up to step --steps",
    )
    found: list[Any] = []
    try:
        args = parser.parse_args(options)
        status = status_of(WHO, lambda: found.extend([args, *_checked(args)]))
    except SystemExit as stop:
        return stop.code
    return status or found


def _checked(args: Namespace) -> tuple[Settings, Run]:
    """Settings and run, when all that the options name is there and fits."""
    settings, local = recommender.settings_of(args), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    recommender.require_memory(settings, local / int(os.environ.get("WORLD_SIZE", 1)))
    prepare_folder(Path(args.output), [FIGURES])
    run = Run(WHO, "SparseAdam and Adam")
    if args.resume is not None:
        _resume(Path(args.resume), settings, run)
    if args.checkpoint is not None:
        if (Path(args.checkpoint) / RUN).exists():
            raise DemoError(f"--checkpoint: {args.checkpoint!r} has a checkpoint already")
        prepare_folder(Path(args.checkpoint), [RUN], "--checkpoint")
    return settings, run


def _resume(folder: Path, settings: Settings, run: Run) -> None:
    """Fill a run with what a checkpoint says about it."""
    try:
        found = json.loads((folder / RUN).read_text())
        of_run, saved = found["runs"][run.name], found["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DemoError(f"--resume: {str(folder)!r} has no checkpoint: {error}") from error
    for name, value in asdict(settings).items():
        if name != "steps" and value != saved.get(name):
            raise DemoError(f"--resume: {name} was {saved.get(name)!r}, now it is {value!r}")
    run.losses = of_run["losses"]
    run.auc = {int(step): auc for step, auc in of_run["auc"].items()}
    if len(run.losses) >= settings.steps:
        raise DemoError(
            f"--steps: expected more than the {len(run.losses)} of the checkpoint, "
            f"got {settings.steps}"
        )


def _run(args: Namespace, settings: Settings, run: Run) -> None:
    import torch.distributed as dist

    from .click_model.sharded_training import ShardedTraining

    is_first, size = dist.get_rank() == 0, dist.get_world_size()
    machine = {**recommender.set_threads(args.threads), "processes": size}
    if is_first:
        print("\n".join(recommender.heading(settings, machine["threads"])))
        print(f"processes  {size}", flush=True)
    training = ShardedTraining(run, settings)
    if args.resume is not None:
        training.load(Path(args.resume))
    log = ClickLog(table_sizes(settings.rows), settings.seed)
    best_auc = recommender.train_visibly([training], settings, log, silent=not is_first)
    taken = training.bytes_of_tables
    if args.checkpoint is not None:
        training.save(Path(args.checkpoint))
    if is_first:
        print("\n".join(report_of(run, best_auc)))
        print(f"  memory     {max(taken) / 1e6:,.1f} MB at most of a process for its part of the "
              f"tables and states, {sum(taken) / 1e6:,.1f} MB")  # fmt: skip
        print(f"  loss       {run.losses[-1]:.4f} at the end, {run.losses[0]:.4f} untrained")
        found = figures(settings, machine, [run], best_auc, bytes_of_tables=taken)
        write_files(Path(args.output), {FIGURES: found})
        if args.checkpoint is not None:
            write_files(Path(args.checkpoint), {RUN: found}, "--checkpoint")
        print(f"\nfigures are in {args.output}{os.sep}")


if __name__ == "__main__":
    sys.exit(main())
