"""Dense steps for any rule, under every operator and optimizer."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from ...kernels.cpu.dense import DenseStep, reduce_dense
from ...kernels.cpu.matrices.step import MatrixTable
from ...kernels.cpu.rows.arguments import RowTables
from ...kernels.cpu.threads.parallel import Prepared
from ...kernels.cpu.threads.workspace import Pool
from ...kernels.element import Kernel, kernel
from ...kernels.lazy import lazy
from ...kernels.rule import Prologue, Rule
from ...kernels.rules.norm import SCALED
from ...kernels.storage import STORAGES, Storage, real_of, storage_of
from ...kernels.tables import MatrixTensor, TensorTable, row_width, table_sizes
from . import cuda, locks
from .arrays import address_of
from .device import DeviceArray, Launch
from .launch import launch_on

_KEPT_STEPS = 4  # of a kernel, which as many calls at a time may use


@dataclass(frozen=True, eq=False)
class Variables:
    """Checked variables: tensors with their states, of the same storage types.

    Each item of ``tensors`` is a parameter, then its states: contiguous, of the shapes that the
    rule declares, all on the host or all on one device. ``table`` has their addresses and sizes.
    """

    tensors: tuple[tuple[Any, ...], ...]
    w: Storage  # of the parameters
    s: tuple[Storage, ...]  # of each state
    table: TensorTable

    @classmethod
    def of(cls, tensors: Sequence[tuple[Any, ...]]) -> Variables:
        """Collect the addresses of ``tensors``; the result keeps them alive."""
        addresses = np.array([[address_of(a) for a in arrays] for arrays in tensors], np.int64)
        first = np.zeros(len(tensors) + 1, np.int64)
        first[1:] = np.cumsum([arrays[0].size for arrays in tensors])
        widths = np.array([row_width(arrays[0].shape) for arrays in tensors], np.int64)
        w, *s = (storage_of(array.dtype) for array in tensors[0])
        return cls(tuple(tensors), w, tuple(s), TensorTable(addresses, first, widths))

    def move(self, addresses: np.ndarray) -> None:
        """Take over new addresses of all tensors, and drop objects derived from the old ones."""
        self.table.addresses[:] = addresses
        self._forget_places()

    def put(self, t: int, k: int, address: int) -> None:
        """Take over the new address of one array: the parameter (``k`` = 0) or a state."""
        self.table.addresses[t, k] = address
        self._forget_places()

    def _forget_places(self) -> None:
        # `matrices` has addresses of its own; `steps` read those of this table in each call.
        vars(self).pop("matrices", None)

    @property
    def real(self) -> Storage:
        """Storage of the arithmetic."""
        return real_of(self.w)

    @property
    def as_matrices(self) -> list[MatrixTensor]:
        """The tensors as matrices."""
        pairs = zip(self.tensors, self.table.addresses.tolist(), strict=True)
        return [MatrixTensor.of(a[0].shape, addresses) for a, addresses in pairs]

    @lazy
    def rows(self) -> RowTables:
        """The tensors as tables, for row-sparse steps; `table` has the addresses."""
        sizes = table_sizes(arrays[0].shape for arrays in self.tensors)
        return RowTables.of(self.table.addresses, sizes)

    @lazy
    def n_rows(self) -> int:
        """The rows of all tables."""
        return int(self.rows.sizes[:, 0].sum())

    @lazy
    def matrices(self) -> MatrixTable:
        """The table for steps on the host by rules with states of rows and columns."""
        return MatrixTable(self.as_matrices)

    @lazy
    def steps(self) -> dict[tuple[Rule, Prologue, Storage], deque[DenseStep]]:
        """The `_free_steps` of these tensors, by rule, gradient transforms and gradient storage."""
        return {}

    @lazy
    def parts(self) -> dict[Any, Pool[Any]]:
        """The parts of steps on a device, by rule, gradient transforms, storage and constants."""
        return {}

    def new_steps(self, rule: Rule, prologue: Prologue, g: Storage) -> deque[DenseStep]:
        """Make an item of `steps`."""
        free = _free_steps(kernel(rule, prologue, self.w, g, self.s))
        return self.steps.setdefault((rule, prologue, g), free)


class DenseUpdate(NamedTuple):
    """The update of some tensors by one kernel call."""

    rule: Rule
    prologue: Prologue  # gradient transforms
    variables: Variables  # T tensors with their states
    gradients: np.ndarray  # int64 [T]: addresses of contiguous gradients of the tensors' sizes
    g: Storage  # of the gradients
    # Rows of scalars, in the type of the arithmetic: the rule's, then the transforms'. For a step
    # on the host also an ``array`` of all of them, which takes less time than one of NumPy.
    hp: Any
    hp_of: np.ndarray  # int64 [T]: the row of each tensor
    constants: tuple[tuple[str, float], ...] = ()  # on a device: numbers that `Rule.factor` takes

    @property
    def kernel(self) -> Kernel:
        """The kernel of the update."""
        return kernel(self.rule, self.prologue, self.variables.w, self.g, self.variables.s)

    def sums(self) -> np.ndarray:
        """The sums that a two-stage rule measures: float64 ``[T, n_measured]``."""
        return reduce_dense(self.kernel, self.variables.table, self.gradients, self.hp, self.hp_of)

    def prepared(self) -> Prepared:
        """The step on the host, ready for `commit`."""
        rule, prologue, variables, gradients, g, hp, hp_of, _ = self
        free, n, table = variables.steps.get((rule, prologue, g)), len(gradients), variables.table
        if free is None:
            free = variables.new_steps(rule, prologue, g)
        try:
            step = free.pop()
            is_attached = step.table is table or step.attach(table)
        except IndexError:
            is_attached = False
        if not is_attached:
            step = DenseStep(self.kernel, table, free.append)
        step.gradients[:n] = gradients
        if type(hp) is array:
            step.scalars[: len(hp)] = hp
        else:
            step.hp[: len(hp)] = hp
        step.hp_of[:n] = hp_of
        step.prepare()
        return step

    def enqueue(self, launch: Launch) -> None:
        """Enqueue the step on a device."""
        key, pools = (self.rule, self.prologue, self.g, self.constants), self.variables.parts
        table, pool = self.variables.table, pools.get(key)
        if pool is None:
            pool = Pool(partial(_dense_part, self.kernel, table, self.constants))
            pool = pools.setdefault(key, pool)
        part = pool.take()
        part.put(table.addresses, self.gradients)
        cuda.device.part.run(part, self.hp, self.hp_of, launch)
        pool.give(part)


def _dense_part(
    kernel: Kernel, table: TensorTable, constants: tuple[tuple[str, float], ...]
) -> Any:
    """The `DevicePart` of steps on some tensors; before each step it gets their addresses."""
    sizes = np.diff(table.first)
    arrays = table.addresses, table.addresses[:, 0]
    if kernel.rule.is_row_wise:
        return cuda.dense.row_wise.RowWiseStep(kernel, *arrays, sizes, table.widths)
    return cuda.dense.step.DenseStep(kernel, *arrays, sizes, constants)


def squares_at(storage: Storage, addresses: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The float64 sum of squares of each of several contiguous arrays, in one call.

    The arrays are given by int64 addresses and numbers of elements.
    """
    addresses = np.array(addresses, np.int64)
    table = TensorTable(addresses[:, None], np.concatenate(([0], np.cumsum(sizes))))
    hp = np.ones((1, 1), real_of(storage).dtype)
    compiled = kernel(SCALED, (), storage, storage, ())
    hp_of = np.zeros(len(addresses), np.int64)
    sums: np.ndarray = reduce_dense(compiled, table, addresses, hp, hp_of)[:, 0]
    return sums


@cache
def _free_steps(kernel: Kernel) -> deque[DenseStep]:  # noqa: ARG001  (the key)
    """Steps of a kernel that no call uses: each is attached to the tensors of its next call."""
    return deque(maxlen=_KEPT_STEPS)


@cache
def _steps_on_one_tensor(
    rule: Rule, prologue: Prologue, w: np.dtype[Any], g: np.dtype[Any]
) -> Pool[DenseStep]:
    """Steps on variables of dtype ``w`` and a gradient of dtype ``g``, at any addresses."""
    s = (STORAGES[w],) * len(rule.states)
    compiled = kernel(rule, prologue, STORAGES[w], STORAGES[g], s)

    def make() -> DenseStep:
        nowhere = TensorTable(np.zeros((1, 1 + len(s)), np.int64), np.zeros(2, np.int64))
        return DenseStep(compiled, nowhere, pool.give)

    pool = Pool(make)
    return pool


@lru_cache(256)
def _parts_on_one_tensor(
    rule: Rule, prologue: Prologue, w: np.dtype[Any], g: np.dtype[Any], size: int, width: int
) -> Pool[Any]:
    """Parts of steps on variables of dtype ``w`` and a gradient of dtype ``g`` on a device."""
    s = (STORAGES[w],) * len(rule.states)
    compiled, nowhere = kernel(rule, prologue, STORAGES[w], STORAGES[g], s), (1, 1 + len(s))
    sizes = np.array([0, size]), np.array([width])
    table = TensorTable(np.zeros(nowhere, np.int64), *sizes)
    return Pool(partial(_dense_part, compiled, table, ()))


def tensor_step(
    rule: Rule, prologue: Prologue, arrays: tuple[Any, ...], addresses: Sequence[int],
    hp: Sequence[float], *, use_locking: bool = False,
) -> None:  # fmt: skip
    """One step of ``rule`` on one tensor, in place; on a device it is enqueued.

    The arrays are the parameter, its states and the gradient: contiguous, of one shape, all but
    the gradient of one dtype. With ``use_locking`` it runs alone (`locks`).
    """
    w, gradient = arrays[0], arrays[-1]
    if isinstance(w, DeviceArray):
        kinds = w.dtype, gradient.dtype, w.size, row_width(w.shape)
        pool, places = _parts_on_one_tensor(rule, prologue, *kinds), np.array([addresses], np.int64)
        part, row = pool.take(), np.array([hp], real_of(STORAGES[w.dtype]).dtype)
        part.put(places[:, :-1], places[:, -1])
        with launch_on(arrays, use_locking=use_locking) as launch:
            cuda.device.part.run(part, row, [0], launch)
        pool.give(part)
        return
    # After an error or an interrupt the step is not given back, since its arguments may be half
    # written: the next call makes another one.
    step = _steps_on_one_tensor(rule, prologue, w.dtype, gradient.dtype).take()
    step.table.move(addresses[:-1], w.size)
    step.gradients[0] = addresses[-1]
    step.hp[0] = hp
    step.prepare()
    if use_locking:
        with locks.exclusive():
            step.run()
    else:
        step.run()
    step.release()


def one_tensor(
    rule: Rule, prologue: Prologue, arrays: tuple[Any, ...], hp: Sequence[float]
) -> DenseUpdate:
    """The update of one tensor; arguments as `tensor_step`."""
    *tensor, gradient = arrays
    variables, place = Variables.of([tuple(tensor)]), np.array([address_of(gradient)], np.int64)
    row, g = np.array([hp], variables.real.dtype), STORAGES[gradient.dtype]
    return DenseUpdate(rule, prologue, variables, place, g, row, np.zeros(1, np.int64))
