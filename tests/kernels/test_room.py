"""Steps where memory or threads are short: serial ones, or an error before anything happens."""

import sys
from textwrap import dedent

import pytest
from helpers import more
from subprocesses import output_of
from test_forks import LAYERS

ON_LINUX = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the limit and /proc are Linux's"
)
MEMORY = """
import resource, sys
import numpy as np
from fusestep import nn

_, most = resource.getrlimit(resource.RLIMIT_AS)


def bits(arrays):
    return [array.tobytes() for array in arrays]


def used():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()

"""
SWEEP = MEMORY + dedent("""
    import os, signal
    from fusestep import get_num_threads, threading_layer

    layer, step_bytes = sys.argv[1], int(sys.argv[2])

    def made(n):
        tables = [np.ones(n, np.float32), np.ones((n // 10, 10))]
        opt = nn.Momentum(tables, 0.5, 0.9)
        gradients = [np.full_like(table, 0.5) for table in tables]
        return lambda: opt(gradients), [*tables, *opt.state_arrays().values()]

    def outcome(room):
        \"\"\"Of a first parallel step that may take so much memory, and how it goes on.\"\"\"
        step, arrays = made(200_000)
        before = bits(arrays)
        if room is not None:
            resource.setrlimit(resource.RLIMIT_AS, (used() + room, most))
        try:
            step()
        except MemoryError:
            found = "failed"
            assert bits(arrays) == before
        else:
            found = "serial" if threading_layer() is None else "parallel"
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        step()
        if found == "failed":
            step()
        assert (get_num_threads(), threading_layer()) == (2, layer)
        os.write(to_parent, b"".join(bits(arrays)))
        return found

    def in_child(room):
        \"\"\"The outcome, and the arrays after two steps.\"\"\"
        global to_parent
        from_child, to_parent = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(OUTCOMES.index(outcome(room)) + 1)
        os.close(to_parent)
        with open(from_child, "rb") as file:
            arrays = file.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code > 0, (code, room)
        return OUTCOMES[code - 1], arrays

    OUTCOMES = ["failed", "serial", "parallel"]
    step, _ = made(100)
    step()
    assert threading_layer() is None  # until a child starts it
    _, expected = in_child(None)  # and what is compiled for it is kept
    found, room = [], 0
    while found.count("parallel") < 3:
        which, arrays = in_child(room)
        assert arrays == expected, room
        found.append(which)
        room += step_bytes
    print(found.count("serial") + found.count("failed"))
""")


@ON_LINUX
@pytest.mark.parametrize("step_bytes", [4 << 20, more(1 << 19)])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_first_parallel_step_while_memory_is_short(layer, step_bytes):
    """Libraries of threads would end the process, or Numba would keep the next layer for good."""
    environment = {"NUMBA_NUM_THREADS": "2"}
    if layer != LAYERS[-1]:  # the one that is taken by itself
        environment["NUMBA_THREADING_LAYER"] = layer
    assert int(output_of(SWEEP, layer, step_bytes, **environment)) > 5


@pytest.mark.parametrize("layer", LAYERS)
def test_the_first_parallel_step_where_no_thread_can_be_started(layer):
    """As in a container that limits them."""
    program = """
        import sys
        import numpy as np
        from fusestep import get_num_threads, nn, threading_layer
        from fusestep.kernels.cpu.process import room
        from fusestep.kernels.cpu.threads import parallel

        array, ones = np.ones(200_000, np.float32), np.ones(200_000, np.float32)
        opt, start = nn.SGD([array], 0.5), room._thread.start_new_thread
        started = []

        def start_one(*of_thread):
            if started:
                raise RuntimeError("can't start new thread")
            started.append(start(*of_thread))

        room._thread.start_new_thread = start_one
        opt((ones,))
        assert threading_layer() is None and started
        print(*parallel.deciding_limit(), sep="|")
        room._thread.start_new_thread = start
        opt((ones,))
        assert (array == 0).all() and get_num_threads() == 3
        print(threading_layer())
    """
    printed = output_of(program, NUMBA_NUM_THREADS="3", NUMBA_THREADING_LAYER=layer)
    assert printed == f"1|the memory and the threads that the system has left\n{layer}\n"


@ON_LINUX
@pytest.mark.parametrize("layer", LAYERS)
def test_a_step_after_a_fork_where_no_thread_can_be_started(layer):
    """Threads end at a fork, in the child at least; a library would end the process, or wait."""
    program = """
        import os, resource, signal
        import numpy as np
        from fusestep import nn, set_num_threads

        array, ones = np.ones(200_000, np.float32), np.ones(200_000, np.float32)
        opt = nn.SGD([array], 0.5)
        for n in (None, 1, None):  # nothing is compiled later
            set_num_threads(n)
            opt((ones,))

        def step():
            if os.geteuid() == 0:
                os.setuid(65534)  # no limit holds for root
            resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
            opt((ones,))
            assert (array == -1).all()

        if os.fork() == 0:
            signal.alarm(60)
            step()
            os._exit(0)
        assert os.wait()[1] == 0
        step()
    """
    output_of(program, NUMBA_NUM_THREADS="2", NUMBA_THREADING_LAYER=layer)


@ON_LINUX
def test_a_kernel_that_there_is_no_room_to_compile():
    program = """
        import resource
        import numpy as np
        from fusestep import nn
        array, ones = np.ones(8, np.float32), np.ones(8, np.float32)
        opt = nn.SGD([array], 0.5)
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20), most))
        try:
            opt((ones,))
        except MemoryError as error:
            print(error)
        assert (array == 1).all() and opt.global_step == 0
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        opt((ones,))
        assert (array == 0.5).all()
    """
    text = "fusestep: there is no room to load or compile a kernel: expected 192 MiB, got less\n"
    assert output_of(program, FUSESTEP_CACHE_DIR="") == text


AT_ANY_ALLOCATION = (
    MEMORY
    + """
from fusestep.kernels.cpu.threads import workspace

N, D, B = 20_000, 4, 60_000
rng = np.random.default_rng(0)
name, use_locking = sys.argv[1], sys.argv[2] == "True"


def rows(dtype):
    n = B * np.dtype(dtype).itemsize  # the second table needs more than the first leaves behind
    # A third of the occurrences are those of one row, which has sums of its own.
    indices = rng.integers(0, N, n) * (rng.random(n) < 0.7)
    return nn.RowTensor(indices, rng.standard_normal((n, D)).astype(dtype), (N, D))


def dense(dtype):
    return rng.standard_normal((N, D)).astype(dtype)


make = rows if name in ("Adam", "LazyAdam") else dense
gradients = tuple(make(dtype) for dtype in (np.float32, np.float64))


def made():
    tables = [np.ones((N, D), np.float32), np.ones((N, D))]
    opt = getattr(nn, name)(tables, use_locking=use_locking)
    return opt, [*tables, *opt.state_arrays().values()]


opt, arrays = made()
before = bits(arrays)
opt(gradients)
after = bits(arrays)
assert before != after
for _ in range(20):  # threads that begin late, on a busy machine, would take memory meanwhile
    made()[0](gradients)
counts = {"failed": 0, "done": 0}
room = 0
while counts["done"] < 3:
    opt, arrays = made()
    workspace._blocks.clear()  # as in the first step of a process
    resource.setrlimit(resource.RLIMIT_AS, (used() + room, most))
    try:
        opt(gradients)
    except MemoryError:
        outcome, expected = "failed", before
    else:
        outcome, expected = "done", after
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    counts[outcome] += 1
    assert bits(arrays) == expected, (outcome, room)
    room += 1 << 18
print(counts["failed"])
"""
)


@ON_LINUX
@pytest.mark.parametrize("use_locking", [False, True])
@pytest.mark.parametrize("name", ["Adam", "LazyAdam", "AdaFactor"])
def test_nothing_has_happened_where_memory_ends(name, use_locking):
    """At any allocation of a step: nothing has been written or counted."""
    # A second arena, which threads open that meet in malloc, has room that is counted already.
    malloc = {"MMAP_THRESHOLD_": 16384, "TRIM_THRESHOLD_": 0, "ARENA_MAX": 1}
    environment = {f"MALLOC_{option}": str(value) for option, value in malloc.items()}
    printed = output_of(AT_ANY_ALLOCATION, name, use_locking, NUMBA_NUM_THREADS="2", **environment)
    assert int(printed) > 0
