"""The checks with which a first run on a GPU begins, `fusestep.bench.gpu.checks`."""

from __future__ import annotations

import pytest

from fusestep.bench.gpu import checks

from devices import GPU, KIND, MARKS, STUB, computed, only

pytestmark = [
    pytest.mark.gpu,
    MARKS[-1],  # each has arrays of one framework
    only(STUB, GPU, reason="they are too large for one thread after the other"),
]


@pytest.mark.parametrize("name", checks.CHECKS)
def test_check(name: str) -> None:
    if name.startswith("torch"):
        torch = pytest.importorskip("torch", reason="torch is not installed")
        if not torch.cuda.is_available():
            pytest.skip("this torch has no CUDA")
    found = checks.run(name)
    assert found["is_computed"] == (KIND == GPU)
    computed()
    assert found["off"] is not None and found["off"] <= 1, found
