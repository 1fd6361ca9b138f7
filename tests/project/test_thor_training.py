"""THOR trains: the example in miniature, its nets, and its runs."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fusestep.examples import thor_digits
from helpers import more
from thor_nets import random

pytest.importorskip("scipy", reason="the factors are inverted by scipy's LAPACK")


def net_of(name: str, seed: int = 0) -> thor_digits.Classifier:
    return thor_digits.Classifier(thor_digits.NETS[name], seed)


def taught(n: int, seed: int = 0) -> thor_digits.Digits:
    """Noise whose pixels differ in size by a factor of 20, labelled by a random net."""
    images = random(seed).standard_normal((n, 1, 8, 8)).astype(np.float32)
    labels = net_of("mlp", seed + 7).scores(images).argmax(axis=1)
    size = np.geomspace(0.05, 1.0, 64).reshape(8, 8).astype(np.float32)
    return thor_digits.Digits(images * size, labels)


@pytest.mark.parametrize("name", thor_digits.NETS)
def test_gradients_of_the_nets(name: str) -> None:
    """Against central differences, in the directions of the gradients themselves."""
    net, digits = net_of(name), taught(12)
    gradients = net.gradients(digits.images, digits.labels)
    for parameter, gradient in zip(net.parameters, gradients, strict=True):
        length = float(np.linalg.norm(gradient))
        assert gradient.shape == parameter.shape
        assert length > 0
        start, change = parameter.data.copy(), np.float32(0.02) * gradient / np.float32(length)
        losses = []
        for sign in (1, -1):
            parameter.data[...] = start + np.float32(sign) * change
            losses.append(net.loss(digits.images, digits.labels))
        parameter.data[...] = start
        assert (losses[0] - losses[1]) / 0.04 == pytest.approx(length, rel=0.03)


@pytest.mark.parametrize("seed", [0, more(1)])
@pytest.mark.parametrize("name", thor_digits.NETS)
def test_half_the_steps_of_the_best_momentum(name: str, seed: int, monkeypatch) -> None:
    digits, target = taught(256, seed), 0.05
    monkeypatch.setattr(thor_digits, "TARGET", target)
    monkeypatch.setattr(thor_digits, "MOST_STEPS", 150)
    if name == "convnet":  # the neighbours of what is best in the whole grid
        monkeypatch.setattr(thor_digits, "LEARNING_RATES", (0.2, 0.5, 1.0))
        monkeypatch.setattr(thor_digits, "MOMENTA", (0.9, 0.95))
    momentum = thor_digits.best_momentum(name, digits, seed)
    thor = thor_digits.thor_run(name, digits, seed)
    assert momentum.steps is not None
    assert thor.steps is not None
    assert 2 * thor.steps <= momentum.steps
    assert thor.losses[-1] < target <= min(thor.losses[:-1])


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    thor_digits.add_arguments(parser)
    return parser.parse_args(given)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thor_digits, "read_digits", lambda: taught(128))
    monkeypatch.setattr(thor_digits, "LEARNING_RATES", (0.2, 1e4))
    monkeypatch.setattr(thor_digits, "MOMENTA", (0.9,))
    monkeypatch.setattr(thor_digits, "TARGET", 0.5)


@pytest.mark.usefixtures("short")
def test_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert thor_digits.main(options("--output", str(tmp_path / "new"))) == 0
    assert capsys.readouterr().out.count("of the steps of the best Momentum") == 2
    figures = json.loads((tmp_path / "new" / thor_digits.FIGURES).read_text())
    assert list(figures) == ["mlp", "convnet"]
    for runs in figures.values():
        assert all(len(run["losses"]) == run["steps"] for run in runs.values())


@pytest.mark.usefixtures("short")
def test_example_is_deterministic(tmp_path: Path) -> None:
    for name in "ab":
        assert thor_digits.main(options("--net", "mlp", "--output", str(tmp_path / name))) == 0
    a, b = (tmp_path / name / thor_digits.FIGURES for name in "ab")
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize(
    ("missing", "text"), [("scipy", "needs scipy"), ("sklearn", "needs scikit")])  # fmt: skip
def test_what_is_missing_is_named(missing: str, text: str, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "sklearn":
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert thor_digits.main(options()) == 2
    error = capsys.readouterr().err
    assert text in error
    assert 'pip install "fusestep[demo,thor]"' in error


@pytest.mark.usefixtures("short")
def test_a_folder_that_cannot_be_written(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert thor_digits.main(options("--output", str(tmp_path / "file" / "x"))) == 2
    assert "thor_digits: --output: cannot write to" in capsys.readouterr().err


def test_a_target_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thor_digits, "MOMENTA", (0.9,))
    for name, value in (("LEARNING_RATES", (0.1,)), ("TARGET", 1e-9), ("MOST_STEPS", 3)):
        monkeypatch.setattr(thor_digits, name, value)
    with pytest.raises(thor_digits.DemoError, match="no setting of Momentum reaches a loss"):
        thor_digits.best_momentum("mlp", taught(32), 0)


def test_digits_are_those_of_scikit_learn() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    digits = thor_digits.read_digits()
    assert digits.images.shape == (1797, 1, 8, 8)
    assert digits.images.dtype == np.float32
    assert abs(float(digits.images.mean())) < 1e-6
    assert set(digits.labels.tolist()) == set(range(10))
