"""Schedules one after the other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fusestep import nn

from helpers import assert_same_bits


def test_warm_up_and_cosine() -> None:
    schedule = nn.SequentialLR([nn.WarmUpLR(0.1, 5), nn.CosineDecayLR(0.01, 0.1, 20)], [5])
    for step in range(40):
        if step < 5:
            expected = 0.02 * step
        elif step < 25:
            expected = 0.055 + 0.045 * math.cos(math.pi * (step - 5) / 20)
        else:
            expected = 0.01
        assert schedule(step) == pytest.approx(expected, rel=1e-13), step


def test_each_schedule_counts_its_own_steps() -> None:
    asked: list[tuple[str, int]] = []

    def recorder(name: str) -> Callable[[int], float]:
        return lambda step: asked.append((name, step)) or 0.5  # type: ignore[func-returns-value]

    schedule = nn.SequentialLR([recorder("a"), 0.25, recorder("b")], [2, 3])
    assert [schedule(step) for step in range(6)] == [0.5, 0.5, 0.25, 0.5, 0.5, 0.5]
    assert asked == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2)]


def test_one_schedule_and_nested_ones() -> None:
    steps = np.arange(12)
    warm = nn.WarmUpLR(0.1, 4)
    assert_same_bits(nn.SequentialLR([warm], [])(steps), warm(steps))
    inner = nn.SequentialLR((warm, 0.5), (3,))
    outer = nn.SequentialLR([0.25, inner], [2])
    assert_same_bits(outer(steps), np.r_[0.25, 0.25, inner(steps[:10])])


def test_later_changes_to_the_lists_do_nothing() -> None:
    schedules, milestones = [0.5, 0.25], [2]
    schedule = nn.SequentialLR(schedules, milestones)
    schedules[0], milestones[0] = 9.0, 1
    assert schedule(np.arange(3)).tolist() == [0.5, 0.5, 0.25]


WRONG = "has a wrong type: expected"
FORMS = "a schedule, a callable of the step or a float"
ORDER = "is out of order: expected more than"
REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    ([], [], ValueError, "schedules is empty: expected at least one schedule, got none"),
    (0.5, [], TypeError, f"schedules {WRONG} a list or a tuple, got float"),
    ([0.5, 1], [3], TypeError, f"schedules[1] {WRONG} {FORMS}, got int"),
    ([0.5, [0.1]], [3], TypeError, f"schedules[1] {WRONG} {FORMS}, got list"),
    ([nn.WarmUpLR], [], TypeError, f"schedules[0] {WRONG} {FORMS}, got the class WarmUpLR"),
    ([-0.5], [], ValueError, "schedules[0] is out of range: expected at least 0, got -0.5"),
    ([math.inf], [], ValueError, "schedules[0] is not finite: expected a finite number, got inf"),
    ([0.5], 3, TypeError, f"milestones {WRONG} a list or a tuple, got int"),
    (
        [0.5, 0.5, 0.5],
        [3],
        ValueError,
        "milestones has a wrong length: expected 2, one fewer than the schedules, got 1",
    ),
    (
        [0.5],
        [3],
        ValueError,
        "milestones has a wrong length: expected 0, one fewer than the schedules, got 1",
    ),
    ([0.5, 0.5, 0.5], [3, 3], ValueError, f"milestones[1] {ORDER} 3, the one before, got 3"),
    ([0.5, 0.5, 0.5], [3, 2], ValueError, f"milestones[1] {ORDER} 3, the one before, got 2"),
    ([0.5, 0.5], [0], ValueError, "milestones[0] is out of range: expected at least 1, got 0"),
    ([0.5, 0.5], [1.0], TypeError, f"milestones[0] {WRONG} an int, got float"),
    ([0.5, 0.5], [True], TypeError, f"milestones[0] {WRONG} an int, got bool"),
]


@pytest.mark.parametrize(("schedules", "milestones", "error", "text"), REFUSED)
def test_sequential_refuses(
    schedules: Any, milestones: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(f'SequentialLR: {text}')}$"):
        nn.SequentialLR(schedules, milestones)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (None, TypeError, "has a schedule that returned no number: expected a float, got None"),
        (math.nan, ValueError, "is not finite: expected a finite number, got nan"),
        (-0.5, ValueError, "is out of range: expected at least 0 and a float32 number, got -0.5"),
    ],
)
def test_sequential_names_the_schedule_that_failed(
    value: Any, error: type[Exception], text: str
) -> None:
    schedule = nn.SequentialLR([0.5, lambda _step: value], [2])
    assert schedule(1) == 0.5
    with pytest.raises(error, match=rf"^SequentialLR: schedules\[1\] {text}$"):
        schedule(2)


def test_repr() -> None:
    found = repr(nn.CosineDecayLR(0.0, np.float64(0.1), 4))
    assert found == "CosineDecayLR(min_lr=0.0, max_lr=0.1, decay_steps=4)"
    assert repr(nn.SequentialLR([nn.WarmUpLR(0.1, 2), 0.05], [2])) == (
        "SequentialLR(schedules=(WarmUpLR(learning_rate=0.1, warmup_steps=2), 0.05), "
        "milestones=(2,))"
    )
