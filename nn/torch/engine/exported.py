"""Forwards of tables in `torch.export`: plain operations, with the ids of now as constants."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ....kernels.private import find
from ....ops.runtime.errors import reject

_outside_of_traces = find("outside of a trace") or nullcontext


def refuse_graph(module: nn.Module) -> NoReturn:
    """Refuse to be traced, as ``__prepare_scriptable__`` too: rows of other ids would be wrong."""
    expected = "torch.export.export of the model in eval mode, with strict=False"
    got = "training mode" if module.training else "another way"
    reject(RuntimeError, type(module).__name__, "the module", "is traced", expected, got)


def in_graph(module: nn.Module) -> bool:
    """Whether `torch.export` looks at a forward. Raises: as `refuse_graph`."""
    # There graphs break; up to 2.11 PyTorch says of all that is compiled that it is exported.
    if torch.compiler.is_dynamo_compiling():
        return False
    # Its name before 2.7.
    is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
    is_exported = bool(is_exporting())
    if torch.jit.is_tracing() or (is_exported and module.training):
        refuse_graph(module)
    return is_exported


def rows_in_graph(table: Any, ids: Tensor) -> Tensor:
    """The rows of ids in a `GrowingEmbedding`; 0 of those that have none now."""
    table._admission()  # which checks the table
    if table.shard is not None and table.shard.comm.size > 1:
        expected, got = "the table of one process", "a part of it"
        reject(RuntimeError, type(table).__name__, "the module", "is exported", expected, got)
    admitted, rows, *_ = table.ids.rows_of_ids()
    rows[admitted == table.padding_idx] = 0
    order, ids = np.argsort(admitted), table._int64(ids)
    # One more, for ids above all. Tensors that are made in a trace are copied in each call.
    with _outside_of_traces():
        keys, places = (
            torch.from_numpy(np.append(x[order], x.dtype.type(0))) for x in (admitted, rows)
        )
    k = torch.searchsorted(keys[:-1], ids)
    return torch.where(keys[k] == ids, places[k], 0)


def bags_in_graph(module: Any, ids: Any, offsets: Any, factors: Any) -> Tensor:
    """Pooled rows of the tables of an `EmbeddingBags`; a RuntimeError where bits would differ."""
    tables = [[*module.children()][t] for t in module._features]
    dtypes = {table.weight.dtype for table in tables}
    is_rounded = module.mode != "max" and not dtypes <= {torch.float32, torch.float64}
    is_one = len(tables) > 1 and isinstance(ids, Tensor)
    if len(dtypes) > 1 or is_rounded or is_one or factors is not None:
        expected = "a list of ids, no per_sample_weights, tables of one dtype, of 16 bits with max"
        reject(RuntimeError, "EmbeddingBags", "the module", "is exported", expected, "others")
    ids, offsets = (x if isinstance(x, list | tuple) else [x] * len(tables) for x in (ids, offsets))
    outputs = []
    for table, rows, begins in zip(tables, ids, offsets, strict=True):
        options: dict[str, Any] = {"mode": module.mode}
        if hasattr(table, "ids"):
            rows = rows_in_graph(table, rows)
        if isinstance(table, nn.EmbeddingBag):
            options["padding_idx"] = table.padding_idx
        elif begins is None and rows.dim() == 1:
            rows = rows[:, None]
        if begins is not None:
            options["include_last_offset"] = module.include_last_offset
        outputs.append(F.embedding_bag(rows, table.weight, begins, **options))
    return torch.cat(outputs, 1)
