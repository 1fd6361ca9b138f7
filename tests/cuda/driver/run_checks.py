"""Run checks of `fusestep.bench.gpu.checks` under the driver without a device, in one process.

    python run_checks.py NAME ...

Each launch is looked at: every argument is an ``int64``, and none is an address in memory that was
freed. Prints what a check launched, as JSON; ends with the first one that raises.
"""

from __future__ import annotations

import ctypes
import json
import sys
from importlib.util import find_spec
from typing import Any

from stub import LIBRARY

from fusestep.bench.gpu import checks
from fusestep.kernels.cuda.device import driver

FREED = 0  # what `stub_state` says


def watch(launched: list[Any]) -> None:
    """Look at every launch from now on; list the kernels."""
    library, launch = ctypes.CDLL(LIBRARY), driver.launch
    state = library.stub_state
    state.argtypes = [ctypes.c_ulonglong]

    def watched(stream: Any, config: Any, kernel: Any, *arguments: int) -> None:
        for k, argument in enumerate(arguments):
            assert type(argument) is int, (k, argument)
            assert -(1 << 63) <= argument < 1 << 63, (k, argument)
            assert argument < 0 or state(argument) != FREED, f"argument {k} of {kernel} was freed"
        launch(stream, config, kernel, *arguments)
        launched.append(kernel)

    driver.launch = watched


def main(names: list[str]) -> None:
    """See the module."""
    if find_spec("torch"):
        import tensors

        tensors.pretend()
    launched: list[Any] = []
    watch(launched)
    for name in names:
        before = len(launched)
        found = checks.run(name)
        assert not found["is_computed"], "there is a device"
        print(json.dumps({name: len(launched) - before}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
