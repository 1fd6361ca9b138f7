"""Run a program in a fresh interpreter, as a user would."""

import os
import subprocess
import sys
import textwrap
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_TESTS = Path(__file__).parent
_FOLDERS = sorted({path.parent for path in _TESTS.rglob("*.py")})  # data have folders, too
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([*map(str, _FOLDERS), os.environ.get("PYTHONPATH", str(_TESTS))]),
}
"""Of a program that imports files of the tests."""
# A process takes no more threads than it has cores, so it has to seem to have as many.
_CORES = """
from fusestep.kernels.cpu.threads import layers as _threads
_threads._cores, _threads._quota = lambda: {}, lambda *_: None
"""


try:
    TORCH = tuple(map(int, version("torch").split(".")[:2]))
except PackageNotFoundError:
    TORCH = (0, 0)
"""The version of PyTorch that is installed."""
_WARNINGS = {
    "TypedStorage is deprecated": (2, 9),
    "Attempted to insert a get_attr Node": (2, 7),
    "Node lifted_tensor_": (2, 7),
    "The epoch parameter in": (2, 9),
    "torch.distributed is unavailable or uninitialized": (2, 7),
    "Sparse invariant checks are implicitly disabled": (2, 13),
    "The given buffer is not writable": (2, 13),  # of the loader of exports
}
IGNORED = [f"ignore:{text}" for text, until in _WARNINGS.items() if (0, 0) < TORCH < until]
"""Warnings that older versions of PyTorch give for what they do themselves."""


def run_python(program, *arguments, timeout=300, **environment):
    """The completed process of ``python -c program`` with these environment variables."""
    program = textwrap.dedent(program)
    if "NUMBA_NUM_THREADS" in environment:
        program = _CORES.format(environment["NUMBA_NUM_THREADS"]) + program
    filters = [part for one in ("error", *IGNORED) for part in ("-W", one)]
    return subprocess.run(
        [sys.executable, *filters, "-c", program, *map(str, arguments)],
        env={**ENVIRONMENT, **environment}, capture_output=True, text=True, timeout=timeout,
        check=False)  # fmt: skip


def output_of(program, *arguments, **environment):
    """What the program printed; it must have ended well."""
    done = run_python(program, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
