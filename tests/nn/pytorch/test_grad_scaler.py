"""Mixed precision: GradScaler, which unscales and skips by itself or leaves both to the step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import torch as fused
from subprocesses import TORCH

from torch_training import (  # isort: skip
    DENSE, EVERY, TABLES, Tagger, assert_close, assert_equal_models, assert_same_bits, loss_of, net,
    snapshot, train)  # fmt: skip

FUSED = ["SGD", "Adagrad", "Adam", "AdamW"]
"""Those that take ``fused`` in PyTorch too."""
F32 = torch.float32


def scaled_step(model, optimizer, scaler, step: int, *, infinite: bool = False, first=None) -> Any:
    """A step with a scaler, after an infinity in one gradient; what the scaler returned."""
    optimizer.zero_grad()
    scaler.scale(loss_of(model, step)).backward()
    if infinite:
        gradient = next(model.parameters()).grad
        (gradient._values() if gradient.is_sparse else gradient)[0, 1] = torch.inf
    if first is not None:
        scaler.unscale_(optimizer)
        first()
    result = scaler.step(optimizer)
    scaler.update()
    return result


def scaler_of() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)


def optimizers(name: str, **options: Any) -> list[tuple[Any, Any]]:
    made = []
    for package in (fused, torch.optim):
        model = net(dtype=F32)
        made.append((model, getattr(package, name)(model.parameters(), lr=0.01, **options)))
    return made


@pytest.mark.parametrize("name", DENSE)
def test_the_scaler_unscales(name: str) -> None:
    pairs, scales = optimizers(name), []
    for model, optimizer in pairs:
        assert not hasattr(optimizer, "_step_supports_amp_scaling")
        scaler = scaler_of()
        for step in range(8):
            scaled_step(model, optimizer, scaler, step, infinite=step in (2, 5))
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1] < 2.0**10
    assert_equal_models(pairs[0][0], pairs[1][0], 1e-5)


CLIPS: dict[str, Callable[[Any, Any], Any] | None] = {
    "no": None,
    "PyTorch's": lambda p, _: torch.nn.utils.clip_grad_norm_(p, 0.5),
    "ours, on the way": lambda p, o: (
        fused.clip_grad_norm_(p, 0.5, optimizer=o)
        if isinstance(o, fused.FusedOptimizer)
        else torch.nn.utils.clip_grad_norm_(p, 0.5)),
}  # fmt: skip


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_the_step_unscales(name: str, is_fused: bool, clip: str) -> None:
    """With ``fused=True``: gradients come scaled, or were unscaled and clipped before."""
    pairs, scales = optimizers(name, fused=is_fused), []
    for model, optimizer in pairs:
        takes_scaled = is_fused and (name != "Adagrad" or TORCH >= (2, 13))
        assert hasattr(optimizer, "_step_supports_amp_scaling") == takes_scaled
        clipped = CLIPS[clip] and partial(CLIPS[clip], [*model.parameters()], optimizer)
        scaler = scaler_of()
        for step in range(8):
            first = clipped if clip != "PyTorch's" or step % 2 else None
            scaled_step(model, optimizer, scaler, step, infinite=step in (2, 5), first=first)
            assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
        scales.append(scaler.get_scale())
    (mine, ours), (other, theirs) = pairs
    assert scales[0] == scales[1] < 2.0**10
    assert_equal_models(mine, other, 1e-5)
    for p, q in zip(mine.parameters(), other.parameters(), strict=True):
        states = ours.state[p], theirs.state[q]
        assert states[0].keys() == states[1].keys()
        assert_close(*[[x for x in s.values() if x is not None] for s in states], 1e-5)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_an_infinity_changes_nothing(name: str, is_fused: bool) -> None:
    model = net(dtype=F32)
    optimizer = getattr(fused, name)(model.parameters(), fused=is_fused)
    train(model, optimizer, range(2))
    before = snapshot(model)
    states = [[x.clone() for x in optimizer.state[p].values()] for p in model.parameters()]
    assert scaled_step(model, optimizer, scaler_of(), 2, infinite=True) is None
    assert_same_bits(model.parameters(), before)
    for p, state in zip(model.parameters(), states, strict=True):
        assert_same_bits(optimizer.state[p].values(), state)


@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**16])
def test_the_scale_is_divided_out(scale: float) -> None:
    """As the protocol says, by itself: attributes before the step."""
    plain, scaled = net(), net()
    ours, theirs = (fused.AdamW(m.parameters(), fused=True) for m in (plain, scaled))
    for step in range(4):
        for model, optimizer, factor in ((plain, ours, 1.0), (scaled, theirs, scale)):
            optimizer.zero_grad()
            (factor * loss_of(model, step)).backward()
            optimizer.found_inf = torch.tensor(0.0)
            optimizer.grad_scale = torch.tensor(factor) if factor != 1.0 else None
            optimizer.step()
    assert_equal_models(plain, scaled)


@pytest.mark.parametrize(
    ("name", "is_fused"), [*((name, None) for name in TABLES), *((name, True) for name in FUSED)]
)
def test_sparse_gradients(name: str, is_fused: bool | None) -> None:
    """Scaled by a power of two they give the bits of those that are not."""
    models = Tagger(F32), Tagger(F32)
    tables = [[*model.words.parameters(), *model.tags.parameters()] for model in models]
    plain = getattr(fused, name)(tables[0], sparse="touched")
    more = {} if is_fused is None else {"fused": is_fused}
    scaled = getattr(fused, name)(tables[1], sparse="touched", **more)
    scaler, before = scaler_of(), None
    for step in range(6):
        scaled_step(models[1], scaled, scaler, step, infinite=step == 3)
        if step == 3:
            assert_same_bits(models[1].parameters(), before)
        else:
            train(models[0], plain, [step])
        before = snapshot(models[1])
    assert_same_bits(models[0].parameters(), models[1].parameters())


@pytest.mark.parametrize("name", EVERY)
def test_a_scaler_that_is_off(name: str) -> None:
    is_table = name in TABLES
    models = [Tagger(F32) if is_table else net(dtype=F32) for _ in range(2)]
    made = []
    for model in models:
        some = [model.words, model.tags] if is_table else [model]
        options = {"sparse": "touched"} if is_table else {}
        parameters = [p for module in some for p in module.parameters()]
        made.append(getattr(fused, name)(parameters, **options))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(3):
        scaled_step(models[0], made[0], scaler, step)
    train(models[1], made[1], range(3))
    assert_same_bits(models[0].parameters(), models[1].parameters())


def test_autocast() -> None:
    """bfloat16 in the model, float32 in parameters, gradients and states."""
    pairs = optimizers("AdamW")
    for model, optimizer in pairs:
        scaler = scaler_of()
        for step in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, step)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert_equal_models(pairs[0][0], pairs[1][0], 1e-5)


def test_a_skipped_step_that_was_clipped_is_forgotten() -> None:
    model = net(dtype=F32)
    optimizer = fused.SGD(model.parameters(), lr=0.1)

    def clip() -> None:
        fused.clip_grad_norm_(model.parameters(), 0.5, optimizer=optimizer)

    before = snapshot(model)
    scaled_step(model, optimizer, scaler_of(), 0, infinite=True, first=clip)
    assert_same_bits(model.parameters(), before)
    train(model, optimizer, range(2))
    expected = net(dtype=F32)
    train(expected, fused.SGD(expected.parameters(), lr=0.1), range(2))
    assert_same_bits(model.parameters(), expected.parameters())
