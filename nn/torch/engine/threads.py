"""PyTorch's number of threads as a limit: steps take no more where the user has lowered it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from ....kernels.cpu.threads.layers import Limit
from ....kernels.cpu.threads.parallel import at_most, beside_openmp

_P = ParamSpec("_P")
_R = TypeVar("_R")
# PyTorch begins with one for each physical core, which nobody has wished for.
_AT_IMPORT = torch.get_num_threads()


def as_torch(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: loops use no more threads than PyTorch, if it has fewer than at import.

    To ask PyTorch takes 30 ns.
    """

    @wraps(function)
    def limited(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        threads = torch.get_num_threads()
        if threads >= _AT_IMPORT:
            return beside_openmp(threads, function, *args, **kwargs)
        return at_most(Limit(threads, "torch.set_num_threads"), function, *args, **kwargs)

    return limited
