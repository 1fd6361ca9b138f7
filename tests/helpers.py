"""What several test files share: operators as tables, unchanged buffers, distances in ulps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fusestep import nn, ops

BF16 = np.dtype(ml_dtypes.bfloat16)
STORAGE_DTYPES = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BF16)
# ulps are of the storage type; ml_dtypes has its own finfo.
EPSILON = {dtype: float(ml_dtypes.finfo(dtype).eps) for dtype in STORAGE_DTYPES}
TINY = {dtype: float(ml_dtypes.finfo(dtype).smallest_subnormal) for dtype in STORAGE_DTYPES}

SCALARS: dict[str, Any] = {
    "beta1_power": 0.9,
    "beta2_power": 0.999,
    "lr": 0.01,
    "beta1": 0.9,
    "beta2": 0.999,
    "epsilon": 1e-8,
}


@dataclass(frozen=True)
class Operator:
    """How an operator is made and called: everything that one valid call needs.

    Attributes:
        make: the class.
        variables: names of the arrays that it updates.
        scalars: names and values of the scalars of a call.
        gradient: what its gradient is called.
        takes_rows: whether the gradient is row-sparse.
        order: published order of a call's arguments, where it is not variables, scalars,
            gradient, indices.
        attributes: arguments of the constructor that have no default.
        returns: which variables are returned; by default all.
        ranges: how a variable is made out of random numbers in (0.1, 1), by default as they are.
    """

    make: Any
    variables: tuple[str, ...]
    scalars: Mapping[str, Any]
    gradient: str = "gradient"
    takes_rows: bool = False
    order: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    returns: tuple[str, ...] | None = None
    ranges: Mapping[str, Callable[[np.ndarray], Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.make.__name__

    @property
    def returned(self) -> tuple[str, ...]:
        return self.variables if self.returns is None else self.returns

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of a call's arguments in the published order."""
        indices = ("indices",) if self.takes_rows else ()
        usual = (*self.variables, *self.scalars, self.gradient, *indices)
        return tuple(self.order.split()) or usual

    def inputs(self, shape: tuple[int, ...] = (5, 3), dtype: Any = np.float32) -> dict[str, Any]:
        """Fresh arguments of one valid call, by name and in order."""
        rng = np.random.default_rng(7)
        given: dict[str, Any] = {**self.scalars}
        for name in self.variables:
            values = rng.uniform(0.1, 1.0, shape)
            given[name] = np.asarray(self.ranges.get(name, np.asarray)(values)).astype(dtype)
        if self.takes_rows:
            given[self.gradient] = rng.standard_normal((4, *shape[1:])).astype(dtype)
            given["indices"] = np.array([1, 0, 1, 3])
        else:
            given[self.gradient] = np.asarray(rng.standard_normal(shape)).astype(dtype)
        return {name: given[name] for name in self.arguments}

    def new(self, **constructor: Any) -> Any:
        """An instance; what is not given has the value of `attributes` or its default."""
        return self.make(**{**self.attributes, **constructor})

    def call(self, inputs: dict[str, Any], **constructor: Any) -> Any:
        return self.new(**constructor)(*inputs.values())


_MOMENTS = ("var", "m", "v")
_FTRL = ("var", "accum", "linear")
_FTRL_SCALARS = {"lr": 0.1, "l1": 0.05, "l2": 0.1, "lr_power": -0.5}
_PROXIMAL_SCALARS = {"lr": 0.1, "l1": 0.05, "l2": 0.1}
_RMSPROP_SCALARS = {"learning_rate": 0.1, "decay": 0.9, "momentum": 0.8, "epsilon": 1e-3}
OPERATORS = {
    operator.name: operator
    for operator in (
        Operator(ops.FusedSparseAdam, _MOMENTS, SCALARS, takes_rows=True),
        Operator(ops.FusedSparseLazyAdam, _MOMENTS, SCALARS, takes_rows=True),
        Operator(ops.Adam, _MOMENTS, SCALARS),
        Operator(ops.AdamNoUpdateParam, ("m", "v"), SCALARS, returns=()),
        Operator(
            ops.AdamWeightDecay,
            _MOMENTS,
            {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "decay": 0.1},
        ),
        Operator(ops.ApplyAdamWithAmsgradV2, (*_MOMENTS, "vhat"), SCALARS, "grad"),
        Operator(
            ops.ApplyAdamWithAmsgrad,
            (*_MOMENTS, "vhat"),
            {name: SCALARS[name] for name in ("beta1_power", "beta2_power", "lr")},
            "grad",
        ),
        Operator(
            ops.ApplyMomentum,
            ("variable", "accumulation"),
            {"learning_rate": 0.1, "momentum": 0.9},
            order="variable accumulation learning_rate gradient momentum",
        ),
        Operator(
            ops.SGD,
            ("parameters", "accum", "stat"),
            {"learning_rate": 0.1, "momentum": 0.9},
            order="parameters gradient learning_rate accum momentum stat",
            returns=("parameters",),
            ranges={"stat": np.round},  # some elements take their first step
        ),
        Operator(
            ops.ApplyRMSProp,
            ("var", "mean_square", "moment"),
            _RMSPROP_SCALARS,
            "grad",
            order="var mean_square moment learning_rate grad decay momentum epsilon",
        ),
        Operator(
            ops.ApplyCenteredRMSProp,
            ("var", "mean_gradient", "mean_square", "moment"),
            _RMSPROP_SCALARS,
            "grad",
            order="var mean_gradient mean_square moment grad learning_rate decay momentum epsilon",
            ranges={"mean_gradient": lambda x: x / 10},  # a positive variance everywhere
        ),
        Operator(ops.ApplyAdagrad, ("var", "accum"), {"lr": 0.1}, "grad"),
        Operator(ops.ApplyProximalAdagrad, ("var", "accum"), _PROXIMAL_SCALARS, "grad"),
        Operator(
            ops.ApplyFtrl,
            _FTRL,
            _FTRL_SCALARS,
            "grad",
            order="var accum linear grad lr l1 l2 lr_power",
        ),
        *(
            Operator(cls, _FTRL, {}, "grad", takes_rows=True, attributes=_FTRL_SCALARS)
            for cls in (ops.FusedSparseFtrl, ops.SparseApplyFtrl)
        ),
        *(
            Operator(cls, ("var", "accum"), _PROXIMAL_SCALARS, "grad", takes_rows=True)
            for cls in (ops.FusedSparseProximalAdagrad, ops.SparseApplyProximalAdagrad)
        ),
    )
}
# It updates nothing: `weight` is only read, so it is in no table of operators that write.
LARS_UPDATE = Operator(
    ops.LARSUpdate,
    ("weight",),
    {"norm_weight": 4.0, "norm_gradient": 9.0, "weight_decay": 0.2, "learning_rate": 1e-3},
    order="weight gradient norm_weight norm_gradient weight_decay learning_rate",
    returns=(),
)
ROW_OPERATORS = {name: op for name, op in OPERATORS.items() if op.takes_rows}
DENSE_OPERATORS = {name: op for name, op in OPERATORS.items() if not op.takes_rows}


def arrays_of(values: Any) -> list[np.ndarray]:
    """Every array in nested dicts, lists, RowTensors, Parameters and optimizers."""
    if isinstance(values, np.ndarray):
        return [values]
    if isinstance(values, nn.Parameter):
        return [values.data]
    if isinstance(values, ops.RowTensor):
        return [values.indices, values.values]
    if isinstance(values, nn.Optimizer):
        return [p.data for p in values.parameters] + list(values._state_arrays().values())
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return [array for value in values for array in arrays_of(value)]
    return []


@contextmanager
def unchanged(*values: Any) -> Iterator[None]:
    """Every byte of every array in `values` is the same afterwards."""
    __tracebackhide__ = True
    arrays = arrays_of(values)
    before = [array.tobytes() for array in arrays]
    yield
    changed = [
        k for k, (a, old) in enumerate(zip(arrays, before, strict=True)) if a.tobytes() != old
    ]
    assert not changed, f"arrays {changed} of {len(arrays)} changed"


@contextmanager
def refused(error: type[BaseException], match: str, *values: Any) -> Iterator[None]:
    """The block raises `error` with a text that matches, and no array in `values` changes."""
    __tracebackhide__ = True
    with unchanged(*values), pytest.raises(error, match=match):
        yield


def assert_same_bits(actual: Any, expected: Any, label: str = "") -> None:
    """Equal dtypes, shapes and bytes: a NaN equals itself, 0.0 and -0.0 differ."""
    __tracebackhide__ = True
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, label
    assert actual.shape == expected.shape, label
    if actual.tobytes() != expected.tobytes():
        np.testing.assert_array_equal(actual, expected, err_msg=label)
        raise AssertionError(f"{label}: equal values, different bits")


def assert_within_ulps(
    actual: np.ndarray, expected: Any, scale: Any, ulps: float = 4.0, label: str = ""
) -> None:
    """`|actual - expected|` is at most `ulps` units in the last place of `scale`.

    Units are those of the dtype of `actual`. `scale` is the largest term that the expected
    value is a sum of: what cancels leaves the rounding of the terms behind, not that of the
    difference. Below the normal range the unit is the smallest subnormal.
    """
    __tracebackhide__ = True
    largest = np.maximum(np.abs(np.asarray(scale, np.float64)), TINY[actual.dtype])
    unit = EPSILON[actual.dtype] * np.exp2(np.floor(np.log2(largest)))
    allowed = ulps * np.maximum(unit, TINY[actual.dtype])
    error = np.abs(actual.astype(np.float64) - np.asarray(expected, np.float64))
    off = ~(error <= allowed)
    if off.any():
        where = np.unravel_index(np.argmax(np.where(off, error / allowed, 0)), error.shape)
        raise AssertionError(
            f"{label}: {off.sum()} of {off.size} off, worst at {tuple(map(int, where))}: "
            f"{actual[where]!r} for {np.asarray(expected)[where]!r}, "
            f"{error[where] / np.broadcast_to(allowed, error.shape)[where] * ulps:.3g} ulps"
        )


FAR = 1e-3
"""What moves a result by more than this acts: the tolerance of a comparison is 3e-6."""


def distance(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    """The largest difference, relative to the largest value of its array in `b` if it is not 0."""
    wide = [(x.astype(np.float64), y.astype(np.float64)) for x, y in zip(a, b, strict=True)]
    return max(float(np.max(np.abs(x - y)) / (np.max(np.abs(y)) or 1.0)) for x, y in wide)
