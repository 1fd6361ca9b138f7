"""Rows of PyTorch's tables that sleep while they have no gradient: see `nn.engine.catch_up`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ....kernels.cpu.rows.catch_up import CatchUp
from ....kernels.cpu.threads.parallel import commit
from ....kernels.idle_table import SLEEP
from ....kernels.private import outside_of_graphs, version_of
from ....kernels.rule import Rule
from ....kernels.storage import STORAGES, real_of
from ....ops.runtime import check
from ....ops.runtime.arrays import address_of, adopt
from ....ops.runtime.bags.ids import HostIds
from ....ops.runtime.bags.pooling import Pooling
from ....ops.runtime.errors import reject
from ....ops.runtime.row_step import Update
from ...base.id_map import IdMap
from ...engine.catch_up import (
    LAST,
    SCALARS,
    MissedSteps,
    NextStep,
    Table,
    check_last,
    scalars_of,
    spans_of,
)
from .declaration import Declaration
from .files import map_scalars
from .memory import DTYPES, array_of, check_there, tensor_of
from .options import check_group, check_rounding
from .part import ParameterBatch, RuleChoice, StepInputs, number
from .state import check_states, group_of, place_of
from .tensors import local
from .threads import as_torch


class _Sleeping:
    """A table whose rows sleep, and the optimizer whose steps they may have missed."""

    def __init__(self, parameter: Tensor, optimizer: Sleeper) -> None:
        key = id(parameter)
        # Its number may be another tensor's when it is gone.
        self.parameter = weakref.ref(parameter, lambda _: _sleeping.pop(key, None))
        self.optimizer, self.woken = weakref.ref(optimizer), 0


_sleeping: dict[int, _Sleeping] = {}
"""By the identity of a parameter that is alive."""


def _found(parameter: Tensor) -> _Sleeping | None:
    known = _sleeping.get(id(parameter))
    return known if known is not None and known.parameter() is parameter else None


def sleeper_of(parameter: Tensor) -> Sleeper | None:
    """The optimizer whose steps rows of a parameter may have missed, if there is one."""
    known = _found(parameter)
    return None if known is None else known.optimizer()


def changes_of(parameter: Tensor) -> int:
    """How often the rows that a lookup has read may have changed since."""
    # Those that others bring up to date later are not among them.
    known, version = _found(parameter), version_of(parameter)
    return int(version if known is None else version - known.woken)


class _Bound(NamedTuple):
    """A table, and the tensor of the last steps of its rows."""

    table: Table
    last: Tensor

    def is_at(self, places: Sequence[int], last: Any, n: int) -> bool:
        """Whether parameter and states still lie there, and the last steps are this tensor."""
        known = self.table.places
        return known.addresses == tuple(places) and last is self.last and known.rows == n


class Sleeper(Declaration):
    """The part of an optimizer that brings rows up to date."""

    _missed: MissedSteps
    # What was chosen for a parameter by the steps that its rows may have missed.
    _tables: dict[Tensor, tuple[RuleChoice, Rule, _Bound]]

    def prepare(self, parameter: Tensor, ids: Any) -> None:
        """Bring rows of a table up to date with ``sparse="catch_up"``, before they are read.

        Rows for which nothing is due are not written, and autograd sees no change. With another
        ``sparse`` none is ever behind, and nothing is done. `watch` calls it for modules;
        `EmbeddingBags` and `ShardedEmbedding` call it themselves.

        Args:
            parameter: a parameter of the optimizer.
            ids: int32 or int64 of any shape, on the host: the numbers of the rows.

        Raises:
            TypeError: ``ids`` are no int32 or int64.
            ValueError: ``parameter`` is none of the optimizer's.
            IndexError: an id is out of range.
            Nothing has been written then.
        """
        where = f"{type(self).__name__}.prepare"
        if place_of(self.param_groups, parameter) is None:
            reject(ValueError, where, "parameter", "is foreign", "one of the groups", "another")
        prepare_rows(parameter, ids, where)

    def flush(self) -> None:
        """Bring all rows up to date with ``sparse="catch_up"``; else none is ever behind."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        behind = [p for p in parameters if LAST.name in self.state.get(p, {})]
        self._catch_up([(p, self._missed.of_all(self._table(p, may_move=True))) for p in behind])

    def watch(self, module: nn.Module) -> list[Any]:
        """Let lookups of ``nn.Embedding`` and ``nn.EmbeddingBag`` bring their rows up to date.

        Every ``nn.Embedding`` and ``nn.EmbeddingBag`` in ``module`` gets a forward pre-hook. A
        lookup by ``torch.nn.functional`` is seen by nobody: call `prepare` before it.

        Args:
            module: a module, or one that contains them.

        Returns:
            A handle of each hook, with ``remove()``.

        Raises:
            ValueError: no table in it is the optimizer's.
        """
        own = {id(p) for group in self.param_groups for p in group["params"]}
        inner = [id(m) for bags in module.modules() if hasattr(bags, "update_in_backward")
                 for m in bags.children()]  # fmt: skip
        found = [
            m
            for m in module.modules()
            if isinstance(m, nn.Embedding | nn.EmbeddingBag)
            and not (id(m) in inner or isinstance(getattr(m, "ids", None), IdMap))
        ]
        if not any(id(p) in own for p in module.parameters()):
            where, expected = f"{type(self).__name__}.watch", "a table of the optimizer"
            reject(ValueError, where, "module", "has no table to watch", expected, "others")
        return [m.register_forward_pre_hook(_before_lookup, with_kwargs=True) for m in found]

    # Tables

    def _table(self, parameter: Tensor, *, may_move: bool = False) -> Table:
        """A table as the steps have left it that its rows may have missed."""
        known = self._tables.get(parameter)
        if known is not None:
            choice, rule, _ = known
        else:
            choice = self._choice(group_of(self.param_groups, parameter))
            if parameter in self._copies:
                choice = choice.with_copy()
            rule = choice.rule
        state = self.state[parameter]
        now = int(number(state["step"]))
        return self._table_of(parameter, choice, rule, state, now, may_move=may_move)

    def _table_of(
        self, parameter: Tensor, choice: RuleChoice, rule: Rule, state: Mapping[str, Any], now: int,
        *, may_move: bool = False,
    ) -> Table:  # fmt: skip
        where, last = type(self).__name__, state.get(LAST.name)
        tensors = [parameter, *(state[name] for name in choice.states)]
        for tensor in (*tensors, last):
            if isinstance(tensor, Tensor):
                check_there(where, "a table or its state", tensor)
        places = [tensor.data_ptr() for tensor in tensors]
        known = self._tables.get(parameter)
        self._check_other(parameter, "a table")
        if known is not None and known[1] is rule and known[2].is_at(places, last, len(parameter)):
            self._look_after(parameter)
            return known[2].table._replace(now=now)
        has_moved = known is not None and known[2].table.places.addresses[0] != places[0]
        if has_moved and not may_move and self.is_asleep(parameter):
            expected, got = "its memory of before; flush() goes on with what is there", "another"
            reject(RuntimeError, where, "a table", "was rebound while rows sleep", expected, got)
        real = real_of(STORAGES[DTYPES[parameter.dtype]]).dtype
        if self._missed.differs(parameter, rule, real) and self.is_asleep(parameter):
            expected, got = "the options and dtype of before; flush() before they change", "others"
            reject(RuntimeError, where, "a table", "has rows that sleep", expected, got)
        n = len(parameter)
        if not isinstance(last, Tensor) or last.dtype != torch.int32 or last.shape != (n,):
            expected, got = f"int32 of shape ({n},)", type(last).__name__
            label = f"state {LAST.name!r}"
            reject(RuntimeError, where, label, "does not fit its table", expected, got)
        self._missed.add(parameter, rule, real, now)
        map_scalars(self, parameter)
        arrays = [array_of(tensor.detach()) for tensor in tensors]
        table = Table.of(parameter, rule, arrays, array_of(last), now)
        self._tables[parameter] = choice, rule, _Bound(table, last)
        self._look_after(parameter)
        return table

    def behind(
        self, given: StepInputs, updates: Iterable[tuple[ParameterBatch, Update]],
        steps: float | list[float],
    ) -> Sequence[CatchUp]:  # fmt: skip
        """Catching up, to be done before these updates of a step."""
        found = []
        for part, update in updates:
            gradients: Any = update.gradients if part.batch.row_sparse else repeat(None)
            each = zip(part.batch.positions.tolist(), part.places, scalars_of(update), gradients,
                       strict=False)  # fmt: skip
            for i, place, own, g in each:
                parameter = given.parameters[i]
                state = given.new.get(parameter) or self.state[parameter]
                now = int(steps if isinstance(steps, float) else steps[place]) - 1
                table = self._table_of(parameter, part.choice, part.rule, state, now)
                found.append(NextStep(table, own, g and g.source))
        return [*self._missed.before(found)]

    @as_torch
    def _catch_up(self, each: Sequence[tuple[Tensor, CatchUp]]) -> None:
        commit([own for _, own in each])
        # What autograd has saved of a table is another one now.
        for parameter, own in each:
            if own.found_any:
                if known := _found(parameter):
                    known.woken += 1
                torch.autograd.graph.increment_version(parameter)

    def prepare_spans(self, parameter: Tensor, spans: Iterable[tuple[int, int, int]]) -> None:
        """Bring rows up to date: address and bytes of lists of ids, and how many there are."""
        if LAST.name not in self.state.get(parameter, {}):
            return  # no row has missed anything
        table = self._table(parameter)
        self._catch_up([(parameter, self._missed.of_span(table, span)) for span in spans])

    # Options and state

    def _check_sleep(
        self, group: Mapping[str, Any], choice: RuleChoice, name: str, parameter: Tensor
    ) -> None:
        """Refuse what rows that sleep cannot have, and tables whose rows others have missed."""
        where, option = type(self).__name__, "sparse='catch_up'"
        self._check_other(parameter, name)
        if not choice.sleeps:
            if self.is_asleep(parameter):
                expected, got = "none: flush() before `sparse` changes", "some"
                reject(RuntimeError, where, name, "has rows that sleep", expected, got)
            self._forget(parameter)
            return
        is_whole = local(parameter) is parameter and parameter.is_contiguous()
        if parameter.is_cuda or not is_whole or parameter.dim() == 0:
            expected = "a contiguous table of one process on the host"
            reject(RuntimeError, where, name, f"does not fit {option}", expected, "another")
        if group["rounding"] == "stochastic":
            reject(ValueError, where, option, "excludes random bits", "another rounding", "it")

    def _check_other(self, parameter: Tensor, name: str) -> None:
        """Refuse a table whose rows sleep in another optimizer."""
        other = sleeper_of(parameter)
        if other is not None and other is not self and other.is_asleep(parameter):
            expected, got = "none: flush() of that one", f"those of a {type(other).__name__}"
            reject(RuntimeError, type(self).__name__, name, "has rows that sleep", expected, got)

    def _new_last(self, parameter: Tensor, step: int) -> Tensor:
        self._missed.drop(parameter)
        make, shape = self._making(parameter, LAST.name), tuple(parameter.shape[:1])
        if make is None:
            return parameter.new_full(shape, step, dtype=torch.int32)
        return tensor_of(make(shape, np.dtype(np.int32), step))

    def _forget(self, parameter: Tensor) -> None:
        """Forget how far the rows of a parameter are: they take all steps from now on."""
        self.state.get(parameter, {}).pop(LAST.name, None)
        self._tables.pop(parameter, None)
        self._missed.drop(parameter)

    def _look_after(self, parameter: Tensor) -> None:
        """Let lookups of a table in whose rows steps may be missing find this optimizer."""
        if sleeper_of(parameter) is not self:
            _sleeping[id(parameter)] = _Sleeping(parameter, self)

    def _look_after_all(self) -> None:
        for parameter, state in self.state.items():
            if isinstance(state, dict) and LAST.name in state:
                self._look_after(parameter)

    def is_asleep(self, parameter: Tensor) -> bool:
        """Whether a row of a parameter has missed a step."""
        state = self.state.get(parameter, {})
        last = state.get(LAST.name)
        return last is not None and bool((last < int(number(state["step"]))).any())

    def _with_scalars(self, state_dict: dict[str, Any], *, flush: bool) -> dict[str, Any]:
        """A state dict with the scalars of missed steps, or without a trace of them."""
        states = dict(state_dict["state"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                if parameter not in self._missed.tables or key not in states:
                    continue
                if flush:
                    states[key] = {k: x for k, x in states[key].items() if k != LAST.name}
                else:
                    given = torch.from_numpy(self._missed.tables[parameter].given.copy())
                    states[key] = {**states[key], SCALARS: given}
        return {**state_dict, "state": states}

    def _begin_asleep(self, saved: Mapping[Any, Any], keys: Iterable[tuple[Tensor, Any]]) -> None:
        """Go on with the scalars of missed steps of a state that was loaded."""
        self._missed.part()
        steps = {}
        for parameter, key in keys:
            scalars = saved.get(key, {}).get(SCALARS)
            state = self.state.get(parameter, {})
            state.pop(SCALARS, None)
            if scalars is None:  # of a state whose rows have taken all steps
                self._forget(parameter)
            else:
                table = self._table(parameter)
                self._missed.scalars(parameter)[...] = np.asarray(scalars)
                steps[parameter] = table.now
        self._missed.begin(steps)
        for parameter in steps:
            last = array_of(self.state[parameter][LAST.name])
            self._missed.wake_late(self._table(parameter), last)

    def _check_loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse options and states of a state dict that the groups cannot have.

        Raises:
            TypeError: the states of a parameter are no dict.
            ValueError: an option or a shape does not fit, or nothing tells what rows have missed.
        """
        where, states = type(self).__name__, state_dict["state"]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            known = {**group, **saved, "params": ()}
            check_group(where, known, takes_sparse=self._takes_sparse)
            check_states(where, saved["params"], states)
            method = self.method(known)
            for k, parameter in enumerate(group["params"]):
                check_rounding(where, known, method.rule, f"parameter {k}", parameter)
            rule = self._choice(known).rule
            for parameter, key in zip(group["params"], saved["params"], strict=False):
                _check_asleep(where, rule, parameter, states.get(key, {}))
            self._check_shapes(known, zip(group["params"], saved["params"], strict=False), states)


def _check_asleep(where: str, rule: Rule, parameter: Tensor, state: Mapping[str, Any]) -> None:
    """Refuse a saved state of a parameter that does not tell what its rows have missed.

    Raises:
        ValueError: it is such a one.
    """
    last, label = state.get(LAST.name), f"state {LAST.name!r}"
    if last is not None:
        shapes = {LAST.name: tuple(parameter.shape[:1]), SCALARS: (SLEEP, len(rule.hp) + 1)}
        for name in shapes.keys() & state.keys():
            if (got := np.shape(state[name])) != shapes[name]:
                reject(ValueError, where, f"state {name!r}", "has a wrong shape", shapes[name], got)
        step = int(number(state["step"]))
        check_last(where, label, np.asarray(last), step)
        if SCALARS not in state and bool((last < step).any()):
            expected = f"state {SCALARS!r} beside it, or state_dict(flush=True)"
            reject(ValueError, where, label, "has rows that sleep", expected, "none")


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


def prepare_bags(pooling: Pooling, given: HostIds, weights: Sequence[Tensor]) -> None:
    """Bring the rows of bags up to date before they are pooled."""
    if not _sleeping:
        return
    for k, spans in spans_of(pooling, given).items():
        if (sleeper := sleeper_of(weights[k])) is not None:
            sleeper.prepare_spans(weights[k], spans)


def _before_lookup(module: Any, args: Any, kwargs: Any) -> None:
    given = module.weight, args[0] if args else kwargs["input"]
    if torch.compiler.is_dynamo_compiling():
        _outside_of_graphs(*given)
    else:
        prepare_rows(*given)


_outside_of_graphs: Any = outside_of_graphs(prepare_rows)
