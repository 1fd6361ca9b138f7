"""Numbers, shards and rows, as a step takes them from PyTorch's tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ....kernels.cpu.headers.arrays import address_of
from ....kernels.private import parts_of
from ....kernels.rule import Rule
from ....kernels.state import PARAMETER, State
from ....kernels.storage import STORAGES
from ....kernels.tables import RowSource
from ....ops.runtime.bags.tensor import BagTensor
from ....ops.runtime.errors import reject
from ....ops.runtime.row_step import RowGradient
from ...engine.tables import LAST, TableArray
from .memory import DTYPES, NUMBERS, array_of, array_there, in_memory, is_as_it_lies


def wide_dtype(state: State, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a state: its own, or the type of the arithmetic."""
    if state.dtype == PARAMETER:
        return dtype
    if state.dtype is None:
        return torch.promote_types(dtype, torch.float32)
    found: torch.dtype = getattr(torch, np.dtype(state.dtype).name)
    return found


def local(tensor: Tensor) -> Tensor:
    """The shard of a distributed tensor that is here; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    found = to_local()
    wait = getattr(found, "wait", None)  # for processes that are still to send some of it
    return found if wait is None else wait()


def gradient_here(parameter: Tensor, gradient: Any) -> Any:
    """The part of a gradient that belongs to what is here of a parameter.

    Where it is cut in another way, or is a sum that the processes have not taken, all of them make
    it so, as operations of PyTorch on the two would.
    """
    wanted, given = (getattr(x, "placements", None) for x in (parameter, gradient))
    if wanted is not None and given is not None and given != wanted:
        gradient = gradient.redistribute(parameter.device_mesh, wanted)
    return local(gradient)


def is_part_of_table(parameter: Tensor) -> bool:
    """Whether it has some rows of a table, and other processes the rest."""
    shard = getattr(parameter, "row_shard", None)
    return shard is not None and shard.comm.size > 1


def is_part(parameter: Tensor) -> bool:
    """Whether other processes have the rest of it, or copies."""
    return local(parameter) is not parameter or is_part_of_table(parameter)


def check_cuts(where: str, name: str, parameter: Any, rule: Rule) -> None:
    """Refuse a distributed parameter of which a process has less than a rule measures at once."""
    cuts = [p for p in parameter.placements if not p.is_replicate()]
    if rule.is_elementwise and rule.measure is None:
        return
    if not rule.is_row_wise:
        wrong, expected = "is distributed", "a tensor of one process: the norm is that of all"
        reject(RuntimeError, where, name, wrong, expected, parameter.placements)
    if not all(type(p).__name__ == "Shard" and p.dim == 0 < parameter.dim() - 1 for p in cuts):
        wrong, expected = "is cut within rows", "whole rows, or copies, in each process"
        reject(RuntimeError, where, name, wrong, expected, parameter.placements)


def of_mesh(mesh: Any, value: float) -> list[float]:
    """The numbers of all processes of a mesh, each of which gives one."""
    found = torch.tensor([value], dtype=torch.float64, device=mesh.device_type)
    for group in mesh.get_all_groups():
        every = [torch.empty_like(found) for _ in range(group.size())]
        torch.distributed.all_gather(every, found, group)
        found = torch.cat(every)
    return [*map(float, found.tolist())]


def first_element(where: str, name: str, parameter: Tensor) -> int:
    """The place of the first element that is here in all of a parameter.

    Raises:
        RuntimeError: what is here are not consecutive rows.
    """
    width: int = math.prod(parameter.shape[1:])
    shard = getattr(parameter, "row_shard", None)
    if shard is not None:
        return int(shard.begin) * width
    if local(parameter) is parameter:
        return 0
    distributed: Any = parameter
    cuts = [(k, p) for k, p in enumerate(distributed.placements) if not p.is_replicate()]
    if not cuts:
        return 0
    (k, placement), mesh, n_rows = cuts[0], distributed.device_mesh, parameter.shape[0]
    if len(cuts) > 1 or type(placement).__name__ != "Shard" or placement.dim != 0:
        wrong, expected = "is cut so that places of elements are unknown", "consecutive rows"
        reject(RuntimeError, where, name, wrong, expected, distributed.placements)
    first = -(-n_rows // mesh.size(k)) * mesh.get_local_rank(k)
    return int(min(first, n_rows)) * width


def rows_of(where: str, name: str, parameter: Tensor, gradient: Tensor | BagTensor) -> RowGradient:
    """The indices and values of a sparse gradient, coalesced or not, or that of pooled rows.

    On the host they are tensors of PyTorch.

    Raises:
        RuntimeError: it is of another shape, or has no sparse dimension.
        IndexError: it has several, and an index is out of range.
    """
    if gradient.shape != parameter.shape:
        reject_shape(where, name, tuple(parameter.shape), gradient)
    if isinstance(gradient, BagTensor):
        return gradient.gradient
    indices, values = parts_of(gradient)
    indices = in_memory(indices, where, f"the indices of {name}")
    values = in_memory(values, where, f"the values of {name}")
    n_sparse, sizes = indices.shape[0], parameter.shape
    if n_sparse == 1:
        indices = indices[0]
    elif n_sparse == 0 or values.dim() - 1 + n_sparse != len(sizes):
        expected, got = "at least 1 sparse dimension", n_sparse
        reject(RuntimeError, where, name, "has a wrong layout", expected, got)
    else:  # the row of a table with as many rows as these dimensions have elements
        most = torch.tensor(sizes[:n_sparse])[:, None].to(indices.device)
        if ((indices < 0) | (indices >= most)).any():
            reject(IndexError, where, name, "has an index out of range", tuple(sizes), indices)
        steps = [math.prod(sizes[k + 1 : n_sparse]) for k in range(n_sparse)]
        indices = (indices * torch.tensor(steps)[:, None].to(indices.device)).sum(0)
    if values.dtype not in DTYPES:
        reject(RuntimeError, where, name, "has a wrong dtype", "a floating dtype", values.dtype)
    # What a `ShardedEmbedding` has received; a gradient of several backwards is in no such order.
    places = getattr(parameter, "row_positions", None)
    n = indices.numel()
    arrays = (array_there(indices), array_there(values)) if values.is_cuda else (indices, values)
    positions, length = (None, 0) if places is None or len(places[0]) != n else places
    source = RowSource(
        values=values.data_ptr(), indices=indices.data_ptr(), index_bytes=indices.element_size(),
        length=n, positions=0 if positions is None else address_of(positions), whole_length=length,
    )  # fmt: skip
    return RowGradient(*arrays, source, positions)


def table_shape(gradient: Tensor) -> tuple[int, ...]:
    """The shape of a parameter as a table: sparse dimensions of a gradient number its rows."""
    n_sparse = gradient.sparse_dim()
    return math.prod(gradient.shape[:n_sparse]), *gradient.shape[n_sparse:]


def rebind(parameter: Tensor, data: Tensor) -> None:
    """Give a parameter memory of another shape. A backward through what it was raises."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("fusestep: a table has grown since the forward of this backward")

    if parameter.requires_grad and not parameter.is_inference():
        with torch.inference_mode(mode=False):
            get_gradient_edge(parameter).node.register_prehook(refuse)
    # What adds to ``.grad`` knows the shape. PyTorch makes it anew where the dtype changes.
    other = torch.float32 if data.dtype == torch.float64 else torch.float64
    parameter.data = data.new_empty(0, dtype=other)
    parameter.data = data


def reject_shape(where: str, name: str, expected: tuple[int, ...], tensor: Any) -> None:
    """Say that a tensor has not the shape that it should have."""
    reject(RuntimeError, where, name, "has a wrong shape", expected, tuple(tensor.shape))


def form_of(tensor: Any) -> Any:
    """The place, size and layout of a tensor, to be compared; None where it has none."""
    is_plain = isinstance(tensor, Tensor) and local(tensor) is tensor
    if not is_plain or tensor.layout != torch.strided:
        return None
    places = tensor.data_ptr(), tensor.untyped_storage().nbytes(), tensor.shape, tensor.stride()
    return *places, tensor.dtype, is_as_it_lies(tensor)


def listed_tensor(
    where: str, label: str, tensor: Any, state: Any, shape: Any, initial: Any
) -> TableArray:
    """A tensor of a table as the list has it; a shape of None is its own.

    Raises:
        RuntimeError: its numbers do not fill memory of the host.
    """
    is_here = isinstance(tensor, Tensor) and local(tensor) is tensor and not tensor.is_cuda
    if not is_here or tensor.layout != torch.strided or tensor.dtype not in NUMBERS or not (
        tensor.is_contiguous() and is_as_it_lies(tensor) and tensor.dim()
    ):  # fmt: skip
        expected = "a contiguous table of one process on the host"
        reject(RuntimeError, where, label, "does not fit", expected, "another")
    array = array_of(tensor.detach())
    dtypes = (LAST.dtype,) if state.dtype is LAST.dtype else STORAGES
    if shape not in (None, array.shape) or array.dtype not in dtypes:
        expected = f"{'int32' if len(dtypes) == 1 else 'floats'} {shape}"
        got = f"{array.dtype} {array.shape}"
        reject(RuntimeError, where, label, "does not fit its table", expected, got)
    return TableArray(label, array, state, array.shape, initial)
