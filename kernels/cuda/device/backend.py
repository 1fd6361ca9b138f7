"""Everything below the kernels: the driver, and the instructions that Numba has no name for.

Raises:
    ImportError: Numba's simulator is switched on, which has neither.
"""

from numba import config

if config.ENABLE_CUDASIM:
    raise ImportError("kernels do not run in Numba's simulator: unset NUMBA_ENABLE_CUDASIM")

from .driver import *  # noqa: F403
from .intrinsics import *  # noqa: F403
