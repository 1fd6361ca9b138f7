"""The demo: its model against finite differences, its sampling against the formulas, its runs."""

import argparse
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from fusestep.examples import corpus, report, sampling, skipgram, training, word2vec
from fusestep.examples.errors import DemoError

OPTIMIZERS = training.OPTIMIZERS


def topic_text() -> str:
    """Sentences of 12 words about one of six topics, its first words more frequent than others."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, 16)
    lines = []
    for topic in rng.integers(0, 6, 600):
        words = rng.choice(15, 12, p=weights / weights.sum())
        lines.append(" ".join(f"topic{topic}_word{word}" for word in words))
    return "\n".join(lines)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(topic_text(), encoding="utf-8")
    return path


def arguments(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    word2vec.add_arguments(parser)
    return parser.parse_args(options)


def run(text: Path, output: Path, *options: str) -> int:
    common = ("--text", str(text), "--output", str(output), "--dim", "16")
    return word2vec.main(arguments(*common, *options))


def vectors(output: Path) -> dict[str, np.ndarray]:
    return load_file(output / report.VECTORS)


# -- the model ------------------------------------------------------------------------------------


def small_model() -> tuple[skipgram.SkipGram, sampling.Batch]:
    rng = np.random.default_rng(1)
    model = skipgram.SkipGram(7, 3, rng, np.float64)
    model.center.data[:] = rng.standard_normal((7, 3))
    model.context.data[:] = rng.standard_normal((7, 3))
    centers = np.array([0, 3, 3, 6, 1], np.int32)  # a duplicate, and rows that are not touched
    targets = rng.integers(0, 7, (5, 4)).astype(np.int32)
    targets[2, 2] = targets[2, 0]  # a negative that is the true neighbour
    return model, sampling.Batch(centers, targets)


@pytest.mark.parametrize("table", [0, 1])
def test_gradients_agree_with_finite_differences(table: int) -> None:
    model, batch = small_model()
    _, gradients = model.gradients(batch)
    parameter, step = model.parameters[table].data, 1e-6
    numeric = np.zeros_like(parameter)
    for place in np.ndindex(parameter.shape):
        start = float(parameter[place])
        for sign in (1, -1):
            parameter[place] = start + sign * step
            numeric[place] += sign * model.losses(batch).sum() / (2 * step)
        parameter[place] = start
    assert np.abs(numeric).max() > 0.1
    np.testing.assert_allclose(gradients[table].to_dense(), numeric, rtol=1e-7, atol=1e-8)


def test_loss_of_the_batch_is_the_mean_of_the_pairs() -> None:
    model, batch = small_model()
    losses = model.losses(batch)
    assert model.gradients(batch)[0] == pytest.approx(losses.mean())
    assert skipgram.mean_loss(model, batch, piece=2) == pytest.approx(losses.mean())


def test_loss_of_untrained_vectors_is_that_of_a_coin() -> None:
    model = skipgram.SkipGram(50, 4, np.random.default_rng(0))
    batch = sampling.Batch(np.zeros(3, np.int32), np.arange(18, dtype=np.int32).reshape(3, 6))
    np.testing.assert_allclose(model.losses(batch), 6 * np.log(2), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_logistic_loss_is_stable(dtype: type) -> None:
    margins: np.ndarray = np.array([-1e4, -30, -1, 0, 1, 30, 1e4], dtype)
    loss, derivative = skipgram.logistic_loss(margins)
    exact = np.logaddexp(0, -margins.astype(np.float64))
    tolerance = 4 * float(np.finfo(dtype).eps)
    np.testing.assert_allclose(loss, exact, rtol=tolerance, atol=1e-300)
    slope = -np.exp(-np.logaddexp(0, margins.astype(np.float64)))
    np.testing.assert_allclose(derivative, slope, rtol=10 * tolerance, atol=1e-300)
    assert loss.dtype == derivative.dtype == dtype


# -- sampling -------------------------------------------------------------------------------------


def test_frequent_words_are_thinned_out() -> None:
    counts = np.array([90_000, 9_000, 900, 100], np.int64)
    keep = sampling.keep_probabilities(counts, 1e-2)
    frequency = counts / counts.sum()
    expected = np.minimum(1, np.sqrt(1e-2 / frequency) + 1e-2 / frequency)
    np.testing.assert_allclose(keep, expected)
    assert keep[0] < keep[1] < 1 and keep[2] == keep[3] == 1
    documents = [np.repeat(np.arange(4, dtype=np.int32), counts)]
    pairs = sampling.skip_gram_pairs(documents, keep, 1, np.random.default_rng(0))
    survivors = np.bincount(pairs.centers, minlength=4) / 2  # window 1: two neighbours each
    deviation = np.sqrt(counts * keep * (1 - keep))
    assert np.all(np.abs(survivors - counts * keep) <= 5 * deviation + 1)


def test_negatives_follow_the_three_quarter_power() -> None:
    counts = np.array([5000, 700, 700, 90, 11, 2, 1], np.int64)
    exact = counts**0.75 / (counts**0.75).sum()
    n = 200_000
    drawn = sampling.NegativeSampler(counts).draw((n // 4, 4), np.random.default_rng(0))
    assert drawn.shape == (n // 4, 4) and drawn.dtype == np.int32
    observed = np.bincount(drawn.ravel(), minlength=7)
    assert np.all(np.abs(observed - n * exact) <= 5 * np.sqrt(n * exact * (1 - exact)))


@pytest.mark.parametrize("n", [1, 2, 1000])
def test_alias_table_is_exact(n: int) -> None:
    weights = np.random.default_rng(n).random(n) ** 4 + 1e-9
    share = weights * (n / weights.sum())
    threshold, alias = sampling._alias_table(share)
    total = threshold + np.bincount(alias, 1 - threshold, n)
    np.testing.assert_allclose(total, share, rtol=1e-9, atol=1e-12)


def test_pairs_of_window_one_are_the_neighbours() -> None:
    documents = [np.array([0, 1, 2], np.int32), np.array([3], np.int32), np.array([4, 5], np.int32)]
    pairs = sampling.skip_gram_pairs(documents, np.ones(6), 1, np.random.default_rng(0))
    found = sorted(zip(pairs.centers.tolist(), pairs.contexts.tolist(), strict=True))
    assert found == [(0, 1), (1, 0), (1, 2), (2, 1), (4, 5), (5, 4)]


def test_near_neighbours_are_drawn_more_often() -> None:
    n, window = 20_000, 4
    pairs = sampling.skip_gram_pairs(
        [np.arange(n, dtype=np.int32)], np.ones(n), window, np.random.default_rng(0)
    )
    distance = np.abs(pairs.centers - pairs.contexts)
    share = np.bincount(distance, minlength=window + 1)[1:] / (2 * n)
    np.testing.assert_allclose(share, [1, 0.75, 0.5, 0.25], atol=0.02)
    assert distance.max() == window


def test_batches_are_full_and_cover_every_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "SHARD_WORDS", 40)
    documents = [np.arange(start, start + 10, dtype=np.int32) for start in range(0, 100, 10)]
    stream = sampling.PairStream(documents, np.ones(100), 2, np.random.default_rng(0))
    batches = stream.batches(32)
    seen = [next(batches) for _ in range(20)]
    assert {len(batch.centers) for batch in seen} == {32}
    assert set(np.concatenate([batch.centers for batch in seen])) == set(range(100))
    assert stream.expected_pairs_per_epoch() == 300


def test_batches_end_where_there_are_no_pairs() -> None:
    lonely = [np.array([word], np.int32) for word in range(5)]
    stream = sampling.PairStream(lonely, np.ones(5), 2, np.random.default_rng(0))
    assert list(stream.batches(4)) == []


# -- the corpus -----------------------------------------------------------------------------------


def test_vocabulary_is_sorted_and_rare_words_are_gone() -> None:
    documents = [["b", "a", "rare", "c"] + list("abcdefghijkl") * 3 for _ in range(40)]
    documents[3] = ["once", *documents[3]]
    built = corpus.build_corpus(documents, 2, "a test")
    assert built.words[:4] == ["a", "b", "c", "d"]
    assert "rare" in built.words and "once" not in built.words
    # "a" occurs four times in each document, of which two are held out.
    assert built.counts[0] == 4 * 38 and built.n_words == 40 * 40
    assert len(built.held_out) == 2 and len(built.train) == 38
    assert [built.words[i] for i in built.held_out[0][:4]] == ["b", "a", "rare", "c"]


def test_standard_library_has_a_large_vocabulary() -> None:
    found = corpus.read_standard_library(min_count=2)
    assert len(found.words) > 10_000 and found.words[0] == "self"
    assert len(found.held_out) >= 10
    # Zipf: the hundred most frequent words are a good part of the text.
    assert found.counts[:100].sum() > 0.2 * found.n_words


def test_words_of_any_script(tmp_path: Path) -> None:
    path = tmp_path / "greek.txt"
    line = "αβγ καφές naïve été 漢字 слово x1 _y don't 42 "
    path.write_text("\ufeff" + line * 60, encoding="utf-8")
    assert sorted(corpus.read_text(path, 2).words) == sorted(
        ["αβγ", "καφές", "naïve", "été", "漢字", "слово", "x1", "_y", "don", "t"]
    )


# -- whole runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_run(optimizer: str, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "folder"
    assert run(text, output, "--optimizer", optimizer, "--learning-rate", "0.02", "--alone") == 0
    out, err = capfd.readouterr()
    assert "words that are used alike" in out and "PyTorch" not in out
    assert ("* estimated from 5 such steps" in out) == (optimizer != "dense")
    assert "pairs/s" in err and "loss" in err
    assert sorted(path.name for path in output.iterdir()) == sorted(
        [report.CURVE, report.VECTORS, report.VOCABULARY]
    )
    assert (output / report.CURVE).read_bytes().startswith(b"\x89PNG")
    vocabulary = json.loads((output / report.VOCABULARY).read_text(encoding="utf-8"))
    tables = vectors(output)
    assert tables["center"].shape == tables["context"].shape == (len(vocabulary["words"]), 16)
    assert np.mean(nearest_topics(vocabulary["words"], tables["center"])) > 0.9


def nearest_topics(words: list[str], table: np.ndarray) -> list[bool]:
    """For every word, whether its nearest neighbour belongs to the same topic."""
    found = report.nearest_neighbours(words, table, words, 1)
    return [word.split("_")[0] == near[0].split("_")[0] for word, near in found.items()]


def trained(text: Path, **changes: Any) -> tuple[training.Trainer, training.History]:
    settings = replace(training.Settings(dim=16, pairs=40_000), **changes)
    trainer = training.Trainer(corpus.read_text(text, 2), settings)
    return trainer, trainer.train(lambda _: None)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_held_out_loss_falls(optimizer: str, text: Path) -> None:
    _, history = trained(text, optimizer=optimizer, learning_rate=0.002)
    first, last = history.held_out[0], history.held_out[-1]
    assert (first.pairs, first.seconds) == (0, 0) and first.loss > 3.5
    assert last.loss < first.loss - 0.5
    assert history.pairs <= 40_000 and not history.stopped
    assert 0 < history.optimizer_seconds < history.seconds


def test_the_estimate_for_dense_gradients_leaves_the_tables_alone(text: Path) -> None:
    trainer, history = trained(text, pairs=5_000)
    before = [table.data.tobytes() for table in trainer.model.parameters]
    assert 0 < trainer.dense_seconds() < 1e3 * history.seconds
    assert [table.data.tobytes() for table in trainer.model.parameters] == before


def test_training_ends_when_nothing_is_learned_any_more(text: Path) -> None:
    trainer, history = trained(text, pairs=1_000_000, learning_rate=0.05)
    assert "held-out loss" in history.stopped
    assert history.pairs < trainer.planned_pairs
    *earlier, first, second, third = (measured.loss for measured in history.held_out)
    assert min(earlier) < min(first, second, third)
    # The tables are those of the lowest loss.
    assert skipgram.mean_loss(trainer.model, trainer.held_out) == min(earlier) == history.best.loss


def test_guesses_by_frequency_are_the_best_scores_of_targets_alone(text: Path) -> None:
    trainer, history = trained(text, pairs=20_000, learning_rate=0.02)
    guess = trainer.guess_loss()
    assert history.best.loss < guess < history.held_out[0].loss
    # By hand: two words of equal shares score log(1 / K), as true ones and as negatives.
    batch = sampling.Batch(np.array([0], np.int32), np.array([[0, 1, 1]], np.int32))
    half = np.full(2, 0.5)
    by_hand = -np.log(1 / 3) - 2 * np.log(2 / 3)
    assert skipgram.mean_guess_loss(batch, half, half) == pytest.approx(by_hand)
    never = skipgram.mean_guess_loss(batch, np.array([1.0, 0.0]), half)
    assert never == pytest.approx(-np.log(0.5))  # negatives that are never neighbours cost nothing


def test_vectors_with_torch(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same batches, the same losses; a short run of both is compared line by line."""
    pytest.importorskip("torch")
    _, ours = trained(text, pairs=20_000)
    _, theirs = trained(text, pairs=20_000, optimizer=training.TORCH)
    assert [m.pairs for m in ours.held_out] == [m.pairs for m in theirs.held_out]
    losses = np.array([[m.loss for m in history.held_out] for history in (ours, theirs)])
    np.testing.assert_allclose(*losses, rtol=1e-3)
    assert run(text, tmp_path, "--pairs", "20000") == 0
    out = capsys.readouterr().out
    assert "fusestep LazyAdam" in out and "PyTorch SparseAdam" in out


def test_a_torch_step_ends_where_ours_ended(text: Path) -> None:
    pytest.importorskip("torch")
    settings = training.Settings(dim=16, pairs=40_000, optimizer=training.TORCH)
    trainer = training.Trainer(corpus.read_text(text, 2), settings)
    assert len(trainer.train(lambda _: None, steps=7).losses) == 7


def test_same_seed_same_vectors(text: Path) -> None:
    def table(seed: int) -> np.ndarray:
        return np.array(trained(text, pairs=5_000, seed=seed)[0].model.center)

    assert table(3).tobytes() == table(3).tobytes()
    assert table(3).tobytes() != table(4).tobytes()


def test_threads_do_not_change_the_vectors(text: Path, tmp_path: Path) -> None:
    for threads in ("1", "2"):
        options = ("--threads", threads, "--pairs", "5000", "--optimizer", "fused")
        assert run(text, tmp_path / threads, *options) == 0
    one, two = (vectors(tmp_path / threads)["center"] for threads in ("1", "2"))
    assert one.tobytes() == two.tobytes()


def test_row_sparse_and_dense_gradients_give_the_same_vectors(text: Path) -> None:
    fused, dense = (
        np.array(trained(text, pairs=5_000, optimizer=optimizer)[0].model.center)
        for optimizer in ("fused", "dense")
    )
    np.testing.assert_allclose(fused, dense, rtol=0, atol=1e-3 * np.abs(dense).max())


def test_ctrl_c_keeps_what_was_learned(text: Path) -> None:
    trainer = training.Trainer(corpus.read_text(text, 2), training.Settings(dim=8, pairs=40_000))

    def interrupt_third(history: training.History) -> None:
        if len(history.losses) == 3:
            signal.raise_signal(signal.SIGINT)

    history = trainer.train(interrupt_third)
    assert history.stopped == "interrupted" and len(history.losses) == 3
    assert history.held_out[-1].pairs == history.pairs
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_ctrl_c_interrupts(text: Path) -> None:
    def interrupt(_: training.History) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    trainer = training.Trainer(corpus.read_text(text, 2), training.Settings(dim=8, pairs=40_000))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(interrupt)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_elsewhere_gives_one_line(text: Path, tmp_path, capsys, monkeypatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(word2vec, "read_corpus", interrupted)
    assert run(text, tmp_path / "out") == 130
    assert capsys.readouterr().err == "fusestep demo: interrupted\n"


def test_time_limit_stops_the_training(text: Path, tmp_path, capsys) -> None:
    assert run(text, tmp_path / "out", "--time-limit", "1e-9") == 0
    assert "time limit" in capsys.readouterr().out


# -- errors: one line, nothing else ---------------------------------------------------------------

TEXTS: dict[str, tuple[bytes | None, str]] = {
    "empty": (b" \n\t", "is empty"),
    "binary": (b"\x7fELF\0\1\2" * 500, "is a binary file"),
    "latin1": (b"caf\xe9 " * 500, "is not text in UTF-8 (byte 3)"),
    "short": (b"to be or not to be", "is too short to train on"),
    "monotonous": (b"ha " * 5000, "is too short to train on"),
    "numbers": (b"1 2 3 4 5 " * 500, "is too short to train on"),
    "missing": (None, "cannot read"),
    ".": (None, "cannot read"),  # a folder
    "": (None, "--text"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_bad_texts(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, expected = TEXTS[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    args = arguments("--text", name and str(tmp_path / name), "--output", str(tmp_path / "out"))
    assert_one_line(word2vec.main(args), capsys, expected)
    assert not (tmp_path / "out").exists()


def test_text_that_is_cut_inside_of_a_character(text: Path, monkeypatch) -> None:
    text.write_text("é" + topic_text() + "é", encoding="utf-8")
    monkeypatch.setattr(corpus, "MAX_TEXT_BYTES", text.stat().st_size - 1)
    found = corpus.read_text(text, 2)
    assert found.n_words > 5000
    assert "its first" in found.source


def test_output_that_cannot_be_written(text: Path, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(word2vec, "Trainer", None)  # it must not come to the training
    occupied = tmp_path / "file"
    occupied.write_text("here is a file, no folder")
    assert_one_line(run(text, occupied), capsys, "--output: cannot write")
    assert_one_line(run(text, occupied / "below"), capsys, "--output: cannot write")


@pytest.mark.skipif(os.name == "nt", reason="no named pipes of this kind")
@pytest.mark.parametrize("name", [report.VECTORS, report.VOCABULARY, report.CURVE])
def test_pipe_in_the_place_of_a_result(
    name: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(word2vec, "Trainer", None)  # it must not come to the training
    os.mkfifo(tmp_path / name)
    assert_one_line(run(text, tmp_path), capsys, f"{name} is a named pipe: expected a regular file")
    assert [path.name for path in tmp_path.iterdir() if path != text] == [name]


@pytest.mark.parametrize("library", ["tqdm", "matplotlib"])
def test_missing_library(library: str, text: Path, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    expected = f'needs {library}: install it with pip install "fusestep[demo]"'
    assert_one_line(run(text, tmp_path / "out"), capsys, expected)


def test_no_sources_of_the_standard_library(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DemoError, match="--text"):
        corpus.read_standard_library(2)


def assert_one_line(status: int, capsys: pytest.CaptureFixture[str], expected: str) -> None:
    out, err = capsys.readouterr()
    assert status == 2
    assert expected in err
    assert out == ""
    assert err.startswith("fusestep demo: ") and err.count("\n") == 1


@pytest.mark.parametrize(("options", "expected"), [
    (("--dim", "0"), "expected a whole number from 1 to"), (("--dim", "many"), "got 'many'"),
    (("--pairs", "-5"), "expected a whole number from 1 up, got '-5'"),
    (("--seed", "-1"), "expected a whole number from 0 up"), (("--threads", "1.5"), "got '1.5'"),
    (("--learning-rate", "nan"), "expected a number above 0"),
    (("--learning-rate", "0"), "expected a number above 0"),
    (("--time-limit", "inf"), "expected a number above 0"),
    (("--optimizer", "sgd"), "invalid choice: 'sgd'"),
])  # fmt: skip
def test_bad_options(options: tuple[str, ...], expected: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        arguments(*options)
    assert stop.value.code == 2
    assert expected in capsys.readouterr().err
