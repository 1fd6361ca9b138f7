"""Each optimizer beside the one of PyTorch, over its options: parameters and states, every element.

The reference is PyTorch's default on the CPU, the loop over single tensors.
"""

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain, product
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import torch as fused
from torch_training import since

STEPS = 20
# Of the largest magnitude that an element had in any step.
BOUND = {torch.float64: 1e-12, torch.float32: 1e-6}
SHAPES = ((), (5,), (3, 4), (2, 7, 3), (4, 2, 3, 3))
_DECAY = {"weight_decay": (0, 0.1)}
_ALL = {**_DECAY, "maximize": (False, True)}
_DECOUPLED = {**_ALL, "decoupled_weight_decay": (False, True)}
OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "SGD": {**_ALL, "momentum": (0, 0.9), "dampening": (0, 0.5), "nesterov": (False, True)},
    "Adagrad": {**_ALL, "lr_decay": (0, 0.1), "initial_accumulator_value": (0, 0.1)},
    "RMSprop": {**_ALL, "momentum": (0, 0.9), "centered": (False, True)},
    "Adam": {**_DECOUPLED, "amsgrad": (False, True), "betas": ((0.9, 0.999), (0.3, 0.2))},
    "AdamW": {**_ALL, "amsgrad": (False, True)},
    "NAdam": {**_DECOUPLED, "momentum_decay": (4e-3, 0.2)},
    "RAdam": {**_DECOUPLED, "betas": ((0.9, 0.999), (0.5, 0.7))}, "Adamax": _ALL,
    "Adadelta": {**_ALL, "rho": (0.9, 0.5)}, "ASGD": {**_ALL, "t0": (1e6, 3), "lambd": (1e-4, 0.1)},
    "Rprop": {"maximize": (False, True), "etas": ((0.5, 1.2), (0.3, 2.0))},
    "Adafactor": {**_ALL, "d": (1.0, 2.0), "eps": ((None, 1e-3), (1e-10, 0.1))},
    "SparseAdam": {"maximize": (False, True), "betas": ((0.9, 0.999), (0.3, 0.2))},
}  # fmt: skip


def combinations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each class with every combination of its options."""
    for name, every in OPTIONS.items():
        known = inspect.signature(getattr(torch.optim, name)).parameters  # older ones lack some
        options = {option: values for option, values in every.items() if option in known}
        for values in product(*options.values()):
            given = dict(zip(options, values, strict=True))
            if given.get("nesterov") and (not given["momentum"] or given["dampening"]):
                continue
            yield name, given


def rates(name: str) -> list[float]:
    """Learning rates of the steps: they change, and are not the default."""
    return (
        [0.05 * (1.0 + 0.1 * (k % 3)) for k in range(STEPS)] if name != "Adadelta" else [1.0] * 20
    )


def parameters(dtype: Any, *, rows: bool) -> list[Any]:
    """Equal ones at every call: of every number of dimensions, strided and channels last too."""
    torch.manual_seed(3)
    made = [torch.randn(shape, dtype=dtype) for shape in (((8, 3), (6,)) if rows else SHAPES)]
    if not rows:
        made.append(torch.randn(2, 3, 4, 4, dtype=dtype).to(memory_format=torch.channels_last))
        made.append(torch.randn(6, 5, dtype=dtype)[:, ::2])
        made.append(torch.randn(4, 6, dtype=dtype).t())
    return [torch.nn.Parameter(tensor) for tensor in made]


def gradient(parameter: Any, generator: Any, *, rows: bool) -> Any:
    """A new one: dense, or of rows with duplicates."""
    if not rows:
        return torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
    indices = torch.randint(0, len(parameter), (1, 6), generator=generator)
    values = torch.randn(6, *parameter.shape[1:], dtype=parameter.dtype, generator=generator)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def tensors_of(optimizer: Any, parameter: Any) -> dict[str, Any]:
    """The parameter and its states as tensors, by name."""
    state = {name: torch.as_tensor(x) for name, x in optimizer.state[parameter].items()}
    return {"parameter": parameter.detach(), **state}


def undo_casts(optimizer: Any) -> None:
    """PyTorch loads single numbers in the dtype of the parameter; it makes them of float32."""
    for state in optimizer.state.values():
        for name in {"mu_product", "eta", "mu"} & state.keys():
            state[name] = state[name].float()


class Comparison:
    """What two optimizers make of equal parameters: the largest errors and magnitudes so far."""

    def __init__(self, ours: Any, theirs: Any, pairs: list[tuple[Any, Any]]) -> None:
        self._ours, self._theirs, self._pairs = ours, theirs, pairs
        # By parameter and name.
        self._sizes = {(k, "parameter"): p.detach().abs() for k, (p, _) in enumerate(pairs)}
        self._errors: dict[tuple[int, str], Any] = {}

    def look(self) -> None:
        """After a step."""
        for k, (mine, other) in enumerate(self._pairs):
            found, expected = tensors_of(self._ours, mine), tensors_of(self._theirs, other)
            assert list(found) == list(expected)
            for name, reference in expected.items():
                value, size, key = found[name], reference.abs(), (k, name)
                assert (value.shape, value.dtype) == (reference.shape, reference.dtype), name
                error = (value - reference).abs()
                self._sizes[key] = torch.maximum(self._sizes.get(key, size), size)
                self._errors[key] = torch.maximum(self._errors.get(key, error), error)

    def check(self, bounds: dict[Any, float]) -> None:
        """Each error is small beside what its element was at its largest."""
        for key, error in self._errors.items():
            if error.numel():
                size = self._sizes[key]
                limit = bounds.get(error.dtype, 0.0) * torch.maximum(size, 1e-3 * size.max())
                assert not (error > limit).any(), (key, error[error > limit], limit[error > limit])


CASES = [
    (name, options, dtype)
    for name, options in combinations()
    for dtype in (torch.float64, torch.float32)
    if dtype == torch.float64 or not options["maximize"]  # a sign changes no rounding
]


@pytest.mark.parametrize(("name", "options", "dtype"), CASES)
def test_numbers_are_those_of_pytorch(name: str, options: dict[str, Any], dtype: Any) -> None:
    rows = name == "SparseAdam"
    mine, other = parameters(dtype, rows=rows), parameters(dtype, rows=rows)
    ours, theirs = (
        getattr(fused, name)(mine, **options), getattr(torch.optim, name)(other, **options),
    )  # fmt: skip
    generator, pairs = torch.Generator().manual_seed(5), list(zip(mine, other, strict=True))
    comparison = Comparison(ours, theirs, pairs)
    for step, rate in enumerate(rates(name)):
        if step == STEPS // 2:  # states travel in both directions, and both go on
            of_theirs, of_ours = theirs.state_dict(), ours.state_dict()
            ours.load_state_dict(of_theirs)
            theirs.load_state_dict(of_ours)
            undo_casts(theirs)
        for group in (*ours.param_groups, *theirs.param_groups):
            group["lr"] = rate
        for k, (p, q) in enumerate(pairs):
            is_left_out = (step + k) % 7 == 6  # counts of updates differ between parameters
            p.grad = None if is_left_out else gradient(p, generator, rows=rows)
            q.grad = None if is_left_out else p.grad.clone()
        ours.step()
        theirs.step()
        comparison.look()
    comparison.check(BOUND)


# Edges: what is not finite, zeros of both signs, and what is too small to be normal

EDGE_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, options) for name, options in combinations() if not options.get("maximize")),
    *((name, {"betas": (0.0, 0.9)}) for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")),
    *((name, {"betas": (0.5, 0.9)}) for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")),
    ("SparseAdam", {"betas": (0.0, 0.9)}),
    *(("RMSprop", {"alpha": alpha, "centered": True}) for alpha in (0.25, 0.5, 0.6)),
    ("Rprop", {"lr": 0.0, "step_sizes": (0.0, 50)}),
    ("Rprop", {"lr": 1e-300, "step_sizes": (0.0, 1e-3)}),
]


def edges(dtype: Any) -> list[float]:
    tiny = torch.finfo(dtype).tiny
    return [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -0.5, 1e5, tiny / 8, -tiny]


def history(optimizer: Any, p: Any, gradients: list[Any]) -> list[dict[str, Any]]:
    """The parameter and its states of elements after each step."""
    found = []
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
        kept = {name: x.clone() for name, x in tensors_of(optimizer, p).items()}
        found.append({name: x for name, x in kept.items() if name == "parameter" or x.dim()})
    return found


def assert_alike(mine: list[dict[str, Any]], other: list[dict[str, Any]], bound: float) -> None:
    """The same NaNs and infinities, and numbers that are close for what they have been."""
    largest: dict[str, Any] = {}
    for found, expected in zip(mine, other, strict=True):
        assert list(found) == list(expected)
        for name, reference in expected.items():
            value, finite = found[name], torch.where(reference.isfinite(), reference.abs(), 0.0)
            largest[name] = torch.maximum(largest.get(name, finite), finite)
            same = (value == reference) | (value.isnan() & reference.isnan())
            same |= (value - reference).abs() <= bound * largest[name].clamp(min=1e-3)
            assert same.all(), (name, value[~same][:5], reference[~same][:5])


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(
    ("name", "options"), [each for each in EDGE_OPTIONS if each[0] != "Adafactor"]
)
def test_edges_are_those_of_pytorch(name: str, options: dict[str, Any], dtype: Any) -> None:
    """Each element has three gradients of its own, in every order, at five parameters."""
    every = torch.tensor(list(product(edges(dtype), repeat=3)), dtype=dtype)
    begins = torch.tensor([0.5, 0.0, -1e-3, float("inf"), float("nan")], dtype=dtype)
    rows, found = name == "SparseAdam", []
    gradients = [column.repeat(len(begins), 1) for column in every.T]
    if rows:
        ids = torch.arange(len(begins))[None]
        gradients = [torch.sparse_coo_tensor(ids, g, check_invariants=False) for g in gradients]
    for module in (fused, torch.optim):
        p = torch.nn.Parameter(begins[:, None].repeat(1, len(every)))
        found.append(history(getattr(module, name)([p], **options), p, gradients))
    if rows:  # of an infinity PyTorch's second moment becomes a NaN, ours stays one
        for kept in chain.from_iterable(found):
            kept["exp_avg_sq"].masked_fill_(~kept["exp_avg_sq"].isfinite(), torch.inf)
    assert_alike(*found, 4 * BOUND[dtype])


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.float32, (3,)), (torch.float32, (2, 3)),
     *(pytest.param(*each, marks=pytest.mark.exhaustive)
       for each in product(BOUND, [(), (3,), (1, 1), (2, 3), (2, 2, 2)])
       if each not in ((torch.float32, (3,)), (torch.float32, (2, 3))))])  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"d": 2.0, "weight_decay": 0.1}, {"eps": (1e-10, 0.0)}])
def test_edges_of_adafactor(options: dict[str, Any], shape: tuple[int, ...], dtype: Any) -> None:
    """Values of one element or of all, in two steps, at three parameters."""
    places = [False, True]
    for first, second, of_all, begin in product(edges(dtype), edges(dtype), places, (0.5, 0, "n")):
        gradients, found = [], []
        for value in (first, second):
            gradients.append(torch.full(shape, 0.25, dtype=dtype))
            flat = gradients[-1].view(-1)
            flat[: len(flat) if of_all else 1] = value
        for module in (fused, torch.optim):
            p = torch.nn.Parameter(torch.full(shape, 0.5 if begin == "n" else begin, dtype=dtype))
            if begin == "n":
                p.data.view(-1)[0] = torch.nan
            found.append(history(module.Adafactor([p], **options), p, gradients))
        assert_alike(*found, 4 * BOUND[dtype])


SIZES = ((0,), (0, 3), (3, 0), (2, 0, 3), (), (1,), (1, 1))


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize(
    ("name", "options"),
    [each for each in EDGE_OPTIONS if each[0] not in ("Adafactor", "SparseAdam")],
)
def test_sizes_of_0_and_1(name: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    found = []
    gradients = [torch.full(shape, 0.3 * k * (-1) ** k) for k in (1, 2, 3)]
    for module in (fused, torch.optim):
        p = torch.nn.Parameter(torch.full(shape, 0.5))
        optimizer = getattr(module, name)([p, torch.nn.Parameter(torch.ones(2))], **options)
        found.append(history(optimizer, p, gradients))
    assert_alike(*found, 1e-6)


@pytest.mark.parametrize("shape", SIZES[:4])
def test_adafactor_leaves_empty_parameters(shape: tuple[int, ...]) -> None:
    """PyTorch's divides by their size."""
    for module, raises in ((torch.optim, True), (fused, False)):
        p = torch.nn.Parameter(torch.ones(shape))
        p.grad = torch.ones(shape)
        with pytest.raises(ZeroDivisionError) if raises else nullcontext():
            module.Adafactor([p]).step()


@since(2, 13)
def test_accumulators_begin_alike_in_all_groups() -> None:
    """Of Adagrad the constructor's value counts, whatever groups say, and when they come."""
    found = []
    for module in (fused, torch.optim):
        p, q, r, s = (torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(4))
        groups = [{"params": [p], "initial_accumulator_value": 4.0}, {"params": [q]}]
        optimizer = module.Adagrad(groups, lr=0.1, initial_accumulator_value=0.5)
        optimizer.add_param_group({"params": [r], "initial_accumulator_value": 4.0})
        optimizer.add_param_group({"params": [s]})
        optimizer.state.pop(q)  # it begins anew
        for x in (p, q, r, s):
            x.grad = torch.ones_like(x)
        optimizer.step()
        found.append([(x.tolist(), optimizer.state[x]["sum"].tolist()) for x in (p, q, r, s)])
    assert found[0] == found[1]
