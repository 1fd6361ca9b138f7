"""Text to numbers: finds the sources, cuts them into words, builds the vocabulary."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import not_
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import DemoError

WORD = re.compile(r"[^\W\d]\w*")  # names and words of any script; no numbers, no punctuation
HOLD_OUT_EVERY = 20  # one document in 20 is never trained on
MAX_TEXT_BYTES = 32 << 20  # more than one run can use, and it has to fit in memory as words
MIN_WORDS, MIN_VOCABULARY = 400, 10

# Not part of every installation, or not prose and programs: third-party packages differ from one
# machine to the next, many distributions ship the tests separately (and assertEqual would drown
# everything else), encodings holds generated tables (LATIN SMALL LETTER A WITH ...).
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
)


@dataclass(frozen=True)
class Corpus:
    """A text as word numbers, 0 for the most frequent word.

    Attributes:
        source: what was read, for the reader of the report.
        words: ``[V]`` the vocabulary, by falling frequency.
        counts: ``[V]`` how often each word occurs in the documents to learn from.
        train: the documents to learn from, an ``[T]`` array of word numbers each.
        held_out: the documents to measure on.
    """

    source: str
    words: list[str]
    counts: NDArray[np.int64]
    train: list[NDArray[np.int32]]
    held_out: list[NDArray[np.int32]]

    @property
    def n_words(self) -> int:
        """The length of the text: how many words of the vocabulary, repetitions included."""
        return sum(map(len, (*self.train, *self.held_out)))


def read_standard_library(min_count: int) -> Corpus:
    """The standard library of the running interpreter, one document a file."""
    documents = [WORD.findall(text) for text in standard_library()]
    return build_corpus(documents, min_count, f"{len(documents)} files of the standard library")


def standard_library() -> list[str]:
    """The sources of the standard library of the running interpreter.

    Raises:
        DemoError: they are not installed.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path
        for path in root.rglob("*.py")
        if EXCLUDED_FOLDERS.isdisjoint(path.relative_to(root).parts)
    )
    texts = list(_readable_texts(files))
    if not texts:
        raise DemoError(
            "this Python keeps no sources of its standard library; name a text with --text"
        )
    return texts


def _readable_texts(files: Sequence[Path]) -> Iterator[str]:
    for path in files:
        try:
            # A few files declare another encoding in their first lines; the words of such a file
            # that are not ASCII do not matter here.
            yield path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # a dangling link or a file of another user; the rest is enough


def read_text(path: Path, min_count: int) -> Corpus:
    """One text file, cut into documents of equal length.

    Raises:
        DemoError: the file cannot be read, is no UTF-8 text, or is too short.
    """
    data = _read_bytes(path)
    words = WORD.findall(_decode(path, data))
    # A document is long against the window, and yet enough of them are held out in a short text.
    size = max(10, min(1000, len(words) // (2 * HOLD_OUT_EVERY)))
    documents = [words[start : start + size] for start in range(0, len(words), size)]
    part = f" (its first {len(data) >> 20} MiB)" if len(data) == MAX_TEXT_BYTES else ""
    return build_corpus(documents, min_count, f"{path.name!r}{part}")


def _read_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise DemoError(f"--text: cannot read {str(path)!r}: {reason}") from error
    if not data.strip():
        raise DemoError(f"--text: {str(path)!r} is empty")
    return data


def _decode(path: Path, data: bytes) -> str:
    if b"\0" in data:
        raise DemoError(f"--text: {str(path)!r} is a binary file: expected text in UTF-8")
    # Reading stops at MAX_TEXT_BYTES, which may lie inside a character of up to four bytes.
    complete = len(data) < MAX_TEXT_BYTES
    for cut in range(1 if complete else 4):
        try:
            return data[: len(data) - cut].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            failure = error
    raise DemoError(
        f"--text: {str(path)!r} is not text in UTF-8 (byte {failure.start}): convert it first"
    )


def build_corpus(documents: Sequence[Sequence[str]], min_count: int, source: str) -> Corpus:
    """Numbers the words of ``documents`` and sets every 20th document aside.

    Words that occur fewer than ``min_count`` times in the others are removed from the text, as
    word2vec does: of a word that is never seen nothing can be learned.

    Raises:
        DemoError: what remains is too short to train on.
    """
    is_held_out = [k % HOLD_OUT_EVERY == HOLD_OUT_EVERY // 2 for k in range(len(documents))]
    occurrences = Counter(chain.from_iterable(compress(documents, map(not_, is_held_out))))
    kept = [(word, count) for word, count in occurrences.items() if count >= min_count]
    kept.sort(key=lambda item: (-item[1], item[0]))  # ties in a fixed order: reproducible
    number = {word: index for index, (word, _) in enumerate(kept)}
    encoded = [
        np.array([number[word] for word in document if word in number], np.int32)
        for document in documents
    ]
    counts = np.array([count for _, count in kept], np.int64)
    _require_enough(int(counts.sum()), len(kept), source)
    train = list(compress(encoded, map(not_, is_held_out)))
    return Corpus(source, list(number), counts, train, list(compress(encoded, is_held_out)))


def _require_enough(n_words: int, n_vocabulary: int, source: str) -> None:
    if n_words < MIN_WORDS or n_vocabulary < MIN_VOCABULARY:
        raise DemoError(
            f"{source} is too short to train on: expected at least {MIN_WORDS} words and "
            f"{MIN_VOCABULARY} different ones that occur repeatedly, got {n_words} and "
            f"{n_vocabulary}"
        )
