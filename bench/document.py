"""The results of a run as JSON: built, checked, written."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .. import threading_layer
from . import machine
from .errors import BenchError
from .peer import Peers
from .result import CaseResult, Settings
from .stats import Target

SCHEMA = 1

# The form of a document: a type, a choice of them, [form of every item], {"key": form}, or
# {str: form of every value}.
_NUMBER = (int, float)
_MAYBE = (int, float, type(None))
_SUMMARY = {"median": _NUMBER, "p20": _NUMBER, "p80": _NUMBER, "samples": int}
_TARGET = {
    "what": str,
    "value": _MAYBE,
    "at_p80": _MAYBE,
    "target": _NUMBER,
    "lower_is_better": bool,
    "unit": str,
    "verdict": str,
}
_CASE = {
    "name": str,
    "summary": str,
    "ours": str,
    "size": {str: int},
    "bytes_moved": {str: int},
    "times": {str: _SUMMARY},
    "ratios": {str: _NUMBER},
    "bound": (str, type(None)),
    "targets": [_TARGET],
    "unavailable": {str: str},
    "points": [{str: _NUMBER}],
}
_DOCUMENT = {
    "schema": int,
    "date": str,
    "fusestep": {"version": str, "commit": (str, type(None)), "changed": (bool, type(None))},
    "machine": {
        "cpu": str,
        "architecture": str,
        "llvm_cpu": str,
        "cores": int,
        "features": [str],
        "system": str,
    },
    "software": {str: (str, type(None))},
    "threads": int,
    "threading_layer": (str, type(None)),
    "quick": bool,
    "load_before": _MAYBE,
    "peers": {str: str},
    "missing_peers": {str: str},
    "cases": [_CASE],
}


def document(
    results: list[CaseResult], settings: Settings, peers: Peers, load: float | None
) -> dict[str, Any]:
    """Everything about a run, times in seconds; ``load`` is that of the machine before it."""
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "fusestep": machine.fusestep(),
        "machine": machine.machine(),
        "software": machine.software(),
        "threads": settings.threads,
        "threading_layer": threading_layer(),
        "quick": settings.quick,
        "load_before": load,
        "peers": peers.versions,
        "missing_peers": peers.missing,
        "cases": [_case(result) for result in results],
    }


def _case(result: CaseResult) -> dict[str, Any]:
    ours = result.times.get(result.ours)
    ratios = {name: t.median / ours.median for name, t in result.times.items()} if ours else {}
    targets = [_target(target) for target in result.targets]
    return {**asdict(result), "ratios": ratios, "targets": targets}


def _target(target: Target) -> dict[str, Any]:
    return {**asdict(target), "verdict": target.verdict}


def check_schema(document: Any) -> None:
    """Check that a document has the form of this version.

    Raises:
        ValueError: it has not; the text names the place.
    """
    _check(document, _DOCUMENT, "document")
    if document["schema"] != SCHEMA:
        raise ValueError(f"document['schema']: expected {SCHEMA}, got {document['schema']}")


def _check(value: Any, form: Any, where: str) -> None:
    if isinstance(form, list):
        _expect(value, list, where)
        for index, item in enumerate(value):
            _check(item, form[0], f"{where}[{index}]")
    elif isinstance(form, dict):
        _expect(value, dict, where)
        _check_mapping(value, form, where)
    else:
        _expect(value, form, where)


def _check_mapping(value: dict[str, Any], form: dict[Any, Any], where: str) -> None:
    if str in form:
        form = dict.fromkeys(value, form[str])
    for key in sorted({*value} ^ {*form}):
        raise ValueError(f"{where}: {'missing' if key in form else 'unknown'} key {key!r}")
    for key, item in value.items():
        _check(item, form[key], f"{where}[{key!r}]")


def _expect(value: Any, kinds: Any, where: str) -> None:
    # True is an int to Python, but no number here.
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        names = " or ".join(kind.__name__ for kind in allowed)
        raise ValueError(f"{where}: expected {names}, got {value!r}")


def check_writable(path: Path) -> None:
    """Find out before the measurement whether its results can be written.

    Raises:
        BenchError: they cannot.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "is a folder")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise BenchError(f"--json: cannot write {str(path)!r}: {error.strerror}") from error


def write(path: Path, document: dict[str, Any]) -> None:
    """Write the file as a whole or not at all.

    Raises:
        BenchError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise BenchError(f"--json: cannot write {str(path)!r}: {error.strerror}") from error
