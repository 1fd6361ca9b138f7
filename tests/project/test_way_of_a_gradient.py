"""The ways of steps on the CPU, from the call to the loops: short, and only downwards."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import fusestep
from fusestep import nn, ops
from fusestep.nn import mxnet

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
MOST_FILES = 11


def calls_of(call: Any) -> list[str]:
    """The file of each function of Python that a call calls, "" for those of others."""
    files: list[str] = []

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            name = frame.f_code.co_filename
            files.append(name.removeprefix(ROOT) if name.startswith(PLACES) else "")

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def way_of(call: Any, left_out: tuple[str, ...] = CHECKS) -> list[str]:
    """The files whose functions a call enters, one after the other, but for those left out."""
    files = [file for file in calls_of(call) if file and file not in left_out]
    return [file for k, file in enumerate(files) if files[k - 1 : k] != [file]]


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


def adam() -> Any:
    opt, gradients = nn.Adam([np.ones(1_024, np.float32)]), (np.full(1_024, 0.1, np.float32),)
    return lambda: opt(gradients)


def lazy_adam() -> Any:
    table = np.ones((1_000, 8), np.float32)
    opt, rows = nn.LazyAdam([table]), nn.RowTensor(IDS, VALUES, table.shape)
    return lambda: opt((rows,))


def fused_sparse_adam() -> Any:
    op, arrays = ops.FusedSparseAdam(), [np.ones((1_000, 8), np.float32) for _ in range(3)]
    return lambda: op(*arrays, 0.9, 0.999, 1e-3, 0.9, 0.999, 1e-8, VALUES, IDS)


def mxnet_updater() -> Any:
    update, w = mxnet.get_updater(mxnet.Adam()), np.ones(1_024, np.float32)
    return lambda: update(0, np.full(1_024, 0.1, np.float32), w)


def torch_adamw() -> Any:
    torch = pytest.importorskip("torch")
    from fusestep.nn import torch as fused

    w = torch.nn.Parameter(torch.ones(1_000))
    w.grad = torch.ones(1_000)
    return fused.AdamW([w]).step


def torch_sparse() -> Any:
    torch = pytest.importorskip("torch")
    from fusestep.nn import torch as fused

    table = torch.nn.Parameter(torch.ones(1_000, 8))
    with torch.sparse.check_sparse_tensor_invariants(False):
        ids = torch.from_numpy(IDS)[None]
        table.grad = torch.sparse_coo_tensor(ids, torch.from_numpy(VALUES), table.shape)
    return fused.LazyAdam([table]).step


def sharded_embedding() -> Any:
    """Forward, backward and step."""
    torch = pytest.importorskip("torch")
    from fusestep.nn import torch as fused
    from fusestep.nn.distributed import alone

    table, ids = fused.ShardedEmbedding(1_000, 8, alone()), torch.from_numpy(IDS)
    opt = fused.LazyAdam(table.parameters())

    def step() -> None:
        opt.zero_grad()
        table(ids).sum().backward()
        opt.step()

    return step


IDS, VALUES = np.array([1, 5, 1]), np.ones((3, 8), np.float32)
# At most so many files, those of checks too, switches from one to another, and calls of Python in
# 3.11, where a comprehension is one.
WAYS = {
    adam: (14, 18, 28),
    lazy_adam: (15, 23, 38),
    fused_sparse_adam: (11, 20, 40),
    mxnet_updater: (13, 20, 42),
    torch_adamw: (14, 21, 28),
    torch_sparse: (17, 26, 40),
    sharded_embedding: (30, 109, 336),
}


@pytest.mark.parametrize("make", WAYS)
def test_a_way_is_short(make: Any) -> None:
    call = make()
    for _ in range(5):
        call()
    files, n_calls = way_of(call, left_out=()), len(calls_of(call))
    most_files, most_switches, most_calls = WAYS[make]
    assert len(set(files)) <= most_files, files
    assert len(files) <= most_switches, files
    assert n_calls <= most_calls


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
