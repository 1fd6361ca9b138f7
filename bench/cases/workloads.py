"""Workloads: shapes of parameters, and which of their gradients are row-sparse."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..errors import BenchError
from ..registry import record
from ..workers.worker_protocol import Parameter
from . import indices, model_shapes
from .model_shapes import Shape

Kind = record.Kind | Literal["pooled"]
# The published sizes.
DENSE_SIZES = ("1K", "16K", "256K", "1M", "4M", "16M", "64M")
PUBLISHED_DENSE = "16M"  # in the tables of the documents
ROW_SIZES = ("10Kx16x1K", "100Kx32x8K", "500000x64x65536", "1Mx128x64K")
# Rows that lie far apart, for uniform indices: most occur once, and each costs misses.
FAR_SIZES = (
    *("1000000x32x65536", "10000000x32x65536", "5000000x64x65536"),
    *("10000000x16x65536", "1000000x128x65536"),
)
# Tables whose rows are pooled: of a click log, or so many alike; samples, and ids of each in each.
CLICK_LOG = "click-log"
POOLED_SIZES = (*(f"{CLICK_LOG}x64x2048x{bag}" for bag in (1, 20, 100)), "1000000x128x2048x20")
DEFAULTS: dict[Kind, str] = {
    "dense": "4M", "rows": "500000x64x65536", "pooled": f"{CLICK_LOG}x64x2048x20",
}  # fmt: skip
# From 10^3 to 10^7 ids in 26 tables, and a million in 1 to 1,000.
GROWTH_SIZES = (
    *(f"26x1000x64x{2 * 10**k}x20" for k in range(5)),
    *(f"{10**k}x{26_000 // 10**k}x64x{50_000 // 10**k}x20" for k in range(4)),
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_NUMBER = re.compile(r"([1-9]\d*)([KMG]?)")
_RANGE_FACTOR = 4
_CLICKS, _BAG = 2048, 20  # samples of a batch, and lookups of one in each table


@dataclass(frozen=True)
class Tensor:
    """One parameter and the kind of its gradient."""

    shape: Shape  # ``[N, D]`` where the gradient is row-sparse
    B: int | None = None  # how many rows the gradient names; None for a dense one
    indices: str = ""  # their distribution
    # So many of these rows in turn are pooled, and have one row of the gradient together;
    # None: each has its own.
    bag: int | None = None

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


Tensors = tuple[Tensor, ...]


def dense(size: str, shape: Callable[[int], Shape] = lambda n: (n,)) -> Tensors:
    """A tensor of so many elements, or of about as many in a ``shape``; ``CxN``: C of them."""
    count, _, elements = size.rpartition("x")
    return (Tensor(shape(number(elements))),) * (number(count) if count else 1)


def square(n: int) -> Shape:
    """The shape of a square matrix of about ``n`` elements."""
    side = max(1, math.isqrt(n))
    return side, side


def rows(size: str, distribution: str) -> Tensors:
    """A table ``[N, D]`` and a batch of B of its rows, from ``NxDxB``."""
    N, D, B = map(number, size.split("x"))
    return (Tensor((N, D), B, distribution),)


def pooled(size: str, distribution: str) -> Tensors:
    """Tables and a batch of bags of their rows, from ``TxNxDxSAMPLESxBAG``.

    T tables of N rows, one without ``Tx``; with ``click-log`` for N those of a click log.
    """
    *count, rows, width, samples, bag = size.split("x")
    D, length = number(width), number(bag)
    numbers = [n for n, _ in model_shapes.click_log_tables()]
    if rows != CLICK_LOG:
        numbers = [number(rows)] * (number(count[0]) if count else 1)
    B = number(samples) * length
    return tuple(Tensor((n, D), B, distribution, length) for n in numbers)


def _clicks(model: str, lookups: int, distribution: str) -> Tensors:
    """So many lookups of each sample of a batch in each table, whose vectors are added up."""
    tables, layers = (getattr(model_shapes, f"{model}_{part}")() for part in ("tables", "dense"))
    sparse = [Tensor(shape, _CLICKS * lookups, distribution) for shape in tables]
    return (*sparse, *map(Tensor, layers))


DENSE_MODELS: dict[str, Callable[[], list[Shape]]] = {
    "many-small": model_shapes.many_small,
    "resnet50": model_shapes.resnet50,
    "gpt2": model_shapes.gpt2_small,
}
MIXED_MODELS: dict[str, Callable[[str], Tensors]] = {
    "dlrm": lambda distribution: _clicks("dlrm", 1, distribution),
    "bags": lambda distribution: _clicks("click_log", _BAG, distribution),
}


def number(text: str) -> int:
    """A whole number above 0, with K, M or G for powers of 1024.

    Raises:
        BenchError: it is none.
    """
    found = _NUMBER.fullmatch(text)
    if not found:
        raise BenchError(f"--size: expected a number such as 65536, 64K or 16M, got {text!r}")
    return int(found[1]) * _UNITS[found[2]]


def label(n: int) -> str:
    """A number with the largest unit that divides it."""
    unit = max((u for u, value in _UNITS.items() if n % value == 0), key=_UNITS.__getitem__)
    return f"{n // _UNITS[unit]}{unit}"


def parse_sizes(text: str) -> dict[Kind, list[str]]:
    """Sizes of each kind of cases, from a list with commas.

    An entry is a number of elements (``16M``), a range of them in steps of four (``1K..64M``), a
    number of tensors and the elements of each (``10x256K``), rows, width and batch of a table
    (``500000x64x65536``), tables, samples and ids of a bag (`pooled`), ``all`` published sizes,
    ``far`` for large tables, or ``growth`` for more and more ids and tables that are pooled.

    Raises:
        BenchError: an entry is none of these.
    """
    found: dict[Kind, list[str]] = {"dense": [], "rows": [], "pooled": []}
    for entry in (part.strip() for part in text.split(",")):
        parts, (first, _, last) = entry.split("x"), entry.partition("..")
        if entry == "all":
            found["dense"] += DENSE_SIZES
            found["rows"] += ROW_SIZES
            found["pooled"] += POOLED_SIZES
        elif entry == "far":
            found["rows"] += FAR_SIZES
        elif entry == "growth":
            found["pooled"] += GROWTH_SIZES
        elif last:
            n, end = number(first), number(last)
            if n > end:
                raise BenchError(f"--size: expected a range that ascends, got {entry!r}")
            while n <= end:
                found["dense"].append(label(n))
                n *= _RANGE_FACTOR
        elif len(parts) > 5:
            raise BenchError(f"--size: expected N x D x B such as 500000x64x65536, got {entry!r}")
        else:
            for part in parts[1:] if parts[0] == CLICK_LOG and len(parts) == 4 else parts:
                number(part)
            kinds: tuple[Kind, ...] = ("dense", "dense", "rows", "pooled", "pooled")
            found[kinds[len(parts) - 1]].append(entry)
    return {kind: list(dict.fromkeys(sizes)) for kind, sizes in found.items()}


def parameters(tensors: Tensors, start: float) -> list[Parameter]:
    """Parameters that ours and all peers start from: gradients are the same in every run, normal.

    Args:
        tensors: which.
        start: every element of them.
    """
    rng, found = np.random.default_rng(1), []
    for seed, tensor in enumerate(tensors):
        shape, rows = tensor.shape, None
        if tensor.B is not None:
            rows = indices.draw(tensor.indices, shape[0], tensor.B, seed)
            shape = tensor.B // (tensor.bag or 1), shape[1]
        values = np.broadcast_to(np.float32(start), tensor.shape)  # without memory of its own
        gradient = rng.standard_normal(shape, np.float32)
        found.append(Parameter(tensor.shape, gradient, rows, values, tensor.bag))
    return found
