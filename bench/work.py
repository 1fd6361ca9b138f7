"""What the cases run: arrays, our step on them, and what peers need to do the same.

All arrays are plain NumPy arrays, as a user has them. Variables start at zero: moments that
start elsewhere and decay untouched end as subnormal numbers, which are slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import nn, ops
from . import traffic
from .bounds import Bound
from .workers.worker_protocol import Job

# Powers of the betas at the first step, learning rate, betas, epsilon.
SCALARS = (0.9, 0.999, 1e-3, 0.9, 0.999, 1e-8)
DENSE = 2**24
TABLE = (500_000, 64, 65_536)  # N, D, B


@dataclass(frozen=True)
class Work:
    """One case, set up.

    Args:
        jobs: our steps by name; the first is the one that targets speak of.
        variables: what the first of them updates.
        bytes: what a step must move, by the model of `traffic`.
        shapes: of the parameters.
        inputs: what a peer gets: gradients, and indices if there are any, one per parameter
            or per batch.
        size: the sizes, for the report.
        bound: what the bound loops move; None where no bound applies.
        new_gradients: each step gets new gradient arrays.
    """

    jobs: dict[str, Job]
    variables: tuple[np.ndarray, ...]
    bytes: int
    shapes: list[tuple[int, ...]]
    inputs: dict[str, list[np.ndarray]]
    size: dict[str, int]
    bound: Bound | None = None
    new_gradients: bool = field(default=False)


def zeros(shape: tuple[int, ...]) -> np.ndarray:
    """Float32 zeros in memory that has been written, unlike that of ``np.zeros``.

    Reading memory that was never written costs no traffic: it is all one page.
    """
    array = np.empty(shape, np.float32)
    array.fill(0)
    return array


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 normal numbers."""
    return rng.standard_normal(shape, np.float32)


def dense_adam(n: int = DENSE) -> Work:
    """Adam on one tensor, as an operator and as an optimizer."""
    w, m, v = (zeros((n,)) for _ in range(3))
    g = normal(np.random.default_rng(0), (n,))
    operator = ops.Adam()
    optimizer = nn.Adam([w], learning_rate=1e-3)
    return Work(
        jobs={
            "ops.Adam": Job(lambda: operator(w, m, v, *SCALARS, g)),
            "nn.Adam": Job(lambda: optimizer((g,))),
        },
        variables=(w, m, v),
        bytes=traffic.dense(n, 3),
        shapes=[(n,)],
        inputs={"gradient": [g]},
        size={"elements": n},
        bound=Bound((w, m, v), g),
    )


def dense_amsgrad(n: int = DENSE) -> Work:
    """AMSGrad on one tensor."""
    w, m, v, vhat = (zeros((n,)) for _ in range(4))
    g = normal(np.random.default_rng(0), (n,))
    operator = ops.ApplyAdamWithAmsgradV2()
    return Work(
        jobs={"ops.ApplyAdamWithAmsgradV2": Job(lambda: operator(w, m, v, vhat, *SCALARS, g))},
        variables=(w, m, v, vhat),
        bytes=traffic.dense(n, 4),
        shapes=[(n,)],
        inputs={"gradient": [g]},
        size={"elements": n},
        bound=Bound((w, m, v, vhat), g),
    )


def many_small(count: int = 200) -> Work:
    """One step of an optimizer on many small parameters, new gradient arrays each time.

    The sizes are ``np.random.default_rng(0).integers(16, 4097, count)``.
    """
    sizes = [int(size) for size in np.random.default_rng(0).integers(16, 4097, count)]
    rng = np.random.default_rng(1)
    originals = [normal(rng, (size,)) for size in sizes]
    parameters = [zeros((size,)) for size in sizes]
    optimizer = nn.Adam(parameters, learning_rate=1e-3)
    gradients: list[np.ndarray] = []

    def load() -> None:
        gradients[:] = [original.copy() for original in originals]

    return Work(
        jobs={"nn.Adam": Job(lambda: optimizer(gradients), load)},
        variables=(*parameters, *optimizer.moment1, *optimizer.moment2),
        bytes=traffic.dense(sum(sizes), 3),
        shapes=[(size,) for size in sizes],
        inputs={"gradient": originals},
        size={"parameters": count, "elements": sum(sizes)},
        new_gradients=True,
    )


def zipf_rows(N: int, B: int) -> np.ndarray:
    """Indices by Zipf's law with exponent 1.2, the frequent rows scattered over the table."""
    rng = np.random.default_rng(0)
    z = rng.zipf(1.2, 3 * B)
    z = z[z <= N][:B] - 1
    return rng.permutation(N)[z]


def rows_fused(N: int = TABLE[0], D: int = TABLE[1], B: int = TABLE[2]) -> Work:
    """A row-sparse gradient, every row takes the step; the bound is the sweep alone."""
    return _adam_rows(ops.FusedSparseAdam(), N, D, B, touched_only=False)


def rows_lazy(N: int = TABLE[0], D: int = TABLE[1], B: int = TABLE[2]) -> Work:
    """A row-sparse gradient, the rows that occur take the step."""
    return _adam_rows(ops.FusedSparseLazyAdam(), N, D, B, touched_only=True)


def rows_ftrl(N: int = TABLE[0], D: int = TABLE[1], B: int = TABLE[2]) -> Work:
    """FTRL on the rows that occur."""
    operator: Any = ops.FusedSparseFtrl(lr=1e-3, l1=0.0, l2=0.0, lr_power=-0.5)
    return _rows(operator, 3, N, D, B, lambda v, g, i: operator(*v, g, i), touched_only=True)


def rows_proximal_adagrad(N: int = TABLE[0], D: int = TABLE[1], B: int = TABLE[2]) -> Work:
    """Proximal Adagrad on the rows that occur."""
    operator: Any = ops.FusedSparseProximalAdagrad()
    return _rows(
        operator, 2, N, D, B, lambda v, g, i: operator(*v, 1e-3, 0.0, 0.0, g, i), touched_only=True
    )


def _adam_rows(operator: Callable[..., Any], N: int, D: int, B: int, *, touched_only: bool) -> Work:
    return _rows(
        operator,
        3,
        N,
        D,
        B,
        lambda v, g, i: operator(*v, *SCALARS, g, i),
        touched_only=touched_only,
    )


def _rows(
    operator: Callable[..., Any],
    count: int,
    N: int,
    D: int,
    B: int,
    call: Callable[[Sequence[np.ndarray], np.ndarray, np.ndarray], Any],
    *,
    touched_only: bool,
) -> Work:
    """A row-sparse step on a table with ``count`` variables."""
    variables = tuple(zeros((N, D)) for _ in range(count))
    indices = zipf_rows(N, B)
    B = indices.size
    g = normal(np.random.default_rng(1), (B, D))
    unique = np.unique(indices).size
    lazy, whole = traffic.rows_touched(unique, D, B, count), traffic.rows_all(N, D, B, count)
    return Work(
        jobs={f"ops.{type(operator).__name__}": Job(lambda: call(variables, g, indices))},
        variables=variables,
        bytes=lazy if touched_only else whole,
        shapes=[(N, D)],
        inputs={"gradient": [g], "indices": [indices]},
        size={"N": N, "D": D, "B": B, "different rows": unique},
        bound=None if touched_only else Bound(variables),
    )
