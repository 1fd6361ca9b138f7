"""Tables whose rows are pooled bag by bag: a forward, a backward that takes the step, and both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ... import nn, ops
from .optimizers import OPTIMIZERS, moved
from .subject import Prepare, Prepared, Subject, Traffic, Use

_FLOAT32 = ("float32",)  # of other types a pooled row is float32 all the same
# As in the libraries that we are compared with.
_OPTIONS: dict[str, dict[str, Any]] = {"Adagrad": {"accum": 0.0}}
FORWARD, BACKWARD, BOTH = "forward", "backward", "both"


def _forward(prepare: Prepare) -> Subject:
    use = Use(FORWARD, Traffic(updated=0, read=0, written=1), looks_up=True)
    return Subject({"pooled": use}, prepare, _FLOAT32)


def _operator(tables: list[np.ndarray]) -> Prepared:
    bags = ops.EmbeddingBags()

    def step(given: Sequence[Any]) -> object:
        (own,) = given
        return bags(tables, own.ids, own.offsets)

    return Prepared(step, [()] * len(tables), tables)


def _subject(name: str, part: str) -> Subject:
    """One part with an optimizer in the tables."""
    known = OPTIMIZERS[name].subject.uses["rows"]
    use = Use(f"{part} {known.algorithm}", known.traffic, looks_up=part == BOTH)
    return Subject({"pooled": use}, partial(_prepare, name, part), _FLOAT32)


def _prepare(name: str, part: str, tables: list[np.ndarray]) -> Prepared:
    optimizer = OPTIMIZERS[name].make(tables, **_OPTIONS.get(name, {}))
    bags = nn.EmbeddingBags(tables, optimizer)

    def forward(given: Sequence[Any]) -> object:
        (own,) = given
        return bags(own.ids, own.offsets)

    def backward(given: Sequence[Any]) -> None:
        (own,) = given
        bags.backward(own.grad)

    def both(given: Sequence[Any]) -> object:
        out = forward(given)
        backward(given)
        return out

    if part == FORWARD:
        return Prepared(forward, [()] * len(tables), tables)
    if part == BACKWARD:
        return Prepared(backward, moved(optimizer), [], forward)
    return Prepared(both, moved(optimizer), [])


BAGS: dict[str, Subject] = {}
if hasattr(nn, "EmbeddingBags"):  # versions to compare with may not have it
    BAGS = {
        "ops.EmbeddingBags": _forward(_operator),
        "nn.EmbeddingBags": _forward(partial(_prepare, "SGD", FORWARD)),
        **{
            f"nn.EmbeddingBags{method}({name})": _subject(name, part)
            for name in ("SGD", "Adagrad", "RowWiseAdagrad", "LazyAdam")
            for method, part in ((".backward", BACKWARD), ("", BOTH))
        },
    }
