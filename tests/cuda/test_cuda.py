"""CUDA kernels without a GPU: index arithmetic under the simulator, and their machine code."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from helpers import more
from subprocesses import ENVIRONMENT

HERE = Path(__file__).parent
needs_numba_cuda = pytest.mark.skipif(
    find_spec("numba_cuda") is None, reason='needs numba-cuda: pip install ".[sass]"'
)
# What takes long begins first, here and in `PARTS`.
CHECKS = (
    ("device_row_wise.py", "rows"),
    ("device_gradients.py", "centralization"),
    ("device_row_wise.py", "dense"),
    ("device_bags.py", "steps"),
    ("device_bags.py", "pooling"),
    ("device_bags.py", "hot"),
    ("device_loops.py", "hot_rows"),
    ("device_mxnet.py", "optimizers"),
    ("device_optimizers.py", "dense_optimizers"),
    ("device_gradients.py", "row_tensors"),
    ("device_loops.py", "loops"),
    ("device_loops.py", "rows"),
    ("device_operators.py", "operators"),
    ("device_optimizers.py", "row_optimizers"),
    ("device_optimizers.py", "copies"),
    ("device_changes.py", "options"),
    ("device_changes.py", "numbers"),
    ("device_changes.py", "captures"),
    ("device_row_wise.py", "tensors"),
    ("device_row_wise.py", "others"),
    ("device_bags.py", "forms"),
    ("device_bags.py", "errors"),
    ("device_errors.py", "index_errors"),
    ("device_errors.py", "locking"),
    ("device_errors.py", "refusals"),
    ("device_mxnet.py", "adam_update"),
    ("device_mxnet.py", "updaters"),
    ("device_routes.py", "routes"),
    ("device_thor.py", "steps"),
    ("device_thor.py", "states"),
    ("device_thor.py", "numbers"),
    ("device_thor.py", "errors"),
    ("device_frameworks.py", "arrays"),
    ("device_frameworks.py", "steps"),
    ("device_frameworks.py", "captures"),
    ("device_frameworks.py", "gradients"),
    ("device_frameworks.py", "thor"),
)
PARTS = ("row-wise", "bags", "rules", "others", "torch", "mixtures", "gradients")
# Registers that a thread may have, so that enough of them fit to hide the latency of memory:
# 64 Ki of them are 4 blocks of 256 threads at 64, 3 at 65 to 85, and 2 at up to 128.
MOST_REGISTERS = {"float32": 64, "others": 80, "maxima": 112, "hot": 255}
# Integers, whose order does not matter: digits are counted in shared memory, and the first bad
# index is the smallest.
INTEGER_ATOMICS = {
    "sort count": {"ATOMS.POPC.INC.32", "ATOMS.ADD"},
    "rows find hot": {"ATOMG.E.ADD.64.STRONG.GPU", "ATOM.E.ADD.64.STRONG.GPU"},
    "rows check": {"REDG.E.MIN.S64.STRONG.GPU", "RED.E.MIN.S64.STRONG.GPU"},
    "bags bounds": {"REDG.E.MIN.S64.STRONG.GPU", "RED.E.MIN.S64.STRONG.GPU"},
    "bags lay out": {"REDG.E.MIN.S64.STRONG.GPU", "RED.E.MIN.S64.STRONG.GPU"},
    "gather": {"REDG.E.MIN.S64.STRONG.GPU", "RED.E.MIN.S64.STRONG.GPU"},
}


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, str(HERE / program), *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@needs_numba_cuda
@pytest.mark.parametrize("extent", ["some", more("every")])
@pytest.mark.parametrize("part", PARTS)
def test_machine_code(part: str, extent: str) -> None:
    """Nothing spills, registers leave room for others, memory is accessed by 16 bytes."""
    report: dict[str, dict[str, Any]] = json.loads(run("cuda_report.py", part, extent))
    kernels = [(name, code) for codes in report.values() for name, code in codes.items()]
    assert report["9.0a"]
    for name, code in kernels:
        memory = code["memory"]
        assert code["stack"] == 0, name
        assert not any(kind.startswith(("LDL", "STL")) for kind in memory), name
        is_mixed = name.rpartition(" ")[2] in ("f16", "bf16", "f64")
        has_more = name.startswith(("row-wise", "lazy counted")) or "weighted" in name
        kind = "others" if is_mixed or has_more else "float32"
        is_wide = name.startswith("row-wise") and name.endswith("f16")  # eight columns, twice
        if "chosen" in name or is_wide:  # of maxima each element may be another position's
            kind = "maxima"
        if "hot" in name:  # few threads, which have many loads on their way
            kind = "hot"
        assert code["registers"] <= MOST_REGISTERS[kind], name
        atomics = {kind for kind in memory if kind.startswith(("ATOM", "RED"))}
        assert atomics <= INTEGER_ATOMICS.get(name, set()), name
        assert code["64-bit divisions"] == 0, name
        n_read, n_written = least_wide(name, code)
        assert memory.get("LDG.E.128", 0) >= n_read, name
        assert memory.get("STG.E.128", 0) >= n_written, name


def least_wide(name: str, code: dict[str, Any]) -> tuple[int, int]:
    """The least loads and stores of 16 bytes: what is narrower is tails, tables and scalars."""
    if name.startswith("dense"):
        return code["read"], code["written"]
    if name.startswith(("rows lazy", "rows sweep")):  # w, m, v, and the gradient 4 + 1 times
        return 8, 3
    if name.startswith("row-wise"):  # gradients twice; w, which is measured, too, or w and m
        return (4 if "dense" in name else 12), (1 if " adagrad " in name else 2)
    if name.startswith(("bags sum", "bags mean")):  # the first, one more, and four at once
        return 6, 1
    if name.startswith("bags max"):  # and the winners, of 4 bytes each
        return 3, 1 if name.endswith("f64") else 2
    if name.startswith("rows") and "sums" in name:  # the first, one more, and four at once
        return 6, 1
    if name.startswith(("rows hot", "finite")):
        return 1, 0
    return 0, 0


@needs_numba_cuda
@pytest.mark.parametrize(("program", "check"), CHECKS)
def test_under_the_simulator(program: str, check: str) -> None:
    if "thor" in program + check:
        pytest.importorskip("scipy", reason="the factors are inverted by scipy's LAPACK")
    assert run(program, check) == "right\n"


def test_every_check_is_run() -> None:
    """But for those of PyTorch's modules, which are run beside the tests on the host."""
    found = {
        (path.name, check.arg)
        for path in HERE.glob("device_*.py")
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "run_check"
        for check in call.keywords
    }
    assert found - {("device_thor_torch.py", "modules")} == set(CHECKS)
