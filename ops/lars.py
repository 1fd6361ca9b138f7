"""The gradient of layer-wise adaptive rate scaling, under MindSpore's name."""

from __future__ import annotations

import math
from typing import Any

from ..kernels.rules import lars as rules
from .primitive import Primitive
from .runtime import check
from .runtime.arrays import ROUNDINGS, address_of, empty_like, native
from .runtime.device import device_of
from .runtime.errors import reject_unknown
from .runtime.step import tensor_step


class LARSUpdate(Primitive):
    """The gradient that LARS hands to an optimizer::

        c = hyperpara * |w| / (|g| + weight_decay*|w| + epsilon)
        with use_clip: c <- max(min(c / learning_rate, 1), 0)
        result = c * (gradient + weight_decay*weight)

    where ``|w| = sqrt(norm_weight)`` and ``|g| = sqrt(norm_gradient)``.

    Args:
        epsilon: float >= 0.
        hyperpara: float >= 0: the trust coefficient.
        use_clip: limit the local learning rate to ``learning_rate``.

    Call arguments:
        weight: float32, float64, float16 or bfloat16; it is read only.
        gradient: of the shape of ``weight`` and at most its precision.
        norm_weight, norm_gradient: scalars >= 0: the sums of **squares** of all elements.
        weight_decay: scalar >= 0.
        learning_rate: scalar >= 0; used with ``use_clip`` only.

    Returns:
        A new array of the shape and dtype of ``weight``.

    Raises:
        TypeError: a kind or dtype does not fit.
        ValueError: a shape or value does not fit.

    Source: ``mindspore.ops.LARSUpdate`` (deprecated in MindSpore 2.10); You et al. (2017),
    arXiv:1708.03888.

    >>> import numpy as np
    >>> w, g = np.array([3.0, 4.0], np.float32), np.array([1.0, 0.0], np.float32)
    >>> print(LARSUpdate(epsilon=0.0, hyperpara=0.1)(w, g, 25.0, 1.0, 0.0, 0.01))
    [0.5 0. ]
    """

    def __init__(
        self, epsilon: float = 1e-05, hyperpara: float = 0.001, use_clip: bool = False,
        **unknown: Any,
    ) -> None:  # fmt: skip
        reject_unknown(type(self).__name__, unknown, type(self))
        super().__init__()
        epsilon = check.float_attribute(self.name, "epsilon", epsilon)
        self.epsilon = self._at_least_0("epsilon", epsilon)
        hyperpara = check.float_attribute(self.name, "hyperpara", hyperpara)
        self.hyperpara = self._at_least_0("hyperpara", hyperpara)
        self.use_clip = check.flag(self.name, "use_clip", use_clip)

    def __call__(
        self, weight: Any, gradient: Any, norm_weight: Any, norm_gradient: Any, weight_decay: Any,
        learning_rate: Any,
    ) -> Any:  # fmt: skip
        """The scaled gradient; see the class."""
        norm_w = math.sqrt(self._at_least_0("norm_weight", norm_weight))
        norm_g = math.sqrt(self._at_least_0("norm_gradient", norm_gradient))
        decay = self._at_least_0("weight_decay", weight_decay)
        rate = self._at_least_0("learning_rate", learning_rate)
        w = check.float_array_anywhere(self.name, "weight", weight)
        w = check.contiguous(w, self.name, "weight")
        ratio = rules.ratio(norm_w, norm_g, decay, self.hyperpara, self.epsilon)
        if self.use_clip:
            ratio = rules.clipped(ratio, rate)
        # The ratio is computed in float64 and rounded once, like every scalar of a rule.
        hp = tuple(map(ROUNDINGS[w.dtype], (ratio, decay)))
        g = check.gradient(self.name, "gradient", gradient, w.dtype, w.shape)
        device_of(self.name, {"result": w, "gradient": g})
        arrays = (empty_like(w), w, g)
        tensor_step(rules.LARS_GRADIENT, (), arrays, [*map(address_of, arrays)], hp)
        return native(arrays[0])
