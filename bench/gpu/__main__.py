"""Steps on a CUDA device against copies and peers: ``python -m fusestep.bench.gpu``.

Needs numba-cuda and a device; PyTorch and CuPy with CUDA are measured where they are installed.
The bound is the fastest of three plain copies (the driver's and two kernels), which take turns
with the steps. Targets are printed beside what was measured, and nothing else follows from them.

The results have a form of their own, results.schema.json: a device has no threads, and its
times come with those that the host took to enqueue the work.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
from rich.console import Console
from rich.table import Table

from .. import machine
from ..errors import BenchError
from ..report import document, table
from ..report.result import BOUND, OURS
from ..report.stats import ratio
from .point import Bench, Point
from .points import points

SCHEMA = 1


def gpu() -> dict[str, Any]:
    """The device and its driver."""
    from numba import cuda

    device = cuda.get_current_device()
    name = getattr(device, "name", "unknown")
    return {
        "name": name.decode() if isinstance(name, bytes) else str(name),
        "compute_capability": ".".join(str(x) for x in device.compute_capability),
        "multiprocessors": getattr(device, "MULTIPROCESSOR_COUNT", None),
        "memory_bytes": int(cuda.current_context().get_memory_info().total),
        "driver": _driver_version(),
        "cuda_of_driver": _cuda_of_driver(),
    }


def _cuda_of_driver() -> str | None:
    from cuda.bindings import driver

    error, number = driver.cuDriverGetVersion()
    if error != driver.CUresult.CUDA_SUCCESS:
        return None
    return f"{number // 1000}.{number % 1000 // 10}"


def _driver_version() -> str | None:
    """Of NVIDIA's driver, where its tool says so."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = dict(machine.software())
    for name in ("numba-cuda", "cuda-bindings", "torch", "cupy", "cupy-cuda12x", "cupy-cuda13x"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def results(found: Sequence[Point], bench: Bench) -> dict[str, Any]:
    """Everything about a run as a document, times in seconds."""
    made = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "fusestep": machine.fusestep(),
        "machine": machine.machine(),
        "software": _versions(),
        "gpu": gpu(),
        "seconds_per_point": bench.seconds,
        "copy_bytes": bench.copies.n_bytes,
        "points": [_as_json(point) for point in found],
    }
    text = (Path(__file__).parent / "results.schema.json").read_text(encoding="utf-8")
    jsonschema.validate(made, json.loads(text))
    return made


def _as_json(point: Point) -> dict[str, Any]:
    ours = point.device[OURS]
    peers = {
        label: asdict(ratio(summary, ours))
        for label, summary in point.device.items()
        if label != OURS and not label.startswith(BOUND)
    }
    return {
        **asdict(point),
        "targets": [{**asdict(target), "is_met": target.is_met} for target in point.targets],
        "of_copy": {label: point.of_copy(label) for label in point.bytes},
        "by_ours": peers,
    }


def show(data: dict[str, Any], console: Console) -> None:
    """Print what a document holds."""
    device, ours = data["gpu"], data["fusestep"]
    commit = f" at {ours['commit'][:10]}" if ours["commit"] else ""
    libraries = ", ".join(f"{name} {text}" for name, text in data["software"].items() if text)
    console.print(f"fusestep {ours['version']}{commit}{' with changes' if ours['changed'] else ''}")
    console.print(libraries)
    console.print(
        f"{device['name']}, {device['memory_bytes'] / 1e9:.1f} GB, driver {device['driver']}, "
        f"CUDA {device['cuda_of_driver']}"
    )
    for point in data["points"]:
        console.print(_table(point))
        for target in point["targets"]:
            console.print(_line(target))
        for note in point["notes"]:
            console.print(f"  note: {note}")


def _table(point: dict[str, Any]) -> Table:
    size = ", ".join(f"{value:,} {name}" for name, value in point["size"].items())
    found = Table("", title=f"{point['case']}: {size}", title_justify="left")
    for head in ("time", "p20", "p80", "GB/s", "of copy", "x ours", "host", "queued"):
        found.add_column(head, justify="right")
    for label, times in point["device"].items():
        moved, by_ours = point["bytes"].get(label), point["by_ours"].get(label)
        if label.startswith(BOUND):
            moved = None
        found.add_row(
            label,
            *(table.seconds(times[name]) for name in ("median", "p20", "p80")),
            f"{moved / times['median'] / 1e9:.0f}" if moved else "",
            f"{point['of_copy'][label]:.1%}" if moved else "",
            f"{by_ours['value']:.2f}" if by_ours else "",
            table.seconds(point["host"][label]["median"]),
            f"{point['ahead'][label]:.0%}",
        )
    if point["copy"]:
        found.caption = f"fastest copy: {point['copy'] / 1e9:.0f} GB/s, read and written"
    return found


def _line(target: dict[str, Any]) -> str:
    sign, verdict = ("<=" if target["at_most"] else ">="), "met" if target["is_met"] else "missed"
    return (
        f"  {target['text']}: {target['reached']:.3f}, target {sign} {target['limit']}: {verdict}"
    )


def _missing() -> str:
    """What is missing for a run; "" for nothing."""
    if find_spec("numba_cuda") is None:
        return "needs numba-cuda: pip install 'fusestep[cuda13,bench]' (or cuda12)"
    from numba import cuda

    return "" if cuda.is_available() else "Numba finds no CUDA device"


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
    args = parser.parse_args(argv)
    try:
        return _run(args)
    except BenchError as error:
        print(f"fusestep bench: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    names = args.names or ["*"]
    chosen = {k: run for k, run in points().items() if any(fnmatch(k, name) for name in names)}
    if not chosen:
        raise BenchError(f"no point is called {' or '.join(names)}: see --list")
    if args.list:
        print("\n".join(chosen))
        return 0
    if missing := _missing():
        raise BenchError(missing)
    if args.json:
        document.check_writable(args.json)
    warnings.filterwarnings("ignore", message="Grid size")  # of Numba: some kernels are small
    console, errors = table.console(), Console(stderr=True)
    bench = Bench(args.seconds, partial(errors.print, markup=False, highlight=False))
    found: list[Point] = []
    trouble = ""
    for name, run in chosen.items():
        errors.print(f"{len(found) + 1} of {len(chosen)}: {name}", markup=False, highlight=False)
        try:
            found.append(run(bench))
        except (BenchError, KeyboardInterrupt) as error:  # what has been measured is not lost
            trouble = f"{name}: {str(error) or 'interrupted'}"
            errors.print(trouble, style="bold red", markup=False)
            if isinstance(error, KeyboardInterrupt):
                break
    data = results(found, bench)
    show(data, console)
    if args.json:
        document.write(args.json, data)
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main())
