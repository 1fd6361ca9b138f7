"""Sparse and dense gradients in one step, of several dtypes: as each parameter by itself."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import Parameter  # noqa: E402

from fusestep.nn import torch as fused  # noqa: E402

from helpers import sampled  # noqa: E402
from torch_training import TABLES, assert_same_bits  # noqa: E402

SHAPES = ((11, 4), (7, 3), (2, 4), (2,), (40, 5))
DTYPES = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}
STEPS = 6
# Each with float32 and, in turn, with one other type or all of them together.
NAMES = [name for name in TABLES if name != "SparseAdam"]
KINDS = [*DTYPES, "all"]
SOME = [(name, kind) for k, name in enumerate(NAMES) for kind in ("f32", KINDS[1 + k % 4])]


def gradient(parameter: Any, k: int, step: int) -> Any:
    """Of rows with duplicates, or dense; which one changes in the course of the steps."""
    generator = torch.Generator().manual_seed(100 * step + k)
    if k in (0, 1) or (k == 4 and step % 3 == 2):
        rows = torch.randint(0, len(parameter), (1, 9), generator=generator)
        values = torch.randn(9, *parameter.shape[1:], generator=generator).to(parameter.dtype)
        return torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=False)
    return torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def parameters(dtypes: list[Any]) -> list[Any]:
    torch.manual_seed(1)
    shapes = SHAPES * len(dtypes)
    return [Parameter(torch.randn(s).to(dtypes[k // len(SHAPES)])) for k, s in enumerate(shapes)]


@pytest.mark.parametrize("sparse", ["touched", "all"])
@pytest.mark.parametrize(("name", "dtypes"), sampled(product(NAMES, KINDS), SOME))
def test_a_step_of_all_is_one_of_each(name: str, dtypes: str, sparse: str) -> None:
    kinds = [*DTYPES.values()] if dtypes == "all" else [DTYPES[dtypes]]
    mine, other = parameters(kinds), parameters(kinds)
    cls = getattr(fused, name)
    together = cls(mine, sparse=sparse, maximize=True)
    alone = [cls([q], sparse=sparse, maximize=True) for q in other]
    for step in range(STEPS):
        for k, (p, q) in enumerate(zip(mine, other, strict=True)):
            p.grad = gradient(p, k % len(SHAPES), step)
            q.grad = p.grad.clone()
        together.step()
        for optimizer in alone:
            optimizer.step()
    assert_same_bits(mine, other)
    for p, q, optimizer in zip(mine, other, alone, strict=True):
        found, expected = together.state[p].values(), optimizer.state[q].values()
        assert_same_bits(map(torch.as_tensor, found), map(torch.as_tensor, expected))
        assert torch.isfinite(p).all()
