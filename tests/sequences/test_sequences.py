"""Random sequences of calls: what one call leaves behind must not show in another.

Most tests look at one call by itself. Here every call comes after many others, in one process, on
one to four threads, and must leave the same bits as in a process where nothing is kept: see
`sequence_program.py`.
"""

import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest
from helpers import more, sampled
from subprocesses import ENVIRONMENT

PROGRAM = Path(__file__).parent / "sequence_program.py"
# Each of three seeds has a third of the operators and of the optimizers; see `World`.
SEQUENCES = [(seed, 200) for seed in range(3)]
LONGER = [*((seed, 1_500) for seed in range(3)), *((seed, 3_000) for seed in range(3, 6))]


def run(how: str, n_threads: int, seed: int, first: int, end: int) -> subprocess.CompletedProcess:
    environment = {
        **ENVIRONMENT, "NUMBA_NUM_THREADS": "1" if how == "fresh" else "4",
        "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    arguments = [how, *map(str, (n_threads, seed, first, end))]
    return subprocess.run(
        [sys.executable, "-W", "error", str(PROGRAM), *arguments],
        env=environment, capture_output=True, text=True, timeout=300, check=False)  # fmt: skip


def both(n_threads: int, seed: int, first: int, end: int, how: str = "kept") -> list[str]:
    """The first lines in which two processes differ, and what made one of them end; or []. One
    after the other: the second finds in the cache what the first one has compiled."""
    done = [run(each, n_threads, seed, first, end) for each in (how, "fresh")]
    lines = [process.stdout.splitlines() for process in done]
    for pair in zip_longest(*lines, fillvalue="nothing"):
        if pair[0] != pair[1]:
            return [*pair, *(process.stderr[-2_000:] for process in done)]
    return [p.args[-5] + " has failed" for p in done if p.returncode]


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


@pytest.mark.parametrize(("seed", "calls"), sampled(LONGER, SEQUENCES))
def test_sequences(seed: int, calls: int) -> None:
    compare(1, seed, calls)


@pytest.mark.parametrize("calls", [50, more(200)])
def test_sequences_of_several_python_threads(calls: int) -> None:
    compare(4, 100, calls)


def test_what_is_stale_is_found() -> None:
    """Powers that are kept without their type; not every sequence comes upon one."""
    assert any(both(1, seed, 0, 200, how="stale") for seed in (3, 10, 13))
