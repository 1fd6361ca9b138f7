"""Gradient descent, plain and with momentum, under MindSpore's names and argument order."""

from __future__ import annotations

from typing import Any

from ..kernels.rule import Prologue
from ..kernels.rules import sgd as rules
from ..kernels.rules.gradient import COUPLED_DECAY, SCALE
from .primitive import Primitive
from .runtime import check
from .runtime.arrays import ROUNDINGS
from .runtime.errors import reject


class ApplyMomentum(Primitive):
    """Gradient descent with momentum::

        accumulation <- momentum*accumulation + gradient_scale*gradient
        variable <- variable - learning_rate*accumulation
        with use_nesterov: variable - learning_rate*(gradient_scale*gradient
                                                     + momentum*accumulation)

    Args:
        gradient_scale: float by which gradients are multiplied.

    Source: ``mindspore.ops.ApplyMomentum``.

    >>> import numpy as np
    >>> w, a, g = np.ones(2, np.float32), np.ones(2, np.float32), np.ones(2, np.float32)
    >>> _ = ApplyMomentum()(w, a, 0.1, g, 0.9)
    >>> print(w, a)
    [0.81 0.81] [1.9 1.9]
    """

    def __init__(
        self, use_nesterov: bool = False, use_locking: bool = False, gradient_scale: float = 1.0,
        **unknown: Any,
    ) -> None:  # fmt: skip
        super().__init__(use_locking, **unknown)
        self.use_nesterov = check.flag(self.name, "use_nesterov", use_nesterov)
        self.gradient_scale = check.scalar(self.name, "gradient_scale", gradient_scale)

    def __call__(
        self, variable: Any, accumulation: Any, learning_rate: Any, gradient: Any, momentum: Any
    ) -> tuple[Any, Any]:
        """Update ``variable`` and ``accumulation`` in place and return them; see the class."""
        lr, mu = self._scalars(learning_rate=learning_rate, momentum=momentum)
        variables = self._variables(variable=variable, accumulation=accumulation)
        real = ROUNDINGS[variables["variable"].dtype]
        hp = rules.momentum_scalars(real, lr, 0.0, 1, (mu, 0.0), ())
        prologue: Prologue = ()
        if self.gradient_scale != 1.0:
            hp, prologue = (*hp, self.gradient_scale), (SCALE,)
        rule = rules.MOMENTUM_NESTEROV if self.use_nesterov else rules.MOMENTUM
        self._apply_dense(rule, variables, hp, "gradient", gradient, prologue)
        return variable, accumulation


class SGD(Primitive):
    """Stochastic gradient descent that knows the first step of each element.

    With ``g = gradient + weight_decay*parameters``, and with a momentum above 0::

        accum <- g                                     where stat > 0; there stat <- 0
        accum <- momentum*accum + (1 - dampening)*g    elsewhere
        parameters <- parameters - learning_rate*accum
        with nesterov: parameters - learning_rate*(g + momentum*accum)

    With a momentum of 0: ``parameters <- parameters - learning_rate*g``, and ``accum`` and
    ``stat`` stay as they are.

    Args:
        dampening: float >= 0; with ``nesterov`` it must be 0.
        weight_decay: float >= 0.
        nesterov: Nesterov's step.
        use_locking: ... It is an addition.

    Call arguments:
        momentum: scalar >= 0.
        stat: as ``parameters``, above 0 where the next step is the first; updated in place.

    Returns:
        ``parameters``, the updated array.

    Source: ``mindspore.ops.SGD``.

    >>> import numpy as np
    >>> w, a, stat = np.ones(2, np.float32), np.zeros(2, np.float32), np.ones(2, np.float32)
    >>> g = np.ones(2, np.float32)
    >>> print(SGD(dampening=0.5)(w, g, 0.1, a, 0.9, stat), a, stat)
    [0.9 0.9] [1. 1.] [0. 0.]
    """

    def __init__(
        self, dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False, *,
        use_locking: bool = False, **unknown: Any,
    ) -> None:  # fmt: skip
        super().__init__(use_locking, **unknown)
        self.dampening = self._at_least_0("dampening", dampening)
        self.weight_decay = self._at_least_0("weight_decay", weight_decay)
        self.nesterov = check.flag(self.name, "nesterov", nesterov)
        if self.nesterov and self.dampening != 0.0:
            wrong = "excludes nesterov"
            reject(ValueError, self.name, "dampening", wrong, "0.0", self.dampening)

    def __call__(
        self, parameters: Any, gradient: Any, learning_rate: Any, accum: Any, momentum: Any,
        stat: Any,
    ) -> Any:  # fmt: skip
        """Update ``parameters``, ``accum`` and ``stat`` in place; see the class."""
        lr = check.scalar(self.name, "learning_rate", learning_rate)
        mu = self._at_least_0("momentum", momentum)
        variables = self._variables(parameters=parameters, accum=accum, stat=stat)
        real = ROUNDINGS[variables["parameters"].dtype]
        if mu == 0.0:
            # The others are checked but have no part in the step.
            check.no_overlap(self.name, list(variables), list(variables.values()))
            rule, hp = rules.SGD, rules.sgd_scalars(real, lr, 0.0, 0, (), ())
            variables = {"parameters": variables["parameters"]}
        else:
            rule = rules.SGD_FIRST_STEP_NESTEROV if self.nesterov else rules.SGD_FIRST_STEP
            # The scalars of a later update: which elements take their first one says ``stat``.
            hp = rules.first_step_scalars(real, lr, 0.0, 0, (mu, self.dampening), ())
        prologue: Prologue = ()
        if self.weight_decay > 0.0:
            hp, prologue = (*hp, self.weight_decay, 0.0), (COUPLED_DECAY,)
        self._apply_dense(rule, variables, hp, "gradient", gradient, prologue)
        return parameters
