"""Whole gradients on device arrays, outside of a step."""

from __future__ import annotations

from typing import Any

import numpy as np

import fusestep
from fusestep import nn

from devices import (
    BF16,
    COMPUTES,
    F16,
    F32,
    F64,
    MARKS,
    assert_close,
    assert_same,
    gradient,
    on_device,
    on_host,
    positive,
    refused,
    rows,
    sized,
    told,
    unchanged,
)

pytestmark = MARKS

# Row-sparse gradients


def assert_alike(found: Any, expected: np.ndarray) -> None:
    """An array of the framework, and the same bits."""
    assert expected.dtype == BF16 or type(found) is type(on_device(expected))
    assert_same(found, expected)


def compare_sums(host: nn.RowTensor) -> None:
    """Device and host add up alike, to the last bit, and leave the gradient as it is."""
    theirs = on_device(host)
    with unchanged(theirs.indices, theirs.values):
        dense, distinct = theirs.to_dense(), theirs.coalesce()
    fusestep.synchronize()
    assert_alike(dense, host.to_dense())
    expected = host.coalesce()
    assert distinct.dense_shape == expected.dense_shape
    if COMPUTES:  # how many there are
        assert_alike(distinct.indices.native(), expected.indices)
        assert_alike(distinct.values.native(), expected.values)


def test_row_sums() -> None:
    """Every storage type and size of indices; tails, no rows, no columns, empty tensors."""
    for dtype in (F32, F64, F16, BF16):
        compare_sums(rows([4, 1, 4, 0, 1, 4], (6, 9), dtype))
    for shape in ((6,), (6, 1), (6, 4), (6, 2, 3), (6, 40), (6, 0)):
        compare_sums(rows([5, 1, 5], shape))
        compare_sums(rows([], shape))
    compare_sums(rows([], (0, 3)))
    host = rows([3, 3, 0], (4, 5))
    compare_sums(nn.RowTensor(host.indices.astype(np.int32), host.values, (4, 5)))
    # A sum of zeros is 0, not -0; and what is not finite stays so.
    host = rows([1, 2, 2, 3], (4, 2))
    host.values[...] = [[-0.0, 1.0], [-0.0, np.inf], [-0.0, 1.0], [np.inf, -np.inf]]
    compare_sums(host)
    # Not aligned to 16 bytes.
    room, index = gradient((4, 9)), np.array([1, 0, 1])
    theirs = nn.RowTensor(on_device(index), on_device(room)[1:], (3, 9))
    assert_same(theirs.to_dense(), nn.RowTensor(index, room[1:], (3, 9)).to_dense())


def test_bad_rows() -> None:
    """They are an error at once, also where there are no rows or no columns."""
    for bad, shape in (([1, 7, -1], (4, 3)), ([2, 1, -3], (4, 3)), ([5], (0, 3)), ([5], (4, 0))):
        tensor = on_device(rows(bad, shape))
        place = next(k for k, index in enumerate(bad) if not 0 <= index < shape[0])
        text = f"RowTensor: indices[{place}] is out of range: expected 0 <= index < {shape[0]}, got"
        for call in (tensor.coalesce, tensor.to_dense):
            with refused(IndexError, f"{text} {bad[place]}", tensor.indices, tensor.values):
                call()
    # The attributes can be assigned to.
    tensor = on_device(rows([1, 1], (4, 3)))
    tensor.values = on_device(gradient((3, 3)))
    for call in (tensor.coalesce, tensor.to_dense):
        with refused(ValueError, "has a wrong length"):
            call()
    tensor.values = gradient((2, 3))
    for call in (tensor.coalesce, tensor.to_dense):
        with refused(RuntimeError, "lives on a CUDA device"):
            call()


def test_bad_lists_of_rows() -> None:
    """A bad index is told by its place in the whole list; parts that differ are refused."""
    (theirs,) = w = on_device([positive((5, 3), BF16)])
    opt = nn.LazyAdam(w, 0.1)
    bad = on_device([rows([1], (5, 3), BF16), rows([2, 5], (5, 3), BF16)])
    with unchanged(theirs):
        opt((bad,))
        with told(IndexError, "LazyAdam: gradient of 'parameter_0': indices[2] is out of range"):
            fusestep.synchronize()
        with refused(ValueError, "has parts that differ"):
            opt((on_device([rows([1], (5, 3), BF16), rows([1], (5, 3))]),))
        assigned = bad[0]
        assigned.values = on_device(gradient((2, 3), BF16))
        with refused(ValueError, "has a wrong length"):
            opt((bad,))
    assert opt.global_step == 0


# The steps of custom optimizers

SHAPES = (
    (5, 4), (7,), (3, 2, 3), sized((2, 40), (2, 100_003)), (4, 1), (0, 3), (3, 0), (),
)  # fmt: skip


def helpers(dtype: Any, of_gradient: Any) -> None:
    """Each published step of a custom optimizer, on gradients of every form."""
    arrays = [positive(shape, dtype) for shape in SHAPES]
    gradients = [gradient(shape, of_gradient) for shape in SHAPES]
    gradients[1] = None
    parts = [rows([1], SHAPES[3], of_gradient), rows([0, 1], SHAPES[3], of_gradient)]
    gradients[0], gradients[3] = rows([3, 1, 3], (5, 4), of_gradient), parts
    made = []
    for device in (False, True):
        params = on_device(arrays) if device else arrays
        groups = [{"params": params, "weight_decay": 0.3, "grad_centralization": True}]
        opt = nn.Optimizer(0.1, groups, loss_scale=4.0)
        given = tuple(on_device(gradients) if device else gradients)
        made.append([
            step(given)
            for step in (opt.decay_weight, opt.gradients_centralization, opt.scale_grad)
        ])  # fmt: skip
    for expected, found in zip(*made, strict=True):
        for i, (a, b) in enumerate(zip(expected, found, strict=True)):
            if isinstance(a, nn.RowTensor):
                if not COMPUTES:  # how many there are
                    continue
                assert_same(b.indices, a.indices)
                assert_close(on_host(b.values), a.values, f"{dtype} {i}")
            elif a is None:
                assert b is None
            else:
                assert of_gradient == BF16 or isinstance(b, type(params[0]))
                assert_close(on_host(b), a, f"{dtype} {i}")


def test_steps_of_custom_optimizers() -> None:
    """`decay_weight`, `gradients_centralization` and `scale_grad` are as on the host."""
    for dtype, of_gradient in ((F32, F32), (F64, F32), (F32, F64), (F16, F16), (BF16, BF16)):
        helpers(dtype, of_gradient)
    w, host = on_device(positive((5, 4))), gradient((5, 4))
    opt = nn.Optimizer(0.1, [w], weight_decay=0.1)
    for bad in (host, rows([1], (5, 4))):
        with refused(ValueError, "lives elsewhere than", w):
            opt.decay_weight((bad,))
    with refused(ValueError, "has a wrong shape", w):
        opt.decay_weight((on_device(gradient((4, 5))),))
    with told(IndexError, "got 5", w):
        opt.decay_weight((on_device(rows([5], (5, 4))),))
