"""Steps on a CUDA device against copies and peers: ``python -m fusestep.bench.gpu``.

Needs numba-cuda and a device; PyTorch and CuPy with CUDA are measured where they are installed.
The bound is the fastest of two plain copies (the driver's and a kernel), which take turns
with the steps.

The results have a form of their own, results.schema.json: a device has no threads, and its
times come with those that the host took to enqueue the work.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import machine
from ..errors import BenchError
from ..report import document, terminal
from .point import Bench, Point, named_points

SCHEMA = 1


def gpu() -> dict[str, Any]:
    """The device and its driver."""
    from cuda.bindings import driver
    from numba import cuda

    device = cuda.get_current_device()
    name = getattr(device, "name", "unknown")
    error, number = driver.cuDriverGetVersion()
    known = error == driver.CUresult.CUDA_SUCCESS
    return {
        "name": name.decode() if isinstance(name, bytes) else str(name),
        "compute_capability": ".".join(str(x) for x in device.compute_capability),
        "multiprocessors": getattr(device, "MULTIPROCESSOR_COUNT", None),
        "memory_bytes": int(cuda.current_context().get_memory_info().total),
        "cuda_of_driver": f"{number // 1000}.{number % 1000 // 10}" if known else None,
    }


def results(found: Sequence[Point], bench: Bench) -> dict[str, Any]:
    """Everything about a run as a document, times in seconds."""
    names = ("numba-cuda", "cuda-bindings", "torch", "cupy", "cupy-cuda12x", "cupy-cuda13x")
    versions = {name: machine.version_of(name) for name in names}
    made = {
        **document.head(SCHEMA),
        "gpu": gpu(),
        "seconds_per_point": bench.seconds,
        "copy_bytes": bench.copies.n_bytes,
        "points": [*found],
    }
    made["software"] |= {name: version for name, version in versions.items() if version}
    document.check_schema(made, SCHEMA, Path(__file__).parent)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fusestep.bench.gpu", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="points; patterns such as 'rows/*'"
    )
    parser.add_argument("--list", action="store_true", help="print the names of all points")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results to a file")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="that a point may take (default: %(default)s)"
    )
    try:
        return _run(parser.parse_args(argv))
    except BenchError as error:
        print(f"fusestep bench: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    names = args.names or ["*"]
    known = named_points()
    chosen = [point for point in known if any(fnmatch(point, name) for name in names)]
    if not chosen:
        raise BenchError(f"no point is called {' or '.join(names)}: see --list")
    if args.list:
        print("\n".join(chosen))
        return 0
    if find_spec("numba_cuda") is None:
        raise BenchError("needs numba-cuda: pip install 'fusestep[cuda13,bench]' (or cuda12)")
    from numba import cuda

    if not cuda.is_available():
        raise BenchError("Numba finds no CUDA device")
    if args.json:
        document.check_writable(args.json)
    warnings.filterwarnings("ignore", message="Grid size")  # of Numba: some kernels are small
    errors = Console(stderr=True, markup=False, highlight=False)
    bench = Bench(args.seconds, errors.print)
    points = import_module(".points", __package__)
    found: list[Point] = []
    trouble = ""
    for name in chosen:
        errors.print(f"{len(found) + 1} of {len(chosen)}: {name}")
        function, *arguments = known[name]
        try:
            found.append(getattr(points, function)(bench, *arguments))
        except (BenchError, KeyboardInterrupt) as error:  # what has been measured is not lost
            trouble = f"{name}: {str(error) or 'interrupted'}"
            errors.print(trouble, style="bold red")
            if isinstance(error, KeyboardInterrupt):
                break
    data = results(found, bench)
    terminal.show_gpu(data, terminal.console())
    if args.json:
        document.write(args.json, data)
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main())
