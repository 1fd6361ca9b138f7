"""The optimizers of Adam's family, under MindSpore's names and defaults."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ..kernels.formula import Formula, running_powers
from ..kernels.rule import Rule
from ..kernels.rules import adam as rules
from ..ops.runtime import check
from ..ops.runtime.errors import reject
from .base.arguments import Checked, Fixed, base_arguments, betas_and_eps
from .base.stateful import StateOfEach
from .fused import FusedOptimizer


@lru_cache(maxsize=256)  # asked for in every step
def _formula_of(beta1: float, beta2: float, eps: float, eps_hat: bool) -> Formula:
    if eps_hat:
        return Formula(rules.adam_scalars, (beta1, beta2, eps), (beta1, beta2))
    return Formula(rules.usual_adam_scalars, (beta1, beta2, eps))


def _powers(shape: tuple[int, ...], step: int, **betas: float) -> dict[str, np.ndarray]:
    """The running powers as MindSpore keeps them, by the names of its parameters."""
    powers = running_powers(np.float32, tuple(betas.values()), step)
    return {
        f"{name}_power": np.full(shape, power, np.float32)
        for name, power in zip(betas, powers, strict=True)
    }


class _BiasCorrectedAdam(FusedOptimizer):
    """Adam with MindSpore's step size: what `Adam`, `LazyAdam` and `AdamOffload` share."""

    # MindSpore keeps the powers of the betas with this shape.
    _power_shape: tuple[int, ...] = ()
    use_nesterov = Fixed(check.flag)
    eps_hat = Checked(check.flag)

    rowwise_bias_correction = False

    def __init__(self, beta1: float, beta2: float, eps: float, eps_hat: bool, **base: Any) -> None:
        self.eps_hat = eps_hat
        constants = betas_and_eps(self._name, base["parameters"], beta1, beta2, eps)
        self.beta1, self.beta2, self.eps = constants
        super().__init__(**base, rule=self._pick_rule())

    def _pick_rule(self) -> Rule:
        return rules.ADAM_NESTEROV if self.use_nesterov else rules.ADAM

    def formula(self) -> Formula:
        if self.rowwise_bias_correction:
            constants = self.beta1, self.beta2, self.eps, float(not self.eps_hat)
            return Formula(rules.by_row_scalars, constants)
        return _formula_of(self.beta1, self.beta2, self.eps, self.eps_hat)

    moment1 = StateOfEach("moment1", "The first moment of each parameter.")
    moment2 = StateOfEach("moment2", "The second moment of each parameter.")

    def _derived_state(self, step: int) -> dict[str, np.ndarray]:
        return _powers(self._power_shape, step, beta1=self.beta1, beta2=self.beta2)


class Adam(_BiasCorrectedAdam):
    """Adam, in MindSpore's form.

    With ``g`` the gradient after decay and scaling, at update t = 1, 2, ... of a parameter::

        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*g*g
        u  = m,  or with use_nesterov  beta1*m + (1 - beta1)*g
        w <- w - lr * sqrt(1 - beta2**t) / (1 - beta1**t) * u / (sqrt(v) + eps)

    With ``eps_hat=False`` the last line is the usual one, of PyTorch and optax::

        w <- w - lr / (1 - beta1**t) * u / (sqrt(v / (1 - beta2**t)) + eps)

    With ``use_amsgrad``, ``vhat <- max(vhat, v)`` takes the place of v in the last line.

    Args:
        use_nesterov: Nesterov's step; not with ``use_amsgrad``.
        use_amsgrad: AMSGrad.
        use_lazy: row-sparse gradients update only the rows that occur.
        use_offload: keep state and arithmetic on the host, also of parameters on a CUDA device
            (`AdamOffload`).
        sparse_update: ... The default is ``"dense_equivalent"``, with ``use_lazy`` ``"lazy"``; with
            ``use_amsgrad`` or ``use_offload`` there is none.

    Raises:
        ValueError: a value does not fit, or options exclude each other.

    Source: ``mindspore.nn.Adam``; Kingma and Ba (2015), arXiv:1412.6980.

    >>> import numpy as np
    >>> w = np.ones(3, np.float32)
    >>> opt = Adam([w], learning_rate=0.1)
    >>> opt((np.array([1, -1, 0], np.float32),))
    (True,)
    >>> print(w.round(6))
    [0.9 1.1 1. ]
    """

    use_amsgrad = Fixed(check.flag)
    use_lazy = Fixed(check.flag)
    use_offload = Fixed(check.flag)

    def __init__(
        self, params: Any, learning_rate: Any = 1e-3, beta1: float = 0.9, beta2: float = 0.999,
        eps: float = 1e-8, use_locking: bool = False, use_nesterov: bool = False,
        weight_decay: Any = 0.0, loss_scale: Any = 1.0, use_amsgrad: bool = False, *,
        eps_hat: bool = True, use_lazy: bool = False, use_offload: bool = False,
        sparse_update: str | None = None, skip_nonfinite: bool = False, state_dtype: Any = None,
        rounding: str = "nearest", clipvalue: float | None = None, clipnorm: float | None = None,
        **unknown: Any,
    ) -> None:  # fmt: skip
        base = base_arguments(locals())
        self.use_nesterov, self.use_amsgrad = use_nesterov, use_amsgrad
        self.use_lazy, self.use_offload = use_lazy, use_offload
        self._check_exclusive()
        if sparse_update is None and not (self.use_amsgrad or self.use_offload):
            base["sparse_update"] = "lazy" if self.use_lazy else "dense_equivalent"
        elif self.use_lazy and sparse_update != "lazy":
            wrong = "contradicts use_lazy"
            reject(ValueError, self._name, "sparse_update", wrong, "'lazy'", sparse_update)
        super().__init__(beta1, beta2, eps, eps_hat, **base)

    @property
    def _stays_on_host(self) -> bool:  # type: ignore[override]
        return bool(self.use_offload)

    def _check_exclusive(self) -> None:
        pairs = (
            ("use_lazy", "use_offload"),
            ("use_amsgrad", "use_lazy"),
            ("use_amsgrad", "use_offload"),
            # MindSpore ignores Nesterov's step there; an accepted argument acts or raises.
            ("use_amsgrad", "use_nesterov"),
        )
        for a, b in pairs:
            if getattr(self, a) and getattr(self, b):
                expected = "at most one of them"
                reject(ValueError, self._name, a, f"excludes {b}", expected, "both True")

    def _pick_rule(self) -> Rule:
        return rules.ADAM_AMSGRAD if self.use_amsgrad else super()._pick_rule()

    @property
    def vhat(self) -> tuple[np.ndarray, ...]:
        """The largest second moment of each parameter; only with ``use_amsgrad``."""
        if "vhat" not in self._states:
            raise AttributeError("Adam: vhat is there with use_amsgrad=True only")
        return self._state("vhat")


class LazyAdam(_BiasCorrectedAdam):
    """Adam whose row-sparse gradients update only the rows that occur.

    The formulas of `Adam`, for the rows named by a `RowTensor`; all other rows, moments
    included, stay as they are. Weight decay acts on these rows, once each. Dense gradients
    update everything, as in `Adam`.

    Args:
        weight_decay: a **float** >= 0 or a callable of the step; coupled; an int raises, as
            published.
        sparse_update: ... With ``"dense_equivalent"`` the steps are those of `Adam`.

    Source: ``mindspore.nn.LazyAdam`` (deprecated in MindSpore 2.0).

    >>> import numpy as np
    >>> from fusestep.nn import RowTensor
    >>> table = np.ones((4, 2), np.float32)
    >>> opt = LazyAdam([table], learning_rate=0.1)
    >>> opt([RowTensor(np.array([1, 1]), np.ones((2, 2), np.float32), (4, 2))])
    (True,)
    >>> print(table[:, 0].round(6))
    [1.  0.9 1.  1. ]
    """

    _power_shape = (1,)
    rowwise_bias_correction = Fixed(check.flag)

    def __init__(
        self, params: Any, learning_rate: Any = 1e-3, beta1: float = 0.9, beta2: float = 0.999,
        eps: float = 1e-8, use_locking: bool = False, use_nesterov: bool = False,
        weight_decay: Any = 0.0, loss_scale: Any = 1.0, *, eps_hat: bool = True,
        rowwise_bias_correction: bool = False, sparse_update: str = "lazy",
        skip_nonfinite: bool = False, state_dtype: Any = None, rounding: str = "nearest",
        clipvalue: float | None = None, clipnorm: float | None = None, **unknown: Any,
    ) -> None:  # fmt: skip
        base = base_arguments(locals())
        self.use_nesterov = use_nesterov
        self.rowwise_bias_correction = rowwise_bias_correction
        if isinstance(weight_decay, int):
            wrong = "has a wrong type"
            reject(TypeError, self._name, "weight_decay", wrong, "a float", weight_decay)
        super().__init__(beta1, beta2, eps, eps_hat, **base)

    def _pick_rule(self) -> Rule:
        if not self.rowwise_bias_correction:
            return super()._pick_rule()
        return rules.ADAM_NESTEROV_BY_ROW if self.use_nesterov else rules.ADAM_BY_ROW


class AdamOffload(_BiasCorrectedAdam):
    """Adam whose state and arithmetic stay on the host.

    The formulas of `Adam`. Of parameters on a CUDA device the moments live on the host: in a step
    parameters and gradients come there in chunks, through pinned memory, and the parameters go
    back while the next chunk is worked on. For parameters on the host it is `Adam`. Row-sparse
    gradients need ``sparse_update``.

    Source: ``mindspore.nn.AdamOffload`` (deprecated in MindSpore 2.0).

    >>> import numpy as np
    >>> w = np.ones(2, np.float32)
    >>> AdamOffload([w], learning_rate=0.1)((np.ones(2, np.float32),))
    (True,)
    >>> print(w.round(6))
    [0.9 0.9]
    """

    _power_shape = (1,)
    _stays_on_host = True

    def __init__(
        self, params: Any, learning_rate: Any = 1e-3, beta1: float = 0.9, beta2: float = 0.999,
        eps: float = 1e-8, use_locking: bool = False, use_nesterov: bool = False,
        weight_decay: Any = 0.0, loss_scale: Any = 1.0, *, eps_hat: bool = True,
        sparse_update: str | None = None, skip_nonfinite: bool = False, state_dtype: Any = None,
        rounding: str = "nearest", clipvalue: float | None = None, clipnorm: float | None = None,
        **unknown: Any,
    ) -> None:  # fmt: skip
        base = base_arguments(locals())
        self.use_nesterov = use_nesterov
        super().__init__(beta1, beta2, eps, eps_hat, **base)


class AdaMax(FusedOptimizer):
    """AdaMax: Adam by the infinity norm.

    With ``g`` the gradient after decay and scaling, at update t = 1, 2, ... of a parameter::

        m <- beta1*m + (1 - beta1)*g
        v <- max(beta2*v, |g|)
        w <- w - lr / (1 - beta1**t) * m / (v + eps)

    Source: ``mindspore.nn.AdaMax``; Kingma and Ba (2015), section 7.1.

    >>> import numpy as np
    >>> w = np.ones(2, np.float32)
    >>> AdaMax([w], learning_rate=0.1)((np.array([3, -1], np.float32),))
    (True,)
    >>> print(w.round(6))
    [0.9 1.1]
    """

    def __init__(
        self, params: Any, learning_rate: Any = 1e-3, beta1: float = 0.9, beta2: float = 0.999,
        eps: float = 1e-8, weight_decay: Any = 0.0, loss_scale: Any = 1.0, *,
        use_locking: bool = False, sparse_update: str | None = None, skip_nonfinite: bool = False,
        state_dtype: Any = None, rounding: str = "nearest", clipvalue: float | None = None,
        clipnorm: float | None = None, **unknown: Any,
    ) -> None:  # fmt: skip
        base = base_arguments(locals())
        self.beta1, self.beta2, self.eps = betas_and_eps(self._name, params, beta1, beta2, eps)
        super().__init__(**base, rule=rules.ADAMAX)

    def formula(self) -> Formula:
        return Formula(rules.adamax_scalars, (self.beta1, self.beta2, self.eps), (self.beta1,))

    moment1 = StateOfEach("moment1", "The first moment of each parameter.")
    moment2 = StateOfEach("moment2", "The largest gradient of each element, an old one fading.")

    def _derived_state(self, step: int) -> dict[str, np.ndarray]:
        return _powers((1,), step, beta1=self.beta1)


class AdamWeightDecay(FusedOptimizer):
    """Adam with decoupled weight decay and without bias correction::

        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*g*g
        w <- w - lr * (m / (sqrt(v) + eps) + weight_decay*w)

    Without bias correction the first update is about ``3.16 * lr`` per element at the
    defaults. There is no loss scale. With ``correct_bias`` it is the usual AdamW, of PyTorch and
    optax; at update t = 1, 2, ... of a parameter::

        w <- w - lr * (m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps) + weight_decay*w)

    Args:
        correct_bias: see the formulas.

    Source: ``mindspore.nn.AdamWeightDecay``; Loshchilov and Hutter (2019), arXiv:1711.05101.

    >>> import numpy as np
    >>> w = np.ones(2, np.float32)
    >>> AdamWeightDecay([w], learning_rate=0.1, weight_decay=0.5)((np.zeros(2, np.float32),))
    (True,)
    >>> print(w)
    [0.95 0.95]
    """

    correct_bias = Checked(check.flag)

    def __init__(
        self, params: Any, learning_rate: Any = 1e-3, beta1: float = 0.9, beta2: float = 0.999,
        eps: float = 1e-6, weight_decay: Any = 0.0, *, correct_bias: bool = False,
        use_locking: bool = False, sparse_update: str | None = None, skip_nonfinite: bool = False,
        state_dtype: Any = None, rounding: str = "nearest", clipvalue: float | None = None,
        clipnorm: float | None = None, **unknown: Any,
    ) -> None:  # fmt: skip
        base = base_arguments(locals())
        self.correct_bias = correct_bias
        self.beta1, self.beta2, self.eps = betas_and_eps(self._name, params, beta1, beta2, eps)
        super().__init__(**base, rule=rules.ADAM_WEIGHT_DECAY)

    def formula(self) -> Formula:
        usual = rules.usual_adam_weight_decay_scalars
        scalars = usual if self.correct_bias else rules.adam_weight_decay_scalars
        return Formula(scalars, (self.beta1, self.beta2, self.eps))
