"""One function over several arguments, side by side in one parallel loop."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ..compiler.compile import NativeFunction, part
from ..compiler.intrinsics import call_address
from ..compiler.records import int64s, last_at_most
from .parallel import Arguments, run


class BesideCall(NamedTuple):
    """Arguments of the loop, all ``int64``."""

    function: int  # the address of a part
    n: int
    firsts: np.ndarray  # [n]: the number of the first part of each loop
    calls: np.ndarray  # [n]: the address of its arguments


@part(BesideCall)
def _run_part(index, slot, c):
    firsts = int64s(c.firsts, c.n)
    k = last_at_most(firsts, c.n, index)
    call_address(c.function, index - firsts[k], slot, int64s(c.calls, c.n)[k])


def run_beside(
    function: NativeFunction, parts: Sequence[int], calls: Sequence[int], threads: int
) -> None:
    """Run one function over several arguments side by side; see `Loop`.

    Args:
        function: a part.
        parts: how many parts each loop has.
        calls: the address of its arguments.
        threads: the most that run them.
    """
    if len(parts) == 1:
        run(function, parts[0], calls[0], threads)
        return
    *firsts, n = accumulate(parts, initial=0)
    bounds = np.array(firsts, np.int64), np.array(calls, np.int64)
    call = Arguments(BesideCall(function.address, len(parts), *bounds))
    run(_run_part, n, call.address, threads)
