"""What the model is shown: pairs of words that stand close together, and random other words.

The recipe is that of word2vec (Mikolov et al. 2013, "Distributed Representations of Words and
Phrases and their Compositionality"): frequent words are thinned out, the window has a random
width, and negatives are drawn from the 3/4 power of the word frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Pairs are shuffled within so many words of text, which bounds the memory to some 200 MB. Ten
# times less is felt: the vectors then bend towards the few documents of the shard in turn.
SHARD_WORDS = 1_200_000


class Batch(NamedTuple):
    """``B`` true pairs, each with ``K`` negatives.

    Attributes:
        centers: ``[B]`` the words whose surroundings are predicted.
        targets: ``[B, 1 + K]`` the true neighbour, then the negatives.
    """

    centers: NDArray[np.int32]
    targets: NDArray[np.int32]


class Pairs(NamedTuple):
    """Words and one neighbour of each, ``[P]`` both."""

    centers: NDArray[np.int32]
    contexts: NDArray[np.int32]


def keep_probabilities(counts: NDArray[np.int64], threshold: float) -> NDArray[np.float64]:
    """``[V]`` the probability that an occurrence of a word survives the subsampling.

    With ``f`` the frequency of a word and ``t`` the threshold, ``sqrt(t / f) + t / f``: the form
    of the published program (the paper gives only the first term).
    """
    ratio = threshold * counts.sum() / counts
    keep: NDArray[np.float64] = np.minimum(np.sqrt(ratio) + ratio, 1.0)
    return keep


class NegativeSampler:
    """Draws words with a probability proportional to ``counts ** power``.

    Walker's alias method: every slot of a table of ``V`` slots is shared by at most two words, so
    a draw costs one look-up however large the vocabulary is.
    """

    def __init__(self, counts: NDArray[np.int64], power: float = 0.75) -> None:
        weights = counts.astype(np.float64) ** power
        self.shares: NDArray[np.float64] = weights / weights.sum()
        self._threshold, self._alias = _alias_table(len(counts) * self.shares)

    def draw(self, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.int32]:
        """Independent draws with replacement."""
        position = rng.random(shape) * len(self._alias)
        slot = position.astype(np.int32)
        return np.where(position - slot < self._threshold[slot], slot, self._alias[slot])


def _alias_table(share: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Vose's construction: a slot keeps ``threshold`` of itself, the rest goes to its alias.

    Args:
        share: ``[V]`` probabilities times ``V``; their mean is 1.
    """
    threshold = np.ones(len(share))
    alias = np.arange(len(share), dtype=np.int32)
    rest = share.tolist()
    small = [word for word, part in enumerate(rest) if part < 1.0]
    large = [word for word, part in enumerate(rest) if part >= 1.0]
    while small and large:
        receiver, giver = small.pop(), large[-1]
        threshold[receiver], alias[receiver] = rest[receiver], giver
        rest[giver] -= 1.0 - rest[receiver]
        if rest[giver] < 1.0:
            small.append(large.pop())
    return threshold, alias  # what is left over differs from 1 by rounding only


def skip_gram_pairs(
    documents: Sequence[NDArray[np.int32]],
    keep: NDArray[np.float64],
    window: int,
    rng: np.random.Generator,
) -> Pairs:
    """All pairs of words at most ``window`` apart in the thinned documents, in random order.

    Each word draws its own radius from 1 to ``window``, so near neighbours count more.
    """
    words = np.concatenate(documents)
    document = np.repeat(np.arange(len(documents)), [len(part) for part in documents])
    survives = rng.random(len(words)) < keep[words]
    words, document = words[survives], document[survives]
    radius = rng.integers(1, window + 1, len(words))
    centers, contexts = [words[:0]], [words[:0]]
    for distance in range(1, min(window, len(words) - 1) + 1):
        together = document[:-distance] == document[distance:]
        left, right = words[:-distance], words[distance:]
        looks_right = together & (radius[:-distance] >= distance)
        looks_left = together & (radius[distance:] >= distance)
        centers += [left[looks_right], right[looks_left]]
        contexts += [right[looks_right], left[looks_left]]
    order = rng.permutation(sum(map(len, centers)))
    return Pairs(np.concatenate(centers)[order], np.concatenate(contexts)[order])


class PairStream:
    """Endless batches of true pairs: epoch after epoch, documents shuffled, in bounded memory."""

    def __init__(
        self,
        documents: Sequence[NDArray[np.int32]],
        keep: NDArray[np.float64],
        window: int,
        rng: np.random.Generator,
    ) -> None:
        self._documents = documents
        self._keep = keep
        self._window = window
        self._rng = rng

    def expected_pairs_per_epoch(self) -> int:
        """Near enough to plan with: every surviving word has ``window + 1`` pairs on average."""
        survivors = sum(float(self._keep[document].sum()) for document in self._documents)
        return int(survivors * (self._window + 1))

    def batches(self, size: int) -> Iterator[Pairs]:
        """Batches of exactly ``size`` pairs; ends only when a whole epoch holds no pair."""
        centers = contexts = np.empty(0, np.int32)
        while True:
            found = 0
            for shard in self._shards():
                pairs = skip_gram_pairs(shard, self._keep, self._window, self._rng)
                found += len(pairs.centers)
                centers = np.concatenate([centers, pairs.centers])
                contexts = np.concatenate([contexts, pairs.contexts])
                whole = len(centers) // size * size
                for start in range(0, whole, size):
                    yield Pairs(centers[start : start + size], contexts[start : start + size])
                centers, contexts = centers[whole:], contexts[whole:]
            if not found:
                return

    def _shards(self) -> Iterator[list[NDArray[np.int32]]]:
        """Documents in random order, in groups of about ``SHARD_WORDS`` words."""
        shard: list[NDArray[np.int32]] = []
        n_words = 0
        for index in self._rng.permutation(len(self._documents)):
            shard.append(self._documents[index])
            n_words += len(shard[-1])
            if n_words >= SHARD_WORDS:
                yield shard
                shard, n_words = [], 0
        if shard:
            yield shard


def with_negatives(
    pairs: Pairs, sampler: NegativeSampler, n_negatives: int, rng: np.random.Generator
) -> Batch:
    """Adds ``n_negatives`` random words to every pair."""
    negatives = sampler.draw((len(pairs.centers), n_negatives), rng)
    return Batch(pairs.centers, np.concatenate([pairs.contexts[:, None], negatives], axis=1))
