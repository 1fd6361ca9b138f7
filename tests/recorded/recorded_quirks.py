"""What MindSpore's CPU kernels do where fusestep does something else, and how a case shows it.

The formulas are steps like those of the references: ``(w, g, *states) -> (w, *states)`` in
float64, where ``g`` is a dense gradient or the pair (indices, rows).
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike
import reference
import reference_elementwise as elementwise
from recorded import Case, Step, assert_close_recorded
from reference import AdamScalars, Array, wide

# (w, g, *states) -> (w, *states), for step t = 1, 2, ...
Formula = Callable[[int], Callable[..., tuple[Array, ...]]]
Rows = tuple[np.ndarray, np.ndarray]


def gradient_of(step: Step, i: int = 0) -> np.ndarray | Rows:
    """The gradient of parameter `i`: dense, or indices and rows."""
    if "indices" in step.inputs:
        return step.inputs["indices"], step.inputs["grad"]
    return step.inputs["grad" if "grad" in step.inputs else f"g{i}"]


def terms(
    case: Case, before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The size of what each variable is the sum of after a step: its rounding may stay."""
    found = {entry: np.abs(array) for entry, array in before.items()}
    if "linear" in found:
        # FTRL adds the difference of two terms of this size.
        power = after["accum"] ** -case.hyper["lr_power"]
        found["linear"] = found["linear"] + found["var"] * power / case.hyper["lr"]
    return found


def assert_follows(
    case: Case, entries: Sequence[str], start: Sequence[ArrayLike], formula: Formula, i: int = 0
) -> None:
    """What a case recorded of `entries` follows from `start` by `formula`, step after step. An
    element may hold the rounding of all that it has been the sum of."""
    __tracebackhide__ = True
    values = dict(zip(entries, map(wide, start), strict=True))
    reached = dict.fromkeys(entries, 0.0)
    for t, step in enumerate(case.steps, 1):
        w, *states = values.values()
        new = dict(zip(entries, formula(t)(w, gradient_of(step, i), *states), strict=True))
        sizes = terms(case, values, new)
        reached = {entry: np.maximum(reached[entry], sizes[entry]) for entry in entries}
        for entry in new.keys() & step.outputs.keys():
            label = f"recorded {entry} after step {t}"
            assert_close_recorded(
                step.outputs[entry], new[entry], case.dtype, label, reached[entry]
            )
        values = new


def merged(
    driver: Callable[..., tuple[Array, ...]], step: Callable[..., tuple[Array, ...]]
) -> Callable[..., tuple[Array, ...]]:
    """A step of the references for (indices, rows), by one of their drivers."""
    return lambda w, rows, *states: driver(step, w, *rows, *states)


def adagrad(w: Array, g: Array, accum: Array, *, lr: float) -> tuple[Array, Array]:
    """An epsilon under the root; the accumulator is updated whatever `update_slots` says."""
    accum = accum + wide(g) ** 2
    return w - lr * wide(g) / np.sqrt(accum + float(np.float32(1e-8))), accum


def ftrl(w: Array, g: Array, accum: Array, linear: Array, **scalars: float) -> tuple[Array, ...]:
    """The sign of l1 is always positive."""
    lr, l1, l2, power = (scalars[name] for name in ("lr", "l1", "l2", "lr_power"))
    _, accum, linear = elementwise.ftrl(w, g, accum, linear, **scalars)
    leader = (l1 - linear) / (accum**-power / lr + 2.0 * l2)
    return np.where(np.abs(linear) <= l1, 0.0, leader), accum, linear


def rmsprop(
    w: Array, g: Array, mean_square: Array, moment: Array, *, lr: float, rho: float,
    one_minus_rho: float, momentum: float, epsilon: float,
) -> tuple[Array, ...]:  # fmt: skip
    """Epsilon is added to the root in whole blocks of 8 elements, under it in the rest."""
    mean_square = rho * mean_square + one_minus_rho * wide(g) ** 2
    root = np.sqrt(mean_square + epsilon)
    blocks = w.size // 8 * 8
    root.flat[:blocks] = np.sqrt(mean_square.flat[:blocks]) + epsilon
    moment = momentum * moment + lr * wide(g) / root
    return w - moment, mean_square, moment


def one_by_one(
    step: Callable[..., tuple[Array, ...]], w: Array, rows: Rows, *states: Array
) -> tuple[Array, ...]:
    """Rows of equal indices make one step each."""
    arrays: tuple[Array, ...] = (w, *states)
    for index, row in zip(*rows, strict=True):
        arrays = reference.lazy_step(step, arrays[0], [index], row[None], *arrays[1:])
    return arrays


def adam_sum_of_squares(
    w: Array, rows: Rows, m: Array, v: Array, *, hp: AdamScalars
) -> tuple[Array, Array, Array]:
    """Every row moves; of equal indices the gradients and, in `v`, their squares are added."""
    indices, values = rows
    m = hp.beta1 * m + hp.one_minus_beta1 * reference.densify(indices, values, w.shape)
    v = hp.beta2 * v + hp.one_minus_beta2 * reference.densify(indices, wide(values) ** 2, w.shape)
    return w - hp.step_size * m / (np.sqrt(v) + hp.epsilon), m, v


def adam_last_wins(
    w: Array, rows: Rows, m: Array, v: Array, *, hp: AdamScalars
) -> tuple[Array, Array, Array]:
    """Each occurrence steps from the old moments: `w` takes all, `m` and `v` keep the last."""
    new = wide(w), wide(m), wide(v)
    for index, row in zip(*rows, strict=True):
        delta, new[1][index], new[2][index] = reference.adam_delta(row, m[index], v[index], hp)
        new[0][index] += delta
    return new
