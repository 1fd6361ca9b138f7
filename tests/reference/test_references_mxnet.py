"""The float64 reference of MXNet's Adam and AdamW against runs of MXNet.

The library takes no part: the reference is stepped from the recorded start with the recorded
gradients, and everything that was recorded is compared. What remains is MXNet's own rounding,
so an element may also miss by two units in the last place of every value that it has had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import recorded_mxnet
import reference_mxnet
from recorded import assert_close_recorded
from recorded_mxnet import (
    DUPLICATES,
    FLUSHED,
    HALF,
    LERPED,
    SPREAD,
    Run,
    Trace,
    assert_each_close,
    flushed,
)
from reference_mxnet import Variable

RUNS = recorded_mxnet.runs()


def values(x: Variable) -> dict[str, np.ndarray]:
    """A weight of the reference as a trace names its arrays."""
    found = {"w": x.weight, "m": x.m, "v": x.v}
    return found | {"w32": x.w} if x.master else found


def recorded_at(trace: Trace, t: int) -> dict[str, np.ndarray]:
    """What was recorded after step t = 1, 2, ..."""
    return {"w": trace.weights[t]} | {name: x[t - 1] for name, x in trace.states.items()}


def compare(run: Run, found: Any, expected: np.ndarray, label: str, reached: Any) -> None:
    """Every element, at the precision of what was recorded."""
    if expected.dtype == np.float64:
        np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-15, err_msg=label)
        return
    with np.errstate(over="ignore"):
        found = np.asarray(found).astype(expected.dtype)
    if run.name in SPREAD:
        assert_each_close(found, expected, label, reached)
    else:
        assert_close_recorded(found, expected, expected.dtype, label, reached)


def test_what_is_named_was_recorded() -> None:
    assert len(RUNS) == 54
    assert RUNS.keys() >= HALF | DUPLICATES | SPREAD | LERPED
    assert RUNS.keys() >= {run for run, *_ in FLUSHED}


@pytest.mark.parametrize("name", [name for name in RUNS if name not in HALF | DUPLICATES])
def test_run(name: str) -> None:
    run = RUNS[name]
    optimizer, held = recorded_mxnet.optimizer(run), recorded_mxnet.variables(run)
    reached = [{entry: np.abs(x) for entry, x in values(x).items()} for x in held]
    for t in range(1, run.steps + 1):
        for i in run.updated(t):
            optimizer.update(i, held[i], run.traces[i].gradients[t - 1])
            assert_same_bookkeeping(run, optimizer, t, i)
        for i, (x, trace) in enumerate(zip(held, run.traces, strict=True)):
            found, expected = values(x), recorded_at(trace, t)
            assert found.keys() == expected.keys()
            for entry, wanted in expected.items():
                with np.errstate(invalid="ignore"):
                    reached[i][entry] = reached[i][entry] + np.abs(found[entry])
                label = f"{entry} of weight {i} after step {t}"
                lost = recorded_mxnet.lerped(trace, t)[entry] if name in LERPED else 0.0
                compare(
                    run,
                    flushed(run, entry, t, found[entry]),
                    wanted,
                    label,
                    reached[i][entry] + lost,
                )


def assert_same_bookkeeping(run: Run, optimizer: reference_mxnet.Optimizer, t: int, i: int) -> None:
    """Rate, decay and counters of an index."""
    at = run.at(t, i)
    assert optimizer.counts[i] == at["t"]
    assert optimizer.num_update == at["num_update"]
    assert optimizer.lr(i) == pytest.approx(at["lr"], rel=1e-14)
    assert optimizer.wd(i) == at["wd"]


# ----------------------------------------------------------------------------------- What is left


def follow(run: Run, step: Callable[[int, np.ndarray, Any, np.ndarray, np.ndarray], Any]) -> None:
    """A run of one weight that follows from ``step(t, w, g, m, v)``."""
    (trace,) = run.traces
    held = trace.weights[0], *(np.zeros_like(x[0]) for x in trace.states.values())
    for t in range(1, run.steps + 1):
        w, *moments = held
        held = step(t, w, trace.gradients[t - 1], *moments)
        for found, (entry, wanted) in zip(held, recorded_at(trace, t).items(), strict=True):
            assert_close_recorded(
                np.asarray(found).astype(wanted.dtype), wanted, wanted.dtype, f"{entry}{t}"
            )


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


@pytest.mark.parametrize("name", sorted(DUPLICATES))
def test_rows_without_duplicates_are_right(name: str) -> None:
    """A row is compared until a gradient names it twice."""
    run = RUNS[name]
    (trace,), (x,) = run.traces, recorded_mxnet.variables(run)
    optimizer, sound = recorded_mxnet.optimizer(run), np.ones(len(x.w), bool)
    for t, (ids, rows) in enumerate(trace.gradients, 1):
        optimizer.update(0, x, (ids, rows))
        sound &= np.bincount(ids, minlength=len(x.w)) < 2
        for entry, wanted in recorded_at(trace, t).items():
            found = values(x)[entry][sound].astype(np.float32)
            assert_close_recorded(found, wanted[sound], np.float32, f"{entry} after step {t}")
    assert 0 < np.count_nonzero(sound) < len(sound)


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
