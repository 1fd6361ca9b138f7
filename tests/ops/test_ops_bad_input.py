"""Operators: what is refused, with which text, without a byte written; and what must work."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from faults import FAULTS, TAKEN, frozen, misaligned, strided
from fusestep import ConversionError, nn
from helpers import BF16, assert_same_bits, label, refused, typed, unchanged

from operators import (  # isort: skip
    ADAM_UPDATE, DENSE_OPERATORS, EVERY_OPERATOR, LARS_UPDATE, OPERATORS, ROW_OPERATORS, Operator,
)  # fmt: skip

# Without momentum the states of SGD have no part in the step, and are checked all the same.
SGD = OPERATORS["SGD"]
PLAIN_SGD = replace(SGD, scalars={**SGD.scalars, "momentum": 0.0})
FUSED = [operator for name, operator in ROW_OPERATORS.items() if name.startswith("Fused")]
WRITING = [*OPERATORS.values(), ADAM_UPDATE, PLAIN_SGD]
EACH_WRITING = pytest.mark.parametrize("operator", WRITING, ids=str)
EACH = pytest.mark.parametrize("operator", [*WRITING, LARS_UPDATE], ids=str)
EACH_CLASS = pytest.mark.parametrize("operator", EVERY_OPERATOR.values(), ids=str)
EACH_DENSE = pytest.mark.parametrize("operator", [*DENSE_OPERATORS.values(), ADAM_UPDATE], ids=str)
EACH_ROWS = pytest.mark.parametrize("operator", ROW_OPERATORS.values(), ids=str)

# Enough positions that keys are built and sorted by several threads.
PARALLEL = 10_000


def reject(operator: Operator, inputs: dict[str, Any], error, text: str, **others) -> None:
    """The call is refused; the text begins with the operator's name."""
    __tracebackhide__ = True
    for each in error if isinstance(error, tuple) else (error,):
        with refused(each, f"^{operator.name}: {text}", inputs, others):
            operator.call_with(inputs, **others)


def assert_same_step(
    operator: Operator, one: dict[str, Any], other: dict[str, Any], **made: Any
) -> None:
    """Two calls, of which ``made`` is for the first one, leave the same bits."""
    __tracebackhide__ = True
    results = operator.call(one, **made), operator.call(other)
    for name in operator.written:
        found, expected = np.asarray(one[name]), np.asarray(other[name])
        assert_same_bits(found.reshape(-1), expected.reshape(-1), name)
    if not operator.returned:
        assert_same_bits(*(result.reshape(-1) for result in results))


# What is refused


@EACH
def test_what_each_argument_refuses(operator: Operator) -> None:
    for name in operator.arguments:
        for make, error, text in FAULTS[operator.known(name).takes]:
            inputs = operator.inputs()
            reject(operator, inputs, error, f"{name} {text}", **{name: make(inputs[name])})


@EACH
def test_what_the_constructor_refuses(operator: Operator) -> None:
    """Before any call, but for numbers that are 0 in the arithmetic of a call, and a function."""
    for name in operator.constructor:
        for make, error, text in FAULTS[operator.known(name).takes]:
            with refused(error, f"^{operator.name}: {name} {text}"):
                made = operator.new(**{name: make(None)})
                if "is 0 in float32" in text or operator is ADAM_UPDATE:
                    made(*operator.inputs().values())


@EACH
def test_what_each_argument_takes(operator: Operator) -> None:
    """At the edges of its range, and in either kind of float."""
    for name in (*operator.scalars, *operator.constructor):
        for value in TAKEN[operator.known(name).takes]:
            with np.errstate(all="ignore"):
                operator.call_with(operator.inputs(), **{name: value})


@pytest.mark.parametrize("operator", [op for op in WRITING if op not in FUSED], ids=str)
def test_epsilon_of_other_dtypes(operator: Operator) -> None:
    """16-bit variables are computed in float32; in float64 it is a number as any other."""
    if "epsilon" not in (*operator.scalars, *operator.constructor):
        return
    inputs = operator.inputs(dtype=np.float16)
    reject(operator, inputs, ValueError, "epsilon is 0 in float32", epsilon=1e-46)
    if operator is ADAM_UPDATE:  # MXNet rounds its scalars to float32
        return
    inputs = operator.inputs(dtype=np.float64)
    for name in (*operator.variables, operator.gradient):
        inputs[name][...] = 0.0
    operator.call_with(inputs, epsilon=1e-46)
    assert all(np.isfinite(inputs[name]).all() for name in operator.variables)


@pytest.mark.parametrize("operator", FUSED, ids=str)
@pytest.mark.parametrize("dtype", [np.float64, np.float16, BF16])
def test_fused_sparse_variables_are_float32(operator: Operator, dtype: Any) -> None:
    text = "var has a wrong dtype: expected float32, got .*fusestep.nn"
    reject(operator, operator.inputs(dtype=dtype), TypeError, text)


@EACH_ROWS
def test_rows_need_a_dimension(operator: Operator) -> None:
    inputs = operator.inputs()
    inputs |= {name: np.ones((), np.float32) for name in operator.variables}
    inputs[operator.gradient] = np.ones(4, np.float32)
    # MindSpore raises RuntimeError here, Python's users expect ValueError: it is both.
    text = "var has no rows: expected at least 1 dimension"
    reject(operator, inputs, (ValueError, RuntimeError), text)


@pytest.mark.parametrize(
    ("variable", "gradient"),
    [(np.float16, np.float32), (BF16, np.float32), (BF16, np.float64), (BF16, np.float16),
     (np.float16, BF16), (np.float32, np.float64)])  # fmt: skip
def test_gradient_that_16_bits_cannot_hold(variable: Any, gradient: Any) -> None:
    # float16 and bfloat16 hold different numbers: neither is the higher one, both convert.
    for operator in (*DENSE_OPERATORS.values(), ADAM_UPDATE, LARS_UPDATE):
        inputs = operator.inputs(dtype=variable)
        inputs[operator.gradient] = inputs[operator.gradient].astype(gradient)
        reject(operator, inputs, ConversionError, f"{operator.gradient} has a higher dtype")


@EACH_WRITING
@pytest.mark.parametrize("shift", [0, 4, 56])
def test_arrays_that_overlap(operator: Operator, shift: int) -> None:
    """Any two of which one is written: the same memory, or one begins within the other."""
    arrays = [n for n in operator.arguments if isinstance(operator.inputs()[n], np.ndarray)]
    for pair in combinations(arrays, 2):
        for first, second in (pair, pair[::-1]):
            inputs = operator.inputs()
            written = {first, second} & {
                *operator.variables[: 1 if operator is PLAIN_SGD else None]
            }
            if not written or shift >= inputs[first].astype(np.float32).nbytes:
                continue
            buffer = np.zeros(240, np.uint8)
            for name, begin in ((first, 0), (second, shift)):
                old = inputs[name].astype(np.int32) if name == "indices" else inputs[name]
                inputs[name] = buffer[begin:][: old.nbytes].view(old.dtype).reshape(old.shape)
            text = f"({first} shares memory with {second}|{second} shares memory with {first}): "
            reject(operator, inputs, ValueError, text)


@EACH_WRITING
def test_neighbours_in_one_buffer_do_not_overlap(operator: Operator) -> None:
    apart, together = operator.inputs(), operator.inputs()
    pool = np.stack([together[name] for name in operator.variables])
    together.update(zip(operator.variables, pool, strict=True))
    assert_same_step(operator, together, apart)


@EACH_CLASS
def test_unknown_keywords(operator: Operator) -> None:
    near = operator.constructor[-1]
    text = f"argument '{near}_' is unknown: .* did you mean '{near}'"
    for error in (TypeError, KeyError):
        with refused(error, f"^{operator.name}: {text}"):
            operator.new(**{f"{near}_": True})
    with pytest.raises(TypeError, match="argument 'zzz' is unknown: expected one of ") as caught:
        operator.new(zzz=1)
    assert "did you mean" not in str(caught.value)


@EACH_ROWS
def test_out_of_range_is_keyword_only(operator: Operator) -> None:
    # After the published arguments, so that a later one of those can keep its place.
    published = [*operator.attributes.values(), False, False, "drop"]
    with pytest.raises(TypeError, match="positional"):
        operator.make(*published)


# Indices


def with_batch(operator: Operator, size: int, dtype: Any = np.int64) -> dict[str, Any]:
    """Inputs with `size` random occurrences of the 5 rows."""
    rng = np.random.default_rng(11)
    inputs = operator.inputs()
    inputs[operator.gradient] = rng.standard_normal((size, 3)).astype(np.float32)
    inputs["indices"] = rng.integers(0, 5, size).astype(dtype)
    return inputs


@EACH_ROWS
@pytest.mark.parametrize("length", [0, 3, 5])
def test_lengths_that_do_not_match(operator: Operator, length: int) -> None:
    inputs = {**operator.inputs(), "indices": np.zeros(length, np.int64)}
    text = f"has a wrong length: expected {length} rows as there are indices, got 4"
    reject(operator, inputs, ValueError, f"{operator.gradient} {text}")


BAD_INDICES = [
    (dtype, bad)
    for dtype in (np.int32, np.int64)
    for bad in (-1, 5, np.iinfo(dtype).max, np.iinfo(dtype).min)
] + [(np.int64, 2**32)]  # a valid row if only 32 bits were looked at


@EACH_ROWS
@pytest.mark.parametrize("size", [1, 9, PARALLEL])
def test_index_out_of_range(operator: Operator, size: int) -> None:
    """The first one is named."""
    for dtype, bad in BAD_INDICES:
        for position in sorted({0, size // 2, size - 1}):
            inputs = with_batch(operator, size, dtype)
            inputs["indices"][position] = bad
            inputs["indices"][position + 1 :: 50] = 5
            text = rf"indices\[{position}\] is out of range: expected 0 <= index < 5, got {bad}$"
            reject(operator, inputs, IndexError, text)
    inputs = operator.inputs((0, 3))
    text = r"indices\[0\] is out of range: expected 0 <= index < 0, got 1"
    reject(operator, inputs, IndexError, text)


@EACH_ROWS
@pytest.mark.parametrize("size", [9, PARALLEL])
def test_drop_leaves_out_what_is_out_of_range(operator: Operator, size: int) -> None:
    given, kept = with_batch(operator, size), with_batch(operator, size)
    bad = np.random.default_rng(5).random(size) < 0.3
    bad[[0, -1]] = True
    given["indices"][bad] = np.resize([-1, 5, 2**40, -(2**40), 2**32], bad.sum())
    for name in ("indices", operator.gradient):
        kept[name] = kept[name][~bad]
    if size < PARALLEL:
        assert_same_step(operator, given, kept, out_of_range="drop")
        return
    operator.call(given, out_of_range="drop")
    operator.call(kept)
    for name in operator.variables:
        # A dropped position still counts in the ranges by which hot rows are summed.
        np.testing.assert_allclose(given[name], kept[name], rtol=1e-4, err_msg=name)


@EACH_ROWS
@pytest.mark.parametrize("size", [3, PARALLEL])
def test_drop_of_everything_is_a_step_without_indices(operator: Operator, size: int) -> None:
    given, none = with_batch(operator, size), with_batch(operator, 0)
    given["indices"][:] = -1
    assert_same_step(operator, given, none, out_of_range="drop")


@EACH_ROWS
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_without_indices(operator: Operator, dtype: Any) -> None:
    """A lazy operator does nothing; the others make a dense step with g = 0."""
    inputs = with_batch(operator, 0, dtype)
    if not operator.every_row:
        with unchanged(inputs):
            operator.call(inputs)
        return
    dense = {**DENSE_OPERATORS["Adam"].inputs(), "gradient": np.zeros((5, 3), np.float32)}
    before = inputs["var"].copy()
    operator.call(inputs)
    DENSE_OPERATORS["Adam"].call(dense)
    for name in operator.variables:
        assert_same_bits(inputs[name], dense[name], name)
    assert (inputs["var"] != before).all()


# What must work


@EACH
@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 1, 3), (2, 3, 2, 2)])
def test_one_to_four_dimensions(operator: Operator, shape: tuple[int, ...]) -> None:
    """The step of every element is that of the flattened call."""
    inputs, flat = operator.inputs(shape), operator.inputs(shape)
    width = -1 if len(shape) == 1 or not operator.takes_rows else int(np.prod(shape[1:]))
    for name in (*operator.variables, operator.gradient):
        if operator.takes_rows and name == operator.gradient:
            inputs["indices"] = flat["indices"] = np.arange(shape[0])
            inputs[name] = flat[name] = np.ones(shape, np.float32)
        flat[name] = flat[name].reshape(-1) if width < 0 else flat[name].reshape(-1, width)
    before = inputs[operator.variables[0]].copy()
    assert_same_step(operator, inputs, flat)
    assert operator is LARS_UPDATE or (inputs[operator.variables[0]] != before).all()


@pytest.mark.parametrize(("operator", "dtype"), typed(list(DENSE_OPERATORS.values())), ids=label)
def test_0d_variables(operator: Operator, dtype: Any) -> None:
    assert_same_step(operator, operator.inputs((), dtype), operator.inputs((1,), dtype))


@EACH_DENSE
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_empty_variables(operator: Operator, shape: tuple[int, ...]) -> None:
    result = operator.call(operator.inputs(shape))
    assert np.shape(result[0] if isinstance(result, tuple) else result) == shape


@EACH_ROWS
@pytest.mark.parametrize("shape", [(0, 3), (0,), (3, 0), (0, 0)])
def test_empty_tables(operator: Operator, shape: tuple[int, ...]) -> None:
    for length in (0, 2) if shape[0] else (0,):
        inputs = {**operator.inputs(shape), "indices": np.zeros(length, np.int64)}
        inputs[operator.gradient] = np.zeros((length, *shape[1:]), np.float32)
        assert operator.call(inputs)[0].shape == shape


class Array:
    """An array behind ``__array__``, always the same memory."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array


class DLPack:
    """An array behind DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


NUMPY_1 = np.lib.NumpyVersion(np.__version__) < "2.0.0"  # whose DLPack has read-only arrays
WRAPPED = (Array, *(() if NUMPY_1 else (DLPack,)), nn.Parameter, lambda a: a.view(np.ndarray))
NUMBERS = (
    *(np.float64, np.array, lambda x: np.array([x]), lambda x: nn.Parameter(np.array(x))),
    *(np.float16, BF16.type),  # 0.5 is exact in them
)
# What stands for an argument as well as what usually stands there.
FORMS: dict[str, tuple[Any, ...]] = {
    "variable": WRAPPED,
    "gradient": (
        *(*WRAPPED, strided, np.asfortranarray, misaligned, frozen),
        *(lambda a: np.repeat(a[::-1], 2, axis=0)[::-2], lambda a: np.broadcast_to(a[:1], a.shape)),
    ),
    "indices": (
        *(lambda a: a.astype(np.int32), lambda a: np.repeat(a, 2)[::2]),
        lambda a: np.repeat(a[::-1], 3)[::-3]),
}  # fmt: skip
FORMS |= {"second variable": WRAPPED, "array": FORMS["gradient"]}


@EACH
def test_forms_of_arrays(operator: Operator) -> None:
    """Whatever holds the numbers: what is only read is left alone, the others are returned."""
    for name in operator.arguments:
        for form in () if name in operator.scalars else FORMS[operator.known(name).takes]:
            inputs, plain = operator.inputs(), operator.inputs()
            holder = form(inputs[name])
            plain[name] = np.array(getattr(holder, "array", holder), order="C")
            if "variable" not in operator.known(name).takes:
                inputs[name] = np.asarray(plain[name])
                with unchanged(inputs[name]):
                    assert_same_step(operator, {**inputs, name: holder}, plain)
                continue
            result = operator.call({**inputs, name: holder})
            operator.call(plain)
            for each in operator.variables:
                assert_same_bits(inputs[each], plain[each], each)
            several = result if isinstance(result, tuple) else (result,)
            expected = {**inputs, name: holder}
            for found, each in zip(several, operator.returned, strict=bool(operator.returned)):
                assert found is expected[each]
    if not operator.returned:
        result = operator.call(inputs := operator.inputs())
        assert result.shape == (5, 3)
        assert not any(np.shares_memory(result, x) for x in inputs.values())


@EACH
def test_forms_of_numbers(operator: Operator) -> None:
    half = {name: -0.5 if name == "lr_power" else 0.5 for name in operator.scalars}
    for form in NUMBERS:
        formed = {name: form(value) for name, value in half.items()}
        assert_same_step(operator, {**operator.inputs(), **formed}, {**operator.inputs(), **half})
    rate = {"lr", "learning_rate"} & {*operator.scalars}
    for form in (int, np.int64, np.int32, lambda x: np.array([x])):
        one, other = operator.inputs(), operator.inputs()
        one.update({name: form(2) for name in rate})
        assert_same_step(operator, one, other | dict.fromkeys(rate, 2.0))


@EACH_WRITING
def test_gradient_of_lower_precision(operator: Operator) -> None:
    # One of the types with each operator, both with Adam: each is a kernel.
    lower = (np.dtype(np.float16), BF16)
    for dtype in lower if operator.name == "Adam" else (lower[len(operator.name) % 2],):
        low, high = operator.inputs(), operator.inputs()
        low[operator.gradient] = low[operator.gradient].astype(dtype)
        high[operator.gradient] = low[operator.gradient].astype(np.float32)
        assert_same_step(operator, low, high)


@EACH_WRITING
def test_nan_stays_where_it_is(operator: Operator) -> None:
    """A NaN in a gradient spoils its element and no other."""
    inputs, clean = operator.inputs(), operator.inputs()
    inputs[operator.gradient][2, 1] = np.nan
    row = inputs["indices"][2] if operator.takes_rows else 2
    operator.call(inputs)
    operator.call(clean)
    for name in operator.variables:
        spoiled = np.isnan(inputs[name])
        # `stat` of SGD knows of a step, not of its gradient; without momentum it stays.
        stays = name == "stat" or (operator is PLAIN_SGD and name == "accum")
        assert np.argwhere(spoiled).tolist() == ([] if stays else [[row, 1]])
        assert_same_bits(inputs[name][~spoiled], clean[name][~spoiled], name)


def test_rows_and_occurrences_that_no_key_can_hold() -> None:
    small, huge = np.ones((10, 4), np.float32), np.ones((2**60, 0), np.float32)
    gradients = [
        nn.RowTensor(np.arange(9), np.ones((9, p.shape[1]), np.float32), p.shape)
        for p in (small, huge)
    ]
    with refused(ValueError, "need too long sort keys: expected at most 63 bits", small):
        nn.LazyAdam([small, huge])(gradients)
