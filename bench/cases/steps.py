"""The table of cases: every operator and optimizer on everything that it can work on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from ..errors import BenchError
from . import indices, workloads
from .bags import BAGS
from .mxnet import MXNET
from .operators import FUNCTIONS, LARS_UPDATE, OPERATORS
from .optimizers import OPTIMIZERS
from .subject import Subject, Use
from .torch import TORCH
from .workloads import DENSE_MODELS, MIXED_MODELS, Kind, Tensor, Tensors

LOOP = "loop"
"""The scenario without anything between two steps."""


@dataclass(frozen=True)
class Case:
    """A subject on one kind of workload."""

    # ``<workload>/<subject>``: ``dense`` (one tensor), ``rows`` (one table with a row-sparse
    # gradient), ``pooled`` (tables whose rows are pooled) or a model; and the subject.
    name: str
    subject: Subject  # the operator or optimizer
    kind: Kind  # of its gradients
    is_default: bool  # it is run when no case is named

    @property
    def use(self) -> Use:
        """The step that the subject takes with such gradients."""
        return self.subject.uses[self.kind]

    @property
    def model(self) -> str | None:
        """The model of the workload, where it is one."""
        workload = self.name.partition("/")[0]
        return workload if workload in (*DENSE_MODELS, *MIXED_MODELS) else None


@dataclass(frozen=True)
class Point:
    """One measurement: a case at one size, dtype and number of threads, in one scenario."""

    case: Case
    size: str
    dtype: str
    threads: int
    distribution: str = indices.DEFAULT
    scenario: str = LOOP

    @property
    def title(self) -> str:
        """For people."""
        size = self.size if self.case.kind == "dense" else f"{self.size} {self.distribution}"
        name = f"{self.case.name} {size} {self.dtype} x{self.threads}"
        return name if self.scenario == LOOP else f"{name} {self.scenario}"

    def tensors(self) -> Tensors:
        """The tensors that it works on."""
        if self.case.model in DENSE_MODELS:
            return tuple(map(Tensor, DENSE_MODELS[self.case.model]()))
        if self.case.model in MIXED_MODELS:
            return MIXED_MODELS[self.case.model](self.distribution)
        if self.case.kind == "rows":
            return workloads.rows(self.size, self.distribution)
        if self.case.kind == "pooled":
            return workloads.pooled(self.size, self.distribution)
        if self.case.use.is_matrix:
            return workloads.dense(self.size, workloads.square)
        return workloads.dense(self.size)


class SpecialCase(NamedTuple):
    """A case with a method of its own: that of the module of its name in `special`."""

    name: str
    is_default: bool = False
    device: str | None = None  # where it is measured, if not on the host
    peer: str = ""  # the one that it has in this process, where it is installed
    install: str = ""  # how


SPECIAL = (
    SpecialCase("far-rows"),
    SpecialCase("first-step", is_default=True),
    *map(SpecialCase, ("training", "dlrm-training", "in-mindspore", "changing-steps", "rounding")),
    SpecialCase("dlrm-programs", peer="fbgemm",
                install="pip install fbgemm-gpu-cpu==1.8.0 beside a CPU build of torch 2.13"),
    *map(SpecialCase, ("catch-up", "id-map")),
    SpecialCase("device-rows", device="cuda"),
)  # fmt: skip
SUBJECTS: dict[str, Subject] = {
    **{f"nn.{name}": optimizer.subject for name, optimizer in OPTIMIZERS.items()},
    **{f"ops.{name}": operator.subject for name, operator in OPERATORS.items()},
    f"ops.{LARS_UPDATE.name}": LARS_UPDATE.subject,
    **{f"ops.{name}": function for name, function in FUNCTIONS.items()},
    **MXNET,
    **TORCH,
    **BAGS,
}
# Each model with the optimizers that it is usually trained with, or would be here.
_ON_MODELS = {
    "many-small": ("nn.Adam", "nn.SGD(momentum)", "nn.Lamb", "nn.mxnet.Adam", "nn.torch.Adam"),
    "resnet50": ("nn.Momentum", "nn.LARS", "nn.Adam", "nn.torch.Adam"),
    "gpt2": ("nn.Adam", "nn.AdamWeightDecay", "nn.Lamb", "nn.torch.Adam", "nn.torch.AdamW"),
    "dlrm": ("nn.SGD", "nn.Adagrad", "nn.LazyAdam", "nn.torch.LazyAdam"),
    "bags": ("nn.SGD", "nn.Adagrad", "nn.LazyAdam", "nn.torch.LazyAdam"),
}
_DEFAULT_ON_MODELS = {"many-small/nn.Adam", "resnet50/nn.Momentum", "resnet50/nn.Adam"}
_WHEN_NAMED = {
    f"{kind}/nn.{name}" for name, optimizer in OPTIMIZERS.items()
    for kind in optimizer.measured.on_request
}  # fmt: skip


def _cases() -> Iterator[Case]:
    no_model: tuple[Kind, ...] = ("dense", "rows", "pooled")
    for name, subject in SUBJECTS.items():
        for kind in no_model:
            if kind in subject.uses:
                full = f"{kind}/{name}"
                # Operators and other interfaces take the same steps: left to those who name them.
                is_ours = name.removeprefix("nn.") in OPTIMIZERS
                yield Case(full, subject, kind, is_ours and full not in _WHEN_NAMED)
    for model, names in _ON_MODELS.items():
        kind = "dense" if model in DENSE_MODELS else "mixed"
        for name in names:
            full = f"{model}/{name}"
            yield Case(full, SUBJECTS[name], kind, full in _DEFAULT_ON_MODELS)


STEPS: tuple[Case, ...] = tuple(_cases())
CASES: tuple[Case | SpecialCase, ...] = (*STEPS, *SPECIAL)


def select(patterns: list[str]) -> list[Case | SpecialCase]:
    """The cases that are asked for, in the order of the table; without any, the default ones.

    A pattern such as ``rows/*`` matches whole names, or what comes after the slash.

    Raises:
        BenchError: nothing has such a name.
    """
    for pattern in patterns:
        if not any(_matches(case.name, pattern) for case in CASES):
            names = [*(case.name for case in CASES), *SUBJECTS]
            near = difflib.get_close_matches(pattern, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "'fusestep bench --list' names them"
            raise BenchError(f"no case {pattern!r}: {hint}")
    if not patterns:
        return [case for case in CASES if case.is_default]
    return [c for c in CASES if any(_matches(c.name, pattern) for pattern in patterns)]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition("/")[2] or name, pattern)


def points(
    cases: Iterable[Case],
    sizes: str | None,
    dtypes: list[str],
    threads: list[int],
    distributions: list[str],
    scenarios: list[str],
) -> list[Point]:
    """Every combination that there is; a model has one size.

    Args:
        cases: the cases.
        sizes: as `workloads.parse_sizes`; None for the default of each kind.
        dtypes: by name.
        threads: numbers of them.
        distributions: of the indices of row cases.
        scenarios: by name.

    Raises:
        BenchError: a size or a dtype fits none of the cases.
    """
    cases = list(cases)
    found = [
        Point(case, size, dtype, count, distribution, scenario)
        for case in cases
        for size in _sizes_of(case, sizes)
        for dtype in dtypes
        if dtype in case.subject.dtypes
        for distribution in (distributions if case.kind != "dense" else distributions[:1])
        for count in threads
        for scenario in scenarios
    ]
    if not found and cases:
        asked = f"--size {sizes or 'default'}, --dtype {','.join(dtypes)}"
        raise BenchError(f"{asked}: fits none of the chosen cases")
    return found


def _sizes_of(case: Case, sizes: str | None) -> list[str]:
    if case.model is not None:
        return [case.model]
    if sizes is None:
        return [workloads.DEFAULTS[case.kind]]
    return workloads.parse_sizes(sizes)[case.kind]
