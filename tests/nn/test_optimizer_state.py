"""States of optimizers: saved, loaded, copied, refused; how steps are counted."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from fusestep import nn

from adam_family import OPTIMIZERS, Halving, gradients_of, ones, parameters, rows
from helpers import BF16, STORAGE_DTYPES, arrays_of, assert_same_bits, refused, unchanged


def trained(make: Callable[..., Any], dtype: Any = np.float32, **options: Any) -> Any:
    """An optimizer of two parameters after steps of which one skipped a parameter."""
    groups = [
        {"params": parameters("a", dtype=dtype), "lr": [0.5, 0.25, 0.125, 0.1, 0.05, 0.01]},
        {"params": [nn.Parameter(np.array([0.5, 2.0], dtype), "b")], "weight_decay": 0.3},
    ]
    opt = make(groups, **options)
    for step in range(3):
        g, h = gradients_of(opt, step, dtype)
        opt([g, None if step == 1 else h])
    return opt


def follow(opt: Any) -> None:
    for step in range(3, 6):
        opt(gradients_of(opt, step, opt.parameters[0].dtype))


def by_state(opt: Any, make: Callable[..., Any], *_: Any) -> Any:
    """A new optimizer over copies of the parameters, with the state of `opt`."""
    groups = [
        {"params": [nn.Parameter(opt.parameters[0].data.copy(), "a")], "lr": [0.0] * 6},
        {"params": [nn.Parameter(opt.parameters[1].data.copy(), "b")], "weight_decay": 0.3},
    ]
    other = make(groups)
    other.load_state_dict(opt.state_dict())
    return other


def by_checkpoint(opt: Any, make: Callable[..., Any], path: Any) -> Any:
    nn.save_checkpoint(opt, path / "optimizer")
    nn.save_checkpoint(opt.parameters, path / "parameters")
    loaded = nn.load_checkpoint(path / "parameters")
    groups = [
        {"params": [nn.Parameter(loaded["a"], "a")], "lr": [0.0] * 6},
        {"params": [nn.Parameter(loaded["b"], "b")], "weight_decay": 0.3},
    ]
    other = make(groups)
    other.load_state_dict(nn.load_checkpoint(path / "optimizer"))
    return other


WAYS: dict[str, Callable[..., Any]] = {
    "state_dict": by_state,
    "checkpoint": by_checkpoint,
    "pickle": lambda opt, *_: pickle.loads(pickle.dumps(opt)),
    "deepcopy": lambda opt, *_: copy.deepcopy(opt),
}
RESUMED: dict[str, tuple[Any, dict[str, Any]]] = {
    name: (make, {} if name == "AdamWeightDecay" else {"loss_scale": 3.0, "weight_decay": 0.1})
    for name, make in OPTIMIZERS.items()
}
RESUMED |= {
    "Adam-plain": (nn.Adam, {}),
    "Adam-locking": (nn.Adam, {"use_locking": True}),
    "Adam-skip": (nn.Adam, {"skip_nonfinite": True}),
    "Adam-float16-state": (nn.Adam, {"state_dtype": np.float16}),
    "Adam-bfloat16-state": (nn.Adam, {"state_dtype": BF16, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", RESUMED.values(), ids=RESUMED)
def test_resumes_bit_for_bit(case: Any, dtype: Any, way: Callable[..., Any], tmp_path: Any) -> None:
    make, options = case
    opt = trained(make, dtype, **options)
    with unchanged(opt):
        again = way(opt, partial(make, **options), tmp_path)
    assert not any(
        np.shares_memory(x, y) for x, y in zip(arrays_of(opt), arrays_of(again), strict=True)
    )
    follow(opt)
    follow(again)
    for p, q in zip(opt.parameters, again.parameters, strict=True):
        assert_same_bits(p.data, q.data, str(p.name))
    for (name, x), (other, y) in zip(
        opt.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert name == other
        assert_same_bits(x, y, name)


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_copies_know_their_schedules_and_rebinding(way: str) -> None:
    opt = nn.LazyAdam(parameters("a"), Halving(), weight_decay=0.1, loss_scale=2.0)
    opt([rows([1, 1])])
    again = WAYS[way](opt)
    assert again.get_lr() == opt.get_lr() == 0.25
    old, again.parameters[0].data = again.parameters[0].data, again.parameters[0].data.copy()
    with unchanged(old):
        again([rows([1, 2])])
    opt([rows([1, 2])])
    assert_same_bits(again.parameters[0].data, opt.parameters[0].data)


def test_row_tensor_and_parameter_pickle() -> None:
    gradient = pickle.loads(pickle.dumps(rows([1, 2])))
    assert_same_bits(gradient.to_dense(), rows([1, 2]).to_dense())
    (p,) = parameters("w")
    again = pickle.loads(pickle.dumps(p))
    assert (again.name, again.requires_grad) == ("w", True)
    assert_same_bits(again.data, p.data)
    assert not np.shares_memory(again.data, p.data)


STATE_NAMES = {
    "Adam": (("moment1", "moment2"), ()),
    "Adam-amsgrad": (("moment1", "moment2", "vhat"), ()),
    "LazyAdam": (("moment1", "moment2"), (1,)),
    "AdamOffload": (("moment1", "moment2"), (1,)),
    "AdamWeightDecay": (("adam_m", "adam_v"), None),
}


@pytest.mark.parametrize("name", STATE_NAMES)
def test_state_names_are_published_ones(name: str) -> None:
    roles, power_shape = STATE_NAMES[name]
    opt = OPTIMIZERS[name](parameters("a", "b"))
    expected = {f"{role}.{p}" for role in (*roles, "step") for p in "ab"}
    expected |= {"global_step", "learning_rate"}
    powers = {"beta1_power", "beta2_power"} if power_shape is not None else set()
    state = opt.state_dict()
    assert set(state) == expected | powers
    assert (state["global_step"].dtype, state["global_step"].shape) == (np.int32, (1,))
    opt([ones(4, 3), ones(4, 3)])
    after = opt.state_dict()
    for power, beta in zip(sorted(powers), (0.9, 0.999), strict=False):
        assert_same_bits(state[power], np.ones(power_shape, np.float32))
        assert_same_bits(after[power], np.full(power_shape, beta, np.float32))


def test_vhat_is_there_with_amsgrad_alone() -> None:
    # A KeyError would break hasattr, getattr with a default and every inspection.
    assert not hasattr(nn.Adam([ones(2)]), "vhat")
    opt = nn.Adam([ones(2)], use_amsgrad=True)
    opt([ones(2)])
    assert (opt.vhat[0] > 0).all()


def test_state_dict_is_a_copy() -> None:
    opt = nn.Adam(parameters("a"))
    state = opt.state_dict()
    with unchanged(opt):
        for array in state.values():
            array[...] = 7
    opt.load_state_dict(opt.state_dict())
    source = opt.state_dict()
    opt.load_state_dict(source)
    with unchanged(opt):
        for array in source.values():
            array[...] = 7


def test_state_keeps_dtypes() -> None:
    opt = nn.Adam([ones(2, dtype=d) for d in STORAGE_DTYPES])
    state = opt.state_dict()
    for k, dtype in enumerate(STORAGE_DTYPES):
        assert state[f"moment1.parameter_{k}"].dtype == dtype


def mindspore_state(opt: Any) -> dict[str, np.ndarray]:
    """What MindSpore would have written: no counts for each parameter, rates in float32."""
    state = {
        name: array for name, array in opt.state_dict().items() if not name.startswith("step.")
    }
    rates = {
        name: array.astype(np.float32)
        for name, array in state.items()
        if name.startswith("learning_rate")
    }
    return {**state, **rates}


@pytest.mark.parametrize("name", STATE_NAMES)
@pytest.mark.parametrize("rates", [True, False], ids=["float32 rates", "our rates"])
def test_state_as_mindspore_writes_it(name: str, rates: bool) -> None:
    """Every parameter has been updated global_step times."""
    make = OPTIMIZERS[name]
    opt = make(parameters("a", "b"), 0.5)
    for seed in range(3):
        opt(gradients_of(opt, seed))
    state = mindspore_state(opt)
    if not rates:
        state |= {n: a for n, a in opt.state_dict().items() if n.startswith("learning_rate")}
    again = make([nn.Parameter(p.data.copy(), p.name) for p in opt.parameters], 0.5)
    again.load_state_dict(state)
    for one in (opt, again):
        one(gradients_of(one, 9))
    for p, q in zip(opt.parameters, again.parameters, strict=True):
        assert_same_bits(p.data, q.data)
    assert again.state_dict()["step.a"].tolist() == [4]


def changed(name: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {**state, name: value}


MISMATCHES: dict[str, tuple[Callable[[dict[str, Any]], Any], Any, str]] = {
    "missing": (
        lambda s: {k: v for k, v in s.items() if k != "moment2.b"},
        KeyError,
        r"state does not fit this optimizer: .*missing \['moment2.b'\]",
    ),
    "one count missing": (
        lambda s: {k: v for k, v in s.items() if k != "step.b"},
        KeyError,
        "missing .'step.b'",
    ),
    "unknown": (changed("vhat.a", ones(4, 3)), KeyError, r"unknown \['vhat.a'\]"),
    "empty": (lambda _: {}, KeyError, "does not fit this optimizer"),
    "dtype": (
        changed("moment2.b", ones(4, 3, dtype=np.float64)),
        TypeError,
        "'moment2.b' has a wrong dtype",
    ),
    "shape": (changed("moment2.b", ones(3, 4)), ValueError, "'moment2.b' has a wrong shape"),
    "flat": (changed("moment2.b", ones(12)), ValueError, "'moment2.b' has a wrong shape"),
    "kind": (changed("moment2.b", None), TypeError, "'moment2.b' is no array"),
    "other beta1": (
        changed("beta1_power", np.float32(0.5)),
        ValueError,
        "'beta1_power' is of other options",
    ),
    "other beta2": (
        changed("beta2_power", np.float32(0.5)),
        ValueError,
        "'beta2_power' is of other options",
    ),
    "step dtype": (
        changed("global_step", np.array([1], np.int64)),
        TypeError,
        "'global_step' has a wrong dtype",
    ),
    "step empty": (
        changed("global_step", np.array([], np.int32)),
        ValueError,
        "'global_step' has a wrong shape",
    ),
    "step kind": (changed("global_step", "two"), TypeError, "'global_step'"),
    "step negative": (
        changed("global_step", np.array([-2], np.int32)),
        ValueError,
        "'global_step'",
    ),
    "rate lengths": (
        changed("learning_rate", np.array([0.1, 0.1])),
        ValueError,
        "'learning_rate' has a wrong shape",
    ),
    "no mapping": (lambda s: list(s), TypeError, "state"),
}


@pytest.mark.parametrize("case", MISMATCHES.values(), ids=MISMATCHES)
def test_state_that_does_not_fit(case: tuple[Any, Any, str]) -> None:
    change, error, text = case
    opt, other = nn.Adam(parameters("a", "b")), nn.Adam(parameters("a", "b"))
    other(gradients_of(other, 1))
    with refused(error, text, opt):
        opt.load_state_dict(change(other.state_dict()))


@pytest.mark.parametrize("value", [np.nan, -0.5, np.inf, 1e39])
def test_a_loaded_rate_is_checked(value: float) -> None:
    opt = nn.Adam(parameters("a"))
    state = changed("learning_rate", np.array(value))(opt.state_dict())
    with refused(ValueError, "'learning_rate' is out of range", opt):
        opt.load_state_dict(state)


@pytest.mark.parametrize("value", [-1, 2**31, 2**63 - 1])
def test_a_loaded_count_is_checked(value: int) -> None:
    """Beyond the steps that there can be it would overflow."""
    opt = nn.Adam(parameters("a"))
    state = changed("step.a", np.array([value]))(opt.state_dict())
    expected = f"at least 0, at most 2147483647, got {value}"
    with refused(ValueError, f"'step.a' is out of range: expected {expected}", opt):
        opt.load_state_dict(state)


def test_a_loaded_step_of_an_own_optimizer_is_checked() -> None:
    class Own(nn.Optimizer):
        def construct(self, gradients: Any) -> bool:
            return bool(gradients)

    opt = Own(0.1, parameters("a"))
    state = changed("global_step", np.array([-5], np.int32))(opt.state_dict())
    with refused(ValueError, "'global_step' is out of range: expected at least 0", opt):
        opt.load_state_dict(state)


def test_unpickled_from_read_only_buffers() -> None:
    """Protocol 5 hands over arrays in foreign memory, which must not be written."""
    opt = trained(nn.Adam, np.float32)
    buffers: list[Any] = []
    data = pickle.dumps(opt, protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    kept = [bytes(bytearray(b)) for b in frozen]
    again = pickle.loads(data, buffers=frozen)
    follow(opt)
    follow(again)
    assert frozen == kept
    for p, q in zip(opt.parameters, again.parameters, strict=True):
        assert_same_bits(p.data, q.data)


def test_a_state_that_was_made_read_only() -> None:
    opt = nn.Momentum([np.ones(3, np.float32)], 0.1, 0.9)
    g = (np.ones(3, np.float32),)
    opt(g)
    opt.moments[0].flags.writeable = False
    with refused(ValueError, "a state of 'parameter_0' is read-only", opt):
        opt(g)
    opt.moments[0].flags.writeable = True
    opt(g)
    assert opt.global_step == 2


def test_no_state_can_be_cut_off_in_place():
    """The kernels would write beyond it."""
    opt = nn.Adam([np.ones(6, np.float32)])
    opt((np.ones(6, np.float32),))
    with pytest.raises(ValueError, match="does not own its data"):
        opt._states["moment1"][0].resize(2, refcheck=False)
    assert opt.global_step == 1


# Counts


def test_global_step_is_copied_when_it_is_assigned():
    opt = nn.Adam([np.ones(2, np.float32)])
    given = np.array([5], np.int32)
    opt.global_step = given
    opt((np.ones(2, np.float32),))
    assert given.tolist() == [5]
    assert opt.global_step.tolist() == [6]
    lars = nn.LARS(opt)
    lars.global_step = given
    assert opt.global_step.tolist() == [5]
    for bad, error in ((3, TypeError), (np.array([3]), TypeError), (-given, ValueError)):
        with pytest.raises(error, match="'global_step'"):
            opt.global_step = bad
    assert opt.global_step.tolist() == [5]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("cls", [nn.Adam, nn.SGD, "custom"])
def test_the_last_step_there_is(cls, wrapped):
    """The published count is an int32."""

    class Descent(nn.Optimizer):
        def construct(self, gradients):
            for p, g in zip(self.parameters, gradients, strict=True):
                p.data -= g
            return True

    w = np.zeros(2, np.float32)
    opt = Descent(0.1, [w]) if cls == "custom" else cls([w], 0.1)
    stepped = nn.LARS(opt) if wrapped else opt
    opt.global_step[0] = 2**31 - 2
    stepped((np.ones(2, np.float32),))
    assert opt.global_step[0] == 2**31 - 1
    with unchanged(opt), pytest.raises(OverflowError, match="global_step is at its end: expected"):
        stepped((np.ones(2, np.float32),))
    assert opt.state_dict()["global_step"] == 2**31 - 1
