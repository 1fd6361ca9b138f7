"""The machine and the software of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import psutil

from .. import __version__
from .errors import BenchError
from .workers.worker_protocol import last_cache_bytes as last_cache_bytes

_OF_DEVICES = ("numba-cuda", "cuda-bindings", "torch", "cupy-cuda12x", "cupy-cuda13x")


def machine() -> dict[str, Any]:
    """The processor, as the system and the compiler see it."""
    features = llvm.get_host_cpu_features()
    return {
        "cpu": _cpu_name(),
        "architecture": platform.machine(),
        "llvm_cpu": llvm.get_host_cpu_name(),
        "cores": cores(),
        "last_cache_bytes": last_cache_bytes(),
        "memory_bytes": psutil.virtual_memory().total,
        "features": sorted(name for name, present in features.items() if present),
        "system": platform.platform(),
    }


def cores() -> int:
    """How many this process may use."""
    can_say = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if can_say else os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def load() -> float | None:
    """How many processes wanted to run during the last minute, where the system says so."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def software() -> dict[str, str | None]:
    """Versions of what the measurement rests on."""
    names = ("numpy", "numba", "llvmlite", "tbb")
    found = {"python": platform.python_version(), **dict.fromkeys(names)}
    for name in (*names, *_OF_DEVICES, "fbgemm-gpu-cpu"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def fusestep() -> dict[str, Any]:
    """Version; in a checkout also the commit, and whether files differ from it."""
    root = checkout()
    commit, changed = None, None
    with suppress(BenchError):
        commit = git(root, "rev-parse", "HEAD") if root else None
        changed = bool(git(root, "status", "--porcelain")) if root else None
    return {"version": __version__, "commit": commit, "changed": changed}


def checkout() -> Path | None:
    """The root of the Git checkout that this package runs from; None outside of one."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / ".git").exists() else None


def checkout_at_hand() -> Path | None:
    """That checkout, or for an installed package the one in the current folder."""
    here = Path.cwd()
    is_ours = (here / ".git").exists() and (here / "bench" / "command.py").exists()
    return checkout() or (here if is_ours else None)


def git(root: Path, *arguments: str) -> str:
    """The output of a command of Git.

    Raises:
        BenchError: it fails, or there is no Git.
    """
    return output(["git", "-C", str(root), *arguments], f"git {arguments[0]}")


def output(command: Sequence[str], failure: str, **options: Any) -> str:
    """What a command prints.

    Args:
        command: the program and its arguments.
        failure: begins the text of an error.
        options: of `subprocess.run`.

    Raises:
        BenchError: it fails; the text has the first exception that it tells of, or its last line.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, **options)
    except OSError as error:
        raise BenchError(f"{failure}: {error.strerror}") from error
    except subprocess.SubprocessError as error:
        lines = ((getattr(error, "stderr", None) or "").strip() or str(error)).splitlines()
        said = next((line for line in lines if "Error: " in line), lines[-1])
        raise BenchError(f"{failure}: {said}") from error
    return str(done.stdout).strip()
