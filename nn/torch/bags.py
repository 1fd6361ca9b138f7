"""Embedding tables that are pooled together, and updated in backward or by an optimizer."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...kernels.private import hooks_of_modules, modules_of, outside_of_graphs, weights_of
from ...ops.runtime.bags.ids import find_error, read, read_plain
from ...ops.runtime.bags.pooled import Pooled, pool
from ...ops.runtime.bags.pooling import Pooling, tables_of_features
from ...ops.runtime.device import is_on_device
from ...ops.runtime.errors import reject
from ..base.ids.admission import begin_by_key
from ..distributed.agreement import attempted
from .engine import memory
from .engine.bags import arguments, gradients, updates
from .engine.bags.arguments import WHERE
from .engine.bags.processes import RoutedBags
from .engine.exported import bags_in_graph, in_graph, refuse_graph
from .engine.memory import array_of, in_memory, tensor_of
from .engine.sleep import prepare_bags, prepare_rows
from .engine.threads import as_torch
from .growing import (
    GrowingEmbedding,
    admissions_of,
    arrays_of_ids,
    begin_rows,
    end_batch,
    rows_of_modules,
)
from .optimizer import Fused

_MODES = "sum", "mean", "max"
# What a module may change between two calls.
_OPTIONS = "__class__", "padding_idx", "max_norm", "scale_grad_by_freq", "sparse"
_of_embedding = attrgetter(*_OPTIONS)
_of_bag = attrgetter(*_OPTIONS, "mode", "include_last_offset")
_hooks_of = hooks_of_modules()


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
        features: the number of the table of each feature; several may share one. Default: one
            feature for each table.

    Call arguments:
        ids: a list of int32 or int64 tensors, one for each feature: ``[n]``, or ``[batch, length]``
            without offsets. Or one tensor with the ids of all features, one after the other.
        offsets: a list of int32 or int64 tensors, where the bags begin: ``[batch]``, or
            ``[batch + 1]`` with ``include_last_offset``. None: see ``ids``. With one tensor of ids
            one of ``features * batch + 1``.
        per_sample_weights: factors of the rows, in the form of the ids; with sums only.

    Returns:
        ``[batch, sum of the features' embedding_dim]``, of the dtype of the tables, or float32 if
        these differ. ``torch.split`` cuts it into tables without a copy.

    The modules are this one's own, under the names that they had in a ``ModuleList``,
    ``ModuleDict``, list or dict. So this can take the place of a list, with the same
    ``state_dict``, and a file of either is one of the other.

    Of modules weights and options are read in each forward, so a change acts or raises. They are
    not called: those with hooks or a forward of their own raise. Parametrized weights have dense
    gradients. The padding row of an ``nn.Embedding`` is read as it is, and has no gradient.

    Backward leaves sparse gradients in ``.grad`` as PyTorch's with ``sparse=True`` does (modules
    that are adopted say ``sparse=True`` from then on), with a row for each id, for whatever takes
    these: accumulation, `clip_grad_norm_`, ``GradScaler``, DistributedDataParallel, any optimizer.
    After `update_in_backward` it takes the step of an optimizer instead, which reads the gradient
    of the output in place.

    A `GrowingEmbedding` admits its ids of 64 bits; those without a row count as zeros. Where all
    tables are such with one ``comm``, each process pools its part of a batch, in sums or means:
    all call this, and backward. The ids of all tables go to the owners of their rows in one
    exchange, and so do counts, rows and gradients: four for each batch. Rows by id have the bits
    of one process.

    On a CUDA device tables, ids and offsets lie there, and forward and backward are enqueued. A bad
    id or offset is told by `fusestep.synchronize`: the output is 0 then, and no step writes. The
    backward of ids that are one tensor waits. Processes that step in backward are on the host.

    Raises:
        TypeError: a kind or dtype does not fit.
        ValueError: a value, shape or offset does not fit, or a module has what is not supported:
            ``max_norm``, ``scale_grad_by_freq``, hooks.
        IndexError: an id is out of range.
        RuntimeError: a tensor is elsewhere than the tables.

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

    _updates: updates.UpdatesInBackward | None = None
    _has_lost_updates = False  # of a copy: its gradients wait for somebody
    _known: Any = None
    _ddp: Any = None
    __prepare_scriptable__ = refuse_graph

    def __init__(
        self, tables: Any, mode: str | None = None, *, include_last_offset: bool | None = None,
        features: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        named = arguments.named_tables(tables)
        self._features = [*range(len(named))]
        if features is not None:
            self._features = tables_of_features(WHERE, features, len(named))
        bags = [m for m in named.values() if isinstance(m, nn.EmbeddingBag)]
        # Of modules that are made here, and where none has an option of its own.
        self._mode = arguments.one_of("mode", {m.mode for m in bags}, mode, "sum")
        if self._mode not in _MODES:
            reject(ValueError, WHERE, "mode", "is not supported", _MODES, self._mode)
        lasts = {bool(m.include_last_offset) for m in bags}
        self._last = arguments.one_of("include_last_offset", lasts, include_last_offset, False)
        for name, table in named.items():
            if not isinstance(table, nn.EmbeddingBag | nn.Embedding):
                options = {"mode": self._mode, "include_last_offset": self._last}
                table = nn.EmbeddingBag(*arguments.size_of(name, table), **options)
            table.sparse = True
            _check_module(name, table)
            self.add_module(name, table)

    def __getstate__(self) -> dict[str, Any]:
        # The optimizer has the parameters of this one, not those of a copy.
        has_lost = self._has_lost_updates or self._updates is not None
        none = {"_updates": None, "_known": None, "_ddp": None}
        return {**vars(self), **none, "_has_lost_updates": has_lost}

    def extra_repr(self) -> str:
        """The options, for ``print``."""
        return f"mode={' or '.join(map(repr, sorted(self._options('mode')))) or repr(self._mode)}"

    @property
    def mode(self) -> str:
        """How bags are pooled: as the modules say."""
        mode: str = arguments.one_of("mode", self._options("mode"), None, self._mode)
        return mode

    @property
    def include_last_offset(self) -> bool:
        """Whether the last of the offsets is the number of ids: as the modules say."""
        options = self._options("include_last_offset")
        return bool(arguments.one_of("include_last_offset", options, None, self._last))

    def _options(self, name: str) -> set[Any]:
        """The values of an option that modules have."""
        return {getattr(m, name) for m in self.children() if isinstance(m, nn.EmbeddingBag)}

    @property
    def weights(self) -> list[nn.Parameter]:
        """The tables."""
        return weights_of(modules_of(self))

    def update_in_backward(
        self, optimizer: Fused | None, *, max_norm: float | None = None,
        clip_value: float | None = None, norm: Callable[[float], float] | None = None,
    ) -> None:  # fmt: skip
        """Let every backward from now on take a step of an optimizer; None: leave gradients again.

        The step is the end of the backward, and one for all calls of this in its forward. What lies
        in ``.grad`` of their tables then, such as the gradient of a penalty or of a module with the
        same weight, acts in it too; afterwards ``.grad`` is None. Hooks of the optimizer's step see
        no more than that in ``.grad``. What `torch.autograd.grad` returns takes no step.

        Learning-rate schedulers of the optimizer act. Calls of its ``step`` raise, and so do those
        of a ``GradScaler``: a gradient is used as it comes, so the loss must not be scaled.
        No gradient outlives backward: it is clipped here, as `clip_grad_norm_` or
        `clip_grad_value_` of the gradients of all tables would, with all that acts in the step.

        In DistributedDataParallel the step is one with the mean over all processes, to the bits of
        `ShardedEmbedding` with ``average``. ``no_sync`` and ``join`` raise in backward.

        A copy or a pickle of this leaves gradients: it has no optimizer, and warns once, until this
        is called. A weight that was replaced raises in the next forward, unless the optimizer has
        the new one.

        Args:
            optimizer: one of `nn.torch` that has the tables as its parameters, and no others.
            max_norm: the largest norm of the gradients of a step, at least 0. One that is not
                finite makes them 0 or NaN, or skips the step with ``skip_nonfinite``.
            clip_value: the largest magnitude of an element, at least 0; not beside ``max_norm``.
            norm: a function that gets the norm of the tables and returns the one to clip by, of
                dense parameters too, say. Each step calls it once. Of several processes, all have
                to return the same number.

        Raises:
            TypeError: it is none, or of a subclass with a step of its own; a kind does not fit.
            ValueError: it has other parameters, or steps in the backward of another module; a limit
                is out of range, or there are two.
        """
        if optimizer is not None:
            if not updates.can_step_in_backward():
                raise RuntimeError(f"{WHERE}: this PyTorch does not tell which backward runs")
            if not isinstance(optimizer, Fused):
                expected, got = "an optimizer of nn.torch", type(optimizer).__name__
                reject(TypeError, WHERE, "optimizer", "has a wrong type", expected, got)
            if type(optimizer).step is not Fused.step:
                wrong, expected = "has a step of its own", "that of nn.torch: it is not called"
                reject(TypeError, WHERE, "optimizer", wrong, expected, type(optimizer).__name__)
            parameters, weights = updates.parameters_of(optimizer), self.weights
            if {*map(id, parameters)} != {*map(id, weights)}:
                updates.reject_others(len(weights), len(parameters))
            other = optimizer._in_backward and optimizer._in_backward()
            if other is not None and other is not self:
                wrong, expected = "steps in backward already", "one that no other module has"
                reject(ValueError, WHERE, "optimizer", wrong, expected, f"that of {other}")
        elif max_norm is not None or clip_value is not None or norm is not None:
            reject(TypeError, WHERE, "optimizer", "is missing", "one that steps", None)
        clipping = max_norm, clip_value, norm
        steps = optimizer and updates.UpdatesInBackward(optimizer, weights, *clipping)
        if self._updates is not None:
            self._updates.optimizer._in_backward = None
        self._updates, self._has_lost_updates = steps, False
        if optimizer is not None:
            optimizer._in_backward = weakref.ref(self)

    def forward(self, ids: Any, offsets: Any = None, per_sample_weights: Any = None) -> Tensor:
        """Pool rows of all tables; see the class."""
        if in_graph(self):
            for name, table in self.named_children():
                _check_module(name, table)
            return bags_in_graph(self, ids, offsets, per_sample_weights)
        if torch.compiler.is_dynamo_compiling():
            return _outside_of_graphs(self, ids, offsets, per_sample_weights)
        checks: list[Callable[[], None]] = []
        factors, weights = per_sample_weights, self.weights
        factors = [factors] if isinstance(factors, Tensor) else factors
        if self._updates is not None and torch.is_grad_enabled():
            self._updates.check(weights)
        call: Any = ids, offsets, per_sample_weights
        if any(isinstance(m, GrowingEmbedding) for m in modules_of(self)):
            if any(getattr(m, "shard", None) is not None for m in modules_of(self)):
                call, checks = self._routed(call, weights)
            else:
                ids, checks = self._rows_of(ids, offsets)
                call = ids, *call[1:]
        out: Tensor = _Pooling.apply(self, (call, checks), *weights, *(factors or ()))
        return out

    def _of_features(self) -> list[nn.Module]:
        """The table of each feature."""
        modules = [*modules_of(self)]
        return [modules[t] for t in self._features]

    def _parts(self, ids: Any, offsets: Any) -> Any:
        """The ids of each feature, if they are such."""
        n = len(self._features)
        if not isinstance(ids, Tensor):
            return ids
        if n == 1:
            return [ids]
        bounds = offsets if isinstance(offsets, Tensor) else ids.new_zeros(1)
        firsts = bounds[:: max(1, (len(bounds) - 1) // n)].tolist()
        return [ids[a:b] for a, b in pairwise(firsts)]  # one after the other

    def _routed(self, call: Any, weights: Sequence[Tensor]) -> tuple[Any, list[Any]]:
        """The call with ids that have gone to the processes that own their rows, and what is to be
        called before there is a gradient.
        """
        tables: list[Any] = [*modules_of(self)]
        comms = [getattr(getattr(m, "shard", None), "comm", None) for m in tables]
        if len({None if c is None else id(getattr(c, "group", c)) for c in comms}) > 1 and any(
            c is None or c.size > 1 for c in comms
        ):
            wrong, expected = "have other processes", "one comm for all tables"
            reject(ValueError, WHERE, "tables", wrong, expected, "several, or none for some")
        pooling, of_features = self._now(weights)[1], self._of_features()

        def prepared() -> tuple[Any, Any]:
            parts = self._parts(*call[:2])
            if not isinstance(parts, list | tuple) or len(parts) != len(of_features):
                arguments.arrays_of(call, of_features)  # which raises
            return arrays_of_ids(of_features, parts), admissions_of(tables)

        found, error = attempted(prepared)
        parts, admissions = found or ((), [])
        steps = [admission.step for admission in admissions] or [None] * len(tables)

        begin = partial(begin_by_key, begin_rows, admissions)
        routed = RoutedBags(pooling, tables, parts, call, steps, begin, error)
        for table in tables:
            table.weight.row_shard = table.shard  # for optimizers
        return routed, [end_batch(admissions)]

    def _rows_of(self, ids: Any, offsets: Any) -> tuple[Any, list[Callable[[], None]]]:
        """The ids with rows in place of those of growing tables, and what is to be called before
        there is a gradient.
        """
        tables, parts = self._of_features(), self._parts(ids, offsets)
        if not isinstance(parts, list | tuple) or len(parts) != len(tables):
            return ids, []  # which is refused as it is
        rows_of_features = [*parts]
        for k, (table, part) in enumerate(zip(tables, parts, strict=True)):  # before admissions
            if not isinstance(table, GrowingEmbedding) and isinstance(part, Tensor):
                prepare_rows(table.weight, part, f"{WHERE}: ids[{k}]")
        growing = [table for table in dict.fromkeys(tables) if isinstance(table, GrowingEmbedding)]
        of_each = [[f for f, x in enumerate(tables) if x is table] for table in growing]
        rows, check = rows_of_modules(growing, [[parts[f] for f in each] for each in of_each])
        for each, of_table in zip(of_each, rows, strict=True):
            for f, part in zip(each, of_table, strict=True):
                rows_of_features[f] = part
        if not isinstance(ids, Tensor):
            return rows_of_features, [check]
        return torch.cat(rows_of_features) if len(tables) > 1 else rows_of_features[0], [check]

    def _now(self, weights: Sequence[Tensor]) -> tuple[Any, Pooling, bool, dict[int, int]]:
        """The tables as they are: a key, how they are pooled, whether each table has one id a bag
        where no offsets are given, and ids of tables that have no gradient.
        """
        modules = modules_of(self)
        # As calls of C: this is done for each table in each forward.
        options = [
            (_of_bag if isinstance(m, nn.EmbeddingBag) else _of_embedding)(m) for m in modules
        ]
        form = Tensor.data_ptr, memory.shape_of, Tensor.stride, memory.dtype_of
        key = [*([*map(ask, weights)] for ask in form), options]
        last = self._known
        are_called = any(chain.from_iterable(map(_hooks_of, modules))) or any(
            "forward" in m.__dict__ for m in modules
        )
        if last is not None and last[0] == key and not are_called:
            return last  # type: ignore[no-any-return]
        for k, (name, module) in enumerate(self._modules.items()):
            _check_module(name, module)
            arguments.check_tensor(f"the weight of table {k}", weights[k])
        padding = [
            _padding(k, m, len(w)) for k, (m, w) in enumerate(zip(modules, weights, strict=True))
        ]
        are_bags = [isinstance(m, nn.EmbeddingBag) for m in modules]
        # Its memory is that of the key for as long as this is known.
        arrays = [array_of(weight.detach()) for weight in weights]
        pooling = Pooling(
            WHERE, arrays, self._features, self.mode,
            [padding[t] if are_bags[t] else None for t in self._features],
            "raise", open_ended=not (self.include_last_offset or is_on_device(arrays[0])),
        )  # fmt: skip
        dropped = {k: row for k, row in enumerate(padding) if row is not None and not are_bags[k]}
        self._known = last = key, pooling, not any(are_bags), dropped
        return last

    @as_torch
    def _pooled(
        self, call: tuple[Any, Any, Any], weights: Sequence[Tensor]
    ) -> tuple[Any, dict[int, int]]:
        """Rows of the tables, pooled, and ids of tables that have no gradient."""
        if isinstance(call, RoutedBags):
            return call.pool(weights), {}
        _, pooling, are_single, dropped = self._now(weights)
        if pooling.is_on_device:
            if not self.include_last_offset and isinstance(call[1], list | tuple):
                call = call[0], [*map(arguments.with_end, call[1], call[0])], call[2]
            return pool(pooling, *arguments.arrays_of(call, self._of_features())), dropped
        arrays = None
        host_ids = read_plain(pooling, *call, arguments.headers_of, singles=are_single)
        if host_ids is None:
            arrays = arguments.arrays_of(call, self._of_features())
            host_ids = read(pooling, *arrays)
        prepare_bags(pooling, host_ids, weights)
        pooled = Pooled(pooling, host_ids)
        if pooled.is_bad:
            find_error(pooling, *(arrays or arguments.arrays_of(call, self._of_features()))[:2])
        return pooled, dropped


_outside_of_graphs: Any = outside_of_graphs(EmbeddingBags.forward)


class _Pooling(torch.autograd.Function):
    """Pooled rows; the tables are inputs, so that backward is called."""

    @staticmethod
    def forward(ctx: Any, module: EmbeddingBags, call: Any, *tensors: Tensor) -> Tensor:
        call, ctx.checks = call
        weights = tensors[: len(modules_of(module))]
        ctx.module, ctx.weights, ctx.is_taken = module, weights, False
        is_routed = isinstance(call, RoutedBags)  # DistributedDataParallel has no part in it
        ctx.parallel = None if is_routed else updates.wrapper_of(module)
        ctx.is_synced, ctx.step = True, None
        if ctx.parallel is not None:
            ctx.is_synced = ctx.parallel.require_backward_grad_sync
        if module._updates is not None and updates.is_in_backward():
            # A backward that computes anew what it needs: the step is its end, not that of the one
            # within it.
            ctx.step = weakref.ref(module._updates.step())
        factors = tensors[len(weights) :]
        ctx.factors, ctx.versions = [(t.shape, t.dtype) for t in factors], None
        ctx.pooled, ctx.dropped = module._pooled(call, weights)
        if any(t.requires_grad for t in factors):  # whose gradients follow from the tables
            ctx.versions = gradients.versions_of(weights)
        dtypes = {weight.dtype for weight in weights}
        out = tensor_of(ctx.pooled.out)
        return out.to(dtypes.pop()) if len(dtypes) == 1 else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        weights, steps = ctx.weights, ctx.module._updates
        for check_rows in ctx.checks:
            check_rows()
        n, needs = len(weights), ctx.needs_input_grad[2:]
        if not any(needs):
            return (None,) * (2 + len(needs))
        grad = array_of(in_memory(grads[0].detach()))
        factors: list[Any] = [None] * (len(needs) - n)
        if any(needs[n:]):
            if ctx.versions != gradients.versions_of(weights):
                wrong = "the tables have changed since the forward"
                raise RuntimeError(f"{WHERE}: no gradients of per_sample_weights: {wrong}")
            products = [tensor_of(x) for x in ctx.pooled.weight_gradients(grad)]
            if len(factors) == 1:
                products = [torch.cat(products)]
            each = zip(products, ctx.factors, strict=True)
            factors = [x.reshape(shape).to(dtype) for x, (shape, dtype) in each]
        are_left, are_taken = [*needs[:n]], [False] * n
        if steps is not None:
            are_left, are_taken = updates.uses_of(node for node, _ in ctx.next_functions[:n])
        elif ctx.module._has_lost_updates:
            ctx.module._has_lost_updates = False
            text = "a copy leaves gradients; call its update_in_backward, with an optimizer or None"
            warnings.warn(f"{WHERE}: {text}", RuntimeWarning, stacklevel=2)
        tables: list[Any] = [None] * n
        if any(are_left) or any(are_taken):
            of_tables = ctx.pooled.gradients(grad)
            for k, row in ctx.dropped.items():
                of_tables[k] = gradients.without_row(of_tables[k], row)
            if any(are_taken):
                steps.collect(ctx, of_tables, are_taken)
            for k, weight in enumerate(weights):
                if are_left[k]:
                    tables[k] = gradients.tensor_of_rows(of_tables[k], weight)
                    if isinstance(ctx.pooled, RoutedBags):  # as `ShardedEmbedding` does
                        weight.row_positions = of_tables[k].places
                elif are_taken[k] and ctx.parallel is not None:  # which waits for one
                    tables[k] = gradients.no_rows(weight)
        return None, None, *tables, *factors


def _check_module(name: str, module: Any) -> None:
    where = f"table {name!r}"
    if not isinstance(module, nn.EmbeddingBag | nn.Embedding):
        reject(TypeError, WHERE, where, "has a wrong type", "a table", type(module).__name__)
    for option in ("max_norm", "scale_grad_by_freq"):
        value = getattr(module, option)
        if value is not None and value is not False:
            reject(ValueError, WHERE, where, f"has {option}", "a module without", value)
    if not module.sparse:
        wrong, expected = "is not sparse, as its gradients are", "sparse=True"
        reject(ValueError, WHERE, where, wrong, expected, module.sparse)
    if any(_hooks_of(module)):
        wrong, expected = "has hooks, or is pruned", "a module without: it is not called"
        reject(ValueError, WHERE, where, wrong, expected, "some")
    kinds = GrowingEmbedding, nn.EmbeddingBag, nn.Embedding
    kind: Any = next(kind for kind in kinds if isinstance(module, kind))
    if "forward" in vars(module) or type(module).forward is not kind.forward:
        wrong, expected = "has a forward of its own", f"that of {kind.__name__}: it is not called"
        reject(TypeError, WHERE, where, wrong, expected, type(module).__name__)


def _padding(k: int, module: Any, rows: int) -> int | None:
    """The id of a table that has no gradient; a negative one is counted from the end."""
    padding, name = module.padding_idx, f"padding_idx of table {k}"
    if isinstance(module, GrowingEmbedding):
        return 0  # of all ids without a row
    if padding is None:
        return None
    if isinstance(padding, bool) or not isinstance(padding, int):
        expected, got = "an int or None", type(padding).__name__
        reject(TypeError, WHERE, name, "has a wrong type", expected, got)
    if not -rows <= padding < rows:
        reject(ValueError, WHERE, name, "is out of range", f"-{rows} <= id < {rows}", padding)
    return padding % rows
