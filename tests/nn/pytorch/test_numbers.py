"""Each optimizer beside the one of PyTorch, over its options: parameters and states, every element.

The reference is PyTorch's default on the CPU, the loop over single tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import torch as fused  # noqa: E402

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
    "RAdam": {**_DECOUPLED, "betas": ((0.9, 0.999), (0.5, 0.7))},
    "Adamax": _ALL,
    "Adadelta": {**_ALL, "rho": (0.9, 0.5)},
    "ASGD": {**_ALL, "t0": (1e6, 3), "lambd": (1e-4, 0.1)},
    "Rprop": {"maximize": (False, True), "etas": ((0.5, 1.2), (0.3, 2.0))},
    "Adafactor": {**_ALL, "d": (1.0, 2.0), "eps": ((None, 1e-3), (1e-10, 0.1))},
    "SparseAdam": {"maximize": (False, True), "betas": ((0.9, 0.999), (0.3, 0.2))},
}


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
        getattr(fused, name)(mine, **options),
        getattr(torch.optim, name)(other, **options),
    )
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
