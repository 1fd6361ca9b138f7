"""The base class of MindSpore's optimizers whose steps are of this package."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn
from mindspore.graph._utils.check_jit_forbidden_api import jit_forbidden_register
from mindspore.graph._utils.pijit_context import SKIP_RULES
from mindspore.graph.jit_context import jit_context
from mindspore.nn import Cell

from ...ops.runtime.errors import reject, reject_unknown
from ..base.file_set import maker_of_states
from ..fused import FusedOptimizer
from .binding import Binding, Scheduled

# MindSpore's states have the dtypes of their parameters, and are those of its own optimizers.
_OWN_STATES = "state_dtype", "rounding"
_BY_KEYWORD = ("use_lazy", "use_offload")  # of MindSpore's own
_WORKS = "PyNative mode on a CPU (mindspore.set_context(mode=mindspore.PYNATIVE_MODE))"

# Functions under `@jit(capture_mode="bytecode")` call what lies in these folders as it is. They are
# read when the first one is called.
if "skip_dirs" in SKIP_RULES:
    SKIP_RULES["skip_dirs"] += (str(Path(__file__).parents[2]),)


class Fused(nn.Optimizer):
    """An optimizer of MindSpore whose step is that of a class of `fusestep.nn`.

    Arguments, groups, learning rates, states, their names and checkpoints are MindSpore's. The
    keyword-only arguments after its own are those of the class of `fusestep.nn`, which says what
    they do. Learning rates and decays may also be schedules of `fusestep.nn`, or any callable of
    the step. A step writes into MindSpore's memory, after all that was queued before; steps of
    several threads take turns. Options are fixed at construction, but for the values of learning
    rates: ``optimizer.learning_rate`` takes a Tensor.

    Raises:
        RuntimeError: MindSpore is not in PyNative mode on a CPU, or runs on several devices.
        TypeError, ValueError, KeyError: as MindSpore's class, and as the class of `fusestep.nn`.
    """

    _step_type: type[FusedOptimizer]
    __signature__: inspect.Signature
    _binding: Binding | None = None
    _call: Callable[[tuple[Any, ...]], tuple[bool, ...]]  # the step itself

    def __init_subclass__(cls, step: type[FusedOptimizer] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if step is None:
            return  # a subclass of a user's
        cls._step_type = step
        arguments = inspect.signature(step).parameters
        kept = [p for name, p in arguments.items() if name not in ("unknown", *_OWN_STATES)]
        cls.__signature__ = inspect.Signature(kept)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        signature, where = self.__signature__, type(self).__name__
        check_context(where)
        if maker_of_states() is not None:
            wrong, expected = "is of no use", "states of MindSpore's Parameters"
            reject(ValueError, where, "states_in", wrong, expected, "a function")
        reject_unknown(where, options, signature.parameters)
        bound = signature.bind(*arguments, **options)
        bound.apply_defaults()
        checked = _for_mindspore(bound.arguments)
        self._begin(checked)
        binding, call = self._bound(checked)
        object.__setattr__(self, "_call", call)
        object.__setattr__(self, "_binding", binding)

    def _begin(self, arguments: Mapping[str, Any]) -> None:
        """Have MindSpore read the arguments, and make states."""
        kinds = self.__signature__.parameters
        theirs = {
            name: value
            for name, value in arguments.items()
            if kinds[name].kind is not inspect.Parameter.KEYWORD_ONLY or name in _BY_KEYWORD
        }
        super().__init__(**theirs)

    def _make_states(self, inner: FusedOptimizer) -> None:
        """Make the states that MindSpore has not made: none."""

    def _bound(self, arguments: dict[str, Any]) -> tuple[Binding, Any]:
        binding = Binding(self, self._step_type, arguments, self._follows)
        return binding, binding.inner

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign an attribute; not an option, nor another tensor in the place of one of a step."""
        if self._binding is not None and not name.startswith("_"):
            if name in self.__signature__.parameters and name != "learning_rate":
                wrong, expected = "is fixed at construction", "a new optimizer"
                reject(ValueError, self.cls_name, name, wrong, expected, "an assignment")
            kept = getattr(self, name, None)
            if value is not kept and type(value) is not Tensor and self._binding.has(kept):
                wrong, expected = "cannot be replaced", "a Tensor, whose values it takes"
                reject(TypeError, self.cls_name, name, wrong, expected, type(value).__name__)
        super().__setattr__(name, value)

    @property
    def target(self) -> str:
        """Where a step works: ``"CPU"``, and nothing else can be assigned.

        Raises:
            ValueError: something else is.
        """
        return "CPU"

    @target.setter
    def target(self, value: str) -> None:
        if value != "CPU":
            reject(ValueError, self.cls_name, "target", "is impossible", "'CPU'", repr(value))

    @classmethod  # a binding that held its optimizer would keep it until it is collected
    def _follows(cls, inner: FusedOptimizer, step: int) -> Mapping[str, Any]:
        """The numbers that MindSpore keeps of ``step`` updates beside the states, by name."""
        return inner._derived_state(step)

    @property
    def skipped_steps(self) -> int:
        """Steps that ``skip_nonfinite`` has skipped."""
        binding: Any = self._binding
        return int(binding.inner.skipped_steps)

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
        result: tuple[bool, ...] = fused_step_in_pynative_mode(self._binding, self._call, gradients)
        return result


class Added(Fused):
    """An optimizer that MindSpore does not have, of its base class and with states of its kind."""

    def _begin(self, given: Mapping[str, Any]) -> None:
        base = ("learning_rate", "params", "weight_decay", "loss_scale")
        nn.Optimizer.__init__(self, *(given[name] for name in base))

    def _make_states(self, inner: FusedOptimizer) -> None:
        for role, arrays in inner._states.items():
            names = [inner._state_name(role, p.name) for p in self.parameters]
            made = map(_made, names, arrays)
            super().__setattr__(role, ParameterTuple(made))
        for name, array in inner.numbers.items():
            super().__setattr__(name, _made(name, array))


def _made(name: str, array: np.ndarray) -> Parameter:
    """A state of MindSpore that begins as one of this package."""
    is_bfloat16 = array.dtype.name == "bfloat16"
    values = Tensor(array.astype(np.float32) if is_bfloat16 else array)
    tensor = values.astype(mindspore.bfloat16) if is_bfloat16 else values
    return Parameter(tensor, name=name, requires_grad=False)


# Its name is what MindSpore's compiler says when it finds a step in a graph.
@jit_forbidden_register
def fused_step_in_pynative_mode(binding: Any, call: Any, gradients: Any) -> tuple[bool, ...]:
    """A step of a `Fused`."""
    if jit_context() is not None:  # it would be done once, and be no part of the graph
        reject(RuntimeError, binding.where, "a step", "is impossible", _WORKS, "a traced graph")
    result: tuple[bool, ...] = binding.step(gradients, call)
    return result


def check_context(where: str) -> None:
    """Refuse what no step of this package can run in.

    Raises:
        RuntimeError: graph mode, another target than the CPU, or several devices.
    """
    if mindspore.get_context("mode") != mindspore.PYNATIVE_MODE:
        reject(RuntimeError, where, "the mode", "is impossible", _WORKS, "graph mode")
    target = mindspore.get_context("device_target")
    if target != "CPU":
        reject(RuntimeError, where, "the device target", "is impossible", _WORKS, target)
    mode = mindspore.get_auto_parallel_context("parallel_mode")
    if mode != "stand_alone":
        wrong = "is impossible"
        reject(RuntimeError, where, "the parallel mode", wrong, "'stand_alone'", repr(mode))


def _for_mindspore(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with each schedule that is not MindSpore's in a Cell."""
    return {
        name: [_group(part) for part in value]
        if name == "params" and isinstance(value, list | tuple)
        else _schedule(value)
        if name in ("learning_rate", "weight_decay")
        else value
        for name, value in arguments.items()
    }


def _group(group: Any) -> Any:
    if not isinstance(group, dict):
        return group
    return {k: _schedule(v) if k in ("lr", "weight_decay") else v for k, v in group.items()}


def _schedule(value: Any) -> Any:
    is_ours = callable(value) and not isinstance(value, Cell | type | mindspore.Tensor)
    return Scheduled(value) if is_ours else value
