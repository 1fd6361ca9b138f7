"""All schedulers of PyTorch on our classes: the same rates, and the same parameters."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.optim import lr_scheduler as s
from torch.optim.swa_utils import SWALR
from fusestep.nn import torch as fused
from subprocesses import output_of
from torch_training import DENSE, assert_equal_models, loss_of, net, since


def cycles(optimizer: Any) -> bool:
    """Whether there is a momentum that a scheduler can move."""
    return "betas" in optimizer.defaults or bool(optimizer.defaults.get("momentum"))


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: s.LambdaLR(o, lambda k: 0.9**k),
    "MultiplicativeLR": lambda o: s.MultiplicativeLR(o, lambda k: 0.8 + 0.01 * k),
    "StepLR": lambda o: s.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: s.MultiStepLR(o, [2, 5, 7], 0.5),
    "ConstantLR": lambda o: s.ConstantLR(o, 0.25, 4),
    "LinearLR": lambda o: s.LinearLR(o, 0.1, 1.0, 6),
    "ExponentialLR": lambda o: s.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: s.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda o: s.CosineAnnealingLR(o, 6, 1e-4),
    "CosineAnnealingWarmRestarts": lambda o: s.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: s.CyclicLR(o, 1e-3, 0.05, 4, cycle_momentum=cycles(o)),
    "OneCycleLR": lambda o: s.OneCycleLR(o, 0.05, total_steps=12, cycle_momentum=cycles(o)),
    "ReduceLROnPlateau": lambda o: s.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SequentialLR": lambda o: s.SequentialLR(
        o, [s.LinearLR(o, 0.1, 1.0, 3), s.ExponentialLR(o, 0.8)], [4]),
    "ChainedScheduler": lambda o: s.ChainedScheduler(
        [s.ConstantLR(o, 0.5, 4), s.ExponentialLR(o, 0.9)], o),
    "SWALR": lambda o: SWALR(o, 1e-3, anneal_epochs=4, anneal_strategy="cos"),
}  # fmt: skip


def test_all_schedulers_are_here() -> None:
    assert set(s.__all__) - {"LRScheduler"} <= SCHEDULERS.keys()


def run(optimizer: Any, model: Any, scheduler: Any, steps: int) -> list[Any]:
    """Rates and what else schedulers move, after each step."""
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        scheduler.step(*((loss.item(),) if isinstance(scheduler, s.ReduceLROnPlateau) else ()))
        seen += [
            (float(g["lr"]), g.get("momentum"), g.get("betas")) for g in optimizer.param_groups
        ]
    return seen


@pytest.mark.parametrize(
    "rate", ["float", *(pytest.param(rate, marks=since(2, 9)) for rate in ("0-d", "one element"))]
)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", DENSE)
def test_schedulers_do_what_they_do_to_pytorch(name: str, scheduler: str, rate: str) -> None:
    models, seen = (net(), net()), []
    options = {"momentum": 0.9} if name in {"SGD", "RMSprop"} else {}
    for model, package in zip(models, (fused, torch.optim), strict=True):
        tensor = torch.tensor(0.02, dtype=torch.float64)  # in its own dtype PyTorch computes
        lr = {"float": 0.02, "0-d": tensor, "one element": tensor.reshape(1)}[rate]
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.1}]
        optimizer = getattr(package, name)(groups, lr=lr, **options)
        seen.append(run(optimizer, model, SCHEDULERS[scheduler](optimizer), 10))
        assert optimizer.param_groups[0]["lr"] is lr or rate == "float"
    assert seen[0] == seen[1]
    assert len(set(seen[0])) > 2
    assert_equal_models(*models)


def test_a_rate_with_derivatives() -> None:
    """It is a number like others, without a warning; PyTorch warns once in a process."""
    program = """
        import torch
        from fusestep.nn import torch as fused
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        fused.SGD([weight], lr=torch.tensor(0.5, requires_grad=True)).step()
        print(weight.tolist())
        """
    assert output_of(program).split() == ["[0.5,", "0.5]"]
