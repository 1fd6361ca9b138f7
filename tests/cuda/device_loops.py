"""The loops of CUDA, as those of the CPU: rules, storage types, rows, sorting, finite values."""

from __future__ import annotations

from simulator import run_check  # isort: split

from collections.abc import Sequence
from typing import Any

import numpy as np

from fusestep.kernels.cpu.rows import step as host_rows
from fusestep.kernels.cpu.threads.parallel import commit, run_all
from fusestep.kernels.cpu.warmup import all_rules
from fusestep.kernels.cuda.dense import finite
from fusestep.kernels.cuda.dense.step import DenseStep
from fusestep.kernels.cuda.device.guard import NOTHING, WORDS
from fusestep.kernels.cuda.device.part import LaunchContext, run
from fusestep.kernels.cuda.rows import sort
from fusestep.kernels.cuda.rows.step import RowStep
from fusestep.kernels.element import Kernel, kernel
from fusestep.kernels.rule import Prologue, Rule
from fusestep.kernels.rules import adam, mxnet
from fusestep.kernels.rules.gradient import CLIP, COUPLED_DECAY, SCALE
from fusestep.kernels.storage import BF16, F16, F32, F64, Storage
from fusestep.kernels.tables import HOT, RowSource, RowTable
from fusestep.nn.engine.host import completed
from fusestep.ops.runtime.step import DenseUpdate, Variables

Tensors = list[list[np.ndarray]]
# What the rules of the package take beside sums.
KNOWN = {
    "epsilon2": 1e-3, "clip_threshold": 1.0, "scale_parameter": True, "weight_decay": 0.1,
    "trust_coefficient": 0.1, "epsilon": 1e-3,
}  # fmt: skip


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
    addresses = np.zeros((len(tensors), 1 + len(compiled.s)), np.int64)
    for t, arrays in enumerate(tensors):
        addresses[t] = [a.ctypes.data for a in arrays[:-1]]
    gradients = np.array([arrays[-1].ctypes.data for arrays in tensors])
    sizes = np.array([arrays[0].size for arrays in tensors])
    run(
        DenseStep(compiled, addresses, gradients, sizes, tuple(KNOWN.items())),
        hp,
        hp_of,
        LaunchContext(0),
    )


def step_on_host(compiled: Kernel, tensors: Tensors, hp: np.ndarray, hp_of: np.ndarray) -> None:
    """The same step by the loop of the CPU."""
    update = DenseUpdate(
        compiled.rule,
        compiled.prologue,
        Variables.of([tuple(arrays[:-1]) for arrays in tensors]),
        np.array([arrays[-1].ctypes.data for arrays in tensors]),
        compiled.g,
        hp,
        hp_of,
    )
    if compiled.rule.factor:
        sums = update.sums()
        commit([completed(update, None, sums, [KNOWN] * len(sums))])
    else:
        commit([update.prepared()])


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
    if rule.factor:
        rows, hp, hp_of = len(sizes), hp[hp_of], np.arange(len(sizes))
    step_on_device(compiled, found, hp, hp_of)
    step_on_host(compiled, expected, hp, hp_of)
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            unit = {2: 2.0**-7, 4: 1e-5, 8: 1e-13}[a.itemsize]
            np.testing.assert_allclose(a.astype(float), b.astype(float), unit, unit)


SIZES = (37, 0, 16, 1, 5, 64, 3)


def every_rule() -> None:
    """All rules of elements and tensors: see `device_row_wise.py`.

    The variance of made-up states may be negative, of which Python takes no root.
    """
    for name, rule in all_rules().items():
        fits = rule.scope == "tensor" and not rule.lines
        if fits and not name.startswith("torch_rmsprop_centered"):
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


# Of the tables of a step: rows, columns, occurrences.
Tables = Sequence[tuple[int, int, int]]


class RowCase:
    """Tables with row-sparse gradients, the same twice; the parameters of one are stepped."""

    def __init__(
        self,
        tables: Tables,
        w: Storage = F32,
        g: Storage = F32,
        s: tuple[Storage, ...] = (F32, F32),
        hottest: int = 0,
        shift: int = 0,
        index_dtype: type = np.int64,
        whole: int = 0,  # length of the batch of which the tables have parts
    ) -> None:
        self.kernel = kernel(adam.ADAM, (), w, g, s)
        rng = np.random.default_rng(7)
        scalars = rng.uniform(0.1, 0.9, (2, self.kernel.n_scalars))
        self.hp = scalars.astype(self.kernel.real.carrier)
        self.hp_of = [t % 2 for t in range(len(tables))]
        self.shapes = tables
        self.found, self.expected = tensors_for(self.kernel, [n * d for n, d, _ in tables], shift)
        self.before = [[a.copy() for a in arrays] for arrays in self.found]
        self.indices = [rng.integers(0, n, b).astype(index_dtype) for n, _, b in tables]
        for index in self.indices:
            index[rng.permutation(len(index))[:hottest]] = 1
        self.values = [rng.uniform(-1, 1, (b, d)).astype(g.dtype) for _, d, b in tables]
        self.whole = whole
        places = (rng.choice(whole, b, replace=False) for _, _, b in tables if whole)
        self.positions = [np.sort(of_table) for of_table in places]

    def tables(self, tensors: Tensors) -> list[RowTable]:
        """These parameters and states as the tables of a step."""
        made = []
        for t, (n, d, b) in enumerate(self.shapes):
            places = tuple(a.ctypes.data for a in tensors[t][:-1])
            hp, index = self.hp[self.hp_of[t] :].ctypes.data, self.indices[t]
            place, values = index.ctypes.data, self.values[t].ctypes.data
            of_batch = (self.positions[t].ctypes.data, self.whole) if self.whole else ()
            source = RowSource(place, index.itemsize, b, values, *of_batch)
            made.append(RowTable(places, hp, n, d, source))
        return made

    def step_on_device(self, *, touched_only: bool, drop: bool = False) -> np.ndarray:
        """One step, and the guard after it."""
        guard = np.array([NOTHING, 0], np.int64)
        assert len(guard) == WORDS
        step = RowStep(
            self.kernel,
            self.tables(self.found),
            touched_only=touched_only,
            drop=drop,
            base=1_000,
        )
        run(step, self.hp, self.hp_of, LaunchContext(0, guard.ctypes.data))
        return guard

    def step_on_host(self, *, touched_only: bool, drop: bool = False) -> None:
        """The same step by the loops of the CPU."""
        tables = self.tables(self.expected)
        step = host_rows.RowStep(self.kernel, tables, touched_only=touched_only, drop=drop)
        assert step.bad_position == -1
        run_all(step.loops)
        step.release()

    def compare(self) -> None:
        """Device and host have done the same to every element."""
        for ours, theirs in zip(self.found, self.expected, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                unit = {2: 2.0**-7, 4: 1e-5, 8: 1e-13}[a.itemsize]
                np.testing.assert_allclose(a.astype(float), b.astype(float), unit, unit)


def compare_rows(tables: Tables, drop: bool = False, **options: Any) -> None:
    """Both updates, on the device as on the host."""
    for touched_only in (True, False):
        case = RowCase(tables, **options)
        if drop:
            for index, (n, _, _) in zip(case.indices, tables, strict=True):
                index[::3] = [n, -1, n + 7][: len(index[::3])] + [n] * (len(index[::3]) - 3)
        guard = case.step_on_device(touched_only=touched_only, drop=drop)
        assert guard[0] == NOTHING
        case.step_on_host(touched_only=touched_only, drop=drop)
        case.compare()


def row_steps() -> None:
    """Duplicates, several tables of different widths, ends of rows, unaligned ones, none."""
    compare_rows([(9, 8, 20)])
    compare_rows([(5, 3, 7), (9, 16, 0), (4, 7, 12), (3, 1, 5)])
    compare_rows([(6, 40, 10)], shift=1, index_dtype=np.int32)
    compare_rows([(4, 4, 0)])
    compare_rows([(4, 5, 12)], drop=True)
    compare_rows([(5, 3, 7), (9, 16, 30)])


def row_storage_types() -> None:
    """16-bit and mixed storage types."""
    compare_rows([(6, 24, 10)], w=BF16, g=BF16)
    compare_rows([(6, 8, 10)], w=F64, g=F32, s=(F64, F64))
    compare_rows([(4, 9, 10)], w=F32, g=F16)


def hot_rows() -> None:
    """Rows with so many occurrences that they are summed range by range."""
    compare_rows([(3, 4, HOT + 90), (4, 1, 4_500)], hottest=HOT + 40)
    compare_rows([(3, 5, HOT + 1)], hottest=HOT + 1)
    compare_rows([(3, 4, HOT + 90), (4, 1, 700)], hottest=HOT + 40, whole=30_000)


def part_of_a_batch() -> None:
    """Ranges are those of positions in the whole batch, not in this part of it."""
    n, first = HOT + 40, 300  # of the positions, 300 are in the first range
    case = RowCase([(3, 1, n)], hottest=n, whole=9_000)
    case.positions = [np.arange(n) + 4_096 - first]
    assert case.tables(case.found)[0].bounds().tolist() == [0, first, n, n]
    # 2**24 + 1 is 2**24: with another cut the ones of the second range would be lost.
    case.values[0][...] = 1.0
    case.values[0][0], case.values[0][-1] = 2.0**24, -(2.0**24)
    case.step_on_device(touched_only=True)
    case.step_on_host(touched_only=True)
    case.compare()
    first_moment, one_minus_beta1 = case.before[0][1][1], case.hp[0, 0]
    expected = first_moment + one_minus_beta1 * (n - first - 1 - first_moment)
    np.testing.assert_allclose(case.found[0][1][1], expected, 1e-5)


def guards() -> None:
    """A bad index keeps the call from writing, and is found."""
    for touched_only in (True, False):
        case = RowCase([(5, 4, 6), (3, 4, 9)])
        case.indices[1][[4, 7]] = 3, -2
        guard = case.step_on_device(touched_only=touched_only)
        assert guard.tolist() == [1_000 + 6 + 4, 3]
        case.expected = case.before
        case.compare()


def sort_by_bits(keys: np.ndarray, first_bit: int, n_bits: int) -> None:
    """The device's sort is NumPy's stable one, and writes nothing beyond its buffers."""
    n, words, guard = len(keys), sort.scratch_words(len(keys)), -7
    buffers = [np.full(size + 1, guard) for size in (n, n, words)]
    buffers[0][:n] = keys
    first, spare, scratch = (buffer.ctypes.data for buffer in buffers)
    place = sort.sort_keys(first, spare, scratch, n, first_bit, n_bits)
    order = np.argsort(keys >> first_bit & (1 << n_bits) - 1, kind="stable")
    np.testing.assert_array_equal(buffers[[first, spare].index(place)][:n], keys[order])
    assert all(buffer[-1] == guard for buffer in buffers)


def sorting() -> None:
    """Tiles and parts of one, several passes, keys in any order and many of them equal."""
    rng = np.random.default_rng(7)
    keys = rng.integers(0, 1 << 62, 85)
    sort_by_bits(keys, 11, 10)
    for n in (0, 1, 32):
        sort_by_bits(keys[:n], 50, 3)
    positions = np.arange(40)
    rows = np.sort(rng.zipf(1.5, 40) % 64)
    for some_rows in (np.full(40, 15), rows, rows[::-1]):
        sort_by_bits(some_rows << 9 | positions, 9, 6)


def finite_values() -> None:
    """NaN and infinities anywhere, in every storage type, aligned or not."""
    for storage in (F32, F64, F16, BF16):
        for shift in (0, 1):
            room = np.zeros(150, storage.dtype)
            first = -room.ctypes.data % 16 // storage.itemsize + shift
            arrays = [room[first : first + 70], room[first + 80 : first + 83], room[:0]]
            addresses = np.array([a.ctypes.data for a in arrays])
            sizes = np.array([a.size for a in arrays])
            arrays[0][:] = np.finfo(np.float16).max  # finite in all of them
            assert finite.all_finite(storage, addresses, sizes, stream=0)
            for array, place, value in ((0, 69, np.nan), (0, 3, np.inf), (1, 2, -np.inf)):
                before = arrays[array][place]
                arrays[array][place] = value
                assert not finite.all_finite(storage, addresses, sizes, stream=0)
                arrays[array][place] = before
    assert finite.all_finite(F32, addresses[2:], sizes[2:], stream=0)


if __name__ == "__main__":
    run_check(
        loops=(every_rule, sizes_and_prologues, storage_types, unaligned, finite_values, sorting),
        rows=(row_steps, row_storage_types, guards),
        hot_rows=(hot_rows, part_of_a_batch),
    )
