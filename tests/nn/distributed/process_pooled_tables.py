"""What ranks do with bags of growing tables that they share: run by ``torchrun`` with a folder."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from fusestep.nn import torch as fused
from fusestep.nn.distributed import Communicator, alone
from process_programs import communicator, run_parts

WIDTHS, LENGTH = (4, 16, 8), 3
# All ranks have a row of the first table more than 512 times: hot rows are summed by ranges.
IDS, BATCH = (3, 300, 300), 400


class Counting:
    """A communicator that counts exchanges."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self.calls = comm, list[str]()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if name in ("all_to_all", "all_gather", "broadcast"):
            self.calls.append(name)
        return found


def bags_of(comm: Communicator | None, mode: str = "sum", **options: Any) -> fused.EmbeddingBags:
    features = options.pop("features", None)
    each = [
        fused.GrowingEmbedding(2000, d, comm=comm, seed=5 + k, **options)
        for k, d in enumerate(WIDTHS)
    ]
    return fused.EmbeddingBags(each, mode, features=features)


def call_of(ids: list[Any], factors: Any, form: str) -> tuple[Any, Any, Any]:
    """Ids ``[batch, LENGTH]`` of each feature as an argument list of some form."""
    if form == "square":
        return ids, None, factors
    flat, n = [x.reshape(-1) for x in ids], len(ids[0])
    weights = None if factors is None else [x.reshape(-1) for x in factors]
    if form == "lists":
        return flat, [torch.arange(0, n * LENGTH, LENGTH) for _ in ids], weights
    ends = torch.arange(0, len(ids) * n * LENGTH + 1, LENGTH)
    return torch.cat(flat), ends, None if weights is None else torch.cat(weights)


def trained(
    comm: Communicator, make: Callable[[Any], Any] = fused.Adagrad, *, form: str = "square",
    weighted: bool = False, in_backward: bool = True, mode: str = "sum", **options: Any,
) -> None:  # fmt: skip
    """Three steps, and outputs, beside one process with the batches of all; rows have its bits."""
    own, one = bags_of(comm, mode, **options), bags_of(alone(), mode, **options)
    optimizers = [make(bags.parameters()) for bags in (own, one)]
    of = options.get("features") or range(len(WIDTHS))
    mine = slice(comm.rank * BATCH, (comm.rank + 1) * BATCH)
    if in_backward:
        own.update_in_backward(optimizers[0])
        one.update_in_backward(optimizers[1])
    for step in range(3):
        generator, shape = torch.Generator().manual_seed(step), (comm.size * BATCH, LENGTH)
        ids = [torch.randint(IDS[t], shape, generator=generator) * 7919 - 11 for t in of]
        factors = [torch.rand(shape, generator=generator) for _ in of] if weighted else None
        ours = None if factors is None else [x[mine] for x in factors]
        out = own(*call_of([x[mine] for x in ids], ours, form))
        whole = one(*call_of(ids, factors, form))
        assert torch.equal(out, whole[mine])
        gradient = torch.randn(whole.shape, generator=generator).to(whole.dtype)
        out.backward(gradient[mine])
        whole.backward(gradient / comm.size if options.get("average") else gradient)
        if not in_backward:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for table, other in zip(own.children(), one.children(), strict=True):
        ids_here = torch.from_numpy(table.ids.rows_of_ids()[0])
        every = torch.from_numpy(other.ids.rows_of_ids()[0])
        here = torch.from_numpy(table.shard.owner(every.numpy()) == comm.rank)
        assert sorted(every[here].tolist()) == sorted(ids_here.tolist())
        rows = table.find(ids_here).long(), other.find(ids_here).long()
        assert torch.equal(table.weight[rows[0]], other.weight[rows[1]])


def bits(comm: Communicator, *_: Any) -> None:
    """Rows by id have the bits of one process: forms, poolings, types, optimizers, features."""
    trained(comm)
    trained(comm, fused.LazyAdam, form="lists", mode="mean")
    trained(comm, form="joined", weighted=True)
    trained(comm, features=[0, 1, 0, 2, 2], in_backward=False)
    trained(comm, dtype=torch.bfloat16, padding_idx=-11)
    trained(comm, dtype=torch.float64, padding_idx=-11, mode="mean")
    if comm.size & (comm.size - 1) == 0:  # else a quotient is rounded
        trained(comm, average=True)


def like_alone(*_: Any) -> None:
    """Of one process, bags have the bits of tables without ``comm``."""
    own, one = bags_of(alone()), bags_of(None)
    for bags in (own, one):
        bags.update_in_backward(fused.Adagrad(bags.parameters()))
    ids = [torch.randint(n, (BATCH, LENGTH)) for n in IDS]
    for _ in range(2):
        outs = [bags(ids) for bags in (own, one)]
        assert torch.equal(*outs)
        for out in outs:
            out.square().sum().backward()
    for table, other in zip(own.children(), one.children(), strict=True):
        every = torch.from_numpy(other.ids.rows_of_ids()[0])
        rows = table.find(every).long(), other.find(every).long()
        assert torch.equal(table.weight[rows[0]], other.weight[rows[1]])


def exchanges(comm: Communicator, *_: Any) -> None:
    """Four exchanges an iteration, whatever the number of tables; three without a gradient."""
    counting: Any = Counting(comm)
    bags = bags_of(counting)
    bags.update_in_backward(fused.Adagrad(bags.parameters()))
    ids = [torch.arange(6).reshape(2, 3) + comm.rank for _ in WIDTHS]
    counting.calls.clear()
    bags(ids).sum().backward()
    # Of one process an agreement is nobody's.
    assert counting.calls == ["all_to_all"] * (4 if comm.size > 1 else 3)
    counting.calls.clear()
    bags.eval()
    with torch.no_grad():
        bags(ids)
    assert counting.calls == ["all_to_all"] * (3 if comm.size > 1 else 2)


def errors(comm: Communicator, *_: Any) -> None:
    """What one rank finds wrong all raise, and a lookup afterwards is as if nothing had been."""
    bags, bad = bags_of(comm, full="raise"), comm.size - 1
    optimizer = fused.Adagrad(bags.parameters())
    bags.update_in_backward(optimizer)
    good: list[Any] = [torch.arange(6).reshape(2, 3) for _ in WIDTHS]
    bags(good).sum().backward()
    rank = f"rank {bad}: " if comm.size > 1 else ""
    many = torch.arange(2100 * comm.size).reshape(-1, 3)
    before = [table.weight.detach().clone() for table in bags.children()]
    for kind, match, wrong in (
        (TypeError, f"{rank}.*ids have a wrong type", [good[0].float(), *good[1:]]),
        (ValueError, f"{rank}ids.*do not fit", good[1:]),
        (ValueError, f"{rank}ids.* another number of bags", [good[0][:1], *good[1:]]),
    ):
        with pytest.raises(kind, match=match):
            bags(wrong if comm.rank == bad else good)
    for table, weights in zip(bags.children(), before, strict=True):
        assert torch.equal(table.weight, weights)
    with pytest.raises(ValueError, match=r"IdMap: ids do not fit: expected .* rows are free"):
        bags([many] * 3 if comm.rank == bad else good)
    bags(good).sum().backward()
    out = bags(good)
    if comm.rank == bad:
        next(iter(bags.children())).evict(unused_for=0)
    with pytest.raises(RuntimeError, match=f"{rank}rows of the forward were given back"):
        out.sum().backward()
    bags(good).sum().backward()


def refusals(comm: Communicator, *_: Any) -> None:
    """What tables of several processes cannot have."""
    ids = [torch.tensor([[1, 2]]) for _ in WIDTHS]
    with pytest.raises(ValueError, match="mode is not supported: expected 'sum' or 'mean'"):
        bags_of(comm, "max")(ids)
    mixed = fused.EmbeddingBags([fused.GrowingEmbedding(9, 2, comm=comm), nn.Embedding(9, 2)])
    with pytest.raises(ValueError, match="tables have other processes: expected one comm"):
        mixed([torch.tensor([1]), torch.tensor([1])])
    each = [fused.GrowingEmbedding(9, 2, comm=comm, average=bool(k)) for k in range(2)]
    with pytest.raises(ValueError, match="average differs"):
        fused.EmbeddingBags(each)(ids[:2])
    bags = bags_of(comm)
    bags.update_in_backward(fused.SGD(bags.parameters(), lr=1.0), max_norm=1.0)
    if comm.size > 1:
        with pytest.raises(RuntimeError, match="got a part of a table"):
            bags(ids).sum().backward()


def beside_ddp(comm: Communicator, *_: Any) -> None:
    """Tables beside a dense layer in DistributedDataParallel, from which they are hidden."""
    torch.manual_seed(3)
    model: Any = nn.Module()
    model.bags, model.head = bags_of(comm, average=True), nn.Linear(sum(WIDTHS), 1)
    model.forward = lambda ids: model.head(torch.tanh(model.bags(ids)))
    torch.manual_seed(3)
    other: Any = nn.Module()
    other.bags, other.head = bags_of(alone()), nn.Linear(sum(WIDTHS), 1)
    fused.hide_from_ddp(model)
    parallel = DistributedDataParallel(model)
    pairs = [(m, torch.optim.SGD(m.head.parameters(), lr=0.1)) for m in (model, other)]
    for m, _ in pairs:
        m.bags.update_in_backward(fused.Adagrad(m.bags.parameters()))
    for step in range(3):
        ids = [torch.randint(n, (8 * comm.size, 2), generator=torch.Generator().manual_seed(step))
               for n in IDS]  # fmt: skip
        mine = [x[8 * comm.rank : 8 * comm.rank + 8] for x in ids]
        (parallel(mine) - 1).square().mean().backward()
        (other.head(torch.tanh(other.bags(ids))) - 1).square().mean().backward()
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.head.weight, other.head.weight)
    for table, whole in zip(model.bags.children(), other.bags.children(), strict=True):
        ids_here = torch.from_numpy(table.ids.rows_of_ids()[0])
        rows = table.find(ids_here).long(), whole.find(ids_here).long()
        torch.testing.assert_close(table.weight[rows[0]], whole.weight[rows[1]])


PARTS = {f.__name__: f for f in (bits, like_alone, exchanges, errors, refusals, beside_ddp)}

if __name__ == "__main__":
    with communicator("torch") as ranks:
        run_parts(ranks, PARTS, Path(sys.argv[2]))
