"""The base of the optimizers of PyTorch's form: the step, its options and its state."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...kernels.cpu.threads.counts import NumberWrite, TensorCount
from ...kernels.cpu.threads.parallel import Prepared, commit
from ...kernels.formula import Numbers
from ...kernels.private import outside_of_graphs, watched, watching
from ...kernels.quiet import quiet
from ...kernels.rule import Rule
from ...kernels.state import PARAMETER, State
from ...ops.runtime import check
from ...ops.runtime.errors import reject
from ...ops.runtime.row_step import Update
from ...ops.runtime.step import DenseUpdate, measured
from ..base.own_rules import check_compiled, check_rule, checked_scalars, is_own
from ..engine.device import launch_updates
from ..engine.host import completed, step_together
from ..engine.reader import is_row_sparse
from .engine.binding import Binding, check_parameter, finish, has_finite, on_devices
from .engine.memory import DTYPES
from .engine.options import (
    OWN,
    Sparse,
    as_before_after_errors,
    check_group,
    check_own,
    check_rows,
)  # fmt: skip
from .engine.part import (
    GradientPrologue,
    Group,
    GroupOptions,
    Method,
    ParameterBatch,
    RuleChoice,
    StepInputs,
    number,
)
from .engine.record import CheckedParameter
from .engine.state import (
    Number,
    cast_states,
    check_states,
    full_like,
    keep_dtypes,
    own_rows,
    place_at,
    place_of,
    single,
    single_of,
    whole_table,
    with_rows,
)  # fmt: skip
from .engine.tensors import is_part, local, wide_dtype
from .engine.threads import as_torch

_KEPT_BINDINGS = 4
# As code of C: that of Python has left the caches when a step begins.
_params_of, _grad_of = itemgetter("params"), attrgetter("grad")
# Behind `Fused` comes a class of PyTorch in every class that can be made.
if TYPE_CHECKING:
    from torch.optim import Optimizer as _Base
else:
    _Base = ABC


def _shown(cls: Any) -> Callable[..., None]:
    """A constructor of a class that writes none, with the arguments of PyTorch's, then ours."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        super(cls, self).__init__(*args, **kwargs)

    theirs = next(c for c in cls.__mro__ if c.__module__.startswith("torch."))
    signature, ours = inspect.signature(theirs.__init__), inspect.signature(Fused.__init__)
    keyword = inspect.Parameter.KEYWORD_ONLY
    every = [*signature.parameters.values()]
    every += [p for p in ours.parameters.values() if p.kind == keyword]
    every += [inspect.Parameter(name, keyword, default=x) for name, x in cls._more_options.items()]
    __init__.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
    return __init__


class Fused(_Base):
    """Step, options and state of a `FusedOptimizer`, to stand before a class of PyTorch.

    It is no subclass of ``torch.optim.Optimizer`` itself: libraries that register all subclasses by
    name look among those of this package too if one of them is reached by way of another.
    """

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, Any]
    defaults: dict[str, Any]
    _bindings: dict[int | None, list[Binding]]
    _clipping: Any = None
    _options: GroupOptions | None = None  # of the last step
    _counts_updates = True  # whether there is a state "step"
    _takes_sparse = True
    _more_options: Mapping[str, Any] = {}  # of groups, and how they begin
    _looks_at_scalars = False  # whether `scalars` is a user's
    _chooses_anew = False  # whether `method` is a user's, or follows from the rate too
    _in_backward: Any = None  # a weak reference to the `EmbeddingBags` whose backward is the step

    def __init__(
        self, params: Any, *args: Any, sparse: Sparse | None = None, skip_nonfinite: bool = False,
        state_dtype: torch.dtype | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        where, own = type(self).__name__, {"sparse": sparse, "state_dtype": state_dtype}
        own |= {name: kwargs.pop(name, x) for name, x in self._more_options.items()}
        check_own(where, own, takes_sparse=self._takes_sparse)
        self.skip_nonfinite = check.flag(where, "skip_nonfinite", skip_nonfinite)
        self.skipped_steps = 0
        params = list(params) if isinstance(params, Iterator) else params
        with as_before_after_errors(() if isinstance(params, Tensor) else params):
            super().__init__(params, *args, **kwargs)
            self.defaults.update(own)
            for group in self.param_groups:
                self._complete(group)
                for parameter in group["params"]:  # of classes that make states at once
                    cast_states(self.state.get(parameter, {}), parameter, group["state_dtype"])

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls._looks_at_scalars = is_own(cls.scalars)
        cls._chooses_anew = cls._chooses_anew or is_own(cls.method)
        if cls.__init__ is Fused.__init__ or hasattr(cls.__init__, "__signature__"):
            cls.__init__ = _shown(cls)  # type: ignore[method-assign]

    # What a subclass defines

    @abstractmethod
    def method(self, group: Group) -> Method:
        """The method by which parameters of a group are updated."""

    @abstractmethod
    def scalars(self, group: Group, step: float) -> Numbers:
        """The scalars of the rule, in its order, at update ``step`` = 1, 2, ...

        The group has the `numbers` of the parameter too, and numbers where options are tensors.
        """

    def numbers(self, group: Group) -> dict[str, float]:  # noqa: ARG002
        """The states of a parameter that are single numbers, and how they begin."""
        return {}

    def next_numbers(self, group: Group, step: float) -> dict[str, Any]:  # noqa: ARG002
        """The new values of `numbers`, which the group has too, after an update."""
        return {}

    def shapes(self, choice: RuleChoice, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        """The shapes of the states of a parameter, in the order of its rule."""
        rule, shape = choice.rule, tuple(parameter.shape)
        of_each = zip(choice.states, rule.states, strict=True)
        return {name: rule.shape_of(state, shape) for name, state in of_each}

    def constants(self, group: Group) -> dict[str, float]:  # noqa: ARG002
        """The numbers that `Rule.factor` takes beside sums, states and scalars, by name."""
        return {}

    def initial(self, role: str, group: Group) -> float:  # noqa: ARG002
        """The value with which the elements of a state begin."""
        return 0.0

    def known_of_step(self) -> dict[str, float]:
        """Numbers and constants of the optimizer, for rules that measure all tensors of a step."""
        return {}

    def take_over(self, numbers: np.ndarray) -> None:
        """Take over the numbers that such a rule has made anew; the step is done."""

    # Options

    def _complete(self, group: dict[str, Any]) -> None:
        """Give a group the options that it lacks, and refuse those that cannot be."""
        for name, value in (OWN | dict(self._more_options)).items():
            group.setdefault(name, self.defaults.get(name, value))
        check_group(type(self).__name__, group, takes_sparse=self._takes_sparse)
        if self.method(group).rule.is_row_wise:
            for k, parameter in enumerate(group["params"]):
                check_rows(type(self).__name__, f"parameter {k} of a group", parameter)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in ``torch.optim``; one that is refused is not kept."""
        self._bindings = {}
        if "sparse" not in self.defaults:
            super().add_param_group(param_group)  # the constructor completes it
            return
        n_groups = len(self.param_groups)
        with as_before_after_errors([param_group]):
            try:
                super().add_param_group(param_group)
                self._complete(self.param_groups[-1])
            except BaseException:
                del self.param_groups[n_groups:]
                raise

    def __getstate__(self) -> dict[str, Any]:
        own = {"skip_nonfinite": self.skip_nonfinite, "skipped_steps": self.skipped_steps}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            self._complete(group)
        self._bindings = {}

    # State

    def state_dict(self) -> dict[str, Any]:
        """The state dict of ``torch.optim``; it has the whole table of a `ShardedEmbedding`."""
        return with_rows(whole_table, super().state_dict(), self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of ``torch.optim``; states keep the dtype that they have in it.

        Options of this package that it does not have, as one of PyTorch's, stay as they are.
        """
        if any(hasattr(p, "row_shard") for group in self.param_groups for p in group["params"]):
            state_dict = with_rows(own_rows, state_dict, self.param_groups)
        own_names = *OWN, *self._more_options
        before = [{name: group[name] for name in own_names} for group in self.param_groups]
        given = [state_dict]  # a hook of the user may give another one

        def look(_: Any, found: dict[str, Any]) -> None:
            given.append(found)
            for group, of_file in zip(self.param_groups, found["param_groups"], strict=False):
                known = {**group, **of_file, "params": ()}
                check_group(type(self).__name__, known, takes_sparse=self._takes_sparse)
                check_states(type(self).__name__, of_file["params"], found["state"])
                self._check_shapes(known, zip(group["params"], of_file["params"], strict=False),
                                   found["state"])  # fmt: skip

        last = self.register_load_state_dict_pre_hook(look)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        saved = given[-1]
        for group, of_file, own in zip(
            self.param_groups, saved["param_groups"], before, strict=True
        ):
            group.update({name: x for name, x in own.items() if name not in of_file})
            for parameter, key in zip(group["params"], of_file["params"], strict=True):
                keep_dtypes(self.state.get(parameter, {}), saved["state"].get(key, {}))
        self._bindings = {}

    def _check_shapes(
        self, group: Group, keys: Iterable[tuple[Tensor, Any]], saved: Mapping[Any, Any]
    ) -> None:
        """Refuse states of elements in the place of those of rows, and the other way round."""
        choice = self._choice(group)
        if choice.rule.is_elementwise:
            return  # PyTorch lets shapes be, and so does a step that finds them as they have to be
        for parameter, key in keys:
            for role, shape in self.shapes(choice, parameter).items():
                state = saved.get(key, {}).get(role)
                if isinstance(state, Tensor) and tuple(state.shape) != shape:
                    label = f"state {role!r} of parameter {key}"
                    found = tuple(state.shape)
                    reject(
                        ValueError, type(self).__name__, label, "has a wrong shape", shape, found
                    )

    def _new_step(self) -> Any:
        return single(0.0)

    def _new_state(self, group: Group, parameter: Tensor, choice: RuleChoice) -> dict[str, Any]:
        """The state of a parameter that has none."""
        made = {"step": self._new_step()} if self._counts_updates else {}
        made.update({name: single(x) for name, x in self.numbers(group).items()})
        dtype, shapes = group["state_dtype"], self.shapes(choice, parameter)
        rule = choice.rule.on(tuple(parameter.shape))
        for (role, shape), state in zip(shapes.items(), rule.states, strict=True):
            value = self.initial(role, group)
            if state.initial == PARAMETER:
                made[role] = parameter.detach().clone()
            elif state.per == "element":
                made[role] = full_like(parameter, value, dtype)
            else:
                own = self._dtype_of(state, parameter, dtype)
                made[role] = parameter.new_full(shape, value, dtype=own, requires_grad=False)
        return made

    def _dtype_of(self, state: State, parameter: Tensor, asked: Any) -> Any:  # noqa: ARG002
        """The dtype of a new state that is not one of elements."""
        return wide_dtype(state, parameter.dtype)

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

    def _plain_step(
        self, closure: Callable[[], Any] | None = None, *, param: Tensor | None = None
    ) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        attributes = vars(self)
        found_inf, scale = attributes.get("found_inf"), attributes.get("grad_scale")
        if isinstance(found_inf, Tensor) and found_inf.is_cuda and isinstance(scale, Tensor):
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
        self._clipping = None
        super().zero_grad(set_to_none)

    def _step(
        self, param: Tensor | None, factor: float, gradients: tuple[Any, ...] | None = None
    ) -> None:
        """One step, with gradients of all parameters in order; None: those in ``.grad``."""
        groups, key = self.param_groups, None if param is None else id(param)
        known = self._bindings.get(key)
        if known is None:
            known = self._bindings.setdefault(key, [])
        # Taken out while it is used: a step of another thread takes another one.
        binding = known.pop() if known else None
        if binding is not None and binding.is_large:
            binding.fetch()
        lists = [*map(_params_of, groups)]
        if param is not None:
            parameters: tuple[Tensor, ...] = (param,)
        else:
            parameters = tuple(lists[0] if len(lists) == 1 else chain.from_iterable(lists))
        if gradients is None:
            gradients = tuple(map(_grad_of, parameters))
        factors = [factor]
        clipping = self._clipping  # which another thread may exchange
        if clipping is not None:
            factors = [factor * own for own in clipping.factors(parameters, gradients)]
        options = self._options
        if options is None or self._chooses_anew or not options.are_still(groups):
            options = self._options = GroupOptions(groups, self._choice)
        plain, choices, before = options.plain or groups, options.choices, options.before
        if factors != [1.0]:
            before = GradientPrologue.of(plain, choices, factors)
        lengths = [*map(len, lists)]
        if binding is not None and not binding.is_for(choices, lengths):
            binding = _exchanged(binding, known, choices, lengths)
        states, given = self.state if param is None else self._state_of(param), None
        if binding is not None and (param is None or binding.is_of(param, groups)):
            given = binding.read(parameters, gradients, states, choices, self._entry)
        if given is None:
            known.clear()
            self._forget_others()
            if param is not None and place_of(groups, param) is None:
                where = type(self).__name__
                reject(ValueError, where, "param", "is foreign", "one of the groups", "another")
            binding = Binding(type(self).__name__, len(parameters), choices, lengths)
            given = binding.read(parameters, gradients, states, choices, self._entry)
        if given is None or binding is None:
            why = "another thread changes them meanwhile"
            raise RuntimeError(f"{type(self).__name__}: the states cannot be read: {why}")
        if self._run(given, binding.count, plain, before):
            known.append(binding)
            if len(known) > _KEPT_BINDINGS:
                del known[0]
        if clipping is not None and self._clipping is clipping:
            self._clipping = clipping.without(param)

    def _state_of(self, param: Tensor) -> dict[Tensor, Any]:
        """The state of one parameter, in the form of all."""
        return {param: self.state.get(param, {})}

    def _choice(self, group: Group) -> RuleChoice:
        return self.method(group).choice(group)

    def _entry(
        self, parameters: tuple[Tensor, ...], gradients: tuple[Any, ...],
        choices: Sequence[RuleChoice], new: dict[Tensor, Any], i: int,
    ) -> CheckedParameter | None:  # fmt: skip
        """A parameter that is to be recorded, checked; None where its class leaves it out.

        A state that it lacks joins ``new``.
        """
        where, parameter, number = type(self).__name__, parameters[i], i
        if len(parameters) == 1:
            number = place_of(self.param_groups, parameter) or 0
        k, name = place_at(self.param_groups, number)
        group, choice = self.param_groups[k], choices[k]
        is_active = self._check(group, choice, name, parameter, gradients[i])
        shapes = self.shapes(choice, parameter)
        numbers = ("step",) * self._counts_updates + tuple(self.numbers(group))
        known, roles = self.state.get(parameter, {}), (*shapes, *numbers)
        if not isinstance(known, dict):
            expected, got = "a dict", type(known).__name__
            reject(RuntimeError, where, f"state of {name}", "has a wrong type", expected, got)
        state = dict(known)  # which another thread may change meanwhile
        # A rule that rests has no roles, and may still begin a state.
        is_new = all(state.get(role) is None for role in roles or state)
        if is_new and (made := self._new_state(group, parameter, choice)):
            state = new[parameter] = {**state, **made}  # beside what a user may have there
        self._check_complete(name, state, roles)
        entry = CheckedParameter(parameter, k, name, state, choice, shapes, numbers, is_new)
        return entry if is_active else None

    def _check_complete(self, name: str, state: Mapping[str, Any], roles: Sequence[str]) -> None:
        """Refuse a state that lacks some of its tensors: they would begin anew beside old ones."""
        missing = [role for role in roles if state.get(role) is None]
        if missing:
            fix = "; the state is of another optimizer or other options"
            where, expected = type(self).__name__, ", ".join(roles)
            wrong = f"lacks {', '.join(map(repr, missing))}"
            reject(RuntimeError, where, f"state of {name}", wrong, expected, [*state], fix)

    def _forget_others(self) -> None:
        """Let go of the bindings of single parameters that are in no group any more."""
        if len(self._bindings) > 1:
            own = {None, *(id(p) for group in self.param_groups for p in group["params"])}
            for key in self._bindings.keys() - own:
                self._bindings.pop(key, None)

    def _check(
        self, group: Group, choice: RuleChoice, name: str, parameter: Tensor, gradient: Any
    ) -> bool:
        """Refuse a parameter and a gradient that no step can take; whether it is updated."""
        where = type(self).__name__
        check_parameter(where, name, local(parameter))
        rule, states = choice.rule, dict.fromkeys(choice.states, 0.0)
        check_rule(where, rule, states, group["sparse"], couples=choice.couples)
        check_compiled(where, rule, (DTYPES[parameter.dtype],))
        if self.skip_nonfinite and is_part(parameter):
            why = "the other processes would not skip the step"
            raise RuntimeError(f"{where}: skip_nonfinite takes no distributed parameters: {why}")
        if is_row_sparse(gradient):
            if not self._takes_sparse:
                raise RuntimeError(f"{where} does not support sparse gradients")
            if choice.touched_only is None:
                fix = "sparse='touched' (the rows that occur) or sparse='all' (every row)"
                raise RuntimeError(f"{where} does not support sparse gradients without {fix}")
        if parameter.is_cuda and choice.rule.is_two_stage and choice.rule.takes:
            fix = "fusestep.nn has one that runs there"
            raise RuntimeError(f"{where} does not support parameters on CUDA devices: {fix}")
        if choice.rule.is_row_wise:
            check_rows(where, name, parameter)
        if group.get("capturable") and not parameter.is_cuda:
            raise AssertionError(
                "If capturable=True, params and state_steps must be on supported devices: ['cuda']."
            )
        return True

    @as_torch
    def _run(
        self, given: StepInputs, count: TensorCount, groups: Sequence[Group],
        before: GradientPrologue,
    ) -> bool:  # fmt: skip
        """Prepare all that can fail; then write and count. Whether it was not skipped."""
        if self.skip_nonfinite and not has_finite(given):
            self.skipped_steps += 1
            return False
        steps, numbers = self._steps(given, count), []
        updates: list[Update] = []  # alive until they are done: rows are found by addresses
        prepared: list[Prepared] = []
        launched: dict[ParameterBatch, Update] = {}
        together: list[DenseUpdate] = []  # whose scalars follow from sums over all of them
        places: list[Sequence[int]] = []
        for part in given.chosen.parts:
            hp, hp_of, after = self._rows(part, given, groups, steps, before)
            numbers += after
            if part.rule.is_two_stage and part.device is None:
                own: Any = part.update(given, before, hp[hp_of], np.arange(len(hp_of)))
                if part.rule.scope == "step":
                    together.append(own)
                    places.append(part.places)
                else:
                    of_each = [groups[k] for k in part.group_of.tolist()]
                    prepared.append(self._measured(own, of_each))
                continue
            updates.append(part.update(given, before, hp, hp_of))
            if part.device is None:
                prepared.append(updates[-1].prepared())
            else:
                launched[part] = updates[-1]
        if together:
            found = step_together(together, places, self.known_of_step())
            if found is None:
                return False
            of_step, steps_together = found
            prepared += steps_together
        counted = [] if count.n else self._counted(given, numbers)
        if numbers:
            written = [(number.tensor.data_ptr(), number.value) for number in numbers]
            prepared.append(NumberWrite(written))
        # After all that can fail: a parameter whose first step raises still has no state.
        if given.new:
            for parameter, state in given.new.items():
                if known := self.state.get(parameter):
                    known.update(state)
                else:
                    self.state[parameter] = state
        if launched:
            for parts, _, arrays in on_devices(given):
                launch_updates([launched[part] for part in parts], arrays)
        commit(prepared, count)
        for parameter, step in counted:
            if isinstance(step, Tensor):
                step.add_(1)
            elif known := self.state.get(parameter):
                known["step"] = step + 1
        if together:
            self.take_over(of_step)
        if given.copies or given.unseen:
            finish(given)
        return True

    def _counted(self, given: StepInputs, numbers: list[Number]) -> list[tuple[Tensor, Any]]:
        """The counts that are no tensors of the host, by parameter; others join ``numbers``."""
        others = []
        for i in given.chosen.active if self._counts_updates else ():
            step = given.states(i)["step"]
            if isinstance(step, Tensor) and not step.is_cuda:
                numbers.append(single_of(step, float(step) + 1.0))
            else:
                others.append((given.parameters[i], step))
        return others

    @quiet
    def _measured(self, update: DenseUpdate, groups: Sequence[Group]) -> Prepared:
        known = [self.constants(group) for group in groups]
        return completed(update, *measured(update, known[0]), known)

    def _steps(self, given: StepInputs, count: TensorCount) -> float | list[float]:
        """The number of this update: one for all parameters with a gradient, or one for each."""
        if count.n:
            if count.read():
                return count.values[0] + 1.0
            return [value + 1.0 for value in count.values[: count.n]]
        if self._counts_updates:
            every = [float(given.states(i)["step"]) + 1.0 for i in given.chosen.active]
        elif not any(given.are_new):
            return 2.0
        else:  # what matters is whether there was one before
            every = [1.0 if is_new else 2.0 for is_new in given.are_new]
        return every[0] if every and len(set(every)) == 1 else every

    def _rows(
        self, part: ParameterBatch, given: StepInputs, groups: Sequence[Group],
        steps: float | list[float], before: GradientPrologue,
    ) -> tuple[Any, Any, list[Number]]:  # fmt: skip
        """Rows of scalars of a kernel call, the row of each tensor, and numbers afterwards."""
        scalars, names, choice = self.scalars, part.numbers, part.choice
        if self._looks_at_scalars:
            scalars = partial(self._checked_scalars, choice.rule)
        is_one = len(before.factors) == 1
        if isinstance(steps, float) and not names and is_one:
            rows = [scalars(groups[k], steps) for k in part.groups]
            if before.prologue:
                more = [before.scalars(groups[k], choice) for k in part.groups]
                rows = [own + others for own, others in zip(rows, more, strict=True)]
            return part.rounded(rows), part.row_of, []
        of_each = [steps if isinstance(steps, float) else steps[k] for k in part.places]
        each = [*zip(part.group_of.tolist(), of_each, strict=True)]
        if not names and is_one:  # those of one group and as many updates have a row in common
            row_of = {key: k for k, key in enumerate(dict.fromkeys(each))}
            rows = [
                scalars(groups[k], step) + before.scalars(groups[k], choice) for k, step in row_of
            ]
            return part.rounded(rows), [row_of[key] for key in each], []
        rows, after = [], []
        for i, (k, step) in zip(part.batch.positions.tolist(), each, strict=True):
            own = given.states(i)
            group = {**groups[k], **{name: own[name] for name in names}}
            scaled = before.scalars(group, choice, 0 if is_one else i)
            rows.append(scalars(group, step) + scaled)
            after += [single_of(own[name], x) for name, x in self.next_numbers(group, step).items()]
        return part.rounded(rows), np.arange(len(rows)), after

    def _checked_scalars(self, rule: Rule, group: Group, step: float) -> Numbers:
        found = self.scalars(group, step)
        return checked_scalars(type(self).__name__, "scalars", found, rule.hp)


class FusedOptimizer(Fused, torch.optim.Optimizer):
    """The base class: one kernel call for all parameters of a dtype, dense and row-sparse.

    Parameters, gradients and states are used where they are. A step reads each once and writes
    parameters and states once; float32 and float64 are computed as such, float16 and bfloat16 in
    float32, rounded once. Results do not depend on the number of threads.

    Args:
        params: as in ``torch.optim``; float32, float64, float16 or bfloat16.
        defaults: the options of groups, and how they begin.
        sparse: what a sparse gradient updates (``torch.sparse_coo``, coalesced or not; rows of
            equal indices are summed first): ``"touched"``, the rows that occur, or ``"all"``,
            every row, those that do not occur with a gradient of 0. None: the rows that occur,
            where both mean the same or the class is made for it; other classes raise in the step.
        skip_nonfinite: a step with a NaN or an infinity in any gradient changes nothing, and is
            counted in ``skipped_steps``.
        state_dtype: a dtype of PyTorch for the states; default each parameter's.

    These are options of groups too, but for ``skip_nonfinite``. Of PyTorch's options ``foreach``
    and ``fused`` change no number: every step is one call, with the numbers of PyTorch's default
    on the CPU. ``fused=True`` makes a ``GradScaler`` leave scaling and skipping to the step.
    ``differentiable`` raises, and ``capturable`` does on CUDA devices: learning rates and counts
    are read by the host.

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


def _exchanged(
    binding: Binding, known: list[Binding], choices: Sequence[RuleChoice], lengths: Sequence[int]
) -> Binding | None:
    """The binding among those that are known, in place of another one, for other kernels."""
    others = [binding]
    while known:
        if (found := known.pop()).is_for(choices, lengths):
            known[:0] = reversed(others)
            return found
        others.append(found)
    known[:0] = reversed(others)
    return None


_is_watched = watching()
_watched_step = watched(Fused._plain_step)


@outside_of_graphs
def _outside_of_graphs(optimizer: Fused, closure: Any, param: Any) -> Any:
    return type(optimizer).step(optimizer, closure, param=param)
