"""Weights of 16 bits in nn.torch, beside masters or remainders, or rounded at random."""

import copy
import io
import warnings
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import reference_random as model
from fusestep.nn import torch as fused
from helpers import BF16, more
from test_options import SIXTEEN_BITS, mixed, unchanged
from torch_training import EVERY, FOLDERS, TABLES, assert_same_bits, everything, refused

FORMS = {"master": "master", "kahan": "remainder"}
"""Ways to round, and the state that lies beside the weight."""
EVERY_FORM = pytest.mark.parametrize("form", [*FORMS, "stochastic"])
SEED = 98_765_432_109
NUMPY = {torch.float16: np.float16, torch.bfloat16: BF16}
ROUNDED = [name for name in EVERY if name != "Adafactor"]  # which has a rule on matrices
SAMPLE = "AdamW", "RowWiseAdagrad"
EACH = pytest.mark.parametrize("name", [n if n in SAMPLE else more(n) for n in ROUNDED])
EACH_FORM = pytest.mark.parametrize("form", FORMS)


def parameters_of(name: str, dtype: Any) -> list[Any]:
    """Those of `mixed` whose gradients a class takes."""
    if name == "SparseAdam":
        return mixed(dtype)[2:]
    return mixed(dtype)[: None if name in TABLES else 2]


def options_of(name: str, form: str, **more_options: Any) -> dict[str, Any]:
    """A rate that matters, and states in float32 in both forms."""
    options = {"lr": 0.1, "rounding": form, **more_options}
    if name in TABLES:
        options.setdefault("sparse", "touched")
    if name != "RowWiseAdagrad":
        options["state_dtype"] = torch.float32
    return options


def wide(parameter: Any, state: Any) -> Any:
    """The number that a weight and what lies beside it make."""
    if "master" in state:
        return state["master"].clone()
    remainder = state.get("remainder")
    return parameter.detach().float() + (0.0 if remainder is None else remainder.float())


def rounded_at_random(x: Any, weight: Any, name: str, update: int, *, by_rows: bool) -> Any:
    """By the model, with the places of elements in memory, or by rows."""
    if by_rows:
        found = model.all_rounded(x.numpy(), NUMPY[weight.dtype], SEED, name, update)
        return torch.from_numpy(found.astype(np.float32)).to(weight.dtype)
    flat, dtype = x.as_strided((x.numel(),), (1,)).numpy(), NUMPY[weight.dtype]
    found = model.all_rounded(flat, dtype, SEED, name, update)
    return torch.from_numpy(found.astype(np.float32)).to(weight.dtype).as_strided(
        weight.shape, weight.stride())  # fmt: skip


@EACH
@EVERY_FORM
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=["f16", "bf16"])
@pytest.mark.parametrize("sparse", ["touched", "all"])
def test_a_step_is_that_of_the_float32_weight(name: str, form: str, dtype, sparse: str) -> None:
    """To the last bit, states too; then both are rounded, channels last and rows as well."""
    if name not in TABLES and sparse == "all":
        pytest.skip("takes no sparse gradients")
    narrow = parameters_of(name, dtype)
    own = {"sparse": sparse} if name in TABLES else {}
    ours = getattr(fused, name)(narrow, **options_of(name, form, **own))
    plain = {n: x for n, x in options_of(name, form, **own).items() if n != "rounding"}
    ours.param_groups[0]["rounding_seed"] = SEED
    exact = [torch.nn.Parameter(p.detach().float()) for p in narrow]
    theirs = getattr(fused, name)(exact, **plain)
    generator = torch.Generator().manual_seed(3)
    for step in range(4):
        for p, q in zip(narrow, exact, strict=True):
            g = torch.randn(p.shape, generator=generator).to(dtype)
            if p.grad.is_sparse:
                ids = torch.tensor([[4, 1, 4]])
                g = torch.sparse_coo_tensor(ids, g[:3], p.shape, check_invariants=False)
            p.grad, q.grad = g, g.float()
            q.data.copy_(wide(p, ours.state.get(p, {})))
        before = [wide(p, ours.state.get(p, {})) for p in narrow]
        ours.step()
        theirs.step()
        for k, (p, q, old) in enumerate(zip(narrow, exact, before, strict=True)):
            state, x = ours.state[p], q.detach()
            rounded = x.to(dtype)
            written = (x != old) if p.grad.is_sparse else torch.ones_like(x, dtype=torch.bool)
            if form == "stochastic":
                rounded = rounded_at_random(
                    x, p, f"parameter {k}", step + 1, by_rows=name.startswith("RowWise")
                )
                own = () if "step" in theirs.state[q] else ("step",)
            else:
                expected = x if form == "master" else (x - rounded.float()).to(dtype)
                own = (FORMS[form],)
                assert_same_bits([state[own[0]][written]], [expected[written]])
            assert_same_bits([p.detach()[written]], [rounded[written]])
            assert torch.equal(wide(p, state)[~written], old[~written])
            assert float(state.get("step", step + 1)) == step + 1
            others = {n: t for n, t in state.items() if n not in own}
            assert others.keys() == theirs.state[q].keys()
            known = others.values(), theirs.state[q].values()
            assert_same_bits(*(map(torch.as_tensor, values) for values in known))


@EACH_FORM
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=["f16", "bf16"])
def test_updates_below_the_last_place_are_kept(form: str, dtype: Any) -> None:
    """Ten thousandths of a step each, which the weight alone never takes."""
    moved = []
    for rounding in ("nearest", form):
        w = torch.nn.Parameter(torch.ones(300, dtype=dtype))
        optimizer = fused.SGD([w], lr=1e-5, rounding=rounding)
        for _ in range(2000):
            w.grad = torch.ones_like(w)
            optimizer.step()
        moved.append(float(1.0 - wide(w, optimizer.state[w]).mean()))
    # A remainder is rounded in each step, too.
    assert moved[0] == 0.0
    assert abs(moved[1] - 0.02) < (1e-4 if form == "master" else 4e-3)


def test_dtypes_of_states() -> None:
    for rounding, asked, expected, beside in (
        ("master", None, torch.float32, torch.float32),
        ("master", torch.bfloat16, torch.bfloat16, torch.float32),
        ("kahan", None, torch.bfloat16, torch.bfloat16),
        ("kahan", torch.float32, torch.float32, torch.bfloat16),
    ):
        (w, *_) = mixed(torch.bfloat16)
        optimizer = fused.AdamW([w], rounding=rounding, state_dtype=asked)
        optimizer.step()
        state = optimizer.state[w]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == expected
        assert state[FORMS[rounding]].dtype == beside


def resumed(way: str, name: str, form: str, parameters: list[Any], optimizer: Any) -> Any:
    """Another optimizer of these parameters, with the states of the first."""
    saved: Any = optimizer.state_dict()
    if way == "file":
        stream = io.BytesIO()
        torch.save(saved, stream)
        stream.seek(0)
        saved = torch.load(stream)
    other = getattr(fused, name)(parameters, **options_of(name, form))
    other.load_state_dict(copy.deepcopy(saved))
    return other


@EACH
@EVERY_FORM
@pytest.mark.parametrize("way", ["dict", "file"])
def test_a_resumed_run_is_the_same(way: str, name: str, form: str) -> None:
    runs = []
    for stops in (False, True):
        parameters = parameters_of(name, torch.bfloat16)
        optimizer = getattr(fused, name)(parameters, **options_of(name, form))
        for k in range(4):
            if stops and k == 2:
                with warnings.catch_warnings(action="error"):
                    optimizer = resumed(way, name, form, parameters, optimizer)
            optimizer.step()
        runs.append(everything(optimizer))
    assert_same_bits(*runs)


@EVERY_FORM
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")
@pytest.mark.parametrize("way", FOLDERS)
def test_distributed_checkpoints_have_them(way: str, form: str) -> None:
    from torch_training import net, through_folder, train

    runs = []
    for stops in (False, True):
        model = net(dtype=torch.bfloat16)
        optimizer: Any = fused.AdamW(model.parameters(), lr=0.1, rounding=form)
        train(model, optimizer, range(2))
        if stops:
            fresh = net(seed=1, dtype=torch.bfloat16)
            other = fused.AdamW(fresh.parameters(), lr=0.1, rounding=form)
            model, optimizer = through_folder(model, optimizer, fresh, other, **FOLDERS[way])
        train(model, optimizer, range(2, 4))
        runs.append(everything(optimizer))
    assert_same_bits(*runs)


@EACH_FORM
def test_states_without_them_begin_at_the_weight(form: str) -> None:
    """Of a run that rounded to the nearest, say, with one warning."""
    parameters = mixed(torch.bfloat16)
    before = fused.Adam(parameters, sparse="touched", state_dtype=torch.float32)
    before.step()
    optimizer = fused.Adam(parameters, sparse="touched", rounding=form)
    optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
    assert all(group["rounding"] == "nearest" for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        group["rounding"] = form
    weights = [p.detach().float() for p in parameters]
    with pytest.warns(UserWarning, match=f"Adam: {FORMS[form]} of parameter 0 begins") as told:
        optimizer.step()
    assert len(told) == 1
    exact = [torch.nn.Parameter(w) for w in weights]
    for p, q in zip(parameters, exact, strict=True):
        q.grad = p.grad.float()
    other = fused.Adam(exact, sparse="touched")
    other.load_state_dict(before.state_dict())
    other.step()
    for p, q in zip(parameters, exact, strict=True):
        assert torch.equal(p, q.detach().bfloat16())


def test_a_weight_that_was_changed_wins() -> None:
    """A master that makes another weight begins at that, element by element; with one warning."""
    parameters = mixed(torch.float16)
    optimizer = fused.SGD(parameters, lr=0.0, sparse="touched", rounding="master")
    optimizer.step()
    masters = [optimizer.state[p]["master"].clone() for p in parameters]
    with torch.no_grad():
        parameters[0][1:3] = 7.0
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.warns(UserWarning, match="SGD: master of parameter 0 begins at the weight") as told:
        optimizer.step()
    assert len(told) == 1
    masters[0][1:3] = 7.0
    assert_same_bits([optimizer.state[p]["master"] for p in parameters], masters)


def test_a_nan_is_the_weight_of_a_nan() -> None:
    (w, *_) = mixed(torch.bfloat16)
    optimizer = fused.SGD([w], lr=0.1, rounding="master")
    optimizer.step()
    w.grad.fill_(torch.nan)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with warnings.catch_warnings(action="error"):
        optimizer.step()


@pytest.mark.parametrize("place", [0, 2])
def test_parameters_without_16_bits(place: int) -> None:
    parameters = mixed(torch.bfloat16)
    parameters[place] = torch.nn.Parameter(parameters[place].detach().float())
    group = {"params": parameters, "rounding": "kahan"}
    wrong = f"rounding='kahan' does not fit parameter {place} of a group: expected torch.float16"
    with pytest.raises(ValueError, match=f"AdamW: {wrong}"):
        fused.AdamW([group])
    assert group == {"params": parameters, "rounding": "kahan"}


def test_parameters_that_are_converted_later() -> None:
    parameters = mixed(torch.bfloat16)[:1]
    optimizer = fused.AdamW(parameters, rounding="master")
    optimizer.step()
    parameters[0].data, parameters[0].grad = parameters[0].detach().float(), None
    parameters[0].grad = torch.ones_like(parameters[0])
    with refused((ValueError, RuntimeError), "does not fit parameter 0", optimizer):
        optimizer.step()


def test_counts_that_a_state_lacks() -> None:
    """A class that counts no updates counts them from the first random rounding on."""
    parameters = mixed(torch.bfloat16)[:1]
    optimizer = fused.SGD(parameters, lr=0.1, momentum=0.9)
    optimizer.step()
    optimizer.param_groups[0]["rounding"] = "stochastic"
    optimizer.step()
    assert optimizer.state[parameters[0]]["step"] == 2.0  # one was before
    both = mixed(torch.bfloat16)[:2]
    groups = [{"params": both[:1], "rounding": "stochastic"}, {"params": both[1:]}]
    mixed_groups = fused.SGD(groups, lr=0.1, momentum=0.9)
    for step in range(3):
        mixed_groups.step()
        assert mixed_groups.state[both[0]]["step"] == step + 1.0
        assert mixed_groups.state[both[1]].keys() == {"momentum_buffer"}


def test_a_step_of_one_parameter_draws_the_bits_of_a_step_of_all() -> None:
    runs = []
    for one_by_one in (False, True):
        parameters = mixed(torch.bfloat16)
        optimizer = fused.Adam(parameters, lr=0.1, rounding="stochastic", sparse="touched")
        for _ in range(3):
            for parameter in reversed(parameters) if one_by_one else (None,):
                optimizer.step(param=parameter)
        runs.append(everything(optimizer))
    assert_same_bits(*runs)


@pytest.mark.parametrize("name", ["SGD", more("AdamW"), more("Lamb"), "LazyAdam"])
@pytest.mark.parametrize("rounding", ["nearest", more("master"), "kahan", more("stochastic")])
def test_the_share_that_is_rounded_away(name: str, rounding: str) -> None:
    """That of a step of the whole weight in float32; nothing has changed after it was found."""
    parameters = mixed(torch.bfloat16)[: None if name in TABLES else 2]
    options = options_of(name, rounding, lr=1e-3)
    optimizer = getattr(fused, name)(parameters, **options)
    optimizer.step()
    wholes = [wide(p, optimizer.state[p]) for p in parameters]
    exact = [torch.nn.Parameter(w.clone()) for w in wholes]
    theirs = getattr(fused, name)(exact, **{**options, "rounding": "nearest"})
    for p, q in zip(parameters, exact, strict=True):
        q.grad = p.grad.float()
        own = {n: x for n, x in optimizer.state[p].items() if n not in FORMS.values()}
        theirs.state[q] = copy.deepcopy(own)
    before = everything(optimizer)
    found = fused.rounded_away(optimizer)
    assert unchanged(optimizer, before)
    theirs.step()
    for p, q, w in zip(parameters, exact, wholes, strict=True):
        stays = (q != w) & (q.bfloat16() == w.bfloat16())
        assert found[p] == float(stays.float().mean())
    assert found[parameters[0]] > 0.0
    if name == "SGD":
        optimizer.grad_scale = torch.tensor(2.0**8)
        assert fused.rounded_away(optimizer)[parameters[0]] == 1.0
        del optimizer.grad_scale
    parameters[0].grad = None
    assert parameters[0] not in fused.rounded_away(optimizer)


def test_shares_of_what_is_no_optimizer() -> None:
    other = torch.optim.SGD(mixed(), lr=0.1)
    with pytest.raises(TypeError, match="rounded_away: optimizer has a wrong type"):
        fused.rounded_away(other)


@pytest.mark.parametrize("seed", [-1, 1 << 63, 1.0, "1", None, True])
def test_seeds_that_are_none(seed: Any) -> None:
    group = {"params": mixed(torch.bfloat16)[:1], "rounding_seed": seed}
    with pytest.raises((ValueError, TypeError), match="SGD: rounding_seed"):
        fused.SGD([group], lr=0.1)


def test_masters_that_win() -> None:
    parameters = mixed(torch.bfloat16)
    optimizer = fused.AdamW(parameters, lr=0.1, rounding="master")
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved, expected = optimizer.state_dict(), [p.detach().clone() for p in parameters]
    with torch.no_grad():
        parameters[0].fill_(7.0)
    optimizer.load_state_dict(saved, from_masters=True)
    for p, x in zip(parameters, expected, strict=True):
        assert torch.equal(p, x)
    plain = fused.AdamW(mixed(torch.float32), lr=0.1)
    without = {**saved, "state": {k: {} for k in saved["state"]}}
    for other, state in ((plain, plain.state_dict()), (optimizer, without)):
        with pytest.raises(ValueError, match="AdamW: from_masters is impossible"):
            other.load_state_dict(state, from_masters=True)
    assert optimizer.state_dict()["state"].keys() == saved["state"].keys()
    # Adagrad has states of parameters that never had a gradient.
    optimizer = fused.Adagrad(parameters, lr=0.1, rounding="master")
    parameters[-1].grad = None
    optimizer.step()
    weights = [p.detach().clone() for p in parameters]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()), from_masters=True)
    assert all(map(torch.equal, parameters, weights))


def test_a_remainder_of_another_weight_begins_anew() -> None:
    """One that fits stays."""
    w = torch.nn.Parameter(torch.tensor([1000.0, 3.0]).bfloat16())
    optimizer = fused.SGD([w], lr=1.0, rounding="kahan")
    w.grad = torch.tensor([1.5, 2.0**-7]).bfloat16()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    w.grad.zero_()
    optimizer.load_state_dict(copy.deepcopy(saved))
    with warnings.catch_warnings(action="error"):
        optimizer.step()
    remainder = optimizer.state[w]["remainder"]
    assert torch.equal(remainder, saved["state"][0]["remainder"]) and remainder.all()
    with torch.no_grad():
        w[0] = 0.01
    optimizer.load_state_dict(saved)
    with pytest.warns(UserWarning, match="SGD: remainder of parameter 0 begins at the weight"):
        optimizer.step()
    assert w[0] == torch.tensor(0.01).bfloat16() and optimizer.state[w]["remainder"][0] == 0.0


def test_states_that_do_not_fit_change_nothing() -> None:
    """Masters for float32 weights, masters of other shapes or only some, for which they win."""
    optimizer = fused.SGD(mixed(torch.bfloat16)[:2], lr=0.1, momentum=0.9, rounding="master")
    optimizer.step()
    saved = optimizer.state_dict()
    plain = fused.SGD(mixed(torch.float32)[:2], lr=0.1, momentum=0.9)
    plain.step()
    with refused(ValueError, "rounding='master' does not fit parameter 0", plain):
        plain.load_state_dict(saved)
    plain.step()
    second = saved["state"][1]
    for wrong in ({**second, "master": torch.zeros(1)}, {"momentum_buffer": torch.zeros(1)}):
        with refused(ValueError, "the master of parameter 1 does not fit", optimizer):
            state = {0: saved["state"][0], 1: wrong}
            optimizer.load_state_dict({**saved, "state": state}, from_masters=True)
    for seed in (-1, 1.5, "1", None, 2**63):
        optimizer.param_groups[0]["rounding_seed"] = seed
        with pytest.raises((TypeError, ValueError), match="SGD: rounding_seed"):
            optimizer.step()
    optimizer.param_groups[0].update(rounding_seed=0, rounding="nope")
    with pytest.raises(ValueError, match="SGD: rounding is unknown"):
        optimizer.step()


@pytest.mark.parametrize("rounding", ["Master", "stochastic ", None, 3])
def test_roundings_that_are_unknown(rounding: Any) -> None:
    with pytest.raises(ValueError, match="SGD: rounding is unknown"):
        fused.SGD(mixed(torch.bfloat16), lr=0.1, rounding=rounding)


def test_rules_on_matrices() -> None:
    optimizer = fused.Adafactor(mixed(torch.bfloat16)[:1])
    with pytest.raises(ValueError, match="rounding='kahan' does not fit a rule on matrices"):
        optimizer.add_param_group({"params": mixed(torch.bfloat16)[1:2], "rounding": "kahan"})
    assert len(optimizer.param_groups) == 1


@EACH_FORM
def test_a_state_of_another_dtype(form: str) -> None:
    """A master is float32."""
    parameters = mixed(torch.bfloat16)[:1]
    optimizer = fused.SGD(parameters, lr=0.1, rounding=form)
    optimizer.step()
    state = optimizer.state[parameters[0]]
    state[FORMS[form]] = state[FORMS[form]].to(torch.float64)
    with refused(RuntimeError, f"state '{FORMS[form]}' of parameter 0", optimizer):
        optimizer.step()
