"""What each rank does with `ShardedEmbedding`; started by `test_embeddings` with names of parts."""

import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel
import process_embedding_states
from fusestep.nn import torch as fused
from fusestep.nn.distributed import Communicator, alone
from process_checks import communicator, refused_everywhere, run_parts

from process_embedding_training import (  # isort: skip
    DIM, MAKE, ORDERS, N, Net, Pair, Whole, assert_bits, assert_part, batch, part, whole_of,
)  # fmt: skip

DTYPES = (torch.float32, torch.bfloat16)


def training(comm: Communicator, *_: Any) -> None:
    """Rows and states have the bits of one process: also where a row has thousands of ids."""
    assert (torch.bincount(batch(0)) > 512).sum() > 1
    for k, name in enumerate(MAKE):
        for j, order in enumerate(ORDERS):
            for dtype in DTYPES[: 1 + (k + j) % 2]:
                Pair(comm, name, order=order, dtype=dtype).steps(3)


def initial(comm: Communicator, *_: Any) -> None:
    """The first numbers are those of any number of processes, and of the seed."""
    for rows in (1, N, 10_000):
        for order in ORDERS:
            options: dict[str, Any] = {"order": order, "seed": 5}
            own = fused.ShardedEmbedding(rows, 2, comm, **options)
            one = fused.ShardedEmbedding(rows, 2, alone(), **options)
            assert_bits(whole_of(own), whole_of(one), f"{rows} {order}")
    assert not torch.equal(one.weight, fused.ShardedEmbedding(rows, 2, alone(), seed=6).weight)
    assert 0.97 < float(one.weight.detach().std()) < 1.03
    torch.manual_seed(comm.rank)  # without a seed it is that of rank 0
    drawn = whole_of(fused.ShardedEmbedding(N, DIM, comm))
    torch.manual_seed(0)
    assert_bits(drawn, fused.ShardedEmbedding(N, DIM, alone()).weight)
    assert fused.ShardedEmbedding(5, 2, comm, dtype=torch.bfloat16).weight.dtype == torch.bfloat16


def ids(comm: Communicator, *_: Any) -> None:
    """Of any shape and of both types, also none at all."""
    for order in ORDERS:
        own = Net(comm, order=order).words
        table = whole_of(own)
        forms = [(), (1,), (0,), (2, 0, 3), (4, 3), (2, 3, 4)]
        for shape in forms:
            for dtype in (torch.int32, torch.int64):
                generator = torch.Generator().manual_seed(comm.rank)
                given = torch.randint(0, N, shape, generator=generator).to(dtype)
                _compare(comm, own, table, given)
        # Not contiguous, and as many as the rank has a number.
        _compare(comm, own, table, torch.arange(24).reshape(4, 6).T)
        _compare(comm, own, table, torch.arange(48)[::3])
        _compare(comm, own, table, torch.full((comm.rank,), 7))


def _compare(comm: Communicator, own: Any, table: Any, given: Any) -> None:
    label = f"{tuple(given.shape)} {given.dtype}"
    rows = own(given)
    assert_bits(rows, table[given.long()], label)
    gradient = torch.arange(rows.numel(), dtype=rows.dtype).reshape(rows.shape)
    own.weight.grad = None
    rows.backward(gradient)
    expected = torch.zeros(table.shape)
    expected.index_add_(0, given.long().reshape(-1), gradient.reshape(-1, DIM))
    if comm.size > 1:
        dist.all_reduce(expected)  # small whole numbers: exact
    assert own.weight.grad.is_sparse and own.weight.grad.shape == own.weight.shape
    assert_bits(whole_of(own, own.weight.grad.to_dense()), expected, label)


def average(comm: Communicator, *_: Any) -> None:
    """Each gradient is divided before they are summed."""
    own = Net(comm, average=True)
    whole = Whole(whole_of(own.words))
    optimizers = [MAKE["SGD"](net.parameters()) for net in (own, whole)]
    given = batch(0)
    own(part(given, 0, comm)).backward()
    rows = whole.words(given)
    rows.register_hook(lambda g: g / comm.size)
    rows.pow(2).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    states = optimizers[1].state[whole.words.weight]
    assert_part(own.words, optimizers[0], whole.words.weight, states)


class _Two(torch.nn.Module):
    """Two tables of different heights, of which the second is looked up with the first's ids."""

    def __init__(self, words: Any, tags: Any) -> None:
        super().__init__()
        self.words, self.tags = words, tags

    def forward(self, ids: Any) -> Any:
        return (self.words(ids) * self.tags(ids % 7)).sum()


def two_tables(comm: Communicator, *_: Any) -> None:
    """In one model, with one optimizer, in different orders of rows."""
    own = _Two(
        fused.ShardedEmbedding(N, DIM, comm, seed=1, order="hash"),
        fused.ShardedEmbedding(7, DIM, comm, seed=2),
    )
    whole = _Two(Whole(whole_of(own.words)).words, Whole(whole_of(own.tags)).words)
    for name in ("LazyAdam", "FTRL"):
        optimizers = [MAKE[name](net.parameters()) for net in (own, whole)]
        for step in range(3):
            given = batch(step)
            for net, optimizer, x in zip(
                (own, whole), optimizers, (part(given, step, comm), given), strict=True
            ):
                optimizer.zero_grad()
                net(x).backward()
                optimizer.step()
        for module, of_whole in ((own.words, whole.words), (own.tags, whole.tags)):
            states = optimizers[1].state[of_whole.weight]
            assert_part(module, optimizers[0], of_whole.weight, states, name)


def several_uses(comm: Communicator, *_: Any) -> None:
    """Gradients that autograd has added up: right, within rounding. Also where one use has no
    occurrences, here or anywhere: the places of the other must not pass for those of the sum."""
    empty = torch.empty(0, dtype=torch.int64)
    own_part = [part(batch(step), step, comm) for step in range(2)]
    of_rank = own_part[1] if comm.rank else empty
    cases = [own_part, [own_part[0], empty], [empty, own_part[0]], [own_part[0], of_rank],
             [of_rank, own_part[0]], [empty, empty]]  # fmt: skip
    for k, uses in enumerate(cases):
        for in_one in (True, False):
            pair = Pair(comm, ("LazyAdam", "SGD")[k % 2], order=ORDERS[in_one])
            for _ in range(2):
                _two_backwards(pair, uses, in_one=in_one)


def _two_backwards(pair: Pair, uses: Any, *, in_one: bool) -> None:
    comm = pair.comm
    of_all = [[None] * comm.size for _ in uses]
    for found, use in zip(of_all, uses, strict=True):
        if comm.size > 1:
            dist.all_gather_object(found, use)
        else:
            found[:] = [use]
    for net, optimizer, given in (
        (pair.own, pair.optimizer, uses),
        (pair.whole, pair.reference, [torch.cat(found) for found in of_all]),
    ):
        optimizer.zero_grad()
        losses = [net(use) for use in given] if in_one else []
        if in_one:
            sum(losses).backward()
        else:
            for use in given:
                net(use).backward()
        optimizer.step()
    rows = torch.from_numpy(pair.own.words.shard.indices)
    found, expected = pair.own.words.weight, pair.whole.words.weight[rows]
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def one_backward_again(comm: Communicator, *_: Any) -> None:
    """After gradients of several backwards one of a single backward has the bits again."""
    pair = Pair(comm, "SGD", order="hash")
    for _ in range(2):
        pair.own(part(batch(0), 0, comm)).backward()
    pair.optimizer.zero_grad()
    assert pair.own.words.weight.grad is None
    pair.steps(2)
    pair.optimizer.zero_grad(set_to_none=False)
    pair.own(part(batch(0), 0, comm)).backward()
    assert bool(pair.own.words.weight.grad.to_dense().any())
    pair.steps(1)


def beside_ddp(comm: Communicator, *_: Any) -> None:
    """The mean of the losses: the head by DistributedDataParallel, the table by its gradients."""
    torch.manual_seed(0)
    head = torch.nn.Linear(DIM, 3)
    own = torch.nn.Sequential(
        fused.ShardedEmbedding(N, DIM, comm, seed=1, average=True), head
    ).double()
    own[0].weight.row_shard  # noqa: B018  (a conversion keeps the parameter)
    whole = torch.nn.Sequential(
        torch.nn.Embedding(N, DIM, sparse=True, _weight=whole_of(own[0])), torch.nn.Linear(DIM, 3)
    ).double()
    whole[1].load_state_dict(head.state_dict())
    ours = own
    if comm.size > 1:
        own._ddp_params_and_buffers_to_ignore = ["0.weight"]
        ours = DistributedDataParallel(own)
    steps = [
        (ours, [fused.LazyAdam(own[0].parameters()), fused.SGD(own[1].parameters(), lr=0.1)]),
        (whole, [fused.LazyAdam(whole[0].parameters()), fused.SGD(whole[1].parameters(), lr=0.1)]),
    ]
    for step in range(3):
        given = torch.randint(0, N, (60,), generator=torch.Generator().manual_seed(step))
        for (net, optimizers), x in zip(steps, (part(given, 0, comm), given), strict=True):
            for optimizer in optimizers:
                optimizer.zero_grad()
            net(x).pow(2).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    torch.testing.assert_close(whole_of(own[0]), whole[0].weight.detach())
    torch.testing.assert_close(own[1].weight, whole[1].weight)


class Summing(torch.nn.Module):
    """The sum of what tables have for ids, beside a layer."""

    def __init__(self, *tables: Any) -> None:
        super().__init__()
        self.tables, self.head = torch.nn.ModuleList(tables), torch.nn.Linear(2, 1)

    def forward(self, ids: Any) -> Any:
        return sum(table(ids).sum() for table in self.tables) + self.head.weight.sum()


def hidden(comm: Communicator, *_: Any) -> None:
    """What `hide_from_ddp` hides trains by ids; lookups of what DistributedDataParallel sees raise,
    with the wrapper and without."""
    given = torch.tensor([[5, 5, 6], [6, 7, 8], [5, 7, 9]])
    for is_hidden in (True, False)[: comm.size]:
        torch.manual_seed(comm.rank)
        options: dict[str, Any] = {"comm": comm, "average": True}
        tables = [
            fused.ShardedEmbedding(12, 2, **options), fused.GrowingEmbedding(12, 2, **options)
        ]  # fmt: skip
        rows = [table.weight.detach().clone() for table in tables]
        model = Summing(*tables)
        if is_hidden:
            fused.hide_from_ddp(model)
        parallel = DistributedDataParallel(model)
        if not is_hidden:
            for call in (parallel, *tables):
                with pytest.raises(RuntimeError, match=r"Embedding: .*hide_from_ddp.*anew"):
                    call(given)
            continue
        assert all(map(torch.equal, rows, (table.weight for table in tables)))
        before = [table(torch.arange(5, 10)).detach() for table in tables]
        optimizer = fused.SGD([table.weight for table in tables], lr=1.0)
        parallel(given[comm.rank]).backward()
        optimizer.step()
        every = given[: comm.size].flatten() - 5
        counts = torch.bincount(every, minlength=5)[:, None] / comm.size
        for table, old in zip(tables, before, strict=True):
            torch.testing.assert_close(table.eval()(torch.arange(5, 10)), old - counts)


def handed_out_by_each(comm: Communicator, *_: Any) -> None:
    """Rows that each process hands out by itself meet those of other ids: lookups raise."""
    for is_pooled, steps, is_shown in product((False, True), repeat=3):
        table = fused.GrowingEmbedding(10, 2)
        one = fused.EmbeddingBags([table]) if is_pooled else table
        optimizer = fused.SGD(table.parameters(), lr=1.0)
        if is_pooled and steps:
            one.update_in_backward(optimizer)
        model, ids = Summing(one), torch.tensor([[1 + comm.rank]])
        if not is_shown:
            names = [name for name, p in model.named_parameters() if p is table.weight]
            model._ddp_params_and_buffers_to_ignore = names
        parallel = DistributedDataParallel(model)
        for mode in (True, False)[: comm.size]:
            parallel.train(mode)
            if comm.size == 1:
                parallel([ids] if is_pooled else ids).backward()
                continue
            with pytest.raises(RuntimeError, match=r"GrowingEmbedding: .*comm=.*rows of its own"):
                parallel([ids] if is_pooled else ids)
        assert len(table.ids) == (comm.size == 1)


def errors(comm: Communicator, *_: Any) -> None:
    """What one rank finds all raise, and nothing is written."""
    for bad in sorted({0, comm.size - 1}):
        for name in ("LazyAdam", "SGD"):
            pair = Pair(comm, name, order="hash")
            pair.steps(1)
            _errors_of(pair, f"rank {bad}: " if comm.size > 1 else "", bad)
            pair.optimizer.zero_grad()
            pair.steps(1)  # as if nothing had been wrong


def _errors_of(pair: Pair, rank: str, bad: int) -> None:
    words, comm = pair.own.words, pair.comm
    states = [torch.as_tensor(x).numpy() for x in pair.optimizer.state[words.weight].values()]
    arrays = [words.weight.detach().numpy(), *states]
    wrong: list[tuple[type[Exception], str, Any]] = [
        (IndexError, rf"{rank}indices\[1\] is out of range.*got {N}", torch.tensor([3, N])),
        (IndexError, rf"{rank}indices\[0\] is out of range.*got -1", torch.tensor([-1])),
        (TypeError, f"{rank}.*float32", torch.ones(3)),
        (TypeError, f"{rank}.*int16", torch.ones(3, dtype=torch.int16)),
        (TypeError, f"{rank}.*", [1, 2]),
    ]
    for kind, match, ids in wrong:
        given = ids if comm.rank == bad else torch.tensor([1, 2])

        def step(given: Any = given) -> None:
            pair.optimizer.zero_grad()
            pair.own(given).backward()
            pair.optimizer.step()

        refused_everywhere(comm, kind, match, step, *arrays)
        assert words.weight.grad is None


def arguments(comm: Communicator, *_: Any) -> None:
    """Of the module, on the last rank: refused by all, those that are fine but differ too."""
    usual: dict[str, Any] = {"num_embeddings": 4, "embedding_dim": 2, "comm": comm, "seed": 1}
    wrong: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "embedding_dim", -1), (TypeError, "embedding_dim", 2.5),
        (TypeError, "embedding_dim", "2"), (TypeError, "average", "yes"),
        (TypeError, "dtype", int), (TypeError, "dtype", torch.int64), (ValueError, "seed", -1),
        (TypeError, "seed", 1.5), (ValueError, "order", "x"), (TypeError, "num_embeddings", 1.5),
    ]  # fmt: skip
    if comm.size > 1:
        differing = {"num_embeddings": 5, "embedding_dim": 3, "average": True, "order": "hash"}
        wrong += [(ValueError, name, value) for name, value in differing.items()]
        wrong += [(ValueError, "dtype", torch.float64)]
    for kind, name, value in wrong:
        given = {**usual, **({name: value} if comm.rank == comm.size - 1 else {})}
        rank = f"rank {comm.size - 1}: " if comm.size > 1 else ""
        what = name.replace("num_embeddings", "rows")
        refused_everywhere(
            comm, kind, f"{rank}{what} ", lambda given=given: fused.ShardedEmbedding(**given)
        )


def needs_all(comm: Communicator, *_: Any) -> None:
    """What needs the gradients of all processes is refused by all, and changes nothing."""
    if comm.size == 1:
        return
    pair = Pair(comm, "LazyAdam", order="range")
    pair.steps(1)
    optimizer = fused.LazyAdam(pair.own.parameters(), skip_nonfinite=True)
    pair.own(part(batch(0), 0, comm)).backward()
    weight = pair.own.words.weight
    if comm.rank == 0:
        weight.grad._values()[:1] = torch.nan
    arrays = [weight.detach().numpy(), weight.grad._values().numpy()]
    refused_everywhere(
        comm, RuntimeError, "skip_nonfinite takes no part of a table", optimizer.step, *arrays,
    )  # fmt: skip
    assert not optimizer.state
    for given in ({}, {"optimizer": pair.optimizer}):
        refused_everywhere(
            comm, RuntimeError, "^clip_grad_norm_: gradient 0 is distributed",
            lambda given=given: fused.clip_grad_norm_([weight], 1e-3, **given), *arrays,
        )  # fmt: skip


def scaler(comm: Communicator, *_: Any) -> None:
    """An infinity on one rank: with PyTorch's scaler for divided parameters all skip the step."""
    own = ShardedGradScaler(device="cpu", init_scale=8.0)
    pair = Pair(comm, "LazyAdam", order="hash")
    weight, bad = pair.own.words.weight, comm.size - 1
    for step, scale in enumerate((8.0, 4.0, 4.0)):
        pair.optimizer.zero_grad()
        before = weight.detach().clone()
        factor = torch.inf if step == 1 and comm.rank == bad else 1.0
        own.scale(factor * pair.own(part(batch(0), 0, comm)).sum()).backward()
        own.step(pair.optimizer)
        own.update()
        assert own.get_scale() == scale
        assert torch.equal(before, weight) == (step == 1)


def main(folder: str, *names: str) -> None:
    """The program of one rank."""
    parts = vars(process_embedding_states) | globals()
    with communicator("torch") as comm:
        run_parts(comm, {name: parts[name] for name in names}, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[2:])
