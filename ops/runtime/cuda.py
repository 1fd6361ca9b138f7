"""Modules that need numba-cuda: imported when they are first asked for, by calls on devices.

The package is optional, and takes half a second to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class _Later:
    """A package and its modules: imported when something of it is first asked for."""

    def __init__(self, package: str) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Any:
        package = import_module(self._package, __package__)
        if not hasattr(package, name):
            import_module(f"{package.__name__}.{name}")
        found = self.__dict__[name] = getattr(package, name)
        return found


numba = _Later("numba.cuda")
dense, device, rows = (_Later(f"...kernels.cuda.{name}") for name in ("dense", "device", "rows"))
