"""The model: skip-gram with negative sampling, with its gradients written out.

For a true pair of a centre word ``c`` and a neighbour ``o``, and negatives ``n_1 .. n_K``,

    loss = -log sigmoid(u_o . v_c) - sum_k log sigmoid(-u_nk . v_c)

where ``v`` are the rows of the table ``center`` and ``u`` those of ``context``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .. import nn, ops
from .sampling import Batch

FloatArray = NDArray[np.floating[Any]]


def logistic_loss(margins: FloatArray) -> tuple[FloatArray, FloatArray]:
    """``-log sigmoid(margin)`` and its derivative, elementwise, without overflow.

    The exponential is taken of ``-|margin|`` only, so it lies in (0, 1], and ``log1p`` keeps
    the digits of a small one.
    """
    decay = np.exp(-np.abs(margins))
    loss = np.maximum(-margins, 0) + np.log1p(decay)
    derivative = -np.where(margins >= 0, decay, 1) / (1 + decay)
    return loss, derivative


class SkipGram:
    """Two embedding tables ``[V, D]``.

    Args:
        n_words: ``V``.
        dim: ``D``.
        rng: draws the start of ``center``; ``context`` starts at zero, as in word2vec.
        dtype: float32, or float64 to check the gradients.
    """

    def __init__(
        self, n_words: int, dim: int, rng: np.random.Generator, dtype: DTypeLike = np.float32
    ) -> None:
        start = (rng.random((n_words, dim)) - 0.5) / dim
        self.center = nn.Parameter(start.astype(dtype), name="center")
        self.context = nn.Parameter(np.zeros((n_words, dim), dtype), name="context")
        self._gather_center = ops.SparseGatherV2()
        self._gather_context = ops.SparseGatherV2()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """In the order of the gradients."""
        return [self.center, self.context]

    def losses(self, batch: Batch) -> FloatArray:
        """``[B]`` the loss of every pair."""
        center_rows, target_rows = self._forward(batch)
        return _loss_and_score_gradient(center_rows, target_rows, batch)[0]

    def gradients(self, batch: Batch) -> tuple[float, tuple[ops.RowTensor, ops.RowTensor]]:
        """The mean loss of a batch, and the gradients of its **sum**.

        The sum is the right scale for Adam, whose step does not depend on it as long as the
        gradients are large against epsilon: a mean over thousands of pairs would not be.
        """
        center_rows, target_rows = self._forward(batch)
        losses, score_gradient = _loss_and_score_gradient(center_rows, target_rows, batch)
        center_gradient = np.matmul(score_gradient[:, None, :], target_rows)[:, 0]  # [B, D]
        target_gradient = score_gradient[:, :, None] * center_rows[:, None, :]  # [B, 1 + K, D]
        return float(losses.mean()), (
            self._gather_center.backward(center_gradient),
            self._gather_context.backward(target_gradient),
        )

    def _forward(self, batch: Batch) -> tuple[FloatArray, FloatArray]:
        """The rows that the batch names: ``[B, D]`` and ``[B, 1 + K, D]``."""
        center_rows = self._gather_center(self.center, batch.centers, 0)
        target_rows = self._gather_context(self.context, batch.targets, 0)
        return center_rows, target_rows


def _loss_and_score_gradient(
    center_rows: FloatArray, target_rows: FloatArray, batch: Batch
) -> tuple[FloatArray, FloatArray]:
    """``[B]`` losses, and ``[B, 1 + K]`` their derivatives by the scores ``u . v``."""
    scores = np.matmul(target_rows, center_rows[:, :, None])[:, :, 0]
    sign = np.full(scores.shape[1], -1, scores.dtype)
    sign[0] = 1  # the first target is the true one
    losses, derivative = logistic_loss(scores * sign)
    # A negative that happens to be the true neighbour would be pushed both ways: it is left out.
    counts = np.ones(scores.shape, bool)
    counts[:, 1:] = batch.targets[:, 1:] != batch.targets[:, :1]
    return (losses * counts).sum(axis=1), derivative * sign * counts


def split(batch: Batch, size: int) -> Iterator[Batch]:
    """The batch in pieces of at most ``size`` pairs."""
    for start in range(0, len(batch.centers), size):
        yield Batch(batch.centers[start : start + size], batch.targets[start : start + size])


def mean_loss(model: SkipGram, batch: Batch, piece: int = 8192) -> float:
    """The mean loss over a batch of any size, in bounded memory."""
    total = sum(float(model.losses(part).sum(dtype=np.float64)) for part in split(batch, piece))
    return total / len(batch.centers)


def mean_guess_loss(
    batch: Batch, observed: NDArray[np.float64], drawn: NDArray[np.float64]
) -> float:
    """The mean loss of the best scores that depend on the target alone.

    These are ``log(observed / (K drawn))``: whether a target is true or one of ``K`` negatives is
    then judged by how often it occurs as each.

    Args:
        batch: of true pairs and negatives.
        observed: ``[V]`` the shares of the words among true neighbours.
        drawn: ``[V]`` their shares among negatives.
    """
    n_negatives = batch.targets.shape[1] - 1
    with np.errstate(divide="ignore"):
        scores = np.log(observed) - np.log(n_negatives * drawn)
    scores = np.maximum(scores, -50.0)  # of a word that is never a neighbour: -infinity
    ones = np.ones((len(batch.centers), 1))
    losses, _ = _loss_and_score_gradient(ones, scores[batch.targets][..., None], batch)
    return float(losses.mean())
