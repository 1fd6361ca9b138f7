"""Fused optimizer steps for CPU and CUDA, with row-sparse (embedding) updates.

Layers, each importing only from those below it:

* ``fusestep.nn``: stateful optimizers;
* ``fusestep.ops``: primitive operators, checked and in place;
* ``fusestep.kernels``: compiled update kernels.
"""

# No relative import here: pytest may load this file from a clone whose folder name is no
# Python identifier, outside of the package.

from importlib import import_module as _import_module
from typing import Any as _Any

__version__ = "0.1.1"

_LAYERS = ("bench", "examples", "kernels", "nn", "ops")
_NAMES = {
    "ConversionError": "fusestep.ops.runtime.errors",
    "MappedFiles": "fusestep.nn.base.mapped_files",
    "get_num_threads": "fusestep.kernels.cpu.threads.parallel",
    "launcher": "fusestep.kernels.cpu.threads.parallel",
    "set_num_threads": "fusestep.kernels.cpu.threads.parallel",
    "states_in": "fusestep.nn.base.file_set",
    "synchronize": "fusestep.ops.runtime.pending",
    "threading_layer": "fusestep.kernels.cpu.threads.layers",
}
__all__ = ["__version__", "nn", "ops", *_NAMES]


def __getattr__(name: str) -> _Any:
    if name in _LAYERS:
        return _import_module(f"fusestep.{name}")
    if name in _NAMES:
        return getattr(_import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'fusestep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
