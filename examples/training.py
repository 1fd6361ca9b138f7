"""The training loop: batches in, optimizer steps out, and a line that says how it goes."""

from __future__ import annotations

import copy
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import median
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from .. import nn, ops
from .corpus import Corpus
from .errors import DemoError
from .sampling import Batch, NegativeSampler, Pairs, PairStream, keep_probabilities, with_negatives
from .skipgram import SkipGram, mean_loss, split

OPTIMIZERS = ("lazy", "fused", "dense")
MAX_EPOCHS = 20  # a short text is not repeated more often than this
MIN_STEPS = 500  # a short text gets smaller batches rather than fewer steps
MIN_BATCH, HELD_OUT_PAIRS, MEASUREMENTS = 64, 20_000, 20
PATIENCE = 3  # measurements of the held-out loss in a row without a new lowest one
DENSE_STEPS = 5  # that are measured, after one that is not
FINAL_RATE = 0.05  # the learning rate falls linearly to this part of its start


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        optimizer: ``"lazy"`` (`nn.LazyAdam`: only the rows of the batch move), ``"fused"``
            (`nn.Adam` on row-sparse gradients: all rows move, as with dense ones) or
            ``"dense"`` (`nn.Adam` on ``[V, D]`` gradients).
        dim: length of a word vector.
        pairs: how many true pairs to train on.
        learning_rate: at the start.
        batch: true pairs per step, at most.
        negatives: random words per true pair.
        window: largest distance of two words of a pair.
        subsample: threshold of `keep_probabilities`.
        seed: of everything random.
        time_limit: in seconds; a safety net for slow machines.
    """

    optimizer: str = "lazy"
    dim: int = 64
    pairs: int = 12_000_000
    learning_rate: float = 0.002
    batch: int = 8192
    negatives: int = 5
    window: int = 6
    subsample: float = 1e-3
    seed: int = 0
    time_limit: float = 100.0


@dataclass
class History:
    """What happened during the training.

    Attributes:
        batch: pairs per step.
        losses: mean loss of every step.
        held_out: ``(pairs seen, held-out loss)``; the first is that of the untrained vectors.
        seconds: of the training.
        optimizer_seconds: the part of them between the gradients of the rows and the new tables.
        stopped: why the training ended early, or an empty string.
    """

    batch: int
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    optimizer_seconds: float = 0.0
    stopped: str = ""

    @property
    def pairs(self) -> int:
        """How many pairs were seen."""
        return self.batch * len(self.losses)

    @property
    def stands_still(self) -> bool:
        """Whether the last measurements on held-out text brought no lower loss."""
        losses = [loss for _, loss in self.held_out]
        return len(losses) - 1 - losses.index(min(losses)) >= PATIENCE


class StopOnInterrupt:
    """Within it, the first Ctrl-C only asks to stop; the second one interrupts as usual.

    So a step is never cut in half, with one table updated and the other not.
    """

    def __init__(self) -> None:
        self.requested = False
        self._installed = False

    def __enter__(self) -> StopOnInterrupt:
        # Only the main thread may do this; and where Ctrl-C does something else, it stays so.
        self._installed = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._installed:
            signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Trainer:
    """Word vectors of a corpus in the making.

    Everything random comes from ``settings.seed``, with one generator per purpose, so that the
    three optimizers see the same batches.

    Raises:
        DemoError: the text holds no pairs to train on or to measure with.
    """

    def __init__(self, corpus: Corpus, settings: Settings) -> None:
        self._settings = settings
        seeds = np.random.SeedSequence(settings.seed).spawn(4)
        start, self._pair_rng, self._negative_rng, held_out_rng = map(np.random.default_rng, seeds)
        self.model = SkipGram(len(corpus.words), settings.dim, start)
        self._sampler = NegativeSampler(corpus.counts)
        keep = keep_probabilities(corpus.counts, settings.subsample)
        self._stream = PairStream(corpus.train, keep, settings.window, self._pair_rng)
        self.held_out = self._fixed_batch(
            PairStream(corpus.held_out, keep, settings.window, held_out_rng), held_out_rng
        )
        planned = min(settings.pairs, MAX_EPOCHS * self._stream.expected_pairs_per_epoch())
        batch = min(settings.batch, max(MIN_BATCH, planned // MIN_STEPS))
        self.n_steps = max(1, planned // batch)
        self.history = History(batch)
        self._step = make_step(settings, self.model, self.n_steps)

    @property
    def planned_pairs(self) -> int:
        """How many pairs all steps together have."""
        return self.n_steps * self.history.batch

    @property
    def is_row_sparse(self) -> bool:
        """Whether the optimizer is given row-sparse gradients."""
        return self._settings.optimizer != "dense"

    def train(self, progress: Callable[[History], None]) -> History:
        """Runs all steps, or until Ctrl-C, the time limit, or a held-out loss that stands still.

        Args:
            progress: called after every step.
        """
        history = self.history
        measure_every = max(1, self.n_steps // MEASUREMENTS)
        self._measure()
        begin = time.perf_counter()
        with StopOnInterrupt() as interrupt:
            for pairs in islice(self._batches(), self.n_steps):
                self._one_step(pairs)
                history.seconds = time.perf_counter() - begin
                if len(history.losses) % measure_every == 0:
                    self._measure()
                progress(history)
                if history.stands_still and len(history.losses) < self.n_steps:
                    history.stopped = "the held-out loss does not fall any more"
                elif interrupt.requested:
                    history.stopped = "interrupted"
                elif history.seconds > self._settings.time_limit:
                    history.stopped = f"time limit of {self._settings.time_limit:g} s"
                if history.stopped:
                    break
        if history.held_out[-1][0] != history.pairs:
            self._measure()
        return history

    def dense_seconds(self) -> float:
        """What the optimizer would have taken for the same steps with dense gradients.

        An estimate: a few such steps of copies of the tables are measured.
        """
        model = copy.deepcopy(self.model)
        step = make_step(replace(self._settings, optimizer="dense"), model, 1 + DENSE_STEPS)
        _, gradients = model.gradients(next(split(self.held_out, self.history.batch)))
        seconds = []
        for _ in range(1 + DENSE_STEPS):
            begin = time.perf_counter()
            step(gradients)
            seconds.append(time.perf_counter() - begin)
        return median(seconds[1:]) * len(self.history.losses)

    def _one_step(self, pairs: Pairs) -> None:
        settings, history = self._settings, self.history
        batch = with_negatives(pairs, self._sampler, settings.negatives, self._negative_rng)
        loss, gradients = self.model.gradients(batch)
        begin = time.perf_counter()
        self._step(gradients)
        history.optimizer_seconds += time.perf_counter() - begin
        history.losses.append(loss)

    def _measure(self) -> None:
        loss = mean_loss(self.model, self.held_out)
        self.history.held_out.append((self.history.pairs, loss))

    def _batches(self) -> Iterator[Pairs]:
        found = False
        for pairs in self._stream.batches(self.history.batch):
            found = True
            yield pairs
        if not found:
            raise DemoError("the text is too short to train on: no two words stand close together")

    def _fixed_batch(self, stream: PairStream, rng: np.random.Generator) -> Batch:
        """Up to ``HELD_OUT_PAIRS`` pairs with their negatives, the same for every measurement."""
        size = max(1, min(HELD_OUT_PAIRS, stream.expected_pairs_per_epoch() // 2))
        pairs = next(stream.batches(size), None)
        if pairs is None:
            raise DemoError("the text is too short to train on: nothing is left to measure with")
        return with_negatives(pairs, self._sampler, self._settings.negatives, rng)


def make_step(
    settings: Settings, model: SkipGram, n_steps: int
) -> Callable[[tuple[ops.RowTensor, ops.RowTensor]], Any]:
    """The optimizer as a function of the two row-sparse gradients.

    The learning rate is given as an array: the rate of every step.
    """
    start = settings.learning_rate
    rates = np.linspace(start, FINAL_RATE * start, n_steps, dtype=np.float32)
    if settings.optimizer == "lazy":
        return nn.LazyAdam(model.parameters, learning_rate=rates)
    adam = nn.Adam(model.parameters, learning_rate=rates)
    if settings.optimizer == "fused":
        return adam
    return lambda gradients: adam(tuple(gradient.to_dense() for gradient in gradients))
