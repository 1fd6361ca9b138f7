"""Calls of operators and functions with random arguments, valid and not, for sequences."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import reference
import sequence_arrays as arrays
from fusestep import ops
from fusestep.bench.cases.operators import FUNCTIONS
from operators import LARS_UPDATE, OPERATORS, Operator
from sequence_arrays import DTYPES, F32, F64, Memory, pick
from test_ops_reference import CALLS, known_scalars

Check = Callable[[Sequence[np.ndarray]], None]


@dataclass
class Call:
    """One call.

    Attributes:
        text: what it is.
        run: makes it.
        arrays: what it may change, and what it must not.
        check: compares the arrays with a reference, from what they were before.
    """

    text: str
    run: Callable[[], Any]
    arrays: list[np.ndarray] = field(default_factory=list)
    check: Check | None = None


# Every operator, and every function that has no variables.
NAMES = (*OPERATORS, LARS_UPDATE.name, *FUNCTIONS, "adam_update")
# Made without options, if there is a reference of that.
_REFERENCES = {name: step for name, _, step in sorted(CALLS, key=lambda call: -len(call[1]))}
_FAULTS = ("read-only", "overlap", "shape", "not finite", "dtype")


def make(name: str, other: np.dtype, rng: np.random.Generator, memory: Memory) -> Call:
    """A call of an operator or function on float32 or another dtype: each is a kernel."""
    memory.forget()
    dtype = pick(rng, (F32, other))
    if name in FUNCTIONS:
        return _function(name, rng, memory)
    if name == "adam_update":
        return _adam_update(dtype, rng, memory)
    operator = {**OPERATORS, LARS_UPDATE.name: LARS_UPDATE}[name]
    if operator.takes_rows:
        return _row_call(operator, rng, memory)
    return _call(operator, dtype, rng, memory)


def _scalars(operator: Operator, rng: np.random.Generator) -> dict[str, float]:
    """Others in every call, so that those of another call show; the exponent has kernels."""
    return {
        name: value if name == "lr_power" else float(value * rng.uniform(0.5, 1.0))
        for name, value in operator.scalars.items()
    }


def _variables(
    operator: Operator, shape: tuple[int, ...], dtype: Any, rng: np.random.Generator, memory: Memory
) -> dict[str, np.ndarray]:
    found = {}
    for name in operator.variables:
        array = memory.positive(rng, shape, dtype)
        if name in operator.ranges:
            array[...] = operator.ranges[name](array.astype(np.float64))
        found[name] = array
    return found


def _constructor(operator: Operator, rng: np.random.Generator) -> dict[str, Any]:
    known = inspect.signature(operator.make).parameters
    return {"use_locking": True} if "use_locking" in known and rng.random() < 0.1 else {}


def _call(operator: Operator, dtype: np.dtype, rng: np.random.Generator, memory: Memory) -> Call:
    shape = arrays.shape(rng, arrays.size(rng))
    variables, scalars = _variables(operator, shape, dtype, rng, memory), _scalars(operator, rng)
    of_gradient = F32 if dtype == F64 and rng.random() < 0.2 else dtype
    gradient = memory.normal(rng, shape, of_gradient)
    kind = "strided" if rng.random() < 0.05 else ""
    if kind:
        gradient = np.repeat(gradient[..., None], 2, -1)[..., 0]
    elif rng.random() < 0.12:
        kind = pick(rng, _FAULTS)
        gradient = _spoil(kind, variables, scalars, gradient)
    text = f"{operator.name} {dtype} {shape} of {gradient.dtype} {kind}"
    given = {**variables, **scalars, operator.gradient: gradient}
    instance = operator.new(**_constructor(operator, rng))
    call = partial(instance, *(given[name] for name in operator.arguments))
    check = _check(operator, given) if dtype in (F32, F64) and not kind else None
    return Call(text, call, [*variables.values(), gradient], check)


def _spoil(
    fault: str, variables: dict[str, np.ndarray], scalars: dict[str, float], gradient: np.ndarray
) -> np.ndarray:
    """Arguments with which a call must fail (but that nothing can overlap nothing)."""
    first = next(iter(variables.values()))
    if fault == "read-only":
        first.flags.writeable = False
    elif fault == "overlap":
        return first
    elif fault == "shape":
        return gradient[None]
    elif fault == "not finite":
        scalars[next(iter(scalars))] = np.nan
    else:
        return gradient.astype(np.int32)
    return gradient


def _row_call(operator: Operator, rng: np.random.Generator, memory: Memory) -> Call:
    shape, n = arrays.table(rng)
    variables, scalars = _variables(operator, shape, F32, rng, memory), _scalars(operator, rng)
    rows = memory.rows(rng, shape, F32, n)
    made, kind = _constructor(operator, rng), ""
    if rng.random() < 0.25 and len(rows.indices):
        bad = pick(rng, (-1, shape[0]))
        rows.indices[int(rng.integers(len(rows.indices)))] = bad
        drops = rng.random() < 0.5
        made |= {"out_of_range": "drop"} if drops else {}
        kind = "dropped" if drops else "bad index"
    text = f"{operator.name} {shape} {len(rows.indices)} {rows.indices.dtype} {kind}"
    given = {**variables, **scalars, operator.gradient: rows.values, "indices": rows.indices}
    if operator.attributes:
        made |= {
            name: value if name == "lr_power" else float(value * rng.uniform(0.5, 1.0))
            for name, value in operator.attributes.items()
        }
    call = partial(operator.new(**made), *(given[name] for name in operator.arguments))
    check = None if kind else _check(operator, given, made)
    return Call(text, call, [*variables.values(), rows.values, rows.indices], check)


def assert_near(found: np.ndarray, exact: Any, tolerance: float, label: str) -> None:
    """Within ``tolerance`` of the largest element, or of 1: what cancels is not looked at."""
    largest = float(np.max(np.abs(exact), initial=1.0))
    wide = found.astype(np.float64)
    np.testing.assert_allclose(wide, exact, tolerance, tolerance * largest, err_msg=label)


def _check(operator: Operator, given: dict[str, Any], made: Any = None) -> Check | None:
    """Against the float64 reference; sums of thousands of rows are left to other tests."""
    if operator.name == LARS_UPDATE.name or len(given.get("indices", ())) > 1_000:
        return None
    real = np.float64 if given[operator.variables[0]].dtype == F64 else np.float32
    known = known_scalars(operator, given, made or {}, real)
    step = partial(_REFERENCES[operator.name], **known)

    def check(before: Sequence[np.ndarray]) -> None:
        n = len(operator.variables)
        w, *states = before[:n]
        if operator.name == "AdamNoUpdateParam":
            w, states = np.zeros_like(w), before[:n]
        if operator.takes_rows and not operator.every_row:
            expected = reference.lazy_step(step, w, before[-1], before[-2], *states)
        elif operator.takes_rows:
            expected = reference.dense_equivalent_step(step, w, before[-1], before[-2], *states)
        else:
            expected = step(w, before[-1], *states)
        dtype = w.dtype
        tolerance = 1e-12 if dtype == F64 else 2e-5 if operator.takes_rows else 4e-6
        for name, exact in zip(operator.variables, expected[-n:], strict=True):
            assert_near(given[name], exact, tolerance, name)

    return check


def _function(name: str, rng: np.random.Generator, memory: Memory) -> Call:
    if name == "SparseGatherV2":
        (n_rows, *tail), n = arrays.table(rng)
        table = memory.normal(rng, (n_rows, *tail), pick(rng, DTYPES))
        indices = memory.indices(rng, n_rows + int(rng.random() < 0.1), n)
        text = f"{name} {table.shape} {table.dtype} {len(indices)}"
        return Call(text, lambda: ops.SparseGatherV2()(table, indices, 0), [table, indices])
    gradients: list[Any] = []
    for _ in range(int(rng.integers(1, 6))):
        dtype = pick(rng, DTYPES)
        if rng.random() < 0.3:
            shape, n = arrays.table(rng)
            gradients.append(memory.rows(rng, shape, dtype, n))
            if n and rng.random() < 0.1:
                gradients[-1].indices[-1] = shape[0]
        else:
            gradients.append(memory.normal(rng, arrays.shape(rng, arrays.size(rng)), dtype))
    kinds = [f"{type(g).__name__}{g.shape} {g.dtype}" for g in gradients]
    if name == "global_norm":
        return Call(f"{name} {kinds}", lambda: ops.global_norm(gradients))
    limit, in_place = float(rng.uniform(0.1, 10.0)), bool(rng.random() < 0.5)
    clip = partial(ops.clip_by_global_norm, gradients, limit, in_place=in_place)
    values = [g.values if isinstance(g, ops.RowTensor) else g for g in gradients]
    return Call(f"{name} {kinds} {limit} {in_place}", clip, values if in_place else [])


def _adam_update(dtype: np.dtype, rng: np.random.Generator, memory: Memory) -> Call:
    is_sparse = bool(rng.random() < 0.4)
    shape, n = arrays.table(rng) if is_sparse else (arrays.shape(rng, arrays.size(rng)), 0)
    w, mean, var = (memory.positive(rng, shape, dtype) for _ in range(3))
    gradient = memory.rows(rng, shape, dtype, n) if is_sparse else memory.normal(rng, shape, dtype)
    if is_sparse and n and rng.random() < 0.1:
        gradient.indices[0] = -1
    # Decay and clipping decide the kernel.
    options = pick(rng, ({}, {"wd": float(rng.uniform(0.01, 0.1)), "clip_gradient": 0.7}))
    options |= {"lazy_update": bool(rng.random() < 0.5), "lr": float(rng.uniform(0.001, 0.1))}
    out = w if rng.random() < 0.6 else None
    text = f"adam_update {dtype} {shape} {n if is_sparse else ''} {options} {out is w}"
    given = [gradient.indices, gradient.values] if is_sparse else [gradient]

    def run() -> Any:
        return ops.adam_update(w, gradient, mean, var, out, **options)

    return Call(text, run, [w, mean, var, *given])
