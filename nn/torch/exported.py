"""Forwards of tables in `torch.export`: plain operations, with the ids of now as constants."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ...ops.runtime.errors import reject
from ..base.id_map import IdMap


def refuse_script(module: nn.Module) -> NoReturn:
    """Refuse `torch.jit`: a trace would have the rows of its example, whatever ids come.

    Raises:
        RuntimeError: always.
    """
    expected = "torch.export.export of the model in eval mode"
    reject(RuntimeError, type(module).__name__, "the module", "is served", expected, "torch.jit")


def in_graph(module: nn.Module) -> bool:
    """Whether `torch.export` looks at a forward.

    Raises:
        RuntimeError: `torch.jit` does, or the module is in training mode.
    """
    if torch.jit.is_tracing():
        refuse_script(module)
    if not torch.compiler.is_exporting():
        return False
    if module.training or torch.compiler.is_dynamo_compiling():
        expected, got = "eval(), and torch.export with strict=False", "another way"
        reject(RuntimeError, type(module).__name__, "the module", "is exported", expected, got)
    return True


def rows_in_graph(known: IdMap, padding: int | None, ids: Tensor) -> Tensor:
    """The rows of int64 ids; 0 of those that have none now."""
    keys, rows, *_ = known.rows_of_ids()
    order = np.argsort(keys)
    keys = keys[order]
    rows = rows[order] * (keys != padding)
    # One more, for ids above all.
    every, all_rows = (torch.from_numpy(np.append(x, x.dtype.type(0))) for x in (keys, rows))
    places = torch.searchsorted(every[:-1], ids)
    return torch.where(every[places] == ids, all_rows[places], 0)


def bags_in_graph(module: Any, ids: Any, offsets: Any, factors: Any) -> Tensor:
    """Pooled rows of the tables of an `EmbeddingBags`, to the bits of its forward on the host.

    Raises:
        RuntimeError: PyTorch's own bags round these otherwise, or all ids are one tensor.
    """
    where, tables = "EmbeddingBags", [[*module.children()][t] for t in module._features]
    dtypes = {table.weight.dtype for table in tables}
    is_short = module.mode == "mean" and not dtypes.isdisjoint((torch.float16, torch.bfloat16))
    if len(dtypes) > 1 or factors is not None or is_short:
        expected = "tables of one dtype, no per_sample_weights, and no means of 16 bits"
        reject(
            RuntimeError, where, "the module", "is exported", expected, "others: their bits differ"
        )
    if len(tables) > 1 and isinstance(ids, Tensor):
        expected = "a list, with one for each feature"
        reject(RuntimeError, where, "ids", "do not fit torch.export", expected, "one tensor")
    ids, offsets = ([x] * len(tables) if x is None or isinstance(x, Tensor) else x
                    for x in (ids, offsets))  # fmt: skip
    found = []
    for table, rows, begins in zip(tables, ids, offsets, strict=True):
        is_bag = isinstance(table, nn.EmbeddingBag)
        if isinstance(getattr(table, "ids", None), IdMap):
            rows = table.rows_in_graph(rows)
        options = {"mode": module.mode, "padding_idx": table.padding_idx if is_bag else None}
        if begins is not None:
            options["include_last_offset"] = module.include_last_offset
        elif rows.dim() == 1 and not is_bag:
            rows = rows[:, None]
        begins = None if begins is None else begins.long()
        found.append(F.embedding_bag(rows.long(), table.weight, begins, **options))
    return torch.cat(found, 1)
