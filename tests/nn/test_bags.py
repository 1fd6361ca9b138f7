"""Bags with optimizers: steps on the gradient of a pooled output, and what must not be done."""

import copy
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fusestep import nn, ops
from fusestep.kernels.cpu.rows import step as row_step
from helpers import BF16, assert_same_arrays, assert_same_bits, assign, refused
from optimizers import BY_NAME, FORMS, assert_same_run, decayed_and_scaled, make, states

TAKING = [form for form, (name, _) in FORMS.items() if BY_NAME[name].takes_rows]
SWEEPING = [form for form in TAKING if form != "Adam-lazy"]
SHAPES = {"a": (40, 5), "b": (7, 16), "c": (300, 64)}


def tables_of(dtype: Any = np.float32) -> list[nn.Parameter]:
    rng = np.random.default_rng(1)
    return [
        nn.Parameter(rng.standard_normal(shape).astype(dtype), name)
        for name, shape in SHAPES.items()
    ]


def ids_of(step: int, batch: int = 30, longest: int = 6) -> tuple[list[Any], list[Any]]:
    """Ids and offsets of one step, of the three tables."""
    rng, ids, offsets = np.random.default_rng(50 + step), [], []
    for n, _ in SHAPES.values():
        bounds = np.concatenate(([0], np.cumsum(rng.integers(0, longest + 1, batch))))
        offsets.append(bounds)
        ids.append(rng.integers(0, n, bounds[-1]))
    return ids, offsets


def gradient_of(out: np.ndarray, step: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(80 + step).standard_normal(out.shape).astype(dtype)


def expanded(gradients: Any) -> list[Any]:
    return [None if g is None else g.to_rows() for g in gradients]


@pytest.mark.parametrize(
    ("form", "how"),
    [(form, "lazy") for form in TAKING] + [(form, "dense_equivalent") for form in SWEEPING],
)
def test_a_step_is_that_of_the_expanded_gradients(form: str, how: str) -> None:
    """To the last bit, whatever the rule: weighted or not, with decay and loss scale."""
    options = {**decayed_and_scaled(form), "sparse_update": how}
    opt, other = (make(form, tables_of(), **options) for _ in range(2))
    for step, pooling in enumerate(["sum", "mean", "max"]):
        bags = nn.EmbeddingBags(opt.parameters, opt, pooling)
        grad = gradient_of(bags(*ids_of(step)), step)
        other(expanded(bags.gradients(grad)))
        bags.backward(grad)
        assert_same_run(opt, other)


@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
@pytest.mark.parametrize("form", ["Adagrad", "RowWiseAdagrad", "LazyAdam"])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [(np.float64, np.float64), (np.float16, np.float32), (BF16, np.float32), (np.float32, BF16)],
    ids=str,
)
def test_storage_types(dtype: Any, grad_dtype: Any, form: str, pooling: str) -> None:
    opt, other = (make(form, tables_of(dtype), sparse_update="lazy") for _ in range(2))
    bags = nn.EmbeddingBags(opt.parameters, opt, pooling)
    for step in range(2):
        grad = gradient_of(bags(*ids_of(step)), step, grad_dtype)
        gradients = bags.gradients(grad)
        if grad_dtype is BF16 and pooling == "mean":  # products are not rounded to 16 bits there
            wide = bags.gradients(grad.astype(np.float32))
            other(expanded(wide))
        else:
            other(expanded(gradients))
        bags.backward(grad)
        assert_same_run(opt, other)


@pytest.fixture(params=[63, 16])
def short_keys(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where sort keys have no room for the number of a gradient row, it is looked up."""
    monkeypatch.setattr(row_step, "_KEY_BITS", request.param)
    row_step._plan_of.cache_clear()
    yield
    row_step._plan_of.cache_clear()


@pytest.mark.usefixtures("short_keys")
def test_hot_rows_and_weights() -> None:
    """Rows that occur thousands of times, with factors: ranges are summed of products."""
    for weighted, pooling in ((False, "sum"), (True, "sum"), (False, "max")):
        opt, other = (nn.LazyAdam(tables_of(), 0.1) for _ in range(2))
        bags, rng = nn.EmbeddingBags(opt.parameters, opt, pooling), np.random.default_rng(4)
        batch, length = 900, 15
        ids = [np.minimum(rng.zipf(1.5, (batch, length)), n) - 1 for n, _ in SHAPES.values()]
        weights = [rng.standard_normal(own.shape).astype(np.float32) for own in ids]
        grad = gradient_of(bags(ids, None, weights if weighted else None), 0)
        other(expanded(bags.gradients(grad)))
        bags.backward(grad)
        assert_same_run(opt, other)


def test_weights_in_some_forwards() -> None:
    """Of the same bags: what was found out about those with weights is not taken of others."""
    tables = tables_of()
    bags, other = (nn.EmbeddingBags(tables, nn.SGD(tables, 0.1)) for _ in range(2))
    ids, offsets = ids_of(0)
    weights = [np.full(len(own), 2, np.float32) for own in ids]
    out = bags(ids, offsets)
    assert_same_bits(bags(ids, offsets, weights), 2 * out)
    assert_same_bits(bags(ids, offsets), out)
    assert_same_bits(other(ids, offsets, weights), 2 * out)
    assert_same_bits(other(ids, offsets), out)


def test_gradients_of_weights() -> None:
    """Of the weights of the last forward, if it had any; before backward, and again."""
    tables = tables_of(np.float64)
    bags = nn.EmbeddingBags(tables, nn.SGD(tables, 0.1))
    rng, (ids, offsets) = np.random.default_rng(3), ids_of(0)
    weights = [rng.standard_normal(len(own)) for own in ids]
    grad = gradient_of(bags(ids, offsets, weights), 0, np.float64)
    arrays = [table.data for table in tables]
    expected = ops.EmbeddingBags().weight_gradients(arrays, ids, offsets, grad)
    for _ in range(2):
        assert_same_arrays(bags.weight_gradients(grad), expected)
    bags(ids, offsets)
    with refused(ValueError, "per_sample_weights have no gradient: .* got none", tables):
        bags.weight_gradients(grad)
    for pooling in ("mean", "max"):
        bags = nn.EmbeddingBags(tables, bags.optimizer, pooling)
        bags(ids, offsets)
        with refused(ValueError, "per_sample_weights have no gradient", tables):
            bags.weight_gradients(grad)


@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
@pytest.mark.usefixtures("short_keys")
def test_tables_of_several_kinds_in_one_step(how: str) -> None:
    """Sums, maxima, means and plain rows of gradients of their own, some of other dtypes. One that
    is none of its kind in the step before is read as what it is."""
    rng, shape = np.random.default_rng(7), (11, 6)

    def gradient(kind: str) -> Any:
        n, dtype = int(rng.integers(1, 90)), np.float32
        if kind == "rows":
            values = rng.standard_normal((n, 6)).astype(dtype)
            return nn.RowTensor(rng.integers(0, 11, n), values, shape)
        table, lengths = rng.standard_normal(shape).astype(np.float32), rng.integers(0, 4, n)
        ids, offsets = rng.integers(0, 11, lengths.sum()), np.append(0, np.cumsum(lengths))
        weights = None
        if kind == "weights":
            weights = [rng.standard_normal(len(ids)).astype(np.float32)]
        elif kind != "mean" and rng.random() < 0.2:  # no factor is rounded to 16 bits
            dtype = np.float16
        bags = ops.EmbeddingBags({"weights": "sum"}.get(kind, kind))
        grad = rng.standard_normal((n, 6)).astype(dtype)
        (found,) = bags.gradients([table], [ids], [offsets], grad, weights)
        return found

    opt, other = (
        nn.Adam([np.ones(shape, np.float32) for _ in range(4)], 0.1, sparse_update=how)
        for _ in range(2)
    )
    for _ in range(40):
        kinds = rng.choice(["sum", "max", "mean", "weights", "rows"], 2)
        given = [gradient(rng.choice(kinds)) if rng.random() < 0.9 else None for _ in range(4)]
        opt(given)
        other([g.to_rows() if isinstance(g, ops.BagTensor) else g for g in given])
        assert_same_run(opt, other)


@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
def test_rows_without_pooling(how: str) -> None:
    """A gradient for each table, of lists of any length."""
    rng, features = np.random.default_rng(0), [2, 0, 1, 0]
    opt, other = (nn.Adam(tables_of(), 0.1, sparse_update=how) for _ in range(2))
    bags = nn.EmbeddingBags(opt.parameters, opt, "none", features=features)
    shapes = [list(SHAPES.values())[t] for t in features]
    for lengths in ((300, 1, 2, 0), (0, 3, 1, 20), (1, 3, 0, 200)):
        ids = [rng.integers(0, n, k) for (n, _), k in zip(shapes, lengths, strict=True)]
        grad = [gradient_of(own, k) for k, own in enumerate(bags(ids))]
        gradients = bags.gradients(grad)
        for t, found in enumerate(gradients):
            dense = np.zeros(opt.parameters[t].shape)
            for f in np.flatnonzero(np.array(features) == t):
                np.add.at(dense, ids[f], grad[f])
            np.testing.assert_allclose(found.to_dense(), dense, rtol=1e-4, atol=1e-5)
        other(expanded(gradients))
        bags.backward(grad)
        assert_same_run(opt, other)


def test_gradients_are_accumulated_clipped_and_taken_later() -> None:
    tables, others = tables_of(), tables_of()
    opt, other = nn.LazyAdam(tables, 0.1), nn.LazyAdam(others, 0.1)
    bags = nn.EmbeddingBags(tables, opt)
    parts = [bags.gradients(gradient_of(bags(*ids_of(step)), step)) for step in range(2)]
    rows = [[a.to_rows(), b.to_rows()] for a, b in zip(*parts, strict=True)]
    opt([[a, b] for a, b in zip(*parts, strict=True)])
    other(rows)
    assert_same_run(opt, other)
    assert ops.global_norm(list(parts[0])) == ops.global_norm(expanded(parts[0]))
    opt(ops.clip_by_global_norm(list(parts[0]), 0.5))
    other(ops.clip_by_global_norm(expanded(parts[0]), 0.5))
    assert_same_run(opt, other)


@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
@pytest.mark.parametrize("options", [
    {"clipnorm": 0.3}, {"clipvalue": 0.1}, {"skip_nonfinite": True}, {"grad_centralization": True},
], ids=str)  # fmt: skip
@pytest.mark.usefixtures("short_keys")
def test_options_of_the_optimizer(options: dict[str, Any], pooling: str) -> None:
    of_group = {n: options[n] for n in options if n == "grad_centralization"}
    rest = {} if of_group else options
    opt, other = (nn.LazyAdam([{"params": tables_of(), **of_group}], 0.1, **rest) for _ in range(2))
    bags = nn.EmbeddingBags(opt.parameters, opt, pooling)
    for step in range(3):
        grad = gradient_of(bags(*ids_of(step)), step)
        if step == 1 and "skip_nonfinite" in options:
            grad[3, 9] = np.nan
            before = opt.state_dict()
            bags.backward(grad)
            assert opt.skipped_steps == 1
            for name, array in states(opt).items():
                assert_same_bits(array, before[name])
            continue
        other(expanded(bags.gradients(grad)))
        bags.backward(grad)
        assert_same_arrays(opt.parameters, other.parameters)


@pytest.mark.parametrize("seed", range(6))
def test_random_sequences(seed: int) -> None:
    """Bags, features that share tables, plain rows, dense gradients, lists, rebinding and errors.
    Beside an optimizer that is given the expanded gradients."""
    rng = np.random.default_rng(seed)
    form = ["LazyAdam", "Adagrad", "RowWiseAdagrad"][seed % 3]
    how = "lazy" if seed < 3 else "dense_equivalent"
    opt, other = (make(form, tables_of(), sparse_update=how) for _ in range(2))
    names = list(SHAPES)
    pooling = [nn.EmbeddingBags(opt.parameters, opt, p, padding_idx=i)
               for p, i in (("sum", None), ("mean", None), ("sum", 3))]  # fmt: skip
    of_what = {
        "part": nn.EmbeddingBags(opt.parameters[1:2], opt),
        "shared": nn.EmbeddingBags(opt.parameters, opt, features=[2, 0, 2, 0], padding_idx=3),
    }
    for step in range(40):
        what = rng.choice(
            ["bags", "part", "shared", "rows", "dense", "list", "rebind", "bad ids", "bad grad"]
        )
        bags = pooling[rng.integers(3)]
        ids, offsets = ids_of(int(rng.integers(10_000)), batch=int(rng.integers(0, 40)))
        if what == "rebind":
            k = int(rng.integers(3))
            opt.parameters[k].data = opt.parameters[k].data.copy()
        elif what == "bad ids":
            ids[2] = np.append(ids[2], 300)
            offsets[2] = np.append(offsets[2][:-1], len(ids[2]))
            if len(offsets[2]) > 1:
                with refused(IndexError, "out of range", opt):
                    bags(ids, offsets)
        elif what == "bad grad":
            out = bags(ids, offsets)
            with refused(ValueError, "wrong shape", opt):
                bags.backward(out[:, 1:])
        elif what in ("bags", "part", "shared"):
            features = {"part": [1], "shared": [2, 0, 2, 0]}.get(what, [0, 1, 2])
            bags = of_what.get(what, bags)
            grad = gradient_of(bags(*([own[f] for f in features] for own in (ids, offsets))), step)
            for own in (*ids, *offsets):  # they may change after the forward
                own[:] = 10**9
            other(expanded(bags.gradients(grad)))
            bags.backward(grad)
        else:
            gradients: list[Any] = []
            for k, name in enumerate(names):
                shape = SHAPES[name]
                if what == "dense" and k == 0:
                    gradients.append(rng.standard_normal(shape).astype(np.float32))
                    continue
                indices = rng.integers(0, shape[0], rng.integers(0, 30))
                values = rng.standard_normal((len(indices), shape[1])).astype(np.float32)
                rows = nn.RowTensor(indices, values, shape)
                gradients.append([rows, rows] if what == "list" else rows)
            opt(gradients)
            other(gradients)
        assert_same_run(opt, other)


# What must not be done


def test_backward_needs_its_own_forward() -> None:
    tables = tables_of()
    opt = nn.LazyAdam(tables, 0.1)
    bags = nn.EmbeddingBags(tables, opt)
    grad = gradient_of(np.empty((30, 85)), 0)
    with refused(RuntimeError, "backward needs a forward before each", opt):
        bags.backward(grad)
    bags(*ids_of(0))
    bags.backward(grad)
    with refused(RuntimeError, "backward needs a forward before each", opt):
        bags.backward(grad)
    bags(*ids_of(0))
    tables[1].data = tables[1].data.copy()
    with refused(RuntimeError, "tables that were rebound", opt):
        bags.backward(grad)
    bags(*ids_of(0))  # of the new tables
    bags.backward(grad)
    bags(*ids_of(0))
    other = threading.Thread(target=bags, args=ids_of(1))
    other.start()
    other.join()
    with refused(RuntimeError, "another thread's forward", opt):
        bags.backward(grad)


@pytest.mark.parametrize("steps", [0, 1])
def test_after_an_error_the_forward_is_still_there(steps: int) -> None:
    tables = tables_of()
    opt = nn.LazyAdam(tables, 0.1)
    bags = nn.EmbeddingBags(tables, opt)
    grad = gradient_of(bags(*ids_of(0)), 0)
    with refused(ValueError, "grad has a wrong shape", opt):
        bags.backward(grad[1:])
    with refused(IndexError, "out of range", opt):
        bags([np.array([[99]]), np.array([[0]]), np.array([[0]])])
    with refused(ValueError, "shares memory with a parameter or state", opt):
        room = nn.Parameter(np.zeros((30, 85), np.float32))
        alias = nn.EmbeddingBags([room], nn.SGD([room], 0.1))
        if steps:
            alias([np.zeros((30, 1), int)])
            alias.backward(np.ones((30, 85), np.float32))
        alias([np.zeros((30, 1), int)])
        alias.backward(room.data)
    bags.backward(grad)


def test_a_read_only_table_is_not_written() -> None:
    tables = tables_of()
    opt = nn.LazyAdam(tables, 0.1)
    bags = nn.EmbeddingBags(tables, opt)
    grad = gradient_of(bags(*ids_of(0)), 0)
    tables[2].data.flags.writeable = False
    with refused(ValueError, "parameter 'c' is read-only", opt):
        bags.backward(grad)
    tables[2].data.flags.writeable = True
    bags.backward(grad)  # of the same forward


@pytest.mark.parametrize(("error", "text", "call"), [
    (TypeError, "optimizer has a wrong type", lambda p: nn.EmbeddingBags(p, None)),
    (TypeError, "parameters have a wrong type", lambda p: nn.EmbeddingBags(p[0], nn.SGD(p, 0.1))),
    (ValueError, r"parameters\[0\] is none of the optimizer's",
     lambda p: nn.EmbeddingBags(p[:1], nn.SGD(p[1:], 0.1))),
    (ValueError, "pooling is unknown", lambda p: nn.EmbeddingBags(p, nn.SGD(p, 0.1), "least")),
    (ValueError, "padding_idx of feature 1 is out of range",
     lambda p: nn.EmbeddingBags(p, nn.SGD(p, 0.1), padding_idx=7)),
])  # fmt: skip
def test_bad_arguments(error: type[Exception], text: str, call: Any) -> None:
    with pytest.raises(error, match=f"EmbeddingBags: .*{text}"):
        call(tables_of())


def test_a_table_that_was_resized_in_place() -> None:
    table = np.ones((8, 4), np.float32)
    opt = nn.LazyAdam([table], 0.1)
    bags = nn.EmbeddingBags([table], opt)
    ids = [np.array([[1, 7]])]
    bags(ids)
    assign(table, shape=(4, 8))  # what it is, not where
    with refused(RuntimeError, "tables that were rebound", opt):
        bags.backward(np.ones((1, 4), np.float32))
    with refused(IndexError, "out of range", opt):
        bags(ids)
    out = bags([np.array([[1, 3]])])
    assert out.shape == (1, 8)
    with refused(ValueError, "has another shape than at construction", opt):
        bags.backward(out)


def test_a_table_that_moved_in_place() -> None:
    table = np.ones((8, 4), np.float32)
    bags = nn.EmbeddingBags([table], nn.LazyAdam([table], 0.1))
    ids, before = [np.array([[1, 7]])], table.ctypes.data
    bags(ids)
    table.resize((2**20, 4), refcheck=False)
    held = [np.ones((8, 4), np.float32) for _ in range(100)]  # one of them where it was
    table.resize((8, 4), refcheck=False)
    assert table.ctypes.data != before
    table[:] = 3
    with refused(RuntimeError, "tables that were rebound", table, *held):
        bags.backward(np.ones((1, 4), np.float32))
    assert bags(ids).tolist() == [[6] * 4]


def test_gradients_of_other_tables() -> None:
    """Factors of another type, in a first step and in one that is like the last."""
    tables = tables_of()
    opt, offsets = nn.LazyAdam(tables, 0.1), ids_of(0)[1]
    bags, ids = ops.EmbeddingBags("mean"), ids_of(0)[0]
    wide = [table.data.astype(np.float64) for table in tables]
    grad = gradient_of(np.empty((30, 85)), 0)
    for _ in range(2):
        with refused(TypeError, "has weights of another dtype: expected float32", opt):
            opt(bags.gradients(wide, ids, offsets, grad))
        opt(bags.gradients([table.data for table in tables], ids, offsets, grad))


def test_a_rule_without_row_sparse_gradients() -> None:
    tables = tables_of()
    opt = nn.Momentum(tables, 0.1, 0.9)
    bags = nn.EmbeddingBags(tables, opt)
    grad = gradient_of(bags(*ids_of(0)), 0)
    with refused(ValueError, "is row-sparse", opt):
        bags.backward(grad)


def test_copies_begin_without_a_forward() -> None:
    tables = tables_of()
    bags = nn.EmbeddingBags(tables, nn.LazyAdam(tables, 0.1))
    ids, offsets = ids_of(0)
    out = bags(ids, offsets)
    for copied in (copy.deepcopy(bags), pickle.loads(pickle.dumps(bags))):
        with pytest.raises(RuntimeError, match="needs a forward"):
            copied.backward(out)
        assert_same_bits(copied(ids, offsets), out)
        copied.backward(out)
        assert copied.parameters[0] is not tables[0]
    assert_same_bits(bags(ids, offsets), out)
