"""UniformRows: new weights that follow from ids."""

from __future__ import annotations

import math

import numpy as np

from ...kernels.keeping import mixed
from ...ops.runtime import check
from .arguments import seed as checked_seed


class UniformRows:
    """New weights of rows: uniform numbers that follow from seed, id and column alone.

    So an id gets the same numbers whenever, wherever and in whatever row it is admitted.

    Args:
        bound: they are in ``[-bound, bound)``.
        seed: an int from 0 to 2**63 - 1.

    Raises:
        TypeError, ValueError: an argument is no number, or out of range.

    >>> import numpy as np
    >>> draw = UniformRows(0.1, seed=3)
    >>> both = draw(np.array([7, 9]), (2, 4))
    >>> np.array_equal(both[1:], draw(np.array([9]), (1, 4)))
    True
    """

    def __init__(self, bound: float, seed: int = 0) -> None:
        self.bound = check.scalar_at_least_0("UniformRows", "bound", bound)
        self.seed = checked_seed("UniformRows", "seed", seed)
        self._key = np.uint64(mixed(self.seed))

    def __call__(self, ids: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """float32 of this shape, whose first axis numbers the ids."""
        columns = np.arange(math.prod(shape[1:]), dtype=np.uint64)
        keys = mixed(self._key ^ ids.reshape(-1, 1).astype(np.uint64))
        words = mixed(keys + columns) >> np.uint64(40)  # 24 bits, which a float32 holds
        drawn = words.astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
        found: np.ndarray = (drawn * np.float32(self.bound)).reshape(shape)
        return found
