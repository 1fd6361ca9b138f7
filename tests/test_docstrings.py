"""The examples in the docstrings of the public layers run and print what they say."""

import doctest
import importlib

import pytest

MODULES = [
    "fusestep.nn.adam",
    "fusestep.nn.adam_weight_decay",
    "fusestep.nn.checkpoint",
    "fusestep.nn.optimizer",
    "fusestep.nn.parameter",
    "fusestep.nn.schedule",
    "fusestep.ops.adam",
    "fusestep.ops.amsgrad",
    "fusestep.ops.arrays",
    "fusestep.ops.embedding",
    "fusestep.ops.fused_sparse_adam",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted > 0
    assert failed == 0
