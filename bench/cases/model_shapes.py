"""The parameter shapes of real models, in the order in which their layers come."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

Shape = tuple[int, ...]


def many_small(count: int = 200) -> list[Shape]:
    """Small vectors: ``np.random.default_rng(0).integers(16, 4097, count)`` elements each."""
    return [(int(n),) for n in np.random.default_rng(0).integers(16, 4097, count)]


def resnet50() -> list[Shape]:
    """ResNet-50 for 1,000 classes: 161 tensors, 25,557,032 elements (He et al., 2016)."""
    filters, channels = [(64, 3, 7, 7)], 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            filters += [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:  # the first of a stage projects its input too
                filters.append((4 * width, channels, 1, 1))
            channels = 4 * width
    normalized = [shape for own in filters for shape in (own, own[:1], own[:1])]
    return [*normalized, (1000, channels), (1000,)]


def gpt2_small() -> list[Shape]:
    """GPT-2 small: 148 tensors, 124,439,808 elements, head and token embedding being one
    (Radford et al., 2019).
    """
    width, layers = 768, 12
    norm: list[Shape] = [(width,), (width,)]
    attention: list[Shape] = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    perceptron: list[Shape] = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    blocks = [*norm, *attention, *norm, *perceptron] * layers
    return [(50257, width), (1024, width), *blocks, *norm]


# Different values of each of the 26 categorical features in the Criteo Kaggle data.
CRITEO_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


def dlrm_tables() -> list[Shape]:
    """The 26 embedding tables of DLRM for Criteo Kaggle, 16 wide: 540,201,232 elements
    (Naumov et al., 2019).
    """
    return [(rows, 16) for rows in CRITEO_ROWS]


def dlrm_dense() -> list[Shape]:
    """Weights and biases of its two perceptrons, 13-512-256-64-16 and 367-512-256-1.

    The second takes the first one's 16 outputs and the 351 products of pairs of 27 vectors.
    """
    return _layers(((13, 512), (512, 256), (256, 64), (64, 16), (367, 512), (512, 256), (256, 1)))


def click_log_tables() -> list[Shape]:
    """26 tables of 100 to 500,000 rows, 64 wide, each larger than the last by the same factor."""
    return [(round(rows), 64) for rows in np.geomspace(100, 500_000, 26)]


def click_log_dense() -> list[Shape]:
    """Layers of the same perceptrons with 64 outputs below, and 64 and 351 inputs above."""
    return _layers(((13, 512), (512, 256), (256, 64), (415, 512), (512, 256), (256, 1)))


def _layers(widths: Iterable[tuple[int, int]]) -> list[Shape]:
    return [shape for before, after in widths for shape in ((after, before), (after,))]
