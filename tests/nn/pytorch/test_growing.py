"""GrowingEmbedding: ids that come and go, against tables with a vocabulary that is known."""

import copy
import io
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np
from fusestep import nn
from fusestep.nn import torch as fused
from thread_processes import in_threads

D, N_IDS, CAPACITY = 4, 30, 64
DRAW, INIT = nn.UniformRows(0.3, seed=5), torch.nn.init
EACH = torch.from_numpy(np.random.default_rng(8).integers(-(2**63), 2**63 - 1, N_IDS))
OPTIMIZERS: dict[str, Any] = {
    "SparseAdam": {}, "Adagrad": {}, "AdamW": {"sparse": "touched"},
    "LazyAdam": {"sparse": "catch_up"}, "RowWiseAdagrad": {},
}  # fmt: skip


def growing(capacity: int = CAPACITY, **options: Any) -> fused.GrowingEmbedding:
    return fused.GrowingEmbedding(capacity, D, initial=DRAW, **options)


def optimizer_of(name: str, table: Any, **options: Any) -> Any:
    optimizer = getattr(fused, name)(table.parameters(), lr=0.1, **OPTIMIZERS[name], **options)
    optimizer.watch(table)  # for plain tables
    return optimizer


def step(table: Any, optimizer: Any, ids: Any) -> Any:
    optimizer.zero_grad()
    out = table(ids)
    (out.square().sum() + out.sum()).backward()
    optimizer.step()
    return out.detach()


def known_table() -> tuple[Any, Any]:
    """A table with all ids, and its row of each id."""
    rows = torch.randperm(N_IDS, generator=torch.Generator().manual_seed(1)) + 1
    table = torch.nn.Embedding(N_IDS + 1, D, sparse=True)
    with torch.no_grad():
        table.weight[rows] = torch.from_numpy(DRAW(EACH.numpy(), (N_IDS, D)))
    return table, rows


@pytest.mark.parametrize("is_pooled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_by_id_are_those_of_a_known_vocabulary(name: str, is_pooled: bool) -> None:
    """Rows differ; weights and states by id do not, to the last bit, through resumes and growth."""
    torch.manual_seed(0)
    (known, row_of), table = known_table(), growing(N_IDS // 2)
    models = [table, known]
    if is_pooled:
        models = [fused.EmbeddingBags([table]), fused.EmbeddingBags([known])]
    optimizers = [optimizer_of(name, model) for model in models]
    for k in range(8):
        if k == 2:
            optimizers[0].zero_grad()
            table.grow(CAPACITY)
        if k == 5:  # resume in other objects, in the middle of admissions
            file = io.BytesIO()
            torch.save([x.state_dict() for x in (models[0], optimizers[0])], file)
            optimizers[1].state_dict(flush=True)  # as saving does there
            states = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            table = growing()
            models[0] = fused.EmbeddingBags([table]) if is_pooled else table
            optimizers[0] = optimizer_of(name, models[0])
            for own, state in zip((models[0], optimizers[0]), states, strict=True):
                own.load_state_dict(state)
        chosen = torch.randint(min(N_IDS, 5 + 4 * k), (7,))
        given = EACH[chosen], row_of[chosen]
        if is_pooled:
            given = tuple([[own] for own in given])
        assert torch.equal(*map(step, models, optimizers, given))
    for optimizer in optimizers:
        optimizer.flush()
    ids, rows, *_ = map(torch.from_numpy, table.ids.rows_of_ids())
    theirs = torch.stack([row_of[i == EACH][0] for i in ids])
    assert len(ids) > N_IDS // 2
    assert torch.equal(table.weight[rows], known.weight[theirs])
    mine, others = (o.state[m.weight] for o, m in zip(optimizers, (table, known), strict=True))
    for role, state in mine.items():
        if np.shape(state)[:1] == (CAPACITY,):
            assert torch.equal(state[rows], others[role][theirs]), role


def test_rows_that_are_given_back_begin_anew() -> None:
    """With the weights of their id, and without the states of the one before."""
    table = growing(3)
    optimizer = optimizer_of("SparseAdam", table)
    for _ in range(3):
        step(table, optimizer, EACH[:2])
    assert table.ids.step == 3
    assert table.ids.evict(unused_for=0).tolist() == [1, 2]
    found = step(table, optimizer, EACH[5:6])
    assert torch.equal(found, torch.from_numpy(DRAW(EACH[5:6].numpy(), (1, D))))
    moments = optimizer.state[table.weight]["exp_avg"]
    assert torch.allclose(moments[1], 0.1 * (2 * found[0] + 1)) and moments[2].any()
    alone = growing(3)
    step(alone, torch.optim.SGD(alone.parameters()), EACH[:1])
    alone.ids.evict(unused_for=0)
    with pytest.raises(RuntimeError, match="the table needs more: expected an optimizer"):
        alone(EACH[:1])


@pytest.mark.parametrize("is_pooled", [False, True])
def test_least_recently_used_rows_are_evicted_between_steps(is_pooled: bool) -> None:
    """Never those of two lookups before one backward; rows that are gone then raise."""
    table = growing(4, full="evict")
    model = fused.EmbeddingBags([table]) if is_pooled else table
    with pytest.raises(RuntimeError, match="needs more"):
        model([EACH[:2]] if is_pooled else EACH[:2])
    optimizer = optimizer_of("SparseAdam", model)

    def look(ids: Any) -> Any:
        return model([ids] if is_pooled else ids)

    first, second = look(EACH[:2]), look(EACH[2:5])
    assert table.ids.find(EACH[:5].numpy()).tolist() == [1, 2, 3, 0, 0]
    (first.sum() + second.sum()).backward()
    optimizer.step()
    assert not table.weight[0].any()
    out = look(EACH[3:4])
    assert table.ids.last.evicted.tolist() == [1]
    table.ids.evict(unused_for=0)
    with pytest.raises(RuntimeError, match="rows of the forward were given back"):
        out.sum().backward()


def test_features_of_a_table_keep_each_others_rows() -> None:
    """Weights are ids: no new id of one feature takes the row of an id of another."""
    options: Any = {
        "initial": lambda new, shape: new.astype(float).reshape(shape), "padding_idx": 0,
    }  # fmt: skip
    tables = [fused.GrowingEmbedding(9, 1, full="evict", **options) for _ in range(2)]
    model = fused.EmbeddingBags(tables, features=[0, 1, 0])
    optimizer = fused.SGD(model.parameters(), lr=0.0)
    for k in range(200):
        given = torch.randint(30, (3, 4, 1), generator=torch.Generator().manual_seed(k))
        assert torch.equal(step(model, optimizer, [*given]), given[..., 0].T.float())
    assert tables[0].ids.evictions > 100
    before = tables[0].ids.state_dict()
    with pytest.raises(TypeError, match="int32 or uint64 on the host, got"):
        model([given[0] + 99, given[1], given[2].short()])
    after = tables[0].ids.state_dict()
    assert all(np.array_equal(before[name], x) for name, x in after.items())


@pytest.mark.parametrize("is_late", [False, True])
def test_gradients_that_are_summed_are_of_one_step(is_late: bool) -> None:
    """Also where a loop forgets the old gradient after the forward; a row that is handed out again
    gets no gradient of the id before."""
    table = growing(4, full="evict")
    optimizer = fused.SGD(table.parameters(), lr=0.1)
    for k in range(3):
        if not is_late:
            optimizer.zero_grad()
        for part in range(2):
            found = table(EACH[part + 2 * (k == 2) : part + 2 + 2 * (k == 2)])
            if is_late and part == 0:
                optimizer.zero_grad()
            found.sum().backward()
        assert table.ids.step == k + 1
        if k < 2:
            assert table.ids.find(EACH[:3].numpy()).tolist() == [1, 2, 3]
            optimizer.step()
    assert table.ids.find(EACH[2:5].numpy()).tolist() == [3, 1, 2]
    optimizer.step()
    optimizer.zero_grad()
    table(EACH[2:5]).sum().backward()
    if is_late:  # as a weight has that is used for other things, too
        table.weight.grad = table.weight.grad.to_dense()
    table.ids.evict(unused_for=0)
    seen = table(EACH[9:10])  # in row 1, of which .grad has an entry
    seen.sum().backward()
    optimizer.step()
    assert torch.allclose(table(EACH[9:10]), seen - 0.1)


def test_what_is_between_summed_gradients_ends_no_step() -> None:
    """Rows that an evaluation wakes, and a flush, are no steps of the optimizer."""
    table = growing(4, full="evict")
    optimizer = optimizer_of("LazyAdam", table)
    for ids in (EACH[:3], EACH[:2], EACH[:2]):
        step(table, optimizer, ids)
    optimizer.zero_grad()
    table(EACH[:2]).sum().backward()
    table.eval()(EACH[2:3])
    optimizer.flush()
    table.train()(EACH[5:8]).sum().backward()
    assert table.ids.step == 4 and table.ids.last.evicted.tolist() == [3]
    assert table.weight.grad.coalesce().indices().tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("rounding", ["master", "kahan"])
def test_new_rows_begin_beside_their_weights_too(rounding: str) -> None:
    """In every optimizer of the table, also of a copy of both, and after a resume."""
    table = fused.GrowingEmbedding(9, 1, initial=0.5, dtype=torch.bfloat16)
    optimizer = fused.SGD(table.parameters(), lr=0.01, rounding=rounding)
    for k in range(3):
        if k == 2:
            table, optimizer = copy.deepcopy((table, optimizer))
        step(table, optimizer, torch.tensor([k]))
    expected = torch.tensor(0.5 - 0.01 * 2.0).bfloat16()
    assert table.weight[1:4, 0].tolist() == [expected] * 3
    table.ids.evict(unused_for=0)
    again = fused.GrowingEmbedding(9, 1, initial=0.5, dtype=torch.bfloat16)
    other = fused.SGD(again.parameters(), lr=0.01, rounding=rounding)
    again.load_state_dict(table.state_dict())
    other.load_state_dict(optimizer.state_dict())
    step(again, other, torch.tensor([7]))
    assert again.weight[1, 0] == expected


def test_what_others_see_of_an_admission() -> None:
    """Autograd sees the new rows; a checkpoint that is computed again admits and counts nothing."""
    table = growing(after=2)
    torch.optim.SGD(table.parameters(), lr=0.1)
    for _ in range(2):
        out = torch.utils.checkpoint.checkpoint(table, EACH[:3], use_reentrant=False)
        before = table.ids.state_dict()
        out.sum().backward()
        assert all(np.array_equal(before[name], x) for name, x in table.ids.state_dict().items())
    assert table.ids.rows_of_ids()[2].tolist() == [2, 2, 2]
    used = table.weight.square().sum()
    table(EACH[5:6]), table(EACH[5:6])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.backward()
    with pytest.raises(RuntimeError, match="grow: the table cannot grow: expected one without a"):
        table.grow(100)


def test_state_dicts_are_those_of_a_module() -> None:
    """Buffers, hooks, prefixes and names that are unexpected or missing."""

    class Named(fused.GrowingEmbedding):
        def __init__(self) -> None:
            super().__init__(9, D)
            self.register_buffer("scale", torch.ones(1))

    table, other, seen = torch.nn.Sequential(Named()), torch.nn.Sequential(Named()), []
    table(EACH[:3])
    table[0].scale += 2
    other = copy.deepcopy(other)
    other[0].register_load_state_dict_pre_hook(lambda *_: seen.append(1))
    state = table.state_dict()
    assert other.load_state_dict(state) == ([], []) and seen and other[0].scale == 3
    assert torch.equal(other.eval()(EACH[:3]), table.eval()(EACH[:3]))
    for wrong in ({**state, "0.ids.more": state["0.scale"]}, {**state, "0.bias": state["0.scale"]}):
        with pytest.raises(RuntimeError, match="Unexpected key"):
            other.load_state_dict(wrong)
        assert len(other.load_state_dict(wrong, strict=False).unexpected_keys) == 1
    fewer = {name: x for name, x in state.items() if name != "0.ids.rows"}
    weight = other[0].weight.clone()
    assert other.load_state_dict(fewer, strict=False).missing_keys == ["0.ids.rows"]
    assert torch.equal(other[0].weight, weight)
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.ids\.rows"):
        other.load_state_dict(fewer)


@pytest.mark.parametrize("name", ["SparseAdam", "Adagrad"])
def test_processes_that_share_the_ids(name: str) -> None:
    """Each has its part of the batch, and of the ids: bits by id are those of one process."""
    batches = [EACH[torch.randint(min(N_IDS, 6 + 4 * k), (2, 6))] for k in range(7)]

    def program(comm: Any) -> Any:
        table = growing(comm=comm, padding_idx=int(EACH[1]))
        optimizer = optimizer_of(name, table)
        parts = [b if comm is None else b.chunk(comm.size)[comm.rank] for b in batches]
        looked = [step(table, optimizer, ids) for ids in parts]
        looked.append(table.eval()(parts[0]).detach())
        ids, rows, *_ = table.ids.rows_of_ids()
        states = [
            x[rows]
            for x in optimizer.state[table.weight].values()
            if np.shape(x)[:1] == (CAPACITY,)
        ]
        every = torch.cat((table.weight[rows].detach(), *states), 1)
        optimizer.load_state_dict(optimizer.state_dict())
        return dict(zip(ids.tolist(), every.tolist(), strict=True)), looked

    (one, looked), found = program(None), in_threads(2, program)
    assert {**found[0][0], **found[1][0]} == one and 0 < len(found[0][0]) < len(one)
    for k, rows in enumerate(looked):
        assert torch.equal(torch.cat([own[k] for _, own in found]), rows)

    def failing(comm: Any) -> str:
        table = growing(comm=comm)
        with pytest.raises(TypeError, match=r"rank 1: .*, got torch.int16") as error:
            table(EACH.short() if comm.rank else EACH)
        with pytest.raises(ValueError, match="is looked up by itself"):
            table.rows([EACH])
        return str(error.value)

    assert len({*in_threads(2, failing)}) == 1


def test_modes_padding_and_admission() -> None:
    """Evaluation changes nothing; padding and ids that wait read zeros and get no gradient."""
    table = growing(after=2, padding_idx=-1)
    optimizer, ids = optimizer_of("SparseAdam", table), torch.tensor([[-1, 5], [6, 7]])
    assert not step(table, optimizer, ids).any()
    before = {k: x.clone() for k, x in table.state_dict().items()}
    table.eval()
    assert not table(ids).any()
    assert all(torch.equal(before[k], x) for k, x in table.state_dict().items())
    table.train()
    out = step(table, optimizer, ids)
    assert not out[0, 0].any() and out[0, 1].any() and len(table.ids) == 3
    assert not table.weight[0].any()
    assert table.weight.grad.coalesce().indices().tolist() == [[1, 2, 3]]
    for copied in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert torch.equal(copied(ids), table(ids)) and len(copied.ids) == 3
    half = growing(dtype=torch.bfloat16)
    assert half(ids).dtype == torch.bfloat16 and half.weight[2].any()
    assert "64, 4, 4 ids" in repr(half)


def test_files_that_do_not_fit() -> None:
    """Rows and a map that do not belong together, a module that is too small, missing arrays."""
    table = growing()
    step(table, optimizer_of("SparseAdam", table), EACH)
    state = table.state_dict()
    torn = {**state, "weight": state["weight"][:-1]}
    wrapped = state["ids.rows"].clone()
    wrapped[-1] = -2
    for other, given, text in (
        (growing(), {**state, "ids.rows": wrapped}, "does not fit: expected rows of a map of at"),
        (growing(), {**state, "ids.step": state["ids.step"].float()}, "step is another array"),
        (growing(), torn, "do not belong together"),
        (growing(9), state, "does not fit: expected rows of a map of at most 9 rows"),
        (growing(), {"weight": state["weight"]}, "Missing key"),
    ):
        with pytest.raises(RuntimeError, match=text):
            other.load_state_dict(given)
        assert len(other.ids) == 0 and not other.weight.any()
    larger = growing(1000)
    larger.load_state_dict(state)
    assert torch.equal(larger.eval()(EACH), table.eval()(EACH))


def test_bad_input() -> None:
    """One clear error, and nothing has changed."""
    table = growing(full="raise", capacity=5)
    optimizer = optimizer_of("SparseAdam", table)
    step(table, optimizer, EACH[:3])
    before = {k: x.clone() for k, x in table.state_dict().items()}
    cases: list[tuple[Any, str, Any]] = [
        (TypeError, "int32 or uint64 on the host, got torch.int16", lambda: table(EACH.short())),
        (TypeError, "int32 or uint64 on the host, got list", lambda: table([3])),
        (ValueError, "initial is not", lambda: fused.GrowingEmbedding(9, D, initial=INIT.eye_)),
        (ValueError, "do not fit: expected 1 new ids", lambda: table(EACH)),
        (RuntimeError, "cannot grow", lambda: table.grow(9)),
        (ValueError, "capacity is out of range", lambda: growing(1)),
        (TypeError, "dtype is unknown", lambda: growing(dtype=torch.int32)),
        (TypeError, "padding_idx has a wrong type", lambda: growing(padding_idx=1.5)),
    ]
    for error, text, call in cases:
        with pytest.raises(error, match=text):
            call()
    assert all(torch.equal(before[k], x) for k, x in table.state_dict().items())
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="rows is out of range"):
        table.grow(5)
    table.grow(6)
    assert table(EACH[:5]).shape == (5, D)
