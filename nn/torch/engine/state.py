"""The states of an optimizer, and the places of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....kernels.cpu.threads import allocation
from ....kernels.idle_table import SLEEP
from ....kernels.keeping import KAHAN, MASTER, begun_anew
from ....kernels.quiet import quiet
from ....kernels.rule import Rule
from ....kernels.state import PARAMETER, State
from ....ops.runtime.errors import reject
from ...distributed.shard import RowShard, places
from ...engine.catch_up import SCALARS, check_missed
from ...engine.tables import LAST
from .memory import NUMBERS, array_of, tensor_of
from .part import number
from .tensors import local, wide_dtype

Making = Callable[[tuple[int, ...], np.dtype[Any], Any], np.ndarray]
"""A function that makes a state of this shape and dtype, and how it begins."""


def single(value: float) -> Tensor:
    """A state that is a single number, of the type that PyTorch gives it."""
    is_double = torch.get_default_dtype() == torch.float64
    return torch.full((), value, dtype=torch.float64 if is_double else torch.float32)


def full_like(parameter: Tensor, value: float, dtype: torch.dtype | None) -> Tensor:
    """A state of a parameter's shape and strides, filled, on large pages where it is large."""
    made = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    here = made if type(made) is Tensor else local(made)
    if not here.is_cuda:
        allocation.on_large_pages(here.data_ptr(), here.nbytes)
    return made.fill_(value) if value else made.zero_()


def filled(parameter: Tensor, shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Tensor:
    """A state of another shape, cut as the parameter is."""
    if local(parameter) is parameter:
        return parameter.new_full(shape, value, dtype=dtype, requires_grad=False)
    from torch.distributed.tensor import full

    mesh, placements = parameter.device_mesh, parameter.placements
    return full(shape, value, dtype=dtype, device_mesh=mesh, placements=placements)


def element_state(
    parameter: Tensor, state: State, value: float, asked: torch.dtype | None,
    make: Making | None = None,
) -> Tensor:  # fmt: skip
    """A new state of a parameter's elements: filled, or a copy of the parameter.

    ``asked`` is its dtype where the state declares none; None: the parameter's. With ``make`` that
    function makes it.
    """
    if state.initial == PARAMETER:
        asked = parameter.dtype
    dtype = asked if state.dtype is None else wide_dtype(state, parameter.dtype)
    if make is not None:
        initial = array_of(parameter.detach()) if state.initial == PARAMETER else value
        return tensor_of(make(tuple(parameter.shape), NUMBERS[dtype or parameter.dtype], initial))
    made = full_like(parameter, value, dtype)
    return made.copy_(parameter.detach()) if state.initial == PARAMETER else made


def beside_of(
    parameter: Tensor, beside: Sequence[State], state: Mapping[str, Any]
) -> dict[str, Any]:
    """The states beside a weight that a state lacks, or that make another weight, begun anew."""
    made = {}
    for kept in beside:
        there = state.get(kept.name)
        if there is None:
            made[kept.name] = element_state(parameter, kept, 0.0, None)
        elif kept in (*MASTER.beside, *KAHAN.beside) and there.shape == parameter.shape:
            keeping = MASTER if kept in MASTER.beside else KAHAN
            made[kept.name] = begun_anew(keeping, parameter.detach(), there, torch, Tensor.to)
    return {name: x for name, x in made.items() if x is not None}


def without_states(state_dict: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A state dict without the states of some names."""
    states = {
        key: {name: x for name, x in state.items() if name not in names}
        if isinstance(state, Mapping) and not state.keys().isdisjoint(names)
        else state
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


class Number(NamedTuple):
    """A state that is a single number on the host, and what a step makes of it."""

    tensor: Tensor
    value: np.ndarray


@quiet
def single_of(state: Tensor, value: Any) -> Number:
    """A state that is a single number on the host, with its new value in its dtype."""
    return Number(state, np.array([number(value)]).astype(NUMBERS[state.dtype]))


def cast_states(state: dict[str, Any], parameter: Tensor, dtype: torch.dtype | None) -> None:
    """Give the states of a parameter's shape another dtype."""
    for name, value in state.items():
        is_cast = dtype is not None and name != "step" and isinstance(value, Tensor)
        if is_cast and value.shape == parameter.shape:
            state[name] = value.to(dtype)


_CAME_FROM = "came_from"  # the device of a number in a file, as its attribute
_OF_GROUPS = "lr", "initial_lr"  # tensors there, in a run that can be captured


class LeftHere(Tensor):
    """A single number that PyTorch's load leaves where it is."""

    def to(self, *_: Any, **__: Any) -> Any:
        """The number itself."""
        return self


def left_here(state_dict: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A state dict with the numbers of these names as PyTorch's load leaves them."""
    states = {
        key: {
            name: x.as_subclass(LeftHere) if name in names and type(x) is Tensor else x
            for name, x in state.items()
        }
        for key, state in state_dict["state"].items()
        if isinstance(state, Mapping)
    }
    return {**state_dict, "state": {**state_dict["state"], **states}}


def numbers_here(state_dict: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A state dict whose numbers of these names, and rates, have come from devices to the host.

    `numbers_there` gives them back.
    """
    return _moved(state_dict, names, lambda x: "cpu" if x.is_cuda and x.numel() == 1 else None)


def numbers_there(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict whose numbers that came from devices are there again."""
    return _moved(state_dict, None, lambda x: getattr(x, _CAME_FROM, None))


def _moved(
    state_dict: Mapping[str, Any], names: Collection[str] | None, place_of: Callable[[Tensor], Any]
) -> dict[str, Any]:
    """A state dict some of whose numbers have moved: by one transfer for each device and dtype."""
    states, groups = dict(state_dict["state"]), dict(enumerate(state_dict["param_groups"]))
    moving: dict[Any, list[tuple[dict[Any, Any], Any, str, Tensor]]] = {}
    for every, known in ((states, names), (groups, _OF_GROUPS)):
        for key, own in every.items():
            for name, x in own.items() if isinstance(own, Mapping) else ():
                is_known = isinstance(x, Tensor) and (known is None or name in known)
                if is_known and (place := place_of(x)) is not None:
                    moving.setdefault((place, x.device, x.dtype), []).append((every, key, name, x))
    for (place, *_), found in moving.items():
        with torch.no_grad():
            moved = torch.stack([local(x).reshape(()) for *_, x in found]).to(place)
        for (every, key, name, x), value in zip(found, moved.unbind(), strict=True):
            every[key] = {**every[key], name: value.reshape(x.shape)}
            if x.is_cuda:
                vars(every[key][name])[_CAME_FROM] = str(x.device)
    return {**state_dict, "state": states, "param_groups": [*groups.values()]}


def updates_of(where: str, state: Mapping[str, Any]) -> int:
    """The count of updates of a parameter whose rows sleep.

    Raises:
        ValueError: it is none.
    """
    value = state.get("step")
    is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    count = number(value) if is_number else -1.0
    if not 0 <= count < 1 << 31 or count != int(count):
        reject(ValueError, where, "state 'step'", "is no count", "0 to 2**31 - 1", value)
    return int(count)


def check_states(where: str, keys: Iterable[Any], states: Mapping[Any, Any]) -> None:
    """Refuse what is no dict where states of a parameter should be, as PyTorch does too late."""
    for key in keys:
        if not isinstance(found := states.get(key, {}), Mapping):
            got = type(found).__name__
            reject(TypeError, where, f"state of parameter {key}", "has a wrong type", "a dict", got)


def has_master(group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether a state of a parameter of a group has the weight in float32."""
    return group.get("rounding") == MASTER.name and MASTER.name in state


def check_masters(
    where: str, groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]
) -> None:
    """Refuse a state dict that has no weights beside masters, or not all masters of a group."""
    states, found = state_dict["state"], 0
    for group, saved in zip(groups, state_dict["param_groups"], strict=False):
        for parameter, key in zip(group["params"], saved["params"], strict=False):
            state = states.get(key)
            if saved.get("rounding") != MASTER.name or not state:
                continue
            if MASTER.name not in state and number(state.get("step", 1.0)) == 0.0:
                continue  # it never had a gradient
            master, found = state.get(MASTER.name), found + 1
            if getattr(master, "shape", None) != parameter.shape:
                label, expected = f"the master of parameter {key}", f"{tuple(parameter.shape)}"
                got = "none" if master is None else tuple(master.shape)
                reject(ValueError, where, label, "does not fit", expected, got)
    if not found:
        expected = "weights beside masters"
        reject(ValueError, where, "from_masters", "is impossible", expected, "a state without")


def keep_dtypes(parameter: Tensor, state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Give a state that was loaded the dtypes it was saved with: PyTorch takes the parameter's.

    Numbers that were on a device go back to that of the parameter.
    """
    for name, value in saved.items():
        loaded = state.get(name)
        if isinstance(loaded, LeftHere):
            state[name] = value
            if hasattr(value, _CAME_FROM):
                vars(value)[_CAME_FROM] = str(parameter.device)
            continue
        if not isinstance(loaded, Tensor) or name == "step":
            continue
        if isinstance(value, Tensor) and loaded.dtype != value.dtype:
            state[name] = value.to(device=loaded.device, copy=True)
        # Of PyTorch's SGD on sparse gradients.
        if name == "momentum_buffer" and state[name].layout == torch.sparse_coo:
            state[name] = state[name].to_dense()


def names_of(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the parameters of all groups, in order: their own, or their numbers."""
    names: list[str] = []
    for group in groups:
        own = group.get("param_names") or range(len(names), len(names) + len(group["params"]))
        names += [f"parameter {name}" for name in own]
    return names


def name_of(groups: Sequence[Mapping[str, Any]], parameter: Tensor) -> str:
    """The name of a parameter; that of the first where it is in no group."""
    return names_of(groups)[place_of(groups, parameter) or 0]


def place_of(groups: Sequence[Mapping[str, Any]], parameter: Tensor) -> int | None:
    """The number of a parameter among those of all groups; None where it is none of them."""
    every = [*map(id, chain.from_iterable(group["params"] for group in groups))]
    return every.index(id(parameter)) if id(parameter) in every else None


def group_of(groups: Sequence[Mapping[str, Any]], parameter: Tensor) -> Any:
    """The group of a parameter; None where it is in none of them."""
    return next((own for own in groups if place_of([own], parameter) is not None), None)


def whole_table(tensor: Tensor, shard: RowShard) -> Tensor:
    """The rows of this process as a DTensor of the whole table.

    Where PyTorch does not know the processes, these are the rows themselves, in the order of
    their numbers if there is one process.
    """
    if len(tensor) != len(shard):
        return tensor  # an entry of others in a state
    group = getattr(shard.comm, "group", None)
    if group is None:
        if shard.comm.size > 1 or shard.order == "range":
            return tensor
        by_number = torch.empty_like(tensor)
        by_number[torch.from_numpy(shard.indices)] = tensor
        return by_number
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(group, tensor.device.type)
    shape = torch.Size((shard.rows, *tensor.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    whole: Tensor = DTensor.from_local(
        tensor.detach(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
    )
    return whole


def order_in_state(shard: RowShard) -> str:
    """The order of the rows that `whole_table` gives."""
    is_by_number = shard.comm.size == 1 and getattr(shard.comm, "group", None) is None
    return "range" if is_by_number else shard.order


def own_rows(tensor: Tensor, shard: RowShard, order: str | None = None) -> Tensor:
    """The rows of this process, of a DTensor, a whole table, or those of a process.

    Args:
        tensor: the rows.
        shard: whose rows they become.
        order: of those that were given; None: a whole table lies by its numbers, all else as
            the shard's.

    Raises:
        ValueError: a DTensor, or rows of a process, are in another order than the shard's.
    """
    to_local = getattr(tensor, "to_local", None)
    if to_local is None and len(tensor) == shard.rows:
        return tensor[torch.from_numpy(places(shard.indices, shard.rows, order or "range"))]
    is_own = to_local is not None or len(tensor) == len(shard)  # what else it is, PyTorch refuses
    if is_own and order not in (None, shard.order):
        where, wrong = "ShardedEmbedding.load_state_dict", "has another order of rows"
        reject(ValueError, where, "the table", wrong, shard.order, order)
    found: Tensor = tensor if to_local is None else to_local()
    return found


def _has_rows(name: str, x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and name != SCALARS


def with_rows(
    convert: Callable[[Tensor, RowShard], Tensor], state_dict: dict[str, Any],
    groups: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """A state dict whose states of tables that several processes own are converted."""
    states = dict(state_dict["state"])
    for group, saved in zip(groups, state_dict["param_groups"], strict=False):
        for parameter, key in zip(group["params"], saved["params"], strict=False):
            shard = getattr(parameter, "row_shard", None)
            # Of a table that grows each process saves its own rows.
            if isinstance(shard, RowShard) and isinstance(states.get(key), dict):
                states[key] = {
                    name: convert(x, shard) if _has_rows(name, x) else x
                    for name, x in states[key].items()
                }
    return {**state_dict, "state": states}


def check_asleep(where: str, rule: Rule, parameter: Tensor, state: Mapping[str, Any]) -> None:
    """Refuse a saved state of a parameter that does not tell what its rows have missed."""
    last, label = state.get(LAST.name), f"state {LAST.name!r}"
    if last is not None:
        shapes = {LAST.name: tuple(parameter.shape[:1]), SCALARS: (SLEEP, len(rule.hp) + 1)}
        for name in shapes.keys() & state.keys():
            if (got := np.shape(state[name])) != shapes[name]:
                reject(ValueError, where, f"state {name!r}", "has a wrong shape", shapes[name], got)
        check_missed(where, label, np.asarray(last), updates_of(where, state), state.get(SCALARS))
