"""THOR on PyTorch modules; skipped where PyTorch is not installed."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from fusestep import nn
from helpers import assert_same_bits

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("scipy", reason="the factors are inverted by scipy's LAPACK")

BATCH = 16


def make_module(dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(2, 3, 3, stride=2, padding=1)
            self.bn = torch.nn.BatchNorm2d(3)
            self.fc = torch.nn.Linear(12, 6, bias=False)
            self.emb = torch.nn.Embedding(5, 6, padding_idx=0)
            self.ln = torch.nn.LayerNorm(6)
            self.out = torch.nn.Linear(6, 4)

        def forward(self, x: Any, ids: Any) -> Any:
            # An operation in place behind a hooked module, and the call of one by keyword.
            h = torch.relu_(self.bn(self.conv(x))).flatten(1)
            h = self.ln(self.fc(input=h)[:, None] + self.emb(ids))
            return self.out(h.sum(1))

    return Net().to(dtype)


def batch(seed: int, dtype: Any = torch.float32) -> tuple[Any, ...]:
    torch.manual_seed(100 + seed)
    x = torch.randn(BATCH, 2, 4, 4, dtype=dtype)
    return x, torch.randint(0, 5, (BATCH, 3)), torch.randint(0, 4, (BATCH,))


def loss_of(module: Any, seed: int, dtype: Any = torch.float32) -> Any:
    x, ids, labels = batch(seed, dtype)
    return torch.nn.functional.cross_entropy(module(x, ids), labels)


def make(module: Any, **changed: Any) -> Any:
    options = {"learning_rate": 0.05, "damping": 0.05, "momentum": 0.9, "batch_size": BATCH}
    return nn.thor(module, **{**options, "frequency": 3, **changed})


def train(module: Any, opt: Any, steps: range) -> list[float]:
    losses = []
    for t in steps:
        opt.zero_grad()
        loss = loss_of(module, t)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hooks_capture_what_records_do(dtype: Any) -> None:
    """The same net written with records, its captures taken by autograd and by hand."""
    module = make_module(dtype=dtype)
    opt = make(module)
    real = {torch.float32: np.float32, torch.float64: np.float64}[dtype]
    parameters = {n: nn.Parameter(p.detach().numpy().copy(), n) for n, p in
                  module.named_parameters()}  # fmt: skip
    net = {
        "conv": nn.ThorConv2d(
            parameters["conv.weight"], parameters["conv.bias"], stride=2, padding=1),
        "bn": [parameters["bn.weight"], parameters["bn.bias"]],
        "fc": nn.ThorDense(parameters["fc.weight"]),
        "emb": nn.ThorEmbedding(parameters["emb.weight"], padding_idx=0),
        "ln": nn.ThorLayerNorm(parameters["ln.weight"], parameters["ln.bias"]),
        "out": nn.ThorDense(parameters["out.weight"], parameters["out.bias"]),
    }  # fmt: skip
    other = make(net)
    assert [p.name for p in opt.parameters] == [p.name for p in other.parameters]
    for t in range(5):
        opt.zero_grad()
        x, ids, labels = batch(t, dtype)
        kept: dict[str, list[Any]] = {}

        def keep(name: str, value: Any, kept: Any = kept) -> Any:
            value.retain_grad()
            kept.setdefault(name, []).append(value)
            return value

        h = torch.relu(module.bn(keep("conv", module.conv(x)))).flatten(1)
        fc_out, emb_out = keep("fc", module.fc(h)), keep("emb", module.emb(ids))
        mixed = fc_out[:, None] + emb_out
        ln_out = keep("ln", module.ln(mixed))
        out = keep("out", module.out(ln_out.sum(1)))
        torch.nn.functional.cross_entropy(out, labels).backward()
        given = {"conv": x, "fc": h, "emb": ids, "ln": mixed, "out": ln_out.sum(1)}
        for name, value in given.items():
            (output,) = kept[name]
            net[name].capture(value.detach().numpy(), output.grad.numpy())
        gradients = tuple(p.grad.numpy().copy() for p in module.parameters())
        opt.step()
        other(gradients)
        for p, q in zip(module.parameters(), other.parameters, strict=True):
            assert q.dtype == real
            np.testing.assert_allclose(p.detach().numpy(), q.data, rtol=1e-5, atol=1e-6)


def test_step_and_zero_grad() -> None:
    module = make_module()
    opt = make(module)
    losses = train(module, opt, range(1)) + [
        opt.step(lambda: _closure(module, opt)).item() for _ in range(10)
    ]
    assert losses[-1] < losses[0]
    opt.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())
    opt.zero_grad()
    assert all(p.grad is None for p in module.parameters())
    before = [p.detach().clone() for p in module.parameters()]
    opt.step()  # nothing has a gradient: nothing moves
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def _closure(module: Any, opt: Any) -> Any:
    opt.zero_grad()
    loss = loss_of(module, 0)
    loss.backward()
    return loss


def test_hooks_do_nothing_between_refreshes_and_in_evaluation() -> None:
    module = make_module()
    opt = make(module)
    with torch.no_grad():
        loss_of(module, 0)
    assert not any(p.layer.has_captured for p in opt._preconditioners)
    loss_of(module, 0)  # a forward pass without a backward pass
    assert not any(p.layer.has_captured for p in opt._preconditioners)
    train(module, opt, range(1))
    loss_of(module, 1).backward()
    assert not any(p.layer.has_captured for p in opt._preconditioners)


def test_zero_grad_forgets_captures() -> None:
    results = []
    for spoil in (False, True):
        module = make_module()
        opt = make(module)
        if spoil:
            loss_of(module, 7).backward()
            module.bn.reset_running_stats()
        train(module, opt, range(3))
        results.append([p.detach().clone() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_accumulated_gradients_count_as_one_batch() -> None:
    """Without batch normalization a batch equals its halves."""
    results = []
    for parts in (1, 2):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        opt = make(module)
        x, labels = torch.randn(BATCH, 4), torch.randint(0, 3, (BATCH,))
        opt.zero_grad()
        for a, b in zip(x.chunk(parts), labels.chunk(parts), strict=True):
            (torch.nn.functional.cross_entropy(module(a), b) / parts).backward()
        opt.step()
        results.append([p.detach().numpy() for p in module.parameters()])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on_alike(copied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn, "Net", None, raising=False)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    opt = make(module)
    x, labels = torch.randn(BATCH, 4), torch.randint(0, 3, (BATCH,))

    def go(module: Any, opt: Any, steps: int) -> None:
        for _ in range(steps):
            opt.zero_grad()
            torch.nn.functional.cross_entropy(module(x), labels).backward()
            opt.step()

    go(module, opt, 2)
    other_module, other = copied((module, opt))
    go(module, opt, 5)
    go(other_module, other, 5)
    for a, b in zip(module.parameters(), other_module.parameters(), strict=True):
        assert_same_bits(a.detach().numpy(), b.detach().numpy())


def test_follows_storage_that_was_replaced() -> None:
    results = []
    for replaced in (False, True):
        module = make_module()
        opt = make(module)
        train(module, opt, range(2))
        if replaced:
            for p in module.parameters():
                p.data = p.data.clone()
        train(module, opt, range(2, 4))
        results.append([p.detach().clone() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_autograd_notices_the_step() -> None:
    module = torch.nn.Linear(3, 2)
    opt = make(module)
    x = torch.randn(4, 3, requires_grad=True)
    y = module(x).square().sum()
    y.backward(retain_graph=True)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_bfloat16() -> None:
    module = torch.nn.Linear(8, 4).to(torch.bfloat16)
    opt = make(module)
    x = torch.randn(BATCH, 8, dtype=torch.bfloat16)
    losses = []
    for _ in range(10):
        opt.zero_grad()
        loss = (module(x).float() - 1).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_frozen_parameters_are_left_alone() -> None:
    module = make_module()
    module.out.weight.requires_grad_(False)
    module.ln.weight.requires_grad_(False)
    opt = make(module)
    before = module.out.weight.detach().clone()
    train(module, opt, range(4))
    assert torch.equal(before, module.out.weight)
    assert {"out.weight", "ln.weight"}.isdisjoint(p.name for p in opt.parameters)
    assert "matrix_g_inv.ln.bias" in opt.state_dict()


LEFT_OUT = [
    (lambda: torch.nn.Conv2d(4, 4, 3, groups=2), "groups=2"),
    (lambda: torch.nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), "padding_mode='circ"),
    (lambda: torch.nn.Embedding(4, 4, scale_grad_by_freq=True), "scale_grad_by_freq=True"),
    (lambda: torch.nn.MultiheadAttention(4, 2), "attention reads its weight without calling it"),
    (
        lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4)),
        "its weight is computed from other parameters"),
]  # fmt: skip


@pytest.mark.parametrize(("make_layer", "why"), LEFT_OUT)
def test_layers_that_cannot_be_treated_are_named(make_layer: Any, why: str) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), make_layer())
    with pytest.warns(UserWarning, match=rf"thor: some layers take the plain gradient: 1.*{why}"):
        opt = make(module)
    assert len(opt.parameters) == len(list(module.parameters()))


def test_tied_weights_take_the_plain_gradient() -> None:
    module = torch.nn.ModuleList([torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False),
                                  torch.nn.Linear(4, 4)])  # fmt: skip
    module[1].weight = module[0].weight
    text = r"0 \(a parameter that other modules have too\), 1 \(a parameter"
    with pytest.warns(UserWarning, match=text):
        opt = make(module)
    assert [p.name for p in opt.parameters] == ["0.weight", "2.weight", "2.bias"]


def test_errors() -> None:
    with pytest.raises(ValueError, match="thor: net declares no layers"):
        make(torch.nn.Sequential(torch.nn.BatchNorm1d(3)))
    module = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="data is not contiguous"):
        make(module)
    with pytest.raises(RuntimeError, match="a tensor is elsewhere: expected a tensor on the CPU"):
        make(torch.nn.Linear(2, 2, device="meta"))
    module = torch.nn.Linear(2, 2)
    opt = make(module)
    module.weight.grad = torch.ones(2, 2)
    module.bias.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="thor: layer 'net' has captured nothing"):
        opt.step()


def test_sparse_gradients_are_refused() -> None:
    module = torch.nn.Embedding(5, 4, sparse=True)
    opt = make(module)
    module(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="thor: gradient of 'weight' is row-sparse: expected a"):
        opt.step()


def cut(tensor: Any, n_bytes: int = 0) -> Any:
    tensor.untyped_storage().resize_(n_bytes)
    return tensor


@pytest.mark.parametrize("kind", ["freed", "shrunk", "functional", "parameter"])
def test_tensors_without_memory_are_refused(kind: str) -> None:
    module = make_module()
    optimizer = make(module)
    loss_of(module, 0).backward()
    weight = module.out.weight
    if kind == "parameter":
        weight.data = cut(torch.ones(4, 6))
    else:
        whole = torch.ones(4, 6)
        functional = torch._to_functional_tensor(whole)
        weight.grad = functional if kind == "functional" else cut(whole, 8 * (kind == "shrunk"))
    before = module.conv.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"^thor: .* has no memory: expected 96 bytes, got "):
        optimizer.step()
    assert torch.equal(module.conv.weight, before)


@pytest.mark.parametrize("name", ["out.bias", "conv.weight", "emb.weight"])
def test_gradients_that_lie_as_others_do_not(name: str) -> None:
    """Zeros without memory, and negatives of what lies there, are the numbers that they are."""
    for is_zero in (True, False):
        module, other = make_module(), make_module()
        for each, is_plain in ((module, False), (other, True)):
            optimizer = make(each)
            loss_of(each, 0).backward()
            parameter = each.get_parameter(name)
            gradient = torch._neg_view(torch.ones(parameter.shape))
            if is_zero:
                gradient = torch._efficientzerotensor(parameter.shape)
            parameter.grad = gradient.clone() if is_plain else gradient
            optimizer.step()
        pairs = zip(module.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(p, q) for p, q in pairs)


def test_hooks_can_be_removed() -> None:
    module = make_module()
    opt = make(module)
    opt.remove_hooks()
    loss_of(module, 0).backward()
    assert not any(p.layer.has_captured for p in opt._preconditioners)
    train(module, make(module), range(2))
