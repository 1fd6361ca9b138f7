"""A measurement on a CUDA device: contestants in turn with copies.

Imports nothing that needs a device: the names of the points and their report are there without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..errors import BenchError
from ..measure import Contestant, measured
from ..report.result import BOUND, OURS
from ..report.stats import Summary, ratio

Point = dict[str, Any]
COPY_BYTES = 1 << 31
_OF_FREE = 0.9  # what arrays may take of the memory that is free
_OF_COPIES = 0.125  # what either array of the copies may take of it
TORCH, NN_TORCH, SPARSE_ADAM = "torch fused", "nn.torch", "torch SparseAdam"
LARGE = (1 << 26, 1 << 28)  # elements of dense steps
DISTRIBUTIONS = ("zipf1.05", "zipf1.2")
SORTED = (10**5, 10**6, 10**7)
SMALL = 200  # tensors
BATCHES = (1 << 13, 1 << 17)  # rows of a gradient of a table of 10^6
_DTYPES = ("float32", "bfloat16", "float16")


def named_points() -> dict[str, tuple[Any, ...]]:
    """By name, the function of `points` that measures one, and its arguments."""
    return {
        **{f"dense/{kind}/{dtype}/{LARGE[0]}": ("large", kind, LARGE[0], dtype)
           for kind in ("adam", "adamw", "sgd") for dtype in _DTYPES},
        f"dense/adam/float32/{LARGE[-1]}": ("large", "adam", LARGE[-1], "float32"),
        "model/gpt2": ("gpt2",),
        **{f"dense/{kind}/{LARGE[0]}": ("large", kind, LARGE[0], "float32")
           for kind in ("lamb", "adafactor")},
        **{f"small/adam/{count}": ("small_adam", count) for count in (1, SMALL)},
        **{f"table/{distribution}/{batch}": ("table", distribution, batch)
           for batch in BATCHES for distribution in ("zipf1.2", "uniform")},
        "bags": ("bags",),
        **{f"rows/{kind}/{distribution}": (f"{kind}_rows", distribution)
           for kind in ("all", "lazy") for distribution in DISTRIBUTIONS},
        **{f"sort/{n}": ("sorts", n) for n in SORTED},
    }  # fmt: skip


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
        """The point of a document; the contestants are in turn with the copies.

        Args:
            case: its name.
            size: the sizes.
            jobs: by label, ours first.
            moved: by label, the bytes that a step must move; nothing where they say nothing.
            wanted: one of the sizes as it should be: one that is smaller is noted.
        """
        copies = self.copies.jobs if moved else {}
        timed = {label: self._clock.Timed(job) for label, job in {**jobs, **copies}.items()}
        contestants = [Contestant(label, one.sample) for label, one in timed.items()]
        times = measured(contestants, "loop", self.seconds, lambda _: None)
        device, kept = times.summaries, {label: len(s) for label, s in times.samples.items()}
        host = {label: Summary.of(one.host[-kept[label] :]) for label, one in timed.items()}
        ahead = {label: one.ahead[-kept[label] :] for label, one in timed.items()}
        fastest = min((device[label].median for label in copies), default=None)
        # Each byte of a copy is read and written.
        copy = None if fastest is None else 2 * self.copies.n_bytes / fastest
        notes = []
        if wanted is not None and size[wanted[0]] < wanted[1]:
            name, n = wanted
            notes.append(f"{size[name]} {name} instead of {n}, for want of device memory")
            self._say(f"{case}: {notes[0]}")
        return point(case, size, moved, (device, host), ahead, copy, notes)


def point(
    case: str,
    size: dict[str, int],
    moved: Mapping[str, int],
    times: tuple[dict[str, Summary], dict[str, Summary]],
    ahead: Mapping[str, list[bool]],
    copy: float | None,
    notes: list[str],
) -> Point:
    """The entry of a case in one size in a document.

    Args:
        case: its name.
        size: the sizes.
        moved: by label, the bytes that a step must move.
        times: seconds of a step by label: on the device, and until the host had enqueued it.
        ahead: by label, whether the device did not wait for the host in a sample.
        copy: bytes a second of the fastest copy, read and written, in this measurement.
        notes: what a reader should know.
    """
    device, host = times
    peers = [label for label in device if label != OURS and not label.startswith(BOUND)]
    speeds = {label: n / device[label].median for label, n in moved.items()}
    return {
        "case": case,
        "size": size,
        "bytes": dict(moved),
        "device": {label: asdict(summary) for label, summary in device.items()},
        "host": {label: asdict(summary) for label, summary in host.items()},
        "ahead": {label: sum(found) / len(found) for label, found in ahead.items()},
        "copy": copy,
        "notes": notes,
        "of_copy": {label: speed / copy for label, speed in speeds.items()} if copy else {},
        "by_ours": {label: asdict(ratio(device[label], device[OURS])) for label in peers},
    }
