"""Small trainings, ours beside PyTorch's: equal models, equal data, and what they must end with."""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from fusestep.nn import torch as fused
from subprocesses import TORCH

any_gradient = pytest.mark.skipif(
    not hasattr(Tensor, "grad_dtype"), reason="gradients have the dtype of their parameters"
)


def since(*version: int) -> pytest.MarkDecorator:
    """A mark of what PyTorch itself does from a version on."""
    return pytest.mark.skipif(version > TORCH, reason=f"PyTorch is older than {version}")


_CLASSES = {n: c for n in fused.__all__ if isinstance(c := getattr(fused, n), type)}
EVERY = sorted(n for n, c in _CLASSES.items() if issubclass(c, fused.FusedOptimizer))
EVERY.remove("FusedOptimizer")
SHARED = [name for name in EVERY if hasattr(torch.optim, name)]
DENSE = [name for name in SHARED if name != "SparseAdam"]
TABLES = [name for name in EVERY if name not in {"Lamb", "LARS", "Adafactor", "Prodigy"}]
"""Classes that take sparse gradients."""


def net(seed: int = 0, dtype: Any = torch.float64) -> nn.Sequential:
    """Equal ones for a seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


class Tagger(nn.Module):
    """Two tables with sparse gradients, and a dense layer."""

    def __init__(self, dtype: Any = torch.float64, seed: int = 0, *, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(11, 4, sparse=sparse, dtype=dtype)
        self.tags = nn.Embedding(7, 4, sparse=sparse, dtype=dtype)
        self.head = nn.Linear(4, 2, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Of ids with a number for each of two places."""
        return self.head(torch.tanh(self.words(ids) * self.tags(ids % 7)))


def batch_of(step: int, model: nn.Module) -> Tensor:
    """The inputs of a step: numbers, or ids with duplicates."""
    generator = torch.Generator().manual_seed(100 + step)
    if isinstance(model, Tagger):
        return torch.randint(0, 11, (6,), generator=generator)
    dtype = next(model.parameters()).dtype
    return torch.randn(8, 4, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Something with derivatives."""
    loss: Tensor = (model(batch_of(step, model)) - 0.5).pow(2).sum()
    return loss


def train(
    model: nn.Module, optimizer: Any, steps: Iterable[int], then: Callable[[], Any] | None = None
) -> None:
    """Ordinary steps; ``then`` is called after each."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if then is not None:
            then()


def assert_equal_models(mine: nn.Module, other: nn.Module, bound: float = 1e-11) -> None:
    """All parameters, beside the largest of each."""
    assert_close(list(mine.parameters()), list(other.parameters()), bound)


def assert_close(mine: Iterable[Tensor], other: Iterable[Tensor], bound: float = 1e-11) -> None:
    """Tensor by tensor, beside the largest magnitude of each."""
    for p, q in zip(mine, other, strict=True):
        assert (p.shape, p.dtype) == (q.shape, q.dtype)
        assert torch.isfinite(p).all()
        error, size = (p - q).detach().abs(), q.detach().abs()
        if error.numel():
            assert float(error.max()) <= bound * float(size.max()), float(error.max() / size.max())


def snapshot(model: nn.Module) -> list[Tensor]:
    """Copies of all parameters."""
    return [p.detach().clone() for p in model.parameters()]


def assert_same_bits(mine: Iterable[Tensor], other: Iterable[Tensor]) -> None:
    """No element differs."""
    for p, q in zip(mine, other, strict=True):
        assert torch.equal(p, q)


def through_folder(model, optimizer, fresh, resumed, **options) -> tuple[Any, Any]:
    """A fresh model and optimizer that go on, by a folder of torch.distributed.checkpoint."""
    # Slow to import.
    import torch.distributed.checkpoint as dcp
    import torch.distributed.checkpoint.state_dict as of_dcp

    given = of_dcp.StateDictOptions(**options)
    saved, loaded = (
        {
            "model": each.state_dict(),
            "optimizer": of_dcp.get_optimizer_state_dict(each, own, options=given)}
        for each, own in ((model, optimizer), (fresh, resumed)))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(saved, checkpoint_id=folder)
        dcp.load(loaded, checkpoint_id=folder)
    fresh.load_state_dict(loaded["model"])
    of_dcp.set_optimizer_state_dict(fresh, resumed, loaded["optimizer"], options=given)
    return fresh, resumed


FOLDERS: dict[str, dict[str, Any]] = {
    "folder": {}, "flat folder": {"flatten_optimizer_state_dict": True},
    "full folder": {"full_state_dict": True, "cpu_offload": True},
}  # fmt: skip
"""Options of ways through a folder."""


def everything(optimizer: Any) -> list[Tensor]:
    """Copies of all parameters and states, which no later step changes."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [x for p in parameters for _, x in sorted(optimizer.state.get(p, {}).items())]
    return [torch.as_tensor(x).detach().clone() for x in (*parameters, *states) if x is not None]


def _held(thing: Any) -> list[Tensor]:
    """Copies of the tensors of an optimizer or a module, or of a tensor."""
    if isinstance(thing, torch.optim.Optimizer):
        return everything(thing)
    return snapshot(thing) if isinstance(thing, nn.Module) else [thing.detach().clone()]


@contextmanager
def refused(kind: Any, match: str, *things: Any) -> Iterator[None]:
    """The block raises an error with a text that matches, and no tensor of these things changes."""
    __tracebackhide__ = True
    before = [_held(thing) for thing in things]
    with pytest.raises(kind, match=match):
        yield
    for thing, tensors in zip(things, before, strict=True):
        assert_same_bits(_held(thing), tensors)
