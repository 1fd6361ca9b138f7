"""What the ranks of a distributed training do; run by ``torchrun`` with a folder."""

import contextlib
import copy
import gc
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
        table_steps(nn.parallel.DistributedDataParallel(model), optimizer, range(3))
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
    """PyTorch's clipping of shards is respected; rules with norms of whole tensors are refused."""
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


class Cut:
    """Parameters that ranks have in all ways, beside whole ones of one process."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Partial, Replicate, Shard

        line, square = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (RANKS, 1))
        self.partial, self.dtype = Partial, dtype
        self.ways = [
            (line, [Shard(0)]), (line, [Shard(1)]), (line, [Replicate()]),
            (square, [Shard(0), Replicate()]), (square, [Replicate(), Shard(0)]), None,
        ]  # fmt: skip
        shapes = [(5, 4), (4, 3), (3, 2), (1, 6), (2, 2), (3, 3)]  # one rank has none of a row
        self.alone = [nn.Parameter(self.random(s, k)) for k, s in enumerate(shapes)]
        self.cut = [nn.Parameter(self.of(p.detach(), k)) for k, p in enumerate(self.alone)]

    def random(self, shape: Any, seed: int) -> Any:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=self.dtype)

    def of(self, whole: Any, k: int) -> Any:
        from torch.distributed.tensor import distribute_tensor

        way = self.ways[k]
        return whole.clone() if way is None else distribute_tensor(whole.clone(), *way)

    def backward(self, step: int) -> None:
        """Gradients; one is a sum that ranks have not taken."""
        from torch.distributed.tensor import DTensor

        for k, (p, q) in enumerate(zip(self.cut, self.alone, strict=True)):
            q.grad = self.random(q.shape, 7 * step + k)
            p.grad = self.of(q.grad, k)
        line, parts = self.ways[2][0], [self.random((3, 2), 90 + rank) for rank in range(RANKS)]
        self.alone[2].grad = sum(parts)
        self.cut[2].grad = DTensor.from_local(parts[dist.get_rank()], line, [self.partial()])

    def check(self, tolerance: float = 1e-12) -> None:
        wholes = [getattr(p, "full_tensor", p.clone)() for p in self.cut]
        assert_close(wholes, self.alone, tolerance)


def clip_over_meshes() -> None:
    """The norm of DTensors is that of PyTorch and of one process, in place and in a step."""
    for order in (1.0, 2.0, 3.5, float("inf")):
        for in_step in (False, True):
            found = Cut()
            ours, reference = fused.AdamW(found.cut), fused.AdamW(found.alone)
            for step in range(3):
                found.backward(step)
                # PyTorch adds no norms of several meshes; 2.8 adds norms for that of a sum.
                if TORCH >= (2, 11):
                    line = torch.nn.utils.clip_grad_norm_(found.cut[:3], 1e9, order).full_tensor()
                    mine = fused.clip_grad_norm_(found.cut[:3], 1e9, order)
                    assert_close([mine], [line], 1e-6)
                mine = fused.clip_grad_norm_(
                    found.cut, 0.1, order, optimizer=ours if in_step else None
                )
                assert_close([mine], [fused.clip_grad_norm_(found.alone, 0.1, order)], 1e-12)
                for optimizer in (ours, reference):
                    optimizer.step()
                found.check()
    found.backward(0)
    fused.clip_grad_norm_(found.cut, 0.1, optimizer=ours)
    found.cut[0].grad.mul_(2.0)
    with pytest.raises(RuntimeError, match="have changed since they were measured"):
        ours.step()
    if dist.get_rank():
        found.cut[0].grad.to_local().fill_(float("nan"))
    for order in (2.0, float("inf")):
        assert fused.clip_grad_norm_(found.cut, 0.1, order, optimizer=ours).isnan()


def skip_over_meshes() -> None:
    """A gradient that is not finite in one process is skipped by all."""
    for k in range(6):
        found = Cut()
        ours = fused.AdamW(found.cut, skip_nonfinite=True)
        reference = fused.AdamW(found.alone)
        for step in range(4):
            found.backward(step)
            if step == 2 and (k == 5 or dist.get_rank() == 0):
                local(found.cut[k].grad).fill_(float("inf"))
            ours.step()
            if step != 2:
                reference.step()
            found.check()
        assert ours.skipped_steps == 1


def rows_over_meshes() -> None:
    """Rows that are whole are stepped where they are; those that are cut are refused."""
    classes: dict[str, dict[str, Any]] = {
        "RowWiseAdagrad": {"weight_decay": 0.1}, "RowWiseAdam": {},
        "LazyAdam": {"rowwise_bias_correction": True},
    }  # fmt: skip
    for name, options in classes.items():
        found, kept = Cut(), [0, 2, 3, 4, 5]
        ours, reference = (
            getattr(fused, name)([every[k] for k in kept], **options)
            for every in (found.cut, found.alone)
        )
        found.cut[1], found.alone[1], found.ways[1] = found.cut[5], found.alone[5], None
        model = nn.ParameterList([found.cut[k] for k in kept])
        for step in range(4):
            found.backward(step)
            ours.step()
            reference.step()
            found.check()
            if step == 1:
                saved = dcp.get_optimizer_state_dict(model, ours)
                ours = getattr(fused, name)(model, **options)
                dcp.set_optimizer_state_dict(model, ours, saved)
        for k in kept:
            mine, other = ours.state[found.cut[k]], reference.state[found.alone[k]]
            assert mine.keys() == other.keys()
            for role, state in other.items():
                whole = getattr(mine[role], "full_tensor", lambda own=mine[role]: own)()
                assert_close([whole], [state], 1e-12)
        found = Cut()
        found.backward(0)
        found.ways.append(found.ways[0])
        vector = nn.Parameter(found.of(found.random((4,), 0), -1))  # it is one row
        vector.grad = found.of(found.random((4,), 1), -1)
        for cut in (found.cut[1], vector):
            one = getattr(fused, name)([cut], **options)
            with pytest.raises(RuntimeError, match="is cut within rows"):
                one.step()


def leaks() -> None:
    """Steps of DTensors, measured and clipped, leave no objects and no memory behind."""
    found = Cut(torch.float32)
    optimizer = fused.AdamW(found.cut, skip_nonfinite=True)
    counts, sizes = [], []
    for step in range(2200):
        found.backward(0)
        fused.clip_grad_norm_(found.cut, 1.0, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if step in (200, 2199):
            gc.collect()
            counts.append(len(gc.get_objects()))
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            sizes.append(pages * os.sysconf("SC_PAGE_SIZE"))
    assert counts[1] - counts[0] < 200
    assert sizes[1] - sizes[0] < 8 << 20


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


def check_shards(model, optimizer, alone, reference, bound: float = 1e-11) -> None:
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert p.to_local().shape != q.shape
        assert_close([p.full_tensor()], [q], bound)
        states, expected = optimizer.state[p], reference.state[q]
        assert states.keys() == expected.keys()
        for role, tensor in expected.items():
            found = states[role]
            whole = found.full_tensor() if tensor.shape == q.shape else found
            assert_close([whole], [tensor], bound)


def main() -> None:
    """The program of one rank."""
    dist.init_process_group("gloo")
    try:
        of_fsdp = (fsdp, clip, growing) if TORCH >= (2, 7) else ()  # which needed a GPU
        of_meshes = clip_over_meshes, skip_over_meshes, rows_over_meshes, leaks
        for part in (ddp, checkpoint, *of_fsdp, *of_meshes, stochastic):
            part()
        Path(sys.argv[1], f"{dist.get_rank()}").write_text("done")
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # At once: a thread of gloo that is alive when Python ends may abort the process.
    os._exit(0)
