"""Forks while other threads compile, start threads or step: no child waits for one of them."""

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from fusestep.kernels.cpu.threads import layers, parallel, tbb
from helpers import more
from subprocesses import output_of, run_python

LAYERS = ["workqueue", "omp", *(["tbb"] if find_spec("numba.np.ufunc.tbbpool") else [])]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

FORK_BETWEEN = """
    import os, signal, sys, threading, time, warnings
    warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of forks beside threads
    from llvmlite.binding import ffi
    from numba.core import event
    from numba.np.ufunc import parallel as of_numba
    from fusestep.kernels.cpu.compiler.compile import NativeFunction
    from fusestep.kernels import cache
    from fusestep.kernels.cpu.threads import layers, parallel

    cache.save = lambda *_: None  # so that it is new again in the next process

    def compile_new():
        def function(n):
            pass
        NativeFunction(function, "a test of forks").address

    busy = threading.Event()

    class WaitingPass(event.Listener):
        def on_start(self, _):
            if not busy.is_set():
                busy.set()
                time.sleep(1)
        def on_end(self, _):
            pass

    def compile_slowly():
        with event.install_listener("numba:run_pass", WaitingPass()):
            compile_new()

    def hold(lock):
        with lock:
            busy.set()
            time.sleep(1)

    other = {
        "compiler": compile_slowly,
        "LLVM": lambda: hold(ffi.lib._lock),
        "first step": lambda: hold(layers._start_lock),
        "start of threads": lambda: hold(of_numba._backend_init_thread_lock),
        "workqueue": lambda: hold(layers._workqueue_lock),
    }[sys.argv[1]]
    thread = threading.Thread(target=other)
    thread.start()
    busy.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that waits for a thread of its parent
        compile_new()
        parallel.start_threads()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    thread.join()
    compile_new()
    print("ended with", status)
"""


@pytest.mark.parametrize(
    "busy", ["compiler", "LLVM", "first step", "start of threads", "workqueue"]
)
def test_fork_while_another_thread_holds_a_lock(busy):
    """The fork waits for it, so the child finds it free, and the parent too afterwards."""
    printed = output_of(FORK_BETWEEN, busy, NUMBA_THREADING_LAYER="workqueue")
    assert printed == "ended with 0\n"


def test_what_surrounds_a_fork():
    """A fork that is interrupted while it waits, one within it as of a signal handler, and the
    functions of the child: no lock stays taken, and those come in order when locks are free."""
    program = """
        import os, threading
        from fusestep.kernels.cpu.process.forks import fork_between, in_child

        class Waiting:
            act = staticmethod(lambda: None)
            def __enter__(self):
                act, self.act = self.act, lambda: None
                act()
            def __exit__(self, *_):
                pass

        def interrupt():
            raise KeyboardInterrupt

        def fork_within():
            assert os.fork() or os._exit(0)

        lock, waiting, called = threading.RLock(), Waiting(), []
        fork_between(lock, waiting)

        @in_child
        def first():
            called.append(lock._is_owned())
            raise KeyboardInterrupt

        @in_child
        def second():
            called.append("second")

        for waiting.act, n_children in ((interrupt, 1), (fork_within, 2), (lambda: None, 1)):
            if os.fork() == 0:
                os._exit(called[-2:] != [False, "second"] or lock._is_owned())
            ended = [os.wait()[1] for _ in range(n_children)]
            print(ended, lock._is_owned(), called)
    """
    assert output_of(program) == "[0] False []\n[0, 0] False []\n[0] False []\n"


def test_a_fork_holds_its_locks_longest():
    """Regions may begin before another fork does. Where nothing has run, nothing is compiled."""
    program = """
        import os
        from fusestep.kernels.cpu.process.forks import fork_between
        from fusestep.kernels.cpu.threads import layers, parallel

        class Looking:
            def __enter__(self):
                seen.append(layers.regions.value)
            def __exit__(self, *_):
                seen.append(layers.regions.value)

        seen = []
        fork_between(Looking())
        for step in (lambda: None, parallel.start_threads):
            step()
            if os.fork() == 0:
                os._exit(0)
            print(os.wait()[1], *seen, layers.add_atomically.is_loaded)
    """
    assert output_of(program, NUMBA_NUM_THREADS="2") == "0 0 0 False\n0 0 0 0 0 True\n"


def test_a_child_of_a_fork_within_a_step_takes_the_next_one():
    """Its optimizer has a lock, which a thread held that the child does not have."""
    program = """
        import os, signal, threading
        import numpy as np
        from fusestep import nn

        g, reads, forked = np.ones(3, np.float32), threading.Event(), threading.Event()
        opt = nn.Adam([np.ones(3, np.float32)], use_locking=True)
        opt((g,))

        class Waiting:
            def __array__(self, *_, **__):
                reads.set(), forked.wait(60)
                return g

        thread = threading.Thread(target=opt, args=((Waiting(),),))
        thread.start()
        reads.wait(60)
        if os.fork() == 0:
            signal.alarm(60)  # ends a child that waits for a thread of its parent
            opt((g,))
            os._exit(opt.global_step.item() != 2)
        forked.set()
        thread.join()
        print(os.wait()[1], opt.global_step.item())
    """
    assert output_of(program) == "0 2\n"


def test_forks_are_hooked_in_one_file():
    root = Path(parallel.__file__).parents[3]
    files = [path for layer in ("kernels", "ops", "nn") for path in (root / layer).rglob("*.py")]
    hooked = {str(p.relative_to(root)) for p in files if "register_at_fork" in p.read_text("utf-8")}
    assert hooked == {"kernels/cpu/process/forks.py"}


def test_first_steps_import_nothing_beside_a_lock():
    """A fork meanwhile would leave the child with a module that is never ready."""
    program = """
        import sys
        import numpy as np
        from fusestep import nn
        from fusestep.kernels.cpu.compiler.compile import _lock
        from fusestep.kernels.cpu.threads.layers import _start_lock
        from numba.core.compiler_lock import global_compiler_lock

        class Look:
            def find_spec(self, name, path=None, target=None):
                held = (global_compiler_lock._lock, _lock, _start_lock)
                if not any(lock._is_owned() for lock in held):
                    print(name)

        sys.meta_path.insert(0, Look())
        for n in (4, 140_000):
            opt = nn.LazyAdam([np.ones((n, 2), np.float32)])
            opt([np.ones((n, 2), np.float32)])
            opt([nn.RowTensor(np.zeros(2, int), np.ones((2, 2), np.float32), (n, 2))])
    """
    assert output_of(program) == ""


# Children that step, forked by one thread or several while others step.
FORKS = """
    import collections, os, signal, sys, threading, warnings
    import numpy as np
    from fusestep import get_num_threads, nn, threading_layer

    warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of forks beside threads
    forking, n_forks = sys.argv[1], int(sys.argv[2])

    def made():
        arrays = [np.ones(200_000, np.float32), np.ones((40, 3), np.float32)]
        gradients = [np.full_like(array, 0.5) for array in arrays]
        opt = nn.Momentum(arrays, 0.5, 0.9)
        return lambda: opt(gradients), lambda: b"".join(array.tobytes() for array in arrays)

    def stepped():
        step, bits = made()
        step()
        step()
        return bits()

    expected, found, stop = stepped(), collections.Counter(), threading.Event()

    def work():
        step, _ = made()
        while not stop.is_set():
            step()

    def work_in_new_threads():
        while not stop.is_set():
            thread = threading.Thread(target=stepped)
            thread.start()
            thread.join()

    def fork(n):
        step, _ = made()
        for _ in range(n):
            child = os.fork()
            if child == 0:
                signal.alarm(60)  # ends a child that waits for a thread of its parent
                same = stepped() == expected
                os._exit(get_num_threads() if same else 99)
            found[os.waitpid(child, 0)[1]] += 1
            step()

    workers = [threading.Thread(target=target) for target in (work, work, work_in_new_threads)]
    forkers = [threading.Thread(target=fork, args=(n_forks // 2,)) for _ in range(2)]
    [thread.start() for thread in workers]
    if forking == "main":
        fork(n_forks)
    else:
        [thread.start() for thread in forkers]
        [thread.join() for thread in forkers]
    stop.set()
    [thread.join() for thread in workers]
    assert get_num_threads() == 2 and stepped() == expected
    print(threading_layer(), *sorted(found), found.total())
"""


@pytest.mark.parametrize("n_forks", [20, more(400)])
@pytest.mark.parametrize("forking", ["main", "other"])
@pytest.mark.parametrize("layer", LAYERS)
def test_children_step_that_were_forked_while_others_step(layer, forking, n_forks):
    """And nobody says anything about it: Numba's layer of TBB would, in every fork."""
    environment = {"NUMBA_NUM_THREADS": "2", "NUMBA_THREADING_LAYER": layer}
    done = run_python(FORKS, forking, n_forks, **environment)
    assert done.stderr == ""
    printed, *statuses, n = done.stdout.split()
    assert (printed, n) == (layer, str(n_forks))
    # Exit codes: on how many threads. TBB can be used where the others had just ended.
    possible = {"workqueue": {2 << 8}, "omp": {1 << 8}, "tbb": {1 << 8, 2 << 8}}
    assert {*map(int, statuses)} <= possible[layer]


@pytest.mark.skipif("tbb" not in LAYERS, reason="there is no wheel of tbb for this system")
def test_what_a_child_can_use_of_tbb():
    """It begins anew where no other thread has a place in it, whatever thread forks."""
    program = """
        import os, threading, time
        import numpy as np
        from fusestep import nn
        from fusestep.kernels.cpu.threads import parallel

        def step():
            array = np.ones(200_000, np.float32)
            nn.SGD([array], 0.5)((np.ones_like(array),))
            assert (array == 0.5).all()

        def fork(generations=2):
            child = os.fork()
            if child == 0:
                step()
                limit = parallel.deciding_limit()
                print(parallel.get_num_threads(), limit.source, flush=True)
                if generations > 1:
                    fork(generations - 1)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0

        def in_thread(*work):
            thread = threading.Thread(target=lambda: [each() for each in work])
            thread.start()
            thread.join()
            while os.path.exists(f"/proc/self/task/{thread.native_id}"):  # it leaves TBB last
                time.sleep(0.001)

        in_thread(step, fork)
        in_thread(step)
        fork()
        step()
        in_thread(step, fork)
        fork()
    """
    printed = output_of(program, NUMBA_NUM_THREADS="2", NUMBA_THREADING_LAYER="tbb")
    anew = "2 the cores of this process\n" * 2
    lost = "1 a fork while other threads had used tbb\n" * 2
    assert printed == anew + anew + lost + anew


@pytest.mark.skipif("tbb" not in LAYERS, reason="there is no wheel of tbb for this system")
def test_a_fork_of_which_tbb_hears_nothing():
    """An interrupt while the fork waits for a lock: TBB has not ended, unlike at the fork before.
    The child does without TBB, whose threads it does not have."""
    program = """
        import os, signal, sys, threading
        import numpy as np
        from fusestep import get_num_threads, nn
        from fusestep.kernels.cpu.process.forks import fork_between

        sys.unraisablehook = lambda *_: None

        class Interrupted:
            is_next = False
            def __enter__(self):
                if self.is_next:
                    raise KeyboardInterrupt
            def __exit__(self, *_):
                pass

        def step():
            array = np.ones(200_000, np.float32)
            nn.SGD([array], 0.5)((np.ones_like(array),))
            assert (array == 0.5).all()

        def forked(program):
            child = os.fork()
            if child == 0:
                signal.alarm(60)  # ends a child that waits for a thread of its parent
                program()
                os._exit(get_num_threads())
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        def step_and_fork():
            step()
            lock.is_next = True
            print(forked(step), flush=True)
            lock.is_next = False

        lock = Interrupted()
        fork_between(lock)
        step()
        print(forked(step_and_fork), flush=True)
        step_and_fork()
    """
    printed = output_of(program, NUMBA_NUM_THREADS="2", NUMBA_THREADING_LAYER="tbb")
    assert printed == "1\n2\n1\n"


@pytest.mark.parametrize("layer", LAYERS)
def test_a_signal_handler_forks_within_a_step(layer):
    """Parent and child both end the step, the child on the threads that it has."""
    program = """
        import os, signal, sys
        import numpy as np
        from fusestep import nn, threading_layer
        from fusestep.kernels.cpu.threads import parallel

        array, ones = np.ones(200_000, np.float32), np.ones(200_000, np.float32)
        opt = nn.SGD([array], 0.5)
        opt((ones,))
        children, run_words = [], parallel.run_words

        def interrupted(words):  # cut for two threads
            assert max(words[parallel._THREADS :: parallel._LOOP_WORDS]) == 2
            signal.raise_signal(signal.SIGUSR1)
            run_words(words)

        signal.signal(signal.SIGUSR1, lambda *_: children.append(os.fork()))
        parallel.run_words = interrupted
        opt((ones,))
        parallel.run_words = run_words
        (child,) = children
        if child == 0:
            signal.alarm(60)
        opt((ones,))
        assert (array == -0.5).all(), array
        if child == 0:
            os._exit(0)
        print(threading_layer(), os.waitpid(child, 0)[1])
    """
    printed = output_of(program, NUMBA_NUM_THREADS="2", NUMBA_THREADING_LAYER=layer)
    assert printed == f"{layer} 0\n"


@pytest.mark.parametrize("layer", LAYERS)
def test_a_fork_interrupted_at_any_moment(layer):
    """It happens, and leaves nothing taken: other threads compile and step in parallel."""
    program = """
        import inspect, os, sys, threading
        from fusestep.kernels.cpu.compiler import compile
        from fusestep.kernels.cpu.threads import layers, parallel
        from fusestep.kernels.private import compiler_locks

        parallel.start_threads()
        process, moment = os.getpid(), 0
        locks = compile._lock, *compiler_locks(), layers._workqueue_lock
        sys.unraisablehook = (kept := []).append  # with what the frames of the hook hold

        def look(frame, event, _argument):
            global passed
            # Where a generator goes on Python looks at no signals.
            if event != "c_return" and frame.f_code.co_flags & inspect.CO_GENERATOR:
                return
            passed += event in ("call", "return", "c_return")
            if passed > moment and os.getpid() == process:
                sys.setprofile(None)
                raise KeyboardInterrupt

        def take_all():
            for lock in locks:
                assert lock.acquire(timeout=20), (lock, moment)
                lock.release()
            parallel.start_threads()
            taken.append(moment)

        while True:
            passed, taken, child = 0, [], None
            try:
                sys.setprofile(look)
                child = os.fork()
            except KeyboardInterrupt:
                child = os.waitpid(-1, 0)[0]
            else:
                sys.setprofile(None)
                if child == 0:
                    take_all()
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0, moment
            thread = threading.Thread(target=take_all)
            thread.start()
            thread.join()
            assert taken == [moment] and layers.regions.value == 0
            if passed <= moment:
                break
            moment += 1
        assert moment > 20, moment
        print(parallel.get_num_threads())
    """
    assert output_of(program, NUMBA_NUM_THREADS="2", NUMBA_THREADING_LAYER=layer) == "2\n"


@pytest.mark.skipif("tbb" not in LAYERS, reason="needs TBB")
def test_a_module_of_tbb_without_a_definition(monkeypatch):
    """As one that is made in another way: TBB is left to Numba."""
    parallel.start_threads()
    if layers.threading_layer() != "tbb":
        pytest.skip("another layer runs")
    assert tbb._library() is not None
    monkeypatch.setattr(tbb, "_definition_of", lambda _: ctypes.POINTER(tbb._Definition)())
    assert tbb._library.__wrapped__() is None
