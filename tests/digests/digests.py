"""A digest of what every public optimizer, operator and schedule computes, to compare two trees.

    python tests/digests/digests.py --output FILE.json     # of one tree
    python tests/digests/digests.py --against FILE.json    # on another tree: 1 where a case differs

A case runs something through the public interface and hashes every array that it leaves: the
parameters, all states, what is returned, and the texts of errors and warnings. Its digest depends
neither on the number of threads nor on the run. It does depend on the machine and on the versions
of NumPy, Numba and SciPy, so both trees are to be run on one machine, in one environment.

Cases are made from the registry of optimizers, the table of operators (`operators.py` of the
tests), the names in ``__all__`` and signatures. A public name without a case ends the run with 1,
unless the file of the other tree does not have that name either.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import inspect
import json
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from importlib.metadata import distributions
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

# THOR calls BLAS, whose sums may depend on the number of its threads; it reads this at its import.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# The tables of the tests, which pytest finds by itself.
sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("", "nn/mxnet", "nn/thor")]

import numpy as np

import fusestep
from fusestep import nn, ops

import digest_front_ends
import digest_functions
import digest_optimizers

MODULES = {
    "nn": nn,
    "nn.mxnet": nn.mxnet,
    "nn.mxnet.lr_scheduler": nn.mxnet.lr_scheduler,
    "ops": ops,
}
PACKAGES = ("numpy", "numba", "llvmlite", "ml_dtypes", "safetensors", "scipy")
# What a text may hold of the run and of the place of a file, which is not looked at.
_ADDRESS, _MODULE = re.compile(r"\b0x[0-9a-f]+"), re.compile(r"\bfusestep(?:\.\w+)*\.(?=\w)")

Case = tuple[str, Callable[["Record"], object]]


class Record:
    """What a case has left, added value by value."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=12)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def add(self, *values: Any) -> None:
        """Values by type and content: of an array all bytes, of an error its types and text."""
        for value in values:
            if isinstance(value, np.ndarray):
                self._add(f"array {value.dtype} {value.shape}", value.tobytes())
            elif isinstance(value, np.generic):
                self._add(f"scalar {value.dtype}", value.tobytes())
            elif value is None or isinstance(value, bool | int | float | bytes):
                self._add(type(value).__name__, repr(value).encode())
            elif isinstance(value, str):
                self._add("str", _MODULE.sub("fusestep.", _ADDRESS.sub("0x", value)).encode())
            elif isinstance(value, tuple | list):
                self._add(f"{type(value).__name__} of {len(value)}")
                self.add(*value)
            elif isinstance(value, Mapping):
                self.add(sorted(value.items(), key=lambda pair: str(pair[0])))
            elif isinstance(value, nn.RowTensor):
                self.add(value.indices, value.values, value.dense_shape)
            elif isinstance(value, nn.Parameter):
                self.add(value.name, value.requires_grad, np.asarray(value.data))
            elif isinstance(value, BaseException):
                self.add(_public_kinds(type(value)), str(value))
            else:
                self.add(repr(value))

    def _add(self, kind: str, content: bytes = b"") -> None:
        self._hash.update(f"{kind} {len(content)}:".encode() + content)

    def attempt(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Add what a call returns, or the error that it raises; the result, or None."""
        try:
            result = function(*given, **named)
        except Exception as error:
            self.add(error)
            return None
        self.add(result)
        return result


def _public_kinds(error: type[BaseException]) -> list[str]:
    """What can be written after ``except`` to catch an error."""
    public = [*public_names().values()]
    return [c.__name__ for c in error.__mro__ if c in public or "fusestep" not in c.__module__]


@cache
def public_names() -> dict[str, Any]:
    """All public names with what they stand for."""
    return {
        f"{place}.{name}": getattr(module, name)
        for place, module in MODULES.items()
        for name in module.__all__
    }


def is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def signatures() -> Iterator[Case]:
    """Names, kinds and defaults of all arguments."""
    for name, value in public_names().items():
        if callable(value) and not is_error(value):
            yield f"signature {name}", partial(_add_signature, function=value)
        if inspect.isfunction(getattr(value, "__call__", None)):  # noqa: B004  (of a class)
            yield f"signature {name}()", partial(_add_signature, function=value.__call__)


def _add_signature(record: Record, function: Any) -> None:
    for p in inspect.signature(function).parameters.values():
        default = "" if p.default is p.empty else "a function" if callable(p.default) else p.default
        record.add([p.name, p.kind.name, default])


def all_cases() -> dict[str, Callable[[Record], object]]:
    """Every case by its name."""
    found: dict[str, Callable[[Record], object]] = {}
    modules = (digest_functions, digest_optimizers, digest_front_ends)
    for name, case in chain(signatures(), *(module.cases() for module in modules)):
        if name in found:
            raise ValueError(f"two cases are called {name!r}")
        found[name] = case
    return found


def uncovered(names: Iterable[str]) -> list[str]:
    """The public names of which no case is, under this or another name."""
    public = public_names()
    seen = {re.match(r"[\w.]*", name)[0] for name in names}  # type: ignore[index]
    covered = {id(value) for name, value in public.items() if name in seen}
    return [
        name
        for name, value in public.items()
        if id(value) not in covered and not isinstance(value, ModuleType) and not is_error(value)
    ]


def digest(case: Callable[[Record], object]) -> tuple[str, str | None]:
    """The digest of one case, warnings included; and the error with which it ended, if any."""
    record, ending = Record(), None
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            case(record)
        except Exception as error:
            record.add(error)
            ending = f"{type(error).__name__}: {error}"
    record.add([[w.category.__name__, str(w.message)] for w in given])
    return record.digest, ending


def environment() -> dict[str, str]:
    """What digests depend on, beside the tree."""
    installed = {d.name: d.version for d in distributions() if d.name in PACKAGES}
    return {"machine": platform.machine(), "python": platform.python_version(), **installed}


def compare(found: Mapping[str, str], other: Mapping[str, Any], pattern: str) -> bool:
    """Print how the digests differ from those of another tree; whether they are equal."""
    expected = {n: d for n, d in other["cases"].items() if fnmatch.fnmatchcase(n, pattern)}
    if other["environment"] != environment():
        print(f"environments differ: {other['environment']} and now {environment()}")
    kinds = {
        "differs": [n for n in expected if found.get(n, expected[n]) != expected[n]],
        "is missing": [n for n in expected if n not in found],
        "is new": [n for n in found if n not in expected],
    }
    for kind, names in kinds.items():
        print(*(f"{kind}: {name}" for name in names), sep="\n", end="\n" * bool(names))
        print(f"{kind}: {len(names)} of {len(expected)} cases")
    return not kinds["differs"] and not kinds["is missing"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, help="write the digests to this file")
    parser.add_argument("--against", type=Path, help="compare with the digests of this file")
    parser.add_argument("--only", default="*", help="cases whose names match, such as 'nn.Adam*'")
    parser.add_argument("--verbose", action="store_true", help="print each case with its time")
    options = parser.parse_args(arguments)
    other = json.loads(options.against.read_text()) if options.against else None
    cases = all_cases()
    found: dict[str, str] = {}
    endings: dict[str, str] = {}
    for name, case in cases.items():
        if not fnmatch.fnmatchcase(name, options.only):
            continue
        start = time.perf_counter()
        found[name], ending = digest(case)
        endings |= {name: ending} if ending else {}
        if options.verbose:
            print(f"{time.perf_counter() - start:7.3f} s  {found[name]}  {name}  {ending or ''}")
    print(f"{len(found)} digests of {Path(fusestep.__file__).parent}")
    print(f"{len(endings)} cases end with an error")
    if options.output:
        result = {
            "environment": environment(), "public": sorted(public_names()), "cases": found,
            "errors": endings,
        }  # fmt: skip
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    bare = uncovered(cases)
    print(*(f"no case: {name}" for name in bare), sep="\n", end="\n" if bare else "")
    equal = other is None or compare(found, other, options.only)
    known = public_names() if other is None else other["public"]
    return 0 if equal and not {*bare} & {*known} else 1


if __name__ == "__main__":
    sys.exit(main())
