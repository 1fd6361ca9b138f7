"""State of all optimizers: resumed, copied, counted, refused; rebinding, steps that are skipped."""

import copy
import operator
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adam_family import Descent
from fusestep import nn
from fusestep.kernels.cpu.headers import arrays as headers
from helpers import BF16, arrays_of, assert_same_bits, refused, unchanged

from optimizers import (  # isort: skip
    BY_NAME, FIXED_RATE, FORMS, OWN_RATE, assert_same_run, decayed_and_scaled, gradients, inner,
    make, parameters, rows)  # fmt: skip

EACH_FORM = pytest.mark.parametrize("form", FORMS)
SHAPES = {"a": (4, 3), "b": (2,), "c": (), "d.weight": (2, 3, 5)}
# Which parameters have a gradient: so their counts of updates differ.
PATTERN = ("abcd", "acd", "acd", "bcd", "abd", "abcd")


def step(opt: Any, number: int) -> None:
    """Step `number` of the pattern."""
    given = gradients(opt.parameters, number)
    present = [str(p.name)[0] in PATTERN[number] for p in opt.parameters]
    opt([g if there else None for g, there in zip(given, present, strict=True)])


def steps(opt: Any, numbers: range) -> Any:
    for number in numbers:
        step(opt, number)
    return opt


# Resuming


def by_state_dict(opt: Any, fresh: Callable[..., Any], *_: Any) -> Any:
    again = fresh(copy.deepcopy(opt.parameters), 0.0)
    again.load_state_dict(opt.state_dict())
    return again


def by_checkpoint(opt: Any, fresh: Callable[..., Any], folder: Path) -> Any:
    nn.save_checkpoint(opt, folder / "optimizer")
    nn.save_checkpoint(opt.parameters, folder / "parameters")
    loaded = nn.load_checkpoint(folder / "parameters")
    again = fresh([nn.Parameter(loaded[name], name) for name in SHAPES], 0.0)
    again.load_state_dict(nn.load_checkpoint(folder / "optimizer"))
    return again


WAYS: dict[str, Callable[..., Any]] = {
    "state_dict": by_state_dict, "checkpoint": by_checkpoint,
    "pickle": lambda opt, *_: pickle.loads(pickle.dumps(opt)),
    "deepcopy": lambda opt, *_: copy.deepcopy(opt),
}  # fmt: skip


def in_groups(form: str, params: Any, rate: float = 0.05, **options: Any) -> Any:
    """One of two groups has a list of rates, if it may; the other one a decay of its own."""
    has_one = form in FIXED_RATE + OWN_RATE or BY_NAME[FORMS[form][0]].together
    rates = {} if has_one else {"lr": [rate * (1 + k) for k in range(6)]}
    groups = [{"params": params[:2], **rates}, {"params": params[2:], "weight_decay": 0.3}]
    return make(form, groups, **options)


RESUMED: list[tuple[str, str, Any, dict[str, Any]]] = [
    *((form, way, np.float32, decayed_and_scaled(form)) for form, way in product(FORMS, WAYS)),
    *(
        (form, "checkpoint", *other)
        for form in ("Momentum", "RMSProp-both", "FTRL", "Lamb", "AdaFactor")
        for other in (
            (BF16, {}), (np.float32, {"state_dtype": np.float16}),
            (np.float32, {"use_locking": True, "skip_nonfinite": True}))),
]  # fmt: skip


@pytest.mark.parametrize(("form", "way", "dtype", "options"), RESUMED)
def test_resumes_bit_for_bit(form: str, way: str, dtype, options: dict[str, Any], tmp_path) -> None:
    """Of a state that is loaded the rates count, too."""
    fresh = partial(in_groups, form, **options)
    whole, half = (fresh(parameters(SHAPES, dtype, form)) for _ in range(2))
    steps(whole, range(6))
    steps(half, range(3))
    with unchanged(half):
        again = WAYS[way](half, fresh, tmp_path)
        steps(again, range(3, 6))
    assert_same_run(again, whole)


def test_counts_of_skipped_parameters_matter() -> None:
    """So that the pattern of this file shows a count that is lost."""
    opt = steps(make("Lamb", parameters(SHAPES)), range(3))
    again = make("Lamb", copy.deepcopy(opt.parameters))
    state = opt.state_dict()
    assert state["step.b"].tolist() == [1]
    again.load_state_dict({n: a for n, a in state.items() if not n.startswith("step.")})
    for one in (opt, again):
        step(one, 5)
    assert not np.array_equal(opt.parameters[1].data, again.parameters[1].data)
    assert_same_bits(opt.parameters[0].data, again.parameters[0].data)


# States that do not fit


@pytest.fixture
def trained() -> Callable[[str], Any]:
    return lambda form: steps(make(form, parameters(SHAPES, form=form)), range(2))


def derived(name: str) -> bool:
    """Whether an entry only repeats options, so that it may be missing."""
    return name in ("momentum", "beta1_power", "beta2_power", "afactor_step")


Mismatch = tuple[Any, Any, str]


def mismatches(state: dict[str, np.ndarray]) -> Iterator[Mismatch]:
    """The state with one entry changed, in all ways; what is raised, and its text."""
    yield {**state, "unheard.of": np.ones(2, np.float32)}, KeyError, r"unknown \['unheard.of'\]"
    yield {}, KeyError, "does not fit this optimizer"
    yield list(state), TypeError, "state"
    for name, array in state.items():
        # No value is read of an array that is so large that it could not be one.
        far_too_large = np.broadcast_to(np.array(-1, array.dtype), (1 << 40,))
        text = f"{name!r} has a wrong shape: .*got \\(1099511627776,\\)"
        yield {**state, name: far_too_large}, ValueError, text
        for kind in ("two", *(None, [1]) * name.startswith("step.")):
            yield {**state, name: kind}, (TypeError, ValueError), f"state {name!r}"
        if derived(name):
            yield {**state, name: array + 0.125}, ValueError, f"'{name}' is of other options"
            continue
        yield {n: a for n, a in state.items() if n != name}, KeyError, rf"missing \['{name}'\]"
        other = np.float64 if array.dtype != np.float64 else np.float16
        yield {**state, name: array.astype(other)}, TypeError, f"'{name}' has a wrong dtype"
        turned = array.reshape(array.shape[::-1])
        for wrong in (np.stack([array, array]), *[turned] * (turned.shape != array.shape)):
            yield {**state, name: wrong}, ValueError, f"'{name}' has a wrong shape"
        for value, text in BAD_VALUES.get(name.partition(".")[0], ()):
            wrong = np.full_like(array, value)
            yield {**state, name: wrong}, ValueError, f"'{name}' is out of range{text}"


_COUNTS = ": expected at least 0, at most 2147483647, got {}"
BAD_VALUES: dict[str, list[tuple[float, str]]] = {
    "learning_rate": [(x, "") for x in (np.nan, -0.5, np.inf, 1e39)],
    "step": [(x, _COUNTS.format(x)) for x in (-1, 2**31, 2**63 - 1)],  # they would overflow
    "global_step": [(-2, ": expected at least 0")],
}


@EACH_FORM
def test_state_that_does_not_fit(form: str, trained: Callable[[str], Any]) -> None:
    opt, other = trained(form), make(form, parameters(SHAPES, form=form))
    for state, error, text in mismatches(opt.state_dict()):
        with refused(error, text, other):
            other.load_state_dict(state)
    other.load_state_dict(opt.state_dict())


OTHER_OPTIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("Momentum", "Momentum", {"momentum": 0.8}),
    ("SGD-momentum", "SGD-momentum", {"momentum": 0.8}), ("SGD", "SGD-momentum", {}),
    ("SGD-momentum", "SGD", {}), ("LARS", "LARS", {"momentum": 0.8}),
    ("Adam", "Adam", {"beta1": 0.8}), ("LazyAdam", "LazyAdam", {"beta2": 0.99}),
    ("Adam", "Adam-amsgrad", {}), ("Adam-amsgrad", "Adam", {}), ("RMSProp", "RMSProp-centered", {}),
    ("RMSProp-centered", "RMSProp", {}), ("RMSProp", "RMSProp-momentum", {}),
    ("AdaFactor", "AdaFactor-compressed", {}), ("AdaFactor-plain", "AdaFactor", {}),
    ("AdaFactor-rate", "AdaFactor", {}), ("Adagrad", "FTRL", {}), ("Lamb", "AdamWeightDecay", {}),
]  # fmt: skip


@pytest.mark.parametrize(("source", "form", "options"), OTHER_OPTIONS)
def test_state_of_other_options(
    source: str, form: str, options: dict[str, Any], trained: Callable[[str], Any]
) -> None:
    opt = make(form, parameters(SHAPES, form=form), **options)
    with refused((KeyError, TypeError, ValueError), "state", opt):  # type: ignore[arg-type]
        opt.load_state_dict(trained(source).state_dict())


# States as MindSpore writes them


def as_mindspore(state: dict[str, np.ndarray], empty: dict[str, np.ndarray]) -> dict[str, Any]:
    """No counts for each parameter, rates in float32, and entries that hold nothing."""
    kept = {n: a for n, a in state.items() if not n.startswith("step.")}
    rates = {n: a.astype(np.float32) for n, a in kept.items() if n.startswith("learning_rate")}
    return {**kept, **rates, **empty}


def each(role: str, value: float, shape: tuple[int, ...] | None = None) -> dict[str, np.ndarray]:
    """One array of each parameter."""
    shapes = {name: own if shape is None else shape for name, own in SHAPES.items()}
    return {f"{role}{name}": np.full(s, value, np.float32) for name, s in shapes.items()}


def of_adafactor(matrices: bool) -> list[str]:
    return [name for name, shape in SHAPES.items() if (len(shape) >= 2) == matrices]


EMPTY_STATES: dict[str, dict[str, np.ndarray]] = {
    "SGD": {**each("accum.", 0.0), **each("stat.", 1.0)},
    "SGD-momentum": each("stat.", 0.0),
    "SGD-nesterov": each("stat.", 0.0),
    "RMSProp": each("moment.", 0.25),
    "RMSProp-centered": each("moment.", 0.25),
    "AdaFactor": {
        f"exp_avg_sq{part}_{name}": np.zeros(1, np.float32)
        for part, names in (
            ("", of_adafactor(True)), ("_row", of_adafactor(False)), ("_col", of_adafactor(False)))
        for name in names},
}  # fmt: skip


@EACH_FORM
def test_state_as_mindspore_writes_it(form: str) -> None:
    """Every parameter has had as many updates as there were steps."""
    opt, again = (make(form, parameters(SHAPES, form=form)) for _ in range(2))
    for rate in map(opt.get_lr_parameter, opt.parameters):
        if isinstance(rate, nn.Parameter):
            rate.data[...] = np.float32(rate.data)
    for number in (0, 5):
        opt(gradients(opt.parameters, number))
    for p, q in zip(again.parameters, opt.parameters, strict=True):
        p.data[...] = q.data
    again.load_state_dict(as_mindspore(opt.state_dict(), EMPTY_STATES.get(form, {})))
    for one in (opt, again):
        one(gradients(one.parameters, 7))
    assert_same_run(opt, again)


@pytest.mark.parametrize("form", EMPTY_STATES)
def test_empty_states_of_foreign_parameters_are_refused(form: str) -> None:
    opt = make(form, parameters(SHAPES, form=form))
    name = next(iter(EMPTY_STATES[form]))
    foreign = {**opt.state_dict(), name.rstrip("abcd.weight") + "foreign": np.zeros(1, np.float32)}
    with refused(KeyError, "unknown", opt):
        opt.load_state_dict(foreign)


# Rebinding and shared memory


ROWS = [f for f in FORMS if BY_NAME[FORMS[f][0]].takes_rows]
WITH_AND_WITHOUT_ROWS = pytest.mark.parametrize(
    ("form", "is_sparse"), [*((f, False) for f in FORMS), *((f, True) for f in ROWS)]
)


def stepping(form: str, is_sparse: bool) -> Any:
    """An optimizer that takes row-sparse gradients or none."""
    options = {"sparse_update": "lazy"} if is_sparse else {}
    return make(form, parameters(SHAPES, form=form), **options)


def given_to(opt: Any, number: int, is_sparse: bool) -> list[Any]:
    """Gradients, of which the first is row-sparse or not."""
    given = gradients(opt.parameters, number)
    if is_sparse:
        given[0] = rows(SHAPES["a"], [1, number % 4], seed=number)
    return given


@WITH_AND_WITHOUT_ROWS
def test_updates_follow_a_rebinding(form: str, is_sparse: bool) -> None:
    """They reach the new arrays and never the old ones; states go on."""
    straight, opt = (stepping(form, is_sparse) for _ in range(2))
    for number in range(6):
        old = []
        if number in (1, 4):
            for p in opt.parameters:
                old.append(p.data)
                p.data = p.data.copy()
        given = given_to(opt, number, is_sparse)
        straight(given)
        with unchanged(old):
            opt(given)
    assert_same_run(opt, straight)


@EACH_FORM
def test_shared_memory_is_refused(form: str) -> None:
    pool = np.ones(20, np.float32)
    for one, other in ((pool[:8], pool[7:]), (pool[:4], pool[:4]), (pool, pool[3:4])):
        with refused(ValueError, "shares memory with", pool):
            make(form, [one, other])
    opt = make(form, [pool[:8], pool[8:16]])
    opt([np.ones(8, np.float32)] * 2)
    for array in (pool[4:12], pool[8:16]):
        with refused(ValueError, "shares memory with", opt):
            opt.parameters[0].data = array


@EACH_FORM
def test_rebinding_to_a_state_is_refused(form: str) -> None:
    """A step would read and write both at once."""
    opt = make(form, parameters({"a": (3,), "m": (3, 3)}))
    arrays = [a for a in arrays_of(inner(opt)) if a.shape == (3,) and a.dtype == np.float32]
    own = opt.parameters[0].data
    assert form == "SGD" or len(arrays) > 1
    for array in arrays:
        if array is not own:
            with refused(ValueError, "shares memory with", opt):
                opt.parameters[0].data = array


@EACH_FORM
def test_gradient_in_the_memory_of_a_variable_is_refused(form: str) -> None:
    pool = np.ones(8, np.float32)
    opt = make(form, [pool[:3], pool[3:6]])
    good = [np.ones(3, np.float32)] * 2
    for _ in range(2):  # the second step knows its gradients
        variables = [a for a in arrays_of(inner(opt)) if a.shape == (3,) and a.dtype == np.float32]
        for bad in (*variables, pool[2:5], pool[5:8]):
            with refused(ValueError, "a gradient shares memory with a parameter or state", opt):
                opt([good[0], bad])
        opt(good)


# Steps that are skipped


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@EACH_FORM
def test_skip_nonfinite_skips_whole_steps(form: str, bad: float) -> None:
    """Parameters, states and counters are as if the step had not been tried."""
    opt, plain = (
        make(form, parameters(SHAPES, form=form), skip_nonfinite=True, **decayed_and_scaled(form))
        for _ in range(2)
    )
    for number in range(3):
        for place in range(len(opt.parameters)):
            spoiled = gradients(opt.parameters, number)
            spoiled[place].reshape(-1)[-1] = bad
            with unchanged(opt):
                assert opt(spoiled) == (True,) * len(SHAPES)
        for one in (opt, plain):
            step(one, number)
    assert_same_run(opt, plain)
    assert (inner(opt).skipped_steps, inner(plain).skipped_steps) == (3 * len(SHAPES), 0)


@EACH_FORM
def test_without_skip_nonfinite_a_nan_is_written(form: str) -> None:
    opt = make(form, parameters(SHAPES, form=form))
    spoiled = gradients(opt.parameters, 0)
    spoiled[0][1, 1] = np.nan
    opt(spoiled)
    assert np.isnan(opt.parameters[0].data[1, 1])
    assert inner(opt).skipped_steps == 0
    assert all(np.isfinite(p.data).all() for p in opt.parameters[1:])


# Variables that are made read-only between steps


@pytest.mark.parametrize("usable", [True, False])
@WITH_AND_WITHOUT_ROWS
def test_read_only_since_the_last_step(
    form: str, is_sparse: bool, usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with any parameter or state read-only raises and writes nothing."""
    monkeypatch.setattr(headers, "usable", usable)
    opt = stepping(form, is_sparse)
    given = given_to(opt, 0, is_sparse)
    opt(given)
    for p, states in zip(opt.parameters, inner(opt)._states_of_each(), strict=True):
        for array in (p.data, *states):
            name = f"parameter '{p.name}'" if array is p.data else f"a state of '{p.name}'"
            array.flags.writeable = False
            with refused(ValueError, f"{name} is read-only: expected a writable array", opt):
                opt(given)
            array.flags.writeable = True
            opt(given)


def test_only_what_is_written_must_be_writable() -> None:
    opt = make("Adam", parameters({"a": (4, 3), "b": (2,)}))
    a, b = gradients(opt.parameters, 0)
    opt.parameters[1].data.flags.writeable = False
    opt([a, None])
    with refused(ValueError, "parameter 'b' is read-only", opt):
        opt([None, b])


# Copies


@EACH_FORM
def test_a_state_is_a_copy(form: str, trained: Callable[[str], Any]) -> None:
    """What is saved is nobody's memory, and what was loaded is not either."""
    opt = trained(form)
    source = opt.state_dict()
    opt.load_state_dict(source)
    for state in (source, opt.state_dict()):
        with unchanged(opt):
            for array in state.values():
                array[...] = 7


def test_row_tensor_and_parameter_pickle() -> None:
    gradient = rows((4, 3), [1, 2])
    assert_same_bits(pickle.loads(pickle.dumps(gradient)).to_dense(), gradient.to_dense())
    p = nn.Parameter(np.ones(3), "w")
    again = pickle.loads(pickle.dumps(p))
    assert (again.name, again.requires_grad) == ("w", True)
    assert_same_bits(again.data, p.data)
    assert not np.shares_memory(again.data, p.data)


def test_unpickled_from_read_only_buffers() -> None:
    """Protocol 5 hands over arrays in foreign memory, which must not be written."""
    opt = steps(make("Adam", parameters(SHAPES)), range(1))
    buffers: list[Any] = []
    data = pickle.dumps(opt, protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    kept = [bytes(bytearray(b)) for b in frozen]
    again = pickle.loads(data, buffers=frozen)
    for one in (opt, again):
        steps(one, range(1, 3))
    assert frozen == kept
    assert_same_run(opt, again)


def test_no_state_can_be_cut_off_in_place() -> None:
    """The kernels would write beyond it."""
    opt = steps(make("Adam", parameters(SHAPES)), range(1))
    with pytest.raises(ValueError, match="does not own its data"):
        opt._states["moment1"][0].resize(2, refcheck=False)
    step(opt, 1)


# Counts


def test_global_step_is_copied_when_it_is_assigned() -> None:
    opt = make("Adam", parameters(SHAPES))
    given = np.array([5], np.int32)
    opt.global_step = given
    step(opt, 0)
    assert (given.tolist(), opt.global_step.tolist()) == ([5], [6])
    nn.LARS(opt).global_step = given
    for bad, error in ((3, TypeError), (np.array([3]), TypeError), (-given, ValueError)):
        with pytest.raises(error, match="'global_step'"):
            opt.global_step = bad
    assert opt.global_step.tolist() == [5]


def test_global_step_is_a_number_where_one_is_asked_for() -> None:
    opt = make("Adam", parameters(SHAPES))
    opt.global_step[0] = 3
    for count in (opt.global_step, nn.LARS(opt).global_step, copy.deepcopy(opt).global_step):
        assert (int(count), operator.index(count), [*range(count)]) == (3, 3, [0, 1, 2])
        assert (f"{count}", f"{count:05d}", count.tolist(), count[0]) == ("3", "00003", [3], 3)
        assert count == 3 and type(count == 3) is type(count + 1) is np.ndarray
        assert isinstance(count.sum(), np.integer)
        for kept in (opt.state_dict()["global_step"], pickle.loads(pickle.dumps(count))):
            assert type(kept) is np.ndarray and (kept.tolist(), kept.dtype) == ([3], np.int32)
    opt.global_step += 1
    assert int(opt.global_step) == 4


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("form", ["Adam", "SGD", "custom"])
def test_the_last_step_there_is(form: str, wrapped: bool) -> None:
    """The published count is an int32."""
    w = np.zeros(2, np.float32)
    opt = Descent(0.1, [w]) if form == "custom" else make(form, [w])
    stepped = nn.LARS(opt) if wrapped else opt
    opt.global_step[0] = 2**31 - 2
    stepped((np.ones(2, np.float32),))
    with refused(OverflowError, "global_step is at its end: expected", opt):
        stepped((np.ones(2, np.float32),))
    assert opt.state_dict()["global_step"] == 2**31 - 1
    with refused(ValueError, "'global_step' is out of range: expected at least 0", opt):
        opt.load_state_dict({**opt.state_dict(), "global_step": np.array([-5], np.int32)})
