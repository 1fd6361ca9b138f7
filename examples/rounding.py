"""Do weights of 16 bits learn? Three models, trained with each way of rounding weights.

Run as ``python -m fusestep.examples.rounding``. A transformer on the source code of Python's
standard library (AdamW), word vectors of it (SparseAdam), and a recommender (Adam for tables and
dense layers): each with float32 weights, and with bfloat16 weights that are kept in each way. A
seed gives the same initial weights and batches to all of them. The arithmetic of the models is
float32, from the weights as they are stored, and so are the moments: what differs is how weights
are kept, and that gradients of bfloat16 weights are bfloat16.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from .errors import require, status_of
from .options import Parser, integer
from .recommender import NEEDED, set_threads
from .report import prepare_folder, write_files

QUICK_STEPS = 12
STYLES, FIRST_DRAWN = ("-", "-", "--", "-.", ":"), 2

Losses = dict[str, dict[str, list[dict[int, float]]]]
"""Losses of held-out data: by model, way and seed, after numbers of steps."""


class Study(NamedTuple):
    """Trainings of the same models in several ways.

    Attributes:
        name: of the example and its files.
        ways: by name the options of an optimizer; the others are compared with the first.
        models: titles of those that are trained.
    """

    name: str
    ways: Mapping[str, Mapping[str, Any]]
    models: Sequence[str]

    @property
    def files(self) -> tuple[str, str]:
        """The names of the files for the losses and for the picture."""
        return f"{self.name}.json", f"{self.name}.png"


STUDY = Study(
    "rounding",
    {"float32": {}}
    | {way: {"rounding": way} for way in ("nearest", "master", "kahan", "stochastic")},
    ["transformer", "word vectors", "recommender"],
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the example to ``parser``."""
    add = parser.add_argument
    add("--seeds", type=integer(2), default=3, metavar="N", help="trainings of each (default: 3)")
    add("--threads", type=integer(1), metavar="N", help="at most (default: all)")
    add("--quick", action="store_true", help=f"{QUICK_STEPS} steps, which show nothing")
    add("--output", default="demo-output", metavar="DIR", help="folder of the results")


def main(args: argparse.Namespace, study: Study = STUDY) -> int:
    """Trains, reports, saves; returns the exit status (2 for a mistake of the user)."""
    return status_of(study.name, lambda: _run(args, study))


def _run(args: argparse.Namespace, study: Study) -> None:
    require("this example", NEEDED, "torch,demo")
    folder, (figures, curves) = Path(args.output), study.files
    prepare_folder(folder, study.files)
    machine = set_threads(args.threads)
    losses = train_all(study, args.seeds, QUICK_STEPS if args.quick else None)
    print("\n".join(report(losses)))
    found = {"machine": machine, "losses": losses}
    write_files(folder, {figures: json.dumps(found, indent=1).encode(), curves: picture(losses)})
    print(f"\nfigures and curves are in {folder}{os.sep}")


def train_all(study: Study, n_seeds: int, steps: int | None) -> Losses:
    """Train every model in every way, and show a progress bar."""
    from tqdm import tqdm

    from .rounded_models import MODELS, train

    losses: Losses = {}
    lengths = {title: steps or MODELS[title][0] for title in study.models}
    total = sum(lengths.values()) * len(study.ways) * n_seeds
    # A log file gets a line now and then instead of ten a second.
    every = 0.2 if sys.stderr.isatty() else 20.0
    with tqdm(total=total, unit=" steps", mininterval=every) as bar:
        for title in study.models:
            for way, options in study.ways.items():
                bar.set_postfix_str(f"{title}, {way}", refresh=False)
                losses.setdefault(title, {})[way] = [
                    train(MODELS[title][1](seed), options, seed, lengths[title], bar.update)
                    for seed in range(n_seeds)
                ]
    return losses


def compared(losses: Mapping[str, list[dict[Any, float]]]) -> dict[str, tuple[float, float]]:
    """The mean of the last losses of each way, and how far it is from that of the first way.

    The distance is the mean over the seeds, in terms of the range of the first way's last losses.
    """
    last = {way: [[*of_seed.values()][-1] for of_seed in own] for way, own in losses.items()}
    wide = next(iter(last.values()))
    spread = max(wide) - min(wide) or math.nan
    return {
        way: (mean(own), mean(x - y for x, y in zip(own, wide, strict=True)) / spread)
        for way, own in last.items()
    }


def report(losses: Losses) -> list[str]:
    """Lines for the reader."""
    lines = []
    for title, by_way in losses.items():
        lines.append(
            f"\n{title}: held-out loss, and its distance from the first's in spreads of seeds"
        )
        lines += [f"  {way:16s} {x:8.4f} {d:+8.2f}" for way, (x, d) in compared(by_way).items()]
    return lines


def picture(losses: Losses) -> bytes:
    """A PNG: held-out losses by the number of steps: means, from the lowest seed to the highest.

    The first losses are left out, which would hide how the others differ.
    """
    # Not pyplot: so it needs no display, and nobody's open figures and backend are touched.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    for axes, (title, by_way) in zip(figure.subplots(1, len(losses)), losses.items(), strict=True):
        for (way, own), style in zip(by_way.items(), STYLES, strict=False):
            steps = list(own[0])[FIRST_DRAWN:]
            every = [[of_seed[step] for of_seed in own] for step in steps]
            (line,) = axes.plot(steps, [mean(of_step) for of_step in every], style, label=way)
            low, high = zip(*((min(x), max(x)) for x in every), strict=True)
            axes.fill_between(steps, low, high, alpha=0.2, color=line.get_color())
        axes.set(title=title, xlabel="step", ylabel="held-out loss (nats)")
        axes.grid(alpha=0.3)
        axes.legend()
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)  # drawn by the Agg backend
    return png.getvalue()


if __name__ == "__main__":
    _parser = Parser(prog="rounding", description=(__doc__ or "").partition("\n")[0])
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
