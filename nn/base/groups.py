"""Parameter groups: what each parameter's learning rate, decay and centralization are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...ops.runtime.errors import UnknownArgumentError, message, reject_unknown
from ..schedules.base import Rate, Schedule, learning_rate, weight_decay
from .parameter import Parameter

GROUP_KEYS = ("params", "lr", "weight_decay", "grad_centralization", "order_params")


@dataclass(frozen=True)
class ParameterOptions:
    """One parameter and the values of its group.

    Attributes:
        parameter: the parameter.
        rate: its learning rate.
        decay: its weight decay, 0 where it is exempt.
        centralize: whether its gradient is centralized.
    """

    parameter: Parameter
    rate: Rate
    decay: float | Schedule
    centralize: bool = False


@dataclass(frozen=True)
class Groups:
    """All parameters in optimizer order; ``is_group_lr`` when any group has its own rate."""

    options: tuple[ParameterOptions, ...]
    rates: tuple[Rate, ...]
    is_group: bool
    is_group_lr: bool


def read_groups(
    where: str, parameters: Any, rate: Any, decay: Any, *, filter_names: bool
) -> Groups:
    """Read a list of parameters or of group dicts.

    Args:
        where: the optimizer's name, for errors.
        parameters: an iterable of parameters (arrays are wrapped) or of group dicts.
        rate: the default learning rate.
        decay: the default weight decay.
        filter_names: ungrouped parameters whose name contains "beta" or "gamma" do not decay.

    Raises:
        TypeError: a kind does not fit.
        ValueError: nothing to optimize, names that repeat, lists of different lengths, or
            ``order_params`` that does not fit.
        RuntimeError: a parameter is given twice.
        KeyError: an unknown or missing key of a group.
    """
    entries = _entries(where, parameters)
    default = learning_rate(where, "learning_rate", rate)
    default_decay = weight_decay(where, decay)
    if isinstance(entries[0], dict):
        groups = _from_dicts(where, entries, default, default_decay)
    else:
        groups = _from_list(where, entries, default, default_decay, filter_names)
    _check_names(where, groups.options)
    _check_lengths(where, groups.rates)
    return groups


def _entries(where: str, parameters: Any) -> list[Any]:
    if parameters is None:
        raise ValueError(message(where, "parameters", "is missing", "a list", None))
    if isinstance(parameters, Parameter | np.ndarray | str | bytes | dict) or not isinstance(
        parameters, Iterable
    ):
        raise TypeError(
            message(
                where,
                "parameters",
                "has a wrong type",
                "a list of parameters or of group dicts",
                type(parameters).__name__,
            )
        )
    entries = list(parameters)
    if not entries:
        raise ValueError(message(where, "parameters", "is empty", "at least one parameter", "none"))
    if len({isinstance(e, dict) for e in entries}) == 2:
        raise TypeError(
            message(where, "parameters", "mixes kinds", "only parameters or only dicts", "both")
        )
    return entries


def _wrap(where: str, entries: Iterable[Any]) -> list[Parameter]:
    found = []
    for entry in entries:
        if isinstance(entry, dict | str):
            raise TypeError(
                message(
                    where, "parameters", "holds a wrong type", "parameters", type(entry).__name__
                )
            )
        parameter = entry if isinstance(entry, Parameter) else Parameter(entry)
        if not parameter.requires_grad:
            raise ValueError(
                message(
                    where,
                    f"parameter {parameter.name!r}",
                    "does not require a gradient",
                    "requires_grad=True",
                    False,
                )
                + "; leave it out"
            )
        found.append(parameter)
    return found


def _is_exempt(name: str | None) -> bool:
    return name is not None and ("beta" in name or "gamma" in name)


def _from_list(
    where: str, entries: list[Any], rate: Rate, decay: float | Schedule, filter_names: bool
) -> Groups:
    options = []
    for parameter in _wrap(where, entries):
        own_decay = 0.0 if filter_names and _is_exempt(parameter.name) else decay
        options.append(ParameterOptions(parameter, rate, own_decay))
    return Groups(tuple(options), (rate,), is_group=False, is_group_lr=False)


def _from_dicts(where: str, groups: list[Any], rate: Rate, decay: float | Schedule) -> Groups:
    options: list[ParameterOptions] = []
    rates: list[Rate] = []
    order: list[Parameter] | None = None
    for k, group in enumerate(groups):
        reject_unknown(f"{where}: group {k}", group, GROUP_KEYS)
        if "order_params" in group:
            order = _order(where, k, group)
            continue
        if "params" not in group:
            raise UnknownArgumentError(
                message(where, f"group {k}", "has no 'params'", "the key 'params'", list(group))
            )
        own_rate = rate
        if "lr" in group:
            own_rate = learning_rate(where, f"learning_rate_group_{k}", group["lr"])
            rates.append(own_rate)
        own_decay = weight_decay(where, group["weight_decay"]) if "weight_decay" in group else decay
        centralize = group.get("grad_centralization", False)
        if not isinstance(centralize, bool):
            raise TypeError(
                message(
                    where,
                    "grad_centralization",
                    "has a wrong type",
                    "a bool",
                    type(centralize).__name__,
                )
            )
        options += [
            # Below two dimensions there is nothing to centralize.
            ParameterOptions(p, own_rate, own_decay, centralize and p.ndim >= 2)
            for p in _wrap(where, _group_entries(where, k, group["params"]))
        ]
    if not options:
        raise ValueError(message(where, "parameters", "is empty", "at least one parameter", "none"))
    if order is not None:
        options = _reorder(where, options, order)
    if any(o.rate is rate for o in options) or not rates:
        rates.insert(0, rate)
    is_group_lr = any(o.rate is not rate for o in options)
    return Groups(tuple(options), tuple(rates), is_group=True, is_group_lr=is_group_lr)


def _group_entries(where: str, k: int, params: Any) -> list[Any]:
    if isinstance(params, Parameter | np.ndarray | str | bytes) or not isinstance(params, Iterable):
        raise TypeError(
            message(
                where,
                f"group {k}: params",
                "has a wrong type",
                "a list of parameters",
                type(params).__name__,
            )
        )
    return list(params)


def _order(where: str, k: int, group: dict[str, Any]) -> list[Parameter]:
    if len(group) > 1:
        raise ValueError(
            message(
                where, f"group {k}", "has other keys beside order_params", "only it", list(group)
            )
        )
    return _group_entries(where, k, group["order_params"])


def _reorder(
    where: str, options: list[ParameterOptions], order: list[Parameter]
) -> list[ParameterOptions]:
    if any(not isinstance(p, Parameter) for p in order):
        raise TypeError(
            message(
                where,
                "order_params",
                "holds a wrong type",
                "the Parameter objects of the groups",
                [type(p).__name__ for p in order],
            )
        )
    by_identity = {id(o.parameter): o for o in options}
    if len(order) != len(options):
        raise ValueError(
            message(where, "order_params", "has a wrong length", len(options), len(order))
        )
    missing = [o for o in options if not any(o.parameter is p for p in order)]
    if missing:
        raise ValueError(
            message(
                where,
                "order_params",
                f"lacks parameter {missing[0].parameter.name!r}",
                "every grouped parameter once",
                [getattr(p, "name", p) for p in order],
            )
        )
    return [by_identity[id(p)] for p in order]


def _check_names(where: str, options: tuple[ParameterOptions, ...]) -> None:
    """Refuse what would be updated or saved twice."""
    if len({id(o.parameter) for o in options}) != len(options):
        raise RuntimeError(
            message(where, "parameters", "holds a parameter twice", "each once", "a repetition")
        )
    seen: set[str] = set()
    for name in (option.parameter.name for option in options):
        if name in seen:
            raise ValueError(
                message(where, f"parameter name {name!r}", "repeats", "unique names", "two of it")
            )
        if name is not None:
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
    lengths = {
        len(rate.data)
        for rate in rates
        if isinstance(rate, Parameter) and rate.ndim == 1 and not rate.is_on_device
    }
    if len(lengths) > 1:
        raise ValueError(
            message(
                where, "lr", "lists differ in length", "one length in all groups", sorted(lengths)
            )
        )
