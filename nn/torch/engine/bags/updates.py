"""Steps of an optimizer in backward: one for each, with the gradients of all bags in it."""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Iterable, Sequence
from functools import partial, reduce
from itertools import chain
from operator import add, is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .....kernels import private
from .....kernels.private import find
from .....ops.runtime import check
from .....ops.runtime.bags.tensor import BagTensor, joined
from .....ops.runtime.device import is_on_device
from .....ops.runtime.errors import reject
from ....distributed.agreement import attempted
from ....distributed.reduction import average_bags
from ....distributed.torch_group import over_torch
from ..clipping import checked_number, limit_of, norm_of, within
from ..threads import as_torch
from .arguments import WHERE
from .gradients import is_empty, tensor_of_rows, with_others

Gradients = dict[Tensor, BagTensor]
"""The gradients of a call, by table."""

_is_watched, _hooks_of = private.watching(), private.hooks_of_tensors()
_backward_of_now, _is_run = private.backward_of_now(), find("engine node")
_at_the_end_of_backward, _active_wrapper = private.at_the_end_of_backward(), find("active wrapper")


def can_step_in_backward() -> bool:
    """Whether this PyTorch tells which backward runs, and what is needed of it."""
    needed = "graph task", "engine node", "end of backward", "active wrapper"
    return None not in [*map(find, needed)]


def is_in_backward() -> bool:
    """Whether a backward runs, as where it computes anew what it needs."""
    return _backward_of_now() >= 0


def parameters_of(optimizer: Any) -> list[Tensor]:
    """The parameters of all groups."""
    return [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]


def reject_others(n_tables: int, n_parameters: int) -> None:
    """Refuse an optimizer that has other parameters than the tables."""
    wrong, expected = "has other parameters", f"the {n_tables} tables"
    reject(ValueError, WHERE, "optimizer", wrong, expected, f"{n_parameters} parameters")


class UpdatesInBackward:
    """The steps of an optimizer at the ends of backwards, and how their gradients are clipped.

    Arguments are those of `EmbeddingBags.update_in_backward`.
    """

    def __init__(
        self, optimizer: Any, weights: Sequence[Tensor], max_norm: Any, clip_value: Any, norm: Any
    ) -> None:
        self.optimizer, self.weights, self._norm = optimizer, weights, norm
        if max_norm is not None and clip_value is not None:
            reject(ValueError, WHERE, "clip_value", "is beside max_norm", "one of them", "both")
        if norm is not None and (max_norm is None or not callable(norm)):
            expected, got = "a function, and max_norm", f"{type(norm).__name__}, {max_norm}"
            reject(TypeError, WHERE, "norm", "does not fit", expected, got)
        self._is_by_value = clip_value is not None
        name, limit = ("clip_value", clip_value) if self._is_by_value else ("max_norm", max_norm)
        self.limit = None if limit is None else limit_of(WHERE, name, limit)
        # Of threads, one at a time; hooks of a step may go backward themselves.
        self._lock = threading.RLock()
        self._steps: weakref.WeakValueDictionary[int, StepAtEnd] = weakref.WeakValueDictionary()

    def check(self, weights: Sequence[Tensor]) -> None:
        """Refuse tables that the optimizer does not have, or with hooks that would see nothing."""
        if not all(map(is_, weights, self.weights)):
            identities = {*map(id, parameters_of(self.optimizer))}
            for k, weight in enumerate(weights):
                if weight.requires_grad and id(weight) not in identities:
                    _reject_weight(k)
            self.weights = weights
        if any(chain.from_iterable(map(_hooks_of, weights))):
            k = next(k for k, weight in enumerate(weights) if any(_hooks_of(weight)))
            wrong = "has hooks, which would see no gradient"
            expected, got = "none, or update_in_backward(None)", "some"
            reject(ValueError, WHERE, f"the weight of table {k}", wrong, expected, got)

    def step(self) -> StepAtEnd:
        """The step at the end of the backward that this is called in."""
        key = _backward_of_now()
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = StepAtEnd(self)
            _at_the_end_of_backward(step)
        return step

    def collect(self, ctx: Any, gradients: Sequence[BagTensor], are_taken: Sequence[bool]) -> None:
        """Give the gradients of a call to the step of this backward; all processes meet there."""
        wrong = expected = got = fix = ""
        if not ctx.is_synced:
            wrong, got = "is called in no_sync", "one without an exchange"
            expected = "a backward of all processes, whose end is a step"
            fix = "; leave no_sync out, or accumulate after update_in_backward(None)"
        elif ctx.parallel is not None and ctx.parallel._join_config.enable:
            wrong, got = "is called in join", "uneven ones"
            expected = "as many batches on all processes"
        elif ctx.parallel is not None and is_on_device(gradients[0].values):
            wrong, got = "steps in backward of DistributedDataParallel", "tables on a CUDA device"
            expected = "tables on the host"
        if wrong:
            reject(RuntimeError, WHERE, "the module", wrong, expected, got, fix)
        step = None if ctx.step is None else ctx.step()
        if step is None or step.is_over:
            step = self.step()
        every = zip(ctx.weights, gradients, are_taken, strict=True)
        taken = {weight: gradient for weight, gradient, is_taken in every if is_taken}
        step.calls.append((ctx, taken))

    @as_torch
    def take(self, calls: Sequence[tuple[Any, Gradients]]) -> None:
        """One step with the gradients of all calls, and with what lies in ``.grad``."""
        contexts, optimizer = [ctx for ctx, _ in calls], self.optimizer
        parallel = next((ctx.parallel for ctx in contexts if ctx.parallel is not None), None)
        with self._lock:
            if parallel is None:
                gradients = self._found(calls)
            else:
                mine, error = attempted(partial(self._found, calls, is_shared=True))
                comm, mine = over_torch(parallel.process_group), mine or {}
                means = average_bags(WHERE, [*mine.values()], comm, error)
                gradients = dict(zip(mine, means, strict=True))

            def step(*_: Any, **__: Any) -> None:
                with torch.no_grad():
                    self._take(gradients)
                for ctx in contexts:
                    ctx.is_taken = True
                for weight in gradients:
                    weight.grad = None

            optimizer._opt_called = True  # schedulers ask whether a step came before theirs
            if _is_watched(optimizer):
                private.watched(step)(optimizer)
            else:
                step()

    def _take(self, of_bags: dict[Tensor, Any]) -> None:
        """One step with these gradients, clipped, and with what lies in ``.grad``."""
        optimizer, limit, factor = self.optimizer, self.limit, 1.0
        gradients = {p: with_others(p, of_bags.get(p)) for p in parameters_of(optimizer)}
        if limit is not None:
            named = [("a gradient", p, g) for p, g in gradients.items() if g is not None]
            if self._is_by_value or any(p.is_cuda for p in gradients):
                named = [(name, p, tensor_of_rows(g, p)) for name, p, g in named]
            if self._is_by_value:
                gradients |= {of_table[1]: within(limit, *of_table) for of_table in named}
            else:
                norm = norm_of(named, 2.0)
                if self._norm is not None:
                    norm = checked_number(WHERE, "norm", self._norm(norm))
                    check.in_range(WHERE, "norm", norm, not norm < 0.0, "at least 0")
                if optimizer.skip_nonfinite and not math.isfinite(norm):
                    optimizer.skipped_steps += 1
                    return
                factor = min(limit / (norm + 1e-6), 1.0)  # as `clip_grad_norm_`
        optimizer._step(None, factor, tuple(gradients.values()))

    def _found(
        self, calls: Sequence[tuple[Any, Gradients]], *, is_shared: bool = False
    ) -> dict[Tensor, Any]:
        """The gradients of tables, of all calls together, if there is a step with them."""
        identities = {*map(id, parameters_of(self.optimizer))}
        by_weight: dict[Tensor, list[BagTensor]] = {}
        if len(identities) > len(calls[0][0].weights):
            reject_others(len(calls[0][0].weights), len(identities))
        for ctx, of_call in calls:
            if ctx.is_taken:
                wrong = "backward has updated the tables already"
                raise RuntimeError(f"{WHERE}: {wrong}: once a forward")
            for k, weight in enumerate(ctx.weights):
                if weight not in of_call:
                    continue
                if id(weight) not in identities:
                    _reject_weight(k)
                if is_shared and not is_empty(weight.grad):
                    wrong, expected = "has a gradient from elsewhere", "bags alone: only these meet"
                    fix = "; update_in_backward(None) leaves all to DistributedDataParallel"
                    got, name = tuple(weight.grad.shape), f"the weight of table {k}"
                    reject(RuntimeError, WHERE, name, wrong, expected, got, fix)
            for weight, gradient in of_call.items():
                by_weight.setdefault(weight, []).append(gradient)
        if len(calls) == 1:
            return calls[0][1]
        if any(is_on_device(g.values) for every in by_weight.values() for g in every):
            return {
                w: reduce(add, [tensor_of_rows(g, w) for g in each])
                for w, each in by_weight.items()
            }
        return dict(zip(by_weight, joined([*by_weight.values()]), strict=True))


class StepAtEnd:
    """The gradients of one backward, which calls this at its end, and alone keeps it alive."""

    def __init__(self, updates: UpdatesInBackward) -> None:
        self._updates, self.is_over = updates, False
        self._has_waited = False
        self.calls: list[tuple[Any, Gradients]] = []

    def __call__(self) -> None:
        """Take the step."""
        if not self._has_waited and any(ctx.parallel is not None for ctx, _ in self.calls):
            # DistributedDataParallel waits for its exchange at the end of backward, too, and comes
            # to that after its last gradient: until then threads of gloo write to ``.grad``.
            self._has_waited = True
            _at_the_end_of_backward(self)
            return
        self.is_over = True  # a hook that goes backward itself takes a step of its own
        if self.calls:
            self._updates.take(self.calls)


def wrapper_of(module: Any) -> DistributedDataParallel | None:
    """The wrapper that calls a module, or, where a backward computes anew, that has called it.

    A new one warns where PyTorch exchanges sparse gradients of tables over gloo.
    """
    active = _active_wrapper and _active_wrapper()
    last = None if module._ddp is None else module._ddp()
    if active is None:
        return last if last is not None and is_in_backward() else None
    if active is not last:
        if not any(inner is module for inner in active.module.modules()):
            return None
        module._ddp = weakref.ref(active)
        _warn_of_exchange(active, [*module.parameters()])
    return active


def _warn_of_exchange(parallel: DistributedDataParallel, weights: Sequence[Tensor]) -> None:
    """Warn where PyTorch exchanges sparse gradients of tables over gloo, which is not safe."""
    group, ignored = parallel.process_group, parallel.parameters_to_ignore
    if dist.get_backend(group) != "gloo" or dist.get_world_size(group) == 1:
        return
    identities, named = {*map(id, weights)}, parallel.module.named_parameters()
    names = [name for name, p in named if id(p) in identities and name not in ignored]
    if names:
        warnings.warn(
            f"{WHERE}: DistributedDataParallel exchanges sparse gradients over gloo, which "
            f"corrupts memory now and then: before you wrap the model, set "
            f"model._ddp_params_and_buffers_to_ignore = {names}, and use update_in_backward",
            RuntimeWarning,
            stacklevel=2,
        )


def uses_of(nodes: Iterable[Any]) -> tuple[list[bool], list[bool]]:
    """Which gradients that reach these nodes a backward returns, and which it accumulates."""
    if private.is_backward_compiled():
        wrong, expected = "is compiled", "one of PyTorch's engine, whose end is the step"
        fix = "; update_in_backward(None) leaves gradients"
        reject(RuntimeError, WHERE, "backward", wrong, expected, "compiled autograd", fix)
    uses: list[bool | None] = []
    for node in nodes:
        try:
            uses.append(node is not None and _is_run(node))
        except RuntimeError:  # of `torch.autograd.grad` for a leaf: it is returned
            uses.append(None)
    return [use is None for use in uses], [*map(bool, uses)]


def _reject_weight(k: int) -> None:
    fix = "; call update_in_backward with an optimizer of the weights as they are now"
    wrong, expected = "was replaced", "a parameter of the optimizer"
    reject(ValueError, WHERE, f"the weight of table {k}", wrong, expected, "another tensor", fix)
