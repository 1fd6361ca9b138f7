"""Rows of many pooled tables, and their gradients, between who uses them and who owns them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ...kernels.cpu.gather import gather
from ...kernels.quiet import quiet
from ...ops.runtime.arrays import address_of
from ...ops.runtime.bags.tensor import BagTensor
from ...ops.runtime.row_step import RowGradient
from ..base.admission import found, locked
from ..base.id_arrays import Admissions
from ..engine.bag_maps import FoundRows
from .agreement import agree, attempted
from .communicator import Communicator, as_bytes
from .id_shard import IdShard, ids_of_keys, keys_of

_I32, _STATUS = np.dtype(np.int32), 8  # bytes before a message, which say whether it is an error


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
        steps: as those of `admission.found`.
        begin: as that of `admission.found`.
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
        self._where, self._comm, self._of = where, shards[0].comm, [*of]
        self._maps, self._lookups = [shard.ids for shard in shards], list[FoundRows]()
        none = np.empty(0, np.int64)
        self._bags = [Bags(none, none)] * len(self._of) if bags is None else bags
        requests, counts = self._requests(shards, padding)
        n_words = [len(words) for words in requests]
        numbers = np.stack((n_words, np.zeros_like(n_words)), axis=1)
        subject = {**subject, "tables": [shard.signature for shard in shards], "of": self._of}
        received = agree(self._comm, where, {**subject, "steps": [*map(str, steps)]}, error, numbers)
        arrived = self._exchanged([*map(as_bytes, requests)], (8 * received[:, 0]).tolist())
        # By rank: of each table the different ids, of each feature the occurrences here, the bags
        # with one of them, and all of its ids.
        words, n, width = [x.view(np.int64) for x in arrived], len(shards), len(self._of)
        self._counts = np.array([x[: counts.shape[1]] for x in words])
        self._asked, self._given = self._counts[:, :n], np.split(self._counts[:, n:], 3, axis=1)
        self._sent = np.split(counts[:, n:], 3, axis=1)
        self._own = counts[:, :n]  # different ids that this process has sent, by rank
        assert self._given[0].shape[1] == width
        self.needed, self._error = attempted(self._answers, words, steps, begin)
        if self.needed is None:
            self.needed = [np.zeros(m, np.int64) for m in self._asked.sum(axis=0).tolist()]

    def _requests(
        self, shards: Sequence[IdShard], padding: Sequence[int | None]
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """The words for each rank, and the counts with which they begin."""
        size, n_tables = self._comm.size, len(shards)
        firsts, ids, times = np.zeros((n_tables, size + 1), np.int64), [], []
        places: list[np.ndarray] = [np.empty(0, _I32)] * len(self._of)
        for t, shard in enumerate(shards):
            features = [f for f, of in enumerate(self._of) if of == t]
            every = np.concatenate([self._bags[f].ids for f in features] or [np.empty(0, np.int64)])
            is_known = np.full(len(every), True) if padding[t] is None else every != padding[t]
            distinct, inverse, n = np.unique(
                keys_of(every[is_known]), return_inverse=True, return_counts=True
            )
            # Different keys ascend, and so do their owners.
            firsts[t, 1:] = [*np.searchsorted(distinct, shard.first_keys), len(distinct)]
            of_table = np.full(len(every), len(distinct), _I32)
            of_table[is_known] = inverse
            ends = np.cumsum([len(self._bags[f].ids) for f in features])
            for f, part in zip(features, np.split(of_table, ends[:-1]), strict=True):
                places[f] = part
            ids.append(ids_of_keys(distinct))
            times.append(n)
        self.places = places
        self._sort_occurrences(firsts)
        n_distinct = np.diff(firsts, axis=1).T  # [rank, table]
        totals = np.tile([len(bags.ids) for bags in self._bags], (size, 1))
        counts = np.concatenate((n_distinct, self._n_sent, self._n_bags, totals), axis=1)
        requests = []
        for r in range(size):
            spans = [slice(*firsts[t, r : r + 2]) for t in range(n_tables)]
            parts = [x[span] for lists in (ids, times) for x, span in zip(lists, spans, strict=True)]
            requests.append(np.concatenate((counts[r], *parts)))
        return requests, counts

    def _sort_occurrences(self, firsts: np.ndarray) -> None:
        """Sort the occurrences by owner and feature, in the order of the batch."""
        size, width = self._comm.size, len(self._of)
        lengths = [len(bags.ids) for bags in self._bags]
        feature = np.repeat(np.arange(width), lengths)
        place = np.concatenate(self.places)
        owner = np.concatenate([
            np.searchsorted(firsts[t, 1:], x, side="right")
            for t, x in zip(self._of, self.places, strict=True)
        ])  # fmt: skip
        groups = owner * width + feature
        # Numbers of 16 bits are sorted in one pass.
        order = np.argsort(groups.astype(np.uint16 if (size + 1) * width < 1 << 16 else np.int64),
                           kind="stable")  # fmt: skip
        order = order[: np.count_nonzero(owner < size)]  # behind them lies what is left out
        owner, feature, group = owner[order], feature[order], groups[order]
        bag = np.concatenate([bags.bag_of for bags in self._bags])[order]
        is_next = np.ones(len(order), bool)  # whether a bag begins, in its group
        is_next[1:] = (group[1:] != group[:-1]) | (bag[1:] != bag[:-1])
        n_groups = size * width
        self._n_sent = np.bincount(group, minlength=n_groups).reshape(size, width)
        self._n_bags = np.bincount(group[is_next], minlength=n_groups).reshape(size, width)
        first_bag = np.concatenate(([0], np.cumsum(self._n_bags.reshape(-1))))[group]
        of_table = np.asarray(self._of, np.int64)[feature]
        position = np.concatenate([np.arange(n) for n in lengths])
        columns = place[order] - firsts[of_table, owner], np.cumsum(is_next) - 1 - first_bag
        # For each occurrence, by owner: its place among the ids of the table that the owner has
        # got, that of its bag among the bags of the feature, and its own among all of the feature.
        lists = (*columns, position[order])
        self._lists = np.stack(lists).astype(_I32) if len(order) else np.empty((3, 0), _I32)
        self._order, self._bag_numbers = order, bag[is_next]

    def _exchanged(self, messages: Sequence[np.ndarray], sizes: Sequence[int]) -> list[np.ndarray]:
        """The messages of all ranks, of these sizes, for one to each."""
        received = np.empty(sum(sizes), np.uint8)
        lengths = [len(message) for message in messages]
        self._comm.all_to_all(np.concatenate(messages), lengths, received, sizes).wait()
        return np.split(received, np.cumsum(sizes)[:-1])

    def _told(
        self, messages: Sequence[Sequence[np.ndarray]], sizes: Sequence[int],
        error: Exception | None,
    ) -> list[np.ndarray]:  # fmt: skip
        """The messages of all ranks, which have said first that they have found no error."""
        status = np.full(1, error is not None, np.int64).view(np.uint8)
        sent = [
            np.concatenate((status, *(as_bytes(np.ascontiguousarray(x)) for x in parts)))
            for parts in messages
        ]
        arrived = self._exchanged(sent, [n + _STATUS for n in sizes])
        if any(message[:_STATUS].any() for message in arrived):
            agree(self._comm, self._where, {}, error)
        return [message[_STATUS:] for message in arrived]

    def _answers(
        self, words: Sequence[np.ndarray], steps: Sequence[int | None],
        begin: Callable[[Sequence[tuple[int, Admissions]]], Any],
    ) -> list[np.ndarray]:  # fmt: skip
        """The rows of the ids that others ask for, rank by rank for each table."""
        n_counts, n = self._counts.shape[1], len(self._maps)
        # Of a rank: counts, then ids of all tables, then how often each occurs.
        parts = []
        for x, asked in zip(words, self._asked, strict=True):
            parts.append(np.split(x[n_counts:], np.cumsum([*asked, *asked])[:-1]))
        ids, times = (
            np.concatenate([part[k + t] for t in range(n) for part in parts]) for k in (0, n)
        )
        bounds = [0, *np.cumsum(self._asked.sum(axis=0)).tolist()]
        with locked(self._maps):
            evictions = [id_map.evictions for id_map in self._maps]
            rows = found(self._maps, ids, bounds, steps, begin, times)
        spans = [slice(*span) for span in pairwise(bounds)]
        each = zip(self._maps, spans, evictions, strict=True)
        self._lookups = [FoundRows(m, ids[span], rows[span], e) for m, span, e in each]
        return [rows[span].astype(np.int64) for span in spans]

    def check_rows(self) -> None:
        """Refuse gradients of rows that were given back since.

        Raises:
            RuntimeError: some were.
        """
        if not all(lookup.are_current() for lookup in self._lookups):
            wrong = "rows of the forward were given back before its backward"
            raise RuntimeError(f"{self._where}: {wrong}: evict after the step")

    def rows(self, tables: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The rows of the different ids of each table, and a row of zeros behind them.

        Args:
            tables: contiguous ``[N, D]`` arrays of this process, as wide as those of the others.

        Raises:
            TypeError, ValueError, RuntimeError: on a rank, ids got no rows.
        """
        messages: list[list[np.ndarray]] = [[] for _ in range(self._comm.size)]
        for table, needed, asked in zip(tables, self.needed, self._asked.T, strict=True):
            read: np.ndarray = np.empty((len(needed), table.shape[1]), table.dtype)
            if read.size:
                gather(table, needed, read)
            for message, part in zip(messages, np.split(read, np.cumsum(asked)[:-1]), strict=True):
                message.append(part)
        row_bytes = [table.shape[1] * table.itemsize for table in tables]
        sizes = self._own * row_bytes
        arrived = self._told(messages, sizes.sum(axis=1).tolist(), self._error)
        parts = [np.split(x, np.cumsum(own)[:-1]) for x, own in zip(arrived, sizes, strict=True)]
        zeros = [np.zeros(n, np.uint8) for n in row_bytes]
        return [
            np.concatenate([*(part[t] for part in parts), zeros[t]])
            .view(table.dtype).reshape(-1, table.shape[1])
            for t, table in enumerate(tables)
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
        _, error = attempted(self.check_rows)
        if average:
            grad = grad / grad.dtype.type(self._comm.size)
        of_rank = np.cumsum(self._n_sent.sum(axis=1))[:-1]
        lists = np.split(self._lists, of_rank, axis=1)
        factors = None if weights is None else np.split(weights[self._order], of_rank)
        numbers = np.split(self._bag_numbers, np.cumsum(self._n_bags.reshape(-1))[:-1])
        spans, width = [slice(*span) for span in pairwise(columns)], len(self._of)
        messages = [
            [lists[r], *([] if factors is None else [factors[r]]),
             *(grad[numbers[r * width + f], span] for f, span in enumerate(spans))]
            for r in range(self._comm.size)
        ]  # fmt: skip
        n_given, n_bags, totals = self._given
        widths, per_id = np.diff(columns), 3 * _I32.itemsize
        real_bytes = 0 if weights is None else weights.itemsize
        sizes = n_given.sum(axis=1) * (per_id + real_bytes) + n_bags @ widths * grad.itemsize
        arrived = self._told(messages, sizes.tolist(), error)
        by_rank = []
        for r, message in enumerate(arrived):
            n, row_bytes = int(n_given[r].sum()), n_bags[r] * widths * grad.itemsize
            cuts = np.cumsum([per_id * n, real_bytes * n, *row_bytes])
            of_ids, of_weights, *rows = np.split(message, cuts[:-1])
            parts = np.cumsum(n_given[r])[:-1]
            each = np.split(of_ids.view(_I32).reshape(3, n), parts, axis=1)
            real = [] if weights is None else np.split(of_weights.view(weights.dtype), parts)
            by_rank.append((each, real, [x.view(grad.dtype) for x in rows]))
        first_asked = np.cumsum(self._asked, axis=0) - self._asked
        made = []
        for t, (n_rows, row) in enumerate(shapes):
            features = [f for f, of in enumerate(self._of) if of == t]
            first_bag = first_position = 0
            pieces: list[tuple[Any, ...]] = []
            for f in features:
                for r, (each, real, rows) in enumerate(by_rank):
                    place, bag, position = each[f].astype(np.int64)
                    index = self.needed[t][first_asked[r, t] + place]
                    factor = real[f] if real else None
                    pieces.append((index, bag + first_bag, position + first_position, factor, rows[f]))
                    first_bag += int(n_bags[r, f])
                    first_position += int(totals[r, f])
            *joined, values = (
                np.concatenate([piece[k] for piece in pieces]) for k in (0, 1, 2, 4)
            )
            has_row = joined[0] > 0  # row 0 is nobody's
            indices, bags, positions = (x[has_row] for x in joined)
            of_ids = None if weights is None else np.concatenate([p[3] for p in pieces])[has_row]
            gradient = RowGradient.shared(
                indices.astype(_I32), values.reshape(-1, row), bags.astype(_I32),
                row * values.itemsize, of_ids,
            )  # fmt: skip
            places = address_of(positions)
            source = gradient.source._replace(positions=places, whole_length=first_position)
            gradient = gradient._replace(positions=positions, source=source)
            made.append(BagTensor(gradient, row, (n_rows, row)))
        return made
