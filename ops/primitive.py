"""The common base of operators, and the two ways in which one applies a rule."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ..kernels.cpu.headers.arrays import alike
from ..kernels.cpu.rows.arguments import RowTables
from ..kernels.element import kernel
from ..kernels.rule import Prologue, Rule
from ..kernels.storage import F32, STORAGES
from ..kernels.tables import RowSource, table_sizes
from .docstrings import complete_operator
from .runtime import check
from .runtime.arrays import adopt_anywhere
from .runtime.device import DeviceArray, alike_on_device, device_of
from .runtime.errors import RejectedValueError, reject, reject_unknown
from .runtime.row_step import RowGradient, RowUpdate, check_keys, run_updates
from .runtime.step import tensor_step

Named = dict[str, Any]
"""Checked variables of one dtype and shape by their names, the parameter first."""
_FIRST = np.zeros(1, np.int64)


@lru_cache(256)
def _sizes_of(shape: tuple[int, ...]) -> array[int]:
    return array("q", table_sizes([shape]).tobytes())


class Primitive:
    """A stateless operator that updates its variables in place.

    Attributes:
        use_locking: whether calls are serialised with others that say so
            (`fusestep.ops.runtime.locks`).
        name: the operator's name, for messages.
    """

    use_locking: bool
    _only_float32 = False  # as the fused operators are published

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        complete_operator(cls, only_float32=cls._only_float32)

    def __init__(self, use_locking: bool = False, **unknown: Any) -> None:
        self.name = type(self).__name__
        reject_unknown(self.name, unknown, type(self))
        self.use_locking = check.flag(self.name, "use_locking", use_locking)

    def __repr__(self) -> str:
        published = inspect.signature(type(self)).parameters
        attributes = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if k in published)
        return f"{self.name}({attributes})"

    def _scalars(self, **values: Any) -> tuple[float, ...]:
        return tuple([check.scalar(self.name, name, value) for name, value in values.items()])

    def _at_least_0(self, name: str, value: Any) -> float:
        return check.scalar_at_least_0(self.name, name, value)

    def _variables(self, **values: Any) -> Named:
        arrays = tuple(values.values())
        # One compiled check of all of them where nothing is wrong; whatever it does not know goes
        # through the checks, which say what is wrong or find that nothing is.
        if alike(arrays, len(arrays)) is None:
            there = alike_on_device(arrays)
            if there is not None:
                return dict(zip(values, there, strict=True))
            values = {name: check.variable(self.name, name, x) for name, x in values.items()}
            check.same_layout(self.name, values)
        return values

    def _apply_dense(
        self, rule: Rule, variables: Named, hp: Sequence[float], name: str, gradient: Any,
        prologue: Prologue = (),
    ) -> None:  # fmt: skip
        """Check the gradient and apply ``rule`` to the variables in place."""
        arrays = (*variables.values(), gradient)
        addresses = alike(arrays, len(variables))
        if addresses is None:
            arrays, addresses = self._checked_dense(variables, name, gradient)
        tensor_step(rule, prologue, arrays, addresses, hp, use_locking=self.use_locking)

    def _checked_dense(
        self, variables: Named, name: str, gradient: Any
    ) -> tuple[tuple[Any, ...], list[int]]:
        """The variables and the checked gradient, and their addresses."""
        w = next(iter(variables.values()))
        if type(w) is DeviceArray:
            gradient = adopt_anywhere(self.name, name, gradient)
        # One of the layout of the parameter fits it, and lies on its device.
        if not (type(gradient) is type(w) is DeviceArray and gradient.layout is w.layout):
            gradient = check.gradient(self.name, name, gradient, w.dtype, w.shape)
            if DeviceArray in (type(w), type(gradient)):
                device_of(self.name, {**variables, name: gradient})
        arrays = (*variables.values(), gradient)
        return arrays, check.no_overlap(self.name, [*variables, name], arrays)


class RowPrimitive(Primitive):
    """An operator on row-sparse gradients.

    Attributes:
        out_of_range: what to do with indices outside of ``[0, N)``: ``"raise"`` or ``"drop"``.
    """

    out_of_range = "raise"
    _touched_only = True  # else all rows take the step

    def _variables(self, **values: Any) -> Named:
        variables = super()._variables(**values)
        name, w = next(iter(variables.items()))  # all are of one dtype
        if self._only_float32 and w.dtype != F32.dtype:
            fix = "; the optimizers of fusestep.nn take other dtypes"
            reject(TypeError, self.name, name, "has a wrong dtype", "float32", w.dtype, fix)
        return variables

    def _apply_rows(self, *update: Any) -> None:
        """Make the update of `_row_update`, in place."""
        made = self._row_update(*update)
        rows, variables = made.gradients[0], update[1]
        run_updates([made], [*variables.values(), rows.values, rows.indices], self.use_locking)

    def _row_update(
        self, rule: Rule, variables: Named, hp: Sequence[float], name: str, gradient: Any,
        indices: Any, prologue: Prologue = (),
    ) -> RowUpdate:  # fmt: skip
        """Check the row-sparse gradient."""
        arrays = (*variables.values(), indices, gradient)
        addresses = alike(arrays, len(variables), has_rows=True)
        if addresses is None:
            arrays, addresses = self._checked_rows(variables, name, gradient, indices)
        w, *_, index, values = arrays
        *_, index_address, values_address = addresses
        source = RowSource(
            values=values_address, indices=index_address, index_bytes=index.itemsize,
            length=len(index),
        )  # fmt: skip
        s = STORAGES[w.dtype]
        compiled = kernel(rule, prologue, s, STORAGES[values.dtype], (s,) * len(rule.states))
        row = np.array([hp], compiled.real.dtype)
        check_keys(self.name, w.shape[0], len(index))
        tables = RowTables.one(addresses[:-2], _sizes_of(w.shape))
        rows = RowGradient(index, values, source)
        use = self._touched_only, self.out_of_range == "drop"
        return RowUpdate([self.name], compiled, tables, [rows], row, _FIRST, *use)

    def _checked_rows(
        self, variables: Named, name: str, gradient: Any, indices: Any
    ) -> tuple[tuple[Any, ...], list[int]]:
        """The variables and the checked row-sparse gradient, and their addresses."""
        where, w = self.name, next(iter(variables.values()))
        if w.ndim == 0:
            wrong, expected = "has no rows", "at least 1 dimension"
            reject(RejectedValueError, where, "var", wrong, expected, "0 dimensions")
        values = check.floating(where, name, gradient, w.dtype)
        index = adopt_anywhere(where, "indices", indices)
        device_of(where, {**variables, name: values, "indices": index})
        check.row_gradient(where, name, index, values, w.shape)
        values = check.contiguous(values, where, name)
        index = check.contiguous(index, where, "indices")
        arrays = (*variables.values(), index, values)
        return arrays, check.no_overlap(where, [*variables, "indices", name], arrays)
