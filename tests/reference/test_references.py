"""The float64 references against runs of PyTorch, pytorch_optimizer and optax; their branches.

The library takes no part: a reference is stepped from the recorded start with the recorded
gradients, and everything that was recorded is compared. What remains is the rounding of the
original system, so an element may also miss by two units in the last place of every value that
it has had. MindSpore and MXNet were recorded for what the library has of them: it must meet these
runs as well as the references.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import recorded
import recorded_torch
import reference
import reference_elementwise as elementwise
import reference_layerwise as layerwise

Scalars = SimpleNamespace


def bind(step: Callable[..., Any], h: Scalars, **changed: Any) -> Any:
    """A reference with the scalars that it names."""
    names = inspect.getfullargspec(step).kwonlyargs
    return partial(step, **{k: v for k, v in {**vars(h), **changed}.items() if k in names})


def compare(found: Any, expected: np.ndarray, label: str, reached: Any, slack: float = 1) -> None:
    """Every element, at the precision of what was recorded."""
    expected = expected.reshape(np.shape(found))
    if expected.dtype == np.float64:
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15, err_msg=label)
    else:
        found = np.asarray(found).astype(expected.dtype)
        recorded.assert_close_recorded(found, expected, expected.dtype, label, slack * reached)


def add_sizes(reached: list[Any], values: Any) -> list[Any]:
    """Magnitudes summed over the steps, as their rounding errors add up."""
    return [total + np.abs(x) for total, x in zip(reached, values, strict=True)]


# Where the originals carry more rounding than that, by how much; see `add_sizes`. Epsilon beside
# the root is 7e-7 of the smallest root, and the buffer cancels.
SLACK = {"torch_rmsprop_centered_mom": 3}
RUNS = recorded_torch.runs()
# Recorded beside the states: counters, norms that say how a step was made, places of factors.
BY_PRODUCTS = {"step", "RMS", "weight_norm", "adam_norm", "trust_ratio", "v_row", "v_col"}


@pytest.mark.parametrize("name", RUNS)
def test_run(name: str) -> None:
    run = RUNS[name]
    for i, trace in enumerate(run.traces):
        states = recorded_torch.states(run, i)
        assert trace.states.keys() - states.keys() <= BY_PRODUCTS
        values = [reference.wide(trace.weights[0]), *states.values()]
        reached = add_sizes([0.0] * len(values), values)
        for t in range(1, run.steps + 1):
            gradient = recorded_torch.gradients(run, t)[i]
            values = recorded_torch.formula(run, t)(values[0], gradient, *values[1:])
            reached = add_sizes(reached, values)
            expected = [trace.weights[t], *(trace.states[state][t - 1] for state in states)]
            for entry in zip(values, expected, ["w", *states], reached, strict=True):
                compare(*entry, SLACK.get(name, 1))


# ------------------------------------------------------------------- What no recording comes to


def test_elementwise_branches() -> None:
    zero, one = np.zeros(2), np.ones(2)
    for step, scalars in ((elementwise.adagrad, {}), (elementwise.proximal_adagrad, {"l1": 1.0})):
        w, accum = bind(step, Scalars(lr=0.1, l2=1.0, **scalars))(one, zero, zero)
        np.testing.assert_array_equal([w, accum], [one, zero])
    _, accum = elementwise.adagrad(one, one, one, lr=0.1, update_slots=False)
    np.testing.assert_array_equal(accum, one)
    h = Scalars(lr=1.0, rho=1.0, one_minus_rho=0.0, momentum=1.0, epsilon=1.0)
    centered = bind(elementwise.rmsprop_centered, h)
    w, *_, moment = centered(one, one, [2.0, 0.0], zero, one)  # variance -3 and 1
    np.testing.assert_array_equal([w, moment], [[1.0, -1.0], [1.0, 2.0]])
    w, *_ = bind(elementwise.rmsprop, h, epsilon=3.0)(one, one, one, zero)
    np.testing.assert_array_equal(w, one / 2)
    h = Scalars(lr=1.0, momentum=0.5, one_minus_dampening=0.1)
    new = bind(elementwise.sgd_stat, h)(one, one, [4.0, 4.0], [1.0, 0.0])
    np.testing.assert_allclose(new, [[0.0, -1.1], [1.0, 2.1], [0.0, 0.0]])


def test_lamb_ratios() -> None:
    h = {"lr": 1.0, "beta1": 0.0, "one_minus_beta1": 1.0, "beta2": 0.0, "one_minus_beta2": 1.0}
    h |= {"beta1_power": 0.0, "beta2_power": 0.0, "epsilon": 0.0, "decay": 0.0}
    zero, four = np.zeros(1), np.full(1, 4.0)
    for step in (layerwise.lamb, partial(layerwise.lamb_clipped, norm_decay=0.5)):
        assert step(zero, four, zero, zero, **h)[0] == -1.0
    assert layerwise.lamb(9 * four, four, zero, zero, **h)[0] == 0.0
    clipped = partial(layerwise.lamb_clipped, 9 * four, four, zero, zero, **h)
    assert clipped(norm_decay=0.0)[0] == 26.0
    assert clipped(norm_decay=0.5)[0] == 36.0 - 36.0 / 19.0
    h["beta1"] = h["beta2"] = 1.0
    assert layerwise.lamb_clipped(four, zero, four, 4 * four, norm_decay=0.0, **h)[0] == 3.0


def test_adafactor_branches() -> None:
    h = {"lr": 0.1, "beta2": 0.5, "one_minus_beta2": 0.5}
    w, g, square = np.ones(3), np.full(3, 0.3), np.full(3, 0.2)
    bare, compressed = (
        layerwise.adafactor(w, g, None, square, compression=flag, **h) for flag in (False, True)
    )
    np.testing.assert_array_equal(compressed[0], bare[0])
    np.testing.assert_array_equal(compressed[2], np.float16(bare[2]))
    small, *_ = layerwise.adafactor(0 * w, g, None, square, epsilon2=0.5, **h)
    np.testing.assert_allclose(small, (bare[0] - w) / 2)


def test_global_norm() -> None:
    rows = (np.array([2, 0, 2]), np.array([[1.0], [4.0], [2.0]]))
    assert layerwise.global_norm([rows, np.full(3, 2.0), np.zeros((0, 4))]) == np.sqrt(37)
    (indices, values), dense = layerwise.clip_by_global_norm([rows, np.full(6, 2.0)], 3.5)
    np.testing.assert_array_equal(indices, rows[0])
    np.testing.assert_allclose(values, rows[1] / 2)
    np.testing.assert_allclose(dense, 1.0)
    assert layerwise.clip_by_global_norm([np.ones(4)], 3.0)[0].tolist() == [1.0] * 4
