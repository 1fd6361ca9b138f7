"""Optimizers with PyTorch's names, arguments, numbers and states, for dense and sparse gradients.

``fusestep.nn.torch`` takes the place of ``torch.optim``; PyTorch is imported with it. Names of
``torch.optim`` that are not written anew here are PyTorch's: ``LBFGS``, ``lr_scheduler``, ...
"""

from typing import TYPE_CHECKING

from torch import optim as _optim

from .adafactor import Adafactor
from .adagrad import FTRL, Adadelta, Adagrad, RMSprop
from .adam import Adam, AdamW, LazyAdam, SparseAdam
from .adam_variants import Adamax, Adan, Lion, NAdam, RAdam
from .bags import EmbeddingBags
from .clipping import ClippingModule, ClippingTrainer, clip_grad_norm_, clip_grad_value_
from .descent import ASGD, SGD, Rprop
from .embedding import ShardedEmbedding
from .growing import GrowingEmbedding
from .layerwise import LARS, Lamb
from .optimizer import FusedOptimizer
from .prodigy import Prodigy
from .rounding import rounded_away
from .row_wise import RowWiseAdagrad, RowWiseAdam
from .thor import Thor
from .wrappers import averaged, hide_from_ddp

__all__ = [
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Adan",
    "ClippingModule", "ClippingTrainer", "EmbeddingBags", "FTRL", "FusedOptimizer",
    "GrowingEmbedding", "LARS", "Lamb", "LazyAdam", "Lion", "NAdam", "Prodigy", "RAdam",
    "RMSprop", "RowWiseAdagrad", "RowWiseAdam", "Rprop", "SGD", "ShardedEmbedding", "SparseAdam",
    "Thor", "averaged", "clip_grad_norm_", "clip_grad_value_", "hide_from_ddp", "rounded_away",
]  # fmt: skip

if TYPE_CHECKING:
    from torch.optim import (
        LBFGS,
        Muon,
        Optimizer,
        lr_scheduler,
        swa_utils,
        swap_in_optimizer_params_and_state,
    )  # fmt: skip

    __all__ += ["LBFGS", "Muon", "Optimizer", "lr_scheduler", "swa_utils"]
    __all__ += ["swap_in_optimizer_params_and_state"]
else:  # whatever the installed PyTorch has
    for _name in sorted({*_optim.__all__} - {*__all__}):
        globals()[_name] = getattr(_optim, _name)
        __all__.append(_name)
