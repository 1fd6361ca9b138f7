"""Rows of PyTorch's tables that begin anew, or as copies of others."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....kernels.cpu.threads.parallel import Prepared, commit
from ....kernels.keeping import COPY
from ....kernels.state import PARAMETER
from ....ops.runtime.errors import reject
from ...engine.catch_up import LAST
from ...engine.row_reset import RowState, copied, grown, more_rows, reset
from .memory import array_of, tensor_of
from .part import number
from .sleep import Sleeper
from .state import group_of, place_of
from .tensors import local
from .threads import as_torch

_lock = threading.Lock()
_alive: list[weakref.ref[TableRows]] = []  # exchanged, never changed: readers take no lock


def optimizers_of(parameter: Tensor) -> list[TableRows]:
    """The optimizers of a parameter."""
    every = [optimizer() for optimizer in _alive]
    return [o for o in every if o is not None and place_of(o.param_groups, parameter) is not None]


class TableRows(Sleeper):
    """The part of an optimizer that resets and copies rows."""

    _n_taken = 0  # steps of this object

    def _join(self) -> None:
        """Be found by `optimizers_of`."""
        global _alive
        with _lock:
            _alive = [*(o for o in _alive if o() not in (None, self)), weakref.ref(self)]

    def reset_rows(
        self, parameter: Tensor, rows: Any, weights: Any = None, *, ids: Any = None
    ) -> None:
        """Begin rows of a table anew, as if they had never been updated.

        Their states begin as at the first step, those of elements and of rows: moments and counts,
        what lies beside the weights, and the steps that rows have missed.

        Args:
            parameter: a contiguous parameter of the optimizer, on the host.
            rows: int32 or int64: different row numbers.
            weights: of these rows: a number, a tensor ``[len(rows), ...]``, or a function
                ``weights(ids, shape)`` of NumPy's array and a shape that makes an array, such as
                `fusestep.nn.UniformRows`. None: they stay as they are.
            ids: integers, one for each row, for that function; default the row numbers.

        Raises:
            TypeError: a kind or dtype does not fit.
            ValueError: a shape does not fit, a row occurs twice, or ``parameter`` is none of the
                optimizer's.
            IndexError: a row is out of range.
            RuntimeError: the parameter is elsewhere, or not contiguous.
            Nothing has been written then.
        """
        where = f"{type(self).__name__}.reset_rows"
        w, known = self._rows_of(where, parameter)
        states, rows, ids = [*known.values()], _array(rows), _array(ids)
        given = (lambda *of: _array(weights(*of))) if callable(weights) else _array(weights)
        if weights is None:
            self._wake(parameter, rows)
        self._write_rows(parameter, lambda: reset(where, w, states, rows, given, ids))

    def copy_rows(self, parameter: Tensor, source: Any, target: Any) -> None:
        """Let rows of a table become copies of others, with all that is kept for them.

        Args:
            parameter: a contiguous parameter of the optimizer, on the host.
            source: int32 or int64: row numbers.
            target: different row numbers, as many; rows are read before any is written.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError: as `reset_rows`.
        """
        where = f"{type(self).__name__}.copy_rows"
        w, known = self._rows_of(where, parameter)
        source, target = _array(source), _array(target)
        self._wake(parameter, source)
        arrays = [w, *(state.array for state in known.values())]
        self._write_rows(parameter, lambda: copied(where, arrays, source, target))

    def grow(self, parameter: Tensor, rows: int) -> None:
        """Give a table more rows: its data and all that is kept for its rows move to new tensors.

        The new rows have weights of 0, and states as at the first step. They take memory when they
        are used, where they are 0.

        Args:
            parameter: a contiguous parameter of the optimizer, on the host, without a gradient.
            rows: above the number of rows of now, below 2**31.

        Raises:
            TypeError, ValueError: ``rows`` does not fit, or ``parameter`` is none of the
                optimizer's.
            RuntimeError: the parameter is elsewhere or not contiguous, or has a gradient or one of
                ``copies``.
            Nothing has changed then.
        """
        where = f"{type(self).__name__}.grow"
        w, known = self._rows_of(where, parameter)
        n = more_rows(where, rows, len(w))
        if parameter.grad is not None or COPY.name in known:
            expected = "one without a gradient and copies"
            reject(RuntimeError, where, "parameter", "cannot grow", expected, "another")
        if self._files is not None:
            self._files.files.write("states that have moved into memory", for_good=True)
        made = {role: tensor_of(grown(own.array, n, own.initial)) for role, own in known.items()}
        parameter.data = tensor_of(grown(w, n, 0.0))
        self.state.get(parameter, {}).update(made)
        if LAST.name in made:
            table = self._table(parameter, may_move=True)
            self._missed.wake_late(table, array_of(made[LAST.name]))

    def _rows_of(self, where: str, parameter: Tensor) -> tuple[Any, dict[str, RowState]]:
        """The array of a table, and the states that have something for each row."""
        group, state = group_of(self.param_groups, parameter), self.state.get(parameter, {})
        if group is None:
            reject(ValueError, where, "parameter", "is foreign", "one of the groups", "another")
        is_here = local(parameter) is parameter and not parameter.is_cuda and parameter.dim()
        if not is_here or not parameter.is_contiguous():
            expected = "a contiguous table of one process on the host"
            reject(RuntimeError, where, "parameter", "does not fit", expected, "another")
        choice = self._choice(group)
        named = dict(zip(choice.states, choice.rule.states, strict=True))
        found = {}
        for role, tensor in state.items():
            if not isinstance(tensor, Tensor) or tensor.shape[:1] != parameter.shape[:1]:
                continue
            if role == LAST.name:
                initial: Any = number(state["step"])
            elif role == COPY.name:
                initial = PARAMETER
            elif role in named and named[role].per in ("element", "row"):
                is_weight = named[role].initial == PARAMETER
                initial = PARAMETER if is_weight else self.initial(role, group)
            else:
                continue
            found[role] = RowState(array_of(tensor.detach()), initial)
        return array_of(parameter.detach()), found

    def _wake(self, parameter: Tensor, rows: Any) -> None:
        """Bring rows up to date whose weights are read."""
        if LAST.name in self.state.get(parameter, {}):
            self.prepare(parameter, torch.as_tensor(rows))

    @as_torch
    def _write_rows(self, parameter: Tensor, make: Callable[[], Prepared]) -> None:
        commit([make()])
        torch.autograd.graph.increment_version(parameter)


def _array(value: Any) -> Any:
    return array_of(value.detach().contiguous()) if isinstance(value, Tensor) else value
