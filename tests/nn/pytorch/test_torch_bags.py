"""Bags beside PyTorch's modules: options that change, ids of every form, compilation, errors."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn.utils import parametrizations, parametrize, prune
from bag_modules import IDS, SIZES, assert_as, assert_close, before, modules_of, pooled, stepping
from fusestep import ops
from fusestep.kernels.tables import LEFT_OUT
from fusestep.nn import torch as fused
from fusestep.nn.torch.engine.bags.gradients import rows_of_bags
from helpers import more

# Modules that change


@pytest.mark.parametrize(
    ("option", "values"), [("mode", ("mean", "max", "sum")), ("include_last_offset", (True, False))]
)
def test_options_that_change_act(option: str, values: Any) -> None:
    modules, bags = modules_of(), fused.EmbeddingBags(modules_of())
    ids, offsets = [own.reshape(-1) for own in IDS], torch.tensor([0, 3, 6])
    for value in values:
        for module in (*modules, *bags.children()):
            setattr(module, option, value)
        expected = torch.cat([m(i, offsets) for m, i in zip(modules, ids, strict=True)], 1)
        torch.testing.assert_close(bags(ids, [offsets] * 2), expected)
    assert getattr(bags, option) == values[-1]
    assert "sum" in repr(bags)
    setattr(bags.get_submodule("0"), option, values[0])
    with pytest.raises(ValueError, match=f"{option} differs"):
        bags(ids, [offsets] * 2)
    assert repr(bags)
    with pytest.raises(AttributeError):
        setattr(bags, option, values[0])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("form", ["single", "square", "offsets"])
@pytest.mark.parametrize("padding", [0, 3])
def test_the_padding_row_of_an_embedding(padding: int, form: str, mode: str) -> None:
    """It is read as it is, and neither a gradient nor a lazy step touches it."""
    torch.manual_seed(0)
    tables = [torch.nn.Embedding(5, 4, padding_idx=1, dtype=torch.float64) for _ in range(2)]
    for table in tables:
        torch.nn.init.normal_(table.weight)
    bags = fused.EmbeddingBags(copy.deepcopy(tables), mode)
    bags([torch.tensor([[1]])] * 2)
    for module in (*tables, *bags.children()):  # another row from now on
        module.padding_idx = padding
    optimizer = fused.SGD(bags.parameters(), lr=0.1, momentum=0.9, sparse="touched")
    ids = [torch.tensor([[0, 3, 1], [3, 3, 0], [2, 4, 3]]), torch.randint(5, (3, 3))]
    offsets = None
    if form == "single":
        ids = [own[:, 1].contiguous() for own in ids]
    elif form == "offsets":
        ids, offsets = [own.reshape(-1) for own in ids], [torch.tensor([0, 3, 6])] * 2

    def theirs(table: Any, own: Any) -> Any:
        rows = table(own.reshape(3, -1))
        return rows.amax(1) if mode == "max" else getattr(rows, mode)(1)

    pools = torch.nn.functional.embedding_bag  # whose maxima have one gradient each
    for _ in range(2):
        bags.update_in_backward(None)
        out = bags(ids, offsets)
        expected = torch.cat([theirs(t, i) for t, i in zip(tables, ids, strict=True)], 1)
        torch.testing.assert_close(out, expected)
        out.square().sum().backward()
        for table, own, weight in zip(tables, ids, bags.weights, strict=True):
            assert padding not in weight.grad._indices()
            table.weight.grad = None
            pools(own.reshape(3, -1), table.weight, mode=mode).square().sum().backward()
            table.weight.grad[padding] = 0
            torch.testing.assert_close(weight.grad.to_dense(), table.weight.grad)
            weight.grad = None
        bags.update_in_backward(optimizer)
        rows = [w.detach()[padding].clone() for w in bags.weights]
        bags(ids, offsets).square().sum().backward()
        assert all(torch.equal(w[padding], row) for w, row in zip(bags.weights, rows, strict=True))
        for table, weight in zip(tables, bags.weights, strict=True):
            assert not torch.equal(table.weight, weight)
            table.load_state_dict({"weight": weight.detach()})


@pytest.mark.parametrize("after", [False, True], ids=["before", "after the first forward"])
@pytest.mark.parametrize(("option", "value", "error", "text"), [
    ("max_norm", 1.0, ValueError, "has max_norm"),
    ("scale_grad_by_freq", True, ValueError, "has scale_grad_by_freq"),
    ("padding_idx", 9, ValueError, "padding_idx of table 0 is out of range"),
    ("padding_idx", -10, ValueError, "padding_idx of table 0 is out of range"),
    ("padding_idx", 1.0, TypeError, "padding_idx of table 0 has a wrong type"),
    ("padding_idx", True, TypeError, "padding_idx of table 0 has a wrong type"),
    ("mode", "least", ValueError, "mode differs|pooling is unknown"),
    ("sparse", False, ValueError, "is not sparse"),
    ("forward", lambda *_: None, TypeError, "has a forward of its own"),
])  # fmt: skip
def test_options_that_are_refused(option: str, value, error, text: str, after: bool) -> None:
    bags, _ = stepping()
    tables = before(bags)
    if after:
        bags(IDS).sum().backward()
        tables = before(bags)
    module = bags.get_submodule("0")
    earlier = getattr(module, option)
    setattr(module, option, value)
    for _ in range(2):
        with pytest.raises(error, match=f"EmbeddingBags: .*({text})"):
            bags(IDS)
    assert_as(bags, tables)
    setattr(module, option, earlier)
    vars(module).pop("forward", None)
    bags(IDS).sum().backward()


class OwnForward(torch.nn.EmbeddingBag):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().forward(*args, **kwargs)


HOOKS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda m: m.register_forward_hook(lambda *_: None),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "backward": lambda m: m.register_full_backward_hook(lambda *_: None),
    "backward pre": lambda m: m.register_full_backward_pre_hook(lambda *_: None),
    "pruning": lambda m: prune.random_unstructured(m, "weight", 0.5),
    "weight norm": lambda m: torch.nn.utils.weight_norm(m),
    "spectral norm": lambda m: torch.nn.utils.spectral_norm(m),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after the first forward"])
@pytest.mark.parametrize("kind", [torch.nn.EmbeddingBag, torch.nn.Embedding])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_hooks_of_modules_are_refused(hook: str, kind: Any, after: bool) -> None:
    modules = modules_of("sum", kind=kind)
    if not after:
        HOOKS[hook](modules[1])
        with pytest.raises(ValueError, match="EmbeddingBags: table '1' has hooks, or is pruned"):
            fused.EmbeddingBags(modules)
        return
    bags = fused.EmbeddingBags(modules)
    bags(IDS)
    HOOKS[hook](modules[1])
    for _ in range(2):
        with pytest.raises(ValueError, match="EmbeddingBags: table '1' has hooks, or is pruned"):
            bags(IDS)


def test_pruning_that_was_made_permanent_acts() -> None:
    modules = modules_of()
    for module in modules:
        prune.random_unstructured(module, "weight", 0.5)
        prune.remove(module, "weight")
    expected = pooled(modules, IDS)
    torch.testing.assert_close(fused.EmbeddingBags(modules)(IDS), expected)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_weights(register: str) -> None:
    """They act where gradients are left, and a step in backward refuses them."""
    bags, _ = stepping()
    seen: list[Any] = []
    handle = getattr(bags.weights[1], register)(seen.append)
    with pytest.raises(
        ValueError, match="the weight of table 1 has hooks, which would see no gradient"
    ):
        bags(IDS)
    bags.update_in_backward(None)
    bags(IDS).sum().backward()
    assert len(seen) == 1
    handle.remove()
    bags.zero_grad()
    bags.update_in_backward(fused.LazyAdam(bags.parameters(), lr=0.1))
    bags(IDS).sum().backward()


class Twice(torch.nn.Module):
    def forward(self, w: Any) -> Any:
        return 2 * w


PARAMETRIZATIONS: dict[str, Callable[[Any], Any]] = {
    "twice": lambda m: parametrize.register_parametrization(m, "weight", Twice()),
    "twice two times": lambda m: [
        parametrize.register_parametrization(m, "weight", Twice()) for _ in range(2)],
    "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
}  # fmt: skip


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("way", PARAMETRIZATIONS)
def test_parametrized_tables(way: str, mode: str) -> None:
    """Their gradients go on to what they are computed from, and steps are those of optimizers."""
    modules = modules_of(mode)
    for module in modules:
        PARAMETRIZATIONS[way](module)
    bags = fused.EmbeddingBags(copy.deepcopy(modules))
    optimizers = [torch.optim.Adagrad(m.parameters(), lr=0.1) for m in (modules, bags)]
    for _ in range(3):
        for out, optimizer in zip((pooled(modules, IDS), bags(IDS)), optimizers, strict=True):
            optimizer.zero_grad()
            out.square().sum().backward()
            optimizer.step()
    assert_close(bags, modules)
    with pytest.raises(ValueError, match="optimizer has other parameters"):
        bags.update_in_backward(fused.Adagrad(bags.parameters(), lr=0.1))


def test_tables_that_are_parametrized_later() -> None:
    bags, _ = stepping()
    out = bags(IDS).detach().clone()
    parametrize.register_parametrization(bags.get_submodule("1"), "weight", Twice())
    with pytest.raises(ValueError, match="the weight of table 1 was replaced"):
        bags(IDS)
    bags.update_in_backward(None)
    torch.testing.assert_close(bags(IDS), out * torch.tensor([1.0] * 4 + [2.0] * 8))


# Ids, and other arguments


OTHERS = [
    torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.float32, torch.float16, torch.float8_e5m2, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_other_dtypes_of_ids_and_offsets(dtype: Any) -> None:
    bags, _ = stepping()
    flat, bounds = [i.reshape(-1) for i in IDS], [torch.tensor([0, 3])] * 2
    other_ids, other_bounds = IDS[1].to(dtype), bounds[1].to(dtype)
    joined = torch.cat(flat), torch.tensor([0, 3, 6, 9, 12])
    calls: list[tuple[str, Any]] = [
        (r"ids\[1\]", ([IDS[0], other_ids],)),
        (r"ids\[1\]", ([flat[0], other_ids.reshape(-1)], bounds)),
        (r"offsets\[1\]", (flat, [bounds[0], other_bounds])),
        ("ids", (joined[0].to(dtype), joined[1])), ("offsets", (joined[0], joined[1].to(dtype))),
    ]  # fmt: skip
    for name, arguments in calls:
        with pytest.raises(TypeError, match=f"EmbeddingBags: {name} has a wrong dtype"):
            bags(*arguments)
    factors = [torch.ones(2, 3), torch.ones(2, 3).to(dtype)]
    if not dtype.is_floating_point or dtype.itemsize == 1:
        with pytest.raises(TypeError, match=r"per_sample_weights\[1\] has a wrong dtype"):
            bags(IDS, None, factors)
    assert torch.equal(bags([i.int() for i in IDS]), bags(IDS))


def test_tensors_that_compiled_code_cannot_read() -> None:
    """Strided, empty, of inference mode, parameters, cut out of larger ones: the same output."""
    ours = fused.EmbeddingBags(modules_of())
    ids, offsets = [own.reshape(-1) for own in IDS], [torch.tensor([0, 2, 2, 5])] * 2
    out = ours(ids, offsets)
    with torch.inference_mode():
        inference = [own.clone() for own in ids]
    changes: list[Any] = [
        inference, [own.int() for own in ids], [torch.stack([own, own], 1)[:, 0] for own in ids],
        [torch.cat([own, own])[len(own) :] for own in ids],
        [torch.nn.Parameter(own, requires_grad=False) for own in ids],
    ]  # fmt: skip
    for change in changes:
        assert torch.equal(ours(change, offsets), out)
    square = [torch.tensor(np.random.default_rng(n).integers(0, n, (6, 4))) for n, _ in SIZES]
    for view in (
        lambda own: own.t().contiguous().t(), lambda own: own[:, :2], lambda own: own[:, ::2],
        lambda own: own[:1, ::2], lambda own: own[:4, :1].expand(4, 4),
        lambda own: own.reshape(-1)[:9].unfold(0, 4, 1),
    ):  # fmt: skip
        views = list(map(view, square))
        assert torch.equal(ours(views), ours([own.contiguous() for own in views]))
    nothing = [torch.tensor([], dtype=torch.int64)] * 2
    assert not ours(nothing, [torch.zeros(4, dtype=torch.int64)] * 2).any()
    assert ours(nothing, nothing).shape == (0, 12)
    gone = ids[1].clone()
    gone.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has no memory"):
        ours([ids[0], gone], offsets)
    for thing in (torch.tensor(1), torch.tensor([1.0]), None, 3, ids[0].to_sparse()):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            ours([ids[0], thing], offsets)


def test_sizes_single_ids_and_last_offsets() -> None:
    torch.manual_seed(1)
    bags = fused.EmbeddingBags([(9, 4), torch.nn.Embedding(5, 3, padding_idx=1)], "mean")
    ids = [torch.tensor([[1, 8], [0, 0]]), torch.tensor([4, 1])]
    first, second = bags.weights
    expected = torch.cat([first[ids[0]].mean(1), second[ids[1]]], dim=1)
    torch.testing.assert_close(bags(ids), expected)
    whole = fused.EmbeddingBags([(9, 4)], include_last_offset=True)
    out = whole([ids[0].reshape(-1)], [torch.tensor([0, 2, 4])])
    torch.testing.assert_close(out, whole([ids[0]]))
    with torch.no_grad():
        assert not whole([ids[0]]).requires_grad
    embeddings = fused.EmbeddingBags([torch.nn.Embedding(5, 3), torch.nn.Embedding(9, 4)])
    first, second = embeddings.weights
    expected = torch.cat([first[ids[1]], second[[8, 0]]], dim=1)
    assert torch.equal(embeddings([ids[1], torch.tensor([8, 0])]), expected)
    with pytest.raises(ValueError, match=r"ids\[1\] have another number of bags"):
        embeddings([ids[1], torch.tensor([8])])
    with pytest.raises(ValueError, match=r"ids\[0\] has a wrong shape"):
        bags([torch.tensor([1, 8]), ids[1]])  # without offsets nobody knows what a bag is


def test_numbers_that_are_marked_as_negative() -> None:
    """As PyTorch marks them, instead of writing them: those that are meant are read."""
    bags = fused.EmbeddingBags([(4, 4)])
    ids, factors = torch.tensor([[3, 1]]), torch.rand(1, 2)
    out, marked = bags([ids], None, [factors]), torch._neg_view
    assert torch.equal(bags([marked(-ids)], None, [factors]), out)
    assert torch.equal(bags([ids], None, [marked(-factors)]), out)
    with pytest.raises(IndexError, match=r"ids\[0\]\[0\] is out of range"):
        bags([marked(ids)])
    for grad in (torch.ones(1, 4), marked(-torch.ones(1, 4))):
        bags.weights[0].grad = None
        bags([ids]).backward(grad)
        assert bags.weights[0].grad.to_dense()[[1, 3]].tolist() == [[1] * 4] * 2


@pytest.mark.parametrize(("error", "text", "call"), [
    (ValueError, "mode is not supported", lambda: fused.EmbeddingBags([(2, 2)], "least")),
    (ValueError, "mode differs", lambda: fused.EmbeddingBags(
        [torch.nn.EmbeddingBag(2, 2, mode="sum"), torch.nn.EmbeddingBag(2, 2, mode="mean")])),
    (ValueError, "mode differs", lambda: fused.EmbeddingBags(modules_of(), "mean")),
    (TypeError, "table '0' has a forward", lambda: fused.EmbeddingBags([OwnForward(3, 2)])),
    (ValueError, "share a weight", lambda: fused.EmbeddingBags([modules_of()[0]] * 2)),
    (TypeError, "tables have a wrong type", lambda: fused.EmbeddingBags(3)),
    (TypeError, "table '0' has a wrong type", lambda: fused.EmbeddingBags([3])),
    (ValueError, "tables are missing", lambda: fused.EmbeddingBags([])),
    *((kind, "the size of table '0' is wrong: expected ints above 0",
       lambda size=size: fused.EmbeddingBags([size])) for size, kind in (
        ((1.5, 4), TypeError), ((4, True), TypeError), ((0, 4), ValueError))),
    (ValueError, r"offsets\[0\] has a wrong shape: expected .bags,., where each begins",
     lambda: fused.EmbeddingBags([(2, 2)])([IDS[0][0]], [IDS[0][0, :0]])),
    (ValueError, "ids has a wrong shape", lambda: fused.EmbeddingBags([(2, 2)])(torch.tensor([1]))),
    (ValueError, "ids do not fit", lambda: fused.EmbeddingBags([(2, 2)])([])),
    (TypeError, r"ids\[0\] has a wrong type", lambda: fused.EmbeddingBags([(2, 2)])([[1]])),
    (TypeError, r"ids\[0\] has a wrong dtype",
     lambda: fused.EmbeddingBags([(2, 2)])([torch.tensor([[1.0]])])),
    (IndexError, r"ids\[0\]\[0\] is out of range",
     lambda: fused.EmbeddingBags([(2, 2)])([torch.tensor([[2]])])),
    (TypeError, "optimizer has a wrong type",
     lambda: fused.EmbeddingBags([(2, 2)]).update_in_backward(torch.optim.SGD)),
    (ValueError, "optimizer has other parameters", lambda: fused.EmbeddingBags(
        [(2, 2)]).update_in_backward(fused.SGD(modules_of().parameters(), lr=0.1))),
])  # fmt: skip
def test_bad_input(error: type[Exception], text: str, call: Any) -> None:
    with pytest.raises(error, match=f"EmbeddingBags: .*{text}"):
        call()


@pytest.mark.parametrize("pooling", ["sum", "mean", "max", "weighted sum"])
def test_rows_that_pytorch_makes_of_bags(pooling: str) -> None:
    """As on a device, where ids that count for nothing, or are bad, are rows of zeros."""
    rng = np.random.default_rng(0)
    tables = [rng.normal(size=shape).astype(np.float32) for shape in ((50, 8), (9, 4))]
    ids = [rng.integers(0, len(table), 30) for table in tables]
    weights = [rng.normal(size=30).astype(np.float32)] * 2 if "weighted" in pooling else None
    offsets, grad = [np.arange(0, 31, 3)] * 2, rng.normal(size=(10, 12)).astype(np.float32)
    bags = ops.EmbeddingBags(pooling.removeprefix("weighted "))
    for found in bags.gradients(tables, ids, offsets, grad, weights):
        expected = found.to_rows()
        indices, values = rows_of_bags(found, torch.from_numpy)
        np.testing.assert_array_equal(indices.numpy(), expected.indices)
        np.testing.assert_array_equal(values.numpy(), expected.values)
        marked = found.indices.copy()
        marked[3], marked[5] = LEFT_OUT, found.dense_shape[0]
        of_marked = ops.BagTensor(
            found.gradient.with_arrays(indices=marked), found.unit, found.dense_shape
        )
        indices, values = rows_of_bags(of_marked, torch.from_numpy)
        assert not values[[3, 5]].any()
        assert ((indices >= 0) & (indices < found.dense_shape[0])).all()
        others = np.delete(np.arange(30), (3, 5))
        np.testing.assert_array_equal(values.numpy()[others], expected.values[others])


# Compiled models


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = fused.EmbeddingBags(modules_of(dtype=torch.float32))
        self.head = torch.nn.Linear(12, 1)

    def forward(self, *ids: Any) -> Any:
        return self.head(torch.relu(self.bags([*ids]) * 2))


@pytest.mark.parametrize(
    ("in_backward", "backend"),
    [(False, "eager"), (True, "aot_eager"), more(True, "eager"), more(False, "aot_eager")],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the bags' output, as Dynamo asks
def test_compiled_models(in_backward: bool, backend: str) -> None:
    """With a break at the bags: the numbers of the model that is not compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model()
    other = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend)
    optimizers = [fused.Adagrad(m.bags.parameters(), lr=0.1) for m in (model, other)]
    for one, optimizer in zip((model, other), optimizers, strict=True):
        if in_backward:
            one.bags.update_in_backward(optimizer)
    for step in range(3):
        for call, optimizer in zip((compiled, other), optimizers, strict=True):
            call(*[i.roll(step) for i in IDS]).square().sum().backward()
            if not in_backward:
                optimizer.step()
                optimizer.zero_grad()
    assert_close(model, other)
    assert all(s["step"] == 3 for s in optimizers[0].state.values())
    for a, b in zip(model.head.parameters(), other.head.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend=backend, fullgraph=True)(*IDS)
    torch._dynamo.reset()


# Features that share tables

FEATURES = [0, 1, 0]


@pytest.mark.parametrize("mode", ["sum", "max"])
@pytest.mark.parametrize("updates", [False, True])
def test_features_that_share_a_table(mode: str, updates: bool) -> None:
    """As PyTorch's modules that are called several times; ids as lists, or all in one tensor."""
    theirs = modules_of(mode, torch.float32, sparse=mode == "sum")
    bags = fused.EmbeddingBags(modules_of(mode, torch.float32), features=FEATURES)
    optimizer, other = (fused.Adagrad(m.parameters(), lr=0.1) for m in (bags, theirs))
    if updates:
        bags.update_in_backward(optimizer)
    for step in range(3):
        rng, ids, offsets = np.random.default_rng(step), [], []
        for table in FEATURES:
            lengths = rng.integers(0, 6, 30)
            offsets.append(torch.tensor(np.cumsum(lengths) - lengths))
            ids.append(torch.tensor(rng.integers(0, SIZES[table][0], lengths.sum())))
        given: tuple[Any, Any] = ids, offsets
        if step == 1:  # as torchrec's KeyedJaggedTensor has them: values() and offsets()
            begins = np.cumsum([0, *(len(own) for own in ids)])
            every = [own + int(at) for own, at in zip(offsets, begins, strict=False)]
            given = torch.cat(ids), torch.cat([*every, torch.tensor(begins[-1:])])
        out = bags(*given)
        each = zip(FEATURES, ids, offsets, strict=True)
        expected = torch.cat([theirs[t](i, o) for t, i, o in each], dim=1)
        torch.testing.assert_close(out, expected)
        gradient = torch.randn_like(out)
        for result, taken in ((out, optimizer), (expected, other)):
            taken.zero_grad()
            result.backward(gradient)
            if taken is other or not updates:
                taken.step()
        assert_close(bags, theirs)
    assert bags.state_dict().keys() == theirs.state_dict().keys()
    assert torch.equal(copy.deepcopy(bags)(ids, offsets), bags(ids, offsets))


def test_features_that_are_refused() -> None:
    for features, text in (([0, 2], r"features\[1\] is no table"), ("01", "features have a wrong")):
        with pytest.raises((TypeError, ValueError), match=f"EmbeddingBags: {text}"):
            fused.EmbeddingBags(modules_of(), features=features)
    bags = fused.EmbeddingBags(modules_of(), features=FEATURES)
    with pytest.raises(ValueError, match="ids do not fit: expected a list of 3 tensors"):
        bags([torch.tensor([1])] * 2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gradients_that_follow_one_without_ids(dtype: Any) -> None:
    """PyTorch adds them in place."""
    bags = fused.EmbeddingBags([(5, 3)])
    for n in (0, 2, 0, 1):
        bags([torch.arange(n, dtype=dtype)], [torch.tensor([0])]).sum().backward()
    assert bags.weights[0].grad.to_dense()[:, 0].tolist() == [2.0, 1.0, 0.0, 0.0, 0.0]
