"""RMSProp, plain and centered, under MindSpore's names and argument order."""

from __future__ import annotations

from typing import Any

from ..kernels.formula import Numbers
from ..kernels.rules import rmsprop as rules
from .primitive import Named, Primitive
from .runtime import check
from .runtime.arrays import ROUNDINGS


class ApplyRMSProp(Primitive):
    """RMSProp::

        mean_square <- decay*mean_square + (1 - decay)*grad*grad
        moment <- momentum*moment + learning_rate * grad / sqrt(mean_square + epsilon)
        var <- var - moment

    Call arguments:
        epsilon: a scalar; what is 0 only in the type of the arithmetic (1e-46 in float32) raises.

    Source: ``mindspore.ops.ApplyRMSProp``; Tieleman and Hinton (2012), lecture 6.5.

    >>> import numpy as np
    >>> w, s, mo = np.ones(2, np.float32), np.ones(2, np.float32), np.zeros(2, np.float32)
    >>> _ = ApplyRMSProp()(w, s, mo, 0.1, np.ones(2, np.float32), 0.9, 0.0, 1e-10)
    >>> print(w)
    [0.9 0.9]
    """

    def __call__(
        self, var: Any, mean_square: Any, moment: Any, learning_rate: Any, grad: Any, decay: Any,
        momentum: Any, epsilon: Any,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        """Update ``var``, ``mean_square`` and ``moment`` in place; see the class."""
        scalars = self._scalars(
            learning_rate=learning_rate, decay=decay, epsilon=epsilon, momentum=momentum
        )
        variables = self._variables(var=var, mean_square=mean_square, moment=moment)
        hp = _hp(self.name, variables, *scalars)
        self._apply_dense(rules.RMSPROP_MOMENTUM, variables, hp, "grad", grad)
        return var, mean_square, moment


class ApplyCenteredRMSProp(Primitive):
    """RMSProp with a running variance instead of a running mean square::

        mean_gradient <- decay*mean_gradient + (1 - decay)*grad
        mean_square <- decay*mean_square + (1 - decay)*grad*grad
        d = mean_square - mean_gradient*mean_gradient + epsilon
        moment <- momentum*moment + learning_rate * grad / sqrt(d)
        var <- var - moment

    Where ``d`` is not positive, ``moment`` and ``var`` stay as they are.

    Call arguments:
        grad, learning_rate, decay, momentum, epsilon: as `ApplyRMSProp`.

    Source: ``mindspore.ops.ApplyCenteredRMSProp``; Graves (2013), arXiv:1308.0850.

    >>> import numpy as np
    >>> w, mg, s, mo = (np.full(2, x, np.float32) for x in (1.0, 0.0, 1.0, 0.0))
    >>> _ = ApplyCenteredRMSProp()(w, mg, s, mo, np.ones(2, np.float32), 0.1, 0.9, 0.0, 1e-10)
    >>> print(w.round(4))
    [0.8995 0.8995]
    """

    def __call__(
        self, var: Any, mean_gradient: Any, mean_square: Any, moment: Any, grad: Any,
        learning_rate: Any, decay: Any, momentum: Any, epsilon: Any,
    ) -> tuple[Any, Any, Any, Any]:  # fmt: skip
        """Update the variables in place and return them; see the class."""
        scalars = self._scalars(
            learning_rate=learning_rate, decay=decay, epsilon=epsilon, momentum=momentum
        )
        variables = self._variables(
            var=var, mean_gradient=mean_gradient, mean_square=mean_square, moment=moment
        )
        hp = _hp(self.name, variables, *scalars)
        self._apply_dense(rules.RMSPROP_CENTERED_MOMENTUM, variables, hp, "grad", grad)
        return var, mean_gradient, mean_square, moment


def _hp(where: str, variables: Named, lr: float, *constants: float) -> Numbers:
    """The scalars of a rule; the constants are decay, epsilon and momentum."""
    real, epsilon = ROUNDINGS[variables["var"].dtype], constants[1]
    check.epsilon(where, "epsilon", epsilon, real(epsilon))
    return rules.rmsprop_momentum_scalars(real, lr, 0.0, 0, constants, ())
