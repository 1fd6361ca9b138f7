"""Clipping of tables that step in backward: as of gradients that are left, and of dense ones."""

import copy
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from bag_modules import IDS, assert_as, assert_close, before, modules_of, pooled, stepping
from fusestep.nn import torch as fused


@pytest.mark.parametrize("limit", [0.0, 0.3, 2.0, math.inf])
@pytest.mark.parametrize("mode", ["sum", "max"])
@pytest.mark.parametrize(
    ("name", "sparse"),
    [("Adam", "touched"), ("Adam", "all"), ("AdamW", "catch_up"), ("Adagrad", None), ("SGD", None)],
)
def test_one_call_beside_gradients_that_are_left(
    name: str, sparse: str | None, mode: str, limit: float
) -> None:
    """The same bits, with a shared table and one that rests; a master of SGD in 16 bits."""
    cls, options = getattr(fused, name), {"rounding": "master"} if name == "SGD" else {}
    dtype = torch.bfloat16 if options else torch.float32
    for kind in ("max_norm", "clip_value"):
        both = [fused.EmbeddingBags(modules_of(mode, dtype), features=[0, 1, 0]) for _ in range(2)]
        optimizers = [cls(b.parameters(), lr=0.1, sparse=sparse, **options) for b in both]
        both[0].update_in_backward(optimizers[0], **{kind: limit})
        for step in range(4):
            for bags in both:
                bags.weights[1].requires_grad_(step != 2)
                ids = [own.roll(step) for own in (*IDS, IDS[0].flip(0))]
                bags(ids).float().square().sum().backward()
            if kind == "clip_value":
                fused.clip_grad_value_(both[1].parameters(), limit)
            else:
                fused.clip_grad_norm_(both[1].parameters(), limit, optimizer=optimizers[1])
            optimizers[1].step()
            optimizers[1].zero_grad()
            assert_as(both[0], before(both[1]))


@pytest.mark.parametrize("kind", ["max_norm", "clip_value", "norm"])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_beside_pytorch(calls: int, kind: str) -> None:
    """Of several calls, with a penalty in ``.grad``, and with the norm of a dense layer."""
    theirs, layer, seen = modules_of(), torch.nn.Linear(12, 1, dtype=torch.float64), []
    ours, dense = fused.EmbeddingBags(copy.deepcopy(theirs)), torch.optim.SGD(theirs.parameters())
    clip = "clip_grad_value_" if kind == "clip_value" else "clip_grad_norm_"

    def total(of_tables: float) -> float:
        seen.append(of_tables)
        return math.hypot(of_tables, *(p.grad.norm().item() for p in layer.parameters()))

    limit = {"max_norm": 0.2, "norm": total} if kind == "norm" else {kind: 0.2}
    ours.update_in_backward(fused.SGD(ours.parameters()), **limit)
    for step in range(3):
        for modules in (ours, theirs):
            layer.zero_grad()
            loss = 0.1 * next(modules.parameters()).square().sum()
            for k in range(calls):
                ids = [own.roll(k + step) for own in IDS]
                out = modules(ids) if modules is ours else pooled(modules, ids)
                loss = loss + layer(out).square().sum()
            loss.backward()
        every = [*theirs.parameters(), *([*layer.parameters()] * (kind == "norm"))]
        getattr(torch.nn.utils, clip)(every, 0.2)
        dense.step()
        dense.zero_grad()
        assert len(seen) == (step + 1) * (kind == "norm")
        assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("of_norm", [False, True])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("skips", [False, True])
def test_norms_that_are_not_finite(skips: bool, bad: float, of_norm: bool) -> None:
    bags, optimizer = stepping(fused.SGD, skip_nonfinite=skips)
    bags.update_in_backward(optimizer, max_norm=1.0, norm=lambda n: bad if of_norm else n)
    tables = before(bags)
    (bags(IDS) * (1.0 if of_norm else bad)).sum().backward()
    assert optimizer.skipped_steps == skips
    if skips or (of_norm and bad == math.inf):  # all gradients are 0
        assert_as(bags, tables)
    else:
        assert bags.weights[0][1].isnan().all()


@pytest.mark.parametrize(("options", "error", "text"), [
    ({"max_norm": math.nan}, ValueError, "max_norm is out of range: expected at least 0"),
    ({"clip_value": "x"}, TypeError, "clip_value is no number"),
    ({"clip_value": 1.0, "max_norm": 1.0}, ValueError, "clip_value is beside max_norm"),
    ({"norm": abs}, TypeError, "norm does not fit: expected a function, and max_norm"),
    ({"norm": lambda _: -1.0, "max_norm": 1.0}, ValueError, "norm is out of range"),
    ({"norm": lambda _: "x", "max_norm": 1.0}, TypeError, "norm is no number"),
])  # fmt: skip
def test_bad_limits(options: Any, error: Any, text: str) -> None:
    bags, optimizer = stepping(fused.SGD)
    tables = before(bags)
    with pytest.raises(error, match=f"EmbeddingBags: {text}"):  # noqa: PT012
        bags.update_in_backward(optimizer, **options)
        bags(IDS).sum().backward()
    assert_as(bags, tables)
    with pytest.raises(TypeError, match="optimizer is missing"):
        bags.update_in_backward(None, **options)


def test_functions_that_clip_warn_of_tables_that_step_in_backward() -> None:
    bags, optimizer = stepping(fused.SGD)
    for clip in (fused.clip_grad_norm_, fused.clip_grad_value_):
        with pytest.warns(RuntimeWarning, match="update_in_backward.optimizer, max_norm") as seen:
            clip(bags.parameters(), 1.0)
        assert [one.filename for one in seen] == [__file__]
    bags.update_in_backward(optimizer, clip_value=1.0)
    fused.clip_grad_value_(bags.parameters(), 1.0)  # warnings are errors
    with pytest.raises(ValueError, match="optimizer steps in backward"):
        fused.clip_grad_norm_(bags.parameters(), 1.0, optimizer=optimizer)
    bags.update_in_backward(None)
    fused.clip_grad_norm_(bags.parameters(), 1.0)
