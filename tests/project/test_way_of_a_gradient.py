"""The way of a dense step on the CPU, from the call to the loops: short, and only downwards."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import fusestep
from fusestep import nn

ROOT = str(Path(fusestep.__file__).parent) + "/"
LAYERS = ("nn/", "ops/", "kernels/")
PLACES = tuple(ROOT + layer for layer in LAYERS)
# Files of checks and of errors: each is entered wherever something has to be checked.
CHECKS = (
    "nn/base/arguments.py",
    "nn/engine/reader.py",
    "ops/runtime/check.py",
    "ops/runtime/errors.py",
    "kernels/cpu/headers/arrays.py",
)
MOST_FILES = 8


def way_of(call: Any) -> list[str]:
    """The files whose functions a call enters, one after the other."""
    files: list[str] = []

    def see(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PLACES):
            return
        file = code.co_filename.removeprefix(ROOT)
        if file not in CHECKS and files[-1:] != [file]:
            files.append(file)

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def layer_of(file: str) -> int:
    return next(k for k, layer in enumerate(LAYERS) if file.startswith(layer))


@pytest.mark.parametrize("make", [nn.Adam, nn.SGD, nn.AdamWeightDecay])
@pytest.mark.parametrize("size", [1_024, 200_000])
def test_a_dense_step(make: Any, size: int) -> None:
    w = np.ones(size, np.float32)
    opt, gradients = make([w]), (np.full(size, 0.1, np.float32),)
    for _ in range(3):
        opt(gradients)
    files = way_of(lambda: opt(gradients))
    assert files[0] == "nn/fused.py"
    assert files[-1].startswith("kernels/cpu/")
    assert len(dict.fromkeys(files)) <= MOST_FILES, files
    for k, file in enumerate(files):
        since = files[files.index(file) : k]
        assert all(layer_of(other) <= layer_of(file) for other in since), (file, files)


def test_an_option_that_changes_between_steps_acts() -> None:
    """What a step does is remembered; whatever is assigned makes it anew."""
    found = []
    for beta in (0.9, 0.5):
        w = np.ones(3, np.float32)
        opt = nn.Adam([w], 0.1)
        opt((w * 0.5,))
        opt.beta1 = beta
        opt((np.full(3, -1.0, np.float32),))
        found.append(w)
    assert not np.array_equal(*found)
