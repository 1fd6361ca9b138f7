"""The examples in the docstrings of the public layers run and print what they say."""

import doctest
import importlib
import inspect

import pytest

from fusestep import nn, ops


def modules() -> list[str]:
    """Those that define what the public layers export."""
    found = set()
    for layer in (ops, nn, nn.mxnet):
        for value in (getattr(layer, name) for name in layer.__all__):
            if inspect.ismodule(value):
                found.add(value.__name__)
            elif not (inspect.isclass(value) and issubclass(value, Exception)):
                found.add(value.__module__)
    return sorted(found)


@pytest.mark.parametrize("name", modules())
def test_examples(name):
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted > 0
    assert failed == 0
