"""THOR against Momentum on handwritten digits: ``python -m fusestep.examples.thor_digits``.

The 1797 images of 8 x 8 that come with scikit-learn, batches of 512, a small MLP and a small
convnet. Counted are the steps until the loss over all images is below 0.001. Momentum has the best
of a grid of learning rates and momenta; THOR has one setting for both nets.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import nn
from .digits_nets import Classifier, FloatArray, IntArray, convnet, mlp
from .errors import DemoError, status_of
from .options import integer
from .report import prepare_folder, write_files

BATCH = 512
TARGET = 1e-3
LEARNING_RATES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
MOMENTA = (0.8, 0.9, 0.95)
MOST_STEPS = 400
THOR: dict[str, Any] = {"learning_rate": 0.1, "damping": 0.01, "momentum": 0.8, "frequency": 2}
NETS: dict[str, Callable[[int], Classifier]] = {"mlp": mlp, "convnet": convnet}
CURVES, FIGURES = "thor_digits.png", "thor_digits.json"


@dataclass(frozen=True)
class Digits:
    """Images ``[N, 1, 8, 8]``, centred, and their labels ``[N]``."""

    images: FloatArray
    labels: IntArray

    def batches(self, seed: int, size: int) -> Iterator[IntArray]:
        """Indices of batches without end: every pass in a new order, a short rest left out."""
        rng = np.random.default_rng(seed)
        while True:
            order = rng.permutation(len(self.labels))
            for start in range(0, len(order) - size + 1, size):
                yield order[start : start + size]


def read_digits() -> Digits:
    """The data set of scikit-learn.

    Raises:
        DemoError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DemoError(
            'this example needs scikit-learn: install it with pip install "fusestep[demo,thor]"'
        ) from error
    found = load_digits()
    images = (found.images / 16).astype(np.float32)[:, None]
    return Digits(images - images.mean(axis=0), found.target.astype(np.int64))


@dataclass
class Run:
    """One training.

    Attributes:
        label: of the optimizer and its setting.
        losses: over all images, after each step.
        steps: how many it took to the target, or None.
        seconds: of the training, without the losses over all images.
    """

    label: str
    losses: list[float] = field(default_factory=list)
    steps: int | None = None
    seconds: float = 0.0


def train(
    net: Classifier, opt: Any, label: str, digits: Digits, seed: int, most: int, target: float
) -> Run:
    """Train until the loss over all images is below the target, or ``most`` steps."""
    run = Run(label)
    batches = digits.batches(seed, min(BATCH, len(digits.labels)))
    # A learning rate of the grid that is too high ends in infinities: no news.
    with np.errstate(all="ignore"):
        for step in range(1, most + 1):
            chosen = next(batches)
            begin = time.perf_counter()
            opt(net.gradients(digits.images[chosen], digits.labels[chosen]))
            run.seconds += time.perf_counter() - begin
            run.losses.append(net.loss(digits.images, digits.labels))
            if run.losses[-1] < target:
                run.steps = step
                break
            if not np.isfinite(run.losses[-1]):
                break
    return run


def best_momentum(
    make: Callable[[int], Classifier], digits: Digits, seed: int, target: float, most: int
) -> Run:
    """The run with the fewest steps of the whole grid; none goes on when it cannot win any more.

    Raises:
        DemoError: no setting reaches the target.
    """
    best: Run | None = None
    for momentum in MOMENTA:
        for rate in LEARNING_RATES:
            net = make(seed)
            opt = nn.Momentum(net.parameters, learning_rate=rate, momentum=momentum)
            label = f"Momentum, learning rate {rate:g}, momentum {momentum:g}"
            allowed = most if best is None or best.steps is None else best.steps - 1
            run = train(net, opt, label, digits, seed + 1, allowed, target)
            if run.steps is not None:
                best = run
    if best is None:
        raise DemoError(f"no setting of Momentum reaches a loss of {target:g} in {most} steps")
    return best


def thor_run(
    make: Callable[[int], Classifier], digits: Digits, seed: int, target: float, most: int
) -> Run:
    """THOR's run."""
    net = make(seed)
    opt = nn.thor(net.records, **THOR, batch_size=min(BATCH, len(digits.labels)))
    label = "THOR, " + ", ".join(f"{k.replace('_', ' ')} {v:g}" for k, v in THOR.items())
    return train(net, opt, label, digits, seed + 1, most, target)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the example to ``parser``."""
    add = parser.add_argument
    add("--net", choices=[*NETS, "both"], default="both", help="which net (default: both)")
    add("--seed", type=integer(0), default=0, help="of weights and batches (default: 0)")
    add("--output", default="demo-output", metavar="DIR", help="folder of the results")


def main(args: argparse.Namespace) -> int:
    """Trains, reports, saves; returns the exit status (2 for a mistake of the user)."""
    return status_of("thor_digits", lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    for name in ("matplotlib", "scipy"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise DemoError(
                f'this example needs {name}: install it with pip install "fusestep[demo,thor]"'
            ) from error
    digits = read_digits()
    folder = Path(args.output)
    prepare_folder(folder, [CURVES, FIGURES])
    print(f"{len(digits.labels)} images, batches of {BATCH}, steps to a loss of {TARGET:g}")
    grid = f"learning rates {LEARNING_RATES}, momenta {MOMENTA}"
    print(f"grid of Momentum: {grid}")
    runs = {}
    for name in NETS if args.net == "both" else [args.net]:
        momentum = best_momentum(NETS[name], digits, args.seed, TARGET, MOST_STEPS)
        thor = thor_run(NETS[name], digits, args.seed, TARGET, MOST_STEPS)
        runs[name] = (momentum, thor)
        print_runs(name, momentum, thor)
    figures = {
        name: {run.label: {"steps": run.steps, "losses": run.losses} for run in pair}
        for name, pair in runs.items()
    }
    found = {CURVES: curves(runs), FIGURES: json.dumps(figures, indent=1).encode()}
    write_files(folder, found)
    print(f"\ncurves and figures are in {folder / CURVES} and {folder / FIGURES}")


def print_runs(name: str, momentum: Run, thor: Run) -> None:
    """Steps and time per step of both."""
    print(f"\n{name}")
    for run in (momentum, thor):
        reached = "not reached" if run.steps is None else f"{run.steps:4d} steps"
        each = 1e3 * run.seconds / len(run.losses)
        print(f"  {reached}  {each:6.2f} ms a step  {run.label}")
    if thor.steps is not None and momentum.steps is not None:
        print(f"  THOR takes {thor.steps / momentum.steps:.2f} of the steps of the best Momentum")


def curves(runs: dict[str, tuple[Run, Run]]) -> bytes:
    """A PNG: for each net the loss over all images by the number of steps."""
    # Not pyplot: so it needs no display, and nobody's open figures and backend are touched.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(runs), 4.2), layout="constrained")
    for place, (name, pair) in enumerate(runs.items(), 1):
        axes = figure.add_subplot(1, len(runs), place)
        for run, color in zip(pair, ("C0", "C1"), strict=True):
            axes.semilogy(range(1, len(run.losses) + 1), run.losses, color=color, label=run.label)
        axes.axhline(TARGET, color="0.6", linewidth=0.8, linestyle="--")
        axes.set(title=name, xlabel="step", ylabel="loss over all images (nats)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6, loc="upper right")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)  # drawn by the Agg backend
    return png.getvalue()


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
