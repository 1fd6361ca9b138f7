"""Each optimizer in MindSpore beside MindSpore's own: losses, parameters and states."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mindspore.nn", reason="MindSpore is not installed")

import mindspore
from mindspore import Tensor, nn
from fusestep import nn as ours
from fusestep.nn import mindspore as fused
from fusestep.nn.mindspore.binding import host_array
from mindspore_training import STEPS, dense_net, losses, parameter, table_net, trained

pytestmark = pytest.mark.usefixtures("synchronous")
DYNAMIC = nn.CosineDecayLR(0.01, 0.1, STEPS)
CASES: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{}, {"t0": 3.0, "lambd": 0.1, "weight_decay": 0.1}],
    "AdaFactor": [
        {}, {"compression": True, "warmup_init": True},
        {"learning_rate": 0.05, "relative_step": False, "beta1": None, "weight_decay": 0.1},
        {"learning_rate": [0.05] * STEPS, "relative_step": False, "scale_parameter": False}],
    "AdaMax": [{}, {"beta1": 0.5, "loss_scale": 3.0, "weight_decay": 0.1}],
    "Adadelta": [{}, {"rho": 0.5, "epsilon": 0.01}],
    "Adagrad": [{}, {"accum": 1.0, "learning_rate": 0.1}],
    "Adam": [
        {}, {"learning_rate": 0.05, "loss_scale": 3.0, "weight_decay": 0.1},
        {"use_amsgrad": True}, {"use_lazy": True}, {"use_offload": True}, {"use_nesterov": True},
        {"learning_rate": DYNAMIC, "weight_decay": DYNAMIC},
        {"learning_rate": [0.01 * k for k in range(STEPS)]},
        {"learning_rate": Tensor(0.05, mindspore.float32)}],
    "AdamOffload": [{}],
    "AdamWeightDecay": [{"weight_decay": 0.1}, {"learning_rate": DYNAMIC, "weight_decay": DYNAMIC}],
    "FTRL": [{"learning_rate": 0.1}, {"lr_power": -0.3, "weight_decay": 0.1}],
    "LazyAdam": [{"learning_rate": 0.05}],
    "Momentum": [{"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.1}],
    "ProximalAdagrad": [{"learning_rate": 0.1, "l1": 0.01, "l2": 0.01}],
    "RMSProp": [{"learning_rate": 0.01}, {"centered": True, "momentum": 0.5}],
    "Rprop": [{"learning_rate": 0.01}],
    "SGD": [{}, {"momentum": 0.9, "dampening": 0.1}, {"momentum": 0.9, "nesterov": True}],
}  # fmt: skip
EVERY = [
    (name, cases[0], net, STEPS) for name, cases in CASES.items() for net in (dense_net, table_net)
]
EVERY += [(name, options, dense_net, 10) for name, cases in CASES.items() for options in cases[1:]]
NO_STEP = {"LARS", "Lamb"}  # MindSpore's have no kernels on a CPU
ADDED: dict[str, list[dict[str, Any]]] = {  # MindSpore has none
    "Adan": [{}], "Lion": [{"weight_decay": 0.5}],
    "Prodigy": [{"learning_rate": 0.5, "d0": 0.125}, {"beta1": 0.0, "use_bias_correction": True}],
    "RowWiseAdagrad": [{"accum": 0.5, "weight_decay": 0.5}], "RowWiseAdam": [{"clipnorm": 0.5}],
}  # fmt: skip


def test_every_class_is_compared() -> None:
    assert CASES.keys() | NO_STEP | ADDED.keys() == {*fused.__all__}


@pytest.mark.parametrize(("name", "options", "make_net", "steps"), EVERY)
def test_a_training_is_that_of_mindspore(name: str, options, make_net, steps: int) -> None:
    expected, states = trained(make_net, lambda ps: getattr(nn, name)(ps, **options), steps)
    found, own = trained(make_net, lambda ps: getattr(fused, name)(ps, **options), steps)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert len({*expected}) == steps and own.keys() == states.keys()
    for label, values in states.items():
        # Without momentum MindSpore writes it and does not read it.
        if not (name == "RMSProp" and "momentum" not in options and label.startswith("moment.")):
            bound = 2e-5 * max(1e-3, float(np.abs(values).max(initial=0)))
            np.testing.assert_allclose(own[label], values, rtol=2e-4, atol=bound, err_msg=label)


def in_groups(module: Any, parameters: Any, rate: Any) -> Any:
    first, others = parameters[:1], parameters[1:]
    decayed = {"params": first, "lr": rate, "weight_decay": 0.1}
    groups = [decayed, {"params": others}, {"order_params": parameters[::-1]}]
    return module.Momentum(groups, learning_rate=0.02, momentum=0.9, weight_decay=0.01)


@pytest.mark.parametrize("rate", [0.1, [0.01 * k for k in range(STEPS)], DYNAMIC])
def test_groups_are_those_of_mindspore(rate: Any) -> None:
    expected, states = trained(dense_net, lambda ps: in_groups(nn, ps, rate), 10)
    found, own = trained(dense_net, lambda ps: in_groups(fused, ps, rate), 10)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert own.keys() == states.keys()


def test_each_group_has_its_options() -> None:
    """As outside of MindSpore; which centralizes gradients of other shapes than MindSpore."""
    rng, names = np.random.default_rng(0), "abcdefgh"
    weights = [parameter(rng.standard_normal((3, 4)), name) for name in names]
    copies = [ours.Parameter(w.asnumpy().copy(), w.name) for w in weights]

    def make(module: Any, ps: Any) -> Any:
        groups = [
            {"params": [ps[0]], "lr": 0.5, "weight_decay": 0.25},
            {"params": [ps[1]], "lr": 0.125, "weight_decay": 0.25},
            {"params": [ps[2]], "lr": 0.5, "weight_decay": 0.5},
            {"params": [ps[3]], "lr": 0.5, "weight_decay": 0.25, "grad_centralization": True},
            {"params": [ps[4]], "weight_decay": lambda step: 0.1 * step},
            {"params": [ps[5]], "lr": [0.5, 0.25, 0.125], "grad_centralization": True},
            {"params": [ps[6]]}, {"params": [ps[7]], "grad_centralization": True},
            {"order_params": ps[::-1]},
        ]  # fmt: skip
        return module.Momentum(groups, 0.25, momentum=0.5, weight_decay=0.125, loss_scale=4.0)

    optimizer, own = make(fused, weights), make(ours, copies)
    for _ in range(3):
        arrays = [rng.standard_normal((3, 4)).astype(np.float32) for _ in names]
        optimizer(tuple(map(Tensor, arrays)))
        own(arrays)
        for w, copy in zip(weights, copies, strict=True):
            np.testing.assert_array_equal(w.asnumpy(), copy.data, err_msg=w.name)


@pytest.mark.parametrize("in_group", [False, True])
@pytest.mark.parametrize("rate", [
    ours.CosineDecayLR(0.01, 0.1, STEPS), lambda s: 0.055 + 0.045 * np.cos(np.pi * s / STEPS),
])  # fmt: skip
def test_schedules_of_this_package_are_taken(rate: Any, in_group: bool) -> None:
    def run(rate: Any) -> list[float]:
        net = dense_net()
        parameters = net.trainable_params()
        options = {"lr": rate, "weight_decay": rate}
        given = [{"params": parameters, **options}] if in_group else parameters
        more = {} if in_group else {"learning_rate": rate, "weight_decay": rate}
        optimizer = fused.Adam(given, **more)
        found = losses(net, optimizer, 0, 8)
        next_rate = optimizer.get_lr()[0] if in_group else optimizer.get_lr()
        expected = 0.055 + 0.045 * np.cos(np.pi * 8 / STEPS)
        np.testing.assert_allclose(next_rate.asnumpy(), expected, rtol=1e-5)
        return found

    np.testing.assert_allclose(run(rate), run(DYNAMIC), rtol=1e-4)


@pytest.mark.parametrize("name", sorted(NO_STEP))
def test_what_mindspore_cannot_do_on_a_cpu_is_the_step_of_this_package(name: str) -> None:
    def make(module: Any, parameters: Any) -> Any:
        if name == "Lamb":
            return module.Lamb(parameters, learning_rate=0.1, weight_decay=0.1)
        inner = module.Momentum(parameters, learning_rate=0.1, momentum=0.9, weight_decay=0.1)
        return module.LARS(inner, coefficient=0.1)

    net = dense_net()
    weights = net.trainable_params()
    copies = [ours.Parameter(w.asnumpy().copy(), w.name) for w in weights]
    optimizer, own = make(fused, weights), make(ours, copies)
    for k in range(4):
        arrays = [np.full(w.shape, 0.1 * k - 0.2, np.float32) for w in weights]
        assert optimizer(tuple(map(Tensor, arrays))) == own(arrays)
    for w, copy in zip(weights, copies, strict=True):
        np.testing.assert_array_equal(w.asnumpy(), copy.data)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name in ADDED for options in ADDED[name]]
)
def test_what_mindspore_does_not_have(name: str, options: Any, dtype: str, tmp_path: Path) -> None:
    """Parameters, states and their names are those outside of MindSpore; also after a file."""
    options = {"learning_rate": 0.25, **options}
    rng = np.random.default_rng(0)
    kind, shapes = getattr(mindspore, dtype), {"w": (3, 4), "gamma": (5,)}
    starts = {label: rng.standard_normal(shape) for label, shape in shapes.items()}

    def make() -> Any:
        weights = [parameter(values, label, kind) for label, values in starts.items()]
        return getattr(fused, name)(weights, **options)

    optimizer = make()
    copies = [ours.Parameter(host_array(w).copy(), w.name) for w in optimizer.parameters]
    own = getattr(ours, name)(copies, **options)
    for k in range(4):
        if k == 2:
            mindspore.save_checkpoint(optimizer, str(tmp_path / "kept.ckpt"))
            kept, optimizer = mindspore.load_checkpoint(str(tmp_path / "kept.ckpt")), make()
            assert mindspore.load_param_into_net(optimizer, kept) == ([], [])
        values = [rng.standard_normal(shape).astype(np.float32) for shape in shapes.values()]
        gradients = tuple(Tensor(array).astype(kind) for array in values)
        assert optimizer(gradients) == own([host_array(g).copy() for g in gradients])
    found = {p.name: host_array(p) for p in optimizer.get_parameters()}
    expected = {n: a for n, a in own.state_dict().items() if not n.startswith("step.")}
    expected |= {p.name: p.data for p in own.parameters}
    assert found.keys() == expected.keys()
    for label, array in expected.items():
        np.testing.assert_array_equal(found[label], array, err_msg=label)
        assert found[label].dtype == array.dtype or label == "learning_rate"


def published(kind: Any) -> Any:
    """The constructor of a class of MindSpore, under its decorators."""
    function = inspect.unwrap(kind.__init__)
    while function.__code__.co_varnames[1] not in ("params", "optimizer"):
        cells = [cell.cell_contents for cell in function.__closure__]
        function = inspect.unwrap(next(found for found in cells if inspect.isfunction(found)))
    return function


def defaults(function: Any) -> dict[str, Any]:
    """Its positional arguments; LARS has a filter of its own, equal but another function."""
    found = inspect.signature(function).parameters.values()
    return {
        p.name: p.default
        for p in found
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in ("self", "lars_filter")
    }


@pytest.mark.parametrize("name", fused.__all__)
def test_signatures_are_those_of_mindspore(name: str) -> None:
    kind, known = getattr(fused, name), getattr(ours if name in ADDED else nn, name)
    assert issubclass(kind, nn.Optimizer if name in ADDED else known)
    expected = defaults(known if name in ADDED else published(known))
    assert [*defaults(kind).items()] == [*expected.items()]


def test_other_names_are_mindspores() -> None:
    assert fused.Dense is nn.Dense and fused.thor is nn.thor
    assert {*dir(fused)} == {*dir(nn), *fused.__all__}
    with pytest.raises(AttributeError):
        fused.Nothing  # noqa: B018


def test_other_versions_are_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(mindspore, "__version__", "2.11.0")
    with pytest.raises(ImportError, match=r"needs MindSpore 2\.10, got 2\.11\.0"):
        importlib.reload(fused)
