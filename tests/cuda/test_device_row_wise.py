"""Rules that measure rows or tensors on device arrays, as on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from fusestep import nn
from fusestep.kernels.tables import HOT
from fusestep.nn.engine import offload

from device_rules import OF_ROWS, OF_TENSORS, Own
from devices import (
    BF16,
    COMPUTES,
    F16,
    F32,
    F64,
    MARKS,
    assert_equal_runs,
    assert_same,
    computed,
    gradient,
    on_device,
    on_host,
    positive,
    refused,
    rows,
    sized,
    told,
)

pytestmark = MARKS

Make = Callable[[Any], Any]
# Rows that lanes share or one has alone, that end within a tile, of several rounds; vectors.
SHAPES: tuple[tuple[int, ...], ...] = (
    (5, 4), (7,), (9, 1), (3, 64), (2, 257), (1, 3), (4, 2, 3), (0, 3),
    *sized((), ((1_003, 1), (70, 3), (400, 64), (9, 5_003), (40_001,))),
)  # fmt: skip
LAZY: tuple[Make, ...] = (
    lambda p: nn.RowWiseAdagrad(p, accum=0.1, learning_rate=0.1, weight_decay=0.1, loss_scale=2.0),
    lambda p: nn.RowWiseAdam(
        [{"params": p[:1], "lr": 0.3, "weight_decay": 0.2}, {"params": p[1:]}], 0.1
    ),
)
OPTIMIZERS: tuple[Make, ...] = (
    *LAZY,
    lambda p: nn.RowWiseAdagrad(
        p, learning_rate=0.1, weight_decay=0.1, decoupled_weight_decay=True,
        sparse_update="dense_equivalent",
    ),
    lambda p: nn.RowWiseAdam(p, 0.1, weight_decay=0.1, sparse_update="dense_equivalent"),
    *(partial(Own, of=of, sparse_update="lazy") for of in OF_ROWS),
    *(partial(Own, of=of, sparse_update="dense_equivalent") for of in OF_ROWS),
)  # fmt: skip


def compare(
    make: Make, variables: Sequence[np.ndarray], steps: Sequence[list[Any]], target: str = "GPU"
) -> None:
    """Device and host do the same."""
    on_cpu, on_gpu = make([w.copy() for w in variables]), make(on_device(variables))
    on_gpu.target = target
    for step in steps:
        taken = on_gpu(tuple(on_device(step)))
        if COMPUTES:
            assert on_cpu(tuple(step)) == taken
    if COMPUTES:
        assert_equal_runs(on_gpu, on_cpu)


def dense_steps(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any]) -> list[list[Any]]:
    steps = [[gradient(s, d) for s, d in zip(shapes, dtypes, strict=True)] for _ in range(2)]
    steps[1][0] = steps[1][3] = None
    return steps


def test_dense() -> None:
    """Every shape, in the types whose tiles are 2 and 4 elements."""
    for make in OPTIMIZERS[::2]:
        for dtype in (F32, F64):
            variables = [positive(s, dtype) for s in SHAPES]
            compare(make, variables, dense_steps(SHAPES, (dtype,) * len(SHAPES)))


def test_types() -> None:
    """Every storage type in one optimizer, gradients and states of others."""
    shapes, dtypes = ((4, 24), (5, 3), (3, 16), (6,)), (F16, BF16, F64, BF16)
    variables = [positive(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    gradients = ((4, 24), F16), ((5, 3), BF16), ((3, 16), F32), ((6,), BF16)
    sparse = [rows([1, 2, 1], s, d) for s, d in gradients[:3]]
    steps = [[gradient(s, d) for s, d in gradients], [*sparse, None]]
    for make in LAZY:
        compare(make, variables, steps)
    compare(lambda p: nn.RowWiseAdam(p, 0.1, state_dtype=np.float32), variables, steps)


def test_sparse() -> None:
    """Several tables of different widths: duplicates, no rows, dense gradients in between."""
    shapes = ((5, 4), (9, 1), (3, 64), (4, 257))
    steps = [
        [rows([1, 3, 1], shapes[0]), rows([8, 0], shapes[1]), rows([], shapes[2]), None],
        [rows([], shapes[0]), None, rows([2, 2], shapes[2]), rows([3, 0, 3, 3], shapes[3])],
        [gradient(shapes[0]), rows([5], shapes[1]), None, rows([1], shapes[3])],
    ]
    variables = [positive(s) for s in shapes]
    for make in OPTIMIZERS:
        compare(make, variables, steps)


def test_hot_rows() -> None:
    """A row with so many occurrences that they are summed range by range."""
    indices, variables = np.arange(HOT + 40) % 64 // 63 * 2, [positive((3, 5))]
    for make in (OPTIMIZERS[0], OPTIMIZERS[3]):
        compare(make, variables, [[rows([1] * (HOT + 30) + [0, 2], (3, 5))]])
        compare(make, variables, [[rows(indices.tolist(), (3, 5))]])


def test_shared_launches() -> None:
    """The bits of a row do not depend on what else is in its launch, nor on duplicates' places."""
    narrow, wide = positive((4, 6)), positive((2, 30))
    of_narrow, of_wide = rows([1, 3, 1], (4, 6)), rows([0, 1], (2, 30))
    found = []
    for others, step in (((), [of_narrow]), ((wide,), [of_narrow, of_wide])):
        opt = LAZY[0](on_device([narrow, *others]))
        opt(tuple(on_device(step)))
        found.append([opt.parameters[0].asnumpy(), on_host(opt.accum[0])])
    for one, other in zip(*found, strict=True):
        assert_same(one, other)


def test_tensors() -> None:
    """States of tensors that a factor gives, and many sums, signed ones among them."""
    shapes = ((5, 4), (37,), (), (3, 1), (0, 3))
    decayed = {"weight_decay": 0.1}
    for of in OF_TENSORS:
        for dtypes in ((F32,) * 5, (F64,) * 5, (BF16, F16, F64, F32, F32)):
            variables = [positive(s, d) for s, d in zip(shapes, dtypes, strict=True)]
            compare(partial(Own, of=of, **decayed), variables, dense_steps(shapes, dtypes))


def test_offloaded() -> None:
    """States on the host, parameters on the device: rows are not cut."""
    shapes = ((5, 4), (7,), (9, 1), (3, 20))
    steps = dense_steps(shapes, (F32,) * 4)
    steps.append([rows([1, 3, 1], (5, 4)), None, rows([0], (9, 1)), rows([], (3, 20))])
    before, offload.CHUNK = offload.CHUNK, 6
    try:
        for make in OPTIMIZERS:
            compare(make, [positive(s) for s in shapes], steps, "CPU")
        for of in OF_TENSORS:
            compare(partial(Own, of=of), [positive(s) for s in shapes], steps[:2], "CPU")
    finally:
        offload.CHUNK = before


def test_guards() -> None:
    """A step with a bad index or a NaN leaves states of rows as they are, too."""
    w = on_device([positive((5, 4)), positive((3, 6))])
    opt = LAZY[0](w)
    opt(tuple(on_device([rows([1], (5, 4)), gradient((3, 6))])))
    before = opt.state_dict()
    with told(IndexError, "got 5", *w):
        opt(tuple(on_device([rows([2, 5], (5, 4)), gradient((3, 6))])))
        opt.state_dict()
    opt.skip_nonfinite = True
    opt(tuple(on_device([rows([2], (5, 4)), np.full((3, 6), np.nan, F32)])))
    for name, array in opt.state_dict().items():
        assert_same(array, before[name], name)
    computed()
    assert opt.skipped_steps == 1
    opt = nn.RowWiseAdagrad(on_device([positive((7,))]))
    with refused(ValueError, "a vector is one row"):
        opt((on_device(rows([2], (7,))),))
