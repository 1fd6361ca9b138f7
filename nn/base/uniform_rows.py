"""UniformRows and NormalRows: new weights that follow from ids."""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np

from ...kernels.cpu.rows.draw import draw_uniform
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

    def __call__(self, ids: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """float32 of this shape, whose first axis numbers the ids."""
        named, seed = np.ascontiguousarray(ids.reshape(-1), np.int64), mixed(self.seed)
        seed -= (seed >> 63) << 64  # its bits as an int64
        drawn = draw_uniform(named, math.prod(shape[1:]), seed, self.bound)
        return drawn.reshape(shape)


class NormalRows:
    """New weights of rows: normal numbers that follow from seed, id and column alone.

    Args:
        std: their standard deviation; none is more than 6.8 times as large.
        seed: an int from 0 to 2**63 - 1.

    Raises:
        TypeError, ValueError: an argument is no number, or out of range.

    >>> import numpy as np
    >>> draw = NormalRows(0.1, seed=3)
    >>> np.array_equal(draw(np.array([7, 9]), (2, 4))[1:], draw(np.array([9]), (1, 4)))
    True
    """

    def __init__(self, std: float, seed: int = 0) -> None:
        self.std = check.scalar_at_least_0("NormalRows", "std", std)
        self.seed = checked_seed("NormalRows", "seed", seed)

    def __call__(self, ids: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """float32 of this shape, whose first axis numbers the ids."""
        words = _words(self.seed, ids, shape)
        halves = words >> np.uint64(32), words & np.uint64(2**32 - 1)
        size, turn = ((half.astype(np.float64) + 0.5) * 2.0**-32 for half in halves)
        # Box and Muller's way, by series: each machine rounds their operations alike.
        fraction, exponent = np.frexp(size)
        s = (fraction - 1.0) / (fraction + 1.0)
        log = exponent * math.log(2.0) + 2.0 * s * np.polyval(_ARTANH, s * s)
        drawn = np.sqrt(-2.0 * log) * np.polyval(_COSINE, (2.0 * turn - 1.0) ** 2)
        found: np.ndarray = (drawn * self.std).astype(np.float32)
        return found


_ARTANH = [1.0 / k for k in range(27, 0, -2)]
_COSINE = [*accumulate(range(2, 32, 2), lambda c, k: -c * math.pi**2 / (k * (k - 1)), initial=1.0)]
_COSINE.reverse()


def _words(seed: int, ids: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """64 random bits for each element of this shape."""
    columns = np.arange(math.prod(shape[1:]), dtype=np.uint64)
    keys = mixed(np.uint64(mixed(seed)) ^ ids.reshape(-1, 1).astype(np.uint64))
    found: np.ndarray = mixed(keys + columns).reshape(shape)
    return found
