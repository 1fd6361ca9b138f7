"""The tensors that one kernel call updates, and the scalars of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...kernels.keeping import key_of, random_scalars
from ...kernels.lazy import lazy
from ...kernels.rule import Prologue, Rule
from ...kernels.storage import Storage
from ...ops.runtime import check
from ...ops.runtime.measured_step import Constants
from ...ops.runtime.row_step import IndexList, RowGradient, RowUpdate, Update, check_lists
from ...ops.runtime.step import DenseUpdate, Variables

NOTHING = np.empty(0)


class RandomBits(NamedTuple):
    """The keys of the random bits of tensors, beside a seed and the number of the update."""

    keys: np.ndarray  # uint64 [T]: `key_of` each parameter
    begins: Any  # int64 [T]: the place of its first element here in all of it; or one number

    @classmethod
    def of(cls, rule: Rule, names: Iterable[str], begins: Any = 0) -> RandomBits | None:
        """The keys of parameters by name; None for a rule that does not round at random."""
        if rule.keeping is None or not rule.keeping.hp:
            return None
        return cls(np.array([*map(key_of, names)], np.uint64), begins)

    def joined(self, seeds: Any, counts: Any, hp: Any, hp_of: Any) -> tuple[Any, Any]:
        """Rows of scalars, one for each tensor, with those that its random bits follow from.

        ``counts`` are the numbers of this update, ``seeds`` and they of each tensor or of all.
        """
        drawn = random_scalars(seeds, self.keys, counts, self.begins)
        return np.concatenate((hp[hp_of], drawn), axis=1), np.arange(len(drawn))


@dataclass(frozen=True, eq=False)
class Batch:
    """The tensors of one kernel call: parameters, gradients and states of equal storage types."""

    rule: Rule  # of tensors of these shapes, kept as these are
    positions: np.ndarray  # int64 [T]: places of the tensors among those of a step
    variables: Variables  # parameters and states
    g: Storage  # of the gradients
    row_sparse: bool  # whether the gradients are row-sparse
    places: np.ndarray  # int64 [T]: places among the dense, or the row-sparse, gradients
    is_all: bool  # whether these are all tensors of a step, in order
    labels: tuple[str, ...]  # names of the gradients in errors
    class_of: np.ndarray  # int64 [T]: the class of options of each tensor
    draws: RandomBits | None = None  # of a rule that rounds at random

    @lazy
    def real(self) -> Any:
        """NumPy's scalar type of the arithmetic."""
        return self.variables.real.carrier

    @lazy
    def classes(self) -> list[int]:
        """The classes of options that these tensors have."""
        return sorted({*self.class_of.tolist()})

    @lazy
    def place_of(self) -> np.ndarray:
        """The place of the class of each tensor among `classes`: int64 ``[T]``."""
        return np.searchsorted(self.classes, self.class_of)

    def update(
        self, prologue: Prologue, gradients: Any, hp: Any, hp_of: Any, *, touched_only: bool
    ) -> Update:
        """The update of its tensors behind gradient transforms.

        ``gradients`` are those of `KernelCall`, ``hp`` and ``hp_of`` those of `DenseUpdate`; with
        ``touched_only`` row-sparse gradients update only the rows that occur.
        """
        arguments = self.rule, prologue, self.variables, gradients, self.g, hp, hp_of
        if not self.row_sparse:
            return tuple.__new__(DenseUpdate, (*arguments, ()))  # no call of Python
        return RowUpdate.of(self.labels, *arguments, touched_only=touched_only)


class KernelCall(NamedTuple):
    """One kernel call of a step."""

    batch: Batch
    update: Update
    # float64 [T], for each tensor, if tensors are measured first:
    rates: np.ndarray = NOTHING
    decays: np.ndarray = NOTHING
    constants: Sequence[Constants] = ()  # of each tensor, if the rule measures each

    @property
    def gradients(self) -> Any:
        """Addresses of dense gradients, int64 ``[T]``, or row-sparse gradients."""
        return self.update.gradients


def by_storage(
    by_batch: Iterable[tuple[Batch, Any]],
) -> tuple[tuple[Storage, np.ndarray, np.ndarray], ...]:
    """The arrays of all gradients by storage type: int64 addresses and numbers of elements."""
    arrays: dict[Storage, list[tuple[int, int]]] = {}
    for batch, gradients in by_batch:
        found = arrays.setdefault(batch.g, [])
        if batch.row_sparse:
            itemsize = batch.g.itemsize
            found += [(g.source.values, g.values.nbytes // itemsize) for g in gradients]
        else:
            sizes = np.diff(batch.variables.table.first)
            found += zip(gradients.tolist(), sizes.tolist(), strict=True)
    return tuple(
        # Each array once: pooled tables share one array of gradients.
        (storage, *np.array([*dict.fromkeys(spans)], np.int64).reshape(-1, 2).T.copy())
        for storage, spans in arrays.items()
    )


def index_lists(batch: Batch, gradients: Sequence[RowGradient]) -> list[IndexList]:
    """The indices of the gradients of a batch.

    Raises:
        ValueError: its tables have too many rows for its sort keys.
    """
    entries = zip(batch.labels, gradients, batch.variables.tensors, strict=True)
    lists = [IndexList(label, len(g.indices), w.shape[0]) for label, g, (w, *_) in entries]
    check_lists(batch.labels[0], lists)
    return lists


def check_rows(batch: Batch, gradients: Sequence[RowGradient]) -> None:
    """Check all indices of a batch on the host; as `GradientReader.check_indices`."""
    for own, gradient in zip(index_lists(batch, gradients), gradients, strict=True):
        check.indices_in_range(own.where, gradient.indices, own.rows)
