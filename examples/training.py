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
from typing import Any, NamedTuple

import numpy as np

from .. import get_num_threads, nn, ops
from .corpus import Corpus
from .errors import DemoError
from .sampling import Batch, NegativeSampler, Pairs, PairStream, keep_probabilities, with_negatives
from .skipgram import FloatArray, SkipGram, mean_guess_loss, mean_loss, split

OPTIMIZERS = ("lazy", "fused", "dense")
TORCH = "torch"
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
            (`nn.Adam` on row-sparse gradients: all rows move, as with dense ones), ``"dense"``
            (`nn.Adam` on ``[V, D]`` gradients) or ``"torch"`` (PyTorch's `SparseAdam`).
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
    learning_rate: float = 0.005
    batch: int = 8192
    negatives: int = 5
    window: int = 6
    subsample: float = 1e-3
    seed: int = 0
    time_limit: float = 200.0


class Measurement(NamedTuple):
    """The loss on held-out text after so many pairs and seconds of training."""

    pairs: int
    seconds: float
    loss: float


@dataclass
class History:
    """What happened during the training.

    Attributes:
        batch: pairs per step.
        losses: mean loss of every step.
        held_out: the first is that of the untrained vectors.
        seconds: of the training, without the measurements.
        optimizer_seconds: the part of them between the gradients of the rows and the new tables.
        stopped: why the training ended early, or an empty string.
    """

    batch: int
    losses: list[float] = field(default_factory=list)
    held_out: list[Measurement] = field(default_factory=list)
    seconds: float = 0.0
    optimizer_seconds: float = 0.0
    stopped: str = ""

    @property
    def pairs(self) -> int:
        """How many pairs were seen."""
        return self.batch * len(self.losses)

    @property
    def best(self) -> Measurement:
        """With the lowest loss."""
        return min(self.held_out, key=lambda measurement: measurement.loss)

    @property
    def stands_still(self) -> bool:
        """Whether the last measurements on held-out text brought no lower loss."""
        return len(self.held_out) - 1 - self.held_out.index(self.best) >= PATIENCE


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

    Everything random comes from ``settings.seed``, with one generator per purpose, so that all
    optimizers see the same batches.

    Raises:
        DemoError: the text holds no pairs to train on or to measure with.
    """

    def __init__(self, corpus: Corpus, settings: Settings) -> None:
        self.settings = settings
        seeds = np.random.SeedSequence(settings.seed).spawn(4)
        start, self._pair_rng, self._negative_rng, held_out_rng = map(np.random.default_rng, seeds)
        self.model = SkipGram(len(corpus.words), settings.dim, start)
        self._sampler = NegativeSampler(corpus.counts)
        keep = keep_probabilities(corpus.counts, settings.subsample)
        self._observed = keep * corpus.counts / (keep @ corpus.counts)
        self._stream = PairStream(corpus.train, keep, settings.window, self._pair_rng)
        self.held_out = self._fixed_batch(
            PairStream(corpus.held_out, keep, settings.window, held_out_rng), held_out_rng
        )
        planned = min(settings.pairs, MAX_EPOCHS * self._stream.expected_pairs_per_epoch())
        batch = min(settings.batch, max(MIN_BATCH, planned // MIN_STEPS))
        self.n_steps = max(1, planned // batch)
        self.history = History(batch)
        self._best: list[FloatArray] = []
        self._step = make_step(settings, self.model, self.n_steps)

    @property
    def planned_pairs(self) -> int:
        """How many pairs all steps together have."""
        return self.n_steps * self.history.batch

    @property
    def is_row_sparse(self) -> bool:
        """Whether the optimizer is given row-sparse gradients."""
        return self.settings.optimizer != "dense"

    def train(self, progress: Callable[[History], None], steps: int | None = None) -> History:
        """Runs all steps, or until Ctrl-C, the time limit, or a held-out loss that stands still.

        The tables are then those of the lowest held-out loss.

        Args:
            progress: called after every step.
            steps: at most so many; all that are planned if None.
        """
        history = self.history
        measure_every = max(1, self.n_steps // MEASUREMENTS)
        self._measure()
        with StopOnInterrupt() as interrupt:
            begin = time.perf_counter()
            for pairs in islice(self._batches(), steps or self.n_steps):
                self._one_step(pairs)
                history.seconds += time.perf_counter() - begin
                if len(history.losses) % measure_every == 0:
                    self._measure()
                progress(history)
                if history.stands_still and len(history.losses) < self.n_steps:
                    history.stopped = "the held-out loss does not fall any more"
                elif interrupt.requested:
                    history.stopped = "interrupted"
                elif history.seconds > self.settings.time_limit:
                    history.stopped = f"time limit of {self.settings.time_limit:g} s"
                if history.stopped:
                    break
                begin = time.perf_counter()
        if history.held_out[-1].pairs != history.pairs:
            self._measure()
        for table, best in zip(self.model.parameters, self._best, strict=True):
            table.data[:] = best
        return history

    def guess_loss(self) -> float:
        """The held-out loss of a model that knows how frequent words are, and nothing else."""
        return mean_guess_loss(self.held_out, self._observed, self._sampler.shares)

    def dense_seconds(self) -> float:
        """What the optimizer would have taken for the same steps with dense gradients.

        An estimate: a few such steps of copies of the tables are measured.
        """
        model = copy.deepcopy(self.model)
        step = make_step(replace(self.settings, optimizer="dense"), model, 1 + DENSE_STEPS)
        _, gradients = model.gradients(next(split(self.held_out, self.history.batch)))
        seconds = []
        for _ in range(1 + DENSE_STEPS):
            begin = time.perf_counter()
            step(gradients)
            seconds.append(time.perf_counter() - begin)
        return median(seconds[1:]) * len(self.history.losses)

    def _one_step(self, pairs: Pairs) -> None:
        settings, history = self.settings, self.history
        batch = with_negatives(pairs, self._sampler, settings.negatives, self._negative_rng)
        loss, gradients = self.model.gradients(batch)
        begin = time.perf_counter()
        self._step(gradients)
        history.optimizer_seconds += time.perf_counter() - begin
        history.losses.append(loss)

    def _measure(self) -> None:
        history = self.history
        loss = mean_loss(self.model, self.held_out)
        history.held_out.append(Measurement(history.pairs, history.seconds, loss))
        if history.best is history.held_out[-1]:
            self._best = [table.data.copy() for table in self.model.parameters]

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
        return with_negatives(pairs, self._sampler, self.settings.negatives, rng)


def make_step(
    settings: Settings, model: SkipGram, n_steps: int
) -> Callable[[tuple[ops.RowTensor, ops.RowTensor]], Any]:
    """The optimizer as a function of the two row-sparse gradients.

    The learning rate is given as an array: the rate of every step.
    """
    start = settings.learning_rate
    rates = np.linspace(start, FINAL_RATE * start, n_steps, dtype=np.float32)
    if settings.optimizer == TORCH:
        return _torch_step(model, rates)
    if settings.optimizer == "lazy":
        return nn.LazyAdam(model.parameters, learning_rate=rates)
    adam = nn.Adam(model.parameters, learning_rate=rates)
    if settings.optimizer == "fused":
        return adam
    return lambda gradients: adam(tuple(gradient.to_dense() for gradient in gradients))


def _torch_step(
    model: SkipGram, rates: FloatArray
) -> Callable[[tuple[ops.RowTensor, ops.RowTensor]], Any]:
    """The same with PyTorch's SparseAdam, on as many threads, in the memory of the tables."""
    import torch

    torch.set_num_threads(get_num_threads())
    tables = [torch.from_numpy(table.data) for table in model.parameters]
    optimizer = torch.optim.SparseAdam(tables, lr=rates[0])
    rate = iter(rates.tolist())

    def step(gradients: tuple[ops.RowTensor, ops.RowTensor]) -> None:
        optimizer.param_groups[0]["lr"] = next(rate)
        for table, gradient in zip(tables, gradients, strict=True):
            indices, values = map(torch.from_numpy, (gradient.indices, gradient.values))
            table.grad = torch.sparse_coo_tensor(
                indices[None], values, table.shape, check_invariants=False
            )
        optimizer.step()

    return step
