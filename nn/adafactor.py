"""Adafactor, under MindSpore's name and defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..kernels.formula import Formula
from ..kernels.rules import adafactor as rules
from ..kernels.state import State
from ..ops.runtime import check
from ..ops.runtime.errors import reject
from .base.arguments import Fixed, base_arguments, non_negative_float, open_unit, positive_float
from .base.file_set import MOVED
from .base.groups import Groups
from .engine.plan import StepMethod
from .fused import FusedOptimizer, declared
from .schedules.decay import LearningRateSchedule


class RelativeStep(LearningRateSchedule):
    """Adafactor's own schedule, ``min(1e-2, 1 / sqrt(t))`` at update t = 1, 2, ...

    Args:
        warmup_init: begin with ``1e-6 * t`` instead of 1e-2.

    >>> RelativeStep()(0), RelativeStep()(40_000 - 1), RelativeStep(warmup_init=True)(0)
    (0.01, 0.005, 1e-06)
    """

    def __init__(self, warmup_init: bool = False) -> None:
        self.warmup_init = warmup_init

    def __repr__(self) -> str:
        return f"RelativeStep(warmup_init={self.warmup_init})"

    def construct(self, global_step: int) -> float:
        """The value at ``global_step`` = 0, 1, 2, ..."""
        return rules.relative_rate(int(global_step) + 1, self.warmup_init)


class AdaFactor(FusedOptimizer):
    """Adafactor: second moments of matrices kept as row and column means.

    At update t = 1, 2, ... of a parameter, with ``beta2 = 1 - t**(-decay_rate)``, for a matrix
    (the last two axes; leading axes are a batch of matrices)::

        q = g*g + eps[0]
        R <- beta2*R + (1 - beta2)*(mean of q over each row)
        C <- beta2*C + (1 - beta2)*(mean of q over each column)
        u  = g / (sqrt(R / mean(R)) * sqrt(C))

    for a parameter of fewer dimensions ``v <- beta2*v + (1 - beta2)*q`` and ``u = g / sqrt(v)``;
    then, with root mean squares ``|.|`` over the whole parameter::

        a  = lr * max(eps[1], |w|)  with scale_parameter, else lr
        u <- a * u / max(1, |u| / clip_threshold)
        M <- beta1*M + (1 - beta1)*u       (M = u without beta1)
        w <- w - M - weight_decay*a*w

    States and arithmetic are on the host: parameters on a CUDA device and their gradients come
    there in each step, as those of `AdamOffload`.

    All parameters take the passes together. The gradient of a matrix is read three times, its
    parameter twice, and written once; sums are float64, in an order that does not depend on the
    number of threads. ``g*g`` must be a number of the arithmetic: in float32 one element of 1.8e19
    or more makes a whole matrix NaN.

    Args:
        learning_rate: ... It needs ``relative_step=False``. None takes ``lr =
            min(1e-2, 1/sqrt(t))`` at call t. A list, array or schedule turns ``scale_parameter``
            off. The ``lr`` of a group counts for its parameters, with ``relative_step`` too.
        eps: two floats >= 0: what is added to the squared gradient, and the smallest size that
            a step is relative to.
        clip_threshold: float > 0: largest root mean square of a direction.
        decay_rate: float in (0, 1).
        beta1: float in [0, 1); None or 0 keeps no first moment.
        weight_decay: in [0, 1), or a callable of the step; decoupled. Ungrouped it acts on every
            parameter, whatever its name.
        scale_parameter: make the step relative to the size of the parameter.
        relative_step: take the learning rate from the step.
        warmup_init: with ``relative_step``, begin with ``lr = 1e-6 * t``.
        compression: keep the second moment of parameters below two dimensions in float16.
        state_dtype: dtype of ``M`` and ``v``; default each parameter's. ``R`` and ``C`` are
            float32 (float64 for float64 parameters), as the arithmetic is.

    Raises:
        ValueError: a value does not fit, options exclude each other, or a gradient is
            row-sparse.

    Source: ``mindspore.nn.AdaFactor`` (experimental there); Shazeer and Stern (2018),
    arXiv:1804.04235.

    >>> import numpy as np
    >>> w = np.ones((2, 2), np.float32)
    >>> opt = AdaFactor([w], learning_rate=0.1, relative_step=False, beta1=None)
    >>> opt((np.array([[1, 2], [2, 4]], np.float32),))
    (True,)
    >>> print(w.round(4))  # the gradient is a product of a row and a column
    [[0.9 0.9]
     [0.9 0.9]]
    """

    _stays_on_host = True  # sums over rows and columns are taken there
    relative_step = Fixed(check.flag)
    warmup_init = Fixed(check.flag)
    _filter_names = False
    _rows_need = ("a dense one: Adafactor needs means over all rows", "a RowTensor")

    def __init__(
        self, params: Any, learning_rate: Any = None, eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0, decay_rate: float = 0.8, beta1: float | None = 0.9,
        weight_decay: Any = 0.0, scale_parameter: bool = True, relative_step: bool = True,
        warmup_init: bool = False, compression: bool = False, loss_scale: Any = 1.0, *,
        use_locking: bool = False, skip_nonfinite: bool = False, state_dtype: Any = None,
        clipvalue: float | None = None, clipnorm: float | None = None, **unknown: Any,
    ) -> None:  # fmt: skip
        base = base_arguments(locals())
        self.eps = _two_epsilons(self._name, eps)
        self.clip_threshold = positive_float(
            self._name, "clip_threshold", clip_threshold, np.float32
        )
        self.decay_rate = open_unit(self._name, "decay_rate", decay_rate, np.float64)
        self.beta1 = _beta1(self._name, beta1)
        self.scale_parameter = check.flag(self._name, "scale_parameter", scale_parameter)
        self.relative_step, self.warmup_init = relative_step, warmup_init
        self.compression = check.flag(self._name, "compression", compression)
        self._check_rate(learning_rate)
        if learning_rate is not None and not isinstance(learning_rate, int | float | np.floating):
            self.scale_parameter = False  # a schedule is meant as it is
        if self.relative_step:
            base["learning_rate"] = RelativeStep(self.warmup_init)
        super().__init__(**base, rule=rules.ADAFACTOR if self.beta1 else rules.ADAFACTOR_PLAIN)

    def _check_rate(self, learning_rate: Any) -> None:
        if self.relative_step and learning_rate is not None:
            wrong, expected = "excludes relative_step", "None, or relative_step=False"
            reject(ValueError, self._name, "learning_rate", wrong, expected, learning_rate)
        if not self.relative_step and learning_rate is None:
            expected = "a learning rate, or relative_step=True"
            reject(ValueError, self._name, "learning_rate", "is missing", expected, None)
        if self.warmup_init and not self.relative_step:
            wrong, expected = "needs relative_step", "relative_step=True"
            reject(ValueError, self._name, "warmup_init", wrong, expected, False)

    def _check_groups(self, groups: Groups) -> None:
        super()._check_groups(groups)
        for decay in (option.decay for option in groups.options):
            if isinstance(decay, float):
                check.in_range(self._name, "weight_decay", decay, decay < 1.0, "in [0, 1)")

    # State

    def _dtype_of(self, state: State, i: int) -> np.dtype[Any]:
        if self.compression and state.name == "exp_avg_sq":
            return np.dtype(np.float16)
        return super()._dtype_of(state, i)

    def init_ada_factor_state(self, beta1: float | None) -> None:
        """Make the state anew, for another ``beta1``: zeros, and no update done.

        Args:
            beta1: as at construction.

        Raises:
            TypeError, ValueError: as at construction.
        """
        checked = _beta1(self._name, beta1)
        if self._files is not None:
            self._files.write(MOVED, for_good=True)
        self.beta1 = checked
        self._rule = rules.ADAFACTOR if self.beta1 else rules.ADAFACTOR_PLAIN
        self._states = self._new_states(declared(self._rule))
        self._steps[...] = 0
        self._global_step[...] = 0
        self._derive()

    def _state_name(self, role: str, parameter: str) -> str:
        return f"{role}.{parameter}" if role == "exp_avg" else f"{role}_{parameter}"

    def _derived_state(self, step: int) -> dict[str, np.ndarray]:
        return {"afactor_step": np.array([step], np.float32)}

    def _empty_states(self) -> set[str]:
        # MindSpore keeps an array of one element where a parameter does not have a state.
        return {
            self._state_name(role, str(p.name))
            for role, arrays in self._states.items()
            for p, array in zip(self.parameters, arrays, strict=True)
            if array is None
        }

    # The step

    def _check_used_rates(self, _rates: Sequence[float]) -> None:
        # It can be assigned to after construction.
        if self.beta1 and "exp_avg" not in self._states:
            wrong, expected = "needs a first moment", "init_ada_factor_state, which makes one"
            reject(ValueError, self._name, "beta1", wrong, expected, self.beta1)

    def formula(self) -> Formula:
        return Formula(rules.adafactor_scalars, (self.beta1 or 0.0, self.decay_rate, self.eps[0]))

    def _method(self) -> StepMethod:
        sizes = {
            "epsilon2": self.eps[1],
            "clip_threshold": self.clip_threshold,
            "scale_parameter": self.scale_parameter,
        }
        return super()._method()._replace(constants=tuple(sizes.items()))


def _two_epsilons(where: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        reject(TypeError, where, "eps", "has a wrong type", "a pair of floats", value)
    first, second = (non_negative_float(where, f"eps[{k}]", x) for k, x in enumerate(value))
    return first, second


def _beta1(where: str, value: Any) -> float | None:
    if value is None:
        return None
    beta1 = non_negative_float(where, "beta1", value)
    check.in_range(where, "beta1", beta1, bool(np.float32(beta1) < 1.0), "None or in [0, 1)")
    return beta1
