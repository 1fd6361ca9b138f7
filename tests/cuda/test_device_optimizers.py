"""Steps of optimizers, and MXNet's, on device arrays, as on the host: forms, gradients, types."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import fusestep
from device_rules import OF_ROWS, OF_TENSORS, Own

from devices import (  # isort: skip
    COMPUTES, GPU, KIND, MARKS, RNG, SIMULATOR, assert_alike, assert_close, assert_equal_runs,
    assert_same, exchange, gradient, on_device, on_host, only, positive, put, refused, rows, sized,
    told)  # fmt: skip
from fusestep import nn
from fusestep.kernels.cuda.device.backend import GEOMETRY
from fusestep.kernels.tables import HOT
from fusestep.nn import mxnet as mx
from fusestep.nn.engine import offload
from helpers import STORAGE_DTYPES, in_turn

from optimizers import (  # isort: skip
    BY_NAME, FORMS, ON_DEVICES, arguments_of, decayed_and_scaled, inner, is_row_wise, parameters,
)  # fmt: skip
from optimizers import make as new_optimizer

pytestmark = MARKS
F32, F64, F16, BF16 = STORAGE_DTYPES

Make = Callable[[Any], Any]
Step = list[Any]
Shapes = Sequence[tuple[int, ...]]

# No to four dimensions, empty ones; rows that lanes share or one has alone, that end within a tile
# or are of several rounds. A number has no rows.
WITH_ROWS: Shapes = (
    (5, 4), (7,), (9, 1), (0, 3), (3, 64), (2, 257), (1, 3), (2, 3, 4, 5),
    *sized((), ((60, 9), (1_003,), (20_011,), (70, 3), (400, 64), (9, 5_003))))  # fmt: skip
SHAPES: Shapes = (*WITH_ROWS, (3, 0), ())


def dense_steps(shapes: Shapes = SHAPES, dtypes: Sequence[Any] = ()) -> list[Step]:
    """Some gradients are None in one step, and all in another."""
    types = dtypes or (F32,) * len(shapes)
    steps: list[Step] = [list(map(gradient, shapes, types)) for _ in range(3)]
    steps[1][0] = steps[1][2] = None
    return [*steps, [None] * len(shapes)]


# The first of each rule is enough where a thread comes after the other, and Adafactor's rate.
OF_RULES = {inner(new_optimizer(f, parameters()))._rule: f for f in reversed(ON_DEVICES)}
SOME = [*OF_RULES.values(), "LARS-clipped", "AdaFactor-rate"]
STATES = {F32: None, F64: None, BF16: F32, F16: None}


@pytest.mark.parametrize(
    ("form", "dtype"),
    [(form, F32) for form in SOME]
    if KIND == SIMULATOR
    else sized(in_turn(ON_DEVICES), [*product(ON_DEVICES, STORAGE_DTYPES)]),
    ids=str,
)
def test_optimizers(form: str, dtype: Any) -> None:
    """With decay; rate and loss scale are numbers on the device, which change there."""
    shapes = WITH_ROWS if is_row_wise(form) else SHAPES
    arguments, options = arguments_of(form), decayed_and_scaled(form)
    if STATES[dtype] and "state_dtype" in arguments:
        options["state_dtype"] = STATES[dtype]
    numbers = {"loss_scale": 8.0} if "loss_scale" in options else {}
    if arguments["learning_rate"].takes == "rate" or form == "AdaFactor-rate":
        numbers["learning_rate"] = 0.125
    if form == "AdaFactor-rate":
        options["scale_parameter"] = False  # as an array for a rate makes it
    there = {name: on_device(np.array(number, F32)) for name, number in numbers.items()}
    variables = [positive(shape, dtype) for shape in shapes]
    on_gpu = new_optimizer(form, on_device(variables), **{**options, **there})
    on_cpu = new_optimizer(form, variables, **{**options, **numbers})
    try:
        for k, step in enumerate(dense_steps(shapes, (dtype,) * len(shapes))):
            if k == 2:
                for name, array in there.items():
                    put(array, numbers[name] / 2)
                if "loss_scale" in numbers:
                    on_cpu.loss_scale = 4.0
                if "learning_rate" in numbers:
                    inner(on_cpu).learning_rate.data = np.array(0.0625, F32)
            taken = on_gpu(tuple(on_device(step)))
            if COMPUTES:
                assert on_cpu(tuple(step)) == taken
    except RuntimeError as error:  # what has no kernels may say so; it may not be wrong
        if "CUDA" not in str(error):
            raise
        pytest.skip(str(error))
    assert_equal_runs(on_gpu, on_cpu)


def centralized(params: Any, decay: float = 0.0) -> list[dict[str, Any]]:
    return [
        {"params": params[:3], "grad_centralization": True, "weight_decay": decay},
        {"params": params[3:], "weight_decay": decay},
    ]


OPTIMIZERS: tuple[Make, ...] = (
    lambda p: nn.Adam(
        [{"params": p[:1], "lr": 0.3, "weight_decay": 0.2}, {"params": p[1:]}],
        [0.1, 0.05, 0.01, 0.1]),
    lambda p: nn.SGD(p, 0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    lambda p: nn.LARS(nn.Momentum(p, 0.1, 0.9, weight_decay=0.1, loss_scale=2.0), coefficient=0.1),
    lambda p: nn.LARS(nn.Lamb(p, 0.1), use_clip=True, lars_filter=lambda q: q.ndim > 0),
    # It measures gradients as they were before they were centralized.
    lambda p: nn.LARS(nn.SGD(centralized(p, 0.3), 0.1, loss_scale=2.0), coefficient=0.1),
    lambda p: nn.AdamOffload(p, 0.1),
    lambda p: nn.Adam(p, 0.1, weight_decay=0.1, loss_scale=2.0, clipvalue=0.25),
    lambda p: nn.AdamWeightDecay(p, 0.1, weight_decay=0.1, clipvalue=0.25),
    lambda p: nn.AdamOffload(p, 0.1, weight_decay=0.1, loss_scale=2.0, clipnorm=1.0))  # fmt: skip


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_options_of_dense_steps(make: Make) -> None:
    """LARS, groups, schedules, clipping, states on the host."""
    assert_alike(make, [positive(shape) for shape in SHAPES], dense_steps())


OWN_SHAPES: Shapes = ((5, 4), (37,), (1,), (3, 1), (0, 3))
OWN_TYPES = ((F32,) * 5, (F64,) * 5, (BF16, F16, F64, F32, F32))


@pytest.mark.parametrize("dtypes", OWN_TYPES, ids=["F32", "F64", "mixed"])
@pytest.mark.parametrize("of", [*OF_TENSORS, *OF_ROWS])
def test_rules_of_users(of: Any, dtypes: Sequence[Any]) -> None:
    """States of tensors and of rows that a factor gives, and many sums, some of them signed."""
    variables = list(map(positive, OWN_SHAPES, dtypes))
    assert_alike(partial(Own, of=of, weight_decay=0.1), variables, dense_steps(OWN_SHAPES, dtypes))


# Row-sparse gradients

TABLES: Shapes = ((5, 4), (4, 2, 3), (7,), (9, 1), (3, 64), (4, 257))


def row_steps() -> list[Step]:
    """Tables of all widths: duplicates, no rows, lists of parts; none and dense ones beside."""
    table, cube, vector, narrow, wide, wider = TABLES
    parts = [rows([2], cube), rows([2, 0], cube)]
    many = rows(RNG.integers(0, table[0], sized(3, 200)), table)
    return [
        [rows([1, 3, 1], table), gradient(cube), gradient(vector), rows([8, 0], narrow),
         rows([], wide), None],
        [rows([], table), None, None, None, rows([2, 2], wide), rows([3, 0, 3, 3], wider)],
        [many, parts, None, rows([5], narrow), None, rows([1], wider)],
        [gradient(table), gradient(cube), gradient(vector), rows([], narrow), gradient(wide), None],
    ]  # fmt: skip


ROW_OPTIMIZERS: tuple[Make, ...] = (
    lambda p: nn.Adam(p, 0.1, weight_decay=0.1, loss_scale=2.0),
    lambda p: nn.Adam(p, 0.1, use_lazy=True, use_locking=True),
    lambda p: nn.LazyAdam(
        [{"params": p[:1], "lr": 0.3}, {"params": p[1:], "weight_decay": 0.2}], 0.1),
    lambda p: nn.FTRL(p, learning_rate=0.1),
    lambda p: nn.ProximalAdagrad(p, learning_rate=0.1, sparse_update="dense_equivalent"),
    lambda p: nn.Momentum(p, 0.1, 0.9, sparse_update="lazy"),
    lambda p: nn.AdamOffload(p, 0.1, sparse_update="lazy"),
    lambda p: nn.AdamOffload(p, 0.1, weight_decay=0.1, sparse_update="lazy", clipnorm=1.0),
    lambda p: nn.Adam(p, 0.1, weight_decay=0.1, loss_scale=2.0, clipvalue=0.25),
    lambda p: nn.Momentum(centralized(p), 0.1, 0.9, sparse_update="lazy"),
    lambda p: nn.Momentum(centralized(p, 0.3), 0.1, 0.9, loss_scale=2.0, sparse_update="lazy"),
    lambda p: nn.Adam(centralized(p, 0.3), 0.1, loss_scale=2.0),
    lambda p: nn.LazyAdam(centralized(p, 0.3), 0.1, use_locking=True),
    lambda p: nn.AdamOffload(centralized(p, 0.3), 0.1, sparse_update="lazy"))  # fmt: skip
ROW_WISE: tuple[Make, ...] = (
    lambda p: nn.RowWiseAdagrad(p, accum=0.1, learning_rate=0.1, weight_decay=0.1, loss_scale=2.0),
    lambda p: nn.RowWiseAdam(
        [{"params": p[:1], "lr": 0.3, "weight_decay": 0.2}, {"params": p[1:]}], 0.1),
    lambda p: nn.RowWiseAdagrad(
        p, learning_rate=0.1, weight_decay=0.1, decoupled_weight_decay=True,
        sparse_update="dense_equivalent"),
    lambda p: nn.RowWiseAdam(p, 0.1, weight_decay=0.1, sparse_update="dense_equivalent"),
    *(partial(Own, of=of, sparse_update="lazy") for of in OF_ROWS),
    *(partial(Own, of=of, sparse_update="dense_equivalent") for of in OF_ROWS))  # fmt: skip


@pytest.mark.parametrize("make", [*ROW_OPTIMIZERS, *ROW_WISE])
def test_options_of_row_steps(make: Make) -> None:
    """Lazy and dense-equivalent steps on several tables, with duplicates and without rows."""
    assert_alike(make, list(map(positive, TABLES)), row_steps())


@pytest.mark.parametrize(
    "make", [lambda p: nn.LazyAdam(p, 0.1), *ROW_WISE, *(partial(Own, of=of) for of in OF_TENSORS)]
)
def test_steps_on_the_host(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """States on the host, parameters on the device: what is measured is not cut."""
    monkeypatch.setattr(offload, "CHUNK", 6)
    shapes = TABLES[:4]
    steps = dense_steps(shapes)
    if make(list(map(positive, shapes)))._rule not in [rule for rule, _ in OF_TENSORS]:
        steps += [step[:4] for step in row_steps()]
    assert_alike(make, list(map(positive, shapes)), steps, target="CPU")


TAKING_ROWS = [form for form, (name, _) in FORMS.items() if BY_NAME[name].takes_rows]


@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
@pytest.mark.parametrize("form", sized(TAKING_ROWS[::5], TAKING_ROWS) if COMPUTES else TAKING_ROWS)
def test_row_optimizers(form: str, how: str) -> None:
    if (form, how) == ("Adam-lazy", "dense_equivalent"):
        pytest.skip("it has no such setting")
    options = {**decayed_and_scaled(form), "sparse_update": how}
    make = partial(new_optimizer, form, **options)
    assert_alike(make, list(map(positive, TABLES)), row_steps())


# Widths of no, one and several tiles; an empty list; one row; hot rows; rows that are not aligned.
WIDTHS: Shapes = ((5, 1), (7, 33), (1, 8), (6, 16), (9,), (4, 3, 5))
COUNTS = sized((7, 12, 5, 0, 5, 12), (20, 40, 5, 0, 12, 30))
ROW_TYPES = [(F32, F32), (F32, F16), (F64, F32), (F16, F16), (BF16, BF16)]


@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
@pytest.mark.parametrize(("dtype", "of_gradient"), ROW_TYPES, ids=str)
def test_many_tables_of_mixed_kinds(dtype: Any, of_gradient: Any, how: str) -> None:
    """Storage types of gradients and of tables; duplicates; both sizes of indices."""
    steps = []
    for step in range(2):
        given = []
        for k, (shape, count) in enumerate(zip(WIDTHS, COUNTS, strict=True)):
            is_hot = k == 5 and step and of_gradient == F32
            indices = RNG.integers(0, shape[0], HOT + 90 if is_hot else count)
            indices[: HOT + 40 if is_hot else 0] = 3
            found = rows(indices, shape, of_gradient)
            narrow = found.indices.astype(np.int32 if k % 2 else np.int64)
            given.append(nn.RowTensor(narrow, found.values, shape))
        steps.append(given)
    tables = [positive(shape, dtype) for shape in WIDTHS]
    assert_alike(partial(nn.Adam, learning_rate=0.05, eps=0.01, sparse_update=how), tables, steps)


@pytest.mark.parametrize("make", [ROW_WISE[0], ROW_WISE[3]])
def test_hot_rows(make: Make) -> None:
    """Rows with so many occurrences that they are measured after sums range by range."""
    indices = np.arange(HOT + 40) % 64 // 63 * 2
    for hot in ([1] * (HOT + 30) + [0, 2], indices.tolist()):
        assert_alike(make, [positive((3, 5))], [[rows(hot, (3, 5))]])


@pytest.mark.parametrize("name", ["LazyAdam", "RowWiseAdagrad", "RowWiseAdam"])
def test_threads_that_have_several_keys(name: str) -> None:
    """So many occurrences that a thread goes from row to row, and its block with it."""
    for n, d, b in sized(((24, 8, 24), (9, 21, 61)), ((500, 256, 200_000), (300_000, 24, 200_000))):
        assert b > GEOMETRY.many or not COMPUTES
        steps = [[rows(RNG.permutation(b) % n, (n, d))] for _ in range(2)]
        assert_alike(partial(getattr(nn, name), learning_rate=0.1), [positive((n, d))], steps)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("narrow", [None, 0, 2])
def test_lists_of_rows(dtype: Any, narrow: int | None) -> None:
    """A list of row-sparse gradients is their concatenation, of either size of indices."""
    parts = [rows(indices, (5, 3), dtype) for indices in ([4, 1], [], [1])]
    if narrow is not None:
        part = parts[narrow]
        parts[narrow] = nn.RowTensor(part.indices.astype(np.int32), part.values, (5, 3))
    make = partial(nn.LazyAdam, learning_rate=0.1)
    assert_alike(make, [positive((5, 3), dtype)], [[parts], [parts]])


def test_shared_launches() -> None:
    """The bits of a row do not depend on what else is in its launch, nor on duplicates' places."""
    narrow, wide = positive((4, 6)), positive((2, 30))
    of_narrow, of_wide = rows([1, 3, 1], (4, 6)), rows([0, 1], (2, 30))
    found = []
    for others, step in (((), [of_narrow]), ((wide,), [of_narrow, of_wide])):
        opt = ROW_WISE[0](on_device([narrow, *others]))
        opt(tuple(on_device(step)))
        found.append([opt.parameters[0].asnumpy(), on_host(opt.accum[0])])
    assert_same(*found)


TYPED: tuple[Make, ...] = (
    *(partial(nn.Adam, learning_rate=0.1, **options)
      for options in ({}, {"state_dtype": np.float32, "loss_scale": 2.0})),
    partial(nn.LazyAdam, learning_rate=0.1), *ROW_WISE[:2],
    partial(nn.RowWiseAdam, learning_rate=0.1, state_dtype=np.float32),
    lambda p: nn.LazyAdam(centralized(p, 0.3), 0.1, use_locking=True),
    lambda p: nn.Adam(kept(p), 0.1, weight_decay=0.1, sparse_update="lazy"))  # fmt: skip


def kept(params: Any) -> list[dict[str, Any]]:
    """Beside a master, a remainder, nothing, and a master."""
    ways = "master", "kahan", "nearest", "master"
    return [{"params": [p], "rounding": way} for p, way in zip(params, ways, strict=True)]


@pytest.mark.parametrize("make", TYPED)
def test_several_dtypes(make: Make) -> None:
    """Every storage type in one optimizer, gradients and states of others; no rows."""
    shapes = ((4, 24), (5, 3), (3, 16), (6,))
    gradients = (*zip(shapes, (F16, BF16, F32, BF16), strict=True),)
    sparse = [rows([1, 2, 1], *own) for own in gradients[:3]]
    dense = [gradient(*own) for own in gradients]
    steps = [
        dense, [*sparse, None], [None, rows([4], *gradients[1]), rows([], *gradients[2]), None],
    ]  # fmt: skip
    assert_alike(make, list(map(positive, shapes, (F16, BF16, F64, BF16))), steps)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_copies_beside_parameters(dtype: Any) -> None:
    w, copied = on_device(positive((5, 33))), on_device(np.zeros((5, 33), dtype))
    opt = nn.Adam([{"params": [w], "copies": [copied]}], 0.1, sparse_update="lazy")
    for step in (gradient((5, 33)), rows([1, 3, 1, 0, 2, 4], (5, 33))):
        opt((on_device(step),))
        if COMPUTES:
            assert_same(copied, opt.parameters[0].asnumpy().astype(dtype))
    assert opt.copies == (copied,)


# Many tiles, rows that are aligned and not, tall, wide and low matrices, batches of small ones.
MATRICES = (
    (2_048, 1_024), (1_003, 777), (150_001, 12), (3, 70_001), (1, 9_000), (9_000, 1),
    (70, 30, 3, 3), (5, 130, 260))  # fmt: skip


ADAFACTOR = partial(nn.AdaFactor, weight_decay=0.1, clip_threshold=0.7)
OF_MATRICES = (
    *(partial(ADAFACTOR, beta1=beta1) for beta1 in (None, 0.9)),
    *(partial(new_optimizer, form) for form in ("Adam", "Lamb", "Lamb-clipped")),
)


@pytest.mark.parametrize("make", OF_MATRICES)
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@only(GPU, reason="of small matrices there are other tests, and blocks end in one order")
def test_matrices(dtype: Any, make: Make) -> None:
    """Near the CPU, and the same bits in every run."""
    variables = [positive(shape, dtype) for shape in MATRICES]
    host, *opts = make([w.copy() for w in variables]), *(make(on_device(variables)) for _ in "ab")
    for _ in range(3):
        step = [gradient(shape, dtype) for shape in MATRICES]
        host(list(step))
        for opt in opts:
            opt(on_device(step))
    assert_equal_runs(opts[0], host)
    assert_equal_runs(opts[0], opts[1], assert_same)


# nn.mxnet

Weights = tuple[tuple[tuple[int, ...], Any], ...]
WEIGHTS: Weights = (((5, 3), F32), ((7,), F32), ((4, 2), F32), ((), F32), ((0, 3), F32))
MIXED: Weights = (((5, 3), BF16), ((7,), F16), ((4, 2), F64), ((3,), F32))


def steps_of(weights: Weights) -> list[list[Any]]:
    """Dense and row-sparse gradients: duplicates, no rows, parts, None."""
    (first, d0), (_, d1), (third, d2) = weights[:3]
    parts = [rows([1, 3], first, d0), rows([1], first, d0)]
    rest = [None] * (len(weights) - 3)
    return [
        [gradient(shape, dtype) for shape, dtype in weights],
        [rows([4, 1, 4], first, d0), gradient((7,), d1), rows([], third, d2), *rest],
        [parts, None, rows([3, 3], third, d2), *rest],
    ]


def flat(state: Any) -> list[Any]:
    """The arrays of a state."""
    return [a for part in state for a in flat(part)] if isinstance(state, tuple) else [state]


def compare_updaters(
    make: Callable[[], Any], arrays: list[np.ndarray], steps: list[list[Any]], data: Any = None
) -> tuple[Any, list[Any]]:
    """Some steps on device and host, from saved states on: the same weights, states, counts."""
    made = []
    for there in (copy.deepcopy, on_device):
        updater = mx.get_updater(make())
        if data:
            updater.set_states(data)
        own = there(arrays)
        for step in steps:
            updater(list(range(len(own))), there(step), own)
        assert updater.get_states()  # those of host and device can be written
        made.append((updater, own))
    (host, expected), (found, ours) = made
    assert_close(ours, expected)
    for index, weight in enumerate(ours):
        assert_close(found.states[index], host.states[index], f"state of {index}")
        for state in flat(found.states[index]):
            assert data or type(state) is type(weight) or state.dtype == BF16
    assert found.optimizer._index_update_count == host.optimizer._index_update_count
    assert found.optimizer.num_update == host.optimizer.num_update
    fusestep.synchronize()
    return found, ours


CONDITIONS = {"wd": 0.3, "rescale_grad": 0.7, "clip_gradient": 0.4}


class Half(mx.Adam):
    """An optimizer with a step of its own, which does not know of master copies."""

    def step(self, indices: Any, weights: Any, grads: Any, states: Any) -> None:
        """The rate is halved."""
        self.lr *= 0.5
        super().step(indices, weights, grads, states)


UPDATERS: tuple[Callable[[], Any], ...] = (
    lambda: mx.Adam(0.1, **CONDITIONS),
    lambda: mx.Adam(
        0.1, lazy_update=True, lr_scheduler=mx.lr_scheduler.FactorScheduler(2, 0.5), **CONDITIONS),
    lambda: mx.Adam(0.1, compat="1.9", **CONDITIONS),
    lambda: mx.Adam(0.1, compat="1.9", aggregate_num=0),
    lambda: mx.Adam(0.1, use_fused_step=False, **CONDITIONS),
    lambda: mx.AdamW(0.1, aggregate_num=2, **CONDITIONS),
    lambda: mx.AdamW(0.1, use_fused_step=False, correct_bias=False, wd=0.2))  # fmt: skip
# Master copies on the device, written in the pass of their weights or by themselves.
OF_MASTERS: tuple[Callable[[], Any], ...] = (
    lambda: mx.Adam(0.1), lambda: mx.Adam(0.1, multi_precision=True, **CONDITIONS),
    lambda: mx.Adam(0.1, multi_precision=True, lazy_update=True),
    lambda: mx.AdamW(0.1, multi_precision=True, wd=0.3),
    lambda: Half(0.1, multi_precision=True, use_fused_step=False, aggregate_num=np.inf),
)  # fmt: skip


@pytest.mark.parametrize(
    ("make", "weights"), [*product(UPDATERS, [WEIGHTS]), *product(OF_MASTERS, [MIXED])]
)
def test_updaters(make: Callable[[], Any], weights: Weights) -> None:
    """Each optimizer, form and version; the scheduler is asked as on the host."""
    compare_updaters(make, [positive(*weight) for weight in weights], steps_of(weights))


def test_updated_parameters() -> None:
    """A `Parameter` is its array, wherever that was bound to."""
    p, g = nn.Parameter(on_device(positive((5, 3))), "w"), on_device(gradient((5, 3)))
    opt, w = mx.Adam(0.1), p.asnumpy()
    state, expected = opt.create_state(0, p), mx.Adam(0.1)
    of_host = expected.create_state(0, w)
    for _ in range(2):
        opt.update(0, p, g, state)
        expected.update(0, w, on_host(g), of_host)
        p.data = on_device(on_host(p.data))
        g = on_device(gradient((5, 3)))
    assert_close(p.asnumpy(), w)
    for array in (p.data, *state):  # the memory under an array can be exchanged too
        opt.update(0, p.data, g, state)
        expected.update(0, w, on_host(g), of_host)
        exchange(array)
    assert_close(on_host(p.data), w)


def test_states_of_updaters() -> None:
    """States are copied to the host, and taken over on either side; steps go on alike."""
    make, steps = partial(mx.Adam, 0.1, multi_precision=True, lazy_update=True), steps_of(MIXED)
    first, weights = compare_updaters(make, [positive(*weight) for weight in MIXED], steps)
    step = [*steps[1][:3], gradient((3,))]
    arrays, data = [on_host(w) for w in weights], first.get_states()
    second, others = compare_updaters(make, arrays, [step, step], data)
    for _ in range(2):
        first(list(range(len(MIXED))), on_device(step), weights)
    assert_same(others, weights)
    assert_same([*second.states.values()], [*first.states.values()])


def test_updater_errors() -> None:
    """A bad index writes nothing, of no weight of the call; its counts stay, and steps go on."""
    shapes = (((5, 3), F32), ((4, 2), F64), ((7,), F32))
    weights = on_device([positive(*weight) for weight in shapes])
    for lazy in (True, False):
        updater = mx.get_updater(mx.Adam(0.1, lazy_update=lazy, param_idx2name={1: "table"}))
        updater([0, 1, 2], on_device([gradient(*weight) for weight in shapes]), weights)
        arrays = [a for index in range(3) for a in (weights[index], *updater.states[index])]
        good, bad = rows([1, 2], (5, 3)), rows([0, 4], (4, 2), F64)
        text = "Adam: gradient of 'table': indices[1] is out of range"
        with told(IndexError, text, *arrays, by=updater.get_states):
            updater([0, 1, 2], on_device([good, bad, gradient((7,))]), weights)
        assert updater.optimizer._index_update_count == {0: 2, 1: 2, 2: 2}
        with told(IndexError, "Adam: gradient of '0': indices[0] is out of range", *arrays):
            updater(0, on_device(rows([-1], (5, 3))), weights[0])
        updater(0, on_device(good), weights[0])
        fusestep.synchronize()
        assert updater.optimizer.num_update == 4
    host, g = positive((5, 3)), on_device(gradient((5, 3)))
    opt, on_cpu = mx.Adam(), mx.Adam()
    state, of_host = opt.create_state(0, weights[0]), on_cpu.create_state(0, host)
    arrays = [weights[0], weights[2], g, *state]
    elsewhere, shared, w = "lives elsewhere than", "shares memory with", weights[0]
    for text, arguments in (
        (elsewhere, (0, w, on_host(g), state)), (elsewhere, (0, w, rows([1], (5, 3)), state)),
        (elsewhere, (0, w, g, of_host)), (elsewhere, (0, host, g, of_host)),
        (elsewhere, (0, host, on_host(g), state)),
        (elsewhere, ([0, 1], [w, host], [g, on_host(g)], [state, of_host])),
        (shared, (0, w, w, state)),
        (shared, ([0, 1], [w, w], [g, g], [state, opt.create_state(1, g)])),
        ("has a wrong shape", (0, w, on_device(gradient((3, 5))), state)),
    ):  # fmt: skip
        with refused(ValueError, text, *arrays):
            opt.update(*arguments)
    assert opt.num_update == 0 and not opt._index_update_count
    opt.update([0], [weights[0]], [None], [state])
    assert opt.num_update == 0
