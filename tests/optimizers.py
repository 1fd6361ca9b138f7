"""Every optimizer class of nn and its forms, out of the registry, and runs of any of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fusestep import nn
from fusestep.bench.registry import ROWS as BY_NAME
from fusestep.bench.registry import Argument, Form, Options
from fusestep.bench.registry.layerwise import MOMENTUM
from helpers import assert_same_arrays, assert_same_bits

FAMILIES = tuple(BY_NAME.values())
# Forms of the classes, each with a rule or a set of states of its own.
ALL_FORMS: dict[str, Form] = {
    row.name + f"-{name}" * bool(name): form for row in FAMILIES for name, form in row.forms.items()
}
FORMS: dict[str, tuple[str, Options]] = {
    name: (name.partition("-")[0], form.options) for name, form in ALL_FORMS.items()
}


def make(form: str, params: Any, **options: Any) -> Any:
    """An optimizer of one of the `FORMS`."""
    name, own = FORMS[form]
    return BY_NAME[name].make(params, **{**own, **options})


def arguments_of(form: str) -> Mapping[str, Argument]:
    """What it takes, or the optimizer inside of it."""
    name, own = FORMS[form]
    if name != "LARS":
        return BY_NAME[name].arguments
    inside = own.get("optimizer", MOMENTUM)
    return BY_NAME[getattr(inside, "func", inside).__name__].arguments


def decayed_and_scaled(form: str) -> dict[str, Any]:
    """Options for a weight decay, and for a loss scale where there is one."""
    scaled = "loss_scale" in arguments_of(form)
    return {"weight_decay": 0.1} | ({"loss_scale": 3.0} if scaled else {})


def is_row_wise(form: str) -> bool:
    """Whether it has states of rows, so that a number is no parameter."""
    return BY_NAME[FORMS[form][0]].row_wise


def inner(opt: Any) -> Any:
    """The optimizer inside LARS, or ``opt`` itself."""
    return opt.opt if isinstance(opt, nn.LARS) else opt


SHAPES: dict[str, tuple[int, ...]] = {"table": (6, 4), "vector": (5,)}


def parameters(
    shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype=np.float32, form: str = ""
) -> Any:
    """Fresh parameters, the same ones each time; numbers have an axis, if the form needs rows."""
    rng, least = np.random.default_rng(1), (1,) if form and is_row_wise(form) else ()
    return [
        nn.Parameter(np.array(rng.standard_normal(shape or least)).astype(dtype), name)
        for name, shape in shapes.items()
    ]


def gradients(params: Sequence[nn.Parameter], step: int, dtype: Any = None) -> list[Any]:
    """Dense gradients of a step."""
    rng = np.random.default_rng(100 + step)
    return [np.array(rng.standard_normal(p.shape)).astype(dtype or p.dtype) for p in params]


def rows(shape: tuple[int, ...], indices: Any, seed: int = 0, dtype: Any = np.float32) -> Any:
    """A row-sparse gradient with these indices."""
    values = np.random.default_rng(seed).standard_normal((len(indices), *shape[1:]))
    return nn.RowTensor(np.array(indices, np.int64), values.astype(dtype), shape)


def states(opt: Any) -> dict[str, np.ndarray]:
    """The arrays that hold what was learned: neither counters nor options."""
    others = ("step.", "learning_rate", "global_step", "momentum", "beta1", "beta2", "afactor_step")
    return {n: array for n, array in opt.state_dict().items() if not n.startswith(others)}


def assert_same_run(one: Any, other: Any) -> None:
    """Two optimizers of equal parameters, states and counts of steps, to the last bit."""
    __tracebackhide__ = True
    assert_same_arrays(one.parameters, other.parameters)
    found, expected = one.state_dict(), other.state_dict()
    assert list(found) == list(expected)
    for name, array in found.items():
        assert_same_bits(array, expected[name], name)


def _n_states(form: str) -> int:
    """Of its own: LARS has none."""
    opt = make(form, parameters())
    return len(states(opt)) if inner(opt) is opt else 0


# One form of each class, that with the most states (and plain Adam, whose kernels LazyAdam has
# too): what forms of a class share, like the types of arrays, is tested with these alone where it
# needs kernels of its own.
ONE_OF_EACH = (
    "Adam", *(max((f for f in FORMS if FORMS[f][0] == name), key=_n_states) for name in BY_NAME),
)  # fmt: skip
ON_DEVICES = tuple(form for form, (name, _) in FORMS.items() if not BY_NAME[name].together)
FIXED_RATE = tuple(f for f in FORMS if arguments_of(f)["learning_rate"].takes == "fixed rate")
OWN_RATE = tuple(
    form
    for form, (_, own) in FORMS.items()
    if "relative_step" in arguments_of(form) and own.get("relative_step", True)
)
