"""Arguments of bags, on the host or on a device: kinds, dtypes and shapes are checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .. import check
from ..arrays import address_of, adopt, adopt_anywhere
from ..device import device_of
from ..errors import reject
from .pooling import Pooling, kind_of


class Ids(NamedTuple):
    """The ids of one feature."""

    name: str  # in errors
    array: Any  # contiguous
    bags: int
    offsets: Any  # contiguous; None: all bags have ``length`` ids
    offsets_name: str
    begin: int  # first place in the array; not known for an array of all features on a device
    end: int
    length: int = 0
    first_offset: int = 0  # the number of its first offset

    @property
    def n(self) -> int:
        """The number of ids."""
        return self.end - self.begin


def fill_in(record: Any, ids: Ids, weights: Any) -> None:
    """Write the ids of a feature, and their weights or None, to a record of `IdList`."""
    record["ids"], record["id_bytes"] = address_of(ids.array), ids.array.itemsize
    record["n"], record["bags"], record["length"] = ids.n, ids.bags, ids.length
    record["begin"], record["end"] = ids.begin, ids.end
    if ids.offsets is not None:
        itemsize = ids.offsets.itemsize
        record["offsets"] = address_of(ids.offsets) + ids.first_offset * itemsize
        record["n_offsets"], record["offset_bytes"] = len(ids.offsets), itemsize
    if weights is not None:
        record["id_weights"] = address_of(weights)


def array_of(pooling: Pooling, name: str, argument: Any) -> Any:
    """An array that has to lie on the device of the tables, or on the host with them."""
    if not pooling.is_on_device:
        return adopt(pooling.where, name, argument)
    array = adopt_anywhere(pooling.where, name, argument)
    device_of(pooling.where, {"tables[0]": pooling.arrays[0], name: array})
    return array


def _integers(pooling: Pooling, name: str, argument: Any) -> Any:
    array = array_of(pooling, name, argument)
    if array.dtype not in check.INDEX_DTYPES:
        wrong, expected = "has a wrong dtype", "int32 or int64"
        reject(TypeError, pooling.where, name, wrong, expected, array.dtype)
    return check.contiguous(array, pooling.where, name)


def read_lists(pooling: Pooling, ids: Any, offsets: Any) -> tuple[list[Ids], bool]:
    """The ids of each feature, and whether all features have one array of ids.

    Features that are pooled have equal numbers of bags. If there is one array, each has all of it.

    Raises:
        TypeError, ValueError: a kind, place, dtype or shape does not fit.
    """
    where, n = pooling.where, len(pooling.of)
    if not pooling.pools and offsets is not None:
        wrong, expected = "are given without pooling", "None: each id has a row of the output"
        reject(ValueError, where, "offsets", wrong, expected, type(offsets).__name__)
    if not isinstance(ids, list | tuple):
        return _read_joined(pooling, ids, offsets)
    if len(ids) != n:
        reject(ValueError, where, "ids", "have a wrong length", f"{n} arrays", len(ids))
    if offsets is not None and (not isinstance(offsets, list | tuple) or len(offsets) != n):
        expected = f"a list of {n} arrays, as the ids are"
        reject(ValueError, where, "offsets", "do not fit the ids", expected, kind_of(offsets))
    lists = []
    for f, argument in enumerate(ids):
        bounds = None if offsets is None else offsets[f]
        lists.append(_read_list(pooling, f"ids[{f}]", argument, f"offsets[{f}]", bounds))
    for read in lists if pooling.pools else ():
        if read.bags != lists[0].bags:
            wrong = "have another number of bags than ids[0]"
            reject(ValueError, where, read.name, wrong, lists[0].bags, read.bags)
    return lists, False


def _read_list(pooling: Pooling, name: str, ids: Any, offsets_name: str, offsets: Any) -> Ids:
    where, pools, is_open = pooling.where, pooling.pools, pooling.open_ended
    array = _integers(pooling, name, ids)
    if pools and offsets is None:
        if array.ndim != 2:
            wrong, expected = "has a wrong shape", "(bags, length), as there are no offsets"
            reject(ValueError, where, name, wrong, expected, array.shape)
        bags, length = array.shape
        return Ids(name, array, bags, None, offsets_name, 0, array.size, length)
    if array.ndim != 1:
        reject(ValueError, where, name, "has a wrong shape", "1 dimension", array.shape)
    if not pools:
        return Ids(name, array, array.size, None, offsets_name, 0, array.size, 1)
    bounds = _integers(pooling, offsets_name, offsets)
    if bounds.ndim != 1 or (len(bounds) == 0 and (array.size or not is_open)):
        expected = "(bags,), where each begins" if is_open else "(bags + 1,)"
        reject(ValueError, where, offsets_name, "has a wrong shape", expected, bounds.shape)
    return Ids(name, array, len(bounds) - (not is_open), bounds, offsets_name, 0, array.size)


def _read_joined(pooling: Pooling, ids: Any, offsets: Any) -> tuple[list[Ids], bool]:
    """Read one array with the ids of all features, and one with the offsets of all their bags."""
    where, n, pools = pooling.where, len(pooling.of), pooling.pools
    array = _integers(pooling, "ids", ids)
    if n == 1 and (offsets is None or not pools):
        return [_read_list(pooling, "ids", array, "offsets", offsets)], False
    if not pools or array.ndim != 1:
        expected = f"a list of {n} arrays" + (", or all ids in 1 dimension" if pools else "")
        reject(ValueError, where, "ids", "have a wrong shape", expected, array.shape)
    if isinstance(offsets, list | tuple) or offsets is None:
        expected, got = "one array, as the ids are", type(offsets).__name__
        reject(TypeError, where, "offsets", "do not fit the ids", expected, got)
    bounds = _integers(pooling, "offsets", offsets)
    if bounds.ndim != 1 or len(bounds) % n != 1 % n or len(bounds) == 0:
        wrong, expected = "have a wrong shape", f"({n} * bags + 1,)"
        reject(ValueError, where, "offsets", wrong, expected, bounds.shape)
    bags = (len(bounds) - 1) // n
    every = Ids("ids", array, bags, bounds, "offsets", 0, array.size)
    return [every._replace(first_offset=f * bags) for f in range(n)], n > 1


def read_weights(
    pooling: Pooling, lists: Sequence[Ids], weights: Any, *, is_joined: bool
) -> list[Any] | None:
    """The weights of the ids of each feature, or one array for joined ids; None: no weights.

    Raises:
        TypeError, ValueError: a kind, place, dtype or shape does not fit, or pooling is not "sum".
    """
    where, name = pooling.where, "per_sample_weights"
    if weights is None:
        return None
    if pooling.name != "sum":
        wrong, expected = "need sums", "None, or pooling 'sum'"
        reject(ValueError, where, name, wrong, expected, f"pooling {pooling.name!r}")
    is_listed = isinstance(weights, list | tuple)
    if (is_joined or len(lists) == 1) and not is_listed:
        return [_weights(pooling, name, weights, lists[0].array.size)]
    if is_joined or not is_listed or len(weights) != len(lists):
        expected = "one array" if is_joined else f"a list of {len(lists)} arrays"
        wrong, got = "do not fit the ids", kind_of(weights)
        reject(ValueError, where, name, wrong, f"{expected}, as the ids are", got)
    each = enumerate(zip(weights, lists, strict=True))
    return [_weights(pooling, f"{name}[{f}]", given, x.n) for f, (given, x) in each]


def _weights(pooling: Pooling, name: str, argument: Any, n: int) -> Any:
    where, real, array = pooling.where, pooling.real, array_of(pooling, name, argument)
    check.float_dtype(where, name, array)
    if array.dtype.itemsize > real.itemsize:
        wrong = "has a higher dtype than the arithmetic"
        reject(TypeError, where, name, wrong, real, array.dtype)
    if array.size != n:
        reject(ValueError, where, name, "has a wrong shape", f"{n} numbers", array.shape)
    return check.contiguous(array, where, name)


def read_outputs(
    pooling: Pooling, out: Any, shapes: Sequence[tuple[int, int]],
    is_shared: Callable[[Any, Sequence[Any]], bool],
) -> list[Any]:  # fmt: skip
    """The caller's arrays for the output.

    Args:
        pooling: the tables.
        out: a list of as many arrays as there are shapes.
        shapes: the shapes that they must have.
        is_shared: ``is_shared(array, before)``: whether an array shares memory with any input, or
            with the arrays before it.

    Raises:
        TypeError, ValueError: a kind, place, dtype or shape does not fit, or memory is shared.
    """
    where, arrays = pooling.where, list[Any]()
    if not isinstance(out, list | tuple) or len(out) != len(shapes):
        expected = f"a list of {len(shapes)} arrays"
        reject(ValueError, where, "out", "does not fit the features", expected, kind_of(out))
    for f, (argument, shape) in enumerate(zip(out, shapes, strict=True)):
        name = "out" if len(out) == 1 else f"out[{f}]"
        array = check.variable(where, name, argument)
        device_of(where, {"tables[0]": pooling.arrays[0], name: array})
        if array.dtype != pooling.real:
            reject(TypeError, where, name, "has a wrong dtype", pooling.real, array.dtype)
        if array.shape != shape:
            reject(ValueError, where, name, "has a wrong shape", shape, array.shape)
        if is_shared(array, arrays):
            wrong, expected = "shares memory with what is read", "its own memory"
            reject(ValueError, where, name, wrong, expected, "an overlap")
        arrays.append(array)
    return arrays


def read_gradient(pooling: Pooling, name: str, grad: Any, shape: tuple[int, int]) -> Any:
    """The contiguous gradient of an output.

    Raises:
        TypeError, ValueError: its kind, place, dtype or shape does not fit.
    """
    array = array_of(pooling, name, grad)
    check.float_dtype(pooling.where, name, array)
    if array.shape != shape:
        reject(ValueError, pooling.where, name, "has a wrong shape", shape, array.shape)
    return check.contiguous(array, pooling.where, name)


def read_gradients(pooling: Pooling, grad: Any, shapes: Sequence[tuple[int, int]]) -> list[Any]:
    """The gradients of several outputs, of one dtype.

    Raises:
        TypeError, ValueError: as `read_gradient`.
    """
    where = pooling.where
    if not isinstance(grad, list | tuple) or len(grad) != len(shapes):
        expected = f"a list of {len(shapes)} arrays"
        reject(ValueError, where, "grad", "does not fit the outputs", expected, kind_of(grad))
    each = enumerate(zip(grad, shapes, strict=True))
    gradients = [read_gradient(pooling, f"grad[{f}]", x, shape) for f, (x, shape) in each]
    for f, gradient in enumerate(gradients):
        if gradient.dtype != gradients[0].dtype:
            wrong = "has another dtype than grad[0]"
            reject(TypeError, where, f"grad[{f}]", wrong, gradients[0].dtype, gradient.dtype)
    return gradients


def joined_by_table(
    pooling: Pooling, parts: Sequence[Any], join: Callable[[Sequence[Any], int], Any]
) -> list[Any]:
    """The gradient of each table: those of its features, one below the other.

    Args:
        pooling: the tables.
        parts: the gradient of each feature.
        join: ``join(parts, width)`` joins the gradients of a table, of which there may be none.
    """
    gradients = []
    for t, table in enumerate(pooling.arrays):
        of_table = [part for part, of in zip(parts, pooling.of, strict=True) if of == t]
        gradients.append(of_table[0] if len(of_table) == 1 else join(of_table, table.shape[1]))
    return gradients
