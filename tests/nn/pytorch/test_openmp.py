"""Steps on the threads of PyTorch's OpenMP: same bits, whoever runs the loops, and when not."""

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from ctypes.util import find_library
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import fusestep
from fusestep.kernels.cpu.threads import openmp, parallel
from fusestep.nn import torch as fused
from subprocesses import output_of, run_python
from test_threads import END, INTERRUPTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looked for on Linux alone")
N, ROWS, WIDTH, BATCH = 300_000, 5_000, 40, 20_000


@pytest.fixture(autouse=True)
def _two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, before))
    yield
    torch.set_num_threads(before)


def launches(patched: pytest.MonkeyPatch, choose: Callable[[], bool]) -> list[bool]:
    """From now on ``choose`` says whether OpenMP runs a loop; whether it did, of each."""
    if parallel.get_num_threads() < 2 or openmp.functions() is None:
        pytest.skip("a step has one launcher here")
    taken: list[bool] = []

    def is_awake(_size: int) -> bool:
        taken.append(choose())
        return taken[-1]

    patched.setattr(openmp, "is_awake", is_awake)
    return taken


def trained(steps: int = 4) -> list[torch.Tensor]:
    """Parameters after some steps with dense and sparse gradients."""
    rng = np.random.default_rng(0)
    dense, table = (torch.nn.Parameter(torch.ones(shape)) for shape in ((N,), (ROWS, WIDTH)))
    optimizers = fused.AdamW([dense]), fused.LazyAdam([table]), fused.Adagrad([table])
    for _ in range(steps):
        dense.grad = torch.from_numpy(rng.standard_normal(N, np.float32))
        rows = torch.from_numpy(rng.zipf(1.3, BATCH) % ROWS)[None]
        values = torch.from_numpy(rng.standard_normal((BATCH, WIDTH), np.float32))
        table.grad = torch.sparse_coo_tensor(rows, values, (ROWS, WIDTH), check_invariants=True)
        for optimizer in optimizers:
            optimizer.step()
    return [dense.detach(), table.detach()]


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_both_launchers_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = launches(monkeypatch, lambda: False)
    wanted = trained()
    assert taken and not any(taken)
    rng = np.random.default_rng(1)
    for choose in (lambda: True, lambda: bool(rng.integers(2))):
        taken = launches(monkeypatch, choose)
        assert_equal(trained(), wanted)
        assert any(taken)


def test_a_python_thread_knows_what_ran_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    with monkeypatch.context() as patched:
        for choice in (False, True, False):
            launches(patched, lambda choice=choice: choice)
            trained(1)
            said.append(fusestep.launcher())
    assert said == [fusestep.threading_layer(), "openmp", fusestep.threading_layer()]
    other = threading.Thread(target=lambda: said.append(fusestep.launcher()))
    other.start()
    other.join()
    assert said[-1] is None


def test_a_step_in_a_hook_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch runs hooks on the thread that calls backward, or on one of its own."""
    launches(monkeypatch, lambda: True)

    def run(in_hook: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(300, 700), torch.nn.Linear(700, 300))
        parameters = list(layers.parameters())
        optimizers = {p: fused.AdamW([p]) for p in parameters}
        for p in parameters if in_hook else ():
            p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
        for _ in range(3):
            layers(torch.ones(64, 300)).square().mean().backward()
            for p in parameters:
                if not in_hook:
                    optimizers[p].step()
                p.grad = None
        return [p.detach() for p in parameters]

    assert_equal(run(True), run(False))


def test_threads_of_torch_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        launches(patched, lambda: False)
        wanted = trained()
    known = openmp.functions()
    torch.mm(torch.ones(300, 300), torch.ones(300, 300))
    for n in (2, 3, 2, 1, 4, 2):
        torch.set_num_threads(n)
        assert_equal(trained(), wanted)
        assert torch.get_num_threads() == n
    assert openmp.functions() is known


def test_a_smaller_budget_leaves_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = launches(monkeypatch, lambda: True)
    trained(1)
    assert taken
    taken.clear()
    torch.set_num_threads(parallel.get_num_threads() + 1)
    trained(1)
    assert not taken


def test_python_threads_that_step_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    launches(monkeypatch, lambda: True)
    wanted = trained()
    found: list[list[torch.Tensor]] = []
    threads = [threading.Thread(target=lambda: found.append(trained())) for _ in range(4)]
    for thread in threads:
        thread.start()
    torch.mm(torch.ones(500, 500), torch.ones(500, 500))
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    for result in found:
        assert_equal(result, wanted)


def test_threads_that_sleep_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        launches(patched, lambda: True)
        trained(1)
    size = torch.get_num_threads()
    openmp._team.size, openmp._team.left_alone = size, 0
    assert openmp._team.clock not in (0, openmp._NOBODY)
    time.sleep(0.3)
    assert not openmp.is_awake(size)


def test_a_worker_that_has_ended_is_looked_for_again() -> None:
    size = torch.get_num_threads()
    process_time_of_nobody = (~(1 << 22) << 3) | 6  # of a number that no thread has
    openmp._team.size, openmp._team.clock = size, process_time_of_nobody
    openmp._team.left_alone = 0
    assert openmp.is_awake(size)
    assert openmp._team.clock == 0
    openmp.record_loop(0, 0)  # it came alone
    assert not openmp.is_awake(size)
    assert openmp.is_awake(size + 1)  # another number of threads


def test_threads_that_come_late_are_left_alone_for_some_loops() -> None:
    size, clock = 2, time.pthread_getcpuclockid(threading.get_ident())  # which runs now
    openmp._team.size, openmp._team.patience, openmp._team.left_alone = size, 0, 0

    def loops_without() -> int:
        return next(k for k in range(1_000) if openmp.is_awake(size))

    def late() -> int:
        openmp.record_loop(clock, 1)
        return loops_without()

    openmp.record_loop(clock, 0)
    assert loops_without() == 0
    assert [late() for _ in range(6)] == [8, 24, 56, 120, 128, 128]
    for _ in range(128):
        openmp.record_loop(clock, 0)
    assert late() == 8
    openmp._team.size = 0


@pytest.mark.parametrize("can_start", [False, True])
def test_each_python_thread_starts_a_team_of_its_own(can_start: bool, monkeypatch) -> None:
    """Whatever is known of that of another thread. OpenMP ends the process if it cannot."""
    openmp._team.size, openmp._team.left_alone = 2, 0
    openmp.record_loop(time.pthread_getcpuclockid(threading.get_ident()), 0)
    assert openmp.is_awake(2)
    monkeypatch.setattr(openmp, "can_start", lambda _: can_start)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(openmp.is_awake(2)))
    thread.start()
    thread.join()
    openmp._team.size = 0
    assert found == [can_start]


STEP = """
    import fusestep
    import torch
    from fusestep import launcher
    from fusestep.kernels.cpu.threads import openmp
    from fusestep.nn import torch as fused
    openmp.is_awake = lambda size: True
    from fusestep.nn.torch.engine import chosen
    # `Tensor.is_neg` releases the GIL; in a daemon thread that takes it again when Python ends,
    # PyTorch aborts. Its own optimizers do so, too; here the loops are tried.
    chosen._is_negated = lambda gradient: False
    torch.set_num_threads(max(2, torch.get_num_threads()))
    parameters = [torch.nn.Parameter(torch.ones(1_000_000)) for _ in range(2)]
    opt = fused.SGD(parameters, lr=1.0)
    given = []
    def step(x):
        if given != [x]:  # PyTorch's own functions abort in a thread that Python ends
            given.clear()  # an interrupt may come between two gradients
            for p in parameters:
                p.grad = torch.full_like(p, x)
            given.append(x)
        opt.step()
    def check():
        assert all((p.detach() == parameters[0][0].detach()).all() for p in parameters)
"""


def test_an_interrupt_leaves_a_step_done_or_not_begun() -> None:
    assert output_of(STEP + INTERRUPTS) in ("openmp\n", f"{fusestep.threading_layer()}\n")


def test_the_process_ends_while_they_run_a_step() -> None:
    done = run_python(STEP + END, timeout=60)
    assert done.returncode == 7, done.stderr


WORKERS = """
import torch
from fusestep.kernels.cpu.threads import openmp
from fusestep.nn import torch as fused
if __name__ == "__main__":
    openmp.is_awake = lambda size: True
    torch.set_num_threads(max(2, torch.get_num_threads()))
    p = torch.nn.Parameter(torch.zeros(300_000))
    p.grad = torch.ones_like(p)
    optimizer = fused.SGD([p], lr=1.0)
    optimizer.step()
    class Steps(torch.utils.data.Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, index):
            assert openmp.functions() is None
            optimizer.step()  # of the child's copy
            return p.detach()[-1].item()
    loader = torch.utils.data.DataLoader(Steps(), num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        seen = sorted(float(x) for x in loader)
        optimizer.step()
        print(seen, float(p.detach()[0]))
"""


def test_workers_of_a_data_loader_step_on_their_own() -> None:
    """A forked child does not use them."""
    first, second = output_of(WORKERS).splitlines()
    assert first == "[-3.0, -3.0, -2.0, -2.0] -2.0"
    assert second == "[-4.0, -4.0, -3.0, -3.0] -3.0"


FORKING = """
import os, signal
import torch
from fusestep.kernels.cpu.threads import openmp
from fusestep.nn import torch as fused
torch.set_num_threads(max(2, torch.get_num_threads()))
p = torch.nn.Parameter(torch.zeros(300_000))
p.grad = torch.ones_like(p)
optimizer, children = fused.SGD([p], lr=1.0), []
openmp.is_awake = lambda size: True
optimizer.step()
def is_awake(size):
    signal.raise_signal(signal.SIGUSR1)
    return True
def fork(*_):
    children.append(os.fork())
    if 0 in children:
        signal.alarm(60)  # ends a child that waits for a thread of its parent
signal.signal(signal.SIGUSR1, fork)
openmp.is_awake = is_awake
optimizer.step()
if 0 in children:
    os._exit(set(p.tolist()) != {-2.0})
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], p[0].item())
"""


def test_a_signal_handler_forks_within_a_step() -> None:
    """Child and parent both end the step, the child without threads that it does not have."""
    several = fusestep.get_num_threads() > 1 and openmp.functions() is not None
    assert output_of(FORKING, timeout=100).strip() == f"{[0] * several} -2.0"


WANTED = """
import torch
from fusestep import threading_layer
from fusestep.kernels.cpu.threads import openmp, parallel
parallel.compile_loops()
print(openmp.functions() is not None, threading_layer())
"""


def test_they_are_used_beside_tbb() -> None:
    is_used, layer = output_of(WANTED).split()
    assert is_used == str(layer == "tbb")


@pytest.mark.parametrize(
    "environment",
    [{openmp.VARIABLE: "0"}, *({"NUMBA_THREADING_LAYER": x} for x in ("tbb", "workqueue"))],
)
def test_how_they_are_left_alone(environment: dict[str, str]) -> None:
    assert output_of(WANTED, **environment).split()[0] == "False"


def test_a_process_without_their_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch built without OpenMP, or with one that is linked statically: no name is exported."""
    name = find_library("m")
    if name is None:
        pytest.skip("no library without the names")
    trained()  # starts the threading layer, which loads a library too
    monkeypatch.setattr(ctypes, "CDLL", lambda _name, load=ctypes.CDLL: load(name))
    openmp.functions.cache_clear()
    wanted = trained()
    assert openmp.functions() is None and fusestep.launcher() != "openmp"
    monkeypatch.undo()
    openmp.functions.cache_clear()
    assert_equal(trained(), wanted)


AFTERWARDS = """
import numpy as np
import fusestep
from fusestep import nn
w = np.zeros(1_000_000, np.float32)
nn.SGD([w], 1.0)([np.ones_like(w)])
before = fusestep.launcher()
"""

BESIDE_A_RUNTIME = """
import ctypes
import sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
"""

ON_PYTORCHS_THREADS = """
import fusestep
import torch
from fusestep.kernels.cpu.threads import openmp
from fusestep.nn import torch as fused
torch.set_num_threads(max(2, torch.get_num_threads()))
openmp.is_awake = lambda size: True
p, q = (torch.nn.Parameter(torch.zeros(300_000)) for _ in range(2))
ours, theirs = fused.SGD([p], lr=0.5), torch.optim.SGD([q], lr=0.5)
for _ in range(3):
    p.grad = q.grad = torch.randn(300_000)
    ours.step()
    theirs.step()
several = fusestep.get_num_threads() > 1 and not openmp.why_not()
print(torch.equal(p, q) and (fusestep.launcher() == "openmp") == several)
"""


def test_pytorch_may_come_after_the_first_step() -> None:
    assert output_of(AFTERWARDS + ON_PYTORCHS_THREADS).strip() == "True"


@pytest.mark.parametrize("runtime", ["gomp", "iomp5", "omp"])
def test_another_runtime_in_the_process(runtime: str) -> None:
    """Loaded before PyTorch's own, or in its place: who calls it is the same one for both."""
    library = find_library(runtime)
    if library is None:
        pytest.skip(f"no lib{runtime} here")
    assert output_of(BESIDE_A_RUNTIME + ON_PYTORCHS_THREADS, library).strip() == "True"
    assert output_of(ON_PYTORCHS_THREADS, LD_PRELOAD=library).strip() == "True"
