"""The optimizer behind `thor`: when factors are computed, and the step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...kernels.cpu.threads.layers import Limit
from ...kernels.cpu.threads.parallel import limit_threads
from ...kernels.formula import Formula
from ...kernels.quiet import quiet
from ...kernels.rules import sgd as rules
from ...ops.runtime import check
from ...ops.runtime.errors import reject
from ...ops.runtime.launch import launch_on
from ...ops.runtime.row_step import RowGradient
from ..base.arguments import Checked, Fixed, check_kind, non_negative_float, positive_int
from ..base.file_set import maker_of_states
from ..base.numbers import item
from ..base.parameter import Parameter
from ..base.rates import value_at
from ..base.stateful import StateOfEach
from ..engine.reader import read_gradient
from ..fused import FusedOptimizer
from . import arguments
from .arguments import NAME
from .clipping import ClippedConditioning
from .factors import FactorError
from .layers import ThorLayerNorm
from .net import declared, trainable
from .preconditioners import Inverses, LayerOptions, Preconditioner, Scratch, kind_of

# Up to so many elements the last pass of a step runs on one thread. BLAS has just used all cores,
# and its idle threads and those of OpenMP wait by spinning, against each other: that costs
# milliseconds, more than the pass itself, which is short beside the products.
_SERIAL_UP_TO = 1 << 22
_FIRST = "damping", "momentum", "use_nesterov", "enable_clip_grad", "batch_size", "frequency"
_ALONE = Limit(1, "thor, which BLAS has left with busy cores")


def every_parameter(parameter: Parameter) -> bool:  # noqa: ARG001  (what a filter is called with)
    """The published ``decay_filter``: all parameters decay."""
    return True


class Thor(FusedOptimizer):
    """The optimizer that `thor` makes of a net and of its other arguments, the ``options``.

    Attributes:
        net: what was declared: the layers and further parameters, by their place in the net.
        damping, momentum, batch_size, frequency, bad_factor: can be assigned to between steps.
    """

    _name = NAME
    _filter_names = False
    _stays_on_host = True
    _counts = ("step.", "refreshes.")
    _rows_need = ("a dense one: THOR multiplies it by matrices", "a RowTensor")

    damping = Checked(arguments.damping_of)
    momentum = Checked(non_negative_float)
    use_nesterov = Fixed(check.flag)
    enable_clip_grad = Fixed(check.flag)
    batch_size = Checked(positive_int)
    frequency = Checked(arguments.frequency_of)
    is_compatible = Fixed(check.flag)
    block_size = Fixed(arguments.block_size_of)
    bad_factor = Checked(arguments.bad_factor_of)

    def __init__(self, net: Any, options: Mapping[str, Any]) -> None:
        for name in _FIRST:
            setattr(self, name, options[name])
        self.is_compatible = arguments.compatibility(options["compat"], options["block_size"])
        self.block_size, self.bad_factor = options["block_size"], options["bad_factor"]
        check_kind(NAME, "decay_filter", options["decay_filter"], Callable, "a callable")
        if options["split_indices"] is not None:
            name, fix = "split_indices", "; there is one process, and nothing to reduce over"
            reject(ValueError, NAME, name, "needs a communicator", "None", options[name], fix)
        if maker_of_states() is not None:
            wrong, expected = "cannot make its states", "another class: factors are no states"
            reject(ValueError, NAME, "states_in", wrong, expected, NAME)
        self.net = declared(net)
        super().__init__(
            options["learning_rate"], trainable(self.net), options["weight_decay"],
            options["loss_scale"], states={"moments": 0.0},
            rule=rules.MOMENTUM_NESTEROV if self.use_nesterov else rules.MOMENTUM,
        )  # fmt: skip
        self._filter_decay(options["decay_filter"])
        self._preconditioners = self._precondition_layers()
        self._scratch = Scratch()
        self._is_requested = False
        self._announce(self._step)

    def _filter_decay(self, decay_filter: Callable[[Parameter], bool]) -> None:
        options = tuple(
            option if decay_filter(option.parameter) else replace(option, decay=0.0)
            for option in self._groups.options
        )
        self._groups = replace(self._groups, options=options)
        self._derive()

    def _precondition_layers(self) -> list[Preconditioner]:
        places = {id(p): i for i, p in enumerate(self.parameters)}
        preconditioners = []
        for name, layer in self.net.items():
            if isinstance(layer, Parameter):
                continue
            layer.configure(name, self.block_size, is_compatible=self.is_compatible)
            treated = layer.parameters if isinstance(layer, ThorLayerNorm) else (layer.weight,)
            # A parameter that does not require a gradient has no place.
            positions = {places[id(p)]: k for k, p in enumerate(treated) if id(p) in places}
            layer.is_capturing = False
            if positions:
                preconditioners.append(kind_of(layer)(layer, positions))
        return preconditioners

    def formula(self) -> Formula:
        return Formula(rules.momentum_scalars, (self.momentum, 0.0))

    def _condition(self) -> None:
        super()._condition()
        if self.enable_clip_grad:
            self._conditioning = ClippedConditioning(
                self._groups.options, self._loss_scale, coupled=True
            )

    # Damping and refreshes

    def _options(self, step: int) -> LayerOptions:
        damping = value_at(NAME, "damping", self.damping, step)
        check.in_range(NAME, "damping", damping, damping > 0.0, "above 0")
        loss_scale = item(self._loss_scale)
        return LayerOptions(damping, self.batch_size, loss_scale, self._scratch)

    def request_refresh(self) -> None:
        """Compute the factors anew in the next step too, whatever its number is."""
        self._is_requested = True
        self._announce(self._step)

    def clear_captured(self) -> None:
        """Forget what the layers have captured since the last step."""
        for preconditioner in self._preconditioners:
            preconditioner.layer.clear()

    def _is_due(self, preconditioner: Preconditioner, step: int) -> bool:
        return preconditioner.needs_capture and (
            self._is_requested or step % self.frequency == 0 or not preconditioner.has_factors
        )

    def _announce(self, step: int) -> None:
        """Tell the layers whether this step, the next one, needs what they capture."""
        for preconditioner in self._preconditioners:
            preconditioner.layer.is_capturing = self._is_due(preconditioner, step)

    # The step

    def construct(self, gradients: tuple[Any, ...]) -> tuple[bool, ...]:
        """The step itself, for gradients of the right number."""
        if self._device is None:
            return self._step_with_factors(gradients)
        read = [None if g is None else self._read(i, g) for i, g in enumerate(gradients)]
        arrays = [*(p.array for p in self.parameters), *(g for g in read if g is not None)]
        # In the end the streams of the gradients wait for the parameters too.
        with launch_on(arrays):
            return self._step_with_factors(tuple(None if g is None else g.numpy() for g in read))

    @quiet
    def _step_with_factors(self, gradients: tuple[Any, ...]) -> tuple[bool, ...]:
        step = self._step
        self._classes.rates.at(step)  # a list that is used up raises here
        self._classes.decays.at(step)
        options = self._options(step)
        if self._has_overflown():
            self._skipped[0] += 1
            self.clear_captured()  # it has overflown too
            return (True,) * len(gradients)
        # New inverses are kept when those of all layers are there: after the error of a factor that
        # cannot be inverted no layer has changed.
        fresh: list[tuple[Preconditioner, Inverses]] = []
        conditioned = list(gradients)
        for preconditioner in self._preconditioners:
            read = {i: gradients[i] for i in preconditioner.positions if gradients[i] is not None}
            if self._device is None:  # of what came from a device all is checked
                read = {i: self._read(i, gradient) for i, gradient in read.items()}
            if not read:
                continue
            inverses = self._refreshed(preconditioner, options)
            if inverses is not None:
                fresh.append((preconditioner, inverses))
            elif preconditioner.needs_capture and not preconditioner.has_factors:
                continue  # a first refresh that was skipped, with a warning
            for i, gradient in read.items():
                used = inverses or preconditioner.inverses
                conditioned[i] = preconditioner.precondition(i, gradient, used, options)
        parts = [part for p in self._preconditioners for part in (p, p.layer)]
        before, was_requested = [vars(part).copy() for part in parts], self._is_requested
        try:
            # What belongs to the step beside the parameters comes before they are written: an
            # interrupt may come right after that.
            for preconditioner, inverses in fresh:
                preconditioner.keep(inverses)
            self._is_requested = False
            self.clear_captured()
            self._announce(step + 1)
            if self._device is not None:
                pairs = zip(self.parameters, conditioned, strict=True)
                conditioned = [None if g is None else p.array.holding(g) for p, g in pairs]
            limit = _ALONE if sum(p.size for p in self.parameters) <= _SERIAL_UP_TO else None
            return limit_threads(limit, super().construct, tuple(conditioned))
        except BaseException:
            if self._step == step:
                self._is_requested = was_requested
                for part, attributes in zip(parts, before, strict=True):
                    vars(part).update(attributes)
            raise

    def _read(self, position: int, gradient: Any) -> Any:
        """A checked gradient that is not None and not row-sparse."""
        parameter = self.parameters[position]
        read = read_gradient(NAME, parameter, gradient)
        if isinstance(read, RowGradient):
            name = f"gradient of {parameter.name!r}"
            reject(ValueError, NAME, name, "is row-sparse", *self._rows_need)
        return read

    def _refreshed(self, preconditioner: Preconditioner, options: LayerOptions) -> Inverses | None:
        """New inverses where they are due; None where the old ones are to be used."""
        if not self._is_due(preconditioner, self._step):
            return None
        layer = preconditioner.layer
        if not layer.has_captured:
            name, wrong = f"layer {layer.name!r}", "has captured nothing"
            expected = f"capture(inputs, output_gradients) before step {self._step}"
            reject(RuntimeError, NAME, name, wrong, expected, "none")
        try:
            return preconditioner.inverted(options)
        except FactorError as error:
            if self.bad_factor == "raise":
                raise
            text = f"{error}; the layer keeps its last factors"
            warnings.warn(text, RuntimeWarning, stacklevel=1)
            return None

    # State

    @property
    def n_refreshes(self) -> int:
        """How often factors of layers were computed, in arrays of their own each time."""
        return sum(int(preconditioner.refreshes[0]) for preconditioner in self._preconditioners)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """The arrays of `Optimizer.state_arrays`, with the factors of the layers.

        ``matrix_a_inv.<weight>`` and ``matrix_g_inv.<weight>`` are the inverses in use
        (block-diagonal ones as the rows of their blocks), ``refreshes.<weight>`` is how often they
        were computed. What was captured since the last step is no part of the state.
        """
        arrays = super().state_arrays()
        for preconditioner in self._preconditioners:
            name = self.parameters[next(iter(preconditioner.positions))].name
            arrays |= preconditioner.state(str(name))
        return arrays

    def _derived_state(self, _step: int) -> dict[str, np.ndarray]:
        return {"momentum": np.array(self.momentum, np.float32)}

    def load_state_dict(self, state: Mapping[str, Any], *, from_masters: bool = False) -> None:
        """Load a state of this optimizer, factors included (`FusedOptimizer.load_state_dict`)."""
        super().load_state_dict(state, from_masters=from_masters)
        self._is_requested = False
        self.clear_captured()
        self._announce(self._step)

    moments = StateOfEach("moments", "The accumulated gradient of each parameter.")
