"""Resilient backpropagation, under MindSpore's name and defaults."""

from __future__ import annotations

from typing import Any

from ..kernels.formula import Formula
from ..kernels.rules import rprop as rules
from ..ops.runtime import check
from ..ops.runtime.errors import reject
from .base.arguments import arithmetic_type, base_arguments, check_kind, open_unit, positive_float
from .base.stateful import StateOfEach
from .fused import FusedOptimizer


class Rprop(FusedOptimizer):
    """Rprop: steps of sizes that each element learns, along the signs of the gradients.

    With ``g`` the gradient after decay and scaling, ``h`` that of the update before, and ``s``
    beginning at the learning rate::

        s <- min(s*etas[1], step_sizes[1])    where g*h > 0
        s <- max(s*etas[0], step_sizes[0])    where g*h < 0; there g = 0 from now on
        w <- w - sign(g) * s

    Args:
        learning_rate: ... It is the size with which an element begins; later rates do nothing.
        etas: two floats, in (0, 1) and above 1.
        step_sizes: two floats > 0, the first at most the second.

    Raises:
        TypeError: a kind does not fit (an int where a float is published, a list).

    Source: ``mindspore.nn.Rprop``; Riedmiller and Braun (1993).

    >>> import numpy as np
    >>> w = np.ones(2, np.float32)
    >>> opt = Rprop([w], learning_rate=0.1)
    >>> for g in ([1, 1], [9, -9]):
    ...     _ = opt((np.array(g, np.float32),))
    >>> print(w.round(4), opt.step_size[0].round(4))
    [0.78 0.9 ] [0.12 0.05]
    """

    def __init__(
        self, params: Any, learning_rate: Any = 0.1, etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50.0), weight_decay: Any = 0.0, *,
        use_locking: bool = False, sparse_update: str | None = None, skip_nonfinite: bool = False,
        state_dtype: Any = None, rounding: str = "nearest", clipvalue: float | None = None,
        clipnorm: float | None = None, **unknown: Any,
    ) -> None:  # fmt: skip
        base = base_arguments(locals())
        real, (shrink, grow) = arithmetic_type(params), _two(self._name, "etas", etas)
        self.etaminus = open_unit(self._name, "etas[0]", shrink, real)
        self.etaplus = positive_float(self._name, "etas[1]", grow, real)
        check.in_range(self._name, "etas[1]", grow, self.etaplus > 1.0, "above 1")
        sizes = _two(self._name, "step_sizes", step_sizes)
        self.step_size_min, self.step_size_max = (
            positive_float(self._name, f"step_sizes[{k}]", size, real)
            for k, size in enumerate(sizes)
        )
        is_ordered = self.step_size_min <= self.step_size_max
        check.in_range(self._name, "step_sizes[1]", sizes[1], is_ordered, "at least step_sizes[0]")
        super().__init__(**base, rule=rules.RPROP)

    def formula(self) -> Formula:
        constants = self.etaminus, self.etaplus, self.step_size_min, self.step_size_max
        return Formula(rules.rprop_scalars, constants)

    prev = StateOfEach(
        "prev", "The last gradient of each parameter, 0 where it had changed its sign."
    )
    step_size = StateOfEach("step_size", "The step sizes of each parameter.")


def _two(where: str, name: str, value: Any) -> tuple[Any, ...]:
    check_kind(where, name, value, tuple, "a tuple of two floats")
    if len(value) != 2:
        reject(ValueError, where, name, "has a wrong length", "two floats", len(value))
    return tuple(value)
