"""The base of MXNet's Adam and AdamW: their calls, after whose errors nothing has changed."""

from __future__ import annotations

from functools import lru_cache
from itertools import count
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from ...kernels.cpu.counts import Count
from ...kernels.cpu.threads import allocation
from ...kernels.cpu.threads.parallel import commit
from ...kernels.cpu.threads.workspace import Pool
from ...kernels.rule import Prologue, Rule
from ...kernels.rules import mxnet as rules
from ...ops.runtime import check
from ...ops.runtime.arrays import adopt_anywhere, real_type
from ...ops.runtime.device import DeviceArray
from ...ops.runtime.errors import reject
from ...ops.runtime.row_step import Update, run_updates
from ..base.arguments import Checked
from ..base.parameter import Parameter
from ..engine.layout import Gradients
from .arguments import LISTS, Lists, Values, as_lists, decay_rate, kept_epsilon
from .bindings import Bindings
from .optimizer import Optimizer

_RATE = 0.001
_DECAY = "wd with its factor"
_options = attrgetter(
    "_name", "compat", "rescale_grad", "clip_gradient", "beta1", "beta2", "epsilon", "correct_bias"
)
_wd = itemgetter(2)


class AdamFamily(Optimizer):
    """The base of Adam and AdamW: two moments, one kernel call for all weights of a dtype."""

    _fused_rule: Rule
    _composed_rule: Rule

    beta1 = Checked(decay_rate)
    beta2 = Checked(decay_rate)
    epsilon = Checked(kept_epsilon)
    correct_bias: Any = True
    lazy_update: Any = False

    def __init__(
        self, learning_rate: float | None, use_fused_step: bool, *moment_options: float, **base: Any
    ) -> None:
        if learning_rate is None and base.get("lr_scheduler") is None:
            learning_rate = _RATE
        if base.get("aggregate_num") is None and not self._has_own_update():
            base["aggregate_num"] = np.inf  # results do not depend on it
        super().__init__(learning_rate=learning_rate, use_fused_step=use_fused_step, **base)
        self.beta1, self.beta2, self.epsilon = moment_options
        self._bindings = Bindings(self._name)

    def create_state(self, index: Any, weight: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Zeros for mean and variance, float32 (float64 for a float64 weight).

        They live where the weight does, on a device in its framework.
        """
        array = adopt_anywhere(self._name, "weight", weight)
        mean, var = (_zeros_like(array, np.dtype(real_type(array.dtype))) for _ in range(2))
        return mean, var

    def step(self, indices: Values, weights: Values, grads: Values, states: Values) -> None:
        """Update weights with the scalars of MXNet's composed operations; see ``update``."""
        self._update_lists((indices, weights, grads, states), composed=True)

    def fused_step(self, indices: Values, weights: Values, grads: Values, states: Values) -> None:
        """Update weights with the scalars of MXNet's kernels; see ``update``."""
        self._update_lists((indices, weights, grads, states), composed=False)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Update one weight, or each of a list, in place; arguments as `Optimizer.update`."""
        if not isinstance(index, LISTS):
            index, weight, grad, state = [index], [weight], [grad], [state]
        step = self.fused_step if self.use_fused_step else self.step
        step(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Update weights of which 16-bit ones have a master copy, both in one pass.

        Arguments and errors are those of `Optimizer.update_multi_precision`.
        """
        lists = index, weight, grad, state
        if not self.multi_precision:
            self.update(*lists)
        elif self._has_own_update():
            super().update_multi_precision(*lists)
        else:
            self._update_lists(lists, composed=not self.use_fused_step, with_masters=True)

    def _has_own_update(self) -> bool:
        """Whether a subclass of a user does something else."""
        steps = ("update", "step", "fused_step")
        return any(getattr(type(self), n) is not getattr(AdamFamily, n) for n in steps)

    def _variables(
        self, index: Any, weight: Any, state: Any, *, may_have_master: bool
    ) -> tuple[Any, ...]:
        """Weight, mean and variance, and the master copy, if the weight is rounded from one."""
        master: list[Any] = []
        if may_have_master and self._has_master(weight):
            expected = "(master, (mean, var)) of create_state_multi_precision"
            *master, state = self._pair(index, state, expected)
        if type(state) is not tuple or len(state) != 2:
            state = self._pair(index, state, "(mean, var) of create_state")
        return weight.array if isinstance(weight, Parameter) else weight, *state, *master

    def check_state(self, index: Any, state: Any) -> None:
        """Refuse a state that was read and is not two moments, or a master copy and its moments.

        Raises:
            TypeError: it is of another form, or holds something else than arrays of floats.
            ValueError: its arrays differ in shape.
        """
        made = (AdamFamily.create_state, AdamFamily.create_state_multi_precision)
        if (type(self).create_state, type(self).create_state_multi_precision) != made:
            return  # a subclass of a user has others
        name, expected = f"state of {self._label(index)!r}", "(mean, var) of create_state"
        first, second = self._pair(index, state, expected)
        has_master = isinstance(second, tuple | list)
        others = self._pair(index, second, expected) if has_master else (second,)
        for array in (check.variable(self._name, name, each) for each in (first, *others)):
            if array.shape != first.shape:
                wrong = "has arrays that differ in shape"
                reject(ValueError, self._name, name, wrong, first.shape, array.shape)

    def _update_lists(self, lists: Lists, *, composed: bool, with_masters: bool = False) -> None:
        """Update lists of weights; an error comes before the first write, and counts go back."""
        indices, weights, grads, states = as_lists(self._name, *lists)
        variables = [
            self._variables(i, w, s, may_have_master=with_masters)
            for i, w, s in zip(indices, weights, states, strict=True)
        ]
        if not self._acts():
            return
        touched_only = self._is_lazy(composed)
        rule = self._composed_rule if composed else self._fused_rule
        weights = indices, self._label, variables
        bound, gradients = self._bindings.read(*weights, rule, touched_only, grads)
        layout = gradients.layout
        active = indices if layout.is_complete else [indices[i] for i in layout.active.tolist()]
        largest, counts = self.num_update, self._index_update_count
        # The counts are a dict, which the compiled call cannot write: they go ahead of it, and
        # `done` goes up within it, which after an interrupt tells whether to take them back.
        before = [*map(counts.get, active)]
        try:
            counter = _counters.free.pop()
        except IndexError:
            counter = _counters.take()
        done, count_done = counter
        done[0] = 0
        try:
            numbers = self._advance(active)
            updates = self._updates(gradients, numbers, rule, composed, touched_only)
            if bound.device is None:
                commit([update.prepared() for update in updates], count_done)
            elif updates:
                run_updates(updates, gradients.arrays)
        except BaseException:
            if not done[0]:  # an interrupt may come right after it
                self.num_update = largest
                for index, t in zip(active, before, strict=True):
                    if t is None:
                        counts.pop(index, None)
                    else:
                        counts[index] = t
            raise
        _counters.give(counter)

    def forget_arrays(self) -> None:
        """Hold no array of a former call any more."""
        self._bindings.forget()

    def _acts(self) -> bool:
        """Whether there is an update at all."""
        return True

    def _is_lazy(self, composed: bool) -> bool:
        """Whether a row-sparse gradient updates only the rows that occur."""
        if composed and self.lazy_update:
            reject(AssertionError, self._name, "lazy_update", "needs use_fused_step", True, False)
        return bool(self.lazy_update)

    def _advance(self, indices: Values) -> list[tuple[int, float, float]]:
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

    def _updates(
        self, gradients: Gradients, numbers: Values, rule: Rule, composed: bool, touched_only: bool
    ) -> list[Update]:
        """The kernel calls of a step; ``numbers`` are those of the weights that have a gradient."""
        options = _options(self)
        prologue = _prologue(max(map(_wd, numbers), default=0.0), composed, rule.decays, options)
        how = prologue, composed, rule.decays, options
        numbers_of = dict(zip(gradients.layout.active.tolist(), numbers, strict=True))
        updates = []
        for batch in gradients.layout.batches:
            of_each = [*map(numbers_of.__getitem__, batch.positions.tolist())]
            row_of = dict(zip(dict.fromkeys(of_each), count()))
            rows = [_scalars(batch.real, *each, *how) for each in row_of]
            hp = rows[0] if len(rows) == 1 else np.concatenate(rows)  # slow for one
            hp_of = np.array([*map(row_of.__getitem__, of_each)])
            arguments = prologue, gradients.of(batch), hp, hp_of
            updates.append(batch.update(*arguments, touched_only=touched_only))
        return updates


# A model has few different options, and its weights are often updated one by one. (Typed: a bool is
# refused, also where it equals a number that is known.)
_remembered = lru_cache(maxsize=64, typed=True)


@_remembered
def _prologue(decay: float, composed: bool, decays: bool, options: tuple[Any, ...]) -> Prologue:
    """The gradient transform before a rule, which ``decays`` the weight itself or not."""
    where, compat, rescale, bound, *_ = options
    check.scalar_at_least_0(where, _DECAY, decay)
    before = compat, rescale, bound or 0.0, 0.0 if decays else decay
    return rules.conditioning(*before, composed=composed)


@_remembered
def _scalars(
    real: Any, t: int, lr: float, wd: float, prologue: Prologue, composed: bool, decays: bool,
    options: tuple[Any, ...],
) -> np.ndarray:  # fmt: skip
    """A row of scalars, of rule and gradient transform, for the ``t``-th update of a weight."""
    where, _, rescale, bound, beta1, beta2, epsilon, correct_bias = options
    size = rules.bias_corrected(lr, beta1, beta2, t) if correct_bias else lr
    for name, value in ((_DECAY, wd), ("the learning rate with its factors", size)):
        if not 0.0 <= value <= check.LARGEST:
            check.scalar_at_least_0(where, name, value)
    rule_options = (size, epsilon, wd) if decays else (size, epsilon)
    transform = prologue, rescale, bound or 0.0, wd
    scalars = rules.adam_scalars(real, beta1, beta2, *rule_options, composed=composed)
    scalars += rules.conditioning_scalars(real, *transform, composed=composed)
    row: np.ndarray = np.array([scalars], real)
    # One array for all calls that ask for the same scalars.
    row.flags.writeable = False
    return row


# What tells whether a call has written: counted up with it, and of one call at a time. To make one
# takes longer than to write.
_counters = Pool(lambda: ((done := np.zeros(1, np.int64)), Count(done)))


def _zeros_like(array: Any, dtype: np.dtype[Any]) -> Any:
    if isinstance(array, DeviceArray):
        return array.filled_like(0.0, dtype).native()
    return allocation.full(array.shape, 0.0, dtype)
