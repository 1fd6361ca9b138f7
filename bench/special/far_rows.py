"""A lazy Adam step on rows that lie far apart, in its parts, beside a plain loop.

Uniform indices on large tables, so that most rows occur once and each costs misses. Every step
gets other indices than the one before. The parts are the grouping (find the different rows and
their occurrences) and the update; the plain loop is Numba's own, over rows that somebody has
sorted and made distinct for it, with a prefetch and none of the engine: it reads the gradient of
one occurrence of each row.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numba import njit, prange

from ... import ops
from ...kernels.cpu.compiler.lines import prefetch
from ...kernels.cpu.headers.arrays import address_of
from ...kernels.cpu.rows.arguments import RowTables
from ...kernels.cpu.rows.step import RowStep
from ...kernels.cpu.threads import allocation
from ...kernels.cpu.threads.parallel import run_words
from ...kernels.element import kernel
from ...kernels.rules import adam
from ...kernels.storage import F32
from ...kernels.tables import RowSource, table_sizes
from ..cases import indices
from ..cases.operators import SCALARS
from ..cases.workloads import FAR_SIZES, rows
from ..measure import in_rounds
from ..report.result import Progress, SpecialResult, tracked
from ..work import check_memory
from ..workers.worker_protocol import Job, in_turn

PARTS = STEP, GROUPING, UPDATE, PLAIN = "step", "grouping alone", "update alone", "plain loop"
OF_PLAIN = 1.15  # what an update may take in terms of the plain loop
SETS, ROUNDS = 4, 21
_AHEAD, _PARTS_PER_THREAD = 8, 16


@njit(parallel=True, fastmath=True, error_model="numpy", nogil=True)
def _plain(w, m, v, g, at, different, occurrences, hp, n_parts):  # type: ignore[no-untyped-def]
    n, row_bytes = different.size, 4 * w.shape[1]
    one_minus_beta1, one_minus_beta2, step_size, epsilon = hp
    for part in prange(n_parts):
        for k in range(part * n // n_parts, (part + 1) * n // n_parts):
            if k + _AHEAD < n:
                for address in at[:3]:
                    prefetch(address + different[k + _AHEAD] * row_bytes, row_bytes)
                prefetch(at[3] + occurrences[k + _AHEAD] * row_bytes, row_bytes)
            w_row, m_row, v_row = w[different[k]], m[different[k]], v[different[k]]
            g_row = g[occurrences[k]]
            for d in range(g_row.size):
                x = g_row[d]
                m_row[d] += one_minus_beta1 * (x - m_row[d])
                v_row[d] += one_minus_beta2 * (x * x - v_row[d])
                w_row[d] -= step_size * m_row[d] / (np.sqrt(v_row[d]) + epsilon)


def lazy_adam() -> tuple[Any, Any]:
    """The kernel of Adam in float32, and the scalars of its first update."""
    *powers, lr, beta1, beta2, epsilon = SCALARS.values()
    constants = beta1, beta2, epsilon
    numbers = adam.adam_scalars(
        np.float32, lr, 0.0, 1, constants, tuple(np.array(powers, np.float32).tolist())
    )
    return kernel(adam.ADAM, (), F32, F32, (F32, F32)), numbers


def jobs_of(
    variables: list[np.ndarray], g: np.ndarray, drawn: np.ndarray, n_parts: int
) -> tuple[dict[str, Callable[[], object]], RowStep]:
    """Jobs on one set of indices on a table, and what to release in the end.

    Args:
        variables: parameter and moments, ``[N, D]``.
        g: ``[B, D]``.
        drawn: int64 ``[B]``.
        n_parts: of the plain loop.
    """
    operator: Any = ops.FusedSparseLazyAdam()
    N, D = variables[0].shape
    compiled, numbers = lazy_adam()
    hp = np.array([numbers], np.float32)
    at = np.array([address_of(a) for a in (*variables, g)])
    source = RowSource(
        values=int(at[3]), indices=address_of(drawn), index_bytes=drawn.itemsize, length=drawn.size
    )
    tables = RowTables.of(at[None, :3].copy(), table_sizes([(N, D)]))
    scalars = hp, np.zeros(1, np.int64)
    step = partial(RowStep, compiled, tables, [source], *scalars, touched_only=True)
    grouped = step()
    words = array("q", [word for loop in grouped.loops for word in loop.words])
    different, occurrences = np.unique(drawn, return_index=True)

    def group() -> None:
        step().release()

    def update(keep: Any = (hp, drawn)) -> None:
        del keep  # its memory is used as long as this can be called
        run_words(words)

    return {
        STEP: lambda: operator(*variables, *SCALARS.values(), g, drawn),
        GROUPING: group,
        UPDATE: update,
        PLAIN: lambda: _plain(*variables, g, at, different, occurrences, numbers, n_parts),
    }, grouped


def run(result: SpecialResult, threads: int, progress: Progress) -> None:
    """Measure all sizes.

    Raises:
        BenchError: the machine has not enough memory for the largest.
    """
    check_memory(result.name, FAR_SIZES)
    for size in tracked(FAR_SIZES, progress):
        (tensor,) = rows(size, "uniform")
        (N, D), B = tensor.shape, tensor.B
        assert B is not None
        variables = [allocation.full((N, D), 0.0, np.float32) for _ in range(3)]
        rng = np.random.default_rng(1)
        gradients = [rng.standard_normal((B, D), np.float32) for _ in range(SETS)]
        sets = [
            jobs_of(variables, g, indices.draw("uniform", N, B, seed), _PARTS_PER_THREAD * threads)
            for seed, g in enumerate(gradients)
        ]
        turns = itertools.count()
        jobs = {x: in_turn([Job(of_set[x]) for of_set, _ in sets], turns) for x in PARTS}
        times = in_rounds(jobs, ROUNDS)
        for _, grouped in sets:
            grouped.release()
        result.times.update({f"{size}: {label}": times[label] for label in PARTS})
        result.limits[f"{size}: {UPDATE}"] = OF_PLAIN * times[PLAIN].median
