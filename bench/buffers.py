"""Arrays of a point, with our step on them.

What a version to compare with imports: nothing of the inside of the package, which moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import ops
from .cases.subject import Bags, Prepare, Use
from .workers.worker_protocol import Job, Parameter


class Buffers:
    """One set of buffers with our step on them.

    Args:
        prepare: makes what takes the steps, for the parameters.
        use: what it does with such gradients.
        dtype: of parameters and gradients.
        given: the parameters and their gradients.
        put: copies an array to where the step is taken; None: to the host.
    """

    def __init__(
        self,
        prepare: Prepare,
        use: Use,
        dtype: np.dtype[Any],
        given: Sequence[Parameter],
        put: Callable[[np.ndarray], Any] | None = None,
    ) -> None:
        self.use, put = use, put or np.asarray
        values = [one.gradient.astype(dtype) for one in given]
        lengths = [one.bag for one in given if one.bag is not None]
        if lengths:  # of pooled rows, which have one gradient for all tables
            values = [np.concatenate(values, axis=1)]
        self.values = [put(array) for array in values]
        self.indices = [None if one.indices is None else put(one.indices.copy()) for one in given]
        self.bags: list[Bags] = []
        if lengths:
            counts = np.repeat(lengths, len(values[0]))
            ids = np.concatenate([one.indices for one in given if one.indices is not None])
            offsets = np.concatenate([[0], np.cumsum(counts)])
            self.bags = [Bags(put(ids), put(offsets), self.values[0])]
        self.parameters = [put(np.array(one.start, dtype, order="C")) for one in given]
        self.prepared = prepare(self.parameters)
        if use.in_place:
            self.prepared = self.prepared._replace(updated=[(values,) for values in self.values])

    def job(self, *, fresh: bool) -> Job:
        """Our step."""
        step, gradients = self.prepared.step, self._gradients(self.values)
        hand_over = self.prepared.load or (lambda _: None)

        def load() -> None:
            nonlocal gradients
            if fresh:
                gradients = self._gradients([values.copy() for values in self.values])
            hand_over(gradients)

        return Job(lambda: step(gradients), load)

    def _gradients(self, values: Sequence[np.ndarray]) -> tuple[Any, ...]:
        if self.bags:
            return tuple(of._replace(grad=grad) for of, grad in zip(self.bags, values, strict=True))
        return tuple(
            array if index is None else ops.RowTensor(index, array, parameter.shape)
            for array, index, parameter in zip(values, self.indices, self.parameters, strict=True)
        )
