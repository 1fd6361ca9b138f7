"""A recommender trained with torch.optim, with fusestep's optimizers, and with its tables, too.

    ids and dense features -> 26 tables and an MLP -> products of pairs -> an MLP -> log loss

Run as ``python -m fusestep.examples.recommender``. The model is a DLRM in PyTorch, the clicks come
from a hidden model. All trainings begin with the same weights and see the same batches, in turns.
Their optimizers have the same names; in the third all tables are one `nn.torch.EmbeddingBags`,
which takes their step in backward. With ``--hashed-ids`` the tables grow.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__, get_num_threads, set_num_threads
from .click_model.clicks import N_TABLES, ClickLog, table_sizes
from .click_model.runs import QUICK, Run, Settings, differences, figures, picture, report
from .errors import DemoError, require, status_of
from .options import Parser, integer
from .report import prepare_folder, write_files

if TYPE_CHECKING:
    from .click_model.training import Training

NEEDED = {"torch": "torch", "tqdm": "tqdm", "matplotlib": "matplotlib", "sklearn": "scikit-learn"}
FIGURES, CURVES = "recommender.json", "recommender.png"
MOST_ROWS, MOST_DIM = 100_000_000, 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the example to ``parser``."""
    add_shared(parser)
    parser.add_argument(
        "--single",
        action="store_true",
        help='for fusestep one Adam(sparse="touched") for tables and dense layers',
    )
    parser.add_argument(
        "--hashed-ids",
        action="store_true",
        help="tables that grow: ids of 64 bits, half of which appear late, beside a known "
        "vocabulary and hashing into fewer rows",
    )


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Adds the options of every program that trains this model."""
    _add_sizes(parser)
    add = parser.add_argument
    add("--seed", type=integer(0), default=0, metavar="N", help="of all random (default: 0)")
    add(
        "--threads",
        type=integer(1),
        metavar="N",
        help="of a process, at most (default: all; give 1 on a busy machine)",
    )
    add("--quick", action="store_true", help="a smaller run")
    add(
        "--float64",
        action="store_true",
        help="compute in float64: in float32 roundings grow from step to step, as between two ways "
        "of PyTorch's own",
    )
    add("--output", default="demo-output", metavar="DIR", help="folder of the results")


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    sizes = {
        "steps": (None, "batches to train on"),
        "batch": (None, "clicks of a batch"),
        "rows": (MOST_ROWS, f"of the largest of {N_TABLES} tables"),
        "dim": (MOST_DIM, "length of a row"),
    }
    for name, (most, text) in sizes.items():
        full, quick = getattr(Settings(), name), getattr(QUICK, name)
        shown = f"{full:,}" if quick == full else f"{full:,}, quick {quick:,}"
        parser.add_argument(
            f"--{name}", type=integer(1, most), metavar="N", help=f"{text} (default: {shown})"
        )


def main(args: argparse.Namespace) -> int:
    """Trains, reports, saves; returns the exit status (2 for a mistake of the user)."""
    return status_of("recommender", lambda: _run(args))


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings that the options ask for."""
    names = ("steps", "batch", "rows", "dim", "seed", "single", "float64", "hashed_ids")
    chosen = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    return replace(QUICK if args.quick else Settings(), **chosen)


def _run(args: argparse.Namespace) -> None:
    require("this example", NEEDED, "torch,demo")
    settings, folder = settings_of(args), Path(args.output)
    sizes = table_sizes(settings.rows)
    require_memory(settings, 4 if settings.hashed_ids else 3)
    prepare_folder(folder, [FIGURES, CURVES])
    machine = set_threads(args.threads)
    print("\n".join(heading(settings, machine["threads"])), flush=True)
    runs, best_auc = train_all(settings, sizes)
    print("\n".join(report(runs, best_auc)))
    first, *others = runs
    compared = {"differences_of_losses": {run.name: differences(first, run) for run in others}}
    found = figures(settings, machine, runs, best_auc, **compared)
    write_files(folder, {FIGURES: found, CURVES: picture(runs, best_auc)})
    print(f"\nfigures and curves are in {folder}{os.sep}")


def train_all(settings: Settings, sizes: list[int]) -> tuple[list[Run], float]:
    """The runs, and the AUC of the model that made the clicks."""
    from .click_model import hashed_training, training

    trainings: Sequence[Training] = training.trainings_of(settings)
    if settings.hashed_ids:
        trainings = hashed_training.trainings_of(settings)
    log = ClickLog(sizes, settings.seed, settings.steps // 2 if settings.hashed_ids else 0)
    return [training.run for training in trainings], train_visibly(trainings, settings, log)


def train_visibly(
    trainings: Sequence[Training], settings: Settings, log: ClickLog, *, silent: bool = False
) -> float:
    """Trains with a progress bar; returns the AUC of the model that made the clicks."""
    from sklearn.metrics import roc_auc_score
    from tqdm import tqdm

    from .click_model.training import train

    held_out, runs = log.held_out(settings.held_out), [training.run for training in trainings]
    # A log file gets a line now and then instead of ten a second.
    every = 0.2 if sys.stderr.isatty() else 5.0
    options: dict[str, Any] = {"initial": len(runs[0].losses), "disable": silent}
    with tqdm(total=settings.steps, unit=" steps", mininterval=every, **options) as bar:

        def progress() -> None:
            shown = ", ".join(f"{run.losses[-1]:.3f}" for run in runs)
            bar.set_postfix_str(f"losses {shown}", refresh=False)
            bar.update()

        train(trainings, settings, log, held_out, progress)
    return float(roc_auc_score(held_out.labels, held_out.log_odds))


def heading(settings: Settings, threads: int) -> list[str]:
    """Lines on what will be trained."""
    sizes = table_sizes(settings.rows)
    return [
        f"model      {N_TABLES} tables of {sizes[0]:,} to {sizes[-1]:,} rows, "
        f"{sum(sizes):,} in all, of {settings.dim} numbers",
        f"training   {settings.steps:,} batches of {settings.batch:,} clicks, {threads} thread(s)",
    ]


def require_memory(settings: Settings, trainings: float) -> None:
    """Refuse so many trainings whose tables this machine cannot hold, where it says what it has."""
    from .click_model.training import bytes_of

    try:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return
    needed = trainings * bytes_of(settings)
    if needed > available:
        raise DemoError(
            f"--rows, --dim: tables and states need {needed / 1e9:.3g} GB, "
            f"this machine has {available / 1e9:.3g} GB"
        )


def set_threads(threads: int | None) -> dict[str, Any]:
    """Give PyTorch as many threads as the steps have; what the figures depend on."""
    import torch

    set_num_threads(threads)
    torch.set_num_threads(get_num_threads())
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": get_num_threads(),
        "torch": torch.__version__,
        "fusestep": __version__,
    }


if __name__ == "__main__":
    _parser = Parser(prog="recommender", description=(__doc__ or "").partition("\n")[0])
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
