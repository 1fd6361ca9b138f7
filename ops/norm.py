"""The global norm of a model's gradients, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..kernels.cpu.headers.arrays import lie_in
from ..kernels.quiet import quiet
from ..kernels.rules.norm import SCALED, SCALED_IN_PLACE
from ..kernels.storage import Storage, real_of
from .runtime import check, device_norm
from .runtime.arrays import address_of, empty_like, native
from .runtime.bags.tensor import BagTensor
from .runtime.device import device_of, is_on_device
from .runtime.errors import ConversionError, RejectedTypeError, reject
from .runtime.row_forms import (
    as_rows,
    by_storage,
    index_lists,
    row_gradient,
    values_by_storage,
    values_of,
    with_values,
)
from .runtime.row_step import row_squares, run_updates
from .runtime.row_tensor import RowTensor
from .runtime.step import DenseUpdate, Variables, squares_at, tensor_step

Gradient = Any  # an array, of NumPy or a `DeviceArray`, or a `RowTensor`


def global_norm(x: Sequence[Any]) -> float:
    """The L2 norm of all gradients taken together::

        sqrt(sum over all gradients and elements of g*g)

    A row-sparse gradient counts as the dense one that it stands for: rows of equal indices
    are summed first. Nothing dense is built. Squares and sums are float64, in an order that
    does not depend on the number of threads. On a CUDA device the host waits for the result.

    Args:
        x: a list or tuple of float32, float64, float16 or bfloat16 arrays, `RowTensor`, lists of
            them (for one tensor) and torch sparse COO tensors; None entries count as 0.

    Raises:
        TypeError: a kind or dtype does not fit.
        IndexError: an index of a `RowTensor` is out of range.

    >>> import numpy as np
    >>> rows = RowTensor(np.array([1, 1]), np.array([[1.0], [2.0]], np.float32), (5, 1))
    >>> global_norm([np.array([4.0], np.float32), rows])
    5.0
    """
    where = "global_norm"
    gradients = _adopted(where, x)
    return math.sqrt(_sum_of_squares(where, gradients, on_device=_are_on_device(where, gradients)))


def clip_by_global_norm(
    x: Sequence[Any], clip_norm: float = 1.0, use_norm: float | None = None, *,
    in_place: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients scaled so that their global norm is at most ``clip_norm``::

        g * clip_norm / max(norm, clip_norm)

    Args:
        x: as `global_norm`.
        clip_norm: number > 0.
        use_norm: the norm to go by, if it is known; default `global_norm` of ``x``. It can be
            the norm over several processes.
        in_place: scale the gradients where they lie, all or none, and touch none within the limit.
            They are writable, contiguous and share no memory: arrays, or values of a `RowTensor`.

    Returns:
        A tuple of new gradients of the same kinds, shapes and dtypes; where a list of `RowTensor`
        or a sparse tensor was given, there is one `RowTensor`. With ``in_place`` it has the
        gradients themselves. Those with an infinite or NaN norm become NaN, so that they do not
        pass for clipped ones. On a CUDA device they are arrays of the same framework; the norm
        stays there and nothing is waited for, so a bad index is reported by
        `fusestep.synchronize` (and nothing is scaled in place).

    Raises:
        TypeError: a kind or dtype does not fit.
        ValueError: ``clip_norm`` is not above 0, ``use_norm`` is below, or in place cannot be.
        IndexError: an index of a `RowTensor` is out of range (checked unless ``use_norm`` is
            given: then nothing is summed).

    Source: ``mindspore.ops.clip_by_global_norm``; Pascanu et al. (2013), arXiv:1211.5063.

    >>> import numpy as np
    >>> (g,) = clip_by_global_norm([np.array([3.0, 4.0], np.float32)], 2.5)
    >>> g.tolist()
    [1.5, 2.0]
    >>> clip_by_global_norm([g], 1.25, in_place=True)[0] is g, g.tolist()
    (True, [0.75, 1.0])
    """
    where = "clip_by_global_norm"
    limit = check.scalar(where, "clip_norm", clip_norm)
    check.in_range(where, "clip_norm", limit, limit > 0.0, "above 0")
    in_place = check.flag(where, "in_place", in_place)
    gradients = [g.to_rows() if isinstance(g, BagTensor) else g for g in _adopted(where, x)]
    on_device = _are_on_device(where, gradients)
    if in_place:
        _check_in_place(where, x, gradients)
    results = gradients if in_place else [*map(_like, gradients)]
    if use_norm is None and on_device:
        device_norm.clip(where, gradients, results, limit)
        return tuple(x) if in_place else tuple(map(native, results))
    if use_norm is None:
        norm = math.sqrt(_sum_of_squares(where, gradients, on_device=False))
    else:  # in float64, as it was measured
        norm = check.number(where, "use_norm", use_norm)
        if not math.isfinite(norm):
            reject(ValueError, where, "use_norm", "is not finite", "a finite number", norm)
        check.in_range(where, "use_norm", norm, norm >= 0.0, "at least 0")
    factor = limit / max(norm, limit) if math.isfinite(norm) else math.nan
    if factor != 1.0 or not in_place:
        _scale(gradients, results, factor)
    return tuple(x) if in_place else tuple(map(native, results))


def _adopted(where: str, x: Sequence[Any]) -> list[Gradient | None]:
    """Contiguous gradients, all checked but the values of indices."""
    if not isinstance(x, list | tuple):
        got = type(x).__name__
        reject(RejectedTypeError, where, "x", "has a wrong type", "a list or tuple", got)
    return [None if g is None else _adopted_one(where, f"x[{i}]", g) for i, g in enumerate(x)]


def _adopted_one(where: str, name: str, gradient: Any) -> Gradient:
    if isinstance(gradient, BagTensor) and not is_on_device(gradient.values):
        return gradient
    rows = as_rows(where, name, gradient)
    if rows is None:
        array = check.float_array_anywhere(where, name, gradient)
        return check.contiguous(array, where, name)
    # Checked again: the attributes of a RowTensor can be assigned to.
    check.float_dtype(where, name, rows.values)
    check.row_gradient(where, name, rows.indices, rows.values, rows.dense_shape)
    rows.check_positions(f"{where}: {name}")
    indices, values = (check.contiguous(a, where, name) for a in (rows.indices, rows.values))
    result = with_values(rows, values, indices)
    if result.positions is not None:
        result.positions = check.contiguous(result.positions)
    return result


def _check_in_place(where: str, x: Sequence[Any], gradients: Sequence[Gradient | None]) -> None:
    """Check that gradients can be written to: none was converted, and none aliases another."""
    values: dict[str, Any] = {}
    for i, (original, adopted) in enumerate(zip(x, gradients, strict=True)):
        if isinstance(adopted, RowTensor) and not isinstance(original, RowTensor):
            wrong, expected = "cannot be scaled in place", "an array or a RowTensor"
            reject(ConversionError, where, f"x[{i}]", wrong, expected, type(original).__name__)
        if adopted is not None:
            values[f"x[{i}]"] = check.variable(where, f"x[{i}]", values_of(original))
    check.no_overlap(where, [*values], [*values.values()])
    # Indices that lie among the values would be scaled with them, and name other rows from then on.
    spans = sorted((address_of(a), address_of(a) + a.nbytes) for a in values.values() if a.nbytes)
    written = list(zip(*spans, strict=True)) or ((), ())
    for i, adopted in enumerate(gradients):
        for name in ("indices", "positions") if isinstance(adopted, RowTensor) else ():
            array = getattr(adopted, name)
            if array is not None and lie_in(written, [(address_of(array), array.nbytes)]):
                wrong, expected = "share memory with values to be scaled", "separate arrays"
                reject(ValueError, where, f"{name} of x[{i}]", wrong, expected, "an overlap")


def _are_on_device(where: str, gradients: Sequence[Gradient | None]) -> bool:
    """Whether the gradients live on a CUDA device, all or none."""
    values = {f"x[{i}]": values_of(g) for i, g in enumerate(gradients) if g is not None}
    return bool(values) and device_of(where, values) is not None


@quiet
def _sum_of_squares(where: str, gradients: Sequence[Gradient | None], *, on_device: bool) -> float:
    """Kind by kind, each in one kernel call."""
    if on_device:
        return device_norm.squares(where, gradients)
    # Storage types in the order in which they occur, rows before dense arrays: like that of the
    # sums of each, this order follows from the arguments alone.
    dense, rows = by_storage(gradients)
    total = sum(_of_rows(where, g, tensors) for g, tensors in rows.items())
    return total + sum(float(squares(g, arrays).sum()) for g, arrays in dense.items())


def squares(storage: Storage, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The float64 sum of squares of each of some contiguous arrays, in one call."""
    addresses = np.array([address_of(array) for array in arrays])
    sizes = np.array([array.size for array in arrays])
    return squares_at(storage, addresses, sizes)


def _of_rows(where: str, g: Storage, by_place: dict[int, RowTensor]) -> float:
    tables = [(tensor.dense_shape, row_gradient(tensor)) for tensor in by_place.values()]
    return row_squares(where, index_lists(where, by_place), tables, g, real_of(g))


def _like(gradient: Gradient | None) -> Gradient | None:
    """A gradient of the same kind, with values still to be written."""
    if not isinstance(gradient, RowTensor):
        return None if gradient is None else empty_like(gradient)
    indices, values = gradient.indices, empty_like(gradient.values)
    copied = indices if is_on_device(indices) else indices.copy()
    return with_values(gradient, values, copied)


@quiet
def _scale(
    gradients: Sequence[Gradient | None], results: Sequence[Gradient | None], factor: float
) -> None:
    """Write the products to the results, those of a storage type in one kernel call."""
    in_place, updates = results is gradients, []
    sources, made = values_by_storage(gradients), values_by_storage(results)
    rule = SCALED_IN_PLACE if in_place else SCALED
    arrays = [array for side in (made, sources) for group in side.values() for array in group]
    if len(arrays) == 2:  # for one tensor a step is kept
        tensor_step(rule, (), tuple(arrays), [*map(address_of, arrays)], (factor,))
        return
    for g, group in made.items():
        variables, row_of = Variables.of([(array,) for array in group]), np.zeros(len(group), int)
        places = variables.table.addresses[:, 0]
        if not in_place:
            places = np.array([*map(address_of, sources[g])])
        hp = np.array([[factor]], variables.real.dtype)
        updates.append(DenseUpdate(rule, (), variables, places, g, hp, row_of))
    if updates:
        run_updates(updates, arrays)
