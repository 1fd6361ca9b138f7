"""Models whose weights may have 16 bits and whose arithmetic is float32, and their training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid

from ..nn import torch as fused
from .click_model.clicks import ClickLog, table_sizes
from .click_model.dlrm import DLRM, embedding
from .corpus import Corpus, read_standard_library, standard_library
from .sampling import NegativeSampler, PairStream, keep_probabilities, with_negatives

MEASUREMENTS = 12
LENGTH, WIDTH, LAYERS = 64, 96, 3  # of the transformer: bytes, numbers a byte
Batch = tuple[Tensor, ...]


class Program(NamedTuple):
    """A model and what it learns from.

    Attributes:
        model: with float32 weights.
        loss: ``loss(outputs, batch)``, a mean; the outputs are those of the batch's first tensors.
        n_inputs: how many tensors of a batch are the model's inputs.
        batches: to learn from, without end.
        held_out: to measure on.
        optimizer: of parameters, with options for all groups.
    """

    model: nn.Module
    loss: Callable[[Tensor, Batch], Tensor]
    n_inputs: int
    batches: Iterator[Batch]
    held_out: list[Batch]
    optimizer: Callable[..., Any]


class Rows(nn.Embedding):
    """A table of any dtype, whose rows are looked up as float32."""

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of these ids."""
        return super().forward(ids).float()


def train(
    program: Program, options: Mapping[str, Any], seed: int, steps: int,
    progress: Callable[[], Any],
) -> dict[int, float]:  # fmt: skip
    """Train with a learning rate that falls linearly to 0.

    Args:
        program: is used up.
        options: of the optimizer; with ``rounding`` weights are bfloat16, else float32.
        seed: of the rounding, if that is at random.
        steps: how many.
        progress: called after each.

    Returns:
        The mean loss of held-out data after numbers of steps.
    """
    model = program.model
    if "rounding" in options:
        model.bfloat16()
        options = {**options, "state_dtype": torch.float32}
    optimizer = program.optimizer(model.parameters(), **options)
    optimizer.watch(model)  # for rows that sleep
    for group in optimizer.param_groups:
        group["rounding_seed"] = seed
    rates = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    measured = set(np.rint(np.linspace(0, steps, 1 + MEASUREMENTS)).astype(int).tolist())
    losses = {}
    for step in range(steps + 1):
        if step in measured:
            with torch.no_grad():
                each = [float(_loss(program, batch)) for batch in program.held_out]
            losses[step] = sum(each) / len(each)
        if step < steps:
            optimizer.zero_grad()
            _loss(program, next(program.batches)).backward()
            optimizer.step()
            rates.step()
            progress()
    return losses


def _loss(program: Program, batch: Batch) -> Tensor:
    modules = program.model.named_modules()
    tables = {f"{name}.weight" for name, module in modules if isinstance(module, Rows)}
    named = program.model.named_parameters()
    wide = {name: p.float() for name, p in named if name not in tables}
    outputs = functional_call(program.model, wide, batch[: program.n_inputs])
    return program.loss(outputs, batch)


# -- a transformer --------------------------------------------------------------------------------


class Transformer(nn.Module):
    """The log-odds of the byte that follows each, from those before."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        self.letters, self.places = Rows(256, WIDTH), Rows(LENGTH, WIDTH)
        self.after = nn.Linear(WIDTH, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        """``[B, LENGTH, 256]`` from int64 ``[B, LENGTH]``."""
        states = self.letters(text) + self.places(torch.arange(LENGTH))
        found: Tensor = self.after(self.blocks(states, self.mask.float(), is_causal=True))
        return found


@cache
def _bytes() -> tuple[Tensor, Tensor]:
    """The text to learn from, and that to measure on: every 20th file."""
    texts = [np.frombuffer(text.encode(), np.uint8) for text in standard_library()]
    held_out = np.concatenate(texts[::20])
    learnt = np.concatenate([text for k, text in enumerate(texts) if k % 20])
    return torch.from_numpy(learnt), torch.from_numpy(held_out)


def transformer(seed: int) -> Program:
    """A transformer on the bytes of the standard library's sources."""
    learnt, held_out = _bytes()
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)

    def batch(text: Tensor, begins: np.ndarray) -> Batch:
        pieces = torch.stack([text[k : k + LENGTH + 1] for k in begins]).long()
        return pieces[:, :-1], pieces[:, 1:]

    places = np.linspace(0, len(held_out) - LENGTH - 1, 128).astype(int)
    batches = (batch(learnt, rng.integers(0, len(learnt) - LENGTH, 16)) for _ in count())
    return Program(
        Transformer(),
        lambda outputs, batch: cross_entropy(outputs.flatten(0, 1), batch[1].flatten()),
        1,
        batches,
        [batch(held_out, places)],
        lambda parameters, **options: fused.AdamW(parameters, lr=1e-3, **options),
    )


# -- word vectors ---------------------------------------------------------------------------------


class SkipGram(nn.Module):
    """Scores of words beside others, from two tables."""

    def __init__(self, n_words: int, dim: int) -> None:
        super().__init__()
        self.center, self.context = (Rows(n_words, dim, sparse=True) for _ in range(2))
        nn.init.uniform_(self.center.weight, -0.5 / dim, 0.5 / dim)
        nn.init.zeros_(self.context.weight)

    def forward(self, centers: Tensor, targets: Tensor) -> Tensor:
        """``[B, K]`` from int64 ``[B]`` and ``[B, K]``."""
        return (self.context(targets) @ self.center(centers)[:, :, None]).squeeze(2)


@cache
def _corpus() -> Corpus:
    return read_standard_library(5)


def word_vectors(seed: int) -> Program:
    """Skip-gram with 5 negatives, as in `fusestep demo`."""
    corpus = _corpus()
    torch.manual_seed(seed)
    rng, of_held_out = np.random.default_rng(seed), np.random.default_rng(0)
    keep, sampler = keep_probabilities(corpus.counts, 1e-3), NegativeSampler(corpus.counts)

    def batches(documents: Any, size: int, rng: np.random.Generator) -> Iterator[Batch]:
        for pairs in PairStream(documents, keep, 6, rng).batches(size):
            batch = with_negatives(pairs, sampler, 5, rng)
            yield torch.from_numpy(batch.centers).long(), torch.from_numpy(batch.targets).long()

    def loss(scores: Tensor, _: Batch) -> Tensor:
        return -(logsigmoid(scores[:, 0]) + logsigmoid(-scores[:, 1:]).sum(1)).mean()

    return Program(
        SkipGram(len(corpus.words), 32),
        loss,
        2,
        batches(corpus.train, 4096, rng),
        [next(batches(corpus.held_out, 20_000, of_held_out))],
        # Gradients of a mean over thousands of pairs are small.
        lambda parameters, **options: fused.SparseAdam(parameters, lr=5e-3, eps=1e-12, **options),
    )


# -- a recommender --------------------------------------------------------------------------------


def recommender(seed: int) -> Program:
    """The DLRM of `examples.recommender`, with small tables."""
    sizes, dim, batch_size = table_sizes(20_000), 16, 512
    torch.manual_seed(seed)

    def table(size: int, dim: int) -> nn.Module:
        weight = embedding(size, dim).get_parameter("weight").detach()
        rows: nn.Module = Rows.from_pretrained(weight, freeze=False, sparse=True)
        return rows

    def tensors(clicks: Any) -> Batch:
        return tuple(map(torch.from_numpy, (clicks.dense, clicks.ids, clicks.labels)))

    log = ClickLog(sizes, 0)  # one hidden model for all seeds
    return Program(
        DLRM(sizes, dim, table),
        lambda outputs, batch: binary_cross_entropy_with_logits(outputs, batch[2]),
        2,
        (tensors(log.batch(1_000_000 * seed + k, batch_size)) for k in count()),
        [tensors(log.held_out(8192))],
        lambda parameters, sparse="touched", **options: fused.Adam(
            parameters, lr=1e-3, sparse=sparse, **options
        ),
    )


MODELS: dict[str, tuple[int, Callable[[int], Program]]] = {
    "transformer": (600, transformer),
    "word vectors": (1500, word_vectors),
    "recommender": (600, recommender),
}
"""By title: how many steps, and what is trained with a seed."""
