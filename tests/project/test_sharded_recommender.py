"""The example of a recommender whose tables several processes own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from fusestep import set_num_threads
from fusestep.examples import recommender, sharded_recommender
from fusestep.examples.options import Parser
from subprocesses import ENVIRONMENT

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="torch.distributed without gloo",
)
# A batch that two processes do not divide.
SMALL = "--quick", "--batch", "63", "--rows", "300", "--dim", "4", "--float64", "--threads", "1"


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    """What a run in this process changes is as before after it."""
    of_torch = torch.get_num_threads()
    yield
    set_num_threads(None)
    torch.set_num_threads(of_torch)


def run_two(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone",
         "--nproc-per-node=2", "-m", "fusestep.examples.sharded_recommender", *options],
        env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False)  # fmt: skip


def trained(n: int, folder: Path, steps: int, resume: str | None = None) -> dict[str, Any]:
    """The figures of a run of one process or two, which leaves a checkpoint."""
    options = [*SMALL, "--steps", str(steps), "--output", str(folder), "--checkpoint", str(folder)]
    options += ["--resume", str(folder.with_name(resume))] if resume else []
    if n == 1:
        assert sharded_recommender.main(options) == 0
    else:
        done = run_two(*options)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("AUC  ") == 1  # one process speaks
    found: dict[str, Any] = json.loads((folder / sharded_recommender.FIGURES).read_text())
    assert found["machine"]["processes"] == n
    return {**found, **found["runs"][sharded_recommender.WHO]}


def test_two_processes_and_one_that_goes_on(tmp_path: Path) -> None:
    """The losses of one process; the AUC at step 4 is of the saved model and of the loaded one."""
    one, two = trained(1, tmp_path / "one", 6), trained(2, tmp_path / "two", 4)
    assert two["losses"] == pytest.approx(one["losses"][:4], rel=1e-12)
    assert two["auc"]["0"] == pytest.approx(one["auc"]["0"], rel=1e-12)
    (of_one,), parts = one["bytes_of_tables"], two["bytes_of_tables"]
    assert sum(parts) == of_one and max(parts) < 0.51 * of_one
    assert len([*(tmp_path / "two").glob("*.distcp")]) == 2

    on_one = trained(1, tmp_path / "on_one", 6, "two")
    assert on_one["losses"][:4] == two["losses"] and on_one["auc"]["4"] == two["auc"]["4"]
    assert on_one["losses"] == pytest.approx(one["losses"], rel=1e-12)
    assert on_one["auc"]["6"] == pytest.approx(one["auc"]["6"], rel=1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("n", [1, 2])
def test_as_many_go_on_with_the_same_bits_and_others_but_for_roundings(n: int, tmp_path) -> None:
    whole, _ = trained(n, tmp_path / "whole", 6), trained(n, tmp_path / "half", 4)
    same = trained(n, tmp_path / "same", 6, "half")
    assert same["losses"] == whole["losses"] and same["auc"]["6"] == whole["auc"]["6"]
    others = trained(3 - n, tmp_path / "others", 6, "half")
    assert others["losses"] == pytest.approx(whole["losses"], rel=1e-12)


# -- errors: one line, nothing else ---------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """What is looked at before anything is loaded."""
    settings = vars(recommender.settings_of(arguments("--quick")))
    run = {"losses": [0.7] * settings["steps"], "auc": {"0": 0.5}}
    found = {"settings": settings, "runs": {sharded_recommender.WHO: run}}
    (tmp_path / sharded_recommender.RUN).write_text(json.dumps(found))
    return tmp_path


def arguments(*options: str) -> Any:
    parser = Parser(prog="recommender")
    recommender.add_shared(parser)
    return parser.parse_args(options)


@pytest.mark.parametrize(("options", "expected"), [
    (("--rows", "none"), "argument --rows: expected a whole number from 1"),
    (("--single",), "unrecognized arguments: --single"),
    (("--resume", "{}/nowhere"), "nowhere' has no checkpoint"),
    (("--resume", "{}"), "expected more than the 120 of the checkpoint, got 120"),
    (("--resume", "{}", "--batch", "7", "--steps", "130"), "batch was 512, now it is 7"),
    (("--checkpoint", "{}"), "has a checkpoint already"),
    (("--checkpoint", "{}/run.json"), "--checkpoint: cannot write to"),
    (("--output", "{}/run.json"), "--output: cannot write to"),
    (("--rows", "100000000", "--dim", "1024"), "tables and states need"),
])  # fmt: skip
def test_wrong_options(options: tuple[str, ...], expected: str, checkpoint: Path, capsys) -> None:
    given = ["--quick", "--output", str(checkpoint / "results")]
    assert sharded_recommender.main([*given, *(x.format(checkpoint) for x in options)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and expected in err
    assert err.startswith("sharded_recommender: ") and err.count("\n") == 1


def test_wrong_option_of_two_processes() -> None:
    """The first one says it; what follows is from torchrun."""
    done = run_two("--rows", "none")
    assert done.returncode == 1 and done.stdout == ""
    said = [line for line in done.stderr.splitlines() if line.startswith("sharded_recommender: ")]
    assert len(said) == 1 and "got 'none'" in said[0]
    assert "exitcode  : 2" in done.stderr  # torchrun ends the other one, if it is slower
