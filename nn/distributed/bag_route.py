"""Rows of many pooled tables, and their gradients, between who uses them and who owns them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ...kernels.quiet import quiet
from ...ops.runtime.bags.tensor import BagTensor
from ...ops.runtime.row_step import RowGradient
from ..base.ids.admission import locked
from ..base.ids.id_arrays import Admissions
from ..engine.bag_maps import FoundRows, check_current, found_rows
from .agreement import agree, attempted
from .communicator import as_bytes
from .id_shard import IdShard, ids_of_keys, keys_of
from .route import rows_at

_NO_IDS = np.empty(0, np.int64)


class Bags(NamedTuple):
    """The bags of a feature in this process's part of a batch."""

    ids: np.ndarray  # int64 [n]
    bag_of: np.ndarray  # int64 [n]: the number of the bag of each id, ascending


class BagRoute:
    """The way of the ids of pooled tables to the owners of their rows, and back.

    An iteration has four exchanges, whatever the number of tables: of counts, with all errors found
    so far; of different ids, each with its occurrences; of their rows; of gradients of bags, each
    once for every owner of an id in it, with the list of its ids. Nothing is summed on the way, so
    an owner sums all that a row has got in the order of the whole batch, feature by feature: a step
    has the bits of one process, for any number of them.

    Args:
        where: the name of the caller in errors.
        shards: of the tables, of the same processes.
        of: the table of each feature.
        bags: of the features; None with an error.
        padding: of each table the id that is left out, or None.
        steps: as those of `rows_of_maps`.
        begin: as that of `rows_of_maps`.
        subject: names and values (of JSON) that all processes have alike.
        error: what this process has found wrong.

    Attributes:
        places: int32, for each feature the place of each id among the rows of its table that `rows`
            gets; that of a padding id, and of no other, is behind the last of them.
        needed: int64, for each table the rows of this process that others have asked for.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: on a rank, an error.
        LostProcessError: a process has ended.
    """

    def __init__(
        self, where: str, shards: Sequence[IdShard], of: Sequence[int],
        bags: Sequence[Bags] | None, padding: Sequence[int | None], steps: Sequence[int | None],
        begin: Callable[[Sequence[tuple[int, Admissions]]], Any],
        subject: Mapping[str, Any], error: Exception | None,
    ) -> None:  # fmt: skip
        self._where, self._comm, self._of = where, shards[0].comm, np.array(of)
        self._maps, n = [shard.ids for shard in shards], len(shards)
        self._bags = [Bags(_NO_IDS, _NO_IDS)] * len(of) if bags is None else bags
        self._lookups: list[FoundRows] = []
        requests, counts = self._requests(shards, padding)
        tables = [shard.signature for shard in shards], [*map(str, steps)]
        numbers = [(len(words), 0) for words in requests]
        subject = {**subject, "tables": tables, "of": [*of]}
        received = agree(self._comm, where, subject, error, numbers)
        words = self._exchanged([*map(as_bytes, requests)], (8 * received[:, 0]).tolist())
        words = [message.view(np.int64) for message in words]
        # By rank: of each table the different ids, of each feature the ids here, the bags with one
        # of them, and all of its ids.
        arrived = np.array([message[: counts.shape[1]] for message in words])
        self._sent, self._asked = counts[:, :n], arrived[:, :n]
        self._given = np.split(arrived[:, n:], 3, axis=1)
        requests = [message[counts.shape[1] :] for message in words]
        needed, self._error = attempted(self._answers, requests, steps, begin)
        if needed is None:
            needed = [np.zeros(m, np.int64) for m in self._asked.sum(axis=0).tolist()]
        self.needed: list[np.ndarray] = needed

    def _requests(
        self, shards: Sequence[IdShard], padding: Sequence[int | None]
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """The words for each rank, and the counts with which they begin."""
        size, n = self._comm.size, len(shards)
        firsts, ids, times = np.zeros((n, size + 1), np.int64), [], []
        places: list[np.ndarray] = [np.empty(0, np.int32)] * len(self._of)
        for t, shard in enumerate(shards):
            features = np.flatnonzero(self._of == t).tolist()
            lists = [self._bags[f].ids for f in features]
            every = np.concatenate([_NO_IDS, *lists])
            is_known = np.full(len(every), True) if padding[t] is None else every != padding[t]
            distinct, inverse, n_times = np.unique(
                keys_of(every[is_known]), return_inverse=True, return_counts=True
            )
            # Different keys ascend, and so do their owners.
            firsts[t, 1:] = [*np.searchsorted(distinct, shard.first_keys), len(distinct)]
            among = np.full(len(every), len(distinct), np.int32)
            among[is_known] = inverse
            for f, part in zip(features, _cut(among, [*map(len, lists)]), strict=False):
                places[f] = part
            ids.append(ids_of_keys(distinct))
            times.append(n_times)
        self.places = places
        self._sort_occurrences(firsts)
        totals = np.tile([len(bags.ids) for bags in self._bags], (size, 1))
        counts = [np.diff(firsts, axis=1).T, self._n_sent, self._n_bags, totals]
        by_rank = np.concatenate(counts, axis=1)
        return [
            np.concatenate((by_rank[r], *(
                x[slice(*firsts[t, r : r + 2])] for x_of in (ids, times) for t, x in enumerate(x_of)
            )))
            for r in range(size)
        ], by_rank  # fmt: skip

    def _sort_occurrences(self, firsts: np.ndarray) -> None:
        """Sort the occurrences by owner and feature, in the order of the batch."""
        size, width = self._comm.size, len(self._of)
        lengths = [*map(len, self.places)]
        owner = np.concatenate([
            np.searchsorted(firsts[t, 1:], x, side="right")
            for t, x in zip(self._of, self.places, strict=True)
        ])  # fmt: skip
        groups = owner * width + np.repeat(np.arange(width), lengths)
        # Numbers of 16 bits are sorted in one pass.
        kind = np.uint16 if (size + 1) * width < 1 << 16 else np.int64
        order = np.argsort(groups.astype(kind), kind="stable")
        order = order[: np.count_nonzero(owner < size)]  # behind them lies what is left out
        group, bag = groups[order], np.concatenate([bags.bag_of for bags in self._bags])[order]
        is_next = np.ones(len(order), bool)  # whether a bag begins, in its group
        is_next[1:] = (group[1:] != group[:-1]) | (bag[1:] != bag[:-1])
        n_groups = size * width
        self._n_sent = np.bincount(group, minlength=n_groups).reshape(size, width)
        n_bags = np.bincount(group[is_next], minlength=n_groups)
        self._n_bags, first_bags = n_bags.reshape(size, width), np.cumsum(n_bags) - n_bags
        first_places = firsts[self._of, :size].T.reshape(-1)  # of each group
        # For each occurrence, by owner: its place among the ids of the table that the owner has
        # got, that of its bag among the bags of the feature, and its own among all of the feature.
        self._lists = np.empty((3, len(order)), np.int32)
        self._lists[0] = np.concatenate(self.places)[order] - first_places[group]
        self._lists[1] = np.cumsum(is_next) - 1 - first_bags[group]
        self._lists[2] = np.concatenate([np.arange(n) for n in lengths])[order]
        self._order, self._bag_numbers = order, _cut(bag[is_next], n_bags)

    def _exchanged(self, messages: Sequence[np.ndarray], sizes: Sequence[int]) -> list[np.ndarray]:
        """The messages of all ranks, of these sizes, for one to each."""
        received = np.empty(sum(sizes), np.uint8)
        lengths = [*map(len, messages)]
        self._comm.all_to_all(np.concatenate(messages), lengths, received, sizes).wait()
        return _cut(received, sizes)

    def _told(
        self, messages: Sequence[Sequence[np.ndarray]], sizes: np.ndarray, error: Exception | None
    ) -> list[list[np.ndarray]]:
        """The parts of the messages of all ranks, which have said first that there is no error.

        The sizes of parts are ``[rank, part]``, in bytes.
        """
        status = np.full(1, error is not None, np.int64)
        sent = [
            np.concatenate([as_bytes(np.ascontiguousarray(x)) for x in (status, *parts)])
            for parts in messages
        ]
        arrived = self._exchanged(sent, (sizes.sum(axis=1) + status.nbytes).tolist())
        if any(message[: status.nbytes].any() for message in arrived):
            agree(self._comm, self._where, {}, error)
        each = zip(arrived, sizes, strict=True)
        return [_cut(message[status.nbytes :], own) for message, own in each]

    def _answers(
        self, requests: Sequence[np.ndarray], steps: Sequence[int | None],
        begin: Callable[[Sequence[tuple[int, Admissions]]], Any],
    ) -> list[np.ndarray]:  # fmt: skip
        """The rows of the ids that others ask for, rank by rank for each table."""
        n, per_table = len(self._maps), self._asked.sum(axis=0)
        # Of a rank: ids of all tables, then how often each occurs.
        each = zip(requests, self._asked, strict=True)
        parts = [_cut(words, [*asked, *asked]) for words, asked in each]
        ids, times = (
            np.concatenate([part[k + t] for t in range(n) for part in parts]) for k in (0, n)
        )
        bounds = [0, *np.cumsum(per_table).tolist()]
        with locked(self._maps):
            _, self._lookups = found_rows(self._maps, ids, bounds, steps, begin, times)
        return [lookup.rows.astype(np.int64) for lookup in self._lookups]

    def rows(self, tables: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The rows of the different ids of each table, and a row of zeros behind them.

        Args:
            tables: contiguous ``[N, D]`` arrays of this process, as wide as those of the others.

        Raises:
            TypeError, ValueError, RuntimeError: on a rank, ids got no rows.
        """
        by_table = []
        for table, needed, asked in zip(tables, self.needed, self._asked.T, strict=True):
            by_table.append(_cut(rows_at(table, needed), asked))
        row_bytes = [table.shape[1] * table.itemsize for table in tables]
        arrived = self._told([*zip(*by_table, strict=True)], self._sent * row_bytes, self._error)
        return [
            np.concatenate([*parts, np.zeros(n, np.uint8)]).view(table.dtype).reshape(-1, width)
            for table, n, (_, width), *parts in zip(
                tables, row_bytes, (table.shape for table in tables), *arrived, strict=True
            )
        ]  # fmt: skip

    @quiet
    def gradients(
        self, grad: np.ndarray, columns: Sequence[int], weights: np.ndarray | None,
        shapes: Sequence[tuple[int, int]], *, average: bool,
    ) -> list[BagTensor]:  # fmt: skip
        """The gradients of the rows of this process, from those of the bags of all processes.

        Args:
            grad: ``[batch, sum of D]``, of this process's part of the batch.
            columns: where those of each feature begin, and the end of all.
            weights: of the occurrences, feature by feature; None: all are 1.
            shapes: those of the tables.
            average: whether to divide by the number of processes.

        Raises:
            RuntimeError: on a rank, rows were given back since.
        """
        _, error = attempted(check_current, self._where, self._lookups)
        size, width = self._comm.size, len(self._of)
        if average:
            grad = grad / grad.dtype.type(size)
        n_sent, (n_given, n_bags, totals) = self._n_sent.sum(axis=1), self._given
        # A weight of 1 for all is none at all: a part without bytes.
        real = np.dtype(np.uint8) if weights is None else weights.dtype
        factors = [_NO_IDS] * size if weights is None else _cut(weights[self._order], n_sent)
        stripes = [slice(*span) for span in pairwise(columns)]
        messages = [
            [*part, *(grad[self._bag_numbers[r * width + f], s] for f, s in enumerate(stripes))]
            for r, *part in zip(range(size), _cut(self._lists, n_sent, 1), factors, strict=True)
        ]
        n = n_given.sum(axis=1, keepdims=True)
        weight_bytes = 0 if weights is None else real.itemsize
        row_bytes = np.diff(columns) * grad.itemsize
        sizes = np.concatenate((12 * n, weight_bytes * n, n_bags * row_bytes), axis=1)
        # Of each rank and feature: lists of the ids, their weights, and the rows of their bags.
        lists, factors_given, rows = [], [], []
        for given, (of_ids, of_weights, *parts) in zip(
            n_given, self._told(messages, sizes, error), strict=True
        ):
            lists.append(_cut(of_ids.view(np.int32).reshape(3, -1), given, 1))
            factors_given.append(_cut(of_weights.view(real), given))
            rows.append([part.view(grad.dtype) for part in parts])
        first_asked = np.cumsum(self._asked, axis=0) - self._asked
        made = []
        for t, (n_rows, row) in enumerate(shapes):
            # Feature by feature, and the parts of the batch in their order.
            order = [(r, f) for f in np.flatnonzero(self._of == t).tolist() for r in range(size)]
            firsts = [np.cumsum([0, *(x[r, f] for r, f in order)]) for x in (n_bags, totals)]
            occurrences = [np.empty((3, 0), np.int64)]
            for (r, f), *first in zip(order, *firsts, strict=False):
                place, bag, position = lists[r][f].astype(np.int64)
                index = self.needed[t][first_asked[r, t] + place]
                occurrences.append(np.stack((index, bag + first[0], position + first[1])))
            every = np.concatenate(occurrences, axis=1)
            has_row = every[0] > 0  # row 0 is nobody's
            index, bag, position = np.ascontiguousarray(every[:, has_row])
            values = np.concatenate([np.empty(0, grad.dtype), *(rows[r][f] for r, f in order)])
            factor = None
            if weights is not None:
                of_all = [np.empty(0, real), *(factors_given[r][f] for r, f in order)]
                factor = np.concatenate(of_all)[has_row]
            gradient = RowGradient.shared(
                index.astype(np.int32), values.reshape(-1, row), bag.astype(np.int32),
                row * values.itemsize, factor,
            ).at(position, int(firsts[1][-1]))  # fmt: skip
            made.append(BagTensor(gradient, row, (n_rows, row)))
        return made


def _cut(array: np.ndarray, lengths: Any, axis: int = 0) -> list[np.ndarray]:
    """The parts of an array that have these lengths."""
    return np.split(array, np.cumsum(lengths)[:-1], axis=axis)
