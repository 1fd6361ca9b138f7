"""The names and signatures of torch.optim, and pages that stand alone."""

import inspect
import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import torch as fused
from torch_training import EVERY, SHARED

OPTIMIZERS = [*EVERY, "FusedOptimizer", "Thor"]
OWN = {
    "sparse": None, "skip_nonfinite": False, "state_dtype": None, "rounding": "nearest",
    "eps_hat": False, "rowwise_bias_correction": False,
}  # fmt: skip
VARIADIC = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def parameters(function: Any) -> dict[str, tuple[Any, Any]]:
    """Kind and default, by name."""
    every = inspect.signature(function).parameters.values()
    return {p.name: (p.kind, p.default) for p in every}


def test_every_name_of_torch_optim_is_here() -> None:
    public = {name for name in dir(torch.optim) if not name.startswith("_")}
    assert public >= {"LBFGS", "Optimizer", "lr_scheduler", "swa_utils", "AdamW"}
    assert public - set(dir(fused)) == set()
    assert set(torch.optim.__all__) - set(fused.__all__) == set()
    assert len(fused.__all__) == len(set(fused.__all__))
    for name in public - set(EVERY):
        assert getattr(fused, name) is getattr(torch.optim, name)


@pytest.mark.parametrize("name", SHARED)
def test_signatures_are_those_of_pytorch_and_our_options(name: str) -> None:
    ours, theirs = (parameters(getattr(package, name)) for package in (fused, torch.optim))
    shared = [name for name in ours if name not in OWN]
    if torch.__version__ < "2.7":
        shared = [name for name in shared if name != "decoupled_weight_decay" or name in theirs]
    assert shared == list(theirs)
    assert {name: ours[name] for name in shared} == theirs
    assert all(
        kind == inspect.Parameter.KEYWORD_ONLY for kind, _ in [*ours.values()][len(shared) :]
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_signatures_are_written_out(name: str) -> None:
    cls: Any = getattr(fused, name)
    of_class, of_constructor = parameters(cls), parameters(cls.__init__)
    assert [*of_constructor] == ["self", *of_class]
    assert not [kind for kind, _ in of_class.values() if kind in VARIADIC]
    own = {n: default for n, (_, default) in of_class.items() if n in OWN}
    assert own.items() <= OWN.items()


@pytest.mark.parametrize("name", EVERY)
def test_what_is_given_arrives(name: str) -> None:
    """Every argument, with another value than its default, is the option of the group."""
    cls: Any = getattr(fused, name)
    others = {
        "lr": 0.25, "betas": (0.5, 0.25), "eps": 0.125, "foreach": True, "fused": None,
        "sparse": "all", "state_dtype": torch.float64, "lr_power": -0.25, "rho": 0.5,
        "beta2_decay": -0.5, "etas": (0.25, 1.5), "step_sizes": (0.125, 2.0), "beta3": 0.5,
        "capturable": False, "differentiable": False, "fsdp_in_use": False, "slice_p": 1,
        "rounding": "kahan",
    }  # fmt: skip
    others |= {"betas": (0.5, 0.25, 0.75)} if name == "Adan" else {}
    others |= {"eps": (0.5, 0.25)} if name == "Adafactor" else {}
    given = {}
    for key, (_, default) in parameters(cls).items():
        if key not in ("params", "skip_nonfinite"):
            given[key] = others.get(key, not default if isinstance(default, bool) else 0.5)
    if "rowwise_bias_correction" in given and "amsgrad" in given:  # excludes it
        given["amsgrad"] = False
    given |= {"dampening": 0.0} if name in ("SGD", "LARS") else {}
    given |= {"d": 2.0} if name == "Adafactor" else {}
    given |= {"d0": 0.5} if name == "Prodigy" else {}
    skips = "skip_nonfinite" in parameters(cls)
    optimizer = cls(
        [torch.nn.Parameter(torch.ones(2, 2).bfloat16())], **given, skip_nonfinite=skips
    )
    group = optimizer.param_groups[0]
    assert {key: group[key] for key in given} == given
    assert optimizer.skip_nonfinite is True


def test_classes_of_users_show_what_they_take() -> None:
    class Written(fused.Adam):
        def __init__(self, params: Any, mine: int = 3) -> None:
            super().__init__(params, lr=mine)

    class Below(Written):
        pass

    class Before(fused.FusedOptimizer, torch.optim.SGD):
        method, scalars = fused.SGD.method, fused.SGD.scalars

    class Further(Before):
        pass

    assert [*parameters(Written)] == [*parameters(Below)] == ["params", "mine"]
    expected = [*parameters(torch.optim.SGD), "sparse", "skip_nonfinite", "state_dtype", "rounding"]
    assert [*parameters(Before)] == [*parameters(Further)] == expected
    w = torch.nn.Parameter(torch.ones(2))
    assert Further([w], 0.5, momentum=0.25).param_groups[0]["momentum"] == 0.25
    assert Below([w], mine=4).param_groups[0]["lr"] == 4


@pytest.mark.parametrize("name", [*OPTIMIZERS, "clip_grad_norm_", "clip_grad_value_"])
def test_pages_stand_alone(name: str) -> None:
    """A formula, every argument, what differs from PyTorch's, and an example, on each."""
    target: Any = getattr(fused, name)
    text = inspect.getdoc(target) or ""
    head, _, rest = text.partition("\nArgs:\n")
    arguments = rest.partition("\n\n")[0]
    assert "::\n\n    " in (text if name == "FusedOptimizer" else head)
    named = {
        word.strip()
        for line in arguments.splitlines()
        if line.startswith("    ") and line[4] != " "
        for word in line.partition(":")[0].split(",")
    }
    assert named == set(parameters(target)) - {"self"}
    assert "see `" not in arguments and not re.search("as `[A-Z]", text)
    assert "Differs from ``torch." in text or "``torch.optim`` has none" in text
    assert name in text.partition(">>> ")[2]
