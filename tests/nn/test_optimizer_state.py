"""States of optimizers: saved, loaded, copied, refused; how steps are counted."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fusestep import nn

from adam_family import OPTIMIZERS, Descent, Halving, gradients_of, ones, parameters, rows
from helpers import STORAGE_DTYPES, assert_same_arrays, assert_same_bits, refused, unchanged


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


WAYS: dict[str, Callable[..., Any]] = {
    "pickle": lambda opt: pickle.loads(pickle.dumps(opt)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", WAYS)
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


def test_a_loaded_step_of_an_own_optimizer_is_checked() -> None:
    class Own(nn.Optimizer):
        def construct(self, gradients: Any) -> bool:
            return bool(gradients)

    opt = Own(0.1, parameters("a"))
    state = {**opt.state_dict(), "global_step": np.array([-5], np.int32)}
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
    assert_same_arrays(opt.parameters, again.parameters)


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

    w = np.zeros(2, np.float32)
    opt = Descent(0.1, [w]) if cls == "custom" else cls([w], 0.1)
    stepped = nn.LARS(opt) if wrapped else opt
    opt.global_step[0] = 2**31 - 2
    stepped((np.ones(2, np.float32),))
    assert opt.global_step[0] == 2**31 - 1
    with unchanged(opt), pytest.raises(OverflowError, match="global_step is at its end: expected"):
        stepped((np.ones(2, np.float32),))
    assert opt.state_dict()["global_step"] == 2**31 - 1
