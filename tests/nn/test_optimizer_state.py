"""States of optimizers: saved, loaded, copied, refused; how steps are counted."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fusestep import nn

from adam_family import Descent, Halving, gradients_of, ones, parameters, rows
from helpers import assert_same_arrays, assert_same_bits, refused, unchanged

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
    opt = nn.Adam(parameters("a", "b"))
    opt(gradients_of(opt, 0))
    buffers: list[Any] = []
    data = pickle.dumps(opt, protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    kept = [bytes(bytearray(b)) for b in frozen]
    again = pickle.loads(data, buffers=frozen)
    for step in (1, 2):
        for one in (opt, again):
            one(gradients_of(one, step))
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
