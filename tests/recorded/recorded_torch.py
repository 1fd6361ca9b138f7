"""Runs recorded from PyTorch, pytorch_optimizer and optax, and their steps as our references.

The files and their format are described in ``data/README.md``.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import recorded
import reference
import reference_elementwise as elementwise
import reference_layerwise as layerwise
from recorded import Gradient, Trace
from reference import AdamScalars, Array

Hyper = dict[str, Any]
# (w, g, *states) -> (w, *states)
Formula = Callable[..., tuple[Any, ...]]


class Run(recorded.Run):
    """One recorded optimizer with its parameters."""

    @property
    def optimizer(self) -> str:
        """What ran, as ``library.Class``: ``torch.Adam``, ``po.Lamb``, ``optax.adam``."""
        return f"{self.meta['lib']}.{self.meta['class']}"

    def lr(self, t: int) -> float:
        """The learning rate of step t = 1, 2, ...; optax records only its argument."""
        return self.meta["lr"][t - 1][0] if "lr" in self.meta else self.hyper["learning_rate"]


def runs() -> dict[str, Run]:
    """Every recorded run, by the name of its file."""
    return recorded.runs("torch", Run, _trace)


def states(run: Run, i: int) -> dict[str, np.ndarray]:
    """What parameter `i` starts with, in the order in which its formula takes it. Axes of length 1,
    which torch keeps in the factors of Adafactor, are left out."""
    _, names, initial = _OPTIMIZERS[run.optimizer]
    recorded = run.traces[i].states
    return {
        name: np.full(recorded[name][0].squeeze().shape, initial)
        for name in names
        if name in recorded
    }


def formula(run: Run, t: int) -> Formula:
    """What the optimizer does at step t = 1, 2, ..., as a step of the references. The scalars are
    not rounded: the libraries compute nearly all of them in double precision."""
    return _OPTIMIZERS[run.optimizer][0](run.hyper, run.lr(t), t)


def gradients(run: Run, t: int) -> list[Gradient]:
    """The gradients of step t = 1, 2, ... after what `maximize` and `pre_norm` do to them."""
    found = [trace.gradients[t - 1] for trace in run.traces]
    if run.hyper.get("maximize"):
        return [-g for g in found]
    if run.hyper.get("pre_norm"):
        return layerwise.clip_by_global_norm(found, run.hyper["max_grad_norm"])
    return found


def _adam_scalars(h: Hyper, lr: float, t: int) -> dict[str, float]:
    """Epsilon is added to the corrected root, so to the bare one it comes corrected too."""
    beta1, beta2 = h.get("betas", (0.9, 0.999))
    # Of all scalars, optax has just the two corrections in float32.
    real = np.float32 if "learning_rate" in h else np.float64
    correction1, root = 1 - float(real(beta1) ** t), math.sqrt(1 - float(real(beta2) ** t))
    return {
        "beta1": beta1, "one_minus_beta1": 1 - beta1, "beta2": beta2, "one_minus_beta2": 1 - beta2,
        "step_size": lr * root / correction1, "lr": lr, "epsilon": h.get("eps", 1e-8) * root,
    }  # fmt: skip


def _adam(h: Hyper, lr: float, t: int) -> Formula:
    """Decay, where there is one, is added to the gradient."""
    return _coupled(partial(reference.adam, hp=AdamScalars(**_adam_scalars(h, lr, t))), h)


def _adamw(h: Hyper, lr: float, t: int) -> Formula:
    """The correction is in the learning rate, so it has to be taken out of the decay."""
    found = _adam_scalars(h, lr, t)
    rate = found["step_size"]
    hp = AdamScalars(**{**found, "lr": rate, "decay": lr * h["weight_decay"] / rate})
    return partial(reference.adam_weight_decay, hp=hp)


def _sparse_adam(h: Hyper, lr: float, t: int) -> Formula:
    """Rows by rows, epsilon as MindSpore has it."""
    found = {**_adam_scalars(h, lr, t), "epsilon": h.get("eps", 1e-8)}
    step = partial(reference.adam, hp=AdamScalars(**found))
    return lambda w, g, *states: reference.lazy_step(step, w, *g, *states)


def _torch_sgd(h: Hyper, lr: float, t: int) -> Formula:
    """The first buffer is the gradient, not dampened."""

    def step(w: Array, g: Array, buffer: Array) -> tuple[Array, ...]:
        scalars = {"momentum": h["momentum"], "one_minus_dampening": 1 - h.get("dampening", 0.0)}
        return elementwise.sgd_stat(w, g, buffer, np.full(w.shape, t == 1), lr=lr, **scalars)[:2]

    return _coupled(step, h)


def _optax_sgd(h: Hyper, lr: float, _: int) -> Formula:
    """Momentum without dampening."""
    return partial(elementwise.momentum, lr=lr, momentum=h["momentum"], nesterov=h["nesterov"])


def _rmsprop(h: Hyper, lr: float, _: int) -> Formula:
    """Torch adds epsilon to the root, so under it goes the square; its buffer is free of lr."""

    def step(w: Array, g: Array, mean: Array, square: Array, *buffer: Array) -> tuple[Array, ...]:
        moment = lr * buffer[0] if buffer else np.zeros(w.shape)
        *new, moment = elementwise.rmsprop_centered(
            *(w, g, mean, square, moment), lr=lr, rho=h["alpha"], one_minus_rho=1 - h["alpha"],
            momentum=h.get("momentum", 0.0), epsilon=1e-8**2)  # fmt: skip
        return (*new, moment / lr) if buffer else tuple(new)

    return _coupled(step, h)


def _adagrad(_: Hyper, lr: float, __: int) -> Formula:
    """The epsilons, 1e-10 beside the root and 1e-7 under it, are too small to show."""
    return partial(elementwise.adagrad, lr=lr)


def _torch_adafactor(h: Hyper, lr: float, t: int) -> Formula:
    """No epsilon in the squares, no average of updates; decay with the learning rate alone."""

    def step(w: Array, g: Array, *second: Array) -> tuple[Array, ...]:
        new, _, *second = layerwise.adafactor(
            *(w, g, None, *second), lr=min(lr, t**-0.5), beta2=1 - t ** h.get("beta2_decay", -0.8),
            one_minus_beta2=t ** h.get("beta2_decay", -0.8), epsilon1=0.0,
            epsilon2=h.get("eps", (None, 1e-3))[1], clip_threshold=h.get("d", 1.0))  # fmt: skip
        return (new - lr * h.get("weight_decay", 0.0) * w, *second)

    return step


def _adafactor(h: Hyper, lr: float, t: int) -> Formula:
    """MindSpore's, whose relative step replaces lr; optax has neither that nor an average."""
    beta1, _ = h.get("betas", (None, None))
    relative = "betas" in h and h.get("relative_step", True)

    def step(w: Array, g: Array, *states: Array) -> tuple[Array, ...]:
        new = layerwise.adafactor(
            *(w, g, *states) if beta1 else (w, g, None, *states),
            lr=min(1e-2, t**-0.5) if relative else lr, beta2=1 - t**-0.8, one_minus_beta2=t**-0.8,
            beta1=beta1, one_minus_beta1=1 - (beta1 or 0.0),
            scale_parameter=h.get("scale_parameter", True), decay=h.get("weight_decay", 0.0),
        )  # fmt: skip
        return new if beta1 else (new[0], *new[2:])

    return step


def _lamb(h: Hyper, lr: float, t: int) -> Formula:
    """Decay comes first; only the first moment is corrected; at most 10 of the norm counts."""
    found = {**_adam_scalars(h, lr, t), "epsilon": 1e-6, "decay": 0.0}
    rate = found.pop("step_size") / math.sqrt(1 - found["beta2"] ** t)

    def step(w: Array, g: Array, m: Array, v: Array) -> tuple[Array, ...]:
        w = (1 - lr * h.get("weight_decay", 0.0)) * w
        found["lr"] = rate * min(1.0, 10 / np.linalg.norm(w))
        return layerwise.lamb(w, g, m, v, beta1_power=0.0, beta2_power=0.0, **found)

    return step


def _po_lars(h: Hyper, lr: float, _: int) -> Formula:
    """Momentum over conditioned gradients; vectors give the bare one, without decay."""
    scalars = {"coefficient": 1e-3, "epsilon": 0.0, "decay": h["weight_decay"]}

    def step(w: Array, g: Array, accum: Array) -> tuple[Array, ...]:
        direction = layerwise.lars_gradient(w, g, **scalars) if w.ndim > 1 else g
        return elementwise.momentum(w, direction, accum, lr=lr, momentum=0.9)

    return step


def _optax_lars(h: Hyper, lr: float, _: int) -> Formula:
    """Decay counts as gradient in the norms; the trace is the momentum times -lr."""
    scalars = {"coefficient": 1e-3, "epsilon": h.get("eps", 0.0), "decay": 0.0}
    inner = {"lr": lr, "momentum": 0.9, "nesterov": h.get("nesterov", False)}

    def step(w: Array, g: Array, trace: Array) -> tuple[Array, ...]:
        direction = layerwise.lars_gradient(w, g, **scalars)
        w, accum = elementwise.momentum(w, direction, -trace / lr, **inner)
        return w, -lr * accum

    return _coupled(step, h)


def _adan(h: Hyper, lr: float, t: int) -> Formula:
    """The recorded gradient of the step before has the other sign."""
    betas = {"beta1": 0.98, "beta2": 0.92, "beta3": 0.99, "eps": 1e-8}

    def step(w: Array, g: Array, *states: Array) -> tuple[Array, ...]:
        *states, previous = states
        *new, last = elementwise.adan(
            *(w, g, *states, -previous), lr=lr, decay=h["weight_decay"], t=t, **betas
        )
        return (*new, -last)

    return step


def _lion(h: Hyper, lr: float, _: int) -> Formula:
    scalars = {"beta1": 0.9, "one_minus_beta1": 1 - 0.9, "beta2": 0.99, "one_minus_beta2": 1 - 0.99}
    return partial(elementwise.lion, lr=lr, decay=h["weight_decay"], **scalars)


def _coupled(step: Formula, h: Hyper) -> Formula:
    """A step whose gradient holds the decay."""
    decay = h.get("weight_decay", 0.0)
    return lambda w, g, *states: step(w, g + decay * w, *states)


MOMENTS = ("exp_avg", "exp_avg_sq")
# What a step is, the recorded names of its states in the order of the reference, their start.
_OPTIMIZERS: dict[str, tuple[Callable[[Hyper, float, int], Formula], tuple[str, ...], float]] = {
    "torch.Adam": (_adam, MOMENTS, 0.0),
    "torch.AdamW": (_adamw, MOMENTS, 0.0),
    "torch.SparseAdam": (_sparse_adam, MOMENTS, 0.0),
    "optax.adam": (_adam, ("mu", "nu"), 0.0),
    "optax.adamw": (_adamw, ("mu", "nu"), 0.0),
    "torch.SGD": (_torch_sgd, ("momentum_buffer",), 0.0),
    "optax.sgd": (_optax_sgd, ("trace",), 0.0),
    "torch.RMSprop": (_rmsprop, ("grad_avg", "square_avg", "momentum_buffer"), 0.0),
    "torch.Adagrad": (_adagrad, ("sum",), 0.0),
    "optax.adagrad": (_adagrad, ("sum_of_squares",), 0.1),
    "torch.Adafactor": (_torch_adafactor, ("row_var", "col_var", "variance"), 0.0),
    "po.AdaFactor": (
        _adafactor, ("exp_avg", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"), 0.0),
    "optax.adafactor": (_adafactor, ("v",), 0.0),
    "po.Lamb": (_lamb, MOMENTS, 0.0),
    "po.Adan": (_adan, ("exp_avg", "exp_avg_diff", "exp_avg_sq", "previous_grad"), 0.0),
    "po.LARS": (_po_lars, ("momentum_buffer",), 0.0),
    "optax.lion": (_lion, ("mu",), 0.0),
    "optax.lars": (_optax_lars, ("trace",), 0.0),
}  # fmt: skip


def _trace(arrays: dict[str, np.ndarray], i: int, meta: dict[str, Any]) -> Trace:
    """Parameter `i` of a file; its states are ``p<i>_s_<key>``, optax's ``s_<stage>_<key>_<i>``."""
    if meta["bf16"]:
        raise ValueError(f"bfloat16 bit patterns are not read: {meta['bf16']}")
    states = {
        match[1] or match[2]: array
        for key, array in arrays.items()
        if (match := re.fullmatch(rf"p{i}_s_(\w+)|s_\d+_(\w+)_{i}", key))
    }
    gradients: tuple[Gradient, ...] = (
        tuple((arrays[f"p{i}_gi{t}"], arrays[f"p{i}_gv{t}"]) for t in range(meta["T"]))
        if meta["sparse"]
        else tuple(arrays[f"p{i}_g"])
    )
    return Trace(arrays[f"p{i}_w"], gradients, states)
