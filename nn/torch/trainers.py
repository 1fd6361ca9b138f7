"""Clipping of sparse gradients in the trainers of Hugging Face and Lightning.

Neither is imported: the classes stand before theirs in the bases of a user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from .clipping import clip_grad_norm_, clip_grad_value_


class ClippingTrainer:
    """A ``transformers.Trainer`` that clips by the norm of sparse gradients too.

    ::

        class MyTrainer(ClippingTrainer, transformers.Trainer): ...

    Hugging Face's Trainer measures gradients in every step, for its log even with
    ``max_grad_norm=0``, by ``clip_grad_norm_`` of its accelerator; PyTorch has no norm of sparse
    ones. Where a gradient is sparse, `clip_grad_norm_` of this package takes its place, for any
    optimizer; where none is, nothing changes.

    >>> class Accelerator:  # as accelerate has it
    ...     def unscale_gradients(self): ...
    ...     def clip_grad_norm_(self, parameters, max_norm, norm_type=2): ...
    >>> class Trainer:  # as transformers has it
    ...     def __init__(self):
    ...         self.create_accelerator_and_postprocess()
    ...     def create_accelerator_and_postprocess(self):
    ...         self.accelerator = Accelerator()
    >>> class MyTrainer(ClippingTrainer, Trainer): ...
    >>> import torch
    >>> table = torch.nn.Embedding(10, 2, sparse=True)
    >>> table(torch.tensor([3, 3, 7])).sum().backward()
    >>> MyTrainer().accelerator.clip_grad_norm_(table.parameters(), 1.0)
    tensor(3.1623)
    """

    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator as the Trainer does, and let it take sparse gradients."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        theirs = self.accelerator.clip_grad_norm_
        self.accelerator.clip_grad_norm_ = partial(_clip, self.accelerator, theirs)


class ClippingModule:
    """A ``lightning.LightningModule`` that clips sparse gradients too, by norm or by value.

    ::

        class MyModule(ClippingModule, lightning.LightningModule): ...

    ``gradient_clip_val`` and ``gradient_clip_algorithm`` of the Trainer then act on the gradients
    of an optimizer of which some are sparse, by `clip_grad_norm_` and `clip_grad_value_` of this
    package; where none is, nothing changes.

    Raises:
        RuntimeError: in a step, an optimizer with ``fused=True`` leaves unscaling to its step,
            which comes after clipping.

    >>> class LightningModule:  # as lightning has it
    ...     class trainer: scaler = None
    ...     def configure_gradient_clipping(self, optimizer, **kwargs): ...
    >>> class MyModule(ClippingModule, LightningModule): ...
    >>> import torch
    >>> table = torch.nn.Embedding(10, 2, sparse=True)
    >>> table(torch.tensor([3, 3, 7])).sum().backward()
    >>> MyModule().configure_gradient_clipping(torch.optim.SGD(table.parameters()), 1.5, "value")
    >>> table.weight.grad.coalesce().values()
    tensor([[1.5000, 1.5000],
            [1.0000, 1.0000]])
    """

    trainer: Any

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:  # fmt: skip
        """Clip the gradients of an optimizer before its step; the Trainer calls it."""
        groups = optimizer.param_groups
        every = list(chain.from_iterable(group["params"] for group in groups))
        if not _any_is_sparse(every):
            super().configure_gradient_clipping(  # type: ignore[misc]
                optimizer, gradient_clip_val=gradient_clip_val,
                gradient_clip_algorithm=gradient_clip_algorithm,
            )  # fmt: skip
        elif gradient_clip_val:
            if self.trainer.scaler is not None and any(group.get("fused") for group in groups):
                wrong = "fused=True leaves unscaling to the step, after clipping"
                raise RuntimeError(f"ClippingModule: {wrong}: expected fused=False with a scaler")
            clip = clip_grad_value_ if gradient_clip_algorithm == "value" else clip_grad_norm_
            clip(every, gradient_clip_val)


def _clip(
    accelerator: Any, theirs: Callable[..., Any], parameters: Iterable[Tensor], max_norm: float,
    norm_type: float = 2,
) -> Any:  # fmt: skip
    every = list(parameters)
    if not _any_is_sparse(every):
        return theirs(every, max_norm, norm_type=norm_type)
    accelerator.unscale_gradients()
    return clip_grad_norm_(every, max_norm, norm_type)


def _any_is_sparse(parameters: Iterable[Tensor]) -> bool:
    return any(p.grad is not None and p.grad.is_sparse for p in parameters)
