"""An embedding whose table several processes own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...kernels.private import outside_of_graphs
from ...ops.runtime import check
from ...ops.runtime.errors import reject
from ..base.arguments import count
from ..distributed.agreement import agree, attempted, gather_texts
from ..distributed.communicator import Communicator
from ..distributed.route import Route
from ..distributed.shard import RowShard
from ..distributed.torch_group import over_torch
from .engine.memory import DTYPES, array_of, in_memory, tensor_of
from .engine.sleep import prepare_rows
from .engine.state import order_in_state, own_rows, whole_table
from .engine.threads import as_torch

_WHERE = "ShardedEmbedding"
_BLOCK = 4_096  # rows that are drawn together


class ShardedEmbedding(nn.Module):
    """``torch.nn.Embedding(sparse=True)`` whose table several processes own, row by row.

    Each process looks up the ids of its part of a batch: forward fetches their rows from their
    owners, backward sends the gradients there, where they are a sparse gradient of `weight`, the
    rows of this process. Optimizers of this package then take the step of one process that has the
    whole table and the batch of all, to the same bits (as long as one backward is one step).

    All processes call forward and backward, and call the embeddings of a model in one order.

    Args:
        num_embeddings: rows of the table, of all processes.
        embedding_dim: length of a row.
        comm: the processes; None: `distributed.over_torch` on the default process group.
        order: which rows a process owns, as in `distributed.RowShard`.
        average: divide gradients by the number of processes, as DistributedDataParallel does
            with those of its parameters; where each process has the mean loss of its part of the
            batch.
        dtype: of the table; None: PyTorch's default.
        seed: of the standard normal numbers that it begins with, which do not depend on the
            number of processes; None: drawn by the first one from PyTorch's generator.

    Attributes:
        weight: the rows of this process, ``[shard.end - shard.begin, embedding_dim]``.
        shard: which these are.

    ``state_dict`` has the whole table as a DTensor, of which each process holds its rows;
    torch.distributed.checkpoint saves and loads it, and the states that an optimizer of this
    package has for it, on any number of processes. There a row is at the place that
    ``shard.places`` says: at its number with ``order="range"``. ``load_state_dict`` also takes a
    whole table, such as that of ``torch.nn.Embedding``.

    `weight` is no parameter for DistributedDataParallel: call `hide_from_ddp` before you wrap the
    model. Of several processes, ``skip_nonfinite`` and `clip_grad_norm_` refuse it: they need the
    gradients of all. A ``GradScaler`` looks at those of its own process, and where only one skips a
    step, tables differ from then on: PyTorch's ``ShardedGradScaler`` lets all skip it.

    Raises:
        TypeError: on a rank, a kind does not fit.
        ValueError: on a rank, a value is out of range or differs from that of rank 0.

    >>> import torch
    >>> from fusestep.nn import distributed
    >>> table = ShardedEmbedding(10, 4, distributed.alone())
    >>> out = table(torch.tensor([[1, 2], [2, 1]]))
    >>> out.shape
    torch.Size([2, 2, 4])
    >>> out.sum().backward()
    >>> table.weight.grad.is_sparse
    True
    """

    mixed_up: tuple[str, ...] = ()  # what a wrapper does to the rows: see `wrappers`

    def __init__(
        self, num_embeddings: int, embedding_dim: int, comm: Communicator | None = None, *,
        order: str = "range", average: bool = False, dtype: torch.dtype | None = None,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        comm = over_torch() if comm is None else comm
        self.shard = RowShard(num_embeddings, comm, order=order)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        seed = int(torch.randint(2**62, ())) if seed is None else seed
        subject = {"embedding_dim": embedding_dim, "average": average, "dtype": dtype}
        _, error = attempted(_check, *subject.values(), seed)
        agree(comm, _WHERE, {name: str(value) for name, value in subject.items()}, error)
        self.num_embeddings, self.embedding_dim = self.shard.rows, int(embedding_dim)
        self.average = average
        self.weight = nn.Parameter(torch.empty(len(self.shard), self.embedding_dim, dtype=dtype))
        self._mark()
        self._draw(int(gather_texts(comm, str(seed))[0]))
        self.register_state_dict_post_hook(_whole)
        self.register_load_state_dict_pre_hook(_own)

    def _mark(self) -> None:
        # For optimizers; a copy of a parameter has no attributes of its own.
        self.weight.row_shard = self.shard

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()

    def _draw(self, seed: int) -> None:
        """Draw the same numbers for a row whoever has it: block by block of the order."""
        begin, end = self.shard.begin, self.shard.end
        for block in range(begin // _BLOCK, -(-end // _BLOCK)):
            first = block * _BLOCK
            generator = np.random.default_rng([seed, block])
            rows = generator.standard_normal((_BLOCK, self.embedding_dim), np.float32)
            low, high = max(first, begin), min(first + _BLOCK, end)
            with torch.no_grad():
                part = torch.from_numpy(rows[low - first : high - first])
                self.weight[low - begin : high - begin] = part

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of ids of any shape: ``[*ids.shape, embedding_dim]``.

        Raises:
            TypeError: on a rank, ids are not int32 or int64.
            IndexError: on a rank, an id is out of range.
            RuntimeError: DistributedDataParallel of several processes has the weight.
        """
        if torch.compiler.is_dynamo_compiling():  # of one process, while others exchange rows
            found: Tensor = _outside_of_graphs(self, ids)
            return found
        if self.mixed_up:
            reject(RuntimeError, _WHERE, *self.mixed_up)
        self._mark()
        route = self.shard.route(ids)
        prepare_rows(self.weight, route.needed)
        return looked_up(self.weight, route, average=self.average)

    def extra_repr(self) -> str:
        """The arguments that PyTorch shows."""
        return f"{self.num_embeddings}, {self.embedding_dim}, shard={self.shard}"

    def get_extra_state(self) -> dict[str, Any]:
        """The order of the rows in ``state_dict``, which belongs to the table."""
        return {"order": order_in_state(self.shard)}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """No effect: rows were taken in this order, or refused, before any was written."""


_outside_of_graphs = outside_of_graphs(ShardedEmbedding.forward)


def _check(embedding_dim: Any, average: Any, dtype: Any, seed: Any) -> None:
    count(_WHERE, "embedding_dim", embedding_dim)
    count(_WHERE, "seed", seed)
    check.flag(_WHERE, "average", average)
    if dtype not in DTYPES:
        reject(TypeError, _WHERE, "dtype", "is unknown", [*DTYPES], dtype)


def looked_up(weight: Tensor, route: Route, *, average: bool) -> Tensor:
    """The rows at the end of a route, whose gradients go back along it."""
    found: Tensor = _Lookup.apply(weight, route, average)
    return found


class _Lookup(torch.autograd.Function):
    """Rows, and their gradients on the way back."""

    @staticmethod
    @as_torch
    def forward(ctx: Any, weight: Tensor, route: Route, average: bool) -> Tensor:
        ctx.weight, ctx.route, ctx.average = weight, route, average
        rows = route.gather(array_of(weight))
        return rows if isinstance(rows, Tensor) else tensor_of(rows)

    @staticmethod
    @once_differentiable
    @as_torch
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        weight = ctx.weight
        if ctx.average:
            gradient = gradient / weight.row_shard.comm.size
        arrival = ctx.route.send_back(array_of(in_memory(gradient)))
        indices, values, _, *places = arrival.wait()
        # A sparse tensor has no room for positions, so they go with the parameter. After a second
        # backward, which adds to the gradient, they do not fit it, and the step does without.
        weight.row_positions = tuple(places)
        indices, values = tensor_of(indices)[None], tensor_of(values)
        if not len(values):  # PyTorch adds to it where it lies, and NumPy's memory cannot grow
            indices, values = indices.clone(), values.clone()
        found = torch.sparse_coo_tensor(indices, values, weight.shape, check_invariants=False)
        return found, None, None


def _whole(module: ShardedEmbedding, state: dict[str, Any], prefix: str, _: Any) -> None:
    name = f"{prefix}weight"
    state[name] = whole_table(state[name], module.shard)


def _own(module: ShardedEmbedding, state: dict[str, Any], prefix: str, *_: Any) -> None:
    name = f"{prefix}weight"
    # PyTorch's own table says nothing: its rows lie by their numbers.
    order = state.setdefault(f"{prefix}_extra_state", {"order": "range"})["order"]
    if name in state:
        state[name] = own_rows(state[name], module.shard, order)
