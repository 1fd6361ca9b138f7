"""What the ranks do with bags in DistributedDataParallel: run by ``torchrun`` with a folder."""

import copy
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from fusestep.nn import torch as fused
from fusestep.nn.distributed import Communicator
from process_programs import communicator, run_parts

SIZES = [(40, 4), (7, 16), (300, 8)]


class Model(nn.Module):
    """Tables and a dense layer; called several times, within checkpoints or not."""

    def __init__(
        self, mode: str = "sum", dtype: Any = torch.float64, kind: Any = nn.EmbeddingBag,
        calls: int = 1, kept: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        torch.manual_seed(3)
        options |= {"mode": mode} if kind is nn.EmbeddingBag else {}
        self.bags = fused.EmbeddingBags([kind(n, d, dtype=dtype, **options) for n, d in SIZES])
        self.head, self.calls, self.kept = nn.Linear(28, 1, dtype=dtype), calls, kept

    def forward(self, ids: Any, factors: Any = None) -> Any:
        """Of ids of all tables."""
        found, one = [], torch.ones((), requires_grad=True)
        for k in range(self.calls):

            def call(x: Any, k: int = k) -> Any:
                return self.head(torch.tanh(self.bags([i.roll(k) for i in ids], None, factors))) * x

            found.append(
                call(one) if self.kept is None else checkpoint(call, one, use_reentrant=self.kept)
            )
        return sum(found[1:], found[0])


def batches(step: int, comm: Communicator, model: Model, *, weighted: bool = False) -> list[Any]:
    """The arguments of all ranks; with as many samples each, and none on the last one at times."""
    generator = torch.Generator().manual_seed(step)
    dtype, is_single = (
        model.head.weight.dtype, isinstance(model.bags.get_submodule("0"), nn.Embedding),
    )  # fmt: skip
    found = []
    for _ in range(comm.size):
        shape = (6,) if is_single else (6, 3)
        ids = [torch.randint(n, shape, generator=generator) for n, _ in SIZES]
        factors = [torch.rand(shape, generator=generator, dtype=dtype) for _ in SIZES]
        found.append((ids, factors if weighted else None))
    return found


def loss_of(out: Any) -> Any:
    return (out - 1).square().mean()


def assert_everywhere(model: Any) -> None:
    """The same bits on all ranks."""
    for parameter in model.parameters():
        every = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(every, parameter.detach().contiguous())
        assert all(torch.equal(every[0], other) for other in every)


def wrapped(model: Any, comm: Communicator, shown: bool | None = None, **ddp: Any) -> Any:
    """The model in DistributedDataParallel, which tables are hidden from or ``shown`` to. By
    default they are hidden where there is an exchange: that of sparse gradients over gloo corrupts
    memory now and then."""
    bags = {*map(id, chain.from_iterable(
        m.parameters() for m in model.modules() if isinstance(m, fused.EmbeddingBags)
    ))}  # fmt: skip
    if not (comm.size == 1 if shown is None else shown):
        names = [name for name, p in model.named_parameters() if id(p) in bags]
        model._ddp_params_and_buffers_to_ignore = names
    return DistributedDataParallel(model, **ddp)


def trained(
    comm: Communicator, make: Callable[[Any], Any], *, ddp: Any = None, weighted: bool = False,
    updates: bool = True, shown: bool | None = None, clip: float | None = None, **options: Any,
) -> None:  # fmt: skip
    """Four steps beside one process with the batches of all ranks."""
    model = Model(**options)
    alone = Model(**{**options, "kept": None})
    parallel = wrapped(model, comm, shown, **(ddp or {}))
    tables = [make(m.bags.parameters()) for m in (model, alone)]
    heads = [torch.optim.SGD(m.head.parameters(), lr=0.1) for m in (model, alone)]
    if updates:
        model.bags.update_in_backward(tables[0], max_norm=clip)
    for step in range(4):
        given = batches(step, comm, model, weighted=weighted)
        for optimizer in (*tables, *heads):
            optimizer.zero_grad()
        loss_of(parallel(*given[comm.rank])).backward()
        loss_of(torch.cat([alone(*own) for own in given])).backward()
        assert all((w.grad is None) == updates for w in model.bags.weights)
        if clip is not None:
            fused.clip_grad_norm_(alone.bags.parameters(), clip)
        for optimizer in (*heads, *(tables[updates:])):
            optimizer.step()
    assert_everywhere(model)
    close = {torch.float64: 1e-10, torch.float32: 1e-4}.get(model.head.weight.dtype, 0.1)
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.detach(), other.detach(), rtol=close, atol=close)


def adagrad(parameters: Any) -> Any:
    return fused.Adagrad(parameters, lr=0.1)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adagrad": adagrad, "LazyAdam": lambda p: fused.LazyAdam(p, lr=0.01),
    "Adam": lambda p: fused.Adam(p, lr=0.01, sparse="all"),
    "RowWiseAdagrad": lambda p: fused.RowWiseAdagrad(p, lr=0.1),
    "SGD": lambda p: fused.SGD(p, lr=0.1, skip_nonfinite=True),
}  # fmt: skip


def optimizers(comm: Communicator, *_: Any) -> None:
    for make in OPTIMIZERS.values():
        trained(comm, make)
        trained(comm, make, calls=2, clip=0.05)


def forms(comm: Communicator, *_: Any) -> None:
    """Modes, factors, padding, dtypes, tables of single ids."""
    for mode in ("mean", "max"):
        trained(comm, adagrad, mode=mode)
        trained(comm, adagrad, mode=mode, calls=2)
    trained(comm, adagrad, weighted=True)
    trained(comm, adagrad, padding_idx=2)
    for padding in (None, 2):
        trained(comm, adagrad, kind=nn.Embedding, padding_idx=padding)
    for dtype in (torch.float32, torch.bfloat16):
        trained(comm, adagrad, dtype=dtype)


def wrappers(comm: Communicator, *_: Any) -> None:
    """Options of DistributedDataParallel, also where it leaves the tables alone."""
    for shown in {comm.size == 1, False}:
        for ddp in (
            {}, {"find_unused_parameters": True}, {"static_graph": True},
            {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-4},
        ):  # fmt: skip
            trained(comm, adagrad, ddp=ddp, shown=shown)


def checkpoints(comm: Communicator, *_: Any) -> None:
    """One to three calls in a forward, computed anew in backward or not."""
    for kept in (None, False, True):
        for calls in (1, 2, 3):
            trained(comm, adagrad, kept=kept, calls=calls, ddp={"static_graph": True})


def left(comm: Communicator, *_: Any) -> None:
    """Gradients that are left are averaged by DistributedDataParallel, which asks the modules."""
    for sparse in (False, True):
        trained(comm, adagrad, updates=False, sparse=sparse, shown=True)
    trained(comm, adagrad, updates=False, kind=nn.Embedding, shown=True)
    model = Model()
    parallel, optimizer = wrapped(model, comm, True), adagrad(model.bags.parameters())
    for step, context in enumerate((parallel.no_sync, nullcontext)):
        with context():
            loss_of(parallel(*batches(step, comm, model)[comm.rank])).backward()
    optimizer.step()
    assert_everywhere(model.bags)


def shown(comm: Communicator, *_: Any) -> None:
    """Steps in backward, of tables whose empty gradients DistributedDataParallel exchanges."""
    for calls in (1, 2):
        trained(comm, adagrad, calls=calls, shown=True)


def warned(comm: Communicator, *_: Any) -> None:
    """The first forward says that the tables should be hidden; here no backward exchanges them."""
    for is_shown in (False, True):
        model = Model()
        parallel, given = wrapped(model, comm, is_shown), batches(0, comm, model)[comm.rank]
        with warnings.catch_warnings(record=True) as found:
            parallel(*given)
            parallel(*given)
        names = [name for name, _ in model.named_parameters() if name.startswith("bags.")]
        assert len(found) == (is_shown and comm.size > 1)
        assert all(f"_ddp_params_and_buffers_to_ignore = {names}" in str(w.message) for w in found)


class Biased(nn.Module):
    """Bags beside a parameter: without one DistributedDataParallel has nothing to exchange."""

    def __init__(self, bags: Any) -> None:
        super().__init__()
        self.bags, self.bias = bags, nn.Parameter(torch.zeros(1))

    def forward(self, ids: Any) -> Any:
        return self.bags(ids), self.bias


def bits(comm: Communicator, *_: Any) -> None:
    """Those of a `ShardedEmbedding` that averages; rows are hot, and ranks have none at times."""
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for n in (2, 101):
            torch.manual_seed(0)
            table = nn.Embedding(n, 8, dtype=dtype)
            bags = fused.EmbeddingBags([copy.deepcopy(table)])
            parallel = wrapped(Biased(bags), comm)
            bags.update_in_backward(fused.LazyAdam(bags.parameters(), lr=0.1))
            sharded = fused.ShardedEmbedding(n, 8, comm, average=True, dtype=dtype)
            sharded.load_state_dict({"weight": table.weight.detach()})
            optimizer = fused.LazyAdam(sharded.parameters(), lr=0.1)
            for step in range(4):
                generator = torch.Generator().manual_seed(10 * step + comm.rank)
                length = 0 if step == 2 and comm.rank == 0 else 900 + 77 * comm.rank
                ids = torch.randint(n, (length,), generator=generator)
                grad = torch.randn(length, 8, generator=generator).to(dtype)
                torch.autograd.backward(parallel([ids]), (grad, torch.ones(1)))
                sharded(ids).backward(grad)
                optimizer.step()
                optimizer.zero_grad()
            rows = bags.weights[0].detach()[torch.from_numpy(sharded.shard.indices)]
            assert torch.equal(rows, sharded.weight.detach())


def refusals(comm: Communicator, *_: Any) -> None:
    """What is not averaged raises on all ranks before anything is written."""
    term = "the weight of table 0 has a gradient from elsewhere"

    def without_sync(_: Any, parallel: Any, given: Any) -> None:
        with parallel.no_sync():
            loss_of(parallel(*given)).backward()

    def forward_without_sync(_: Any, parallel: Any, given: Any) -> None:
        with parallel.no_sync():
            loss = loss_of(parallel(*given))
        loss.backward()

    def joining(_: Any, parallel: Any, given: Any) -> None:
        with parallel.join():
            loss_of(parallel(*given)).backward()

    def penalty(model: Any, parallel: Any, given: Any) -> None:
        (loss_of(parallel(*given)) + model.bags.weights[0].square().sum()).backward()

    def penalty_of_one(model: Any, parallel: Any, given: Any) -> None:
        factor = float(comm.rank == 0)
        loss = loss_of(parallel(*given))
        (loss + model.bags.weights[0].square().sum() if factor else loss).backward()

    def bad_state(model: Any, parallel: Any, given: Any) -> None:
        model.bags._updates.optimizer.state[model.bags.weights[1]].pop("sum")
        loss_of(parallel(*given)).backward()

    for call, match in (
        (without_sync, "is called in no_sync: .*leave no_sync out"),
        (forward_without_sync, "is called in no_sync: .*leave no_sync out"),
        (joining, "is called in join"),
        # Where it sees the tables, the error is DistributedDataParallel's own.
        (penalty, term if comm.size > 1 else "sparse gradient"),
        (penalty_of_one, f"rank 0: {term}" if comm.size > 1 else "sparse gradient"),
        (bad_state, "lacks 'sum'"),
    ):
        model = Model()
        parallel = wrapped(model, comm)
        model.bags.update_in_backward(adagrad(model.bags.parameters()))
        tables = [w.detach().clone() for w in model.bags.weights]
        with pytest.raises(RuntimeError, match=match):
            call(model, parallel, batches(0, comm, model)[comm.rank])
        for weight, table in zip(model.bags.weights, tables, strict=True):
            assert torch.equal(weight, table)
        dist.barrier()
    assert_everywhere(model)


def beside(comm: Communicator, *_: Any) -> None:
    """Called without the wrapper, or within one that has not this module, bags step alone."""
    model, other = Model(), Model()
    parallel = wrapped(model, comm)

    class Using(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.bags = nn.Linear(28, 1, dtype=torch.float64), [other.bags]

        def forward(self, ids: Any) -> Any:
            return self.head(self.bags[0](ids))

    using = DistributedDataParallel(Using())
    for one in (model, other):
        one.bags.update_in_backward(adagrad(one.bags.parameters()))
    given = batches(0, comm, model)[comm.rank]
    loss_of(parallel(*given)).backward()
    assert_everywhere(model)
    loss_of(model(*given)).backward()
    loss_of(using(given[0])).backward()
    for one in (model, other):
        every: list[Any] = [None] * comm.size
        dist.all_gather_object(every, one.bags.weights[0].detach().clone())
        assert comm.size == 1 or not torch.equal(every[0], every[1])


def main(folder: str, *names: str) -> None:
    """The program of one rank."""
    with communicator("torch") as comm:
        run_parts(comm, {name: globals()[name] for name in names}, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[2:])
