"""MXNet's Adam and AdamW."""

from __future__ import annotations

import math
from typing import Any

from ...kernels.rules import mxnet as rules
from ...ops.runtime import check
from ...ops.runtime.errors import reject
from ..base.arguments import Checked
from .adam_family import AdamFamily
from .arguments import rescale_factor
from .optimizer import register


@register
class Adam(AdamFamily):
    """MXNet's Adam.

    At update t = 1, 2, ... of an index (``begin_num_update`` shifts t)::

        g = clip(rescale_grad*grad, clip_gradient) + wd*w         compat="2.0"
        g = clip(rescale_grad*grad + wd*w, clip_gradient)         compat="1.9"
        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*g*g
        w <- w - lr * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + epsilon)

    Hyper-parameters are rounded to float32, for float64 weights too, and ``1 - beta`` is taken
    after that, as in MXNet's kernels.

    The two versions of MXNet disagree: ``compat`` says whose behaviour counts. ``"2.0"``, the
    default and the documented one, clips before the decay is added and has
    ``lazy_update=False``; ``"1.9"`` clips the sum and has ``lazy_update=True``.

    Args:
        learning_rate: at least 0. None: 0.001, or with a scheduler the scheduler's own (MXNet's
            default of 0.001 overwrites it).
        beta1, beta2: in [0, 1).
        epsilon: at least 0; what is 0 only in float32 (1e-46) raises.
        lazy_update: a `RowTensor` updates only the rows that occur; else all rows take the step,
            those that do not occur with ``grad = 0``. t advances either way. None: False, with
            ``compat="1.9"`` True.
        use_fused_step: False: the numbers of MXNet 2.0's composed operations, ``1 - beta`` in
            double precision; not with ``lazy_update`` or ``compat="1.9"``. It is one pass too.
        **base: the arguments of `Optimizer`. ``aggregate_num`` is infinite by default: an
            `Updater` passes everything in one call, and each dtype is one kernel call. Results
            do not depend on it.

    Weights and gradients are arrays of float32, float64, float16 or bfloat16. 16-bit weights are
    computed in float32, with float32 moments; with ``multi_precision`` they have a float32 master
    copy too, and master copy and weight are written in one pass. Rows of equal indices are summed
    first, in any order of indices. The caller's gradients are never written. A gradient None
    leaves its weight out.

    Arrays are on the host, or on a CUDA device, where an update is enqueued. There an update with
    an index out of range writes nothing, and `fusestep.synchronize` raises the `IndexError`; its
    counts stay, as MXNet's do after an error, and later updates go on.

    Raises:
        AssertionError: ``lazy_update=True`` with ``use_fused_step=False``.
        TypeError: a kind or dtype does not fit.
        ValueError: a value, a shape or the memory of an array does not fit.
        IndexError: an index of a `RowTensor` is out of range.
        KeyError: an unknown keyword (also `TypeError`).
        After an error that a call raises no weight, state or count has changed.

    Source: ``mxnet.optimizer.Adam`` (MXNet is retired since 2023); Kingma and Ba (2015),
    arXiv:1412.6980.

    >>> import numpy as np
    >>> opt = Adam(learning_rate=0.1)
    >>> w = np.ones(3, np.float32)
    >>> state = opt.create_state(0, w)
    >>> opt.update(0, w, np.array([1, -1, 0], np.float32), state)
    >>> print(w.round(5))
    [0.9 1.1 1. ]
    """

    _fused_rule = _composed_rule = rules.MXNET_ADAM
    lazy_update = Checked(check.flag)

    def __init__(
        self, learning_rate: float | None = None, beta1: float = 0.9, beta2: float = 0.999,
        epsilon: float = 1e-8, lazy_update: bool | None = None, use_fused_step: bool = True,
        **base: Any,
    ) -> None:  # fmt: skip
        super().__init__(learning_rate, use_fused_step, beta1, beta2, epsilon, **base)
        self.lazy_update = self.compat == "1.9" if lazy_update is None else lazy_update
        if self.use_fused_step:
            return
        if lazy_update:
            self._is_lazy(composed=True)
        if self.compat == "1.9":
            reject(ValueError, self._name, "use_fused_step", "is not in MXNet 1.9", True, False)


@register
class AdamW(AdamFamily):
    """MXNet 2.0's AdamW, whose decay is scaled by the bias-corrected learning rate.

    At update t = 1, 2, ... of an index::

        g = clip(rescale_grad*grad, clip_gradient)
        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*g*g
        a = lr * sqrt(1 - beta2**t) / (1 - beta1**t),  or with correct_bias=False  lr
        w <- w - a * (m / (sqrt(v) + epsilon) + wd*w)

    At t = 1 the decay is 0.32 times that of the paper and of PyTorch, and approaches it later.

    Args:
        learning_rate: as `Adam`.
        beta1, beta2: in [0, 1).
        epsilon: at least 0; what is 0 only in float32 (1e-46) raises.
        correct_bias: as in the formula.
        use_fused_step: False: the numbers of MXNet's composed operations: ``1 - beta`` in double
            precision, and the weight decays after it has stepped. It is one pass too.
        **base: as `Adam`, but ``compat`` is ``"2.0"``: 1.9 has no such class. Where
            ``rescale_grad`` is 0, infinite or NaN, an update changes nothing, counts included.

    Row-sparse gradients update all rows, those that do not occur with ``grad = 0``.

    Raises:
        TypeError, ValueError, IndexError, KeyError: as `Adam`.

    Source: ``mxnet.optimizer.AdamW`` of 2.0; Loshchilov and Hutter (2019), arXiv:1711.05101.

    >>> import numpy as np
    >>> opt = AdamW(learning_rate=0.1, wd=0.5, correct_bias=False, beta1=0.0, beta2=0.0)
    >>> w = np.ones(2, np.float32)
    >>> opt.update(0, w, np.array([1, -1], np.float32), opt.create_state(0, w))
    >>> print(w.round(4))
    [0.85 1.05]
    """

    _fused_rule, _composed_rule = rules.MXNET_ADAMW, rules.MXNET_ADAMW_COMPOSED
    correct_bias = Checked(check.flag)
    rescale_grad = Checked(rescale_factor)

    def __init__(
        self, learning_rate: float | None = None, beta1: float = 0.9, beta2: float = 0.999,
        epsilon: float = 1e-6, correct_bias: bool = True, use_fused_step: bool = True, **base: Any,
    ) -> None:  # fmt: skip
        super().__init__(learning_rate, use_fused_step, beta1, beta2, epsilon, **base)
        self.correct_bias = correct_bias
        if self.compat != "2.0":
            reject(ValueError, self._name, "compat", "has no AdamW", "'2.0'", repr(self.compat))

    def _acts(self) -> bool:
        return math.isfinite(self.rescale_grad) and self.rescale_grad != 0.0
