"""Reading the gradients of a step: checked in full before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any

import numpy as np

from ...kernels.cpu.threads.allocation import read_at_random
from ...kernels.keeping import whole_weight
from ...kernels.quiet import quiet
from ...kernels.rule import Rule
from ...kernels.tables import RowSource
from ...ops.runtime import check
from ...ops.runtime.arrays import address_of, adopt_anywhere, real_type
from ...ops.runtime.bags.tensor import BagTensor
from ...ops.runtime.device import DeviceArray, device_of
from ...ops.runtime.errors import reject
from ...ops.runtime.row_forms import as_rows, row_gradient
from ...ops.runtime.row_step import RowGradient
from ...ops.runtime.row_tensor import RowTensor
from ..base import gradients as whole
from ..base.parameter import Parameter
from .batch import check_rows
from .device_gradients import LastOnDevice
from .layout import GradientKind, GradientKinds, Gradients, Layout, build_layout

# A model whose layers take turns to have gradients needs several layouts. A model in which the
# choice of layers never repeats must not keep all of them.
_KEPT_LAYOUTS = 16


class GradientReader:
    """Checks gradients and finds their layouts, which it keeps.

    ``rules`` and ``class_of`` are those of `build_layout`. If ``sparse_update`` is None, row-sparse
    gradients raise, and ``rows_need`` is what the error says of expected and got. ``centralized``
    are the places of the parameters whose gradients are centralized.
    """

    def __init__(
        self, where: str, parameters: Sequence[Parameter], states: Sequence[tuple[Any, ...]],
        rules: Sequence[Rule], class_of: np.ndarray, sparse_update: str | None,
        rows_need: tuple[str, str | None] = ("", None), centralized: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._where, self._parameters, self._states = where, parameters, states
        self._rules, self._class_of, self._sparse_update = rules, class_of, sparse_update
        self._rows_need, self._centralized = rows_need, frozenset(centralized)
        self.shapes = [
            [array.shape for array in (p.array, *own)]
            for p, own in zip(parameters, states, strict=True)
        ]
        self._reals = [np.dtype(real_type(p.dtype)) for p in parameters]
        self.forget()

    def forget(self) -> None:
        """Drop all layouts: an address has changed."""
        # A new dict: a thread that is reading now writes its layout to the old one. The key None
        # has the last layout, if `read_like_last` can use it.
        self._layouts: dict[GradientKinds | None, Layout] = {}
        self._on_device: LastOnDevice | None = None
        # Of each framework a function, arrays of parameters and states, and its results for them.
        self._lay: list[tuple[Callable[[Any], int], list[Any], list[int]]] | None = None

    @property
    def have_moved(self) -> bool:
        """Whether a framework has exchanged the memory of parameters or states on a device."""
        lay = self._lay
        if lay is None:
            every = zip(self._parameters, self._states, strict=True)
            arrays = [a for p, own in every for a in (p.array, *own) if isinstance(a, DeviceArray)]
            known: dict[Any, list[DeviceArray]] = {}
            for array in arrays:
                known.setdefault(array.framework, []).append(array)
            lay = self._lay = [
                (framework.address, [a.owner for a in own], [a.base for a in own])
                for framework, own in known.items()
            ]
        return True in [[*map(address, owners)] != bases for address, owners, bases in lay]

    def read_like_last(self, gradients: tuple[Any, ...]) -> Gradients | None:
        """The gradients of a step if all are of the same kinds as in the step before, else None.

        The headers of all their arrays are read in one compiled call.
        """
        last = self._layouts.get(None)
        if last is None or last.expected is None:
            return self._on_device and self._on_device.read(gradients)
        arrays = self._arrays_like(last, gradients) if last.row_arrays else gradients
        addresses = last.expected.addresses(arrays) if arrays is not None else None
        if arrays is None or addresses is None:
            return None
        if not last.row_arrays:
            return tuple.__new__(Gradients, (last, addresses, [], arrays, ()))
        found: list[int] = addresses.tolist()
        rows: list[Any] = []
        for k in last.row_arrays:
            if k < 0:
                rows.append(None)
                continue
            indices, values = arrays[k : k + 2]
            source = RowSource(
                values=found[k + 1], indices=found[k], index_bytes=indices.itemsize,
                length=len(indices),
            )  # fmt: skip
            rows.append(RowGradient(indices, values, source))
        if last.has_pooled:
            pooled = [gradient.gradient for gradient in gradients if type(gradient) is BagTensor]
            # All else of pooled rows is this package's own.
            if last.shares_memory({(own.source.values, own.values.nbytes) for own in pooled}):
                return None
            others = iter(pooled)
            rows = [row or next(others) for row in rows]
        # Selecting nothing with NumPy takes longer than everything else here.
        dense = addresses[last.dense_arrays] if last.dense_bytes else addresses[:0]
        return tuple.__new__(Gradients, (last, dense, rows, arrays, ()))  # no call of Python

    def _arrays_like(self, last: Layout, gradients: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The arrays of ``gradients`` that may be of the same kinds as the last ones, else None."""
        arrays: list[Any] = []
        each = zip(last.kinds, self.shapes, self._reals, gradients, strict=True)
        for kind, shapes, real, gradient in each:
            if kind is None or kind.index_dtype is None:
                arrays.append(gradient)
                continue
            if kind.pooled:
                if type(gradient) is not BagTensor or gradient.dense_shape != shapes[0]:
                    return None
                values, weights = gradient.gradient.values, gradient.gradient.weights
                if type(values) is not np.ndarray or values.dtype is not kind.dtype:
                    return None
                if weights is not None and weights.dtype is not real:
                    return None
                continue
            if type(gradient) is not RowTensor or gradient.dense_shape != shapes[0]:
                return None
            if gradient.positions is not None or gradient.batch_length:  # `read` checks these
                return None
            arrays.append(gradient.indices)
            arrays.append(gradient.values)
        return tuple(arrays)

    def read(self, gradients: tuple[Any, ...], added: Callable[[int], float]) -> Gradients:
        """The checked gradients of a step.

        Before gradient ``i`` is centralized, ``added(i)`` times the parameter is added to it.

        Raises:
            TypeError: a kind or dtype does not fit.
            ValueError: a shape does not fit, a gradient is row-sparse although the optimizer takes
                none, it shares memory with a parameter or state, or one of these is read-only or
                has changed its shape.
        """
        layouts = self._layouts
        read, kinds = self._read_each(gradients, added)
        self._check_variables(kinds)
        layout = self._layout(layouts, tuple(kinds))
        dense = [g for g in read if not isinstance(g, RowGradient)]
        rows = [g for g in read if isinstance(g, RowGradient)]
        addresses = [address_of(g) for g in dense]
        # A gradient in the memory of a parameter or a state would change while the step reads it.
        self._check_unshared(layout, addresses, rows)
        if not self._centralized:  # `read_like_last` would not centralize them
            layouts[None] = layout
        given = Gradients(layout, np.array(addresses, np.int64), rows, read)
        self._on_device = None
        if layout.batches and self._parameters[0].is_on_device and not self._centralized:
            self._on_device = LastOnDevice.of(given, gradients)
        return given

    def check_indices(self, given: Gradients) -> None:
        """Check all indices of all row-sparse gradients, before any of them is used.

        Raises:
            IndexError: one is out of range.
            ValueError: the tables of a call have too many rows for its sort keys.
        """
        for batch in given.layout.batches:
            if batch.row_sparse:
                check_rows(batch, given.of(batch))

    def _read_each(
        self, gradients: tuple[Any, ...], added: Callable[[int], float]
    ) -> tuple[list[Any], list[GradientKind | None]]:
        read: list[Any] = []
        kinds: list[GradientKind | None] = []
        for i, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            if gradient is None:
                kinds.append(None)
                continue
            if i in self._centralized and isinstance(gradient, BagTensor):
                gradient = gradient.to_rows()  # each row has a mean of its own
            found = read_gradient(self._where, parameter, gradient)
            if isinstance(found, RowGradient):
                need = None if self._sparse_update is not None else self._rows_need
                if need is None and self._rules[i].is_row_wise and parameter.ndim < 2:
                    need = "a dense one: a vector is one row", "a RowTensor"
                if need is not None:
                    name = f"gradient of {parameter.name!r}"
                    reject(ValueError, self._where, name, "is row-sparse", *need)
            if i in self._centralized:
                found = self._centralize(i, found, added(i))
            index_dtype = found.indices.dtype if isinstance(found, RowGradient) else None
            is_pooled = isinstance(found, RowGradient) and found.rows is not None
            read.append(found)
            kinds.append(GradientKind(found.dtype, index_dtype, is_pooled))
        return read, kinds

    def _check_variables(self, kinds: Sequence[GradientKind | None]) -> None:
        """Refuse variables that were changed in place since construction."""
        entries = zip(kinds, self._parameters, self.shapes, self._states, strict=True)
        for kind, p, shapes, states in entries:
            if kind is None:
                continue
            for array, shape in zip((p.array, *states), shapes, strict=True):
                name = f"parameter {p.name!r}" if array is p.array else f"a state of {p.name!r}"
                if not array.flags.writeable:
                    expected, got = "a writable array", "a read-only one"
                    reject(ValueError, self._where, name, "is read-only", expected, got)
                if array.shape != shape:
                    wrong = "has another shape than at construction"
                    reject(ValueError, self._where, name, wrong, shape, array.shape)

    def _layout(self, layouts: dict[GradientKinds | None, Layout], kinds: GradientKinds) -> Layout:
        layout = layouts.get(kinds)
        if layout is not None and not layout.is_in_place:
            layouts.clear()
            layout = None
        if layout is None:
            if len(layouts) >= _KEPT_LAYOUTS:
                layouts.clear()
            tensors = [
                (p.array, *states) for p, states in zip(self._parameters, self._states, strict=True)
            ]
            for kind, p, arrays in zip(kinds, self._parameters, tensors, strict=True):
                for array in arrays if kind is not None else ():
                    label, is_state = f"parameter {p.name!r} or its state", array is not p.array
                    check.variable(self._where, label, array, may_count=is_state)
                is_rows = kind is not None and kind.index_dtype is not None
                if is_rows and self._sparse_update != "dense_equivalent":
                    read_at_random(p.array)
            layout = layouts[kinds] = build_layout(
                self._where, kinds, self._parameters, tensors, self._rules, self._class_of
            )
        return layout

    @quiet
    def _centralize(self, i: int, gradient: Any, factor: float) -> Any:
        """The centralized gradient; a coupled decay is centralized with it, as in MindSpore."""
        parameter, keeping = self._parameters[i], self._rules[i].keeping
        beside = self._states[i][-len(keeping.beside) :] if keeping and keeping.beside else ()
        if parameter.is_on_device:  # computed on the host, which waits
            w = whole_weight(keeping, parameter.asnumpy(), [x.numpy() for x in beside])
            here = _moved(gradient, methodcaller("numpy"))
            found = self._centralize_on_host(i, w, here, factor)
            return _moved(found, parameter.array.holding)
        w = whole_weight(keeping, parameter.data, beside) if beside else parameter.data
        return self._centralize_on_host(i, w, gradient, factor)

    def _centralize_on_host(self, i: int, w: np.ndarray, gradient: Any, factor: float) -> Any:
        # Computed in the type of the arithmetic, so that nothing is rounded twice.
        real = real_type(w.dtype)
        if not isinstance(gradient, RowGradient):
            wide = gradient.astype(real, copy=False)
            return np.ascontiguousarray(
                whole.centralized(whole.decayed(wide, w, factor) if factor else wide)
            )
        if factor:  # the rows are looked up
            label = f"{self._where}: gradient of {self._parameters[i].name!r}"
            check.indices_in_range(label, gradient.indices, len(w))
        values = gradient.values.astype(real, copy=False)
        positions, n = gradient.positions, gradient.source.whole_length
        rows = RowTensor(gradient.indices, values, w.shape, positions=positions, batch_length=n)
        if factor and self._sparse_update != "lazy":
            # Every row decays, so every row has a gradient to centralize.
            return whole.centralized(whole.decayed(rows.to_dense(), w, factor))
        central = whole.centralized(whole.decayed(rows, w, factor) if factor else rows)
        central.values = np.ascontiguousarray(central.values)
        return row_gradient(central)

    def _check_unshared(
        self, layout: Layout, addresses: Sequence[int], rows: Sequence[RowGradient]
    ) -> None:
        """Refuse gradients in the memory of parameters or states."""
        spans = [*zip(addresses, layout.dense_bytes, strict=True)]
        spans += {span for row in rows for span in row.spans}
        if layout.shares_memory(spans):
            expected, got = "its own memory", "an overlap"
            wrong = "shares memory with a parameter or state"
            reject(ValueError, self._where, "a gradient", wrong, expected, got)


def _moved(gradient: Any, move: Callable[[Any], Any]) -> Any:
    """A copy of a gradient elsewhere; ``move`` gives that of an array."""
    if not isinstance(gradient, RowGradient):
        return move(gradient)
    return gradient.with_arrays(indices=move(gradient.indices), values=move(gradient.values))


def read_gradient(where: str, parameter: Parameter, gradient: Any) -> Any:
    """The checked, contiguous form of one gradient that is not None: an array or `RowGradient`.

    Raises:
        TypeError: its kind or dtype does not fit.
        ValueError: its shape does not fit.
    """
    name = f"gradient of {parameter.name!r}"
    if isinstance(gradient, BagTensor):
        return _read_bags(where, name, parameter, gradient)
    rows = as_rows(where, name, gradient)
    if rows is None:
        array = adopt_anywhere(where, name, gradient)
        check.float_dtype(where, name, array, "a floating dtype")
        device_of(where, {"the parameter": parameter.array, name: array})
        if array.shape != parameter.shape:
            reject(ValueError, where, name, "has a wrong shape", parameter.shape, array.shape)
        return check.contiguous(array, where, name)
    if parameter.ndim == 0:
        reject(ValueError, where, name, "is row-sparse", "a dense gradient", "a 0-d parameter")
    if rows.dense_shape != parameter.shape:
        wrong, shapes = "has a wrong dense_shape", (parameter.shape, rows.dense_shape)
        reject(ValueError, where, name, wrong, *shapes)
    # Adopted again, since the attributes of a RowTensor can be assigned to.
    indices = adopt_anywhere(where, name, rows.indices)
    values = adopt_anywhere(where, name, rows.values)
    check.float_dtype(where, name, values, "a floating dtype")
    device_of(where, {"the parameter": parameter.array, name: values, "its indices": indices})
    check.row_gradient(where, name, indices, values, parameter.shape)
    rows.check_positions(f"{where}: {name}")
    arrays = check.contiguous(indices, where, name), check.contiguous(values, where, name)
    if rows.positions is None:
        return RowGradient.of(*arrays)
    return RowGradient.of(*arrays, check.contiguous(rows.positions), rows.batch_length)


def _read_bags(where: str, name: str, parameter: Parameter, bags: BagTensor) -> RowGradient:
    device_of(where, {"the parameter": parameter.array, name: bags.values})
    if bags.dense_shape != parameter.shape:
        wrong = "has a wrong dense_shape"
        reject(ValueError, where, name, wrong, parameter.shape, bags.dense_shape)
    real = np.dtype(real_type(parameter.dtype))
    if bags.weights is not None and bags.weights.dtype != real:
        wrong = "has weights of another dtype"
        reject(TypeError, where, name, wrong, real, bags.weights.dtype)
    return bags.gradient


def is_row_sparse(gradient: Any) -> bool:
    """Whether a gradient is a `RowTensor`, a list of them or a torch sparse COO tensor."""
    if isinstance(gradient, list | tuple):
        return any(isinstance(part, RowTensor | BagTensor) for part in gradient)
    return isinstance(gradient, RowTensor | BagTensor) or getattr(gradient, "is_sparse", False)
