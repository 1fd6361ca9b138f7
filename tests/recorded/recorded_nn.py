"""Optimizers of the library as the recorded runs of MindSpore had them."""

from collections.abc import Callable
from typing import Any

import numpy as np
from fusestep import nn
from recorded import Case, Step


def lars(params: Any, *, epsilon: float, coefficient: float, use_clip: bool, **inner: Any) -> Any:
    """LARS around the optimizer that was recorded with it."""
    return nn.LARS(nn.Momentum(params, momentum=0.9, **inner), epsilon, coefficient, use_clip)


class InverseTime(nn.LearningRateSchedule):
    """0.1, 0.05, 0.0333..."""

    def construct(self, global_step: Any) -> Any:
        """The learning rate of step 0, 1, 2, ..."""
        return 0.1 / (1 + global_step)


# What the recorded texts stand for.
SCHEDULES: dict[str, Callable[[], Any]] = {
    "0.1/(1+step)": InverseTime, "0.05+0.01*step": lambda: lambda step: 0.05 + 0.01 * step,
}  # fmt: skip
GROUPS: dict[str, Callable[[], dict[str, dict[str, Any]]]] = {
    "[{dense.weight: lr=.05, wd=.02}, {bn.gamma: defaults}, {conv.weight: wd=0}]": lambda: {
        "dense.weight": {"lr": 0.05, "weight_decay": 0.02}, "bn.gamma": {},
        "conv.weight": {"weight_decay": 0.0}},
    "[{dense.weight: lr=0.1/(1+step), wd=.02}, {bn.gamma: defaults}, {conv.weight: wd=0}]": (
        lambda: {
            "dense.weight": {"lr": InverseTime(), "weight_decay": 0.02}, "bn.gamma": {},
            "conv.weight": {"weight_decay": 0.0}}),
    "[{dense.weight: wd=.02}, {bn.gamma: defaults}, {conv.weight: wd=0}]": lambda: {
        "dense.weight": {"weight_decay": 0.02}, "bn.gamma": {},
        "conv.weight": {"weight_decay": 0.0}},
}  # fmt: skip


def build(case: Case, **changed: Any) -> Any:
    """The optimizer of a case over copies of its parameters."""
    names = [name for name, _ in case.meta["params"]]
    parameters = {
        name: nn.Parameter(case.initial[f"p{i}"].copy(), name=name) for i, name in enumerate(names)
    }
    hyper = {
        key: SCHEDULES[value]() if isinstance(value, str) and key != "groups" else value
        for key, value in {**case.hyper, **changed}.items()
    }
    hyper |= {key: tuple(hyper[key]) for key in ("etas", "step_sizes") if key in hyper}
    if case.api == "nn.Lamb":
        hyper["clip_ratio"] = case.name.endswith("_v1")
    given: list[Any] = list(parameters.values())
    if "groups" in hyper:
        table = GROUPS[hyper.pop("groups")]()
        given = [{"params": [parameters[name]], **options} for name, options in table.items()]
    if "order_params" in hyper:
        given.append({"order_params": [parameters[name] for name in hyper.pop("order_params")]})
    if case.api == "nn.Optimizer":
        return nn.Optimizer(parameters=given, **hyper)
    is_lars = case.api == "nn.LARS(nn.Momentum(momentum=.9))"
    opt = (lars if is_lars else getattr(nn, case.api.removeprefix("nn.")))(given, **hyper)
    if case.meta.get("target") == "CPU":
        opt.target = "CPU"
    return opt


def gradients(case: Case, step: Step) -> tuple[Any, ...]:
    """The gradients of a step, row-sparse ones as RowTensors."""
    if "indices" in step.inputs:
        shape = case.initial["p0"].shape
        return (nn.RowTensor(step.inputs["indices"], step.inputs["grad"], shape),)
    return tuple(step.inputs[f"g{i}"] for i in range(len(case.meta["params"])))


def arrays(opt: Any) -> dict[str, np.ndarray]:
    """Copies of parameters and states under the names that they have in a recorded step."""
    parameters = {f"p{i}": p.data.copy() for i, p in enumerate(opt.parameters)}
    return parameters | {f"s:{name}": array for name, array in opt.state_dict().items()}


def recorded_states(case: Case) -> dict[str, np.ndarray]:
    """The states at the end of a case, under MindSpore's names."""
    last = case.steps[-1].outputs
    return {entry[2:]: array for entry, array in last.items() if entry.startswith("s:")}


def unkept_states(case: Case) -> dict[str, np.ndarray]:
    """States of MindSpore that the library does without, with what they hold at the end. That is
    nothing to resume from: constants, which tell at most that there was a first step, the last step
    itself, or what follows from its number."""
    momentum = case.hyper.get("momentum", 0.0)
    found: dict[str, np.ndarray] = {}
    for i, (name, shape) in enumerate(case.meta["params"]):
        if case.api == "nn.SGD":
            found[f"stat.{name}"] = np.full(shape, 0.0 if momentum else 1.0, case.dtype)
            if not momentum:
                found[f"accum.{name}"] = np.zeros(shape, case.dtype)
        elif case.api == "nn.RMSProp" and not momentum:
            before, after = (step.outputs[f"p{i}"] for step in case.steps[-2:])
            found[f"moment.{name}"] = before - after
        elif case.api == "nn.ASGD":
            last = case.steps[-1].outputs
            found |= {f"{x}_{name}": last[f"s:{x}_{name}"] for x in ("eta", "mu")}
        elif case.api == "nn.AdaFactor":
            unused = ("",) if len(shape) > 1 else ("row_", "col_")
            found |= {f"exp_avg_sq_{part}{name}": np.zeros(1, case.dtype) for part in unused}
    return found
