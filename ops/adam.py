"""Adam and AdamWeightDecay on dense gradients, under MindSpore's names and argument order."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..kernels.rules import adam as rules
from .primitive import Primitive
from .runtime import check
from .runtime.arrays import rounding
from .runtime.device import DeviceArray
from .runtime.errors import message


def adam_hp_for(where: str, variable: np.ndarray, scalars: dict[str, float]) -> rules.AdamHP:
    """The scalars of a rule with a bias-corrected step size."""
    if scalars["beta2_power"] > 1.0:
        raise ValueError(
            message(where, "beta2_power", "is out of range", "at most 1", scalars["beta2_power"])
        )
    hp = rules.adam_hp(rounding(variable.dtype), **scalars)
    check.epsilon(where, "epsilon", scalars["epsilon"], hp.epsilon)
    return hp


class Adam(Primitive):
    """Adam on a dense gradient::

        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*g*g
        u  = m,  or with use_nesterov  beta1*m + (1 - beta1)*g
        var <- var - lr * sqrt(1 - beta2_power) / (1 - beta1_power) * u / (sqrt(v) + epsilon)

    Args:
        use_locking: serialise concurrent calls on overlapping memory.
        use_nesterov: Nesterov's step.

    Call arguments:
        var, m, v: float32, float64, float16 or bfloat16, of one dtype and shape (0-d and
            empty work); updated in place. 16-bit variables are computed in float32.
        beta1_power, beta2_power: ``beta1**t`` and ``beta2**t`` at update t = 1, 2, ...
        lr, beta1, beta2: scalars.
        epsilon: a scalar. With 0, an element whose moments are 0 becomes NaN; what is 0 only in
            the type of the arithmetic (1e-46 in float32) raises.
        gradient: of the shape of ``var`` and at most its precision.

    Returns:
        ``(var, m, v)``, the updated arrays.

    Raises:
        TypeError: a kind or dtype does not fit (`fusestep.ConversionError` where a variable
            would have to be converted).
        ValueError: a shape, a value or the memory of a variable does not fit.
        Nothing has been written when an error is raised.

    Source: ``mindspore.ops.Adam``.

    >>> import numpy as np
    >>> var, m, v = np.ones(2, np.float32), np.zeros(2, np.float32), np.zeros(2, np.float32)
    >>> _ = Adam()(var, m, v, 0.9, 0.999, 0.001, 0.9, 0.999, 1e-8, np.ones(2, np.float32))
    >>> print(var)
    [0.999 0.999]
    """

    def __init__(
        self, use_locking: bool = False, use_nesterov: bool = False, **unknown: Any
    ) -> None:
        super().__init__(use_locking, unknown, ("use_locking", "use_nesterov"))
        self.use_nesterov = check.flag(self.name, "use_nesterov", use_nesterov)

    def __call__(
        self,
        var: Any,
        m: Any,
        v: Any,
        beta1_power: Any,
        beta2_power: Any,
        lr: Any,
        beta1: Any,
        beta2: Any,
        epsilon: Any,
        gradient: Any,
    ) -> tuple[Any, Any, Any]:
        """Update ``var``, ``m`` and ``v`` in place and return them; see the class."""
        scalars = self._scalars(
            beta1_power=beta1_power,
            beta2_power=beta2_power,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
        )
        variables = self._variables(var=var, m=m, v=v)
        hp = adam_hp_for(self.name, variables["var"], scalars)
        rule = rules.ADAM_NESTEROV if self.use_nesterov else rules.ADAM
        self._apply_dense(rule, variables, hp, "gradient", gradient)
        return var, m, v


class AdamNoUpdateParam(Primitive):
    """Adam's step without taking it: updates the moments and returns the step::

        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*g*g
        u  = m,  or with use_nesterov  beta1*m + (1 - beta1)*g
        delta = -lr * sqrt(1 - beta2_power) / (1 - beta1_power) * u / (sqrt(v) + epsilon)

    Args:
        use_locking: serialise concurrent calls on overlapping memory.
        use_nesterov: Nesterov's step.

    Call arguments:
        m, v: of one floating dtype and shape; updated in place.
        beta1_power, beta2_power, lr, beta1, beta2, epsilon: scalars, as `Adam`.
        gradient: of the shape of ``m`` and at most its precision.

    Returns:
        ``delta``, a new array of the shape and dtype of ``m``, to be added to the parameter.

    Raises:
        TypeError, ValueError: as `Adam`.

    Source: ``mindspore.ops.AdamNoUpdateParam`` (deprecated in MindSpore 2.8).

    >>> import numpy as np
    >>> m, v = np.zeros(2, np.float32), np.zeros(2, np.float32)
    >>> g = np.ones(2, np.float32)
    >>> print(AdamNoUpdateParam()(m, v, 0.9, 0.999, 0.001, 0.9, 0.999, 1e-8, g))
    [-0.001 -0.001]
    """

    def __init__(
        self, use_locking: bool = False, use_nesterov: bool = False, **unknown: Any
    ) -> None:
        super().__init__(use_locking, unknown, ("use_locking", "use_nesterov"))
        self.use_nesterov = check.flag(self.name, "use_nesterov", use_nesterov)

    def __call__(
        self,
        m: Any,
        v: Any,
        beta1_power: Any,
        beta2_power: Any,
        lr: Any,
        beta1: Any,
        beta2: Any,
        epsilon: Any,
        gradient: Any,
    ) -> Any:
        """Update ``m`` and ``v`` in place and return the step; see the class."""
        scalars = self._scalars(
            beta1_power=beta1_power,
            beta2_power=beta2_power,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
        )
        moments = self._variables(m=m, v=v)
        hp = adam_hp_for(self.name, moments["m"], scalars)
        first = moments["m"]
        if isinstance(first, DeviceArray):
            delta: Any = first.empty_like()
        else:
            delta = np.empty(first.shape, first.dtype)
        rule = rules.ADAM_NESTEROV_DELTA if self.use_nesterov else rules.ADAM_DELTA
        self._apply_dense(rule, {"delta": delta, **moments}, hp, "gradient", gradient)
        return delta.native() if isinstance(delta, DeviceArray) else delta


class AdamWeightDecay(Primitive):
    """Adam with decoupled weight decay and without bias correction::

        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*g*g
        var <- var - lr * (m / (sqrt(v) + epsilon) + decay*var)

    Args:
        use_locking: serialise concurrent calls on overlapping memory.

    Call arguments:
        var, m, v: of one floating dtype and shape; updated in place.
        lr, beta1, beta2, epsilon, decay: scalars; epsilon as `Adam`.
        gradient: of the shape of ``var`` and at most its precision.

    Returns:
        ``(var, m, v)``, the updated arrays.

    Raises:
        TypeError, ValueError: as `Adam`.

    Source: ``mindspore.ops.AdamWeightDecay``; Loshchilov and Hutter (2019), arXiv:1711.05101.

    >>> import numpy as np
    >>> var, m, v = np.ones(2, np.float32), np.zeros(2, np.float32), np.zeros(2, np.float32)
    >>> g = np.ones(2, np.float32)
    >>> _ = AdamWeightDecay()(var, m, v, 0.001, 0.9, 0.999, 1e-8, 0.5, g)
    >>> print(var)
    [0.9963377 0.9963377]
    """

    def __init__(self, use_locking: bool = False, **unknown: Any) -> None:
        super().__init__(use_locking, unknown, ("use_locking",))

    def __call__(
        self,
        var: Any,
        m: Any,
        v: Any,
        lr: Any,
        beta1: Any,
        beta2: Any,
        epsilon: Any,
        decay: Any,
        gradient: Any,
    ) -> tuple[Any, Any, Any]:
        """Update ``var``, ``m`` and ``v`` in place and return them; see the class."""
        scalars = self._scalars(lr=lr, beta1=beta1, beta2=beta2, epsilon=epsilon, decay=decay)
        variables = self._variables(var=var, m=m, v=v)
        real = rounding(variables["var"].dtype)
        hp = rules.adam_weight_decay_hp(real, **scalars)
        check.epsilon(self.name, "epsilon", scalars["epsilon"], hp.epsilon)
        self._apply_dense(rules.ADAM_WEIGHT_DECAY, variables, hp, "gradient", gradient)
        return var, m, v
