"""Two processes on this machine: what happens in them is in ``distributed_programs``."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from subprocesses import ENVIRONMENT

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="torch.distributed with gloo",
)
PROGRAM = Path(__file__).with_name("distributed_programs.py")


def test_two_ranks(tmp_path: Path) -> None:
    """All that there is, in one test: each start costs seconds."""
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         PROGRAM, tmp_path],
        env={**ENVIRONMENT, "OMP_NUM_THREADS": "2"},
        capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
