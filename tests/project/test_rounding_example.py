"""Examples that train models in several ways: weights of 16 bits, and rows that sleep."""

import json
import sys
from typing import Any

import pytest
from fusestep import set_num_threads
from fusestep.examples import catch_up, rounding
from fusestep.examples.options import Parser

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


def arguments(*options: str) -> Any:
    parser = Parser(prog="rounding")
    rounding.add_arguments(parser)
    return parser.parse_args(options)


def test_all_models_are_trained_in_each_way(tmp_path, monkeypatch, capsys) -> None:
    """Two steps from the same weights on the same batches."""
    monkeypatch.setattr(rounding, "QUICK_STEPS", 2)
    study = rounding.STUDY._replace(ways={"float32": {}, "stochastic": {"rounding": "stochastic"}})
    threads = torch.get_num_threads()
    options = "--quick", "--seeds", "2", "--threads", "1", "--output", str(tmp_path / "new")
    assert rounding.main(arguments(*options), study) == 0
    set_num_threads(None)
    torch.set_num_threads(threads)
    losses = json.loads((tmp_path / "new" / "rounding.json").read_text())["losses"]
    assert (tmp_path / "new" / "rounding.png").read_bytes().startswith(b"\x89PNG")
    for by_way in losses.values():
        for wide, narrow in zip(*by_way.values(), strict=True):
            assert wide["2"] < wide["0"] == pytest.approx(narrow["0"], rel=1e-2)
            assert narrow["2"] < narrow["0"]
    wide, narrow = losses["transformer"].values()
    assert wide[0]["2"] != narrow[0]["2"] and wide[0]["2"] != wide[1]["2"]
    assert "recommender: held-out loss" in capsys.readouterr().out


def test_catch_up_is_dense_adam(tmp_path, monkeypatch, capsys) -> None:
    """A few steps: the losses of every row's steps, which lazy ones do not have."""
    monkeypatch.setattr(rounding, "QUICK_STEPS", 6)
    threads = torch.get_num_threads()
    options = "--quick", "--seeds", "2", "--threads", "1", "--output", str(tmp_path)
    assert catch_up.main(arguments(*options)) == 0
    set_num_threads(None)
    torch.set_num_threads(threads)
    losses = json.loads((tmp_path / "catch_up.json").read_text())["losses"]
    assert (tmp_path / "catch_up.png").read_bytes().startswith(b"\x89PNG")
    for every, asleep, lazy in (by_way.values() for by_way in losses.values()):
        for mine, theirs, other in zip(asleep, every, lazy, strict=True):
            assert mine["6"] == pytest.approx(theirs["6"], rel=1e-6)
            assert abs(other["6"] - theirs["6"]) > 4 * abs(mine["6"] - theirs["6"])
    assert "word vectors: held-out loss" in capsys.readouterr().out


def test_a_seed_gives_the_same_losses_again() -> None:
    from fusestep.examples.rounded_models import recommender, train

    def run(seed: int) -> dict[int, float]:
        return train(recommender(seed), {"rounding": "stochastic"}, seed, 2, lambda: None)

    assert run(0) == run(0) != run(1)


def test_distances_are_in_spreads_of_seeds() -> None:
    losses = {"float32": [{0: 9.0, 5: 1.0}, {0: 9.0, 5: 2.0}], "kahan": [{5: 1.5}, {5: 3.0}]}
    assert rounding.compared(losses) == {"float32": (1.5, 0.0), "kahan": (2.25, 0.75)}


def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "file").write_text("here is a file, no folder")
    assert rounding.main(arguments("--output", str(tmp_path / "file"))) == 2
    with pytest.raises(SystemExit):
        arguments("--seeds", "1")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert rounding.main(arguments("--output", str(tmp_path))) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["rounding"] * 3
    assert "cannot write" in lines[0] and "from 2 up" in lines[1] and "matplotlib" in lines[2]
