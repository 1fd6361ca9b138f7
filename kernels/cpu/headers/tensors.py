"""Comparing PyTorch's tensors with what they were, without asking Python for them.

`kernels.cpu.headers.tensor_fields` finds where a tensor has what is compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from ...inner import njit
from ..compiler.compile import NativeFunction
from ..compiler.intrinsics import as_pointer, load_int64
from ..compiler.machine import PythonEntry
from ..compiler.records import int64s, records
from .arrays import ITEMS, LENGTH, address_of, overlaps
from .tensor_fields import Fields, layout_of, signed

NONE, DENSE, ROWS, WRITTEN = range(4)
"""What a tensor is: none at all, a dense gradient, one of rows, what a step writes."""
OTHER, SAME, MOVED = range(3)
"""How tensors are found: not as expected, as expected, or so but for where written ones lie."""


class _TensorForm(NamedTuple):
    """Form that a tensor should have, all ``int64``."""

    kind: int
    type: int  # of its object; of `NONE` the object itself
    keys: int = 0
    dtype: int = 0
    dim: int = 0
    itemsize: int = 0
    n_bytes: int = 0


class _TensorQuery(NamedTuple):
    """Question about tuples of objects, all ``int64``; addresses."""

    n_same: int
    same: int  # [n_same]: identities
    n_written: int
    n_forms: int
    forms: int  # [n_forms] of `_TensorForm`: first what is written
    dims: int  # of all forms: sizes, then strides
    addresses: int  # [n_forms]: where each was found
    versions: int  # [n_written]: where changes are counted, or 0
    memory: int  # [2, n_stretches]: of what is written, as for `overlaps`
    n_stretches: int


fields_at, _forms_at, _query_at = map(records, (Fields, _TensorForm, _TensorQuery))


@njit(inline="always")
def code_of(f, tensor):
    """The number of the dtype of a tensor."""
    return carray(as_pointer(tensor + f.dtype), 1, np.uint16)[0]


@njit
def place_of(f, tensor, itemsize, n_bytes):
    """The address of a tensor's first element; 0 where it has not the memory that it needs."""
    storage, offset = load_int64(tensor + f.storage), load_int64(tensor + f.offset) * itemsize
    data = load_int64(storage + f.data)
    return data + offset if data != 0 and offset + n_bytes <= load_int64(storage + f.n_bytes) else 0


@njit
def _fits(f, tensor, form, dims):
    """Whether a tensor has the form: what it is, its dtype, its sizes and strides."""
    if load_int64(tensor + f.keys) != form.keys or load_int64(tensor + f.dim) != form.dim:
        return False
    if code_of(f, tensor) != form.dtype:
        return False
    sizes, strides = tensor + f.sizes, tensor + f.strides
    if form.dim > f.inline:
        sizes = load_int64(sizes)
        strides = sizes + 8 * form.dim
    differ = 0
    for d in range(form.dim):
        size = load_int64(dims + 8 * d)
        differ += load_int64(sizes + 8 * d) != size
        if size != 1 and form.kind != ROWS:  # of a single element the stride means nothing
            differ += load_int64(strides + 8 * d) != load_int64(dims + 8 * (form.dim + d))
    return differ == 0


@njit
def _place_of(f, tensor, form):
    """Likewise, of a form; 0 also where others would see what is written."""
    storage = load_int64(tensor + f.storage)
    if form.kind == WRITTEN and load_int64(storage + f.deleter) == f.lazy:
        return 0
    return place_of(f, tensor, form.itemsize, form.n_bytes)


@njit
def _tensor_of(f, thing, form, dims):
    """The address of the tensor of an object; 0 where it has not the form."""
    if load_int64(thing + 8) != form.type:
        return 0
    tensor = load_int64(thing + f.tensor)
    return tensor if tensor != 0 and _fits(f, tensor, form, dims) else 0


def _look_at_tensors(query, fields, same, tensors):
    """`SAME`, `MOVED` or `OTHER`; the addresses of tensors."""
    c, f = _query_at(query, 1)[0], fields_at(fields, 1)[0]
    if load_int64(same + LENGTH) != c.n_same or load_int64(tensors + LENGTH) != c.n_forms:
        return OTHER
    identities = int64s(c.same, c.n_same)
    for k in range(c.n_same):
        if load_int64(same + ITEMS + 8 * k) != identities[k]:
            return OTHER
    forms, dims, found = _forms_at(c.forms, c.n_forms), c.dims, SAME
    addresses, versions = int64s(c.addresses, c.n_forms), int64s(c.versions, c.n_written)
    memory = carray(as_pointer(c.memory), (2, c.n_stretches), np.int64)
    for k in range(c.n_forms):
        form, thing = forms[k], load_int64(tensors + ITEMS + 8 * k)
        if form.kind == NONE:
            if thing != form.type:
                return OTHER
            continue
        if form.kind != WRITTEN and found == MOVED:
            return MOVED  # with what has moved it is not known yet what overlaps
        tensor = _tensor_of(f, thing, form, dims)
        if tensor == 0:
            return OTHER
        dims += 16 * form.dim
        if form.kind == ROWS:
            continue
        # An empty tensor may have no memory at all, and is never looked for there.
        address = _place_of(f, tensor, form) if form.n_bytes > 0 else addresses[k]
        if address == 0 and form.n_bytes > 0:
            return OTHER
        if form.kind == DENSE:
            if overlaps(memory, address, address + form.n_bytes):
                return OTHER
        else:
            version = load_int64(tensor + f.version)
            versions[k] = version + f.changes if version != 0 else 0
            if addresses[k] != address:
                found = MOVED
        addresses[k] = address
    return found


_look = NativeFunction(_look_at_tensors, f"tensors {ITEMS}", PythonEntry(True, True))
READERS = (_look,)


class ExpectedTensors:
    """Tensors of a step as they should be: of the same dtypes, sizes, strides and kinds.

    Args:
        torch: the module.
        same: objects that should be the same.
        written: tensors that a step writes; they may come to lie elsewhere, apart from each other.
        gradients: tensors of the kinds of ``kinds``, or None; dense ones should not lie in the
            memory of ``written``.
        kinds: one for each gradient.

    Nothing is kept alive but types: who looks has the tensors.
    """

    def __init__(
        self, torch: Any, same: Sequence[Any], written: Sequence[Any],
        gradients: Sequence[Any], kinds: Sequence[int],
    ) -> None:  # fmt: skip
        layout = layout_of(torch)
        assert layout is not None
        every = [*zip(written, [WRITTEN] * len(written), strict=True),
                 *zip(gradients, kinds, strict=True)]  # fmt: skip
        forms, dims = [], []
        for tensor, kind in every:
            forms.append(_form(torch, layout.codes, tensor, kind))
            if kind != NONE:
                strides = [0] * tensor.dim() if kind == ROWS else tensor.stride()
                dims += [*tensor.shape, *strides]
        n = self._n = len(written)
        self._sizes = np.array([form.n_bytes for form in forms[:n]], np.int64)
        self._apart = np.flatnonzero(self._sizes)
        self._places = np.zeros(len(forms), np.int64)
        self.versions = np.zeros(n, np.int64)
        self._memory = np.zeros((2, len(self._apart)), np.int64)
        self.stretches: list[list[int]] = [[], []]  # of what is written, as for `lie_in`
        self._is_settled = False
        tables = [np.array(t, np.int64) for t in ([*map(id, same)], forms, dims, layout.fields)]
        self._alive = tables, [type(tensor) for tensor, _ in every]
        same_at, forms_at, dims_at, self._fields = map(address_of, tables)
        memory_at, n_stretches = address_of(self._memory), len(self._apart)
        places_at, versions_at = address_of(self._places), address_of(self.versions)
        self._query = array("q", _TensorQuery(
            len(same), same_at, n, len(forms), forms_at, dims_at, places_at, versions_at,
            memory_at, n_stretches,
        ))  # fmt: skip
        self._at, _ = self._query.buffer_info()
        self.written, self.gradients = self._places[:n], self._places[n:]
        """Addresses, as they were last found; 0 of gradients that are not dense."""

    def look(self, same: tuple[Any, ...], tensors: tuple[Any, ...]) -> int:
        """`SAME`, `MOVED` or `OTHER` for what is written and the gradients behind it.

        It fills in the addresses. `MOVED`: those of what is written are others than before, or
        this is the first look.
        """
        found = _look.call(self._at, self._fields, id(same), id(tensors))
        if found == SAME and self._is_settled:
            return SAME
        # Addresses of this look, or of one before that ended in the middle, are not taken over yet.
        self._is_settled = False
        # A second look: which gradients overlap with what is written can be told only by the new
        # places, which the first look has found.
        if found == OTHER or not self._settled():
            return OTHER
        if _look.call(self._at, self._fields, id(same), id(tensors)) != SAME:
            return OTHER
        self._is_settled = True
        return MOVED

    def _settled(self) -> bool:
        """Take over where written tensors lie now; whether they do so apart from each other."""
        begins, sizes = self.written[self._apart], self._sizes[self._apart]
        order = np.argsort(begins)
        self._memory[0] = begins[order]
        self._memory[1] = self._memory[0] + sizes[order]
        self.stretches = self._memory.tolist()
        return bool((self._memory[1, :-1] <= self._memory[0, 1:]).all())


def _form(torch: Any, codes: dict[Any, int], tensor: Any, kind: int) -> _TensorForm:
    if kind == NONE:
        return _TensorForm(NONE, id(tensor))
    keys, size = signed(torch._C._dispatch_keys(tensor).raw_repr()), tensor.element_size()
    what = id(type(tensor)), keys, codes[tensor.dtype], tensor.dim()
    return _TensorForm(kind, *what, size, 0 if kind == ROWS else tensor.numel() * size)
