"""Prodigy, which finds the length of its steps itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..kernels.formula import Formula
from ..kernels.rules import prodigy as rules
from ..ops.runtime import check
from ..ops.runtime.errors import reject
from .base.arguments import (
    Fixed,
    arithmetic_type,
    base_arguments,
    check_kind,
    is_int,
    non_negative_float,
    positive_float,
)
from .engine.conditioning import Conditioning
from .engine.plan import Plan, StepMethod
from .fused import FusedOptimizer

_CONSTANTS = "beta3", "d0", "d_coef", "growth_rate"


class Prodigy(FusedOptimizer):
    """Adam whose steps are as long as the distance that the parameters seem to have to go.

    With the estimate ``d`` of that distance before the step, ``r = d*lr`` (with
    ``use_bias_correction`` times ``sqrt(1 - beta2**t) / (1 - beta1**t)`` at step t = 1, 2, ...),
    the parameters ``p0`` at their first update, and sums over all elements of all parameters::

        N <- beta3*N + d/d0 * r * sum(g * (p0 - w))
        m <- beta1*m + (1 - beta1)*d*g
        v <- beta2*v + (1 - beta2)*d*d*g*g
        s <- beta3*s + d/d0 * r * g         (with safeguard_warmup d in the place of r)
        D  = d_coef * N / sum(|s|)
        d <- min(max(d0, all D so far), growth_rate * d)   (while d is d0: of max(d, D))
        w <- w - weight_decay*r*w - r * m / (sqrt(v) + d*eps)

    Only the last ``d`` is the new one. With ``beta1=0`` there is no ``m``, and ``d*g`` with the new
    d takes its place. A step in which ``sum(|s|)`` is 0 changes and counts nothing.

    All parameters take two passes together, since d follows from all of them.

    Args:
        params: ... Groups may have a ``lr`` of their own if that is 0: their states stay, and they
            go on along them.
        learning_rate: ... It is a factor of the steps: usually 1, or a schedule from 1 to 0.
        beta1, beta2: floats in [0, 1).
        beta3: float in [0, 1): how ``N`` and ``s`` fade; None: ``sqrt(beta2)``.
        decouple: whether the weight decay is decoupled, as in the formula; else it is added to the
            gradient, ``g + weight_decay*w``.
        use_bias_correction: see the formula.
        safeguard_warmup: see the formula: the learning rate of a warm-up does not count in ``s``.
        d0: float > 0: what d begins with.
        d_coef: float > 0: a factor of the estimate.
        growth_rate: float > 0: d grows by this factor a step at most.
        fsdp_in_use, slice_p: must be False and 1.
        state_dtype: dtype of ``m``, ``v`` and ``s``; default each parameter's.

    Attributes:
        d: the estimate, a float.

    Raises:
        ValueError: a value does not fit, a parameter lives on a device, groups have different
            learning rates above 0, or a gradient is row-sparse.

    Source: ``prodigyopt.Prodigy`` 1.1.2; Mishchenko and Defazio (2024), arXiv:2306.06101.

    >>> import numpy as np
    >>> w = np.ones(3)
    >>> opt = Prodigy([w], d0=0.01)
    >>> for _ in range(100):
    ...     _ = opt((w - np.array([0, 2, 5]),))
    >>> print(w.round(1))
    [0. 2. 5.]
    """

    decouple = Fixed(check.flag)
    fsdp_in_use = Fixed(check.flag)
    _rows_need = ("a dense one: the estimate is that of all elements", "a RowTensor")

    def __init__(
        self, params: Any, learning_rate: Any = 1.0, beta1: float = 0.9, beta2: float = 0.999,
        beta3: float | None = None, eps: float = 1e-8, weight_decay: Any = 0.0,
        decouple: bool = True, use_bias_correction: bool = False, safeguard_warmup: bool = False,
        d0: float = 1e-6, d_coef: float = 1.0, growth_rate: float = math.inf,
        fsdp_in_use: bool = False, slice_p: int = 1, loss_scale: Any = 1.0, *,
        use_locking: bool = False, skip_nonfinite: bool = False, state_dtype: Any = None,
        rounding: str = "nearest", clipvalue: float | None = None, clipnorm: float | None = None,
        **unknown: Any,
    ) -> None:  # fmt: skip
        where, real = self._name, arithmetic_type(params)
        base = base_arguments(locals())
        self.beta1, self.beta2 = (
            _below_1(where, *each) for each in (("beta1", beta1), ("beta2", beta2))
        )
        self.beta3 = math.sqrt(self.beta2) if beta3 is None else _below_1(where, "beta3", beta3)
        self.eps = positive_float(where, "eps", eps, real)
        self.decouple, self.fsdp_in_use = decouple, fsdp_in_use
        self.use_bias_correction = check.flag(where, "use_bias_correction", use_bias_correction)
        self.safeguard_warmup = check.flag(where, "safeguard_warmup", safeguard_warmup)
        self.d0 = positive_float(where, "d0", d0, real)
        self.d_coef = positive_float(where, "d_coef", d_coef, real)
        check_kind(where, "growth_rate", growth_rate, float | np.floating, "a float")
        if growth_rate != math.inf:
            growth_rate = positive_float(where, "growth_rate", growth_rate, real)
        self.growth_rate = float(growth_rate)
        if self.fsdp_in_use:
            wrong, expected = "is not supported", "False: the estimate is that of one process"
            reject(ValueError, where, "fsdp_in_use", wrong, expected, True)
        if not is_int(slice_p):
            got = type(slice_p).__name__
            reject(TypeError, where, "slice_p", "has a wrong type", "an int", got)
        if slice_p != 1:
            wrong, expected = "is not supported", "1: the estimate is that of all elements"
            reject(ValueError, where, "slice_p", wrong, expected, slice_p)
        numbers = {"d": self.d0, "d_max": self.d0, "d_numerator": 0.0}
        self.numbers = {name: np.array([value]) for name, value in numbers.items()}
        super().__init__(**base, rule=rules.RULES[self.beta1 > 0.0, self.decouple])
        if self._device is not None:
            got = f"CUDA device {self._device}"
            expected = "the host: the estimate is worked out there"
            reject(ValueError, where, "params", "live on a device", expected, got)

    @property
    def d(self) -> float:
        """The estimate of the distance, by which steps are scaled."""
        return float(self.numbers["d"][0])

    # State

    def state_arrays(self) -> dict[str, Any]:
        """The arrays of `Optimizer.state_arrays`, with the numbers of the estimate."""
        return {**super().state_arrays(), **self.numbers}

    def keep_states(self, of: Sequence[bool]) -> None:  # noqa: ARG002
        """Refused: the estimate is that of all parameters."""
        wrong, expected = "cannot be divided among processes", "an optimizer without an estimate"
        reject(ValueError, self._name, "states", wrong, expected, self._name)

    # The step

    def _plan(self, gradients: Any, conditioning: Conditioning) -> Plan | None:
        # Before the checks, which is no write too early: until its first update is counted, each
        # attempt copies a parameter again.
        for i in np.flatnonzero(self._steps == 0).tolist():  # weights may be loaded until then
            if gradients[i] is not None:
                self._states["p0"][i][...] = self.parameters[i].array
        return super()._plan(gradients, conditioning)

    def _method(self) -> StepMethod:
        constants = tuple((name, getattr(self, name)) for name in _CONSTANTS)
        return super()._method()._replace(constants=constants, numbers=self.numbers)

    def formula(self) -> Formula:
        """The formula of the next step."""
        rates, step = self._rates_at(self._step), self._step + 1
        largest = max(rates)
        for rate in rates:
            if rate not in (largest, 0.0):
                wrong, expected = "differs between groups", f"{largest} or 0.0"
                reject(ValueError, self._name, "learning_rate", wrong, expected, rate)
        correction = 1.0
        if self.use_bias_correction:
            correction = rules.correction(self.beta1, self.beta2, step)
        constants = rules.prodigy_constants(
            (self.beta1, self.beta2, self.beta3), self.eps, self.d, self.d0, largest, correction,
            decoupled=self.decouple, safeguarded=self.safeguard_warmup,
        )  # fmt: skip
        return Formula(rules.prodigy_scalars, constants)


def _below_1(where: str, name: str, value: Any) -> float:
    number = non_negative_float(where, name, value)
    check.in_range(where, name, number, number < 1.0, "in [0, 1)")
    return number
