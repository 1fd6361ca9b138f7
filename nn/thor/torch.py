"""THOR on a PyTorch module: hooks capture, gradients are read from ``.grad``.

This module is imported when the first PyTorch module is given: by then PyTorch is too.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ...kernels.private import zero_tensors
from ...kernels.storage import FOREIGN
from ...ops.runtime.arrays import address_of, adopt_anywhere
from ...ops.runtime.errors import reject
from ...ops.runtime.frameworks import check_there, framework_of
from ..base.parameter import Parameter
from .arguments import NAME
from .conv import ThorConv2d
from .layers import ThorDense, ThorEmbedding, ThorLayer, ThorLayerNorm
from .net import Declared
from .optimizer import Thor

_is_zerotensor = zero_tensors()


class TorchThor(Thor):
    """THOR over the parameters of a ``torch.nn.Module``; what `thor` makes of one.

    Its ``Linear``, ``Conv2d``, ``Embedding`` and ``LayerNorm`` modules capture through hooks, in
    the steps whose factors are due only. Modules of these kinds that cannot be treated (groups,
    a shared weight, another padding than zeros, ...) take the plain gradient, with one warning
    that names them; so do all other parameters, without.

    Weights change in place, so they have to be contiguous; their version counters tell autograd.
    A ``GradScaler`` is not supported: it divides the gradients behind THOR's back. Give
    ``loss_scale``, or train in bfloat16. Learning rates come from this package's schedules.

    Attributes:
        module: the module.
        tensors: its parameters that are trained.

    Raises:
        ValueError: no module of the four kinds, a parameter is not contiguous, or not all are on
            the CPU or on one CUDA device.
        RuntimeError: a parameter is on a device of another kind.
    """

    def __init__(self, net: torch.nn.Module, options: Mapping[str, Any]) -> None:
        super().__init__(_entries(net), options)
        self.module = net
        tensors, modules = dict(net.named_parameters()), dict(net.named_modules())
        self.tensors = [tensors[str(p.name)] for p in self.parameters]
        layers = [p.layer for p in self._preconditioners if p.needs_capture]
        self._hooks = [
            modules.get(layer.name, net).register_forward_hook(
                partial(_after_forward, layer), with_kwargs=True
            )
            for layer in layers
        ]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step with the gradients in ``.grad``; parameters without one are skipped.

        Args:
            closure: computes the loss anew, with derivatives, before the step.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._follow()
            self(tuple(_gradient(tensor) for tensor in self.tensors))
            # The arrays were written behind autograd's back: a graph that has saved a parameter for
            # its backward must find that it has changed.
            for tensor in self.tensors:
                if tensor.grad is not None:
                    torch.autograd.graph.increment_version(tensor)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and what was captured with them."""
        for tensor in self.tensors:
            if set_to_none:
                tensor.grad = None
            elif tensor.grad is not None:
                tensor.grad.detach_()
                tensor.grad.zero_()
        self.clear_captured()

    def remove_hooks(self) -> None:
        """Take the hooks off the module, which another optimizer is going to train."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _follow(self) -> None:
        """Bind parameters whose storage PyTorch has replaced to the new one."""
        for parameter, tensor in zip(self.parameters, self.tensors, strict=True):
            name = f"parameter {parameter.name!r}"
            view = _view(tensor, name)
            if address_of(adopt_anywhere(NAME, name, view)) != address_of(parameter.array):
                parameter.data = view


def _after_forward(
    layer: ThorLayer, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Have the layer capture when derivatives reach the output."""
    if layer.is_capturing and output.requires_grad:
        (inputs,) = args or kwargs.values()
        output.register_hook(partial(_capture, layer, inputs.detach()))


def _capture(layer: ThorLayer, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
    if isinstance(layer, ThorConv2d) and inputs.ndim == 3:  # an image without a batch
        inputs, gradient = inputs[None], gradient[None]
    layer.capture(_view(_resolved(inputs)), _view(_resolved(gradient)))


def _view(tensor: torch.Tensor, name: str = "a tensor") -> Any:
    """The memory of a tensor as an array; one on a CUDA device is an array by itself."""
    tensor = tensor.detach()
    if framework_of(tensor) is not None:
        return tensor
    if tensor.device.type != "cpu":
        expected, got = "a tensor on the CPU or a CUDA device", str(tensor.device)
        reject(RuntimeError, NAME, name, "is elsewhere", expected, got)
    check_there(NAME, name, tensor)
    dtype = _FOREIGN.get(tensor.dtype)  # which NumPy takes by its bits
    if dtype is None:
        return tensor.numpy()
    bits = getattr(torch, f"int{8 * dtype.itemsize}")
    return tensor.view(bits).numpy().view(dtype)


def _gradient(tensor: torch.Tensor) -> Any:
    """A gradient as the optimizer takes it; row-sparse ones raise there."""
    gradient = tensor.grad
    return gradient if gradient is None or gradient.is_sparse else _view(_resolved(gradient))


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose numbers lie in memory, not their negatives, or zeros that lie nowhere."""
    return torch.zeros_like(tensor) if _is_zerotensor(tensor) else tensor.resolve_neg()


def _entries(net: torch.nn.Module) -> dict[str, Declared]:
    """Layers and parameters by name."""
    parameters = {  # each tensor once
        id(tensor): Parameter(_view(tensor), name, tensor.requires_grad)
        for name, tensor in net.named_parameters()
    }
    # Of the parameters of a layer the first one, its weight, says where it comes.
    treated: dict[int, tuple[str, Declared]] = {
        id(p): (name, layer)
        for name, layer in _layers(net, parameters).items() for p in layer.parameters
    }  # fmt: skip
    return dict(treated.get(id(p), (str(p.name), p)) for p in parameters.values())


def _layers(net: torch.nn.Module, parameters: dict[int, Parameter]) -> dict[str, ThorLayer]:
    """The layers of a net that can be treated, with ``parameters`` by the ids of their tensors."""
    users = Counter(id(p) for module in net.modules() for p in module.parameters(recurse=False))
    layers, left_out = dict[str, ThorLayer](), []
    for name, module in net.named_modules():
        if not isinstance(module, _KINDS) or getattr(module, "weight", None) is None:
            continue
        tensors = dict(module.named_parameters(recurse=False))
        why = _obstacle(module)
        if "weight" not in tensors:
            why = "its weight is computed from other parameters"
        elif max(users[id(tensor)] for tensor in tensors.values()) > 1:
            why = "a parameter that other modules have too"
        if why:
            left_out.append(f"{name or 'the module'} ({why})")
            continue
        treated = {n: parameters[id(tensor)] for n, tensor in tensors.items()}
        layers[name or "net"] = _layer(module, treated)
    if left_out:
        text = f"{NAME}: some layers take the plain gradient: {', '.join(left_out)}"
        warnings.warn(text, UserWarning, stacklevel=5)
    return layers


_FOREIGN = {getattr(torch, name): dtype for name, dtype in FOREIGN.items()}
_KINDS = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Embedding, torch.nn.LayerNorm)


def _obstacle(module: Any) -> str | None:
    """Why a module of a known kind cannot be treated, or None."""
    if isinstance(module, torch.nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "attention reads its weight without calling it"
    if isinstance(module, torch.nn.Conv2d):
        if module.groups > 1:
            return f"groups={module.groups}"
        if module.padding_mode != "zeros":
            return f"padding_mode={module.padding_mode!r}"
    if isinstance(module, torch.nn.Embedding) and module.scale_grad_by_freq:
        return "scale_grad_by_freq=True"
    return None


def _layer(module: Any, parameters: dict[str, Parameter]) -> ThorLayer:
    weight, bias = parameters["weight"], parameters.get("bias")
    if isinstance(module, torch.nn.Conv2d):
        pairs: Any = module.stride, module.padding, module.dilation
        return ThorConv2d(weight, bias, *pairs)
    if isinstance(module, torch.nn.Embedding):
        return ThorEmbedding(weight, module.padding_idx)
    if isinstance(module, torch.nn.LayerNorm):
        return ThorLayerNorm(weight, bias, module.eps)
    return ThorDense(weight, bias)
