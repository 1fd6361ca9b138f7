"""What is measured of a training, and how it is compared: as lines, as JSON, as a picture."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from statistics import median
from typing import Any

import numpy as np

PARTS = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Settings:
    """What is trained, and for how long."""

    steps: int = 1200
    batch: int = 2048
    rows: int = 1_000_000
    dim: int = 16
    seed: int = 0
    held_out: int = 32768  # clicks
    measurements: int = 6  # of the AUC, after the first one
    single: bool = False  # one `fused.Adam` for tables and dense layers
    float64: bool = False
    hashed_ids: bool = False  # ids of 64 bits, half of which appear late


QUICK = Settings(steps=120, batch=512, rows=20_000, held_out=8192, measurements=3)


@dataclass
class Run:
    """A training with one library.

    Attributes:
        name: of the library.
        optimizers: how its steps are made.
        losses: of each batch, before its step.
        auc: of held-out clicks, by the number of steps before.
        rows: in use, by the number of steps before; of tables that grow, and those beside them.
        seconds: of each part of each iteration.
    """

    name: str
    optimizers: str
    losses: list[float] = field(default_factory=list)
    auc: dict[int, float] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})

    @property
    def milliseconds(self) -> dict[str, float]:
        """Medians of the parts; the first iteration, which compiles and makes states, is apart."""
        return {part: 1e3 * median(all_[1:] or all_) for part, all_ in self.seconds.items()}

    @property
    def iteration(self) -> float:
        """Milliseconds of forward, backward and optimizer together."""
        return sum(self.milliseconds.values())

    @property
    def first(self) -> float:
        """Milliseconds of the optimizer's first step."""
        return 1e3 * self.seconds["optimizer"][0]

    @property
    def share(self) -> float:
        """The optimizer's part of an iteration."""
        return self.milliseconds["optimizer"] / self.iteration

    @property
    def final_auc(self) -> float:
        """That of the trained model."""
        return self.auc[max(self.auc)]


def differences(one: Run, other: Run) -> dict[str, float]:
    """Between the losses of two runs at the same step."""
    found = np.abs(np.subtract(one.losses, other.losses))
    return {"largest": float(found.max()), "mean": float(found.mean())}


def report_of(run: Run, best_auc: float) -> list[str]:
    """Lines on one run."""
    parts = ", ".join(f"{part} {ms:.2f}" for part, ms in run.milliseconds.items())
    rows = [f"  rows       {run.rows[max(run.rows)]:,} in use"] if run.rows else []
    return [
        f"\n{run.name}: {run.optimizers}",
        f"  AUC        {run.final_auc:.4f} of held-out clicks, {run.auc[0]:.4f} untrained; "
        f"the hidden model has {best_auc:.4f}",
        f"  iteration  {run.iteration:.2f} ms ({parts}; medians)",
        f"  optimizer  {run.share:.0%} of an iteration; its first step took {run.first:.0f} ms",
        *rows,
    ]


def report(runs: Sequence[Run], best_auc: float) -> list[str]:
    """Lines for the reader: what was learned, and what it took."""
    lines = [line for run in runs for line in report_of(run, best_auc)]
    torch, *others = runs
    for ours in others:
        ratios = [torch.milliseconds["optimizer"] / ours.milliseconds["optimizer"]]
        ratios.append(torch.iteration / ours.iteration)
        found = ", ".join(f"{name} {x:.2g}" for name, x in differences(torch, ours).items())
        lines.append(f"\n{ours.name} beside {torch.name}:")
        lines.append(f"  differences of the losses of a batch: {found}")
        lines.append("  {:.2f} x the speed in the optimizer, {:.2f} x in all".format(*ratios))
    return lines


def figures(settings: Settings, machine: Mapping[str, Any], runs: Sequence[Run],
            best_auc: float, **others: Any) -> bytes:  # fmt: skip
    """Everything measured, as JSON."""
    found = {
        "settings": asdict(settings),
        "machine": dict(machine),
        "auc_of_the_hidden_model": best_auc,
        **others,
        "runs": {
            run.name: {
                "optimizers": run.optimizers,
                "auc": run.auc,
                **({"rows": run.rows} if run.rows else {}),
                "median_ms": run.milliseconds,
                "first_step_ms": run.first,
                "losses": run.losses,
            }
            for run in runs
        },
    }
    return json.dumps(found, indent=1).encode()


def picture(runs: Sequence[Run], best_auc: float) -> bytes:
    """A PNG: loss and AUC by the number of steps, and rows in use or the time of an iteration."""
    # Not pyplot: so it needs no display, and nobody's open figures and backend are touched.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    loss, auc, third = figure.subplots(1, 3)
    for run, style in zip(runs, cycle(("-", "--", ":"))):
        _draw_loss(loss, run, style)
        auc.plot(list(run.auc), list(run.auc.values()), style, marker="o", label=run.name)
    auc.axhline(best_auc, color="0.6", linewidth=0.8, label="the hidden model")
    loss.set(title="training", xlabel="step", ylabel="log loss (nats)")
    auc.set(title="held-out clicks", xlabel="step", ylabel="AUC")
    for axes in (loss, auc):
        axes.grid(alpha=0.3)
        axes.legend()
    if any(run.rows for run in runs):
        for run in runs:
            third.plot(list(run.rows), list(run.rows.values()), marker="o", label=run.name)
        third.set(title="rows in use", xlabel="step", ylim=(0, None))
        third.grid(alpha=0.3)
    else:
        _draw_times(third, runs)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)  # drawn by the Agg backend
    return png.getvalue()


def _draw_loss(axes: Any, run: Run, style: str) -> None:
    width = max(1, len(run.losses) // 50)
    smooth = np.convolve(run.losses, np.full(width, 1 / width), mode="valid")
    steps = range(width, len(run.losses) + 1)
    axes.plot(steps, smooth, style, linewidth=1.5, label=f"{run.name}, mean of {width} steps")


def _draw_times(axes: Any, runs: Sequence[Run]) -> None:
    names = [run.name.replace(", ", "\n") for run in runs]
    times = [run.milliseconds for run in runs]
    model = [ms["forward"] + ms["backward"] for ms in times]
    steps = [ms["optimizer"] for ms in times]
    below = axes.bar(names, model, 0.5, color="0.75", label="forward and backward")
    above = axes.bar(names, steps, 0.5, bottom=model, color="C3", label="optimizer")
    for bars in (below, above):
        axes.bar_label(bars, fmt="%.1f ms", label_type="center")
    axes.set(title="an iteration, medians", ylabel="ms")
    axes.margins(y=0.25)
    axes.legend(loc="upper right")
