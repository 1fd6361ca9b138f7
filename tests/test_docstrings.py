"""The examples in the docstrings of the public layers run and print what they say."""

import doctest
import importlib

import pytest

MODULES = [
    "fusestep.nn.adafactor",
    "fusestep.nn.adagrad",
    "fusestep.nn.adam",
    "fusestep.nn.adam_weight_decay",
    "fusestep.nn.base.checkpoint",
    "fusestep.nn.schedules.decay",
    "fusestep.nn.schedules.lists",
    "fusestep.nn.ftrl",
    "fusestep.nn.lamb",
    "fusestep.nn.lars",
    "fusestep.nn.mxnet",
    "fusestep.nn.mxnet.adam",
    "fusestep.nn.mxnet.optimizer",
    "fusestep.nn.mxnet.lr_scheduler",
    "fusestep.nn.mxnet.updater",
    "fusestep.nn.base.optimizer",
    "fusestep.nn.base.parameter",
    "fusestep.nn.rmsprop",
    "fusestep.nn.schedules.base",
    "fusestep.nn.thor",
    "fusestep.nn.schedules.sequential",
    "fusestep.nn.sgd",
    "fusestep.nn.thor.conv",
    "fusestep.nn.thor.layers",
    "fusestep.ops.adagrad",
    "fusestep.ops.adam",
    "fusestep.ops.adam_update",
    "fusestep.ops.amsgrad",
    "fusestep.ops.runtime.row_tensor",
    "fusestep.ops.embedding",
    "fusestep.ops.ftrl",
    "fusestep.ops.lars",
    "fusestep.ops.norm",
    "fusestep.ops.rmsprop",
    "fusestep.ops.sgd",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted > 0
    assert failed == 0
