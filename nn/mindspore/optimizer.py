"""The base class of MindSpore's optimizers whose steps are of this package."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import mindspore
from mindspore import nn
from mindspore.graph._utils.check_jit_forbidden_api import jit_forbidden_register
from mindspore.nn import Cell

from ...ops.runtime.errors import reject, reject_unknown
from ..fused import FusedOptimizer
from .binding import Binding, Scheduled

_OWN_STATES = "state_dtype"  # MindSpore's states have the dtypes of their parameters
_BY_KEYWORD = ("use_lazy", "use_offload")  # of MindSpore's own


class Fused(nn.Optimizer):
    """An optimizer of MindSpore whose step is that of a class of `fusestep.nn`.

    Arguments, groups, learning rates, states, their names and checkpoints are MindSpore's. The
    keyword-only arguments after its own are those of the class of `fusestep.nn`, which says what
    they do. Learning rates and decays may also be schedules of `fusestep.nn`, or any callable of
    the step. A step writes into MindSpore's memory, after all that was queued before.

    Raises:
        RuntimeError: MindSpore is not in PyNative mode on a CPU, or runs on several devices.
        TypeError, ValueError, KeyError: as MindSpore's class, and as the class of `fusestep.nn`.
    """

    _step_type: type[FusedOptimizer]
    __signature__: inspect.Signature
    _binding: Binding

    def __init_subclass__(cls, step: type[FusedOptimizer] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if step is None:
            return  # a subclass of a user's
        cls._step_type = step
        arguments = inspect.signature(step).parameters
        kept = [p for name, p in arguments.items() if name not in ("unknown", _OWN_STATES)]
        cls.__signature__ = inspect.Signature(kept)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        signature, where = self.__signature__, type(self).__name__
        check_context(where)
        reject_unknown(where, options, signature.parameters)
        bound = signature.bind(*arguments, **options)
        bound.apply_defaults()
        given = _for_mindspore(bound.arguments)
        kinds = signature.parameters
        theirs = {
            name: value
            for name, value in given.items()
            if kinds[name].kind is not inspect.Parameter.KEYWORD_ONLY or name in _BY_KEYWORD
        }
        super().__init__(**theirs)
        object.__setattr__(self, "_binding", self._bound(given))

    def _bound(self, given: dict[str, Any]) -> Binding:
        return Binding(self, self._step_type, given, self._follows)

    def _follows(self, inner: FusedOptimizer, step: int) -> Mapping[str, Any]:
        """What MindSpore keeps of ``step`` updates beside the states, by name."""
        return inner._derived_state(step)

    @property
    def skipped_steps(self) -> int:
        """Steps that ``skip_nonfinite`` has skipped."""
        return self._binding.inner.skipped_steps

    def construct(self, gradients: Any) -> tuple[bool, ...]:
        """A step with the gradients in the order of ``parameters``.

        Args:
            gradients: a tuple of Tensor or RowTensorInner.

        Returns:
            A True for each parameter.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError: a gradient does not fit, a parameter or
                state has another shape or dtype than at construction, a list of learning rates is
                used up, or what was loaded is of other options. Nothing has changed then.
        """
        result: tuple[bool, ...] = fused_step_in_pynative_mode(self._binding, gradients)
        return result


# Its name is what MindSpore's compiler says when it finds a step in a graph.
@jit_forbidden_register
def fused_step_in_pynative_mode(binding: Binding, gradients: Any) -> tuple[bool, ...]:
    """A step of a `Fused`."""
    return binding.step(gradients)


def check_context(where: str) -> None:
    """Refuse what no step of this package can run in.

    Raises:
        RuntimeError: graph mode, another target than the CPU, or several devices.
    """
    works = "PyNative mode on a CPU (mindspore.set_context(mode=mindspore.PYNATIVE_MODE))"
    if mindspore.get_context("mode") != mindspore.PYNATIVE_MODE:
        reject(RuntimeError, where, "the mode", "is impossible", works, "graph mode")
    target = mindspore.get_context("device_target")
    if target != "CPU":
        reject(RuntimeError, where, "the device target", "is impossible", works, target)
    mode = mindspore.get_auto_parallel_context("parallel_mode")
    if mode != "stand_alone":
        wrong = "is impossible"
        reject(RuntimeError, where, "the parallel mode", wrong, "'stand_alone'", repr(mode))


def _for_mindspore(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with each schedule that is not MindSpore's in a Cell."""
    return {
        name: [_group(part) for part in value]
        if name == "params" and isinstance(value, list | tuple)
        else _schedule(value)
        if name in ("learning_rate", "weight_decay")
        else value
        for name, value in given.items()
    }


def _group(group: Any) -> Any:
    if not isinstance(group, dict):
        return group
    return {k: _schedule(v) if k in ("lr", "weight_decay") else v for k, v in group.items()}


def _schedule(value: Any) -> Any:
    is_ours = callable(value) and not isinstance(value, Cell | type | mindspore.Tensor)
    return Scheduled(value) if is_ours else value
