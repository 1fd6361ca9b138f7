"""The factors of THOR: block-diagonal covariances, their inverses, and products with them.

A factor of ``n`` rows is cut into blocks of ``b = block_size`` rows and columns along its
diagonal, the last one smaller; what lies outside of them is left out. It travels *packed*: an
``[n, b]`` array in which the rows of a block hold that block, followed by zeros where the last one
is narrower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...kernels.quiet import quiet
from ...ops.runtime.errors import message, reject

FloatArray = np.ndarray[Any, np.dtype[Any]]


class FactorError(np.linalg.LinAlgError):
    """A factor that has no inverse worth the name; a `ValueError` too."""


def blocks(n: int, width: int) -> Iterator[slice]:
    """The places of the diagonal blocks of a factor of ``n`` rows, ``width`` rows each."""
    for start in range(0, n, width):
        yield slice(start, min(start + width, n))


def empty_packed(n: int, block_size: int, dtype: Any) -> FloatArray:
    """A packed factor of zeros."""
    return np.zeros((n, min(n, block_size)), dtype)


def add_gram(total: FloatArray, rows: FloatArray) -> None:
    """Add the diagonal blocks of ``rows rows'``, of ``[n, samples]``, to the packed total."""
    for block in blocks(len(total), total.shape[1]):
        part = rows[block]
        total[block, : len(part)] += matmul(part, part.T)


def packed(full: FloatArray, block_size: int) -> FloatArray:
    """The diagonal blocks of a full ``[n, n]`` matrix."""
    result = empty_packed(len(full), block_size, full.dtype)
    for block in blocks(len(full), result.shape[1]):
        result[block, : block.stop - block.start] = full[block, block]
    return result


@quiet
def inverse(
    where: str, covariance: FloatArray, scale: float, damping: float, *, transposes: bool = True
) -> FloatArray:
    """The inverse of ``scale*covariance + damping*I``, block by block, by Cholesky.

    ``L L' = block``, ``inverse = L^-T L^-1`` in float64, rounded to the type of the
    ``covariance``, which is packed. Without ``transposes`` it is ``L^-1 L^-1``, which MindSpore
    takes for the inverse in an embedding's factor. It is a `FactorError` where a block or its
    inverse is not finite, or it is not positive definite.
    """
    lapack = load_lapack()
    result = np.zeros_like(covariance)
    for block in blocks(len(covariance), covariance.shape[1]):
        size = block.stop - block.start
        # A sum of squares that is finite is one of finite numbers, so the diagonal tells all.
        matrix = np.empty((size, size), np.float64, order="F")
        np.multiply(covariance[block, :size], scale, out=matrix.T, dtype=np.float64)
        diagonal = matrix.reshape(-1, order="F")[:: size + 1]
        diagonal += damping
        if not np.isfinite(diagonal).all():
            k = int(np.argmin(np.isfinite(diagonal)))
            wrong, got = "is not finite", f"{diagonal[k]} in row {block.start + k}"
            reject(FactorError, where, "the covariance", wrong, "finite numbers", got)
        root, failed = lapack.dpotrf(matrix, lower=1, clean=1, overwrite_a=1)
        if failed == 0:
            root, failed = lapack.dtrtri(root, lower=1, overwrite_c=1)
        if failed != 0:
            name, wrong = "the damped covariance", "cannot be inverted"
            expected = "a positive definite matrix"
            got = f"a pivot that is not above 0 in row {block.start + abs(failed) - 1}"
            reject(FactorError, where, name, wrong, expected, got, "; raise the damping")
        result[block, :size] = matmul(root.T if transposes else root, root)
        # Covariances from elsewhere may be bad beside the diagonal, or nearly singular.
        if not np.isfinite(result[block, :size]).all():
            wrong, got = "is not finite", f"others in rows {block.start} to {block.stop - 1}"
            reject(FactorError, where, "the inverse", wrong, "finite numbers", got)
    return result


def _stacks(factor: FloatArray) -> Iterator[tuple[slice, FloatArray]]:
    """The blocks of a packed factor as one array, and the narrower one at its end as another."""
    n, width = factor.shape
    whole = n - n % width
    yield slice(whole), factor[:whole].reshape(-1, width, width)
    if whole < n:
        yield slice(whole, n), factor[None, whole:, : n - whole]


def times_packed(matrix: FloatArray, factor: FloatArray, out: FloatArray) -> None:
    """``out = matrix @ factor`` with a packed ``factor`` of ``matrix.shape[1]`` rows."""
    for place, stack in _stacks(factor):
        shape = (len(matrix), *stack.shape[:2])
        matrix_blocks, out_blocks = (
            a[:, place].reshape(shape).swapaxes(0, 1) for a in (matrix, out)
        )
        matmul(matrix_blocks, stack, out=out_blocks)


def packed_times(factor: FloatArray, matrix: FloatArray, out: FloatArray) -> None:
    """``out = factor @ matrix`` with a packed ``factor`` of ``len(matrix)`` rows."""
    for place, stack in _stacks(factor):
        shape = (*stack.shape[:2], matrix.shape[1])
        matmul(stack, matrix[place].reshape(shape), out=out[place].reshape(shape))


matmul: Callable[..., Any] = np.matmul
"""Every matrix product of THOR goes through this name, so that a benchmark can time it."""


def load_lapack() -> Any:
    """SciPy's LAPACK; imported when the first factor is inverted."""
    try:
        from scipy.linalg import lapack
    except ImportError as error:
        raise ImportError(
            message("thor", "scipy", "is not installed", 'pip install "fusestep[thor]"', "no scipy")
            + "; the factors are inverted by its LAPACK"
        ) from error
    return lapack
