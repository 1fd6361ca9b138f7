"""A measurement on a CUDA device: contestants in turn with copies, and what was aimed at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from ..errors import BenchError
from ..report.result import OURS
from ..report.stats import Ratio, Summary, ratio

COPY_BYTES = 1 << 31
_OF_FREE = 0.9  # what arrays may take of the memory that is free
_OF_COPIES = 0.125  # what either array of the copies may take of it

ADAM = (1e-3, 0.0, 1, (0.9, 0.999, 1e-8), (0.9, 0.999))
"""Learning rate, decay, step, betas and epsilon, and powers of the betas."""
TORCH = "torch fused"


@dataclass(frozen=True)
class Target:
    """What was aimed at.

    Args:
        text: in words.
        reached: what was measured, in the unit of ``limit``.
        limit: what it should be at least, or with ``at_most`` at most.
        at_most: which of both.
    """

    text: str
    reached: float
    limit: float
    at_most: bool = False

    @property
    def is_met(self) -> bool:
        """Whether it was reached."""
        return self.reached <= self.limit if self.at_most else self.reached >= self.limit


@dataclass
class Point:
    """What was measured of one case in one size.

    Args:
        case: its name.
        size: the sizes.
        bytes: by label, what a step must move; missing where that says nothing.
        device: by label, seconds of a step on the device.
        host: by label, seconds that it took to enqueue a step.
        ahead: by label, the share of samples in which the device did not wait for the host.
        copy: bytes a second of the fastest copy, read and written, in this measurement.
        targets: what was aimed at.
        notes: what a reader should know.
    """

    case: str
    size: dict[str, int]
    bytes: dict[str, int]
    device: dict[str, Summary]
    host: dict[str, Summary]
    ahead: dict[str, float]
    copy: float | None = None
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def of_copy(self, label: str) -> float:
        """Which share of the speed of a copy a contestant has reached."""
        assert self.copy is not None
        return self.bytes[label] / self.device[label].median / self.copy

    def against(self, label: str) -> Ratio | None:
        """The time of a contestant by ours."""
        return ratio(self.device[label], self.device[OURS]) if label in self.device else None

    def aim(self, text: str, reached: float, limit: float, *, at_most: bool = False) -> None:
        """Add a target."""
        self.targets.append(Target(text, reached, limit, at_most))

    def aim_at_copy(self, label: str, limit: float) -> None:
        """Add a target that is a share of the speed of a copy."""
        self.aim(f"{label}: of the speed of a copy", self.of_copy(label), limit)

    def aim_at_torch(self) -> None:
        """Not slower than torch, where it was measured."""
        if found := self.against(TORCH):
            self.aim(f"time of {TORCH} by ours", found.value, 1.0)


class Bench:
    """A run: the device, how long a point may take, what is said on the way."""

    def __init__(self, seconds: float, say: Callable[[str], None]) -> None:
        from . import clock as gpu_clock

        self.clock, self.seconds, self._say = gpu_clock, seconds, say
        n_bytes = min(COPY_BYTES, int(_OF_COPIES * gpu_clock.free_bytes()))
        unit = gpu_clock.COPY_UNIT
        self.copies = gpu_clock.Copies(max(unit, n_bytes // unit * unit))
        self.torch = _torch()
        self.cupy = _cupy()

    def note(self, point: Point, text: str) -> None:
        """Say something, and keep it with the results."""
        point.notes.append(text)
        self._say(f"{point.case}: {text}")

    def fits(self, wanted: int, bytes_of_one: float, least: int, apart: int = 0) -> int:
        """How many of so many elements fit into memory beside ``apart`` bytes.

        Raises:
            BenchError: not even the least number.
        """
        if self.torch is not None:
            self.torch.cuda.empty_cache()
        free = self.clock.free_bytes()
        n = min(wanted, int((_OF_FREE * free - apart) / bytes_of_one))
        if n < least:
            raise BenchError(f"{free / 1e9:.2f} GB of device memory are free: too little")
        return n

    def measure(
        self,
        case: str,
        size: dict[str, int],
        jobs: Mapping[str, Callable[[], object]],
        moved: Mapping[str, int],
        *,
        with_copies: bool = True,
    ) -> Point:
        """The times of the contestants, in turn with the copies."""
        all_jobs = {**jobs, **(self.copies.jobs if with_copies else {})}
        times = self.clock.interleave(all_jobs, self.seconds)
        point = Point(
            case,
            size,
            dict(moved),
            {label: timed.device for label, timed in times.items()},
            {label: timed.host for label, timed in times.items()},
            {label: timed.ahead for label, timed in times.items()},
        )
        if with_copies:
            point.copy = self.copies.bandwidth(times)
        return point


def _torch() -> Any:
    """PyTorch with CUDA, or None."""
    if find_spec("torch") is None:
        return None
    import torch

    return torch if torch.cuda.is_available() else None


def _cupy() -> Any:
    """CuPy, or None."""
    if find_spec("cupy") is None:
        return None
    import cupy

    return cupy
