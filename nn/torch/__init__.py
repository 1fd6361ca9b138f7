"""Optimizers with PyTorch's names, arguments, numbers and states, for dense and sparse gradients.

``fusestep.nn.torch.X`` takes the place of ``torch.optim.X``; PyTorch is imported with it.
"""

from .adafactor import Adafactor
from .adagrad import FTRL, Adadelta, Adagrad, RMSprop
from .adam import Adam, AdamW, LazyAdam, SparseAdam
from .adam_variants import Adamax, Adan, Lion, NAdam, RAdam
from .clipping import clip_grad_norm_
from .descent import ASGD, SGD, Rprop
from .embedding import ShardedEmbedding
from .layerwise import LARS, Lamb
from .optimizer import Optimizer
from .prodigy import Prodigy
from .row_wise import RowWiseAdagrad, RowWiseAdam
from .thor import Thor

__all__ = [
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Adan", "FTRL", "LARS",
    "Lamb", "LazyAdam", "Lion", "NAdam", "Optimizer", "Prodigy", "RAdam", "RMSprop",
    "RowWiseAdagrad", "RowWiseAdam", "Rprop", "SGD", "ShardedEmbedding", "SparseAdam", "Thor",
    "clip_grad_norm_",
]  # fmt: skip
