"""What calls leave behind in a process: failing ones, and those with numbers that are only equal.

A good call has the bits that it has where nothing is kept: what is kept from call to call is looked
up by such numbers.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import fusestep
from fusestep import nn, ops
from fusestep.nn import mxnet
from helpers import arrays_of, assert_same_arrays
from own_functions import AVERAGED, PLAIN, Own, raising
from sequence_program import droppers

ONLY_READ = replace(AVERAGED, states=(nn.State("m", is_read=True),))

N, SHAPE = 1200, (6, 2)
F32, F64 = np.float32, np.float64


def _array(shape: Any, dtype: Any = F32) -> Any:
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


def _rows(length: Any = 2 * N, *, index: int = 0, values: Any = None) -> Any:
    """Row 0 has so many occurrences that it is summed in ranges of the batch."""
    ids = np.zeros(N, np.int64)
    ids[3] = index
    given, positions = _array((N, 2)) if values is None else values, np.arange(2 * N)[::2].copy()
    return nn.RowTensor(ids, given, SHAPE, positions=positions, batch_length=length)


def _stepped(make: Callable[[Any], Any], gradients: Any, dtype: Any = F32) -> Any:
    params = [nn.Parameter(_array(SHAPE, dtype), "a"), nn.Parameter(_array(5, dtype), "b")]
    opt = make(params)
    for _ in range(2):
        opt(gradients)
    return [p.data for p in params], opt.state_dict()


DENSE = _array(SHAPE), _array(5)


def _own(params: Any, found: Any = (0.5,)) -> Any:
    opt = Own(0.5, params, rule=AVERAGED, sparse_update="lazy")
    opt.function = lambda *_: found
    return opt


def _adam_update(**scalars: Any) -> Any:
    """Zeros, whose signs tell those of the scalars."""
    w, mean, var = (np.full(4, -0.0, F32) for _ in range(3))
    given = {"lr": 0.0, "rescale_grad": 0.0, "wd": 0.0, "epsilon": 0.5, "beta1": 0.0, **scalars}
    return ops.adam_update(w, np.array([1, -1, 0, -0.0], F32), mean, var, out=w, **given), mean, var


class RatedAdam(mxnet.Adam):
    rate: Any = 0.5

    def _get_lr(self, index: Any) -> Any:  # noqa: ARG002
        return self.rate

    def _get_wd(self, index: Any) -> Any:  # noqa: ARG002
        return 0.25 * self.rate


def _mxnet(rate: Any = 0.5, grad: Any = None) -> Any:
    opt = RatedAdam(use_fused_step=False)
    opt.rate = rate
    w, g = _array(3, F64), _array(3, F64) if grad is None else grad
    updater = mxnet.get_updater(opt)
    for _ in range(3):
        updater(0, g, w)
    return w, updater.states[0]


def _ftrl(scalar: Any = 0.5) -> Any:
    w, accum, linear = (np.ones(3, F32) for _ in range(3))
    return ops.ApplyFtrl()(w, accum, linear, _array(3), scalar, 0.0, 0.0, -0.5)


GOOD: dict[str, Callable[[], Any]] = {
    "rows": lambda: _stepped(nn.LazyAdam, (_rows(), _array(5))),
    "norm": lambda: ops.clip_by_global_norm([_rows(), *DENSE], 0.5),
    "dense": lambda: _stepped(nn.Adam, DENSE),
    "float64": lambda: _stepped(lambda p: nn.Adam(p, beta1=0.5, beta2=0.75), DENSE, F64),
    "factored": lambda: _stepped(nn.AdaFactor, DENSE),
    "lars": lambda: _stepped(lambda p: nn.LARS(nn.Momentum(p, 0.1, 0.9)), DENSE),
    "own": lambda: _stepped(_own, DENSE), "own-rows": lambda: _stepped(_own, (_rows(), _array(5))),
    "adam_update": _adam_update, "mxnet": _mxnet, "operator": _ftrl,
}  # fmt: skip


def _assigned(length: Any) -> Any:
    rows = _rows()
    rows.batch_length = length
    return _stepped(nn.LazyAdam, (rows, _array(5)))


def _norm(length: Any) -> Any:
    return ops.global_norm([_rows(length)])


def _after_other_betas(beta: Any) -> Any:
    def make(params: Any) -> Any:
        opt = nn.Adam(params, beta1=0.25, beta2=0.75)
        opt.beta1 = beta
        return opt

    return _stepped(make, DENSE, F64)


FAILING: list[tuple[str, Callable[[], Any]]] = [
    *(
        (name, partial(make, n))
        for n in (2.0 * N, 2 * N + 0.5, F32(2 * N), True, "6", None, -1, 2**63, 2**200)
        for name, make in (("rows", _assigned), ("norm", _norm))),
    ("rows", lambda: _stepped(nn.LazyAdam, (_rows(index=6), _array(5)))),
    ("rows", lambda: _stepped(nn.LazyAdam, (_rows(), _array(6)))),
    ("rows", lambda: _stepped(nn.LazyAdam, (_rows(values=_array((N, 2), F64)), _array(5, int)))),
    ("norm", lambda: ops.clip_by_global_norm([_rows(index=-1), *DENSE], 0.5)),
    ("dense", lambda: _stepped(nn.Adam, (DENSE[0], None, None))),
    ("dense", lambda: _stepped(nn.Adam, (DENSE[0], np.zeros(5, int)))),
    ("factored", lambda: _stepped(nn.AdaFactor, (DENSE[0], _array(4)))),
    ("lars", lambda: _stepped(lambda p: nn.LARS(nn.Momentum(p, 0.1, 0.9)), (_rows(), DENSE[1]))),
    *(
        (name, partial(_stepped, partial(_own, found=found), gradients))
        for name, gradients in (("own", DENSE), ("own-rows", (_rows(), _array(5))))
        for found in ((), (0.5, 0.5), (None,), (math.nan,), ("0.5",), 0.5, (1j,))),
    ("own", lambda: Own(0.5, [_array(3)], rule=replace(PLAIN, update=raising))),
    ("own", lambda: Own(0.5, [_array(3)], rule=ONLY_READ)),
    *(("adam_update", partial(_adam_update, wd=x)) for x in (True, None, "0", math.nan, -1.0)),
    *(("mxnet", partial(_mxnet, x)) for x in (True, None, math.nan, -0.5)),
    ("mxnet", lambda: _mxnet(grad=_array(4, F64))),
    ("operator", lambda: _ftrl(True)),
    ("operator", lambda: _ftrl(None)),
    ("dense", lambda: fusestep.set_num_threads(1.0)),
]  # fmt: skip
EQUAL: list[tuple[str, Callable[[], Any]]] = [
    ("rows", lambda: _stepped(nn.LazyAdam, (_rows(np.int16(2 * N)), _array(5)))),
    ("adam_update", lambda: _adam_update(rescale_grad=-0.0)),
    ("adam_update", lambda: _adam_update(lr=-0.0, wd=-0.0, beta1=F32(-0.0))),
    *(("mxnet", partial(_mxnet, x)) for x in (F32(0.5), np.float16(0.5), np.array(0.5, F32))),
    *(("float64", partial(_after_other_betas, x)) for x in (F32(0.5), np.float16(0.5))),
    ("operator", lambda: _ftrl(F32(0.5))),
]


ERRORS = (TypeError, ValueError, IndexError, ZeroDivisionError)
DROPS = [*droppers().values()]


@pytest.mark.parametrize(
    ("name", "call", "fails"),
    [*((*one, True) for one in FAILING), *((*one, False) for one in EQUAL)],
)
def test_nothing_is_left_behind(name: str, call: Callable[[], Any], fails: bool) -> None:
    """Neither before good calls, of which something is kept, nor after them. Equal numbers of
    another type or sign are not taken for each other."""
    expected = []
    for calls in ((), (call,), (call, call)):
        for drop in DROPS if len(calls) < 2 else ():
            drop()
        for each in calls:
            with pytest.raises(ERRORS) if fails else nullcontext():
                each()
        expected.append(arrays_of(GOOD[name]()))
        assert_same_arrays(expected[-1], expected[0])
