"""``fusestep demo``: word vectors of real text, trained on one's own loop with fused steps.

    text -> pairs of neighbouring words -> SparseGatherV2 -> loss and gradients
         -> two row-sparse gradients with many duplicates -> one optimizer step -> ...

Frequent words occur hundreds of times in every batch (Zipf's law), rare ones once in a thousand
batches: what the row-sparse steps of this package are made for.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from .. import get_num_threads, set_num_threads
from .corpus import Corpus, read_standard_library, read_text
from .errors import require, status_of
from .options import integer, positive
from .report import (
    CURVE,
    VECTORS,
    VOCABULARY,
    choose_queries,
    nearest_neighbours,
    prepare_folder,
    save,
)
from .training import DENSE_STEPS, MAX_EPOCHS, OPTIMIZERS, TORCH, History, Settings, Trainer

MIN_COUNT = 2
MAX_DIM = 1024
QUICK = Settings(dim=32, pairs=5_000_000, learning_rate=0.01, time_limit=60.0)
TITLES = {
    "lazy": "fusestep LazyAdam",
    "fused": "fusestep Adam, row-sparse gradients",
    "dense": "fusestep Adam, dense gradients",
    TORCH: "PyTorch SparseAdam",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the demo to ``parser``."""
    full, quick = Settings(), QUICK
    add = parser.add_argument
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        default="lazy",
        help="lazy: only the rows of the batch move; fused: all rows, from row-sparse gradients; "
        "dense: all rows, from dense gradients (default: lazy)",
    )
    add(
        "--alone",
        action="store_true",
        help="do not train a second time with PyTorch's SparseAdam, where PyTorch is installed",
    )
    add("--text", metavar="FILE", help="train on this UTF-8 text (default: Python's own sources)")
    add("--quick", action="store_true", help="a smaller run, some seconds with each optimizer")
    add(
        "--dim",
        type=integer(1, MAX_DIM),
        help=f"length of a word vector (default: {full.dim}, quick {quick.dim})",
    )
    add(
        "--pairs",
        type=integer(1),
        help=f"word pairs to train on (default: {full.pairs:,}, quick {quick.pairs:,}); "
        f"a short text is repeated {MAX_EPOCHS} times at most",
    )
    add("--learning-rate", type=positive, help=f"at the start (default: {full.learning_rate})")
    add("--seed", type=integer(0), default=0, help="of everything random (default: 0)")
    add("--threads", type=integer(1), help="threads of the optimizer, at most (default: all)")
    add(
        "--time-limit",
        type=positive,
        metavar="SECONDS",
        help="stop training then, whatever is left to do "
        f"(default: {full.time_limit:g}, quick {quick.time_limit:g})",
    )
    add("--output", default="demo-output", metavar="DIR", help="folder of the results")


def main(args: argparse.Namespace) -> int:
    """Trains, reports, saves; returns the exit status (2 for a mistake of the user)."""
    return status_of("fusestep demo", lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    begin = time.perf_counter()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The words of a text may be of a script that the terminal does not know.
        sys.stdout.reconfigure(errors="backslashreplace")
    require("the demo", {"tqdm": "tqdm", "matplotlib": "matplotlib"}, "demo")
    set_num_threads(args.threads)
    settings = settings_of(args)
    corpus = read_corpus(args.text)
    folder = Path(args.output)
    prepare_folder(folder, [VECTORS, VOCABULARY, CURVE])
    trainer = Trainer(corpus, settings)
    print_plan(corpus, trainer, settings)
    histories = {TITLES[settings.optimizer]: _train(trainer)}
    if settings.optimizer == "lazy" and not args.alone and find_spec("torch"):
        steps = len(trainer.history.losses)
        histories[TITLES[TORCH]] = _train(
            Trainer(corpus, replace(settings, optimizer=TORCH)), steps
        )
    print_neighbours(corpus, trainer)
    print_comparison(trainer, histories)
    save(folder, corpus, trainer.model, histories, trainer.guess_loss())
    print(f"\nvectors, vocabulary and a picture of the losses are in {folder}{os.sep}")
    print(f"{time.perf_counter() - begin:.1f} s in all")


def read_corpus(text: str | None) -> Corpus:
    """The named text, or Python's own sources."""
    return read_standard_library(MIN_COUNT) if text is None else read_text(Path(text), MIN_COUNT)


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings that the options ask for."""
    chosen = {
        name: getattr(args, name)
        for name in ("optimizer", "dim", "pairs", "learning_rate", "seed", "time_limit")
        if getattr(args, name) is not None
    }
    return replace(QUICK if args.quick else Settings(), **chosen)


def _train(trainer: Trainer, steps: int | None = None) -> History:
    from tqdm import tqdm

    planned = trainer.history.batch * (steps or trainer.n_steps)
    bar = tqdm(
        total=planned,
        desc=TITLES[trainer.settings.optimizer],
        unit=" pairs",
        unit_scale=True,
        # A log file gets a line now and then instead of ten a second.
        mininterval=0.2 if sys.stderr.isatty() else 5.0,
    )
    with bar:

        def progress(history: History) -> None:
            share = history.optimizer_seconds / history.seconds
            bar.set_postfix_str(f"loss {history.losses[-1]:.3f}, optimizer {share:.0%}", False)
            bar.update(history.batch)

        return trainer.train(progress, steps)


def print_plan(corpus: Corpus, trainer: Trainer, settings: Settings) -> None:
    """What is going to be trained on what."""
    threads = get_num_threads()
    print(f"text        {corpus.source}: {corpus.n_words:,} words")
    print(f"vocabulary  {len(corpus.words):,} words that occur at least {MIN_COUNT} times")
    print(f"model       two tables of {len(corpus.words):,} x {settings.dim}")
    print(f"optimizer   {TITLES[settings.optimizer]}, {threads} thread{'s' * (threads > 1)}")
    print(
        f"training    {trainer.planned_pairs:,} pairs in {trainer.n_steps:,} steps",
        flush=True,  # before the progress bar, which goes to stderr
    )


def print_neighbours(corpus: Corpus, trainer: Trainer) -> None:
    """For some words, those that are used most like them."""
    vectors = trainer.model.center.data
    print("\nwords that are used alike")
    found = nearest_neighbours(corpus.words, vectors, choose_queries(corpus))
    for word, near in found.items():
        print(f"  {word:12s} {', '.join(near)}")


def print_comparison(trainer: Trainer, histories: dict[str, History]) -> None:
    """Time and held-out loss of each optimizer, and what the loss is measured by."""
    for name, history in histories.items():
        if history.stopped:
            print(f"\n{name} stopped after {history.pairs:,} pairs: {history.stopped}")
    width = max(len(name) for name in (*histories, _DENSE))
    print(f"\n{'':{width}s}  in the optimizer   whole training   held-out loss per pair")
    for name, seconds, whole, loss in _lines(trainer, histories):
        print(f"{name:{width}s}  {seconds:>16s}   {whole:>14s}   {loss}".rstrip())
    if trainer.is_row_sparse:
        print(f"* estimated from {DENSE_STEPS} such steps")


_DENSE = "the same with dense gradients *"


def _lines(trainer: Trainer, histories: dict[str, History]) -> Iterator[tuple[str, str, str, str]]:
    for name, history in histories.items():
        times = f"{history.optimizer_seconds:.1f} s", f"{history.seconds:.1f} s"
        yield (name, *times, f"{history.best.loss:.3f}")
    if trainer.is_row_sparse:
        history = trainer.history
        dense = trainer.dense_seconds()
        whole = history.seconds - history.optimizer_seconds + dense
        yield _DENSE, f"{dense:.1f} s", f"{whole:.1f} s", ""
    yield "guesses by frequency alone", "", "", f"{trainer.guess_loss():.3f}"
    yield "untrained", "", "", f"{trainer.history.held_out[0].loss:.3f}"
