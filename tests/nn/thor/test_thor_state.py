"""When THOR computes its factors, and how its state resumes."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from fusestep import nn
from helpers import assert_same_arrays, assert_same_bits
from optimizers import assert_same_run
from thor_nets import BASE, Net, Pass, data, make, train

pytest.importorskip("scipy", reason="the factors are inverted by scipy's LAPACK")

# ------------------------------------------------------------------- When factors are computed


def test_refreshes_every_frequency_steps() -> None:
    net = Net()
    opt = make(net, frequency=3, learning_rate=0.01)
    expected = []
    for t in range(7):
        wanted = t % 3 == 0
        assert all(layer.is_capturing == wanted for layer in net.layers), t
        before = opt.state_dict()
        Pass(t).step(net, opt)
        after = opt.state_dict()
        expected.append(int(after["refreshes.fc.weight"][0]))
        changed = before["matrix_a_inv.fc.weight"] != after["matrix_a_inv.fc.weight"]
        assert bool(changed.any()) == wanted
    assert expected == [1, 1, 1, 2, 2, 2, 3]


def test_between_refreshes_nothing_is_captured() -> None:
    net = Net()
    opt = make(net, frequency=4)
    train(opt, net, range(1))
    Pass(1).capture(net)
    assert not any(layer.has_captured for layer in net.layers)
    with pytest.raises(ValueError, match="ThorDense: inputs has a wrong shape"):
        net.fc.capture(np.zeros((2, 9), np.float32), np.zeros((2, 5), np.float32))


def test_a_refresh_can_be_requested() -> None:
    net = Net()
    opt = make(net, frequency=100, learning_rate=0.01)
    train(opt, net, range(2))
    assert opt.state_dict()["refreshes.fc.weight"] == 1
    opt.request_refresh()
    assert net.fc.is_capturing
    train(opt, net, range(2, 4))
    assert opt.state_dict()["refreshes.fc.weight"] == 2


def test_captured_can_be_cleared() -> None:
    net, others = Net(), Net()
    opt, other = make(net), make(others)
    Pass(9).capture(net)
    opt.clear_captured()
    train(opt, net, range(1))
    train(other, others, range(1))
    assert_same_arrays(data(opt), data(other))


def test_a_parameter_without_a_gradient_is_skipped() -> None:
    net = Net()
    opt = make(net)
    gradients = list(Pass(0).gradients)
    gradients[3] = None
    before = net.fc.weight.data.copy()
    Pass(0).capture(net)
    opt(tuple(gradients))
    assert_same_bits(net.fc.weight.data, before)
    assert opt.state_dict()["refreshes.fc.weight"] == 0
    assert opt.state_dict()["step.fc.weight"] == 0
    assert net.fc.is_capturing  # its factors are due until they are there
    assert not net.conv.is_capturing
    train(opt, net, range(1, 2))
    assert opt.state_dict()["refreshes.fc.weight"] == 1


def test_frozen_parameters_are_left_alone() -> None:
    weight = nn.Parameter(np.ones((2, 3), np.float32), "frozen", requires_grad=False)
    net = {"a": nn.ThorDense(weight, np.zeros(2, np.float32)), "b": nn.ThorDense(np.ones((1, 2)))}
    assert [p.name for p in make(net).parameters] == ["a.bias", "b.weight"]
    assert not net["a"].is_capturing


# ------------------------------------------------------------------------------------------ State


@pytest.mark.parametrize("compat", [None, "mindspore"])
@pytest.mark.parametrize("done", [2, 3])
def test_resumes_bit_for_bit(done: int, compat: str | None) -> None:
    options = {**BASE, "frequency": 3, "compat": compat, "damping": [0.3] * 4 + [0.2] * 4}
    net = Net()
    opt = make(net, **options)
    train(opt, net, range(done))
    saved, weights = opt.state_dict(), data(opt)
    train(opt, net, range(done, 7))

    resumed_net = Net(seed=5)
    resumed = make(resumed_net, **options)
    for p, w in zip(resumed.parameters, weights, strict=True):
        p.data[...] = w
    resumed.load_state_dict(saved)
    assert resumed_net.fc.is_capturing == (done % 3 == 0)
    train(resumed, resumed_net, range(done, 7))
    assert_same_run(resumed, opt)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on_alike(copied: Any) -> None:
    net = Net()
    opt = make(net, **BASE)
    train(opt, net, range(3))
    other_net, other = copied((net, opt))
    train(opt, net, range(3, 6))
    train(other, other_net, range(3, 6))
    assert_same_arrays(data(opt), data(other))


def test_states_have_mindspores_names() -> None:
    net = Net()
    state = make(net).state_dict()
    assert {n for n in state if n.startswith("moments.")} == {
        f"moments.{p.name}" for layer in net.layers for p in layer.parameters
    } | {"moments.scale"}
    assert {"momentum", "global_step", "learning_rate"} <= state.keys()
    assert state["matrix_a_inv.conv.weight"].shape == (18, 18)
    assert state["matrix_g_inv.conv.weight"].shape == (3, 3)
    assert state["matrix_a_inv.emb.embedding_table"].shape == (7,)
    opt = make(Net(), block_size=2)
    assert opt.state_dict()["matrix_a_inv.fc.weight"].shape == (4, 2)
    with pytest.raises(ValueError, match=r"thor: state .matrix_._inv.* has a wrong shape"):
        opt.load_state_dict(state)
