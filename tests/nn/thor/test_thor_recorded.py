"""THOR with ``compat="mindspore"`` against runs of MindSpore, and against its layers' formulas."""

from typing import Any

import numpy as np
import pytest
import recorded
import thor_nets
from fusestep import nn
from recorded import Case, assert_close_recorded
from thor_nets import random

pytest.importorskip("scipy", reason="the factors are inverted by scipy's LAPACK")

CASES = recorded.all_cases("nn_thor")
# Elements that a step takes from 0.06 to 3e-4 hold the roundings of products of up to 130 terms,
# which MindSpore and the BLAS of this test add up in different orders: against the same steps in
# float64, either is off by 1.2e-7 at most in weights of up to 1.7.
ROUNDINGS = 4.0

LAYERS = {
    "emb": lambda p: nn.ThorEmbedding(p["emb.embedding_table"]),
    "fc1": lambda p: nn.ThorDense(p["fc1.weight"], p["fc1.bias"]),
    "ln": lambda p: nn.ThorLayerNorm(p["ln.gamma"], p["ln.beta"]),
    "fc2": lambda p: nn.ThorDense(p["fc2.weight"]),
    "conv": lambda p: nn.ThorConv2d(p["conv.weight"], padding="same"),
    "fc3": lambda p: nn.ThorDense(p["fc3.weight"], p["fc3.bias"]),
}


def build(case: Case, **changed: Any) -> tuple[Any, dict[str, Any]]:
    hyper = dict(case.hyper)
    assert hyper.pop("split_dim") == 128
    hyper.pop("second_order_steps")
    names = [name for name, _ in case.meta["params"]]
    parameters = {n: nn.Parameter(case.initial[f"p{i}"].copy(), n) for i, n in enumerate(names)}
    net = {name: make(parameters) for name, make in LAYERS.items()}
    opt = nn.thor(net, **{**hyper, "compat": "mindspore", **changed})
    assert [p.name for p in opt.parameters] == names
    return opt, net


def factors(net: dict[str, Any], names: list[str], step: recorded.Step) -> None:
    """Hand in the covariances that MindSpore's layers had stored before the step."""
    for entry, a in step.inputs.items():
        if entry.startswith("A"):
            i = entry[1:]
            normalizers = [float(step.inputs.get(f"{n}{i}", 1.0)) for n in ("an", "gn")]
            layer = net[names[int(i)].partition(".")[0]]
            layer.capture_covariances(a, step.inputs[f"G{i}"], *normalizers)
    # With compat="mindspore" a layer normalization has no use for this.
    net["ln"].capture(np.eye(5, dtype=np.float32), np.eye(5, dtype=np.float32))


def compare(case: Case, **changed: Any) -> None:
    opt, net = build(case, **changed)
    names = [str(p.name) for p in opt.parameters]
    reached = [np.abs(p.data) for p in opt.parameters]
    for t, (step, is_second) in enumerate(
        zip(case.steps, case.hyper["second_order_steps"], strict=True)
    ):
        assert is_second == any(entry.startswith("A") for entry in step.inputs)
        if is_second:
            opt.request_refresh()
            factors(net, names, step)
        assert opt(tuple(step.inputs[f"g{i}"] for i in range(len(names)))) == (True,) * len(names)
        for i, p in enumerate(opt.parameters):
            label = f"{p.name} after step {t + 1}"
            allowed = ROUNDINGS * reached[i]
            assert_close_recorded(p.data, step.outputs[f"p{i}"], np.float32, label, allowed)
            reached[i] = np.maximum(reached[i], np.abs(p.data))
    assert opt.state_dict()["refreshes.fc1.weight"] == sum(case.hyper["second_order_steps"])


def test_every_case_is_compared() -> None:
    assert {name.partition("/")[2] for name in CASES} == {"plain", "wd_ls", "clip"}
    assert all(case.api == "nn.thor" and case.meta["leaf_patched"] for case in CASES.values())


@pytest.mark.parametrize("name", CASES)
def test_recorded(name: str) -> None:
    compare(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_the_default_is_something_else(name: str) -> None:
    """What the slips of MindSpore change is far beyond the tolerance."""
    with pytest.raises(AssertionError, match="elements are off"):
        compare(CASES[name], compat=None)


# ----------------------------------------------- What MindSpore's layers store, from its formulas


def stored(layer: Any, x: Any, d: Any) -> tuple[np.ndarray, np.ndarray]:
    """The full covariances that a layer has captured (blocks of 128 hold all of these)."""
    layer.configure("layer", 128, is_compatible=True)
    layer.capture(np.ones_like(x), np.ones_like(d))
    layer.capture(x, d)  # the last one only
    a, a_weight, g, g_weight = layer.covariances
    return a / a_weight, g / g_weight


def test_dense_layers_of_mindspore() -> None:
    x, d = random(0).standard_normal((2, 9, 4))
    a, g = stored(nn.ThorDense(np.zeros((4, 4))), x, d)
    np.testing.assert_allclose(a, x.T @ x / 4)
    np.testing.assert_allclose(g, d.T @ d / 9)


def test_embeddings_of_mindspore() -> None:
    rng = random(1)
    ids, d = rng.integers(0, 5, 9), rng.standard_normal((9, 3))
    a, g = stored(nn.ThorEmbedding(np.zeros((5, 3))), ids, d)
    np.testing.assert_allclose(a, np.bincount(ids, minlength=5))
    np.testing.assert_allclose(g, d.T @ d / 9)


@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_of_mindspore(stride: int) -> None:
    """Patches of the mean image under "same" padding and no dilation, whatever the layer has."""
    rng = random(2)
    layer = nn.ThorConv2d(np.zeros((3, 2, 3, 3)), stride=stride, padding="valid", dilation=2)
    x, n_out = rng.standard_normal((5, 2, 8, 8)), (8 - 5) // stride + 1
    d = rng.standard_normal((5, 3, n_out, n_out))
    a, g = stored(layer, x, d)
    before = (1, 1) if stride == 1 else (0, 0)
    seen = thor_nets.patches(
        x, (3, 3), (stride, stride), before, (1, 1), (1, 1)
    ).mean(axis=0)  # fmt: skip
    positions = (8 // stride) ** 2
    p = seen.reshape(positions, -1)
    np.testing.assert_allclose(a, p.T @ p / positions, atol=1e-12)
    s = d.mean(axis=0).reshape(3, -1)
    np.testing.assert_allclose(g, s @ s.T / n_out**2)
    assert layer.normalizers == (positions, n_out**2)
