"""Threading layers, forks and several Python threads, each for real in a fresh process; and
results that are equal to the last bit for any number of threads."""

import re
import signal
import subprocess
import sys
import textwrap
import threading
from importlib.metadata import distributions
from types import SimpleNamespace

import numpy as np
import pytest
from fusestep import get_num_threads, set_num_threads
from fusestep.kernels.cpu import info
from fusestep.kernels.cpu.threads import layers, parallel
from fusestep.kernels.cpu.threads.layers import Limit
from fusestep.kernels.cpu.threads.parallel import deciding_limit, limit_threads
from subprocesses import ENVIRONMENT, output_of, run_python
from test_interrupts import done_at, interrupt

TBB = next(distributions(name="tbb"), None)
LAYERS = ["workqueue", "omp", *(["tbb"] if TBB else [])]

# Steps that take every parallel path: dense (one tensor, many), sort, hot rows, lazy, sweep.
STEPS = """
    import hashlib, sys
    import numpy as np
    from fusestep import nn, set_num_threads

    def step(mode):
        rng = np.random.default_rng(0)
        shapes = [(140_000,), (300, 257), (5,), (33, 3)]
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


def test_bits_of_every_kind_of_call_do_not_depend_on_the_number_of_threads():
    """Rules, measured tensors and rows, norms, clipping, bags; on 1, 2, 3 and 7 threads."""
    program = "import thread_cases; thread_cases.main()"
    *others, n_cases = output_of(program, NUMBA_NUM_THREADS="7").splitlines()
    assert not others and int(n_cases) > 50


@pytest.mark.parametrize("layer", LAYERS)
def test_several_python_threads_at_once(layer, serial_digests):
    program = (
        STEPS
        + """
    from fusestep import threading_layer
    from helpers import at_once
    results = []
    def work():
        for _ in range(3):
            results.append((step("lazy"), step("all")))
    at_once([work] * 4)
    assert threading_layer() == sys.argv[1], threading_layer()
    assert len(results) == 12 and len(set(results)) == 1, set(results)
    print(*results[0])
    """
    )
    printed = output_of(program, layer, NUMBA_NUM_THREADS="2", NUMBA_THREADING_LAYER=layer)
    assert printed.split() == serial_digests


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no such signal")
def test_a_signal_handler_may_step_while_its_thread_is_about_to():
    program = """
        import signal
        from contextlib import contextmanager
        import numpy as np
        from fusestep import nn, threading_layer
        from fusestep.kernels.cpu.threads import parallel

        arrays = [np.ones(200_000, np.float32) for _ in range(2)]
        ones = np.ones(200_000, np.float32)
        first, second = (nn.Momentum([array], 0.5, 0.0) for array in arrays)
        guard, waiting = parallel.layer_guard, [signal.SIGUSR1]

        @contextmanager
        def interrupted():
            with guard():
                if waiting:
                    signal.raise_signal(waiting.pop())
                yield

        signal.signal(signal.SIGUSR1, lambda *_: second((ones,)))
        parallel.layer_guard = interrupted
        first((ones,))
        assert not waiting and threading_layer() == "workqueue"
        print(*[set(array.tolist()) for array in arrays])
    """
    environment = {"NUMBA_NUM_THREADS": "2", "NUMBA_THREADING_LAYER": "workqueue"}
    assert run_python(program, timeout=120, **environment).stdout == "{0.5} {0.5}\n"


def test_the_hazard_is_real():
    """Without the guard, workqueue aborts the process: the guard's test can fail."""
    program = (
        STEPS
        + """
    import threading
    from contextlib import nullcontext
    from fusestep.kernels.cpu.threads import parallel
    parallel.layer_guard = lambda: nullcontext()
    step("all")
    threads = [threading.Thread(target=lambda: [step("all") for _ in range(50)]) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    """
    )
    done = run_python(program, NUMBA_NUM_THREADS="2", NUMBA_THREADING_LAYER="workqueue")
    assert done.returncode != 0


@pytest.mark.parametrize(("layer", "could_be_tbb"), [
    *((name, True) for name in ("default", "tbb", "TBB", "safe", "threadsafe", "forksafe")),
    ("omp", False), ("workqueue", False),
])  # fmt: skip
def test_tbb_of_pypi_is_loaded_for_layers_that_may_use_it(
    monkeypatch, tmp_path, layer, could_be_tbb
):
    library = tmp_path / "lib" / "libtbb.so.12"
    record = tmp_path / "tbb-2021.6.dist-info" / "RECORD"
    for path in (library, record, record.with_name("METADATA")):
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    record.write_text("lib/libtbb.so.12,,\ntbb-2021.6.dist-info/RECORD,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = []
    loader = SimpleNamespace(CDLL=lambda path, **_: loaded.append(path), RTLD_GLOBAL=0)
    monkeypatch.setattr(layers, "ctypes", loader)
    assert layers._load_tbb(layer.lower()) == could_be_tbb
    assert loaded == ([str(library.resolve())] if could_be_tbb else [])


@pytest.mark.skipif(TBB is None, reason="there is no wheel of tbb for this system")
@pytest.mark.parametrize(
    ("layer", "first"),
    [("default", "compile_loops"), ("tbb", "start_threads"), ("forksafe", "get_num_threads")],
)
def test_tbb_of_pypi_runs(layer, first):
    program = f"""
        from fusestep.kernels.cpu.threads import layers, parallel
        parallel.{first}()
        print(layers.threading_layer())
    """
    assert output_of(program, NUMBA_THREADING_LAYER=layer) == "tbb\n"


def test_a_tbb_that_does_not_load_is_said_and_replaced(tmp_path):
    """Numba takes the next layer, and `fusestep info` says why."""
    record = tmp_path / "tbb-2021.6.dist-info" / "RECORD"
    record.parent.mkdir()
    (tmp_path / "libtbb.so.12").write_text("no library")
    record.with_name("METADATA").write_text("")
    record.write_text("libtbb.so.12,,\n")
    program = """
        import sys
        sys.path.insert(0, sys.argv[1])
        from fusestep.kernels.cpu import info
        from fusestep.kernels.cpu.threads import parallel
        from numba.np.ufunc import parallel as of_numba
        def missing():
            raise ImportError("no tbb")
        of_numba._check_tbb_version_compatible = missing
        print(parallel.get_num_threads(), info.facts()["threading layer"])
    """
    printed = output_of(program, tmp_path, NUMBA_NUM_THREADS="2")
    assert re.fullmatch(r"2 (omp|workqueue): tbb does not load: .*libtbb.so.12.*\n", printed)


def test_a_first_step_beside_the_start_of_numbas_own_threads():
    """Numba takes two locks there, and neither thread may have one that the other waits for."""
    program = """
        import threading
        from numba.np.ufunc import parallel as of_numba
        from fusestep.kernels.cpu.threads import parallel

        of_numba._set_init_process_lock()
        thread = threading.Thread(target=parallel.start_threads, daemon=True)
        with of_numba._backend_init_process_lock:
            thread.start()
            thread.join(1)  # by then it waits
            assert thread.is_alive()
            taken = of_numba._backend_init_thread_lock.acquire(timeout=20)
            if taken:
                of_numba._backend_init_thread_lock.release()
        thread.join(20)
        print(taken, thread.is_alive())
    """
    assert output_of(program, NUMBA_NUM_THREADS="2") == "True False\n"


def test_first_steps_of_two_threads_while_numba_makes_its_lock():
    """Each thread that finds none makes one, also where another already waits with the first."""
    program = """
        import itertools, threading, time
        import numba
        from numba.np.ufunc import parallel as of_numba
        from fusestep.kernels.cpu.threads import parallel

        make, ask, calls = of_numba._set_init_process_lock, numba.get_num_threads, itertools.count()

        def make_slowly():
            is_second = next(calls) > 0
            time.sleep(0.3)  # so that both threads have found none
            with of_numba._backend_init_thread_lock:
                time.sleep(0.3 * is_second)  # the first one waits here, its own taken
                make()
            time.sleep(0.3 * is_second)

        def ask_slowly():
            time.sleep(0.6)  # by then the second one waits, its own taken
            return ask()

        of_numba._set_init_process_lock, numba.get_num_threads = make_slowly, ask_slowly
        threads = [threading.Thread(target=parallel.start_threads, daemon=True) for _ in range(2)]
        [t.start() for t in threads]
        [t.join(20) for t in threads]
        print(next(calls) > 0, *(t.is_alive() for t in threads))
    """
    assert output_of(program, NUMBA_NUM_THREADS="2") == "True False False\n"


# How many


CORES = Limit(6, "the cores of this process")


@pytest.mark.parametrize(("environment", "budget", "expected"), [
    ({}, None, CORES), ({"quota": 2}, None, Limit(2, "the CPU quota of the container")),
    ({"quota": 9}, None, CORES), ({"OMP_NUM_THREADS": "3"}, None, Limit(3, "OMP_NUM_THREADS")),
    ({"OMP_NUM_THREADS": " 3,2 "}, None, Limit(3, "OMP_NUM_THREADS")),
    ({"OMP_NUM_THREADS": "9", "NUMBA_NUM_THREADS": "5"}, None, Limit(5, "NUMBA_NUM_THREADS")),
    ({"OMP_NUM_THREADS": "9", "NUMBA_NUM_THREADS": "9"}, None, CORES),
    ({"OMP_NUM_THREADS": "3"}, 2, Limit(2, "fusestep.set_num_threads")),
    ({"OMP_NUM_THREADS": "1"}, 2, Limit(1, "OMP_NUM_THREADS")),
    ({"OMP_NUM_THREADS": "3"}, 4_000_000, Limit(3, "OMP_NUM_THREADS")),
    ({"OMP_NUM_THREADS": "99999999999999999999"}, None, CORES),
    *(({"OMP_NUM_THREADS": x}, None, CORES) for x in ("0", "-1", "many", "", "2.5")),
])  # fmt: skip
def test_the_smallest_limit_decides(environment, budget, expected, monkeypatch):
    monkeypatch.setattr(layers, "_cores", lambda: 6)
    monkeypatch.setattr(layers, "_quota", lambda *_: environment.get("quota"))
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        monkeypatch.setenv(name, environment.get(name, ""))
    found = layers.limit_of_environment.__wrapped__()
    monkeypatch.setattr(parallel, "limit_of_environment", lambda: found)
    monkeypatch.setattr(parallel, "available_threads", SimpleNamespace(call=lambda: 6))
    monkeypatch.setattr(parallel, "_budget", budget)
    assert deciding_limit() == expected
    assert get_num_threads() == expected.threads


def test_numba_itself_is_obeyed():
    program = """
    import numba
    from fusestep.kernels.cpu.threads import parallel
    numba.set_num_threads(2)
    print(*parallel.deciding_limit(), sep="|")
    """
    assert output_of(program, NUMBA_NUM_THREADS="5") == "2|numba.set_num_threads\n"


@pytest.mark.parametrize("value", ["0", "-3", "many"])
def test_numbers_that_are_none_are_said(value, monkeypatch):
    """OpenMP ignores them."""
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert info.facts()["threads"].endswith(f"; ignored: OMP_NUM_THREADS='{value}'")


def test_numba_refuses_its_own():
    done = run_python("import fusestep.nn", NUMBA_NUM_THREADS="-3")
    assert "Number of threads specified must be > 0" in done.stderr


@pytest.mark.parametrize("layer", LAYERS)
def test_a_huge_number_starts_no_more_threads_than_there_are_cores(layer):
    program = """
        import numpy as np
        from fusestep import get_num_threads, nn, threading_layer
        w = np.ones(1_000_000, np.float32)
        nn.SGD([w], 0.5)((np.ones_like(w),))
        assert (w == 0.5).all()
        print(threading_layer())
    """
    # Workqueue starts as many as it is told: more than some thousands are Numba's own limit.
    huge = "64" if layer == "workqueue" else "1000000"
    code = textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False,
        env={**ENVIRONMENT, "NUMBA_NUM_THREADS": huge, "NUMBA_THREADING_LAYER": layer})  # fmt: skip
    assert done.stdout == f"{layer}\n", done.stderr


STEP = """
    import numpy as np
    from fusestep import launcher, nn
    w = np.ones(1_000_000, np.float32)
    opt = nn.SGD([w], 0.5)
    def step(x):
        opt((np.full_like(w, x),))
    def check():
        assert len(set(w.tolist())) == 1
        assert w[0] == 1 - (opt.global_step.item() - 3), (w[0], opt.global_step)
"""
# What follows `STEP`, or what stands in for it; see test_openmp.py.
END = """
    import sys, threading
    step(1)
    def work():
        while True:
            step(1)
    for _ in range(2):
        threading.Thread(target=work, daemon=True).start()
    for _ in range(20):
        step(1)
    print(launcher(), flush=True)
    sys.exit(7)
"""
INTERRUPTS = """
    import os, signal, threading, time
    begun = threading.Event()
    def interrupt():
        begun.wait()
        for _ in range(30):
            time.sleep(0.003)
            os.kill(os.getpid(), signal.SIGINT)
    for _ in range(3):  # all is compiled then
        step(0)
    def raise_once(*of_signal):  # not where no step is run, nor again before it is caught
        global running
        if running:
            running = False
            raise KeyboardInterrupt
    thread = threading.Thread(target=interrupt)
    interrupted, running = 0, False
    signal.signal(signal.SIGINT, raise_once)
    thread.start()
    while thread.is_alive():
        try:
            running = True
            begun.set()
            while thread.is_alive():
                step(2)
            running = False
        except KeyboardInterrupt:
            interrupted += 1
    thread.join()
    assert interrupted > 5, interrupted
    check()
    print(launcher())
"""


@pytest.mark.parametrize("layer", LAYERS)
def test_the_number_of_openmp_threads_of_others_stays(layer):
    """Numba's omp layer sets it at its start, for PyTorch too, whose copy of OpenMP it may use."""
    program = f"""{STEP}
    import ctypes
    from fusestep import threading_layer
    from numba.np.ufunc import omppool
    openmp = ctypes.CDLL(omppool.__file__)
    for count in (1, 5, 1):
        openmp.omp_set_num_threads(count)  # as torch.set_num_threads does
        step(1)
        assert openmp.omp_get_max_threads() == count
    print(threading_layer())
    """
    printed = output_of(program, NUMBA_NUM_THREADS="2", NUMBA_THREADING_LAYER=layer)
    assert printed == f"{layer}\n"


@pytest.mark.parametrize("layer", LAYERS)
def test_the_end_of_a_process_while_another_thread_steps(layer):
    """Whatever the step is doing: the process ends with its own status, at once."""
    environment = {"NUMBA_NUM_THREADS": "2", "NUMBA_THREADING_LAYER": layer}
    for _ in range(3):
        done = run_python(STEP + END, timeout=60, **environment)
        assert (done.returncode, done.stdout) == (7, f"{layer}\n"), done.stderr


@pytest.mark.skipif(not hasattr(signal, "SIGINT"), reason="this system has no such signal")
@pytest.mark.parametrize("layer", LAYERS)
def test_interrupts_of_parallel_steps(layer):
    """Each step is taken or not, and later ones run as if nothing had been."""
    environment = {"NUMBA_NUM_THREADS": "2", "NUMBA_THREADING_LAYER": layer}
    assert output_of(STEP + INTERRUPTS, **environment) == f"{layer}\n"


def groups(folder, **files):
    """Files of control groups, ``__`` in a name standing for a slash."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("cpu_max", "cpu.max")
        path = path.with_name(path.name.replace("cfs_", "cpu.cfs_"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(("membership", "files", "cores"), [
    ("0::/\n", {"cpu_max": "250000 100000\n"}, 2),
    ("0::/\n", {"cpu_max": "50000 100000\n"}, 1),
    ("0::/\n", {"cpu_max": "max 100000\n"}, None),
    ("0::/\n", {}, None),
    ("0::/a/b\n", {"a__b__cpu_max": "max 100000", "a__cpu_max": "300000 100000"}, 3),
    ("0::/a/b\n", {"a__b__cpu_max": "200000 100000", "a__cpu_max": "300000 100000"}, 2),
    ("0::/not/here\n", {"cpu_max": "400000 100000"}, 4),
    ("3:cpu,cpuacct:/x\n1:memory:/x\n",
     {"cpu,cpuacct__x__cfs_quota_us": "200000", "cpu,cpuacct__x__cfs_period_us": "100000"}, 2),
    ("3:cpu:/docker/1\n", {"cpu__cfs_quota_us": "700000", "cpu__cfs_period_us": "100000"}, 7),
    ("3:cpu:/\n", {"cpu__cfs_quota_us": "-1", "cpu__cfs_period_us": "100000"}, None),
    ("3:memory:/\n", {"memory__cfs_quota_us": "1", "memory__cfs_period_us": "1"}, None),
    ("0::/\n", {"cpu_max": "nonsense"}, None),
    ("0::/\n", {"cpu_max": "100000 0"}, None),
])  # fmt: skip
def test_quotas_of_containers(membership, files, cores, tmp_path):
    place = tmp_path / "membership"
    place.write_text(membership)
    assert layers._quota(place, groups(tmp_path / "groups", **files)) == cores


def test_without_control_groups_there_is_no_quota(tmp_path):
    assert layers._quota(tmp_path / "none", tmp_path) is None


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
    from fusestep.kernels.cpu.threads import parallel

    used = []
    run_all = parallel.run_all
    monkeypatch.setattr(
        parallel, "run_all",
        lambda loops: (used.extend(loop.words[-1] for loop in loops), run_all(loops)))  # fmt: skip
    set_num_threads(1)
    try:
        w = np.ones(200_000, np.float32)
        nn.Adam([w])((np.ones_like(w),))
    finally:
        set_num_threads(None)
    assert set(used) == {1}


def test_a_limit_of_one_call():
    """It is that of its Python thread, of an inner call too, and ends with the call."""
    few, fewer, many = (Limit(n, f"at most {n}") for n in (2, 1, 99))
    elsewhere: list[int] = []

    def ask():
        thread = threading.Thread(target=lambda: elsewhere.append(get_num_threads()))
        thread.start()
        thread.join()
        return get_num_threads()

    def fail():
        raise KeyboardInterrupt

    available = ask()
    assert limit_threads(fewer, ask) == limit_threads(fewer, limit_threads, many, ask) == 1
    assert (
        limit_threads(fewer, limit_threads, None, ask)
        == limit_threads(few, limit_threads, fewer, ask)
        == 1
    )
    assert limit_threads(fewer, deciding_limit) == fewer
    assert limit_threads(many, ask) == limit_threads(None, ask) == available
    with pytest.raises(KeyboardInterrupt):
        limit_threads(fewer, fail)
    assert ask() == available
    assert len(elsewhere) == 8
    assert len(set(elsewhere)) == 1


def test_a_limit_ends_with_its_call_whatever_interrupts_it():
    available, alone, moment = get_num_threads(), Limit(1, "a test"), 0
    while done_at(moment, lambda: limit_threads(alone, get_num_threads), interrupt) > moment:
        assert get_num_threads() == available, moment
        moment += 1
    assert moment > 5
