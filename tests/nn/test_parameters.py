"""Parameters of optimizers: groups, names, order, rebinding, arrays changed in place."""

from typing import Any

import numpy as np
import pytest
from adam_family import ones, parameters
from fusestep import nn
from fusestep.bench.registry import Row
from helpers import assert_same_bits, assign, refused, unchanged
from optimizers import FAMILIES

# Groups


def test_what_groups_tell() -> None:
    """Rates of their own, or one for all; decays are in test_rates.py."""
    a, b, c = parameters("a", "b", "c")
    for of_first, has_rates, rates in (({"lr": 0.5}, True, (0.5, 0.25, 0.25)), ({}, False, 0.25)):
        opt = nn.Adam([{"params": [a], **of_first}, {"params": [b, c]}], 0.25)
        assert opt.parameters == (a, b, c)
        assert (opt.is_group, opt.is_group_lr, opt.get_lr()) == (True, has_rates, rates)


def test_group_params_may_be_a_generator() -> None:
    # MindSpore's check uses a generator up and then optimizes nothing.
    a, b = parameters("a", "b")
    assert nn.Adam(iter([{"params": (p for p in (a, b))}])).parameters == (a, b)


def test_order_params() -> None:
    a, b, c = parameters("a", "b", "c")
    groups = [{"params": [a, b], "lr": 0.5}, {"params": [c]}, {"order_params": (c, a, b)}]
    opt = nn.Adam(groups, 0.25)
    assert opt.parameters == (c, a, b)
    assert opt.get_lr() == (0.25, 0.5, 0.5)
    before = [p.data.copy() for p in (c, a, b)]
    opt([None, None, ones(4, 3)])
    assert_same_bits(c.data, before[0])
    assert_same_bits(a.data, before[1])
    assert (b.data != before[2]).all()


def test_names_by_position() -> None:
    """They give way to those that were given, by a user or by another optimizer."""
    opt = nn.Adam([ones(2), nn.Parameter(ones(3), "mine"), ones(4)])
    assert [p.name for p in opt.parameters] == ["parameter_0", "mine", "parameter_2"]
    of_another = nn.Parameter(ones(2))
    nn.Adam([of_another])
    for params in ([ones(2), nn.Parameter(ones(3), "parameter_0")], [ones(3), of_another]):
        assert len({p.name for p in nn.Adam(params).parameters}) == 2


_A, _B = parameters("a", "b")
_M = ones(5)
BAD_PARAMETERS: list[tuple[Any, Any, str]] = [
    (None, ValueError, "parameters is missing: expected a list"),
    ([], ValueError, "parameters is empty: expected at least one parameter"),
    ([{"params": []}], ValueError, "parameters is empty"),
    ([{"order_params": []}], ValueError, "parameters is empty"),
    (3, TypeError, "parameters has a wrong type: expected a list of parameters or of group"),
    ("w", TypeError, "parameters has a wrong type"),
    ({"params": [_A]}, TypeError, "parameters has a wrong type: .* got dict"),
    (_A, TypeError, "parameters has a wrong type: .* got Parameter"),
    # Its rows would become the parameters, one by one.
    (ones(4, 3), TypeError, "parameters has a wrong type: .* got ndarray"),
    ([_A, {"params": [_B]}], TypeError, "parameters mixes kinds"),
    ([_A, "b"], TypeError, "parameters holds a wrong type: .* got str"),
    ([_A, 3], TypeError, "data is no array: expected an array, got int"),
    ([np.ones(3, int)], TypeError, "data has a wrong dtype: .*got int64"),
    ([np.broadcast_to(ones(1), (3,))], ValueError, "data is read-only"),
    ([ones(6)[::2]], ValueError, "data is not contiguous"),
    ([_A, _A], RuntimeError, "parameters holds a parameter twice"),
    ([{"params": [_A]}, {"params": [_A]}], RuntimeError, "holds a parameter twice"),
    ([_A, parameters("a")[0]], ValueError, "parameter name 'a' repeats"),
    ([_M, _M], ValueError, "shares memory with parameter"),
    ([_M[:3], _M[2:]], ValueError, "shares memory with parameter"),
    ([nn.Parameter(ones(2), "frozen", requires_grad=False)], ValueError,
     "parameter 'frozen' does not require a gradient: .*leave it out"),
    ([{"params": [_A], "learning_rate": 1.0}], KeyError, "'learning_rate' is unknown"),
    ([{"params": [_A], "weight_deca": 1.0}], KeyError, "did you mean 'weight_decay'"),
    ([{"lr": 0.1}], KeyError, "group 0 has no 'params'"),
    ([{"params": _A}], TypeError, "group 0: params has a wrong type"),
    ([{"params": ones(4, 3)}], TypeError, "group 0: params has a wrong type"),
    ([{"params": "a"}], TypeError, "group 0: params has a wrong type"),
    ([{"params": [_A], "lr": -1.0}], ValueError, "learning_rate is out of range"),
    ([{"params": [_A], "weight_decay": "x"}], TypeError, "weight_decay has a wrong type"),
    ([{"params": [_A], "grad_centralization": 1}], TypeError,
     "grad_centralization has a wrong type: expected a bool, got int"),
    ([{"params": [_A], "lr": [0.1]}, {"params": [_B], "lr": [0.1, 0.2]}], ValueError,
     r"lr lists differ in length: .*\[1, 2\]"),
    ([{"params": [_A]}, {"order_params": [_A], "lr": 0.1}], ValueError,
     "group 1 has other keys beside order_params"),
    ([{"params": [_A]}, {"order_params": 3}], TypeError, "expected a list of parameters"),
    ([{"params": [_A, _B]}, {"order_params": [_A]}], ValueError,
     "order_params has a wrong length: expected 2, got 1"),
    ([{"params": [_A, _B]}, {"order_params": [_A, parameters("c")[0]]}], ValueError,
     "order_params lacks parameter 'b'"),
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_bad_parameters(family: Row) -> None:
    for given, error, text in BAD_PARAMETERS:
        with refused(error, text, given):
            family.make(given)
            pytest.fail(text)


def test_order_params_of_plain_arrays_says_what_to_do() -> None:
    """Arrays are wrapped by the group, so the order cannot name them: it needs Parameters."""
    a, b = ones(2), ones(3)
    with pytest.raises((TypeError, ValueError), match=r"order_params .*Parameter"):
        nn.Adam([{"params": [a, b]}, {"order_params": [b, a]}])


# Names


def test_a_refused_constructor_leaves_names_alone() -> None:
    a, b = nn.Parameter(ones(2)), nn.Parameter(ones(2))
    with pytest.raises(ValueError, match="loss_scale"):
        nn.Adam([a, b], loss_scale=-1.0)
    assert (a.name, b.name) == (None, None)


def test_a_name_is_fixed_by_an_optimizer() -> None:
    """The state is saved by name: renaming would lose it."""
    a = nn.Parameter(ones(2))
    a.name = "free"
    nn_opt = nn.Adam([a])
    with pytest.raises(ValueError, match="name is fixed by an optimizer"):
        a.name = "other"
    assert "moment1.free" in nn_opt.state_dict()


# Parameters and rebinding


@pytest.mark.parametrize(("arguments", "error", "text"), [
    ((None,), TypeError, "data is no array"),  # others of no use are in BAD_PARAMETERS
    ((ones(2), 3), TypeError, "name has a wrong type: expected a str, got int"),
    ((ones(2), "w", 1), TypeError, "requires_grad has a wrong type: expected a bool"),
])  # fmt: skip
def test_bad_parameter(arguments: tuple[Any, ...], error: Any, text: str) -> None:
    with pytest.raises(error, match=f"^Parameter: {text}"):
        nn.Parameter(*arguments)


def test_parameter_is_its_array() -> None:
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    p = nn.Parameter(w, "w")
    assert p.data is w
    assert np.asarray(p) is w
    assert p.asnumpy() is w
    assert nn.Parameter(p).data is w
    assert (p.shape, p.dtype, p.ndim, p.size, len(p)) == ((2, 3), np.float32, 2, 6, 2)
    assert np.array(p) is not w
    assert np.asarray(p, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="copy"):
        p.__array__(np.float64, copy=False)  # NumPy 1 has no such wish
    assert repr(p) == "Parameter(name='w', shape=(2, 3), dtype=float32)"


def test_rebinding_reaches_every_optimizer() -> None:
    (p,) = parameters("w")
    one, two = nn.Adam([p]), nn.LazyAdam([p])
    for opt in (one, two):
        opt([ones(4, 3)])
    old, p.data = p.data, p.data.copy()
    with unchanged(old):
        one([ones(4, 3)])
        two([ones(4, 3)])


def test_rebinding_that_is_refused() -> None:
    pool = np.ones((3, 4, 3), np.float32)
    a, b = nn.Parameter(pool[0], "a"), nn.Parameter(pool[1], "b")
    opt = nn.Adam([a, b])
    opt([ones(4, 3), ones(4, 3)])
    for value, error, text in (
        (
            ones(3, 4), ValueError,
            r"Parameter: data has a wrong shape: expected \(4, 3\), got \(3, 4\)"),
        (np.ones((4, 3), int), TypeError, "Parameter: data has a wrong dtype"),
        (ones(3, 4).T, ValueError, "Parameter: data is not contiguous"),
        (np.broadcast_to(ones(3), (4, 3)), ValueError, "Parameter: data is read-only"),
        (b.data, ValueError, "Adam: parameter '.' shares memory with parameter '.'"),
        (pool.reshape(-1)[20:32].reshape(4, 3), ValueError, "Adam: parameter '.' shares memory"),
        ("w", TypeError, "Parameter: data is no array"),
    ):  # fmt: skip
        with refused(error, text, opt, pool):
            a.data = value
        assert a.data is pool[0] or np.shares_memory(a.data, pool[0])
    a.data = pool[0]  # its own memory is no overlap
    opt([ones(4, 3), ones(4, 3)])


# Arrays that were changed in place


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize(("change", "error", "text"), [
    (lambda w: w.setflags(write=False), ValueError, "parameter 'w' is read-only"),
    (lambda w: w.resize((2, 4), refcheck=False), ValueError, r"'w' .*\(4, 2\), got \(2, 4\)"),
    (lambda w: w.resize((2, 2), refcheck=False), ValueError, r"'w' .*\(4, 2\), got \(2, 2\)"),
    (lambda w: w.resize((90_000, 2), refcheck=False), ValueError, "wrong (dense_)?shape"),
    (lambda w: assign(w, dtype=np.int32), TypeError, "parameter 'w' .* wrong dtype"),
], ids=["read-only", "shape", "cut off", "resized", "dtype"])  # fmt: skip
def test_arrays_that_were_changed_between_steps(change, error, text: str, is_sparse: bool) -> None:
    """In place, so that nobody is told: the step looks, and does not write where they were."""

    def gradient(shape: tuple[int, ...]) -> Any:
        rows = nn.RowTensor(np.array([1, 0]), np.ones((2, *shape[1:]), np.float32), shape)
        return rows if is_sparse else np.ones(shape, np.float32)

    w, other = np.ones((4, 2), np.float32), np.ones(3, np.float32)
    params = [nn.Parameter(w, "w"), nn.Parameter(other, "other")]
    opt = nn.Momentum(params, 0.1, 0.9, sparse_update="lazy")
    g = np.ones(3, np.float32)
    opt((gradient((4, 2)), g))
    change(w)
    shape = (4, 2) if w.size > 8 else w.shape
    for _ in range(2):
        with refused(error, text, w, other):
            opt((gradient(shape), g))
    assert opt.global_step == 1
