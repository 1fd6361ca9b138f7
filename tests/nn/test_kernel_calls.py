"""One kernel call for all that is alike, and mixed dtypes in one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from fusestep import nn
from fusestep.ops.runtime.row_step import RowUpdate
from fusestep.ops.runtime.step import DenseUpdate

from adam_family import EACH, gradients_of, ones, rows
from helpers import PAIRWISE, STORAGE_DTYPES, assert_same_bits, more


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernel calls of every step, by kind."""
    made: list[str] = []
    for kind in (DenseUpdate, RowUpdate):

        def count(update: Any, _original: Any = kind.prepared, **options: Any) -> Any:
            made.append(type(update).__name__)
            return _original(update, **options)

        monkeypatch.setattr(kind, "prepared", count)
    return made


@EACH
def test_one_call_for_all_dense_tensors(make: Callable[..., Any], calls: list[str]) -> None:
    """Whatever the groups, decays and counts of updates are."""
    groups = [
        {"params": [ones(k + 1) for k in range(5)], "lr": 0.1},
        {"params": [ones(2, 3)], "weight_decay": 0.3},
        {"params": [ones(7)], "grad_centralization": True},
    ]
    opt = make(groups)
    for step in range(3):
        opt([None if step == 1 and k == 2 else g for k, g in enumerate(gradients_of(opt, step))])
    assert calls == ["DenseUpdate"] * 3


def test_one_call_for_all_tables(calls: list[str]) -> None:
    opt = nn.LazyAdam([ones(4, k + 1) for k in range(6)], weight_decay=0.1)
    for _ in range(3):
        opt([rows([1, 2, 1], p.shape) for p in opt.parameters])
    assert calls == ["RowUpdate"] * 3
    calls.clear()
    opt(
        [
            rows([1], p.shape) if k % 2 else np.ones(p.shape, np.float32)
            for k, p in enumerate(opt.parameters)
        ]
    )
    assert sorted(calls) == ["DenseUpdate", "RowUpdate"]
    calls.clear()
    opt([None] * 6)
    assert calls == []


def test_one_call_for_each_dtype(calls: list[str]) -> None:
    dtypes = [d for d in STORAGE_DTYPES for _ in range(3)]
    opt = nn.Adam([np.ones(3, d) for d in dtypes])
    opt([np.ones(3, d) for d in dtypes])
    assert calls == ["DenseUpdate"] * 4
    calls.clear()
    opt([np.ones(3, np.float32)] * 12)
    assert calls == ["DenseUpdate"] * 4
    calls.clear()
    opt([np.ones(3, np.float16) if k % 2 else np.ones(3, np.float32) for k in range(12)])
    assert calls == ["DenseUpdate"] * 8


def mixed_dtypes(state_dtype: Any) -> Any:
    """Dtypes of parameters and their gradients: a sample, and all."""
    some = [(w, g) for w, g, s in PAIRWISE if s == (state_dtype or w)]
    yield pytest.param(state_dtype, some, id=f"{state_dtype}")
    yield more(state_dtype, list(product(STORAGE_DTYPES, repeat=2)), id=f"{state_dtype}, all")


@pytest.mark.parametrize(
    ("state_dtype", "combinations"),
    [one for dtype in (None, *STORAGE_DTYPES) for one in mixed_dtypes(dtype)],
)
def test_mixed_dtypes_in_one_optimizer(state_dtype: Any, combinations: Any) -> None:
    """Every tensor as in an optimizer of its own; states as asked for.

    Without decay: the kernels are those of test_storage.py.
    """
    rng = np.random.default_rng(7)
    start = [rng.standard_normal(5).astype(w) for w, _ in combinations]
    together, apart = [a.copy() for a in start], [a.copy() for a in start]
    opt = nn.Adam(together, 0.1, state_dtype=state_dtype)
    single = [nn.Adam([a], 0.1, state_dtype=state_dtype) for a in apart]
    for _ in range(2):
        gradients = [rng.standard_normal(5).astype(g) for _, g in combinations]
        opt(gradients)
        for one, gradient in zip(single, gradients, strict=True):
            one([gradient])
    for k, (w, _) in enumerate(combinations):
        assert_same_bits(together[k], apart[k])
        assert (together[k] != start[k]).all()
        for state in (opt.moment1[k], opt.moment2[k]):
            assert state.dtype == (w if state_dtype is None else state_dtype)
