"""Adam and what follows it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...kernels.rules import adam as plain_rules
from ...kernels.rules import lion as lion_rules
from ...kernels.rules.formula import Numbers
from ...kernels.rules.torch import adam as rules
from .binding import Choice
from .optimizer import Method, Optimizer, betas_in_range, not_negative
from .tensors import number


def _betas(group: Mapping[str, Any]) -> Numbers:
    return tuple(map(number, group["betas"]))


def _moments(beta1: float, beta2: float) -> Numbers:
    return 1.0 - beta1, beta2, 1.0 - beta2


def _shrink(group: Mapping[str, Any]) -> float:
    """What a decoupled weight decay leaves of a parameter."""
    return float(1.0 - number(group["lr"]) * number(group["weight_decay"]))


class Adam(Optimizer, torch.optim.Adam):
    """PyTorch's Adam, dense and row-sparse.

    At update t = 1, 2, ... of a parameter, with ``g`` negated first where ``maximize``::

        g <- g + weight_decay*w            (decoupled_weight_decay: w <- w - lr*weight_decay*w)
        m <- m + (1 - beta1)*(g - m)
        v <- beta2*v + (1 - beta2)*g*g     (amsgrad: the largest v so far in the place of v)
        w <- w - lr / (1 - beta1**t) * m / (sqrt(v / (1 - beta2**t)) + eps)

    Args:
        params, lr, betas, eps, weight_decay, amsgrad: as ``torch.optim.Adam``.
        foreach, maximize, capturable, differentiable, fused, decoupled_weight_decay: likewise.
        sparse, skip_nonfinite, state_dtype: see `Optimizer`.

    Raises:
        ValueError: an argument is out of range.
        RuntimeError: ``differentiable``, or ``capturable`` on a CUDA device.

    Source: ``torch.optim.Adam``; Kingma and Ba (2015), arXiv:1412.6980.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = Adam(layer.parameters(), lr=0.1)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """

    def method(self, group: Mapping[str, Any]) -> Method:
        """See `Optimizer`."""
        is_coupled = not group.get("decoupled_weight_decay")
        return Method(rules.TORCH_AMSGRAD if group["amsgrad"] else rules.TORCH_ADAM, is_coupled)

    def scalars(self, group: Mapping[str, Any], step: float) -> Numbers:
        """See `Optimizer`."""
        (beta1, beta2), lr = _betas(group), number(group["lr"])
        shrink = _shrink(group) if group.get("decoupled_weight_decay") else 1.0
        root = 1.0 / math.sqrt(1.0 - beta2**step)
        return (*_moments(beta1, beta2), lr / (1.0 - beta1**step), root, group["eps"], shrink)


class AdamW(Optimizer, torch.optim.AdamW):
    """PyTorch's AdamW: `Adam` with ``decoupled_weight_decay``.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad: as ``torch.optim.AdamW``.
        maximize, foreach, capturable, differentiable, fused: likewise.
        sparse, skip_nonfinite, state_dtype: see `Optimizer`.

    Raises:
        ValueError, RuntimeError: as `Adam`.

    Source: ``torch.optim.AdamW``; Loshchilov and Hutter (2019), arXiv:1711.05101.

    >>> import torch
    >>> table = torch.nn.Embedding(10, 2, sparse=True)
    >>> optimizer = AdamW(table.parameters(), lr=0.1, sparse="touched")
    >>> table(torch.tensor([3, 3, 7])).sum().backward()
    >>> optimizer.step()
    """

    method = Adam.method
    scalars = Adam.scalars

    def _complete(self, group: dict[str, Any]) -> None:
        super()._complete(group)
        group["decoupled_weight_decay"] = True  # PyTorch before 2.7 does not say it


class SparseAdam(Optimizer, torch.optim.SparseAdam):
    """PyTorch's SparseAdam: Adam on the rows that occur, for sparse gradients only.

    Rows of equal indices are summed first. The formula is that of `Adam`, but with ``eps`` beside
    the root that is not corrected::

        w <- w - lr * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + eps)

    Args:
        params, lr, betas: as ``torch.optim.SparseAdam``.
        eps, maximize: likewise.
        sparse, skip_nonfinite, state_dtype: see `Optimizer`.

    Raises:
        ValueError: an argument is out of range.

    A step with a dense gradient is a RuntimeError, as in PyTorch; but for the step with a gradient
    and a learning rate of 0 by which ``torch.distributed.checkpoint`` makes states: PyTorch's
    cannot resume from there.

    Source: ``torch.optim.SparseAdam``.

    >>> import torch
    >>> table = torch.nn.Embedding(10, 2, sparse=True)
    >>> optimizer = SparseAdam(table.parameters(), lr=0.1)
    >>> table(torch.tensor([3, 3, 7])).sum().backward()
    >>> optimizer.step()
    """

    def method(self, group: Mapping[str, Any]) -> Method:  # noqa: ARG002
        """See `Optimizer`."""
        return Method(rules.TORCH_ADAM, touches=True)

    def scalars(self, group: Mapping[str, Any], step: float) -> Numbers:
        """See `Optimizer`."""
        beta1, beta2 = _betas(group)
        size = number(group["lr"]) * math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
        return (*_moments(beta1, beta2), size, 1.0, group["eps"], 1.0)

    def _new_step(self) -> Any:
        return 0

    def _check(
        self, group: Mapping[str, Any], choice: Choice, name: str, parameter: Tensor
    ) -> bool:
        gradient = parameter.grad
        if gradient is None or gradient.layout == torch.sparse_coo:
            return super()._check(group, choice, name, parameter)
        # By such a step torch.distributed.checkpoint makes states.
        if number(group["lr"]) == 0.0 and parameter not in self.state:
            return False
        raise RuntimeError(
            "SparseAdam does not support dense gradients, please consider Adam instead"
        )


class LazyAdam(Optimizer):
    """Adam that leaves rows alone which do not occur in a sparse gradient.

    The formula is that of `Adam`; a dense gradient updates every row. The count of updates, and
    with it the correction of the bias, is that of the whole table.

    Args:
        params: as in ``torch.optim``.
        lr: learning rate, at least 0; a number or a tensor of one element.
        betas: two numbers in [0, 1).
        eps: at least 0.
        weight_decay: coupled, of the rows that occur; at least 0.
        amsgrad, maximize: as `Adam`.
        sparse, skip_nonfinite, state_dtype: see `Optimizer`.

    Raises:
        ValueError: an argument is out of range.

    Source: ``mindspore.nn.LazyAdam``, with PyTorch's numbers.

    >>> import torch
    >>> table = torch.nn.Embedding(10, 2, sparse=True)
    >>> optimizer = LazyAdam(table.parameters(), lr=0.1)
    >>> table(torch.tensor([3, 3, 7])).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self, params: Any, lr: Any = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, *, maximize: bool = False, **own: Any,
    ) -> None:  # fmt: skip
        not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        betas_in_range(betas)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                    "amsgrad": amsgrad, "maximize": maximize}  # fmt: skip
        super().__init__(params, defaults, **own)

    def method(self, group: Mapping[str, Any]) -> Method:
        """See `Optimizer`."""
        rule = rules.TORCH_AMSGRAD if group["amsgrad"] else rules.TORCH_ADAM
        return Method(rule, touches=True)

    scalars = Adam.scalars


class NAdam(Optimizer, torch.optim.NAdam):
    """PyTorch's NAdam: Adam with Nesterov's momentum.

    With ``mu_t = beta1 * (1 - 0.5 * 0.96**(t*momentum_decay))`` and their product ``p`` so far::

        d = sqrt(v / (1 - beta2**t)) + eps
        w <- w - lr * (1 - mu_t) / (1 - p) * g / d - lr * mu_(t+1) / (1 - p*mu_(t+1)) * m / d

    and moments and weight decay as in `Adam`.

    Args:
        params, lr, betas, eps, weight_decay, momentum_decay: as ``torch.optim.NAdam``.
        decoupled_weight_decay, foreach, maximize, capturable, differentiable: likewise.
        sparse, skip_nonfinite, state_dtype: see `Optimizer`.

    Raises:
        ValueError, RuntimeError: as `Adam`.

    Source: ``torch.optim.NAdam``; Dozat (2016).

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = NAdam(layer.parameters(), lr=0.1)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """

    def method(self, group: Mapping[str, Any]) -> Method:
        """See `Optimizer`."""
        return Method(rules.TORCH_NADAM, not group.get("decoupled_weight_decay"))

    def new_numbers(self, group: Mapping[str, Any]) -> dict[str, float]:  # noqa: ARG002
        """See `Optimizer`."""
        return {"mu_product": 1.0}

    def scalars_with(
        self, group: Mapping[str, Any], step: float, numbers: Mapping[str, Any]
    ) -> tuple[Numbers, dict[str, Any]]:
        """See `Optimizer`."""
        (beta1, beta2), lr, decay = _betas(group), number(group["lr"]), group["momentum_decay"]
        mu, mu_next = (beta1 * (1.0 - 0.5 * 0.96 ** (t * decay)) for t in (step, step + 1))
        # In the type of the state, as PyTorch multiplies it.
        product = numbers["mu_product"] * mu
        of_gradient = lr * (1.0 - mu) / (1.0 - number(product))
        of_moment = lr * mu_next / (1.0 - number(product) * mu_next)
        shrink = _shrink(group) if group.get("decoupled_weight_decay") else 1.0
        root = 1.0 / math.sqrt(1.0 - beta2**step)
        scalars = of_moment, root, group["eps"], shrink, of_gradient
        return (*_moments(beta1, beta2), *scalars), {"mu_product": product}


class RAdam(Optimizer, torch.optim.RAdam):
    """PyTorch's RAdam: Adam that waits until the second moment is known well enough.

    With ``r_inf = 2 / (1 - beta2) - 1`` and ``r = r_inf - 2*t*beta2**t / (1 - beta2**t)``::

        w <- w - lr * m / (1 - beta1**t) * c * sqrt(1 - beta2**t) / (sqrt(v) + eps)
            with c = sqrt((r - 4)*(r - 2)*r_inf / ((r_inf - 4)*(r_inf - 2)*r)), where r > 5
        w <- w - lr * m / (1 - beta1**t)       elsewhere

    and moments and weight decay as in `Adam`.

    Args:
        params, lr, betas, eps, weight_decay: as ``torch.optim.RAdam``.
        decoupled_weight_decay, foreach, maximize, capturable, differentiable: likewise.
        sparse, skip_nonfinite, state_dtype: see `Optimizer`.

    Raises:
        ValueError, RuntimeError: as `Adam`.

    Source: ``torch.optim.RAdam``; Liu et al. (2020), arXiv:1908.03265.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = RAdam(layer.parameters(), lr=0.1)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """

    def method(self, group: Mapping[str, Any]) -> Method:
        """See `Optimizer`."""
        return Method(rules.TORCH_RADAM, not group.get("decoupled_weight_decay"))

    def scalars(self, group: Mapping[str, Any], step: float) -> Numbers:
        """See `Optimizer`."""
        (beta1, beta2), lr = _betas(group), number(group["lr"])
        shrink = _shrink(group) if group.get("decoupled_weight_decay") else 1.0
        size, correction = lr / (1.0 - beta1**step), 1.0 - beta2**step
        longest = 2.0 / (1.0 - beta2) - 1.0
        length = longest - 2.0 * step * beta2**step / correction
        if adapts := length > 5.0:
            of_lengths = (length - 4.0) * (length - 2.0) * longest
            of_lengths /= (longest - 4.0) * (longest - 2.0) * length
            size *= math.sqrt(correction) * math.sqrt(of_lengths)
        return (*_moments(beta1, beta2), size, group["eps"], shrink, float(adapts), 0.0, 1.0)


class Adamax(Optimizer, torch.optim.Adamax):
    """PyTorch's Adamax: Adam by the largest gradient that was seen.

    ::

        u <- max(beta2*u, |g| + eps)
        w <- w - lr / (1 - beta1**t) * m / u

    and the first moment and weight decay as in `Adam`.

    Args:
        params, lr, betas, eps, weight_decay: as ``torch.optim.Adamax``.
        foreach, maximize, differentiable, capturable: likewise.
        sparse, skip_nonfinite, state_dtype: see `Optimizer`.

    Raises:
        ValueError, RuntimeError: as `Adam`.

    Source: ``torch.optim.Adamax``; Kingma and Ba (2015), arXiv:1412.6980.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = Adamax(layer.parameters(), lr=0.1)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """

    def method(self, group: Mapping[str, Any]) -> Method:  # noqa: ARG002
        """See `Optimizer`."""
        return Method(rules.TORCH_ADAMAX)

    def scalars(self, group: Mapping[str, Any], step: float) -> Numbers:
        """See `Optimizer`."""
        beta1, beta2 = _betas(group)
        return 1.0 - beta1, beta2, number(group["lr"]) / (1.0 - beta1**step), group["eps"]


class Lion(Optimizer):
    """Lion: steps of one size, along the signs of an average.

    ::

        w <- w - lr * (sign(beta1*m + (1 - beta1)*g) + weight_decay*w)
        m <- beta2*m + (1 - beta2)*g

    Args:
        params, lr, betas, maximize: as `LazyAdam`.
        weight_decay: decoupled, at least 0.
        sparse, skip_nonfinite, state_dtype: see `Optimizer`.

    Raises:
        ValueError: an argument is out of range.

    Source: Chen et al. (2023), arXiv:2302.06675.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = Lion(layer.parameters(), lr=0.1)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self, params: Any, lr: Any = 1e-4, betas: Any = (0.9, 0.99), weight_decay: float = 0.0, *,
        maximize: bool = False, **own: Any,
    ) -> None:  # fmt: skip
        not_negative(lr=lr, weight_decay=weight_decay)
        betas_in_range(betas)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **own)

    def method(self, group: Mapping[str, Any]) -> Method:  # noqa: ARG002
        """See `Optimizer`."""
        return Method(lion_rules.LION, couples=False)

    def scalars(self, group: Mapping[str, Any], step: float) -> Numbers:  # noqa: ARG002
        """See `Optimizer`."""
        beta1, beta2 = _betas(group)
        of_betas = beta1, 1.0 - beta1, beta2, 1.0 - beta2
        return (*of_betas, number(group["lr"]), group["weight_decay"], 0.0, 1.0)


class Adan(Optimizer):
    """Adan: Nesterov's momentum by way of the change of the gradient.

    With ``d = g - g_before`` (0 at the first update) and ``h = g + beta2*d``::

        m <- m + (1 - beta1)*(g - m),  e <- e + (1 - beta2)*(d - e),  n <- n + (1 - beta3)*(h*h - n)
        w <- w - lr * (m / (1 - beta1**t) + beta2*e / (1 - beta2**t))
                    / (sqrt(n / (1 - beta3**t)) + eps)
        w <- w / (1 + lr*weight_decay)

    The betas are those of PyTorch's habit: near 1, what stays of the past.

    Args:
        params, lr, eps, maximize: as `LazyAdam`.
        betas: three numbers in [0, 1).
        weight_decay: decoupled, at least 0.
        sparse, skip_nonfinite, state_dtype: see `Optimizer`.

    Raises:
        ValueError: an argument is out of range.

    Source: Xie et al. (2022), arXiv:2208.06677.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = Adan(layer.parameters(), lr=0.1)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self, params: Any, lr: Any = 1e-3, betas: Any = (0.98, 0.92, 0.99), eps: float = 1e-8,
        weight_decay: float = 0.0, *, maximize: bool = False, **own: Any,
    ) -> None:  # fmt: skip
        not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        betas_in_range(betas, 3)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                    "maximize": maximize}  # fmt: skip
        super().__init__(params, defaults, **own)

    def method(self, group: Mapping[str, Any]) -> Method:  # noqa: ARG002
        """See `Optimizer`."""
        return Method(plain_rules.ADAN, couples=False)

    def scalars(self, group: Mapping[str, Any], step: float) -> Numbers:
        """See `Optimizer`."""
        constants = *_betas(group), group["eps"]
        lr, decay = number(group["lr"]), number(group["weight_decay"])
        return plain_rules.adan_scalars(float, lr, decay, int(step), constants, ())
