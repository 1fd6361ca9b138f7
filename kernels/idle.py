"""Idle steps: what a step without a gradient does to an element, and many of them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

NODES = 5
"""Moments between which the drift of rules with a root is interpolated (`idle_table`)."""


class IdleStep(NamedTuple):
    """One idle step of a row, in numbers.

    Each state is multiplied by its factor, then ``w <- weight*w - size*x``: ``x`` is the moving
    state, its sign, or its quotient by ``sqrt(v) + epsilon``. A coupled weight decay adds ``pull``
    times the weight before the step to the moving state.
    """

    weight: float = 1.0
    states: tuple[float, ...] = ()
    size: float = 0.0
    epsilon: float = 0.0
    pull: float = 0.0


class Idle(NamedTuple):
    """The idle form of a rule.

    Attributes:
        update: ``update(w, g, *states, hp)``, a function of a rule for many steps; ``g`` is 0, and
            with a root a drift that is added. Its scalars are ``weight``, a factor ``state0``, ...
            of each state, ``path0``, ..., ``pull``, and for a root ``epsilon`` and ``node0``, ...
        step: ``step(hp, decay)``: an `IdleStep` from the scalars of the rule in a step and the
            weight decay that is added to the gradient.
        moving: the place of the state along which the weight moves; None: it does not move.
        root: the place of the state under the root, or None. The second state decays.
        by_sign: whether the weight moves along the sign of the state.
        coupled: whether a weight decay may be added to the gradient.
    """

    update: Callable[..., Any]
    step: Callable[[Any, float], IdleStep]
    moving: int | None = 0
    root: int | None = None
    by_sign: bool = False
    coupled: bool = False

    @property
    def n_paths(self) -> int:
        """The number of scalars ``path0``, ..."""
        return 1 if self.root is None else NODES

    def fields(self, n_states: int) -> tuple[str, ...]:
        """The scalars of ``update``, of a rule with so many states."""
        states = [f"state{k}" for k in range(n_states)]
        fields = ["weight", *states, *(f"path{k}" for k in range(self.n_paths)), "pull"]
        root_names = ("epsilon", *(f"node{k}" for k in range(NODES)))
        return (*fields, *(("zero", "one") if self.root is None else root_names))
