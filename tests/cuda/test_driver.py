"""The real stack of CUDA under a driver without a device: what launches, and with what."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import stub

pytestmark = pytest.mark.skipif(stub.lacks() != "", reason=stub.lacks())
# Of each kind of kernel one, compiled: as checks, and as a program.
SAMPLE = (
    "dense/Adam/bfloat16", "dense/Lamb", "rows/LazyAdam/hot", "rows/RowWiseAdagrad",
    "bags/LazyAdam", "ops/clip_by_global_norm")  # fmt: skip
CHECK = """
import sys
from fusestep.bench.gpu import clock
from test_device_checks import CHECKS, results
for name in sys.argv[1:]:
    results(CHECKS[name], clock.put)
"""
OTHERS = """
import numpy as np
from fusestep import nn, synchronize
from fusestep.bench.gpu.clock import put, zeros

group = {"params": [zeros((60, 9)), zeros((2, 100_003))], "grad_centralization": True}
nn.Momentum([group], 0.1, 0.9)((zeros((60, 9)), zeros((2, 100_003))))
tables = [zeros((50, width)) for width in (2, 4, 6)]
pooled = nn.EmbeddingBags(tables, nn.LazyAdam(tables, 0.1), "max")
pooled([put(np.arange(30))] * 3, [put(np.arange(0, 31, 3))] * 3)
pooled.backward(zeros((10, 12), np.float64))
nn.RowTensor(put(np.array([3, 1, 3])), zeros((3, 12)), (60, 12)).coalesce()
synchronize()
"""


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has it."""
    return stub.environment(stub.build(tmp_path_factory.mktemp("driver")))


def run(
    driver: dict[str, str], *arguments: str, fails: bool = False, **settings: str
) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, *arguments], {**driver, **settings}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == int(fails), done.stderr[-3_000:]
    return done


@pytest.mark.parametrize(
    ("program", "names"), [(CHECK, SAMPLE[:3]), (CHECK, SAMPLE[3:]), (OTHERS, ())]
)
def test_compiled_kernels_are_launched(
    driver: dict[str, str], program: str, names: tuple[str, ...]
) -> None:
    """The arguments that the driver reads are those of the compiled kernels."""
    run(driver, "-c", program, *names, PYTHONPATH=os.pathsep.join(sys.path))


PROGRAM = """
import os
import numpy as np
from numba import cuda
from fusestep import nn

table = nn.Parameter(cuda.device_array((50, 4), np.float32), "table")
optimizer = nn.LazyAdam([table], 0.1)
values = cuda.device_array((5, 4), np.float32)
gradient = nn.RowTensor(cuda.to_device(np.arange(5)), values, (50, 4))
optimizer((gradient,))
"""
FAILING = """
before = int(optimizer.global_step[0])
os.environ["FUSESTEP_STUB_FAILS"] = "cuLaunchKernelEx:2:719"
try:
    optimizer((gradient,))
except Exception as error:
    print("OF_THE_STUB" in str(error), int(optimizer.global_step[0]) - before)
optimizer((gradient,))
print(int(optimizer.global_step[0]) - before)
"""


def test_a_launch_that_fails_counts_nothing(driver: dict[str, str]) -> None:
    assert run(driver, "-c", PROGRAM + FAILING).stdout.splitlines() == ["True 0", "1"]


def test_a_launch_by_numba(driver: dict[str, str]) -> None:
    """Where Numba has no kernel for the bindings."""
    without = (
        "from fusestep.kernels.cuda.device import driver\ndriver.cubin_of = lambda loop: None\n"
    )
    run(driver, "-W", "error", "-c", without + PROGRAM)


OWN_RULE = """
from types import ModuleType
from fusestep.nn import Formula, FusedOptimizer, Rule
settings = ModuleType("settings")
settings.factor, half = 1.0, 0.5
def update(w, g, hp):
    def scaled(x):
        return x * half
    return w - hp.lr * settings.factor * scaled(g)
class Own(FusedOptimizer):
    def formula(self):
        return Formula(lambda real, lr, *_: (lr,))
w = cuda.device_array(5, np.float32)
Own(0.1, [w], rule=Rule(update, (), ("lr",)))((cuda.device_array(5, np.float32),))
"""
COUNT = """
from numba.cuda.dispatcher import CUDADispatcher
compile, names = CUDADispatcher.compile, []
def counted(self, *arguments):
    names.append(self.py_func.__qualname__)
    return compile(self, *arguments)
CUDADispatcher.compile = counted
"""


def test_kernels_are_compiled_once(driver: dict[str, str], tmp_path: Path) -> None:
    """A later process compiles nothing but what has changed: a rule that was edited, say."""
    edits = ("w - hp.lr", "w - 2.0 * hp.lr"), ("factor, half = 1.0", "factor, half = 3.0"), (
        "1.0, 0.5", "1.0, 0.25")  # fmt: skip
    edited = [PROGRAM + OWN_RULE.replace(*edit) for edit in edits]
    numbers = []
    for program in (PROGRAM + OWN_RULE, PROGRAM + OWN_RULE, *edited):
        done = run(driver, "-c", COUNT + program + "print(len(names))",
                   FUSESTEP_CACHE_DIR=str(tmp_path))  # fmt: skip
        numbers.append(int(done.stdout))
    assert numbers[0] > 3
    assert numbers[1:] == [0, 1, 1, 1]


def test_kernels_are_compiled_ahead(driver: dict[str, str], tmp_path: Path) -> None:
    """No step compiles kernels that ``fusestep warmup --cuda`` has compiled."""
    kept = {"FUSESTEP_CACHE_DIR": str(tmp_path)}
    warmup = "-m", "fusestep", "warmup", "--cuda", "--plain", "--rule", "adam"
    done = run(driver, *warmup, **kept)
    assert f"kept in {tmp_path}" in done.stdout
    done = run(driver, "-c", COUNT + PROGRAM + "print(names)", **kept)
    assert done.stdout == "[]\n"


def replaced(place: str, value: str) -> str:
    """The program with another value of a module's attribute from its first import on."""
    module, name = place.rsplit(".", 1)
    change = f"import {module}\n{module}.{name} = {value}\n"
    return UNCOMPILED + PROGRAM.replace("from numba", f"{change}from numba", 1)


UNCOMPILED = COUNT + "CUDADispatcher.compile = None\n"
"""Versions that do not fit are told of before anything is compiled."""
FAULTS: dict[str, tuple[str, dict[str, str], str]] = {
    "launch": (PROGRAM, {"FAILS": "cuLaunchKernelEx:2:719"}, "OF_THE_STUB"),
    "copy": (PROGRAM, {"FAILS": "cuMemcpyHtoDAsync_v2:1:700"}, "ILLEGAL_ADDRESS"),
    "NumPy": (replaced("numpy.__version__", "'2.5.2'"), {"VERSION": "13000"},
              "pip install 'numpy<2.5'"),
    "nvJitLink": (replaced("cuda.bindings.nvjitlink.version", "lambda: (13, 0)"),
                  {"VERSION": "13000"}, "nvJitLink is older than NVVM: expected at least 13."),
    "driver": (UNCOMPILED + PROGRAM, {"VERSION": "12080"},
               "the driver is older than nvJitLink: expected at least 13, got 12.8;"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_errors_of_the_driver(driver: dict[str, str], name: str, tmp_path: Path) -> None:
    program, settings, text = FAULTS[name]
    given = {f"FUSESTEP_STUB_{key}": value for key, value in settings.items()}
    done = run(driver, "-c", program, fails=True, FUSESTEP_CACHE_DIR=str(tmp_path), **given)
    assert text in done.stderr.splitlines()[-1], done.stderr[-2_000:]
