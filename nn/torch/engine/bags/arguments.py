"""The arguments of `EmbeddingBags` of PyTorch, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .....kernels.cpu.headers import id_lists
from .....ops.runtime.bags.pooling import kind_of
from .....ops.runtime.errors import reject
from ....base.arguments import is_int
from .. import memory
from ..memory import NUMBERS, array_of, in_memory

WHERE = "EmbeddingBags"
_layout_of, _first_of, _last_of = attrgetter("layout"), itemgetter(0), itemgetter(-1)


def named_tables(tables: Any) -> dict[str, Any]:
    """Modules or sizes by name."""
    if isinstance(tables, nn.ModuleDict | Mapping):
        named = dict(tables.items())
    elif isinstance(tables, nn.ModuleList | list | tuple):
        named = {str(k): table for k, table in enumerate(tables)}
    else:
        expected, got = "a list or a dict of modules or sizes", type(tables).__name__
        reject(TypeError, WHERE, "tables", "have a wrong type", expected, got)
    if not named:
        reject(ValueError, WHERE, "tables", "are missing", "at least one", "none")
    weights = [m.weight for m in named.values() if isinstance(m, nn.EmbeddingBag | nn.Embedding)]
    if len({*map(id, weights)}) < len(weights):
        wrong, expected = "share a weight", "a weight of its own for each"
        reject(ValueError, WHERE, "tables", wrong, expected, "one twice")
    return named


def one_of(name: str, options: set[Any], option: Any, default: Any) -> Any:
    """The option of all modules, or the one that was given."""
    every = {*options, *([] if option is None else [option])}
    if len(every) > 1:
        expected = "one for all tables"
        reject(ValueError, WHERE, name, "differs", expected, sorted(map(str, every)))
    return every.pop() if every else default


def size_of(name: str, table: Any) -> tuple[int, int]:
    """The size of a table that is to be made."""
    if not isinstance(table, list | tuple) or len(table) != 2:
        expected, got = "a module, or (num_embeddings, embedding_dim)", type(table).__name__
        reject(TypeError, WHERE, f"table {name!r}", "has a wrong type", expected, got)
    if not all(is_int(size) and size > 0 for size in table):
        kind = ValueError if all(map(is_int, table)) else TypeError
        reject(kind, WHERE, f"the size of table {name!r}", "is wrong", "ints above 0", table)
    n, width = map(int, table)
    return n, width


def arrays_of(arguments: Sequence[Any], tables: Sequence[nn.Module]) -> list[Any]:
    """The arrays of ids, offsets and weights, in the form of `ops.EmbeddingBags`.

    ``tables`` are those of the features.
    """
    arrays: list[Any] = []
    for name, argument in zip(("ids", "offsets", "per_sample_weights"), arguments, strict=True):
        if argument is None and name != "ids":
            arrays.append(None)
        elif isinstance(argument, Tensor):
            arrays.append(_array(name, argument))
        elif isinstance(argument, list | tuple) and len(argument) == len(tables):
            arrays.append([_array(f"{name}[{k}]", tensor) for k, tensor in enumerate(argument)])
        else:
            expected = f"a list of {len(tables)} tensors, or one tensor"
            reject(ValueError, WHERE, name, "do not fit", expected, kind_of(argument))
    ids, offsets, _ = arrays
    if offsets is None and isinstance(ids, list):
        arrays[0] = [
            a.reshape(len(a), 1) if a.ndim == 1 and isinstance(table, nn.Embedding) else a
            for a, table in zip(ids, tables, strict=True)
        ]
    return arrays


def with_end(offsets: Any, ids: Any) -> Any:
    """Offsets with the number of ids behind them, as a device has them."""
    if not (isinstance(offsets, Tensor) and isinstance(ids, Tensor) and offsets.dim() == 1):
        return offsets  # which is refused as it is
    return torch.cat((offsets, offsets.new_full((1,), ids.numel())))


def headers_of(tensors: Sequence[Any], real: np.dtype[Any]) -> np.ndarray | None:
    """The `id_lists.HEADERS` of plain tensors on the host; None where one is of another kind.

    `map` asks all of them one question after the other.
    """
    if {*map(type, tensors)} != {Tensor} or not (
        {*map(Tensor.get_device, tensors)} == {-1}
        and {*map(_layout_of, tensors)} == {torch.strided}
        and all(map(memory.is_contiguous, tensors))
        and not any(map(Tensor.is_neg, tensors))
    ):
        return None
    places, shapes = [*map(memory.address_of, tensors)], [*map(memory.shape_of, tensors)]
    if not {*map(len, shapes)} <= {1, 2} or not memory.are_there(
        tensors, places, memory.bytes_of(tensors)
    ):
        return None
    kinds = {torch.int32: 4, torch.int64: 8, getattr(torch, real.name): id_lists.REAL}
    headers = np.empty(len(tensors), id_lists.HEADERS)
    headers["kind"] = [*map(kinds.get, map(memory.dtype_of, tensors), repeat(0))]
    headers["address"], headers["dims"] = places, [*map(len, shapes)]
    headers["size"], headers["last"] = [*map(_first_of, shapes)], [*map(_last_of, shapes)]
    return headers


def _array(name: str, tensor: Any) -> Any:
    check_tensor(name, tensor)
    return array_of(in_memory(tensor.detach()))


def check_tensor(name: str, tensor: Any) -> None:
    """Refuse what is no tensor with numbers on the host or a CUDA device."""
    if not isinstance(tensor, Tensor):
        reject(TypeError, WHERE, name, "has a wrong type", "a tensor", type(tensor).__name__)
    if tensor.device.type not in ("cpu", "cuda"):
        expected, got = "one on the host or a CUDA device", tensor.device
        reject(RuntimeError, WHERE, name, "is on a device, where there are no bags", expected, got)
    if tensor.dtype not in NUMBERS or tensor.layout != torch.strided:
        expected = "int32, int64 or a float, in a dense tensor"
        got = f"{tensor.dtype}, {tensor.layout}"
        reject(TypeError, WHERE, name, "has a wrong dtype", expected, got)
