"""The step of each form of an optimizer in float64, with the scalars of the optimizer at hand."""

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import reference
from optimizers import ALL_FORMS
from reference import Step

FORMS = [name for name, form in ALL_FORMS.items() if form.reference]


def reference_of(form: str) -> Callable[..., Any]:
    """The function that the registry names: ``adam`` or, of another file, ``elementwise.sgd``."""
    file, _, name = ALL_FORMS[form].reference.rpartition(".")
    step: Callable[..., Any] = getattr(import_module(f"reference_{file}".rstrip("_")), name)
    return step


def exact_step(form: str, opt: Any, lr: float, t: int, real: Any, decay: float = 0.0) -> Step:
    """The reference of update t = 1, 2, ... of a parameter. A scalar of the reference is an option
    of the optimizer with the same name, rounded to `real`; but for ``lr``, ``decay``, ``t``,
    complements ``one_minus_x`` and powers ``x_power``."""
    step, renamed = reference_of(form), ALL_FORMS[form].renamed
    names = inspect.signature(step).parameters
    if "hp" in names:
        powers = (reference.beta_powers(x, t, real)[-1] for x in (opt.beta1, opt.beta2))
        hp = reference.adam_scalars(lr, opt.beta1, opt.beta2, opt.eps, *powers, decay, real)
        if not getattr(opt, "eps_hat", True) or getattr(opt, "correct_bias", False):
            constants = opt.beta1, opt.beta2, opt.eps
            hp = reference.usual_adam_scalars(lr, *constants, t, decay, real)
        fixed = {"nesterov": opt.use_nesterov} if "nesterov" in names else {}
        return lambda w, g, *states: step(w, g, *states, hp, **fixed)

    of_step = {"lr": lr, "decay": decay, "t": t}

    def scalar(name: str) -> Any:
        value = getattr(opt, renamed.get(name, name), None)
        if value is None and name.startswith("one_minus_"):
            return float(real(1.0) - real(scalar(name.removeprefix("one_minus_"))))
        if value is None and name.endswith("_power"):
            return scalar(name.removesuffix("_power")) ** t
        if value is None:
            value = of_step[renamed.get(name, name)]
        return value if isinstance(value, bool | int) else float(real(value))

    given = [
        name
        for name, p in names.items()
        if p.kind is p.KEYWORD_ONLY
        and (p.default is p.empty or hasattr(opt, renamed.get(name, name)))
    ]
    return partial(step, **{name: scalar(name) for name in given})
