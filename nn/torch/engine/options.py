"""Options of groups, and checks of their values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ....kernels.rule import Rule
from ....kernels.tables import has_rows
from ....ops.runtime import check
from ....ops.runtime.errors import reject
from ...base.arguments import check_kind, seed
from .memory import DTYPE_NAMES, DTYPES
from .part import Group

Sparse = Literal["touched", "all", "catch_up"]
SPARSE = get_args(Sparse)
Rounding = Literal["nearest", "master", "kahan", "stochastic"]
ROUNDINGS = get_args(Rounding)
OWN: dict[str, Any] = {
    "sparse": None, "state_dtype": None, "rounding": "nearest", "rounding_seed": 0,
}  # fmt: skip
"""Options of groups that PyTorch's optimizers do not have."""
EPS_HAT: dict[str, Any] = {"eps_hat": False}
"""The extra option of `Adam` and of classes with its formula."""
ROWWISE: dict[str, Any] = {"rowwise_bias_correction": False}
"""The extra option of classes that can count the updates of each row."""
KERAS: dict[str, Any] = {"beta": 0.0, "l2_shrinkage": 0.0}
"""The extra options of `FTRL`."""


def arguments(names: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor among its ``locals()``."""
    return {name: x for name, x in names.items() if name not in ("self", "__class__")}


def with_defaults(names: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a class that PyTorch lacks: those of `Fused`, and defaults of groups."""
    own = "params", "skip_nonfinite", *OWN, *names["self"]._more_options
    given = arguments(names)
    handed_on = {name: given.pop(name) for name in own if name in given}
    return {**handed_on, "defaults": given}


def shown_constructor(cls: Any, base: Callable[..., None]) -> Callable[..., None]:
    """A constructor of a class that writes none, with the arguments of PyTorch's, then ``base``'s.

    Of the arguments of ``base``, the constructor of `Fused`, only those by name are taken.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        super(cls, self).__init__(*args, **kwargs)

    theirs = next(c for c in cls.__mro__ if c.__module__.startswith("torch."))
    signature, ours = inspect.signature(theirs.__init__), inspect.signature(base)
    keyword = inspect.Parameter.KEYWORD_ONLY
    every = [*signature.parameters.values()]
    every += [p for p in ours.parameters.values() if p.kind == keyword]
    every += [inspect.Parameter(name, keyword, default=x) for name, x in cls._more_options.items()]
    __init__.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
    return __init__


@contextmanager
def as_before_after_errors(groups: Iterable[Any]) -> Iterator[None]:
    """Restore the options of the caller's groups if an error ends the block."""
    before = []
    for group in (g for g in groups if isinstance(g, dict)):
        if isinstance(group.get("params"), Iterator):
            group["params"] = list(group["params"])  # an iterator can be read only once
        before.append((group, dict(group)))
    try:
        yield
    except BaseException:
        for group, options in before:
            group.clear()
            group.update(options)
        raise


def check_group(where: str, group: Group, *, takes_sparse: bool) -> None:
    """Refuse options that a group cannot have, and values that they cannot have."""
    if group.get("differentiable"):
        why = "the step writes in place, by compiled code that autograd does not see"
        raise RuntimeError(f"{where}: differentiable=True is not supported: {why}")
    if "skip_nonfinite" in group:
        reject(ValueError, where, "skip_nonfinite", "is no option of groups", "none", "one")
    check_own(where, {**OWN, **group}, takes_sparse=takes_sparse)


def refuse_capturable(where: str, group: Group) -> None:
    """Refuse a group that is to be captured; one that was, in a file, goes on."""
    if group.get("capturable"):
        why = "the host reads learning rate and counts in every step"
        raise RuntimeError(f"{where}: capturable=True is not supported: {why}")


def check_rounding(where: str, group: Group, rule: Rule, name: str, parameter: Tensor) -> None:
    """Refuse a way of rounding that does not fit a rule, or a parameter.

    Raises:
        ValueError: it is a rule on matrices, or the parameter has no 16 bits, or is on a device
            although it is to be rounded at random.
    """
    if group["rounding"] == "nearest":
        return
    label = f"rounding={group['rounding']!r}"
    if rule.lines or rule.matrix:
        reject(ValueError, where, label, "does not fit a rule on matrices", "'nearest'", "another")
    if parameter.dtype not in (torch.float16, torch.bfloat16):
        expected, got = "torch.float16 or torch.bfloat16", parameter.dtype
        reject(ValueError, where, label, f"does not fit {name}", expected, got)
    if group["rounding"] == "stochastic" and parameter.device.type != "cpu":
        reject(ValueError, where, label, f"does not fit {name}", "the host", parameter.device)


def check_copies(where: str, group: Group, rule: Rule) -> None:
    """Refuse copies of another number, kind, shape, dtype or device than the parameters need."""
    parameters, copies = group["params"], group["copies"]
    if rule.lines or rule.matrix:
        reject(ValueError, where, "copies", "do not fit a rule on matrices", None, "copies")
    if not isinstance(copies, list | tuple) or len(copies) != len(parameters):
        expected = f"a list of {len(parameters)}, a tensor or None for each parameter"
        got = len(copies) if isinstance(copies, list | tuple) else type(copies).__name__
        reject(ValueError, where, "copies", "do not fit the parameters", expected, got)
    for k, (parameter, copied) in enumerate(zip(parameters, copies, strict=True)):
        label = f"copies[{k}]"
        if copied is None:
            continue
        check_kind(where, label, copied, Tensor, "a tensor or None")
        found = copied.dtype in (torch.float16, torch.bfloat16), copied.shape, copied.device
        if parameter.dtype != torch.float32 or found != (True, parameter.shape, parameter.device):
            expected = f"float16 or bfloat16 of a float32 parameter, {tuple(parameter.shape)}, "
            got = f"{copied.dtype} of {parameter.dtype}, {tuple(copied.shape)}, {copied.device}"
            expected += str(parameter.device)
            reject(ValueError, where, label, "does not fit its parameter", expected, got)


def check_rows(where: str, name: str, parameter: Tensor) -> None:
    """Refuse a parameter that has no rows to measure; a vector is one row."""
    if is_lazy(parameter):
        fix = "; call the model once before"
        reject(ValueError, where, name, "is uninitialized", "one with a shape", "none", fix)
    shape = tuple(parameter.shape)
    if not has_rows(shape):
        expected = "at least 1 dimension, and rows with elements"
        reject(ValueError, where, name, "has no rows", expected, shape)


def check_own(where: str, own: Group, *, takes_sparse: bool) -> None:
    """Refuse values that the options of `OWN` and `EPS_HAT` cannot have."""
    sparse, dtype = own["sparse"], own["state_dtype"]
    if sparse is not None and (not takes_sparse or sparse not in SPARSE):
        expected = SPARSE if takes_sparse else "None: the norm is that of all rows"
        reject(ValueError, where, "sparse", "is unknown", expected, sparse)
    if dtype is not None and dtype not in DTYPES:
        reject(ValueError, where, "state_dtype", "is unknown", DTYPE_NAMES, dtype)
    if own["rounding"] not in ROUNDINGS:
        reject(ValueError, where, "rounding", "is unknown", ROUNDINGS, own["rounding"])
    seed(where, "rounding_seed", own.get("rounding_seed", 0))
    for name in (EPS_HAT | ROWWISE).keys() & own.keys():
        check.flag(where, name, own[name])


def saved_group(group: Group) -> dict[str, Any]:
    """A group of a state dict, with the name of its dtype, which every way to save takes."""
    dtype = group["state_dtype"]
    return {**group, "state_dtype": None if dtype is None else str(dtype).removeprefix("torch.")}


def loaded_group(group: Group) -> dict[str, Any]:
    """A group of a state dict with the dtype of that name; one that is unknown stays a name."""
    dtype = group.get("state_dtype")
    named = {"state_dtype": getattr(torch, dtype, dtype)} if isinstance(dtype, str) else {}
    return {**group, **named}


_NAMES = {"lr": "learning rate", "eps": "epsilon value"}  # as PyTorch calls them


def not_negative(**values: Any) -> None:
    """Refuse hyper-parameters below 0, in PyTorch's words."""
    for name, value in values.items():
        if name == "lr" and isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if not value >= 0.0:
            raise ValueError(f"Invalid {_NAMES.get(name, f'{name} value')}: {value}")


def above_0(**values: Any) -> None:
    """Refuse hyper-parameters that are not above 0, in PyTorch's words."""
    for name, value in values.items():
        if not value > 0.0:
            raise ValueError(f"Invalid {_NAMES.get(name, f'{name} value')}: {value}")


def betas_in_range(betas: Any, n: int = 2) -> None:
    """Refuse betas that are not ``n`` numbers in [0, 1), in PyTorch's words."""
    if len(betas) != n:
        raise ValueError(f"Invalid betas: expected {n} numbers, got {betas}")
    for k, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {k}: {beta}")
