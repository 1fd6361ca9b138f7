"""A measurement on a CUDA device: contestants in turn with copies, and what was aimed at.

Imports nothing that needs a device: the names of the points and their report are there without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..errors import BenchError
from ..report.result import BOUND, OURS
from ..report.stats import Ratio, Summary, ratio

COPY_BYTES = 1 << 31
_OF_FREE = 0.9  # what arrays may take of the memory that is free
_OF_COPIES = 0.125  # what either array of the copies may take of it
TORCH, NN_TORCH, SPARSE_ADAM = "torch fused", "nn.torch", "torch SparseAdam"
LARGE = (1 << 26, 1 << 28)  # elements of dense steps
DISTRIBUTIONS = ("zipf1.05", "zipf1.2")
SORTED = (10**5, 10**6, 10**7)
SMALL = 200  # tensors
BATCHES = (1 << 13, 1 << 17)  # rows of a gradient of a table of 10^6


def named_points() -> dict[str, tuple[str, dict[str, Any]]]:
    """By name, the function of `points` that measures one, and its arguments."""
    return {
        **{f"dense/{kind}/{dtype}/{LARGE[0]}": ("dense", {"kind": kind, "wanted": LARGE[0],
                                                         "dtype": dtype})
           for kind in ("adam", "adamw", "sgd") for dtype in ("float32", "bfloat16", "float16")},
        f"dense/adam/float32/{LARGE[1]}": ("dense", {"kind": "adam", "wanted": LARGE[1],
                                                    "dtype": "float32"}),
        "model/gpt2": ("gpt2", {}),
        **{f"dense/{kind}/{LARGE[0]}": (f"dense_{kind}", {"wanted": LARGE[0]})
           for kind in ("lamb", "adafactor")},
        **{f"small/adam/{count}": ("small_adam", {"count": count}) for count in (1, SMALL)},
        **{f"table/{distribution}/{batch}": ("table", {"distribution": distribution,
                                                       "batch": batch})
           for batch in BATCHES for distribution in ("zipf1.2", "uniform")},
        "bags": ("bags", {}),
        **{f"rows/{kind}/{distribution}": (f"{kind}_rows", {"distribution": distribution})
           for kind in ("all", "lazy") for distribution in DISTRIBUTIONS},
        **{f"sort/{n}": ("sorts", {"n": n}) for n in SORTED},
    }  # fmt: skip


@dataclass
class Point:
    """What was measured of one case in one size."""

    case: str  # its name
    size: dict[str, int]  # the sizes
    bytes: dict[str, int]  # by label, what a step must move; missing where that says nothing
    device: dict[str, Summary]  # by label, seconds of a step on the device
    host: dict[str, Summary]  # by label, seconds that it took to enqueue a step
    # By label, the share of samples in which the device did not wait for the host.
    ahead: dict[str, float]
    # Bytes a second of the fastest copy, read and written, in this measurement.
    copy: float | None = None
    # What was aimed at, and whether it was reached.
    targets: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what a reader should know

    @property
    def peers(self) -> list[str]:
        """The labels of all but ours and the copies."""
        return [label for label in self.device if label != OURS and not label.startswith(BOUND)]

    def of_copy(self, label: str) -> float:
        """Which share of the speed of a copy a contestant has reached."""
        assert self.copy is not None
        return self.bytes[label] / self.device[label].median / self.copy

    def by_ours(self, label: str) -> Ratio:
        """The time of a contestant by ours."""
        return ratio(self.device[label], self.device[OURS])

    def aim(self, text: str, reached: float, limit: float, *, at_most: bool = False) -> None:
        """Add a target.

        Args:
            text: in words.
            reached: what was measured, in the unit of ``limit``.
            limit: what it should be at least, or with ``at_most`` at most.
            at_most: which of both.
        """
        is_met = reached <= limit if at_most else reached >= limit
        numbers = {"reached": reached, "limit": limit, "at_most": at_most, "is_met": is_met}
        self.targets.append({"text": text, **numbers})

    def aim_at_copy(self, label: str, limit: float) -> None:
        """Add a target that is a share of the speed of a copy."""
        self.aim(f"{label}: of the speed of a copy", self.of_copy(label), limit)

    def aim_at_torch(self, label: str = OURS) -> None:
        """Not slower than torch, where it was measured."""
        if TORCH in self.device:
            reached = self.device[TORCH].median / self.device[label].median
            self.aim(f"time of {TORCH} by that of {label}", reached, 1.0)


class Bench:
    """A run: the device, how long a point may take, what is said on the way."""

    def __init__(self, seconds: float, say: Callable[[str], None]) -> None:
        self._clock: Any = import_module(".clock", __package__)
        self.seconds, self._say = seconds, say
        n_bytes = min(COPY_BYTES, int(_OF_COPIES * self._clock.free_bytes()))
        unit = self._clock.COPY_UNIT
        self.copies = self._clock.Copies(max(unit, n_bytes // unit * unit))
        self.torch, self.cupy = (
            import_module(name) if find_spec(name) else None for name in ("torch", "cupy")
        )
        if self.torch is not None and not self.torch.cuda.is_available():
            self.torch = None

    def fits(self, wanted: int, bytes_of_one: float, least: int, apart: int = 0) -> int:
        """How many of so many elements fit into memory beside ``apart`` bytes.

        Raises:
            BenchError: not even the least number.
        """
        if self.torch is not None:
            self.torch.cuda.empty_cache()
        free = self._clock.free_bytes()
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
        wanted: tuple[str, int] | None = None,
    ) -> Point:
        """The times of the contestants; in turn with the copies where something is moved.

        Args:
            case: its name.
            size: the sizes.
            jobs: by label.
            moved: bytes, by label.
            wanted: one of the sizes as it should be: one that is smaller is noted.
        """
        times = self._clock.interleave(
            {**jobs, **(self.copies.jobs if moved else {})}, self.seconds
        )
        point = Point(
            case,
            size,
            dict(moved),
            {label: Summary.of(timed.device) for label, timed in times.items()},
            {label: Summary.of(timed.host) for label, timed in times.items()},
            {label: sum(timed.ahead) / len(timed.ahead) for label, timed in times.items()},
        )
        if moved:
            best = min(point.device[label].median for label in self.copies.jobs)
            point.copy = 2 * self.copies.n_bytes / best  # each byte is read and written
        if wanted is not None and size[wanted[0]] < wanted[1]:
            name, n = wanted
            text = f"{size[name]} {name} instead of {n}, for want of device memory"
            point.notes.append(text)
            self._say(f"{case}: {text}")
        return point
