"""Steps without a gradient, many at once, of the rules whose states only decay meanwhile."""

from __future__ import annotations

import math
from typing import Any

from ..rule import product, rule_helper, sign


def shrinking(w: Any, g: Any, hp: Any) -> Any:
    """No state: the weight decays."""
    return hp.weight * w


def fading(w: Any, g: Any, s: Any, hp: Any) -> Any:
    """A state that moves nothing without a gradient."""
    return hp.weight * w, hp.state0 * s


def fading_two(w: Any, g: Any, s: Any, t: Any, hp: Any) -> Any:
    """Two such states."""
    return hp.weight * w, hp.state0 * s, hp.state1 * t


def gliding(w: Any, g: Any, m: Any, hp: Any) -> Any:
    """Along a momentum, to which a coupled weight decay adds."""
    faded = hp.state0 * m
    # The test keeps 0 * inf out of a momentum to which nothing is added.
    added = faded if hp.pull == hp.zero else faded + hp.pull * w
    return hp.weight * w - product(hp.path0, m), added


def gliding_behind(w: Any, g: Any, s: Any, m: Any, hp: Any) -> Any:
    """Along a momentum that is the second state."""
    return hp.weight * w - product(hp.path0, m), hp.state0 * s, hp.state1 * m


def marching(w: Any, g: Any, m: Any, hp: Any) -> Any:
    """Along the sign of a momentum."""
    return hp.weight * w - product(hp.path0, sign(m, hp)), hp.state0 * m


@rule_helper
def _drift(m: Any, v: Any, hp: Any) -> Any:
    """The path along a first moment, by the root of a second one: that of each node, in order."""
    root = math.sqrt(v)
    path = hp.path0 / (product(root, hp.node0) + hp.epsilon)
    path = path + hp.path1 / (product(root, hp.node1) + hp.epsilon)
    path = path + hp.path2 / (product(root, hp.node2) + hp.epsilon)
    path = path + hp.path3 / (product(root, hp.node3) + hp.epsilon)
    path = path + hp.path4 / (product(root, hp.node4) + hp.epsilon)
    return product(path, m)


def drifting(w: Any, g: Any, m: Any, v: Any, hp: Any) -> Any:
    """Adam, with a drift ``g`` that is known already."""
    return hp.weight * w + (g - _drift(m, v, hp)), hp.state0 * m, hp.state1 * v


def drifting_by_largest(w: Any, g: Any, m: Any, v: Any, largest: Any, hp: Any) -> Any:
    """AMSGrad: the largest second moment stays."""
    return hp.weight * w + (g - _drift(m, largest, hp)), hp.state0 * m, hp.state1 * v, largest
