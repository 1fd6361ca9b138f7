"""`EmbeddingBags` of PyTorch in DistributedDataParallel: in real processes, by ``process_bags``."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from helpers import more
from process_starts import needs_torch, start

PROGRAM = Path(__file__).with_name("process_bags.py")
PARTS = "optimizers", "bits", "refusals", "beside", "warned"


@needs_torch
@pytest.mark.parametrize(("size", "others"), [
    (1, ("left", "shown", "wrappers")),
    (2, ("forms", "wrappers", "checkpoints")),
    # PyTorch's exchange of sparse gradients over gloo corrupts memory now and then.
    more(2, ("left", "shown")),
    more(3, ("forms",)),
])  # fmt: skip
def test_processes(size: int, others: tuple[str, ...], tmp_path: Path) -> None:
    """All that there is in one start, which costs seconds."""
    done = start("torch", size, PROGRAM, tmp_path, *PARTS, *others, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    ended = sorted(path.name for path in tmp_path.glob("done-*"))
    assert ended == [f"done-{rank}" for rank in range(size)], done.stdout
