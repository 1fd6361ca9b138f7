"""What this installation runs on: ``fusestep info``."""

from __future__ import annotations

import argparse
import platform

import llvmlite
import numba
import numpy as np

from .cache import cache_directory, cache_entries
from .cpu import headers, parallel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``fusestep info`` has no options."""


def facts() -> dict[str, str]:
    """Versions, threads and the state of the kernel cache."""
    from .. import __version__

    parallel.compile_loops()
    try:
        parallel.start_threads()
        layer = str(parallel.threading_layer())
    except ValueError as error:  # the layer that the user chose cannot be loaded
        layer = str(error).strip().splitlines()[0]
    place = cache_directory()
    entries = cache_entries()
    size = sum(entry.stat().st_size for entry in entries) / 2**20
    return {
        "fusestep": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "cpu": llvmlite.binding.get_host_cpu_name(),
        "threads": str(parallel.get_num_threads()),
        "threading layer": layer,
        "array headers": "read directly" if headers.usable else "read through Python (slower)",
        "kernel cache": f"{place}: {len(entries)} kernels, {size:.1f} MiB" if place else "off",
    }


def main(args: argparse.Namespace) -> int:
    """Print the facts."""
    for name, value in facts().items():
        print(f"{name + ':':<17}{value}")
    return 0
