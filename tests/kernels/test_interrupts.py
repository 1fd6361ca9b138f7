"""A KeyboardInterrupt at any moment of a step: it has happened in whole, counted, or not at all.

Python looks at signals where a function begins or ends. A profiler is called there too, so one that
raises tries all these moments, one after the other.
"""

import hashlib
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from fusestep import nn, ops
from fusestep.nn import mxnet as mx
from helpers import arrays_of, more
from thor_nets import Net, Pass, make

F32, F64 = np.float32, np.float64
HP = (0.9, 0.999, 0.01, 0.9, 0.999, 1e-8)
MOMENTS = {"call", "return", "c_return"}


def done_at(moment: int, step: Callable[[], Any], handler: Callable[[], Any]) -> int:
    """A step with a call of a signal handler at this moment of it; how many moments have passed. A
    KeyboardInterrupt of the handler ends the step."""
    passed = 0

    def look(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal passed
        if event in MOMENTS:
            passed += 1
            if passed > moment:
                sys.setprofile(None)
                handler()

    try:
        sys.setprofile(look)
        step()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return passed


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def ones(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.ones(shape, dtype)


def rows(n: int, d: int, indices: list[int], dtype: Any = F32) -> nn.RowTensor:
    return nn.RowTensor(np.array(indices), ones(len(indices), d, dtype=dtype), (n, d))


class Steps:
    """What steps again and again, and all that it changes."""

    def __init__(self, step: Callable[[], Any], state: Callable[[], Any]) -> None:
        self.step = step
        self._state = state

    def digest(self) -> str:
        found = hashlib.sha256()
        for array in arrays_of(self._state()):
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()


def of_optimizer(opt: Any, gradients: tuple[Any, ...]) -> Steps:
    def state() -> list[Any]:
        return [*opt.parameters, *opt.state_dict().values()]

    return Steps(lambda: opt(gradients), state)


def dense(make_one: Callable[..., Any], **options: Any) -> Steps:
    """Two kernel calls: parameters of two dtypes."""
    opt = make_one([ones(3), ones(4, 2, dtype=F64), ones(2, 3)], **options)
    return of_optimizer(opt, (ones(3), ones(4, 2, dtype=F64), 2 * ones(2, 3)))


def with_rows(make_one: Callable[..., Any], **options: Any) -> Steps:
    """Three kernel calls: tables of two dtypes, and a dense parameter."""
    opt = make_one([ones(6, 2), ones(5, 2, dtype=F64), ones(3)], **options)
    return of_optimizer(opt, (rows(6, 2, [1, 5, 1]), rows(5, 2, [0, 4], F64), ones(3)))


def lars() -> Steps:
    return dense(lambda p: nn.LARS(nn.Momentum(p, learning_rate=0.1, momentum=0.9)))


def thor() -> Steps:
    net = Net()
    opt, passes = make(net, momentum=0.9), Pass(1)
    steps = of_optimizer(opt, passes.gradients)

    def step() -> None:
        opt.clear_captured()  # of a step that was interrupted
        passes.step(net, opt)

    return Steps(step, steps._state)


def mxnet(update: Callable[[Any, list[Any], list[Any]], Any]) -> Steps:
    weights = [ones(3), ones(4, dtype=F64), ones(2, 2)]
    updater = mx.get_updater(mx.Adam(learning_rate=0.1))
    updater(
        [0, 1], [np.ones_like(w) for w in weights[:2]], weights[:2]
    )  # the third index is new in the step

    def state() -> list[Any]:
        opt = updater.optimizer
        counts = [opt.num_update, *opt._index_update_count.values()]
        return [*weights, list(updater.states.values()), np.array(counts)]

    return Steps(lambda: update(updater, [np.ones_like(w) for w in weights], weights), state)


def operator(op: Any, *gradient: np.ndarray) -> Steps:
    arrays = [ones(6, 2), 0.1 * ones(6, 2), 0.2 * ones(6, 2)]
    return Steps(lambda: op(*arrays, *HP, *gradient), lambda: arrays)


def to_another_array(gradient: Any, **options: Any) -> Steps:
    weight, mean, var, out = arrays = [k * ones(6, 2) for k in range(4)]

    def step() -> None:
        ops.adam_update(weight, gradient, mean, var, out, lr=0.1, **options)

    return Steps(step, lambda: arrays)


CASES: dict[str, Callable[[], Steps]] = {
    "Adam": lambda: dense(nn.Adam),
    "Adam, locked": lambda: dense(nn.Adam, use_locking=True),
    "Adam, rows": lambda: with_rows(nn.Adam),
    "LazyAdam": lambda: with_rows(nn.LazyAdam),
    "LazyAdam, locked": lambda: with_rows(nn.LazyAdam, use_locking=True, skip_nonfinite=True),
    "Lamb": lambda: dense(nn.Lamb, learning_rate=0.1),
    "LARS": lars,
    "AdaFactor": lambda: dense(nn.AdaFactor),
    "thor": thor,
    "mxnet.Adam": lambda: mxnet(lambda updater, g, w: updater([0, 1, 2], g, w)),
    "mxnet.Adam, one weight": lambda: mxnet(lambda updater, g, w: updater(2, g[2], w[2])),
    "Adam operator, locked": lambda: operator(ops.Adam(use_locking=True), ones(6, 2)),
    "FusedSparseLazyAdam, locked": lambda: operator(
        ops.FusedSparseLazyAdam(use_locking=True), ones(3, 2), np.array([5, 0, 5])),
    "adam_update": lambda: to_another_array(ones(6, 2)),
    "adam_update, rows, locked": lambda: to_another_array(rows(6, 2, [3, 3]), use_locking=True),
}  # fmt: skip


# What is interrupted within a finalizer goes on, and Python says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("n_before", "every"), [
    pytest.param(0, 7, id="first step"), pytest.param(2, 5, id="later"),
    more(2, 1, id="later, every moment"),
])  # fmt: skip
def test_a_step_happens_in_whole_or_not_at_all(
    case: Callable[[], Steps], n_before: int, every: int
) -> None:
    """At some moments; each case begins with another one."""
    expected = trajectory(case, n_before + 3)
    moment, outcomes = list(CASES.values()).index(case) % every, set()
    while True:
        steps = case()
        for _ in range(n_before):
            steps.step()
        with np.errstate():
            passed = done_at(moment, steps.step, interrupt)
        done = expected.index(steps.digest()) - n_before
        assert done in (0, 1)
        outcomes.add(done)
        for k in range(2):  # and everything goes on as if nothing had been
            in_time(steps.step)
            assert steps.digest() == expected[n_before + done + k + 1], moment
        if passed <= moment:
            break
        moment += every
    assert moment > 5
    assert outcomes == {0, 1}


def trajectory(case: Callable[[], Steps], n: int) -> list[str]:
    """The digests before the first and after each of ``n`` steps."""
    steps = case()
    found = [steps.digest()]
    for _ in range(n):
        steps.step()
        found.append(steps.digest())
    assert len(set(found)) == len(found)
    return found


def in_time(work: Callable[[], Any]) -> Any:
    """The result of another thread, which must not wait for a place that was left behind."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(20)
    assert len(results) == 1
    return results[0]


@pytest.mark.parametrize("case", [name for name in CASES if "locked" in name])
def test_a_step_of_a_signal_handler_does_not_wait_for_ever(case: str) -> None:
    """A handler runs in the thread that it interrupts: within a step it is refused."""
    expected = trajectory(CASES[case], 2)
    n_refused, moment = 0, 0
    while True:
        steps = CASES[case]()
        errors = in_time(lambda k=moment, steps=steps: stepped_within(steps, k))
        if errors is None:
            break
        n_refused += bool(errors)
        assert all("a call is made within another one" in error for error in errors)
        assert steps.digest() == expected[1 if errors else 2], moment
        moment += 1
    assert 0 < n_refused < moment


def stepped_within(steps: Steps, moment: int) -> list[str] | None:
    """The errors of a step within a step at this moment; None: there is no such moment."""
    errors: list[str] | None = None

    def handler() -> None:
        nonlocal errors
        errors = []
        try:
            steps.step()
        except RuntimeError as error:
            errors.append(str(error))

    done_at(moment, steps.step, handler)
    return errors


def test_no_step_but_the_first_asks_numba_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba takes a lock of the process then, which a signal could leave behind."""
    opt = nn.SGD([ones(200_000)])
    opt((ones(200_000),))

    def launch() -> None:
        raise AssertionError

    monkeypatch.setattr("numba.np.ufunc.parallel._launch_threads", launch)
    opt((ones(200_000),))
