"""Runs recorded from MXNet 1.9.1 and 2.0.0b1, and what the reference makes of their arguments.

The files and their format are described in ``data/README.md``.
"""

from functools import cached_property
from typing import Any

import numpy as np
import recorded
import reference_mxnet
from recorded import Gradient, Trace
from reference_mxnet import Hyper, Optimizer, Schedule

# What `Hyper` calls otherwise, and what is no argument of a step.
OTHER_NAMES = {"lazy_update": "lazy", "use_fused_step": "fused"}
STATES = ("m", "v", "w32")

# What fusestep decides otherwise: 16-bit weights are computed in float32, with or without a
# master copy; equal ids are summed, where MXNet makes one step each, or has them race.
HALF = {"mx191_f16_nomp", "mx200b1_f16_nomp"}
DUPLICATES = {"mx191_rsp_lazy_dup", "mx200b1_rsp_lazy_dup"}
# Elements of all sizes.
SPREAD = {
    f"{version}_dense_special{kind}" for version in ("mx191", "mx200b1") for kind in ("", "_clip")
}
# (run, state, step) -> element: subnormal, which the threads of 2.0.0b1 flush to zero.
FLUSHED = {("mx200b1_dense_special", "v", 1): 9}
# The fused AdamW of 2.0 has a form of its own, and its rounding.
LERPED = {"mx200b1_adamw_nobias"}


class Run(recorded.Run):
    """One recorded optimizer with its weights, called by their indices 0, 1, ... States are ``m``,
    ``v`` and, where there is a float32 master copy, ``w32``."""

    @property
    def compat(self) -> str:
        """The version, as far as they differ."""
        return "1.9" if self.meta["mxnet"].startswith("1.9") else "2.0"

    @property
    def dtype(self) -> np.dtype:
        """Of the weights and gradients."""
        return np.dtype(self.meta["dtype"])

    @property
    def names(self) -> dict[int, str]:
        """Names of indices."""
        return {int(index): name for index, name in self.meta["idx2name"].items()}

    @property
    def multipliers(self) -> dict[str, dict[int | str, float]]:
        """What ``set_lr_mult`` and ``set_wd_mult`` were called with, ``lr`` and ``wd``."""
        return {key: _by_index(self.meta[f"{key}_mult"]) for key in ("lr", "wd")}

    @cached_property
    def schedule(self) -> Schedule | None:
        """The scheduler as a function of the update, by the reference."""
        if self.meta["scheduler"] is None:
            return None
        arguments = dict(self.meta["scheduler"])
        return reference_mxnet.schedule(arguments.pop("cls"), **arguments)

    def updated(self, t: int) -> list[int]:
        """The indices that took part in step t = 1, 2, ..."""
        return self.meta["plan"][t - 1]

    def at(self, t: int, index: int) -> dict[str, float]:
        """Recorded ``lr``, ``wd``, ``t`` and ``num_update`` of an index at step t = 1, 2, ..."""
        return self.meta["steps"][t - 1][str(index)]

    def restarts(self, t: int) -> bool:
        """Whether the states were saved and loaded before step t = 1, 2, ..."""
        return str(t - 1) in self.meta["restart"]


def runs() -> dict[str, Run]:
    """Every recorded run, by the name of its file."""
    return recorded.runs("mxnet", Run, _trace)


def hyper(run: Run) -> Hyper:
    """The arguments as the reference names them, after the defaults of class and version."""
    decoupled = run.meta["class"] == "AdamW"
    given = {OTHER_NAMES.get(name, name): value for name, value in run.hyper.items()}
    given.pop("learning_rate")
    defaults = {"epsilon": 1e-6 if decoupled else 1e-8, "lazy": run.compat == "1.9"}
    return Hyper(compat=run.compat, decoupled=decoupled, **(defaults | given))


def optimizer(run: Run) -> Optimizer:
    """The reference before the first step."""
    rate = run.schedule or run.hyper["learning_rate"]
    multipliers = {f"{key}_mult": table for key, table in run.multipliers.items()}
    return Optimizer(hyper(run), rate, run.names, **multipliers)


def variables(run: Run) -> list[reference_mxnet.Variable]:
    """The weights of the reference before the first step."""
    master = run.meta["multi_precision"]
    return [reference_mxnet.variable(x.weights[0], run.dtype, master) for x in run.traces]


def lerped(trace: Trace, t: int) -> dict[str, np.ndarray]:
    """The sizes whose rounding is in the values of `LERPED` after step t = 1, 2, ... AdamW computes
    ``beta2 * (v - x*x) + x*x``, so ``v`` holds the rounding of x*x, a thousand times its own in the
    first step, and half of that goes from its root into the way of the weight."""
    x = np.abs(np.stack(trace.gradients[:t]).astype(np.float64))
    way = np.abs(np.diff(trace.weights[: t + 1].astype(np.float64), axis=0))
    lost = x.max(0) ** 2 / trace.states["v"][:t]
    return {"m": x.max(0), "v": x.max(0) ** 2, "w": (0.5 * lost * way).sum(0)}


def flushed(run: Run, entry: str, t: int, found: np.ndarray) -> np.ndarray:
    """What was computed for step t = 1, 2, ..., with zeros where MXNet flushes to zero."""
    element = FLUSHED.get((run.name, entry, t))
    if element is None:
        return found
    found = found.copy()
    assert abs(found[element]) < np.finfo(np.float32).tiny
    found[element] = 0
    return found


def _by_index(table: dict[str, float]) -> dict[int | str, float]:
    """Indices are text in JSON."""
    return {int(key) if key.isdecimal() else key: value for key, value in table.items()}


def _trace(arrays: dict[str, np.ndarray], i: int, meta: dict[str, Any]) -> Trace:
    """Weight `i` of a file."""
    gradients: tuple[Gradient, ...]
    if meta["grad_kind"][i] == "row_sparse":
        gradients = tuple((arrays[f"p{i}_gi{t}"], arrays[f"p{i}_gv{t}"]) for t in range(meta["T"]))
    else:
        gradients = tuple(arrays[f"p{i}_g"])
    states = {name: arrays[f"p{i}_{name}"] for name in STATES if f"p{i}_{name}" in arrays}
    return Trace(arrays[f"p{i}_w"], gradients, states)
