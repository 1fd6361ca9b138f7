"""Pooled tables: sums, means and gradients against float64, in every form of ids; bad ids."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from fusestep import nn, ops
from fusestep.ops.runtime.bags.tensor import BagTensor
from fusestep.ops.runtime.bags.tensor import joined as joined_gradients
from helpers import BF16, STORAGE_DTYPES, assert_same_arrays, assert_same_bits, refused

SHAPES = [(30, 8), (5, 16), (1_000, 64), (17, 5), (1, 1), (40, 130)]
quick = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def tables_of(shapes: list[tuple[int, int]], dtype: Any = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def bags_of(
    rows: list[int], batch: int, longest: int, seed: int = 0, dtype: Any = np.int64
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Ids and offsets of features that look up tables of so many rows; some bags are empty."""
    rng = np.random.default_rng(seed)
    ids, offsets = [], []
    for n in rows:
        lengths = rng.integers(0, longest + 1, batch) if n else np.zeros(batch, int)
        lengths[rng.random(batch) < 0.2] = 0
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        offsets.append(bounds.astype(dtype))
        ids.append(rng.integers(0, max(n, 1), bounds[-1]).astype(dtype))
    return ids, offsets


def joined(ids: list[np.ndarray], offsets: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The same as one array of ids, and one of offsets."""
    firsts = np.concatenate(([0], np.cumsum([len(own) for own in ids])))
    parts = [bounds[:-1] + first for bounds, first in zip(offsets, firsts, strict=False)]
    return np.concatenate(ids), np.concatenate([*parts, firsts[-1:]]).astype(offsets[0].dtype)


def pooled(tables, ids, offsets, pooling: str, weights=None, left_out=()) -> np.ndarray:
    """The output in float64; ids of ``left_out`` and those out of range count for nothing."""
    columns = []
    for f, (table, own, bounds) in enumerate(zip(tables, ids, offsets, strict=True)):
        out = np.zeros((len(bounds) - 1, table.shape[1]))
        for b in range(len(out)):
            span = range(bounds[b], bounds[b + 1])
            kept = [k for k in span if 0 <= own[k] < len(table) and own[k] not in left_out]
            if pooling == "max" and kept:
                out[b] = table[own[kept]].astype(np.float64).max(axis=0)
                continue
            for k in kept:
                factor = 1.0 if weights is None else float(weights[f][k])
                out[b] += factor * table[own[k]].astype(np.float64)
            if pooling == "mean" and kept:
                out[b] /= len(kept)
        columns.append(out)
    return np.concatenate(columns, axis=1)


def spread(
    tables: Any, ids: Any, offsets: Any, grad: np.ndarray, pooling: str,
    weights: Any = None, left_out: Any = (),
) -> list[np.ndarray]:  # fmt: skip
    """The gradients of the tables in float64, one feature for each."""
    found, column = [], 0
    for f, (table, own, bounds) in enumerate(zip(tables, ids, offsets, strict=True)):
        g = np.zeros(table.shape)
        width = table.shape[1]
        for b in range(len(bounds) - 1):
            span = range(bounds[b], bounds[b + 1])
            kept = [k for k in span if 0 <= own[k] < len(table) and own[k] not in left_out]
            part = grad[b, column : column + width].astype(np.float64)
            if pooling == "max" and kept:
                largest = np.array(own)[kept][table[own[kept]].astype(np.float64).argmax(axis=0)]
                g[largest, np.arange(width)] += part
                continue
            for k in kept:
                factor = 1.0 if weights is None else float(weights[f][k])
                factor /= len(kept) if pooling == "mean" else 1
                g[own[k]] += factor * part
        found.append(g)
        column += width
    return found


def assert_close(actual: np.ndarray, expected: np.ndarray, relative: float = 2e-6) -> None:
    __tracebackhide__ = True
    scale = np.maximum(np.abs(expected), 1e-1 * np.abs(expected).max(initial=1e-30))
    assert actual.shape == expected.shape
    assert (np.abs(actual - expected) <= relative * scale * 10).all()


def assert_both_ways(
    tables: Any, ids: Any, offsets: Any, pooling: str,
    weights: Any = None, left_out: Any = (), **options: Any,
) -> None:  # fmt: skip
    """Outputs, and the gradients of the tables, are those in float64, in both forms of ids."""
    __tracebackhide__ = True
    bags = ops.EmbeddingBags(pooling, **options)
    out = bags(tables, ids, offsets, weights)
    every = None if weights is None else np.concatenate(weights)
    assert_same_bits(bags(tables, *joined(ids, offsets), every), out)
    assert out.dtype == (np.float64 if tables[0].dtype == np.float64 else np.float32)
    assert_close(out, pooled(tables, ids, offsets, pooling, weights, left_out))
    grad = np.random.default_rng(1).standard_normal(out.shape).astype(out.dtype)
    found = bags.gradients(tables, ids, offsets, grad, weights)
    expected = spread(tables, ids, offsets, grad, pooling, weights, left_out)
    for one, own in zip(found, expected, strict=True):
        assert_close(one.to_dense(), own)
        assert not np.isin(one.indices, left_out).any()


def weights_of(ids: list[np.ndarray], dtype: Any = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.standard_normal(len(own)).astype(dtype) for own in ids]


def test_forms_of_weights() -> None:
    """Of ids in one array, as those of lists; strided, or of 16 bits, which Python reads."""
    tables = tables_of(SHAPES)
    ids, offsets = bags_of([len(t) for t in tables], 31, 7)
    weights = weights_of(ids, np.float16)
    bags = ops.EmbeddingBags()
    wide = [own.astype(np.float32) for own in weights]
    out = bags(tables, ids, offsets, wide)
    every, bounds = joined(ids, offsets)
    whole = np.concatenate(wide)
    for factors in (whole, whole.astype(np.float16), np.repeat(whole, 2)[::2]):
        assert_same_bits(bags(tables, every, bounds, factors), out)
    for each in (weights, [np.repeat(own, 2)[::2] for own in wide]):
        assert_same_bits(bags(tables, ids, offsets, each), out)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, BF16], ids=str)
@pytest.mark.parametrize("left_out", [(), (2,)], ids=str)
def test_gradients_of_weights(left_out: tuple[int, ...], dtype: Any) -> None:
    """Products of each row with the gradient of its bag, in the form of the ids; else 0."""
    tables, features = tables_of(SHAPES, dtype), [3, 0, 2, 5, 4, 2]
    own = [tables[t] for t in features]
    ids, offsets = bags_of([len(table) for table in own], 300, 9)
    options: dict[str, Any] = {"features": features}
    if left_out:
        options |= {"padding_idx": [2, 2, 2, 2, None, 2], "out_of_range": "drop"}
        for given in ids:
            given[np.random.default_rng(len(given)).random(len(given)) < 0.1] = -5
    width = sum(table.shape[1] for table in own)
    grad = np.random.default_rng(1).standard_normal((300, width)).astype(np.float32)
    bags = ops.EmbeddingBags(**options)
    found = bags.weight_gradients(tables, ids, offsets, grad)
    assert_same_arrays(found, bags.weight_gradients(tables, *joined(ids, offsets), grad))
    column = 0
    for table, given, bounds, products in zip(own, ids, offsets, found, strict=True):
        part = grad[:, column : column + table.shape[1]].astype(np.float64)
        of_bag = np.repeat(np.arange(300), np.diff(bounds))
        kept = (given >= 0) & ~(np.isin(given, left_out) & (len(table) > 2))
        rows = table[np.where(kept, given, 0)].astype(np.float64)
        expected = np.where(kept, (rows * part[of_bag]).sum(1), 0)
        scale = (np.abs(rows) * np.abs(part[of_bag])).sum(1) + 1e-30
        assert products.dtype == (np.float64 if dtype is np.float64 else np.float32)
        assert (np.abs(products - expected) <= 4e-7 * scale).all()
        column += table.shape[1]


def test_of_equal_numbers_the_first_is_the_largest() -> None:
    """As in PyTorch; NaN wins only where it is the first."""
    table = np.array([[1, np.nan, 0], [1, 2, 0], [0, 3, np.nan]], np.float32)
    bags = ops.EmbeddingBags("max")
    ids = [np.array([1, 0, 1, 2, 0, 2, 2, 1])]
    out = bags([table], ids, [np.array([0, 4, 6, 8])])
    assert_same_bits(out, np.array([[1, 3, 0], [1, np.nan, 0], [1, 3, np.nan]], np.float32))
    (found,) = bags.gradients([table], ids, [np.array([0, 4, 6, 8])], np.ones((3, 3), np.float32))
    expected = [[1, 0, 1], [0, 0, 0], [0, 0, 0], [0, 1, 0]]
    expected += [[1, 1, 1], [0, 0, 0], [0, 1, 1], [1, 0, 0]]
    assert found.to_rows().values.tolist() == expected


def test_a_list_of_outputs() -> None:
    """Arrays of the caller, one for each feature, in any order of the tables."""
    tables, features = tables_of(SHAPES[:3]), [2, 0, 2, 1]
    ids, offsets = bags_of([len(tables[t]) for t in features], 40, 6)
    for pooling in ("sum", "max", "mean"):
        bags = ops.EmbeddingBags(pooling, features=features)
        out = bags(tables, ids, offsets)
        room = [np.full((40, tables[t].shape[1]), np.nan, np.float32) for t in features]
        found = bags(tables, ids, offsets, out=room)
        assert all(one is own for one, own in zip(found, room, strict=True))
        assert_same_bits(np.concatenate(room, axis=1), out)
    with refused(ValueError, r"out\[2\] shares memory", {"room": room, "tables": tables}):
        bags(tables, ids, offsets, out=[room[0], room[1], room[0], room[3]])
    with refused(ValueError, r"out\[1\] has a wrong shape", {"room": room, "tables": tables}):
        bags(tables, ids, offsets, out=[room[0], room[0], room[2], room[3]])
    with refused(ValueError, "out does not fit the features", {"room": room, "tables": tables}):
        bags(tables, ids, offsets, out=room[:3])


def test_objects_that_compiled_code_cannot_read() -> None:
    """Whatever stands in for an array gives what the array gives, and what is none is refused."""
    tables = tables_of(SHAPES[:2])
    ids, offsets = bags_of([30, 5], 20, 6)
    bags = ops.EmbeddingBags()
    out = bags(tables, ids, offsets)

    class Array(np.ndarray):
        pass

    for change in (
        lambda a: a.view(Array), lambda a: np.repeat(a, 2)[::2], lambda a: a.astype(np.longlong),
        lambda a: np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(np.int64),
    ):  # fmt: skip
        assert_same_bits(bags(tables, [change(a) for a in ids], offsets), out)
        assert_same_bits(bags(tables, ids, [change(a) for a in offsets]), out)
    for thing in (3, None, "ids", object(), [1, 2], ids):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            bags(tables, [ids[0], thing], offsets)
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            bags(tables, ids, [thing, offsets[1]])


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_forms_of_ids(index: type) -> None:
    """Lists of arrays, strided ones, and bags of one length: the same bits."""
    tables = tables_of(SHAPES)
    batch, length = 31, 4
    ids, offsets = bags_of([len(t) for t in tables], batch, 7, dtype=index)
    bags = ops.EmbeddingBags()
    out = bags(tables, ids, offsets)
    assert_same_bits(bags(tables, [np.repeat(own, 2)[::2] for own in ids], offsets), out)
    room = np.full(out.shape, np.nan, np.float32)
    assert bags(tables, ids, offsets, out=room) is room
    assert_same_bits(room, out)
    longer, _ = bags_of([len(t) for t in tables], 500, 7, dtype=index)
    square = [own[: batch * length] for own in longer]
    fixed = [np.arange(0, batch * length + 1, length, dtype=index)] * len(tables)
    shaped = [own.reshape(batch, length) for own in square]
    assert_same_bits(bags(tables, shaped), bags(tables, square, fixed))
    grad = np.random.default_rng(1).standard_normal((batch, out.shape[1])).astype(np.float32)
    each = zip(
        bags.gradients(tables, shaped, None, grad),
        bags.gradients(tables, square, fixed, grad), strict=True)  # fmt: skip
    for one, other in each:
        assert_same_bits(one.to_dense(), other.to_dense())


def test_without_pooling() -> None:
    """Every id has a row; features that share a table have one gradient."""
    tables, features = tables_of(SHAPES[:3]), [1, 0, 1]
    ids = [np.array([4, 0, 4]), np.array([], np.int64), np.array([1, 4], np.int32)]
    bags = ops.EmbeddingBags("none", features=features)
    out = bags(tables, ids)
    for found, t, own in zip(out, features, ids, strict=True):
        assert_same_bits(found, tables[t][own])
    grads = [np.random.default_rng(5).standard_normal(o.shape).astype(np.float32) for o in out]
    found = bags.gradients(tables, ids, None, grads)
    expected = np.zeros((5, 16))
    np.add.at(expected, ids[0], grads[0])
    np.add.at(expected, ids[2], grads[2])
    assert_close(found[1].to_dense(), expected)
    assert not found[0].to_dense().any()
    assert len(found[2].indices) == 0
    padded = ops.EmbeddingBags("none", features=features, padding_idx=4)
    assert (padded(tables, [ids[0] % 5, ids[1], ids[2]])[0][[0, 2]] == 0).all()


def test_edges() -> None:
    """No bags, empty bags, an empty table, a bag of 1,000 ids, one id everywhere."""
    tables = tables_of([(0, 4), (3, 2)])
    nothing = [np.array([], np.int32)] * 2
    bags = ops.EmbeddingBags()
    assert bags(tables, nothing, [np.array([0])] * 2).shape == (0, 6)
    assert not bags(tables, nothing, [np.zeros(4, int)] * 2).any()
    for found in bags.gradients(tables, nothing, [np.zeros(4, int)] * 2, np.ones((3, 6))):
        assert not found.to_dense().any()
    long = [nothing[0], np.full(1_000, 1)]
    out = bags(tables, long, [np.zeros(2, int), np.array([0, 1_000])])
    assert_close(out, np.concatenate([np.zeros(4), 1_000 * tables[1][1].astype(float)])[None])


def test_a_thousand_tables() -> None:
    """Of all widths from 1 to 20, in one call, and in calls of their own: the same bits."""
    shapes = [(1 + k % 7, 1 + k % 20) for k in range(1_000)]
    tables = tables_of(shapes)
    ids, offsets = bags_of([n for n, _ in shapes], 5, 3)
    bags = ops.EmbeddingBags()
    out, column = bags(tables, ids, offsets), 0
    found = bags.gradients(tables, ids, offsets, out)
    for table, own, bounds, gradient in zip(tables, ids, offsets, found, strict=True):
        part = out[:, column : column + table.shape[1]]
        assert_same_bits(part, bags([table], [own], [bounds]))
        (alone,) = bags.gradients([table], [own], [bounds], np.ascontiguousarray(part))
        assert_same_bits(gradient.to_rows().values, alone.to_rows().values)
        column += table.shape[1]


@quick
@given(st.data())
def test_any_bags(data: st.DataObject) -> None:
    """A padding id, and with "drop" ids out of range, count for nothing, also as all of a bag."""
    rows, widths = st.integers(1, 12), st.sampled_from([1, 3, 5, 8, 16, 20, 64, 130])
    shapes = data.draw(st.lists(st.tuples(rows, widths), min_size=1, max_size=4))
    batch, seed = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 10))
    tables = tables_of(shapes, data.draw(st.sampled_from(STORAGE_DTYPES)))
    longest, index = data.draw(st.integers(0, 12)), data.draw(st.sampled_from([np.int32, np.int64]))
    ids, offsets = bags_of([r for r, _ in shapes], batch, longest, seed, index)
    pooling = data.draw(st.sampled_from(["sum", "mean", "max"]))
    weights = weights_of(ids) if pooling == "sum" and data.draw(st.booleans()) else None
    padding = data.draw(st.sampled_from([None, 0]))
    options: dict[str, Any] = {"left_out": () if padding is None else (0,), "padding_idx": padding}
    if data.draw(st.booleans()):
        options["out_of_range"] = "drop"
        for own in ids:
            is_bad = np.random.default_rng(seed).random(len(own)) < 0.3
            own[is_bad] = data.draw(st.sampled_from([-1, 12, 2**31 - 1]))
    assert_both_ways(tables, ids, offsets, pooling, weights, **options)


def good() -> dict[str, Any]:
    tables = tables_of([(5, 2), (4, 3)])
    ids = [np.array([0, 1, 4]), np.array([3, 3])]
    return {"tables": tables, "ids": ids, "offsets": [np.array([0, 2, 3]), np.array([0, 0, 2])]}


BAD = [
    (ValueError, r"offsets\[1\]\[1\] falls: expected at least 1, got 0",
     {"offsets": [np.array([0, 2, 3]), np.array([1, 0, 2])]}),
    (ValueError, r"offsets\[0\] do not begin at 0: expected 0, got 1",
     {"offsets": [np.array([1, 2, 3]), np.array([0, 0, 2])]}),
    (ValueError, r"offsets\[0\] do not end at the number of ids: expected 3, got 2",
     {"offsets": [np.array([0, 2, 2]), np.array([0, 0, 2])]}),
    (ValueError, r"offsets\[1\] do not end at the number of ids: expected 2, got 3",
     {"offsets": [np.array([0, 2, 3]), np.array([0, 0, 3])]}),
    (IndexError, r"ids\[0\]\[1\] is out of range: expected 0 <= id < 5, got -1",
     {"ids": [np.array([0, -1, 4]), np.array([3, 3])]}),
    (IndexError, r"ids\[1\]\[1\] is out of range: expected 0 <= id < 4, got 4",
     {"ids": [np.array([0, 1, 4]), np.array([3, 4], np.int32)]}),
    (TypeError, r"ids\[0\] has a wrong dtype", {"ids": [np.zeros(3), np.array([3, 3])]}),
    (TypeError, r"offsets\[0\] has a wrong dtype", {"offsets": [np.zeros(3), np.array([0, 0, 2])]}),
    (ValueError, r"ids have a wrong length", {"ids": [np.array([0, 1, 4])]}),
    (ValueError, r"offsets do not fit the ids", {"offsets": [np.array([0, 2, 3])]}),
    (ValueError, r"ids\[1\] have another number of bags",
     {"offsets": [np.array([0, 2, 3]), np.array([0, 2])]}),
    (ValueError, r"ids\[0\] has a wrong shape", {"offsets": None}),
    (ValueError, r"tables\[0\] has a wrong shape", {"tables": [np.zeros(5), np.zeros((4, 3))]}),
    (TypeError, r"tables\[0\] has a wrong dtype",
     {"tables": [np.zeros((5, 2), int), np.zeros((4, 3))]}),
    (TypeError, r"tables differ in the type of the arithmetic",
     {"tables": [np.zeros((5, 2), np.float32), np.zeros((4, 3))]}),
    (ValueError, r"shares? memory", {"tables": [np.zeros((5, 2), np.float32)] * 2}),
    (ValueError, r"per_sample_weights\[0\] has a wrong shape",
     {"per_sample_weights": [np.zeros(2, np.float32), np.zeros(2, np.float32)]}),
    (TypeError, r"per_sample_weights\[0\] has a higher dtype",
     {"per_sample_weights": [np.zeros(3), np.zeros(2)]}),
    (ValueError, r"out has a wrong shape", {"out": np.zeros((2, 4), np.float32)}),
    (TypeError, r"out has a wrong dtype", {"out": np.zeros((2, 5))}),
    (ValueError, r"offsets falls?|offsets\[2\] falls",
     {"ids": np.array([0, 1, 4, 3, 3]), "offsets": np.array([0, 9, 3, 3, 5])}),
    (ValueError, r"offsets have a wrong shape",
     {"ids": np.array([0, 1, 4, 3, 3]), "offsets": np.array([0, 3, 3, 5])}),
    (ValueError, r"offsets do not begin at 0: expected 0, got 1",
     {"ids": np.array([0, 1, 4, 3, 3]), "offsets": np.array([1, 2, 3, 3, 5])}),
    (ValueError, r"offsets do not end at the number of ids: expected 5, got 4",
     {"ids": np.array([0, 1, 4, 3, 3]), "offsets": np.array([0, 2, 3, 3, 4])}),
    (ValueError, r"offsets\[3\] falls: expected at least 1000000, got 3",
     {"ids": np.zeros(2_000_000, int)[:5], "offsets": np.array([0, 1, 1_000_000, 3, 5])}),
    (ValueError, r"offsets\[0\] do not end at the number of ids: expected 3, got 0",
     {"offsets": [np.array([0]), np.array([0])]}),
    (ValueError, r"tables\[1\] is not contiguous",
     {"tables": [np.zeros((5, 2), np.float32), np.zeros((4, 6), np.float32)[:, ::2]]}),
    (ValueError, r"tables are missing", {"tables": []}),
]  # fmt: skip


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize(("error", "text", "changed"), BAD, ids=[text for _, text, _ in BAD])
def test_bad_input(
    error: type[Exception], text: str, changed: dict[str, Any], padding: int | None
) -> None:
    given = {**good(), "out": np.ones((2, 5), np.float32), **changed}
    with refused(error, "EmbeddingBags: .*" + text, given):
        ops.EmbeddingBags(padding_idx=padding)(**given)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 1}, {"out_of_range": "drop"}], ids=str)
def test_offsets_far_outside(options: dict[str, Any]) -> None:
    """No id is read there, whichever thread comes to the bag, and nothing is written."""
    tables, ids, bounds = tables_of([(5, 2)]), np.zeros(600, int), np.arange(0, 601, 3)
    bags, room = ops.EmbeddingBags(**options), np.ones((200, 2), np.float32)
    for k in range(len(bounds)):
        for far in (-(2**50), 2**50):
            offsets = bounds.copy()
            offsets[k] = far
            for out in (None, room):
                with refused(ValueError, r"offsets.* (falls|begin|end)", room):
                    bags(tables, [ids], [offsets], out=out)


@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("of", ["tables", "ids", "offsets", "per_sample_weights"])
def test_an_output_in_the_memory_of_what_is_read(of: str, is_joined: bool) -> None:
    """Of the last table, the last ids, the last offsets, and of the weights of these ids."""
    given, weights = good(), [np.ones(3, np.float32), np.ones(2, np.float32)]
    if is_joined:
        given["ids"], given["offsets"] = joined(given["ids"], given["offsets"])
        weights = [np.concatenate(weights)]
    given["per_sample_weights"] = weights[0] if is_joined else weights
    is_one = isinstance(given[of], np.ndarray)
    last = given[of] if is_one else given[of][-1]
    for begin in (last.nbytes - 4, 0):  # the output begins with the last element, or before it
        room = np.zeros(last.nbytes + 80, np.uint8)
        moved = room[40 : 40 + last.nbytes].view(last.dtype).reshape(last.shape)
        moved[...] = last
        given[of] = moved if is_one else [*given[of][:-1], moved]
        given["out"] = room[begin + 40 :][:40].view(np.float32).reshape(2, 5)
        with refused(ValueError, "out shares memory with what is read", given):
            ops.EmbeddingBags()(**given)


@pytest.mark.parametrize(("error", "text", "options"), [
    (ValueError, "pooling is unknown", {"pooling": "least"}),
    (ValueError, "out_of_range is unknown", {"out_of_range": "clip"}),
    (ValueError, r"padding_idx of feature 1 is out of range", {"padding_idx": 4}),
    (ValueError, r"padding_idx of feature 0 is out of range", {"padding_idx": -1}),
    (TypeError, "padding_idx has a wrong type", {"padding_idx": 1.0}),
    (ValueError, r"features\[1\] is no table", {"features": [0, 2]}),
    (ValueError, r"features\[0\] is no table", {"features": [-1, 0]}),
    (TypeError, "features have a wrong type", {"features": 1}),
    (TypeError, "argument 'mode' is unknown", {"mode": "sum"}),
])  # fmt: skip
def test_bad_options(error: type[Exception], text: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=text):
        ops.EmbeddingBags(**options)(**good())


@pytest.mark.parametrize(("error", "text", "grad"), [
    (ValueError, "grad has a wrong shape", np.zeros((3, 5), np.float32)),
    (TypeError, "grad has a wrong dtype", np.zeros((2, 5), int)),
    (ValueError, r"grad\[1\] has a wrong shape", [np.zeros((2, 2)), np.zeros((2, 2))]),
    (ValueError, r"grad does not fit the outputs", [np.zeros((2, 2))]),
])  # fmt: skip
def test_bad_gradients(error: type[Exception], text: str, grad: Any) -> None:
    given = good()
    with pytest.raises(error, match=text):
        ops.EmbeddingBags().gradients(given["tables"], given["ids"], given["offsets"], grad)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64], ids=lambda t: t.__name__)
@pytest.mark.parametrize("weighted", ["none", "some", "all"])
@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
def test_gradients_of_several_calls(pooling: str, weighted: str, dtype: Any) -> None:
    """Joined they are the rows of each call, one behind the other; a step has the same bits."""
    if weighted != "none" and pooling != "sum":
        return
    rng, shapes = np.random.default_rng(0), SHAPES[:4]
    tables, bags, calls = tables_of(shapes, dtype), ops.EmbeddingBags(pooling), list[Any]()
    for k, batch in enumerate((5, 1, 300)):
        ids, offsets = bags_of([n for n, _ in shapes], batch, 4, seed=k)
        factors = None
        if weighted == "all" or (weighted == "some" and k == 1):
            factors = [rng.random(len(own)).astype(dtype) for own in ids]
        grad = rng.standard_normal((batch, sum(d for _, d in shapes))).astype(dtype)
        calls.append(bags.gradients(tables, ids, offsets, grad, factors))
    columns: list[tuple[BagTensor, ...]] = list(zip(*calls, strict=True))
    for divisor in (1, 4):  # powers of 2 round nothing
        for found, column in zip(joined_gradients(columns, divisor), columns, strict=True):
            rows, each = found.to_rows(), [own.to_rows() for own in column]
            assert_same_bits(rows.indices, np.concatenate([own.indices for own in each]))
            values = np.concatenate([own.values for own in each])
            if divisor == 1 or dtype != np.float16:
                assert_same_bits(rows.values, (values / dtype(divisor)).astype(dtype))
    own, others = (tables_of(shapes, np.promote_types(dtype, np.float32)) for _ in range(2))
    nn.SGD(own, learning_rate=0.1)(tuple(joined_gradients(columns)))
    nn.SGD(others, learning_rate=0.1)(tuple(map(list, columns)))
    for one, other in zip(own, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 if dtype != np.float16 else 0.1)


@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
@pytest.mark.parametrize("row", [0, 3, 16])
def test_gradients_without_a_row(row: int, pooling: str) -> None:
    """Those of all other occurrences, as they are; without any the same object."""
    tables, (ids, offsets) = tables_of([(17, 5)]), bags_of([17], 200, 4)
    grad = np.random.default_rng(1).standard_normal((200, 5)).astype(np.float32)
    (whole,) = ops.EmbeddingBags(pooling).gradients(tables, ids, offsets, grad)
    rows, left = whole.to_rows(), whole.without(row).to_rows()
    keeps = rows.indices != row
    assert 0 < keeps.sum() < len(keeps)
    assert_same_bits(left.indices, rows.indices[keeps])
    assert_same_bits(left.values, rows.values[keeps])
    without = whole.without(row)
    assert without.without(row) is without


def test_joined_outputs_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, (ids, offsets) = tables_of([(17, 5)]), bags_of([17], 20, 4)
    found = ops.EmbeddingBags().gradients(tables, ids, offsets, np.ones((20, 5), np.float32))
    monkeypatch.setattr("fusestep.ops.runtime.bags.tensor.MOST", 19)
    with pytest.raises(ValueError, match="EmbeddingBags: the outputs are too large together"):
        joined_gradients([found * 2])
