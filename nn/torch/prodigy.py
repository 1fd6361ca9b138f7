"""Prodigy, which finds the length of its steps itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ...kernels.formula import Numbers
from ...kernels.rules import prodigy as rules
from ...ops.runtime import check
from ...ops.runtime.errors import reject
from .engine.options import Rounding, above_0, betas_in_range, not_negative, with_defaults
from .engine.part import Group, Method, number
from .optimizer import Fused

_FLAGS = "decouple", "use_bias_correction", "safeguard_warmup"
# What all groups have in common, as the first one has it.
_OF_ALL = "d", "d_max", "d_numerator"
_CONSTANTS = "d0", "d_coef", "growth_rate"


class Prodigy(Fused, torch.optim.Optimizer):
    """Adam whose steps are as long as the distance that the parameters seem to have to go.

    With the estimate ``d`` of that distance before the step, ``r = d*lr`` (with
    ``use_bias_correction`` times ``sqrt(1 - beta2**t) / (1 - beta1**t)`` at step t = 1, 2, ...),
    the parameters ``p0`` at their first update, and sums over all elements of all parameters::

        N <- beta3*N + d/d0 * r * sum(g * (p0 - w))
        m <- beta1*m + (1 - beta1)*d*g
        v <- beta2*v + (1 - beta2)*d*d*g*g
        s <- beta3*s + d/d0 * r * g         (with safeguard_warmup d in the place of r)
        D  = d_coef * N / sum(|s|)
        d <- min(max(d0, all D so far), growth_rate * d)   (while d is d0: of max(d, D))
        w <- w - weight_decay*r*w - r * m / (sqrt(v) + d*eps)

    Only the last ``d`` is the new one. With ``betas[0] = 0`` there is no ``m``, and ``d*g`` with
    the new d takes its place. A step in which ``sum(|s|)`` is 0 changes and counts nothing. ``d``,
    ``d_max``, ``d_numerator`` and the number of steps ``k`` are options of the groups, the same in
    all; gradients are read only, with a coupled decay too.

    Args:
        params: ... A group's ``lr`` may be 0 where others' is not: its states stay, and it goes on
            along them.
        lr: a factor of the steps, above 0. Usually 1, or a schedule from 1 to 0.
        beta3: in [0, 1): how ``N`` and ``s`` fade; None: ``sqrt(betas[1])``.
        eps: above 0.
        decouple: whether the weight decay is decoupled, as in the formula; else it is added to the
            gradient, ``g + weight_decay*w``.
        use_bias_correction, safeguard_warmup: see the formula.
        d0: above 0: what d begins with.
        d_coef, growth_rate: above 0: see the formula.
        fsdp_in_use, slice_p: must be False and 1.

    In the step ``param``, sparse gradients, CUDA tensors, distributed parameters and different
    learning rates above 0 raise.

    Source: ``prodigyopt.Prodigy`` 1.1.2; Mishchenko and Defazio (2024), arXiv:2306.06101.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = Prodigy(layer.parameters())
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     layer(torch.ones(1, 2)).square().sum().backward()
    ...     optimizer.step()
    >>> optimizer.param_groups[0]["k"]
    3
    """

    _takes_sparse = False

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1.0, betas: tuple[float, float] = (0.9, 0.999),
        beta3: float | None = None, eps: float = 1e-8, weight_decay: float = 0.0,
        decouple: bool = True, use_bias_correction: bool = False,
        safeguard_warmup: bool = False, d0: float = 1e-6, d_coef: float = 1.0,
        growth_rate: float = math.inf, fsdp_in_use: bool = False,
        slice_p: int = 1, *, maximize: bool = False, skip_nonfinite: bool = False,
        state_dtype: torch.dtype | None = None, rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        arguments = with_defaults(locals())
        for name in _FLAGS:
            check.flag(type(self).__name__, name, arguments["defaults"][name])
        above_0(d0=d0, lr=lr, eps=eps, d_coef=d_coef, growth_rate=growth_rate)
        not_negative(lr=lr, weight_decay=weight_decay)
        betas_in_range(betas)
        if beta3 is not None:
            betas_in_range((beta3,), n=1)
        if fsdp_in_use or slice_p != 1:
            wrong = "fsdp_in_use=True" if fsdp_in_use else f"slice_p={slice_p}"
            why = "the estimate is that of all elements, in one process"
            raise ValueError(f"Prodigy: {wrong} is not supported: {why}")
        numbers = {"d": d0, "d_max": d0, "d_numerator": 0.0, "k": 0}
        arguments["defaults"] |= numbers | {"fsdp_in_use": False, "slice_p": 1}
        super().__init__(**arguments)

    def method(self, group: Group) -> Method:
        has_average = group["betas"][0] > 0.0
        return Method(rules.RULES[has_average, group["decouple"]], couples=not group["decouple"])

    def scalars(self, group: Group, step: float) -> Numbers:  # noqa: ARG002
        first, (beta1, beta2) = self.param_groups[0], group["betas"]
        largest = max(number(each["lr"]) for each in self.param_groups)
        lr = group["lr"]
        if lr not in (largest, 0.0):
            raise RuntimeError(
                "Prodigy: learning rates of groups differ: expected equal ones, or 0, got "
                f"{lr} beside {largest}"
            )
        correction = 1.0
        if first["use_bias_correction"]:
            correction = rules.correction(first["betas"][0], first["betas"][1], first["k"] + 1)
        constants = rules.prodigy_constants(
            (beta1, beta2, _beta3(first)), group["eps"], first["d"], first["d0"], largest,
            correction, decoupled=group["decouple"], safeguarded=group["safeguard_warmup"],
        )  # fmt: skip
        decay = group["weight_decay"]
        scalars: Numbers = rules.prodigy_scalars(float, lr, decay, 0, constants, ())
        return scalars

    def constants_of_step(self) -> dict[str, float]:
        first = self.param_groups[0]
        return {"beta3": _beta3(first), **{name: first[name] for name in (*_OF_ALL, *_CONSTANTS)}}

    def take_over(self, numbers: np.ndarray) -> None:
        for group in self.param_groups:
            group.update(zip(_OF_ALL, numbers.tolist(), strict=True))
            group["k"] += 1

    def _step(self, param: Tensor | None, *rest: Any) -> None:
        if param is not None:
            why = "the estimate is that of all parameters"
            raise RuntimeError(f"Prodigy: step(param=...) is not supported: {why}")
        super()._step(param, *rest)
        # torch.distributed.checkpoint has an optimizer make its states by a step without a rate.
        if self.param_groups[0]["k"] == 0 and not any(number(g["lr"]) for g in self.param_groups):
            self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        """Make the states of parameters that have a gradient."""
        for group in self.param_groups:
            choice = self._choice(group)
            for p in group["params"]:
                if p.grad is not None and not self.state.get(p):
                    self.state[p] = self._new_state(group, p, choice)

    def load_state_dict(self, state_dict: dict[str, Any], *, from_masters: bool = False) -> None:
        """Load a state dict (`FusedOptimizer.load_state_dict`).

        Raises:
            ValueError: a run of some steps has lost its states on the way, as through a checkpoint
                that was loaded into an optimizer without states.
        """
        n = max((group.get("k", 0) for group in state_dict["param_groups"]), default=0)
        if n and not any(state_dict["state"].values()):
            expected = f"those of a run of {n} steps"
            reject(ValueError, "Prodigy", "the states", "are missing", expected, "none")
        super().load_state_dict(state_dict, from_masters=from_masters)

    def _check(self, *rest: Any) -> bool:
        if len({self.method(each).rule for each in self.param_groups}) > 1:
            raise RuntimeError(
                "Prodigy: groups differ in decouple, or in whether betas[0] is 0: expected the "
                "same in all"
            )
        return super()._check(*rest)


def _beta3(group: Group) -> float:
    beta3 = group["beta3"]
    return float(math.sqrt(group["betas"][1]) if beta3 is None else beta3)
