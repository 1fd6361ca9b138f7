"""Facts about an optimizer class beside its code: one row for each class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from ... import nn

Kind = Literal["dense", "rows", "mixed"]  # which gradients of a step are row-sparse
Options = Mapping[str, Any]
ELSEWHERE = object()  # what the argument does is no number: errors, concurrency, skipped steps
MINDSPORE = "MindSpore 2.10"


class Large(NamedTuple):
    """Fate of an element after a gradient whose square is infinite: in that step, and later."""

    in_step: str
    later: str


MOVES = Large("as usual: nothing is squared, or not kept", "as usual")
STOPS = Large("stays", "stays for good: the accumulator is infinite")
LOST_LATER = Large(
    "stays, but for a decoupled weight decay and `RMSProp`'s momentum",
    "NaN from its next update on: `v + (1 - beta2)*(g*g - v)` is infinity minus infinity; with "
    "`Lamb(clip_ratio=True)` the whole parameter",
)
LOST = Large("NaN", "NaN")
ROW_STOPS = Large(
    "as usual: the mean of squares is taken in float64",
    "the row stays for good: its accumulator is infinite",
)
ROW_LOST_LATER = Large(
    "as usual: the mean of squares is taken in float64",
    "the row is NaN from its next update on: infinity minus infinity",
)


@dataclass(frozen=True)
class Argument:
    """One argument of a constructor.

    Attributes:
        takes: what may be given, a key of `KINDS` in tests/nn/argument_kinds.py.
        moved: a value with which a run ends far from one with the value in `Row.base`.
        beside: other arguments, in both runs.
        also: other arguments, in the run with the moved value.
        in_states: it shows in the states, not in the parameters.
        rows_only: it shows with row-sparse gradients only.
    """

    takes: str
    moved: Any = ELSEWHERE
    beside: Options = field(default_factory=dict)
    also: Options = field(default_factory=dict)
    in_states: bool = False
    rows_only: bool = False


COMMON = {
    "learning_rate": Argument("rate", 0.1),
    "weight_decay": Argument("decay", 0.3),
    "loss_scale": Argument("loss scale", 4.0),
    "use_locking": Argument("flag"),
    # Without decay, a step with g = 0 may be no step.
    "sparse_update": Argument("sparse update", "lazy", {"weight_decay": 0.3}, rows_only=True),
    "skip_nonfinite": Argument("flag"),
    "state_dtype": Argument("dtype", np.float16, in_states=True),
    "rounding": Argument("rounding"),
    "clipvalue": Argument("clip", 0.1),
    "clipnorm": Argument("clip", 0.1),
    "use_nesterov": Argument("flag", True),
    "beta1": Argument("open unit", 0.5),
    "beta2": Argument("open unit", 0.9),
    "eps": Argument("positive", 0.1),
    "accum": Argument("not negative", 1.0),
    "l1": Argument("not negative", 0.3),
    "l2": Argument("not negative", 0.9),
}
"""Arguments that several classes have, with values that move a run."""


@dataclass(frozen=True)
class Form:
    """Options with which a class has a rule, states or habits of its own.

    Attributes:
        options: beside those of `Row.base`.
        when: these options in words, for documents; "" where they make no difference there.
        reference: the function that is its step: ``adam`` in reference.py of tests/reference, or
            ``elementwise.sgd`` in its reference_elementwise.py; "" where only tests of its own
            compare it with one.
        renamed: options by the names that the reference has for them, where those differ.
        rows: `sparse_update` where none is given.
        rows_there: what its source does with row-sparse gradients.
        large: what large gradients do; None: it takes more than one line to say.
    """

    options: Options = field(default_factory=dict)
    when: str = ""
    reference: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    rows: Literal["lazy", "dense_equivalent"] | None = None
    rows_there: str = "refused"
    large: Large | None = None


@dataclass(frozen=True)
class Measured:
    """A case of the benchmark: a class with options that decide which bytes a step moves.

    Attributes:
        dense: the algorithm that peers run on dense gradients; None: no peer runs it.
        rows: the algorithm for row-sparse gradients; None: not measured.
        options: options of the class, beside the learning rate.
        passes: for each pass over whole tensors before the update, how many arrays it reads.
        on_request: kinds of gradients that are left to those who name the case, because the step
            is that of another one.
        is_matrix: it is measured on a square matrix.
        start: what the parameters start from.
    """

    dense: str | None
    rows: str | None = None
    options: Options = field(default_factory=dict)
    passes: tuple[int, ...] = ()
    on_request: tuple[Kind, ...] = ()
    is_matrix: bool = False
    start: float = 0.0


@dataclass(frozen=True)
class Source:
    """Where a class is from, and what it was compared with.

    Attributes:
        system: that published it, with its version; or the paper.
        compared: with what: the words are those of docs/parity.md.
        status: in that system.
        differs: from it.
        unkept: states that it keeps and that hold nothing.
    """

    system: str
    compared: str
    status: str = "-"
    differs: str = ""
    unkept: str = ""


recorded = partial(Source, MINDSPORE, "recorded")
"""A class of MindSpore that was compared with recorded runs of it."""


@dataclass(frozen=True)
class Row:
    """One class of `fusestep.nn`.

    Attributes:
        name: of the class.
        published: its positional arguments with their defaults, as its source has them.
        base: the arguments of a run: the required ones, and others with which all act.
        own: arguments that are its own, or other ones than in `COMMON`.
        forms: by what is added to the name of the class; "" is the class as it is.
        measured: by what stands in brackets after the name.
        source: where it is from.
        needs: why it takes no row-sparse gradient: what the error says is expected; "": it does.
        states: its states for documents, where they do not follow from its forms.
        build: makes one from parameters and options, where that is not the class.
        row_wise: it has states of rows, so its parameters have rows.
        together: steps follow from sums over all parameters, and are taken on the host.
    """

    name: str
    published: str
    base: Options
    own: Mapping[str, Argument]
    forms: Mapping[str, Form]
    measured: Mapping[str, Measured]
    source: Source
    needs: str = ""
    states: str = ""
    build: Callable[..., Any] | None = None
    row_wise: bool = False
    together: bool = False

    @property
    def cls(self) -> type:
        """The class, which an older version to compare with may not have."""
        found: type = getattr(nn, self.name)
        return found

    @property
    def arguments(self) -> dict[str, Argument]:
        """All arguments of the class but the parameters (or the optimizer) to work on."""
        _, *names = inspect.signature(self.cls).parameters
        known = {**COMMON, **self.own}
        return {name: known[name] for name in names if name in known}

    @property
    def takes_rows(self) -> bool:
        """Whether it can take row-sparse gradients."""
        return not self.needs

    def new(self, params: Any, **options: Any) -> Any:
        """An optimizer with these options."""
        return (self.build or self.cls)(params, **options)

    def make(self, params: Any, **options: Any) -> Any:
        """An optimizer with the options of `base` unless others are given."""
        return self.new(params, **{**self.base, **options})
