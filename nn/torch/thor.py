"""THOR, second order, as an optimizer of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...ops.runtime.errors import reject
from ..thor.arguments import BLOCK_SIZE
from ..thor.optimizer import every_parameter
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
        given = {
            "learning_rate": number(lr), "damping": damping, "momentum": momentum,
            "weight_decay": weight_decay, "loss_scale": 1.0, "batch_size": batch_size,
            "use_nesterov": nesterov, "decay_filter": every_parameter, "split_indices": None,
            "enable_clip_grad": clip_grad, "frequency": frequency, "compat": None,
            "block_size": block_size, "bad_factor": bad_factor,
        }  # fmt: skip
        self._thor: TorchThor | None = None
        thor = TorchThor(module, given)
        super().__init__(thor.tensors, {"lr": lr, "damping": damping, "momentum": momentum})
        self._thor = thor
        self._show()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The group of the module; another one raises."""
        if self._thor is not None:
            raise ValueError("Thor trains the parameters of its module, and no others")
        super().add_param_group(param_group)

    @as_torch
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step (`FusedOptimizer.step`)."""
        thor, (group,) = self._thor, self.param_groups
        assert thor is not None
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
        assert self._thor is not None
        self._thor.zero_grad(set_to_none)

    def _names(self) -> list[dict[str, str]]:
        """For each parameter, by the names of its states those that `nn.thor` gives them."""
        thor = self._thor
        assert thor is not None
        # What all have in common is a state of each: PyTorch saves no others everywhere.
        names = {str(p.name): {"global_step": "global_step"} for p in thor.parameters}
        for name in thor.state_arrays():
            role, _, parameter = name.partition(".")
            if parameter in names:
                names[parameter][role] = name
        return [*names.values()]

    def _show(self) -> None:
        """Have ``state`` name the states where they lie."""
        thor = self._thor
        assert thor is not None
        arrays, self._n_shown = thor.state_arrays(), thor.n_refreshes
        for tensor, names in zip(thor.tensors, self._names(), strict=True):
            own = {role: tensor_of(arrays[name]) for role, name in names.items()}
            if isinstance(known := self.state.get(tensor), dict):
                known.update(own)  # beside entries of others
            else:
                self.state[tensor] = own

    def state_dict(self) -> dict[str, Any]:
        """The state dict of ``torch.optim``, with copies of the states."""
        assert self._thor is not None
        self._show()
        found: dict[str, Any] = super().state_dict()
        arrays = self._thor.state_dict()
        for key, names in enumerate(self._names()):
            own = {role: tensor_of(arrays[name]) for role, name in names.items()}
            found["state"][key] = {**found["state"][key], **own}
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of ``torch.optim``; the states are checked first.

        Raises:
            KeyError, TypeError, ValueError: they are not those of this module.
        """
        # Behind the hooks of users, which may give another one; before PyTorch changes anything.
        last = self.register_load_state_dict_pre_hook(_load)
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            last.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # of `load_state_dict`, with copies of the states
        self._show()

    def _take_states(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the states of a ``state_dict``, after checking all of them."""
        thor, states, groups = self._thor, state_dict["state"], state_dict["param_groups"]
        assert thor is not None
        if [len(group["params"]) for group in groups] != [len(self.param_groups[0]["params"])]:
            raise ValueError("loaded state dict has another group or other parameters")
        check_states("Thor", groups[0]["params"], states)
        if "thor" in state_dict:  # as before states were those of parameters
            given = dict(state_dict["thor"])
        else:
            given, steps = thor.state_dict(), set()
            given = {name: x for name, x in given.items() if "." not in name}
            for key, names in zip(groups[0]["params"], self._names(), strict=True):
                own = states.get(key, {})
                given.update((name, own.get(role)) for role, name in names.items())
                steps.add(number(own.get("global_step", -1)))
            if len(steps) > 1:
                wrong, expected = "differs between parameters", "one number"
                reject(ValueError, "Thor", "state 'global_step'", wrong, expected, steps)
            given = {name: x for name, x in given.items() if x is not None}
        thor.load_state_dict(
            {name: array_of(x) if isinstance(x, Tensor) else x for name, x in given.items()}
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("Thor has hooks on its module: copy the module, and load the state_dict")


def _load(optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    optimizer._take_states(state_dict)
