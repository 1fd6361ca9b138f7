"""Pooled tables on device arrays, and steps on the gradients of their outputs, as on the host."""

import copy
import re
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import fusestep
import test_embedding_bags

from devices import (  # isort: skip
    COMPUTES, MARKS, RNG, assert_calls_alike, assert_close, assert_equal_runs, assert_same,
    gradient, on_device, on_host, refused, rows, sized, told, unchanged)  # fmt: skip
from fusestep import nn, ops
from fusestep.kernels.cuda.rows.step import RowStep
from fusestep.kernels.element import kernel
from fusestep.kernels.rules.adam import ADAM
from fusestep.kernels.storage import F32 as FLOAT32
from fusestep.kernels.tables import HOT, RowSource, RowTable
from helpers import STORAGE_DTYPES
from test_embedding_bags import joined

pytestmark = MARKS
F32, F64, F16, BF16 = STORAGE_DTYPES
POOLINGS = ("sum", "mean", "max")
# Rows that end within a tile, of several tiles, alone or with others; an empty table.
SHAPES = sized(
    ((7, 4), (3, 9), (5, 16), (1, 1), (0, 3), (6, 8)),
    ((3_000, 64), (7, 16), (50_000, 5), (1, 1), (0, 3), (900, 130)),
)
SOME = sized((4, 5), (2_000, 10))


def tables_of(shapes: Sequence[tuple[int, int]] = SHAPES, dtype: Any = F32) -> list[np.ndarray]:
    return [gradient(shape, dtype) for shape in shapes]


def bags_of(
    tables: Sequence[np.ndarray], batch: int = sized(5, 2_000), longest: int = sized(7, 20),
    dtype: Any = np.int64,
) -> tuple[list[np.ndarray], list[np.ndarray]]:  # fmt: skip
    """Ids and offsets of a feature for each table; some bags are empty."""
    return test_embedding_bags.bags_of(
        list(map(len, tables)), batch, longest, int(RNG.integers(1 << 30)), dtype
    )


def compare_forward(options: dict[str, Any], tables: Any, *given: Any) -> Any:
    """The output of the device is that of the host, and in place of an array too."""
    bags = ops.EmbeddingBags(**options)
    expected = assert_calls_alike(bags, tables, *given)
    out = on_device(copy.deepcopy(expected))
    assert bags(*on_device([tables, *given]), out=out) is out
    assert_same(out, expected)
    return expected


def compare_gradients(options: dict[str, Any], tables: Any, grad: Any, *given: Any) -> None:
    """Each id gets the gradient that it gets on the host, but for those that do not count."""
    bags, (ids, offsets, *weights) = ops.EmbeddingBags(**options), given
    expected = bags.gradients(tables, ids, offsets, grad, *weights)
    there = on_device([ids, offsets, grad, *weights])
    found = bags.gradients(on_device(tables), *there)
    fusestep.synchronize()
    if not COMPUTES:  # which of them count
        return
    places = np.flatnonzero(np.concatenate([on_host(own.indices) for own in found]) >= 0)
    for own, host in zip(found, expected, strict=True):
        kept = on_host(own.indices) >= 0
        assert (on_host(own.indices)[~kept] == -(2**31)).all()
        assert (own.unit, own.dense_shape, own.dtype) == (host.unit, host.dense_shape, host.dtype)
        for name in ("indices", "rows", "weights"):
            ours, theirs = getattr(own, name), getattr(host, name)
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                np.testing.assert_array_equal(on_host(ours)[kept], theirs)
        if given[1] is None and isinstance(grad, list):
            assert_same(own.values, host.values)
        if host.winners is not None:  # numbered among all ids here, there among those that count
            np.testing.assert_array_equal(on_host(own.winners), np.append(places, -1)[host.winners])


def compare(options: dict[str, Any], tables: Any, *given: Any) -> None:
    out = compare_forward(options, tables, *given)
    compare_gradients(options, tables, gradients_like(out), *given)


def gradients_like(out: Any, dtype: Any = None) -> Any:
    """Of one output, or of each of a list."""
    if isinstance(out, list):
        return [gradients_like(own, dtype) for own in out]
    return gradient(out.shape, dtype or out.dtype)


def test_pooling() -> None:
    """Sums, means and maxima of every storage type; weights; both sizes of ids and offsets."""
    for name in POOLINGS:
        for dtype, index in ((F32, np.int64), (F64, np.int32), (F16, np.int32), (BF16, np.int64)):
            tables = tables_of(dtype=dtype)
            compare({"pooling": name}, tables, *bags_of(tables, dtype=index))
    for dtype in (F32, F64, BF16):
        tables = tables_of(dtype=dtype)
        ids, offsets = bags_of(tables)
        real = F64 if dtype is F64 else F32
        compare({}, tables, ids, offsets, [gradient(own.shape, real) for own in ids])
    compare({}, tables, ids, offsets, [gradient(own.shape, F16) for own in ids])
    mixed = [gradient(s, d) for s, d in zip(SHAPES, (F32, F16, F16, BF16, F32, F32), strict=True)]
    compare({"pooling": "mean"}, mixed, *bags_of(mixed))
    # A sum of one -0 is -0; NaN is the largest only where it comes first.
    table = np.array([[-0.0, np.nan, 0], [-0.0, 2, 0], [-0.0, 3, np.nan]], F32)
    ids, offsets = [np.array([1, 0, 1, 2, 0, 2, 2, 1])], [np.array([0, 4, 6, 8, 8])]
    for name in ("sum", "max"):
        compare({"pooling": name}, [table], ids, offsets)


def test_lists() -> None:
    """Rows as they are, an array for each feature; and pooled outputs in arrays of their own."""
    for dtype, features in ((F32, None), (BF16, [4, 0, 2, 0, 1, 0])):
        tables = tables_of(dtype=dtype)[:5]
        chosen = tables if features is None else [tables[t] for t in features]
        ids = [RNG.integers(0, max(len(t), 1), 4 if len(t) else 0) for t in chosen]
        options = {"pooling": "none", "features": features}
        compare(options, tables, ids, None)
        padded = {"padding_idx": [None] + [0] * (len(chosen) - 1), "out_of_range": "drop"}
        if features is not None:
            compare({**options, **padded}, tables, ids, None)
    tables = tables_of()
    ids, offsets = bags_of(tables)
    for name in ("sum", "max"):
        bags, out = ops.EmbeddingBags(name), on_device([gradient((5, t.shape[1])) for t in tables])
        assert bags(*on_device([tables, ids, offsets]), out=out) is out
        assert_same(np.concatenate([on_host(own) for own in out], 1), bags(tables, ids, offsets))


def compare_products(options: dict[str, Any], *given: Any) -> None:
    """The gradients of weights, whose sums over columns are in another order than on the host."""
    call = ops.EmbeddingBags(**options).weight_gradients
    known = COMPUTES or isinstance(given[1], list)  # of joined ids: how many each feature has
    assert_calls_alike(call, *given, compare=assert_close if known else lambda *_: None)


def test_products() -> None:
    """Every storage type; ids that count for nothing; joined ids; the last forward."""
    for dtype, grad_dtype in ((F32, F32), (F64, F64), (F16, F32), (BF16, F16)):
        tables = tables_of(dtype=dtype)
        ids, offsets = bags_of(tables)
        grad = gradient((5, sum(t.shape[1] for t in tables)), grad_dtype)
        compare_products({}, tables, ids, offsets, grad)
    compare_products({}, tables, *joined(ids, offsets), grad)
    features = [2, 0, 2, 1]
    ids, offsets = bags_of([tables[t] for t in features])
    left = {"features": features, "padding_idx": 1, "out_of_range": "drop"}
    ids[0][:2] = -5
    mixed = [tables[0].astype(F32), *tables[1:3]]
    compare_products(left, mixed, ids, offsets, gradient((5, 45)))
    own = on_device([gradient((5, 4))])
    bags = nn.EmbeddingBags(own, nn.SGD(own, 0.1))
    given = on_device([[np.array([1, 2])], [np.array([0, 0, 2])]])
    grad = on_device(gradient((2, 4)))
    bags(*given, on_device([gradient((2,))]))
    (found,) = bags.weight_gradients(grad)
    assert_close(found, on_host(own[0])[[1, 2]] @ on_host(grad)[1])
    bags(*given)
    with refused(ValueError, "have no gradient", *own):
        bags.weight_gradients(grad)


def test_forms() -> None:
    """Joined ids, bags of one length, one table; what else there is, `test_any_bags` draws."""
    tables = tables_of()
    ids, offsets = bags_of(tables)
    compare({}, tables, *joined(ids, offsets), gradient((sum(map(len, ids)),)))
    own = tables[:3]
    compare({}, own, [RNG.integers(0, len(t), (4, 3)) for t in own], None)
    compare({}, own[:1], np.array([[1, 2], [3, 3]]), None, gradient((2, 2)))
    compare({}, own[:1], np.array([1, 2, 3]), np.array([0, 3, 3]))
    compare({}, own[:1], np.array([1, 2, 3]), np.array([0, 3, 3]), gradient((3,)))
    # Empty batches, bags and lists; views that are not aligned, and strided ids.
    nothing = np.array([], np.int64)
    compare({}, own[:1], [nothing], [np.array([0])])
    compare({}, own[:1], [nothing], [np.array([0, 0, 0])])
    compare({}, own[:2], nothing, np.array([0, 0, 0]))
    room = on_device(gradient((9,)))
    view = room[1:9].reshape(2, 4)
    given = [np.array([1, 0])], [np.array([0, 2])]
    found = ops.EmbeddingBags()([view], *on_device(given))
    assert_same(found, ops.EmbeddingBags()([on_host(view)], *given))


# Steps

Make = Callable[[Any], Any]
OPTIMIZERS: tuple[Make, ...] = (
    lambda p: nn.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, sparse_update="dense_equivalent"),
    lambda p: nn.LazyAdam(p, 0.1, weight_decay=0.1, loss_scale=2.0),
    lambda p: nn.RowWiseAdagrad(p, learning_rate=0.1),
    lambda p: nn.RowWiseAdam(p, 0.1, sparse_update="dense_equivalent"),
    lambda p: nn.Adagrad(p, 0.1, learning_rate=0.1),
)


def compare_steps(
    make: Make, tables: Any, options: dict[str, Any], steps: Sequence[tuple[Any, ...]],
    grad_dtype: Any = F32,
) -> None:  # fmt: skip
    """Some steps on the device are those on the host, with another parameter that has none."""
    others = [gradient((3,))]
    on_cpu = make([w.copy() for w in (*others, *tables)])
    on_gpu = make(on_device([*others, *tables]))
    host = nn.EmbeddingBags(on_cpu.parameters[1:], on_cpu, **options)
    device = nn.EmbeddingBags(on_gpu.parameters[1:], on_gpu, **options)
    for given in steps:
        expected, found = host(*given), device(*on_device(given))
        assert_close(found, expected)
        grad = gradients_like(expected, grad_dtype)
        host.backward(grad)
        device.backward(on_device(grad))
    assert_equal_runs(on_gpu, on_cpu)


def test_steps() -> None:
    """Every kind of rule, pooling and storage type; ids that count for nothing."""
    tables = tables_of()
    for k, make in enumerate(OPTIMIZERS):
        for name in POOLINGS if k < 3 else ("mean",):
            own = [bags_of(tables, *SOME) for _ in range(2)]
            compare_steps(make, tables, {"pooling": name}, own)
    ids, offsets = bags_of(tables, *SOME)
    weights = [gradient(own.shape) for own in ids]
    compare_steps(OPTIMIZERS[1], tables, {}, [(ids, offsets, weights), (ids, offsets)])
    for name, make in product(POOLINGS, OPTIMIZERS[:3]):
        left = {"padding_idx": 0, "out_of_range": "drop", "pooling": name}
        bad = [np.where(RNG.random(len(x)) < 0.3, -1, x) for x in ids[:4]]
        compare_steps(make, tables[:4], left, [(bad, offsets[:4])])
    features = [0, 2, 0, 1]
    options = {"pooling": "none", "features": features, "padding_idx": 1}
    lists = [RNG.integers(0, len(tables[t]), 4) for t in features]
    compare_steps(OPTIMIZERS[1], tables[:3], options, [(lists,)])
    for dtype, grad_dtype in ((F64, F64), (F16, F32), (BF16, BF16)):
        own = tables_of(dtype=dtype)
        for name in ("mean", "max"):
            compare_steps(OPTIMIZERS[1], own, {"pooling": name}, [bags_of(own, *SOME)], grad_dtype)


def test_hot() -> None:
    """Rows that occur more than `HOT` times, whose ranges are summed; widths that are no tiles."""
    tables, batch = tables_of([(3, 4), (4, 5)]), 40
    for k, name in enumerate(POOLINGS):
        lengths = sized((2, 20) if k % 2 else (20, 2), (20, 20))  # each table in turn
        ids = [RNG.integers(0, 30, (batch, n)).clip(0, 2 + t) for t, n in enumerate(lengths)]
        assert max((own == len(t) - 1).sum() for own, t in zip(ids, tables, strict=True)) > HOT
        compare_steps(OPTIMIZERS[1], tables, {"pooling": name}, [(ids, None)])
    compare_steps(OPTIMIZERS[1], tables, {}, [(ids, None, [gradient(x.shape) for x in ids])])
    # The sums of a probe begin at a whole vector, for the tables whose rows do.
    made = kernel(ADAM, (), FLOAT32, FLOAT32, (FLOAT32,) * 2)
    sources = RowSource(index_bytes=4, length=HOT + 1)
    widths = [RowTable((0, 0, 0), 4, width, sources) for width in (4, 5)]
    assert RowStep(made, widths, touched_only=True)._hot_stride % 4 == 0


def test_any_bags() -> None:
    """Drawn ones: shapes, features, forms, sizes of ids and offsets, what counts for nothing."""
    for _ in range(sized(18, 40)):
        widths = RNG.choice([1, 2, 4, 5, 8, 12], RNG.integers(1, 5))
        heights = RNG.integers(1, 9, len(widths))
        tables = tables_of([(int(n), int(d)) for n, d in zip(heights, widths, strict=True)])
        features = np.sort(RNG.integers(0, len(tables), RNG.integers(1, 6))).tolist()
        is_joined = RNG.random() < 0.5
        if not is_joined:
            RNG.shuffle(features)
        chosen, dtype = [tables[t] for t in features], RNG.choice([np.int32, np.int64])
        ids, offsets = bags_of(chosen, int(RNG.integers(1, 7)), int(RNG.integers(0, 9)), dtype)
        options: dict[str, Any] = {"features": features, "pooling": str(RNG.choice(POOLINGS))}
        if RNG.random() < 0.5:
            options["padding_idx"] = [int(RNG.integers(0, len(t))) for t in chosen]
        if RNG.random() < 0.5:
            options["out_of_range"] = "drop"
            ids = [np.where(RNG.random(len(own)) < 0.2, 9, own).astype(dtype) for own in ids]
        given: list[Any] = [ids, offsets]
        if options["pooling"] == "sum" and RNG.random() < 0.5:
            given.append([gradient(own.shape) for own in ids])
        if is_joined:
            given[:2] = joined(ids, offsets)
            given[2:] = [np.concatenate(own) for own in given[2:]]
        compare(options, tables, *given)
        compare_steps(OPTIMIZERS[1], tables, options, [tuple(given)])


def test_mixtures() -> None:
    """Tables with weights, with maxima and with neither in one step: each as by itself."""
    tables, plain, grad = tables_of([(5, 4)] * 3), rows([3, 1, 3], (5, 4)), gradient((4, 4))
    given = [bags_of([w], 4, 5) for w in tables]
    weights = [gradient(given[0][0][0].shape)]

    def steps(there: Any) -> Any:
        opt, found = nn.LazyAdam(there(tables), 0.1), []
        for k, (name, own) in enumerate((("sum", weights), ("max", None), ("sum", None))):
            arguments = [opt.parameters[k].data], *map(there, (*given[k], grad, own))
            found += ops.EmbeddingBags(name).gradients(*arguments)
        for chosen in ([0, 1, 2], [0, 2], [1, 2], [2]):
            opt(tuple(found[k] if k in chosen else None for k in range(3)))
        opt((found[0], there(plain), found[2]))  # pooled rows and plain ones in one step
        return opt

    assert_equal_runs(steps(on_device), steps(copy.deepcopy))


# Errors

GOOD, ENDS = [[1, 2], [0, 2]], [[0, 1, 2], [0, 0, 2]]
JOINED, NO_ID = [1, 2, 0, 2], "is out of range: expected 0 <= id <"
BAD = (
    (IndexError, [[1, 5], [0, 2]], ENDS, f"ids[0][1] {NO_ID} 5, got 5"),
    (IndexError, [[1, 2], [-1, 2]], ENDS, f"ids[1][0] {NO_ID} 3, got -1"),
    (IndexError, [[1, 2], [0, 2**40]], ENDS, f"ids[1][1] {NO_ID} 3, got {2**40}"),
    (IndexError, [[1, 2], [0, -(2**31)]], ENDS, f"ids[1][1] {NO_ID} 3, got -{2**31}"),
    (IndexError, [1, 2, 0, 4], [0, 1, 2, 3, 4], f"ids[3] {NO_ID} rows of its table, got 4"),
    (ValueError, GOOD, [[1, 1, 2], [0, 0, 2]], "offsets[0][0] does not fit: expected 0, got 1"),
    (ValueError, GOOD, [[0, 3, 2], [0, 0, 2]], "offsets[0][1] does not fit: expected at least "),
    (ValueError, GOOD, [[0, 1, 2], [0, -1, 2]], "offsets[1][1] does not fit: expected at least "),
    (ValueError, GOOD, [[0, 1, 1], [0, 0, 2]], "offsets[0][2] does not fit: "),
    # Behind which nothing is read or written.
    (ValueError, GOOD, [[0, 2**40, 2], [0, 0, 2]], "offsets[0][1] does not fit: "),
    (ValueError, GOOD, [[0, -(2**40), 2], [0, 0, 2]], "offsets[0][1] does not fit: "),
    (ValueError, JOINED, [0, 1, 2, 3, 5], "offsets[4] does not fit"),
    (ValueError, JOINED, [1, 1, 2, 3, 4], "offsets[0] does not fit"),
    (ValueError, JOINED, [0, 1, 9, 3, 4], "offsets[2] does not fit"),
)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(("error", "ids", "offsets", "text"), BAD)
def test_bad_bags(error: Any, ids: Any, offsets: Any, text: str, pooling: str) -> None:
    """Told later; outputs stay as they are, or are 0; no step is taken, and then all goes on."""
    opt = nn.LazyAdam(on_device(tables_of([(5, 4), (3, 2)])), 0.1)
    bags, arrays = nn.EmbeddingBags(opt.parameters, opt, pooling), [p.data for p in opt.parameters]
    is_joined = ids is JOINED or isinstance(ids[0], int)
    bad = on_device([np.array(x) if is_joined else [*map(np.array, x)] for x in (ids, offsets)])
    out, grad = on_device([gradient((2, 6)), gradient((2, 6))])
    with told(error, text, *arrays, out):
        bags(*bad, out=out)
    found = on_host(bags(*bad))
    with told(error, text, *arrays):
        bags.backward(grad)
    assert not found.any()
    bags(*on_device([[*map(np.array, GOOD)], [*map(np.array, ENDS)]]))
    bags.backward(grad)
    assert opt.state_dict()["global_step"] == 1


# What is strided is copied by frameworks.
LATER = re.compile("falls|begin|end at|out of range|contiguous|memory")
BAD_ARGUMENTS = [one for one in test_embedding_bags.BAD if not LATER.search(one[1])]


@pytest.mark.parametrize(("error", "text", "changed"), BAD_ARGUMENTS)
def test_bad_arguments(error: Any, text: str, changed: dict[str, Any]) -> None:
    """Arguments that the host refuses are refused alike, but for values, which are told later."""
    given = {**test_embedding_bags.good(), "out": np.ones((2, 5), F32), **changed}
    there = {name: on_device(value) for name, value in given.items()}
    with pytest.raises(error, match="EmbeddingBags: .*" + text), unchanged(*there.values()):
        ops.EmbeddingBags()(**there)


def test_refusals() -> None:
    """Calls that mix places, or are not done on devices, raise at once."""
    host, apart = tables_of([(5, 4), (3, 2)]), [np.array([1, 2]), np.array([0, 2])]
    tables, ids, bounds = on_device([host, apart, [np.array([0, 1, 2]), np.array([0, 0, 2])]])
    given, grad = {"tables": tables, "ids": ids, "offsets": bounds}, on_device(gradient((2, 6)))
    bags, shifted_bounds = ops.EmbeddingBags(), on_device([np.array([0])] * 2)
    of_types = on_device([gradient((2, 4)), gradient((2, 2), F64)])
    elsewhere, no_fit, no_ids = "lives elsewhere", "offsets do not fit the ids", {"offsets": None}
    cases: tuple[tuple[type[Exception], str, dict[str, Any], dict[str, Any]], ...] = (
        (ValueError, f"tables[1] {elsewhere}", {}, {"tables": [tables[0], host[1]]}),
        (ValueError, f"ids[0] {elsewhere}", {}, {"ids": apart}),
        (ValueError, f"offsets[0] {elsewhere}", {}, {"offsets": [np.array([0, 2])] * 2}),
        (ValueError, f"out {elsewhere}", {}, {"out": gradient((2, 6))}),
        (ValueError, f"grad {elsewhere}", {}, {"grad": gradient((2, 6))}),
        (ValueError, no_fit, {}, {"offsets": bounds[0]}),
        (TypeError, no_fit, {}, {"ids": ids[0]}),
        (TypeError, no_fit, {}, {"tables": tables[:1], "ids": ids[0], "offsets": bounds[:1]}),
        (ValueError, "do not end at the number of ids", {}, {"offsets": shifted_bounds}),
        (ValueError, "out does not fit the features", {}, {"out": [grad]}),
        (ValueError, "out[0] has a wrong shape", {}, {"out": [grad, grad]}),
        (ValueError, "grad is a list", {}, {"grad": [grad, grad]}),
        (ValueError, "grad has a wrong shape", {}, {"grad": tables[0]}),
        (ValueError, "offsets are given without pooling", {"pooling": "none"}, {}),
        (ValueError, "ids have a wrong shape", {"pooling": "none"}, {**no_ids, "ids": ids[0]}),
        (ValueError, "grad does not fit the outputs", {"pooling": "none"},
         {**no_ids, "grad": grad}),
        (TypeError, "grad[1] has another dtype than grad[0]", {"pooling": "none"},
         {**no_ids, "grad": of_types}),
        (ValueError, "features are not in the order of their tables", {"features": [1, 0]},
         {"ids": ids[0], "offsets": bounds[0]}),
        (ValueError, "per_sample_weights need sums", {"pooling": "max"},
         {"per_sample_weights": [grad, grad]}))  # fmt: skip
    for error, text, options, changed in cases:
        own = ops.EmbeddingBags(**options)
        call = own.gradients if "grad" in changed else own
        with refused(error, text, *tables, grad):
            call(**{**given, **changed})
    with refused(ValueError, "per_sample_weights have no gradient", *tables, grad):
        ops.EmbeddingBags("max").weight_gradients(tables, ids, bounds, grad)
    shared, twice = on_device([gradient((4, 6)), gradient((2, 4))])
    with refused(ValueError, "out shares memory with what is read", shared):
        bags([shared], ids[:1], bounds[:1], out=shared[1:3])
    both = ops.EmbeddingBags(features=[0, 0])
    with refused(ValueError, "out[1] shares memory", twice):
        both(tables[:1], ids[:1] * 2, bounds[:1] * 2, out=[twice, twice])
    found = bags.gradients(tables, ids, bounds, grad)
    with refused(RuntimeError, "lives on a CUDA device", *tables):
        found[0].to_rows()
    off = nn.LazyAdam(tables, 0.1)
    off.target = "CPU"
    with refused(RuntimeError, "is that of pooled rows on a device", *tables):
        off(tuple(found))
    host_grad = bags.gradients(host, apart, [np.array([0, 1, 2])] * 2, gradient((2, 6)))
    for opt, own, other in (
        (nn.LazyAdam(tables, 0.1), found, host_grad), (nn.LazyAdam(host, 0.1), host_grad, found),
    ):  # fmt: skip
        for step in range(2):  # also in a step that is like the last
            with refused(ValueError, "lives elsewhere than the parameter", *tables, grad):
                opt(tuple(other))
            assert opt.state_dict()["global_step"] == step
            opt(tuple(own))
    fusestep.synchronize()
