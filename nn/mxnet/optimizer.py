"""The base class of ``mxnet.optimizer``: learning rates, multipliers, counts, and the registry."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from ...kernels.storage import REALS, STORAGES
from ...ops.adam_update import compat_version
from ...ops.runtime import check
from ...ops.runtime.arrays import adopt_anywhere
from ...ops.runtime.errors import reject, reject_unknown
from ..base.arguments import Checked, CheckedAttributes, check_kind, count
from . import arguments
from .arguments import LISTS, Values, arguments_of, as_lists
from .master import as_float32, master_arguments, round_to

_BASE_RATE = 0.01
_DECAYING = ("_weight", "_gamma")  # how names end that decay in 1.9
_HALVES = STORAGES.keys() - REALS.keys()


class ScheduledRateError(RuntimeError, UserWarning):
    """The learning rate cannot be set: a scheduler computes it.

    It is a `UserWarning` too, which is what MXNet raises.
    """


class Optimizer(CheckedAttributes):
    """The base class of MXNet's optimizers: it keeps learning rates, multipliers and counts.

    Weights, gradients and states come with every call, each weight under an index. A subclass
    defines ``create_state`` and ``step`` or ``fused_step`` (or, as in 1.9, ``update``), and asks
    ``_update_count``, ``_get_lr`` and ``_get_wd`` for what belongs to an index.

    Args:
        rescale_grad: gradients are multiplied by it.
        param_idx2name: dict from index to name.
        wd: weight decay, at least 0.
        clip_gradient: bound of the rescaled gradient; None, 0 and below: no clipping.
        learning_rate: at least 0. None: 0.01, or with a scheduler the scheduler's own.
        lr_scheduler: an `LRScheduler` or any callable of ``num_update`` = 1, 2, ... Where a
            ``learning_rate`` is given too, a copy of the scheduler starts from it.
        sym: None. Symbols of MXNet do not exist here: use ``set_lr_mult`` and ``set_wd_mult``.
        begin_num_update: where the counts of all indices begin.
        multi_precision: 16-bit weights get a float32 master copy in their state.
        param_dict: dict from index to an object with ``lr_mult`` and ``wd_mult``; it counts
            before the tables of ``set_lr_mult`` and ``set_wd_mult``.
        aggregate_num: how many weights an `Updater` passes in one call; ``numpy.inf``: all.
        use_fused_step: ``update`` calls ``fused_step``, else ``step``. Default False.
        compat: the version of MXNet whose behaviour counts where versions differ, ``"2.0"`` or
            ``"1.9"``. Here: in 1.9, with ``param_idx2name``, names that do not end with
            ``_weight`` or ``_gamma`` have no weight decay unless ``set_wd_mult`` gives them one.

    Attributes:
        rescale_grad, wd, clip_gradient, lr, lr_scheduler: can be assigned to between updates.
        num_update: the largest count of any index; what the scheduler is asked with.

    Raises:
        TypeError: a kind does not fit.
        ValueError: a value does not fit.
        KeyError: an unknown keyword (also `TypeError`).

    Source: ``mxnet.optimizer.Optimizer`` (MXNet is retired since 2023).

    >>> import numpy as np
    >>> @register
    ... class SignDescent(Optimizer):
    ...     def step(self, indices, weights, grads, states):
    ...         for index, weight, grad, state in zip(indices, weights, grads, states):
    ...             self._update_count(index)
    ...             weight -= self._get_lr(index) * np.sign(grad)
    >>> w = np.ones(2, np.float32)
    >>> create("signdescent", learning_rate=0.5).update(0, w, np.array([3.0, -3.0]), None)
    >>> w.tolist()
    [0.5, 1.5]
    """

    opt_registry: dict[str, type[Optimizer]] = {}  # noqa: RUF012  (shared on purpose)

    compat = Checked(lambda where, _, value: compat_version(where, value))
    rescale_grad = Checked(check.scalar)
    wd = Checked(check.scalar_at_least_0)
    clip_gradient = Checked(arguments.clip_bound)
    lr = Checked(check.scalar_at_least_0)
    lr_scheduler = Checked(arguments.scheduler)
    begin_num_update = Checked(count)
    multi_precision = Checked(check.flag)
    aggregate_num = Checked(arguments.aggregate_number)
    use_fused_step = Checked(check.flag)
    num_update = Checked(count)
    lr_mult = Checked(arguments.multipliers)
    wd_mult = Checked(arguments.multipliers)
    idx2name = Checked(arguments.names)
    param_dict = Checked(arguments.parameters)

    def __init__(
        self, rescale_grad: float = 1.0, param_idx2name: Mapping[Any, str] | None = None,
        wd: float = 0.0, clip_gradient: float | None = None, learning_rate: float | None = None,
        lr_scheduler: Any = None, sym: None = None, begin_num_update: int = 0,
        multi_precision: bool = False, param_dict: Mapping[Any, Any] | None = None,
        aggregate_num: float | None = None, use_fused_step: bool | None = None, *,
        compat: str = "2.0", **unknown: Any,
    ) -> None:  # fmt: skip
        reject_unknown(self._name, unknown, arguments_of(type(self)))
        self.compat = compat
        if sym is not None:
            fix = "; give its multipliers to set_lr_mult and set_wd_mult"
            reject(TypeError, self._name, "sym", "is not supported", None, type(sym).__name__, fix)
        self.rescale_grad, self.wd, self.clip_gradient = rescale_grad, wd, clip_gradient
        self._set_rate(learning_rate, lr_scheduler)
        self.begin_num_update = self.num_update = begin_num_update
        self._index_update_count: dict[Any, int] = {}
        self.multi_precision = multi_precision
        one_by_one = 0 if compat == "1.9" else 1
        self.aggregate_num = one_by_one if aggregate_num is None else aggregate_num
        self.use_fused_step = False if use_fused_step is None else use_fused_step
        self.idx2name = arguments.names(self._name, "param_idx2name", param_idx2name)
        self.param_dict = param_dict
        self.set_lr_mult({})
        self.set_wd_mult({})

    _name = "Optimizer"  # of errors

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls._name = cls.__name__

    def _set_rate(self, learning_rate: Any, lr_scheduler: Any) -> None:
        self.lr_scheduler = lr_scheduler
        if learning_rate is None:
            self.lr = getattr(lr_scheduler, "base_lr", _BASE_RATE)
            return
        self.lr = check.scalar_at_least_0(self._name, "learning_rate", learning_rate)
        if lr_scheduler is not None:
            if not hasattr(lr_scheduler, "starting_from"):
                expected = "no learning_rate, or an LRScheduler, which can start from it"
                wrong = "is given beside a callable"
                reject(ValueError, self._name, "learning_rate", wrong, expected, learning_rate)
            self.lr_scheduler = lr_scheduler.starting_from(self.lr)

    # The registry

    @staticmethod
    def register(klass: type[Optimizer]) -> type[Optimizer]:
        """Make a class known to `create` by its name; a decorator.

        Raises:
            TypeError: it is no subclass of `Optimizer`.
        """
        if not (isinstance(klass, type) and issubclass(klass, Optimizer)):
            expected = "a subclass of Optimizer"
            reject(TypeError, "register", "klass", "has a wrong type", expected, klass)
        replaced = Optimizer.opt_registry.get(klass.__name__.lower())
        if replaced is not None:
            new, old = (f"{each.__module__}.{each.__name__}" for each in (klass, replaced))
            warnings.warn(f"register: {new} takes the place of {old}", stacklevel=2)
        Optimizer.opt_registry[klass.__name__.lower()] = klass
        return klass

    @staticmethod
    def create_optimizer(name: str, **kwargs: Any) -> Optimizer:
        """An instance of a registered class, by its name in upper or lower case.

        Raises:
            TypeError: ``name`` is no str.
            ValueError: no class of this name is registered.
        """
        check_kind("create", "name", name, str, "a str")
        klass = Optimizer.opt_registry.get(name.lower())
        if klass is None:
            expected = f"one of {', '.join(sorted(Optimizer.opt_registry))}"
            fix = "; fusestep.nn has more optimizers, under MindSpore's names"
            reject(ValueError, "create", "name", "is unknown", expected, repr(name), fix)
        return klass(**kwargs)

    # States

    def create_state(self, index: Any, weight: Any) -> Any:  # noqa: ARG002
        """The state of a weight: None in the base class."""
        return None

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        """The state of a weight; with ``multi_precision``, of a 16-bit weight
        ``(float32 master copy, state of that)``.
        """
        if not self._has_master(weight):
            return self.create_state(index, weight)
        master = as_float32(adopt_anywhere(self._name, "weight", weight))
        return master, self.create_state(index, master)

    def _has_master(self, weight: Any) -> bool:
        if not self.multi_precision:
            return False
        return adopt_anywhere(self._name, "weight", weight).dtype in _HALVES

    def check_state(self, index: Any, state: Any) -> None:
        """Refuse a state that was read and is none of `create_state_multi_precision`.

        The base class takes any.

        Raises:
            TypeError: it is of another form.
            ValueError: its arrays do not fit together.
        """

    def _pair(self, index: Any, state: Any, expected: str) -> tuple[Any, Any]:
        """The two parts of a state."""
        if not (isinstance(state, tuple | list) and len(state) == 2):
            got = f"{type(state).__name__} of {len(state)}" if hasattr(state, "__len__") else state
            name = f"state of {self._label(index)!r}"
            reject(TypeError, self._name, name, "has a wrong type", expected, got)
        return state[0], state[1]

    def _label(self, index: Any) -> str:
        return str(self.idx2name.get(index, index))

    def forget_arrays(self) -> None:
        """Hold no array of a former call any more; the base class holds none."""

    # Updates

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Update one weight, or each of a list of weights, in place.

        Args:
            index: the index of the weight, or a list of different ones.
            weight: an array, or a list of as many.
            grad: an array or a `RowTensor`, or a list of as many.
            state: what `create_state` made for the weight, or a list of as many.

        Raises:
            ValueError: the lists differ in length or an index repeats.
            TypeError, ValueError, IndexError: as ``step`` or ``fused_step``.
        """
        lists = as_lists(self._name, index, weight, grad, state)
        if self.use_fused_step:
            self.fused_step(*lists)
        else:
            self.step(*lists)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Update one weight, or each of a list of weights, of which some have master copies.

        Arguments and errors are those of `update`, but the states are those of
        `create_state_multi_precision`. The update of a weight with a master copy acts on the copy,
        with a float32 gradient; the weight becomes the rounded copy.
        """
        if not self.multi_precision:
            self.update(index, weight, grad, state)
            return
        lists = as_lists(self._name, index, weight, grad, state)
        expected = "(master, its state) of create_state_multi_precision"
        masters, rows = [], []
        for i, w, g, s in zip(*lists, strict=True):
            if self._has_master(w):
                masters.append((w, self._pair(i, s, expected)[0]))
                w, g, s = master_arguments(g, s)
            rows.append((w, g, s))
        if masters:
            columns = map(list, zip(*rows, strict=True)) if isinstance(index, LISTS) else rows[0]
            weight, grad, state = columns
        self.update(index, weight, grad, state)
        for w, master in masters:
            round_to(adopt_anywhere(self._name, "weight", w), master)

    def step(self, indices: Values, weights: Values, grads: Values, states: Values) -> None:
        """Update weights; defined by subclasses.

        Raises:
            NotImplementedError: in the base class.
        """
        raise NotImplementedError(f"{self._name}: define step(indices, weights, grads, states)")

    def fused_step(self, indices: Values, weights: Values, grads: Values, states: Values) -> None:
        """Update weights in as few passes over memory as possible; defined by subclasses.

        Raises:
            NotImplementedError: in the base class.
        """
        raise NotImplementedError(
            f"{self._name}: define fused_step(indices, weights, grads, states)"
        )

    # Rates

    @property
    def learning_rate(self) -> float:
        """The learning rate of now, without multipliers."""
        if self.lr_scheduler is None:
            return float(self.lr)
        rate = self.lr_scheduler(self.num_update)
        return check.scalar_at_least_0(self._name, "lr_scheduler's rate", rate)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate.

        Raises:
            ScheduledRateError: a scheduler computes it (`RuntimeError` and `UserWarning`).
            TypeError, ValueError: it is no number of at least 0.
        """
        if self.lr_scheduler is not None:
            wrong, expected = "is computed by a scheduler", "no scheduler"
            fix = "; assign to lr_scheduler.base_lr of the optimizer, or set lr_scheduler to None"
            reject(ScheduledRateError, self._name, "learning_rate", wrong, expected, lr, fix)
        self.lr = check.scalar_at_least_0(self._name, "learning_rate", lr)

    def set_lr_mult(self, args_lr_mult: Mapping[Any, float]) -> None:
        """Set the factors of the learning rate by index or name; all others become 1.

        A name that no weight has is a `ValueError` in the next update by an `Updater`. (Before it
        ``idx2name`` can be assigned to. Where a str is an index there is none: it may come later.)

        Raises:
            TypeError, ValueError: a factor is no number of at least 0.
        """
        self.lr_mult = args_lr_mult

    def set_wd_mult(self, args_wd_mult: Mapping[Any, float]) -> None:
        """Set the factors of the weight decay by index or name; all others become 1 (with
        ``compat="1.9"`` some become 0, see the class). Unknown names as in `set_lr_mult`.

        Raises:
            TypeError, ValueError: a factor is no number of at least 0.
        """
        factors = arguments.multipliers(self._name, "wd_mult", args_wd_mult)
        if self.compat == "1.9":
            exempt = (n for n in self.idx2name.values() if not n.endswith(_DECAYING))
            factors = dict.fromkeys(exempt, 0.0) | factors
        self.wd_mult = factors

    def check_factors(self, indices: Values) -> None:
        """Refuse factors for names that no weight has, which would do nothing.

        An `Updater` calls this before an update of ``indices``. Not earlier: ``idx2name`` and
        ``param_dict`` can be assigned to. Where a str is an index, any other one may be an index
        that comes later.

        Raises:
            ValueError: there is one.
        """
        if any(isinstance(index, str) for index in (*indices, *self._index_update_count)):
            return
        names = {*self.idx2name, *self.idx2name.values(), *self.param_dict}
        for table in ("lr_mult", "wd_mult"):
            for name, factor in getattr(self, table).items():
                # In 1.9 many names have the factor 0 anyway: the table may be of other names.
                may_be_other = table == "wd_mult" and self.compat == "1.9" and factor == 0.0
                is_exempt = may_be_other and not str(name).endswith(_DECAYING)
                if not isinstance(name, str) or name in names or is_exempt:
                    continue
                near = difflib.get_close_matches(name, self.idx2name.values(), n=1)
                fix = f"; did you mean {near[0]!r}?" if near else ""
                label, wrong = f"{table}[{name!r}]", "is a factor for no weight"
                expected = "an index, or a name in param_idx2name"
                reject(ValueError, self._name, label, wrong, expected, name, fix)

    def _factor(self, index: Any, name: str) -> float:
        """The factor of ``param_dict``, else that of the index, else that of its name, else 1."""
        if index in self.param_dict:
            factor = getattr(self.param_dict[index], name)
            return check.scalar_at_least_0(self._name, f"{name} of param_dict[{index!r}]", factor)
        table: Mapping[Any, float] = getattr(self, name)
        if index in table:
            return table[index]
        return table.get(self.idx2name[index], 1.0) if index in self.idx2name else 1.0

    def _scaled(self, value: float, indices: Values, name: str) -> list[float]:
        """``value`` times the factor of each index."""
        if not getattr(self, name) and not self.param_dict:
            return [value] * len(indices)
        return [value * self._factor(index, name) for index in indices]

    def _get_lr(self, index: Any) -> float:
        """The learning rate of an index, at the present ``num_update``."""
        return self.learning_rate * self._factor(index, "lr_mult")

    def _get_lrs(self, indices: Values) -> list[float]:
        if type(self)._get_lr is Optimizer._get_lr:
            return self._scaled(self.learning_rate, indices, "lr_mult")
        return self._floats("the learning rate of _get_lr", map(self._get_lr, indices))

    def _floats(self, name: str, values: Iterable[Any]) -> list[float]:
        """A user's numbers as floats, by which what follows is looked up: -0.0 as 0.0."""
        return [check.number(self._name, name, value) or 0.0 for value in values]

    def _get_wd(self, index: Any) -> float:
        """The weight decay of an index."""
        return float(self.wd * self._factor(index, "wd_mult"))

    def _get_wds(self, indices: Values) -> list[float]:
        if type(self)._get_wd is Optimizer._get_wd:
            return self._scaled(self.wd, indices, "wd_mult")
        return self._floats("wd of _get_wd", map(self._get_wd, indices))

    def _update_count(self, index: Any) -> None:
        """Count an update of an index, or of each of a list of them."""
        counts, begin, largest = self._index_update_count, self.begin_num_update, self.num_update
        for each in index if isinstance(index, LISTS) else [index]:
            counts[each] = t = counts.get(each, begin) + 1
            largest = max(largest, t)
        if largest != self.num_update:  # a count: there is nothing to check
            object.__setattr__(self, "num_update", largest)


register = Optimizer.register
create = Optimizer.create_optimizer
