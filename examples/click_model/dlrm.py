"""DLRM (Naumov et al., 2019, arXiv:1906.00091) in PyTorch: which impressions will be clicked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from .clicks import N_DENSE

# Layers of the authors' net for Criteo's log.
BOTTOM, TOP = (512, 256, 64), (512, 256)


def embedding(size: int, dim: int) -> nn.Module:
    """A table with sparse gradients, whose numbers are the smaller the more rows it has."""
    table = nn.Embedding(size, dim, sparse=True)
    limit = 1 / math.sqrt(size)
    nn.init.uniform_(table.weight, -limit, limit)
    return table


class DLRM(nn.Module):
    """Tables, an MLP for the dense features, products of all pairs of vectors, and an MLP on top.

    Args:
        sizes: rows of each table.
        dim: length of a row.
        table: makes a table of them.

    Attributes:
        tables: modules with a row for each id; or one that has the rows of all tables side by side.
        bottom: the MLP for the dense features.
        top: that on top.
    """

    def __init__(
        self, sizes: Sequence[int], dim: int,
        table: Callable[[int, int], nn.Module] = embedding,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tables: nn.Module = nn.ModuleList(table(size, dim) for size in sizes)
        self.bottom = nn.Sequential(*_layers((N_DENSE, *BOTTOM, dim)), nn.ReLU())
        n_vectors = len(sizes) + 1
        n_products = n_vectors * (n_vectors - 1) // 2
        self.top = nn.Sequential(*_layers((dim + n_products, *TOP, 1)))
        pairs = torch.tril_indices(n_vectors, n_vectors, offset=-1)
        self.register_buffer("pairs", pairs[0] * n_vectors + pairs[1], persistent=False)

    @property
    def dense_parameters(self) -> list[nn.Parameter]:
        """Those of the two MLPs."""
        return [*self.bottom.parameters(), *self.top.parameters()]

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Log-odds ``[B]`` of a click, from ``[B, N_DENSE]`` and ``[T, B]``."""
        bottom = self.bottom(dense)
        if isinstance(self.tables, nn.ModuleList):
            rows = [table(own) for table, own in zip(self.tables, ids, strict=True)]
            vectors = torch.stack([bottom, *rows], dim=1)
        else:
            vectors = torch.cat([bottom, self.tables([*ids])], dim=1)
            vectors = vectors.unflatten(1, (-1, bottom.shape[1]))
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        chosen = products.index_select(1, self.pairs)
        of_top: Tensor = self.top(torch.cat([bottom, chosen], dim=1))
        return of_top.squeeze(1)


def _layers(widths: Sequence[int]) -> list[nn.Module]:
    """Linear layers with rectifiers between them."""
    layers: list[nn.Module] = []
    for width, out in pairwise(widths):
        layers += [nn.Linear(width, out), nn.ReLU()]
    return layers[:-1]
