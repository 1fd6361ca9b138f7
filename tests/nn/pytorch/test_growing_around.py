"""GrowingEmbedding and what PyTorch has around it: a loss, checkpoints, torch.export."""

import copy
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as of_dcp
from torch.export import Dim, load, save
from fusestep.nn import UniformRows
from fusestep.nn import torch as fused
from subprocesses import TORCH
from thread_processes import in_threads

ALONE: Any = {"no_dist": True} if TORCH >= (2, 7) else {}
export = partial(torch.export.export, strict=False)  # which older versions do not by default
D, GENERATOR = 4, torch.Generator().manual_seed(3)
KNOWN = torch.randint(-(2**63), 2**63 - 1, (25,), generator=GENERATOR)
EACH = torch.cat((KNOWN, torch.tensor([7, 0, 2**63 - 1, -(2**63)]).repeat(3)))


def growing(capacity: int = 30, **options: Any) -> Any:
    return fused.GrowingEmbedding(capacity, D, initial=UniformRows(0.3, seed=5), **options)


def step(table: Any, optimizer: Any, ids: Any) -> Any:
    optimizer.zero_grad()
    out = table(ids)
    (out.float().square().sum() + out.float().sum()).backward()
    optimizer.step()
    return out.detach()


@pytest.mark.parametrize("kind", ["alone", "bags", "in backward", "plain"])
def test_growth_beside_a_loss_that_is_alive(kind: str) -> None:
    """Training goes on to the bits of a table that was large; the old loss raises, hooks stay."""
    found, calls = [], list[int]()
    for rows in (30, 40):
        table = growing(rows)
        if kind == "plain":
            table = torch.nn.Embedding(rows, D, sparse=True, _weight=torch.ones(rows, D))
        weight, is_bag = table.weight, kind in ("bags", "in backward")
        model = fused.EmbeddingBags([table]) if is_bag else table
        optimizer = fused.SparseAdam(model.parameters(), lr=0.1)
        if kind == "in backward":
            model.update_in_backward(optimizer)
        else:
            weight.register_hook(lambda grad: calls.append(len(grad)))
            weight.register_post_accumulate_grad_hook(lambda p: calls.append(len(p.grad)))
        for k in range(6):
            ids = [torch.arange(k, k + 3)] if is_bag else torch.arange(k, k + 3)
            old, weight.grad = model(ids).sum(), None
            if k == 3 and len(weight) == 30:
                _ = optimizer.grow(weight, 40) if kind == "plain" else table.grow(40)
                before = weight.clone()
                with pytest.raises(RuntimeError, match=r"grown since the forw|invalid gradi"):
                    old.backward()
                assert torch.equal(weight, before) and weight.grad is None
            calls.clear()
            model(ids).square().sum().backward()
            if kind != "in backward":
                optimizer.step()
        assert calls == ([] if kind == "in backward" else [40, 40])
        found.append(weight.detach()[:9])
    assert torch.equal(*found)


def test_growth_where_autograd_keeps_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch that keeps it refuses to grow beside a loss, and grows without one."""
    monkeypatch.setattr(torch, "float64", torch.float32)  # so nothing is of another dtype
    tables = growing(), growing()
    optimizer = fused.SparseAdam(tables[1].parameters(), lr=0.1)
    for own in tables:
        loss = own(KNOWN).sum()
        with pytest.raises(RuntimeError, match=r"cannot grow: .*\(del loss\)"):
            own.grow(40)
        assert own.weight.shape == (30, D) and own.ids.capacity == 30
        del loss
        own.grow(40)
        step(own, optimizer, KNOWN)


@pytest.mark.parametrize("rounding", ["nearest", "master", "kahan"])
@pytest.mark.parametrize("is_asleep", [False, True])
@pytest.mark.parametrize("name", ["LazyAdam", "Adagrad", "SparseAdam", "RowWiseAdagrad"])
def test_a_state_of_fewer_rows(name: str, is_asleep: bool, rounding: str) -> None:
    """It loads beside a larger table, in either order: bits go on, further rows begin anew."""
    dtype = torch.float32 if rounding == "nearest" else torch.bfloat16
    options = {"rounding": rounding, "sparse": "catch_up" if is_asleep else "touched", "lr": 0.1}

    def made(capacity: int) -> Any:
        table = growing(capacity, dtype=torch.float32).to(dtype)
        optimizer = getattr(fused, name)(table.parameters(), **options)
        optimizer.watch(table)
        return copy.deepcopy((table, optimizer))

    small = made(20)
    for _ in range(3):
        step(*small, torch.randint(9, (5,)))
    states = [x.state_dict() for x in small]
    for order in (1, -1):
        large, same = made(40), copy.deepcopy(small)
        for own, state in [*zip(large, states, strict=True)][::order]:
            own.load_state_dict(state)
        for _ in range(5):
            ids = torch.randint(15, (5,))
            assert torch.equal(step(*large, ids), step(*same, ids))
        _ = large[1].flush(), same[1].flush()
        mine, theirs = (o.state[table.weight] for table, o in (large, same))
        assert mine.keys() == theirs.keys()
        for role, x in theirs.items():
            if np.shape(x)[:1] == (20,):
                assert len(mine[role]) == 40 and torch.equal(mine[role][:20], x), role
            elif np.ndim(x) == 0:
                assert type(mine[role]) is type(x) and mine[role] == x
    with pytest.raises(ValueError, match=r"has too many rows: expected at most 20.*grow\(40\)"):
        small[1].load_state_dict(large[1].state_dict())
    plain = getattr(fused, name)([torch.nn.Parameter(torch.ones(40, D, dtype=dtype))], **options)
    if is_asleep:
        with pytest.raises(ValueError, match="has a wrong shape"):
            plain.load_state_dict(states[1])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_states_by_torch_distributed_checkpoint(is_compiled: bool, tmp_path: Path) -> None:
    """Keys and tensors are those of ``state_dict``; a new model becomes the saved one."""

    def model() -> Any:
        bags = fused.EmbeddingBags([growing(), torch.nn.EmbeddingBag(7, D, mode="sum")])
        return torch.nn.Sequential(growing(), bags, torch.nn.Linear(D, 1))

    def are_same(mine: Any, theirs: Any) -> bool:
        same = [torch.equal(mine[name], x) for name, x in theirs.items() if name in mine]
        return [*mine] == [*theirs] and all(same)

    inner = model()
    one = torch.compile(inner, backend="eager") if is_compiled else inner
    inner[0](KNOWN), inner[1]([KNOWN[:2, None], KNOWN[2:4, None] % 7])
    right = inner.state_dict()
    whole = of_dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    optimizer = fused.SGD(one.parameters(), lr=0.1)
    assert are_same(of_dcp.get_state_dict(one, optimizer)[0], right)
    assert are_same(of_dcp.get_model_state_dict(one, options=whole), right)
    # As torchtitan does, but into tensors of the sizes that were saved.
    dcp.save({"model": of_dcp.get_model_state_dict(one)}, checkpoint_id=tmp_path, **ALONE)
    known = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    state: Any = {k: torch.empty(x.size, dtype=x.properties.dtype) for k, x in known.items()}
    dcp.load(state, checkpoint_id=tmp_path, **ALONE)
    state = {name.removeprefix("model."): state[name] for name in state}
    for given, options in ((state, of_dcp.StateDictOptions(strict=False)), (dict(right), whole)):
        other = model()
        of_dcp.set_model_state_dict(other, given, options=options)
        assert are_same(dict(sorted(other.state_dict().items())), dict(sorted(right.items())))

    def of_several(comm: Any) -> None:
        with pytest.raises(RuntimeError, match="in a file of its own"):
            of_dcp.get_model_state_dict(growing(comm=comm))

    in_threads(2, of_several)


def ids_of(*shape: int) -> Any:
    """Two thirds of them known."""
    return EACH[torch.randint(len(EACH), shape, generator=GENERATOR)]


def check(module: Any, first: Any, *more: Any, **options: Any) -> None:
    """A module that was exported, saved and loaded has the bits of this one."""
    file = io.BytesIO()
    save(export(module.eval(), first, **options), file)
    served = load(io.BytesIO(file.getvalue())).module()
    for given in (first, *more):
        right, found = module(*given), served(*given)
        assert torch.equal(found, right) and found.dtype == right.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exported_tables(dtype: Any) -> None:
    """Ids that are unknown, of any dtype, in batches of any shape; of a table without ids too."""
    shapes, table = ({0: Dim("n"), 1: Dim("m")},), growing(padding_idx=7, dtype=dtype)
    check(table, (ids_of(2),))
    table.train()(KNOWN)
    check(table, (ids_of(4, 3),), (ids_of(9, 5),), (EACH[None],), dynamic_shapes=shapes)
    for given in (torch.arange(-1, 9, dtype=torch.int32), EACH.view(torch.uint64)):
        assert torch.equal(table(given), table(given.to(torch.int64)))
        if given.dtype != torch.uint64 or TORCH >= (2, 13):  # which PyTorch could not save
            check(table, (given,))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_exported_bags(mode: str, dtype: Any) -> None:
    """Plain and growing tables that features share, padding, ragged and dynamic batches."""
    rest = torch.nn.EmbeddingBag(70, 9, mode=mode, padding_idx=3, include_last_offset=True)
    last = torch.nn.Embedding(50, 3, padding_idx=2)
    tables = [growing(padding_idx=7), rest, last]
    tables[0](KNOWN)
    model = fused.EmbeddingBags(tables, features=[0, 1, 2, 0]).to(dtype).eval()

    def batch(*shape: int) -> Any:
        parts = (torch.randint(n, shape, generator=GENERATOR) for n in (70, 50))
        return [ids_of(*shape), *parts, ids_of(*shape)]

    if mode != "max" and dtype == torch.float16:
        with pytest.raises(RuntimeError, match=r"EmbeddingBags: the module is exported: .*16 bits"):
            export(model, (batch(5, 6),))
        return
    check(model, (batch(5, 6),), (batch(17, 6),), dynamic_shapes=([{0: Dim("n")}] * 4,))
    ragged = [(batch(n), [torch.tensor([0, 2, 2, *range(4, n, 3), n])] * 4) for n in (9, 40)]
    check(model, *ragged, dynamic_shapes=([{0: Dim("n")}] * 4, [{0: Dim("b", min=3)}] * 4))
    check(fused.EmbeddingBags([last], mode=mode), ([torch.arange(9, dtype=torch.int32)],))
    check(fused.EmbeddingBags([rest]), (torch.arange(9).reshape(3, 3),))


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # which is deprecated
def test_what_is_not_exported() -> None:
    """Training mode, torch.jit and what PyTorch's bags round otherwise: errors say what to do."""
    bags, ids = torch.nn.Sequential(fused.EmbeddingBags([growing()])), ids_of(3, 2)
    for name, module, given in (("Growing", growing(), (ids,)), ("Bags", bags, ([ids],))):
        wrong: list[Any] = [partial(export, copy.deepcopy(module), given)]
        wrong += [partial(torch.jit.trace, module.eval(), given), partial(torch.jit.script, module)]
        for how in wrong:
            with pytest.raises(RuntimeError, match=f"{name}.*torch.export.export of the model in"):
                how()
    two, ones = fused.EmbeddingBags([(9, 2), (9, 2)]).eval(), torch.ones(2, 2).long()
    for args in ((ones, ones[0]), ([ones] * 2, None, [ones.float()] * 2)):
        with pytest.raises(RuntimeError, match="expected a list of ids, no per_sample_weights"):
            export(two, args)


def test_frozen_tables_and_what_new_rows_begin_with() -> None:
    """A frozen table admits nothing; functions of torch.nn.init give the same for any threads."""
    table = growing(9, full="evict")
    optimizer = fused.SGD(table.parameters(), lr=0.1)
    step(table, optimizer, KNOWN[:8])
    before = copy.deepcopy(table.requires_grad_(False).state_dict())
    assert not table(KNOWN[8:]).any()
    assert all(torch.equal(x, before[name]) for name, x in table.state_dict().items())
    step(table.requires_grad_(True), optimizer, KNOWN[9:12])
    assert table.find(KNOWN[9:12]).tolist() == table.ids.last.evicted.tolist() == [1, 2, 3]
    assert table.evict(unused_for=0, keep=KNOWN[:10]).tolist() == [2, 3]
    draw, found = partial(torch.nn.init.normal_, std=0.5), []
    for threads in (1, torch.get_num_threads()):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        made = copy.deepcopy(fused.GrowingEmbedding(40_000, D, initial=draw))
        found.append(made(torch.arange(30_000)).detach())
    assert torch.equal(*found) and abs(found[0].std() - 0.5) < 0.01


def test_ids_that_wait_and_numbers_of_all() -> None:
    table = fused.GrowingEmbedding(10, 2, after=2, pending=3)
    optimizer = fused.SparseAdam(table.parameters())
    for ids in ([1, 1, 2, 3, 4, 5], [1, 6], [1, 7]):
        table(torch.tensor(ids)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = table.statistics()
    assert (found["admitted"], found["evicted"], found["pending"]) == (1, 0, 3)
    assert found["dropped"] == 3 and found == table.ids.statistics()
    assert table.evict(unused_for=0).tolist() == [1]
    assert table.find(torch.tensor([1])).tolist() == [0]
    assert table.statistics()["evicted"] == 1


def test_forwards_beside_a_backward_of_another_thread() -> None:
    """They read no gradient that is being exchanged, and number their steps in one order."""
    table = fused.GrowingEmbedding(4_000, 4)
    optimizer, lock = fused.SparseAdam(table.parameters(), lr=0.01), threading.Lock()

    def train(seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for _ in range(60):
            loss = table(torch.randint(-3_000, 3_000, (40,), generator=draw)).square().sum()
            with lock:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(train, range(3))] == [None] * 3
