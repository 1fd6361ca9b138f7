"""Checks of the CUDA loops under Numba's simulator: ``python cuda_simulation.py <check>``.

The simulator runs a Python thread for each of the device's, so arrays are short and blocks small.
It has to be switched on before Numba is imported, hence a process of its own.
"""

from __future__ import annotations

import os
import sys

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fusestep.kernels.blocks import Kernel, kernel
from fusestep.kernels.cuda import dense
from fusestep.kernels.rules import adam, mxnet
from fusestep.kernels.rules.adafactor import ADAFACTOR, ADAFACTOR_PLAIN
from fusestep.kernels.rules.gradient import CLIP, COUPLED_DECAY, SCALE
from fusestep.kernels.rules.rule import Prologue, Rule
from fusestep.kernels.storage import BF16, F16, F32, F64, Storage
from fusestep.kernels.warmup import all_rules
from fusestep.ops.step import Variables, dense_step

# Few threads a block and one tile a thread, so that short tensors have several blocks.
dense.THREADS, dense._TILES_PER_THREAD = 4, 1
Tensors = list[list[np.ndarray]]


def tensors_for(compiled: Kernel, sizes: Sequence[int], shift: int = 0) -> tuple[Tensors, Tensors]:
    """Variables and gradients of these sizes, twice; ``shift`` elements past an aligned address."""
    rng = np.random.default_rng(3)

    def array(storage: Storage, n: int) -> np.ndarray:
        room = np.zeros(n + shift + 16, storage.dtype)
        first = -room.ctypes.data % 16 // storage.itemsize + shift
        room[first : first + n] = rng.uniform(0.1, 1.0, n).astype(storage.dtype)
        return room[first : first + n]

    storages = (compiled.w, *compiled.s, compiled.g)
    made = [[array(storage, n) for storage in storages] for n in sizes]
    return made, [[a.copy() for a in arrays] for arrays in made]


def step_on_device(compiled: Kernel, tensors: Tensors, hp: np.ndarray, hp_of: np.ndarray) -> None:
    """One step by the device's loop."""
    addresses = np.zeros((len(tensors), 4), np.int64)
    for t, arrays in enumerate(tensors):
        addresses[t, : len(arrays) - 1] = [a.ctypes.data for a in arrays[:-1]]
    gradients = np.array([arrays[-1].ctypes.data for arrays in tensors])
    sizes = np.array([arrays[0].size for arrays in tensors])
    dense.dense_update(compiled, addresses, gradients, sizes, hp, hp_of)


def step_on_host(compiled: Kernel, tensors: Tensors, hp: np.ndarray, hp_of: np.ndarray) -> None:
    """The same step by the loop of the CPU."""
    dense_step(
        compiled.rule,
        compiled.prologue,
        Variables.of([tuple(arrays[:-1]) for arrays in tensors]),
        np.array([arrays[-1].ctypes.data for arrays in tensors]),
        compiled.g,
        hp,
        hp_of,
    )


def compare(
    rule: Rule,
    sizes: Sequence[int],
    prologue: Prologue = (),
    w: Storage = F32,
    g: Storage = F32,
    s: tuple[Storage, ...] | None = None,
    shift: int = 0,
) -> None:
    """Device and host do the same to every element: but for the simulator's wider roots."""
    compiled = kernel(rule, prologue, w, g, (F32,) * len(rule.states) if s is None else s)
    found, expected = tensors_for(compiled, sizes, shift)
    rng = np.random.default_rng(5)
    rows = min(3, len(sizes))
    hp = rng.uniform(0.1, 0.9, (rows, compiled.n_scalars)).astype(compiled.real.carrier)
    hp_of = np.arange(len(sizes)) % rows
    step_on_device(compiled, found, hp, hp_of)
    step_on_host(compiled, expected, hp, hp_of)
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            unit = {2: 2.0**-7, 4: 1e-5, 8: 1e-13}[a.itemsize]
            np.testing.assert_allclose(a.astype(float), b.astype(float), unit, unit)


SIZES = (37, 0, 16, 1, 5, 64, 3)


def every_rule() -> None:
    """All rules that are one loop."""
    for rule in all_rules().values():
        if rule not in (ADAFACTOR, ADAFACTOR_PLAIN):
            compare(rule, (19, 2))


def sizes_and_prologues() -> None:
    """Tails, empty tensors, several blocks, scalars of each tensor."""
    compare(adam.ADAM, SIZES)
    compare(adam.ADAM, SIZES, (SCALE, CLIP, COUPLED_DECAY))
    compare(adam.ADAM, (0, 0))


def storage_types() -> None:
    """Tiles of 2 to 8 elements, loads of 16 bytes or two of them."""
    compare(adam.ADAM, SIZES, w=F64, g=F64, s=(F64, F64))
    compare(adam.ADAM, SIZES, w=F64, g=F32, s=(F64, F32))
    compare(adam.ADAM, SIZES, w=F16, g=F16, s=(F32, F32))
    compare(adam.ADAM, SIZES, w=BF16, g=BF16, s=(BF16, BF16))
    compare(mxnet.MXNET_ADAM_MASTER, SIZES, g=F16, s=(F32, F32, F16))


def unaligned() -> None:
    """Elements one by one where 16-byte loads are not possible."""
    compare(adam.ADAM, SIZES, shift=1)
    compare(adam.ADAM, SIZES, w=BF16, g=F32, s=(F32, F32), shift=3)


CHECKS: dict[str, Callable[[], Any]] = {
    check.__name__: check for check in (every_rule, sizes_and_prologues, storage_types, unaligned)
}

if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
    print("right")
