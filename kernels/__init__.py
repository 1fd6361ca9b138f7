"""Compiled update kernels: arrays, addresses and scalars in, arrays updated in place.

Nothing here knows a user, a framework or an error message: callers check first
(``fusestep.ops``), kernels trust their arguments.

A newcomer may add a rule (`rules`): a scalar function with its scalars and states, from whose
`Rule` all loops and checks follow. Prefetch distances, the chunks of dense steps and the sizes
below which one thread runs (``SERIAL_BELOW``) change the speed alone; ``fusestep bench --against``
says by how much.

Bits are fixed by more than the mathematics; they are equal for any number of threads. They follow
from the order of operations in a rule, from where it rounds (`rule.product`, `rule.RULE_FLAGS`),
from `storage`, and from the cuts by which sums are made: ``HOT`` and the ranges of `tables`,
``PART`` of `cpu.dense`, the tiles and pieces of `cpu.matrices`, and `cuda.device.geometry`. To
change one of these is to change results; ``tests/digests`` lists which.
"""
