"""Reading the gradients of a step: checked in full before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ...kernels.cpu.threads.allocation import read_at_random
from ...kernels.keeping import whole_weight
from ...kernels.quiet import quiet
from ...kernels.rule import Keeping
from ...kernels.storage import Storage
from ...kernels.tables import RowSource
from ...ops.runtime import check
from ...ops.runtime.arrays import address_of, adopt_anywhere, real_type
from ...ops.runtime.bags.tensor import BagTensor
from ...ops.runtime.device import DeviceArray, Form, device_of, lie_on
from ...ops.runtime.errors import reject
from ...ops.runtime.row_forms import as_rows, row_gradient
from ...ops.runtime.row_step import IndexList, RowGradient, check_lists
from ...ops.runtime.row_tensor import RowTensor
from ..base import gradients as whole
from ..base.parameter import Parameter
from .layout import Batch, Kind, Layout, build_layout

# A model whose layers take turns to have gradients needs several layouts. A model in which the
# choice of layers never repeats must not keep all of them.
_KEPT_LAYOUTS = 16


class Gradients(NamedTuple):
    """The checked gradients of one step."""

    layout: Layout
    addresses: np.ndarray  # int64: those of the dense gradients, in order
    rows: list[RowGradient]  # the row-sparse gradients, in order
    keep: Sequence[Any]  # objects that must stay alive until the step is done
    streams: Sequence[DeviceArray] = ()  # on a device: one array of each stream, if known

    @property
    def arrays(self) -> Sequence[Any]:
        """Arrays of all streams of a step on a device; the first, a parameter, decides."""
        if self.streams:
            return self.streams
        variables = (batch.variables.tensors for batch in self.layout.batches)
        found = [arrays[0] for tensors in variables for arrays in tensors]
        for gradient in self.keep:
            found += gradient[:2] if isinstance(gradient, RowGradient) else [gradient]
        return found

    def of(self, batch: Batch) -> Any:
        """The gradients of a batch: addresses of dense gradients, or row-sparse gradients."""
        if not batch.row_sparse:
            return self.addresses if batch.is_all else self.addresses[batch.places]
        is_only = self.layout.n_row_batches == 1
        return self.rows if is_only else [self.rows[k] for k in batch.places]

    @property
    def by_batch(self) -> list[tuple[Batch, Any]]:
        """The batches with their gradients."""
        return [(batch, self.of(batch)) for batch in self.layout.batches]


class _RowLook(NamedTuple):
    """The form of a `RowTensor` on a device."""

    dense_shape: tuple[int, ...]
    indices: DeviceArray
    values: DeviceArray

    def is_of(self, gradient: Any) -> bool:
        """Whether a gradient has this form."""
        if type(gradient) is not RowTensor or gradient.dense_shape != self.dense_shape:
            return False
        if gradient.positions is not None or gradient.batch_length:  # `read` checks these
            return False
        return self.indices.is_like(gradient.indices) and self.values.is_like(gradient.values)


def _row_look_of(gradient: Any, read: RowGradient) -> _RowLook | None:
    """The form of a `RowTensor` on a device; None if it is another form of it that was read."""
    is_itself = type(gradient) is RowTensor and read.rows is None and read.positions is None
    if not (is_itself and read.values is gradient.values and read.indices is gradient.indices):
        return None
    arrays = gradient.indices.without_owner(), gradient.values.without_owner()
    return _RowLook(gradient.dense_shape, *arrays)


class _DenseLook(NamedTuple):
    """The dense gradients on a device that are of one framework and dtype."""

    form: Form  # of the first
    places: list[int]  # among all gradients
    dense: list[int]  # their places among all dense gradients
    forms: list[Any]  # of each, for its framework

    def addresses(self, gradients: tuple[Any, ...]) -> list[int] | None:
        """Where those of another step lie; None if one is of another form."""
        framework, own = self.form.framework, [gradients[i] for i in self.places]
        is_alike = [*map(framework.form, own)] == self.forms
        return [*map(framework.address, own)] if is_alike else None


class _LastOnDevice(NamedTuple):
    """The last step on a device, if its gradients were not copied, and none was pooled."""

    layout: Layout
    types: list[type]  # of all gradients
    dense: list[_DenseLook]
    rows: list[tuple[int, _RowLook]]  # with their places
    order: np.ndarray  # of each dense gradient the place in the lists of ``dense``
    streams: Sequence[DeviceArray]
    apart: list[list[int]]  # addresses of dense gradients that were found apart from variables


class GradientReader:
    """Checks gradients and finds their layouts, which it keeps.

    If ``sparse_update`` is None, row-sparse gradients raise, and ``rows_need`` is what the error
    says of expected and got. ``centralized`` are the places of the parameters whose gradients are
    centralized. For a ``row_wise`` rule a vector is one row. ``keepings`` say how each parameter is
    kept; by default alone.
    """

    def __init__(
        self, where: str, parameters: Sequence[Parameter], states: Sequence[tuple[Any, ...]],
        sparse_update: str | None, rows_need: tuple[str, str | None] = ("", None),
        centralized: Sequence[int] = (), *, row_wise: bool = False,
        keepings: Sequence[Keeping | None] = (),
    ) -> None:  # fmt: skip
        self._keepings = keepings or [None] * len(parameters)
        self._where, self._parameters, self._states = where, parameters, states
        self._sparse_update, self._rows_need = sparse_update, rows_need
        self._centralized, self._row_wise = frozenset(centralized), row_wise
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
        self._layouts: dict[tuple[Kind | None, ...] | None, Layout] = {}
        self._on_device: _LastOnDevice | None = None
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
            return self._on_device and self._read_on_device(self._on_device, gradients)
        arrays = self._arrays_like(last, gradients) if last.row_arrays else gradients
        addresses = last.expected.addresses(arrays) if arrays is not None else None
        if arrays is None or addresses is None:
            return None
        if not last.row_arrays:
            return tuple.__new__(Gradients, (last, addresses, [], arrays, ()))
        found, rows = addresses.tolist(), list[Any]()
        for k in last.row_arrays:
            if k < 0:
                rows.append(None)
                continue
            indices, values = arrays[k : k + 2]
            source = RowSource(found[k], indices.itemsize, len(indices), found[k + 1])
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

    def _read_on_device(self, last: _LastOnDevice, gradients: tuple[Any, ...]) -> Gradients | None:
        """The gradients on a device if they are like the last ones (`read_like_last`)."""
        if [*map(type, gradients)] != last.types:
            return None
        rows, found, layout = list[RowGradient](), list[list[int]](), last.layout
        for i, row_look in last.rows:
            gradient = gradients[i]
            if not row_look.is_of(gradient):
                return None
            rows.append(RowGradient.of(gradient.indices, gradient.values))
        for look in last.dense:
            own = look.addresses(gradients)
            if own is None:
                return None
            found.append(own)
        spans = [span for row in rows for span in row.spans]
        if found != last.apart:
            for look, own in zip(last.dense, found, strict=True):
                if not lie_on(look.form, own):
                    return None
                n_bytes = [layout.dense_bytes[k] for k in look.dense]
                spans += zip(own, n_bytes, strict=True)
        if spans and layout.shares_memory(spans):
            return None
        last.apart[:] = found
        addresses = np.array([*chain(*found)], np.int64)
        if len(found) > 1:
            addresses = addresses[last.order]
        return Gradients(layout, addresses, rows, gradients, last.streams)

    def _last_on_device(
        self, layout: Layout, given: Gradients, gradients: tuple[Any, ...]
    ) -> _LastOnDevice | None:
        """A record of gradients on a device; None if one is not plain, or was copied."""
        if not layout.batches or self._centralized or not self._parameters[0].is_on_device:
            return None
        read, rows, n_dense = iter(given.keep), list[tuple[int, _RowLook]](), 0
        dense: dict[Any, _DenseLook] = {}
        for i, gradient in enumerate(gradients):
            array: Any = None if gradient is None else next(read)
            if isinstance(array, RowGradient):
                row_look = _row_look_of(gradient, array)
                if row_look is None:
                    return None
                rows.append((i, row_look))
            elif array is not None:
                form = array.look if array.owner is gradient else None
                if form is None:
                    return None
                key = array.framework, array.dtype
                look = dense.setdefault(key, _DenseLook(array.form, [], [], []))
                look.places.append(i)
                look.dense.append(n_dense)
                look.forms.append(form)
                n_dense += 1
        streams = {(array.framework, array.stream): array for array in reversed(given.arrays)}
        first = given.arrays[0]
        others = [a for key, a in streams.items() if key != (first.framework, first.stream)]
        order = np.argsort([k for look in dense.values() for k in look.dense])
        looks = [*map(type, gradients)], [*dense.values()], rows, order
        return _LastOnDevice(layout, *looks, [a.without_owner() for a in (first, *others)], [])

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
        self._on_device = self._last_on_device(layout, given, gradients)
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
    ) -> tuple[list[Any], list[Kind | None]]:
        read: list[Any] = []
        kinds: list[Kind | None] = []
        for i, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            if gradient is None:
                kinds.append(None)
                continue
            if i in self._centralized and isinstance(gradient, BagTensor):
                gradient = gradient.to_rows()  # each row has a mean of its own
            found = read_gradient(self._where, parameter, gradient)
            if isinstance(found, RowGradient) and self._sparse_update is None:
                name = f"gradient of {parameter.name!r}"
                reject(ValueError, self._where, name, "is row-sparse", *self._rows_need)
            if isinstance(found, RowGradient) and self._row_wise and parameter.ndim < 2:
                expected, got = "a dense one: a vector is one row", "a RowTensor"
                reject(ValueError, self._where, f"gradient of {parameter.name!r}",
                       "is row-sparse", expected, got)  # fmt: skip
            if i in self._centralized:
                found = self._centralize(i, found, added(i))
            index_dtype = found.indices.dtype if isinstance(found, RowGradient) else None
            is_pooled = isinstance(found, RowGradient) and found.rows is not None
            read.append(found)
            kinds.append(Kind(found.dtype, index_dtype, is_pooled))
        return read, kinds

    def _check_variables(self, kinds: Sequence[Kind | None]) -> None:
        """Refuse variables that were changed in place since construction.

        Raises:
            ValueError: one is read-only or has another shape.
        """
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

    def _layout(
        self, layouts: dict[tuple[Kind | None, ...] | None, Layout], kinds: tuple[Kind | None, ...]
    ) -> Layout:
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
            labels = [f"{self._where}: gradient of {p.name!r}" for p in self._parameters]
            layout = layouts[kinds] = build_layout(kinds, tensors, labels, self._keepings)
        return layout

    @quiet
    def _centralize(self, i: int, gradient: Any, factor: float) -> Any:
        """The centralized gradient; a coupled decay is centralized with it, as in MindSpore."""
        parameter, keeping = self._parameters[i], self._keepings[i]
        beside = self._states[i][-len(keeping.beside) :] if keeping and keeping.beside else ()
        if parameter.is_on_device:  # computed on the host, which waits
            w = whole_weight(keeping, parameter.asnumpy(), [x.numpy() for x in beside])
            found = self._centralize_on_host(i, w, _on_host(gradient), factor)
            return _on_device_of(parameter.array, found)
        w = parameter.data
        if beside:
            w = whole_weight(keeping, w, beside)
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


def _on_host(gradient: Any) -> Any:
    """A copy of a device gradient on the host."""
    if not isinstance(gradient, RowGradient):
        return gradient.numpy()
    return gradient.with_arrays(indices=gradient.indices.numpy(), values=gradient.values.numpy())


def _on_device_of(w: DeviceArray, gradient: Any) -> Any:
    """A copy of a gradient on the device of ``w``, in arrays of its framework."""
    if not isinstance(gradient, RowGradient):
        return w.holding(gradient)
    indices, values = w.holding(gradient.indices), w.holding(gradient.values)
    return gradient.with_arrays(indices=indices, values=values)


def by_storage(
    by_batch: Iterable[tuple[Batch, Any]],
) -> tuple[tuple[Storage, np.ndarray, np.ndarray], ...]:
    """The arrays of all gradients by storage type: int64 addresses and numbers of elements."""
    arrays: dict[Storage, list[tuple[int, int]]] = {}
    for batch, gradients in by_batch:
        found = arrays.setdefault(batch.g, [])
        if batch.row_sparse:
            itemsize = batch.g.itemsize
            found += [(g.source.values, g.values.nbytes // itemsize) for g in gradients]
        else:
            sizes = np.diff(batch.variables.table.first)
            found += zip(gradients.tolist(), sizes.tolist(), strict=True)
    return tuple(
        # Each array once: pooled tables share one array of gradients.
        (storage, *np.array([*dict.fromkeys(spans)], np.int64).reshape(-1, 2).T.copy())
        for storage, spans in arrays.items()
    )


def index_lists(batch: Batch, gradients: Sequence[RowGradient]) -> list[IndexList]:
    """The indices of the gradients of a batch.

    Raises:
        ValueError: its tables have too many rows for its sort keys.
    """
    entries = zip(batch.labels, gradients, batch.variables.tensors, strict=True)
    lists = [IndexList(label, len(g.indices), w.shape[0]) for label, g, (w, *_) in entries]
    check_lists(batch.labels[0], lists)
    return lists


def check_rows(batch: Batch, gradients: Sequence[RowGradient]) -> None:
    """Check all indices of a batch on the host; as `GradientReader.check_indices`."""
    for own, gradient in zip(index_lists(batch, gradients), gradients, strict=True):
        check.indices_in_range(own.where, gradient.indices, own.rows)


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
