"""Parameter groups: learning rate, weight decay and centralization of each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...ops.runtime import check
from ...ops.runtime.device import device_of
from ...ops.runtime.errors import UnknownArgumentError, reject, reject_unknown
from .arguments import LEAVES, check_kind
from .parameter import Parameter
from .rates import Rate, Schedule, learning_rate, weight_decay

GROUP_KEYS = ("params", "lr", "weight_decay", "grad_centralization", "order_params")
FUSED_KEYS = (*GROUP_KEYS, "rounding", "copies")
"""The keys of groups whose parameters may be kept in other ways."""


@dataclass(frozen=True)
class ParameterOptions:
    """One parameter and the values of its group."""

    parameter: Parameter
    rate: Rate
    decay: float | Schedule  # 0 where it is exempt
    centralize: bool = False
    rounding: Any = None  # how it is kept, if its group says so
    copy: Any = None  # of 16 bits, which a step writes beside it


@dataclass(frozen=True)
class Groups:
    """All parameters in optimizer order; ``is_group_lr``: a group has its own learning rate."""

    options: tuple[ParameterOptions, ...]
    rates: tuple[Rate, ...]
    is_group: bool
    is_group_lr: bool


def read_groups(
    where: str, parameters: Any, rate: Any, decay: Any, *, filter_names: bool,
    keys: Sequence[str] = GROUP_KEYS,
) -> Groups:  # fmt: skip
    """Read the parameters of an `Optimizer`, whose docstring says what is accepted.

    ``rate`` and ``decay`` are the defaults. With ``filter_names`` ungrouped parameters whose name
    contains "beta" or "gamma" do not decay. Groups may have these ``keys``.
    """
    entries = _entries(where, parameters)
    default = learning_rate(where, "learning_rate", rate)
    default_decay = weight_decay(where, decay)
    if isinstance(entries[0], dict):
        groups = _from_dicts(where, entries, default, default_decay, keys)
    else:
        groups = _from_list(where, entries, default, default_decay, filter_names)
    _check_names(where, groups.options)
    _check_lengths(where, groups.rates)
    return groups


def _entries(where: str, parameters: Any) -> list[Any]:
    if parameters is None:
        reject(ValueError, where, "parameters", "is missing", "a list", None)
    expected = "a list of parameters or of group dicts"
    if isinstance(parameters, Mapping):
        reject(TypeError, where, "parameters", "has a wrong type", expected, "dict", LEAVES)
    entries = _listed(where, "parameters", parameters, expected, but=dict)
    if not entries:
        reject(ValueError, where, "parameters", "is empty", "at least one parameter", "none")
    if len({isinstance(e, dict) for e in entries}) == 2:
        expected = "only parameters or only dicts"
        reject(TypeError, where, "parameters", "mixes kinds", expected, "both")
    return entries


def _listed(where: str, name: str, value: Any, expected: str, but: Any = ()) -> list[Any]:
    """The elements of an iterable that is no single parameter, no text, and none of ``but``."""
    is_single = isinstance(value, (Parameter, np.ndarray, str, bytes, but))
    check_kind(where, name, value, () if is_single else Iterable, expected)
    return list(value)


def _wrap(where: str, entries: Iterable[Any]) -> list[Parameter]:
    wrapped = []
    for entry in entries:
        if isinstance(entry, dict | str):
            wrong, got = "holds a wrong type", type(entry).__name__
            reject(TypeError, where, "parameters", wrong, "parameters", got)
        parameter = entry if isinstance(entry, Parameter) else Parameter(entry)
        if not parameter.requires_grad:
            name, wrong = f"parameter {parameter.name!r}", "does not require a gradient"
            reject(ValueError, where, name, wrong, "requires_grad=True", False, "; leave it out")
        wrapped.append(parameter)
    return wrapped


def _from_list(
    where: str, entries: list[Any], rate: Rate, decay: float | Schedule, filter_names: bool
) -> Groups:
    exempt = ("beta", "gamma") if filter_names else ()
    options = [
        ParameterOptions(p, rate, 0.0 if any(part in (p.name or "") for part in exempt) else decay)
        for p in _wrap(where, entries)
    ]
    return Groups(tuple(options), (rate,), is_group=False, is_group_lr=False)


def _from_dicts(
    where: str, groups: list[Any], rate: Rate, decay: float | Schedule, keys: Sequence[str]
) -> Groups:
    options: list[ParameterOptions] = []
    rates: list[Rate] = []
    order: list[Parameter] | None = None
    of_parameters = "a list of parameters"
    for k, group in enumerate(groups):
        reject_unknown(f"{where}: group {k}", group, keys)
        if "order_params" in group:
            if len(group) > 1:
                wrong = "has other keys beside order_params"
                reject(ValueError, where, f"group {k}", wrong, "only it", list(group))
            order = _listed(where, f"group {k}: params", group["order_params"], of_parameters)
            continue
        if "params" not in group:
            wrong, expected = "has no 'params'", "the key 'params'"
            reject(UnknownArgumentError, where, f"group {k}", wrong, expected, list(group))
        own_rate = rate
        if "lr" in group:
            own_rate = learning_rate(where, f"learning_rate_group_{k}", group["lr"])
            rates.append(own_rate)
        own_decay = weight_decay(where, group["weight_decay"]) if "weight_decay" in group else decay
        centralize = group.get("grad_centralization", False)
        check.flag(where, "grad_centralization", centralize)
        wrapped = _wrap(where, _listed(where, f"group {k}: params", group["params"], of_parameters))
        copies = _copies(where, k, group.get("copies"), wrapped)
        rounding = group.get("rounding")
        options += [
            # Below two dimensions there is nothing to centralize.
            ParameterOptions(p, own_rate, own_decay, centralize and p.ndim >= 2, rounding, copy)
            for p, copy in zip(wrapped, copies, strict=True)
        ]
    if not options:
        reject(ValueError, where, "parameters", "is empty", "at least one parameter", "none")
    if order is not None:
        options = _reorder(where, options, order)
    # Learning rates are part of the state of an optimizer. A default that every group overrides is
    # left out: it would be saved and loaded without being used.
    if any(o.rate is rate for o in options) or not rates:
        rates.insert(0, rate)
    is_group_lr = any(o.rate is not rate for o in options)
    return Groups(tuple(options), tuple(rates), is_group=True, is_group_lr=is_group_lr)


def _copies(where: str, k: int, copies: Any, parameters: Sequence[Parameter]) -> list[Any]:
    """The arrays of 16 bits that a step writes beside parameters; None where there is none."""
    if copies is None:
        return [None] * len(parameters)
    name = f"group {k}: copies"
    expected = f"a list of {len(parameters)}, an array or None for each parameter"
    listed = _listed(where, name, copies, expected)
    if len(listed) != len(parameters):
        reject(ValueError, where, name, "do not fit the parameters", expected, len(listed))
    found = []
    for j, (copy, p) in enumerate(zip(listed, parameters, strict=True)):
        label = f"{name}[{j}]"
        array = None if copy is None else check.variable(where, label, copy)
        found.append(array)
        if array is None:
            continue
        device_of(where, {"the parameter": p.array, label: array})
        fits = p.dtype == np.float32 and array.dtype.itemsize == 2
        if not fits or array.shape != p.shape:
            expected = f"float16 or bfloat16 of a float32 parameter, {p.shape}"
            got = f"{array.dtype} of {p.dtype}, {array.shape}"
            reject(ValueError, where, label, "does not fit its parameter", expected, got)
    return found


def _reorder(
    where: str, options: list[ParameterOptions], order: list[Parameter]
) -> list[ParameterOptions]:
    if any(not isinstance(p, Parameter) for p in order):
        expected, got = "the Parameter objects of the groups", [type(p).__name__ for p in order]
        reject(TypeError, where, "order_params", "holds a wrong type", expected, got)
    if len(order) != len(options):
        reject(ValueError, where, "order_params", "has a wrong length", len(options), len(order))
    # Parameters may still be without a name here, and two may hold the same numbers.
    by_identity = {id(o.parameter): o for o in options}
    given = {id(p) for p in order}
    missing = [o.parameter.name for o in options if id(o.parameter) not in given]
    if missing:
        wrong = f"lacks parameter {missing[0]!r}"
        names = [p.name for p in order]
        reject(ValueError, where, "order_params", wrong, "every grouped parameter once", names)
    return [by_identity[id(p)] for p in order]


def _check_names(where: str, options: tuple[ParameterOptions, ...]) -> None:
    """Refuse parameters that are given twice, and names that repeat."""
    if len({id(o.parameter) for o in options}) != len(options):
        wrong = "holds a parameter twice"
        reject(RuntimeError, where, "parameters", wrong, "each once", "a repetition")
    seen: set[str] = set()
    for name in (o.parameter.name for o in options if o.parameter.name is not None):
        if name in seen:
            argument = f"parameter name {name!r}"
            reject(ValueError, where, argument, "repeats", "unique names", "two of it")
        seen.add(name)


def name_by_position(options: Sequence[ParameterOptions]) -> None:
    """Name the parameters without a name ``parameter_<i>``; names that were given stay."""
    taken = {option.parameter.name for option in options}
    for i, option in enumerate(options):
        if option.parameter.name is None:
            free = f"parameter_{i}"
            while free in taken:
                free += "_"
            option.parameter.name = free
            taken.add(free)


def _check_lengths(where: str, rates: tuple[Rate, ...]) -> None:
    # Training would end with the shortest list.
    lengths = {
        len(rate.data)
        for rate in rates
        if isinstance(rate, Parameter) and rate.ndim == 1 and not rate.is_on_device
    }
    if len(lengths) > 1:
        wrong, expected = "lists differ in length", "one length in all groups"
        reject(ValueError, where, "lr", wrong, expected, sorted(lengths))
