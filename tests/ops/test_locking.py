"""use_locking=True: many threads, some serial order for every row, no update lost."""

import gc
import signal
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from fusestep import nn, ops
from fusestep.kernels.cpu.rows import step as row_step
from fusestep.ops.runtime import locks

from helpers import holding
from subprocesses import output_of

HP = (0.9, 0.999, 0.01, 0.9, 0.999, 1e-8)
DENSE = {"shared": False}


def hammer(calls):
    """Run the calls at once, each on a thread of its own; errors of threads are raised here."""
    errors = []
    barrier = threading.Barrier(len(calls))

    def work(call):
        barrier.wait()
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def tables(n, d):
    return [np.full((n, d), x, np.float32) for x in (1.0, 0.1, 0.2)]


def apply_serially(counts, d, gradient=0.5):
    """Rows after ``counts[row]`` equal updates, one after the other."""
    var, m, v = tables(len(counts), d)
    op = ops.FusedSparseLazyAdam()
    for k in range(max(counts)):
        rows = np.flatnonzero(counts > k)
        op(var, m, v, *HP, np.full((len(rows), d), gradient, np.float32), rows)
    return var, m, v


@pytest.mark.parametrize("d", [1, 24])
def test_lazy_calls_on_overlapping_rows_lose_nothing(d):
    n, n_threads, n_calls = 50, 8, 60
    var, m, v = tables(n, d)
    op = ops.FusedSparseLazyAdam(use_locking=True)
    counts = np.zeros(n, int)
    lists = []
    for t in range(n_threads):
        rng = np.random.default_rng(t)
        mine = [rng.permutation(n)[: rng.integers(1, n)] for _ in range(n_calls)]
        for rows in mine:
            counts[rows] += 1
        lists.append(mine)

    def work(mine):
        for rows in mine:
            op(var, m, v, *HP, np.full((len(rows), d), 0.5, np.float32), rows)

    hammer([lambda mine=mine: work(mine) for mine in lists])
    # All updates are equal, so every serial order gives the same rows: those after
    # counts[row] updates.
    for actual, expected in zip((var, m, v), apply_serially(counts, d), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_lazy_calls_on_disjoint_rows():
    n, d, n_threads = 64, 8, 8
    var, m, v = tables(n, d)
    op = ops.FusedSparseLazyAdam(use_locking=True)

    def work(t):
        rows = np.arange(t, n, n_threads)
        for _ in range(100):
            op(var, m, v, *HP, np.full((len(rows), d), 0.5, np.float32), rows)

    hammer([lambda t=t: work(t) for t in range(n_threads)])
    expected = apply_serially(np.full(n, 100), d)
    for actual, wanted in zip((var, m, v), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)


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
        hammer([lambda call=call, a=arrays: op(*a, *call) for call in (first, second)])
        # Parameter and states of a row are those of the same order.
        equal = [(np.stack(arrays) == wanted).all(axis=(0, 2)) for wanted in (one, other)]
        assert (equal[0] | equal[1]).all()


@pytest.mark.parametrize("use_locking", [False, True])
def test_ftrl_waits_for_the_locks_of_its_rows(use_locking):
    """All row locks are held: a locked call stands still before its first row."""
    op = ops.FusedSparseFtrl(0.1, 0.01, 0.1, -0.5, use_locking=use_locking)
    arrays, expected = tables(5, 2), tables(5, 2)
    call = np.ones((2, 2), np.float32), np.array([3, 1])
    ops.FusedSparseFtrl(0.1, 0.01, 0.1, -0.5)(*expected, *call)
    thread = threading.Thread(target=op, args=(*arrays, *call))
    row_step.stripes.fill(1)
    try:
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() == use_locking
        assert (arrays[0] == 1).all() == use_locking
    finally:
        row_step.stripes.fill(0)
        thread.join()
    for actual, wanted in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)


def test_mixing_lazy_with_dense_calls():
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

    hammer([lambda: run(lazy, half), lambda: run(sweep, all_rows), run_dense] * 2)
    counts = np.full(n, 4 * 80)
    counts[half] += 2 * 80
    for actual, wanted in zip((var, m, v), apply_serially(counts, d), strict=True):
        np.testing.assert_array_equal(actual, wanted)


def test_dense_calls_are_serialised_as_a_whole():
    """Two different dense steps: all rows see them in the same order."""
    n = 200_000
    dense = ops.Adam(use_locking=True)

    def both(order):
        arrays = [np.full(n, x, np.float32) for x in (1.0, 0.1, 0.2)]
        for g in order:
            dense(*arrays, *HP, np.full(n, g, np.float32))
        return arrays[0]

    first, second = both([3.0, -1.0]), both([-1.0, 3.0])
    assert first[0] != second[0]
    for _ in range(20):
        arrays = [np.full(n, x, np.float32) for x in (1.0, 0.1, 0.2)]
        hammer(
            [
                lambda g=g, arrays=arrays: dense(*arrays, *HP, np.full(n, g, np.float32))
                for g in (3.0, -1.0)
            ]
        )
        equal = [np.array_equal(arrays[0], wanted) for wanted in (first, second)]
        assert sum(equal) == 1


def test_views_of_one_buffer_exclude_each_other():
    """Identity is the memory: rows of other widths over the same buffer are the same rows."""
    n, d = 30, 8
    var, m, v = tables(n, d)
    narrow = [a.reshape(2 * n, d // 2) for a in (var, m, v)]
    op = ops.FusedSparseLazyAdam(use_locking=True)

    def run(arrays):
        rows = np.arange(len(arrays[0]))
        g = np.full(arrays[0].shape, 0.5, np.float32)
        for _ in range(100):
            op(*arrays, *HP, g, rows)

    hammer([lambda: run((var, m, v)), lambda: run(narrow)] * 2)
    for actual, wanted in zip((var, m, v), apply_serially(np.full(n, 400), d), strict=True):
        np.testing.assert_array_equal(actual, wanted)


def test_optimizer_counters_and_rows():
    n, d, n_threads, n_calls = 30, 4, 6, 50
    table = np.ones((n, d), np.float32)
    opt = nn.LazyAdam([table], 0.01, use_locking=True)
    gradient = nn.RowTensor(np.arange(n), np.full((n, d), 0.5, np.float32), (n, d))
    hammer([lambda: [opt((gradient,)) for _ in range(n_calls)]] * n_threads)
    assert opt.global_step[0] == n_threads * n_calls
    # Every step has its own bias correction: calls must run in the order in which they took
    # their numbers, or the weights are those of no serial order.
    reference = nn.LazyAdam([np.ones((n, d), np.float32)], 0.01)
    for _ in range(n_threads * n_calls):
        reference((gradient,))
    np.testing.assert_array_equal(opt.moment1[0], reference.moment1[0])
    np.testing.assert_array_equal(opt.moment2[0], reference.moment2[0])
    np.testing.assert_array_equal(table, reference.parameters[0].data)


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

    hammer([lambda s=s: work(lazy if s % 2 else sweep, s) for s in range(8)])
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


class TestRequests:
    """The order in which memory is granted."""

    def spans(self, *ranges):
        return locks.spans_of([((begin,), (size,), 8) for begin, size in ranges])

    def start(self, order, name, spans, shared, release):
        def work():
            with holding(spans, shared=shared):
                order.append(name)
                release.wait(10)

        thread, n_before = threading.Thread(target=work), len(locks._requests)
        thread.start()
        until(lambda: len(locks._requests) > n_before)
        time.sleep(0.05)
        return thread

    def test_row_calls_share_and_a_dense_call_waits_its_turn(self):
        order, release = [], threading.Event()
        rows = self.spans((1_000, 80))
        threads = [
            self.start(order, "lazy 1", rows, True, release),
            self.start(order, "lazy 2", rows, True, release),
            self.start(order, "dense", rows, False, release),
            self.start(order, "lazy 3", rows, True, release),
            self.start(order, "elsewhere", self.spans((5_000, 80)), False, release),
        ]
        until(lambda: len(order) >= 3)
        assert sorted(order) == ["elsewhere", "lazy 1", "lazy 2"]
        release.set()
        for thread in threads:
            thread.join()
        assert order.index("dense") < order.index("lazy 3")

    def test_row_calls_on_other_variables_over_the_same_memory_wait(self):
        order, release = [], threading.Event()
        wide = locks.spans_of([((1_000,), (80,), 16)])
        threads = [
            self.start(order, "narrow", self.spans((1_000, 80)), True, release),
            self.start(order, "wide", wide, True, release),
        ]
        until(lambda: order)
        assert order == ["narrow"]
        release.set()
        for thread in threads:
            thread.join()
        assert order == ["narrow", "wide"]

    def test_an_interrupt_while_waiting_leaves_the_queue(self):
        spans = self.spans((1_000, 80))
        main, order = threading.get_ident(), []
        # It is ignored in what a script has started in the background.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)

        def interrupt():
            time.sleep(0.1)
            signal.pthread_kill(main, signal.SIGINT)

        def work():
            order.append("worked")

        try:
            with TestRequests.held_elsewhere(spans):
                threading.Thread(target=interrupt).start()
                with pytest.raises(KeyboardInterrupt):
                    locks.serialized(work, spans, shared=False)
        finally:
            signal.signal(signal.SIGINT, before)
        locks.serialized(work, spans, shared=False)
        assert order == ["worked"]
        assert locks._requests == []

    @staticmethod
    @contextmanager
    def held_elsewhere(spans):
        """Another thread has the memory."""
        inside, leave = threading.Event(), threading.Event()

        def hold():
            with holding(spans):
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

    def test_a_thread_does_not_wait_for_itself(self):
        spans = self.spans((1_000, 80))
        with holding(spans, shared=True):
            assert locks.serialized(lambda: 1, spans, shared=True) == 1
            with pytest.raises(RuntimeError, match="use_locking: a call is made within another"):
                locks.serialized(lambda: 1, spans, shared=False)
        assert locks.serialized(lambda: 2, spans, shared=False) == 2

    @pytest.mark.parametrize("shared", [False, True])
    def test_a_thread_does_not_wait_for_another_that_waits_for_it(self, shared):
        mine, others = self.spans((1_000, 80)), self.spans((1_000, 80), (5_000, 80))
        asked = mine if shared else self.spans((5_000, 80))
        errors = []

        def work():
            with holding(mine, shared=True):
                other = threading.Thread(
                    target=locks.serialized, args=(int, others), kwargs=DENSE, daemon=True
                )
                other.start()
                time.sleep(0.05)  # it waits
                with pytest.raises(RuntimeError, match="a call is made within another one") as info:
                    locks.serialized(int, asked, shared=shared)
                errors.append(info.value)
            other.join()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(20)
        assert len(errors) == 1
        assert locks._requests == []

    def test_nothing_is_kept_of_requests_that_are_over(self):
        """There is always a next one that waits, and knows the one before it."""
        spans, turn, alive = self.spans((1_000, 80)), threading.Semaphore(0), []

        def work():
            turn.acquire()
            alive.append(n_requests())

        def n_requests():
            return sum(type(found) is locks.Request for found in gc.get_objects())

        threads, before = [], n_requests()
        gc.disable()
        try:
            for n in range(20):
                call = threading.Thread(target=locks.serialized, args=(work, spans), kwargs=DENSE)
                threads.append(call)
                call.start()
                until(lambda n=n: len(locks._requests) == 1 + min(n, 1))
                if n:
                    turn.release()
                    until(lambda n=n: len(alive) == n and len(locks._requests) == 1)
            turn.release()
            for call in threads:
                call.join()
        finally:
            gc.enable()
        assert max(alive) < before + 6, alive


def until(condition):
    """Wait for other threads."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


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
        spans = locks.spans_of([((0,), (1 << 62,), 0)])
        def hold_all():
            request = locks.Request(spans, shared=False)
            with request.place, opt._host.turn():
                request.wait()
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
