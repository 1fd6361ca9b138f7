"""MXNet's kernel-level Adam, ``adam_update``: dense and row-sparse, one pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..kernels.cpu.parallel import commit
from ..kernels.rules import mxnet
from ..kernels.rules.formula import to_float32
from ..kernels.rules.norm import SCALED
from ..kernels.rules.rule import Prologue
from ..kernels.storage import STORAGES
from .primitive import Primitive
from .runtime import check, locks, pending
from .runtime.arrays import RowTensor, address_of, adopt_anywhere, real_type
from .runtime.device import DeviceArray, device_of, may_share_memory
from .runtime.device_step import checked, launch_on
from .runtime.errors import message, reject_unknown
from .runtime.row_step import (
    RowGradient,
    bad_index_error,
    check_keys,
    check_rows_on_device,
    prepared_rows,
    row_step,
)
from .runtime.step import Variables, dense_step, prepared_dense

_ARGUMENTS = (
    "weight", "grad", "mean", "var", "out", "lr", "beta1", "beta2", "epsilon", "wd",
    "rescale_grad", "clip_gradient", "lazy_update", "compat", "use_locking",
)  # fmt: skip


def compat_version(where: str, value: Any) -> str:
    """The version of MXNet whose order of clipping and decay counts.

    Raises:
        ValueError: it is neither ``"2.0"`` nor ``"1.9"``.
    """
    if not (isinstance(value, str) and value in mxnet.VERSIONS):
        raise ValueError(message(where, "compat", "is unknown", "'2.0' or '1.9'", repr(value)))
    return value


class _AdamUpdate(Primitive):
    """The operator behind `adam_update`, whose name errors carry."""

    def __init__(self, use_locking: bool) -> None:
        super().__init__(check.flag("adam_update", "use_locking", use_locking), {}, ())
        self.name = "adam_update"

    def apply(
        self, weight: Any, grad: Any, mean: Any, var: Any, out: Any, lazy: bool, scalars: _Scalars
    ) -> Any:
        """Check everything, update, and return the array with the new weight."""
        given = check.float_array_anywhere(self.name, "weight", weight)
        if out is weight or (out is not None and _is_same_memory(given, out)):
            self._step(check.variable(self.name, "weight", weight), grad, mean, var, lazy, scalars)
            return out
        named = {"mean": mean, "var": var, **({} if out is None else {"out": out})}
        written = {name: check.variable(self.name, name, x) for name, x in named.items()}
        if out is not None:
            check.same_layout(self.name, {"weight": given, "out": written["out"]})
        read = {"weight": given, **_arrays_of(grad)}
        device = device_of(self.name, {**read, **written})
        check.no_overlap(self.name, list(written), list(written.values()))
        self._check_apart(written, read)
        result = self._step_elsewhere(given, grad, written, lazy, scalars)
        if out is not None:
            return out
        return result if device is None else result.native()

    def _lock_spans(self, arrays: list[Any]) -> list[locks.Span] | None:
        if not self.use_locking:
            return None
        memory = tuple(map(address_of, arrays)), tuple(a.nbytes for a in arrays), 0
        return locks.spans_of([memory])

    def _step(self, w: Any, grad: Any, mean: Any, var: Any, lazy: bool, scalars: _Scalars) -> None:
        variables = self._variables(weight=w, mean=mean, var=var)
        prologue, hp = scalars.for_dtype(w.dtype)
        if not isinstance(grad, RowTensor):
            self._apply_dense(mxnet.MXNET_ADAM, variables, hp, "grad", grad, prologue)
            return
        self._check_shape(grad, w)
        rows = grad.values, grad.indices
        self._apply_rows(
            mxnet.MXNET_ADAM, variables, hp, "grad", *rows, touched_only=lazy, prologue=prologue
        )

    def _step_elsewhere(
        self, given: Any, grad: Any, written: dict[str, Any], lazy: bool, scalars: _Scalars
    ) -> Any:
        """The step on a copy of the weight, which is ``out`` or new; on a device it is enqueued.

        Copy and step are written together, or neither.
        """
        given = check.contiguous(given, self.name, "weight")
        result = written["out"] if "out" in written else _empty_like(given)
        variables = self._variables(weight=result, mean=written["mean"], var=written["var"])
        gradient: Any
        if isinstance(grad, RowTensor):
            self._check_shape(grad, given)
            gradient, _ = self._checked_rows(variables, "grad", grad.values, grad.indices)
        else:
            gradient = self._checked_dense(variables, "grad", grad)[0][-1]
        bound = Variables.of([tuple(variables.values())])
        copy, arguments = _copying(given, bound), self._arguments(bound, gradient, scalars)
        spans = self._lock_spans([given, *variables.values()])
        if isinstance(given, DeviceArray):
            self._enqueue(given, bound, gradient, copy, arguments, lazy, spans, "out" in written)
            return result
        if isinstance(gradient, RowGradient):
            step = prepared_rows([self.name], *arguments, touched_only=lazy)
        else:
            step = prepared_dense(*arguments)
        locks.serialized(partial(commit, [prepared_dense(*copy), step]), spans, shared=False)
        return result

    def _arguments(self, bound: Variables, gradient: Any, scalars: _Scalars) -> tuple[Any, ...]:
        """Those of `dense_step`, or those of `row_step` but for the first."""
        prologue, of_rule = scalars.for_dtype(bound.tensors[0][0].dtype)
        hp = np.array([of_rule], bound.real.dtype)
        if isinstance(gradient, RowGradient):
            return mxnet.MXNET_ADAM, prologue, bound, [gradient], hp, [0]
        place, g = np.array([address_of(gradient)], np.int64), STORAGES[gradient.dtype]
        return mxnet.MXNET_ADAM, prologue, bound, place, g, hp, np.zeros(1, np.int64)

    def _enqueue(
        self,
        given: DeviceArray,
        bound: Variables,
        gradient: Any,
        copy: Any,
        arguments: Any,
        lazy: bool,
        spans: list[locks.Span] | None,
        has_out: bool,
    ) -> None:
        """Neither copy nor step write to ``out`` if an index turns out to be out of range."""
        of_rows = isinstance(gradient, RowGradient)
        read = [gradient.indices, gradient.values] if of_rows else [gradient]
        error = self._index_error(gradient, given) if of_rows else None
        with (
            pending.held(),  # before the order of streams is held, as in `table_step`
            launch_on([given, *bound.tensors[0], *read], spans) as launch,
            checked(given.device, launch, error) as guarded,
        ):
            if of_rows and has_out:
                check_rows_on_device(bound, [gradient], guarded)
            dense_step(*copy, launch=guarded if of_rows and has_out else launch)
            if of_rows:
                row_step([self.name], *arguments, touched_only=lazy, launch=guarded)
            else:
                dense_step(*arguments, launch=guarded)

    def _index_error(self, rows: RowGradient, table: Any) -> Callable[[int, int], IndexError]:
        """What makes the error; keys that are too long are refused here."""
        n, n_rows = len(rows.indices), len(table)
        check_keys(self.name, [(n_rows, n)])
        return bad_index_error([(self.name, n, n_rows)])

    def _check_shape(self, grad: RowTensor, w: Any) -> None:
        if grad.dense_shape != w.shape:
            wrong = "has a wrong dense_shape"
            raise ValueError(message(self.name, "grad", wrong, w.shape, grad.dense_shape))

    def _check_apart(self, written: dict[str, Any], read: dict[str, Any]) -> None:
        for name, array in written.items():
            for other, its_array in read.items():
                if may_share_memory(array, its_array):
                    raise ValueError(
                        message(
                            self.name,
                            name,
                            f"shares memory with {other}",
                            "separate arrays",
                            "an overlap",
                        )
                    )


def _copying(given: Any, bound: Variables) -> tuple[Any, ...]:
    """The arguments of the `dense_step` that copies ``given`` to the weight of ``bound``."""
    result = Variables.of([bound.tensors[0][:1]])
    place, one = np.array([address_of(given)], np.int64), np.ones((1, 1), bound.real.dtype)
    return SCALED, (), result, place, bound.w, one, np.zeros(1, np.int64)


def _empty_like(array: Any) -> Any:
    if isinstance(array, DeviceArray):
        return array.empty_like()
    return np.empty(array.shape, array.dtype)


def _is_same_memory(weight: Any, out: Any) -> bool:
    """Whether two objects are views of the very same elements."""
    ours, theirs = (
        (address_of(a), a.shape, a.dtype, a.strides, a.flags.writeable)
        for a in (weight, adopt_anywhere("adam_update", "out", out))
    )
    return bool(ours == theirs)


def _arrays_of(grad: Any) -> dict[str, Any]:
    if isinstance(grad, RowTensor):  # its attributes can be assigned to
        arrays = {"grad": grad.values, "indices": grad.indices}
        return {name: adopt_anywhere("adam_update", name, a) for name, a in arrays.items()}
    return {"grad": check.float_array_anywhere("adam_update", "grad", grad)}


class _Scalars:
    """The checked scalars of a call."""

    def __init__(self, where: str, compat: str, **given: Any) -> None:
        checked = {name: check.scalar(where, name, value) for name, value in given.items()}
        for name in ("lr", "epsilon", "wd"):
            check.in_range(where, name, checked[name], checked[name] >= 0.0, "at least 0")
        check.epsilon(where, "epsilon", checked["epsilon"], to_float32(checked["epsilon"]))
        for name in ("beta1", "beta2"):
            in_unit = 0.0 <= checked[name] <= 1.0
            check.in_range(where, name, checked[name], in_unit, "between 0 and 1")
        self._version = compat_version(where, compat)
        self._given = checked

    def for_dtype(self, dtype: np.dtype[Any]) -> tuple[Prologue, tuple[float, ...]]:
        """The prologue, and the scalars of rule and prologue."""
        real, given = real_type(dtype), self._given
        rescale, bound, decay = given["rescale_grad"], given["clip_gradient"], given["wd"]
        prologue = mxnet.conditioning(self._version, rescale, bound, decay, composed=False)
        names = ("lr", "beta1", "beta2", "epsilon")
        hp = mxnet.adam_hp(real, *(given[name] for name in names), composed=False)
        return prologue, hp + mxnet.conditioning_scalars(
            real, prologue, rescale, bound, decay, composed=False
        )


def adam_update(
    weight: Any,
    grad: Any,
    mean: Any,
    var: Any,
    out: Any = None,
    *,
    lr: Any,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    epsilon: Any = 1e-8,
    wd: Any = 0.0,
    rescale_grad: Any = 1.0,
    clip_gradient: Any = -1.0,
    lazy_update: bool = True,
    compat: str = "2.0",
    use_locking: bool = False,
    **unknown: Any,
) -> Any:
    """One update of Adam, without correction of the bias (a caller folds it into ``lr``)::

        g    = clip(rescale_grad*grad, clip_gradient) + wd*weight        (compat "1.9":
        g    = clip(rescale_grad*grad + wd*weight, clip_gradient))
        mean <- beta1*mean + (1 - beta1)*g
        var  <- beta2*var + (1 - beta2)*g*g
        out  <- weight - lr * mean / (sqrt(var) + epsilon)

    Hyper-parameters are rounded to float32, for float64 weights too, and ``1 - beta`` is taken
    after that, as in MXNet.

    Args:
        weight: float32, float64, float16 or bfloat16, of any shape; 16-bit arrays are computed
            in float32. It changes only where it is ``out``.
        grad: an array of the shape of ``weight`` and at most its precision, or a `RowTensor`,
            whose rows of equal indices are summed first. It is never written.
        mean: the moving mean, of the dtype and shape of ``weight``; updated in place.
        var: the moving variance, likewise.
        out: where the result goes, of the dtype and shape of ``weight``. ``out=weight`` updates
            in place, in one pass; None makes a new array, at the price of a copy.
        lr: the learning rate, a scalar of at least 0.
        beta1: a scalar in [0, 1].
        beta2: a scalar in [0, 1].
        epsilon: a scalar of at least 0. With 0, an element whose moments are 0 becomes NaN; what is
            0 only in float32 (1e-46) raises.
        wd: the weight decay, a scalar of at least 0.
        rescale_grad: a scalar.
        clip_gradient: the bound of the clipped gradient; 0 and below: no clipping.
        lazy_update: a row-sparse gradient updates only the rows that occur; else rows that do
            not occur take the step with ``grad = 0``.
        compat: ``"2.0"`` or ``"1.9"``: the version of MXNet whose order counts.
        use_locking: serialise concurrent calls on overlapping memory.
        **unknown: any other keyword raises.

    All arrays are on the host, or all on one CUDA device; there the update is enqueued, and an
    index that is out of range is reported by `fusestep.synchronize`.

    Returns:
        ``out``, or the new array (on a device, of the framework of ``weight``).

    Raises:
        TypeError: a kind or dtype does not fit (`fusestep.ConversionError` where a variable
            would have to be converted).
        ValueError: a shape, a value or the memory of an array does not fit.
        IndexError: an index of the `RowTensor` is out of range.
        KeyError: an unknown keyword (also `TypeError`).
        Nothing has been written when an error is raised.

    Source: ``mxnet.nd.adam_update`` (MXNet is retired since 2023).

    >>> import numpy as np
    >>> w, mean, var = np.ones(2, np.float32), np.zeros(2, np.float32), np.zeros(2, np.float32)
    >>> g = np.array([1, -1], np.float32)
    >>> _ = adam_update(w, g, mean, var, out=w, lr=0.001, wd=0.0)
    >>> print(w)
    [0.9968377 1.0031623]
    """
    reject_unknown("adam_update", unknown, _ARGUMENTS)
    lazy = check.flag("adam_update", "lazy_update", lazy_update)
    scalars = _Scalars(
        "adam_update",
        compat,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
        wd=wd,
        rescale_grad=rescale_grad,
        clip_gradient=clip_gradient,
    )
    return _AdamUpdate(use_locking).apply(weight, grad, mean, var, out, lazy, scalars)
