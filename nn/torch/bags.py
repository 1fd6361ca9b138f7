"""Embedding tables that are pooled together, and updated in backward or by an optimizer."""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from itertools import chain, pairwise
from operator import add, attrgetter, is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from ...kernels.private import (
    at_the_end_of_backward,
    backward_of_now,
    find,
    hooks_of_modules,
    hooks_of_tensors,
    is_backward_compiled,
    modules_of,
    outside_of_graphs,
    parts_of,
    watched,
    weights_of,
)  # fmt: skip
from ...kernels.tables import LEFT_OUT
from ...ops.runtime import check
from ...ops.runtime.bags.ids import find_error, read, read_plain
from ...ops.runtime.bags.pooled import Pooled, pool
from ...ops.runtime.bags.pooling import Pooling, tables_of_features
from ...ops.runtime.bags.tensor import BagTensor, joined
from ...ops.runtime.device import is_on_device
from ...ops.runtime.errors import reject
from ..base.arguments import is_int
from ..distributed.agreement import attempted
from ..distributed.reduction import average_bags
from ..distributed.torch_group import over_torch
from .clipping import _norm, limit_of, number_of, within
from .engine.exported import bags_in_graph, in_graph, refuse_graph
from .engine.memory import NUMBERS, array_of, in_memory, tensor_of
from .engine.sleep import changes_of, prepare_bags, prepare_rows
from .engine.threads import as_torch
from .growing import GrowingEmbedding
from .optimizer import Fused, _is_watched

_WHERE = "EmbeddingBags"
_MODES = "sum", "mean", "max"
# What a module may change between two calls.
_OPTIONS = "__class__", "padding_idx", "max_norm", "scale_grad_by_freq", "sparse"
_of_embedding = attrgetter(*_OPTIONS)
_of_bag = attrgetter(*_OPTIONS, "mode", "include_last_offset")
_hooks_of, _hooks_of_weight = hooks_of_modules(), hooks_of_tensors()


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

    A `GrowingEmbedding` admits its ids of 64 bits; those without a row count as zeros.

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

    _updates: _Updates | None = None
    _has_lost_updates = False  # of a copy: its gradients wait for somebody
    _known: Any = None
    _ddp: Any = None
    __prepare_scriptable__ = refuse_graph

    def __init__(
        self, tables: Any, mode: str | None = None, *, include_last_offset: bool | None = None,
        features: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        named = _named(tables)
        self._features = [*range(len(named))]
        if features is not None:
            self._features = tables_of_features(_WHERE, features, len(named))
        bags = [m for m in named.values() if isinstance(m, nn.EmbeddingBag)]
        # Of modules that are made here, and where none has an option of its own.
        self._mode = _one_of("mode", {m.mode for m in bags}, mode, "sum")
        if self._mode not in _MODES:
            reject(ValueError, _WHERE, "mode", "is not supported", _MODES, self._mode)
        lasts = {bool(m.include_last_offset) for m in bags}
        self._last = _one_of("include_last_offset", lasts, include_last_offset, False)
        for name, table in named.items():
            if not isinstance(table, nn.EmbeddingBag | nn.Embedding):
                options = {"mode": self._mode, "include_last_offset": self._last}
                table = nn.EmbeddingBag(*_size(name, table), **options)
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
        found: str = _one_of("mode", self._options("mode"), None, self._mode)
        return found

    @property
    def include_last_offset(self) -> bool:
        """Whether the last of the offsets is the number of ids: as the modules say."""
        found = self._options("include_last_offset")
        return bool(_one_of("include_last_offset", found, None, self._last))

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
            needed = "graph task", "engine node", "end of backward", "active wrapper"
            if None in [*map(find, needed)]:
                raise RuntimeError(f"{_WHERE}: this PyTorch does not tell which backward runs")
            if not isinstance(optimizer, Fused):
                expected, got = "an optimizer of nn.torch", type(optimizer).__name__
                reject(TypeError, _WHERE, "optimizer", "has a wrong type", expected, got)
            if type(optimizer).step is not Fused.step:
                wrong, expected = "has a step of its own", "that of nn.torch: it is not called"
                reject(TypeError, _WHERE, "optimizer", wrong, expected, type(optimizer).__name__)
            own, weights = _parameters_of(optimizer), self.weights
            if {*map(id, own)} != {*map(id, weights)}:
                wrong, expected = "has other parameters", f"the {len(weights)} tables"
                reject(ValueError, _WHERE, "optimizer", wrong, expected, f"{len(own)} parameters")
            other = optimizer._in_backward and optimizer._in_backward()
            if other is not None and other is not self:
                wrong, expected = "steps in backward already", "one that no other module has"
                reject(ValueError, _WHERE, "optimizer", wrong, expected, f"that of {other}")
        elif max_norm is not None or clip_value is not None or norm is not None:
            reject(TypeError, _WHERE, "optimizer", "is missing", "one that steps", None)
        updates = optimizer and _Updates(optimizer, weights, max_norm, clip_value, norm)
        if self._updates is not None:
            self._updates.optimizer._in_backward = None
        self._updates, self._has_lost_updates = updates, False
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
        if any(isinstance(m, GrowingEmbedding) for m in modules_of(self)):
            ids, checks = self._rows_of(ids, offsets)
        factors, weights = per_sample_weights, self.weights
        if isinstance(factors, Tensor):
            factors = [factors]
        if self._updates is not None and torch.is_grad_enabled():
            self._updates.check(weights)
        given = ids, offsets, per_sample_weights
        out: Tensor = _Pooling.apply(self, (given, checks), *weights, *(factors or ()))
        return out

    def _rows_of(self, ids: Any, offsets: Any) -> tuple[Any, list[Callable[[], None]]]:
        """The ids with rows in place of those of growing tables, and what is to be called before
        there is a gradient.
        """
        modules = [*modules_of(self)]
        tables = [modules[t] for t in self._features]
        checks: list[Callable[[], None]] = []
        parts = [ids] if isinstance(ids, Tensor) and len(tables) == 1 else ids
        if isinstance(ids, Tensor) and len(tables) > 1:  # one after the other
            bounds = offsets if isinstance(offsets, Tensor) else ids.new_zeros(1)
            firsts = bounds[:: max(1, (len(bounds) - 1) // len(tables))].tolist()
            parts = [ids[a:b] for a, b in pairwise(firsts)]
        if not isinstance(parts, list | tuple) or len(parts) != len(tables):
            return ids, checks  # which is refused as it is
        found = [*parts]
        for k, (table, own) in enumerate(
            zip(tables, parts, strict=True)
        ):  # before ids are admitted
            if not isinstance(table, GrowingEmbedding) and isinstance(own, Tensor):
                prepare_rows(table.weight, own, f"{_WHERE}: ids[{k}]")
        for table in dict.fromkeys(tables):
            if isinstance(table, GrowingEmbedding):
                each = [f for f, own in enumerate(tables) if own is table]
                rows, check = table.rows([parts[f] for f in each])
                checks.append(check)
                for f, own in zip(each, rows, strict=True):
                    found[f] = own
        if not isinstance(ids, Tensor):
            return found, checks
        return torch.cat(found) if len(tables) > 1 else found[0], checks

    def _now(self, weights: Sequence[Tensor]) -> tuple[Any, Pooling, bool, dict[int, int]]:
        """The tables as they are: a key, how they are pooled, whether each table has one id a bag
        where no offsets are given, and ids of tables that have no gradient.
        """
        modules = modules_of(self)
        key = [
            (w.data_ptr(), w.shape, w.stride(), w.dtype,
             (_of_bag if isinstance(m, nn.EmbeddingBag) else _of_embedding)(m))
            for w, m in zip(weights, modules, strict=True)
        ]  # fmt: skip
        known = self._known
        # As calls of C: this is done for each table in each forward.
        are_called = any(chain.from_iterable(map(_hooks_of, modules))) or any(
            "forward" in m.__dict__ for m in modules
        )
        if known is not None and known[0] == key and not are_called:
            return known  # type: ignore[no-any-return]
        for k, (name, module) in enumerate(self._modules.items()):
            _check_module(name, module)
            _check_tensor(f"the weight of table {k}", weights[k])
        padding = [
            _padding(k, m, len(w)) for k, (m, w) in enumerate(zip(modules, weights, strict=True))
        ]
        are_bags = [isinstance(m, nn.EmbeddingBag) for m in modules]
        # Its memory is that of the key for as long as this is known.
        arrays = [array_of(weight.detach()) for weight in weights]
        pooling = Pooling(
            _WHERE, arrays, self._features, self.mode,
            [padding[t] if are_bags[t] else None for t in self._features],
            "raise", open_ended=not (self.include_last_offset or is_on_device(arrays[0])),
        )  # fmt: skip
        dropped = {k: own for k, own in enumerate(padding) if own is not None and not are_bags[k]}
        self._known = known = key, pooling, not any(are_bags), dropped
        return known

    @as_torch
    def _pooled(
        self, given: tuple[Any, Any, Any], weights: Sequence[Tensor]
    ) -> tuple[Any, dict[int, int]]:
        """Rows of the tables, pooled, and ids of tables that have no gradient."""
        _, pooling, are_single, dropped = self._now(weights)
        if pooling.is_on_device:
            if not self.include_last_offset and isinstance(given[1], list | tuple):
                given = given[0], [*map(_with_end, given[1], given[0])], given[2]
            return pool(pooling, *self._arrays(given)), dropped
        arrays = None
        found = read_plain(pooling, *given, torch, singles=are_single)
        if found is None:
            arrays = self._arrays(given)
            found = read(pooling, *arrays)
        prepare_bags(pooling, found, weights)
        pooled = Pooled(pooling, found)
        if pooled.is_bad:
            find_error(pooling, *(arrays or self._arrays(given))[:2])
        return pooled, dropped

    def _arrays(self, given: tuple[Any, Any, Any]) -> list[Any]:
        """The arrays of the arguments, in the form of `ops.EmbeddingBags`."""
        modules = [*modules_of(self)]
        modules = [modules[t] for t in self._features]
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
                a.reshape(len(a), 1) if a.ndim == 1 and isinstance(module, nn.Embedding) else a
                for a, module in zip(ids, modules, strict=True)
            ]
        return found

    def _parallel(self) -> DistributedDataParallel | None:
        """The wrapper that calls this, or, where a backward computes anew, that has called it."""
        active = _active_wrapper and _active_wrapper()
        known = None if self._ddp is None else self._ddp()
        if active is None:
            return known if known is not None and _backward() != _NO_BACKWARD else None
        if active is not known:
            if not any(module is self for module in active.module.modules()):
                return None
            self._ddp = weakref.ref(active)
            _warn_of_exchange(active, [*self.parameters()])
        return active


def _warn_of_exchange(parallel: DistributedDataParallel, weights: Sequence[Tensor]) -> None:
    """Warn where PyTorch exchanges sparse gradients of tables over gloo, which is not safe."""
    group, ignored = parallel.process_group, parallel.parameters_to_ignore
    if dist.get_backend(group) != "gloo" or dist.get_world_size(group) == 1:
        return
    known, named = {*map(id, weights)}, parallel.module.named_parameters()
    names = [name for name, p in named if id(p) in known and name not in ignored]
    if names:
        warnings.warn(
            f"{_WHERE}: DistributedDataParallel exchanges sparse gradients over gloo, which "
            f"corrupts memory now and then: before you wrap the model, set "
            f"model._ddp_params_and_buffers_to_ignore = {names}, and use update_in_backward",
            RuntimeWarning,
            stacklevel=2,
        )


_outside_of_graphs: Any = outside_of_graphs(EmbeddingBags.forward)


class _Updates:
    """The steps of an optimizer in backward: one for each, with all that has come in it."""

    def __init__(
        self, optimizer: Fused, weights: Sequence[Tensor], max_norm: Any, clip_value: Any, norm: Any
    ) -> None:
        self.optimizer, self._weights, self._norm = optimizer, weights, norm
        if max_norm is not None and clip_value is not None:
            reject(ValueError, _WHERE, "clip_value", "is beside max_norm", "one of them", "both")
        if norm is not None and (max_norm is None or not callable(norm)):
            expected, got = "a function, and max_norm", f"{type(norm).__name__}, {max_norm}"
            reject(TypeError, _WHERE, "norm", "does not fit", expected, got)
        self._is_by_value = clip_value is not None
        name, limit = ("clip_value", clip_value) if self._is_by_value else ("max_norm", max_norm)
        self.limit = None if limit is None else limit_of(_WHERE, name, limit)
        # Of threads, one at a time; hooks of a step may go backward themselves.
        self._lock = threading.RLock()
        self._steps: weakref.WeakValueDictionary[int, _Step] = weakref.WeakValueDictionary()

    def check(self, weights: Sequence[Tensor]) -> None:
        """Refuse tables that the optimizer does not have, or with hooks that would see nothing.

        Raises:
            ValueError: there are some.
        """
        if not all(map(is_, weights, self._weights)):
            own = {*map(id, _parameters_of(self.optimizer))}
            for k, weight in enumerate(weights):
                if weight.requires_grad and id(weight) not in own:
                    _reject_weight(k)
            self._weights = weights
        if any(chain.from_iterable(map(_hooks_of_weight, weights))):
            k = next(k for k, weight in enumerate(weights) if any(_hooks_of_weight(weight)))
            wrong = "has hooks, which would see no gradient"
            expected, got = "none, or update_in_backward(None)", "some"
            reject(ValueError, _WHERE, f"the weight of table {k}", wrong, expected, got)

    def step(self) -> _Step:
        """The step at the end of the backward that this is called in."""
        key = _backward()
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = _Step(self)
            _at_the_end_of_backward(found)
        return found

    @as_torch
    def take(self, calls: Sequence[tuple[Any, dict[Tensor, BagTensor]]]) -> None:
        """One step with the gradients of all calls, and with what lies in ``.grad``."""
        contexts, optimizer = [ctx for ctx, _ in calls], self.optimizer
        parallel = next((ctx.parallel for ctx in contexts if ctx.parallel is not None), None)
        with self._lock:
            if parallel is None:
                found = self._found(calls)
            else:
                mine, error = attempted(partial(self._found, calls, is_shared=True))
                comm, mine = over_torch(parallel.process_group), mine or {}
                means = average_bags(_WHERE, [*mine.values()], comm, error)
                found = dict(zip(mine, means, strict=True))

            def step(*_: Any, **__: Any) -> None:
                with torch.no_grad():
                    self._take(found)
                for ctx in contexts:
                    ctx.is_taken = True
                for weight in found:
                    weight.grad = None

            optimizer._opt_called = True  # schedulers ask whether a step came before theirs
            if _is_watched(optimizer):
                watched(step)(optimizer)
            else:
                step()

    def _take(self, found: dict[Tensor, Any]) -> None:
        """One step with these gradients, clipped, and with what lies in ``.grad``."""
        optimizer, limit, factor = self.optimizer, self.limit, 1.0
        gradients = {p: _with_others(p, found.get(p)) for p in _parameters_of(optimizer)}
        if limit is not None:
            named = [("a gradient", p, g) for p, g in gradients.items() if g is not None]
            if self._is_by_value or any(p.is_cuda for p in gradients):
                named = [(name, p, _as_torch(g, p)) for name, p, g in named]
            if self._is_by_value:
                gradients |= {own[1]: within(limit, *own) for own in named}
            else:
                norm = _norm(named, 2.0)
                if self._norm is not None:
                    norm = number_of(_WHERE, "norm", self._norm(norm))
                    check.in_range(_WHERE, "norm", norm, not norm < 0.0, "at least 0")
                if optimizer.skip_nonfinite and not math.isfinite(norm):
                    optimizer.skipped_steps += 1
                    return
                factor = min(limit / (norm + 1e-6), 1.0)  # as `clip_grad_norm_`
        optimizer._step(None, factor, tuple(gradients.values()))

    def _found(
        self, calls: Sequence[tuple[Any, dict[Tensor, BagTensor]]], *, is_shared: bool = False
    ) -> dict[Tensor, Any]:
        """The gradients of tables, of all calls together.

        Raises:
            RuntimeError, ValueError: there is no step with these.
        """
        known, found = {*map(id, _parameters_of(self.optimizer))}, dict[Tensor, list[BagTensor]]()
        if len(known) > len(calls[0][0].weights):
            wrong, expected = "has other parameters", f"the {len(calls[0][0].weights)} tables"
            reject(ValueError, _WHERE, "optimizer", wrong, expected, f"{len(known)} parameters")
        for ctx, own in calls:
            if ctx.is_taken:
                wrong = "backward has updated the tables already"
                raise RuntimeError(f"{_WHERE}: {wrong}: once a forward")
            if not known.issuperset(map(id, own)):
                _reject_weight(next(
                    k for k, w in enumerate(ctx.weights) if w in own and id(w) not in known
                ))  # fmt: skip
            for weight, gradient in own.items():
                if is_shared and not _is_empty(weight.grad):
                    k = next(k for k, w in enumerate(ctx.weights) if w is weight)
                    wrong, expected = "has a gradient from elsewhere", "bags alone: only these meet"
                    fix = "; update_in_backward(None) leaves all to DistributedDataParallel"
                    got, name = tuple(weight.grad.shape), f"the weight of table {k}"
                    reject(RuntimeError, _WHERE, name, wrong, expected, got, fix)
                found.setdefault(weight, []).append(gradient)
        if len(calls) == 1:
            return calls[0][1]
        if any(is_on_device(own.values) for every in found.values() for own in every):
            return {w: reduce(add, [_as_torch(g, w) for g in every]) for w, every in found.items()}
        return dict(zip(found, joined([*found.values()]), strict=True))


class _Step:
    """The gradients of one backward, which calls this at its end, and alone keeps it alive."""

    def __init__(self, updates: _Updates) -> None:
        self._updates, self.is_over = updates, False
        self._has_waited = False
        self.calls: list[tuple[Any, dict[Tensor, BagTensor]]] = []

    def __call__(self) -> None:
        if not self._has_waited and any(ctx.parallel is not None for ctx, _ in self.calls):
            # DistributedDataParallel waits for its exchange at the end of backward, too, and comes
            # to that after its last gradient: until then threads of gloo write to ``.grad``.
            self._has_waited = True
            _at_the_end_of_backward(self)
            return
        self.is_over = True  # a hook that goes backward itself takes a step of its own
        if self.calls:
            self._updates.take(self.calls)


class _Pooling(torch.autograd.Function):
    """Pooled rows; the tables are inputs, so that backward is called."""

    @staticmethod
    def forward(ctx: Any, module: EmbeddingBags, given: Any, *tensors: Tensor) -> Tensor:
        given, ctx.checks = given
        weights = tensors[: len(modules_of(module))]
        ctx.module, ctx.weights, ctx.is_taken = module, weights, False
        ctx.parallel, ctx.is_synced, ctx.step = module._parallel(), True, None
        if ctx.parallel is not None:
            ctx.is_synced = ctx.parallel.require_backward_grad_sync
        if module._updates is not None and _backward() != _NO_BACKWARD:
            # A backward that computes anew what it needs: the step is its end, not that of the one
            # within it.
            ctx.step = weakref.ref(module._updates.step())
        factors = tensors[len(weights) :]
        ctx.factors, ctx.versions = [(t.shape, t.dtype) for t in factors], None
        ctx.pooled, ctx.dropped = module._pooled(given, weights)
        if any(t.requires_grad for t in factors):  # whose gradients follow from the tables
            ctx.versions = _versions(weights)
        dtypes = {weight.dtype for weight in weights}
        out = tensor_of(ctx.pooled.out)
        return out.to(dtypes.pop()) if len(dtypes) == 1 else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        weights, updates = ctx.weights, ctx.module._updates
        for check_rows in ctx.checks:
            check_rows()
        n, needs = len(weights), ctx.needs_input_grad[2:]
        if not any(needs):
            return (None,) * (2 + len(needs))
        grad = array_of(in_memory(grads[0].detach()))
        factors: list[Any] = [None] * (len(needs) - n)
        if any(needs[n:]):
            if ctx.versions != _versions(weights):
                wrong = "the tables have changed since the forward"
                raise RuntimeError(f"{_WHERE}: no gradients of per_sample_weights: {wrong}")
            products = [tensor_of(x) for x in ctx.pooled.weight_gradients(grad)]
            if len(factors) == 1:
                products = [torch.cat(products)]
            each = zip(products, ctx.factors, strict=True)
            factors = [x.reshape(shape).to(dtype) for x, (shape, dtype) in each]
        are_left, are_taken = [*needs[:n]], [False] * n
        if updates is not None:
            are_left, are_taken = _uses_of(node for node, _ in ctx.next_functions[:n])
        elif ctx.module._has_lost_updates:
            ctx.module._has_lost_updates = False
            text = "a copy leaves gradients; call its update_in_backward, with an optimizer or None"
            warnings.warn(f"{_WHERE}: {text}", RuntimeWarning, stacklevel=2)
        tables: list[Any] = [None] * n
        if any(are_left) or any(are_taken):
            found = ctx.pooled.gradients(grad)
            for k, row in ctx.dropped.items():
                found[k] = _without(found[k], row)
            if any(are_taken):
                _collect(ctx, updates, found, are_taken)
            for k, weight in enumerate(weights):
                if are_left[k]:
                    tables[k] = _as_torch(found[k], weight)
                elif are_taken[k] and ctx.parallel is not None:  # which waits for one
                    tables[k] = _empty(weight)
        return None, None, *tables, *factors


def _collect(
    ctx: Any, updates: _Updates, found: Sequence[BagTensor], are_taken: Sequence[bool]
) -> None:
    """Give the gradients of a call to the step of this backward.

    Raises:
        RuntimeError: processes do not meet in it.
    """
    if not ctx.is_synced:
        wrong, expected = "is called in no_sync", "a backward of all processes, whose end is a step"
        fix = "; leave no_sync out, or accumulate after update_in_backward(None)"
        reject(RuntimeError, _WHERE, "the module", wrong, expected, "one without an exchange", fix)
    if ctx.parallel is not None and ctx.parallel._join_config.enable:
        wrong, expected = "is called in join", "as many batches on all processes"
        reject(RuntimeError, _WHERE, "the module", wrong, expected, "uneven ones")
    if ctx.parallel is not None and is_on_device(found[0].values):
        wrong, expected = "steps in backward of DistributedDataParallel", "tables on the host"
        reject(RuntimeError, _WHERE, "the module", wrong, expected, "tables on a CUDA device")
    step = None if ctx.step is None else ctx.step()
    if step is None or step.is_over:
        step = updates.step()
    every = zip(ctx.weights, found, are_taken, strict=True)
    step.calls.append((ctx, {weight: own for weight, own, is_taken in every if is_taken}))


def _uses_of(nodes: Iterable[Any]) -> tuple[list[bool], list[bool]]:
    """Which of the gradients that reach these nodes a backward returns, and which it accumulates.

    Raises:
        RuntimeError: it is compiled, and calls nothing at its end.
    """
    if is_backward_compiled():
        wrong, expected = "is compiled", "one of PyTorch's engine, whose end is the step"
        fix = "; update_in_backward(None) leaves gradients"
        reject(RuntimeError, _WHERE, "backward", wrong, expected, "compiled autograd", fix)
    uses: list[bool | None] = []
    for node in nodes:
        try:
            uses.append(node is not None and _is_run(node))
        except RuntimeError:  # of `torch.autograd.grad` for a leaf: it is returned
            uses.append(None)
    return [use is None for use in uses], [*map(bool, uses)]


_NO_BACKWARD = -1
_backward, _is_run = backward_of_now(), find("engine node")
_at_the_end_of_backward, _active_wrapper = at_the_end_of_backward(), find("active wrapper")


def _parameters_of(optimizer: Fused) -> list[Tensor]:
    return [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]


def _reject_weight(k: int) -> None:
    fix = "; call update_in_backward with an optimizer of the weights as they are now"
    wrong, expected = "was replaced", "a parameter of the optimizer"
    reject(ValueError, _WHERE, f"the weight of table {k}", wrong, expected, "another tensor", fix)


def _versions(weights: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Where tables lie, and how often they have changed."""
    return [(weight.data_ptr(), changes_of(weight)) for weight in weights]


def _as_torch(gradient: Any, weight: Tensor) -> Any:
    """The gradient as PyTorch's, a row for each id; dense where it goes on from there."""
    if not isinstance(gradient, BagTensor):
        return gradient
    if is_on_device(gradient.values):
        indices, values = rows_of_bags(gradient, tensor_of)
    else:
        rows = gradient.to_rows()
        indices, values = tensor_of(rows.indices), tensor_of(rows.values)
    found = torch.sparse_coo_tensor(
        indices.long()[None], values.to(weight.dtype), tuple(weight.shape), check_invariants=False
    )
    return found if weight.is_leaf else found.to_dense()


def rows_of_bags(gradient: BagTensor, tensor_of: Callable[[Any], Tensor]) -> tuple[Tensor, Tensor]:
    """The index and the row of each occurrence in a gradient of pooled rows, by PyTorch.

    What counts for nothing, and what is out of range, is a row of zeros: how many there are is not
    asked, since the answer would be waited for. ``tensor_of`` gives the tensors of arrays.
    """
    rows, unit, (n_rows, width) = gradient.gradient, gradient.unit, gradient.dense_shape
    indices = tensor_of(rows.indices)
    n, numbers = len(indices), torch.arange(len(indices), device=indices.device)[:, None]
    places = tensor_of(rows.rows).long()[:, None] + torch.arange(
        width // unit, device=indices.device
    )

    def in_places(array: Any) -> Tensor:
        return tensor_of(array).reshape(-1, unit)[places].reshape(n, width)

    is_known = ((indices >= 0) & (indices < n_rows))[:, None]
    places = places.clamp(0, max(0, rows.values.size // unit - 1))  # those of bad ids are any
    values = in_places(rows.values)
    if rows.winners is not None:
        is_known = is_known & (in_places(rows.winners) == gradient.first + numbers)
    if rows.weights is not None:
        factors = tensor_of(rows.weights)
        real = torch.promote_types(factors.dtype, values.dtype)
        values = (values.to(real) * factors.to(real)[:, None]).to(values.dtype)
    return indices.clamp(0, max(0, n_rows - 1)), values.where(is_known, values.new_zeros(()))


def _without(gradient: BagTensor, row: int) -> BagTensor:
    """``gradient`` without the occurrences of a row."""
    if not is_on_device(gradient.values):
        return gradient.without(row)
    indices = tensor_of(gradient.indices)
    own = array_of(indices.masked_fill(indices == row, LEFT_OUT))
    found = gradient.gradient.with_arrays(indices=own)
    return BagTensor(found, gradient.unit, gradient.dense_shape)


def _with_others(weight: Tensor, gradient: Any) -> Any:
    """The gradient of a table with what lies in ``.grad``; None for one that rests."""
    if gradient is None or _is_empty(weight.grad):
        return gradient
    return weight.grad + _as_torch(gradient, weight)


def _empty(weight: Tensor) -> Tensor:
    """A sparse gradient without rows."""
    return torch.sparse_coo_tensor(tuple(weight.shape), dtype=weight.dtype)


def _is_empty(gradient: Tensor | None) -> bool:
    return gradient is None or (gradient.is_sparse and parts_of(gradient)[0].shape[1] == 0)


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
    weights = [m.weight for m in named.values() if isinstance(m, nn.EmbeddingBag | nn.Embedding)]
    if len({*map(id, weights)}) < len(weights):
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
    if not all(is_int(size) and size > 0 for size in table):
        kind = ValueError if all(map(is_int, table)) else TypeError
        reject(kind, _WHERE, f"the size of table {name!r}", "is wrong", "ints above 0", table)
    n, width = map(int, table)
    return n, width


def _check_module(name: str, module: Any) -> None:
    where = f"table {name!r}"
    if not isinstance(module, nn.EmbeddingBag | nn.Embedding):
        reject(TypeError, _WHERE, where, "has a wrong type", "a table", type(module).__name__)
    for option in ("max_norm", "scale_grad_by_freq"):
        value = getattr(module, option)
        if value is not None and value is not False:
            reject(ValueError, _WHERE, where, f"has {option}", "a module without", value)
    if not module.sparse:
        wrong, expected = "is not sparse, as its gradients are", "sparse=True"
        reject(ValueError, _WHERE, where, wrong, expected, module.sparse)
    if any(_hooks_of(module)):
        wrong, expected = "has hooks, or is pruned", "a module without: it is not called"
        reject(ValueError, _WHERE, where, wrong, expected, "some")
    kinds = GrowingEmbedding, nn.EmbeddingBag, nn.Embedding
    kind: Any = next(kind for kind in kinds if isinstance(module, kind))
    if "forward" in vars(module) or type(module).forward is not kind.forward:
        wrong, expected = "has a forward of its own", f"that of {kind.__name__}: it is not called"
        reject(TypeError, _WHERE, where, wrong, expected, type(module).__name__)


def _padding(k: int, module: Any, rows: int) -> int | None:
    """The id of a table that has no gradient; a negative one is counted from the end."""
    own, name = module.padding_idx, f"padding_idx of table {k}"
    if isinstance(module, GrowingEmbedding):
        return 0  # of all ids without a row
    if own is None:
        return None
    if isinstance(own, bool) or not isinstance(own, int):
        expected, got = "an int or None", type(own).__name__
        reject(TypeError, _WHERE, name, "has a wrong type", expected, got)
    if not -rows <= own < rows:
        reject(ValueError, _WHERE, name, "is out of range", f"-{rows} <= id < {rows}", own)
    return own % rows


def _with_end(offsets: Any, ids: Any) -> Any:
    """Offsets with the number of ids behind them, as a device has them."""
    if not (isinstance(offsets, Tensor) and isinstance(ids, Tensor) and offsets.dim() == 1):
        return offsets  # which is refused as it is
    return torch.cat((offsets, offsets.new_full((1,), ids.numel())))


def _array(name: str, tensor: Any) -> Any:
    _check_tensor(name, tensor)
    return array_of(in_memory(tensor.detach()))


def _check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        reject(TypeError, _WHERE, name, "has a wrong type", "a tensor", type(tensor).__name__)
    if tensor.device.type not in ("cpu", "cuda"):
        expected, got = "one on the host or a CUDA device", tensor.device
        reject(RuntimeError, _WHERE, name, "is on a device, where there are no bags", expected, got)
    if tensor.dtype not in NUMBERS or tensor.layout != torch.strided:
        expected = "int32, int64 or a float, in a dense tensor"
        got = f"{tensor.dtype}, {tensor.layout}"
        reject(TypeError, _WHERE, name, "has a wrong dtype", expected, got)
