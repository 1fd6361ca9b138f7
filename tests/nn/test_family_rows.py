"""Row-sparse gradients of all optimizers that take them: lazy, dense-equivalent, refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from fusestep import nn
from helpers import arrays_of, assert_same_arrays, assert_same_bits, refused

from optimizers import (  # isort: skip
    ALL_FORMS, BY_NAME, FORMS, arguments_of, decayed_and_scaled, gradients, inner, is_row_wise,
    make, parameters, rows, states)  # fmt: skip

TAKING = [form for form, (name, _) in FORMS.items() if BY_NAME[name].takes_rows]
REFUSING = [form for form in FORMS if form not in TAKING]
SWEEPING = [form for form in TAKING if form != "Adam-lazy"]  # it has no such setting
EACH_TAKING = pytest.mark.parametrize("form", TAKING)

# The same cases in every run; nothing is kept between runs.
quick = settings(
    max_examples=25, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow])  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Steps on one table.

    Attributes:
        shape: that of the table.
        indices: those of each step's gradient.
        dtype: of the table and the gradients.
        options: weight decay and loss scale.
    """

    shape: tuple[int, ...]
    indices: list[list[int]]
    dtype: Any
    options: dict[str, Any]

    def of(self, form: str) -> Case:
        """The same on a table that has rows, if the form needs some: a vector is one row."""
        shape = (*self.shape, 1) if len(self.shape) < 2 and is_row_wise(form) else self.shape
        return replace(self, shape=shape)

    def table(self) -> nn.Parameter:
        """The same in every call; named so that it decays."""
        return parameters({"table": self.shape}, self.dtype)[0]

    def gradient(self, step: int) -> nn.RowTensor:
        return rows(self.shape, self.indices[step], seed=step, dtype=self.dtype)

    def options_of(self, form: str) -> dict[str, Any]:
        """Those that the form has."""
        return {n: v for n, v in self.options.items() if n in decayed_and_scaled(form)}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n = draw(st.integers(1, 30))
    tail = draw(st.sampled_from([(), (1,), (3,), (8,), (17,), (2, 5)]))
    indices = draw(st.lists(st.lists(st.integers(0, n - 1), max_size=40), min_size=1, max_size=3))
    # Three kinds of kernels: each other combination would be compiled too.
    conditioned = {"weight_decay": 0.1, "loss_scale": 3.0}
    kinds = [(np.float32, {}), (np.float32, conditioned), (np.float64, {})]
    return Case((n, *tail), indices, *draw(st.sampled_from(kinds)))


def a_case(indices: list[list[int]], shape: tuple[int, ...] = (6, 4)) -> Case:
    return Case(shape, indices, np.float32, {"weight_decay": 0.1, "loss_scale": 3.0})


def assert_equal_arrays(one: Any, other: Any, only: Any = ...) -> None:
    """The table and its states, or some rows of them, to the last bit."""
    __tracebackhide__ = True
    assert_same_bits(one.parameters[0].data[only], other.parameters[0].data[only], "table")
    for name, array in states(one).items():
        assert_same_bits(array[only], states(other)[name][only], name)


# Properties


@pytest.mark.parametrize("form", SWEEPING)
@example(a_case([[2, 2, 2], [], [5, 0, 5]]))
@example(a_case([[3] * 600 + [1]], (9, 3)))
@quick
@given(cases())
def test_dense_equivalent_is_the_dense_step(form: str, case: Case) -> None:
    """Of the gradient written out, to the last bit."""
    case = case.of(form)
    options = {**case.options_of(form), "sparse_update": "dense_equivalent"}
    opt, dense = (make(form, [case.table()], **options) for _ in range(2))
    for step in range(len(case.indices)):
        gradient = case.gradient(step)
        opt([gradient])
        dense([gradient.to_dense()])
    assert_equal_arrays(opt, dense)


@EACH_TAKING
@example(a_case([[2, 2, 2], [], [5, 0, 5]]))
@quick
@given(cases())
def test_lazy_takes_the_same_step_on_the_named_rows_alone(form: str, case: Case) -> None:
    """Named rows as in a step on all rows, from the same state; others keep every bit."""
    case = case.of(form)
    options = {**case.options_of(form), "sparse_update": "lazy"}
    opt = make(form, [case.table()], **options)
    for step in range(len(case.indices)):
        gradient = case.gradient(step)
        before, dense = (make(form, [case.table()], **options) for _ in range(2))
        for one in (before, dense):
            one.load_state_dict(opt.state_dict())
            one.parameters[0].data[...] = opt.parameters[0].data
        opt([gradient])
        dense([gradient.to_dense()])
        named = np.isin(np.arange(case.shape[0]), case.indices[step])
        assert_equal_arrays(opt, before, ~named)
        assert_equal_arrays(opt, dense, named)


# Beside other parameters, and with counts of their own


@pytest.mark.parametrize(
    ("form", "how"),
    [(form, "lazy") for form in TAKING] + [(form, "dense_equivalent") for form in SWEEPING],
)
def test_rows_and_dense_gradients_in_one_step(form: str, how: str) -> None:
    """As in optimizers of their own, also where a parameter was skipped."""
    options = {**decayed_and_scaled(form), "sparse_update": how}
    together, apart = parameters(), parameters()
    opt, alone = make(form, together, **options), [make(form, [p], **options) for p in apart]
    table, vector = together
    for step, present in enumerate(["tv", "v", "t", "tv"]):
        g = rows(table.shape, [4, step, 4], seed=step) if "t" in present else None
        h = gradients([vector], step)[0] if "v" in present else None
        opt([g, h])
        for one, gradient in zip(alone, (g, h), strict=True):
            if gradient is not None:
                one([gradient])
    assert_same_arrays(together, apart)


# Defaults


DEFAULTS = {name: form.rows for name, form in ALL_FORMS.items() if form.rows}


@pytest.mark.parametrize("form", DEFAULTS)
def test_default(form: str) -> None:
    (p,), (q,) = parameters({"table": (6, 4)}), parameters({"table": (6, 4)})
    default, given = make(form, [p]), make(form, [q], sparse_update=DEFAULTS[form])
    for step in range(2):
        for one in (default, given):
            one([rows((6, 4), [1, step, 1], seed=step)])
    assert_equal_arrays(default, given)


@pytest.mark.parametrize("form", [form for form in TAKING if form not in DEFAULTS])
def test_without_a_default_the_error_names_both_settings(form: str) -> None:
    opt = make(form, parameters())
    good = gradients(opt.parameters, 0)
    opt(good)
    name, _ = FORMS[form]
    text = f"^{name}: gradient of 'table' .*sparse_update='lazy' or sparse_update='dense_equival"
    with refused(ValueError, text, opt):
        opt([rows((6, 4), [1]), good[1]])


# Where a whole parameter is looked at


@pytest.mark.parametrize("form", REFUSING)
def test_refused_where_the_whole_parameter_counts(form: str) -> None:
    """The text says why; nothing changes, the parameters before it neither."""
    # LARS refuses what the optimizer inside would take.
    options = {"sparse_update": "lazy"} if "sparse_update" in arguments_of(form) else {}
    opt = make(form, parameters({"vector": (5,), "table": (6, 4)}), **options)
    good = gradients(opt.parameters, 0)
    opt(good)
    reason = BY_NAME[FORMS[form][0]].needs
    text = f"gradient of 'table' is row-sparse: expected {reason}, got a RowTensor"
    for bad in (rows((6, 4), [1]), [rows((6, 4), [1]), rows((6, 4), [0, 1])], rows((6, 4), [])):
        for first in (good[0], None):
            with refused(ValueError, text, opt):
                opt([first, bad])


@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
@pytest.mark.parametrize("cls", [nn.SGD, nn.Momentum, nn.RMSProp, nn.Adam, nn.FTRL])
def test_lars_takes_rows_of_a_parameter_that_its_filter_leaves_out(cls: type, how: str) -> None:
    """It takes the optimizer's own step without decay; the others are scaled as ever."""
    base = BY_NAME[cls.__name__].base
    inner = cls(parameters(), **base, weight_decay=0.1, loss_scale=3.0, sparse_update=how)
    opt = nn.LARS(inner, coefficient=0.3, lars_filter=lambda p: p.name != "table")
    table, vector = parameters()
    plain = cls([table], **base, loss_scale=3.0, sparse_update=how)
    scaled = nn.LARS(cls([vector], **base, weight_decay=0.1, loss_scale=3.0), coefficient=0.3)
    for step in range(3):
        g = rows(table.shape, [4, step, 4], seed=step)
        (h,) = gradients([vector], step)
        opt([g, h])
        plain([g])
        scaled([h])
    assert_same_bits(opt.parameters[0].data, table.data)
    assert_same_bits(opt.parameters[1].data, vector.data)


# Memory of the step


def in_memory_of(array: np.ndarray, name: str) -> nn.RowTensor:
    """A gradient of a (40, 4) table of which one array lies in the memory of another array."""
    n = 8
    values, found = np.ones((n, 4), np.float32), array.reshape(-1).view(np.uint8)
    if name == "values":
        return nn.RowTensor(np.arange(n), found[: 16 * n].view(np.float32).reshape(n, 4), (40, 4))
    if name == "int32":
        return nn.RowTensor(found[: 4 * n].view(np.int32), values, (40, 4))
    if name == "int64":
        return nn.RowTensor(found[: 8 * n].view(np.int64), values, (40, 4))
    whole = nn.RowTensor(np.arange(n), values, (40, 4), positions=np.arange(n), batch_length=2**62)
    whole.positions = found[: 8 * n].view(np.int64)
    whole.positions[:] = np.arange(n)
    return whole


@pytest.mark.parametrize("name", ["values", "int32", "int64", "positions"])
@EACH_TAKING
def test_rows_in_the_memory_of_a_variable_are_refused(form: str, name: str) -> None:
    """Also where they come only in a later step."""
    lazy = {"sparse_update": "lazy"} if form in SWEEPING else {}
    opt = make(form, parameters({"table": (40, 4)}), **lazy)
    good = rows((40, 4), [3, 1, 3], seed=0)
    for _ in range(2):
        for array in arrays_of(inner(opt)):
            if array.shape == (40, 4):
                bad = in_memory_of(array, name)
                with refused(ValueError, "a gradient shares memory with a parameter or state", opt):
                    opt([bad])
        opt([good])
