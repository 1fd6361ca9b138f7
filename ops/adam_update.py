"""MXNet's kernel-level Adam, ``adam_update``: dense and row-sparse, one pass."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from ..kernels.formula import Numbers, to_float32
from ..kernels.rule import Prologue
from ..kernels.rules import mxnet
from ..kernels.rules.norm import SCALED
from .primitive import Named, RowPrimitive
from .runtime import check
from .runtime.arrays import address_of, adopt_anywhere, empty_like, native, real_type
from .runtime.device import DeviceArray, device_of, may_share_memory
from .runtime.errors import reject, reject_unknown
from .runtime.row_step import Update, run_updates
from .runtime.row_tensor import RowTensor
from .runtime.step import one_tensor


def compat_version(where: str, value: Any) -> str:
    """The version of MXNet whose order of clipping and decay counts."""
    if not (isinstance(value, str) and value in mxnet.VERSIONS):
        reject(ValueError, where, "compat", "is unknown", "'2.0' or '1.9'", repr(value))
    return value


class _AdamUpdate(RowPrimitive):
    """The operator behind `adam_update`, whose name errors carry."""

    def __init__(self, use_locking: bool, lazy: bool, compat: str, **scalars: Any) -> None:
        where = "adam_update"
        self._touched_only = check.flag(where, "lazy_update", lazy)
        options = {name: check.scalar(where, name, value) for name, value in scalars.items()}
        for name in ("lr", "epsilon", "wd"):
            check.in_range(where, name, options[name], options[name] >= 0.0, "at least 0")
        check.epsilon(where, "epsilon", options["epsilon"], to_float32(options["epsilon"]))
        for name in ("beta1", "beta2"):
            in_unit = 0.0 <= options[name] <= 1.0
            check.in_range(where, name, options[name], in_unit, "between 0 and 1")
        self._options, self._version = options, compat_version(where, compat)
        super().__init__(check.flag(where, "use_locking", use_locking))
        self.name = where

    def __call__(self, weight: Any, grad: Any, mean: Any, var: Any, out: Any) -> Any:
        """Check everything, update, and return the array with the new weight."""
        array = check.float_array_anywhere(self.name, "weight", weight)
        if out is weight or (out is not None and _is_same_memory(array, out)):
            self._step(check.variable(self.name, "weight", weight), grad, mean, var)
            return out
        named = {"mean": mean, "var": var, **({} if out is None else {"out": out})}
        written = {name: check.variable(self.name, name, x) for name, x in named.items()}
        if out is not None:
            check.same_layout(self.name, {"weight": array, "out": written["out"]})
        read = {"weight": array, **_arrays_of(grad)}
        device_of(self.name, {**read, **written})
        check.no_overlap(self.name, list(written), list(written.values()))
        self._check_no_alias(written, read)
        result = self._step_elsewhere(array, grad, **written)
        return native(result) if out is None else out

    def _step(self, w: Any, grad: Any, mean: Any, var: Any) -> None:
        variables, name = self._variables(weight=w, mean=mean, var=var), "grad"
        prologue, hp = self._prologue_and_hp(w.dtype)
        if not isinstance(grad, RowTensor):
            self._apply_dense(mxnet.MXNET_ADAM, variables, hp, name, grad, prologue)
            return
        self._check_shape(grad, w)
        rows = grad.values, grad.indices
        self._apply_rows(mxnet.MXNET_ADAM, variables, hp, name, *rows, prologue)

    def _step_elsewhere(self, array: Any, grad: Any, mean: Any, var: Any, out: Any = None) -> Any:
        """The step on a copy of the weight, which is ``out`` or new; on a device it is enqueued.

        Copy and step are written together, or neither.
        """
        array = check.contiguous(array, self.name, "weight")
        result = empty_like(array) if out is None else out
        variables = self._variables(weight=result, mean=mean, var=var)
        update, read = self._update(variables, grad)
        copy = one_tensor(SCALED, (), (result, array), (1.0,))
        arrays = [array, *variables.values(), *read]
        if out is None and isinstance(array, DeviceArray):
            # A new array has the old weight if an index is found to be bad later.
            run_updates([copy], arrays)
            run_updates([update], arrays, self.use_locking)
        else:
            # Together: no interrupt leaves ``out`` with the old weight beside moments that moved.
            run_updates([copy, update], arrays, self.use_locking)
        return result

    def _update(self, variables: Named, grad: Any) -> tuple[Update, tuple[Any, ...]]:
        """The update after the copy, and the arrays that it reads."""
        rule, name = mxnet.MXNET_ADAM, "grad"
        prologue, hp = self._prologue_and_hp(variables["weight"].dtype)
        if not isinstance(grad, RowTensor):
            arrays, _ = self._checked_dense(variables, name, grad)
            return one_tensor(rule, prologue, arrays, hp), arrays[-1:]
        self._check_shape(grad, variables["weight"])
        rows = grad.values, grad.indices, prologue
        update = self._row_update(rule, variables, hp, name, *rows)
        return update, update.gradients[0].arrays

    def _prologue_and_hp(self, dtype: np.dtype[Any]) -> tuple[Prologue, Numbers]:
        """The gradient transforms before the rule, and the scalars of both."""
        real, options = real_type(dtype), self._options
        before = options["rescale_grad"], options["clip_gradient"], options["wd"]
        prologue = mxnet.conditioning(self._version, *before, composed=False)
        named = (options[name] for name in ("beta1", "beta2", "lr", "epsilon"))
        hp = mxnet.adam_scalars(real, *named, composed=False)
        return prologue, hp + mxnet.conditioning_scalars(real, prologue, *before, composed=False)

    def _check_shape(self, grad: RowTensor, w: Any) -> None:
        if grad.dense_shape != w.shape:
            wrong = "has a wrong dense_shape"
            reject(ValueError, self.name, "grad", wrong, w.shape, grad.dense_shape)

    def _check_no_alias(self, written: Named, read: Named) -> None:
        for (name, array), (other, its_array) in product(written.items(), read.items()):
            if may_share_memory(array, its_array):
                wrong = f"shares memory with {other}"
                reject(ValueError, self.name, name, wrong, "separate arrays", "an overlap")


def _is_same_memory(weight: Any, out: Any) -> bool:
    """Whether two objects are views of the very same elements."""
    ours, theirs = (
        (address_of(a), a.shape, a.dtype, a.strides, a.flags.writeable)
        for a in (weight, adopt_anywhere("adam_update", "out", out))
    )
    return bool(ours == theirs)


def _arrays_of(grad: Any) -> Named:
    if isinstance(grad, RowTensor):
        return {"grad": grad.values, "indices": grad.indices}
    return {"grad": check.float_array_anywhere("adam_update", "grad", grad)}


def adam_update(
    weight: Any, grad: Any, mean: Any, var: Any, out: Any = None, *, lr: Any, beta1: Any = 0.9,
    beta2: Any = 0.999, epsilon: Any = 1e-8, wd: Any = 0.0, rescale_grad: Any = 1.0,
    clip_gradient: Any = -1.0, lazy_update: bool = True, compat: str = "2.0",
    use_locking: bool = False, **unknown: Any,
) -> Any:  # fmt: skip
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
        var: the moving variance, of the dtype and shape of ``weight``; updated in place.
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
        use_locking: concurrent calls act like some serial order of them.
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
    reject_unknown("adam_update", unknown, adam_update)
    update = _AdamUpdate(
        use_locking, lazy_update, compat, lr=lr, beta1=beta1, beta2=beta2, epsilon=epsilon, wd=wd,
        rescale_grad=rescale_grad, clip_gradient=clip_gradient,
    )  # fmt: skip
    return update(weight, grad, mean, var, out)
