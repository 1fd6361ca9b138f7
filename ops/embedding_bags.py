"""Pooled rows of many tables in one call, and the gradients of the tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..kernels.cpu.threads.allocation import Recycled
from .runtime.arrays import adopt_anywhere
from .runtime.bags.pooled import pool
from .runtime.bags.pooling import Pooling
from .runtime.bags.tensor import BagTensor
from .runtime.errors import reject, reject_unknown


class EmbeddingBags:
    """Rows of many tables, pooled bag by bag, side by side in one array::

        out[b, columns of feature f] = pool(tables[t][id] for id in bag b of feature f)

    A *feature* is a list of bags of ids, one bag for each sample of the batch; it looks up rows of
    one table. All tables are read in one parallel call, each sum in the order of the ids.

    Args:
        pooling: ``"sum"``; ``"mean"``: divided by the number of ids; ``"max"``: of each column the
            largest number, whose gradient is that of the first id that has it; ``"none"``: every id
            has a row of its own, and the output is a list with an array for each feature. An empty
            bag is 0.
        features: the table of each feature, list of int; default: a feature for each table.
        padding_idx: an id that counts for nothing, neither in sums nor in numbers of ids, and gets
            no gradient (with ``"none"`` its row is 0); int, or a list with one or None for each
            feature.
        out_of_range: ids outside of ``[0, N)`` ``"raise"`` an error, or are ``"drop"``-ped: then
            they count for nothing.

    Call arguments:
        tables: a list of floating ``[N, D]`` arrays, all on the host or all on one CUDA device,
            where the other arrays are then too; float64 all or none.
        ids: a list with an int32 or int64 array for each feature, or one array with the ids of
            all features, one after the other.
        offsets: where bags begin, int32 or int64: with a list of ids a list with an array of
            ``batch + 1`` for each feature, from 0 to the number of its ids; with one array of ids
            one of ``features * batch + 1``. None: ids are ``[batch, length]``, all bags of a
            feature of the same length; or, with ``"none"``, ``[n]``.
        per_sample_weights: factors of the rows, in the form of the ids; only of sums.
        out: an array for the output, or a list with one ``[batch, D]`` for each feature; default a
            new array.

    Returns:
        ``[batch, sum of D]``, or a list as ``out`` is one, or with ``"none"`` a list of ``[n, D]``:
        float32, or float64 where the tables are; of 16-bit tables the sums are not rounded.
        ``numpy.split`` cuts the array into features without a copy.

    `gradients` has the gradient of each table, a `BagTensor`, for that of the output: with
    duplicates within and over bags, which the step that takes it sums in their order. An
    optimizer's step on it reads the gradient of the output in place. `weight_gradients` has those
    of weights.

    On a CUDA device the call is enqueued, and nothing is copied to the host. Where an offset or an
    id does not fit, ``out`` stays as it is, or the new output is 0 throughout, and the gradients
    let no step write; `fusestep.synchronize` raises the error. The gradients of ids that are one
    array of several features wait for the device, which alone knows how many ids each has; their
    features have to be in the order of their tables there.

    Raises:
        TypeError: a kind or dtype does not fit.
        ValueError: a shape, or an offset does not fit, or memory is shared that must not be.
        IndexError: an id is out of range.
        Nothing has been written when an error is raised.

    Source: ``torch.nn.EmbeddingBag``, for many tables FBGEMM's
    ``SplitTableBatchedEmbeddingBagsCodegen``.

    >>> import numpy as np
    >>> tables = [np.arange(6, dtype=np.float32).reshape(3, 2), np.ones((4, 1), np.float32)]
    >>> ids = [np.array([2, 0, 2]), np.array([3])]
    >>> offsets = [np.array([0, 2, 3]), np.array([0, 0, 1])]
    >>> bags = EmbeddingBags()
    >>> bags(tables, ids, offsets).tolist()
    [[4.0, 6.0, 0.0], [4.0, 5.0, 1.0]]
    >>> first, second = bags.gradients(tables, ids, offsets, np.ones((2, 3), np.float32))
    >>> first.to_dense().tolist()
    [[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]]
    """

    name = "EmbeddingBags"

    def __init__(
        self, pooling: str = "sum", *, features: Sequence[int] | None = None,
        padding_idx: int | Sequence[int | None] | None = None, out_of_range: str = "raise",
        **unknown: Any,
    ) -> None:  # fmt: skip
        reject_unknown(self.name, unknown, EmbeddingBags)
        self.pooling, self.features = pooling, features
        self.padding_idx, self.out_of_range = padding_idx, out_of_range
        self._memory = Recycled()

    def __call__(
        self, tables: Sequence[Any], ids: Any, offsets: Any = None,
        per_sample_weights: Any = None, *, out: Any = None,
    ) -> Any:  # fmt: skip
        """Pool rows; see the class."""
        return pool(self._read(tables), ids, offsets, per_sample_weights, out).out

    def gradients(
        self, tables: Sequence[Any], ids: Any, offsets: Any, grad: Any,
        per_sample_weights: Any = None,
    ) -> list[BagTensor]:  # fmt: skip
        """The gradients of the tables.

        Args:
            tables: the tables of the call.
            ids: the ids of the call.
            offsets: the offsets of the call.
            per_sample_weights: the weights of the call.
            grad: the floating gradient of its output, or a list with one for each feature (which
                is joined to one array first; on a device only with ``"none"``).

        Raises:
            TypeError, ValueError, IndexError: as the call; ``grad`` does not fit the output.
        """
        pooled = pool(self._read(tables), ids, offsets, per_sample_weights, sums=False)
        return pooled.gradients(grad)

    def weight_gradients(
        self, tables: Sequence[Any], ids: Any, offsets: Any, grad: Any
    ) -> list[np.ndarray]:
        """The gradients of the weights of ids, which do not depend on the weights::

            d out / d weight[k] = sum(table[ids[k]] * grad[bag of k, columns of the feature])

        Args:
            tables: as in `gradients`; the pooling has to be ``"sum"``.
            ids: as in `gradients`.
            offsets: as in `gradients`.
            grad: as in `gradients`.

        Returns:
            For each feature an array ``[n]``, of the type of the arithmetic, in the order of its
            ids; 0 for an id that is ignored.

        Raises:
            TypeError, ValueError, IndexError: as `gradients`.
        """
        pooled = pool(self._read(tables), ids, offsets, sums=False, multiplies=True)
        return pooled.weight_gradients(grad)

    def _read(self, tables: Sequence[Any]) -> Pooling:
        if not isinstance(tables, list | tuple):
            got = type(tables).__name__
            reject(TypeError, self.name, "tables", "have a wrong type", "a list of arrays", got)
        each = enumerate(tables)
        arrays = [adopt_anywhere(self.name, f"tables[{t}]", table) for t, table in each]
        chosen = self.pooling, self.padding_idx, self.out_of_range
        return Pooling(self.name, arrays, self.features, *chosen, memory=self._memory)
