"""Random sequences of calls: what one call leaves behind must not show in another.

Most tests look at one call by itself. Here every call comes after many others, in one process, on
one to four threads, and must leave the same bits as in a process where nothing is kept: see
`sequence_program.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "sequence_program.py"
CALLS, CALLS_OF_THREAD = 1_500, 200
# Each of three has a third of the operators and of the optimizers; see `World`.
SEEDS = range(3)
MORE_SEEDS = range(3, 6)
large = pytest.mark.skipif(
    not os.environ.get("FUSESTEP_LARGE_TESTS"),
    reason="takes a minute; FUSESTEP_LARGE_TESTS=1 runs it",
)


def started(how: str, n_threads: int, seed: int, first: int, end: int) -> subprocess.Popen:
    environment = {
        **os.environ,
        "NUMBA_NUM_THREADS": "1" if how == "fresh" else "4",
        "OPENBLAS_NUM_THREADS": "1",
    }
    arguments = [how, *map(str, (n_threads, seed, first, end))]
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(PROGRAM), *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def both(n_threads: int, seed: int, first: int, end: int, how: str = "kept") -> list[str]:
    """The first lines in which the two processes differ, and what made one of them end; or []."""
    arguments = n_threads, seed, first, end
    processes = [started(how, *arguments), started("fresh", *arguments)]
    (kept, kept_errors), (fresh, fresh_errors) = (p.communicate(timeout=300) for p in processes)
    for pair in zip_longest(kept.splitlines(), fresh.splitlines(), fillvalue="nothing"):
        if pair[0] != pair[1]:
            return [*pair, kept_errors[-2_000:], fresh_errors[-2_000:]]
    return [p.args[-5] + " has failed" for p in processes if p.returncode]


def shortest(n_threads: int, seed: int, end: int) -> int:
    """The largest number of a call from which on a sequence still differs."""
    calls = 1
    while calls < end and not both(n_threads, seed, end - calls, end):
        calls *= 2
    return max(0, end - calls)


def compare(n_threads: int, seed: int, end: int) -> None:
    """Fails at the first call that differs, and says how to run it."""
    found = both(n_threads, seed, 0, end)
    if not found:
        return
    number = next((int(word) for word in found[0].split() if word.isdigit()), end - 1)
    first = shortest(n_threads, seed, number + 1) if n_threads == 1 else 0
    command = f"{PROGRAM.name} kept|fresh {n_threads} {seed} {first} {number + 1}"
    pytest.fail("\n".join(["kept and fresh differ: " + command, *found]), pytrace=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_sequences(seed: int) -> None:
    compare(1, seed, CALLS)


def test_sequences_of_several_python_threads() -> None:
    compare(4, 100, CALLS_OF_THREAD)


@large
@pytest.mark.parametrize("seed", MORE_SEEDS)
def test_more_sequences(seed: int) -> None:
    compare(1, seed, 2 * CALLS)


def test_what_is_stale_is_found() -> None:
    """Powers that are kept without their type."""
    assert both(1, 1, 0, CALLS, how="stale")
