"""An optimizer of this package on the memory of MindSpore's parameters, states and rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import RLock
from typing import Any

import mindspore
import ml_dtypes
import numpy as np
from mindspore import Tensor

# `runtime.synchronize` logs an error on a CPU when it is first called, and does not wait then.
from mindspore._c_expression import synchronize
from mindspore.common.sparse_tensor import RowTensorInner
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from ...kernels.cpu.headers.arrays import address_of
from ...ops.runtime.errors import reject
from ...ops.runtime.row_tensor import RowTensor
from ..base.arguments import gradients_of
from ..base.checkpoint import steps_done
from ..base.parameter import Parameter
from ..engine.layout import Gradients
from ..engine.reader import GradientReader
from ..fused import FusedOptimizer

Follows = Callable[[FusedOptimizer, int], Mapping[str, Any]]
"""By name, what MindSpore keeps of a number of updates beside its states."""
_LOOKUP = "; EmbeddingLookup(sparse=True) gives values without their indices on a CPU"


class Scheduled(LearningRateSchedule):
    """A callable of the step 0, 1, 2, ..., for MindSpore."""

    def __init__(self, schedule: Callable[[int], Any]) -> None:
        super().__init__()
        self.schedule = schedule

    def construct(self, global_step: Any) -> Any:
        """The value at a step."""
        return Tensor(np.float32(self.schedule(int(global_step.asnumpy().reshape(())))))


def function_of(cell: Any) -> Callable[[int], Any]:
    """The value of a schedule by the number of the step, asked for without MindSpore if it can."""
    if isinstance(cell, Scheduled):
        return cell.schedule
    return lambda step: cell(Tensor([step], mindspore.int32)).asnumpy()


def host_array(tensor: Any) -> np.ndarray:
    """The elements of a tensor, once they are computed; MindSpore's bfloat16 as that of NumPy."""
    array: np.ndarray = tensor.asnumpy()
    is_bfloat16 = tensor.dtype == mindspore.bfloat16
    return array.view(np.uint16).view(ml_dtypes.bfloat16) if is_bfloat16 else array


def check_memory(where: str, name: str, tensor: Any) -> None:
    """Refuse a tensor whose storage was made smaller: its address is that of freed memory."""
    storage = tensor.untyped_storage()
    n_bytes = storage.size()
    # After `set_dtype` and `set_` it may still be the one of before, which says nothing.
    if storage.data_ptr() == tensor.data_ptr() and n_bytes < tensor.nbytes:
        expected, got = f"{tensor.nbytes} bytes", f"{n_bytes} bytes"
        reject(ValueError, where, name, "has memory that was freed", expected, got)


def shared_array(where: str, tensor: Any) -> np.ndarray:
    """MindSpore's own memory of a parameter.

    Raises:
        ValueError: it is not there yet or was freed, or there is only a copy of it.
    """
    name = f"parameter {tensor.name!r}"
    if tensor.has_init:
        wrong, expected = "has no values yet", "net.init_parameters_data() before"
        reject(ValueError, where, name, wrong, expected, "an initializer")
    check_memory(where, name, tensor)
    array = host_array(tensor)
    if address_of(array) != tensor.data_ptr() or not tensor.is_contiguous():
        expected, got = "contiguous memory of its own", "a part or a view of another tensor"
        reject(ValueError, where, name, "cannot be shared", expected, got)
    return array


def places_of(tensors: Sequence[Any]) -> list[Any]:
    """Where tensors lie, and what decides how their memory is read.

    Another dtype is always at another place. It is the tensor that is asked: its storage may be
    the one of before.
    """
    return [(t.data_ptr(), t.untyped_storage().size(), t.is_contiguous(), t.shape) for t in tensors]


class TensorReader(GradientReader):
    """Reads tensors of MindSpore; of those that are like the last ones only addresses."""

    _seen: list[Any] | None = None

    def read_like_last(self, gradients: tuple[Any, ...]) -> Gradients | None:
        """The gradients if they are like the last ones (`GradientReader.read_like_last`)."""
        last, seen = self._layouts.get(None), _scanned(gradients)
        if last is None or seen is None or self._seen != seen[0]:
            return None
        _, addresses, storages = seen
        if last.shares_memory(zip(addresses, last.dense_bytes, strict=True)):
            return None  # `read` says it
        return Gradients(last, np.array(addresses, np.int64), [], storages)

    def read(self, gradients: tuple[Any, ...], added: Callable[[int], float]) -> Gradients:
        """The gradients, checked (`GradientReader.read`)."""
        for p, g in zip(self._parameters, gradients, strict=True):
            if isinstance(g, Tensor):
                name = f"gradient of {p.name!r}"
                if g.shape != p.shape:
                    wrong = "has a wrong shape"
                    reject(ValueError, self._where, name, wrong, p.shape, g.shape, _LOOKUP)
                check_memory(self._where, name, g)
        seen = _scanned(gradients)
        arrays = tuple(host_array(g) if isinstance(g, Tensor) else g for g in gradients)
        result = super().read_like_last(arrays) or super().read(arrays, added)
        # Unless another thread has given a tensor other memory meanwhile.
        is_seen = seen is not None and seen[1] == list(map(address_of, arrays))
        self._seen = seen[0] if seen is not None and is_seen else None
        return result


def _scanned(gradients: Iterable[Any]) -> tuple[list[Any], list[int], list[Any]] | None:
    """Kinds and addresses of dense gradients, and the storages that hold their memory.

    None if they are not all plain tensors that lie in their storages. A storage holds the memory
    when another thread gives the tensor another one, as `assign_value` does.
    """
    kinds, addresses, storages = [], [], []
    for g in gradients:
        if type(g) is not Tensor or not g.is_contiguous():
            return None
        # A tensor is computed when it tells where it lies.
        address, storage = g.data_ptr(), g.untyped_storage()
        begin, n_bytes = storage.data_ptr(), storage.size()
        if not begin <= address <= begin + n_bytes - g.nbytes:
            return None
        kinds.append((n_bytes, g.shape, g.dtype))
        addresses.append(address)
        storages.append(storage)
    return kinds, addresses, storages


class Binding:
    """A `FusedOptimizer` whose arrays are the memory of an optimizer of MindSpore.

    MindSpore has read the arguments; it has parameters, states, learning rates and the count of
    steps, and the `FusedOptimizer` has the step. ``options`` are all arguments of its class but
    parameters and decay. ``follows`` gives what MindSpore keeps of a number of updates beside the
    states, which its own step would go on from.
    """

    def __init__(self, outer: Any, make: Any, options: dict[str, Any], follows: Follows) -> None:
        self.where = outer.cls_name
        self._follows, self._exclusive = follows, RLock()
        self._weights = tuple(outer.parameters)
        parameters = [Parameter(shared_array(self.where, w), w.name) for w in self._weights]
        rates = outer.get_lr_parameter(list(self._weights))
        options = {**options, **_groups(outer, make, parameters, rates, options)}
        self.inner: FusedOptimizer = make(**options)
        self.inner.reader_type = TensorReader
        self._check_names(rates)
        outer._make_states(self.inner)
        self._find(outer, rates)
        self._check_memory()

    def has(self, value: Any) -> bool:
        """Whether a value is, or begins with, a tensor that a step works on."""
        first = value[0] if isinstance(value, tuple) and value else value
        return any(tensor is first for tensor in self._tensors)

    def _check_names(self, rates: Iterable[Any]) -> None:
        """Refuse a parameter with the name of a state: MindSpore has one tensor for each name."""
        inner = self.inner
        names = [name for i in range(len(self._weights)) for name in inner.states_by_name(i)]
        names += ["global_step", *self._follows(inner, 0), *inner.numbers]
        names += {rate.name for rate in rates if isinstance(rate, mindspore.Parameter)}
        (name, count), *_ = Counter([*names, *(w.name for w in self._weights)]).most_common(1)
        if count > 1:
            wrong, expected = "has the name of a state", "another name"
            reject(ValueError, self.where, f"parameter {name!r}", wrong, expected, name)

    def _find(self, outer: Any, rates: Sequence[Any]) -> None:
        """Find the tensor of MindSpore for each array of the optimizer."""
        inner, tensors = self.inner, {p.name: p for p in outer.get_parameters()}
        self._tensors, self._arrays = [*self._weights], [p.array for p in inner.parameters]
        self._places: list[Any] = []

        def index_of(tensor: Any, array: np.ndarray | None = None) -> int:
            self._tensors.append(tensor)
            self._arrays.append(host_array(tensor) if array is None else array)
            return len(self._tensors) - 1

        self._roles = {
            role: [
                None
                if array is None
                else index_of(tensors[inner._state_name(role, str(p.name))], array)
                for p, array in zip(inner.parameters, arrays, strict=True)
            ]
            for role, arrays in inner._states.items()
        }
        self._numbers = {name: index_of(tensors[name], a) for name, a in inner.numbers.items()}
        self._step_at = index_of(outer.global_step, inner.global_step)
        ours = {id(o.rate): o.rate for o in inner._groups.options if isinstance(o.rate, Parameter)}
        theirs = {id(o.rate): t for o, t in zip(inner._groups.options, rates, strict=True)}
        self._rates = {index_of(theirs[key]): rate for key, rate in ours.items()}
        self._following = {
            name: index_of(tensors[name]) for name in self._follows(inner, 0) if name in tensors
        }
        self._options = [self._following[name] for name in inner._derived_state(0)]

    def _check_memory(self) -> None:
        """Wait for what MindSpore has queued, and work on its memory as it lies now.

        Raises:
            TypeError, ValueError: a tensor has another dtype or shape than at construction, or
                shares its memory, or its memory was freed.
        """
        # To tell where a tensor lies MindSpore waits only when it is first asked.
        synchronize()
        places = places_of(self._tensors)
        if places == self._places:
            return
        arrays = [shared_array(self.where, tensor) for tensor in self._tensors]
        for tensor, array, before in zip(self._tensors, arrays, self._arrays, strict=True):
            for kind, what in ((TypeError, "dtype"), (ValueError, "shape")):
                old, new = getattr(before, what), getattr(array, what)
                if old != new:
                    wrong = f"has another {what} than at construction"
                    reject(kind, self.where, f"parameter {tensor.name!r}", wrong, old, new)
        states = {
            role: tuple(None if k is None else arrays[k] for k in places)
            for role, places in self._roles.items()
        }
        self._check_options(arrays)
        self.inner.take_arrays(arrays[: len(self._weights)], states, arrays[self._step_at])
        self.inner.numbers = {name: arrays[k] for name, k in self._numbers.items()}
        for place, rate in self._rates.items():
            rate.data = arrays[place]
        self._arrays, self._places = arrays, places

    def _check_options(self, arrays: Sequence[np.ndarray]) -> None:
        """Refuse a state of other options, or of another number of steps."""
        step, names = steps_done(self.where, arrays[self._step_at]), self.inner._derived_state(0)
        self.inner._check_derived({name: arrays[self._following[name]] for name in names}, step)
        self._checked = [float(arrays[k].flat[0]) for k in self._options]

    def _count(self) -> int:
        """Have as many updates as MindSpore's count of steps, which a checkpoint may have set."""
        step, counts = int(self._arrays[self._step_at][0]), self.inner._steps
        checked = [float(self._arrays[k].flat[0]) for k in self._options]
        if counts[0] != step or checked != self._checked:
            self._check_options(self._arrays)
            counts[:] = step
        return step

    def _follow(self, step: int) -> None:
        """Have what MindSpore keeps of a number of updates beside the states."""
        following = self._follows(self.inner, step) if self._following else {}
        for name, place in self._following.items():
            kept, value = self._arrays[place], following[name]
            if kept.size and kept.flat[0] != value:
                kept[...] = value
        self._checked = [float(self._arrays[k].flat[0]) for k in self._options]

    def step(self, gradients: Any, call: Callable[[tuple[Any, ...]], tuple[bool, ...]]) -> Any:
        """A step by ``call``, after everything that MindSpore has queued; one at a time."""
        arrays = gradients_of(self.where, gradients, len(self._weights))
        if any(type(g) is not Tensor for g in arrays):
            names = [f"gradient of {w.name!r}" for w in self._weights]
            arrays = tuple(map(partial(_row_tensor, self.where), names, arrays))
        with self._exclusive:
            self._check_memory()
            before = self._count()
            try:
                return call(arrays)
            finally:  # an interrupt may have come after the step
                done = int(self._arrays[self._step_at][0])
                if done != before:
                    self._follow(done)


def _row_tensor(where: str, name: str, gradient: Any) -> Any:
    """A row-sparse gradient of MindSpore as this package has it; a dense one as it is."""
    if isinstance(gradient, Tensor):
        return gradient
    if not isinstance(gradient, RowTensorInner):
        expected, got = "a Tensor or a RowTensorInner", type(gradient).__name__
        reject(TypeError, where, name, "has a wrong type", expected, got)
    arrays = host_array(gradient.indices), host_array(gradient.values)
    return RowTensor(*arrays, tuple(gradient.dense_shape))


def _groups(
    outer: Any, make: Any, parameters: list[Parameter], rates: list[Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a `FusedOptimizer` for what MindSpore has read of groups and rates."""
    rate_of = {id(rate): _rate(rate) for rate in rates}
    decays = _decays(outer, make, options.get("weight_decay", 0.0))
    centralized = getattr(outer, "grad_centralization_flags", [False] * len(parameters))
    groups: dict[Any, dict[str, Any]] = {}
    for p, rate, decay, centralize in zip(parameters, rates, decays, centralized, strict=True):
        own_rate = {"lr": rate_of[id(rate)]} if outer.is_group_lr else {}
        key = (id(rate), decay, centralize)
        made = {"params": [], "weight_decay": decay, "grad_centralization": centralize, **own_rate}
        groups.setdefault(key, made)["params"].append(p)
    found: dict[str, Any] = {"params": [*groups.values(), {"order_params": parameters}]}
    if options["learning_rate"] is not None:
        found["learning_rate"] = rate_of[id(rates[0])]
    return found


def _rate(rate: Any) -> Any:
    """A learning rate of MindSpore as this package takes it; its memory is bound later."""
    if isinstance(rate, mindspore.Parameter):
        return rate.asnumpy().tolist()
    return function_of(rate)


def _decays(outer: Any, make: Any, decay: Any) -> list[Any]:
    """The weight decay of each parameter: a number, or a function of the step."""
    if outer.is_group:  # MindSpore has multiplied these with the loss scale, and wrapped them
        scale, values = outer.loss_scale, outer.group_weight_decay
        cells = {id(x): function_of(x.weight_decay) for x in values if callable(x)}
        return [cells[id(x)] if callable(x) else x / scale for x in values]
    value = function_of(decay) if callable(decay) else decay
    filters = make._filter_names
    return [0.0 if filters and not flag else value for flag in outer.decay_flags]
