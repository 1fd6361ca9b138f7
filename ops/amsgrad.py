"""AMSGrad on dense gradients, in both published signatures."""

from __future__ import annotations

from typing import Any

from ..kernels.rules import adam as rules
from .adam import Corrected
from .primitive import Primitive
from .runtime import check


class ApplyAdamWithAmsgradV2(Primitive):
    """AMSGrad: Adam that divides by the largest second moment seen so far::

        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*g*g
        vhat <- max(vhat, v)
        var <- var - lr * sqrt(1 - beta2_power) / (1 - beta1_power) * m / (sqrt(vhat) + epsilon)

    The maximum is over the moment without bias correction. With ``beta1_power == 1`` the step
    is infinite or NaN, without an error.

    Source: ``mindspore.ops.ApplyAdamWithAmsgradV2``; Reddi, Kale and Kumar (2018),
    arXiv:1904.09237.

    >>> import numpy as np
    >>> f = lambda *rows: np.array(rows, np.float32)
    >>> var, m, v = f([0.2, 0.2], [0.2, 0.2]), f([0.1, 0.2], [0.4, 0.3]), f([0.2, 0.1], [0.3, 0.4])
    >>> vhat, grad = f([0.1, 0.2], [0.6, 0.2]), f([0.4, 0.2], [0.2, 0.3])
    >>> op = ApplyAdamWithAmsgradV2()
    >>> _ = op(var, m, v, vhat, 0.9, 0.999, 0.01, 0.8, 0.999, 1e-8, grad)
    >>> print(var)
    [[0.19886853 0.1985858 ]
     [0.19853032 0.19849943]]
    """

    def __call__(
        self, var: Any, m: Any, v: Any, vhat: Any, beta1_power: Any, beta2_power: Any, lr: Any,
        beta1: Any, beta2: Any, epsilon: Any, grad: Any,
    ) -> tuple[Any, Any, Any, Any]:  # fmt: skip
        """Update the four variables in place and return them; see the class."""
        scalars = Corrected.read(self.name, beta1_power, beta2_power, lr, beta1, beta2, epsilon)
        variables = self._variables(var=var, m=m, v=v, vhat=vhat)
        hp = scalars.hp(self.name, variables)
        self._apply_dense(rules.ADAM_AMSGRAD, variables, hp, "grad", grad)
        return var, m, v, vhat


class ApplyAdamWithAmsgrad(Primitive):
    """`ApplyAdamWithAmsgradV2` with the betas and epsilon as attributes.

    Args:
        beta1, beta2, epsilon: scalars.

    Source: ``mindspore.ops.ApplyAdamWithAmsgrad``.

    >>> import numpy as np
    >>> var, m, v, vhat = np.ones((4, 1), np.float32), *np.zeros((3, 4, 1), np.float32)
    >>> _ = ApplyAdamWithAmsgrad()(var, m, v, vhat, 0.9, 0.999, 0.001, np.ones((4, 1), np.float32))
    >>> print(var[0])
    [0.999]
    """

    def __init__(
        self, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8,
        use_locking: bool = False, **unknown: Any,
    ) -> None:  # fmt: skip
        super().__init__(use_locking, **unknown)
        self.beta1 = check.scalar(self.name, "beta1", beta1)
        self.beta2 = check.scalar(self.name, "beta2", beta2)
        self.epsilon = check.scalar(self.name, "epsilon", epsilon)

    def __call__(
        self, var: Any, m: Any, v: Any, vhat: Any, beta1_power: Any, beta2_power: Any, lr: Any,
        grad: Any,
    ) -> tuple[Any, Any, Any, Any]:  # fmt: skip
        """Update the four variables in place and return them; see the class."""
        constants = self.beta1, self.beta2, self.epsilon
        scalars = Corrected.read(self.name, beta1_power, beta2_power, lr, *constants)
        variables = self._variables(var=var, m=m, v=v, vhat=vhat)
        hp = scalars.hp(self.name, variables)
        self._apply_dense(rules.ADAM_AMSGRAD, variables, hp, "grad", grad)
        return var, m, v, vhat
