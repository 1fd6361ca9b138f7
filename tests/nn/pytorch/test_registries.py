"""Libraries that register all subclasses of PyTorch's optimizers by name."""

import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import torch as fused
from subprocesses import output_of
from torch_training import EVERY

_OURS = "from fusestep.nn import torch as fused"
_THEIRS = "from class_resolver.contrib.torch import optimizer_resolver as known"


@pytest.mark.parametrize("order", [(_OURS, _THEIRS), (_THEIRS, _OURS)], ids=["first", "last"])
def test_the_order_of_imports_does_not_matter(order: tuple[str, str]) -> None:
    pytest.importorskip("class_resolver", reason="class_resolver is not installed")
    program = "\n".join((*order, "print([f'{c.__module__}.{c.__name__}' for c in known])"))
    found = output_of(program)
    assert "torch.optim.adam.Adam'" in found
    assert "fusestep" not in found


@pytest.mark.parametrize("name", EVERY)
def test_classes_and_their_names(name: str) -> None:
    cls: Any = getattr(fused, name)
    assert repr(cls).startswith("<class 'fusestep.nn.torch.")
    assert pickle.loads(pickle.dumps(cls)) is cls
    assert issubclass(cls, torch.optim.Optimizer)
    assert issubclass(cls, fused.FusedOptimizer)
    assert issubclass(cls, getattr(torch.optim, name, torch.optim.Optimizer))
    assert not issubclass(getattr(torch.optim, name, torch.optim.Adam), fused.FusedOptimizer)
    optimizer = cls([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    assert isinstance(optimizer, fused.FusedOptimizer)
    assert repr(optimizer).startswith(f"{name} (")


class Steep(fused.FusedOptimizer):
    """A class of a user."""

    def __init__(self, params: Any, lr: float = 0.1, **own: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "maximize": False}, **own)

    def method(self, group: Any) -> Any:
        del group
        return fused.SGD.method(self, {"momentum": 0.0, "weight_decay": 0.0})

    def scalars(self, group: Any, step: float) -> Any:
        del step
        return (2.0 * group["lr"],)


def test_a_class_of_a_user() -> None:
    assert issubclass(Steep, torch.optim.Optimizer)
    assert issubclass(Steep, fused.FusedOptimizer)
    assert not issubclass(fused.Adam, Steep)
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = Steep([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert parameter.tolist() == pytest.approx([-0.2] * 3)
