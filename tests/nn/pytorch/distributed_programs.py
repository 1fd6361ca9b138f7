"""What the ranks of a distributed training do; run by ``torchrun`` with a folder."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp

from fusestep.nn import torch as fused
from fusestep.nn.torch.engine.tensors import local

from subprocesses import TORCH
from torch_training import Tagger, assert_close, assert_same_bits, batch_of, loss_of, net, train

RANKS = 2


def everywhere(tensor: Any) -> list[Any]:
    """A tensor of each rank."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.detach().contiguous())
    return found


def optimizers(model: Tagger) -> list[Any]:
    """Of all kinds for tables, and one for the dense rest."""
    return [
        fused.SparseAdam(model.words.parameters(), lr=0.05),
        fused.LazyAdam(model.tags.parameters(), lr=0.05),
        fused.AdamW(model.head.parameters(), lr=0.05),
    ]


def ddp() -> None:
    """Sparse gradients, averaged over ranks: as one process with the whole batch."""
    threads = torch.get_num_threads()
    model, alone = Tagger(), Tagger()
    parallel = nn.parallel.DistributedDataParallel(model)
    mine, reference = optimizers(model), optimizers(alone)
    rank = dist.get_rank()
    for step in range(20):
        ids = batch_of(step, model)
        for one, part, group in ((parallel, ids[rank::RANKS], mine), (alone, ids, reference)):
            for optimizer in group:
                optimizer.zero_grad()
            (one(part) - 0.5).pow(2).mean().backward()
            for optimizer in group:
                optimizer.step()
    assert model.words.weight.grad.is_sparse
    for parameter in model.parameters():
        first, second = everywhere(parameter)
        assert torch.equal(first, second)
    assert_close(model.parameters(), alone.parameters(), 1e-9)
    assert torch.get_num_threads() == threads


def saved(model: Any, optimizer: Any) -> Any:
    """What torch.distributed.checkpoint would write."""
    options = dcp.StateDictOptions(full_state_dict=True)
    return copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer, options=options))


CHECKPOINTED: dict[str, Callable[[Any], Any]] = {
    "SparseAdam": lambda tables: fused.SparseAdam(tables, lr=0.05),
    "LazyAdam": lambda tables: fused.LazyAdam(tables, lr=0.05),
    "Adam": lambda tables: fused.Adam(tables, lr=0.05, sparse="touched"),
    "Adagrad": lambda tables: fused.Adagrad(tables, lr=0.05),
    "FTRL": lambda tables: fused.FTRL(tables, lr=0.05, l1=0.01),
    "SGD": lambda tables: fused.SGD(tables, lr=0.05, momentum=0.9, sparse="touched"),
}


class Tables(nn.Module):
    """Sparse gradients alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(11, 4, sparse=True, dtype=torch.float64)
        self.tags = nn.Embedding(7, 4, sparse=True, dtype=torch.float64)

    def forward(self, ids: Any) -> Any:
        return self.words(ids) * self.tags(ids % 7)


def table_steps(one: Any, optimizer: Any, steps: Any) -> None:
    for step in steps:
        ids = torch.randint(0, 11, (6,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (one(ids) - 0.5).pow(2).sum().backward()
        optimizer.step()


def checkpoint() -> None:
    """Saved after some steps, and resumed by a new optimizer: both go on equally."""
    for name, make in CHECKPOINTED.items():
        model, again = Tables(0), Tables(5)
        optimizer, fresh = make(model.parameters()), make(again.parameters())
        parallel = nn.parallel.DistributedDataParallel(model)
        table_steps(parallel, optimizer, range(3))
        state = saved(model, optimizer)
        again.load_state_dict(model.state_dict())
        before = [p.detach().clone() for p in again.parameters()]
        dcp.set_optimizer_state_dict(
            again, fresh, state, options=dcp.StateDictOptions(full_state_dict=True)
        )
        assert_same_bits(again.parameters(), before)  # making states moves nothing
        for p, q in zip(model.parameters(), again.parameters(), strict=True):
            mine, other = optimizer.state[p], fresh.state[q]
            assert mine.keys() == other.keys(), name
            assert_same_bits(
                map(torch.as_tensor, mine.values()), map(torch.as_tensor, other.values())
            )
        table_steps(model, optimizer, range(3, 6))
        table_steps(again, fresh, range(3, 6))
        assert_same_bits(model.parameters(), again.parameters())


SHARDED = ["SGD", "Adagrad", "RMSprop", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta",
           "ASGD", "Rprop", "Lion", "Adan"]  # fmt: skip


def fsdp() -> None:
    """Sharded parameters: each rank steps its shard, together as one process."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    for name in SHARDED:
        options = {"momentum": 0.9} if name == "SGD" else {}
        model, alone = net(), net()
        fully_shard(model)
        optimizer = getattr(fused, name)(model.parameters(), **options)
        reference = getattr(fused, name)(alone.parameters(), **options)
        train(model, optimizer, range(3))
        train(alone, reference, range(3))
        check_shards(model, optimizer, alone, reference)
        state = dcp.get_optimizer_state_dict(model, optimizer)
        fresh = getattr(fused, name)(model.parameters(), **options)
        dcp.set_optimizer_state_dict(model, fresh, state)
        train(model, fresh, range(3, 6))
        train(alone, reference, range(3, 6))
        check_shards(model, fresh, alone, reference)
        assert all(isinstance(p, DTensor) for p in model.parameters())


def clip() -> None:
    """PyTorch's clipping of shards is respected; what needs the norm of all of them is refused."""
    from torch.distributed.fsdp import fully_shard

    model, alone = net(), net()
    fully_shard(model)
    ours, reference = fused.AdamW(model.parameters()), fused.AdamW(alone.parameters())
    for step in range(3):
        for one, optimizer in ((model, ours), (alone, reference)):
            optimizer.zero_grad()
            loss_of(one, step).backward()
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            optimizer.step()
    # Before 2.9 PyTorch clips shards by a norm in float32.
    check_shards(model, ours, alone, reference, 1e-11 if TORCH >= (2, 9) else 1e-6)
    for name in ("Lamb", "LARS", "Adafactor"):
        with pytest.raises(RuntimeError, match="is distributed"):
            getattr(fused, name)(model.parameters()).step()
    with pytest.raises(RuntimeError, match="is distributed"):
        fused.clip_grad_norm_(model.parameters(), 0.1)


def stochastic() -> None:
    """What a rank draws for its shards and rows are the bits of one process."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    model, alone = net(dtype=torch.bfloat16), net(dtype=torch.bfloat16)
    fully_shard(model)
    for name in ("SGD", "AdamW", "Adagrad"):
        one, other = (
            getattr(fused, name)(each.parameters(), lr=0.1, rounding="stochastic")
            for each in (model, alone)
        )
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                q.grad = torch.randn(q.shape, generator=generator).bfloat16()
                p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements)
            one.step()
            other.step()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q)
    p = nn.Parameter(distribute_tensor(torch.ones(4, 6).bfloat16(), p.device_mesh, [Shard(1)]))
    p.grad = distribute_tensor(torch.ones(4, 6).bfloat16(), p.device_mesh, [Shard(1)])
    with pytest.raises(RuntimeError, match="is cut so that places of elements are unknown"):
        fused.SGD([p], lr=0.1, rounding="stochastic").step()
    whole = nn.Parameter(torch.ones(11, 3, dtype=torch.bfloat16))
    whole.grad = torch.ones_like(whole)
    fused.SGD([whole], lr=1e-3, rounding="stochastic").step()
    for order in ("range", "hash"):
        table = fused.ShardedEmbedding(11, 3, order=order, dtype=torch.bfloat16)
        table.weight.data.fill_(1.0)
        table.weight.grad = torch.ones_like(table.weight)
        fused.SGD([table.weight], lr=1e-3, rounding="stochastic").step()
        assert torch.equal(table.weight, whole[table.shard.begin : table.shard.end])


def growing() -> None:
    """A table that FSDP leaves out is saved and loaded; of what it would cut, all calls raise."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_module

    def made() -> Any:
        return nn.Sequential(fused.GrowingEmbedding(30, 4), nn.Linear(4, 2))

    meshes = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("all", "one"))
    for mesh in (meshes["all"], meshes["one"]):
        models = made(), made()
        for model in models:
            fully_shard(model, mesh=mesh, ignored_params={model[0].weight})
        models[0](torch.tensor([2**50, -3, 9])).sum().backward()
        found = dcp.get_model_state_dict(models[0])
        dcp.set_model_state_dict(models[1], found)
        for state in (models[0].state_dict(), models[1].state_dict()):
            assert [*found] == [*state] and state["0.weight"].shape == (4, 4)
            assert all(torch.equal(*map(local, (x, state[name]))) for name, x in found.items())
        with pytest.raises(RuntimeError, match="the weight is a DTensor: expected in ignored_par"):
            fully_shard(made(), mesh=mesh)
        model = distribute_module(made(), mesh)
        for call in (model.state_dict, lambda: model(torch.arange(3))):  # noqa: B023
            with pytest.raises(RuntimeError, match="the weight is a DTensor"):
                call()


def check_shards(
    model: Any, optimizer: Any, alone: Any, reference: Any, bound: float = 1e-11
) -> None:
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert p.to_local().shape != q.shape
        assert_close([p.full_tensor()], [q], bound)
        states, expected = optimizer.state[p], reference.state[q]
        assert states.keys() == expected.keys()
        for role, tensor in expected.items():
            found = states[role]
            assert_close([found.full_tensor() if tensor.shape == q.shape else found], [tensor])


def main() -> None:
    """The program of one rank."""
    dist.init_process_group("gloo")
    try:
        of_fsdp = (fsdp, clip, growing) if TORCH >= (2, 7) else ()  # which needed a GPU
        for part in (ddp, checkpoint, *of_fsdp, stochastic):
            part()
        Path(sys.argv[1], f"{dist.get_rank()}").write_text("done")
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # At once: a thread of gloo that is alive when Python ends may abort the process.
    os._exit(0)
