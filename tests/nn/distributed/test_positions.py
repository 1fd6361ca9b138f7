"""The positions of a `RowTensor`: what is refused, when it is made and when it is used."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fusestep import nn, ops
from fusestep.nn import mxnet
from fusestep.nn.base import gradients
from fusestep.nn.distributed import all_reduce, alone
from fusestep.nn.mxnet import master
from helpers import assert_same_bits, refused
from thread_processes import in_threads

VALUES = np.ones((3, 2), np.float32)
IDS = np.array([2, 0, 2])
WRONG: list[tuple[Any, int, type[Exception], str]] = [
    (np.array([0, 1, 2], np.int32), 9, TypeError, "positions have a wrong dtype"),
    (np.array([0.0, 1.0, 2.0]), 9, TypeError, "positions have a wrong dtype"),
    (np.arange(2), 9, ValueError, "positions do not fit the indices"),
    (np.arange(4), 9, ValueError, "positions do not fit the indices"),
    (np.arange(3)[None], 9, ValueError, "positions do not fit the indices"),
    (np.array([0, 2, 1]), 9, ValueError, "positions are no positions of a batch"),
    (np.array([0, 1, 1]), 9, ValueError, "positions are no positions of a batch"),
    (np.array([-1, 1, 2]), 9, ValueError, "positions are no positions of a batch"),
    (np.array([0, 1, 9]), 9, ValueError, r"positions .*expected ascending ones in \[0, 9\)"),
    (np.array([0, 1, 2]), 0, ValueError, "positions are no positions of a batch"),
    (np.array([0, 1, 2]), 2, ValueError, "positions are no positions of a batch"),
    (np.arange(3, dtype=np.uint64), 9, TypeError, "positions have a wrong dtype"),
    # Differences of neighbours that overflow are positive.
    (np.array([1, -(2**63), 2]), 9, ValueError, "positions are no positions of a batch"),
    (None, 9, ValueError, "batch_length is given without positions: expected 0, or positions"),
]


def stepping(gradient: nn.RowTensor, n_before: int) -> tuple[Any, Callable[[], Any]]:
    """An optimizer, after steps with the same gradient, whose arrays are known by then."""
    opt = nn.LazyAdam([np.ones((4, 2), np.float32)])
    for _ in range(n_before):
        opt((gradient,))
    return opt, lambda: opt((gradient,))


USES: dict[str, Callable[[nn.RowTensor], tuple[Any, Callable[[], Any]]]] = {
    "a step": lambda g: stepping(g, 0), "a later step": lambda g: stepping(g, 2),
    "clip_by_global_norm": lambda g: (g, lambda: ops.clip_by_global_norm([g], 0.1, in_place=True)),
    "global_norm": lambda g: (g, lambda: ops.global_norm([g])),
    "all_reduce": lambda g: (g, lambda: all_reduce((g,), alone())),
    "list": lambda g: (g, lambda: ops.global_norm([[g]])),
}  # fmt: skip


@pytest.mark.parametrize(("positions", "length", "kind", "match"), WRONG)
def test_positions_that_are_refused(
    positions: Any, length: int, kind: type[Exception], match: str
) -> None:
    """When a gradient is made, and where they were assigned, by all that use them."""
    with pytest.raises(kind, match=f"^RowTensor: {match}"):
        nn.RowTensor(IDS, VALUES, (4, 2), positions=positions, batch_length=length)
    for use in USES.values():
        gradient = nn.RowTensor(IDS, VALUES.copy(), (4, 2))
        watched, call = use(gradient)
        gradient.positions, gradient.batch_length = positions, length
        with refused(kind, f": .*{match}", watched, gradient):
            call()


@pytest.mark.parametrize(
    ("length", "kind"),
    [(6.5, TypeError), (6.0, TypeError), (np.float32(6), TypeError), ("6", TypeError),
     (True, TypeError), (np.True_, TypeError), (None, TypeError), (np.array(6), TypeError),
     (-1, ValueError), (2**62 + 1, ValueError), (2**63, ValueError), (2**200, ValueError)],
)  # fmt: skip
def test_batch_lengths_that_are_refused(length: Any, kind: type[Exception]) -> None:
    """By itself, also where it is assigned; and nothing of it is left where steps look for sizes,
    in which 6.0 and 6 are equal."""
    n, match = _NEW.pop(), "^RowTensor: batch_length .*: expected an int"
    ids, values = np.zeros(n, np.int64), np.ones((n, 1), np.float32)
    with pytest.raises(kind, match=match):
        nn.RowTensor(ids, values, (4, 1), positions=np.arange(n), batch_length=length)
    gradient = nn.RowTensor(ids, values, (4, 1), positions=np.arange(n), batch_length=n)
    table = np.ones((4, 1), np.float32)
    opt = nn.SGD([table], learning_rate=1.0)
    with refused(kind, match, opt, gradient):
        gradient.batch_length = length
        opt((gradient,))
    opt((gradient,))
    assert table.ravel().tolist() == [1 - n, 1, 1, 1]


_NEW = [*range(2, 40)]
"""Numbers of occurrences that no step of this file has had."""


def test_integers_of_numpy_are_batch_lengths() -> None:
    for kind in (np.int8, np.uint16, np.int64, np.uint64):
        gradient = nn.RowTensor(IDS, VALUES, (4, 2), positions=np.arange(3), batch_length=kind(7))
        assert type(gradient.batch_length) is int and gradient.batch_length == 7


def test_the_longest_batch() -> None:
    """The last range begins at 2**62 - 2**56: its ends are numbers of 64 bits."""
    values, longest = np.random.default_rng(0).standard_normal((N, 1)).astype(np.float32), 2**62
    begins = longest // 64 * np.array([0, 3, 63, 64])
    positions = np.concatenate([
        begin + np.arange(-n, 0) for begin, n in zip(begins[1:], (5000, 3000, 1000), strict=True)
    ])  # fmt: skip
    table, ids = np.zeros((2, 1), np.float32), np.ones(N, np.int64)
    gradient = nn.RowTensor(ids, values, (2, 1), positions=positions, batch_length=longest)
    nn.SGD([table], learning_rate=1.0)((gradient,))
    total = np.float32(0)
    for part in np.split(values.ravel(), [5000, 8000]):
        total += np.cumsum(part, dtype=np.float32)[-1]
    assert_same_bits(table.ravel(), np.array([0, -total], np.float32))

    def program(comm: Any) -> Any:
        match = f"batch_length is out of range: .*, got {2 * longest}"
        with pytest.raises(ValueError, match=match):
            all_reduce((gradient,), comm)

    in_threads(2, program)


def test_positions_are_an_array() -> None:
    gradient = nn.RowTensor(IDS, VALUES, (4, 2))
    match = r"^RowTensor: positions is no array"
    for wrong in ([0, 1, 2], 3, "012"):
        with pytest.raises(TypeError, match=match):
            nn.RowTensor(IDS, VALUES, (4, 2), positions=wrong, batch_length=9)
        with pytest.raises(TypeError, match=match):
            gradient.positions = wrong
    assert gradient.positions is None
    held = type("Held", (), {"__array__": lambda *_: np.arange(3)})()
    gradient.positions, gradient.batch_length = held, 9
    assert type(gradient.positions) is np.ndarray


def test_positions_of_parts_are_refused() -> None:
    """The places of which would not be ascending."""
    part = nn.RowTensor(IDS, VALUES, (4, 2), positions=np.arange(3), batch_length=6)
    opt = nn.LazyAdam([np.ones((4, 2), np.float32)])
    with refused(ValueError, "^LazyAdam: .*has parts with positions", opt, part):
        opt(([part, nn.RowTensor(IDS, VALUES, (4, 2))],))
    opt(([part],))  # one part is no list of parts


def test_positions_need_not_be_contiguous() -> None:
    """Nor stay the same: each step reads them anew."""
    n = 9000
    rng = np.random.default_rng(0)
    ids, values = np.zeros(n, np.int64), rng.standard_normal((n, 3)).astype(np.float32)
    results = []
    for positions in (np.arange(2 * n)[::2], np.arange(2 * n)[::2].copy(), None):
        table = np.zeros((2, 3), np.float32)
        nn.SGD([table])((nn.RowTensor(
            ids, values, (2, 3), positions=positions, batch_length=2 * n * (positions is not None)
        ),))  # fmt: skip
        results.append(table)
    assert_same_bits(results[0], results[1])
    assert (results[0] != results[2]).any()  # other ranges, another order of the sum


N = 9000  # a row with more than 512 occurrences is summed in ranges of 4096 of the batch


def whole_and_part() -> tuple[nn.RowTensor, nn.RowTensor]:
    """A batch whose occurrences are of row 0 and of row 1 in turn, and what has row 0 of it. Those
    of row 1 are zeros: sums over both have the bits of those over row 0."""
    values = np.random.default_rng(0).standard_normal((2 * N, 3)).astype(np.float32)
    values[1::2] = 0
    whole = nn.RowTensor(np.arange(2 * N) % 2, values, (2, 3))
    part = nn.RowTensor(
        np.zeros(N, np.int64), values[::2].copy(), (2, 3),
        positions=np.arange(2 * N)[::2].copy(), batch_length=2 * N)  # fmt: skip
    return whole, part


def without(gradient: nn.RowTensor) -> nn.RowTensor:
    return nn.RowTensor(gradient.indices, gradient.values, gradient.dense_shape)


def _stepped(gradient: Any, **options: Any) -> np.ndarray:
    table = np.full((2, 3), 0.5, np.float32)
    group = {"params": [nn.Parameter(table, "table")], **options}
    nn.SGD([group], learning_rate=0.1)((gradient,))
    return table[:1]


def _clipped(gradient: Any, **options: Any) -> np.ndarray:
    gradient = copy.deepcopy(gradient)
    (found,) = ops.clip_by_global_norm([gradient], 1.0, use_norm=3.0, **options)
    return _stepped(found)


def _reduced(gradient: Any) -> np.ndarray:
    (found,) = all_reduce((gradient,), alone())
    return _stepped(found)


def _of_mxnet(gradient: Any, dtype: Any = np.float32) -> np.ndarray:
    optimizer = mxnet.Adam(learning_rate=0.1, multi_precision=True)
    weight = np.full((2, 3), 0.5, dtype)
    state = optimizer.create_state_multi_precision(0, weight)
    optimizer.update_multi_precision(0, weight, gradient, state)
    mean, _ = state if dtype == np.float32 else state[1]  # Adam's first update forgets the size
    return mean[:1]


_BASE = nn.SGD([np.ones(2, np.float32)], loss_scale=3.0)
OPERATIONS: dict[str, Callable[[Any], np.ndarray]] = {
    "step": _stepped, "copy": lambda g: _stepped(copy.copy(g)),
    "deepcopy": lambda g: _stepped(copy.deepcopy(g)),
    "pickle": lambda g: _stepped(pickle.loads(pickle.dumps(g))), "list": lambda g: _stepped([g]),
    "scale_grad": lambda g: _stepped(_BASE.scale_grad((g,))[0]),
    "gradients_centralization": lambda g: _stepped(gradients.centralized(g)),
    "decay_weight": lambda g: _stepped(gradients.decayed(g, np.ones((2, 3), np.float32), 0.1)),
    "grad_centralization": lambda g: _stepped(g, grad_centralization=True),
    "decay and centralization": lambda g: _stepped(g, grad_centralization=True, weight_decay=0.1),
    "clip_by_global_norm": _clipped, "clip_by_global_norm of a list": lambda g: _clipped([g]),
    "clip_by_global_norm in place": lambda g: _clipped(g, in_place=True),
    "global_norm": lambda g: np.array(ops.global_norm([g])), "all_reduce": _reduced,
    "mxnet": _of_mxnet,
    "mxnet in float32": lambda g: _stepped(master.master_arguments(g, (None, None))[1]),
    "mxnet with a master copy": lambda g: _of_mxnet(g, np.float16),
}  # fmt: skip
IN_ORDER = {"decay_weight", "decay and centralization"}
"""Without ranges: rows that decay are summed in the order of their occurrences first."""


@pytest.mark.parametrize("name", OPERATIONS)
def test_positions_are_kept(name: str) -> None:
    """Through all that makes a gradient out of one: a step has the bits of the whole batch."""
    whole, part = whole_and_part()
    operation = OPERATIONS[name]
    assert_same_bits(operation(part), operation(whole), name)
    if name not in IN_ORDER:
        assert (operation(without(part)) != operation(whole)).any()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_batches_of_several_processes_are_one_behind_the_other(size: int) -> None:
    """In `all_reduce`: places of each rank's batch become places of all of them."""
    whole, part = whole_and_part()

    def program(comm: Any) -> Any:
        return [all_reduce((g,), comm)[0] for g in (part, whole)]

    for of_part, of_whole in in_threads(size, program):
        assert of_part.batch_length == 2 * N * size
        assert_same_bits(of_part.positions, np.arange(2 * N * size)[::2])
        assert of_whole.positions is None
        assert_same_bits(_stepped(of_part), _stepped(of_whole))


def test_all_have_positions_or_none() -> None:
    _, part = whole_and_part()

    def program(comm: Any) -> Any:
        with pytest.raises(ValueError, match=r"all_reduce: rank 1: gradients.* differs"):
            all_reduce((part if comm.rank else without(part),), comm)

    in_threads(2, program)


def test_parts_with_positions_are_refused_by_operations() -> None:
    _, part = whole_and_part()
    for call in (ops.global_norm, ops.clip_by_global_norm, lambda x: all_reduce(x, alone())):
        with refused(ValueError, "has parts with positions", part):
            call([[part, without(part)]])


def test_one_without_the_other() -> None:
    """A length alone says nothing; positions without one are none of a batch of 0."""
    known, part = nn.RowTensor(IDS, VALUES, (4, 2)), nn.RowTensor(IDS, VALUES, (4, 2))
    opt = nn.LazyAdam([np.ones((4, 2), np.float32)])
    opt((known,))
    part.batch_length = 9
    for given in (part, [known, part]):  # also after a step with the same arrays
        with refused(ValueError, "batch_length is given without positions", opt, part):
            opt((given,))
    with pytest.raises(ValueError, match=r"ascending ones in \[0, 0\)"):
        nn.RowTensor(IDS, VALUES, (4, 2), positions=np.arange(3))
    none = nn.RowTensor(IDS[:0], VALUES[:0], (4, 2), positions=np.arange(0))
    assert none.positions is not None
    nn.LazyAdam([np.ones((4, 2), np.float32)])((none,))


def test_places_of_the_batch_not_of_the_row() -> None:
    """Ascending over all rows, in the order of the occurrences, whatever their rows."""
    ids, values = np.array([3, 0, 3, 1]), np.arange(8.0, dtype=np.float32).reshape(4, 2)
    positions = np.array([0, 4, 5, 9])
    gradient = nn.RowTensor(ids, values, (4, 2), positions=positions, batch_length=10)
    table, expected = np.zeros((2, 4, 2), np.float32)
    nn.SGD([table], learning_rate=1.0)((gradient,))
    nn.SGD([expected], learning_rate=1.0)((without(gradient),))
    assert_same_bits(table, expected)


def test_operations_without_order_do_not_need_them() -> None:
    gradient = ops.RowTensor(IDS, VALUES, (4, 2), positions=np.array([1, 5, 7]), batch_length=8)
    assert gradient.to_dense()[:, 0].tolist() == [1, 0, 2, 0]
    assert gradient.coalesce().indices.tolist() == [0, 2]
    assert "RowTensor(indices=(3,)" in repr(gradient)
