"""Compiled update kernels: arrays, addresses and scalars in, arrays updated in place.

Nothing here knows a user, a framework or an error message: callers check first
(``fusestep.ops``), kernels trust their arguments.
"""
