"""THOR, second order, as an optimizer of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ...ops.runtime.errors import reject
from ..thor.arguments import BLOCK_SIZE
from ..thor.thor import thor
from ..thor.torch import TorchThor
from .engine.memory import array_of, tensor_of
from .engine.options import not_negative
from .engine.part import number
from .engine.state import check_states
from .engine.threads import as_torch

_OF_STEP = ("damping", "momentum")


class Thor(torch.optim.Optimizer):
    """THOR: natural gradient descent with Kronecker factors, over the parameters of a module.

    With the inputs ``X`` of a layer and the derivatives ``d`` at its outputs, of N samples, both
    factors computed and inverted in every step that ``frequency`` divides::

        Ainv = (X'X / N + sqrt(damping) I)^-1,   Ginv = (d'd / N + sqrt(damping) I)^-1
        g <- Ginv g Ainv + weight_decay*w        (g as a matrix of out rows)
        with clip_grad: g <- g / max(|g|, 1), each tensor by itself
        a <- momentum*a + g
        w <- w - lr*a,   nesterov: w - lr*(g + momentum*a)

    What it does with each kind of layer is said of `fusestep.nn.thor`, which this class gives
    PyTorch's form: groups, schedulers, hooks, ``state_dict``. Hooks on the module's
    ``Linear``, ``Conv2d``, ``Embedding`` and ``LayerNorm`` capture what a step needs.

    Args:
        module: a ``torch.nn.Module``; all parameters that require a gradient are trained, as one
            group.
        lr: learning rate, at least 0; a number or a tensor of one element.
        damping: above 0.
        momentum: at least 0.
        weight_decay: coupled, at least 0.
        batch_size: how many samples the loss averages over; 1 where it is their sum.
        nesterov: Nesterov's step.
        frequency: steps between two computations of the factors, at least 2.
        clip_grad: limit the norm of each gradient to 1, after weight decay.
        block_size: of the diagonal blocks; None for whole factors.
        bad_factor: ``"raise"`` or ``"skip"``, for a factor that cannot be inverted.

    ``lr``, ``damping`` and ``momentum`` are read from the group in every step. ``state`` has the
    states of each parameter where they lie: moments, counts, and with its weight the inverses in
    use of a layer. It takes dense gradients, and cannot be copied: copy the module and load the
    ``state_dict``.

    Raises:
        TypeError, ValueError: an argument does not fit, or the module has no layer that it knows.
        RuntimeError: in a step: a layer whose factors are due has captured nothing.
        numpy.linalg.LinAlgError: in a step: a factor cannot be inverted.

    ``torch.optim`` has none.

    Source: Chen et al. (2021), "THOR, Trace-based Hardware-driven Layer-Oriented Natural Gradient
    Descent Computation".

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = Thor(layer, lr=0.1, damping=0.1, batch_size=4)
    >>> layer(torch.randn(4, 2)).square().mean().backward()
    >>> optimizer.step()
    """

    def __init__(
        self, module: torch.nn.Module, lr: float | Tensor = 1e-3, damping: float = 0.03,
        momentum: float = 0.9, weight_decay: float = 0.0, *, batch_size: int = 32,
        nesterov: bool = False, frequency: int = 100, clip_grad: bool = False,
        block_size: int | None = BLOCK_SIZE, bad_factor: str = "raise",
    ) -> None:  # fmt: skip
        not_negative(lr=lr)
        self._thor = cast("TorchThor", thor(
            module, number(lr), damping, momentum, weight_decay, batch_size=batch_size,
            use_nesterov=nesterov, enable_clip_grad=clip_grad, frequency=frequency,
            block_size=block_size, bad_factor=bad_factor,
        ))  # fmt: skip
        group = {"lr": lr, "damping": damping, "momentum": momentum}
        super().__init__(self._thor.tensors, group)
        self._show()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The group of the module; another one raises."""
        if self.param_groups:
            raise ValueError("Thor trains the parameters of its module, and no others")
        super().add_param_group(param_group)

    @as_torch
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step (`FusedOptimizer.step`)."""
        thor, (group,) = self._thor, self.param_groups
        not_negative(lr=group["lr"])
        # In place: the parameters know their learning rate by identity, not by value.
        rate: Any = thor.learning_rate
        rate.data[...] = number(group["lr"])
        # Only what has changed: after any assignment the next step derives its update anew.
        for name in _OF_STEP:
            if getattr(thor, name) != group[name]:
                setattr(thor, name, group[name])
        loss = thor.step(closure)
        if thor.n_refreshes != self._n_shown:  # in new arrays
            self._show()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and what was captured with them."""
        self._thor.zero_grad(set_to_none)

    def _names(self) -> list[dict[str, str]]:
        """For each parameter, by the names of its states those that `nn.thor` gives them."""
        # What all have in common is a state of each: PyTorch saves no others everywhere.
        names = {str(p.name): {"global_step": "global_step"} for p in self._thor.parameters}
        for name in self._thor.state_arrays():
            role, _, parameter = name.partition(".")
            if parameter in names:
                names[parameter][role] = name
        return [*names.values()]

    def _states(self, arrays: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        """The states of each parameter among the arrays of `nn.thor`."""
        each = self._names()
        return [{role: tensor_of(arrays[name]) for role, name in names.items()} for names in each]

    def _show(self) -> None:
        """Have ``state`` name the states where they lie."""
        states, self._n_shown = self._states(self._thor.state_arrays()), self._thor.n_refreshes
        for tensor, state in zip(self._thor.tensors, states, strict=True):
            if isinstance(shown := self.state.get(tensor), dict):
                shown.update(state)  # beside entries of others
            else:
                self.state[tensor] = state

    def state_dict(self) -> dict[str, Any]:
        """The state dict of ``torch.optim``, with copies of the states."""
        self._show()
        saved: dict[str, Any] = super().state_dict()
        for key, state in enumerate(self._states(self._thor.state_dict())):
            saved["state"][key] = {**saved["state"][key], **state}
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of ``torch.optim``; the states are checked first.

        Raises:
            KeyError, TypeError, ValueError: they are not those of this module.
        """
        # Behind the hooks of users, which may give another one; before PyTorch changes anything.
        last = self.register_load_state_dict_pre_hook(Thor._take_states)
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            last.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # of `load_state_dict`, with copies of the states
        self._show()

    def _take_states(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the states of a ``state_dict``, after checking all of them."""
        states, groups = state_dict["state"], state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(self.param_groups[0]["params"])]:
            raise ValueError("loaded state dict has another group or other parameters")
        keys = groups[0]["params"]
        check_states("Thor", keys, states)
        if "thor" in state_dict:  # as before states were those of parameters
            arrays = dict(state_dict["thor"])
        else:
            of_each = [states.get(key, {}) for key in keys]
            if len(steps := {number(state.get("global_step", -1)) for state in of_each}) > 1:
                wrong, expected = "differs between parameters", "one number"
                reject(ValueError, "Thor", "state 'global_step'", wrong, expected, steps)
            arrays = {name: x for name, x in self._thor.state_dict().items() if "." not in name}
            for state, names in zip(of_each, self._names(), strict=True):
                arrays |= {name: state.get(role) for role, name in names.items()}
        self._thor.load_state_dict({
            name: array_of(x) if isinstance(x, Tensor) else x
            for name, x in arrays.items() if x is not None
        })  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("Thor has hooks on its module: copy the module, and load the state_dict")
