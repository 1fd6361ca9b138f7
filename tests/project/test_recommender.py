"""The example of a recommender: its click log, its model, its runs, and what it says."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fusestep import set_num_threads
from fusestep.examples import recommender
from fusestep.examples.click_model import clicks
from fusestep.examples.click_model import runs as click_runs
from fusestep.examples.options import Parser
from subprocesses import ENVIRONMENT, output_of

NAMES = ["torch.optim", "fusestep", "fusestep, EmbeddingBags"]
PNG = b"\x89PNG"
# Two threads of PyTorch wait for each other at every turn where other tests have the cores.
ALONE = ("--threads", "1")


@pytest.fixture
def threads() -> Iterator[None]:
    """What a run in this process changes is as before after it."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    of_torch = torch.get_num_threads()
    yield
    set_num_threads(None)
    torch.set_num_threads(of_torch)


def arguments(*options: str) -> Any:
    parser = Parser(prog="recommender")
    recommender.add_arguments(parser)
    return parser.parse_args(options)


# -- the click log --------------------------------------------------------------------------------


def small_log(seed: int = 0) -> clicks.ClickLog:
    return clicks.ClickLog(clicks.table_sizes(5000), seed)


def test_same_seed_and_number_same_clicks() -> None:
    def digest(seed: int, number: int) -> list[bytes]:
        return [array.tobytes() for array in small_log(seed).batch(number, 64)]

    first = digest(0, 0)
    assert digest(0, 0) == first
    assert not set(digest(0, 1)) & set(first) and not set(digest(1, 0)) & set(first)
    assert not {array.tobytes() for array in small_log().held_out(64)} & set(first)


@pytest.mark.parametrize("largest", [1, 7, 5000])
def test_ids_lie_in_their_tables(largest: int) -> None:
    sizes = clicks.table_sizes(largest)
    batch = clicks.ClickLog(sizes, 0).batch(0, 3000)
    assert len(sizes) == clicks.N_TABLES and max(sizes) == largest
    assert batch.ids.shape == (clicks.N_TABLES, 3000) and batch.dense.shape == (3000, 13)
    assert (batch.ids >= 0).all() and (batch.ids.max(axis=1) < sizes).all()


def test_ids_follow_zipfs_law() -> None:
    size, n = 5000, 200_000
    log = clicks.ClickLog(clicks.table_sizes(size), 0)
    counts = np.bincount(log.batch(0, n).ids[-1], minlength=size)
    borders = np.arange(1, size + 2) ** (1 - clicks.EXPONENT)
    share = (borders[:-1] - borders[1:]) / (borders[0] - borders[-1])
    deviation = np.sqrt(n * share)
    ranked = np.sort(counts)[::-1]
    assert np.all(np.abs(ranked - n * share)[:20] < 5 * deviation[:20])
    # Each row belongs to one rank: frequent ones lie apart.
    assert np.count_nonzero(counts) > 0.9 * size
    assert abs(int(counts.argmax()) - int(np.argsort(counts)[-2])) > 100


def test_clicks_follow_the_hidden_model() -> None:
    found = small_log().held_out(50_000)
    assert set(np.unique(found.labels)) == {0, 1}
    assert found.labels.mean() == pytest.approx(clicks.CLICK_RATE, abs=0.02)
    rates = 1 / (1 + np.exp(-found.log_odds.astype(np.float64)))
    for part in np.array_split(np.argsort(rates), 8):
        tolerance = 5 * np.sqrt(rates[part].mean() / len(part))
        assert found.labels[part].mean() == pytest.approx(rates[part].mean(), abs=tolerance)
    assert rates.std() > 0.1


def test_log_odds_are_those_of_a_factorization_machine() -> None:
    log = small_log()
    batch = log.batch(0, 5)
    for b in range(5):
        rows = list(log._hidden[log._first[:, 0] + batch.ids[:, b]])
        rows.append(batch.dense[b] @ log._of_dense)
        products = [x[1:] @ y[1:] for i, x in enumerate(rows) for y in rows[:i]]
        expected = float(log._bias) + sum(float(row[0]) for row in rows) + float(sum(products))
        assert batch.log_odds[b] == pytest.approx(expected, abs=1e-5)


# -- the report -----------------------------------------------------------------------------------


def made_up(name: str, shift: float) -> click_runs.Run:
    run = click_runs.Run(name, "an optimizer", [0.7, 0.5 + shift, 0.4], {0: 0.5, 3: 0.75})
    for part, ms in zip(click_runs.PARTS, (10, 20, 10), strict=True):
        run.seconds[part] = [1.0, 1e-3 * ms, 1e-3 * ms]
    return run


def test_report_of_made_up_runs() -> None:
    one, other = made_up("torch.optim", 0.0), made_up("fusestep", 0.25)
    other.seconds["optimizer"] = [1.0, 0.005, 0.005]
    said = "\n".join(click_runs.report([one, other, made_up("bags", 0.5)], 0.9))
    assert "0.7500 of held-out clicks, 0.5000 untrained; the hidden model has 0.9000" in said
    assert "40.00 ms (forward 10.00, backward 20.00, optimizer 10.00; medians)" in said
    assert "25% of an iteration; its first step took 1000 ms" in said
    assert (
        "fusestep beside torch.optim:\n  differences of the losses of a batch: largest 0.25, "
        in said
    )
    assert "largest 0.25, mean 0.083" in said
    assert "2.00 x the speed in the optimizer, 1.14 x in all" in said
    assert said.endswith("1.00 x the speed in the optimizer, 1.00 x in all")
    assert "bags beside torch.optim:\n  differences of the losses of a batch: largest 0.5, " in said


# -- the model and its training -------------------------------------------------------------------


def test_model_computes_products_of_all_pairs() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from fusestep.examples.click_model.dlrm import DLRM

    torch.manual_seed(0)
    model = DLRM([4, 5, 6], 3)
    dense, ids = torch.randn(7, clicks.N_DENSE), torch.randint(0, 4, (3, 7))
    with torch.no_grad():
        for b in range(7):
            bottom = model.bottom(dense[b])
            rows = [table.weight[own[b]] for table, own in zip(model.tables, ids, strict=True)]
            vectors = [bottom, *rows]
            products = [x @ y for i, x in enumerate(vectors) for y in vectors[:i]]
            expected = model.top(torch.cat([bottom, torch.stack(products)]))
            torch.testing.assert_close(model(dense, ids)[b], expected[0])


def test_the_step_in_backward_is_the_optimizers() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from fusestep.examples.click_model.training import BagTraining

    settings = click_runs.Settings(batch=8, rows=20)
    training = BagTraining(click_runs.Run("bags", "an optimizer"), settings)
    before = [table.weight.detach().clone() for table in training._model.tables.children()]
    training.step(clicks.ClickLog(clicks.table_sizes(20), 0).batch(0, 8))
    begin, end = training._step
    assert 0.0 < begin < end
    assert all(seconds[0] > 0 for seconds in training.run.seconds.values())
    assert training.run.seconds["optimizer"][0] > end - begin
    for table, was in zip(training._model.tables.children(), before, strict=True):
        assert not table.weight.equal(was)
    training._step = [4.0, 6.0]
    assert training._parts([0.0, 3.0, 10.0, 11.0]) == [3.0, 5.0, 3.0]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("options", "optimizers"),
    [((), "SparseAdam and Adam"), (("--single",), 'one Adam(sparse="touched")')],
)
def test_runs_with_either_library_agree(
    options: tuple[str, ...], optimizers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """In float64 to the last digits, so what differs in float32 are roundings that grow."""
    small = ("--quick", "--steps", "20", "--batch", "128", "--rows", "1000", "--float64", *ALONE)
    assert recommender.main(arguments(*small, *options, "--output", str(tmp_path))) == 0
    found = json.loads((tmp_path / recommender.FIGURES).read_text())
    assert list(found["differences_of_losses"]) == NAMES[1:]
    assert all(of["largest"] < 1e-12 for of in found["differences_of_losses"].values())
    assert found["runs"]["fusestep"]["optimizers"] == optimizers
    assert "x the speed in the optimizer" in capsys.readouterr().out


@pytest.mark.usefixtures("threads")
def test_tables_that_grow_learn_as_a_known_vocabulary(tmp_path, capsys) -> None:
    """The same losses to the last bit; fewer rows are used, and half of the ids come late."""
    small = ("--quick", "--steps", "12", "--batch", "128", "--rows", "3000", *ALONE)
    assert recommender.main(arguments(*small, "--hashed-ids", "--output", str(tmp_path))) == 0
    found = json.loads((tmp_path / recommender.FIGURES).read_text())
    known, growing, fewer, hashing = found["runs"].values()
    assert known["losses"] == growing["losses"] and fewer["losses"] != hashing["losses"]
    rows = [[*run["rows"].values()] for run in (known, growing, fewer, hashing)]
    assert growing["rows"]["0"] == fewer["rows"]["0"] == 0
    assert rows[2][-1] < rows[1][-1] < rows[0][-1] and rows[3][-1] < rows[0][-1]
    assert rows[1] == sorted(rows[1])
    assert "in use" in capsys.readouterr().out
    early, late = (
        clicks.ClickLog(clicks.table_sizes(3000), 0, late_from=1).batch(k, 99).ids for k in (0, 1)
    )
    assert not (early % 2).any() and (late % 2).any()


def test_quick_run(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    done = run_example("--quick", *ALONE, "--output", str(tmp_path / "new" / "folder"))
    assert done.returncode == 0, done.stderr
    assert "largest" in done.stdout and "steps" in done.stderr
    folder = tmp_path / "new" / "folder"
    names = recommender.CURVES, recommender.FIGURES
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert (folder / recommender.CURVES).read_bytes().startswith(PNG)
    found = json.loads((folder / recommender.FIGURES).read_text())
    assert found["settings"] == vars(click_runs.QUICK)
    assert all(of["largest"] < 0.02 for of in found["differences_of_losses"].values())
    assert list(found["runs"]) == NAMES
    for run in found["runs"].values():
        assert len(run["losses"]) == click_runs.QUICK.steps
        untrained, *auc = run["auc"].values()
        assert 0.4 < untrained < 0.6 < min(auc) and auc == sorted(auc)
        assert auc[-1] < found["auc_of_the_hidden_model"]
        assert all(ms > 0 for ms in run["median_ms"].values())


def run_example(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-P", "-m", "fusestep.examples.recommender", *options]
    return subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )


# -- errors: one line, nothing else ---------------------------------------------------------------


@pytest.mark.parametrize(("options", "expected"), [
    (("--dim", "0"), "--dim: expected a whole number from 1 to"),
    (("--rows", "many"), "got 'many'"),
    (("--steps", "0"), "expected a whole number from 1 up, got '0'"),
    (("--batch", "1.5"), "got '1.5'"), (("--seed", "-1"), "expected a whole number from 0 up"),
    (("--threads", "0"), "expected a whole number from 1 up"),
    (("--slow",), "unrecognized arguments: --slow"),
])  # fmt: skip
def test_bad_options(options: tuple[str, ...], expected: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        arguments(*options)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert expected in error and error.count("\n") == 1


def test_bad_option_of_a_process() -> None:
    done = run_example("--rows", "none")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("recommender: argument --rows: expected a whole number")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("module", recommender.NEEDED)
def test_missing_library(module: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(recommender, "NEEDED", {module: recommender.NEEDED[module]})
    monkeypatch.setitem(sys.modules, module, None)
    expected = f"needs {recommender.NEEDED[module]}: install it with pip install "
    assert_one_line(capsys, expected + '"fusestep[torch,demo]"')


def test_tables_that_no_machine_can_hold(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    options = "--rows", str(recommender.MOST_ROWS), "--dim", str(recommender.MOST_DIM)
    assert_one_line(capsys, "--rows, --dim: tables and states need", *options)


def test_output_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "file").write_text("here is a file, no folder")
    options = "--output", str(tmp_path / "file")
    assert_one_line(capsys, "--output: cannot write", *options)


def assert_one_line(capsys: pytest.CaptureFixture[str], expected: str, *options: str) -> None:
    assert recommender.main(arguments(*options)) == 2
    out, err = capsys.readouterr()
    assert out == "" and expected in err
    assert err.startswith("recommender: ") and err.count("\n") == 1


def test_torch_is_imported_by_a_run_only() -> None:
    program = "import sys, fusestep.examples.recommender; print('torch' in sys.modules)"
    assert output_of(program).strip() == "False"
