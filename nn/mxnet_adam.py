"""MXNet's Adam and AdamW, over the same rules as MindSpore's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..kernels.rules import mxnet as rules
from ..kernels.rules.rule import Prologue, Rule
from ..ops import check
from ..ops.arrays import adopt, real_type
from ..ops.errors import message
from .mxnet_arguments import Checked, as_lists, decay_rate
from .mxnet_optimizer import Optimizer, register
from .mxnet_step import Bindings, Step
from .parameter import Parameter

_RATE = 0.001


class _AdamFamily(Optimizer):
    """What `Adam` and `AdamW` share: two moments, one kernel call for all weights of a dtype."""

    _decay_is_coupled = True
    # The rules for weights without and with a master copy: fused, and composed.
    _fused: tuple[Rule, Rule]
    _composed: tuple[Rule, Rule]

    beta1 = Checked(decay_rate)
    beta2 = Checked(decay_rate)
    epsilon = Checked(check.scalar_at_least_0)

    def __init__(
        self,
        learning_rate: float | None,
        beta1: float,
        beta2: float,
        epsilon: float,
        use_fused_step: bool,
        **base: Any,
    ) -> None:
        if learning_rate is None and base.get("lr_scheduler") is None:
            learning_rate = _RATE
        if base.get("aggregate_num") is None:
            base["aggregate_num"] = np.inf  # results do not depend on it
        super().__init__(learning_rate=learning_rate, use_fused_step=use_fused_step, **base)
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self._bindings = Bindings(self._name)

    def create_state(self, index: Any, weight: Any) -> tuple[np.ndarray, np.ndarray]:  # noqa: ARG002
        """Zeros for mean and variance, float32 (float64 for a float64 weight)."""
        array = adopt(self._name, "weight", weight)
        mean, var = (np.zeros(array.shape, real_type(array.dtype)) for _ in range(2))
        return mean, var

    def step(
        self, indices: Sequence[Any], weights: Sequence[Any], grads: Sequence[Any],
        states: Sequence[Any],
    ) -> None:  # fmt: skip
        """Update weights with the scalars of MXNet's composed operations; see ``update``."""
        self._update_all(indices, self._variables(weights, states), grads, composed=True)

    def fused_step(
        self, indices: Sequence[Any], weights: Sequence[Any], grads: Sequence[Any],
        states: Sequence[Any],
    ) -> None:  # fmt: skip
        """Update weights with the scalars of MXNet's kernels; see ``update``."""
        self._update_all(indices, self._variables(weights, states), grads, composed=False)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """As `Optimizer.update_multi_precision`; master copy and weight in one pass."""
        lists = as_lists(self._name, index, weight, grad, state)
        indices, weights, grads, states = lists
        masters = [self._has_master(w) for w in weights]
        if self._has_own_update() or not any(masters):
            super().update_multi_precision(index, weight, grad, state)
            return
        variables = [
            self._with_master(i, w, s) if has_master else self._variables([w], [s])[0]
            for i, w, s, has_master in zip(indices, weights, states, masters, strict=True)
        ]
        self._update_all(indices, variables, grads, composed=not self.use_fused_step)

    def _has_own_update(self) -> bool:
        """Whether a subclass of a user does something else."""
        steps = ("update", "step", "fused_step")
        return any(getattr(type(self), n) is not getattr(_AdamFamily, n) for n in steps)

    def _variables(self, weights: Sequence[Any], states: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Weight, mean and variance of each index."""
        if not all(isinstance(s, tuple | list) and len(s) == 2 for s in states):
            expected = "(mean, var) of create_state"
            raise TypeError(message(self._name, "state", "has a wrong type", expected, states))
        return [
            (w.data if isinstance(w, Parameter) else w, *s)
            for w, s in zip(weights, states, strict=True)
        ]

    def _with_master(self, index: Any, weight: Any, state: Any) -> tuple[Any, ...]:
        """Master copy, mean, variance, and the weight that becomes the rounded copy."""
        if not isinstance(state, tuple | list) or len(state) != 2:
            name, got = f"state of {self._label(index)!r}", type(state).__name__
            expected = "(master, (mean, var)) of create_state_multi_precision"
            raise TypeError(message(self._name, name, "has a wrong type", expected, got))
        (variables,) = self._variables([state[0]], [state[1]])
        return (*variables, weight.data if isinstance(weight, Parameter) else weight)

    def _label(self, index: Any) -> str:
        return str(self.idx2name.get(index, index))

    def _update_all(
        self,
        indices: Sequence[Any],
        variables: Sequence[tuple[Any, ...]],
        grads: Sequence[Any],
        *,
        composed: bool,
    ) -> None:
        """Everything that can fail comes before the first write, and the counts go back then."""
        if not self._acts():
            return
        lazy = self._touches_only_rows_of_gradient(composed)
        bound = self._bindings.bound(
            indices, self._label, variables, "lazy" if lazy else "dense_equivalent"
        )
        given = bound.read(grads)
        counts, num_update = dict(self._index_update_count), self.num_update
        try:
            numbers = self._advance([indices[i] for i in given.layout.active.tolist()])
            prologue = self._prologue(max((wd for *_, wd in numbers), default=0.0))
            of_each: list[Any] = [None] * len(indices)
            for i, of_one in zip(given.layout.active.tolist(), numbers, strict=True):
                of_each[i] = of_one
            Step(
                bound,
                given,
                self._composed if composed else self._fused,
                prologue,
                touched_only=lazy,
                numbers=of_each,
                scalars=lambda real, n: self._scalars(real, prologue, *n, composed=composed),
            ).run()
        except BaseException:
            self._index_update_count, self.num_update = counts, num_update
            raise

    def _acts(self) -> bool:
        """Whether there is an update at all."""
        return True

    def _touches_only_rows_of_gradient(self, composed: bool) -> bool:  # noqa: ARG002
        """What a row-sparse gradient does."""
        return False

    def _advance(self, indices: Sequence[Any]) -> list[tuple[int, float, float]]:
        """Count an update of each index: its count, learning rate and weight decay.

        A scheduler is asked with the largest count so far, as if the indices came one by one.
        """
        largest = self.num_update
        self._update_count(indices)
        counts = [self._index_update_count[index] for index in indices]
        if not counts or counts[0] == self.num_update:  # it has been this from the first one on
            lrs = self._get_lrs(indices)
        else:
            lrs = []
            for index, t in zip(indices, counts, strict=True):
                largest = self.num_update = max(largest, t)
                lrs += self._get_lrs([index])
        return list(zip(counts, lrs, self._get_wds(indices), strict=True))

    def _prologue(self, decay: float) -> Prologue:
        bound = self.clip_gradient
        return rules.conditioning(
            self.compat,
            scales=np.float32(self.rescale_grad) != 1,
            clips=bound is not None and bound > 0,
            decays=self._decay_is_coupled and bool(np.float32(decay) > 0),
        )

    def _scalars(
        self, real: Any, prologue: Prologue, t: int, lr: float, wd: float, *, composed: bool
    ) -> tuple[Any, ...]:
        """The scalars of rule and prologue for a weight that is updated the ``t``-th time."""
        own = self._rule_scalars(real, t, lr, wd, composed)
        return own + rules.conditioning_scalars(
            real, prologue, self.rescale_grad, self.clip_gradient or 0.0, wd, composed=composed
        )

    def _rule_scalars(
        self, real: Any, t: int, lr: float, wd: float, composed: bool
    ) -> tuple[Any, ...]:
        """The scalars of the rule."""
        raise NotImplementedError

    def _step_size(self, t: int, lr: float) -> float:
        corrected = rules.bias_corrected(lr, self.beta1, self.beta2, t)
        return check.scalar(self._name, "the learning rate", corrected)


@register
class Adam(_AdamFamily):
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
        epsilon: at least 0.
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

    Raises:
        AssertionError: ``lazy_update=True`` with ``use_fused_step=False``.
        TypeError: a kind or dtype does not fit.
        ValueError: a value, a shape or the memory of an array does not fit.
        IndexError: an index of a `RowTensor` is out of range.
        KeyError: an unknown keyword (also `TypeError`).
        After an error no weight, state or count has changed.

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

    _fused = (rules.MXNET_ADAM, rules.MXNET_ADAM_MASTER)
    _composed = _fused
    lazy_update = Checked(check.flag)

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        lazy_update: bool | None = None,
        use_fused_step: bool = True,
        **base: Any,
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, use_fused_step, **base)
        self.lazy_update = self.compat == "1.9" if lazy_update is None else lazy_update
        if self.use_fused_step:
            return
        if lazy_update:
            raise AssertionError(
                message(self._name, "lazy_update", "needs use_fused_step", True, False)
            )
        if self.compat == "1.9":
            raise ValueError(
                message(self._name, "use_fused_step", "is not in MXNet 1.9", True, False)
            )

    def _touches_only_rows_of_gradient(self, composed: bool) -> bool:
        return bool(self.lazy_update) and not composed

    def _rule_scalars(
        self, real: Any, t: int, lr: float, wd: float, composed: bool  # noqa: ARG002
    ) -> tuple[Any, ...]:  # fmt: skip
        step_size = self._step_size(t, lr)
        return rules.adam_hp(
            real, step_size, self.beta1, self.beta2, self.epsilon, composed=composed
        )


@register
class AdamW(_AdamFamily):
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
        epsilon: at least 0.
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

    _decay_is_coupled = False
    _fused = (rules.MXNET_ADAMW, rules.MXNET_ADAMW_MASTER)
    _composed = (rules.MXNET_ADAMW_COMPOSED, rules.MXNET_ADAMW_COMPOSED_MASTER)
    correct_bias = Checked(check.flag)
    rescale_grad = Checked(check.number)

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        correct_bias: bool = True,
        use_fused_step: bool = True,
        **base: Any,
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, use_fused_step, **base)
        self.correct_bias = correct_bias
        if self.compat != "2.0":
            raise ValueError(
                message(self._name, "compat", "has no AdamW", "'2.0'", repr(self.compat))
            )

    def _acts(self) -> bool:
        return math.isfinite(np.float32(self.rescale_grad)) and self.rescale_grad != 0.0

    def _rule_scalars(
        self, real: Any, t: int, lr: float, wd: float, composed: bool
    ) -> tuple[Any, ...]:
        step_size = self._step_size(t, lr) if self.correct_bias else lr
        return rules.adamw_hp(
            real, step_size, self.beta1, self.beta2, self.epsilon, wd, composed=composed
        )
