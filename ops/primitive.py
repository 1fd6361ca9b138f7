"""The common base of operators, and the two ways in which one applies a rule."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..kernels.cpu.headers import alike
from ..kernels.rules.rule import Prologue, Rule
from .runtime import check
from .runtime.arrays import adopt_anywhere, check_row_gradient
from .runtime.device import device_of
from .runtime.errors import RejectedValueError, message, reject_unknown
from .runtime.row_step import RowGradient, table_step
from .runtime.step import tensor_step


class Primitive:
    """A stateless operator that updates its variables in place.

    Attributes:
        use_locking: whether concurrent calls on overlapping memory are serialised
            (`fusestep.ops.runtime.locks`).
        name: the operator's name, for messages.
    """

    use_locking: bool

    def __init__(self, use_locking: bool, unknown: dict[str, Any], known: tuple[str, ...]) -> None:
        self.name = type(self).__name__
        reject_unknown(self.name, unknown, known)
        self.use_locking = check.flag(self.name, "use_locking", use_locking)

    def __repr__(self) -> str:
        published = inspect.signature(type(self)).parameters
        attributes = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if k in published)
        return f"{self.name}({attributes})"

    def _scalars(self, **values: Any) -> dict[str, float]:
        return {name: check.scalar(self.name, name, value) for name, value in values.items()}

    def _variables(self, **values: Any) -> dict[str, Any]:
        arrays = tuple(values.values())
        if alike(arrays, len(arrays)) is None:
            values = {name: check.variable(self.name, name, x) for name, x in values.items()}
            check.same_layout(self.name, values)
        return values

    def _apply_dense(
        self,
        rule: Rule,
        variables: dict[str, Any],
        hp: Sequence[float],
        name: str,
        gradient: Any,
        prologue: Prologue = (),
    ) -> None:
        """Check the gradient and apply ``rule`` to the variables in place."""
        arrays = (*variables.values(), gradient)
        addresses: Sequence[int] | np.ndarray | None = alike(arrays, len(variables))
        if addresses is None:
            arrays, addresses = self._checked_dense(variables, name, gradient)
        tensor_step(rule, prologue, arrays, addresses, hp, use_locking=self.use_locking)

    def _checked_dense(
        self, variables: dict[str, Any], name: str, gradient: Any
    ) -> tuple[tuple[Any, ...], list[int]]:
        """The variables and the checked gradient, and their addresses."""
        w = next(iter(variables.values()))
        gradient = check.gradient(self.name, name, gradient, w.dtype, w.shape)
        arrays = (*variables.values(), gradient)
        device_of(self.name, {**variables, name: gradient})
        return arrays, check.no_overlap(self.name, [*variables, name], arrays)

    def _apply_rows(
        self,
        rule: Rule,
        variables: dict[str, Any],
        hp: Sequence[float],
        name: str,
        gradient: Any,
        indices: Any,
        *,
        touched_only: bool,
        drop: bool = False,
        prologue: Prologue = (),
    ) -> None:
        """Check the row-sparse gradient and apply ``rule`` to the variables in place."""
        rows, addresses = self._checked_rows(variables, name, gradient, indices)
        table_step(
            self.name,
            rule,
            prologue,
            list(variables.values()),
            addresses,
            rows,
            hp,
            touched_only=touched_only,
            drop=drop,
            use_locking=self.use_locking,
        )

    def _checked_rows(
        self, variables: dict[str, Any], name: str, gradient: Any, indices: Any
    ) -> tuple[RowGradient, list[int]]:
        """The checked row-sparse gradient, and the addresses of the variables."""
        arrays = list(variables.values())
        if arrays[0].ndim == 0:
            raise RejectedValueError(
                message(self.name, "var", "has no rows", "at least 1 dimension", "0 dimensions")
            )
        values = check.floating(self.name, name, gradient, arrays[0].dtype)
        index = adopt_anywhere(self.name, "indices", indices)
        device_of(self.name, {**variables, name: values, "indices": index})
        check_row_gradient(self.name, name, index, values, arrays[0].shape)
        values = check.contiguous(values, self.name, name)
        index = check.contiguous(index, self.name, "indices")
        *addresses, index_address, values_address = check.no_overlap(
            self.name, [*variables, "indices", name], [*arrays, index, values]
        )
        return RowGradient(index, values, index_address, values_address), addresses


def out_of_range_rule(where: str, value: Any) -> str:
    """What to do with indices outside of ``[0, N)``: ``"raise"`` or ``"drop"``.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(value, str) or value not in ("raise", "drop"):
        raise ValueError(message(where, "out_of_range", "is unknown", "'raise' or 'drop'", value))
    return value


def require_float32(where: str, variables: dict[str, Any]) -> None:
    """The fused sparse operators are published for float32 variables.

    Raises:
        TypeError: a variable has another dtype.
    """
    for name, array in variables.items():
        if array.dtype != np.float32:
            raise TypeError(
                message(where, name, "has a wrong dtype", "float32", array.dtype)
                + "; the optimizers of fusestep.nn take other dtypes"
            )
