"""Files of MindSpore and MXNet in the formats of this package: ``fusestep convert``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from .base.checkpoint import replace_file, save_checkpoint
from .mxnet import serialization
from .mxnet.pickles import load_states


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fusestep convert``."""
    parser.add_argument(
        "source", type=Path,
        help="a checkpoint of MindSpore (.ckpt; MindSpore must be installed), or the states of an "
        "Updater or Trainer of MXNet (.states; nothing in them is executed)",
    )  # fmt: skip
    parser.add_argument(
        "target", type=Path,
        help="the file to write: what nn.load_checkpoint reads, or, of states of MXNet, what "
        "nn.mxnet.Updater.set_states takes",
    )  # fmt: skip
    parser.add_argument(
        "--updates",
        type=int,
        help="the number of updates done, for .states without one (saved without the optimizer)",
    )


def main(args: argparse.Namespace) -> int:
    """Convert one file; returns the exit status."""
    try:
        written = converted(args.source, args.target, args.updates)
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"fusestep convert: {error}", file=sys.stderr)
        return 1
    print(f"{args.target}: {written}")
    return 0


def converted(source: Path, target: Path, updates: int | None = None) -> str:
    """Write ``target`` from ``source``; what it holds, in words.

    Raises:
        ImportError: a checkpoint of MindSpore, without MindSpore.
        OSError: a file cannot be read or written.
        ValueError: the source is not of the kind that its name says, or is the target, or its
            updates are not known.
    """
    if target.exists() and target.samefile(source):
        raise ValueError(f"{source}: expected another name for what is written")
    if source.suffix == ".ckpt":
        arrays = mindspore_arrays(source)
        save_checkpoint(arrays, target)
        return f"{len(arrays)} arrays"
    if source.suffix != ".states":
        raise ValueError(f"{source}: expected a name that ends with .ckpt or .states")
    states, counts, num_update = load_states(source.read_bytes())
    if not counts:
        if updates is None or updates < 0:
            raise ValueError(f"{source} has no counts of updates: say how many with --updates")
        counts, num_update = dict.fromkeys(states, updates), updates
    elif updates is not None:
        raise ValueError(f"{source} has counts of updates: --updates has no use")
    replace_file(target, serialization.dumped(states, counts, num_update), "target")
    return f"states of {len(states)} weights, {num_update} updates"


def mindspore_arrays(source: Path) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint of MindSpore, by name."""
    source.open("rb").close()  # else MindSpore says in a page of its own what is wrong
    try:
        import mindspore
    except ImportError:
        raise ImportError(f"{source} needs MindSpore: pip install 'fusestep[mindspore]'") from None
    from .mindspore.binding import host_array

    try:
        found = mindspore.load_checkpoint(str(source))
    except Exception as error:  # it raises whatever the reader of its format does
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{source} is no checkpoint of MindSpore: {reason}") from None
    return {name: np.array(host_array(tensor)) for name, tensor in found.items()}
