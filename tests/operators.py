"""Every operator out of the table of the benchmark, with calls of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fusestep.bench.cases import operators

# The variables that are returned, where these are not all.
_RETURNS: Mapping[str, tuple[str, ...]] = {
    "AdamNoUpdateParam": (),
    "SGD": ("parameters",),
    "LARSUpdate": (),
}
# How a variable is made out of random numbers in (0.1, 1), where not as they are.
_RANGES: Mapping[str, Mapping[str, Callable[[np.ndarray], Any]]] = {
    "SGD": {"stat": np.round},  # some elements take their first step
    "ApplyCenteredRMSProp": {"mean_gradient": lambda x: x / 10},  # a positive variance everywhere
}


class Operator(operators.Operator):
    """One with all that a valid call needs."""

    @property
    def returned(self) -> tuple[str, ...]:
        """Names of the variables that are returned."""
        return _RETURNS.get(self.name, self.variables)

    @property
    def ranges(self) -> Mapping[str, Callable[[np.ndarray], Any]]:
        """How variables are made out of random numbers."""
        return _RANGES.get(self.name, {})

    def inputs(self, shape: tuple[int, ...] = (5, 3), dtype: Any = np.float32) -> dict[str, Any]:
        """Fresh arguments of one valid call, by name and in order."""
        rng = np.random.default_rng(7)
        given: dict[str, Any] = {**self.scalars}
        for name in self.variables:
            values = rng.uniform(0.1, 1.0, shape)
            given[name] = np.asarray(self.ranges.get(name, np.asarray)(values)).astype(dtype)
        if self.takes_rows:
            given[self.gradient] = rng.standard_normal((4, *shape[1:])).astype(dtype)
            given["indices"] = np.array([1, 0, 1, 3])
        else:
            given[self.gradient] = np.asarray(rng.standard_normal(shape)).astype(dtype)
        return {name: given[name] for name in self.arguments}

    def new(self, **constructor: Any) -> Any:
        """An instance; what is not given has the value of `attributes` or its default."""
        return self.make(**{**self.attributes, **constructor})

    def call(self, inputs: dict[str, Any], **constructor: Any) -> Any:
        """The result of one call of a new instance."""
        return self.new(**constructor)(*inputs.values())


OPERATORS = {name: Operator(**vars(op)) for name, op in operators.OPERATORS.items()}
# It updates nothing: `weight` is only read, so it is in no table of operators that write.
LARS_UPDATE = Operator(**vars(operators.LARS_UPDATE))
ROW_OPERATORS = {name: op for name, op in OPERATORS.items() if op.takes_rows}
DENSE_OPERATORS = {name: op for name, op in OPERATORS.items() if not op.takes_rows}
