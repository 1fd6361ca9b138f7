"""Threading layers, forks and several Python threads, each for real in a fresh process; and
results that are equal to the last bit for any number of threads."""

import threading

import numpy as np
import pytest

from fusestep import get_num_threads, set_num_threads
from fusestep.kernels.cpu.parallel import serial

from subprocesses import output_of, run_python

# Steps that take every parallel path: dense (one tensor, many), sort, hot rows, lazy, sweep.
STEPS = """
    import hashlib, sys
    import numpy as np
    from fusestep import nn, set_num_threads

    def step(mode):
        rng = np.random.default_rng(0)
        shapes = [(70_000,), (300, 257), (5,), (33, 3)]
        dense = [rng.standard_normal(s).astype(np.float32) for s in shapes]
        tables = [rng.standard_normal(s).astype(np.float32) for s in ((900, 40), (2_000, 7))]
        opt = nn.Adam([*dense, *tables], 0.1, weight_decay=0.1, use_lazy=mode == "lazy")
        for _ in range(2):
            gradients = [rng.standard_normal(s).astype(np.float32) for s in shapes]
            for table in tables:
                n = 20_000
                indices = rng.zipf(1.3, n) % len(table)
                indices[: n // 3] = 5
                values = rng.standard_normal((n, table.shape[1])).astype(np.float32)
                gradients.append(nn.RowTensor(indices, values, table.shape))
            opt(gradients)
        digest = hashlib.sha256()
        for array in (*dense, *tables, *opt.moment1, *opt.moment2):
            digest.update(array.tobytes())
        return digest.hexdigest()
"""


@pytest.fixture(scope="module")
def serial_digests():
    text = output_of(STEPS + "\n    print(step('lazy'), step('all'))", NUMBA_NUM_THREADS="1")
    return text.split()


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_bits_do_not_depend_on_the_number_of_threads(threads, serial_digests):
    program = STEPS + "\n    print(step('lazy'), step('all'))"
    assert output_of(program, NUMBA_NUM_THREADS=str(threads)).split() == serial_digests


def test_bits_do_not_depend_on_the_thread_budget(serial_digests):
    program = STEPS + "\n    set_num_threads(2); print(step('lazy'), step('all'))"
    assert output_of(program, NUMBA_NUM_THREADS="4").split() == serial_digests


@pytest.mark.parametrize("layer", ["workqueue", "omp"])
def test_several_python_threads_at_once(layer, serial_digests):
    program = (
        STEPS
        + """
    import threading
    from fusestep import threading_layer
    results = []
    def work():
        for _ in range(3):
            results.append((step("lazy"), step("all")))
    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert threading_layer() == sys.argv[1], threading_layer()
    assert len(results) == 12 and len(set(results)) == 1, set(results)
    print(*results[0])
    """
    )
    printed = output_of(program, layer, NUMBA_NUM_THREADS="2", NUMBA_THREADING_LAYER=layer)
    assert printed.split() == serial_digests


@pytest.mark.parametrize("layer", ["workqueue", "omp"])
def test_fork_after_a_parallel_step(layer, serial_digests):
    program = (
        STEPS
        + """
    import os
    from fusestep import get_num_threads, threading_layer
    before = step("lazy")
    assert threading_layer() == sys.argv[1]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, f"{step('lazy')} {get_num_threads()}".encode())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    digest, threads = os.read(read, 200).decode().split()
    # GNU OpenMP kills a forked child that enters it, so the child runs on one thread.
    assert int(threads) == (1 if sys.argv[1] == "omp" else 2), threads
    assert step("lazy") == before == digest
    print(digest)
    """
    )
    printed = output_of(program, layer, NUMBA_NUM_THREADS="2", NUMBA_THREADING_LAYER=layer)
    assert printed.split() == serial_digests[:1]


def test_the_hazard_is_real():
    """Without the guard, workqueue aborts the process: the guard's test can fail."""
    program = (
        STEPS
        + """
    import threading
    from contextlib import nullcontext
    from fusestep.kernels.cpu import parallel
    parallel._layer_guard = lambda: nullcontext()
    step("all")
    threads = [threading.Thread(target=lambda: [step("all") for _ in range(50)]) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    """
    )
    done = run_python(program, NUMBA_NUM_THREADS="2", NUMBA_THREADING_LAYER="workqueue")
    assert done.returncode != 0


def test_thread_budget():
    available = get_num_threads()
    try:
        set_num_threads(1)
        assert get_num_threads() == 1
        set_num_threads(10_000)
        assert get_num_threads() == available
    finally:
        set_num_threads(None)
    assert get_num_threads() == available


@pytest.mark.parametrize(("n", "error"), [(0, ValueError), (1.0, TypeError), (True, TypeError)])
def test_thread_budget_rejects(n, error):
    with pytest.raises(error, match="set_num_threads: n must be"):
        set_num_threads(n)


def test_budget_is_reached_by_kernels(monkeypatch):
    from fusestep import nn
    from fusestep.kernels.cpu import dense

    used = []
    run = dense.run
    monkeypatch.setattr(
        dense, "run", lambda f, n, c, threads: (used.append(threads), run(f, n, c, threads))
    )
    set_num_threads(1)
    try:
        w = np.ones(100_000, np.float32)
        nn.Adam([w])((np.ones_like(w),))
    finally:
        set_num_threads(None)
    assert used == [1]


def test_a_python_thread_can_ask_for_no_others():
    elsewhere: list[int] = []

    def ask():
        thread = threading.Thread(target=lambda: elsewhere.append(get_num_threads()))
        thread.start()
        thread.join()

    available = get_num_threads()
    ask()
    with serial(True):
        assert get_num_threads() == 1
        with serial(False):  # an inner wish does not undo an outer one
            assert get_num_threads() == 1
        ask()
    assert elsewhere[0] == elsewhere[1]
    with serial(False):
        assert get_num_threads() == available
