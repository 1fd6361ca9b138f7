"""Dense steps for any rule, under every operator and optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from ...kernels.cpu.dense import DenseStep
from ...kernels.cpu.measure import measure
from ...kernels.cpu.parallel import Prepared, commit
from ...kernels.cpu.workspace import Pool
from ...kernels.element import kernel
from ...kernels.rules.rule import Prologue, Rule
from ...kernels.storage import STORAGES, Storage, real_of
from ...kernels.tables import TensorTable
from . import device_step, locks
from .arrays import address_of
from .device import DeviceArray
from .device_step import Launch


@dataclass(frozen=True, eq=False)
class Variables:
    """Checked variables: tensors of the same storage types of parameter and states.

    Attributes:
        tensors: for each tensor the parameter, then its states; contiguous, of one shape
            (but for the row and column means of Adafactor); all on the host, or all on one
            device.
        w: storage of the parameters.
        s: storage of each state.
        table: their addresses and sizes.
    """

    tensors: tuple[tuple[Any, ...], ...]
    w: Storage
    s: tuple[Storage, ...]
    table: TensorTable

    @classmethod
    def of(cls, tensors: Sequence[tuple[Any, ...]]) -> Variables:
        """Collect the addresses of ``tensors``, which are kept alive with the result."""
        addresses = np.array([[address_of(a) for a in arrays] for arrays in tensors], np.int64)
        first = np.zeros(len(tensors) + 1, np.int64)
        first[1:] = np.cumsum([arrays[0].size for arrays in tensors])
        w, *s = (STORAGES[array.dtype] for array in tensors[0])
        return cls(tuple(tensors), w, tuple(s), TensorTable(addresses, first))

    @property
    def real(self) -> Storage:
        """Storage of the arithmetic."""
        return real_of(self.w)

    @cached_property
    def spans(self) -> list[locks.Span]:
        """The memory of all tensors, for locking."""
        return spans_of(self.tensors)

    @cached_property
    def _steps(self) -> dict[tuple[Rule, Prologue, Storage], Pool[DenseStep]]:
        return {}

    def steps(self, rule: Rule, prologue: Prologue, g: Storage) -> Pool[DenseStep]:
        """The steps of ``rule`` on these tensors, for gradients stored as ``g``."""
        key = rule, prologue, g
        if key not in self._steps:
            compiled = kernel(rule, prologue, self.w, g, self.s)
            pool: Pool[DenseStep] = Pool(lambda: DenseStep(compiled, self.table, pool.give))
            self._steps[key] = pool
        return self._steps[key]


def spans_of(tensors: Sequence[tuple[Any, ...]]) -> list[locks.Span]:
    """The memory of variables, for locking."""
    return locks.spans_of(
        [
            (
                tuple(address_of(a) for a in arrays),
                tuple(a.nbytes for a in arrays),
                arrays[0].nbytes // max(1, arrays[0].shape[0]) if arrays[0].ndim else 0,
            )
            for arrays in tensors
        ]
    )


def dense_step(
    rule: Rule,
    prologue: Prologue,
    variables: Variables,
    gradients: np.ndarray,
    g: Storage,
    hp: np.ndarray,
    hp_of: np.ndarray,
    *,
    launch: Launch | None = None,
) -> None:
    """One step of ``rule`` on all ``variables``, in place, in one kernel call.

    Args:
        rule: the update rule.
        prologue: what happens to the gradient before the rule.
        variables: T tensors with their states.
        gradients: int64 ``[T]``: addresses of contiguous gradients of the tensors' sizes.
        g: storage of the gradients.
        hp: at most T rows of scalars in the type of the arithmetic: the rule's, then the
            prologue's.
        hp_of: int64 ``[T]``: the row of ``hp`` that each tensor uses.
        launch: for variables on a device; the step is enqueued.
    """
    if launch is None:
        commit([prepared_dense(rule, prologue, variables, gradients, g, hp, hp_of)])
        return
    compiled = kernel(rule, prologue, variables.w, g, variables.s)
    table = variables.table
    sizes = np.diff(table.first)
    device_step.dense_update(compiled, table.addresses, gradients, sizes, hp, hp_of, launch)


def prepared_dense(
    rule: Rule,
    prologue: Prologue,
    variables: Variables,
    gradients: np.ndarray,
    g: Storage,
    hp: np.ndarray,
    hp_of: np.ndarray,
) -> Prepared:
    """A step on variables on the host, to be run by `commit`; arguments as `dense_step`."""
    pool = variables.steps(rule, prologue, g)
    try:
        step = pool.free.pop()
    except IndexError:
        step = pool.take()
    step.gradients[:], step.hp[: len(hp)], step.hp_of[:] = gradients, hp, hp_of
    step.prepare()
    return step


@cache
def _steps_on_one_tensor(
    rule: Rule, prologue: Prologue, w: np.dtype[Any], g: np.dtype[Any]
) -> Pool[DenseStep]:
    """For variables of dtype ``w`` and a gradient of dtype ``g``, wherever they lie."""
    s = (STORAGES[w],) * len(rule.states)
    compiled = kernel(rule, prologue, STORAGES[w], STORAGES[g], s)

    def make() -> DenseStep:
        nowhere = TensorTable(np.zeros((1, 1 + len(s)), np.int64), np.zeros(2, np.int64))
        return DenseStep(compiled, nowhere, pool.give)

    pool = Pool(make)
    return pool


def tensor_step(
    rule: Rule,
    prologue: Prologue,
    arrays: tuple[Any, ...],
    addresses: Sequence[int] | np.ndarray,
    hp: Sequence[float],
    *,
    use_locking: bool = False,
) -> None:
    """One step of ``rule`` on one tensor, in place; on a device it is enqueued.

    Args:
        rule: the update rule.
        prologue: what happens to the gradient before the rule.
        arrays: the parameter, its states and the gradient: contiguous, of one shape, all but the
            gradient of one dtype.
        addresses: those of the arrays.
        hp: the scalars of the rule, then those of the prologue.
        use_locking: hold the variables exclusively.
    """
    w, gradient = arrays[0], arrays[-1]
    if isinstance(w, DeviceArray):
        _tensor_step_on_device(rule, prologue, arrays, addresses, hp, use_locking)
        return
    step = _steps_on_one_tensor(rule, prologue, w.dtype, gradient.dtype).take()
    step.table.move(addresses[:-1], w.size)
    step.gradients[0] = addresses[-1]
    step.hp[0] = hp
    step.prepare()
    if use_locking:
        locks.serialized(step.run, spans_of([arrays[:-1]]), shared=False)
    else:
        step.run()
    step.release()


def _tensor_step_on_device(
    rule: Rule,
    prologue: Prologue,
    arrays: tuple[Any, ...],
    addresses: Sequence[int] | np.ndarray,
    hp: Sequence[float],
    use_locking: bool,
) -> None:
    *variables, gradient = arrays
    w = STORAGES[variables[0].dtype]
    compiled = kernel(rule, prologue, w, STORAGES[gradient.dtype], (w,) * len(rule.states))
    spans = spans_of([tuple(variables)]) if use_locking else None
    with device_step.launch_on(arrays, spans) as launch:
        device_step.dense_update(
            compiled,
            np.array([addresses[:-1]], np.int64),
            np.array(addresses[-1:], np.int64),
            np.array([gradient.size]),
            np.array([hp], compiled.real.dtype),
            np.zeros(1, np.int64),
            launch,
        )


def measure_step(
    rule: Rule,
    prologue: Prologue,
    variables: Variables,
    gradients: np.ndarray,
    g: Storage,
    hp: np.ndarray,
    hp_of: np.ndarray,
) -> np.ndarray:
    """The first stage of a two-stage ``rule``; arguments as `dense_step`, nothing is written.

    Returns:
        float64 ``[T, n_measured]``: sums of squares over each tensor.
    """
    compiled = kernel(rule, prologue, variables.w, g, variables.s)
    return measure(compiled, variables.table, gradients, hp, hp_of)
