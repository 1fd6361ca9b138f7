"""Everything that THOR refuses: one clear error, and nothing has changed."""

import sys
from typing import Any

import numpy as np
import pytest
from argument_kinds import KINDS
from fusestep import nn
from fusestep.nn.thor import factors as thor_factors
from helpers import refused, unchanged
from optimizers import assert_same_run
from thor_nets import BATCH, Net, Pass, train

pytest.importorskip("scipy", reason="the factors are inverted by scipy's LAPACK")

F32 = np.float32


def make(net: Any, **changed: Any) -> Any:
    options = {"learning_rate": 0.1, "damping": 0.1, "momentum": 0.9, "batch_size": BATCH}
    return nn.thor(net, **{**options, **changed})


TAKES = {
    "learning_rate": "rate", "damping": "damping", "momentum": "not negative",
    "weight_decay": "decay", "loss_scale": "loss scale", "batch_size": "count",
    "use_nesterov": "flag", "decay_filter": "filter", "enable_clip_grad": "flag",
    "frequency": "at least 2",
}  # fmt: skip
OTHERS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"damping": nn.CosineDecayLR}, TypeError, "damping is a class: expected an instance"),
    ({"split_indices": [1]}, ValueError, r"split_indices needs a communicator: .* got \[1\]"),
    ({"compat": "torch"}, ValueError, "compat is unknown: expected None or 'mindspore'"),
    ({"compat": "mindspore", "block_size": 4}, ValueError, "block_size is fixed by compat"),
    ({"block_size": 0}, ValueError, "block_size is out of range: expected at least 1"),
    ({"bad_factor": "ignore"}, ValueError, "bad_factor is unknown"),
    ({"dampening": 0.1}, TypeError, "argument 'dampening' is unknown.*did you mean 'damping'"),
]


@pytest.mark.parametrize("name", TAKES)
def test_arguments(name: str) -> None:
    for value, error, text in KINDS[TAKES[name]].refused(name):
        with pytest.raises(error, match=f"^thor: {text}"):
            make(Net(), **{name: value})


@pytest.mark.parametrize(("changed", "error", "text"), OTHERS, ids=str)
def test_arguments_of_other_kinds(
    changed: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"^thor: {text}"):
        make(Net(), **changed)


@pytest.mark.parametrize("net", [[], {}, [nn.Parameter(np.ones(2))], 3, None, object()])
def test_a_net_without_layers(net: Any) -> None:
    with pytest.raises(ValueError, match="thor: net declares no layers: expected a ThorDense"):
        make(net)


def test_layers_that_share_a_parameter() -> None:
    weight = nn.Parameter(np.ones((2, 2), F32))
    with pytest.raises(ValueError, match=r"thor: layer '1' shares a parameter: .* got '0'"):
        make([nn.ThorDense(weight), nn.ThorEmbedding(weight)])


RECORDS = [
    (lambda: nn.ThorDense(np.ones(3)), ValueError, r"ThorDense: weight has a wrong shape"),
    (lambda: nn.ThorDense(np.ones((0, 3))), ValueError, r"ThorDense: weight has a wrong shape"),
    (lambda: nn.ThorDense([[1.0]]), TypeError, "Parameter: data is no array"),
    (lambda: nn.ThorDense(np.ones((2, 3)), np.ones(3)), ValueError,
     r"ThorDense: bias has a wrong shape: expected \(2,\), got \(3,\)"),
    (lambda: nn.ThorConv2d(np.ones((2, 3))), ValueError, r"expected \(out, channels, kh, kw\)"),
    (lambda: nn.ThorConv2d(np.ones((2, 1, 1, 1)), groups=2), ValueError,
     "ThorConv2d: groups is not supported: expected 1, got 2; give weight and bias as plain"),
    (lambda: nn.ThorConv2d(np.ones((2, 1, 1, 1)), padding="full"), ValueError,
     "ThorConv2d: padding is unknown: expected an int, a pair, 'same' or 'valid', got 'full'"),
    (lambda: nn.ThorConv2d(np.ones((2, 1, 1, 1)), padding=-1), ValueError,
     "ThorConv2d: padding is out of range: expected at least 0, got -1"),
    (lambda: nn.ThorConv2d(np.ones((2, 1, 1, 1)), stride=0), ValueError, "stride is out of range"),
    (lambda: nn.ThorConv2d(np.ones((2, 1, 1, 1)), stride=1.0), TypeError, "an int or a pair"),
    (lambda: nn.ThorConv2d(np.ones((2, 1, 1, 1)), dilation=(1, 2, 3)), TypeError, "an int or a"),
    (lambda: nn.ThorEmbedding(np.ones((2, 1)), 2), ValueError, "padding_idx is out of range"),
    (lambda: nn.ThorEmbedding(np.ones((2, 1)), 0.0), TypeError, "padding_idx has a wrong type"),
    (lambda: nn.ThorLayerNorm(np.ones(())), ValueError, "ThorLayerNorm: weight has a wrong shape"),
    (lambda: nn.ThorLayerNorm(np.ones(2), np.ones(3)), ValueError, "bias has a wrong shape"),
    (lambda: nn.ThorLayerNorm(np.ones(2), eps=0.0), ValueError, "eps is out of range"),
    (lambda: nn.ThorLayerNorm(np.ones(2), eps=1), TypeError, "eps has a wrong type"),
]  # fmt: skip


@pytest.mark.parametrize(("make_record", "error", "text"), RECORDS)
def test_records(make_record: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make_record()


CAPTURES = [
    (2, np.ones((3, 5), F32), np.ones((3, 5), F32), ValueError, r"inputs has a wrong .*\(..., 4\)"),
    (2, np.ones((3, 4), F32), np.ones((2, 5), F32), ValueError, "output_gradients has a wrong sh"),
    (2, np.ones((3, 4), int), np.ones((3, 5), F32), TypeError, "inputs has a wrong dtype"),
    (2, "x", np.ones((3, 5), F32), TypeError, "ThorDense: inputs is no array"),
    (1, np.ones((2, 2, 5), F32), np.ones((2, 3, 3, 3), F32), ValueError, r"\(N, 2, H, W\)"),
    (1, np.ones((2, 2, 5, 5), F32), np.ones((2, 3, 5, 5), F32), ValueError, r"\(2, 3, 3, 3\)"),
    (1, np.ones((2, 2, 0, 5), F32), np.ones((2, 3, 3, 3), F32), ValueError, "smaller than the ker"),
    (0, np.ones(3, F32), np.ones((3, 4), F32), TypeError, "int32 or int64 ids"),
    (0, np.array([0, 7]), np.ones((2, 4), F32), IndexError, "0 <= id < 7, got 7"),
    (0, np.array([0, -1]), np.ones((2, 4), F32), IndexError, "0 <= id < 7, got -1"),
    (0, np.array([0, 1]), np.ones((2, 5), F32), ValueError, r"expected \(2, 4\), got \(2, 5\)"),
    (3, np.ones((2, 4), F32), np.ones((2, 4), F32), ValueError, r"expected \(..., 5,\), got"),
    (3, np.ones((2, 5), F32), np.ones((3, 5), F32), ValueError, "output_gradients has a wrong sh"),
]


@pytest.mark.parametrize(("layer", "x", "d", "error", "text"), CAPTURES)
def test_captures(layer: int, x: Any, d: Any, error: type[Exception], text: str) -> None:
    record = Net().layers[layer]
    with pytest.raises(error, match=text):
        record.capture(x, d)
    assert not record.has_captured


def test_covariances_of_wrong_kinds() -> None:
    net = Net()
    with pytest.raises(ValueError, match=r"ThorDense: a has a wrong shape: expected \(4, 4\)"):
        net.fc.capture_covariances(np.ones((3, 3)), np.ones((5, 5)))
    with pytest.raises(ValueError, match=r"ThorEmbedding: a has a wrong shape: expected \(7,\)"):
        net.emb.capture_covariances(np.ones((7, 7)), np.ones((4, 4)))
    with pytest.raises(TypeError, match="ThorDense: g has a wrong dtype"):
        net.fc.capture_covariances(np.ones((4, 4)), np.ones((5, 5), int))
    with pytest.raises(ValueError, match="ThorConv2d: a_normalizer is out of range"):
        net.conv.capture_covariances(np.ones((18, 18)), np.ones((3, 3)), 0.0)
    with pytest.raises(TypeError, match="ThorLayerNorm: capture_covariances is not for this"):
        net.ln.capture_covariances(np.ones(5), np.ones(5))


# ----------------------------------------------------------------------------------------- Steps


def test_a_layer_that_captured_nothing() -> None:
    net = Net()
    opt = make(net)
    text = r"thor: layer 'emb' has captured nothing: expected capture\(.*\) before step 0"
    with refused(RuntimeError, text, opt):
        opt(Pass(0).gradients)


GRADIENTS = [
    (3, np.ones((5, 5), F32), ValueError, "thor: gradient of 'fc.weight' has a wrong shape"),
    (3, np.ones((5, 4), int), TypeError, "thor: gradient of 'fc.weight' has a wrong dtype"),
    (4, np.ones(4, F32), ValueError, "thor: gradient of 'fc.bias' has a wrong shape"),
    (0, nn.RowTensor(np.array([1]), np.ones((1, 4), F32), (7, 4)), ValueError,
     "thor: gradient of 'emb.embedding_table' is row-sparse: expected a dense one: THOR"),
    (7, nn.RowTensor(np.array([1]), np.ones(1, F32), (3,)), ValueError,
     "thor: gradient of 'scale' is row-sparse: expected a dense one"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "gradient", "error", "text"), GRADIENTS)
def test_gradients(place: int, gradient: Any, error: type[Exception], text: str) -> None:
    """A step that is refused leaves everything, what was captured included."""
    net, others = Net(), Net()
    opt, other = make(net), make(others)
    first = Pass(0)
    first.capture(net)
    given = list(first.gradients)
    given[place] = gradient
    with refused(error, text, opt):
        opt(tuple(given))
    opt(first.gradients)
    first.step(others, other)
    assert_same_run(opt, other)


@pytest.mark.parametrize("name", ["learning_rate", "damping"])
def test_a_list_that_is_used_up(name: str) -> None:
    net = Net()
    opt = make(net, **{name: [0.1, 0.1]})
    train(opt, net, range(2))
    with refused(RuntimeError, f"thor: {name} has no value for step 2", opt):
        opt(Pass(2).gradients)


def test_a_damping_schedule_that_returns_0() -> None:
    net = Net()
    opt = make(net, damping=lambda _: 0.0)
    with refused(ValueError, "thor: damping is out of range: expected above 0, got 0.0", opt):
        Pass(0).step(net, opt)
    with pytest.raises(ValueError, match="thor: damping is out of range"):
        opt.damping = -1.0


# --------------------------------------------------------------------------------- Bad factors


def spoil(net: Net, kind: str) -> None:
    """Captures with a layer whose factor has no inverse."""
    first = Pass(5)
    for layer, x, d in zip(net.layers, first.inputs, first.outputs, strict=True):
        if kind == "indefinite" and layer is net.fc:
            layer.capture_covariances(-np.eye(4), np.eye(5))
            continue
        if kind == "beside" and layer is net.fc:
            layer.capture_covariances(np.eye(4), np.where(np.eye(5) > 0, 1.0, np.nan))
            continue
        if (kind, layer) in (("nan", net.fc), ("norm", net.ln)):
            d = np.where(np.arange(d.size).reshape(d.shape) == 8, np.nan, d)
        if kind == "infinite" and layer is net.conv:
            x = np.where(np.arange(x.size).reshape(x.shape) == 8, np.inf, x).astype(F32)
        layer.capture(x, d)


BAD = {
    "nan": r"thor: factor G of layer 'fc': the covariance is not finite: expected .* row 3",
    "infinite": r"thor: factor A of layer 'conv': the covariance is not finite: .*, got inf",
    "indefinite": r"factor A of layer 'fc': the damped covariance cannot be inverted: .* row 0",
    "beside": r"factor G of layer 'fc': the (inverse is not finite|damped covariance cannot be)",
    "norm": r"factor of the weight of layer 'ln': the mean square is not finite: .* element 3",
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_factor_raises(kind: str) -> None:
    net = Net()
    opt = make(net)
    spoil(net, kind)
    with refused(thor_factors.FactorError, BAD[kind], opt):
        opt(Pass(5).gradients)
    assert issubclass(thor_factors.FactorError, np.linalg.LinAlgError)
    opt.clear_captured()
    train(opt, net, range(1))


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_factor_is_skipped_by_choice(kind: str) -> None:
    net = Net()
    opt = make(net, bad_factor="skip", frequency=2)
    train(opt, net, range(2))
    before = opt.state_dict()
    spoil(net, kind)
    with pytest.warns(RuntimeWarning, match=BAD[kind] + ".*; the layer keeps its last factors"):
        opt(Pass(5).gradients)
    after = opt.state_dict()
    layer = {"norm": "ln.gamma", "infinite": "conv.weight"}.get(kind, "fc.weight")
    for other in ("fc.weight", "ln.gamma", "conv.weight", "emb.embedding_table"):
        kept = np.array_equal(after[f"matrix_g_inv.{other}"], before[f"matrix_g_inv.{other}"])
        assert kept == (other == layer)
        assert after[f"refreshes.{other}"] - before[f"refreshes.{other}"] == (other != layer)


def test_without_factors_a_skipped_layer_takes_the_plain_gradient() -> None:
    net = Net()
    opt = make(net, bad_factor="skip", learning_rate=1.0, momentum=0.0)
    before = net.fc.weight.data.copy()
    spoil(net, "nan")
    with pytest.warns(RuntimeWarning, match="factor G of layer 'fc'"):
        opt(Pass(5).gradients)
    np.testing.assert_allclose(before - net.fc.weight.data, Pass(5).gradients[3], atol=1e-6)
    assert net.fc.is_capturing  # due until it has factors
    train(opt, net, range(1))
    assert opt.state_dict()["refreshes.fc.weight"] == 1


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    opt = make(net)
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.linalg", None)
    text = r'thor: scipy is not installed: expected pip install "fusestep\[thor\]", got no scipy'
    with unchanged(opt), pytest.raises(ImportError, match=text):
        Pass(0).step(net, opt)


def test_states_of_other_kinds() -> None:
    opt = make(Net())
    state = opt.state_dict()
    with refused(KeyError, "thor: state does not fit", opt):
        opt.load_state_dict({n: a for n, a in state.items() if "matrix_a" not in n})
    with refused(ValueError, "state 'momentum' is of other options", opt):
        opt.load_state_dict({**state, "momentum": np.array(0.5, F32)})
    with refused(ValueError, r"thor: state 'refreshes.* is out of range: expected at least 0", opt):
        opt.load_state_dict({**state, "refreshes.fc.weight": np.array([-1])})


def test_read_only_since_the_last_step() -> None:
    net = Net()
    opt = make(net)
    train(opt, net, range(1))
    for array, name in ((net.fc.weight.data, "parameter"), (opt.moments[3], "a state of")):
        array.flags.writeable = False
        with refused(ValueError, f"thor: {name} 'fc.weight' is read-only", opt):
            train(opt, net, range(1, 2))
        array.flags.writeable = True
        train(opt, net, range(1, 2))


@pytest.mark.parametrize("name", ["refreshes.fc.weight", "step.fc.weight", "learning_rate"])
def test_shapes_of_a_state_come_before_its_values(name: str) -> None:
    opt = make(Net())
    state = opt.state_dict()
    negative = np.full((2, 3), -1, state[name].dtype)
    with refused(ValueError, rf"thor: state '{name}' has a wrong shape: .*got \(2, 3\)", opt):
        opt.load_state_dict({**state, name: negative})
    with refused(TypeError, f"thor: state '{name}' has a wrong dtype", opt):
        opt.load_state_dict({**state, name: negative.astype(np.float16)})


@pytest.mark.parametrize(("name", "value"), [
    ("use_nesterov", True), ("enable_clip_grad", True), ("block_size", 2), ("is_compatible", True),
])  # fmt: skip
def test_what_layers_and_rule_were_made_with_cannot_be_assigned(name: str, value: Any) -> None:
    opt = make(Net())
    text = f"^thor: {name} is fixed at construction: expected an optimizer .* got {value}$"
    with refused(AttributeError, text, opt):
        setattr(opt, name, value)


@pytest.mark.parametrize("name", ["damping", "momentum", "batch_size", "frequency"])
def test_what_is_assigned_is_checked(name: str) -> None:
    opt = make(Net())
    for value, error, text in KINDS[TAKES[name]].refused(name):
        with refused(error, f"^thor: {text}", opt):
            setattr(opt, name, value)
    with refused(ValueError, "^thor: bad_factor ", opt):
        opt.bad_factor = "rais"
