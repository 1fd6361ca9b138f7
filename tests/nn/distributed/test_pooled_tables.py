"""Bags of growing tables that several processes share, by ``process_pooled_tables``."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from helpers import more
from process_starts import needs_torch, start

PROGRAM = Path(__file__).with_name("process_pooled_tables.py")


@needs_torch
@pytest.mark.parametrize("size", [1, 2, (more(3)), more(4)])
def test_processes(size: int, tmp_path: Path) -> None:
    """All that there is in one start, which costs seconds."""
    done = start("torch", size, PROGRAM, tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    ended = sorted(path.name for path in tmp_path.glob("done-*"))
    assert ended == [f"done-{rank}" for rank in range(size)], done.stdout
