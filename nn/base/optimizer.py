"""The public base class of optimizers: groups, learning rates, decay, scaling, counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...kernels.cpu.threads import allocation
from ...kernels.quiet import quiet
from ...ops.runtime import check, pending
from ...ops.runtime.device import DeviceArray, device_of
from ...ops.runtime.errors import reject, reject_unknown
from . import gradients as grads
from .arguments import CheckedAttributes, check_kind, gradients_of, next_step
from .checkpoint import as_state, checked_state, steps_done
from .docstrings import OPTIMIZERS
from .file_set import LOADED, FileSet, files_of, made_by, maker_of_states
from .groups import GROUP_KEYS, Groups, name_by_position, read_groups
from .numbers import StepCount, check_place, item, loss_scale_of
from .parameter import Parameter, assign, writable
from .rates import PerOwnerRates, Rate

_TARGETS = ("CPU", "GPU", "Ascend")


class Optimizer(CheckedAttributes):
    """The base class of every optimizer.

    A subclass defines ``construct(gradients)``; the optimizer is called with the gradients in
    the order of `parameters`. ``global_step`` counts the calls that succeeded.

    Args:
        parameters: a list of `Parameter` (arrays are wrapped), or of dicts with the keys
            ``params``, ``lr``, ``weight_decay``, ``grad_centralization``; a further dict with
            the only key ``order_params`` gives the order.

    Attributes:
        parameters: the parameters in optimizer order.
        global_step: int32 ``(1,)``.

    Raises:
        TypeError: a kind does not fit.
        ValueError: a value or name does not fit, or parameters share memory.
        RuntimeError: a parameter is given twice.
        KeyError: an unknown or missing key of a group.

    Source: ``mindspore.nn.Optimizer``.

    >>> import numpy as np
    >>> class SignDescent(Optimizer):
    ...     def construct(self, gradients):
    ...         for p, g in zip(self.parameters, self.decay_weight(gradients)):
    ...             p.data -= self.get_lr() * np.sign(g)
    ...         return (True,) * len(self.parameters)
    >>> w = Parameter(np.ones(2, np.float32))
    >>> SignDescent(0.5, [w])((np.array([3.0, -3.0], np.float32),))
    (True,)
    >>> w.data.tolist()
    [0.5, 1.5]
    """

    _filter_names = True
    _group_keys: tuple[str, ...] = GROUP_KEYS
    _name = "Optimizer"  # in errors
    _files: FileSet | None = None  # that its states lie in
    _makes_states = False  # after this constructor

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._name = vars(cls).get("_name", cls.__name__)
        OPTIMIZERS.complete(cls)

    def __init__(
        self, learning_rate: Any, parameters: Any, weight_decay: Any = 0.0, loss_scale: Any = 1.0,
        **unknown: Any,
    ) -> None:  # fmt: skip
        reject_unknown(self._name, unknown, Optimizer)
        self._loss_scale = loss_scale_of(self._name, loss_scale)
        self._groups: Groups = read_groups(
            self._name, parameters, learning_rate, weight_decay, filter_names=self._filter_names,
            keys=self._group_keys,
        )  # fmt: skip
        self._check_groups(self._groups)
        self.parameters = tuple(option.parameter for option in self._groups.options)
        self._files = files_of(self._name, self._meaning)
        self._global_step = self._made("global_step", (1,), np.int32, 0)
        self._device = self._common_device()
        self._check_overlap({})
        for parameter in self.parameters:
            parameter.check_awake()
        # After the checks above: parameters keep no name of an optimizer that could not be made.
        name_by_position(self._groups.options)
        for parameter in self.parameters:
            parameter.watch(self)
        if not self._makes_states:
            self._complete_files()

    def _made(self, name: str, shape: tuple[int, ...], dtype: Any, initial: Any) -> np.ndarray:
        """A new array of the state on the host, made as `states_in` says."""
        if (make := self._files or maker_of_states()) is not None:
            return made_by(make, self._name, name, shape, dtype, initial)
        if isinstance(initial, np.ndarray):
            made = allocation.empty(shape, dtype)
            made[...] = initial
            return made
        return allocation.full(shape, float(initial), dtype)

    def _meaning(self) -> dict[str, Any]:
        """Class and options, which tell states from those that mean something else."""
        return {"class": f"nn.{type(self).__name__}"}

    def _complete_files(self) -> None:
        """Refuse files whose values cannot be, or that are not all; else note that they are."""
        if self._files is not None:
            if not self._works_on_host:
                expected, got = "parameters on the host", "a CUDA device"
                reject(ValueError, self._name, "MappedFiles", "has no states", expected, got)
            self._check_values(self.state_arrays())
            self._files.complete()

    def __repr__(self) -> str:
        n = sum(parameter.size for parameter in self.parameters)
        rates = {option.rate: None for option in self._groups.options}
        lr = ", ".join(
            f"{float(rate):g}"
            if isinstance(rate, Parameter) and rate.ndim == 0 and not rate.is_on_device
            else repr(rate)
            for rate in rates
        )
        return f"{self._name}({len(self.parameters)} parameters, {n:,} elements, lr={lr})"

    def _common_device(self) -> int | None:
        """The CUDA device of all parameters, where learning rates may be too; None: the host."""
        # Named by their numbers too: a name may look like the number of another parameter.
        arrays = {
            f"parameter {i}" + (f" ({p.name!r})" if p.name else ""): p.array
            for i, p in enumerate(self.parameters)
        }
        device = device_of(self._name, arrays)
        for rate in self._groups.rates:
            if isinstance(rate, Parameter):
                check_place(self._name, "learning_rate", rate.array, device)
        check_place(self._name, "loss_scale", self._loss_scale, device)
        return device

    def _check_groups(self, groups: Groups) -> None:
        """Refuse options of groups that a subclass does not take, before anything has changed."""

    @property
    def loss_scale(self) -> Any:
        """The number by which gradients are divided; it can be assigned to between steps.

        A float, or the array of one element on the device of the parameters that was assigned.
        Each step reads it, and waits for it.

        Raises:
            TypeError: a value that is assigned is no number.
            ValueError: it is not above 0 or not finite in float32, or lives elsewhere.
        """
        scale = self._loss_scale
        return scale.native() if isinstance(scale, DeviceArray) else scale

    @loss_scale.setter
    def loss_scale(self, value: Any) -> None:
        scale = loss_scale_of(self._name, value)
        check_place(self._name, "loss_scale", scale, self._device)
        self._loss_scale = scale
        self._condition()

    def _condition(self) -> None:
        """Called after weight decay or loss scale have changed; for subclasses."""

    def construct(self, gradients: tuple[Any, ...]) -> Any:
        """Update the parameters; defined by subclasses.

        Raises:
            NotImplementedError: in the base class.
        """
        raise NotImplementedError(f"{self._name}: define construct(self, gradients)")

    def __call__(self, gradients: Sequence[Any]) -> Any:
        """One step with ``gradients`` in the order of `parameters`."""
        gradients = self._given(gradients)
        next_step(self._name, self._global_step)
        result = self.construct(gradients)
        # Counted only if `construct` has not raised: a schedule must not skip a step.
        self._global_step += 1
        return result

    # Learning rate and weight decay

    @property
    def is_group(self) -> bool:
        """Whether the parameters were given in groups."""
        return self._groups.is_group

    @property
    def is_group_lr(self) -> bool:
        """Whether any group has a learning rate of its own."""
        return self._groups.is_group_lr

    @property
    def learning_rate(self) -> Rate | tuple[Rate, ...]:
        """The learning rate as it is kept; one for each parameter if groups have their own."""
        if self.is_group_lr:
            return tuple(option.rate for option in self._groups.options)
        return self._groups.options[0].rate

    def get_lr(self) -> float | tuple[float, ...]:
        """The learning rate of the next step; one for each parameter if groups have their own."""
        rates = self._rates_at(self._step)
        return tuple(rates) if self.is_group_lr else rates[0]

    def get_lr_parameter(self, param: Parameter | list[Parameter]) -> Any:
        """The learning rate of ``param`` as it is kept, or a list of them for a list.

        A fixed value or list is a `Parameter`, which may be assigned to; a schedule is itself.

        Raises:
            TypeError: ``param`` is neither a `Parameter` nor a list of them.
            ValueError: it does not belong to this optimizer.
        """
        if isinstance(param, list):
            return [self.get_lr_parameter(p) for p in param]
        check_kind(self._name, "param", param, Parameter, "a Parameter or a list")
        rates = [option.rate for option in self._groups.options if option.parameter is param]
        if not rates:
            name = f"parameter {param.name!r}"
            reject(ValueError, self._name, name, "is foreign", "one of mine", "another")
        return rates[0]

    def get_weight_decay(self) -> float | tuple[float, ...]:
        """The weight decay of the next step; in groups one for each parameter."""
        decays = self._decays_at(self._step)
        return tuple(decays) if self.is_group else max(decays)

    @property
    def global_step(self) -> np.ndarray:
        """int32 ``(1,)``: the calls that succeeded; an assigned array is copied into it.

        Where Python asks for a number it is one: in `int`, `range`, ``f"{opt.global_step:05d}"``.

        Raises:
            TypeError: the assigned value is no array of int32.
            ValueError: it has another shape or is negative.
        """
        return self._global_step.view(StepCount)

    @global_step.setter
    def global_step(self, value: Any) -> None:
        step = steps_done(self._name, value)
        if self._files is not None:
            self._files.check_alone()
        self._global_step[0] = step

    @property
    def _step(self) -> int:
        return int(self._global_step[0])

    def _rates_at(self, step: int) -> list[float]:
        rates = [option.rate for option in self._groups.options]
        return PerOwnerRates(self._name, "learning_rate", rates).at(step)

    def _decays_at(self, step: int) -> list[float]:
        decays = [option.decay for option in self._groups.options]
        return PerOwnerRates(self._name, "weight_decay", decays).at(step)

    # Gradients, as separate steps for custom optimizers

    def _given(self, gradients: Any) -> tuple[Any, ...]:
        return gradients_of(self._name, gradients, len(self.parameters))

    def decay_weight(self, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """``g + weight_decay * loss_scale * w`` where decay applies, as new gradients.

        A row-sparse gradient is summed by row first: a row decays once, and only if it occurs. On
        a device the host waits for the number of rows then.
        """
        decays = self._decays_at(self._step)
        return tuple(
            grads.decayed(g, p.array, decay * item(self._loss_scale)) if decay else g
            for g, p, decay in zip(self._given(gradients), self.parameters, decays, strict=True)
        )

    def gradients_centralization(self, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """``g - mean of g over all axes but the first`` where a group asks for it.

        It acts on parameters of two or more dimensions; others have nothing to centralize.
        """
        return tuple(
            grads.centralized(g) if option.centralize else g
            for g, option in zip(self._given(gradients), self._groups.options, strict=True)
        )

    def scale_grad(self, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """``g * float32(1 / loss_scale)``, as new gradients; the same ones if it is 1."""
        gradients = self._given(gradients)
        scale = item(self._loss_scale)
        if scale == 1.0:
            return gradients
        return tuple(grads.scaled(g, 1.0 / scale) for g in gradients)

    sends_parameters: Callable[[], None] | None = None  # of `distributed.ShardedStates`

    def broadcast_params(self, optim_result: Any) -> bool:  # noqa: ARG002  (published name)
        """Send the parameters that this process has updated to all others; True.

        For an optimizer in `distributed.ShardedStates`, which does it after each step by itself;
        elsewhere there is nothing to send.

        Args:
            optim_result: the result of the update, which is complete then.

        Raises:
            distributed.LostProcessError: a process has ended.
        """
        if self.sends_parameters is not None:
            self.sends_parameters()
        return True

    # Where it runs

    @property
    def _works_on_host(self) -> bool:
        return self._device is None

    @property
    def target(self) -> str:
        """Where state and arithmetic live: ``"CPU"`` or ``"GPU"``.

        That is where the parameters live, unless it is set. Optimizers of this package take
        ``"CPU"`` for parameters on a CUDA device: then the states move to the host, parameters
        and gradients come there for the step, and the parameters go back.

        Raises:
            TypeError: what is assigned is no str.
            ValueError: it is none of the published targets, or impossible.
        """
        return "CPU" if self._works_on_host else "GPU"

    @target.setter
    def target(self, value: str) -> None:
        check_kind(self._name, "target", value, str, "a str")
        if value not in _TARGETS:
            reject(ValueError, self._name, "target", "is unknown", _TARGETS, value)
        if value != self.target:
            self._move_to(value)

    def _move_to(self, target: str) -> None:
        """Move state and arithmetic to another target, where a subclass can."""
        expected = f"{self.target!r}: the parameters live there"
        reject(ValueError, self._name, "target", "is impossible", expected, target)

    @property
    def unique(self) -> bool:
        """Whether duplicate rows are summed before the update: always."""
        return True

    @unique.setter
    def unique(self, value: bool) -> None:
        if not check.flag(self._name, "unique", value):
            fix = "; duplicate rows are always summed, an update without it is not defined"
            reject(ValueError, self._name, "unique", "is impossible", True, False, fix)

    # State

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies on the host of all that a resumed run needs beside the parameters, by name."""
        pending.settle()
        return {
            name: array.numpy() if isinstance(array, DeviceArray) else array.copy()
            for name, array in self.state_arrays().items()
        }

    @quiet
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict`, after checking all of it.

        Raises:
            KeyError: a name is missing or unknown.
            TypeError: a dtype differs.
            ValueError: a shape differs, or the state was made with other options.
        """
        arrays = self.fitting(state)
        if self._files is not None:
            self._files.write(LOADED)
        for name, array in self.state_arrays().items():
            assign(array, arrays[name])
        self._go_on_from(arrays)
        if self._files is not None:
            self._files.write()

    def fitting(self, state: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The arrays of a state, which has all names of this optimizer, its dtypes and shapes.

        Raises: as `load_state_dict`.
        """
        # Errors of steps on a device belong to the old state: they are raised before anything is
        # loaded.
        pending.settle()
        given = self._completed(as_state(self._name, state))
        arrays = checked_state(self._name, given, self.state_arrays())
        self._check_values(arrays)
        return arrays

    def _completed(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state with the arrays that it may lack, and without those of no use here."""
        return state

    def _go_on_from(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Called when all arrays of a state were taken over; for subclasses."""

    def _check_values(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Refuse values of a state that fits in names, dtypes and shapes."""
        steps_done(self._name, arrays["global_step"])

    def state_arrays(self) -> dict[str, Any]:
        """The arrays of the state themselves, by name."""
        # A schedule is code, and no part of the state: the resumed program defines it.
        rates = (rate for rate in self._groups.rates if isinstance(rate, Parameter))
        return {"global_step": self._global_step, **{str(rate.name): rate.array for rate in rates}}

    def check_rebinding(self, parameter: Parameter, array: Any) -> None:
        """Check the array that ``parameter.data`` becomes: same device, no shared memory."""
        device_of(self._name, {f"parameter {parameter.name!r}": parameter.array, "its data": array})
        self._check_overlap({id(parameter): array})

    def check_awake(self, parameter: Parameter) -> None:
        """Called before another optimizer gets a parameter, which a subclass may refuse."""

    def forget_addresses(self) -> None:
        """Called after a parameter was rebound; a subclass drops what it has derived from it."""

    def _check_overlap(self, rebound: Mapping[int, Any]) -> None:
        arrays = [rebound.get(id(p), p.array) for p in self.parameters]
        names = [f"parameter {p.name or i!r}" for i, p in enumerate(self.parameters)]
        if not rebound:  # states are memory of their own: parameters and copies are what users give
            copies = [o.copy for o in self._groups.options if o.copy is not None]
            names, arrays = names + ["an array of copies"] * len(copies), arrays + copies
        check.no_overlap(self._name, names, arrays)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._global_step = writable(self._global_step)
        for parameter in self.parameters:
            parameter.watch(self)


OPTIMIZERS.complete(Optimizer)  # its subclasses are completed when they are made
