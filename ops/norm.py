"""The global norm of a model's gradients, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..kernels.cpu.dense import measure
from ..kernels.cpu.rows.step import row_norm
from ..kernels.element import kernel
from ..kernels.quiet import quiet
from ..kernels.rules.norm import SCALED
from ..kernels.storage import Storage, real_of
from ..kernels.tables import TensorTable
from .runtime import check, device_norm
from .runtime.arrays import address_of, empty_like, native
from .runtime.device import device_of, is_on_device
from .runtime.errors import RejectedTypeError, reject
from .runtime.row_forms import as_rows, by_storage, index_lists
from .runtime.row_step import RowGradient, check_keys, first_bad_index, row_table
from .runtime.row_tensor import RowTensor
from .runtime.step import tensor_step

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
    return math.sqrt(_sum_of_squares("global_norm", _adopted("global_norm", x)))


def clip_by_global_norm(
    x: Sequence[Any], clip_norm: float = 1.0, use_norm: float | None = None
) -> tuple[Any, ...]:
    """Gradients scaled so that their global norm is at most ``clip_norm``::

        g * clip_norm / max(norm, clip_norm)

    Args:
        x: as `global_norm`.
        clip_norm: number > 0.
        use_norm: the norm to go by, if it is known; default `global_norm` of ``x``. It can be
            the norm over several processes.

    Returns:
        A tuple of new gradients of the same kinds, shapes and dtypes; where a list of `RowTensor`
        or a sparse tensor was given, there is one `RowTensor`. Gradients with an infinite
        or NaN norm become NaN, so that they do not pass for clipped ones. On a CUDA device they
        are arrays of the same framework; the norm stays there and nothing is waited for, so a
        bad index is reported by `fusestep.synchronize`.

    Raises:
        TypeError: a kind or dtype does not fit.
        ValueError: ``clip_norm`` is not above 0, or ``use_norm`` is below.
        IndexError: an index of a `RowTensor` is out of range (looked for unless ``use_norm`` is
            given: then nothing is summed).

    Source: ``mindspore.ops.clip_by_global_norm``; Pascanu et al. (2013), arXiv:1211.5063.

    >>> import numpy as np
    >>> (g,) = clip_by_global_norm([np.array([3.0, 4.0], np.float32)], 2.5)
    >>> g.tolist()
    [1.5, 2.0]
    """
    where = "clip_by_global_norm"
    limit = check.scalar(where, "clip_norm", clip_norm)
    check.in_range(where, "clip_norm", limit, limit > 0.0, "above 0")
    gradients = _adopted(where, x)
    on_device = _are_on_device(where, gradients)
    if use_norm is None and on_device:
        return device_norm.clipped(where, gradients, limit)
    if use_norm is None:
        norm = math.sqrt(_sum_of_squares(where, gradients))
    else:  # in float64, as it was measured
        norm = check.number(where, "use_norm", use_norm)
        if not math.isfinite(norm):
            reject(ValueError, where, "use_norm", "is not finite", "a finite number", norm)
        check.in_range(where, "use_norm", norm, norm >= 0.0, "at least 0")
    factor = limit / max(norm, limit) if math.isfinite(norm) else math.nan
    return tuple(_scaled(gradient, factor) for gradient in gradients)


def _adopted(where: str, x: Sequence[Any]) -> list[Gradient | None]:
    """Contiguous gradients, all checked but the values of indices."""
    if not isinstance(x, list | tuple):
        got = type(x).__name__
        reject(RejectedTypeError, where, "x", "has a wrong type", "a list or tuple", got)
    return [None if g is None else _adopted_one(where, f"x[{i}]", g) for i, g in enumerate(x)]


def _adopted_one(where: str, name: str, gradient: Any) -> Gradient:
    rows = as_rows(where, name, gradient)
    if rows is None:
        array = check.float_array_anywhere(where, name, gradient)
        return check.contiguous(array, where, name)
    # Checked again: the attributes of a RowTensor can be assigned to.
    check.float_dtype(where, name, rows.values)
    check.row_gradient(where, name, rows.indices, rows.values, rows.dense_shape)
    indices, values = (check.contiguous(a, where, name) for a in (rows.indices, rows.values))
    return RowTensor(indices, values, rows.dense_shape)


def _are_on_device(where: str, gradients: Sequence[Gradient | None]) -> bool:
    """Whether the gradients live on a CUDA device, all or none."""
    values = {
        f"x[{i}]": g.values if isinstance(g, RowTensor) else g
        for i, g in enumerate(gradients)
        if g is not None
    }
    return bool(values) and device_of(where, values) is not None


@quiet
def _sum_of_squares(where: str, gradients: Sequence[Gradient | None]) -> float:
    """Kind by kind, each in one kernel call."""
    if _are_on_device(where, gradients):
        return device_norm.squares(where, gradients)
    dense, rows = by_storage(gradients)
    total = sum(_of_rows(where, g, tensors) for g, tensors in rows.items())
    return total + sum(float(squares(g, arrays).sum()) for g, arrays in dense.items())


def squares(storage: Storage, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The float64 sum of squares of each of some contiguous arrays, in one call."""
    addresses = np.array([address_of(array) for array in arrays])
    sizes = np.array([array.size for array in arrays])
    return squares_at(storage, addresses, sizes)


def squares_at(storage: Storage, addresses: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """As `squares`, for arrays given by int64 addresses and numbers of elements."""
    addresses = np.array(addresses, np.int64)
    table = TensorTable(addresses[:, None], np.concatenate(([0], np.cumsum(sizes))))
    hp = np.ones((1, 1), real_of(storage).dtype)
    compiled = kernel(SCALED, (), storage, storage, ())
    hp_of = np.zeros(len(addresses), np.int64)
    sums: np.ndarray = measure(compiled, table, addresses, hp, hp_of)[:, 0]
    return sums


def _of_rows(where: str, g: Storage, by_place: dict[int, RowTensor]) -> float:
    real, tensors = real_of(g), list(by_place.values())
    hp = np.ones(1, real.dtype)
    tables = [
        row_table((), t.dense_shape, RowGradient.of(t.indices, t.values), address_of(hp))
        for t in tensors
    ]
    check_keys(where, tables)
    position, total = row_norm(kernel(SCALED, (), real, g, ()), tables)
    if position >= 0:
        raise first_bad_index(index_lists(where, by_place), tensors, position)
    return total


def _scaled(gradient: Gradient | None, factor: float) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, RowTensor):
        indices = gradient.indices
        own = indices if is_on_device(indices) else indices.copy()
        return RowTensor(own, _scaled(gradient.values, factor), gradient.dense_shape)
    result = empty_like(gradient)
    addresses = address_of(result), address_of(gradient)
    tensor_step(SCALED, (), (result, gradient), addresses, (factor,))
    return native(result)
