"""THOR: natural gradient descent with Kronecker-factored curvature."""

from .conv import ThorConv2d
from .layers import ThorDense, ThorEmbedding, ThorLayerNorm
from .optimizer import Thor
from .thor import thor

__all__ = ["Thor", "ThorConv2d", "ThorDense", "ThorEmbedding", "ThorLayerNorm", "thor"]
