"""What the demo leaves behind: neighbours of words, the loss curve, the vectors."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import save as to_safetensors

from ..kernels.files import check_target
from ..nn.base.checkpoint import replace_file
from .corpus import Corpus
from .errors import DemoError
from .skipgram import FloatArray, SkipGram
from .training import History

VECTORS, VOCABULARY, CURVE = "vectors.safetensors", "vocabulary.json", "loss.png"

# Words that a reader of Python knows; words of the text take the place of those it lacks.
QUERIES = ("width", "red", "hours", "left", "int", "encode", "first", "http", "list", "while")
N_QUERIES, N_NEIGHBOURS = 8, 6
MIN_OCCURRENCES = 50  # a word that is rarer has a vector that says little
FIRST_RANK = 30  # words more frequent than this stand next to everything
CANDIDATES = 4_000  # neighbours are looked for among the most frequent words only


def nearest_neighbours(
    words: Sequence[str], vectors: FloatArray, queries: Sequence[str], n: int = N_NEIGHBOURS
) -> dict[str, list[str]]:
    """For each query the ``n`` words whose vectors point most nearly the same way.

    Args:
        words: ``[V]`` by falling frequency.
        vectors: ``[V, D]``.
        queries: each of them one of ``words``.
        n: how many neighbours.
    """
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    direction = vectors / np.maximum(length, np.finfo(vectors.dtype).tiny)
    number = {word: index for index, word in enumerate(words)}
    chosen = np.array([number[query] for query in queries], np.int64)
    cosine = direction[chosen] @ direction[:CANDIDATES].T
    found = {}
    for query, similarity in zip(queries, cosine, strict=True):
        order = np.argsort(-similarity, kind="stable")[: n + 1]
        found[query] = [words[index] for index in order if words[index] != query][:n]
    return found


def choose_queries(corpus: Corpus) -> list[str]:
    """Those of `QUERIES` that are frequent in the text, filled up with frequent words of it."""
    frequent = corpus.words[: int(np.count_nonzero(corpus.counts >= MIN_OCCURRENCES))]
    known = set(frequent)
    preferred = [word for word in QUERIES if word in known]
    others = [word for word in frequent[FIRST_RANK:] if len(word) > 3 and word not in preferred]
    return (preferred + others)[:N_QUERIES] or corpus.words[:N_QUERIES]


def prepare_folder(folder: Path, names: Iterable[str], option: str = "--output") -> None:
    """Makes the folder that an option names and tries whether these files can be written there.

    Raises:
        DemoError: it cannot.
    """
    with _writing(folder, option):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        for name in names:
            check_target(name, folder / name)


def write_files(folder: Path, files: Mapping[str, bytes], option: str = "--output") -> None:
    """Writes files into the folder that an option names; each appears whole or not at all.

    Raises:
        DemoError: one cannot be written.
    """
    with _writing(folder, option):
        for name, content in files.items():
            replace_file(folder / name, content, name)


def save(
    folder: Path, corpus: Corpus, model: SkipGram, histories: dict[str, History], guess: float
) -> None:
    """Writes the vectors, the vocabulary and the loss curve.

    Row ``i`` of the two tables in the vector file belongs to word ``i`` of the vocabulary.

    Raises:
        DemoError: a file cannot be written.
    """
    tables = {str(table.name): np.asarray(table) for table in model.parameters}
    vocabulary = {"words": corpus.words, "counts": corpus.counts.tolist()}
    files = {
        VECTORS: to_safetensors(tables),
        VOCABULARY: json.dumps(vocabulary, ensure_ascii=False).encode(),
        CURVE: loss_curve(histories, guess),
    }
    write_files(folder, files)


@contextmanager
def _writing(folder: Path, option: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise DemoError(f"{option}: cannot write to {str(folder)!r}: {reason}") from error


def loss_curve(histories: dict[str, History], guess: float) -> bytes:
    """A PNG of the held-out loss over the seconds of training, a line for each optimizer.

    Args:
        histories: by the name of the optimizer.
        guess: the loss of guesses by frequency alone.
    """
    # Not pyplot: so it needs no display, and nobody's open figures and backend are touched.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, history in histories.items():
        _, seconds, losses = zip(*history.held_out, strict=True)
        axes.plot(seconds, losses, "o-", markersize=3, label=name)
    axes.axhline(guess, color="0.5", linestyle=":", label="guesses by frequency alone")
    axes.set(title="The same word vectors", xlabel="seconds of training")
    axes.set_ylabel("held-out loss per pair (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    png = io.BytesIO()
    figure.savefig(png, format="png")  # drawn by the Agg backend
    return png.getvalue()
