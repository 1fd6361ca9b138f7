"""Embedding tables that are pooled together, and updated in backward or by an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...kernels.private import version_of
from ...ops.runtime.bags.ids import find_error, read, read_plain
from ...ops.runtime.bags.pooled import Pooled
from ...ops.runtime.bags.pooling import Pooling
from ...ops.runtime.bags.tensor import BagTensor
from ...ops.runtime.errors import reject
from .engine.memory import array_of, in_memory, tensor_of
from .engine.threads import as_torch
from .optimizer import Fused

_WHERE = "EmbeddingBags"


class EmbeddingBags(nn.Module):
    """Many ``torch.nn.EmbeddingBag`` in one call: their outputs side by side.

    Args:
        tables: ``nn.EmbeddingBag`` and ``nn.Embedding`` modules, whose weights and options are
            adopted, or pairs ``(num_embeddings, embedding_dim)``; in a list, or by name. An
            ``nn.Embedding`` is one whose bags have one id, where no offsets are given.
        mode: ``"sum"``, ``"mean"`` or ``"max"``; None: that of the modules, which is one for all,
            else sums.
        include_last_offset: whether the last of the offsets is the number of ids, as in PyTorch;
            None: as the modules have it, else no.

    Call arguments:
        ids: a list of int32 or int64 tensors, one for each table: ``[n]``, or ``[batch, length]``
            without offsets. Or one tensor with the ids of all tables, one after the other.
        offsets: a list of int32 or int64 tensors, where the bags begin: ``[batch]``, or
            ``[batch + 1]`` with ``include_last_offset``. None: see ``ids``. With one tensor of ids
            one of ``tables * batch + 1``.
        per_sample_weights: factors of the rows, in the form of the ids; with sums only.

    Returns:
        ``[batch, sum of the tables' embedding_dim]``, of the dtype of the tables, or float32 if
        these differ. ``torch.split`` cuts it into tables without a copy.

    The modules are this one's own, under the names that they had in a ``ModuleList``,
    ``ModuleDict``, list or dict. So this can take the place of a list, with the same
    ``state_dict``, and a file of either is one of the other.

    Backward leaves sparse gradients in ``.grad`` as PyTorch's with ``sparse=True`` does, with a row
    for each id, for whatever takes these: accumulation, `clip_grad_norm_`, ``GradScaler``, any
    optimizer. After `update_in_backward` it takes the step of an optimizer instead, which reads the
    gradient of the output in place. On the host only.

    Raises:
        TypeError: a kind or dtype does not fit.
        ValueError: a value, shape or offset does not fit, or a module has an option that is not
            supported: ``max_norm``, ``scale_grad_by_freq``.
        IndexError: an id is out of range.
        RuntimeError: a tensor is on a device.

    >>> import torch
    >>> bags = EmbeddingBags([torch.nn.EmbeddingBag(9, 4, mode="sum"), torch.nn.Embedding(5, 2)])
    >>> sorted(bags.state_dict())
    ['0.weight', '1.weight']
    >>> from fusestep.nn.torch import Adagrad
    >>> optimizer = Adagrad(bags.parameters(), lr=0.1)
    >>> bags.update_in_backward(optimizer)
    >>> out = bags([torch.tensor([[1, 2], [2, 2]]), torch.tensor([4, 0])])
    >>> out.shape
    torch.Size([2, 6])
    >>> out.sum().backward()
    """

    def __init__(
        self,
        tables: Any,
        mode: str | None = None,
        *,
        include_last_offset: bool | None = None,
    ) -> None:
        super().__init__()
        named = _named(tables)
        chosen = {m.mode for m in named.values() if isinstance(m, nn.EmbeddingBag)}
        lasts = {bool(m.include_last_offset) for m in named.values()
                 if isinstance(m, nn.EmbeddingBag)}  # fmt: skip
        self.mode = _one_of("mode", chosen, mode, "sum")
        if self.mode not in ("sum", "mean", "max"):
            expected = "'sum', 'mean' or 'max'"
            reject(ValueError, _WHERE, "mode", "is not supported", expected, self.mode)
        self.include_last_offset = _one_of("include_last_offset", lasts, include_last_offset, False)
        for name, table in named.items():
            if not isinstance(table, nn.EmbeddingBag | nn.Embedding):
                n, width = _size(name, table)
                table = nn.EmbeddingBag(n, width, mode=self.mode)
            _check_options(name, table)
            self.add_module(name, table)
        self._optimizer: Fused | None = None
        self._hook: Any = None
        self._known: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # The optimizer has the parameters of this one, not those of a copy.
        return {**vars(self), "_optimizer": None, "_hook": None, "_known": None}

    def extra_repr(self) -> str:
        """The options, for ``print``."""
        return f"mode={self.mode!r}"

    @property
    def weights(self) -> list[nn.Parameter]:
        """The tables."""
        return [module.weight for module in self._modules.values()]

    @property
    def _are_single(self) -> bool:
        """Whether each table has one id a bag, where no offsets are given."""
        return all(type(module) is nn.Embedding for module in self._modules.values())

    def update_in_backward(self, optimizer: Fused | None) -> None:
        """Let every backward from now on take a step of an optimizer; None: leave gradients again.

        Learning-rate schedulers of the optimizer act. Calls of its ``step`` raise, and so do those
        of a ``GradScaler``: a gradient is used as it comes, so the loss must not be scaled.
        ``clip_grad_norm_`` finds no gradient: there is none that outlives backward.

        Args:
            optimizer: one of `nn.torch` that has the tables as its parameters, and no others.

        Raises:
            TypeError: it is none.
            ValueError: it has other parameters.
        """
        if optimizer is None:
            self._leave_gradients()
            return
        if not isinstance(optimizer, Fused):
            expected, got = "an optimizer of nn.torch", type(optimizer).__name__
            reject(TypeError, _WHERE, "optimizer", "has a wrong type", expected, got)
        own = [p for group in optimizer.param_groups for p in group["params"]]
        if {*map(id, own)} != {*map(id, self.weights)}:
            wrong, expected = "has other parameters", f"the {len(self.weights)} tables"
            reject(ValueError, _WHERE, "optimizer", wrong, expected, f"{len(own)} parameters")
        self._leave_gradients()
        self._optimizer = optimizer
        self._hook = optimizer.register_step_pre_hook(_refuse)

    def _leave_gradients(self) -> None:
        if self._optimizer is not None:
            self._hook.remove()
        self._optimizer = self._hook = None

    def forward(self, ids: Any, offsets: Any = None, per_sample_weights: Any = None) -> Tensor:
        """Pool rows of all tables; see the class."""
        factors = per_sample_weights
        if isinstance(factors, Tensor):
            factors = [factors]
        given = ids, offsets, per_sample_weights
        out: Tensor = _Pooling.apply(self, given, *self.weights, *(factors or ()))
        return out

    def _pooling(self, weights: Sequence[Tensor]) -> Pooling:
        """The tables as they are now, and how they are pooled."""
        key = [(w.data_ptr(), w.shape, w.stride(), w.dtype) for w in weights]
        if self._known is None or self._known[0] != key:
            for k, weight in enumerate(weights):
                _check_tensor(f"the weight of table {k}", weight)
            arrays = [array_of(weight.detach(), keep=False) for weight in weights]
            padding = [module.padding_idx for module in self.children()]
            made = Pooling(
                _WHERE, arrays, None, self.mode, padding, "raise",
                open_ended=not self.include_last_offset,
            )  # fmt: skip
            self._known = key, made
        return self._known[1]  # type: ignore[no-any-return]

    @as_torch
    def _pooled(self, given: tuple[Any, Any, Any], weights: Sequence[Tensor]) -> Pooled:
        pooling, arrays = self._pooling(weights), None
        found = read_plain(pooling, *given, torch, singles=self._are_single)
        if found is None:
            arrays = self._arrays(given)
            found = read(pooling, *arrays)
        pooled = Pooled(pooling, found)
        if pooled.is_bad:
            find_error(pooling, *(arrays or self._arrays(given))[:2])
        return pooled

    def _arrays(self, given: tuple[Any, Any, Any]) -> list[Any]:
        """The arrays of the arguments, in the form of `ops.EmbeddingBags`."""
        modules = self._modules.values()
        found: list[Any] = []
        for name, own in zip(("ids", "offsets", "per_sample_weights"), given, strict=True):
            if own is None and name != "ids":
                found.append(None)
                continue
            if isinstance(own, Tensor):
                found.append(_array(name, own))
                continue
            if not isinstance(own, list | tuple) or len(own) != len(modules):
                got = len(own) if isinstance(own, list | tuple) else type(own).__name__
                expected = f"a list of {len(modules)} tensors, or one tensor"
                reject(ValueError, _WHERE, name, "do not fit", expected, got)
            found.append([_array(f"{name}[{k}]", tensor) for k, tensor in enumerate(own)])
        ids, offsets, _ = found
        if offsets is None and isinstance(ids, list):
            found[0] = [
                a[:, None] if a.ndim == 1 and isinstance(module, nn.Embedding) else a
                for a, module in zip(ids, modules, strict=True)
            ]
        return found

    @as_torch
    def _take(
        self, found: Sequence[BagTensor], weights: Sequence[Tensor], needs: Sequence[bool]
    ) -> None:
        """The step of the optimizer on the tables that need gradients."""
        assert self._optimizer is not None
        every = zip(weights, found, needs, strict=True)
        given = {weight: gradient for weight, gradient, is_needed in every if is_needed}
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        self._optimizer._step(None, 1.0, tuple(map(given.get, parameters)))


def _refuse(*_: Any) -> None:
    fix = "update_in_backward(None) leaves gradients for it"
    raise RuntimeError(f"{_WHERE}: the optimizer steps in backward, not by step(): {fix}")


class _Pooling(torch.autograd.Function):
    """Pooled rows; the tables are inputs, so that backward is called."""

    @staticmethod
    def forward(ctx: Any, module: EmbeddingBags, given: Any, *tensors: Tensor) -> Tensor:
        weights = tensors[: len(module._modules)]
        ctx.module, ctx.weights, ctx.is_taken = module, weights, False
        factors = tensors[len(weights) :]
        ctx.factors, ctx.versions = [(t.shape, t.dtype) for t in factors], None
        if any(t.requires_grad for t in factors):  # whose gradients follow from the tables
            ctx.versions = _versions(weights)
        ctx.pooled = module._pooled(given, weights)
        dtypes = {weight.dtype for weight in weights}
        out = tensor_of(ctx.pooled.out)
        return out.to(dtypes.pop()) if len(dtypes) == 1 else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        module, weights = ctx.module, ctx.weights
        needs, needs_factors = ctx.needs_input_grad[2:], ctx.needs_input_grad[2 + len(weights) :]
        if not any(needs):
            return (None,) * (2 + len(needs))
        grad = array_of(in_memory(grads[0].detach()))
        of_factors: list[Any] = [None] * len(needs_factors)
        if any(needs_factors):  # before the tables change
            if ctx.versions != _versions(weights):
                wrong = "the tables have changed since the forward"
                raise RuntimeError(f"{_WHERE}: no gradients of per_sample_weights: {wrong}")
            products = [tensor_of(x) for x in ctx.pooled.weight_gradients(grad)]
            if len(of_factors) == 1:
                products = [torch.cat(products)]
            each = zip(products, ctx.factors, strict=True)
            of_factors = [x.reshape(shape).to(dtype) for x, (shape, dtype) in each]
        needs = needs[: len(weights)]
        if not any(needs):
            return None, None, *(None for _ in weights), *of_factors
        found = ctx.pooled.gradients(grad)
        if module._optimizer is None:
            every = zip(found, weights, needs, strict=True)
            tables = [_sparse(g, w) if is_needed else None for g, w, is_needed in every]
            return None, None, *tables, *of_factors
        if ctx.is_taken:
            raise RuntimeError(f"{_WHERE}: backward has updated the tables already: once a forward")
        module._take(found, weights, needs)
        ctx.is_taken = True
        return None, None, *(None for _ in weights), *of_factors


def _versions(weights: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Where tables lie, and how often they have changed."""
    return [(weight.data_ptr(), version_of(weight)) for weight in weights]


def _sparse(gradient: BagTensor, weight: Tensor) -> Tensor:
    """The gradient as PyTorch's, a row for each id."""
    rows = gradient.to_rows()
    indices, values = tensor_of(rows.indices).long()[None], tensor_of(rows.values)
    return torch.sparse_coo_tensor(
        indices, values.to(weight.dtype), tuple(weight.shape), check_invariants=False
    )


def _named(tables: Any) -> dict[str, Any]:
    """Modules or sizes by name."""
    if isinstance(tables, nn.ModuleDict | Mapping):
        named = dict(tables.items())
    elif isinstance(tables, nn.ModuleList | list | tuple):
        named = {str(k): table for k, table in enumerate(tables)}
    else:
        expected, got = "a list or a dict of modules or sizes", type(tables).__name__
        reject(TypeError, _WHERE, "tables", "have a wrong type", expected, got)
    if not named:
        reject(ValueError, _WHERE, "tables", "are missing", "at least one", "none")
    if len({id(m.weight) for m in named.values() if isinstance(m, nn.Module)}) < sum(
        isinstance(m, nn.Module) for m in named.values()
    ):
        wrong, expected = "share a weight", "a weight of its own for each"
        reject(ValueError, _WHERE, "tables", wrong, expected, "one twice")
    return named


def _one_of(name: str, found: set[Any], given: Any, default: Any) -> Any:
    """The option of all modules, or the one that was given."""
    every = {*found, *([] if given is None else [given])}
    if len(every) > 1:
        expected = "one for all tables"
        reject(ValueError, _WHERE, name, "differs", expected, sorted(map(str, every)))
    return every.pop() if every else default


def _size(name: str, table: Any) -> tuple[int, int]:
    if not isinstance(table, list | tuple) or len(table) != 2:
        expected, got = "a module, or (num_embeddings, embedding_dim)", type(table).__name__
        reject(TypeError, _WHERE, f"table {name!r}", "has a wrong type", expected, got)
    n, width = map(int, table)
    return n, width


def _check_options(name: str, module: nn.EmbeddingBag | nn.Embedding) -> None:
    for option, is_used in (
        ("max_norm", module.max_norm is not None), ("scale_grad_by_freq", module.scale_grad_by_freq)
    ):  # fmt: skip
        if is_used:
            wrong, expected = f"has {option}", "a module without"
            reject(ValueError, _WHERE, f"table {name!r}", wrong, expected, getattr(module, option))


def _array(name: str, tensor: Any) -> Any:
    _check_tensor(name, tensor)
    return array_of(in_memory(tensor.detach()))


def _check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        reject(TypeError, _WHERE, name, "has a wrong type", "a tensor", type(tensor).__name__)
    if tensor.device.type != "cpu":
        expected, got = "a tensor on the host", tensor.device
        reject(RuntimeError, _WHERE, name, "is on a device, where there are no bags", expected, got)
    if tensor.dtype.is_complex or tensor.dtype == torch.bool or tensor.layout != torch.strided:
        expected, got = "numbers in a dense tensor", f"{tensor.dtype}, {tensor.layout}"
        reject(TypeError, _WHERE, name, "has a wrong dtype", expected, got)
