"""The first ten minutes on a CUDA device: ``python -m fusestep.bench.gpu.first_run FOLDER``.

Smallest things first: the environment and one kernel, the checks, some of them under
compute-sanitizer, and the points of the benchmark. Each part has a process and a time limit of its
own, and what it found is in a file of the folder before the next one begins: ``results.jsonl`` has
a line for each, ``bench.json`` the points so far. A second run with the same folder does what the
first did not reach, and again what failed.

Exits with 0 if all that was reached is right, with 1 if something failed, with 2 if no kernel runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatch
from pathlib import Path
from shutil import which
from typing import Any

from ..report import document
from .checks import CHECKS, NOT_COMPUTED, WRONG
from .point import named_points

AT_ONCE = 12
VERDICTS = {0: "right", WRONG: "wrong", NOT_COMPUTED: "not computed"}
CHECK_SECONDS, SANITIZER_SECONDS, POINT_SECONDS = 60, 100, 60
SANITIZED = ("sort/2049", "rows/LazyAdam/hot", "dense/AdaFactor/bfloat16", "bags/max", "bad index")
TOOLS = ("memcheck", "racecheck", "synccheck")
FIRST = ("dense/adam/float32/67108864", "rows/lazy/zipf1.2", "model/gpt2", "table/zipf1.2/8192",
         "table/uniform/131072", "bags", "dense/adamw/bfloat16/67108864", "sort/1000000",
         "dense/sgd/float32/67108864", "rows/all/zipf1.2")  # fmt: skip
PROBE = """
import importlib.metadata, sys, time
print("python", sys.version.split()[0])
for name in ("numba", "llvmlite", "numba-cuda", "cuda-bindings", "cuda-core", "cuda-pathfinder",
             "nvidia-nvvm", "nvidia-nvjitlink", "torch", "cupy-cuda13x", "numpy", "ml_dtypes"):
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(name, "-")
from cuda.bindings import nvjitlink, nvvm
print("NVVM", nvvm.version(), nvvm.ir_version(), "nvJitLink", nvjitlink.version())
import numpy as np
from numba import cuda
device = cuda.get_current_device()
print(device.name, device.compute_capability, cuda.current_context().get_memory_info())
began = time.perf_counter()
from fusestep.kernels.cuda.device.arrays import fill
from fusestep.kernels.cuda.device.backend import address_of
array, stream = cuda.device_array(1000, np.float32), cuda.default_stream()
fill(address_of(array), 1000, 2.5, np.dtype(np.float32), stream)
found = array.copy_to_host()
print("first kernel after", round(time.perf_counter() - began, 2), "s")
assert (found == 2.5).all() or "without a device" in str(device.name), found
began = time.perf_counter()
for _ in range(1000):
    fill(address_of(array), 1000, 2.5, np.dtype(np.float32), stream)
print("a launch takes the host", round((time.perf_counter() - began) * 1e3, 1), "us")
cuda.synchronize()
"""


class Run:
    """The folder of a run, and the time that is left."""

    def __init__(self, folder: Path, seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._end = folder, time.monotonic() + seconds
        self._log = folder / "results.jsonl"
        self.failed: list[str] = []
        lines = self._log.read_text(encoding="utf-8").splitlines() if self._log.exists() else []
        known = [json.loads(line) for line in lines]
        self._done = {one["name"] for one in known if one["verdict"] in ("right", "not computed")}

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def is_due(self, name: str) -> bool:
        """Whether a part was not done by an earlier run."""
        return name not in self._done

    def start(self, name: str, command: Sequence[str], seconds: float) -> dict[str, Any] | None:
        """Run a part, and what became of it; None where no time is left for it."""
        if self.left < 5:
            return None
        limit, began = min(seconds, self.left), time.perf_counter()
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=limit
            )
            verdict = VERDICTS.get(done.returncode, f"failed with {done.returncode}")
            text, errors = done.stdout, done.stderr
        except subprocess.TimeoutExpired as error:
            verdict, text = f"stopped after {limit:.0f} s", str(error.stdout or b"")
            errors = str(error.stderr or b"")
        took = round(time.perf_counter() - began, 1)
        found = {"name": name, "verdict": verdict, "seconds": took, "out": text[-20_000:]}
        return found if verdict == "right" else {**found, "errors": errors[-3_000:]}

    def keep(self, found: dict[str, Any] | None) -> bool:
        """Write down what a part found; whether it is right."""
        if found is None:
            return False
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"{json.dumps(found)}\n")
        is_right = found["verdict"] in ("right", "not computed")
        if not is_right:
            self.failed.append(found["name"])
        lines = (found["out"] if is_right else found["errors"]).strip().splitlines()
        last = lines[-1] if lines else ""
        print(found["verdict"], f"{found['seconds']} s", found["name"], last[:160], flush=True)
        return is_right

    def side_by_side(self, parts: Mapping[str, Sequence[str]], seconds: float) -> None:
        """Several parts at once, each kept when it ends."""
        due = {name: command for name, command in parts.items() if self.is_due(name)}
        with ThreadPoolExecutor(max(2, min(AT_ONCE, (os.cpu_count() or 2) - 2))) as pool:
            jobs = [pool.submit(self.start, *part, seconds) for part in due.items()]
            for job in as_completed(jobs):
                self.keep(job.result())


def _module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", f"fusestep.bench.gpu{name}", *arguments]


def environment(run: Run) -> bool:
    """Find out what is installed, and run one kernel: without it nothing else makes sense."""
    if smi := which("nvidia-smi"):
        run.keep(run.start("nvidia-smi", [smi], 20))
    return run.keep(run.start("environment", [sys.executable, "-P", "-c", PROBE], 60))


def measure(run: Run, seconds: float, patterns: Sequence[str]) -> None:
    """The points of the benchmark, the most important ones first."""
    every = [*FIRST, *(name for name in named_points() if name not in FIRST)]
    for name in (name for pattern in patterns for name in every if fnmatch(name, pattern)):
        if not run.is_due(f"bench {name}") or run.left < 20:
            continue
        own = run.folder / "point.json"
        own.unlink(missing_ok=True)
        command = _module("", name, "--seconds", str(seconds), "--json", str(own))
        found = run.start(f"bench {name}", command, POINT_SECONDS)
        if run.keep(found) and own.exists():
            _add(run.folder / "bench.json", own)


def _add(path: Path, other: Path) -> None:
    """The point of one document, added to another one."""
    data = document.read(other, "--json", has_schema=False)
    if path.exists():
        before = document.read(path, "bench.json", has_schema=False)
        data["points"] = [*before["points"], *data["points"]]
    document.write(path, data)
    other.unlink()


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m fusestep.bench.gpu.first_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="of the results")
    parser.add_argument("--seconds", type=float, default=540.0, help="in all (default: 540)")
    parser.add_argument(
        "--point-seconds", type=float, default=1.0, help="of a measurement (default: 1)"
    )
    parser.add_argument(
        "--points", nargs="+", default=["*"], metavar="NAME", help="of the benchmark; patterns"
    )
    parser.add_argument("--no-sanitizer", action="store_true", help="leave out compute-sanitizer")
    parser.add_argument("--no-bench", action="store_true", help="leave out what is measured")
    args = parser.parse_args(arguments)
    run = Run(args.folder, args.seconds)
    if not environment(run):
        print(f"no kernel runs here: see {run.folder / 'results.jsonl'}", file=sys.stderr)
        return 2
    run.side_by_side({name: _module(".checks", name) for name in CHECKS}, CHECK_SECONDS)
    if (sanitizer := which("compute-sanitizer")) and not args.no_sanitizer:
        command = [sanitizer, "--error-exitcode", "9", "--tool"]
        parts = {
            f"{tool} {name}": [*command, tool, *_module(".checks", name)]
            for tool in TOOLS
            for name in SANITIZED
        }
        run.side_by_side(parts, SANITIZER_SECONDS)
    if not args.no_bench:
        measure(run, args.point_seconds, args.points)
    print(f"{len(run.failed)} failed{': ' if run.failed else ''}{', '.join(run.failed)}")
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
