"""The examples in the docstrings of the public layers run and print what they say."""

import doctest
import importlib

import pytest

MODULES = [
    "fusestep.nn.adafactor",
    "fusestep.nn.adagrad",
    "fusestep.nn.adam",
    "fusestep.nn.adam_weight_decay",
    "fusestep.nn.checkpoint",
    "fusestep.nn.decay",
    "fusestep.nn.decay_lists",
    "fusestep.nn.ftrl",
    "fusestep.nn.lamb",
    "fusestep.nn.lars",
    "fusestep.nn.mxnet",
    "fusestep.nn.mxnet_adam",
    "fusestep.nn.mxnet_optimizer",
    "fusestep.nn.mxnet_schedulers",
    "fusestep.nn.mxnet_updater",
    "fusestep.nn.optimizer",
    "fusestep.nn.parameter",
    "fusestep.nn.rmsprop",
    "fusestep.nn.schedule",
    "fusestep.nn.second_order",
    "fusestep.nn.sequential",
    "fusestep.nn.sgd",
    "fusestep.nn.thor_conv",
    "fusestep.nn.thor_layers",
    "fusestep.ops.adagrad",
    "fusestep.ops.adam",
    "fusestep.ops.adam_update",
    "fusestep.ops.amsgrad",
    "fusestep.ops.arrays",
    "fusestep.ops.embedding",
    "fusestep.ops.ftrl",
    "fusestep.ops.fused_sparse_adam",
    "fusestep.ops.lars",
    "fusestep.ops.norm",
    "fusestep.ops.rmsprop",
    "fusestep.ops.sgd",
    "fusestep.ops.sparse_ftrl",
    "fusestep.ops.sparse_proximal_adagrad",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted > 0
    assert failed == 0
