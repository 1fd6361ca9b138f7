"""Arguments of MXNet's optimizers and schedulers: what each takes, its default, how it acts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from fusestep.nn import mxnet as mx
from fusestep.ops import RowTensor

S = mx.lr_scheduler
F16, F32, F64 = (np.dtype(f"f{size}") for size in (2, 4, 8))
LARGEST = float(np.finfo(F32).max)
REQUIRED = object()

# The forms in which an optimizer computes; tests that hold for all of them run with each.
KINDS: dict[str, Callable[..., Any]] = {
    "Adam": mx.Adam, "Adam 1.9": partial(mx.Adam, compat="1.9"),
    "Adam unfused": partial(mx.Adam, use_fused_step=False), "AdamW": mx.AdamW,
}  # fmt: skip


def ones(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.ones(shape, dtype)


def random(*shape: int, seed: int = 1, dtype: Any = F32) -> np.ndarray:
    return np.array(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def rows(indices: Any, shape: tuple[int, ...] = (4, 3), dtype: Any = F32) -> RowTensor:
    values = random(len(indices), *shape[1:], seed=7, dtype=dtype)
    return RowTensor(np.array(indices, np.int64), values, shape)


def counts_of(opt: mx.Optimizer) -> tuple[int, dict[Any, int]]:
    return opt.num_update, dict(opt._index_update_count)


# What each kind of argument refuses: the value, the error, and what its text says of the argument.

Refused = list[tuple[Any, type[Exception], str]]
TYPE = "has a wrong type: expected"
NUMBER: Refused = [
    ("1", TypeError, f"{TYPE} a number, got str"), (True, TypeError, f"{TYPE} a number, got bool"),
    (1e39, ValueError, "is too large: expected a float32 number"),
    (ones(2), ValueError, "has a wrong shape: expected a scalar"),
]  # fmt: skip
FINITE: Refused = [*NUMBER, (np.nan, ValueError, "is not finite"),
                   (-np.inf, ValueError, "is not finite")]  # fmt: skip
NONE: Refused = [(None, TypeError, f"{TYPE} .*, got NoneType")]
NEGATIVE: Refused = [(-0.1, ValueError, "is out of range: expected at least 0.*, got -0.1")]
FLOAT_AS_INT: Refused = [
    (1.0, TypeError, f"{TYPE} an int, got float"), (True, TypeError, f"{TYPE} an int, got bool"),
    (None, TypeError, f"{TYPE} an int, got NoneType"),
]  # fmt: skip
BELOW_0: Refused = [(-1, ValueError, "is out of range: expected at least [01], got -1")]
FLAG: Refused = [(1, TypeError, f"{TYPE} a bool, got int"),
                 ("no", TypeError, f"{TYPE} a bool, got str")]  # fmt: skip
BETA = "is out of range: .*at least 0 and below 1 in float32"
REFUSED: dict[str, Refused] = {
    "number": FINITE + NONE,
    "number or None": FINITE,
    "scale": NUMBER + NONE,
    "at least 0": FINITE + NONE + NEGATIVE,
    "rate": FINITE + NEGATIVE,
    "beta": [*FINITE, *NONE, *NEGATIVE, (1.0, ValueError, BETA), (1 - 1e-9, ValueError, BETA)],
    "epsilon": [*FINITE, *NONE, *NEGATIVE, (1e-46, ValueError, "is 0 in float32: .*or 0 itself")],
    "factor": [*FINITE, *NONE, *NEGATIVE, (1.1, ValueError, "is out of range: .* at most 1")],
    "power": [*FINITE, *NONE, (0, ValueError, "is out of range: expected above 0")],
    "count": FLOAT_AS_INT + BELOW_0,
    "positive int": [*FLOAT_AS_INT, *BELOW_0, (0, ValueError, "is out of range: .*at least 1")],
    "aggregate": [*BELOW_0, (2.5, TypeError, f"{TYPE} an int"), (np.nan, TypeError, TYPE)],
    "flag": FLAG + NONE,
    "flag or None": FLAG,
    "names": [(["w"], TypeError, f"{TYPE} a dict of names"), ({0: 1}, TypeError, TYPE)],
    "parameters": [
        *((x, TypeError, f"{TYPE} a dict of parameters") for x in (5, False, [(0, 3)], "x")),
        ({0: 3}, TypeError, f"{TYPE} an object with lr_mult and wd_mult, got int")],
    "multipliers": [
        *((x, TypeError, f"{TYPE} a dict of numbers") for x in (None, [(0, 1.0)], 2.0)),
        ({0: -1.0}, ValueError, "is out of range"), ({0: np.nan}, ValueError, "is not finite"),
        ({0: "2"}, TypeError, TYPE), ({0: None}, TypeError, TYPE)],
    "scheduler": [
        (x, TypeError, f"{TYPE} an LRScheduler or a callable")
        for x in (0.1, "factor", S.FactorScheduler, [0.1, 0.2])],
    "compat": [(x, ValueError, "is unknown: expected '2.0' or '1.9'") for x in ("1.8", 2.0, None)],
    "mode": [(x, ValueError, "is unknown: .*linear") for x in ("cubic", 1, None)],
    "steps": [
        ([], TypeError, f"{TYPE} a non-empty list of ints, got an empty list"),
        (3, TypeError, f"{TYPE} .*got int"), ([2, 2], ValueError, "is not increasing"),
        ([3, 2], ValueError, r"is not increasing: .*got \[3, 2\]"), ([1.5], TypeError, TYPE),
        ([0, 2], ValueError, "is out of range")],
    "nothing": [(object(), TypeError, "is not supported: expected None, got object; .*_mult")],
}  # fmt: skip

# What each kind takes, where that is a range.
TAKEN: dict[str, Any] = {
    "number": st.floats(-LARGEST, LARGEST),
    "number or None": st.none() | st.floats(-LARGEST, LARGEST),
    "scale": st.floats(-LARGEST, LARGEST) | st.sampled_from([np.inf, -np.inf]),
    "at least 0": st.floats(0, LARGEST), "rate": st.floats(0, LARGEST),
    "beta": st.floats(0, float(np.nextafter(F32.type(1), F32.type(0)))),
    "epsilon": st.just(0.0) | st.floats(1e-45, LARGEST), "factor": st.floats(0, 1),
    "power": st.floats(1e-30, LARGEST), "count": st.integers(0, 2**40),
    "positive int": st.integers(1, 2**40), "aggregate": st.just(np.inf) | st.integers(0, 2**40),
    "flag": st.booleans(), "steps": st.sets(st.integers(1, 2**40), min_size=1).map(sorted),
}  # fmt: skip


@dataclass(frozen=True)
class Option:
    """An argument. `moved` is a value that must change the numbers of a run, or the rates of a
    scheduler, in which both have what is `beside`; None: it changes none."""

    takes: str
    default: Any
    moved: Any = None
    beside: Mapping[str, Any] = field(default_factory=dict)


HELD = {0: SimpleNamespace(lr_mult=2.0, wd_mult=1.0)}
BASE = {
    "rescale_grad": Option("number", 1.0, 0.5),
    "param_idx2name": Option("names", None, {0: "a_bias"}, {"compat": "1.9", "wd": 0.3}),
    "wd": Option("at least 0", 0.0, 0.3), "clip_gradient": Option("number or None", None, 0.3),
    "learning_rate": Option("rate", None, 0.02),
    "lr_scheduler": Option("scheduler", None, S.FactorScheduler(1, 0.5)),
    "sym": Option("nothing", None), "begin_num_update": Option("count", 0, 3),
    "multi_precision": Option("flag", False), "param_dict": Option("parameters", None, HELD),
    "aggregate_num": Option("aggregate", None), "use_fused_step": Option("flag or None", None),
}  # fmt: skip
OF_19 = Option("compat", "2.0", "1.9", {"wd": 0.3, "clip_gradient": 0.5})
RATES = {"learning_rate": BASE["learning_rate"], "beta1": Option("beta", 0.9, 0.8),
         "beta2": Option("beta", 0.999, 0.99)}  # fmt: skip
OPTIONS: dict[type, dict[str, Option]] = {
    mx.Optimizer: BASE,
    mx.Adam: {
        **RATES,
        "epsilon": Option("epsilon", 1e-8, 0.1),
        "lazy_update": Option("flag or None", None, True),
        "use_fused_step": Option("flag or None", True),  # acts: it has a reference of its own
    },
    mx.AdamW: {
        **RATES, "epsilon": Option("epsilon", 1e-6, 0.1),
        "correct_bias": Option("flag", True, False), "use_fused_step": Option("flag or None", True),
    },
}  # fmt: skip
# Arguments that are handed on, of which AdamW checks one by itself.
HANDED_ON: dict[type, dict[str, Option]] = {
    mx.Optimizer: {"compat": Option("compat", "2.0")},
    mx.Adam: {**BASE, **OPTIONS[mx.Adam], "compat": OF_19},
    mx.AdamW: {
        **BASE, **OPTIONS[mx.AdamW], "rescale_grad": Option("scale", 1.0, 0.5),
        "param_idx2name": Option("names", None), "compat": Option("compat", "2.0")},
}  # fmt: skip

WARM = {"warmup_steps": 6, "base_lr": 0.5}
WARM_UP = {
    "warmup_steps": Option("count", 0, 5), "warmup_begin_lr": Option("at least 0", 0, 0.25, WARM),
    "warmup_mode": Option("mode", "linear", "constant", WARM),
}  # fmt: skip
BASE_RATE = {"base_lr": Option("at least 0", 0.01, 0.5)}
FALL = {"max_update": Option("positive int", REQUIRED, 12), **BASE_RATE}
FINAL = {"final_lr": Option("at least 0", 0, 0.005)}
FACTOR = {"factor": Option("factor", 1, 0.5)}
OF_SCHEDULERS: dict[type, dict[str, Option]] = {
    S.LRScheduler: {**BASE_RATE, **WARM_UP},
    S.FactorScheduler: {
        "step": Option("positive int", REQUIRED, 5, {"factor": 0.5}), **FACTOR,
        "stop_factor_lr": Option("at least 0", 1e-8, 0.004, {"factor": 0.5}),
        **BASE_RATE, **WARM_UP},
    S.MultiFactorScheduler: {
        "step": Option("steps", REQUIRED, [4], {"factor": 0.5}), **FACTOR, **BASE_RATE, **WARM_UP},
    S.PolyScheduler: {**FALL, "pwr": Option("power", 2, 1.0), **FINAL, **WARM_UP},
    S.CosineScheduler: {**FALL, **FINAL, **WARM_UP},
}  # fmt: skip
# What a scheduler cannot be made without.
NEEDED: dict[type, dict[str, Any]] = {
    S.LRScheduler: {}, S.FactorScheduler: {"step": 3}, S.MultiFactorScheduler: {"step": [2, 5]},
    S.PolyScheduler: {"max_update": 8}, S.CosineScheduler: {"max_update": 8},
}  # fmt: skip
SCHEDULERS = [cls for cls in NEEDED if cls is not S.LRScheduler]
