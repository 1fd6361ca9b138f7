"""Growing tables in company: several of them, their seeds, means of models, and wrappers."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np
from torch.optim import swa_utils
from fusestep import nn
from fusestep.nn import torch as fused
from fusestep.nn.distributed import alone
from thread_processes import in_threads

IDS = torch.arange(40) * 2**40 - 7

# Seeds


def rows_of(table: Any, ids: Any = IDS) -> Any:
    optimizer = fused.SGD(table.parameters(), lr=0.1)  # a table that was loaded needs one
    return optimizer.param_groups and table(ids).detach().clone()


def test_tables_differ_and_follow_from_the_generator() -> None:
    """One draw for each table without a seed, on the host, and none for one with a seed."""
    torch.manual_seed(3)
    tables = [fused.GrowingEmbedding(99, 8) for _ in range(3)]
    state = torch.get_rng_state()
    found = [rows_of(table) for table in tables]
    assert not any((found[0] == other).any() for other in found[1:])
    assert len({table.ids.seed for table in tables}) == 3
    torch.manual_seed(3)
    with torch.device("meta"), torch.inference_mode():
        again = [fused.GrowingEmbedding(99, 8, chance=0.5) for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), state)
    assert [table.ids.seed for table in again] == [table.ids.seed for table in tables]
    assert [table.initial.seed for table in again] == [table.ids.seed for table in tables]
    given = fused.GrowingEmbedding(99, 8, seed=2**63 - 1)
    assert torch.equal(torch.get_rng_state(), state) and given.ids.seed == 2**63 - 1
    for other in (copy.deepcopy(tables[1]), pickle.loads(pickle.dumps(tables[1]))):
        assert torch.equal(rows_of(other), found[1])
        assert torch.equal(rows_of(other, IDS + 1), rows_of(tables[1], IDS + 1))
        other.load_state_dict(tables[2].state_dict())
        assert other.initial.seed == tables[2].ids.seed
    with pytest.raises(ValueError, match="seed is out of range"):
        fused.GrowingEmbedding(99, 8, seed=-1)


@pytest.mark.parametrize("is_used", [False, True])
def test_the_seed_of_a_file_wins(is_used: bool) -> None:
    """For new weights and for admission, also where the map has drawn already."""
    one, other = (fused.GrowingEmbedding(999, 4, chance=0.5) for _ in range(2))
    if is_used:
        other(IDS)
    one(IDS)
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert other.load_state_dict(state) == ([], [])
    for k in range(4):
        assert torch.equal(rows_of(one, IDS + k), rows_of(other, IDS + k))
    assert 0 < len(one.ids) < 999
    mine = fused.GrowingEmbedding(999, 4, initial=nn.UniformRows(0.3, seed=5))
    mine.load_state_dict(state)
    assert (mine.ids.seed, mine.initial.seed) == (one.ids.seed, 5)


def test_files_without_a_seed_and_with_a_bad_one() -> None:
    """They were made with the seed that was given, or with 0."""
    for seed, expected in ((None, 0), (7, 7)):
        table = fused.GrowingEmbedding(99, 4, seed=expected, chance=0.5)
        table(IDS)
        state = table.state_dict()
        before = int(state.pop("ids.seed"))
        other = fused.GrowingEmbedding(99, 4, seed=seed, chance=0.5)
        assert other.load_state_dict(state) == ([], []) and before == other.ids.seed == expected
        assert torch.equal(rows_of(table, IDS + 1), rows_of(other, IDS + 1))
    for wrong in (torch.tensor([-1]), torch.tensor([1.5]), torch.tensor([1, 2])):
        fresh = fused.GrowingEmbedding(99, 4)
        seed = fresh.ids.seed
        with pytest.raises(RuntimeError, match="ids: "):
            fresh.load_state_dict({**state, "ids.seed": wrong})
        assert len(fresh.ids) == 0 and fresh.ids.seed == seed and not fresh.weight.any()
    assert fresh.load_state_dict({}, strict=False) and fresh.ids.seed == seed


def test_processes_have_the_seed_of_the_first() -> None:
    def program(comm: Any) -> Any:
        table = fused.GrowingEmbedding(99, 4, comm=comm)
        drawn, found = table.ids.seed, rows_of(table)
        first = fused.GrowingEmbedding(99, 4, comm=alone(), seed=5)
        first(IDS[comm.rank :: comm.size])
        table.load_state_dict(first.state_dict())  # all have the seed of the file
        return drawn, found, table.ids.seed, rows_of(table, IDS + 1)

    one, other = in_threads(2, program)
    assert one[0] == other[0] and one[2] == other[2] == 5
    for k, seed in ((1, one[0]), (3, 5)):
        expected = fused.GrowingEmbedding(99, 4, seed=seed)
        assert torch.equal(one[k], other[k])
        assert torch.equal(one[k], rows_of(expected, IDS + (k == 3)))

    def differing(comm: Any) -> None:
        with pytest.raises(ValueError, match=r"seed.*differs"):
            fused.GrowingEmbedding(99, 4, comm=comm, seed=comm.rank)
        table = fused.GrowingEmbedding(99, 4, comm=comm)
        table.load_state_dict(fused.GrowingEmbedding(99, 4, seed=comm.rank).state_dict())
        with pytest.raises(ValueError, match=r"seed.*differs"):
            rows_of(table)

    in_threads(2, differing)


# Means


class Towers(torch.nn.Module):
    """Two tables that grow, one of them in bags, a plain table, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.users = fused.GrowingEmbedding(12, 3, full="evict")
        self.items = fused.EmbeddingBags([fused.GrowingEmbedding(16, 3, padding_idx=0)])
        self.days = torch.nn.Embedding(9, 3, sparse=True)
        self.head = torch.nn.Linear(3, 1)

    @property
    def growing(self) -> list[Any]:
        return [self.users, self.items.get_submodule("0")]

    def forward(self, users: Any, items: Any, days: Any) -> Any:
        return self.head(self.users(users) * self.items([items[:, None]]) + self.days(days))


def ema(old: Any, new: Any, _: Any) -> Any:
    return 0.8 * old + 0.2 * new


def by_count(old: Any, new: Any, n: Any) -> Any:
    return old + (new - old) / (3 * n + 2)


def mean(old: Any, new: Any, n: Any) -> Any:
    return old + (new - old) / (n + 1)


MEANS: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "swa": ({}, mean), "ema": ({"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.8)}, ema),
    "swa of many": ({"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()}, mean),
    "ema of each": ({"avg_fn": swa_utils.get_ema_avg_fn(0.8)}, ema),
    "by count, and buffers": ({"avg_fn": by_count, "use_buffers": True}, by_count),
}  # fmt: skip


def weights_of(table: Any) -> dict[int, Any]:
    ids, rows, *_ = table.ids.rows_of_ids()
    rows = table.weight.detach()[torch.from_numpy(rows).long()].double()
    return dict(zip(ids.tolist(), rows.numpy(), strict=True))


def with_mean(known: dict[int, Any], table: Any, rule: Callable[..., Any]) -> dict[int, Any]:
    """Means by id and their numbers of updates, with one update more."""
    return {
        i: (rule(known[i][0], w, known[i][1]) if i in known else w, known.get(i, (0, 0))[1] + 1)
        for i, w in weights_of(table).items()
    }


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", MEANS)
def test_means_by_id(name: str, seed: int) -> None:
    """Beside a float64 reference by id: admission, eviction, growth, resumes, rows that sleep."""
    torch.manual_seed(seed)
    random, (options, rule) = np.random.default_rng(seed), MEANS[name]
    model = Towers()
    kind = fused.LazyAdam if seed else fused.SparseAdam
    tables = [*model.users.parameters(), *model.items.parameters(), *model.days.parameters()]
    tables_of = kind(tables, lr=0.1, **({"sparse": "catch_up"} if seed else {}))
    tables_of.watch(model)
    heads = torch.optim.SGD(model.head.parameters(), lr=0.1)
    average, every = fused.averaged(model, **options), {"days": 9, "head": 0}
    known, near = [dict[int, Any](), {}], {"rtol": 1e-5, "atol": 1e-6}
    layers: dict[str, tuple[Any, int]] = {}
    lost: set[int] = set()
    for k in range(40):
        low = k // 3
        users, items = (torch.from_numpy(random.integers(low, low + 6, 5)) for _ in range(2))
        tables_of.zero_grad(), heads.zero_grad()
        model(users, items, users % 9).square().sum().backward()
        tables_of.step(), heads.step()
        if random.random() < 0.2:
            ids, rows, *_ = model.growing[1].ids.rows_of_ids()
            gone = model.growing[1].ids.evict(unused_for=int(random.integers(4)))
            lost.update(ids[np.isin(rows, gone)].tolist())  # even if they come back at once
        if k in (14, 27):
            tables_of.zero_grad()
            model.growing[k % 2].grow(20 + k)
        if random.random() < 0.5:
            average.update_parameters(model)
            assert not any(map(tables_of.is_asleep, tables))
            known[1] = {i: x for i, x in known[1].items() if i not in lost}
            lost.clear()
            known = [with_mean(*each, rule) for each in zip(known, model.growing, strict=True)]
            for part, n in every.items():
                weight = getattr(model, part).weight.detach().double().clone()
                old = layers.get(part, (weight, n))[0]
                count = int(average.n_averaged) - 1
                layers[part] = rule(old, weight, count) if count else weight, n
        if k in (9, 30):  # resume in other objects
            file = io.BytesIO()
            torch.save(average.state_dict(), file)
            average = fused.averaged(copy.deepcopy(model) if k == 9 else model, **options)
            assert average.load_state_dict(torch.load(io.BytesIO(file.getvalue()))) == ([], [])
            average = copy.deepcopy(average)
        if not layers:
            continue
        before = [copy.deepcopy(table.ids.state_dict()) for table in average.module.growing]
        for is_training in (True, False):
            average.train(is_training)
            for table, own in zip(average.module.growing, known, strict=True):
                ids = torch.arange(1, 40)
                expected = torch.zeros(39, 3, dtype=torch.float64)
                for i in own.keys() - {0}:
                    expected[i - 1] = torch.from_numpy(own[i][0])
                torch.testing.assert_close(table(ids).double(), expected, **near)
        for part, (weight, _) in layers.items():
            torch.testing.assert_close(
                getattr(average.module, part).weight.double(), weight, **near
            )
        out = average(torch.tensor([low, 99]), torch.tensor([low, 0]), torch.tensor([1, 2]))
        assert out.shape == (2, 1)
        for table, state in zip(average.module.growing, before, strict=True):
            assert all(np.array_equal(state[i], x) for i, x in table.ids.state_dict().items())
    assert len(known[0]) > 5 and max(n for _, n in known[0].values()) > 1


def test_the_average_as_a_model() -> None:
    """Its state is that of a model, which goes on with its ids; what does not fit is refused."""
    model = Towers()
    average, optimizer = fused.averaged(model), fused.SGD(model.parameters(), lr=0.1)
    model.load_state_dict(Towers().state_dict())  # with other seeds
    model(IDS[:3], IDS[:3], torch.arange(3))
    average.update_parameters(model)
    other = Towers()
    assert other.load_state_dict(average.module.state_dict()) == ([], [])
    assert [table.ids.seed for table in other.growing] == [t.ids.seed for t in model.growing]
    for copied in (other, copy.deepcopy(average.module).train()):
        optimizer = fused.SGD(copied.parameters(), lr=0.1)
        copied(IDS[:5], IDS[:5], torch.arange(5))
        assert len(copied.users.ids) == 5 and len(average.module.users.ids) == 3
    weight = average.module.users.weight.clone()
    smaller = Towers()
    smaller.users = fused.GrowingEmbedding(9, 3)
    for wrong in (smaller, torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="averaged: tables do not fit the model"):
            average.update_parameters(wrong)
    assert torch.equal(average.module.users.weight, weight) and average.n_averaged == 1
    optimizer.zero_grad()
    fused.averaged(torch.nn.Linear(2, 2)).update_parameters(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("is_pooled", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
def test_the_copy_of_an_averaged_model_raises(is_pooled: bool, is_late: bool) -> None:
    table = fused.GrowingEmbedding(9, 2)
    model = torch.nn.Sequential(fused.EmbeddingBags([table]) if is_pooled else table)
    given = [IDS[:3, None]] if is_pooled else IDS[:3]
    if is_late:
        model(given)
    wrong = swa_utils.AveragedModel(model)
    model(given)
    wrong.update_parameters(model)
    for mode in (True, False):
        with pytest.raises(RuntimeError, match=r"GrowingEmbedding: .*AveragedModel.*averaged\("):
            wrong.train(mode)(given)
    wrong.module = None
    assert model(given).any()


def test_a_mean_by_a_loop_warns_and_other_copies_do_not() -> None:
    """Copies that are evaluated, trained, loaded, converted or averaged by id are right."""
    model = torch.nn.Sequential(fused.GrowingEmbedding(9, 2))
    wrong, evaluated, trained, loaded, average = *(copy.deepcopy(model) for _ in range(4)), None
    with torch.inference_mode():
        assert not copy.deepcopy(model).eval()(IDS[:3]).any()
    average = copy.deepcopy(fused.averaged(model))
    average.update_parameters(model)
    assert not average(IDS[:3]).any()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    assert not evaluated.eval()(IDS[:3]).any() and not evaluated.double()(IDS[:3]).any()
    model(IDS[:3])
    loaded.load_state_dict(model.state_dict())
    trained(IDS[:3]).sum().backward()
    optimizer.step()
    with torch.no_grad():
        for mine, other in zip(wrong.parameters(), model.parameters(), strict=True):
            mine.mul_(0.9).add_(other, alpha=0.1)
        loaded[0].weight.mul_(2.0)
    assert torch.equal(loaded.eval()(IDS[:3]), 2 * model(IDS[:3])) and trained.eval()(IDS[:3]).any()
    with pytest.warns(RuntimeWarning, match=r"all of them read zeros; nn.torch.averaged\(model\)"):
        assert not wrong.eval()(IDS[:3]).any()
    assert not wrong(IDS[:3]).any()


# DistributedDataParallel: see `process_embeddings` for several processes


def test_what_is_hidden() -> None:
    """All names of the tables that processes share, beside what is hidden already."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = fused.ShardedEmbedding(5, 2, alone())
            growing = fused.GrowingEmbedding(5, 2, comm=alone())
            self.first, self.second, self.head = table, table, torch.nn.Linear(2, 5, bias=False)
            self.inner = torch.nn.ModuleDict({"x": growing, "own": fused.GrowingEmbedding(5, 2)})
            self.head.weight = table.weight
            self._ddp_params_and_buffers_to_ignore = {"other"}

    model = Tied()
    for _ in range(2):
        assert fused.hide_from_ddp(model) is model
    hidden = {"other", "first.weight", "second.weight", "head.weight", "inner.x.weight"}
    assert {*model._ddp_params_and_buffers_to_ignore} == hidden
    assert all(p._ddp_ignored for p in (model.head.weight, model.inner["x"].weight))
    root = fused.hide_from_ddp(fused.ShardedEmbedding(5, 2, alone()))
    assert {*root._ddp_params_and_buffers_to_ignore} == {"weight", ".weight"}
    plain: Any = fused.hide_from_ddp(torch.nn.Linear(2, 1))
    assert not plain._ddp_params_and_buffers_to_ignore
    with pytest.raises(TypeError, match="hide_from_ddp: model has a wrong type"):
        fused.hide_from_ddp([model])
