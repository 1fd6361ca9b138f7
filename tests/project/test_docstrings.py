"""The examples in the docstrings of the public layers run and print what they say."""

import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

LAYERS = ("fusestep.nn", "fusestep.ops")
EXTRAS = ("mindspore", "mpi4py", "torch")


def modules_with_examples() -> Iterator[str]:
    for layer in LAYERS:
        found = pkgutil.walk_packages(importlib.import_module(layer).__path__, f"{layer}.")
        for name in (layer, *(module.name for module in found)):
            spec = find_spec(name)
            if spec and spec.origin and ">>> " in Path(spec.origin).read_text(encoding="utf-8"):
                yield name


MODULES = sorted(modules_with_examples())


def test_both_layers_have_examples():
    for layer in LAYERS:
        assert sum(name.startswith(layer) for name in MODULES) > 10


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        pytest.skip(f"needs {error.name}")
    failed, attempted = doctest.testmod(module)
    assert attempted > 0
    assert failed == 0
