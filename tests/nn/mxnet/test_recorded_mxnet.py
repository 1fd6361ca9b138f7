"""The library against runs of MXNet 1.9.1 and 2.0.0b1: every step, array and element."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import recorded_mxnet
import reference_mxnet
from fusestep.nn import RowTensor
from fusestep.nn import mxnet as mx
from recorded import Gradient, Trace, assert_close_recorded
from recorded_mxnet import DUPLICATES, FLUSHED, HALF, LERPED, SPREAD, Run
from reference import wide

RUNS = recorded_mxnet.runs()
# What the library decides otherwise is compared with the reference, which has the decision.
DECIDED = HALF | DUPLICATES

# ----------------------------------------------------------------------------------- The library


def build(run: Run, **changed: Any) -> mx.Optimizer:
    """The optimizer of a run."""
    arguments = dict(run.hyper)
    if run.meta["scheduler"] is not None:
        given = dict(run.meta["scheduler"])
        arguments["lr_scheduler"] = getattr(mx.lr_scheduler, given.pop("cls"))(**given)
    opt = getattr(mx, run.meta["class"])(
        **arguments, param_idx2name=run.names, multi_precision=run.meta["multi_precision"],
        compat=run.compat, **changed)  # fmt: skip
    # Without a call the defaults by name of 1.9.1 stay.
    if run.multipliers["lr"]:
        opt.set_lr_mult(run.multipliers["lr"])
    if run.multipliers["wd"]:
        opt.set_wd_mult(run.multipliers["wd"])
    return opt


def as_library(g: Gradient, shape: tuple[int, ...]) -> Any:
    """A recorded gradient as the library takes it."""
    return RowTensor(*g, shape) if isinstance(g, tuple) else g


class Session:
    """A run by the library: the weights, and whatever has their states."""

    def __init__(self, run: Run, opt: mx.Optimizer) -> None:
        self.run = run
        self.opt = opt
        self.weights = [trace.weights[0].copy() for trace in run.traces]
        self.states = self.initial()

    def initial(self) -> Any:
        """States before the first step."""
        return [self.opt.create_state_multi_precision(i, w) for i, w in enumerate(self.weights)]

    def gradients(self, t: int) -> list[Any]:
        """The gradients of step t = 1, 2, ..., for every weight."""
        pairs = zip(self.run.traces, self.weights, strict=True)
        return [as_library(trace.gradients[t - 1], w.shape) for trace, w in pairs]

    def step(self, t: int) -> None:
        """Step t = 1, 2, ... of the weights that take part."""
        raise NotImplementedError

    def restart(self) -> None:
        """Save and load what there is to be saved; nothing here."""

    def values(self, i: int) -> dict[str, np.ndarray]:
        """Copies of a weight and its states, as a trace names them."""
        state, found = self.states[i], {"w": self.weights[i]}
        if self.run.meta["multi_precision"]:
            found["w32"], state = state
        return {name: x.copy() for name, x in (found | {"m": state[0], "v": state[1]}).items()}


class OneByOne(Session):
    """A call for every index."""

    def step(self, t: int) -> None:
        gradients = self.gradients(t)
        for i in self.run.updated(t):
            self.opt.update_multi_precision(i, self.weights[i], gradients[i], self.states[i])


class ByUpdater(Session):
    """All indices in a call of an updater, which makes the states."""

    def initial(self) -> Any:
        self.updater = mx.get_updater(self.opt)
        return self.updater.states

    def step(self, t: int) -> None:
        indices, gradients = self.run.updated(t), self.gradients(t)
        self.updater(indices, *([x[i] for i in indices] for x in (gradients, self.weights)))
        self.states = self.updater.states

    def restart(self) -> None:
        """In a new updater with a new optimizer."""
        saved = self.updater.get_states()
        self.opt = build(self.run)
        self.updater = mx.Updater(self.opt)
        self.updater.set_states(saved)


WAYS = (OneByOne, ByUpdater)


# ------------------------------------------------------------------------------------ Comparison

# Cases in which MXNet's kernels have another form than its Adam for dense weights, and the library
# has one for all: they agree to two units in the last place, AdamW to a thousand. Everything else
# is equal to the last bit.
OTHER_FORM = {
    "rsp_std": "squares x*x first, where the dense kernel has ((1 - beta2)*x)*x",
    "rsp_lazy_all": "squares x*x first in 1.9.1, where it clips",
    "unfused_clip_wd": "composed operations: x*x first, and divides before it multiplies",
    "unfused_rsp": "composed operations", "adamw_unfused": "composed operations",
    "adamw_nobias": "moments as beta*(m - x) + x",
}  # fmt: skip


def values(trace: Trace, entry: str) -> np.ndarray:
    """The recorded arrays after 0, 1, 2, ... steps."""
    if entry == "w":
        return trace.weights
    first = trace.weights[:1] if entry == "w32" else np.zeros_like(trace.states[entry][:1])
    return np.concatenate([first.astype(trace.states[entry].dtype), trace.states[entry]])


def comparable(run: Run, trace: Trace, entry: str, t: int) -> Any:
    """Which elements are compared: all, but moments of weights that have become NaN. MXNet adds ``0
    * weight`` to their gradients, here nothing is added without weight decay."""
    if run.name not in SPREAD or entry == "w":
        return ...
    return ~np.isnan(values(trace, "w")[t - 1])


def close(run: Run, found: np.ndarray, expected: np.ndarray, label: str, lost: Any) -> None:
    """Every element: its bits, or the precision of what was recorded."""
    __tracebackhide__ = True
    assert found.dtype == expected.dtype
    if run.meta["case"] in OTHER_FORM:
        assert_close_recorded(found, expected, expected.dtype, label, lost)
    else:
        np.testing.assert_array_equal(found, expected, err_msg=label)


def assert_same_bookkeeping(run: Run, opt: mx.Optimizer, t: int, i: int) -> None:
    """Rate, decay and counters of an index after it took part in step t = 1, 2, ..."""
    at = run.at(t, i)
    assert opt._index_update_count[i] == at["t"]
    assert opt.num_update == at["num_update"]
    assert opt._get_lr(i) == pytest.approx(at["lr"], rel=1e-12)
    assert opt._get_wd(i) == pytest.approx(at["wd"], rel=1e-12)


def test_what_is_named_was_recorded() -> None:
    assert len(RUNS) == 54
    assert {run.meta["case"] for run in RUNS.values()} >= OTHER_FORM.keys()
    assert RUNS.keys() >= HALF | DUPLICATES | SPREAD | LERPED | {run for run, *_ in FLUSHED}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in RUNS if name not in DECIDED])
def test_run(name: str, way: type[Session]) -> None:
    run = RUNS[name]
    session = way(run, build(run))
    for t in range(1, run.steps + 1):
        if run.restarts(t):
            session.restart()
        session.step(t)
        for i, trace in enumerate(run.traces):
            found = session.values(i)
            assert found.keys() == {"w", *trace.states}
            for entry, computed in found.items():
                label = f"{entry} of weight {i} after step {t}"
                expected = values(trace, entry)[t]
                x = recorded_mxnet.flushed(run, entry, t, computed)
                known = comparable(run, trace, entry, t)
                lost = recorded_mxnet.lerped(trace, t)[entry] if name in LERPED else 0.0
                close(run, x[known], expected[known], label, lost)
            if i in run.updated(t):
                assert_same_bookkeeping(run, session.opt, t, i)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", sorted(DECIDED))
def test_run_as_decided(name: str, way: type[Session]) -> None:
    """Every step from what the library had before it: a rounding of float16 is not carried on."""
    run = RUNS[name]
    session = way(run, build(run))
    assert len(run.traces) == 1
    reference, (x,) = recorded_mxnet.optimizer(run), recorded_mxnet.variables(run)
    for t in range(1, run.steps + 1):
        before = {"m": x.m, "v": x.v} if t == 1 else session.values(0)
        x.w, x.m, x.v = (wide(y) for y in (session.weights[0], before["m"], before["v"]))
        reference.update(0, x, run.traces[0].gradients[t - 1])
        session.step(t)
        found = session.values(0)
        for entry, y in {"m": x.m, "v": x.v}.items():
            label, reached = f"{entry} after step {t}", np.abs(before[entry])
            assert_close_recorded(found[entry], y.astype(np.float32), np.float32, label, reached)
        assert_close_recorded(found["w"], x.weight, run.dtype, f"w after step {t}")
        assert_same_bookkeeping(run, session.opt, t, 0)


# What MXNet does where the library decides otherwise


def follow(run: Run, step: Callable[[int, np.ndarray, Any, np.ndarray, np.ndarray], Any]) -> None:
    """A run of one weight that follows from ``step(t, w, g, m, v)``."""
    (trace,) = run.traces
    held = trace.weights[0], *(np.zeros_like(x[0]) for x in trace.states.values())
    for t in range(1, run.steps + 1):
        w, *moments = held
        held = step(t, w, trace.gradients[t - 1], *moments)
        for found, entry in zip(held, ("w", *trace.states), strict=True):
            wanted = values(trace, entry)[t]
            computed = np.asarray(found).astype(wanted.dtype)
            assert_close_recorded(computed, wanted, wanted.dtype, f"{entry} after step {t}")


@pytest.mark.parametrize("name", sorted(DUPLICATES))
def test_duplicates_of_mxnet_make_one_step_each(name: str) -> None:
    run = RUNS[name]
    h = replace(recorded_mxnet.hyper(run), lazy=True)

    def one_by_one(t: int, w: Any, rows: Any, m: Any, v: Any) -> Any:
        lr = reference_mxnet.corrected(h, run.hyper["learning_rate"], t)
        for index, row in zip(*rows, strict=True):
            w, m, v = reference_mxnet.step(h, w, ([index], row[None]), m, v, lr=lr, wd=h.wd)
        return w, m, v

    follow(run, one_by_one)


@pytest.mark.parametrize("name", sorted(HALF))
def test_float16_without_master_copies_is_float16_in_every_operation(name: str) -> None:
    run = RUNS[name]
    h, half = recorded_mxnet.hyper(run), np.float16
    beta1, beta2, wd, clip = (half(x) for x in (h.beta1, h.beta2, h.wd, h.clip_gradient))

    def step(t: int, w: Any, g: Any, m: Any, v: Any) -> Any:
        lr = half(reference_mxnet.corrected(h, run.hyper["learning_rate"], t))
        if h.compat == "1.9":
            x = np.clip(g + wd * w, -clip, clip)
        else:
            x = np.clip(g, -clip, clip) + wd * w
        m = beta1 * m + (half(1) - beta1) * x
        v = beta2 * v + (half(1) - beta2) * x * x
        return w - lr * m / (np.sqrt(v) + half(h.epsilon)), m, v

    follow(run, step)
