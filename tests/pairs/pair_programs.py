"""Programs of nn.torch that are put together from parts, each beside a reference in float64."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
import fusestep
from fusestep.nn import distributed
from fusestep.nn import torch as fused
from pair_reference import RATE, WIDTH, Reference, begin

STEPS, IDS, BATCH, LENGTH, OUT = 9, 24, 4, 3, 3
LATE, EVENT, BAD, FROZEN = 3, 4, 6, range(3, 6)  # steps
POOL = np.random.default_rng(5).integers(-(2**62), 2**62, IDS)
_makes = threading.Lock()  # `states_in` and the seeds of PyTorch are the process's


@dataclass
class Plan:
    """A program; each part of it sets some of this."""

    kind: str = "Adam"  # of the optimizers
    options: dict[str, Any] = field(default_factory=dict)
    by_row: bool = False  # bias correction of the table
    dtype: torch.dtype = torch.float32
    tolerance: float = 3e-5
    table: str = "plain"  # or "growing", "sharded"
    features: int = 1
    bags: bool = False
    batches: int = 1  # of a step
    clips: tuple[str, ...] = ()  # "norm", "value"
    is_bad: bool = False  # a gradient of one step is infinite
    scaler: bool = False
    schedule: bool = False
    is_late: bool = False  # a parameter joins later
    frozen: tuple[str, ...] = ()  # "table", "dense": for some steps
    files: bool = False
    copies: bool = False
    average: bool = False
    threads: int = 1  # programs at once
    wrap: str = ""  # "ddp" or "fsdp"
    compiles: bool = False
    processes: int = 1
    events: list[Callable[[Run], None]] = field(default_factory=list)


def _head(plan: Plan) -> Any:
    return np.tile(np.arange(plan.features * WIDTH) / 8.0, (OUT, 1))


class Model(nn.Module):
    """A table, a matrix without a bias, and a scalar; the loss is linear in all."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        is_shared = plan.processes > 1 and plan.wrap != "fsdp"
        comm = distributed.over_torch() if plan.processes > 1 else None
        average = plan.wrap in ("ddp", "fsdp")
        dtype, rows = plan.dtype, torch.from_numpy(begin(np.arange(IDS), (IDS, WIDTH)))
        if plan.table == "growing":
            table: Any = fused.GrowingEmbedding(
                40, WIDTH, initial=begin, dtype=dtype, seed=1, average=average and is_shared,
                comm=comm if is_shared else None)  # fmt: skip
        elif plan.table == "sharded":
            table = fused.ShardedEmbedding(IDS, WIDTH, comm, average=average, dtype=dtype)
            table.load_state_dict({"weight": rows})
        else:
            # PyTorch's own exchange of sparse gradients over gloo is not safe.
            is_sparse = plan.wrap != "ddp" or plan.bags
            table = nn.Embedding(IDS, WIDTH, sparse=is_sparse, dtype=dtype)
            table.load_state_dict({"weight": rows})
        self.head = nn.Linear(plan.features * WIDTH, OUT, bias=False, dtype=dtype)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        with torch.no_grad():
            self.head.weight.copy_(torch.from_numpy(_head(plan)))
        self.table = table
        if plan.bags:
            if plan.table == "plain":
                table = nn.EmbeddingBag(IDS, WIDTH, mode="sum", sparse=True, dtype=dtype)
                table.load_state_dict({"weight": rows})
            self.table = fused.EmbeddingBags([table], features=[0] * plan.features)

    @property
    def lookup(self) -> Any:
        """The module of the table itself."""
        return next(iter(self.table.children()), self.table)

    def forward(self, ids: list[Tensor], d: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of rows of each feature, side by side, and a loss of the other parameters."""
        if isinstance(self.table, fused.EmbeddingBags):
            pooled = self.table(ids)
        else:
            pooled = torch.cat([self.table(own).sum(1) for own in ids], 1)
        return pooled, self.head(d).sum() + self.scale * e


class Run:
    """One run of a program, whose models and optimizers are exchanged on the way."""

    def __init__(self, plan: Plan, folder: Path, seed: int, rank: int = 0) -> None:
        self.plan, self.folder, self.seed, self.rank = plan, folder, seed, rank
        self.k, self.n_made, self.uses, self.ends = 0, 0, 0, list[Callable[[], None]]()
        mode = "all" if plan.options.get("sparse") == "catch_up" else "touched"
        if plan.wrap == "ddp" and plan.table == "plain" and not plan.bags:
            mode = "all"
        mode = "own" if plan.by_row and mode != "all" else mode
        begun = {"head": _head(plan), "scale": 1.0}
        rows = None if plan.table == "growing" else range(IDS)
        self.reference = Reference(begun, rows, mode)
        self.make()

    # Models and optimizers

    def make(self) -> None:
        """Make model and optimizers anew."""
        plan = self.plan
        self.n_made += 1
        with _makes:
            torch.manual_seed(0)
            self.model = Model(plan)
            self._freeze()
            if plan.wrap == "fsdp":
                from torch.distributed.fsdp import fully_shard

                own = {self.model.lookup.weight, self.model.scale}
                fully_shard(self.model, ignored_params=own)
            weight = self.model.lookup.weight
            groups: list[Any] = [[weight], [self.model.head.weight], [self.model.scale]]
            groups = [{"params": own} for own in groups[: 3 - (plan.is_late and self.k < LATE)]]
            groups[0] |= {"rowwise_bias_correction": True} if plan.by_row else {}
            self.copy = weight.detach().to(torch.bfloat16)
            if plan.copies:
                groups[0]["copies"] = [self.copy]
            lists = [groups[:1], groups[1:]] if plan.bags else [groups]
            options = {"sparse": "touched", "lr": RATE, **plan.options}
            self.optimizers = []
            for k, own in enumerate(lists):
                maker: Any = contextlib.nullcontext()
                if plan.files:
                    folder = self.folder / f"{self.n_made}.{k}.{self.rank}"
                    maker = fusestep.states_in(fusestep.MappedFiles(folder, fill=True))
                with maker:
                    self.optimizers.append(getattr(fused, plan.kind)(own, **options))
        scaler = torch.amp.GradScaler if plan.processes == 1 else ShardedGradScaler
        self.scaler = scaler("cpu", init_scale=4.0) if plan.scaler else None
        self.schedulers = [
            torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            for optimizer in self.optimizers if plan.schedule
        ]  # fmt: skip
        self.average = fused.averaged(self.model) if plan.average else None
        if plan.options.get("sparse") == "catch_up":
            self.optimizers[0].watch(self.model)
        self.join()

    def join(self) -> None:
        """Wrap the model, and let bags step in backward."""
        plan, wrapped = self.plan, self.model
        if plan.wrap == "ddp":
            for parameter in self.model.parameters():  # PyTorch leaves out what is frozen now
                parameter.requires_grad_()
            wrapped = nn.parallel.DistributedDataParallel(
                fused.hide_from_ddp(self.model), find_unused_parameters=bool(plan.frozen)
            )
        compiles = partial(torch.compile, backend="eager")
        self.wrapped: Any = compiles(wrapped) if plan.compiles else wrapped
        if plan.bags:
            limits = {{"norm": "max_norm", "value": "clip_value"}[name]: 1.0 for name in plan.clips}
            self.model.table.update_in_backward(self.optimizers[0], **limits)

    def _freeze(self) -> None:
        is_frozen = self.k in FROZEN
        for name, module in (("table", self.model.lookup), ("dense", self.model.head)):
            if name in self.plan.frozen:
                module.weight.requires_grad_(not is_frozen)

    # Steps

    def draw(self, batch: int, rank: int) -> tuple[Any, Any, Any, Any]:
        """The ids of a batch, and the gradients of pooled rows, of the matrix and the scalar."""
        plan, k = self.plan, self.k
        rank = 0 if plan.wrap == "fsdp" else rank
        draw = np.random.default_rng([self.seed, k, batch, rank])
        # Some ids come again after a pause.
        near = (draw.integers(0, IDS // 2, (plan.features, BATCH, LENGTH)) + 5 * (k // 2)) % IDS
        ids = POOL[near] if plan.table == "growing" else near
        # Of one sign in a column: what is left of a sum that is nearly 0, Adam makes large.
        signs = np.random.default_rng([self.seed, k]).choice([-1.0, 1.0], WIDTH)
        c = draw.choice([1.0, 2.0], (BATCH, plan.features * WIDTH)) * np.tile(signs, plan.features)
        # Dense parameters have the same gradients in all processes, as those of a trainer have.
        draw = np.random.default_rng([self.seed, k, batch])
        d, e = (draw.choice([-2.0, -1.0, 1.0, 2.0], n) for n in (plan.features * WIDTH, 1))
        if plan.is_bad and k == BAD and batch == rank == 0:
            c[0, 0] = np.inf
        return ids, c, d, e

    def step(self) -> None:
        """One step of the program, and of the reference."""
        plan, reference = self.plan, self.reference
        if plan.is_late and self.k == LATE:
            late = {"initial_lr": RATE} if plan.schedule else {}
            self.optimizers[-1].add_param_group({"params": [self.model.scale], **late})
        self._freeze()
        self.model.zero_grad()
        rests = "table" in plan.frozen and self.k in FROZEN
        self.uses += not rests
        ranks = range(plan.processes)
        shares = plan.wrap == "ddp"
        rows, dense = dict[int, Any](), {"head": 0.0, "scale": 0.0}
        for batch in range(plan.batches):
            every = [self.draw(batch, rank) for rank in ranks]
            seen = every if plan.table != "plain" or shares else [every[self.rank]]
            for ids, c, _, _ in seen:
                if not rests:
                    reference.admit(map(int, ids.ravel()), self.uses)
                means = plan.wrap in ("ddp", "fsdp") and len(seen) > 1
                share = 1.0 / len(seen) if means else 1.0
                for own, g in zip(ids, np.split(c, plan.features, 1), strict=True):
                    for k, row in zip(own.ravel(), np.repeat(g, LENGTH, 0), strict=True):
                        rows[int(k)] = rows.get(int(k), 0.0) + share * row
            dense["head"] = dense["head"] + np.tile(every[0][2], (OUT, 1))
            dense["scale"] = dense["scale"] + every[0][3][0]
            self._backward(*every[self.rank])
        self._update()
        with np.errstate(invalid="ignore"):  # of infinities, whose step is skipped
            self._step_of_reference(None if rests else rows, dense)
        if self.average is not None:
            self.average.update_parameters(self.model)
            reference.average()

    def _groups(self) -> list[Any]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _backward(self, ids: Any, c: Any, d: Any, e: Any) -> None:
        dtype = self.plan.dtype
        c, d, e = (torch.from_numpy(x).to(dtype) for x in (c, d, e))
        pooled, rest = self.wrapped([*torch.from_numpy(ids)], d, e[0])
        right = np.concatenate([*self.reference.look_up(ids).sum(2)], 1)
        self.compare("rows that were looked up", pooled, right, 3.0)
        loss = (pooled * c).sum() + rest
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _update(self) -> None:
        plan = self.plan
        optimizers = self.optimizers[1:] if plan.bags else self.optimizers
        for optimizer in optimizers if self.scaler is not None and plan.clips else ():
            self.scaler.unscale_(optimizer)
        parameters = [p for group in self._groups() for p in group["params"]]
        if plan.bags:
            parameters = parameters[1:]
        if "norm" in plan.clips:
            fused.clip_grad_norm_(parameters, 1.0)
        if "value" in plan.clips:
            fused.clip_grad_value_(parameters, 1.0)
        for optimizer in optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        for scheduler in self.schedulers:
            scheduler.step()

    def _step_of_reference(self, rows: Any, dense: dict[str, Any]) -> None:
        plan, k = self.plan, self.k
        if plan.is_late and k < LATE:
            del dense["scale"]
        if "dense" in plan.frozen and k in FROZEN:
            del dense["head"]
        # An infinity is limited too, unless it has been seen or made a NaN before.
        is_limited = plan.clips == ("value",) and not plan.scaler
        is_bad = plan.is_bad and k == BAD and not is_limited
        parts = [[*(rows or {}).values()], [*dense.values()]]
        parts = parts if plan.bags else [parts[0] + parts[1]]
        if "norm" in plan.clips:
            squares = [sum(float((np.asarray(x) ** 2).sum()) for x in part) for part in parts]
            factors = [min(1.0, 1.0 / (np.sqrt(x) + 1e-6)) for x in squares]
            rows = rows and {key: factors[0] * x for key, x in rows.items()}
            dense = {key: factors[-1] * x for key, x in dense.items()}
        if "value" in plan.clips:
            rows = rows and {key: np.clip(x, -1.0, 1.0) for key, x in rows.items()}
            dense = {key: np.clip(x, -1.0, 1.0) for key, x in dense.items()}
        if is_bad:
            rows, dense = None, dense if plan.bags else {}
        halvings = (k - 1) // 2 if plan.schedule else 0
        late = plan.schedule and plan.is_late  # which begins at the first rate
        self.reference.step(rows, dense, RATE * 0.5**halvings, {"scale": 2.0} if late else {})

    # Comparisons

    def compare(self, what: str, value: Any, right: Any, terms: float = 1.0) -> None:
        """Raise if numbers are further from the right ones than their storage type explains."""
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        difference = np.abs(value.detach().double().numpy() - right).max(initial=0.0)
        limit = terms * self.plan.tolerance
        assert difference <= limit, f"{what}: {difference:.2g} off in step {self.k}"

    def compare_all(self) -> None:
        """Raise if any weight is not the reference's."""
        ids = torch.tensor([*self.reference.rows, 77] if self.reference.grows else range(IDS))
        models = [(self.model, False)]
        if self.average is not None:
            models.append((self.average.module, True))
        for model, means in models:
            model.eval()
            with torch.no_grad():
                if self.plan.bags:
                    found = model.table([ids[:, None]] * self.plan.features)[:, :WIDTH]
                else:
                    found = model.table(ids)
            model.train(model is self.model)
            self.compare("a table", found, self.reference.look_up(ids, means=means))
            for name, weight in (("head", model.head.weight), ("scale", model.scale)):
                own = self.reference.dense[name]
                self.compare(name, weight, own.mean if means else own.w)
        if self.plan.copies:
            assert torch.equal(self.copy, self.model.lookup.weight.detach().bfloat16())

    def run(self) -> None:
        """All steps, with the events between them."""
        plan = self.plan
        for k in range(1, STEPS + 1):
            self.k = k
            if k == EVENT:
                for event in plan.events:
                    event(self)
            try:
                self.step()
            except (RuntimeError, ValueError, TypeError):
                if plan.processes == 1:
                    self.compare_all()  # nothing was written
                raise
        self.compare_all()
        for end in self.ends:
            end()
