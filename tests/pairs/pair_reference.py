"""Adam in float64 with its rows by id, in plain Python: what programs of two features must meet."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

RATE, WIDTH = 0.1, 4


def begin(ids: Any, shape: tuple[int, ...] = (WIDTH,)) -> Any:
    """The weights of new rows: numbers that 16 bits hold."""
    first = (np.asarray(ids, np.int64) % 13 - 6) / 8.0
    return (first[..., None] + np.arange(WIDTH) / 8.0).reshape(*shape[:-1], WIDTH)


class Weight:
    """A row or a parameter, its moments, and the number of its updates."""

    def __init__(self, value: Any) -> None:
        self.w = np.array(value, np.float64)
        self.m, self.v, self.t = np.zeros_like(self.w), np.zeros_like(self.w), 0
        self.mean, self.n_means = self.w, 0

    def step(self, g: Any, rate: float, t: int) -> None:
        """Update number ``t``."""
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.999 * self.v + 0.001 * g * g
        correction = np.sqrt(1.0 - 0.999**t) / (1.0 - 0.9**t)
        self.w = self.w - rate * correction * self.m / (np.sqrt(self.v) + 1e-8 * correction)

    def average(self) -> None:
        """Take the value of now into the mean."""
        self.n_means += 1
        self.mean = self.mean + (self.w - self.mean) / self.n_means if self.n_means > 1 else self.w


class Reference:
    """A table by id, and dense parameters by name.

    Args:
        dense: how these begin.
        rows: the ids that have a row; None: those that occur get one.
        updates: the rows that a step updates: ``"touched"``, ``"all"``; or ``"own"``: touched,
            with the count of each row for its bias correction.
    """

    def __init__(self, dense: Mapping[str, Any], rows: Iterable[int] | None, updates: str) -> None:
        self.dense = {name: Weight(x) for name, x in dense.items()}
        self.grows, self.updates, self.t = rows is None, updates, 0
        self.rows = {k: Weight(begin(k)) for k in rows or ()}
        self.last_use: dict[int, int] = {}

    def admit(self, ids: Iterable[int], step: int) -> None:
        """Let ids have rows, in a table that grows."""
        for k in ids if self.grows else ():
            self.rows.setdefault(k, Weight(begin(k)))
            self.last_use[k] = step

    def evict(self, step: int, unused_for: int) -> None:
        """Forget ids that were not used for so long."""
        for k in [k for k, last in self.last_use.items() if step - last >= unused_for]:
            del self.rows[k], self.last_use[k]

    def look_up(self, ids: Any, *, means: bool = False) -> Any:
        """The rows of ids; zeros of those that have none."""
        none = Weight(np.zeros(WIDTH))
        found = [self.rows.get(int(k), none) for k in np.ravel(ids)]
        values = [row.mean if means else row.w for row in found]
        return np.reshape(values, (*np.shape(ids), WIDTH))

    def step(
        self, table: Mapping[int, Any] | None, dense: Mapping[str, Any], rate: float,
        factors: Mapping[str, float],
    ) -> None:  # fmt: skip
        """One step with the gradients of rows and of parameters; None: the table rests. ``factors``
        are those of the rates of some parameters."""
        for name, g in dense.items():
            self.dense[name].step(g, rate * factors.get(name, 1.0), self.dense[name].t + 1)
        if table is None:
            return
        self.t += 1
        for k, row in self.rows.items():
            if k in table or self.updates == "all":
                t = row.t + 1 if self.updates == "own" else self.t
                row.step(table.get(k, 0.0), rate, t)

    def average(self) -> None:
        """Take all values into means."""
        for weight in (*self.rows.values(), *self.dense.values()):
            weight.average()


def assert_as_known(
    names: Iterable[str], result: str, refused: Mapping[frozenset[str], str]
) -> None:
    """A program is right, or refused by its error."""
    text = refused.get(frozenset(names))
    assert result == "right" if text is None else text in result, f"{' + '.join(names)}: {result}"


def assert_of_pairs(pairs: Iterable[Iterable[str]], refused: Any, others: Any) -> None:
    """Each verdict is that of a pair, and no pair has two."""
    assert {*refused, *others} <= {*map(frozenset, pairs)}
    assert refused.keys().isdisjoint(others)
