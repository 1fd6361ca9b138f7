"""Models in wrappers of PyTorch that take rows of tables by their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from operator import gt
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

from ...kernels.private import hider
from ...ops.runtime.errors import reject
from ..base.arguments import check_kind
from .embedding import ShardedEmbedding
from .engine.memory import tensor_of
from .engine.sleep import sleeper_of
from .growing import GrowingEmbedding

_Model = TypeVar("_Model", bound=nn.Module)
_hide = hider()


def hide_from_ddp(model: _Model) -> _Model:
    """Hide the tables that processes share from DistributedDataParallel, before the wrap.

    These are the weights of each `ShardedEmbedding`, and of each `GrowingEmbedding` with ``comm``.
    What is hidden already stays so. Lookups of tables that are not hidden raise in a wrapper of
    several processes.

    Args:
        model: what DistributedDataParallel is to wrap.

    Returns:
        The model.

    Raises:
        TypeError: it is no module.
        ValueError: it is wrapped already.
        RuntimeError: this PyTorch hides nothing.

    >>> from fusestep.nn import distributed
    >>> table = GrowingEmbedding(1000, 4, comm=distributed.alone())
    >>> model = hide_from_ddp(nn.Sequential(table, nn.Linear(4, 1)))
    """
    where = "hide_from_ddp"
    check_kind(where, "model", model, nn.Module, "a module")
    if isinstance(model, DistributedDataParallel):
        reject(ValueError, where, "model", "is wrapped", "what is to be wrapped", "the wrapper")
    if _hide is None:
        raise RuntimeError(f"{where}: this PyTorch hides nothing from DistributedDataParallel")
    tables = [m for m in model.modules() if isinstance(m, ShardedEmbedding | GrowingEmbedding)]
    weights = {id(m.weight) for m in tables if m.shard is not None}
    every = model.named_parameters(remove_duplicate=False)
    names = [name for name, p in every if id(p) in weights]
    # The wrapper knows a parameter of the model itself by both names.
    _hide(model, [*names, *(f".{name}" for name in names if "." not in name)])
    return model


class averaged(AveragedModel):  # noqa: N801
    """PyTorch's ``AveragedModel``, with the rows of each `GrowingEmbedding` averaged by id.

    After `update_parameters` tables have the ids of those of the model. The row of an id is its
    mean over the updates in which it has had a row without a break; their number is what ``avg_fn``
    gets. Tables admit nothing, in training mode neither. Rows of the model that sleep are brought
    up to date. PyTorch's own class averages rows by their numbers, which belong to other ids over
    time: lookups in its copy raise.

    Args:
        model, device, avg_fn, multi_avg_fn, use_buffers: as PyTorch's class. Tables of the average
            use the memory of all their rows.

    >>> table = GrowingEmbedding(1000, 4)
    >>> average = averaged(table)
    >>> for k in range(3):
    ...     out = table(torch.tensor([2**62, k]))
    ...     average.update_parameters(table)
    >>> torch.equal(average(torch.tensor([2])), table(torch.tensor([2])))
    True
    """

    _times: Sequence[Tensor] = ()  # for each table: in how many updates each of its rows was

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all but the tables that grow."""
        super().train(mode)
        for table in _growing(self):
            table.eval()
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """In how many updates the rows of tables were."""
        return {"times": [*self._times]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go on with what was saved."""
        self._times = [*state["times"]]

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Take the parameters of a model into the mean.

        Raises:
            ValueError: it has other tables. Nothing has changed then.
        """
        mine, theirs = _growing(self), _growing(model)
        every = self._times or [torch.zeros(len(m.weight), dtype=torch.int64) for m in mine]
        got, expected = ([tuple(m.weight.shape) for m in tables] for tables in (mine, theirs))
        if not len(mine) == len(theirs) == len(every) or any(map(gt, got, expected)):
            reject(ValueError, "averaged", "tables", "do not fit the model", expected, got)
        for sleeper in {sleeper_of(p) for p in model.parameters()}:
            if sleeper is not None:
                sleeper.flush()
        means = [*map(self._mean, mine, theirs, every)]
        for table, (n, _) in zip(mine, expected, strict=True):
            if n > len(table.weight):
                table.grow(n)
        super().update_parameters(model)  # of rows by their numbers: what follows is by ids
        for table, other, (state, rows, mean, _) in zip(mine, theirs, means, strict=True):
            table.ids.load_state_dict(state)
            table._begin_seed(other.ids.seed)
            table.weight[rows], table._as_copied = mean, -1
        self._times = [times for *_, times in means]

    def _mean(
        self, mine: GrowingEmbedding, theirs: GrowingEmbedding, times: Tensor
    ) -> tuple[dict[str, Any], Tensor, Tensor, Tensor]:
        """The map of a table, its rows in use, their means, and times with this update."""
        state = theirs.ids.state_dict()
        rows, before = (tensor_of(x).long() for x in (state["rows"], mine.ids.find(state["ids"])))
        means, times = theirs.weight[rows], times[before]
        # Ids that have come back since the last update begin anew.
        lost = state["removed"][state["removed_steps"] > mine.ids.step]
        times[tensor_of(np.isin(state["ids"], lost))] = 0
        for n in times.unique():
            same = times == n
            old, new = mine.weight[before[same]], means[same]
            if n and self.multi_avg_fn is not None:
                self.multi_avg_fn([old], [new], n)
                means[same] = old
            elif n:
                means[same] = (self.avg_fn or get_swa_avg_fn())(old, new, n)
        of_rows = times.new_zeros(int(state["next_row"][0])).index_copy(0, rows, times + 1)
        return state, rows, means, of_rows


def _growing(model: nn.Module) -> list[GrowingEmbedding]:
    return [m for m in model.modules() if isinstance(m, GrowingEmbedding)]


def _look_at(parent: Any, _: str, child: Any) -> None:
    """Mark tables that a wrapper mixes up: lookups raise."""
    if child is None:
        return
    if isinstance(parent, averaged):
        for table in _growing(child):
            table.eval()
    elif isinstance(parent, AveragedModel):
        for table in _growing(child):
            table.mixed_up = _OF_MEANS
    if not isinstance(parent, DistributedDataParallel):
        return
    if dist.get_world_size(parent.process_group) > 1:
        shown = {
            id(p)
            for name, module in child.named_modules()
            for label, p in module.named_parameters(recurse=False)
            if f"{name}.{label}" not in parent.parameters_to_ignore
        }
        for table in child.modules():
            if isinstance(table, ShardedEmbedding | GrowingEmbedding):
                is_shared = table.shard is not None and table.shard.comm.size > 1
                if is_shared and id(table.weight) in shown:
                    table.mixed_up = _SHOWN
                if not is_shared and isinstance(table, GrowingEmbedding):
                    table.mixed_up = _ALONE


_OF_MEANS = (
    "the table", "is in an AveragedModel, where rows are averaged by their numbers",
    "nn.torch.averaged(model), whose means are by id", "PyTorch's class",
)  # fmt: skip
_ALONE = (
    "the table", "is in DistributedDataParallel, where gradients meet by the numbers of rows",
    "comm=..., with which processes share ids", "none: each hands out rows of its own",
)  # fmt: skip
_SHOWN = (
    "the weight", "is not hidden from DistributedDataParallel",
    "nn.torch.hide_from_ddp(model) before the wrap", "none",
    ": processes have the rows of rank 0 now, so make the model anew",
)  # fmt: skip

# PyTorch calls this when a wrapper gets its model, so before the wrapper sends or averages rows.
register_module_module_registration_hook(_look_at)
