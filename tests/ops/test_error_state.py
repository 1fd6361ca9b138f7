"""NumPy's error state is the caller's: no step reads it, and none changes its result for it.

A first run under a strict state, a second one under "ignore" (what is remembered from a step to the
next one must not hide an error), and the bits of both.
"""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
from fusestep import nn, ops
from helpers import arrays_of, assert_same_bits
from operators import ADAM_UPDATE, EVERY_OPERATOR, Operator
from optimizers import BY_NAME, FORMS, SHAPES, inner, make, parameters
from sequence_program import droppers
from thor_nets import Net, Pass
from thor_nets import make as make_thor

HOSTILE = np.array([1e-40, -1e-40, 1e38, -1e38, 3e38, 1e-46, 0.0, 1.0, np.inf, -np.inf, np.nan])
TINY = np.finfo(np.float32).smallest_subnormal
HUGE = float(np.finfo(np.float32).max)
DROPS = [*droppers().values()]  # what is remembered from earlier steps, of other tests too


@contextmanager
def state(kind: str) -> Any:
    """An error state in which every signal of NumPy is an error."""

    def fail(kind: str, _: int) -> None:
        raise FloatingPointError(kind)

    call = fail if kind == "call" else None
    with np.errstate(all=kind, call=call):  # type: ignore[call-overload]
        yield


def assert_independent(run: Callable[[], Any], kind: str = "raise") -> None:
    """``run()`` gives the same arrays under ``kind`` as where nothing is looked at."""
    __tracebackhide__ = True
    found = []
    for each in (kind, "ignore"):
        for drop in DROPS:
            drop()
        with state(each):
            found.append(arrays_of(run()))
    strict, calm = found
    assert len(strict) == len(calm) > 0
    for k, (one, other) in enumerate(zip(strict, calm, strict=True)):
        assert_same_bits(one, other, f"array {k}")


def hostile(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Every one of `HOSTILE`, from another one on for each seed."""
    with state("ignore"):
        return np.resize(np.roll(HOSTILE, seed), shape).astype(dtype)


# Operators

EXTREMES: dict[str, tuple[float, ...]] = {
    "number": (0.0, 1e-46, HUGE), "not negative": (1e-46, HUGE), "closed unit": (1e-46, 1.0),
    "reciprocal": (1e-38, HUGE), "not positive": (-HUGE, -0.0), "epsilon": (TINY, HUGE),
    "epsilon of MXNet": (TINY, HUGE),
    **dict.fromkeys(("not 1", "at most 1"), (0.0, 1e-46, 1.0 - 2**-23)),
}  # fmt: skip
"""The smallest and the largest values that scalars may have, by what they take."""


def extreme_calls(operator: Operator) -> list[dict[str, float]]:
    """All scalars as usual; each of them in turn extreme; the largest rate with the worst power."""
    calls: list[dict[str, float]] = [{}]
    for name in (*operator.scalars, *operator.attributes):
        takes = operator.known(name).takes.removesuffix(" float")
        calls += [{name: float(value)} for value in EXTREMES[takes]]
    if "beta1_power" in operator.scalars:
        calls.append({"lr": HUGE, "beta1_power": 1.0 - 2**-23})
    return calls


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("operator", "dtype"), [
    pytest.param(operator, dtype, id=f"{operator.name}-{np.dtype(dtype)}")
    for operator in (*EVERY_OPERATOR.values(), ADAM_UPDATE)
    for dtype in (np.float32, np.float16, np.float64)
    if dtype == np.float32 or not operator.takes_rows
])  # fmt: skip
def test_operator(operator: Operator, dtype: Any, seed: int) -> None:
    def run() -> list[Any]:
        found = []
        for given in extreme_calls(operator):
            inputs = operator.inputs(dtype=dtype)
            gradient = inputs[operator.gradient]
            gradient[...] = hostile(gradient.shape, dtype, seed)
            found += [operator.call_with(inputs, **given), inputs]
        return found

    assert_independent(run)


def test_gradients_as_a_whole() -> None:
    grads = [hostile((11,), dtype, 0) for dtype in (np.float32, np.float64, np.float16)]
    wide = np.full(3, 1e308)

    def run() -> list[Any]:
        assert ops.global_norm([wide, wide.copy()]) == np.inf
        clipped = [ops.clip_by_global_norm(grads, use_norm=x) for x in (1.0, HUGE, None)]
        rows = nn.RowTensor(np.array([1, 1, 0]), np.full((3, 2), 6e4, np.float16), (4, 2))
        return [clipped, rows.to_dense(), rows.coalesce()]

    assert_independent(run)


# Optimizers

OPTIONS = {"weight_decay": 1e38, "loss_scale": 1e30}
STEPS = (0, 826, 30_000)
"""Where float32 powers of 0.9 are ordinary, run out (at 828), and are 0."""


def options_of(form: str) -> dict[str, Any]:
    """A decay and a loss scale whose product is beyond float32, where there are such options."""
    name, own = FORMS[form]
    if name in ("LARS", "AdaFactor", "Lamb") or "optimizer" in own:
        return {}
    return {n: v for n, v in OPTIONS.items() if n in BY_NAME[name].arguments}


def at_step(opt: Any, step: int) -> None:
    """As if it had done so many steps, of zero gradients."""
    whole = opt.state_dict()
    derived = ("beta1_power", "beta2_power", "afactor_step")
    kept = {name: array for name, array in whole.items() if name not in derived}
    for name, array in kept.items():
        if name == "global_step" or name.startswith("step."):
            array[...] = step
    opt.load_state_dict(kept)
    opt.load_state_dict(opt.state_dict())  # with powers that are checked


def stepped(form: str, dtype: Any, given: Callable[[int], list[Any]], **options: Any) -> list[Any]:
    """Parameters and states after a few steps at each of `STEPS`."""
    found = []
    for start in STEPS:
        with state("ignore"):
            params = parameters(SHAPES, dtype)
        opt = make(form, params, **options)
        at_step(opt, start)
        for step in range(4):
            opt(given(step))
        found += [params, opt.state_dict()]
    return found


RATES = {"rate 0": 0.0, "rate 1e-46": 1e-46, "largest rate": HUGE}  # two of them 0 in float32
WIDE = {"float64": np.float64, "float16": np.float16}  # gradients beyond 16-bit arithmetic
KINDS = ("dense", "finite", "rows", "centralized", "decayed", *RATES, *WIDE)
OF_KIND = {
    "rows": tuple(form for form, (name, _) in FORMS.items() if BY_NAME[name].takes_rows),
    **dict.fromkeys(RATES, tuple(f for f in FORMS if "FTRL" not in f and "AdaFactor" not in f)),
    **dict.fromkeys(WIDE, ("Adam", "Lamb", "LARS", "AdaFactor", "FTRL", "SGD-momentum")),
}


@pytest.mark.parametrize(("form", "kind"), [(f, k) for k in KINDS for f in OF_KIND.get(k, FORMS)])
def test_optimizer(form: str, kind: str) -> None:
    options: dict[str, Any] = options_of(form) if kind == "decayed" else {}
    if kind == "rows":
        options |= {} if form == "Adam-lazy" else {"sparse_update": "lazy"}
    dtype = WIDE.get(kind, np.float32)

    def given(step: int) -> list[Any]:
        seed = -1 - step if kind == "finite" else step
        grads = [hostile(shape, dtype, seed) for shape in SHAPES.values()]
        if kind == "finite":
            grads = [np.where(np.isfinite(g), g, np.float32(1e38)) for g in grads]
        if kind == "rows":
            grads[0] = nn.RowTensor(np.array([1, 4, 1, 0, 2, 4]), grads[0], SHAPES["table"])
        return grads

    def run() -> list[Any]:
        if kind not in ("centralized", *RATES):
            return stepped(form, dtype, given, **options)
        with state("ignore"):
            params = parameters(SHAPES)
        opt = make(form, [{"params": params, "grad_centralization": kind not in RATES}])
        if kind in RATES:
            inner(opt).learning_rate.data[...] = RATES[kind]
        for step in range(3):
            opt(given(step))
        return [params, opt.state_dict()]

    assert_independent(run)


@pytest.mark.parametrize("kind", ["raise", "warn", "call", "print"])
def test_adam_beyond_the_last_power(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """900 steps in a row: float32(0.9)**t becomes subnormal, and is rounded then, at t = 829."""

    def run() -> list[Any]:
        params = [np.ones(3, np.float32)]
        opt = nn.Adam(params, learning_rate=1e-3)
        for _ in range(900):
            opt([np.array([1.0, 1e-40, -1e38], np.float32)])
        return [params, opt.state_dict()]

    assert_independent(run, kind)
    assert capfd.readouterr() == ("", "")


def test_steps_of_a_users_own() -> None:
    """The pieces of a step, and LARS around an optimizer whose step is not of this package."""

    class Descent(nn.Optimizer):
        def construct(self, gradients: tuple[Any, ...]) -> tuple[bool, ...]:
            gradients = self.gradients_centralization(self.decay_weight(gradients))
            for p, g in zip(self.parameters, self.scale_grad(gradients), strict=True):
                with state("ignore"):
                    p.data -= g
            return (True,) * len(gradients)

    def run() -> list[Any]:
        with state("ignore"):
            params, wide = parameters(SHAPES), parameters(SHAPES, np.float64)
        groups = [{"params": params, "grad_centralization": True, "weight_decay": 1e38}]
        own = Descent(0.1, groups, loss_scale=1e-30)
        own([hostile(p.shape, np.float32, 2) for p in params])
        nn.LARS(Descent(0.1, wide))([np.full(p.shape, 1e-200) for p in wide])
        return [params, wide]

    assert_independent(run)


@pytest.mark.parametrize(("name", "options"), [
    ("adam", {}), ("adam", {"compat": "1.9", "clip_gradient": HUGE}),
    ("adam", {"multi_precision": True, "rescale_grad": 1e-46}),
    ("adam", {"use_fused_step": False, "wd": 1e-46, "epsilon": 0.0}),
    ("adamw", {"wd": HUGE, "correct_bias": False}),
])  # fmt: skip
@pytest.mark.parametrize("rate", [1e-3, 1e-46, HUGE])
def test_mxnet(name: str, options: dict[str, Any], rate: float) -> None:
    def run() -> list[Any]:
        found = []
        for start in STEPS:
            opt = nn.mxnet.create(name, learning_rate=rate, begin_num_update=start, **options)
            updater = nn.mxnet.get_updater(opt)
            weights = [np.ones(11, dtype) for dtype in (np.float32, np.float64, np.float16)]
            for step in range(3):
                updater([0, 1, 2], [hostile(w.shape, w.dtype, step) for w in weights], weights)
            found += [weights, [updater.states[k] for k in range(3)]]
        return found

    assert_independent(run)


def test_mxnet_optimizer_of_a_users_own() -> None:
    """The base class rounds a gradient to the master copy, and the copy to the weight."""

    class Descent(nn.mxnet.Optimizer):
        def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:  # noqa: ARG002
            weight[...] = grad

    def run() -> list[Any]:
        opt, w = Descent(multi_precision=True), np.ones(3, np.float16)
        grad = np.array([1e300, 1e38, 1e-40])
        opt.update_multi_precision(0, w, grad, opt.create_state_multi_precision(0, w))
        return [w]

    assert_independent(run)


@pytest.mark.parametrize("compat", [None, "mindspore"])
@pytest.mark.parametrize("scale", [1e-40, 1e38])
def test_thor(scale: float, compat: str | None) -> None:
    pytest.importorskip("scipy", reason="the factors are inverted by scipy's LAPACK")

    def run() -> list[Any]:
        net = Net()
        options = {} if compat is None else {"compat": compat}
        opt = make_thor(net, frequency=2, bad_factor="skip", **options)
        for step in range(3):
            for layer, x, d in zip(net.layers, passes[step].inputs, outputs[step], strict=True):
                layer.capture(x, d)
            opt([hostile(p.shape, np.float32, step) for p in opt.parameters])
        return [opt.parameters, opt.state_dict()]

    with state("ignore"):
        passes = [Pass(step) for step in range(3)]
        outputs = [[(d * np.float32(scale)).astype(d.dtype) for d in p.outputs] for p in passes]
    skipped = pytest.warns(RuntimeWarning, match="keeps its last factors")
    with skipped if scale > 1 else nullcontext():
        assert_independent(run)


# Arguments


@pytest.mark.parametrize("value", [1e300, 1e-300], ids=["huge", "tiny"])
@pytest.mark.parametrize("kind", ["raise", "warn"])
def test_arguments_are_refused_as_ever(kind: str, value: float) -> None:
    """Beyond float32 or 0 in it, as a scalar of NumPy, which asks for the error state itself."""
    number = np.float64(value)
    with state(kind):
        for make_one in (
            lambda: nn.Adam([np.ones(1, np.float32)], eps=number),
            lambda: nn.RMSProp([np.ones(1, np.float32)], epsilon=number),
            lambda: nn.Lamb([np.ones(1, np.float32)], 0.1, beta1=number),
        ):
            with pytest.raises(ValueError, match="is out of range"):
                make_one()


def test_initial_values_beyond_the_states() -> None:
    def run() -> list[Any]:
        opt = nn.Adagrad([np.ones(2, np.float32)], accum=1e30, state_dtype=np.float16)
        return [opt.state_dict()]

    assert_independent(run)
