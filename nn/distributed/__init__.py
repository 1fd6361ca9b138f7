"""Tables larger than one machine, and models on many: over torch.distributed and MPI.

`over_torch` needs PyTorch, `over_mpi` mpi4py; neither is imported before it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .checkpoint import load_checkpoint, save_checkpoint
from .communicator import Communicator, LostProcessError, alone
from .id_shard import IdShard
from .joint_step import together
from .reduction import all_reduce
from .route import Route
from .shard import RowShard
from .states import ShardedStates

if TYPE_CHECKING:
    from .mpi_group import over_mpi
    from .torch_group import over_torch

__all__ = [
    "Communicator", "IdShard", "LostProcessError", "Route", "RowShard", "ShardedStates",
    "all_reduce", "alone", "load_checkpoint", "over_mpi", "over_torch", "save_checkpoint",
    "together",
]  # fmt: skip


_MODULES = {"over_torch": "torch_group", "over_mpi": "mpi_group"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
