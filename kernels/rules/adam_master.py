"""Adam on a float32 master weight, with the 16-bit weight as a copy that is written on the way.

The last state is the copy: it is what the model computes with, and it is never read here, so the
compiler leaves its load out. Nothing but its storage type makes it different from the master.
"""

from __future__ import annotations

from typing import Any

from .adam import MOMENTS, AdamHP, AdamWeightDecayHP, adam, adam_then_decay, adam_weight_decay
from .rule import Rule


def adam_master(w: Any, g: Any, m: Any, v: Any, copy: Any, hp: Any) -> Any:
    """Adam, and the copy."""
    w, m, v = adam(w, g, m, v, hp)
    return w, m, v, w


def adam_weight_decay_master(w: Any, g: Any, m: Any, v: Any, copy: Any, hp: Any) -> Any:
    """Adam with decoupled decay, and the copy."""
    w, m, v = adam_weight_decay(w, g, m, v, hp)
    return w, m, v, w


def adam_then_decay_master(w: Any, g: Any, m: Any, v: Any, copy: Any, hp: Any) -> Any:
    """Adam with decoupled decay after the step, and the copy."""
    w, m, v = adam_then_decay(w, g, m, v, hp)
    return w, m, v, w


STATES = (*MOMENTS, "copy")
ADAM_MASTER = Rule(adam_master, STATES, AdamHP._fields)
ADAM_WEIGHT_DECAY_MASTER = Rule(adam_weight_decay_master, STATES, AdamWeightDecayHP._fields)
ADAM_THEN_DECAY_MASTER = Rule(adam_then_decay_master, STATES, AdamWeightDecayHP._fields)
