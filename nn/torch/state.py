"""The states of an optimizer, and the places of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def single(value: float) -> Tensor:
    """A state that is a single number, of the type that PyTorch gives it."""
    is_double = torch.get_default_dtype() == torch.float64
    return torch.tensor(value, dtype=torch.float64 if is_double else torch.float32)


def cast_states(state: dict[str, Any], parameter: Tensor, dtype: torch.dtype | None) -> None:
    """Give the states of a parameter's shape another dtype."""
    for name, value in state.items():
        if dtype is not None and name != "step" and value.shape == parameter.shape:
            state[name] = value.to(dtype)


def keep_dtypes(state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Give a state that was loaded the dtypes it was saved with: PyTorch takes the parameter's."""
    for name, value in saved.items():
        loaded = state.get(name)
        if not isinstance(loaded, Tensor) or name == "step":
            continue
        if isinstance(value, Tensor) and loaded.dtype != value.dtype:
            state[name] = value.to(device=loaded.device, copy=True)
        if state[name].layout == torch.sparse_coo:  # PyTorch's SGD on sparse gradients
            state[name] = state[name].to_dense()


def places_of(groups: Sequence[Mapping[str, Any]]) -> dict[int, tuple[int, str]]:
    """By the identity of a parameter the number of its group, and its name."""
    places: dict[int, tuple[int, str]] = {}
    for k, group in enumerate(groups):
        names = group.get("param_names") or ()
        for j, parameter in enumerate(group["params"]):
            name = names[j] if names else len(places)
            places[id(parameter)] = k, f"parameter {name}"
    return places
