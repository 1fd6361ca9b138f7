"""MXNet's operator and optimizers on device arrays: ``python device_mxnet.py <check>``.

A process of its own, under Numba's simulator, where device arrays lie on the host.
"""

from __future__ import annotations

import os
import sys

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import cuda

import fusestep
from fusestep import ops

from device_arrays import (
    BF16,
    F16,
    F32,
    F64,
    assert_close,
    gradient,
    on_device,
    on_host,
    positive,
    refused,
    rows,
    unchanged,
)

SHAPE = (5, 3)
SCALARS: dict[str, Any] = {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "2.0": {"wd": 0.3, "rescale_grad": 0.7, "clip_gradient": 0.4},
    "1.9": {"wd": 0.3, "rescale_grad": 0.7, "clip_gradient": 0.4, "compat": "1.9"},
    "standard": {"wd": 0.3, "lazy_update": False},
    "locked": {"wd": 0.3, "use_locking": True},
}


def compare_update(grad: Any, dtype: Any, place: str, **options: Any) -> None:
    """Two steps on device and host: the same in every array; the result is returned."""
    shape = grad.shape
    variables = [positive(shape, dtype) for _ in range(3)]
    theirs = on_device(variables)
    made = []
    for arrays, g in ((variables, grad), (theirs, on_device(grad))):
        w, mean, var = arrays
        other = np.full(shape, 7, dtype)
        places = {
            "weight": w,
            "None": None,
            "other": other if w is variables[0] else on_device(other),
        }
        out = places[place]
        for _ in range(2):
            found = ops.adam_update(w, g, mean, var, out, **SCALARS, **options)
            assert out is None or found is out
        made.append(found)
    for ours, expected in zip([*theirs, made[1]], [*variables, made[0]], strict=True):
        assert_close(on_host(ours), expected, f"{dtype} {place} {options}")
    assert type(made[1]) is type(theirs[0]) or dtype == BF16
    fusestep.synchronize()


def updates() -> None:
    """Every option, dense and row-sparse, wherever the result goes."""
    sparse = rows([1, 4, 1, 0], SHAPE)
    for place, names in (("weight", OPTIONS), ("None", ["1.9"]), ("other", ["standard", "locked"])):
        for name in names:
            for grad in (gradient(SHAPE), sparse):
                compare_update(grad, F32, place, **OPTIONS[name])
    for dtype, of_gradient in ((F64, F32), (F16, F16), (BF16, BF16)):
        for grad in (gradient(SHAPE, of_gradient), rows([2, 2], SHAPE, of_gradient)):
            compare_update(grad, dtype, "other", wd=0.3)
        compare_update(gradient(SHAPE, of_gradient), dtype, "None")
    for place in ("weight", "None", "other"):
        for grad in (gradient(()), gradient((0, 3)), rows([], SHAPE), rows([3], (4,))):
            compare_update(grad, F32, place)


def update_reads_only_the_weight() -> None:
    """The weight changes only where it is ``out``; the gradient never does."""
    w, mean, var, out, g = on_device([positive(SHAPE) for _ in range(4)] + [gradient(SHAPE)])
    with unchanged(w, g):
        ops.adam_update(w, g, mean, var, out, **SCALARS)
        new = ops.adam_update(w, g, mean, var, **SCALARS)
    assert not (on_host(out) == on_host(w)).any()
    assert not (on_host(new) == on_host(w)).any()
    # Another view of the weight is the weight.
    view = type(w)(w._ary)
    assert ops.adam_update(w, g, mean, var, view, **SCALARS) is view
    before = on_host(w)
    w._ary.flags.writeable = False
    ops.adam_update(w, g, mean, var, out, **SCALARS)
    np.testing.assert_array_equal(on_host(w), before)


def update_errors() -> None:
    """A bad index writes nothing, not even to ``out``; what is wrong at once is refused."""
    w, mean, var, out = theirs = on_device([positive(SHAPE) for _ in range(4)])
    bad = on_device(rows([1, 5], SHAPE))
    for lazy in (True, False):
        for place in (w, out):
            with unchanged(*theirs):
                ops.adam_update(w, bad, mean, var, place, lazy_update=lazy, **SCALARS)
                with refused(IndexError, "adam_update: indices[1] is out of range: expected 0 <="):
                    fusestep.synchronize()
        with unchanged(*theirs):
            new = ops.adam_update(w, bad, mean, var, lazy_update=lazy, **SCALARS)
            with refused(IndexError, "got 5"):
                fusestep.synchronize()
        np.testing.assert_array_equal(on_host(new), on_host(w))
    g, host = on_device(gradient(SHAPE)), positive(SHAPE)
    for arrays in (
        (w, gradient(SHAPE), mean, var),
        (w, rows([1], SHAPE), mean, var),
        (w, g, host, var),
        (w, g, mean, var, host),
        (host, gradient(SHAPE), mean, var),
        (host, g, host + 1, host + 2, host),
        (host, on_device(rows([1], SHAPE)), host + 1, host + 2, host),
    ):
        with refused(ValueError, "lives elsewhere than", *theirs):
            ops.adam_update(*arrays, **SCALARS)
    room = on_device(positive((9, 3)))
    for arrays in (
        (w, g, mean, var, mean),
        (w, w, mean, var, w),
        (room[:5], g, mean, var, room[1:6]),
        (w, room[:5], room[4:], var),
        (w, room[4:], mean, var, room[:5]),
    ):
        with refused(ValueError, "shares memory with", *theirs, room):
            ops.adam_update(*arrays, **SCALARS)
    with refused(ValueError, "shares memory with", *theirs):
        shared = on_device(rows([1], SHAPE))
        shared.values = out[:1]
        ops.adam_update(w, shared, mean, var, out, **SCALARS)
    # Only the lower half is read, so the upper one may be written.
    ops.adam_update(room[:4], room[4:8], *on_device([positive((4, 3))] * 2), **SCALARS)
    with refused(ValueError, "has a wrong shape", *theirs):
        ops.adam_update(w, on_device(gradient((3, 5))), mean, var, out, **SCALARS)
    with refused(TypeError, "higher dtype", *theirs):
        ops.adam_update(w, on_device(gradient(SHAPE, F64)), mean, var, out, **SCALARS)
    with refused(ValueError, "is not contiguous", *theirs):
        ops.adam_update(on_device(positive((5, 6)))[:, ::2], g, mean, var, out, **SCALARS)
    huge = on_device([np.zeros((2**61, 0), F16) for _ in range(4)])
    with refused(ValueError, "too long sort keys"):
        ops.adam_update(huge[0], on_device(rows([1, 2], (2**61, 0), F16)), *huge[1:], **SCALARS)
    with refused(RuntimeError, "lives on a CUDA device", *theirs):
        ops.adam_update(w, g, mean, var, out, lr=cuda.to_device(np.array(0.1)))


CHECKS: dict[str, Sequence[Callable[[], Any]]] = {
    "adam_update": (
        updates,
        update_reads_only_the_weight,
        update_errors,
    ),
}

if __name__ == "__main__":
    for check in CHECKS[sys.argv[1]]:
        check()
    print("right")
