"""Idle steps: what steps without a gradient do to an element, many of them at once.

While a row has no gradient its states only decay, and the weight drifts by them. A row may sleep
then: the number of its last step is kept, and the steps that it has missed are taken together when
it is next read or written. An idle step of Adam is

    w <- weight*w - size*beta1*m / (sqrt(beta2*v) + epsilon),   m <- beta1*m,   v <- beta2*v

so that after ``k`` of them the drift is a sum over ``j = 1 .. k`` of ``size_j * beta1**j * m``
divided by ``sqrt(v) * beta2**(j/2) + epsilon``. As a function of ``j`` the divisor's reciprocal is
smooth. It is interpolated between `NODES` moments ``x``, so the drift is the sum over these alone
of ``path*m / (sqrt(v)*exp(-x) + epsilon)``: the paths depend on the steps, not on the element. How
far that is off follows from the betas; where it is more than `TOLERANCE` of the drift, steps are
taken one by one, until the first moment has faded.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from .idle import NODES, IdleStep
from .rule import Rule, hp_type

SLEEP = 2_048
"""The most steps that a row sleeps. Every row is checked once in so many steps."""
TOLERANCE, _MISLED = 1e-7, 5e-7
_SECOND = 1  # the place of the second moment that decays
_SLOWEST = -math.log(1e-9)  # what is left of a first moment whose steps no longer count
LEAST = 1e-10
"""A step no longer counts that moves so much less than all missed steps before it."""
NO_STEP = math.inf
"""In the place of the coupled decay of steps whose scalars are not there."""


class Nodes(NamedTuple):
    """The moments between which drifts are interpolated, for two speeds of fading.

    A moment is minus the logarithm of what is left of the root, in units of the epsilon of the
    first missed step.
    """

    x: np.ndarray  # [NODES]
    shares: np.ndarray  # [NODES, steps]: those of the steps before, while epsilon stays
    moments: np.ndarray  # and the relative errors there
    errors: np.ndarray
    steady: np.ndarray  # [steps]: the errors where `shares` are
    suffice: bool  # whether the drift is right while epsilon stays

    def error(self, moments: np.ndarray) -> np.ndarray:
        """The relative error at some moments."""
        errors: np.ndarray = np.interp(moments, self.moments, self.errors)
        return errors


@cache
def nodes_of(fades1: float, fades2: float) -> Nodes:
    """The nodes for what one step takes of the first moment and of the root, as logarithms."""
    # Chebyshev's points of the first quarter of the time in which the first moment fades.
    end = max(2.0, _SLOWEST / fades1 * 0.05 * NODES)
    angles = np.cos((2.0 * np.arange(NODES) + 1.0) * math.pi / (2 * NODES))
    x = fades2 * (1.0 + (end - 1.0) * (1.0 - angles) / 2.0)
    root = np.exp(np.linspace(-12.0, 16.0, 57))[:, None]  # over epsilon

    def wrong(moments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        exact = 1.0 / (root * np.exp(-moments) + 1.0)
        interpolated = (1.0 / (root * np.exp(-x) + 1.0)) @ _shares(x, moments)
        return np.abs(exact - interpolated), exact

    j = np.arange(1.0, 2.0 + min(SLEEP, _SLOWEST / fades1))
    weights = np.exp(-fades1 * j)
    missed, drift = (np.cumsum(part * weights, axis=1) for part in wrong(fades2 * j))
    inside, beyond = np.linspace(x[0], x[-1], 64), np.geomspace((x[-1] - x[0]) / 64, 8.0, 256)
    moments = np.concatenate((x[0] - beyond[::-1], inside, x[-1] + beyond))
    errors, exact = wrong(moments)
    # Large shares of both signs cancel, which in float32 costs as many of its last places.
    lost = np.maximum(np.abs(_shares(x, moments)).sum(axis=0) - 3.0, 0.0) * 2.0**-24
    worst = (errors / exact).max(axis=0) + lost
    suffice = fades1 > fades2 and bool((missed / drift).max() <= TOLERANCE)
    steps = np.arange(SLEEP, 0.0, -1.0)
    steady = np.interp(fades2 * steps, moments, worst)
    return Nodes(x, _shares(x, fades2 * steps), moments, worst, steady, suffice)


def _shares(x: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """The share ``[NODES, moments]`` that each node has of a value in between (Lagrange's form)."""
    nodes, shares = x.tolist(), np.empty((len(x), len(moments)))
    from_each = [moments - node for node in nodes]
    for k, moment in enumerate(nodes):
        others = nodes[:k] + nodes[k + 1 :]
        first, *rest = from_each[:k] + from_each[k + 1 :]
        np.divide(first, math.prod(moment - other for other in others), out=shares[k])
        for other in rest:
            shares[k] *= other
    return shares


class IdleTable:
    """The scalars of missed steps, for each number of the last step that a row may have taken.

    Attributes:
        given: ``[SLEEP, scalars]`` in the type of the arithmetic: the scalars of the rule in the
            last steps, then the coupled weight decay, or `NO_STEP`; those of step t at
            ``t % SLEEP``.
        many: ``[SLEEP, fields]``: scalars of `Idle.update`, for rows that were last updated in step
            t at ``t % SLEEP``.
        steps: float64 ``[SLEEP, 5]``, for a rule with a root: what is left of the weight, of the
            first moment and of the root in step t, size and epsilon, at ``t % SLEEP``.
        closed_from: of rows from before the steps up to this one are taken one by one.
        changes: whether any step changes more than nothing.
        begun: the step at which it was begun.
        step: that up to which scalars were taken in.
        places: of ``many`` the address and the bytes of a row, the address of ``steps``; or None.
    """

    def __init__(self, rule: Rule, real: Any) -> None:
        assert rule.idle is not None
        self.rule, self.idle, self.n_states = rule, rule.idle, len(rule.states)
        idle, n_states = self.idle, self.n_states
        self.given = np.zeros((SLEEP, len(rule.hp) + 1), real)
        self.given[:, -1] = NO_STEP
        self.many = np.zeros((SLEEP, len(idle.fields(n_states))), real)
        if idle.root is None:
            self.many[:, -1] = 1.0
        # The first fields of ``many``, a row each.
        self.n_sums = 1 + n_states + idle.n_paths + 1
        self._sums = np.zeros((self.n_sums, SLEEP))
        self.steps = np.zeros((SLEEP, 5))
        # Sums over the missed steps, each with what is left of the first moment: sizes, and errors.
        self._moved, self._wrong = np.zeros(SLEEP), np.zeros(SLEEP)
        self._x = np.zeros(SLEEP)  # moments since the last step
        self._first_epsilon = np.zeros(SLEEP)  # logarithm of epsilon in the first missed step
        self.places: tuple[int, int, int] | None = None
        self.begin(0)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "places": None}  # those of a copy are others

    def begin(self, step: int) -> None:
        """Forget all but ``given``, which has the steps up to ``step``."""
        self.begun = step
        # The oldest may have been overwritten by those of a step that was not taken.
        self.step = self._first = max(0, step - SLEEP + 1)
        self._fades: tuple[float, float] | None = None
        self._log_epsilon, self._changed = 0.0, 0
        self.closed_from, self.changes, self.is_whole = 0, False, True

    @property
    def is_fresh(self) -> bool:
        """Whether no steps were given."""
        return bool((self.given[:, -1] == NO_STEP).all())

    def advance(self, step: int) -> None:
        """Take in the steps up to ``step``, whose scalars were given."""
        # An interrupt came in between, or another count of steps was assigned.
        if not self.is_whole or abs(step - self.step) > SLEEP:
            self.begin(step)
        if self.step == step:
            return
        self.is_whole = False
        while self.step < step:
            self.step += 1
            *hp, decay = self.given[self.step % SLEEP].tolist()
            if decay != NO_STEP:
                self._take(self.step, self.idle.step(hp_type(self.rule, ())(*hp), decay))
            else:  # before this table began: no row has missed it
                self._first = self.step
        # Rows that are not there yet are never read.
        self.many[:, : self.n_sums] = self._sums.T
        self.is_whole = True

    def _take(self, step: int, missed: IdleStep) -> None:
        """One step: rows that took the one before are the first to miss it."""
        idle, sums, begin = self.idle, self._sums, (step - 1) % SLEEP
        n_states, moving = self.n_states, idle.moving
        weight, paths, pull = sums[0], sums[1 + n_states : -1], sums[-1]
        is_still = idle.root is None and moving is None and {missed.weight, *missed.states} <= {1.0}
        self.changes = self.changes or not is_still
        sums[:, begin] = 0.0
        sums[: 1 + n_states, begin] = 1.0
        if idle.coupled and moving is not None:
            fade, state = missed.states[moving], sums[1 + moving]
            before = weight.copy(), state.copy(), pull.copy()
            weight[:] = missed.weight * before[0] - missed.size * fade * before[2]
            state[:] = fade * before[1] - missed.pull * paths[0]
            pull[:] = fade * before[2] + missed.pull * before[0]
            paths[0] = missed.weight * paths[0] + missed.size * fade * before[1]
            return
        for k, left in enumerate(missed.states):
            if left != 1.0:
                sums[1 + k] *= left
        if missed.weight != 1.0:
            weight *= missed.weight
            paths *= missed.weight
        if idle.root is not None:
            self._add_paths(step, missed)
        elif moving is not None:
            paths[0] += missed.size * (1.0 if idle.by_sign else sums[1 + moving])

    def _add_paths(self, step: int, missed: IdleStep) -> None:
        """The drift of one step, shared among the nodes."""
        idle, sums, begin = self.idle, self._sums, (step - 1) % SLEEP
        assert idle.moving is not None
        assert idle.root is not None
        left = missed.states[idle.moving], math.sqrt(missed.states[_SECOND])
        fades = _fading(left[0]), _fading(left[1])
        # The largest second moment, of AMSGrad, does not fade.
        passed, root_left = (fades[1], left[1]) if idle.root == _SECOND else (0.0, 1.0)
        if fades != self._fades:
            self._fades, self._nodes, self.closed_from = fades, nodes_of(*fades), step - 1
            self._changed = step
        if (missed.epsilon > 0.0) != (self.steps[(step - 1) % SLEEP, -1] > 0.0):
            self.closed_from = step - 1  # the one is no part of the other
        log_epsilon = math.log(missed.epsilon) if missed.epsilon > 0.0 else 0.0
        if log_epsilon != self._log_epsilon:
            self._changed = step
        self.steps[step % SLEEP] = missed.weight, left[0], root_left, missed.size, missed.epsilon
        self._x += passed + log_epsilon - self._log_epsilon
        self._x[begin], self._first_epsilon[begin] = passed, log_epsilon
        self._wrong[begin] = self._moved[begin] = 0.0
        self._log_epsilon = log_epsilon
        self.many[begin, len(sums) :] = missed.epsilon, *np.exp(-self._nodes.x)
        if not self._nodes.suffice:
            self.closed_from = step
        # The first moment of rows that slept longer has faded.
        move = sums[1 + idle.moving] * missed.size
        counts = np.abs(move) >= LEAST * self._moved * np.sqrt(sums[1 + idle.root])
        span, end = min(step - self._first, SLEEP - 1), step % SLEEP
        ordered = counts[end - span : end] if span <= end else np.roll(counts, -end)[-span:]
        recent = span - int(ordered.argmax())
        oldest = (step - recent) % SLEEP
        parts = [slice(oldest, min(oldest + recent, SLEEP)), slice(max(0, oldest + recent - SLEEP))]
        end, is_steady = step - recent, passed > 0.0 and step - recent >= self._changed - 1
        for part in parts:
            sizes, n = np.where(counts[part], move[part], 0.0), part.stop - (part.start or 0)
            end += n
            if is_steady:
                steady = slice(SLEEP - step + end - n, SLEEP - step + end)
                errors, shares = self._nodes.steady[steady], self._nodes.shares[:, steady]
            else:
                errors, shares = (
                    self._nodes.error(self._x[part]),
                    _shares(self._nodes.x, self._x[part]),
                )
            self._moved[part] += np.abs(sizes)
            self._wrong[part] += np.abs(sizes) * errors
            (misled,) = (self._wrong[part] > _MISLED * self._moved[part]).nonzero()
            if len(misled):
                self.closed_from = max(self.closed_from, end - n + int(misled[-1]) + 1)
            if not is_steady:
                # What is beyond all nodes would be of any size; steps are taken one by one there.
                # With another epsilon in its divisor, a drift is that of another time by another
                # factor.
                sizes *= (errors < 1.0) * np.exp(self._first_epsilon[part] - log_epsilon)
            sums[1 + self.n_states : -1, part] += sizes * shares


def _fading(factor: float) -> float:
    return -math.log(max(factor, 1e-30)) if factor < 1.0 else 1e-30
