"""All that belongs to a table: checked by each call before it writes."""

from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any

import numpy as np
import pytest
from fusestep import nn
from fusestep.kernels.idle_table import IdleTable
from fusestep.kernels.rules.adam import ADAM
from fusestep.nn.engine.tables import LAST
from fusestep.ops.runtime import locks
from helpers import meanwhile

N, D = 300, 8
ROWS = np.array([3, 5])


def rows_of(rows: np.ndarray = ROWS, n: int = N) -> tuple[nn.RowTensor]:
    return (nn.RowTensor(rows, np.ones((len(rows), D), np.float32), (n, D)),)


def asleep(name: str = "Adam") -> tuple[np.ndarray, Any]:
    """A table most of whose rows sleep, or have never been updated, and its optimizer."""
    w = np.zeros((N, D), np.float32)
    options = {"sparse_update": "catch_up"} if name == "Adam" else {}
    opt = getattr(nn, name)([w], learning_rate=0.1, **options)
    for rows in (np.arange(N), ROWS):
        opt(rows_of(rows))
    return w, opt


CHANGES: dict[str, Callable[[np.ndarray], Any]] = {
    "smaller": lambda x: x.resize((2, 2)[: x.ndim], refcheck=False),
    "larger": lambda x: x.resize((2 * N, D)[: x.ndim], refcheck=False),
    "shape": lambda x: setattr(x, "shape", (2, -1)), "read-only": lambda x: x.setflags(write=False),
}  # fmt: skip
CALLS: dict[str, Callable[[Any], Any]] = {
    "flush": lambda opt: opt.flush(),
    "prepare": lambda opt: opt.prepare(opt.parameters[0], np.arange(2)),
    "state_dict": lambda opt: opt.state_dict(flush=True),
    "reset_rows": lambda opt: opt.reset_rows(opt.parameters[0], ROWS, 0.5),
    "copy_rows": lambda opt: opt.copy_rows(opt.parameters[0], ROWS, ROWS + 2),
    "grow": lambda opt: opt.grow(opt.parameters[0], 2 * N + 5), "step": lambda opt: opt(rows_of()),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("which", ["w", "moment1", "moment2", LAST.name])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["Adam", "LazyAdam"])
def test_an_array_that_was_changed_in_place(name: str, change: str, which: str, call: str) -> None:
    """Refused before a number of any array has changed, and of those beside it in memory."""
    w, opt = asleep(name)
    if name == "LazyAdam" and (which == LAST.name or call in ("flush", "prepare", "state_dict")):
        return  # it has none, and nothing is due
    if which != "w" and change in ("smaller", "larger"):
        return  # NumPy refuses it: the optimizer's own arrays are parts of larger memory
    array = w if which == "w" else opt._states[which][0]
    opt.prepare(opt.parameters[0], ROWS)  # the table is known
    CHANGES[change](array)
    arrays = [w, *(own[0] for own in opt._states.values())]
    before, others = [x.copy() for x in arrays], [np.full(9_000, 7.0) for _ in range(20)]
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        CALLS[call](opt)
    for x, y in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(x, y)
    assert all((x == 7.0).all() for x in others)


@pytest.mark.parametrize("last", [-1, -(2**31), 3, 2**31 - 1])
def test_last_steps_out_of_range(last: int) -> None:
    """Those that others have written: refused, or (in a table that is known) within memory."""
    for call in ("flush", "state_dict", "prepare", "grow", "step", ""):
        w, opt = asleep()
        if not call:
            opt.prepare(opt.parameters[0], ROWS)
        before, opt._states[LAST.name][0][9] = w.copy(), last
        if call:
            opt._bound = {}
            with pytest.raises(ValueError, match="has rows of another time"):
                CALLS[call](opt)
            np.testing.assert_array_equal(w, before)
    opt.prepare(opt.parameters[0], np.arange(N))
    opt(rows_of(np.arange(N)))
    assert np.isfinite(w).all()


def test_scalars_of_a_count_that_jumps() -> None:
    """Steps that were never given take no time: no more than can be missed are taken in."""
    table = IdleTable(ADAM, np.float32)
    table.advance(2**30)
    assert table.step == 2**30
    table.advance(5)
    assert table.step == 5


def test_a_call_within_a_call_that_locks() -> None:
    """It is refused, and leaves no lock behind for other threads."""
    w = np.zeros((N, D), np.float32)
    opt = nn.LazyAdam([w], use_locking=True)
    with locks.exclusive(), pytest.raises(RuntimeError, match="within another one"):
        opt.reset_rows(w, ROWS, 0.5)
    done = list[bool]()
    thread = Thread(target=lambda: done.append(all(opt(rows_of()))), daemon=True)
    thread.start()
    thread.join(60)
    assert done == [True]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scalars_that_are_no_numbers(value: float) -> None:
    """Of steps that rows have missed: a load refuses them before anything has changed."""
    w, opt = asleep()
    opt(rows_of())
    state = opt.state_dict()
    state["idle_scalars.parameter_0"][600] = np.inf  # of a step that no row has missed
    opt.load_state_dict(state)
    state["idle_scalars.parameter_0"][3, 0] = value
    before = opt.state_dict()
    with pytest.raises(ValueError, match="are no numbers"):
        opt.load_state_dict(state)
    for name, array in opt.state_dict().items():
        np.testing.assert_array_equal(array, before[name])
    opt.flush()
    assert np.isfinite(w).all()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(k, marks=pytest.mark.exhaustive) for k in range(1, 25))]
)
def test_tables_that_another_thread_exchanges(seed: int) -> None:
    """Data is rebound, row numbers change, rows are reset and tables grow: calls raise, or work."""
    rng = np.random.default_rng(seed)
    _, opt = asleep()
    guard = [np.full((N, D), 7.0, np.float32) for _ in range(40)]
    p, ids = opt.parameters[0], rng.integers(0, N, 64)

    def change(k: int) -> None:
        if k % 4 == 0:
            opt.flush()
            p.data = p.data.copy()
        elif k % 4 == 1:
            opt.reset_rows(p, np.array([k % N]), 0.5)
        elif k % 4 == 2:
            ids.fill(k % (2 * N) - N // 2)
        elif len(p) < 3 * N:
            opt.grow(p, len(p) + 1)

    errors = ValueError, RuntimeError, IndexError
    with meanwhile(change, *errors):
        for k in range(400):
            with suppress(*errors):
                opt.prepare(p, ids)
                opt(rows_of(rng.integers(0, N, 5), len(p)))
                opt(rows_of(ids, len(p)))
                if k % 50 == 0:
                    opt.flush()
    assert all((x == 7.0).all() for x in guard)
