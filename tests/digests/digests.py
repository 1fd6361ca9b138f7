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

import argparse
import fnmatch
import inspect
import json
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import distributions
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

# THOR calls BLAS, whose sums may depend on the number of its threads; it reads this at its import.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# The tables of the tests, which pytest finds by itself.
sys.path += [
    str(Path(__file__).parents[1] / folder) for folder in ("", *("nn", "nn/mxnet", "nn/thor"))
]

import digest_functions
import digest_steps
import fusestep
from digest_record import Record, public_names

PACKAGES = ("numpy", "numba", "llvmlite", "ml_dtypes", "safetensors", "scipy")


def signatures() -> Iterator[tuple[str, Callable[[Record], object]]]:
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


def is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def all_cases() -> dict[str, Callable[[Record], object]]:
    """Every case by its name; those of one name are one case."""
    return dict(chain(signatures(), digest_steps.cases(), digest_functions.cases()))


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


def digest(case: Callable[[Record], object]) -> tuple[str, str]:
    """The digest of one case, warnings included; and the error with which it ended, or ""."""
    record, ending = Record(), ""
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
    options = parser.parse_args(arguments)
    cases = all_cases()
    found = {n: digest(case) for n, case in cases.items() if fnmatch.fnmatchcase(n, options.only)}
    digests = {name: of_case for name, (of_case, _) in found.items()}
    print(f"{len(found)} digests of {Path(fusestep.__file__).parent}")
    print(
        *(f"ends early: {name}: {ending}" for name, (_, ending) in found.items() if ending),
        sep="\n",
    )
    known = [*public_names()]
    if options.output:
        result = {"environment": environment(), "public": sorted(known), "cases": digests}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    equal = True
    if options.against:
        other = json.loads(options.against.read_text())
        known, equal = other["public"], compare(digests, other, options.only)
    bare = uncovered(cases)
    print(*(f"no case: {name}" for name in bare), sep="\n")
    return 0 if equal and not {*bare} & {*known} else 1


if __name__ == "__main__":
    sys.exit(main())
