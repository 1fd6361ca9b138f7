"""Facts about an installation: ``fusestep info``."""

from __future__ import annotations

import argparse
import platform
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import llvmlite
import numba
import numpy as np

from ..cache import cache_directory, cache_entries, cache_problem


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``fusestep info`` has no options."""


def facts() -> dict[str, str]:
    """Versions, threads and the state of the kernel cache."""
    from ... import __version__

    versions = {
        "fusestep": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "cpu": llvmlite.binding.get_host_cpu_name(),
    }
    try:
        from .compiler import machine
        from .headers import arrays
        from .threads import layers, openmp, parallel
    except RuntimeError as error:  # the user has switched the compiler off
        return {**versions, "kernels": f"none: {error}"}

    try:
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # said below
            parallel.compile_loops()
        parallel.start_threads()
        limit = parallel.deciding_limit()
        count = f"{limit.threads}, decided by {limit.source}"
        layer = ": ".join(filter(None, (layers.threading_layer(), layers.layer_problem())))
        reason = openmp.why_not()
        shared = f"left alone: {reason}" if reason else "also run steps of nn.torch while awake"
    except ValueError as error:  # the layer that the user chose cannot be loaded
        layer, count, shared = str(error).strip().splitlines()[0], "none", "none"
    built = machine.portable(parallel.LOOPS[0].identity) is not None
    return {
        **versions,
        "threads": "; ignored: ".join((count, *layers.ignored_variables())),
        "threading layer": layer,
        "PyTorch": _pytorch(arrays.untried),
        "PyTorch threads": shared,
        "array headers": _way(arrays.why_not),
        "loops": "built with the package" if built else "compiled at first use",
        "kernel cache": _cache_state(),
    }


def _pytorch(untried: Callable[..., str]) -> str:
    try:
        release = version("torch")  # which need not be imported
    except PackageNotFoundError:
        return "none"
    return ": ".join(filter(None, (release, untried(PyTorch=release))))


def _way(reason: str) -> str:
    return f"read through Python (slower): {reason}" if reason else "read directly"


def _cache_state() -> str:
    place, problem = cache_directory(), cache_problem()
    if place is None:
        return "off"
    if problem:
        return f"{place}: not used, {problem}"
    entries = cache_entries()
    size = sum(entry.stat().st_size for entry in entries) / 2**20
    return f"{place}: {len(entries)} kernels, {size:.1f} MiB"


def main(args: argparse.Namespace) -> int:
    """Print the facts."""
    for name, value in facts().items():
        print(f"{name + ':':<17}{value}")
    return 0
