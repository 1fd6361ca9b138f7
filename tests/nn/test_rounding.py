"""Weights of 16 bits in nn, beside masters or remainders, or rounded at random."""

import pickle
from typing import Any

import numpy as np
import pytest
import fusestep
import reference_random as model
from fusestep import nn
from fusestep.kernels.keeping import key_of, random_scalars
from helpers import BF16, assert_same_arrays, assert_same_bits, more, refused

from optimizers import (  # isort: skip
    BY_NAME, FORMS, ONE_OF_EACH, arguments_of, gradients, inner, make, parameters, rows,
)  # fmt: skip

F16, F32 = np.float16, np.float32
BESIDE = {"master": "master", "kahan": "remainder"}
SEED = 12_345_678_901
EACH_WAY = pytest.mark.parametrize("rounding", BESIDE)
ROUNDED = [form for form in FORMS if "rounding" in arguments_of(form) and FORMS[form][0] != "LARS"]
QUICK = "Adam", "RowWiseAdagrad"
EACH_CASE = pytest.mark.parametrize(("form", "options"), [
    *((f, {}) if f in QUICK else more(f, {}) for f in ROUNDED if f in ONE_OF_EACH),
    # A gradient is clipped by its norm first; LARS measures the whole weight.
    *(("Momentum", {"clipnorm": 0.5}), ("Momentum", {"clipvalue": 0.1}), ("LARS", {})),
    *(("SGD", {"weight_decay": 0.1}), ("Momentum", {"weight_decay": 0.1}), ("Lion", {})),
    *((form, {"sparse_update": "dense_equivalent"}) for form in QUICK),
])  # fmt: skip


def wide_states(form: str) -> dict[str, Any]:
    """The option for states in float32, where there is one."""
    return {"state_dtype": F32} if "state_dtype" in arguments_of(form) else {}


def whole(opt: Any) -> list[np.ndarray]:
    """The numbers that weights and what lies beside them make."""
    if "master" in opt._states:
        return [a.copy() for a in opt._states["master"]]
    if "remainder" not in opt._states:
        return [p.data.astype(F32) for p in opt.parameters]
    every = zip(opt.parameters, opt._states["remainder"], strict=True)
    return [p.data.astype(F32) + a.astype(F32) for p, a in every]


@EACH_CASE
@pytest.mark.parametrize("rounding", [*BESIDE, "stochastic"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
def test_a_step_is_that_of_the_float32_weight(
    form: str, options: dict[str, Any], rounding: str, dtype: Any
) -> None:
    """To the last bit, states too; then both are rounded."""
    sparse = BY_NAME[FORMS[form][0]].takes_rows
    options = {"sparse_update": "lazy", **options} if sparse else options
    params = parameters(dtype=dtype, form=form)
    stepped = make(form, params, rounding=rounding, **wide_states(form), **options)
    ours = inner(stepped)
    if rounding == "stochastic":
        ours.rounding_seed = SEED
    exact = [nn.Parameter(p.data.astype(F32), p.name) for p in params]
    theirs = make(form, exact, **options)
    for step in range(4):
        own = F32 if step == 3 else dtype
        given = gradients(params, step, own)
        if sparse and step % 2:
            given[0] = rows(params[0].shape, [4, 1, 4], step, own)
        wide = [
            nn.RowTensor(g.indices, g.values.astype(F32), g.dense_shape)
            if isinstance(g, nn.RowTensor)
            else g.astype(F32)
            for g in given
        ]
        before = whole(ours)
        for q, x in zip(exact, before, strict=True):
            q.data[...] = x
        stepped(given)
        theirs(wide)
        for k, (p, q, old, new) in enumerate(zip(params, exact, before, whole(ours), strict=True)):
            rounded, moves = q.data.astype(dtype), q.data != old
            if rounding == "stochastic":
                rounded = model.all_rounded(q.data, dtype, SEED, p.name, step + 1)
            else:
                left = q.data if rounding == "master" else q.data - rounded.astype(F32)
                beside = ours._states[BESIDE[rounding]][k]
                assert_same_bits(beside[moves], left.astype(beside.dtype)[moves])
            assert_same_bits(p.data[moves], rounded[moves])
            assert_same_bits(new[~moves], old[~moves])
        expected = theirs.state_dict()
        own = "rounding_seed", BESIDE.get(rounding, "rounding_seed")
        found = {n: a for n, a in ours.state_dict().items() if not n.startswith(own)}
        assert found.keys() == expected.keys()
        for n, a in found.items():  # Prodigy's first weights have the dtype of the weights
            is_first = n.startswith("p0.")
            assert_same_bits(a.astype(F32) if is_first else a, expected[n])


@pytest.mark.parametrize("rounding", [*BESIDE, "stochastic"])
@pytest.mark.parametrize("way", ["state_dict", "pickle", "file"])
def test_resumed_runs_have_the_same_bits(way: str, rounding: str, tmp_path: Any) -> None:
    runs = []
    for stops in (False, True):
        params = parameters(dtype=BF16)
        opt = nn.Adam(params, 0.1, rounding=rounding)
        if rounding == "stochastic":
            opt.rounding_seed = SEED
        for step in range(4):
            if stops and step == 2:
                if way == "pickle":
                    params, opt = pickle.loads(pickle.dumps((params, opt)))
                elif way == "file":
                    nn.save_checkpoint(opt.state_dict(), tmp_path / "x.safetensors")
                    opt = nn.Adam(params, 0.1, rounding=rounding)
                    opt.load_state_dict(nn.load_checkpoint(tmp_path / "x.safetensors"))
                else:
                    saved = opt.state_dict()
                    opt = nn.Adam(params, 0.1, rounding=rounding)
                    opt.load_state_dict(saved)
            opt(gradients(params, step))
        runs.append([p.data for p in params] + [*opt.state_dict().values()])
    assert_same_arrays(*runs)


@EACH_WAY
def test_a_state_without_them_begins_at_the_weight(rounding: str) -> None:
    params = parameters(dtype=BF16)
    before = nn.Adam(params, 0.1, state_dtype=F32)
    before(gradients(params, 0))
    opt = nn.Adam(params, 0.1, rounding=rounding, state_dtype=F32)
    with pytest.warns(UserWarning, match=f"Adam: {BESIDE[rounding]}.table begins") as told:
        opt.load_state_dict(before.state_dict())
    assert len(told) == 1
    assert_same_arrays(whole(opt), [p.data.astype(F32) for p in params])
    with pytest.raises(KeyError, match=r"moment1\.table"):
        opt.load_state_dict({n: a for n, a in before.state_dict().items() if n != "moment1.table"})


@pytest.mark.parametrize("way", ["state", "rebound"])
def test_a_weight_that_was_changed_wins(way: str) -> None:
    params = parameters(dtype=F16)
    opt = nn.SGD(params, 0.1, rounding="master")
    opt(gradients(params, 0))
    masters = whole(opt)
    if way == "state":
        params[0].data[1:3] = 7.0
        opt.load_state_dict(opt.state_dict())
    else:
        changed = params[0].data.copy()
        changed[1:3] = 7.0
        params[0].data = changed
    masters[0][1:3] = 7.0
    none = [np.zeros_like(p.data) for p in params]
    with pytest.warns(UserWarning, match=r"SGD: master\.table begins at the weight") as told:
        opt(none)
    assert len(told) == 1
    assert_same_arrays(whole(opt), masters)


@EACH_WAY
@pytest.mark.parametrize("kind", ["dense", "rows", "LARS"])
def test_what_is_measured_and_decayed_is_the_whole_weight(kind: str, rounding: str) -> None:
    """Centralized gradients with a decay, and LARS, far from the rounded weight."""
    x = np.array([[1.0035, 2.003], [-3.007, 0.5]], F32)
    w, exact = x.astype(BF16), x.copy()
    group = {"grad_centralization": kind != "LARS", "weight_decay": 1.0}
    ours, theirs = (
        nn.SGD([{"params": [p], **group}], 0.1, **more)
        for p, more in ((w, {"rounding": rounding, "state_dtype": F32}), (exact, {}))
    )
    state = ours.state_dict()
    if rounding == "master":
        state["master.parameter_0"] = x
    else:
        left = x - w.astype(F32)
        state["remainder.parameter_0"] = left.astype(BF16)
        exact[...] = w.astype(F32) + state["remainder.parameter_0"].astype(F32)
    ours.load_state_dict(state)
    given: Any = np.full((2, 2), 0.25, F32)
    if kind == "rows":
        given = nn.RowTensor(np.array([1, 1]), given, (2, 2))
    for opt in (ours, theirs):
        (nn.LARS(opt, coefficient=0.01) if kind == "LARS" else opt)((given,))
    np.testing.assert_allclose(whole(ours)[0], exact, rtol=2**-16 if rounding == "kahan" else 1e-6)


def test_a_state_without_a_seed_keeps_the_own_one() -> None:
    """Of a run that rounded to the nearest; no warning, since nothing is lost."""
    before = nn.SGD([np.ones(4, BF16)], 0.1)
    opt = nn.SGD([np.ones(4, BF16)], 0.1, rounding="stochastic")
    opt.rounding_seed = 7
    opt.load_state_dict(before.state_dict())
    assert opt.rounding_seed == 7
    opt.load_state_dict({**opt.state_dict(), "rounding_seed": np.array([9])})
    assert opt.rounding_seed == 9


def test_a_remainder_of_another_weight_begins_anew() -> None:
    """One that fits is kept to the last bit, also in the middle between two weights."""
    w = np.array([1000.0, 3.0, 0.5], BF16)
    opt = nn.SGD([w], 1.0, rounding="kahan")
    opt((np.array([1.5, 2.0**-7, 2.0**-10], BF16),))
    state = opt.state_dict()
    assert state["remainder.parameter_0"].astype(F32).all()
    opt.load_state_dict(state)
    opt((np.zeros(3, BF16),))
    assert_same_bits(opt.state_dict()["remainder.parameter_0"], state["remainder.parameter_0"])
    w[0] = 0.01
    opt.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"SGD: remainder\.parameter_0 begins at the weight"):
        opt((np.zeros(3, BF16),))
    assert w[0] == BF16.type(0.01)
    assert opt.state_dict()["remainder.parameter_0"].astype(F32).tolist()[0] == 0.0
    assert opt.state_dict()["remainder.parameter_0"].astype(F32)[1:].all()


# Rounding at random

NUMBERS = {
    F16: [1.0001, -3.3, 2.0**-14 * 1.0003, 2.0**-20 * 1.3, -(2.0**-26), 65503.0, 0.0],
    BF16: [1.001, -3.3, 1e-39, -1.7e38, 3e-41, 0.0],
}


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
def test_the_mean_of_what_is_rounded(dtype: Any) -> None:
    """A million draws: within five standard deviations of the number, each a neighbour of it."""
    n = 1_000_000
    for number in NUMBERS[dtype]:
        x = F32(number)
        w = np.zeros(n, dtype)
        opt = nn.SGD([w], 1.0, rounding="stochastic")
        opt.rounding_seed = 7
        opt((np.full(n, -x),))
        found, counts = np.unique(w.astype(np.float64), return_counts=True)
        assert len(found) <= 2
        if len(found) == 1:
            assert abs(found[0] - x) < 2.0**-38 or found[0] == x
            continue
        low, high = found
        share = (float(x) - low) / (high - low)
        assert low < x < high
        assert abs(counts[1] / n - share) < 5 * np.sqrt(share * (1 - share) / n) + 2.0**-13


def test_ends_of_the_range() -> None:
    """What is no finite number stays so; what rounding to the nearest keeps finite is finite."""
    last = float(np.array(0x7F7F, np.uint16).view(BF16))
    cases = {
        F16: [(65519.0, 65504.0), (65536.0, np.inf), (-np.inf, -np.inf), (np.nan, np.nan)],
        BF16: [(3.39e38, last), (-3.39e38, -last), (np.inf, np.inf), (np.nan, np.nan)],
    }
    for dtype, pairs in cases.items():
        for x, expected in pairs:
            w = np.zeros(300, dtype)
            nn.SGD([w], 1.0, rounding="stochastic")((np.full(300, -x, F32),))
            np.testing.assert_array_equal(w.astype(F32), F32(expected))


def test_random_bits_are_those_of_seed_name_update_and_place() -> None:
    """Of any cut: threads, other parameters, rows alone; and none repeats the bits of another."""
    n = 300_000  # several threads
    g = np.full(n, 1e-4, F32)

    def run(*names: str, seed: int = 0, updates: int = 1) -> dict[str, np.ndarray]:
        params = [nn.Parameter(np.ones(n, BF16), name) for name in names]
        opt = nn.SGD(params, 1.0, rounding="stochastic")
        opt.rounding_seed = seed
        for _ in range(updates):
            opt([g] * len(names))
        return {p.name: p.data for p in params}

    both = run("a", "b")
    assert_same_bits(run("b")["b"], both["b"])
    try:
        fusestep.set_num_threads(1)
        assert_same_bits(run("a")["a"], both["a"])
    finally:
        fusestep.set_num_threads(None)
    others = [both["a"], both["b"], run("a", seed=1)["a"], run("a", updates=2)["a"]]
    others[3] = others[3] != others[0]
    moved = [other != 1 for other in others[:3]] + [others[3]]
    for i in range(4):
        for j in range(i):
            found = np.corrcoef(moved[i], moved[j])[0, 1]
            assert abs(found) < 5 / np.sqrt(n)
    # Neighbours, and elements a power of two apart, are independent too.
    for step in (1, 2, 64, 4096):
        found = np.corrcoef(moved[0][step:], moved[0][:-step])[0, 1]
        assert abs(found) < 5 / np.sqrt(n)


def test_a_part_draws_the_bits_of_the_whole() -> None:
    """By the place of its first element, across the end of 32 bits."""
    keys = np.array([key_of("a")], np.uint64)
    for begin in (0, 5, (1 << 32) - 2, 3 << 32):
        low, high, *_ = (int(x) for x in random_scalars(3, keys, 1, begin)[0])
        whole_low, whole_high, *_ = (int(x) for x in random_scalars(3, keys, 1, 0)[0])
        first, whole_first = low | high << 16, whole_low | whole_high << 16
        assert first == (whole_first + begin) % (1 << 32)


def test_seeds() -> None:
    opt = nn.Adam(parameters(dtype=BF16), rounding="stochastic")
    assert opt.rounding_seed == 0
    for wrong in (1.0, "1", None, True):
        with pytest.raises(
            TypeError, match="Adam: rounding_seed has a wrong type: expected an int"
        ):
            opt.rounding_seed = wrong
    for wrong in (-1, 1 << 63):
        with pytest.raises(ValueError, match="Adam: rounding_seed is out of range"):
            opt.rounding_seed = wrong
    opt.rounding_seed = (1 << 63) - 1
    assert opt.state_dict()["rounding_seed"].tolist() == [(1 << 63) - 1]
    other = nn.Adam(parameters())
    assert "rounding_seed" not in other.state_dict()
    with pytest.raises(ValueError, match="Adam: rounding_seed is of no use"):
        other.rounding_seed = 1


@pytest.mark.parametrize("form", ["SGD", "Adam", more("Momentum"), more("RowWiseAdagrad")])
@pytest.mark.parametrize("rounding", ["nearest", more("master"), "kahan", more("stochastic")])
def test_the_share_that_is_rounded_away(form: str, rounding: str) -> None:
    """That of a step of the whole weight in float32; nothing has changed after it was found."""
    params = parameters(dtype=BF16, form=form)
    opt = make(form, params, rounding=rounding, **wide_states(form))
    opt(gradients(params, 0))
    small = [(g.astype(F32) * F32(1e-3)).astype(BF16) for g in gradients(params, 1)]
    small[1][2:] = 0
    wholes = whole(opt)
    exact = [nn.Parameter(x.copy(), p.name) for x, p in zip(wholes, params, strict=True)]
    theirs = make(form, exact)
    names = theirs.state_dict().keys()
    theirs.load_state_dict({n: a for n, a in opt.state_dict().items() if n in names})
    before = [a.copy() for p in params for a in (p.data,)] + [*opt.state_dict().values()]
    found = nn.rounded_away(opt, small)
    assert_same_arrays([p.data for p in params] + [*opt.state_dict().values()], before)
    theirs([g.astype(F32) for g in small])
    for p, q, w in zip(params, exact, wholes, strict=True):
        stays = (q.data != w) & (q.data.astype(BF16) == w.astype(BF16))
        assert found[p.name] == np.mean(stays)
    assert form != "SGD" or 0.0 < found["table"] <= 1.0
    assert nn.rounded_away(opt, [small[0], None]).keys() == {"table"}


def test_shares_of_what_is_no_optimizer() -> None:
    with pytest.raises(TypeError, match="rounded_away: optimizer has a wrong type"):
        nn.rounded_away(object(), [])
    params = parameters(dtype=BF16)
    with pytest.raises(ValueError, match="gradients"):
        nn.rounded_away(nn.Adam(params), [])


def test_processes_that_own_parts_of_tables() -> None:
    from fusestep.nn.distributed import alone, together

    with pytest.raises(ValueError, match="optimizer rounds at random"):
        together(nn.Adam(parameters(dtype=BF16), rounding="stochastic"), alone())


def test_what_is_refused() -> None:
    params = parameters()
    with refused(ValueError, r"Adam: parameter 'table' does not fit rounding='kahan'", params[0]):
        nn.Adam(params, rounding="kahan")
    with pytest.raises(ValueError, match="Lamb: rounding is unknown: expected"):
        nn.Lamb(params, 0.1, rounding="master ")
    with pytest.raises(TypeError, match="rounding"):  # its rule is one on matrices
        nn.AdaFactor(parameters(dtype=F16), rounding="master")
    opt = nn.Adam(parameters(dtype=F16), rounding="master")
    with pytest.raises(AttributeError, match="rounding is fixed at construction"):
        opt.rounding = "nearest"
    state = opt.state_dict()
    state["master.table"] = state["master.table"].astype(F16)
    with pytest.raises(TypeError, match=r"master\.table"):
        opt.load_state_dict(state)


# Groups, copies, and masters that win


def test_a_group_rounds_in_its_own_way() -> None:
    """Parameters of a group have the bits of an optimizer of their own; others are as they were."""
    ways = [*BESIDE, "stochastic", None]
    params = {way: parameters(dtype=F32 if way is None else BF16) for way in ways}
    for way, own in params.items():
        for p in own:
            p.name = f"{way}.{p.name}"
    alone = {way: [nn.Parameter(p.data.copy(), p.name) for p in own] for way, own in params.items()}
    groups = [
        {"params": own} | ({} if way is None else {"rounding": way}) for way, own in params.items()
    ]
    opt = nn.Adam(groups, 0.1)
    others = {way: nn.Adam(own, 0.1, rounding=way or "nearest") for way, own in alone.items()}
    opt.rounding_seed = others["stochastic"].rounding_seed = SEED
    for step in range(3):
        given = {way: gradients(own, step) for way, own in params.items()}
        if step == 1:
            given["kahan"][0] = rows(params["kahan"][0].shape, [4, 1, 4], step, BF16)
        opt([g for own in given.values() for g in own])
        for way, other in others.items():
            other(given[way])
    state = opt.state_dict()
    for way, other in others.items():
        assert_same_arrays([p.data for p in params[way]], [p.data for p in alone[way]])
        assert all(array.tobytes() == state[n].tobytes() for n, array in other.state_dict().items())
    assert state["master.master.table"].dtype == state["moment1.master.table"].dtype == F32
    assert state["remainder.kahan.table"].dtype == state["moment1.kahan.table"].dtype == BF16
    assert len(state) == len({n for other in others.values() for n in other.state_dict()})
    again = pickle.loads(pickle.dumps(opt))
    again([g for own in given.values() for g in own])
    opt([g for own in given.values() for g in own])
    assert_same_arrays(again.state_dict(), opt.state_dict())


@pytest.mark.parametrize("form", ["Adam", "RowWiseAdagrad", more("Lamb"), more("SGD")])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
def test_copies_are_the_rounded_weights(form: str, dtype: Any) -> None:
    params, plain = parameters(form=form), parameters(form=form)
    copies = [np.zeros(p.shape, dtype) for p in params[:1]] + [None] * (len(params) - 1)
    ours = make(form, [{"params": params, "copies": copies}])
    theirs = make(form, plain)
    for step in range(3):
        given = gradients(params, step)
        if step == 1 and "sparse_update" in arguments_of(form) and ours.sparse_update:
            given[0] = rows(params[0].shape, [4, 1, 4], step, F32)
        ours(given)
        theirs(given)
        if step != 1:
            assert_same_bits(copies[0], params[0].data.astype(dtype))
    assert_same_arrays([p.data for p in params], [p.data for p in plain])
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert ours.copies[0] is copies[0] and ours.copies[1:] == (None,) * (len(params) - 1)
    ours.load_state_dict(theirs.state_dict())
    other = pickle.loads(pickle.dumps(ours))
    other(gradients(params, 7))
    assert other.copies[0] is not copies[0]
    assert_same_bits(other.copies[0], other.parameters[0].data.astype(dtype))


def test_copies_that_are_refused() -> None:
    w, half = np.ones((3, 2), F32), np.ones((3, 2), F16)
    room = np.zeros(12, F32)
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "copies do not fit the parameters", {"params": [w], "copies": []}),
        (TypeError, "copies has a wrong type", {"params": [w], "copies": 3}),
        (TypeError, r"copies\[0\] is no array", {"params": [w], "copies": ["half"]}),
        (ValueError, r"copies\[0\] does not fit", {"params": [w], "copies": [half[:2].copy()]}),
        (ValueError, r"copies\[0\] does not fit", {"params": [w], "copies": [w.copy()]}),
        (ValueError, r"copies\[0\] does not fit", {"params": [half], "copies": [half.copy()]}),
        (ValueError, r"copies\[0\] is not contiguous", {"params": [w], "copies": [half.T]}),
        (ValueError, "shares memory", {"params": [room[:6]], "copies": [room.view(F16)[6:12]]}),
        (ValueError, "excludes copies", {"params": [w], "copies": [half], "rounding": "kahan"}),
        (ValueError, "rounding of a group is unknown", {"params": [w], "rounding": "Kahan"}),
        (ValueError, "does not fit rounding='master'", {"params": [w], "rounding": "master"}),
    ]
    for error, text, group in cases:
        with refused(error, text, w, half, room):
            nn.Adam([group])
    with pytest.raises(KeyError, match="copies"):
        nn.Optimizer(0.1, [{"params": [w], "copies": [half]}])
    with pytest.raises(ValueError, match="does not fit a rule on matrices"):
        nn.AdaFactor([{"params": [half], "rounding": "kahan"}])
    opt = nn.SGD([{"params": [w], "copies": [half]}], 0.1)
    with refused(ValueError, "shares memory", w, half):
        opt([half])
    with refused(ValueError, "copies are written where steps are taken", w, half):
        opt.keep_states([False])


def test_masters_that_win() -> None:
    params = parameters(dtype=F16)
    opt = nn.SGD(params, 0.1, rounding="master")
    opt(gradients(params, 0))
    state, expected = opt.state_dict(), [p.data.copy() for p in params]
    params[0].data[...] = 7.0
    opt.load_state_dict(state, from_masters=True)
    opt([np.zeros_like(p.data) for p in params])
    assert_same_arrays([p.data for p in params], expected)
    del state["master.table"]
    for other in (opt, nn.SGD(parameters(), 0.1)):
        with refused(ValueError, "from_masters is impossible", params[0].data):
            other.load_state_dict(state if other is opt else other.state_dict(), from_masters=True)
    with pytest.raises(TypeError, match="from_masters"):
        opt.load_state_dict(opt.state_dict(), from_masters=1)
