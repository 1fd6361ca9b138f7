"""Foundations of the operators: arrays and frameworks, checks, locks, streams, steps.

A newcomer may add a framework of device arrays (`frameworks`), a check with its text (`check`,
`errors`) or a form of row-sparse gradients (`row_forms`). All operators and optimizers step by way
of `step` and `row_step`, where everything that can fail comes before the first write: a new check
goes before them, and a new lock is taken in the order that `locks`, `pending` and `launch` say.

Bits are those of the kernels: hardly anything is computed here. What counts are the type of the
arithmetic and the rounding of scalars to it (`arrays.real_type`, `arrays.rounding`), the order of
occurrences in lists of row-sparse gradients and of batches in parts, and the sums of `row_tensor`.
"""
