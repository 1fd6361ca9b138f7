"""The results of a run as JSON: built, checked against the schema, written, read."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from ... import threading_layer
from ...kernels.files import check_target
from ...nn.base.checkpoint import replace_file
from .. import machine
from ..errors import BenchError
from ..peer import Peers
from .result import PointResult, SpecialResult

SCHEMA = 3
Result = PointResult | SpecialResult


def document(
    results: Sequence[Result],
    seconds: float,
    peers: Peers,
    load: float | None,
    gpu: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything about a run, times in seconds.

    Args:
        results: its results.
        seconds: that the measurement of a point could take.
        peers: the libraries beside.
        load: of the machine before it.
        gpu: the CUDA device that took the steps.
    """
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "fusestep": machine.fusestep(),
        "machine": machine.machine(),
        "software": machine.software(),
        **({} if gpu is None else {"gpu": gpu}),
        "threading_layer": threading_layer(),
        "seconds_per_point": seconds,
        "load_before": load,
        "peers": peers.versions,
        "missing_peers": peers.missing,
        "points": [_point(r) for r in results if isinstance(r, PointResult)],
        "special": [asdict(r) for r in results if isinstance(r, SpecialResult)],
    }


def _point(result: PointResult) -> dict[str, Any]:
    point, of_point = result.point, ("size", "dtype", "threads", "scenario")
    others = "sizes", "bytes", "from_memory", "copies", "losses", "memory", "unavailable", "waited"
    return {
        "case": point.case.name,
        "indices": None if point.case.kind == "dense" else point.distribution,
        **{name: getattr(point, name) for name in of_point},
        **{name: getattr(result, name) for name in others},
        "times": {label: asdict(summary) for label, summary in result.times.items()},
        "host": {label: asdict(summary) for label, summary in result.host.items()},
        "bound": asdict(result.bound) if result.bound else None,
        "peers": {peer: asdict(against) for peer, against in result.peers.items()},
    }


def joined(*documents: dict[str, Any]) -> dict[str, Any]:
    """The last of some documents, with the results and the peers of the others before its own."""
    found = dict(documents[-1])
    for part in ("points", "special"):
        found[part] = [one for data in documents for one in data[part]]
    for part in ("peers", "missing_peers"):
        found[part] = {name: text for data in documents for name, text in data[part].items()}
    return found


def same(point: dict[str, Any]) -> tuple[Any, ...]:
    """The key that points have in common that differ in their scenario only; threads come last."""
    return tuple(point[key] for key in ("case", "size", "indices", "dtype", "threads"))


@cache
def _schema() -> Any:
    path = Path(__file__).with_name("results.schema.json")
    return json.loads(path.read_text(encoding="utf-8"))


def check_schema(document: Any) -> None:
    """Check that a document has the form of this version.

    Raises:
        ValueError: it has not; the text names the place.
    """
    found = document.get("schema") if isinstance(document, dict) else None
    if found != SCHEMA:
        raise ValueError(f"expected results of schema {SCHEMA}, got {found}")
    try:
        jsonschema.validate(document, _schema())
    except jsonschema.ValidationError as error:
        raise ValueError(f"{error.json_path}: {error.message}") from error


def read(path: Path, option: str, *, has_schema: bool = True) -> dict[str, Any]:
    """The document in a file; without the schema it is one of an example.

    Raises:
        BenchError: it cannot be read, or is no such document.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if has_schema:
            check_schema(found)
    except OSError as error:
        raise BenchError(f"{option}: cannot read {str(path)!r}: {error.strerror}") from error
    except ValueError as error:  # of JSON, of its encoding, of the schema
        raise BenchError(f"{option}: {str(path)!r} holds no results: {error}") from error
    return found


def check_writable(path: Path, option: str = "--json") -> None:
    """Find out before the measurement whether a file can be written.

    Raises:
        BenchError: it cannot.
    """
    with _writing(path, option):
        check_target(option, path)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def write(path: Path, document: dict[str, Any]) -> None:
    """Write the file as a whole or not at all.

    Raises:
        BenchError: it cannot be written.
    """
    with _writing(path, "--json"):
        replace_file(path, f"{json.dumps(document, indent=1)}\n".encode(), "--json")


@contextmanager
def _writing(path: Path, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        of_system = f"{option}: cannot write {str(path)!r}: {error.strerror}"
        raise BenchError(of_system if error.strerror else str(error)) from error
