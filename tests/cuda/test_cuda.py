"""CUDA kernels without a GPU: index arithmetic under the simulator, and their machine code."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from subprocesses import ENVIRONMENT

HERE = Path(__file__).parent
needs_numba_cuda = pytest.mark.skipif(
    find_spec("numba_cuda") is None, reason='needs numba-cuda: pip install ".[sass]"'
)
CHECKS = {
    "cuda_simulation.py": (
        "every_rule", "sizes_and_prologues", "storage_types", "unaligned", "row_steps",
        "row_storage_types", "hot_rows", "guards", "sorting", "finite_values",
    ),
    "device_operators.py": ("operators",),
    "device_optimizers.py": ("dense_optimizers", "row_optimizers", "copies"),
    "device_graphs.py": ("numbers", "graphs"),
    "device_changes.py": ("options", "graphs"),
    "device_gradients.py": ("row_tensors", "centralization"),
    "device_adafactor.py": ("values", "shapes", "types", "states"),
    "device_errors.py": ("index_errors", "locking", "refusals"),
    "device_mxnet.py": ("adam_update", "optimizers", "updaters"),
    "device_thor.py": ("steps", "states", "numbers", "errors"),
    "framework_simulation.py": ("arrays", "steps", "graphs", "gradients", "thor"),
}  # fmt: skip
CAPABILITIES = ("8.0", "9.0a")
# Registers that a thread may have, so that enough of them fit to hide the latency of memory:
# 64 Ki of them are 4 blocks of 256 threads at 64, and 3 at 65 to 85.
MOST_REGISTERS = {"float32": 64, "others": 80}
# Integers, whose order does not matter: digits are counted in shared memory, and the first bad
# index is the smallest.
INTEGER_ATOMICS = {
    "sort count": {"ATOMS.POPC.INC.32", "ATOMS.ADD"},
    "rows check": {"REDG.E.MIN.S64.STRONG.GPU", "RED.E.MIN.S64.STRONG.GPU"},
    "gather": {"REDG.E.MIN.S64.STRONG.GPU", "RED.E.MIN.S64.STRONG.GPU"},
}


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, str(HERE / program), *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@needs_numba_cuda
@pytest.mark.parametrize(("program", "check"), [(p, c) for p in CHECKS for c in CHECKS[p]])
def test_under_the_simulator(program: str, check: str) -> None:
    if "thor" in program + check:
        pytest.importorskip("scipy", reason="the factors are inverted by scipy's LAPACK")
    assert run(program, check) == "right\n"


@cache
def report(capability: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(run("cuda_report.py", capability))
    return found


@needs_numba_cuda
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_nothing_spills(capability: str) -> None:
    for name, code in report(capability).items():
        assert code["stack"] == 0, name
        assert not any(kind.startswith(("LDL", "STL")) for kind in code["memory"]), name


@needs_numba_cuda
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_registers_stay_within_their_budget(capability: str) -> None:
    for name, code in report(capability).items():
        is_mixed = name.rpartition(" ")[2] in ("f16", "bf16", "f64")
        assert code["registers"] <= MOST_REGISTERS["others" if is_mixed else "float32"], name


@needs_numba_cuda
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_loads_and_stores_are_of_16_bytes(capability: str) -> None:
    """At least one for each array; what is narrower is tails, the table and the scalars."""
    for name, code in report(capability).items():
        memory = code["memory"]
        if name.startswith("dense"):
            assert memory["LDG.E.128"] >= code["read"], name
            assert memory["STG.E.128"] >= code["written"], name
        elif name.startswith(("rows lazy", "rows sweep")):  # w, m, v, and the gradient 4 + 1 times
            assert memory["LDG.E.128"] >= 8, name
            assert memory["STG.E.128"] >= 3, name
        elif name.startswith("rows") and "sums" in name:  # the first, one more, and four at once
            assert memory["LDG.E.128"] >= 6, name
            assert memory["STG.E.128"] >= 1, name
        elif name.startswith(("rows hot", "finite", "central", "factored squares")):
            assert memory["LDG.E.128"] >= 1, name
            assert memory.get("STG.E.128", 0) >= ("difference" in name), name
        elif name.startswith("factored direction"):  # w, g, factors of columns
            assert memory["LDG.E.128"] >= 3, name
        elif name.startswith("factored update"):  # and the first moment, if there is one
            n_written = 1 if name.endswith("plain") else 2
            assert memory["LDG.E.128"] >= 2 + n_written, name
            assert memory["STG.E.128"] >= n_written, name


@needs_numba_cuda
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_no_float_atomics_and_no_64_bit_division(capability: str) -> None:
    for name, code in report(capability).items():
        atomics = {kind for kind in code["memory"] if kind.startswith(("ATOM", "RED"))}
        assert atomics <= INTEGER_ATOMICS.get(name, set()), name
        assert code["64-bit divisions"] == 0, name
