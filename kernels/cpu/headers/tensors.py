"""Comparing PyTorch's tensors with what they were, without asking Python for them.

`kernels.cpu.headers.tensor_fields` finds where a tensor has what is compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from ...inner import njit
from ..compiler.compile import NativeFunction
from ..compiler.intrinsics import as_pointer, load_int64, next_item, prefetch_line
from ..compiler.lines import LINE, prefetch
from ..compiler.machine import PythonEntry
from ..compiler.records import int64s, records
from .arrays import ITEMS, LENGTH, address_of, overlaps
from .tensor_fields import STORAGE_BYTES, TENSOR_BYTES, Fields, keys_of, layout_of

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
    """Question about parameters, gradients and states, all ``int64``; addresses."""

    n_parameters: int
    parameters: int  # [n_parameters]: identities
    n_states: int
    states: int  # [n_states] of `_StateForm`
    names: int  # of the states of all parameters: identities
    n_written: int
    n_forms: int
    forms: int  # [n_forms] of `_TensorForm`: first what is written
    dims: int  # of all forms: sizes, then strides
    seen: int  # [n_seen] of `_Seen`: of forms `_OF_FORM` each, then of states `_OF_STATE`
    n_seen: int
    addresses: int  # [n_forms]: where each was found
    versions: int  # [n_written]: where changes are counted, or 0
    memory: int  # [2, n_stretches]: of what is written, as for `overlaps`
    n_stretches: int
    cursors: int  # of the dict of states, and of that of a parameter: [2, 3]


class _StateForm(NamedTuple):
    """Item of the dict of states, all ``int64``."""

    parameter: int  # its identity
    n_names: int  # how many states are looked at


class _Seen(NamedTuple):
    """Stretch of memory that a look reads, all ``int64``; after it, it may be gone."""

    address: int
    n_bytes: int


fields_at, _forms_at, _states_at, _seen_at, _query_at = map(
    records, (Fields, _TensorForm, _StateForm, _Seen, _TensorQuery)
)
# Of a cursor in a dict: where it is, then the last key and the last value.
_KEY, _VALUE, _CURSOR_BYTES = 8, 16, 24
# Sizes of what is seen: an object, a tensor and a storage; a dict and its items, to which CPython
# has an address at this place (of what is there elsewhere the wrong lines are fetched).
_OF_FORM, _OF_STATE = (24, TENSOR_BYTES, STORAGE_BYTES), (48, 120)
_PER_FORM, _PER_STATE, _DICT_ITEMS = len(_OF_FORM), len(_OF_STATE), 32


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


@njit
def _rewind(cursor):
    words = int64s(cursor, _CURSOR_BYTES // 8)
    for k in range(words.size):
        words[k] = 0


@njit
def _find_parameters(c, parameters, gradients):
    """Fill in parameters that are written, and gradients; how many of the former, or -1."""
    n, found = c.n_parameters, 0
    if load_int64(parameters + LENGTH) != n or load_int64(gradients + LENGTH) != n:
        return -1
    known, forms = int64s(c.parameters, n), _forms_at(c.forms, c.n_forms)
    seen = _seen_at(c.seen, c.n_seen)
    for k in range(n):
        if load_int64(parameters + ITEMS + 8 * k) != known[k]:
            return -1
        seen[_PER_FORM * (c.n_written + k)].address = load_int64(gradients + ITEMS + 8 * k)
        if forms[c.n_written + k].kind != NONE:
            seen[_PER_FORM * found].address = known[k]
            found += 1
    return found


@njit
def _find_states(c, states, found):
    """Fill in the states behind what was found; whether their dicts have all that they had."""
    every, names = _states_at(c.states, c.n_states), int64s(c.names, c.n_written)
    one, other, seen = c.cursors, c.cursors + _CURSOR_BYTES, _seen_at(c.seen, c.n_seen)
    n, place = 0, _PER_FORM * c.n_forms
    _rewind(one)
    for k in range(c.n_states):
        if not next_item(states, one) or load_int64(one + _KEY) != every[k].parameter:
            return False
        own = load_int64(one + _VALUE)
        _rewind(other)
        for _ in range(every[k].n_names):
            # Between those that are looked at a user may have others.
            while next_item(own, other) and load_int64(other + _KEY) != names[n]:
                pass
            if load_int64(other + _KEY) != names[n]:
                return False
            seen[_PER_FORM * (found + n)].address = load_int64(other + _VALUE)
            n += 1
        if every[k].n_names > 0:  # so it is a dict
            seen[place].address, seen[place + 1].address = own, load_int64(own + _DICT_ITEMS)
        place += _PER_STATE
    return not next_item(states, one)


def _look_at_tensors(query, fields, parameters, gradients, states):
    """`SAME`, `MOVED` or `OTHER`; the addresses of tensors."""
    c, f = _query_at(query, 1)[0], fields_at(fields, 1)[0]
    n = _find_parameters(c, parameters, gradients)
    if n < 0 or not _find_states(c, states, n):
        return OTHER
    forms, dims, found = _forms_at(c.forms, c.n_forms), c.dims, SAME
    addresses, versions = int64s(c.addresses, c.n_forms), int64s(c.versions, c.n_written)
    memory = carray(as_pointer(c.memory), (2, c.n_stretches), np.int64)
    seen = _seen_at(c.seen, c.n_seen)
    for k in range(c.n_forms):
        form, place = forms[k], _PER_FORM * k
        thing = seen[place].address
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
        seen[place + 1].address = tensor
        seen[place + 2].address = load_int64(tensor + f.storage)
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
            prefetch_line(version)
            if form.n_bytes <= LINE:  # of single numbers: what is larger is read as it lies
                prefetch_line(address)
            if addresses[k] != address:
                found = MOVED
        addresses[k] = address
    return found


def _fetch_seen(query):
    c = _query_at(query, 1)[0]
    seen = _seen_at(c.seen, c.n_seen)
    for k in range(seen.size):
        prefetch(seen[k].address, seen[k].n_bytes)


_fetch = NativeFunction(_fetch_seen, "what was seen", PythonEntry(holds_gil=True))
_look = NativeFunction(_look_at_tensors, f"tensors {ITEMS}", PythonEntry(True, True))
READERS = _look, _fetch

States = Mapping[Any, dict[str, Any]]
"""The states of parameters by their names: a ``dict``."""


class ExpectedTensors:
    """Tensors of a step as they should be: of the same dtypes, sizes, strides and kinds.

    Args:
        torch: the module.
        parameters: objects that should be the same.
        gradients: of each, a tensor of the kind of ``kinds``, or None; dense ones should not lie
            in the memory of what is written.
        kinds: one for each gradient. Parameters of others than `NONE` are written.
        states: the states of parameters, which should be of the same ones, in this order.
        names: for each of them, which are written, in their order. Their tensors, as those of the
            parameters, may be others and come to lie elsewhere, apart from each other.

    Nothing is kept alive but types and names: who looks has the tensors.
    """

    def __init__(
        self, torch: Any, parameters: tuple[Any, ...], gradients: Sequence[Any],
        kinds: Sequence[int], states: States, names: Sequence[Sequence[str]],
    ) -> None:  # fmt: skip
        layout = layout_of(torch)
        assert layout is not None
        own = zip(states.values(), names, strict=True)
        written = [p for p, kind in zip(parameters, kinds, strict=True) if kind != NONE]
        written += [tensors[name] for tensors, chosen in own for name in chosen]
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
        all_names = [name for chosen in names for name in chosen]
        in_states = [_StateForm(id(p), len(own)) for p, own in zip(states, names, strict=True)]
        seen = [_Seen(0, size) for size in _OF_FORM * len(forms) + _OF_STATE * len(states)]
        tables = [np.array(t, np.int64) for t in (
            [*map(id, parameters)], in_states, [*map(id, all_names)], forms, dims, seen,
            [0] * (2 * _CURSOR_BYTES // 8), layout.fields,
        )]  # fmt: skip
        self._alive = tables, [type(tensor) for tensor, _ in every], all_names
        parameters_at, states_at, names_at, forms_at, dims_at, seen_at, cursors_at, fields_at = map(
            address_of, tables
        )
        places_at, versions_at, memory_at = map(
            address_of, (self._places, self.versions, self._memory)
        )
        self._query = array("q", _TensorQuery(
            len(parameters), parameters_at, len(states), states_at, names_at, n, len(forms),
            forms_at, dims_at, seen_at, len(seen), places_at, versions_at, memory_at,
            len(self._apart), cursors_at,
        ))  # fmt: skip
        self._asked = self._query.buffer_info()[0], fields_at
        self.written, self.gradients = self._places[:n], self._places[n:]
        """Addresses, as they were last found; 0 of gradients that are not dense."""

    def fetch(self) -> None:
        """Bring what `look` is going to read into the caches.

        A look goes from address to address, one miss after the other; here all are on their way at
        once. It is read where it was: what is gone is fetched in vain.
        """
        _fetch.call(self._asked[0])

    def look(self, parameters: tuple[Any, ...], gradients: tuple[Any, ...], states: States) -> int:
        """`SAME`, `MOVED` or `OTHER` for what is written and the gradients.

        It fills in the addresses. `MOVED`: those of what is written are others than before, or
        this is the first look.
        """
        given = id(parameters), id(gradients), id(states)
        found = _look.call(*self._asked, *given)
        if found == SAME and self._is_settled:
            return SAME
        # Addresses of this look, or of one before that ended in the middle, are not taken over yet.
        self._is_settled = False
        # A second look: which gradients overlap with what is written can be told only by the new
        # places, which the first look has found.
        if found == OTHER or not self._settled():
            return OTHER
        if _look.call(*self._asked, *given) != SAME:
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
    keys, size = keys_of(tensor), tensor.element_size()
    what = id(type(tensor)), keys, codes[tensor.dtype], tensor.dim()
    return _TensorForm(kind, *what, size, 0 if kind == ROWS else tensor.numel() * size)
