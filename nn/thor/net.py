"""The layers and parameters that a net declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from ...ops.runtime.errors import reject
from ...ops.runtime.frameworks import framework_of
from ..base.parameter import Parameter
from .layers import ThorLayer

Declared = ThorLayer | Parameter
_LEAVES = (str, bytes, int, float, complex, np.ndarray, np.generic, type, ModuleType)


def declared(net: Any) -> dict[str, Declared]:
    """Layers and further parameters by their place in a net: a layer, or what the elements or
    attributes of a list, tuple, mapping or object hold, and theirs.
    """
    entries = dict(_walk("", net, set()))
    layers = {name: d for name, d in entries.items() if isinstance(d, ThorLayer)}
    if not layers:
        expected = "a ThorDense, ThorConv2d, ThorEmbedding or ThorLayerNorm in it"
        reject(ValueError, "thor", "net", "declares no layers", expected, type(net).__name__)
    owners: dict[int, str] = {}
    for name, layer in layers.items():
        for parameter in layer.parameters:
            if id(parameter) in owners:
                argument, got = f"layer {name!r}", repr(owners[id(parameter)])
                expected = "layers with parameters of their own"
                reject(ValueError, "thor", argument, "shares a parameter", expected, got)
            owners[id(parameter)] = name
    return {n: d for n, d in entries.items() if isinstance(d, ThorLayer) or id(d) not in owners}


def _walk(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Declared]]:
    if value is None or isinstance(value, _LEAVES) or id(value) in seen:
        return
    # Parts of a net may refer to the whole, or to each other.
    seen.add(id(value))
    if isinstance(value, ThorLayer | Parameter):
        yield name or "net", value
    elif framework_of(value) is None:  # an array on a device has attributes of its framework
        for key, part in _parts(value):
            yield from _walk(f"{name}.{key}" if name else str(key), part, seen)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif hasattr(value, "__dict__"):
        yield from vars(value).items()


def trainable(entries: Mapping[str, Declared]) -> list[Parameter]:
    """The parameters that may be updated, in order; those without a name get one by their place."""
    parameters: list[Parameter] = []
    for place, entry in entries.items():
        named = {place: entry} if isinstance(entry, Parameter) else {
            f"{place}.{name}": p for name, p in zip(entry.NAMES, entry.parameters, strict=False)
        }  # fmt: skip
        for name, parameter in named.items():
            if parameter.requires_grad:
                if parameter.name is None:
                    parameter.name = name
                parameters.append(parameter)
    return parameters
