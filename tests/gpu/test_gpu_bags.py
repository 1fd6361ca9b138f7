"""Pooled tables on a CUDA device, in bulk: outputs, steps and gradients of weights.

``pytest -m gpu tests/gpu`` runs the tests for devices alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fusestep
from fusestep import nn, ops

import gpu_arrays
from gpu_arrays import Maker
from gpu_checks import F16, F32, F64, near_run
from helpers import assert_same_bits

if lacking := gpu_arrays.missing():
    pytest.skip(lacking, allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    # Frameworks and drivers have warnings of their own; test_a_step_warns_of_nothing has ours.
    pytest.mark.filterwarnings("default"),
]

SHAPES = {"a": (3_000, 64), "b": (7, 16), "c": (50_000, 5), "d": (1, 1), "e": (900, 130)}


def tables_of(dtype: Any, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in SHAPES.values()]


def bags_of(
    batch: int, longest: int, seed: int = 1
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Ids, offsets and weights of a feature for each table; small tables have hot rows."""
    rng, ids, offsets, weights = np.random.default_rng(seed), [], [], []
    for n, _ in SHAPES.values():
        bounds = np.concatenate(([0], np.cumsum(rng.integers(0, longest + 1, batch))))
        ids.append(rng.integers(0, n, bounds[-1]))
        offsets.append(bounds)
        weights.append(rng.standard_normal(bounds[-1]).astype(np.float32))
    return ids, offsets, weights


def there(make: Maker, value: Any) -> Any:
    """Arrays on the device, in lists as they are."""
    if isinstance(value, list | tuple):
        return [there(make, own) for own in value]
    return None if value is None else make.put(value)


@pytest.mark.parametrize("batch", [1, 300, 5_000])
@pytest.mark.parametrize("dtype", [F32, F64, F16], ids=str)
@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
def test_outputs_are_those_of_the_cpu(maker: Maker, pooling: str, dtype: Any, batch: int) -> None:
    """Nothing in them could become an FMA: the same bits, also where ids count for nothing."""
    tables, (ids, offsets, _) = tables_of(dtype), bags_of(batch, 20)
    on_device = there(maker, tables)
    for options in ({}, {"padding_idx": 0, "out_of_range": "drop"}):
        bags: Any = ops.EmbeddingBags(pooling, **options)
        given = [np.where(own % 7 == 3, -1, own) for own in ids] if options else ids
        found = bags(on_device, there(maker, given), there(maker, offsets))
        assert_same_bits(maker.get(found), bags(tables, given, offsets))
    joined = (
        np.concatenate(ids),
        np.concatenate(
            [
                own[:-1] + at
                for own, at in zip(offsets, np.cumsum([0, *map(len, ids[:-1])]), strict=True)
            ]
            + [[sum(map(len, ids))]]
        ),
    )
    bags = ops.EmbeddingBags(pooling)
    found = bags(on_device, *there(maker, joined))
    assert_same_bits(maker.get(found), bags(tables, ids, offsets))


@pytest.mark.parametrize("pooling", ["sum", "weighted", "mean", "max"])
@pytest.mark.parametrize("kind", ["lazy", "sweep", "row-wise"])
def test_steps_are_those_of_the_cpu(maker: Maker, kind: str, pooling: str) -> None:
    """Of rows with few occurrences and with thousands, in several ranges."""
    ends = []
    for make in (None, maker):
        start = tables_of(F32)
        arrays = start if make is None else there(make, start)
        opt: Any = {
            "lazy": lambda p: nn.LazyAdam(p, 0.01),
            "sweep": lambda p: nn.Adam(p, 0.01, sparse_update="dense_equivalent"),
            "row-wise": lambda p: nn.RowWiseAdagrad(p, learning_rate=0.01),
        }[kind](arrays)
        bags = nn.EmbeddingBags(arrays, opt, "sum" if pooling == "weighted" else pooling)
        for step in range(2):
            ids, offsets, weights = bags_of(2_000, 10, step)
            given = ids, offsets, weights if pooling == "weighted" else None
            width = sum(shape[1] for shape in SHAPES.values())
            grad = np.random.default_rng(step).standard_normal((2_000, width)).astype(np.float32)
            bags(*(given if make is None else there(make, given)))
            bags.backward(grad if make is None else make.put(grad))
        fusestep.synchronize()
        ends.append([p.asnumpy() for p in opt.parameters])
    for name, cpu, gpu in zip(SHAPES, *ends, strict=True):
        near_run(gpu, cpu, F32, name)


def test_gradients_of_weights(maker: Maker) -> None:
    """Within the rounding of sums of as many products as there are columns."""
    tables, (ids, offsets, _) = tables_of(F32), bags_of(700, 10)
    width = sum(shape[1] for shape in SHAPES.values())
    grad = np.random.default_rng(5).standard_normal((700, width)).astype(np.float32)
    bags = ops.EmbeddingBags()
    expected = bags.weight_gradients(tables, ids, offsets, grad)
    found = bags.weight_gradients(*(there(maker, own) for own in (tables, ids, offsets, grad)))
    for own, host in zip(found, expected, strict=True):
        np.testing.assert_allclose(maker.get(own), host, rtol=1e-5, atol=1e-4)


def test_a_bad_id_is_told_later(maker: Maker) -> None:
    """The output is 0, and no step is taken."""
    tables, (ids, offsets, _) = tables_of(F32), bags_of(300, 5)
    arrays = there(maker, tables)
    bags = nn.EmbeddingBags(arrays, nn.LazyAdam(arrays, 0.1))
    ids[2][40] = 50_000
    out = bags(there(maker, ids), there(maker, offsets))
    bags.backward(maker.put(np.ones((300, 216), np.float32)))
    assert not maker.get(out).any()
    with pytest.raises(IndexError, match=r"ids\[2\]\[40\] is out of range"):
        fusestep.synchronize()
    for own, table in zip(arrays, tables, strict=True):
        assert_same_bits(maker.get(own), table)
