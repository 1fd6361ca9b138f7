"""The base of the optimizers of PyTorch's form: options, state dict, and hooks of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...kernels.keeping import COPY, MASTER
from ...kernels.private import outside_of_graphs, watched, watching
from ...ops.runtime import check
from ...ops.runtime.device import refuse_captures
from ..base.docstrings import TORCH
from ..base.file_set import maker_of_states
from ..base.own_rules import is_own
from ..engine.catch_up import SCALARS, MissedSteps
from ..engine.tables import LAST
from .engine import options
from .engine import state as states
from .engine.files import ParameterFiles
from .engine.options import Rounding, Sparse
from .engine.part import number, state_dtype_of
from .engine.step import Steps
from .engine.table_rows import TableOptimizer

# Behind `Fused` comes a class of PyTorch in every class that can be made.
if TYPE_CHECKING:
    from torch.optim import Optimizer as _Base
else:
    _Base = object


class Fused(TableOptimizer, _Base):
    """Step, options and state of a `FusedOptimizer`, to stand before a class of PyTorch.

    It is no subclass of ``torch.optim.Optimizer`` itself: libraries that register all subclasses by
    name look among those of this package too if one of them is reached by way of another.
    """

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, Any]
    defaults: dict[str, Any]
    _steps: Steps
    _more_options: Mapping[str, Any] = {}  # of groups, and how they begin
    _in_backward: Any = None  # a weak reference to the `EmbeddingBags` whose backward is the step

    def __init__(
        self, params: Any, *args: Any, sparse: Sparse | None = None, skip_nonfinite: bool = False,
        state_dtype: torch.dtype | None = None, rounding: Rounding = "nearest", **kwargs: Any,
    ) -> None:  # fmt: skip
        where = type(self).__name__
        own = {"sparse": sparse, "state_dtype": state_dtype, "rounding": rounding}
        own |= {name: kwargs.pop(name, x) for name, x in self._more_options.items()}
        options.check_own(where, own, takes_sparse=self._takes_sparse)
        self.skip_nonfinite = check.flag(where, "skip_nonfinite", skip_nonfinite)
        self.skipped_steps, self._tables = 0, {}
        self._maker, self._missed = maker_of_states(), MissedSteps()
        params = list(params) if isinstance(params, Iterator) else params
        with options.as_before_after_errors(() if isinstance(params, Tensor) else params):
            super().__init__(params, *args, **kwargs)
            self.defaults.update(own)
            for group in self.param_groups:
                self._complete(group)
                if self._maker is not None:
                    self._check_maker(group)
                for p in group["params"]:  # of classes that make states at once
                    states.cast_states(self.state.get(p, {}), p, state_dtype_of(group))
        self._join()
        ParameterFiles.open(self)

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls._looks_at_scalars = is_own(cls.scalars)
        cls._chooses_anew = cls._chooses_anew or is_own(cls.method)
        if cls.__init__ is Fused.__init__ or hasattr(cls.__init__, "__signature__"):
            cls.__init__ = options.shown_constructor(cls, Fused.__init__)  # type: ignore[method-assign]
        TORCH.complete(cls)

    # Options

    def _complete(self, group: dict[str, Any]) -> None:
        """Give a group the options that it lacks, and refuse those that cannot be."""
        where = type(self).__name__
        for name, value in (options.OWN | dict(self._more_options)).items():
            group.setdefault(name, self.defaults.get(name, value))
        options.check_group(where, group, takes_sparse=self._takes_sparse)
        rule = self.method(group).rule
        if group.get("copies") is not None:
            options.check_copies(where, group, rule)
            pairs = zip(group["params"], group.pop("copies"), strict=True)
            self._copies = {**self._copies, **{p: own for p, own in pairs if own is not None}}
        for k, parameter in enumerate(group["params"]):
            name = f"parameter {k} of a group"
            options.check_rounding(where, group, rule, name, parameter)
            if rule.is_row_wise:
                options.check_rows(where, name, parameter)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in ``torch.optim``; one that is refused is not kept."""
        self._steps = Steps()
        if "sparse" not in self.defaults:
            super().add_param_group(param_group)  # the constructor completes it
            options.refuse_capturable(type(self).__name__, self.param_groups[-1])
            return
        n_groups = len(self.param_groups)
        with options.as_before_after_errors([param_group]):
            try:
                super().add_param_group(param_group)
                options.refuse_capturable(type(self).__name__, self.param_groups[-1])
                self._complete(self.param_groups[-1])
                if self._files is not None:
                    self._files.take_over(self)
            except BaseException:
                del self.param_groups[n_groups:]
                raise

    def __getstate__(self) -> dict[str, Any]:
        names = "skip_nonfinite", "skipped_steps", "_copies", "_missed", "_saves_awake"
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tables = {}
        self._look_after_all()
        for group in self.param_groups:
            self._complete(group)
        if "_steps" not in vars(self):  # else a state dict is loaded
            self._steps = Steps()
        self._join()

    # State

    def state_dict(self, *, flush: bool = False) -> dict[str, Any]:
        """The state dict of ``torch.optim``; it has the whole table of a `ShardedEmbedding`.

        Copies of parameters are not in it. With ``flush`` all rows are brought up to date first
        (`flush`), for readers that know no ``sparse="catch_up"``; so are rows of an optimizer that
        has `watch`ed a module. Otherwise nothing is written. Counts and rates that were loaded
        from a device are there again.
        """
        self._flush_before_saving(flush)
        self._save_scalars()
        found = states.with_rows(states.whole_table, super().state_dict(), self.param_groups)
        found["param_groups"] = [options.saved_group(group) for group in found["param_groups"]]
        left = (COPY.name, LAST.name, SCALARS) if flush else (COPY.name,)
        return states.without_states(states.numbers_there(found), left)

    def load_state_dict(self, state_dict: dict[str, Any], *, from_masters: bool = False) -> None:
        """Load a state dict of ``torch.optim``; states keep the dtype that they have in it.

        Options of this package that it does not have, as one of PyTorch's, stay as they are.
        ``from_masters`` makes parameters their masters, rounded (ValueError: there are none); by
        default the weights stay, and a master that makes another one begins at it in the next step.
        What is of fewer rows of a `GrowingEmbedding` begins anew for the others; of more rows, it
        raises a ValueError.
        """
        if any(hasattr(p, "row_shard") for group in self.param_groups for p in group["params"]):
            state_dict = states.with_rows(states.own_rows, state_dict, self.param_groups)
        if self._files is not None:
            self._files.files.check_alone()
        own_names = *options.OWN, *self._more_options
        numbers = {"step", *chain.from_iterable(map(self.numbers, self.param_groups))}
        before = [{name: group[name] for name in own_names} for group in self.param_groups]
        given = [state_dict]  # a hook of the user may give another one

        def look(_: Any, found: dict[str, Any]) -> dict[str, Any]:
            groups = [options.loaded_group(group) for group in found["param_groups"]]
            found = states.without_states({**found, "param_groups": groups}, (COPY.name,))
            found = states.numbers_here(found, numbers)
            given.append(found)
            self._check_loaded(found)
            if from_masters:
                states.check_masters(type(self).__name__, self.param_groups, found)
            return states.left_here(found, numbers)

        last = self.register_load_state_dict_pre_hook(look)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        if self._files is not None:
            self._files.begin_anew(self._missed)
        groups, saved, keys = self.param_groups, given[-1], list[tuple[Tensor, Any]]()
        for group, loaded, own in zip(groups, saved["param_groups"], before, strict=True):
            group.update({name: x for name, x in own.items() if name not in loaded})
            for parameter, key in zip(group["params"], loaded["params"], strict=True):
                keys.append((parameter, key))
                state = self.state.get(parameter, {})
                states.keep_dtypes(parameter, state, saved["state"].get(key, {}))
                self._make_loaded(parameter, state)
                if from_masters and states.has_master(group, state):
                    parameter.detach().copy_(state[MASTER.name])
        self._begin_asleep(saved["state"], keys)
        if self._files is not None:
            self._files.write(self.param_groups, self.state)
        self._steps.forget()

    # The step

    def step(self, closure: Callable[[], Any] | None = None, *, param: Tensor | None = None) -> Any:
        """One step with the gradients in ``.grad``; parameters without one are left out.

        Args:
            closure: computes the loss anew, with derivatives, before the step.
            param: the only parameter to update, as in a hook of
                ``register_post_accumulate_grad_hook``.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a parameter, a gradient or a state does not fit.
            IndexError: an index of a sparse gradient is out of range.
            Nothing has changed then.
        """
        if torch.compiler.is_dynamo_compiling():
            return _outside_of_graphs(self, closure, param)
        if self._in_backward is not None and self._in_backward() is not None:
            fix = "update_in_backward(None) leaves gradients for it"
            wrong = "the optimizer steps in backward, not by step()"
            raise RuntimeError(f"EmbeddingBags: {wrong}: {fix}")
        if _is_watched(self):
            return _watched_step(self, closure, param=param)
        return self._plain_step(closure, param=param)

    # PyTorch would put hooks and the mark of its profiler around every step: 60 us where the
    # caches hold other things.
    step.hooked = True  # type: ignore[attr-defined]

    def _plain_step(self, closure: Any = None, *, param: Tensor | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        attributes = vars(self)
        found_inf, scale = attributes.get("found_inf"), attributes.get("grad_scale")
        if isinstance(found_inf, Tensor) and found_inf.is_cuda and isinstance(scale, Tensor):
            refuse_captures([found_inf.device])
            # Waited for once.
            found_inf, scale = torch.stack((found_inf.reshape(()), scale.reshape(()))).tolist()
        # A step that a GradScaler skips changes and counts nothing.
        if found_inf is not None and number(found_inf) != 0.0:
            self._clipping = None
        else:
            self._step(param, 1.0 if scale is None else 1.0 / number(scale))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, as in ``torch.optim``, and give up a clipping of them."""
        if self._clipping is not None:  # not written in compiled functions, which may not do so
            self._clipping = None
        super().zero_grad(set_to_none)

    def _step(
        self, param: Tensor | None, factor: float, gradients: tuple[Any, ...] | None = None
    ) -> None:
        """One step, with gradients of all parameters in order; None: those in ``.grad``."""
        if self._files is not None:
            self._files.files.check_alone()
        self._steps.take(self, param, factor, gradients)
        self._n_taken += 1


class FusedOptimizer(Fused, torch.optim.Optimizer):
    """The base class: one kernel call for all parameters of a dtype, dense and row-sparse.

    Parameters, gradients and states are used where they are. A step reads each once and writes
    parameters and states once; float32 and float64 are computed as such, float16 and bfloat16 in
    float32, rounded once. Results do not depend on the number of threads.

    Args:
        defaults: the options of groups, and how they begin.

    A group may have ``copies``: a tensor of float16 or bfloat16, or None, for each of its float32
    parameters, on the same device. A step writes it with the parameter, rounded to the nearest.
    They are taken out of the group when it is added, and are not in the state dict.

    Norms and decay are those of the whole weight with every ``rounding``. The random bits of
    ``"stochastic"`` follow from the group's option ``rounding_seed`` (an int from 0 to 2**63 - 1;
    0), the name or number of the parameter, the number of its update and the place of the element:
    they are the same for any number of threads and processes, and after a resume.

    All but ``skip_nonfinite`` are options of groups too. Of PyTorch's options ``foreach`` and
    ``fused`` change no number: every step is one call, with the numbers of PyTorch's default on the
    CPU. ``differentiable`` and ``capturable`` raise; a state dict with ``capturable=True`` loads:
    learning rates and counts come to the host then.

    Raises:
        ValueError: an option is out of range.
        RuntimeError: an option is not supported.

    A subclass defines `method` and `scalars`. It stands before a class of ``torch.optim``, from
    which it has constructor and defaults, or gives this constructor the defaults::

        class Steep(FusedOptimizer): ...
        class Steep(FusedOptimizer, torch.optim.SGD): ...

    Differs from ``torch.optim.Optimizer``: the step is here.

    >>> import torch
    >>> from fusestep.nn import Rule
    >>> from fusestep.nn.torch.engine.part import Method
    >>> def steep(w, g, hp):
    ...     return w - hp.lr * g
    >>> class Steep(FusedOptimizer):
    ...     rule = Rule(steep, (), ("lr",))
    ...     def __init__(self, params, lr=0.5):
    ...         super().__init__(params, {"lr": lr})
    ...     def method(self, group):
    ...         return Method(self.rule)
    ...     def scalars(self, group, step):
    ...         return (group["lr"] / step,)
    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> w.grad = torch.ones(2)
    >>> Steep([w]).step()
    >>> w.tolist()
    [0.5, 0.5]
    """

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        """Every class of this package is one, but for `Thor`."""
        return True if cls is FusedOptimizer and Fused in other.__mro__ else NotImplemented


_is_watched = watching()
_watched_step = watched(Fused._plain_step)


@outside_of_graphs
def _outside_of_graphs(optimizer: Fused, closure: Any, param: Any) -> Any:
    return type(optimizer).step(optimizer, closure, param=param)
