"""Arguments of optimizers and schedules: shared checks, and attributes that are checked whenever
they are assigned to.

A wrong kind raises a `TypeError` (an int is no float), a value out of range a `ValueError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...kernels.quiet import quiet
from ...ops.runtime import check
from ...ops.runtime.errors import RejectedTypeError, RejectedValueError, reject, reject_unknown

LEAVES = "; jax.tree.leaves(x) lists the arrays of a tree x"
MOST_STEPS = int(np.iinfo(np.int32).max)
_OF_BASE = (
    "learning_rate", "weight_decay", "loss_scale", "use_locking", "sparse_update",
    "skip_nonfinite", "state_dtype", "rounding", "clipvalue", "clipnorm",
)  # fmt: skip


def base_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `FusedOptimizer` among the ``locals()`` of a subclass's constructor.

    Raises:
        TypeError: there is an unknown keyword.
    """
    reject_unknown(given["self"]._name, given["unknown"], given["__class__"])
    return {"parameters": given["params"], **{n: given[n] for n in _OF_BASE if n in given}}


def check_kind(where: str, name: str, value: Any, kinds: Any, expected: str) -> None:
    """Refuse a value that is no instance of ``kinds``."""
    if not isinstance(value, kinds):
        reject(TypeError, where, name, "has a wrong type", expected, type(value).__name__)


def open_unit(where: str, name: str, value: Any, real: Any) -> float:
    """A float strictly between 0 and 1, in the arithmetic type ``real`` too."""
    return _float_up_to(1.0, "between 0 and 1", where, name, value, real)


def positive_float(where: str, name: str, value: Any, real: Any) -> float:
    """A finite float above 0, in the arithmetic type ``real`` too."""
    return _float_up_to(np.inf, "positive and finite", where, name, value, real)


@quiet
def _float_up_to(end: float, expected: str, where: str, name: str, value: Any, real: Any) -> float:
    check_kind(where, name, value, float | np.floating, "a float")
    accepted = 0.0 < real(value) < end
    check.in_range(where, name, value, bool(accepted), f"{expected} in {real.__name__}")
    return float(value)


def seed(where: str, name: str, value: Any) -> int:
    """An int from 0 to 2**63 - 1."""
    if not is_int(value):
        reject(TypeError, where, name, "has a wrong type", "an int", type(value).__name__)
    check.in_range(where, name, value, 0 <= value < 1 << 63, "from 0 to 2**63 - 1")
    return int(value)


def betas_and_eps(
    where: str, params: Any, beta1: Any, beta2: Any, eps: Any
) -> tuple[float, float, float]:
    """Adam's hyper-parameters, in range in the arithmetic of ``params``."""
    real = arithmetic_type(params)
    return (
        open_unit(where, "beta1", beta1, real),
        open_unit(where, "beta2", beta2, real),
        positive_float(where, "eps", eps, real),
    )


def arithmetic_type(params: Any) -> Any:
    """float64 if all ``params`` (arrays, parameters or lists of them) are float64, else float32.

    It decides which hyper-parameters are in range, before the parameters themselves are checked.
    """
    entries = params if isinstance(params, list | tuple) else []
    dtypes = {getattr(entry, "dtype", None) for entry in entries}
    return np.float64 if dtypes == {np.dtype(np.float64)} else np.float32


def non_negative_float(where: str, name: str, value: Any) -> float:
    """A finite float of at least 0."""
    number = check.float_attribute(where, name, value)
    check.in_range(where, name, value, number >= 0.0, "at least 0")
    return number


def clip_limit(where: str, name: str, value: Any) -> float | None:
    """A limit of gradients: a number above 0, in float32 too; None: no clipping."""
    if value is None:
        return None
    number = check.scalar(where, name, value)
    check.in_range(
        where, name, number, number >= 1.0 / check.LARGEST, "positive and finite in float32"
    )
    return number


def positive_int(where: str, name: str, value: Any) -> int:
    """An int, Python's or NumPy's, of at least 1."""
    return _int_from(1, where, name, value)


def count(where: str, name: str, value: Any) -> int:
    """An int, Python's or NumPy's, of at least 0."""
    return _int_from(0, where, name, value)


def is_int(value: Any) -> bool:
    """Whether ``value`` is an int of Python or NumPy; a bool is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _int_from(least: int, where: str, name: str, value: Any) -> int:
    if not is_int(value):
        reject(TypeError, where, name, "has a wrong type", "an int", type(value).__name__)
    check.in_range(where, name, value, value >= least, f"at least {least}")
    return int(value)


def list_or_tuple(where: str, name: str, value: Any) -> tuple[Any, ...]:
    """A copy of the elements of a list or a tuple."""
    check_kind(where, name, value, list | tuple, "a list or a tuple")
    return tuple(value)


def step_numbers(where: str, step: Any) -> np.ndarray:
    """Steps as an array of non-negative integers, 0-d for a single one."""
    wrong, expected = "has a wrong type", "an int or an array of ints"
    if isinstance(step, bool) or not (isinstance(step, int) or hasattr(step, "__array__")):
        reject(TypeError, where, "global_step", wrong, expected, type(step).__name__)
    steps = np.asarray(step)
    if steps.dtype.kind not in "iu":
        reject(TypeError, where, "global_step", wrong, expected, steps.dtype)
    if (steps < 0).any():
        reject(ValueError, where, "global_step", "is out of range", "at least 0", steps.min())
    return steps


def gradients_of(where: str, gradients: Any, n_parameters: int) -> tuple[Any, ...]:
    """The gradients of a step as a tuple, one for each parameter."""
    if not isinstance(gradients, (tuple, list)):
        wrong, got = "has a wrong type", type(gradients).__name__
        expected = "a tuple or list in the order of the parameters"
        fix = LEAVES if isinstance(gradients, dict) else ""
        reject(RejectedTypeError, where, "gradients", wrong, expected, got, fix)
    if len(gradients) != n_parameters:
        wrong, expected = "has a wrong length", f"{n_parameters}, one for each parameter"
        reject(RejectedValueError, where, "gradients", wrong, expected, len(gradients))
    return tuple(gradients)


def next_step(where: str, global_step: np.ndarray) -> int:
    """The number of the next step, from 0 on; the count is an int32, as published."""
    step = int(global_step[0])
    if step >= MOST_STEPS:
        expected = f"at most {MOST_STEPS} steps"
        reject(OverflowError, where, "global_step", "is at its end", expected, step)
    return step


Accept = Callable[[str, str, Any], Any]


class Checked:
    """An attribute whose values go through ``accept(where, name, value)`` when assigned.

    Its class must be a subclass of `CheckedAttributes`, whose ``__setattr__`` checks: with a
    ``__set__`` here, reading the attribute would be a call too.
    """

    def __init__(self, accept: Accept) -> None:
        self._accept = accept

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        if not issubclass(owner, CheckedAttributes):
            raise TypeError(f"{owner.__name__}.{name} is not checked: it is no CheckedAttributes")

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        raise AttributeError(f"{instance._name}: {self._name} is not set")

    if TYPE_CHECKING:

        def __set__(self, instance: Any, value: Any) -> None: ...

    def accepted(self, instance: Any, value: Any) -> Any:
        """The value that ``instance`` is to hold."""
        return self._accept(instance._name, self._name, value)


class CheckedAttributes:
    """A class that can have `Checked` attributes."""

    def __setattr__(self, name: str, value: Any) -> None:
        attribute = getattr(type(self), name, None)
        if isinstance(attribute, Checked):
            value = attribute.accepted(self, value)
        super().__setattr__(name, value)


class Fixed(Checked):
    """A `Checked` attribute that cannot change after construction, such as a limit of clipping.

    It is fixed, once it has a value, if ``is_fixed(optimizer)`` is true.
    """

    def __init__(self, accept: Accept, is_fixed: Callable[[Any], bool] = lambda _: True) -> None:
        super().__init__(accept)
        self._is_fixed = is_fixed

    def accepted(self, instance: Any, value: Any) -> Any:
        """The checked value (`Checked.accepted`), which can no longer change once it is fixed."""
        if self._name in vars(instance) and self._is_fixed(instance):
            wrong, expected = "is fixed at construction", "an optimizer that is made with it"
            reject(AttributeError, instance._name, self._name, wrong, expected, value)
        return super().accepted(instance, value)
