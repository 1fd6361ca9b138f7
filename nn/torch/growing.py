"""GrowingEmbedding: an embedding whose ids have 64 bits and get rows when they occur."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ...kernels.cpu.rows.write import RowWrite
from ...kernels.cpu.threads import allocation
from ...kernels.cpu.threads.parallel import commit
from ...kernels.private import (
    at_the_end_of_backward,
    backward_of_now,
    is_bound,
    outside_of_graphs,
    parts_of,
    version_of,
)
from ...kernels.state import PARAMETER
from ...ops.runtime import check
from ...ops.runtime.bags.pooling import padding_of_features
from ...ops.runtime.errors import reject
from ..base.arguments import seed as checked_seed
from ..base.ids.admission import begin_by_key, locked
from ..base.ids.id_arrays import OPTIONAL, STATE, Admissions
from ..base.ids.id_map import IdMap
from ..base.uniform_rows import UniformRows
from ..distributed.agreement import gather_texts, jointly
from ..distributed.communicator import Communicator
from ..distributed.id_shard import IdShard
from ..engine.bag_maps import check_current, id_of_64_bits, rows_of_tables
from ..engine.tables import WEIGHTS, StatefulTable, TableArray, grown, more_rows
from .embedding import looked_up
from .engine.exported import in_graph, refuse_graph, rows_in_graph
from .engine.memory import DTYPES, array_of, tensor_of
from .engine.sleep import prepare_rows
from .engine.table_rows import optimizers_of, optimizers_of_all
from .engine.tensors import local, rebind
from .engine.threads import as_torch

_WHERE = "GrowingEmbedding"
_at_the_end_of_backward = at_the_end_of_backward()
_IDS = torch.int64, torch.int32, torch.uint64
_OF_ALL_ROWS = "xavier", "orthogonal", "eye", "dirac", "sparse"  # of `torch.nn.init`


class GrowingEmbedding(nn.Embedding):
    """``torch.nn.Embedding(sparse=True)`` for ids of 64 bits, whose rows an `IdMap` hands out.

    Ids are int64, int32 or uint64, whose bits are used as they are. In training mode, unless the
    weight is frozen, they are admitted as `nn.IdMap` says. A row that is handed out begins anew:
    with new weights, and with new states in the optimizers of `nn.torch` that have the table.
    Others know nothing of it: with them no row can be handed out twice. In evaluation mode, and
    where a checkpoint of activations is computed again, nothing changes. Ids without a row read row
    0, which is all zeros and gets no gradient.

    The step of the map is that of this module: it goes up in the first forward after a backward
    whose gradient such an optimizer has used, or that is no longer in ``.grad``. So batches whose
    gradients are summed are one step. A backward raises if rows of its forward were given back in
    between; a gradient in ``.grad`` loses rows that are handed out again.

    Memory is used as rows are: a table of many rows costs little until they are handed out. A step
    with ``sparse="all"``, and states of an optimizer that are filled, use all of it.

    With ``comm`` several processes own the ids, as `distributed.IdShard` says, and look up those of
    their parts of a batch, as `ShardedEmbedding` does: all call forward and backward, in one mode.
    Then capacity, table and ``state_dict`` are those of each process.

    Args:
        capacity: rows of the table, that of ids without one included; 2 to 2**31 - 1.
        embedding_dim: length of a row.
        padding_idx: an id that is never admitted; None: each may be.
        initial: the weights of new rows: a number, or a function ``initial(ids, shape)`` such as
            `nn.UniformRows`, so that they follow from the id. Or a function of ``torch.nn.init``,
            or `functools.partial` of one, whose numbers follow from PyTorch's generator and not
            from the id. None: uniform numbers below ``1 / sqrt(embedding_dim)``, with the seed.
        dtype: of the table; None: PyTorch's default.
        after, chance, full, pending: as `nn.IdMap`.
        seed: of the default weights and of admission, as `nn.IdMap`; None: drawn from PyTorch's
            generator, with ``comm`` by rank 0.
        comm: the processes that own the ids; None: this one.
        average: with ``comm``, as `ShardedEmbedding`.

    Attributes:
        weight: the table, ``[capacity, embedding_dim]``.
        ids: its `nn.IdMap`, for eviction and lookups.
        shard: the `distributed.IdShard` of this process, with ``comm``; else None.

    ``state_dict`` has copies of the rows that were handed out, the arrays of the map and the seed;
    it loads into a module of any capacity that has room for them. What an optimizer keeps is of the
    capacity that it was made for, and loads beside a table of that one or a larger one.

    `EmbeddingBags` adopts such modules, with ``comm`` too. `averaged` has means of rows by id. In
    DistributedDataParallel a table needs ``comm`` and `hide_from_ddp`.

    Raises:
        TypeError, ValueError: an argument does not fit.

    >>> import torch
    >>> from fusestep.nn.torch import SparseAdam
    >>> table = GrowingEmbedding(1000, 4)
    >>> optimizer = SparseAdam(table.parameters())
    >>> table(torch.tensor([2**62, -7, 2**62])).shape, len(table.ids)
    (torch.Size([3, 4]), 2)
    """

    mixed_up: tuple[str, ...] = ()  # what a wrapper does to the rows: see `wrappers`
    _drawn: UniformRows | None = None  # the default of `initial`
    _seed_of_old_files = 0
    _as_copied = -1  # the version of the weight of a copy without ids
    __prepare_scriptable__ = refuse_graph

    def __init__(
        self, capacity: int, embedding_dim: int, padding_idx: int | None = None, *,
        initial: float | Callable[[np.ndarray, tuple[int, ...]], Any] | None = None,
        dtype: torch.dtype | None = None, after: int = 1, chance: float = 1.0,
        seed: int | None = None, full: str = "reserved", pending: int | None = None,
        comm: Communicator | None = None, average: bool = False,
    ) -> None:  # fmt: skip
        first = int(torch.randint(2**63 - 1, (), device="cpu")) if seed is None else seed
        ids = IdMap(capacity, after=after, chance=chance, seed=first, full=full, pending=pending)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in DTYPES:
            reject(TypeError, _WHERE, "dtype", "is unknown", [*DTYPES], dtype)
        table = tensor_of(allocation.zeros((ids.capacity, embedding_dim), DTYPES[dtype]))
        super().__init__(ids.capacity, embedding_dim, sparse=True, _weight=table)
        (padding,) = padding_of_features(_WHERE, [padding_idx], 1)
        self.padding_idx = None if padding is None else id_of_64_bits(_WHERE, padding)
        self.ids = ids
        self._is_next, self._n_taken = True, -1
        self.average = check.flag(_WHERE, "average", average)
        if comm is not None:
            (first, *_) = map(int, gather_texts(comm, str(ids.seed)))
            ids._begin_seed(first if seed is None else ids.seed)
            ids._is_part = comm.size > 1
        self.shard = None if comm is None else IdShard(ids, comm)
        if initial is None:
            initial = self._drawn = UniformRows(1.0 / math.sqrt(embedding_dim), ids.seed)
        fill: Any = initial
        of_torch = getattr(fill, "func", fill)
        if getattr(of_torch, "__module__", "") == nn.init.__name__:
            if (name := of_torch.__name__).startswith(_OF_ALL_ROWS):
                expected = "a function that does not depend on how many rows are new"
                reject(ValueError, _WHERE, "initial", "is not supported", expected, name)
            initial = partial(_filled, fill)
        self.initial = initial
        self._seed_of_old_files = 0 if seed is None else ids.seed
        self.register_state_dict_post_hook(_handed_out)
        self.register_load_state_dict_pre_hook(_taken_over)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """The rows of ids of any shape: ``[*input.shape, embedding_dim]``.

        Raises:
            TypeError: ids are not int64, int32 or uint64 on the host.
            ValueError: more new ids than rows, with ``full="raise"``.
            RuntimeError: rows were given back, and no optimizer of `nn.torch` has the table; or a
                wrapper of the model mixes up its rows.
            Nothing has changed then.
        """
        if in_graph(self):
            return F.embedding(rows_in_graph(self, input), self.weight, 0)
        if torch.compiler.is_dynamo_compiling():
            return _outside_of_graphs(self, input)
        if self.shard is not None:
            return self._of_processes(self.shard, input)
        (rows,), check = self.rows([input])
        prepare_rows(self.weight, rows)
        # Where no id lacks a row PyTorch need not copy the gradient to leave row 0 out.
        padding = None if array_of(rows).all() else 0
        vectors = F.embedding(rows, self.weight, padding, sparse=True)
        # Before the gradient reaches the table: a row may belong to another id by then.
        if vectors.requires_grad:
            vectors.register_hook(check)
        return vectors

    def _of_processes(self, shard: IdShard, ids: Tensor) -> Tensor:
        self.weight.row_shard = shard  # for optimizers
        ids_here, step, begin = jointly(shard.comm, _WHERE, self._checked, ids)
        is_known: np.ndarray = np.ones(ids_here.shape, bool)
        if self.padding_idx is not None:
            is_known = ids_here != self.padding_idx
        route = shard.route(ids_here[is_known], step, begin)
        prepare_rows(self.weight, route.needed)
        looked = looked_up(self.weight, route, average=self.average)
        rows = looked.new_zeros((*ids_here.shape, self.embedding_dim))
        rows[tensor_of(is_known)] = looked
        if step is not None:
            self._is_next = False
        if rows.requires_grad:
            rows.register_hook(lambda _: _at_the_end_of_backward(partial(_go_on, [self])))
        return rows

    def rows(self, features: Sequence[Tensor]) -> tuple[list[Tensor], Callable[..., None]]:
        """The rows of the ids of each feature, int32 of their shape, admitted together in training
        mode; and what to call before a gradient of them is used. Not with ``comm``.

        Raises: as `forward`.
        """
        if self.shard is not None:
            wrong, expected = "is looked up by itself", "one without comm"
            reject(ValueError, _WHERE, "the module", wrong, expected, "several processes")
        (rows,), check = rows_of_modules([self], [features])
        return rows, check

    def _int64(self, ids: Any) -> Tensor:
        if not isinstance(ids, Tensor) or ids.dtype not in _IDS or ids.device.type != "cpu":
            got = f"{ids.dtype} on {ids.device}" if isinstance(ids, Tensor) else type(ids).__name__
            expected = "int64, int32 or uint64 on the host"
            reject(TypeError, _WHERE, "ids", "have a wrong type", expected, got)
        return ids.view(torch.int64) if ids.dtype == torch.uint64 else ids.long()

    def _array(self, ids: Any) -> np.ndarray:
        """A copy of ids, if they are such; int64."""
        copied = self._int64(ids).detach().clone(memory_format=torch.contiguous_format)
        return array_of(copied)  # type: ignore[no-any-return]

    def _checked(self, ids: Any) -> tuple[np.ndarray, int | None, Callable[[Admissions], None]]:
        admission = self._admission()
        return self._array(ids), admission.step, lambda new: begin_rows([(admission, new)])

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight":  # as FSDP does, in whose forward it is a table that is gone afterwards
            self._mark()

    def _mark(self) -> None:
        """Let `Fused.load_state_dict` know the table, of which a copy has no mark."""
        self.weight.can_grow = True
        if local(self.weight) is not self.weight:
            wrong, expected = "is a DTensor", "in ignored_params of fully_shard, and comm=..."
            reject(RuntimeError, _WHERE, "the weight", wrong, expected, "cut by its rows")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()
        is_known = len(self.ids) or self.weight.is_inference()
        self._as_copied = -1 if is_known else version_of(self.weight)

    def _warn_of_mean(self) -> None:
        """Warn, once, where a loop over parameters has written to a copy that has no ids."""
        is_mean = not self.training and self._as_copied != version_of(self.weight)
        if is_mean and not len(self.ids):
            wrong = "the weight of a copy has changed, which has no ids: all of them read zeros"
            fix = "nn.torch.averaged(model) has means of rows by id"
            warnings.warn(f"{_WHERE}: {wrong}; {fix}", RuntimeWarning, stacklevel=2)
        if is_mean or self.training:
            self._as_copied = -1

    def _admission(self, optimizers: Sequence[Any] | None = None) -> _Admission:
        """How ids are admitted: `optimizers_of` the table are given, or asked for."""
        self._mark()
        if self.mixed_up:
            reject(RuntimeError, _WHERE, *self.mixed_up)
        if self._as_copied >= 0:
            self._warn_of_mean()
        if optimizers is None:
            optimizers = optimizers_of(self.weight)
        # A backward that computes anew what it needs looks up ids that were admitted before.
        are_admitted = self.training and self.weight.requires_grad and _backward_of_now() < 0
        if are_admitted and not optimizers and (self.ids.evictions or self.ids.full == "evict"):
            expected = "an optimizer of nn.torch: rows that are given back begin anew in it"
            reject(RuntimeError, _WHERE, "the table", "needs more", expected, "none")
        waits = bool(optimizers) and _steps_of(optimizers) == self._n_taken
        gradient = self.weight.grad if waits else None
        # Gradients may be summed over several batches: all of them belong to one step.
        is_next = self._is_next and gradient is None
        step = self.ids.step + is_next if are_admitted else None
        if step is not None:
            self.ids.check_step(step)
        return _Admission(self, step, optimizers, gradient)

    def _begin_seed(self, seed: int) -> None:
        """Draw admissions, and default weights, from another seed from now on."""
        self.ids._begin_seed(seed)
        if self._drawn is not None and self.initial is self._drawn:
            self.initial = self._drawn = UniformRows(self._drawn.bound, seed)
        if self.shard is not None:
            self.shard.signature["seed"] = seed

    def grow(self, capacity: int) -> None:
        """Have more rows; so have the states of the optimizer of `nn.torch` that has the table.

        Args:
            capacity: as for the class, and above that of now.

        Raises:
            TypeError, ValueError: it is not.
            RuntimeError: the table has a gradient, or two optimizers. Nothing has changed then.
        """
        where, optimizers = f"{_WHERE}.grow", optimizers_of(self.weight)
        n = more_rows(where, capacity, len(self.weight))
        if self.weight.grad is not None or len(optimizers) > 1 or is_bound(self.weight):
            expected = "one without a gradient, of one optimizer, and no loss alive (del loss)"
            reject(RuntimeError, where, "the table", "cannot grow", expected, "another")
        if optimizers:
            optimizers[0].grow(self.weight, n)
        else:
            rebind(self.weight, tensor_of(grown(array_of(self.weight.detach()), n, 0.0)))
        self.ids.grow(capacity)
        self.num_embeddings = self.ids.capacity

    def evict(self, *, keep: Tensor | None = None, **bounds: Any) -> Tensor:
        """Give rows back, between steps: arguments, return value and errors of `nn.IdMap.evict`."""
        kept = None if keep is None else self._array(keep)
        return tensor_of(self.ids.evict(keep=kept, **bounds))

    def find(self, ids: Tensor) -> Tensor:
        """The rows of ids, int32 of their shape; 0 for one that has none. Raises: as `forward`."""
        return tensor_of(self.ids.find(self._array(ids)))

    def statistics(self) -> Any:
        """The numbers of `nn.IdMap.statistics`."""
        return self.ids.statistics()

    def extra_repr(self) -> str:
        """The arguments that PyTorch shows."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {len(self.ids)} ids"


class _Admission(NamedTuple):
    """How ids of a table are admitted."""

    module: GrowingEmbedding
    step: int | None  # None: they are not
    optimizers: Sequence[Any]  # of the table
    gradient: Tensor | None  # that waits for a step


def begin_rows(new: Sequence[tuple[_Admission, Admissions]]) -> None:
    """Let rows that were handed out begin anew, with their states in all optimizers."""
    by_optimizer: dict[Any, list[tuple[Any, ...]]] = {}
    for (module, _, optimizers, gradient), admitted in new:
        weight = module.weight
        # What an evicted id has collected is not for the id that gets its row.
        if gradient is not None and module.ids.evictions:
            weight.grad = _without(gradient, admitted.rows)
        table = weight, admitted.rows, module.initial, admitted.ids
        for optimizer in optimizers:
            by_optimizer.setdefault(optimizer, []).append(table)
        if not optimizers:
            w = array_of(weight.detach())
            alone = TableArray("the table", w, WEIGHTS, w.shape, PARAMETER)
            listed = StatefulTable(_WHERE, {WEIGHTS.name: alone})
            commit([RowWrite([listed.reset(admitted.rows, module.initial, admitted.ids)])])
            torch.autograd.graph.increment_version(weight)
    for optimizer, tables in by_optimizer.items():
        optimizer.reset_rows_of(tables)


def admissions_of(modules: Sequence[GrowingEmbedding]) -> list[_Admission]:
    """How the ids of each table are admitted."""
    of_each = optimizers_of_all([module.weight for module in modules])
    return [module._admission(own) for module, own in zip(modules, of_each, strict=True)]


def end_batch(admissions: Sequence[_Admission]) -> Callable[[], None]:
    """Have admitted the ids of a batch; what to call in its backward."""
    modules = [admission.module for admission in admissions]
    for module, admission in zip(modules, admissions, strict=True):
        if admission.step is not None:
            module._is_next = False
    # Until its end a backward exchanges ``.grad``, which no other thread may read meanwhile.
    return partial(_at_the_end_of_backward, partial(_go_on, modules))


def arrays_of_ids(modules: Sequence[GrowingEmbedding], ids: Sequence[Any]) -> list[np.ndarray]:
    """Copies of the ids of each table, if they are such; int64."""
    return [module._array(x) for module, x in zip(modules, ids, strict=True)]


@as_torch
def rows_of_modules(
    modules: Sequence[GrowingEmbedding], features: Sequence[Sequence[Tensor]]
) -> tuple[list[list[Tensor]], Callable[..., None]]:
    """`GrowingEmbedding.rows` of several tables, found and admitted in one call."""
    parts = [[m._array(x) for x in xs] for m, xs in zip(modules, features, strict=True)]
    padding = [[m.padding_idx] * len(of_table) for m, of_table in zip(modules, parts, strict=True)]
    maps = [module.ids for module in modules]
    with locked(maps):  # the steps are those of no other thread then
        admissions = admissions_of(modules)
        rows, lookups = rows_of_tables(
            maps, parts, padding, 0, [admission.step for admission in admissions],
            partial(begin_by_key, begin_rows, admissions),
        )  # fmt: skip
        go_on = end_batch(admissions)

    def check(*_: Any) -> None:
        go_on()
        check_current(_WHERE, lookups)

    return [[*map(tensor_of, of_table)] for of_table in rows], check


def _go_on(modules: Sequence[GrowingEmbedding]) -> None:
    """Let the next forward be another step; at the end of a backward."""
    for module, own in zip(modules, optimizers_of_all([m.weight for m in modules]), strict=True):
        module._is_next, module._n_taken = True, _steps_of(own)


# State


def _handed_out(module: GrowingEmbedding, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Leave the rows that were handed out in a state dict, beside the map and its seed."""
    module._mark()
    arrays = module.ids.state_dict()
    state[f"{prefix}weight"] = state[f"{prefix}weight"][: int(arrays["next_row"][0])].clone()
    arrays["seed"] = np.array([module.ids.seed])
    state.update({f"{prefix}ids.{name}": torch.from_numpy(x) for name, x in arrays.items()})


def _taken_over(
    module: GrowingEmbedding, state: dict[str, Any], prefix: str, _: Any, __: bool,
    missing: list[str], ___: list[str], errors: list[str],
) -> None:  # fmt: skip
    """Take over rows and map of a state dict, and leave what PyTorch loads."""
    weight, labels = f"{prefix}weight", {f"{prefix}ids.{name}": name for name in STATE}
    needed = [label for label, name in labels.items() if name not in OPTIONAL]
    missing += [label for label in needed if label not in state]
    arrays = {name: state.pop(label) for label, name in labels.items() if label in state}
    seed, rows = state.pop(f"{prefix}ids.seed", module._seed_of_old_files), state.get(weight)
    if rows is None:
        return
    state[weight] = module.weight  # which PyTorch leaves as it is
    if not arrays.keys() >= STATE.keys() - OPTIONAL:
        return
    try:
        seed = checked_seed(_WHERE, "seed", np.asarray(seed).item())
        made = module.ids.loaded(_WHERE, arrays)
    except (TypeError, ValueError, RuntimeError) as error:
        errors.append(f"{prefix}ids: {error}")
        return
    shape = (int(made._rows.next_row[0]), module.embedding_dim)
    if tuple(np.shape(rows)) != shape:
        got = f"rows {tuple(np.shape(rows))} beside a map of {shape}"
        errors.append(f"{_WHERE}: {weight} and its map do not belong together: {got}")
        return
    with torch.no_grad():
        module.weight[: len(rows)].copy_(rows)
    module._is_next, module._as_copied = True, -1
    module.ids.take_over(made)
    module._begin_seed(seed)


_backward_of_now = backward_of_now()


def _filled(fill: Callable[[Tensor], Any], _: np.ndarray, shape: tuple[int, ...]) -> Any:
    """New weights by a function of ``torch.nn.init``."""
    made = torch.empty(shape, dtype=torch.float32, device="cpu")
    fill(made)
    return array_of(made)


def _steps_of(optimizers: Sequence[Any]) -> int:
    return sum(optimizer._n_taken for optimizer in optimizers)


def _without(gradient: Any, rows: np.ndarray) -> Tensor:
    """A gradient without these rows, which belong to other ids now."""
    if not gradient.is_sparse:
        return gradient.index_fill(0, tensor_of(rows).long(), 0.0)
    indices, values = parts_of(gradient)
    is_kept = tensor_of(~np.isin(array_of(indices[0]), rows))
    kept = indices[:, is_kept], values[is_kept]
    return torch.sparse_coo_tensor(*kept, gradient.shape, check_invariants=False)


_outside_of_graphs: Any = outside_of_graphs(GrowingEmbedding.forward)
