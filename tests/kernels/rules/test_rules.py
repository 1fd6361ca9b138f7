"""Rules of Adam's family as a table, their scalars, and what happens to a gradient before them.

Steps are compared with the references in test_family_reference.py, test_ops_reference.py and
test_mxnet_reference.py.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference
from fusestep.kernels.formula import running_powers
from fusestep.kernels.rule import Rule, hp_type
from fusestep.kernels.rules import adam as rules
from fusestep.kernels.rules import gradient as prologues
from fusestep.kernels.rules import mxnet

HYPER = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-3}
# Powers of the third update; the fourth scalar of decay is only in its rule.
POWERS = {"beta1_power": 0.9**3, "beta2_power": 0.99**3}
DECAY = {"decay": 0.05}


# Each rule of the family: how its scalars are made, and the reference step (w, g, *states, hp).
RULES: dict[str, tuple[Rule, dict[str, float], Callable[..., Any]]] = {
    "adam": (rules.ADAM, POWERS, reference.adam),
    "nesterov": (rules.ADAM_NESTEROV, POWERS, lambda *a: reference.adam(*a, nesterov=True)),
    "amsgrad": (rules.ADAM_AMSGRAD, POWERS, reference.adam_amsgrad),
    "delta": (rules.ADAM_DELTA, POWERS, lambda _, *a: reference.adam_delta(*a)),
    "nesterov_delta": (
        rules.ADAM_NESTEROV_DELTA, POWERS, lambda _, *a: reference.adam_delta(*a, nesterov=True)),
    "weight_decay": (rules.ADAM_WEIGHT_DECAY, DECAY, reference.adam_weight_decay),
    "mxnet": (mxnet.MXNET_ADAM, POWERS, reference.adam),
    "mxnet_decay": (mxnet.MXNET_ADAMW, DECAY, reference.adam_weight_decay),
    "mxnet_decay_composed": (mxnet.MXNET_ADAMW_COMPOSED, DECAY, reference.adamw_composed),
}  # fmt: skip


def scalars(name: str, real: Any) -> tuple[tuple[Any, ...], reference.AdamScalars]:
    """The scalars of a rule, rounded to `real`, for the library and for the reference."""
    rule, extra, _ = RULES[name]
    hp = hp_type(rule, ())
    expected = reference.adam_scalars(**HYPER, **extra, real=real)
    if name.startswith("mxnet"):  # how it rounds is tested with its optimizers
        return hp(*(real(getattr(expected, field)) for field in rule.hp)), expected
    lr, *constants = HYPER.values()
    if rule is rules.ADAM_WEIGHT_DECAY:
        made = rules.adam_weight_decay_scalars(real, lr, DECAY["decay"], 3, tuple(constants), ())
    else:
        made = rules.adam_scalars(
            real, lr, 0.0, 3, tuple(constants), (*map(real, POWERS.values()),)
        )
    return hp(*made), expected


def samples(n: int, n_states: int, seed: int) -> list[np.ndarray]:
    """Parameter, gradient and states over four decades, with zeros and cancelling moments."""
    rng = np.random.default_rng(seed)
    size = np.exp(rng.uniform(np.log(1e-2), np.log(1e2), (2 + n_states, n)))
    w, g, m = size[:3] * rng.choice([-1.0, 1.0], (3, n))
    v = size[3] ** 2
    # beta1*m + (1 - beta1)*g is nearly 0 for a tenth of the elements, and exactly 0 for others.
    k = n // 10
    m[:k] = -g[:k] / 9
    w[k : 2 * k] = g[2 * k : 3 * k] = m[3 * k : 4 * k] = v[4 * k : 5 * k] = 0.0
    return [w, g, m, v, *size[4:] ** 2]


def test_prologue_in_plain_python() -> None:
    """No decay is nothing, also beside an infinite weight; a NaN that is clipped stays a NaN."""
    hp = SimpleNamespace(weight_decay=0.5, no_decay=0.0, grad_scale=0.25)
    assert prologues.coupled_decay(3.0, -4.0, hp) == 1.0
    assert prologues.scale(3.0, -4.0, hp) == 0.75
    hp.weight_decay = 0.0
    assert prologues.coupled_decay(3.0, np.inf, hp) == 3.0
    hp = SimpleNamespace(clip_bound=0.5)
    given = [0.5, -0.5, 0.25, 7.0, -7.0, np.inf, -np.inf]
    clipped = [prologues.clip(g, 1.0, hp) for g in given]
    assert clipped == [0.5, -0.5, 0.25, 0.5, -0.5, 0.5, -0.5]
    assert np.isnan(prologues.clip(np.nan, 1.0, hp))


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.999])
def test_running_power_is_the_rounded_product(beta: float) -> None:
    expected = reference.beta_powers(beta, 50)
    bases = beta, 0.25
    powers = [running_powers(np.float32, bases, t) for t in range(1, 51)]
    assert powers == [(power, 0.25**t) for t, power in enumerate(expected, 1)]
    # Not in order either: a resumed run asks for one in the middle.
    assert running_powers(np.float32, bases, 37)[0] == expected[36]
    assert running_powers(np.float64, (beta,), 7) == (pytest.approx(beta**7, rel=1e-14),)
    assert running_powers(np.float32, bases, 0) == (1, 1)


def test_amsgrad_keeps_a_nan_of_v() -> None:
    hp, _ = scalars("amsgrad", np.float64)
    _, _, v, vhat = rules.adam_amsgrad(1.0, np.nan, 0.0, 0.5, 7.0, hp)
    assert np.isnan([v, vhat]).all()
