"""One kernel call for all that is alike, and mixed dtypes in one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fusestep import nn
from fusestep.ops.runtime.row_step import RowUpdate
from fusestep.ops.runtime.step import DenseUpdate

from adam_family import EACH, gradients_of, ones, rows
from helpers import STORAGE_DTYPES


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
