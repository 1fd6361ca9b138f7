"""Each pair of features: right, refused by the error that the documentation shows, or not tried."""

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from pair_page import PAGE, page

from pair_parts import (  # isort: skip
    NOT_APPLICABLE, OF_THREE, PAIRS, PARTS, REFUSED, outcome, plan_of, programs)  # fmt: skip
from pair_reference import assert_as_known, assert_of_pairs
from subprocesses import ENVIRONMENT, TORCH

TRIED = [pair for pair in PAIRS if frozenset(pair) not in NOT_APPLICABLE]
ALONE = [pair for pair in TRIED if plan_of(*pair).processes == 1]
TOGETHER = [pair for pair in TRIED if pair not in ALONE]
OF_THREE_TOGETHER = [[*names] for names in OF_THREE if plan_of(*names).processes > 1]
KNOWN = REFUSED | OF_THREE
PROGRAM = Path(__file__).with_name("pair_processes.py")


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    """Let PyTorch warn of what it likes; the package warns of wrong numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.mark.parametrize("pair", ALONE[::4], ids=" + ".join)
def test_a_pair(pair: tuple[str, str], tmp_path: Path) -> None:
    assert_as_known(pair, outcome(plan_of(*pair), tmp_path, 1), KNOWN)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PARTS)
def test_all_pairs_of_a_feature(name: str, tmp_path: Path) -> None:
    for n, pair in enumerate(pair for pair in ALONE if pair[0] == name):
        for seed in range(3):
            (folder := tmp_path / f"{n}.{seed}").mkdir()
            assert_as_known(pair, outcome(plan_of(*pair), folder, seed), KNOWN)


@pytest.mark.parametrize("names", [p for p in programs(24, 1) if plan_of(*p).processes == 1])
def test_more_parts(names: list[str], tmp_path: Path) -> None:
    assert_as_known(names, outcome(plan_of(*names), tmp_path, 1), KNOWN)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2, 22))
def test_many_more_parts(seed: int, tmp_path: Path) -> None:
    for n, names in enumerate(programs(50, seed)):
        if plan_of(*names).processes == 1:
            (folder := tmp_path / str(n)).mkdir()
            assert_as_known(names, outcome(plan_of(*names), folder, seed), KNOWN)


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_two_processes(step: int, tmp_path: Path) -> None:
    more = [names for names in programs(200, 3) if plan_of(*names).processes > 1]
    pairs = [*TOGETHER, *OF_THREE_TOGETHER, *more][::step]
    if TORCH < (2, 7):
        pairs = [names for names in pairs if "FSDP2" not in names]  # it leaves out no parameters
    (told := tmp_path / "pairs").write_text(json.dumps(pairs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(PROGRAM), str(tmp_path), str(told)]
    done = subprocess.run(
        command, env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=300, check=False)  # fmt: skip
    results = json.loads((tmp_path / "outcomes").read_text())
    assert len(results) == len(pairs), done.stderr
    for names, result in zip(pairs, results, strict=True):
        assert_as_known(names, result, KNOWN)


def test_documentation_says_the_same() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python tests/pairs/pair_page.py"


def test_every_verdict_is_of_a_pair() -> None:
    assert_of_pairs(PAIRS, REFUSED, NOT_APPLICABLE)
