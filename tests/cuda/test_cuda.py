"""CUDA without a GPU: machine code, and the set of device tests on devices that are none."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import devices
import stub
from helpers import more
from subprocesses import ENVIRONMENT

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
needs_numba_cuda = pytest.mark.skipif(
    find_spec("numba_cuda") is None, reason='needs numba-cuda: pip install ".[sass]"'
)
# What takes long begins first, here and in `PARTS`.
LONG = [f"test_device_{name}.py" for name in ("optimizers", "bags", "rows", "loops", "operators")]
FILES = LONG + sorted({path.name for path in HERE.glob("test_device_*.py")} - {*LONG})
PARTS = ("row-wise", "bags", "rules", "others", "torch", "mixtures")
# Registers that a thread may have, so that enough of them fit to hide the latency of memory:
# 64 Ki of them are 4 blocks of 256 threads at 64, 3 at 65 to 85, and 2 at up to 128.
MOST_REGISTERS = {"float32": 64, "others": 80, "maxima": 112, "hot": 255}
# Integers, whose order does not matter: digits are counted in shared memory, and the first bad
# index is the smallest.
SMALLEST = {"REDG.E.MIN.S64.STRONG.GPU", "RED.E.MIN.S64.STRONG.GPU"}
COUNTS = {"ATOMS.POPC.INC.32", "ATOMS.ADD"}
INTEGER_ATOMICS = {
    "sort count": COUNTS, "rows check": COUNTS | SMALLEST,
    **dict.fromkeys(("rows sort one tile", "bags bounds", "bags lay out", "gather"), SMALLEST),
}  # fmt: skip


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
    if name.startswith(("rows hot", "finite")):
        return 1, 0
    return 0, 0


def run_set(environment: dict[str, str], *chosen: str) -> str:
    """Run tests of the set on the device of an environment; the end of what pytest says."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    return done.stdout


@needs_numba_cuda
@pytest.mark.parametrize("name", FILES)
def test_under_the_simulator(name: str) -> None:
    """Each file is a process, as the simulator has to be there before Numba is imported."""
    if "thor" in name:
        pytest.importorskip("scipy", reason="the factors are inverted by scipy's LAPACK")
    if "frameworks" in name:
        pytest.importorskip("torch", reason="torch is not installed")
    run_set({**ENVIRONMENT, "NUMBA_ENABLE_CUDASIM": "1"}, str(HERE / name))


@pytest.mark.skipif(stub.lacks() != "", reason=stub.lacks())
@pytest.mark.parametrize("part", range(2))
def test_under_a_driver_without_a_device(part: int, tmp_path: Path) -> None:
    """Launches reach the driver; numbers are not computed. Half of the files, in one process."""
    environment = stub.environment(stub.build(tmp_path))
    said = run_set(environment, *(str(HERE / name) for name in FILES[part::2]))
    assert "not computed" in said


@pytest.mark.gpu
@pytest.mark.skipif(devices.KIND != devices.GPU, reason=devices.LACKS or "this is another device")
def test_on_a_device() -> None:
    """The set itself is collected: `pytest -m gpu tests/cuda` runs it there."""
    assert devices.FRAMEWORKS == ("numba", "torch", "cupy")
