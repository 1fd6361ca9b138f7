"""Descent: SGD, its average, and by signs."""

from __future__ import annotations

from typing import Any

import torch

from ...kernels.formula import Numbers
from ...kernels.rules import rprop as rprop_rules
from ...kernels.rules import sgd as rules
from .engine.part import Group, Method, number
from .optimizer import Fused


class SGD(Fused, torch.optim.SGD):
    """PyTorch's SGD.

    With ``g`` negated first where ``maximize``; at the first update ``a = g``::

        g <- g + weight_decay*w
        a <- momentum*a + (1 - dampening)*g
        w <- w - lr*a,   nesterov: w - lr*(g + momentum*a),   without momentum: w - lr*g

    Args:
        params, lr, momentum, dampening, weight_decay: as ``torch.optim.SGD``.
        nesterov, maximize, foreach, differentiable, fused: likewise.
        sparse, skip_nonfinite, state_dtype: see `Optimizer`.

    Raises:
        ValueError: an argument is out of range.
        RuntimeError: ``differentiable``.

    Without momentum and decay a sparse gradient updates the rows that occur, whatever ``sparse``.

    Source: ``torch.optim.SGD``.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = SGD(layer.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """

    _counts_updates = False

    def method(self, group: Group) -> Method:
        """See `Optimizer`."""
        if not group["momentum"]:
            return Method(rules.SGD, touches=not group["weight_decay"])
        rule = rules.MOMENTUM_NESTEROV if group["nesterov"] else rules.MOMENTUM
        return Method(rule, states=("momentum_buffer",))

    def scalars(self, group: Group, step: float) -> Numbers:
        """See `Optimizer`."""
        lr, momentum = number(group["lr"]), group["momentum"]
        if not momentum:
            return (lr,)
        return lr, momentum, 1.0 - (group["dampening"] if step > 1 else 0.0)


class ASGD(Fused, torch.optim.ASGD):
    """PyTorch's ASGD: descent that shrinks the parameter, and the average of where it has been.

    With ``eta`` and ``mu`` from the update before (first ``lr`` and 1)::

        g <- g + weight_decay*w
        w <- (1 - lambd*eta)*w - eta*g
        ax <- ax + mu*(w - ax)
        eta <- lr / (1 + lambd*lr*t)**alpha,   mu <- 1 / max(1, t - t0)

    Args:
        params, lr, lambd, alpha, t0: as ``torch.optim.ASGD``.
        weight_decay, foreach, maximize, differentiable, capturable: likewise.
        sparse, skip_nonfinite, state_dtype: see `Optimizer`.

    Raises:
        ValueError, RuntimeError: as `SGD`.

    Source: ``torch.optim.ASGD``; Polyak and Juditsky (1992).

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = ASGD(layer.parameters(), lr=0.1)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """

    def method(self, group: Group) -> Method:  # noqa: ARG002
        """See `Optimizer`."""
        return Method(rules.ASGD, states=("ax",))

    def numbers(self, group: Group) -> dict[str, float]:
        """See `Optimizer`."""
        return {"eta": number(group["lr"]), "mu": 1.0}

    def next_numbers(self, group: Group, step: float) -> dict[str, Any]:
        """See `Optimizer`."""
        lr = number(group["lr"])
        eta = lr / (1.0 + group["lambd"] * lr * step) ** group["alpha"]
        return {"eta": eta, "mu": 1.0 / max(1.0, step - group["t0"])}

    def scalars(self, group: Group, step: float) -> Numbers:  # noqa: ARG002
        """See `Optimizer`."""
        eta, mu = number(group["eta"]), number(group["mu"])
        return 1.0 - group["lambd"] * eta, eta, mu, 1.0


class Rprop(Fused, torch.optim.Rprop):
    """PyTorch's Rprop: each element has a step size of its own, and only signs count.

    A size, first ``lr``, grows by ``etas[1]`` while the gradient keeps its sign, and shrinks by
    ``etas[0]`` when that changes; then the element waits for one step. Sizes stay within
    ``step_sizes``.

    Args:
        params, lr, etas, step_sizes: as ``torch.optim.Rprop``.
        capturable, foreach, maximize, differentiable: likewise.
        sparse, skip_nonfinite, state_dtype: see `Optimizer`.

    Raises:
        ValueError, RuntimeError: as `SGD`.

    Source: ``torch.optim.Rprop``; Riedmiller and Braun (1993).

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = Rprop(layer.parameters(), lr=0.1)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """

    def method(self, group: Group) -> Method:  # noqa: ARG002
        """See `Optimizer`."""
        return Method(rprop_rules.RPROP)

    def initial(self, role: str, group: Group) -> float:
        """See `Optimizer`."""
        return number(group["lr"]) if role == "step_size" else 0.0

    def scalars(self, group: Group, step: float) -> Numbers:  # noqa: ARG002
        """See `Optimizer`."""
        return (number(group["lr"]), *group["etas"], *group["step_sizes"], 0.0, 1.0)
