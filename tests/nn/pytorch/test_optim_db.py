"""The cases with which PyTorch tests its own optimizers: options and errors."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")  # PyTorch's own cases need it

from torch.testing._internal import common_optimizers
from torch.testing._internal.common_optimizers import OptimizerErrorEnum
from fusestep.nn import torch as fused
from torch_training import SHARED, assert_close

INFOS = {info.name: info for info in common_optimizers.optim_db if info.name in SHARED}
DTYPES = {"f32": torch.float32, "f64": torch.float64}
BOUND = {torch.float32: 2e-6, torch.float64: 1e-11}


def test_the_cases_are_there() -> None:
    assert set(INFOS) == set(SHARED)


def inputs() -> Iterator[Any]:
    """A class, and the number of a case of it: those of PyTorch hold tensors, and are made anew."""
    for name, info in INFOS.items():
        for k, case in enumerate(info.optim_inputs_func(device="cpu")):
            yield pytest.param(name, k, id=f"{name}-{case.desc}")


def options_of(name: str, k: int) -> dict[str, Any]:
    options: dict[str, Any] = INFOS[name].optim_inputs_func(device="cpu")[k].kwargs
    for key, value in options.items():
        if isinstance(value, torch.Tensor):  # PyTorch computes in its dtype
            options[key] = value.double()
    return options


def run(package: Any, name: str, options: dict[str, Any], dtype: Any) -> list[Any]:
    """Parameters and states after some steps."""
    torch.manual_seed(1)
    weight, bias = (
        torch.nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype))
        for shape in ((10, 5), (10,))
    )
    x = torch.randn(5, dtype=torch.float64).to(dtype)
    optimizer = getattr(package, name)([weight, bias], **options)
    for step in range(12):
        optimizer.zero_grad()
        ((weight.mv(x) + bias).pow(2).sum() / (1 + step)).backward()
        if INFOS[name].only_supports_sparse_grads:
            weight.grad, bias.grad = weight.grad.to_sparse(1), bias.grad.to_sparse(1)
        optimizer.step()
    states = [optimizer.state[p] for p in (weight, bias)]
    tensors = [torch.as_tensor(x) for state in states for _, x in sorted(state.items())]
    return [weight, bias, *tensors]


def bounded(tensors: list[Any]) -> Any:
    return [t.double() if t.is_floating_point() else t for t in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "k"), list(inputs()))
def test_options(name: str, k: int, dtype: str) -> None:
    kind = DTYPES[dtype]
    found, expected = (
        run(package, name, options_of(name, k), kind) for package in (fused, torch.optim)
    )
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    assert_close(bounded(found), bounded(expected), BOUND[kind])


def errors() -> Iterator[Any]:
    for name, info in INFOS.items():
        for k, case in enumerate(info.optim_error_inputs_func(device="cpu", dtype=torch.float32)):
            yield pytest.param(name, k, id=f"{name}-{case.optimizer_error_input.desc}")


def outcome(act: Callable[[], Any]) -> tuple[Any, str]:
    """The type and the text of a warning or an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            act()
        except Exception as e:
            return type(e), str(e)
    return None, ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "k"), list(errors()))
def test_errors(name: str, k: int, dtype: str) -> None:
    """As PyTorch's: in the same place, of the same type, in the same words."""
    case = INFOS[name].optim_error_inputs_func(device="cpu", dtype=DTYPES[dtype])[k]
    given = case.optimizer_error_input

    def act(package: Any) -> Callable[[], Any]:
        cls = getattr(package, name)
        if case.error_on == OptimizerErrorEnum.STEP_ERROR:
            return cls(given.params, **given.kwargs).step
        params = given.params
        if params is None:  # PyTorch looks at the options first; so every list will do
            params = [torch.nn.Parameter(torch.ones(2))]
        return lambda: cls(params, **given.kwargs)

    expected = outcome(act(torch.optim))
    found = outcome(act(fused))
    assert expected[0] is found[0] is case.error_type
    assert found[1].startswith(expected[1])  # ours may go on with the name of the parameter
