"""Looking at PyTorch's tensors in each step without asking Python for them.

A record of each parameter, its states and its gradient is made once. A look then tells which
parameters have a gradient, which of these are still as recorded, and the addresses of their
tensors. `kernels.cpu.headers.tensor_fields` finds the places of the compared fields in a tensor.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from ...inner import njit
from ..compiler.compile import NativeFunction
from ..compiler.intrinsics import as_pointer, hold_item, load_int64, next_item, prefetch_line
from ..compiler.lines import LINE, prefetch
from ..compiler.machine import PythonEntry
from ..compiler.records import int64s, records
from .arrays import (
    FORM_BYTES,
    INDICES,
    ITEMS,
    LENGTH,
    NOWHERE,
    OBJECT,
    OPEN,
    ROWS,
    Expected,
    Form,
    Forms,
    address_of,
    expected_reader,
    fits,
    forms_at,
    item_of,
    overlaps,
    stretches_at,
)  # fmt: skip
from .tensor_fields import STORAGE_BYTES, TENSOR_BYTES, Fields, keys_of
from .tensor_fields import layout_of as layout_of

ABSENT, FITS, OTHER_GRADIENT, OTHER = range(4)
"""Status of a parameter. `ABSENT`: it has no gradient. `FITS`: all is as recorded.
`OTHER_GRADIENT`: all but the gradient is as recorded. `OTHER`: it differs from the record."""
MOVED, OTHERS, UNLIKE, REORDERED, FOREIGN = 1, 2, 4, 8, 16
"""Flags of a look. `MOVED`: written tensors have other addresses than at the last look. `OTHERS`:
other parameters have gradients than then. `UNLIKE`: a parameter with a gradient does not fit.
`REORDERED`: the dict of states has another order; `FOREIGN`: the number of parameters differs;
with either nothing else is known."""


class _Expected(NamedTuple):
    """Expectation of the tensor at one place, all ``int64``."""

    form: int  # address of a `Form`, which tensors that are alike share
    name: int  # identity of the name of a state


class _Record(NamedTuple):
    """Record of a parameter, all ``int64``."""

    first: int  # its place; those of its states and of its gradient follow
    n_written: int  # parameter and states; 0: nothing is recorded
    counter: int  # the place of its float32 count of updates; -1: it has none
    held: int  # where in a list the first of its states is held
    holds_dict: int  # whether its dict of states is held too


class _TensorQuery(NamedTuple):
    """Question about parameters, gradients and states, all ``int64``; addresses."""

    n_parameters: int
    records: int  # [n_parameters] of `_Record`
    none: int  # identity of None
    n_states: int
    order: int  # [n_states]: the parameter of each item of the dict of states; -1: none
    n_places: int
    expected: int  # [n_places] of `_Expected`
    addresses: int  # [n_places]: those of the written tensors
    gradients: int  # [n_parameters]: those of the dense gradients that fit
    seen: int  # [n_parameters] of `_SeenState`, then [n_places] of `_SeenTensor`
    memory: int  # [2, n_stretches]: of the written tensors, as for `overlaps`
    n_stretches: int
    cursors: int  # [2, 3]: in the dict of states, and in the dict of one parameter
    status: int  # [n_parameters]
    states: int  # [n_parameters]: the dict of states of each, or 0
    active: int  # [n_parameters]: those that fit, in order
    counts: int  # [n_parameters]: addresses of the counts of updates, without gaps
    versions: int  # [n_places]: addresses of the written tensors' counts of changes
    found: int  # [3]: how many of the last three there are


class _SeenTensor(NamedTuple):
    """Addresses that a look has read, all ``int64``. Not valid afterwards."""

    thing: int
    tensor: int
    storage: int


class _SeenState(NamedTuple):
    """Addresses of a dict of states that a look has read. Not valid afterwards."""

    mapping: int
    items: int


fields_at, _expected_at, _records_at, _tensors_at, _dicts_at, _query_at = map(
    records, (Fields, _Expected, _Record, _SeenTensor, _SeenState, _TensorQuery)
)
_STATE_BYTES = 8 * len(_SeenState._fields)
# A cursor in a dict has its position, then the last key and the last value.
_KEY, _VALUE, _CURSOR_BYTES = 8, 16, 24
# Bytes that are fetched of an object, a dict and its items, and the place of the items' address in
# a dict of CPython. If it lies elsewhere in a later version, useless lines are fetched.
_THING_BYTES, _DICT_BYTES, _ITEMS_BYTES, _DICT_ITEMS = 24, 48, 120, 32


@njit(inline="always")
def tensor_in(f, thing, tensor_type):
    """The address of the tensor in an object of Python; 0 if that is not exactly of this type."""
    return load_int64(thing + f.tensor) if load_int64(thing + 8) == tensor_type else 0


@njit(inline="always")
def read_tensor(f, tensor):
    """Dtype, dispatch keys and dimension of a tensor; then the addresses of sizes and strides."""
    dim, sizes, strides = load_int64(tensor + f.dim), tensor + f.sizes, tensor + f.strides
    if dim > f.inline:
        sizes = load_int64(sizes)
        strides = sizes + 8 * dim
    dtype = np.int64(carray(as_pointer(tensor + f.dtype), 1, np.uint16)[0])
    return (dtype, load_int64(tensor + f.keys), dim), sizes, strides


@njit
def place_of(f, tensor, itemsize, n_bytes):
    """The address of a tensor's first element; 0 if its storage is too small for it."""
    storage, offset = load_int64(tensor + f.storage), load_int64(tensor + f.offset) * itemsize
    data = load_int64(storage + f.data)
    return data + offset if data != 0 and offset + n_bytes <= load_int64(storage + f.n_bytes) else 0


@njit(inline="always")
def _seen_of(c):
    """The addresses that a look has read at each place."""
    return _tensors_at(c.seen + _STATE_BYTES * c.n_parameters, c.n_places)


@njit
def _tensor_of(f, at, seen):
    """The address of the tensor that was seen; 0 if it does not have the form at ``at``."""
    form = forms_at(at, 1)[0]
    tensor = tensor_in(f, seen.thing, form.type)
    if tensor == 0:
        return 0
    found, sizes, strides = read_tensor(f, tensor)
    if form.kind == ROWS:
        strides = 0
    if not fits(found, sizes, strides, (form.dtype, form.marks, form.dim), at + FORM_BYTES, 0):
        return 0
    seen.tensor, seen.storage = tensor, load_int64(tensor + f.storage)
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
            if load_int64(cursor + _KEY) != item_of(parameters, order[k]):
                return False
            found[order[k]] = load_int64(cursor + _VALUE)
    return not next_item(states, cursor)


@njit
def _find_things(c, r, k, parameter, gradient):
    """Find the objects of a parameter, its states and its gradient.

    Returns whether the dict has the states in the recorded order.
    """
    expected, seen = _expected_at(c.expected, c.n_places), _seen_of(c)
    own, cursor = int64s(c.states, k + 1)[k], c.cursors + _CURSOR_BYTES
    seen[r.first].thing, seen[r.first + r.n_written].thing = parameter, gradient
    if r.n_written > 1:
        if own == 0:
            return False
        _rewind(cursor)
        for j in range(1, r.n_written):
            name = expected[r.first + j].name
            # A user may have other items between the states.
            while next_item(own, cursor) and load_int64(cursor + _KEY) != name:
                pass
            if load_int64(cursor + _KEY) != name:
                return False
            seen[r.first + j].thing = load_int64(cursor + _VALUE)
        state = _dicts_at(c.seen, c.n_parameters)[k]
        state.mapping, state.items = own, load_int64(own + _DICT_ITEMS)  # own is a dict
    return True


@njit
def _look_at_written(c, f, r, held, n_versions):
    """Compare a parameter and its states with their record.

    Returns -1 if a tensor is not as recorded, else whether one has another address than last time.
    """
    expected, addresses = _expected_at(c.expected, c.n_places), int64s(c.addresses, c.n_places)
    every, versions, has_moved = _seen_of(c), int64s(c.versions, c.n_places), 0
    for place in range(r.first, r.first + r.n_written):
        at, seen = expected[place].form, every[place]
        form, tensor = forms_at(at, 1)[0], _tensor_of(f, at, seen)
        if tensor == 0:
            return -1
        # A lazy clone shares this memory until PyTorch writes to it: a write here would be seen in
        # the other tensor too.
        if load_int64(seen.storage + f.deleter) == f.lazy:
            return -1
        # An empty tensor may have no memory at all, so its address is not compared.
        address = addresses[place]
        if form.n_bytes > 0:
            address = place_of(f, tensor, form.itemsize, form.n_bytes)
            if address == 0:
                return -1
        if place > r.first:  # the caller has the parameters
            hold_item(held, r.held + place - r.first - 1, seen.thing)
        version = load_int64(tensor + f.version)
        versions[n_versions] = version + f.changes if version != 0 else 0
        n_versions += 1
        prefetch_line(version)
        if form.n_bytes <= LINE:  # single numbers; the loops fetch larger tensors themselves
            prefetch_line(address)
        if addresses[place] != address:
            addresses[place], has_moved = address, 1
    return has_moved


@njit
def _fits_gradient(c, f, k, place):
    """Whether a gradient is as recorded, and lies apart from what is written."""
    at, seen = _expected_at(c.expected, c.n_places)[place].form, _seen_of(c)[place]
    form = forms_at(at, 1)[0]
    if form.kind == OBJECT:
        return load_int64(seen.thing + 8) == form.type
    tensor = _tensor_of(f, at, seen)
    if tensor == 0 or form.kind == ROWS or form.n_bytes == 0:
        return tensor != 0
    address = place_of(f, tensor, form.itemsize, form.n_bytes)
    if address == 0:
        return False
    int64s(c.gradients, c.n_parameters)[k] = address
    return not overlaps(stretches_at(c.memory, c.n_stretches), address, address + form.n_bytes)


def _look_at_tensors(query, fields, parameters, gradients, states, held):
    c, f = _query_at(query, 1)[0], fields_at(fields, 1)[0]
    n, every = c.n_parameters, _records_at(c.records, c.n_parameters)
    if load_int64(parameters + LENGTH) != n or load_int64(gradients + LENGTH) != n:
        return FOREIGN
    if not _find_states(c, parameters, states):
        return REORDERED
    status, dicts, active = int64s(c.status, n), int64s(c.states, n), int64s(c.active, n)
    counts, found = int64s(c.counts, n), int64s(c.found, 3)
    addresses = int64s(c.addresses, c.n_places)
    flags = n_active = n_counts = n_versions = 0
    # All objects are found first. Then their memory is read: no read waits for an earlier one.
    for k in range(n):
        r, gradient = every[k], item_of(gradients, k)
        if (gradient == c.none) != (status[k] == ABSENT):
            flags |= OTHERS
        if gradient == c.none:
            status[k] = ABSENT
            continue
        parameter = item_of(parameters, k)
        is_known = r.n_written > 0 and _find_things(c, r, k, parameter, gradient)
        status[k] = FITS if is_known else OTHER
    for k in range(n):
        if status[k] == ABSENT:
            continue
        r, has_moved = every[k], -1
        if status[k] == FITS:
            has_moved = _look_at_written(c, f, r, held, n_versions)
        if has_moved < 0:
            status[k], flags = OTHER, flags | UNLIKE
            continue
        flags |= MOVED * has_moved
        if r.holds_dict != 0 and dicts[k] != 0:
            hold_item(held, k, dicts[k])
        n_versions += r.n_written
        if r.counter >= 0:
            counts[n_counts] = addresses[r.counter]
            n_counts += 1
        active[n_active] = k
        n_active += 1
        if not _fits_gradient(c, f, k, r.first + r.n_written):
            status[k], flags = OTHER_GRADIENT, flags | UNLIKE
    found[0], found[1], found[2] = n_active, n_counts, n_versions
    return flags


def _fetch_seen(query):
    """Fetch the memory at the addresses that the last look has read."""
    c = _query_at(query, 1)[0]
    states, seen = _dicts_at(c.seen, c.n_parameters), _seen_of(c)
    for k in range(c.n_parameters):
        prefetch(states[k].mapping, _DICT_BYTES)
        prefetch(states[k].items, _ITEMS_BYTES)
    for k in range(c.n_places):
        prefetch(seen[k].thing, _THING_BYTES)
        prefetch(seen[k].tensor, TENSOR_BYTES)
        prefetch(seen[k].storage, STORAGE_BYTES)


@njit
def _read_by_form(fields, thing, form):
    f = fields_at(fields, 1)[0]
    tensor = tensor_in(f, thing, form.type)
    if tensor == 0:
        return (0, 0, 0), 0, 0, 0
    found, sizes, strides = read_tensor(f, tensor)
    return found, sizes, strides, tensor


@njit
def _where_it_is(fields, tensor, itemsize, n_bytes):
    return place_of(fields_at(fields, 1)[0], tensor, itemsize, n_bytes)


_read = NativeFunction(
    expected_reader(_read_by_form, _where_it_is),
    f"tensors of forms {ITEMS}",
    PythonEntry(True, True),
)
_fetch = NativeFunction(_fetch_seen, "what was seen", PythonEntry(holds_gil=True))
_look = NativeFunction(_look_at_tensors, f"tensors {ITEMS}", PythonEntry(True, True))
READERS = _look, _fetch, _read

States = Mapping[Any, dict[str, Any]]
"""The states of parameters by their names: a ``dict``."""


def form_of(torch: Any, tensor: Any, kind: int, **more: Any) -> Form:
    """The form of a tensor as it is; ``more`` replaces fields."""
    layout = layout_of(torch)
    assert layout is not None
    what = layout.codes[tensor.dtype], keys_of(tensor), tensor.dim(), tensor.element_size()
    return Form(kind, id(type(tensor)), *what)._replace(**more)


def expected_rows(
    torch: Any, tables: Sequence[tuple[Any, tuple[int, ...]]], memory: np.ndarray
) -> Expected | None:
    """The expected indices ``[1, B]`` and values ``[B, ...]`` of sparse gradients of tables.

    The tables are given by the dtype of the values and their shape. None where tensors are not
    read.
    """
    layout = layout_of(torch)
    if layout is None:
        return None
    with torch.inference_mode(False):
        kind, keys = id(torch.Tensor), keys_of(torch.zeros(1))
    indices = Form(INDICES, kind, layout.codes[torch.int64], keys, 2, 8, 8), (1, OPEN, 0, 1)
    forms = []
    for dtype, shape in tables:
        strides = tuple(math.prod(shape[k:]) for k in range(1, len(shape) + 1))
        own = layout.codes[dtype], keys, len(shape), dtype.itemsize, strides[0] * dtype.itemsize
        forms += [indices, (Form(ROWS, kind, *own), (OPEN, *shape[1:], *strides))]
    fields = np.array(layout.fields, np.int64)
    return Expected(forms, memory, torch.Tensor, fields=fields, reader=_read)


class RecordedTensors(NamedTuple):
    """Forms and names that a look compares with one parameter. They keep no tensor alive."""

    forms: list[Form]  # of the parameter, its states in the order of their dict, its gradient
    dims: list[tuple[int, ...]]  # of each, sizes and strides
    names: list[Any]  # of the states; of the others None
    counter: int  # the number of its float32 count of updates among these; -1: it has none
    types: list[type]  # the types of the forms, which are kept alive here
    holds_dict: bool = False  # whether a step needs other items of the dict of states too


class TensorLook:
    """Looks at the tensors of ``n`` parameters, for one caller at a time.

    A look keeps no tensor alive and compares no identities of tensors: another tensor of the same
    form fits as well. Where tensors cannot be read, no parameter with a gradient fits.

    Attributes:
        first: the place of each recorded parameter; those of its states and its gradient follow.
        held, n_held: the number of its first state in a list of held objects, and the length of
            that list.
        addresses: the last address of the written tensor at each place.
        gradients: the last address of each parameter's dense gradient, if it fitted.
        status, active, counts, versions, found: as in the last look; see `_TensorQuery`.
    """

    def __init__(self, torch: Any, n: int) -> None:
        self._n, self._layout = n, layout_of(torch)
        # Place 0 belongs to no parameter; parameters without a record point there.
        self.first, self._n_of, self.n_places = np.zeros(n, np.int64), [0] * n, 1
        self.held, self.n_held = [0] * n, n
        self.status, self.active, self.counts, self.gradients = (
            np.zeros(n, np.int64) for _ in range(4)
        )
        self.found = np.zeros(3, np.int64)
        self.addresses = np.zeros(0, np.int64)
        records = np.zeros((n, len(_Record._fields)), np.int64)
        fields = np.array(self._layout.fields if self._layout else (), np.int64)
        self._tables = {
            "records": records, "order": np.zeros(0, np.int64),
            "expected": np.zeros((0, len(_Expected._fields)), np.int64),
            "memory": NOWHERE, "cursors": np.zeros(6, np.int64),
            "status": self.status, "states": np.zeros(n, np.int64), "active": self.active,
            "counts": self.counts, "found": self.found, "gradients": self.gradients,
        }  # fmt: skip
        self._forms = Forms()
        self._recorded: list[Any] = [None] * n
        self._query = array("q", [0] * len(_TensorQuery._fields))
        self._alive, self._asked = fields, (self._query.buffer_info()[0], address_of(fields))
        self._grow(1)
        self._set(n_parameters=n, none=id(None))

    def _grow(self, n_places: int) -> None:
        """Make room for so many places."""
        expected, n = self._tables["expected"], self._n
        if n_places > len(expected):
            room, old = max(2 * len(expected), n_places), len(expected)
            seen = np.zeros(len(_SeenState._fields) * n + len(_SeenTensor._fields) * room, np.int64)
            made = np.zeros((room, expected.shape[1]), np.int64)
            made[:old] = expected
            addresses, self.versions = np.zeros(room, np.int64), np.zeros(room, np.int64)
            addresses[:old] = self.addresses
            self.addresses = addresses
            self._tables |= {"expected": made, "addresses": addresses, "versions": self.versions,
                             "seen": seen}  # fmt: skip
            self._set(**{name: address_of(table) for name, table in self._tables.items()})
        self.n_places = n_places
        self._set(n_places=n_places)

    def record(self, k: int, n_places: int, recorded: RecordedTensors | None) -> None:
        """Take over the record of parameter ``k``, which has ``n_places`` places.

        Without ``recorded`` the parameter never fits.
        """
        if n_places != self._n_of[k]:
            self.first[k], self._n_of[k], self.held[k] = self.n_places, n_places, self.n_held
            self.n_held += n_places - 2
            self._grow(self.n_places + n_places)
        first, self._recorded[k] = int(self.first[k]), recorded
        if recorded is None:
            self._tables["records"][k] = np.array(_Record(first, 0, -1, 0, 0))
            return
        counter = first + recorded.counter if recorded.counter >= 0 else -1
        own = self.held[k], recorded.holds_dict
        self._tables["records"][k] = np.array(_Record(first, n_places - 1, counter, *own))
        each = zip(recorded.forms, recorded.dims, recorded.names, strict=True)
        self._tables["expected"][first : first + n_places] = [
            _Expected(self._forms.at(form, dims), 0 if name is None else id(name))
            for form, dims, name in each
        ]
        self.addresses[first : first + n_places] = 0

    def _set(self, **values: int) -> None:
        """Set fields of the query."""
        for name, value in values.items():
            self._query[_FIELDS[name]] = value

    def expect_gradient(self, k: int, form: Form, kind: type) -> None:
        """Record another type of gradient, or one made in another mode."""
        known = self._recorded[k]
        known.types.append(kind)
        known.forms[-1] = known.forms[-1]._replace(type=form.type, marks=form.marks)
        place = int(self.first[k]) + self._n_of[k] - 1
        self._tables["expected"][place, 0] = self._forms.at(known.forms[-1], known.dims[-1])

    def _order(self, parameters: tuple[Any, ...], states: States) -> None:
        """Take over the order in which a dict has the states of parameters, and other items."""
        known = {id(parameter): k for k, parameter in enumerate(parameters)}
        # The keys are listed in one call, since another thread may change the dict.
        places = [known.get(id(key), -1) for key in [*states]]
        table = self._tables["order"] = np.array(places, np.int64)
        self._set(order=address_of(table), n_states=len(places))

    def keep_apart(self, memory: np.ndarray) -> None:
        """Set the memory in which no dense gradient may lie; as for `overlaps`."""
        self._tables["memory"] = memory
        self._set(memory=address_of(memory), n_stretches=memory.shape[1])

    def fetch(self) -> None:
        """Fetch the memory that `look` is going to read into the caches.

        A look goes from address to address, one miss after the other; here all lines are fetched at
        once. The addresses are those of the last look, so a few lines may be fetched in vain.
        """
        if self._layout is not None:
            _fetch.call(self._asked[0])

    def look(
        self, parameters: tuple[Any, ...], gradients: tuple[Any, ...], states: States,
        held: list[Any],
    ) -> int:  # fmt: skip
        """Compare all tensors with their records; fill in `status`, `addresses` and the lists.

        ``held`` is a list of `n_held` times None. It gets the dict of states of each parameter that
        needs it, and behind these the states. Returns flags.
        """
        if self._layout is None:
            return self._look_by_python(gradients)
        given = id(parameters), id(gradients), id(states), id(held)
        flags = _look.call(*self._asked, *given)
        tried = 0
        while flags == REORDERED and tried < _TRIALS:
            self._order(parameters, states)
            flags, tried = _look.call(*self._asked, *given), tried + 1
        return flags

    def _look_by_python(self, gradients: tuple[Any, ...]) -> int:
        if len(gradients) != self._n:
            return FOREIGN
        self.status[:] = [ABSENT if gradient is None else OTHER for gradient in gradients]
        self.found[:] = 0
        return OTHERS | (UNLIKE if self.status.any() else 0)


_FIELDS = {name: k for k, name in enumerate(_TensorQuery._fields)}
_TRIALS = 3  # to find the order of states, which another thread may change meanwhile
