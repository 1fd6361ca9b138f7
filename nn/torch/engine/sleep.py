"""Lookups and saves of PyTorch's tables whose rows sleep: they bring rows up to date."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.private import outside_of_graphs, version_of
from ....ops.runtime import check
from ....ops.runtime.arrays import address_of, adopt
from ....ops.runtime.bags.ids import HostIds
from ....ops.runtime.bags.pooling import Pooling
from ...base.ids.id_map import IdMap
from ...engine.catch_up import spans_of
from .memory import array_of


class WatchedTable:
    """A table whose rows sleep, and the optimizer whose steps they may have missed.

    Attributes:
        woken: how often rows were brought up to date.
        awake: the count of steps, and the version of the last steps, at which no row slept.
    """

    def __init__(self, parameter: Tensor, optimizer: Any) -> None:
        key = id(parameter)
        # Its number may be another tensor's when it is gone.
        self.parameter = weakref.ref(parameter, lambda _: _sleeping.pop(key, None))
        self.optimizer, self.woken = weakref.ref(optimizer), 0
        self.awake: tuple[float, int] | None = None


_sleeping: dict[int, WatchedTable] = {}
"""By the identity of a parameter that is alive."""


def sleeping_of(parameter: Tensor) -> WatchedTable | None:
    """The record of a table whose rows sleep; None of any other one."""
    table = _sleeping.get(id(parameter))
    return table if table is not None and table.parameter() is parameter else None


def sleeper_of(parameter: Tensor) -> Any:
    """The optimizer whose steps rows of a parameter may have missed, if there is one."""
    table = sleeping_of(parameter)
    return None if table is None else table.optimizer()


def look_after(parameter: Tensor, optimizer: Any) -> None:
    """Let lookups of a table in whose rows steps may be missing find this optimizer."""
    if sleeper_of(parameter) is not optimizer:
        _sleeping[id(parameter)] = WatchedTable(parameter, optimizer)


def changes_of(parameter: Tensor) -> int:
    """How often the rows that a lookup has read may have changed since."""
    # Those that others bring up to date later are not among them.
    table, version = sleeping_of(parameter), version_of(parameter)
    return int(version if table is None else version - table.woken)


def prepare_rows(weight: Tensor, ids: Any, where: str = "") -> None:
    """Bring rows of a table up to date before they are read, whoever its optimizer is.

    Ids are checked if ``where`` says whose they are; else the lookup itself refuses bad ones.
    """
    sleeper = sleeper_of(weight)
    if sleeper is None and not where:
        return
    if isinstance(ids, Tensor):
        rows = array_of(ids.detach().contiguous())
    else:
        rows = check.contiguous(adopt(where or "a lookup", "ids", ids))
    check.index_dtype(where or "a lookup", rows)
    if where:
        check.indices_in_range(where, rows.reshape(-1), len(weight))
    if sleeper is not None:
        sleeper.prepare_spans(weight, [(address_of(rows), rows.itemsize, rows.size)])


def prepare_bags(pooling: Pooling, lists: HostIds, weights: Sequence[Tensor]) -> None:
    """Bring the rows of bags up to date before they are pooled."""
    if not _sleeping:
        return
    for k, spans in spans_of(pooling, lists).items():
        if (sleeper := sleeper_of(weights[k])) is not None:
            sleeper.prepare_spans(weights[k], spans)


def watch_lookups(module: nn.Module) -> list[Any]:
    """Hooks of the lookups in a module that bring rows up to date; those of bags do it anyway."""
    inner = [id(m) for bags in module.modules() if hasattr(bags, "update_in_backward")
             for m in bags.children()]  # fmt: skip
    lookups = [
        m
        for m in module.modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag)
        and not (id(m) in inner or isinstance(getattr(m, "ids", None), IdMap))
    ]
    return [m.register_forward_pre_hook(_before_lookup, with_kwargs=True) for m in lookups]


def watch_saves(module: nn.Module, parameters: Iterable[Tensor]) -> list[Any]:
    """Hooks of the modules that have any of the parameters, by which rows are saved up to date."""
    tables = {*map(id, parameters)}
    owners = [m for m in module.modules() if any(id(p) in tables for p in m.parameters(False))]
    return [m.register_state_dict_pre_hook(_before_saving) for m in owners]


def _before_lookup(module: Any, args: Any, kwargs: Any) -> None:
    lookup = module.weight, args[0] if args else kwargs["input"]
    if torch.compiler.is_dynamo_compiling():
        _outside_of_graphs(*lookup)
    else:
        prepare_rows(*lookup)


def _before_saving(module: nn.Module, *_: Any) -> None:
    for parameter in module.parameters(recurse=False):
        if (sleeper := sleeper_of(parameter)) is not None:
            sleeper.flush_table(parameter)


_outside_of_graphs: Any = outside_of_graphs(prepare_rows)
