"""Operators: what is refused, with which text, without a byte written; and what must work."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from fusestep import ConversionError, nn, ops
from fusestep.bench.cases.operators import SCALARS

from helpers import BF16, assert_same_bits, label, refused, typed, unchanged
from operators import DENSE_OPERATORS, OPERATORS, ROW_OPERATORS, Operator

EACH = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())
EACH_DENSE = pytest.mark.parametrize("operator", DENSE_OPERATORS.values(), ids=DENSE_OPERATORS)
EACH_ROWS = pytest.mark.parametrize("operator", ROW_OPERATORS.values(), ids=ROW_OPERATORS)
EACH_WITH_SCALARS = pytest.mark.parametrize(
    "operator", [op for op in OPERATORS.values() if op.scalars], ids=lambda op: op.name
)
EACH_VARIABLE = pytest.mark.parametrize(
    ("operator", "variable"),
    [
        pytest.param(op, name, id=f"{op.name}-{name}")
        for op in OPERATORS.values()
        for name in op.variables
    ],
)

# Enough positions that keys are built and sorted by several threads.
PARALLEL = 10_000


def reject(
    operator: Operator, inputs: dict[str, Any], error: type[BaseException], text: str, **made: Any
) -> None:
    """The call is refused; the text begins with the operator's name."""
    __tracebackhide__ = True
    with refused(error, f"^{operator.name}: {text}", inputs):
        operator.call(inputs, **made)


# Variables


@EACH_VARIABLE
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.complex64, bool, object, ">f4"])
def test_variable_of_no_native_floating_dtype(
    operator: Operator, variable: str, dtype: Any
) -> None:
    inputs = operator.inputs()
    inputs[variable] = inputs[variable].astype(dtype)
    expected = "expected float32, float64, float16, bfloat16, got "
    text = f"{variable} has a wrong dtype: {expected}{np.dtype(dtype)}"
    reject(operator, inputs, TypeError, text)


@EACH_VARIABLE
@pytest.mark.parametrize("value", [None, "var", [1.0, 2.0], object(), 0.5])
def test_variable_that_is_no_array(operator: Operator, variable: str, value: Any) -> None:
    inputs = {**operator.inputs(), variable: value}
    text = f"{variable} is no array: expected an array, got {type(value).__name__}"
    reject(operator, inputs, TypeError, text)


@EACH
@pytest.mark.parametrize("dtype", [np.float64, np.float16, BF16])
def test_variables_of_several_dtypes(operator: Operator, dtype: Any) -> None:
    inputs = operator.inputs()
    last = operator.variables[-1]
    inputs[last] = inputs[last].astype(dtype)
    text = f"{last} differs in dtype from {operator.variables[0]}: expected float32, got "
    reject(operator, inputs, ConversionError, text)


FUSED = [op for op in ROW_OPERATORS.values() if op.name.startswith("Fused")]


@pytest.mark.parametrize("operator", FUSED, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [np.float64, np.float16, BF16])
def test_fused_sparse_variables_are_float32(operator: Operator, dtype: Any) -> None:
    text = "var has a wrong dtype: expected float32, got .*fusestep.nn"
    reject(operator, operator.inputs(dtype=dtype), TypeError, text)


@EACH
@pytest.mark.parametrize("shape", [(5, 4), (4, 3), (15,), (5, 3, 1), ()])
def test_variables_of_several_shapes(operator: Operator, shape: tuple[int, ...]) -> None:
    inputs = operator.inputs()
    last = operator.variables[-1]
    inputs[last] = np.ones(shape, np.float32)
    text = f"{last} differs in shape from {operator.variables[0]}: expected .5, 3., got "
    reject(operator, inputs, ValueError, text)


@EACH_ROWS
def test_rows_need_a_dimension(operator: Operator) -> None:
    inputs = operator.inputs()
    inputs.update({name: np.ones((), np.float32) for name in operator.variables})
    inputs[operator.gradient] = np.ones(4, np.float32)
    # MindSpore raises RuntimeError here, Python's users expect ValueError: it is both.
    for error in (ValueError, RuntimeError):
        reject(operator, inputs, error, "var has no rows: expected at least 1 dimension")


@EACH_VARIABLE
def test_variable_that_is_read_only(operator: Operator, variable: str) -> None:
    inputs = operator.inputs()
    inputs[variable].flags.writeable = False
    reject(operator, inputs, ValueError, f"{variable} is read-only: expected a writable array")


def strided(array: np.ndarray) -> np.ndarray:
    """The same values in every other column of a wider array."""
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def misaligned(array: np.ndarray) -> np.ndarray:
    """The same values one byte off their natural alignment."""
    buffer = np.zeros(array.nbytes + 1, np.uint8)[1:]
    found = buffer.view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


LAYOUTS = {"strided": strided, "fortran": np.asfortranarray, "misaligned": misaligned}


@EACH_VARIABLE
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_variable_that_is_not_contiguous(operator: Operator, variable: str, layout: Any) -> None:
    inputs = operator.inputs()
    inputs[variable] = layout(inputs[variable])
    wrong = "aligned" if layout is misaligned else "contiguous"
    text = f"{variable} is not {wrong}: expected .*{wrong}"
    reject(operator, inputs, ValueError, text)


def shifted_views(shape: tuple[int, ...], shift: int) -> tuple[np.ndarray, np.ndarray]:
    """Two contiguous arrays, the second `shift` elements into the first."""
    size = int(np.prod(shape))
    buffer = np.ones(size + shift, np.float32)
    return buffer[:size].reshape(shape), buffer[shift:].reshape(shape)


@EACH
@pytest.mark.parametrize("shift", [0, 1, 14])
@pytest.mark.parametrize("swap", [False, True])
def test_variables_that_overlap(operator: Operator, shift: int, swap: bool) -> None:
    inputs = operator.inputs()
    views = shifted_views((5, 3), shift)
    first, last = operator.variables[0], operator.variables[-1]
    inputs[first], inputs[last] = views[::-1] if swap else views
    reject(operator, inputs, ValueError, sharing(first, last))


@EACH
def test_neighbours_in_one_buffer_do_not_overlap(operator: Operator) -> None:
    apart, together = operator.inputs(), operator.inputs()
    pool = np.stack([together[name] for name in operator.variables])
    together.update(zip(operator.variables, pool, strict=True))
    operator.call(apart)
    operator.call(together)
    for name in operator.variables:
        assert_same_bits(together[name], apart[name], name)


# Gradients


@EACH
@pytest.mark.parametrize("dtype", [np.int64, np.complex64, bool, object])
def test_gradient_of_no_floating_dtype(operator: Operator, dtype: Any) -> None:
    inputs = operator.inputs()
    inputs[operator.gradient] = inputs[operator.gradient].astype(dtype)
    reject(
        operator, inputs, TypeError, f"{operator.gradient} has a wrong dtype: expected float32, "
    )


@EACH
def test_gradient_of_higher_precision(operator: Operator) -> None:
    inputs = operator.inputs()
    inputs[operator.gradient] = inputs[operator.gradient].astype(np.float64)
    text = (
        f"{operator.gradient} has a higher dtype than the variable: expected float32, got float64"
    )
    # The sources name TypeError and RuntimeError: both must catch it.
    for error in (ConversionError, TypeError, RuntimeError):
        reject(operator, inputs, error, text)


@EACH_DENSE
@pytest.mark.parametrize(
    ("variable", "gradient"),
    [(np.float16, np.float32), (BF16, np.float32), (BF16, np.float64), (BF16, np.float16)],
)
def test_gradient_that_16_bits_cannot_hold(
    operator: Operator, variable: Any, gradient: Any
) -> None:
    # float16 and bfloat16 hold different numbers: neither is the higher one, both convert.
    inputs = operator.inputs(dtype=variable)
    inputs[operator.gradient] = inputs[operator.gradient].astype(gradient)
    reject(operator, inputs, ConversionError, f"{operator.gradient} has a higher dtype")


@EACH
@pytest.mark.parametrize("shape", [(), (3,), (5, 4), (4, 4), (15,), (5, 3, 1), (0, 3)])
def test_gradient_of_a_wrong_shape(operator: Operator, shape: tuple[int, ...]) -> None:
    inputs = {**operator.inputs(), operator.gradient: np.ones(shape, np.float32)}
    reject(
        operator, inputs, ValueError, f"{operator.gradient} has a wrong (shape|length): expected "
    )


@EACH
@pytest.mark.parametrize("value", [None, "gradient", [[1.0]], 0.5])
def test_gradient_that_is_no_array(operator: Operator, value: Any) -> None:
    inputs = {**operator.inputs(), operator.gradient: value}
    reject(operator, inputs, TypeError, f"{operator.gradient} is no array: expected an array")


def sharing(a: str, b: str) -> str:
    """Either may be called the one that intrudes."""
    return f"({a} shares memory with {b}|{b} shares memory with {a}): "


@EACH_VARIABLE
@pytest.mark.parametrize("shift", [0, 1])
def test_gradient_in_the_memory_of_a_variable(
    operator: Operator, variable: str, shift: int
) -> None:
    inputs = operator.inputs()
    n_rows = len(inputs[operator.gradient])
    inputs[variable], shared = shifted_views((5, 3), shift)
    inputs[operator.gradient] = shared.reshape(-1)[: 3 * n_rows].reshape(n_rows, 3)
    reject(operator, inputs, ValueError, sharing(operator.gradient, variable))


@EACH_ROWS
def test_indices_in_the_memory_of_a_variable(operator: Operator) -> None:
    for variable in operator.variables:
        inputs = operator.inputs()
        inputs[variable] = np.zeros((5, 3), np.float32)
        inputs["indices"] = inputs[variable].reshape(-1)[:4].view(np.int32)
        reject(operator, inputs, ValueError, sharing("indices", variable))


# Indices


@EACH_ROWS
@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, np.int16, np.uint32, np.uint64, bool, ">i4"]
)
def test_indices_of_a_wrong_dtype(operator: Operator, dtype: Any) -> None:
    inputs = operator.inputs()
    inputs["indices"] = inputs["indices"].astype(dtype)
    reject(operator, inputs, TypeError, "indices has a wrong dtype: expected int32 or int64, got ")


@EACH_ROWS
@pytest.mark.parametrize("value", [[1, 0, 1, 3], None, 1, "1"])
def test_indices_that_are_no_array(operator: Operator, value: Any) -> None:
    inputs = {**operator.inputs(), "indices": value}
    reject(operator, inputs, TypeError, "indices is no array: expected an array")


@EACH_ROWS
@pytest.mark.parametrize("shape", [(), (4, 1), (2, 2)])
def test_indices_of_a_wrong_shape(operator: Operator, shape: tuple[int, ...]) -> None:
    inputs = {**operator.inputs(), "indices": np.zeros(shape, np.int64)}
    reject(operator, inputs, ValueError, "indices has a wrong shape: expected 1 dimension")


@EACH_ROWS
@pytest.mark.parametrize("length", [0, 3, 5])
def test_lengths_that_do_not_match(operator: Operator, length: int) -> None:
    inputs = {**operator.inputs(), "indices": np.zeros(length, np.int64)}
    name = operator.gradient
    text = f"{name} has a wrong length: expected {length} rows as there are indices, got 4"
    reject(operator, inputs, ValueError, text)


def with_batch(operator: Operator, size: int, dtype: Any = np.int64) -> dict[str, Any]:
    """Inputs with `size` random occurrences of the 5 rows."""
    rng = np.random.default_rng(11)
    inputs = operator.inputs()
    inputs[operator.gradient] = rng.standard_normal((size, 3)).astype(np.float32)
    inputs["indices"] = rng.integers(0, 5, size).astype(dtype)
    return inputs


BAD_INDICES = [
    (dtype, bad)
    for dtype in (np.int32, np.int64)
    for bad in (-1, 5, np.iinfo(dtype).max, np.iinfo(dtype).min)
] + [(np.int64, 2**32)]  # a valid row if only 32 bits were looked at


@EACH_ROWS
@pytest.mark.parametrize(("dtype", "bad"), BAD_INDICES)
@pytest.mark.parametrize("size", [1, 9, PARALLEL])
def test_index_out_of_range(operator: Operator, size: int, dtype: Any, bad: int) -> None:
    for position in sorted({0, size // 2, size - 1}):
        inputs = with_batch(operator, size, dtype)
        inputs["indices"][position] = bad
        text = rf"indices\[{position}\] is out of range: expected 0 <= index < 5, got {bad}$"
        reject(operator, inputs, IndexError, text)


@EACH_ROWS
def test_the_first_bad_index_is_named(operator: Operator) -> None:
    inputs = with_batch(operator, PARALLEL)
    inputs["indices"][[4321, 9000, 123]] = 5
    reject(operator, inputs, IndexError, r"indices\[123\] is out of range")


@EACH_ROWS
def test_no_index_is_in_range_of_an_empty_table(operator: Operator) -> None:
    inputs = operator.inputs((0, 3))
    text = r"indices\[0\] is out of range: expected 0 <= index < 0, got 1"
    reject(operator, inputs, IndexError, text)


# Scalars

WRONG_KIND: dict[str, Any] = {
    "None": None,
    "str": "0.1",
    "bytes": b"0.1",
    "bool": True,
    "NumPy bool": np.bool_(True),
    "complex": 1j,
    "list": [0.1],
    "tuple": (0.1,),
    "object": object(),
    "str array": np.array("0.1"),
    "complex array": np.array(1j),
}


@EACH_WITH_SCALARS
@pytest.mark.parametrize("value", WRONG_KIND.values(), ids=WRONG_KIND)
def test_scalar_of_a_wrong_kind(operator: Operator, value: Any) -> None:
    # "expected an array" would send the user the wrong way: a number is what is asked for.
    for scalar in operator.scalars:
        text = f"{scalar} has a wrong d?type: expected a (real )?number, got "
        reject(operator, {**operator.inputs(), scalar: value}, TypeError, text)


@EACH_WITH_SCALARS
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.float32(np.nan), np.array([np.inf])])
def test_scalar_that_is_not_finite(operator: Operator, value: Any) -> None:
    for scalar in operator.scalars:
        text = f"{scalar} is not finite: expected a finite number, got "
        reject(operator, {**operator.inputs(), scalar: value}, ValueError, text)


@EACH_WITH_SCALARS
@pytest.mark.parametrize("shape", [(0,), (2,), (1, 1)])
def test_scalar_of_a_wrong_shape(operator: Operator, shape: tuple[int, ...]) -> None:
    for scalar in operator.scalars:
        inputs = {**operator.inputs(), scalar: np.full(shape, 0.5)}
        reject(operator, inputs, ValueError, f"{scalar} has a wrong shape: expected a scalar, ")


@EACH_WITH_SCALARS
@pytest.mark.parametrize("value", [1e39, 10**400], ids=["1e39", "10**400"])
def test_scalar_that_float32_cannot_hold(operator: Operator, value: Any) -> None:
    # It is infinite in the arithmetic, like the infinity that is refused.
    for scalar in operator.scalars:
        inputs = {**operator.inputs(), scalar: value}
        reject(operator, inputs, ValueError, f"{scalar} is too large: expected a float32 number")


@pytest.mark.parametrize("name", ["beta1", "beta2", "epsilon"])
@pytest.mark.parametrize(
    ("value", "error"), [(np.nan, ValueError), ("1", TypeError), (True, TypeError)]
)
def test_attribute_of_amsgrad(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^ApplyAdamWithAmsgrad: {name} "):
        ops.ApplyAdamWithAmsgrad(**{name: value})


@pytest.mark.parametrize(
    "operator",
    [op for op in ROW_OPERATORS.values() if "beta1_power" in op.scalars],
    ids=lambda op: op.name,
)
@pytest.mark.parametrize("value", [1.0, 1, np.float32(1), 1 - 1e-9], ids=repr)
def test_beta1_power_of_one(operator: Operator, value: Any) -> None:
    # 1 - 1e-9 is 1 in float32, where the division takes place.
    inputs = {**operator.inputs(), "beta1_power": value}
    for error in (RuntimeError, ValueError):
        reject(operator, inputs, error, "beta1_power makes the step infinite: expected not 1")


@pytest.mark.parametrize(
    "operator",
    [op for op in OPERATORS.values() if "beta2_power" in op.scalars],
    ids=lambda op: op.name,
)
def test_beta2_power_above_one(operator: Operator) -> None:
    inputs = {**operator.inputs(), "beta2_power": 1.5}
    reject(operator, inputs, ValueError, "beta2_power is out of range: expected at most 1, got 1.5")


# Constructors

FLAGS = [
    pytest.param(op, flag, id=f"{op.name}-{flag}")
    for op in OPERATORS.values()
    for flag in ("use_locking", "use_nesterov", "nesterov", "update_slots")
    if flag in inspect.signature(op.make).parameters
]


@pytest.mark.parametrize(("operator", "flag"), FLAGS)
@pytest.mark.parametrize("value", [1, 0, None, "True", np.bool_(True)], ids=repr)
def test_flag_that_is_no_bool(operator: Operator, flag: str, value: Any) -> None:
    got = type(value).__name__
    text = f"^{operator.name}: {flag} has a wrong type: expected a bool, got {got}"
    with pytest.raises(TypeError, match=text):
        operator.new(**{flag: value})


@EACH
@pytest.mark.parametrize("error", [TypeError, KeyError])
def test_unknown_keyword_suggests_the_nearest(operator: Operator, error: type[Exception]) -> None:
    text = f"^{operator.name}: argument 'use_lock' is unknown: .* did you mean 'use_locking'"
    with pytest.raises(error, match=text):
        operator.new(use_lock=True)


@EACH
def test_unknown_keyword_without_a_near_one(operator: Operator) -> None:
    with pytest.raises(TypeError, match="argument 'zzz' is unknown: expected one of ") as caught:
        operator.new(zzz=1)
    assert "did you mean" not in str(caught.value)


@EACH_ROWS
@pytest.mark.parametrize("value", ["ignore", None, True, "DROP"])
def test_unknown_out_of_range(operator: Operator, value: Any) -> None:
    with pytest.raises(
        ValueError, match="out_of_range is unknown: expected 'raise' or 'drop', got "
    ):
        operator.new(out_of_range=value)


@EACH_ROWS
def test_out_of_range_is_keyword_only(operator: Operator) -> None:
    # After the published arguments, so that a later one of those can keep its place.
    published = [*operator.attributes.values(), False, False, "drop"]
    with pytest.raises(TypeError, match="positional"):
        operator.make(*published)


@EACH
def test_repr_names_the_attributes(operator: Operator) -> None:
    made = operator.new(use_locking=True)
    assert repr(made).startswith(f"{operator.name}(")
    assert "use_locking=True" in repr(made)


# What must work


@EACH
@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 1, 3), (2, 3, 2, 2)])
def test_one_to_four_dimensions(operator: Operator, shape: tuple[int, ...]) -> None:
    """The step of every element is that of the flattened call."""
    inputs, flat = operator.inputs(shape), operator.inputs(shape)
    if operator.takes_rows:
        n_rows = len(inputs["var"])
        inputs["indices"] = flat["indices"] = np.arange(n_rows)
        inputs[operator.gradient] = flat[operator.gradient] = np.ones(shape, np.float32)
        width = inputs["var"].size // len(inputs["var"])
        names = (*operator.variables, operator.gradient)
        flat.update({n: flat[n].reshape(-1, width) for n in names})
    else:
        flat.update({n: flat[n].reshape(-1) for n in (*operator.variables, operator.gradient)})
    before = inputs[operator.variables[0]].copy()
    operator.call(inputs)
    operator.call(flat)
    for name in operator.variables:
        assert_same_bits(inputs[name], flat[name].reshape(shape), name)
    assert (inputs[operator.variables[0]] != before).all()


@pytest.mark.parametrize(("operator", "dtype"), typed(list(DENSE_OPERATORS.values())), ids=label)
def test_0d_variables(operator: Operator, dtype: Any) -> None:
    inputs, one = operator.inputs((), dtype), operator.inputs((1,), dtype)
    operator.call(inputs)
    operator.call(one)
    for name in operator.variables:
        assert_same_bits(inputs[name], one[name].reshape(()), name)


@EACH_DENSE
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_empty_variables(operator: Operator, shape: tuple[int, ...]) -> None:
    result = operator.call(operator.inputs(shape))
    assert np.shape(result[0] if isinstance(result, tuple) else result) == shape


@EACH_ROWS
@pytest.mark.parametrize("shape", [(0, 3), (0,), (3, 0), (0, 0)])
@pytest.mark.parametrize("n_indices", [0, 2])
def test_empty_tables(operator: Operator, shape: tuple[int, ...], n_indices: int) -> None:
    inputs = operator.inputs(shape)
    length = n_indices if shape[0] else 0
    inputs["indices"] = np.zeros(length, np.int64)
    inputs[operator.gradient] = np.zeros((length, *shape[1:]), np.float32)
    assert operator.call(inputs)[0].shape == shape


@EACH_ROWS
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_empty_indices_of_a_lazy_operator(operator: Operator, index_dtype: Any) -> None:
    if operator.name == "FusedSparseAdam":
        return  # not lazy: the next test
    inputs = with_batch(operator, 0, index_dtype)
    with unchanged(inputs):
        operator.call(inputs)


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_empty_indices_of_a_dense_equivalent_operator(index_dtype: Any) -> None:
    """A dense step with g = 0."""
    empty = {"gradient": np.zeros((0, 3), np.float32), "indices": np.zeros(0, index_dtype)}
    fused = {**ROW_OPERATORS["FusedSparseAdam"].inputs(), **empty}
    dense = {**DENSE_OPERATORS["Adam"].inputs(), "gradient": np.zeros((5, 3), np.float32)}
    before = fused["var"].copy()
    ROW_OPERATORS["FusedSparseAdam"].call(fused)
    DENSE_OPERATORS["Adam"].call(dense)
    for name in ("var", "m", "v"):
        assert_same_bits(fused[name], dense[name], name)
    assert (fused["var"] != before).all()


@EACH_ROWS
def test_index_dtypes_and_strides_agree(operator: Operator) -> None:
    results = []
    for change in (
        lambda i: i.astype(np.int32),
        lambda i: i,
        lambda i: np.repeat(i, 2)[::2],
        lambda i: np.repeat(i[::-1], 3)[::-3],
    ):
        inputs = operator.inputs()
        inputs["indices"] = change(inputs["indices"])
        results.append(operator.call(inputs))
    for result in results[1:]:
        for found, expected in zip(result, results[0], strict=True):
            assert_same_bits(found, expected)


SCALAR_FORMS = {
    "numpy": np.float64,
    "0-d": np.array,
    "(1,)": lambda x: np.array([x]),
    "Parameter": lambda x: nn.Parameter(np.array(x)),
    # 0.5 is exact in all of these.
    "float16": np.float16,
    "bfloat16": BF16.type,
}


@EACH_WITH_SCALARS
@pytest.mark.parametrize("form", SCALAR_FORMS.values(), ids=SCALAR_FORMS)
def test_scalar_forms(operator: Operator, form: Any) -> None:
    half = {name: -0.5 if name == "lr_power" else 0.5 for name in operator.scalars}
    plain = {**operator.inputs(), **half}
    formed = {**operator.inputs(), **{name: form(value) for name, value in half.items()}}
    operator.call(plain)
    operator.call(formed)
    for name in operator.variables:
        assert_same_bits(formed[name], plain[name], name)


@EACH_WITH_SCALARS
@pytest.mark.parametrize("form", [int, np.int64, np.int32, lambda x: np.array([x])])
def test_integer_scalars(operator: Operator, form: Any) -> None:
    plain, formed = operator.inputs(), operator.inputs()
    rate = "lr" if "lr" in operator.scalars else "learning_rate"
    plain[rate], formed[rate] = 2.0, form(2)
    operator.call(plain)
    operator.call(formed)
    for name in operator.variables:
        assert_same_bits(formed[name], plain[name], name)


GRADIENT_LAYOUTS = {
    **LAYOUTS,
    "reversed": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
    "read-only": lambda a: (a.setflags(write=False), a)[1],
}


@EACH
@pytest.mark.parametrize("layout", GRADIENT_LAYOUTS.values(), ids=GRADIENT_LAYOUTS)
def test_gradient_layouts(operator: Operator, layout: Any) -> None:
    """A gradient of any layout is read as its values are, and left alone."""
    inputs, plain = operator.inputs(), operator.inputs()
    inputs[operator.gradient] = layout(inputs[operator.gradient])
    plain[operator.gradient] = np.array(inputs[operator.gradient], order="C")
    with unchanged(inputs[operator.gradient]):
        operator.call(inputs)
    operator.call(plain)
    for name in operator.variables:
        assert_same_bits(inputs[name], plain[name], name)


LOWER = (np.dtype(np.float16), BF16)


# One of the types with each operator, both with Adam.
@pytest.mark.parametrize(
    ("operator", "dtype"),
    [
        pytest.param(operator, dtype, id=f"{operator.name}-{dtype}")
        for k, operator in enumerate(OPERATORS.values())
        for dtype in (LOWER if operator.name == "Adam" else (LOWER[k % 2],))
    ],
)
def test_gradient_of_lower_precision(operator: Operator, dtype: Any) -> None:
    low, high = operator.inputs(), operator.inputs()
    low[operator.gradient] = low[operator.gradient].astype(dtype)
    high[operator.gradient] = low[operator.gradient].astype(np.float32)
    operator.call(low)
    operator.call(high)
    for name in operator.variables:
        assert_same_bits(low[name], high[name], name)


@EACH_ROWS
@pytest.mark.parametrize("size", [9, PARALLEL])
def test_drop_leaves_out_what_is_out_of_range(operator: Operator, size: int) -> None:
    given, kept = with_batch(operator, size), with_batch(operator, size)
    bad = np.random.default_rng(5).random(size) < 0.3
    bad[[0, -1]] = True
    given["indices"][bad] = np.resize([-1, 5, 2**40, -(2**40), 2**32], bad.sum())
    for name in ("indices", operator.gradient):
        kept[name] = kept[name][~bad]
    operator.call(given, out_of_range="drop")
    operator.call(kept)
    for name in operator.variables:
        if size == PARALLEL:
            # A dropped position still counts in the ranges by which hot rows are summed.
            np.testing.assert_allclose(given[name], kept[name], rtol=1e-4, err_msg=name)
        else:
            assert_same_bits(given[name], kept[name], name)


@EACH_ROWS
@pytest.mark.parametrize("size", [3, PARALLEL])
def test_drop_of_everything_is_a_step_without_indices(operator: Operator, size: int) -> None:
    given, none = with_batch(operator, size), with_batch(operator, 0)
    given["indices"][:] = -1
    operator.call(given, out_of_range="drop")
    operator.call(none)
    for name in operator.variables:
        assert_same_bits(given[name], none[name], name)


class ArrayOnly:
    """An array behind ``__array__``, always the same memory."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array


NUMPY_1 = np.lib.NumpyVersion(np.__version__) < "2.0.0"  # whose DLPack has read-only arrays


class DLPackOnly:
    """An array behind DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class CopyOnly:
    """An object that hands out a new array each time: an update of it would be lost."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array.copy()


class OnDevice:
    """What a CUDA array looks like from outside."""

    __cuda_array_interface__ = {"shape": (5, 3), "typestr": "<f4", "data": (0, False), "version": 3}  # noqa: RUF012


def identities(result: Any) -> list[int]:
    """Which objects were returned, alone or in a tuple."""
    return [id(r) for r in (result if isinstance(result, tuple) else (result,))]


@EACH
@pytest.mark.parametrize(
    "wrap", [ArrayOnly, DLPackOnly, nn.Parameter, lambda a: a.view(np.ndarray)]
)
def test_array_like_objects(operator: Operator, wrap: Any) -> None:
    """They are updated in place, and returned as they were given."""
    inputs, plain = operator.inputs(), operator.inputs()
    if wrap is DLPackOnly and NUMPY_1:
        variable = operator.variables[0]
        with refused(ValueError, f"{variable} is read-only", inputs):
            operator.call({**inputs, variable: wrap(inputs[variable])})
        return
    wrapped = {name: wrap(inputs[name]) for name in (*operator.variables, operator.gradient)}
    result = operator.call({**inputs, **wrapped})
    expected = operator.call(plain)
    for name in operator.variables:
        assert_same_bits(inputs[name], plain[name], name)
    if operator.returned:
        assert identities(result) == [id(wrapped[name]) for name in operator.returned]
    else:
        assert_same_bits(result, expected)


@EACH_VARIABLE
def test_variable_that_only_gives_copies(operator: Operator, variable: str) -> None:
    inputs = operator.inputs()
    with refused(TypeError, f"{variable} cannot be updated in place", inputs):
        operator.call({**inputs, variable: CopyOnly(inputs[variable])})


@EACH_VARIABLE
def test_variable_on_a_device(operator: Operator, variable: str) -> None:
    inputs = {**operator.inputs(), variable: OnDevice()}
    reject(
        operator,
        inputs,
        RuntimeError,
        f"{variable} lives on a CUDA device: .*; (for arrays|copy it)",
    )


@EACH
def test_the_given_arrays_are_returned(operator: Operator) -> None:
    inputs = operator.inputs()
    result = operator.call(inputs)
    if operator.returned:
        assert identities(result) == [id(inputs[name]) for name in operator.returned]
    else:
        assert result.shape == (5, 3)
        assert not any(np.shares_memory(result, inputs[name]) for name in operator.variables)


@EACH
def test_nan_stays_where_it_is(operator: Operator) -> None:
    """A NaN in a gradient spoils its element and no other."""
    inputs, clean = operator.inputs(), operator.inputs()
    inputs[operator.gradient][2, 1] = np.nan
    row = inputs["indices"][2] if operator.takes_rows else 2
    operator.call(inputs)
    operator.call(clean)
    for name in operator.variables:
        spoiled = np.isnan(inputs[name])
        # `stat` of SGD knows of a step, not of its gradient.
        assert np.argwhere(spoiled).tolist() == ([] if name == "stat" else [[row, 1]])
        assert_same_bits(inputs[name][~spoiled], clean[name][~spoiled], name)


@pytest.mark.parametrize("name", ["ApplyAdamWithAmsgradV2", "Adam", "AdamNoUpdateParam"])
def test_dense_beta1_power_of_one_is_not_refused(name: str) -> None:
    # As in MindSpore, and as documented: the step is infinite.
    operator = DENSE_OPERATORS[name]
    inputs = {**operator.inputs(), "beta1_power": 1.0}
    result = operator.call(inputs)
    first = result[0] if isinstance(result, tuple) else result
    assert not np.isfinite(first).any()
    assert SCALARS["beta1_power"] == 0.9


def test_amsgrad_attributes_act_as_arguments() -> None:
    v1, v2 = OPERATORS["ApplyAdamWithAmsgrad"], OPERATORS["ApplyAdamWithAmsgradV2"]
    one, two = v1.inputs(), v2.inputs()
    attributes = {"beta1": 0.7, "beta2": 0.8, "epsilon": 0.1}
    v1.call(one, **attributes)
    v2.call({**two, **attributes})
    for name in v1.variables:
        assert_same_bits(one[name], two[name], name)


# Masks and sizes


@EACH
def test_masked_arrays_are_refused(operator: Operator) -> None:
    inputs = operator.inputs()
    name = operator.variables[0]
    inputs[name] = np.ma.masked_array(inputs[name], mask=True)
    reject(operator, inputs, TypeError, f"{name} is masked")


def test_rows_and_occurrences_that_no_key_can_hold() -> None:
    from fusestep import nn

    small, huge = np.ones((10, 4), np.float32), np.ones((2**60, 0), np.float32)
    opt = nn.LazyAdam([small, huge])
    gradients = [
        nn.RowTensor(np.arange(9), np.ones((9, 4), np.float32), small.shape),
        nn.RowTensor(np.arange(9), np.ones((9, 0), np.float32), huge.shape),
    ]
    with pytest.raises(ValueError, match="need too long sort keys: expected at most 63 bits"):
        opt(gradients)
    assert (small == 1).all()
