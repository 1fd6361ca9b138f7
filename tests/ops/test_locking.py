"""use_locking=True: many threads, some serial order for every row, no update lost."""

import signal
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from fusestep import nn, ops
from fusestep.ops.runtime import launch, locks
from helpers import at_once
from subprocesses import output_of

HP = (0.9, 0.999, 0.01, 0.9, 0.999, 1e-8)


def tables(n, d):
    return [np.full((n, d), x, np.float32) for x in (1.0, 0.1, 0.2)]


def apply_serially(counts, d):
    """Rows after ``counts[row]`` equal updates, one after the other."""
    var, m, v = tables(len(counts), d)
    op = ops.FusedSparseLazyAdam()
    for k in range(max(counts)):
        rows = np.flatnonzero(counts > k)
        op(var, m, v, *HP, np.full((len(rows), d), 0.5, np.float32), rows)
    return var, m, v


def test_ftrl_rows_see_some_serial_order():
    """Two different calls at once: rows of one call only, and rows that see both."""
    n, d = 6, 1_000
    op = ops.FusedSparseFtrl(0.1, 0.01, 0.1, -0.3, use_locking=True)  # the slow power: more overlap
    rng = np.random.default_rng(3)
    first, second = (
        (rng.standard_normal((4, d)).astype(np.float32), rng.permutation(4) + begin)
        for begin in (0, 2)
    )

    def after(*calls):
        arrays = tables(n, d)
        for call in calls:
            op(*arrays, *call)
        return np.stack(arrays)

    one, other = after(first, second), after(second, first)
    assert (one[0, 2:4] != other[0, 2:4]).any(axis=1).all()
    for _ in range(50):
        arrays = tables(n, d)
        at_once([lambda call=call, a=arrays: op(*a, *call) for call in (first, second)])
        # Parameter and states of a row are those of the same order.
        equal = [(np.stack(arrays) == wanted).all(axis=(0, 2)) for wanted in (one, other)]
        assert (equal[0] | equal[1]).all()


def test_mixing_lazy_with_dense_calls():
    """All updates are equal, so every serial order gives the same rows, and none is lost."""
    n, d = 40, 16
    var, m, v = tables(n, d)
    lazy = ops.FusedSparseLazyAdam(use_locking=True)
    sweep = ops.FusedSparseAdam(use_locking=True)
    dense = ops.Adam(use_locking=True)
    all_rows, half = np.arange(n), np.arange(0, n, 2)

    def run(op, rows):
        for _ in range(80):
            op(var, m, v, *HP, np.full((len(rows), d), 0.5, np.float32), rows)

    def run_dense():
        for _ in range(80):
            dense(var, m, v, *HP, np.full((n, d), 0.5, np.float32))

    at_once([lambda: run(lazy, half), lambda: run(sweep, all_rows), run_dense] * 2)
    counts = np.full(n, 4 * 80)
    counts[half] += 2 * 80
    for actual, wanted in zip((var, m, v), apply_serially(counts, d), strict=True):
        np.testing.assert_array_equal(actual, wanted)


def test_without_locking_memory_is_safe():
    """Concurrent calls may interleave, but never write outside of the variables."""
    n, d, guard = 60, 12, 4_096
    buffers = [np.full(n * d + 2 * guard, 7.0, np.float32) for _ in range(3)]
    var, m, v = (b[guard:-guard].reshape(n, d) for b in buffers)
    for a in (var, m, v):
        a[:] = 0.5
    lazy, sweep = ops.FusedSparseLazyAdam(), ops.FusedSparseAdam()

    def work(op, seed):
        rng = np.random.default_rng(seed)
        for _ in range(60):
            rows = rng.integers(0, n, 200)
            op(var, m, v, *HP, rng.standard_normal((200, d)).astype(np.float32), rows)

    at_once([lambda s=s: work(lazy if s % 2 else sweep, s) for s in range(8)])
    for buffer in buffers:
        assert (buffer[:guard] == 7).all()
        assert (buffer[-guard:] == 7).all()
    assert np.isfinite(var).all()
    assert np.isfinite(m).all()
    assert (v >= 0).all()


def test_a_failed_call_releases_the_lock():
    var, m, v = tables(5, 2)
    op = ops.FusedSparseLazyAdam(use_locking=True)
    bad = np.array([7])
    with pytest.raises(IndexError, match=r"indices\[0\] is out of range"):
        op(var, m, v, *HP, np.ones((1, 2), np.float32), bad)
    op(var, m, v, *HP, np.ones((1, 2), np.float32), bad - 6)
    assert (var[1] != 1).all()


def test_a_gradient_cannot_step_its_own_optimizer():
    """Reading it is a part of the step, which would wait for itself."""
    w = np.ones(3, np.float32)
    opt = nn.Adam([w], use_locking=True)

    class Stepping:
        def __array__(self, *_, **__):
            opt((np.ones(3, np.float32),))
            return np.ones(3, np.float32)

    errors = []

    def work():
        try:
            opt((Stepping(),))
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert errors == [
        "Adam: a call is made within another one: expected a call after its end, "
        "got one from a signal handler or an array's __array__"
    ]
    assert (w == 1).all()
    opt((np.ones(3, np.float32),))
    assert opt.global_step == 1


@contextmanager
def held_elsewhere():
    """Another thread is in a call."""
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with locks.exclusive():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    try:
        yield
    finally:
        leave.set()
        thread.join()


def test_an_interrupt_while_waiting_leaves_nothing_behind():
    order, main = [], threading.get_ident()
    # It is ignored in what a script has started in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt():
        time.sleep(0.1)
        signal.pthread_kill(main, signal.SIGINT)

    try:
        with held_elsewhere():
            threading.Thread(target=interrupt).start()
            with pytest.raises(KeyboardInterrupt), locks.exclusive():
                order.append("early")
    finally:
        signal.signal(signal.SIGINT, before)
    with locks.exclusive():
        order.append("later")
    assert order == ["later"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_call_within_a_call_is_refused_and_no_error_keeps_the_lock(error):
    """As from a signal handler: the inner call would wait for the outer one for ever."""
    var, m, v = tables(5, 2)
    step = ops.FusedSparseLazyAdam(use_locking=True)
    call = var, m, v, *HP, np.ones((1, 2), np.float32), np.array([1])

    def within():
        with pytest.raises(RuntimeError, match="use_locking: a call is made within another one"):
            step(*call)
        assert (var == 1).all()
        ops.FusedSparseLazyAdam()(*call)  # has no part in the order
        raise error

    with pytest.raises(error), locks.exclusive():
        within()
    assert (var[1] != 1).all()
    thread = threading.Thread(target=step, args=call)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("use_locking", [False, True])
@pytest.mark.parametrize("make", [nn.Adam, nn.Lamb, nn.LazyAdam])
def test_optimizers_take_the_lock_of_operators(make, use_locking):
    """Dense steps, those that measure first, and those on rows: two may have one parameter."""
    w = np.ones((5, 2), np.float32)
    opt, g = make([w], 0.1, use_locking=use_locking), np.ones((5, 2), np.float32)
    gradient = nn.RowTensor(np.arange(5), g, g.shape) if make is nn.LazyAdam else g
    with locks.exclusive():
        if use_locking:
            with pytest.raises(RuntimeError, match="a call is made within another one"):
                opt((gradient,))
            assert (w == 1).all() and opt.global_step == 0
        else:
            opt((gradient,))
    opt((gradient,))
    assert opt.global_step == 2 - use_locking


def test_locked_launches_wait_for_the_last_one_of_their_device(monkeypatch):
    """On a device streams wait for events, and the host for nothing."""
    noted = []

    class Event:
        def record(self, stream):
            self.after = stream

        def wait(self, stream):
            noted.append((stream, self.after))

        def query(self):
            return self.after == "over"

    backend = SimpleNamespace(new_event=Event)
    monkeypatch.setattr(launch, "cuda", SimpleNamespace(device=SimpleNamespace(backend=backend)))
    monkeypatch.setattr(launch, "_last", {})
    for device, stream in ((0, "a"), (1, "b"), (0, "c")):
        with launch.in_order(device, stream):
            pass
    assert noted == [("c", "a")]
    with pytest.raises(MemoryError), launch.in_order(1, "d"):
        raise MemoryError
    with launch.in_order(1, "e"):  # after what was enqueued before the error
        inner = launch.in_order(0, "f")
        with pytest.raises(RuntimeError, match="a call is made within another one"):
            inner.__enter__()
    assert noted == [("c", "a"), ("d", "b"), ("e", "d")]
    for stream in ("over", "g"):  # an event that is over is not waited for
        with launch.in_order(2, stream):
            pass
    assert len(noted) == 3


def test_fork_while_a_thread_is_in_a_locked_call():
    program = """
        import os, threading
        import numpy as np
        from fusestep import nn, ops
        from fusestep.ops.runtime import locks
        HP = (0.9, 0.999, 0.01, 0.9, 0.999, 1e-8)
        arrays = [np.full(1000, x, np.float32) for x in (1.0, 0.1, 0.2)]
        op, g = ops.Adam(use_locking=True), np.ones(1000, np.float32)
        opt = nn.Adam([np.ones(10, np.float32)], use_locking=True)
        op(*arrays, *HP, g)
        inside, leave = threading.Event(), threading.Event()
        def hold_all():
            with locks.exclusive(), opt._host.exclusive():
                inside.set()
                leave.wait()
        thread = threading.Thread(target=hold_all)
        thread.start()
        inside.wait()
        child = os.fork()
        if child == 0:
            op(*arrays, *HP, g)
            opt((np.ones(10, np.float32),))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        leave.set()
        thread.join()
        assert status == 0, status
    """
    output_of(program)
