"""Each pair of features: right, refused by the error that the documentation shows, or not tried."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from pair_page import PAGE, page
from pair_parts import (
    NOT_APPLICABLE,
    PAIRS,
    PARTS,
    REFUSED,
    outcome,
    plan_of,
)
from subprocesses import ENVIRONMENT

TRIED = [pair for pair in PAIRS if frozenset(pair) not in NOT_APPLICABLE]
ALONE = [pair for pair in TRIED if plan_of(*pair).processes == 1]
TOGETHER = [pair for pair in TRIED if pair not in ALONE]
PROGRAM = Path(__file__).with_name("pair_processes.py")


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    """Let PyTorch warn of what it likes; the package warns of wrong numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RuntimeWarning)
        yield


def assert_as_known(pair: tuple[str, ...], result: str) -> None:
    """The pair is right, or refused by its error."""
    text = REFUSED.get(frozenset(pair))
    assert result == "right" if text is None else text in result, f"{' + '.join(pair)}: {result}"


@pytest.mark.parametrize("pair", ALONE[::4], ids=" + ".join)
def test_a_pair(pair: tuple[str, str], tmp_path: Path) -> None:
    assert_as_known(pair, outcome(plan_of(*pair), tmp_path, 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PARTS)
def test_all_pairs_of_a_feature(name: str, tmp_path: Path) -> None:
    for n, pair in enumerate(pair for pair in ALONE if pair[0] == name):
        for seed in range(3):
            (folder := tmp_path / f"{n}.{seed}").mkdir()
            assert_as_known(pair, outcome(plan_of(*pair), folder, seed))


@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_pairs_in_two_processes(step: int, tmp_path: Path) -> None:
    (pairs := tmp_path / "pairs").write_text(json.dumps(TOGETHER[::step]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(PROGRAM), str(tmp_path), str(pairs)]
    done = subprocess.run(
        command, env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    results = json.loads((tmp_path / "outcomes").read_text())
    assert len(results) == len(TOGETHER[::step]), done.stderr
    for pair, result in zip(TOGETHER[::step], results, strict=True):
        assert_as_known(pair, result)


def test_documentation_says_the_same() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python tests/pairs/pair_page.py"


def test_every_verdict_is_of_a_pair() -> None:
    assert {*REFUSED, *NOT_APPLICABLE} <= {*map(frozenset, PAIRS)}
    assert REFUSED.keys().isdisjoint(NOT_APPLICABLE)
