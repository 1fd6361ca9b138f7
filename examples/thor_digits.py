"""THOR against Momentum on handwritten digits: ``python -m fusestep.examples.thor_digits``.

The 1797 images of 8 x 8 that come with scikit-learn, batches of 512, a small MLP and a small
convnet. Counted are the steps until the loss over all images is below 0.001. Momentum has the best
of a grid of learning rates and momenta; THOR has one setting for both nets.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .. import nn
from .errors import DemoError, require, status_of
from .options import integer
from .report import prepare_folder, write_files

BATCH, TARGET, MOST_STEPS = 512, 1e-3, 400
LEARNING_RATES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
MOMENTA = (0.8, 0.9, 0.95)
THOR: dict[str, Any] = {"learning_rate": 0.1, "damping": 0.01, "momentum": 0.8, "frequency": 2}
NETS: dict[str, Sequence[tuple[tuple[int, ...], int]]] = {
    "mlp": [((64, 64), 1), ((64, 64), 1), ((10, 64), 1)],
    "convnet": [((8, 1, 3, 3), 1), ((16, 8, 3, 3), 2), ((10, 16 * 4 * 4), 1)],
}
"""The shapes of the weights of each net, and strides."""
FIGURES = "thor_digits.json"
Floats = np.ndarray[Any, np.dtype[np.float32]]
Integers = np.ndarray[Any, np.dtype[np.int64]]
Record = nn.ThorDense | nn.ThorConv2d


class Classifier:
    """Dense layers and 3 x 3 convolutions with rectifiers in between, and the mean cross entropy.

    The layers are THOR's records: each step hands them what went in and the derivatives of what
    came out. Optimizers that do not need that take the same gradients.

    Args:
        layers: the shape of each weight and, of a convolution, the stride.
        seed: of the weights, whose variance lets a rectifier keep that of what goes through
            (He et al., 2015).
    """

    def __init__(self, layers: Sequence[tuple[tuple[int, ...], int]], seed: int) -> None:
        self.records: list[Record] = []
        rng = np.random.default_rng(seed)
        for shape, stride in layers:
            size = np.float32(np.sqrt(2 / np.prod(shape[1:])))
            arrays = size * rng.standard_normal(shape, np.float32), np.zeros(shape[0], np.float32)
            is_dense = len(shape) == 2
            record = nn.ThorDense if is_dense else partial(nn.ThorConv2d, stride=stride, padding=1)
            self.records.append(record(*arrays))
        self.parameters = [p for record in self.records for p in record.parameters]
        # Of the last batch, by layer: its input, and the rows that its weight is multiplied by.
        self._passed: list[tuple[Floats, Floats]] = []

    def scores(self, x: Floats) -> Floats:
        """``[N, 10]`` for a batch of images ``[N, 1, 8, 8]``."""
        self._passed.clear()
        for record in self.records:
            if self._passed:
                x = np.maximum(x, 0)
            weight, bias = (p.data.reshape(len(p.data), -1) for p in record.parameters)
            rows = _rows(record, x)
            self._passed.append((x, rows.reshape(-1, weight.shape[1])))
            y = self._passed[-1][1] @ weight.T + bias[:, 0]
            x = np.ascontiguousarray(np.moveaxis(y.reshape(*rows.shape[:-1], -1), -1, 1))
        return x

    def loss(self, x: Floats, labels: Integers) -> float:
        """The mean loss; nothing is captured."""
        return _cross_entropy(self.scores(x), labels)[0]

    def gradients(self, x: Floats, labels: Integers) -> tuple[Floats, ...]:
        """Derivatives of the mean loss by the parameters; THOR takes note."""
        _, d = _cross_entropy(self.scores(x), labels)
        found: list[Floats] = []
        for record, (given, rows) in zip(self.records[::-1], self._passed[::-1], strict=True):
            weight = record.parameters[0].data
            is_dense = isinstance(record, nn.ThorDense)
            record.capture(given.reshape(len(given), -1) if is_dense else given, d)
            of_rows = np.moveaxis(d, 1, -1).reshape(-1, len(weight))
            found = [(of_rows.T @ rows).reshape(weight.shape), of_rows.sum(axis=0), *found]
            d = _input(record, of_rows @ weight.reshape(len(weight), -1), given.shape)
            d = d * (given > 0)  # the rectifier's; nobody needs those of the images
        return tuple(found)


def _rows(record: Record, x: Floats) -> Floats:
    """The factors of a weight: samples, or the patches ``[N, H, W, C * 9]`` of images."""
    if isinstance(record, nn.ThorDense):
        return x.reshape(len(x), -1)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    s = record.stride[0]
    windows = sliding_window_view(padded, (3, 3), axis=(2, 3))[:, :, ::s, ::s]
    patches: Floats = np.moveaxis(windows, 1, 3)
    return patches.reshape(*patches.shape[:3], -1)


def _input(record: Record, rows: Floats, shape: tuple[int, ...]) -> Floats:
    """The derivatives by an input of that shape, from those by its rows."""
    if isinstance(record, nn.ThorDense):
        return rows.reshape(shape)
    n, channels, height, width = shape
    s = record.stride[0]
    padded = np.zeros((n, channels, height + 2, width + 2), np.float32)
    patches = np.moveaxis(rows.reshape(n, height // s, width // s, channels, 3, 3), 3, 1)
    for i in range(3):
        for j in range(3):
            padded[:, :, i : i + height : s, j : j + width : s] += patches[..., i, j]
    return padded[:, :, 1:-1, 1:-1]


def _cross_entropy(scores: Floats, labels: Integers) -> tuple[float, Floats]:
    """The mean loss ``[N, C]`` scores have, and its derivatives by the scores."""
    found = np.exp(scores - scores.max(axis=1, keepdims=True))
    found /= found.sum(axis=1, keepdims=True)
    of_labels = np.arange(len(labels)), labels
    loss = float(-np.mean(np.log(found[of_labels])))
    found[of_labels] -= 1
    return loss, found / np.float32(len(labels))


class Digits(NamedTuple):
    """Images ``[N, 1, 8, 8]``, centred, and their labels ``[N]``."""

    images: Floats
    labels: Integers


def read_digits() -> Digits:
    """The data set of scikit-learn."""
    found = importlib.import_module("sklearn.datasets").load_digits()
    images = (found.images / 16).astype(np.float32)[:, None]
    return Digits(images - images.mean(axis=0), found.target.astype(np.int64))


@dataclass
class Run:
    """One training."""

    label: str  # of the optimizer and its setting
    losses: list[float] = field(default_factory=list)  # over all images, after each step
    steps: int | None = None  # how many it took to the target
    seconds: float = 0.0  # of the training, without the losses over all images


def train(net: Classifier, opt: Any, label: str, digits: Digits, seed: int, most: int) -> Run:
    """Train until the loss over all images is below the target, or ``most`` steps.

    Every pass has the batches in a new order, a short rest left out.
    """
    run, rng, n = Run(label), np.random.default_rng(seed), len(digits.labels)
    size = min(BATCH, n)
    orders = (rng.permutation(n)[: n // size * size] for _ in itertools.count())
    batches = itertools.chain.from_iterable(np.split(order, n // size) for order in orders)
    # A learning rate of the grid that is too high ends in infinities: no news.
    with np.errstate(all="ignore"):
        for step, chosen in enumerate(itertools.islice(batches, most), 1):
            begin = time.perf_counter()
            opt(net.gradients(digits.images[chosen], digits.labels[chosen]))
            run.seconds += time.perf_counter() - begin
            run.losses.append(net.loss(*digits))
            if run.losses[-1] < TARGET:
                run.steps = step
            if run.steps is not None or not np.isfinite(run.losses[-1]):
                break
    return run


def best_momentum(name: str, digits: Digits, seed: int) -> Run:
    """The run with the fewest steps of the whole grid; none goes on when it cannot win any more.

    Raises:
        DemoError: no setting reaches the target.
    """
    best, allowed = None, MOST_STEPS
    for momentum, rate in itertools.product(MOMENTA, LEARNING_RATES):
        net = Classifier(NETS[name], seed)
        opt = nn.Momentum(net.parameters, learning_rate=rate, momentum=momentum)
        label = f"Momentum, learning rate {rate:g}, momentum {momentum:g}"
        run = train(net, opt, label, digits, seed + 1, allowed)
        if run.steps is not None:
            best, allowed = run, run.steps - 1
    if best is None:
        text = f"no setting of Momentum reaches a loss of {TARGET:g} in {MOST_STEPS} steps"
        raise DemoError(text)
    return best


def thor_run(name: str, digits: Digits, seed: int) -> Run:
    """THOR's run."""
    net = Classifier(NETS[name], seed)
    opt = nn.thor(net.records, **THOR, batch_size=min(BATCH, len(digits.labels)))
    label = "THOR, " + ", ".join(f"{k.replace('_', ' ')} {v:g}" for k, v in THOR.items())
    return train(net, opt, label, digits, seed + 1, MOST_STEPS)


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
    require("this example", {"scipy": "scipy", "sklearn.datasets": "scikit-learn"}, "demo,thor")
    digits, folder = read_digits(), Path(args.output)
    prepare_folder(folder, [FIGURES])
    print(f"{len(digits.labels)} images, batches of {BATCH}, steps to a loss of {TARGET:g}")
    print(f"grid of Momentum: learning rates {LEARNING_RATES}, momenta {MOMENTA}")
    figures: dict[str, dict[str, Any]] = {}
    for name in NETS if args.net == "both" else [args.net]:
        print(f"\n{name}")
        pair = [best_momentum(name, digits, args.seed), thor_run(name, digits, args.seed)]
        for run in pair:
            reached = "not reached" if run.steps is None else f"{run.steps:4d} steps"
            each = 1e3 * run.seconds / len(run.losses)
            print(f"  {reached}  {each:6.2f} ms a step  {run.label}")
        momentum, thor = (run.steps for run in pair)
        if thor and momentum:
            print(f"  THOR takes {thor / momentum:.2f} of the steps of the best Momentum")
        figures[name] = {run.label: {"steps": run.steps, "losses": run.losses} for run in pair}
    write_files(folder, {FIGURES: json.dumps(figures, indent=1).encode()})
    print(f"\nthe losses after each step are in {folder / FIGURES}")


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
