"""The device, or Numba's simulator of one: everything below the kernels, under the same names.

This is the only place that asks which of them it is.
"""

from numba import config

if not config.ENABLE_CUDASIM:
    from .driver import *  # noqa: F403
    from .intrinsics import *  # noqa: F403
else:
    from .simulated import *  # noqa: F403
