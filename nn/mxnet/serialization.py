"""States of an Updater as bytes: arrays in the safetensors format, the rest as JSON within."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from ...kernels.storage import FOREIGN, STORAGES
from ...ops.runtime import check
from ...ops.runtime.arrays import adopt_anywhere
from ...ops.runtime.device import DeviceArray
from ...ops.runtime.errors import message, reject
from ..base.arguments import check_kind, count, is_int
from . import lr_scheduler as schedulers
from .arguments import arguments_of
from .optimizer import Optimizer

_FORMAT = "fusestep.nn.mxnet.Updater/1"
_DOCUMENT = "document"
_SCHEDULERS = {
    name: getattr(schedulers, name)
    for name in ("FactorScheduler", "MultiFactorScheduler", "PolyScheduler", "CosineScheduler")
}
_TABLES = ("idx2name", "lr_mult", "wd_mult")
# What belongs to the process, and what is written in another form.
_NOT_ARGUMENTS = {"sym", "param_dict", "lr_scheduler", "learning_rate", "param_idx2name"}


def dump(states: Mapping[Any, Any], optimizer: Optimizer, *, with_optimizer: bool) -> bytes:
    """As `Updater.get_states`."""
    described = _described(optimizer) if with_optimizer else None
    return dumped(states, optimizer._index_update_count, optimizer.num_update, described)


def dumped(
    states: Mapping[Any, Any],
    counts: Mapping[Any, int],
    num_update: int,
    optimizer: dict[str, Any] | None = None,
) -> bytes:
    """States with counts of updates, and an optimizer that was described."""
    tensors: dict[str, np.ndarray] = {}
    document = {
        "format": _FORMAT,
        "states": [
            [_index(index), _structure(state, f"state.{k}", tensors)]
            for k, (index, state) in enumerate(states.items())
        ],
        "counts": [[_index(i), t] for i, t in counts.items()],
        "num_update": num_update,
        "optimizer": optimizer,
    }
    tensors[_DOCUMENT] = np.frombuffer(json.dumps(document).encode(), np.uint8)
    return bytes(save_tensors(tensors))


def load(data: Any, optimizer: Optimizer) -> tuple[dict[Any, Any], Optimizer]:
    """The states, and the optimizer with their counts; a new one where ``data`` holds one."""
    check_kind("set_states", "states", data, bytes | bytearray | memoryview, "bytes")
    try:
        tensors = load_tensors(bytes(data))
        document = json.loads(tensors.pop(_DOCUMENT).tobytes())
        if document["format"] != _FORMAT:
            raise ValueError("another format")
        states = {_index(index): _restored(v, tensors) for index, v in document["states"]}
        counts = {_index(i): count("set_states", "a count", t) for i, t in document["counts"]}
        if (len(states), len(counts)) != (len(document["states"]), len(document["counts"])):
            raise ValueError("an index twice")
        num_update = count("set_states", "num_update", document["num_update"])
        if document["optimizer"] is not None:
            optimizer = _made(document["optimizer"], optimizer)
    except _DAMAGES as error:
        expected, got = "bytes of Updater.get_states", f"{type(error).__name__} {error}"
        text = message("set_states", "states", "cannot be read", expected, got)
        raise ValueError(
            f"{text}; pickles of MXNet can execute anything: `fusestep convert` reads what is data"
        ) from None
    for index, state in states.items():
        optimizer.check_state(index, state)
    # Only now: bytes that turn out to be damaged leave the counts of the present optimizer alone.
    optimizer._index_update_count, optimizer.num_update = counts, num_update
    return states, optimizer


def moved(state: Any, weight: Any) -> Any:
    """A state that was read, with its arrays where the weight lives."""
    if type(state) in (tuple, list):
        return type(state)(moved(part, weight) for part in state)
    array = adopt_anywhere("set_states", "weight", weight)
    if not (isinstance(array, DeviceArray) and isinstance(state, np.ndarray)):
        return state
    return array.holding(state).native()


# What reading a document that was damaged or made by hand can run into.
_DAMAGES = (
    AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError,
    safetensors.SafetensorError,
)  # fmt: skip


def _index(index: Any) -> int | str:
    if not (is_int(index) or isinstance(index, str)):
        wrong, got = "cannot be written", repr(index)
        reject(TypeError, "get_states", "an index", wrong, "an int or a str", got)
    return index if isinstance(index, str) else int(index)


def _structure(value: Any, name: str, tensors: dict[str, np.ndarray]) -> Any:
    """``value`` with names in the place of its arrays, which go to ``tensors``."""
    if type(value) in (tuple, list):  # a subclass could not be made again
        parts = [_structure(part, f"{name}.{k}", tensors) for k, part in enumerate(value)]
        return {type(value).__name__: parts}
    on_device = DeviceArray.adopt("get_states", name, value)
    value = value if on_device is None else on_device.numpy()
    is_foreign = isinstance(value, np.ndarray) and value.dtype in FOREIGN.values()
    if is_foreign or (isinstance(value, np.ndarray) and value.dtype.kind in "biuf"):
        # The format has all of them, its reader for NumPy has not.
        kept = value.view(STORAGES[value.dtype].carrier) if is_foreign else value
        tensors[name] = np.ascontiguousarray(kept).reshape(value.shape)
        return {value.dtype.name if is_foreign else "array": name}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    expected = "None, numbers, arrays of real numbers, tuples and lists"
    got = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
    return reject(TypeError, "get_states", name, "cannot be written", expected, got)


def _restored(value: Any, tensors: Mapping[str, np.ndarray]) -> Any:
    ((kind, content),) = value.items()
    if kind == "value":
        return content
    if kind in ("array", *FOREIGN):
        array = tensors[content].copy()  # of its own, and writable
        return array.view(FOREIGN[kind]) if kind in FOREIGN else array
    parts = [_restored(part, tensors) for part in content]
    return {"tuple": tuple, "list": list}[kind](parts)


# The optimizer


def _described(optimizer: Optimizer) -> dict[str, Any]:
    klass = type(optimizer)
    name = klass.__name__.lower()
    if Optimizer.opt_registry.get(name) is not klass:
        wrong, expected = "cannot be written", "a registered class"
        reject(TypeError, "get_states", "optimizer", wrong, expected, klass)
    return {
        "name": name,
        "arguments": _arguments(optimizer, sorted(set(arguments_of(klass)) - _NOT_ARGUMENTS)),
        "learning_rate": float(optimizer.lr),
        **{
            name: [[_index(key), value] for key, value in getattr(optimizer, name).items()]
            for name in _TABLES
        },
        "lr_scheduler": _described_scheduler(optimizer.lr_scheduler),
    }


def _described_scheduler(scheduler: Any) -> dict[str, Any] | None:
    if scheduler is None:
        return None
    name = type(scheduler).__name__
    if _SCHEDULERS.get(name) is not type(scheduler):
        wrong, expected = "cannot be written", f"None or one of {', '.join(_SCHEDULERS)}"
        reject(TypeError, "get_states", "lr_scheduler", wrong, expected, scheduler)
    return {"name": name, "arguments": _arguments(scheduler, arguments_of(type(scheduler)))}


def _arguments(owner: Any, names: Iterable[str]) -> dict[str, Any]:
    """The present value of each argument, which is the attribute of the same name."""
    where = type(owner).__name__
    found = {}
    for name in names:
        if not hasattr(owner, name):
            expected = "an attribute of the same name"
            reject(TypeError, where, f"argument {name!r}", "is not kept", expected, "none")
        found[name] = _plain(where, name, getattr(owner, name))
    return found


def _plain(where: str, name: str, value: Any) -> Any:
    """A value that JSON holds."""
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(where, name, part) for part in value]
    expected = "None, a number, a str or a list"
    return reject(TypeError, where, name, "cannot be written", expected, type(value).__name__)


def _made(described: Mapping[str, Any], present: Optimizer) -> Optimizer:
    """The optimizer that was written; what belongs to the process is that of the present one."""
    arguments = described["arguments"]
    if not _NOT_ARGUMENTS.isdisjoint(arguments):
        raise ValueError(f"arguments {sorted(_NOT_ARGUMENTS.intersection(arguments))}")
    optimizer = Optimizer.create_optimizer(described["name"], **arguments)
    optimizer.lr = described["learning_rate"]
    optimizer.lr_scheduler = _made_scheduler(described["lr_scheduler"])
    optimizer.param_dict = present.param_dict
    for name in _TABLES:
        setattr(optimizer, name, dict(described[name]))
    return optimizer


def _made_scheduler(described: Mapping[str, Any] | None) -> Any:
    if described is None:
        return None
    arguments = dict(described["arguments"])
    base_lr = arguments.pop("base_lr")
    # After the warm-up it may have been set below where that began.
    begin = max(base_lr, arguments["warmup_begin_lr"])
    scheduler = _SCHEDULERS[described["name"]](**arguments, base_lr=begin)
    scheduler.base_lr = check.scalar_at_least_0("set_states", "base_lr", base_lr)
    return scheduler
