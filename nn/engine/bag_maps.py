"""Maps in front of the features of bags: ids become rows, which begin anew when handed out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from ...ops.runtime import check
from ...ops.runtime.arrays import adopt
from ...ops.runtime.bags.ids import check_features
from ...ops.runtime.bags.pooling import Pooling, padding_of_features
from ...ops.runtime.errors import reject
from ..base.ids.admission import begin_by_key, locked, rows_of_maps
from ..base.ids.id_arrays import Admissions, ids_of_64_bits
from ..base.ids.id_map import IdMap

_LEFT_OUT = -1


class FoundRows(NamedTuple):
    """The rows that a map has found for ids in a forward."""

    map: IdMap
    ids: np.ndarray
    rows: np.ndarray
    evictions: int  # before the ids were looked for: another thread may evict meanwhile

    def are_current(self) -> bool:
        """Whether the ids still have these rows."""
        return self.evictions == self.map.evictions or self.map.holds(self.ids, self.rows)


def found_rows(
    maps: Sequence[IdMap], ids: np.ndarray, bounds: Sequence[int], steps: Sequence[int | None],
    begin: Callable[[Sequence[tuple[int, Admissions]]], Any], times: np.ndarray | None = None,
) -> tuple[np.ndarray, list[FoundRows]]:  # fmt: skip
    """The result of `rows_of_maps`, whose arguments these are, and a record for each map."""
    evictions = [id_map.evictions for id_map in maps]
    rows = rows_of_maps(maps, ids, bounds, steps, begin, times)
    each = zip(maps, pairwise(bounds), evictions, strict=True)
    return rows, [FoundRows(m, ids[a:b], rows[a:b], n) for m, (a, b), n in each]


def check_current(where: str, lookups: Sequence[FoundRows]) -> None:
    """Refuse a gradient of rows that were given back since they were found.

    Raises:
        RuntimeError: some were.
    """
    if not all(lookup.are_current() for lookup in lookups):
        wrong = "rows of the forward were given back before its backward"
        raise RuntimeError(f"{where}: {wrong}: evict after the step")


class BagMaps:
    """The maps of the features of bags.

    Args:
        where: the name of the caller in errors.
        maps: an `IdMap` or None for each feature; features of one table have the same.
        features: the number of the table of each feature.
        padding: the id of each feature that counts for nothing, or one for all, or None.
        out_of_range: ``"raise"`` or ``"drop"``, of features without a map.
        begin: ``begin([(table, admissions), ...])`` lets rows of tables begin anew.
    """

    def __init__(
        self, where: str, maps: Any, features: Sequence[int], padding: Any, out_of_range: str,
        begin: Callable[[Sequence[tuple[int, Admissions]]], None],
    ) -> None:  # fmt: skip
        n = len(features)
        is_list = isinstance(maps, list | tuple) and len(maps) == n
        if not is_list or not all(id_map is None or isinstance(id_map, IdMap) for id_map in maps):
            expected, got = f"a list of {n}, an IdMap or None for each feature", repr(maps)
            reject(TypeError, where, "maps", "do not fit the features", expected, got)
        self._where, self._maps, self._of, self._begin = where, [*maps], [*features], begin
        pairs = dict(zip(zip(features, map(id, maps), strict=True), maps, strict=True))
        self.of_tables = {t: id_map for (t, _), id_map in pairs.items() if id_map is not None}
        each_table = [t for t, _ in pairs]
        if len({*each_table}) < len(pairs) or len({*self.of_tables.values()}) < len(self.of_tables):
            expected = "one map for all features of a table, and for no other table"
            reject(
                ValueError, where, "maps", "do not fit the tables", expected, f"tables {each_table}"
            )
        each = padding_of_features(where, padding, n)
        self._padding = [
            None if id_map is None or k is None else id_of_64_bits(where, k)
            for id_map, k in zip(maps, each, strict=True)
        ]
        self.padding = [
            None if id_map is not None else k for id_map, k in zip(maps, each, strict=True)
        ]
        leaves_out = any(k is not None for k in self._padding)
        self._checks, self.out_of_range = out_of_range == "raise", out_of_range
        if leaves_out:  # ids without a map are checked here
            self.out_of_range = "drop"

    def check_tables(self, tables: Sequence[Any]) -> None:
        """Refuse tables that have another number of rows than their maps.

        Raises:
            ValueError: there is one.
        """
        for t, id_map in self.of_tables.items():
            if len(tables[t]) != id_map.capacity:
                expected = f"{id_map.capacity} rows, the capacity of its map (both can grow)"
                wrong, got = "does not fit its map", len(tables[t])
                reject(ValueError, self._where, f"table {t}", wrong, expected, got)

    def rows(
        self, pooling: Pooling, ids: Any, offsets: Any, step: int | None
    ) -> tuple[Any, list[FoundRows]]:
        """The ids in their form, with rows in place of those of features with a map.

        Raises:
            TypeError, ValueError, IndexError: ids, offsets or the step do not fit. Nothing has
                changed then.
        """
        is_listed = isinstance(ids, list | tuple)
        arrays_of_ids = [adopt(self._where, "ids", x) for x in (ids if is_listed else [ids])]
        # Offsets are checked beside ids that fit any table: those of maps are numbers of any size.
        zeros = [np.zeros(x.shape, np.int64) for x in arrays_of_ids]
        parts = check_features(pooling, zeros if is_listed else zeros[0], offsets)
        features: list[Any] = []
        for f, (part, id_map) in enumerate(zip(parts, self._maps, strict=True)):
            array = arrays_of_ids[f if is_listed else 0]
            if not is_listed:
                array = array.reshape(-1)[part.begin : part.end]
            if id_map is None:
                check.index_dtype(self._where, array)
                if self._checks:
                    n = len(pooling.arrays[self._of[f]])
                    check.indices_in_range(self._where, array.reshape(-1), n)
            else:
                array = ids_of_64_bits(self._where, array)
            features.append(array)
        # Ids are admitted last, when nothing can be refused any more.
        tables, maps = [*self.of_tables], [*self.of_tables.values()]
        of_each = [[f for f, of in enumerate(self._of) if of == t] for t in tables]
        with locked(maps):
            for id_map in () if step is None else maps:  # other threads take steps too
                id_map.check_step(step)
            rows, kept = rows_of_tables(
                maps, [[features[f] for f in each] for each in of_each],
                [[self._padding[f] for f in each] for each in of_each], _LEFT_OUT,
                [None if step is None else int(step)] * len(maps),
                partial(begin_by_key, self._begin, tables),
            )  # fmt: skip
        for each, arrays in zip(of_each, rows, strict=True):
            for f, array in zip(each, arrays, strict=True):
                features[f] = array
        if is_listed:
            return features, kept
        shape = arrays_of_ids[0].shape if len(features) == 1 else (-1,)
        return np.concatenate([x.reshape(-1) for x in features]).reshape(shape), kept


def id_of_64_bits(where: str, padding: int) -> int:
    """An id that is ignored as an int64, the bits of unsigned ones as they are.

    Raises:
        ValueError: it has more than 64 bits.
    """
    is_one = -(1 << 63) <= padding < 1 << 64
    check.in_range(where, "padding_idx", padding, is_one, "of 64 bits")
    return padding - (1 << 64) if padding >> 63 > 0 else padding


def rows_of_tables(
    maps: Sequence[IdMap], parts: Sequence[Sequence[np.ndarray]],
    padding: Sequence[Sequence[int | None]], left_out: int, steps: Sequence[int | None],
    begin: Callable[[Sequence[tuple[int, Admissions]]], Any],
) -> tuple[list[list[np.ndarray]], list[FoundRows]]:  # fmt: skip
    """The rows of the ids of several tables, found in one call, and a record of each table.

    Args:
        maps: those of the tables, whose locks the caller has.
        parts: the ids of each feature of each table, int64. No id takes the row of one beside it.
        padding: of each feature the id that is left out, or None.
        left_out: the row of that.
        steps: of each table, in which ids are admitted; None: they are not.
        begin: ``begin([(number of a table, admissions), ...])``.

    Returns:
        For each table rows of the shapes of its features, int32; and the records.
    """
    if not maps:
        return [], []
    features = [*chain.from_iterable(parts)]
    # Copies, which no other thread changes.
    ids = np.concatenate([x.reshape(-1) for x in features])
    ends = np.cumsum([x.size for x in features])
    first_features = [*accumulate(map(len, parts), initial=0)]
    bounds = np.concatenate(([0], ends))[first_features]
    is_known = None
    if any(ignored is not None for ignored in chain.from_iterable(padding)):
        is_known = np.full(len(ids), True)
        each = zip((0, *ends[:-1]), ends, chain.from_iterable(padding), strict=True)
        for first, end, ignored in each:
            if ignored is not None:
                is_known[first:end] = ids[first:end] != ignored
        before = np.concatenate(([0], np.cumsum(is_known)))
        ids, bounds = ids[is_known], before[bounds]
    rows, records = found_rows(maps, ids, bounds.tolist(), steps, begin)
    if is_known is not None:
        every = np.full(len(is_known), left_out, np.int32)
        every[is_known] = rows
        rows = every
    each_feature = zip(np.split(rows, ends[:-1]), features, strict=True)
    shaped = [x.reshape(part.shape) for x, part in each_feature]
    return [shaped[a:b] for a, b in pairwise(first_features)], records
