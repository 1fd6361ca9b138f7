"""Classes of Adam's family, an optimizer of a user, and small parameters and gradients."""

from typing import Any

import numpy as np
import pytest
from fusestep import nn

CLASSES = (nn.Adam, nn.LazyAdam, nn.AdamOffload, nn.AdamWeightDecay)
EACH_CLASS = pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def parameters(*names: str, dtype: Any = np.float32) -> list[nn.Parameter]:
    """Parameters ``[4, 3]`` with different values."""
    rng = np.random.default_rng(1)
    return [nn.Parameter(rng.standard_normal((4, 3)).astype(dtype), name) for name in names]


def gradients_of(opt: nn.Optimizer, seed: int, dtype: Any = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(p.shape).astype(dtype) for p in opt.parameters]


def rows(indices: Any, shape: tuple[int, ...] = (4, 3), value: float = 1.0) -> nn.RowTensor:
    values = np.full((len(indices), *shape[1:]), value, np.float32)
    return nn.RowTensor(np.array(indices, np.int64), values, shape)


class Halving(nn.LearningRateSchedule):
    def construct(self, global_step: int) -> float:
        return 0.5 * 0.5**global_step


def central(g: np.ndarray) -> np.ndarray:
    """A gradient without its mean, in all of its dimensions but the first."""
    return g - g.mean(axis=tuple(range(1, g.ndim)), keepdims=True) if g.ndim > 1 else g


class Descent(nn.Optimizer):
    """A custom optimizer that uses every separate step of the base class."""

    def construct(self, gradients: tuple[Any, ...]) -> Any:
        gradients = self.decay_weight(gradients)
        gradients = self.gradients_centralization(gradients)
        gradients = self.scale_grad(gradients)
        rates = self.get_lr() if self.is_group_lr else (self.get_lr(),) * len(self.parameters)
        for p, g, rate in zip(self.parameters, gradients, rates, strict=True):
            p.data -= p.dtype.type(rate) * g
        return self.broadcast_params((True,) * len(self.parameters))
