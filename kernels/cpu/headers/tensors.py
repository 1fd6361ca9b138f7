"""Looking at PyTorch's tensors in each step without asking Python for them.

What a step needs of a parameter, its states and its gradient is recorded once, for each parameter
by itself. A look tells which parameters have a gradient, which of these are as recorded, and where
their tensors lie. `kernels.cpu.headers.tensor_fields` finds where a tensor has what is compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from ...inner import njit
from ..compiler.compile import NativeFunction
from ..compiler.intrinsics import as_pointer, hold_item, load_int64, next_item, prefetch_line
from ..compiler.lines import LINE, prefetch
from ..compiler.machine import PythonEntry
from ..compiler.records import int64s, records
from .arrays import ITEMS, LENGTH, address_of, overlaps
from .tensor_fields import STORAGE_BYTES, TENSOR_BYTES, Fields, layout_of, signed

WRITTEN, DENSE, ROWS, OBJECT = range(4)
"""What a form is of: a tensor that is written, a dense gradient, one of rows, any object."""
ABSENT, FITS, OTHER_GRADIENT, OTHER = range(4)
"""How a parameter is found: without a gradient; as recorded; so but for the gradient; otherwise."""
MOVED, OTHERS, UNLIKE, REORDERED, FOREIGN = 1, 2, 4, 8, 16
"""Flags of a look. `MOVED`: written tensors lie elsewhere than at the last look. `OTHERS`: other
parameters have gradients than then. `UNLIKE`: a parameter with a gradient does not fit. Nothing
else is known where the dict of states is `REORDERED`, or there is another number of parameters
(`FOREIGN`)."""


class TensorForm(NamedTuple):
    """Form that a tensor should have, all ``int64``."""

    kind: int
    type: int  # identity
    name: int = 0  # identity of the name of a state
    keys: int = 0
    dtype: int = 0
    dim: int = 0
    dims: int = 0  # address of sizes, then strides
    itemsize: int = 0
    n_bytes: int = 0  # from the first to the last element


class _Record(NamedTuple):
    """Record of a parameter, all ``int64``."""

    first: int  # number of its form; those of its states and of its gradient follow
    n_written: int  # parameter and states; 0: nothing is recorded
    count: int  # number of the form of its float32 count of updates; -1: it has none


class _TensorQuery(NamedTuple):
    """Question about parameters, gradients and states, all ``int64``; addresses."""

    n_parameters: int
    records: int  # [n_parameters] of `_Record`
    none: int  # identity of None
    n_states: int
    order: int  # [n_states]: the parameter of each item of the dict of states; -1: none
    n_forms: int
    forms: int  # [n_forms] of `TensorForm`
    addresses: int  # [n_forms]: where each was found
    seen: int  # [n_seen] of `_Seen`: `_OF_STATE` for each parameter, then `_OF_FORM` for each form
    n_seen: int
    memory: int  # [2, n_stretches]: of what is written, as for `overlaps`
    n_stretches: int
    cursors: int  # of the dict of states, and of that of a parameter: [2, 3]
    status: int  # [n_parameters]
    states: int  # [n_parameters]: the dict of states of each, or 0
    active: int  # [n_parameters]: those that fit, in order
    counts: int  # [n_parameters]: addresses of the counts of those that have one
    versions: int  # [n_forms]: addresses of the counts of changes of what is written
    found: int  # [3]: how many of the last three there are


class _Seen(NamedTuple):
    """Memory range that a look reads, all ``int64``. Not valid afterwards."""

    address: int
    n_bytes: int


fields_at, _forms_at, _records_at, _seen_at, _query_at = map(
    records, (Fields, TensorForm, _Record, _Seen, _TensorQuery)
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
def _fits(f, tensor, form):
    """Whether a tensor has the form: what it is, its dtype, its sizes and strides."""
    if load_int64(tensor + f.keys) != form.keys or load_int64(tensor + f.dim) != form.dim:
        return False
    if code_of(f, tensor) != form.dtype:
        return False
    sizes, strides, dims = tensor + f.sizes, tensor + f.strides, form.dims
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
def _tensor_of(f, thing, form, seen):
    """The address of the tensor of an object; 0 where it has not the form."""
    seen[0].address = thing
    if load_int64(thing + 8) != form.type:
        return 0
    tensor = load_int64(thing + f.tensor)
    if tensor == 0 or not _fits(f, tensor, form):
        return 0
    seen[1].address, seen[2].address = tensor, load_int64(tensor + f.storage)
    return tensor


@njit
def _rewind(cursor):
    words = int64s(cursor, _CURSOR_BYTES // 8)
    for k in range(words.size):
        words[k] = 0


@njit
def _find_states(c, parameters, states):
    """Find the dict of states of each parameter; whether they come in the known order."""
    order = int64s(c.order, c.n_states)
    found, cursor = int64s(c.states, c.n_parameters), c.cursors
    for k in range(found.size):
        found[k] = 0
    _rewind(cursor)
    for k in range(order.size):
        if not next_item(states, cursor):
            return False
        if order[k] >= 0:
            if load_int64(cursor + _KEY) != load_int64(parameters + ITEMS + 8 * order[k]):
                return False
            found[order[k]] = load_int64(cursor + _VALUE)
    return not next_item(states, cursor)


@njit
def _find_written(c, f, r, parameter, own, held, n_versions):
    """Look at a parameter and its states ``own``.

    Returns -1 if anything is not as recorded, else whether it lies elsewhere than last time.
    """
    forms, addresses = _forms_at(c.forms, c.n_forms), int64s(c.addresses, c.n_forms)
    seen, versions, cursor = _seen_at(c.seen, c.n_seen), int64s(c.versions, c.n_forms), c.cursors
    cursor += _CURSOR_BYTES
    has_moved, n = 0, c.n_parameters
    if own == 0 and r.n_written > 1:
        return -1
    _rewind(cursor)
    for k in range(r.n_written):
        form, thing = forms[r.first + k], parameter
        if k > 0:
            # Between those that are looked at a user may have others.
            while next_item(own, cursor) and load_int64(cursor + _KEY) != form.name:
                pass
            if load_int64(cursor + _KEY) != form.name:
                return -1
            thing = load_int64(cursor + _VALUE)
        number = r.first + k
        tensor = _tensor_of(f, thing, form, seen[_PER_STATE * n + _PER_FORM * number :])
        if tensor == 0:
            return -1
        # Others would see what is written to memory that is shared until somebody writes.
        if load_int64(load_int64(tensor + f.storage) + f.deleter) == f.lazy:
            return -1
        # An empty tensor may have no memory at all, and is never looked for there.
        address = addresses[number]
        if form.n_bytes > 0:
            address = place_of(f, tensor, form.itemsize, form.n_bytes)
            if address == 0:
                return -1
        if k > 0:  # the caller has the parameters
            hold_item(held, n + number, thing)
        version = load_int64(tensor + f.version)
        versions[n_versions + k] = version + f.changes if version != 0 else 0
        prefetch_line(version)
        if form.n_bytes <= LINE:  # of single numbers: what is larger is read as it lies
            prefetch_line(address)
        if addresses[number] != address:
            addresses[number], has_moved = address, 1
    return has_moved


@njit
def _fits_gradient(c, f, number, thing):
    """Whether a gradient is as recorded, and lies apart from what is written."""
    form, seen = _forms_at(c.forms, c.n_forms)[number], _seen_at(c.seen, c.n_seen)
    if form.kind == OBJECT:
        return load_int64(thing + 8) == form.type
    seen = seen[_PER_STATE * c.n_parameters + _PER_FORM * number :]
    tensor = _tensor_of(f, thing, form, seen)
    if tensor == 0 or form.kind == ROWS or form.n_bytes == 0:
        return tensor != 0
    address = place_of(f, tensor, form.itemsize, form.n_bytes)
    if address == 0:
        return False
    memory = carray(as_pointer(c.memory), (2, c.n_stretches), np.int64)
    int64s(c.addresses, c.n_forms)[number] = address
    return not overlaps(memory, address, address + form.n_bytes)


def _look_at_tensors(query, fields, parameters, gradients, states, held):
    c, f = _query_at(query, 1)[0], fields_at(fields, 1)[0]
    n, every = c.n_parameters, _records_at(c.records, c.n_parameters)
    if load_int64(parameters + LENGTH) != n or load_int64(gradients + LENGTH) != n:
        return FOREIGN
    if not _find_states(c, parameters, states):
        return REORDERED
    status, own, active = int64s(c.status, n), int64s(c.states, n), int64s(c.active, n)
    counts, addresses = int64s(c.counts, n), int64s(c.addresses, c.n_forms)
    seen, found = _seen_at(c.seen, c.n_seen), int64s(c.found, 3)
    flags = n_active = n_counts = n_versions = 0
    for k in range(n):
        r, gradient = every[k], load_int64(gradients + ITEMS + 8 * k)
        if (gradient == c.none) != (status[k] == ABSENT):
            flags |= OTHERS
        if gradient == c.none:
            status[k] = ABSENT
            continue
        place = _PER_STATE * k
        has_moved = -1
        if r.n_written > 0:
            parameter = load_int64(parameters + ITEMS + 8 * k)
            has_moved = _find_written(c, f, r, parameter, own[k], held, n_versions)
        if has_moved < 0:
            status[k], flags = OTHER, flags | UNLIKE
            continue
        flags |= MOVED * has_moved
        if own[k] != 0:
            hold_item(held, k, own[k])
            if r.n_written > 1:  # so it is a dict
                seen[place].address, seen[place + 1].address = (
                    own[k],
                    load_int64(own[k] + _DICT_ITEMS),
                )
        n_versions += r.n_written
        if r.count >= 0:
            counts[n_counts] = addresses[r.count]
            n_counts += 1
        active[n_active] = k
        n_active += 1
        status[k] = FITS
        if not _fits_gradient(c, f, r.first + r.n_written, gradient):
            status[k], flags = OTHER_GRADIENT, flags | UNLIKE
    found[0], found[1], found[2] = n_active, n_counts, n_versions
    return flags


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


def form_of(torch: Any, tensor: Any, kind: int, name: str | None = None, **more: Any) -> TensorForm:
    """The form of a tensor as it is, but for its dims; ``more`` replaces fields."""
    layout = layout_of(torch)
    assert layout is not None
    keys, size = signed(torch._C._dispatch_keys(tensor).raw_repr()), tensor.element_size()
    what = id(type(tensor)), 0 if name is None else id(name), keys, layout.codes[tensor.dtype]
    return TensorForm(kind, *what, tensor.dim(), 0, size)._replace(**more)


class RecordedTensors:
    """What a look compares of one parameter; it keeps types and names alive, and no tensor.

    Args:
        forms: of the parameter, its states in the order of their dict, and its gradient.
        dims: of each, sizes and strides.
        count: the number of the form of its float32 count of updates; -1: it has none.
        alive: what the identities in the forms mean.
    """

    def __init__(
        self, forms: Sequence[TensorForm], dims: Sequence[Sequence[int]], count: int, alive: Any
    ) -> None:
        flat = np.array([*chain.from_iterable(dims)], np.int64)
        places = accumulate(map(len, dims), initial=0)
        each, begin = zip(forms, places, strict=False), address_of(flat)
        self.forms = np.array([form._replace(dims=begin + 8 * k) for form, k in each], np.int64)
        self.count, self._alive = count, (flat, alive)


class TensorLook:
    """Looks at the tensors of ``n`` parameters, for one caller at a time.

    It keeps no tensor alive, and compares no identity of one with an earlier one: another tensor
    of the same form fits as well. Where tensors cannot be read, no parameter with a gradient does.

    Attributes:
        first: of each parameter that was recorded, the number of its form, which those of its
            states and of its gradient follow.
        addresses: where the tensor of each form was last found.
        status, active, counts, versions, found: as in the last look; see `_TensorQuery`.
    """

    def __init__(self, torch: Any, n: int) -> None:
        self._n, self._layout = n, layout_of(torch)
        # The first form is no parameter's: those without a record have it.
        self.first, self._n_forms, self.n_forms = np.zeros(n, np.int64), [0] * n, 1
        self.status, self.active, self.counts = (np.zeros(n, np.int64) for _ in range(3))
        self.found = np.zeros(3, np.int64)
        self.addresses = np.zeros(0, np.int64)
        records = np.array([_Record(0, 0, -1)] * n, np.int64)
        fields = np.array(self._layout.fields if self._layout else (), np.int64)
        self._tables = {
            "records": records.reshape(n, 3), "order": np.zeros(0, np.int64),
            "forms": np.zeros((0, len(TensorForm._fields)), np.int64),
            "memory": np.zeros((2, 0), np.int64), "cursors": np.zeros(6, np.int64),
            "status": self.status, "states": np.zeros(n, np.int64), "active": self.active,
            "counts": self.counts, "found": self.found,
        }  # fmt: skip
        self._alive: list[Any] = [fields, *([None] * n)]
        self._query = array("q", [0] * len(_TensorQuery._fields))
        self._asked = self._query.buffer_info()[0], address_of(fields)
        self._grow(1)
        self._set(n_parameters=n, none=id(None))

    def _grow(self, n_forms: int) -> None:
        """Make room for so many forms."""
        forms, n = self._tables["forms"], self._n
        if n_forms > len(forms) or not self._query[0]:
            room = max(2 * len(forms), n_forms)
            old = len(forms)
            seen = np.zeros((_PER_STATE * n + _PER_FORM * room, 2), np.int64)
            seen[:, 1] = _OF_STATE * n + _OF_FORM * room
            made = np.zeros((room, forms.shape[1]), np.int64)
            made[:old] = forms
            addresses, self.versions = np.zeros(room, np.int64), np.zeros(room, np.int64)
            addresses[:old] = self.addresses
            self.addresses = addresses
            self._tables |= {"forms": made, "addresses": addresses, "versions": self.versions,
                             "seen": seen}  # fmt: skip
            self._set(**{name: address_of(table) for name, table in self._tables.items()})
        self.n_forms = n_forms
        self._set(n_forms=n_forms, n_seen=_PER_STATE * n + _PER_FORM * n_forms)

    def record(self, k: int, n_forms: int, recorded: RecordedTensors | None) -> None:
        """Take over what parameter ``k`` has to be, which has so many forms.

        Without ``recorded`` it is never found to fit.
        """
        if n_forms != self._n_forms[k]:
            self.first[k], self._n_forms[k] = self.n_forms, n_forms
            self._grow(self.n_forms + n_forms)
        first, self._alive[1 + k] = int(self.first[k]), [recorded]
        if recorded is None:
            self._tables["records"][k] = _Record(first, 0, -1)
            return
        count = first + recorded.count if recorded.count >= 0 else -1
        self._tables["records"][k] = _Record(first, n_forms - 1, count)
        self._tables["forms"][first : first + n_forms] = recorded.forms
        self.addresses[first : first + n_forms] = 0

    def _set(self, **values: int) -> None:
        """Set fields of the query."""
        for name, value in values.items():
            self._query[_FIELDS[name]] = value

    def expect_gradient(self, k: int, form: TensorForm, alive: Any) -> None:
        """Record another kind of gradient of the same dtype and sizes."""
        self._alive[1 + k].append(alive)
        number = int(self.first[k]) + self._n_forms[k] - 1
        self._tables["forms"][number, [_TYPE, _KEYS]] = form.type, form.keys

    def _order(self, parameters: tuple[Any, ...], states: States) -> None:
        """Take over in which order a dict has the states of parameters, beside other things."""
        known = {id(parameter): k for k, parameter in enumerate(parameters)}
        # A list of them is made in one go: another thread may change the dict.
        places = [known.get(id(key), -1) for key in [*states]]
        table = self._tables["order"] = np.array(places, np.int64)
        self._set(order=address_of(table), n_states=len(places))

    def keep_apart(self, memory: np.ndarray) -> None:
        """Let no dense gradient fit that lies in these stretches; as for `overlaps`."""
        self._tables["memory"] = memory
        self._set(memory=address_of(memory), n_stretches=memory.shape[1])

    def fetch(self) -> None:
        """Bring what `look` is going to read into the caches.

        A look goes from address to address, one miss after the other; here all are on their way at
        once. It is read where it was: what is gone is fetched in vain.
        """
        if self._layout is not None:
            _fetch.call(self._asked[0])

    def look(
        self, parameters: tuple[Any, ...], gradients: tuple[Any, ...], states: States,
        held: list[Any],
    ) -> int:  # fmt: skip
        """Flags of what was found; fill in `status`, `addresses` and the lists.

        ``held`` is a list of None, one for each parameter and `n_forms`: it gets the dicts of
        states, then the states by the numbers of their forms.
        """
        if self._layout is None:
            return self._look_by_python(gradients)
        given = id(parameters), id(gradients), id(states), id(held)
        flags = _look.call(*self._asked, *given)
        for _ in range(_TRIALS):
            if flags != REORDERED:
                break
            self._order(parameters, states)
            flags = _look.call(*self._asked, *given)
        return flags

    def _look_by_python(self, gradients: tuple[Any, ...]) -> int:
        if len(gradients) != self._n:
            return FOREIGN
        self.status[:] = [ABSENT if gradient is None else OTHER for gradient in gradients]
        self.found[:] = 0
        return OTHERS | (UNLIKE if self.status.any() else 0)


_TYPE, _KEYS = (TensorForm._fields.index(name) for name in ("type", "keys"))
_FIELDS = {name: k for k, name in enumerate(_TensorQuery._fields)}
_TRIALS = 3  # to find the order of states, which another thread may change meanwhile
