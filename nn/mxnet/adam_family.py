"""What MXNet's Adam and AdamW share: how they are called, and that nothing changes on an error."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from ...kernels.cpu.counts import Count
from ...kernels.cpu.parallel import commit
from ...kernels.cpu.workspace import Pool
from ...kernels.rules import mxnet as rules
from ...kernels.rules.rule import Prologue, Rule
from ...ops.runtime import check
from ...ops.runtime.arrays import adopt_anywhere, real_type
from ...ops.runtime.device import DeviceArray
from ...ops.runtime.errors import reject
from ..base.arguments import Checked
from ..base.parameter import Parameter
from ..engine.on_device import launch_updates
from .arguments import Lists, as_lists, decay_rate, is_list, kept_epsilon
from .bindings import Bindings, updates_of
from .optimizer import Optimizer

_RATE = 0.001
_DECAY = "wd with its factor"
_options = attrgetter(
    "_name", "compat", "rescale_grad", "clip_gradient", "beta1", "beta2", "epsilon", "correct_bias"
)
_wd = itemgetter(2)


class AdamFamily(Optimizer):
    """What Adam and AdamW share: two moments, one kernel call for all weights of a dtype."""

    # The rules for weights without and with a master copy; and those for composed operations.
    _fused_rules: tuple[Rule, Rule]
    _composed_rules: tuple[Rule, Rule]

    beta1 = Checked(decay_rate)
    beta2 = Checked(decay_rate)
    epsilon = Checked(kept_epsilon)
    correct_bias: Any = True

    def __init__(
        self, learning_rate: float | None, use_fused_step: bool, *of_moments: float, **base: Any
    ) -> None:
        if learning_rate is None and base.get("lr_scheduler") is None:
            learning_rate = _RATE
        if base.get("aggregate_num") is None and not self._has_own_update():
            base["aggregate_num"] = np.inf  # results do not depend on it
        super().__init__(learning_rate=learning_rate, use_fused_step=use_fused_step, **base)
        self.beta1, self.beta2, self.epsilon = of_moments
        self._bindings = Bindings(self._name)

    def create_state(self, index: Any, weight: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Zeros for mean and variance, float32 (float64 for a float64 weight).

        They live where the weight does, on a device in its framework.
        """
        array = adopt_anywhere(self._name, "weight", weight)
        mean, var = (_zeros_like(array, np.dtype(real_type(array.dtype))) for _ in range(2))
        return mean, var

    def step(
        self, indices: Sequence[Any], weights: Sequence[Any], grads: Sequence[Any],
        states: Sequence[Any],
    ) -> None:  # fmt: skip
        """Update weights with the scalars of MXNet's composed operations; see ``update``."""
        self._update_lists((indices, weights, grads, states), composed=True)

    def fused_step(
        self, indices: Sequence[Any], weights: Sequence[Any], grads: Sequence[Any],
        states: Sequence[Any],
    ) -> None:  # fmt: skip
        """Update weights with the scalars of MXNet's kernels; see ``update``."""
        self._update_lists((indices, weights, grads, states), composed=False)

    def _update_lists(self, lists: Lists, *, composed: bool, with_masters: bool = False) -> None:
        indices, weights, grads, states = as_lists(self._name, *lists)
        variables = [
            self._with_master(i, w, s)
            if with_masters and self._has_master(w)
            else self._variables(i, w, s)
            for i, w, s in zip(indices, weights, states, strict=True)
        ]
        self._update_all(indices, variables, grads, composed=composed)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """As `Optimizer.update`."""
        if not is_list(index):
            index, weight, grad, state = [index], [weight], [grad], [state]
        step = self.fused_step if self.use_fused_step else self.step
        step(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """As `Optimizer.update_multi_precision`; master copy and weight in one pass."""
        if not self.multi_precision:
            self.update(index, weight, grad, state)
            return
        if self._has_own_update():
            super().update_multi_precision(index, weight, grad, state)
            return
        lists, composed = (index, weight, grad, state), not self.use_fused_step
        self._update_lists(lists, composed=composed, with_masters=True)

    def _has_own_update(self) -> bool:
        """Whether a subclass of a user does something else."""
        steps = ("update", "step", "fused_step")
        return any(getattr(type(self), n) is not getattr(AdamFamily, n) for n in steps)

    def _variables(self, index: Any, weight: Any, state: Any) -> tuple[Any, ...]:
        """Weight, mean and variance of an index."""
        if type(state) is not tuple or len(state) != 2:
            state = self._pair(index, state, "(mean, var) of create_state")
        return weight.array if isinstance(weight, Parameter) else weight, *state

    def _with_master(self, index: Any, weight: Any, state: Any) -> tuple[Any, ...]:
        """Master copy, mean, variance, and the weight that becomes the rounded copy."""
        expected = "(master, (mean, var)) of create_state_multi_precision"
        master, moments = self._pair(index, state, expected)
        copy = weight.array if isinstance(weight, Parameter) else weight
        return (*self._variables(index, master, moments), copy)

    def check_state(self, index: Any, state: Any) -> None:
        """As `Optimizer.check_state`: two moments, or a master copy and its moments."""
        made = (AdamFamily.create_state, AdamFamily.create_state_multi_precision)
        if (type(self).create_state, type(self).create_state_multi_precision) != made:
            return  # a subclass of a user has others
        name, expected = f"state of {self._label(index)!r}", "(mean, var) of create_state"
        first, second = self._pair(index, state, expected)
        has_master = isinstance(second, tuple | list)
        others = self._pair(index, second, expected) if has_master else (second,)
        for array in (check.variable(self._name, name, given) for given in (first, *others)):
            if array.shape != first.shape:
                wrong = "has arrays that differ in shape"
                reject(ValueError, self._name, name, wrong, first.shape, array.shape)

    def _update_all(
        self, indices: Sequence[Any], variables: Sequence[Any], grads: Sequence[Any], composed: bool
    ) -> None:
        """Everything that can fail comes before the first write, and the counts go back then."""
        if not self._acts():
            return
        lazy = self._touches_only_rows_of_gradient(composed)
        sparse_update = "lazy" if lazy else "dense_equivalent"
        bound, given = self._bindings.read(indices, self._label, variables, sparse_update, grads)
        active = indices
        if not given.layout.is_complete:
            active = [indices[i] for i in given.layout.active.tolist()]
        before = self.num_update, list(map(self._index_update_count.get, active))
        counter = _counters.take()
        done, count = counter
        done[0] = 0
        try:
            numbers = self._advance(active)
            of_kind = self._composed_rules if composed else self._fused_rules
            how = composed, of_kind[0].decays, _options(self)
            prologue = _prologue(max(map(_wd, numbers), default=0.0), *how)
            updates = updates_of(
                given, of_kind, prologue, touched_only=lazy, numbers=numbers,
                scalars=_scalars, options=(prologue, *how),
            )  # fmt: skip
            if bound.device is None:
                commit([update.prepared() for update in updates], count)
            elif updates:
                launch_updates(updates, given)
        except BaseException:
            if not done[0]:  # an interrupt may come right after it
                self._restore(active, *before)
            raise
        _counters.give(counter)

    def _restore(
        self, indices: Sequence[Any], num_update: int, counts: Sequence[int | None]
    ) -> None:
        self.num_update = num_update
        for index, count in zip(indices, counts, strict=True):
            if count is None:
                self._index_update_count.pop(index, None)
            else:
                self._index_update_count[index] = count

    def forget_arrays(self) -> None:
        """Hold no array of a former call any more."""
        self._bindings.forget()

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
        counts = list(map(self._index_update_count.__getitem__, indices))
        if not counts or counts[0] == self.num_update:  # it has been this from the first one on
            lrs = self._get_lrs(indices)
        else:
            lrs = []
            for index, t in zip(indices, counts, strict=True):
                largest = self.num_update = max(largest, t)
                lrs += self._get_lrs([index])
        return list(zip(counts, lrs, self._get_wds(indices), strict=True))


# A model has few different options, and its weights are often updated one by one. (Typed: a bool is
# refused, also where it equals a number that is known.)
_remembered = lru_cache(maxsize=64, typed=True)


@_remembered
def _prologue(decay: float, composed: bool, decays: bool, options: tuple[Any, ...]) -> Prologue:
    """What happens to the gradients before a rule, which ``decays`` the weight itself or not."""
    where, compat, rescale, bound, *_ = options
    check.scalar_at_least_0(where, _DECAY, decay)
    added = 0.0 if decays else decay
    return rules.conditioning(compat, rescale, bound or 0.0, added, composed=composed)


@_remembered
def _scalars(
    real: Any, t: int, lr: float, wd: float, prologue: Prologue, composed: bool, decays: bool,
    options: tuple[Any, ...],
) -> np.ndarray:  # fmt: skip
    """A row of the scalars of rule and prologue for a weight that is updated the ``t``-th time."""
    where, _, rescale, bound, beta1, beta2, epsilon, correct_bias = options
    check.scalar_at_least_0(where, _DECAY, wd)
    size = rules.bias_corrected(lr, beta1, beta2, t) if correct_bias else lr
    size = check.scalar_at_least_0(where, "the learning rate with its factors", size)
    of_rule = (size, epsilon, wd) if decays else (size, epsilon)
    of_gradient = prologue, rescale, bound or 0.0, wd
    own = rules.adam_scalars(real, beta1, beta2, *of_rule, composed=composed)
    own += rules.conditioning_scalars(real, *of_gradient, composed=composed)
    row: np.ndarray = np.array([own], real)
    row.flags.writeable = False
    return row


def _counter() -> tuple[np.ndarray, Count]:
    done = np.zeros(1, np.int64)
    return done, Count(done)


# What tells whether a call has written: counted up with it. To make one takes longer than to write.
_counters = Pool(_counter)


def _zeros_like(array: Any, dtype: np.dtype[Any]) -> Any:
    if isinstance(array, DeviceArray):
        return array.filled_like(0.0, dtype).native()
    return np.zeros(array.shape, dtype)
