"""Steps that are scaled by the norms of a whole parameter: LAMB, and LARS around any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..kernels.formula import Formula
from ..kernels.keeping import KAHAN, MASTER, whole_weight
from ..kernels.quiet import quiet
from ..kernels.rule import Prologue
from ..kernels.rules import lamb as lamb_rules
from ..kernels.rules import lars as rules
from ..kernels.rules.gradient import COUPLED_DECAY, TRUST
from ..kernels.storage import STORAGES
from ..ops.lars import LARSUpdate
from ..ops.runtime import check, device_norm
from ..ops.runtime.arrays import adopt, adopt_anywhere
from ..ops.runtime.device import is_on_device
from ..ops.runtime.errors import reject, reject_unknown
from ..ops.runtime.step import squares_at
from .base.arguments import Fixed, base_arguments, betas_and_eps, check_kind, non_negative_float
from .base.optimizer import Optimizer
from .base.own_rules import check_scalars
from .base.parameter import Parameter
from .engine.batch import Batch, KernelCall
from .engine.conditioning import Conditioning
from .engine.reader import is_row_sparse
from .fused import FusedOptimizer


class Lamb(FusedOptimizer):
    """LAMB: Adam's direction, scaled per parameter to the parameter's norm.

    With L2 norms over a whole parameter, at its update t = 1, 2, ...::

        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*g*g
        u  = m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps) + weight_decay*w
        w <- w - lr * ratio * u,   ratio = |w| / |u|, or 1 where either norm is 0

    With ``clip_ratio`` the form of MindSpore 1.x: the ratio is limited to [0, 10], the norm is
    that of ``m / (1 - beta1**t) / sqrt(v / (1 - beta2**t) + eps) + weight_decay*w``,
    and it is 1 where ``|w|`` or ``|g|`` is 0.

    A step reads each parameter, gradient and moment twice and writes them once; the norms are
    summed in float64, in an order that does not depend on the number of threads. There is no
    loss scale: the direction does not depend on the gradient's, but for ``eps``.

    Args:
        clip_ratio: the form of MindSpore 1.x.

    Raises:
        ValueError: a value does not fit, or a gradient is row-sparse: the norm is that of the
            whole parameter.

    Source: ``mindspore.nn.Lamb``; You et al. (2020), arXiv:1904.00962.

    >>> import numpy as np
    >>> w = np.array([3.0, 4.0], np.float32)
    >>> Lamb([w], learning_rate=0.1)((np.ones(2, np.float32),))
    (True,)
    >>> print(w.round(4))  # a step of length 0.1 * |w| = 0.5
    [2.6464 3.6464]
    """

    clip_ratio = Fixed(check.flag)
    _rows_need = ("a dense one: LAMB scales by the norm of the whole parameter", "a RowTensor")

    def __init__(
        self, params: Any, learning_rate: Any, beta1: float = 0.9, beta2: float = 0.999,
        eps: float = 1e-6, weight_decay: Any = 0.0, *, clip_ratio: bool = False,
        use_locking: bool = False, skip_nonfinite: bool = False, state_dtype: Any = None,
        rounding: str = "nearest", clipvalue: float | None = None, clipnorm: float | None = None,
        **unknown: Any,
    ) -> None:  # fmt: skip
        base = base_arguments(locals())
        self.beta1, self.beta2, self.eps = betas_and_eps(self._name, params, beta1, beta2, eps)
        self.clip_ratio = clip_ratio
        rule = lamb_rules.LAMB_CLIPPED if self.clip_ratio else lamb_rules.LAMB
        super().__init__(**base, rule=rule, states={"lamb_m": 0.0, "lamb_v": 0.0})

    def formula(self) -> Formula:
        return Formula(lamb_rules.lamb_scalars, (self.beta1, self.beta2, self.eps))


def default_filter(parameter: Parameter) -> bool:
    """Whether LARS acts on a parameter: not on biases and layer norms."""
    return not any(part in str(parameter.name) for part in ("LayerNorm", "bias"))


class Inner:
    """An attribute of LARS that is the optimizer's, where that has it."""

    def __init__(self, name: str, *, can_be_assigned: bool = False) -> None:
        self._name = name
        self._can_be_assigned = can_be_assigned

    def __get__(self, lars: Any, owner: type | None = None) -> Any:
        return self if lars is None else getattr(lars.opt, self._name)

    def __set__(self, lars: Any, value: Any) -> None:
        if not self._can_be_assigned:
            raise AttributeError(f"LARS: {self._name} cannot be assigned to")
        if not hasattr(lars.opt, self._name):
            raise AttributeError(f"{type(lars.opt).__name__} has no {self._name}")
        setattr(lars.opt, self._name, value)


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling around another optimizer.

    With L2 norms over a whole parameter and ``g`` the gradient divided by the loss scale::

        c  = coefficient * |w| / (|g| + weight_decay*|w| + epsilon)
        with use_clip: c <- max(min(c / lr, 1), 0)
        g <- c * (g + weight_decay*w)

    and then the optimizer's own step with this gradient and without its weight decay. It acts
    on parameters that pass ``lars_filter``; the others take the optimizer's step with the plain
    gradient, **without weight decay**.

    The optimizer is left as it is: it keeps its states, counters, learning rate and decay, and
    can also be called by itself. For the optimizers of this package nothing is written between
    the norms and the step: two passes over memory, one that reads parameters and gradients and
    the step. Other subclasses of `Optimizer` get new gradient arrays.

    Args:
        optimizer: the optimizer; its learning rate, weight decay and loss scale count.
        epsilon: float >= 0.
        coefficient: float >= 0: the trust coefficient.
        use_clip: limit the local learning rate to the optimizer's.
        lars_filter: called with each `Parameter`; True where LARS acts. Default: the name holds
            neither "LayerNorm" nor "bias".

    Attributes:
        opt: the optimizer.
        parameters, loss_scale, found_inf, skipped_steps: the optimizer's.

    Raises:
        ValueError: a value does not fit, the optimizer clips gradients (``clipvalue``,
            ``clipnorm``), or a gradient of a parameter on which LARS acts is row-sparse.

    Source: ``mindspore.nn.LARS`` (deprecated in MindSpore 2.9); You, Gitman and Ginsburg
    (2017), arXiv:1708.03888.

    >>> import numpy as np
    >>> from fusestep.nn import Momentum
    >>> w = np.array([3.0, 4.0], np.float32)
    >>> opt = LARS(Momentum([w], learning_rate=1.0, momentum=0.9), coefficient=0.1)
    >>> opt((np.array([0, 2], np.float32),))
    (True,)
    >>> print(w.round(4))  # a step of length 0.1 * |w| = 0.5
    [3.  3.5]
    """

    def __init__(
        self, optimizer: Optimizer, epsilon: float = 1e-05, coefficient: float = 0.001,
        use_clip: bool = False, lars_filter: Callable[[Parameter], bool] = default_filter,
        **unknown: Any,
    ) -> None:  # fmt: skip
        reject_unknown(self._name, unknown, LARS)
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LARS):
            got = type(optimizer).__name__
            reject(TypeError, self._name, "optimizer", "has a wrong type", "another optimizer", got)
        if isinstance(optimizer, FusedOptimizer):
            check_scalars(self._name, optimizer._rule, COUPLED_DECAY, TRUST)
            for name in ("clipvalue", "clipnorm"):
                if getattr(optimizer, name) is not None:
                    wrong, expected = f"has {name}", "one that does not clip"
                    reject(ValueError, self._name, "optimizer", wrong, expected, repr(optimizer))
        self.epsilon = non_negative_float(self._name, "epsilon", epsilon)
        self.coefficient = non_negative_float(self._name, "coefficient", coefficient)
        self.use_clip = check.flag(self._name, "use_clip", use_clip)
        check_kind(self._name, "lars_filter", lars_filter, Callable, "a callable")
        self.opt = optimizer
        self._acts = np.array([bool(lars_filter(p)) for p in optimizer.parameters])

    def __repr__(self) -> str:
        return f"LARS({self.opt!r}, coefficient={self.coefficient:g})"

    # What the base class reads is the optimizer's.

    parameters: Any = Inner("parameters")
    loss_scale: Any = Inner("loss_scale", can_be_assigned=True)
    found_inf = Inner("found_inf", can_be_assigned=True)
    skipped_steps = Inner("skipped_steps")
    _global_step: Any = Inner("_global_step")
    _loss_scale: Any = Inner("_loss_scale")
    _groups: Any = Inner("_groups")
    _works_on_host: Any = Inner("_works_on_host")

    def _move_to(self, target: str) -> None:
        self.opt._move_to(target)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """The state arrays of the optimizer within."""
        return self.opt.state_arrays()

    def state_dict(self) -> dict[str, np.ndarray]:
        """The state of the optimizer within; LARS has none of its own."""
        return self.opt.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], **options: Any) -> None:
        """Load the state of the wrapped optimizer: its ``load_state_dict``, with its options."""
        self.opt.load_state_dict(state, **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    # The step

    def __call__(self, gradients: Sequence[Any]) -> Any:
        """One step; gradients in the order of `parameters`, as the optimizer takes them."""
        return self.construct(self._given(gradients))

    def construct(self, gradients: tuple[Any, ...]) -> Any:
        """The step itself, for gradients of the right number."""
        self._refuse_rows(gradients)
        if _takes_fused_steps(self.opt):
            conditioning = LayerwiseConditioning(self, self._acts, gradients)
            return self.opt._step_with(gradients, conditioning)  # type: ignore[attr-defined]
        new = self._new_gradients(gradients)
        with _bare(self.opt):
            return self.opt(new)

    def _refuse_rows(self, gradients: tuple[Any, ...]) -> None:
        """Refuse row-sparse gradients where LARS acts: the norm is that of a whole gradient."""
        for parameter, gradient, acts in zip(self.parameters, gradients, self._acts, strict=True):
            if acts and is_row_sparse(gradient):
                name = f"gradient of {parameter.name!r}"
                expected = "a dense one, or a lars_filter that leaves this parameter out"
                reject(ValueError, self._name, name, "is row-sparse", expected, "a RowTensor")

    @quiet
    def _new_gradients(self, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        """The gradients after LARS, as new arrays."""
        step = self._step
        rates, decays = self._rates_at(step), self._decays_at(step)
        update = LARSUpdate(self.epsilon, self.coefficient, self.use_clip)
        scaled = self.scale_grad(gradients)
        new = list(scaled)
        for i in np.flatnonzero(self._acts).tolist():
            if scaled[i] is None:
                continue
            w = self.parameters[i].data
            g = adopt(self._name, f"gradient of {self.parameters[i].name!r}", scaled[i])
            w_squares, g_squares = (float(np.square(a, dtype=np.float64).sum()) for a in (w, g))
            new[i] = update(w, g, w_squares, g_squares, decays[i], rates[i])
        return tuple(new)


def _takes_fused_steps(optimizer: Optimizer) -> bool:
    """Whether its step is that of this package, not one that a user's subclass has changed."""
    kind = type(optimizer)
    return (
        isinstance(optimizer, FusedOptimizer)
        and kind.construct is FusedOptimizer.construct
        and kind.__call__ is FusedOptimizer.__call__
    )


@contextmanager
def _bare(optimizer: Optimizer) -> Iterator[None]:
    """The optimizer without weight decay and loss scale, which LARS has applied."""
    # Put back in any case: MindSpore's wrapped optimizer loses both for good.
    groups, loss_scale = optimizer._groups, optimizer.loss_scale
    bare = tuple(replace(option, decay=0.0) for option in groups.options)
    optimizer._groups, optimizer.loss_scale = replace(groups, options=bare), 1.0
    try:
        yield
    finally:
        optimizer._groups, optimizer.loss_scale = groups, loss_scale


class LayerwiseConditioning(Conditioning):
    """LARS's order: the loss scale, weight decay, then the factor of each parameter.

    A centralized gradient is ``center(c * (g + weight_decay*w))`` with the factor c of the
    plain gradient, as in MindSpore. ``gradients`` are as the step was called with them.
    """

    is_measured = True
    leaves_decay = False

    def __init__(self, lars: LARS, acts: np.ndarray, gradients: tuple[Any, ...]) -> None:
        self._lars, self._acts, self._gradients = lars, acts, gradients
        super().__init__(lars._groups.options, lars._loss_scale, coupled=True)

    def _parts(self, decays: bool) -> Prologue:
        return self._scaling + ((COUPLED_DECAY,) if decays else ()) + (TRUST,)

    def centralized_with(self, i: int, decay: float) -> float:
        """The weight decay where LARS acts, times the loss scale, which comes later."""
        return decay * self._scale if self._acts[i] else 0.0

    def scalars(self, i: int, decay: float) -> tuple[float, ...]:  # noqa: ARG002
        """The scalars where LARS does not act; `fill_measured_scalars` has the others."""
        return self._of_parts(0.0, self._scale)

    @property
    def joins(self) -> np.ndarray:
        """Whether the decay joins each gradient: only where LARS acts (`Conditioning.joins`)."""
        joins: np.ndarray = self._acts & super().joins
        return joins

    def fill_measured_scalars(self, call: KernelCall, column: dict[str, int]) -> None:
        """Fill in decay and factor of the parameters on which LARS acts."""
        batch, hp, decays = call.batch, call.update.hp, call.decays
        acts, table = self._acts[batch.positions], batch.variables.table
        sizes, w = np.diff(table.first), batch.variables.tensors[0][0]
        squares = partial(device_norm.squares_at, w) if is_on_device(w) else squares_at
        if batch.rule.keeping is MASTER:
            w_squares = squares(STORAGES[np.dtype(np.float32)], table.addresses[:, -1], sizes)
        elif batch.rule.keeping is KAHAN:
            w_squares = np.array([_kahan_squares(*tensors) for tensors in batch.variables.tensors])
        else:
            w_squares = squares(batch.variables.w, table.addresses[:, 0], sizes)
        g_squares = squares(batch.g, call.gradients, sizes)
        self._put_plain(batch, g_squares)
        lars = self._lars
        w_norms, g_norms = np.sqrt(w_squares), np.sqrt(g_squares) / self._scale
        ratio = rules.lars_ratio(w_norms, g_norms, decays, lars.coefficient, lars.epsilon)
        if lars.use_clip:
            ratio = rules.clipped_ratio(ratio, call.rates)
        hp[acts, column["trust_ratio"]] = ratio[acts]
        if COUPLED_DECAY in self.prologue:
            # A centralized gradient already holds the decay.
            joins = self.joins[batch.positions]
            hp[:, column["weight_decay"]] = np.where(joins, decays, 0.0)

    def _put_plain(self, batch: Batch, g_squares: np.ndarray) -> None:
        """Put the squares of plain gradients in the place of those of centralized ones."""
        for k, i in enumerate(batch.positions.tolist()):
            if not self._options[i].centralize:
                continue
            plain = adopt_anywhere("LARS", "a gradient", self._gradients[i])
            if is_on_device(plain):
                plain = plain.numpy()
            g_squares[k] = np.square(plain, dtype=np.float64).sum()


def _kahan_squares(w: Any, *states: Any) -> float:
    """The sum of squares of a weight with its remainder, which is its last state."""
    w, remainder = (x.numpy() if is_on_device(x) else x for x in (w, states[-1]))
    whole = whole_weight(KAHAN, w, [remainder])
    return float(np.square(whole, dtype=np.float64).sum())
