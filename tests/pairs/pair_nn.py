"""Programs of two features of `fusestep.nn`, each beside a reference in float64."""

import copy
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import combinations
from operator import methodcaller
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import fusestep
from fusestep import nn
from fusestep.nn import distributed
from pair_reference import RATE, WIDTH, Reference, Weight, begin

STEPS, EVENT, BAD, IDS, MORE_IDS, LENGTH, FADE, OWN_RATE = 9, 4, 6, 24, 30, 3, 0.8, 0.02
RESTS = {"table": (3, 4), "head": (5, 6, 7), "bias": ()}  # steps
POOL = np.random.default_rng(5).integers(-(2**62), 2**62, MORE_IDS)
DENSE = {"head": np.arange(15.0).reshape(3, 5) ** 2 % 13 / 8.0, "bias": np.arange(6.0) / 8.0}
BFLOAT16, NUMBERS, ALONE = np.dtype(ml_dtypes.bfloat16), (-2.0, -1.0, 1.0, 2.0), distributed.alone()
Plan = dict[str, dict[str, Any]]  # the options of each part of a program


def _said(work: Callable[..., Any], *arguments: Any) -> str:
    try:
        return work(*arguments) or "right"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Run:
    """One run of a program, whose optimizer is exchanged on the way."""

    def __init__(self, plan: Plan, path: str, seed: int) -> None:
        self.plan, self.path, self.seed, self.ends = plan, path, seed, list[Callable[[], str]]()
        self.options = {key: x for own in plan.values() for key, x in own.items()}
        self.events = [event for name, event in _EVENTS.items() if name in plan]
        self.k, self.n_made, self.n_steps, self.has_ids = 0, 0, 0, "growing ids" in plan
        self.n_ids, self.n_rows = IDS, IDS + self.has_ids
        self.dtype = BFLOAT16 if "rounding" in self.options else np.dtype(np.float32)
        counts = "own" if "rowwise_bias_correction" in self.options else "touched"
        self.reference = Reference(DENSE, None if self.has_ids else range(IDS), counts)
        self.make()

    def make(self) -> None:
        """Make parameters and optimizer anew."""
        plan, n, self.n_made = self.plan, self.n_rows, self.n_made + 1
        table = np.zeros((n, WIDTH)) if self.has_ids else begin(np.arange(n), (n, WIDTH))
        named = [(x.astype(self.dtype), name) for name, x in {"table": table, **DENSE}.items()]
        own = {"grad_centralization": True} if "centralized gradients" in plan else {}
        groups: Any = [{"params": [nn.Parameter(*x)], **own} for x in named]
        groups[1] |= {"lr": OWN_RATE, "weight_decay": 0.0} if "groups" in plan else {}
        groups[0] |= {"copies": [table.astype(BFLOAT16)]} if "copies" in plan else {}
        given = groups if max(map(len, groups)) > 1 else [p for x in groups for p in x["params"]]
        options = {"learning_rate": RATE, "sparse_update": "lazy", "eps_hat": False, **self.options}
        maker: Any = nullcontext()
        if "states in files" in plan:
            maker = fusestep.states_in(fusestep.MappedFiles(f"{self.path}{self.n_made}", fill=True))
        with maker:
            self.opt = (nn.AdamOffload if "AdamOffload" in plan else nn.LazyAdam)(given, **options)
        self.ids, self.bags, tables = nn.IdMap(n), None, self.opt.parameters[:1]
        if "bags" in plan:
            maps = [self.ids] if self.has_ids else None
            self.bags = nn.EmbeddingBags(tables, self.opt, maps=maps, new_rows=begin)
        self.join()

    def join(self) -> None:
        """Let the optimizer step with those of other processes, of which there are none."""
        self.stepper: Any = self.opt
        if "together" in self.plan:
            distributed.together(self.opt, ALONE)
        if "ShardedStates" in self.plan:
            self.stepper = distributed.ShardedStates(self.opt, ALONE)

    def go(self, first: int = 1) -> None:
        """Take the steps that are left."""
        try:
            for self.k in range(first, STEPS + 1):
                while self.k == EVENT and self.events:
                    self.events.pop(0)(self)
                self._step()
        finally:  # an error has written nothing
            self._compare_all()
        for text in (end() for end in self.ends):
            assert text == "right", text

    def _step(self) -> None:
        plan, draw, sums = self.plan, np.random.default_rng([self.seed, self.k]), dict[Any, Any]()
        pieces = [self._look_up(draw, sums) for _ in range(1 + ("several gradients" in plan))]
        right = {name: draw.choice(NUMBERS, x.shape) for name, x in DENSE.items()}
        given = {"table": pieces if len(pieces) > 1 else pieces[0]}
        given |= {name: self._scaled(x) for name, x in right.items()}
        rests = {name for name in given if "gradients of None" in plan and self.k in RESTS[name]}
        gradients = [None if name in rests else g for name, g in given.items()]
        calls = 1 + ("locked calls at once" in plan)
        gate = threading.Barrier(calls)
        with ThreadPoolExecutor(calls) as pool:
            each: Any = pool.map if calls > 1 else map
            [*each(lambda _: (gate.wait(), self.stepper(gradients)), range(calls))]
        for _ in range(0 if self.k == BAD and "skip_nonfinite" in plan else calls):
            self._step_of_reference(sums, right, rests)

    def _scaled(self, g: Any) -> Any:
        return (self.options.get("loss_scale", 1.0) * g).astype(self.dtype)

    def _look_up(self, draw: Any, sums: dict[int, Any]) -> Any:
        """The gradient of a batch, after its rows were compared; it is added to ``sums``."""
        opt, k, table = self.opt, self.k, self.opt.parameters[0]
        # Some ids come again after a pause.
        near = (draw.integers(0, IDS // 2, (4, LENGTH)) + 5 * (k // 2)) % self.n_ids
        ids, c = POOL[near] if self.has_ids else near, draw.choice(NUMBERS, (4, WIDTH))
        c[0, 0] *= np.inf if k == BAD and "skip_nonfinite" in self.plan else 1.0
        for key, row in zip(ids.ravel().tolist(), np.repeat(c, LENGTH, 0), strict=True):
            sums[key] = sums.get(key, 0.0) + row
        if self.bags is not None:
            pooled = self.bags([ids], step=k if self.has_ids else None)
            self.reference.admit(sums, k)
            self._compare("pooled", pooled, self.reference.look_up(ids).sum(1), LENGTH)
            return self.bags.gradients(self._scaled(c))[0]
        reset = lambda new: opt.reset_rows(table, new.rows, begin, ids=new.ids)  # noqa: E731
        rows = self.ids(ids, k, begin=reset) if self.has_ids else ids
        self.reference.admit(sums, k)
        opt.prepare(table, rows)
        self._compare("rows", table.data[rows], self.reference.look_up(ids))
        return nn.RowTensor(rows.ravel(), np.repeat(self._scaled(c), LENGTH, 0), table.shape)

    def _step_of_reference(self, sums: Any, right: dict[str, Any], rests: Iterable[str]) -> None:
        reference, fades = self.reference, "learning_rate" in self.options
        keys = [*(reference.rows if "sparse_update" in self.options else sums)]
        g = {"table": np.array([sums.get(key, np.zeros(WIDTH)) for key in keys]), **right}
        w = {"table": reference.look_up(keys), **{k: x.w for k, x in reference.dense.items()}}
        made = {k: self._conditioned(k, x, w[k]) for k, x in g.items() if k not in rests}
        table = dict(zip(keys, made.pop("table"), strict=True)) if "table" in made else None
        rate = RATE * FADE**self.n_steps if fades else RATE
        factors = {"head": OWN_RATE / rate} if "groups" in self.plan else {}
        reference.step(table, made, rate, factors)
        self.n_steps += 1

    def _conditioned(self, name: str, g: Any, w: Any) -> Any:
        """A gradient as the rule gets it: in MindSpore's order, if it is clipped in Keras's."""
        is_exempt = "groups" in self.plan and name == "head"
        decay = 0.0 if is_exempt else self.options.get("weight_decay", 0.0) * w
        bound, limit = (self.options.get(name, np.inf) for name in ("clipvalue", "clipnorm"))
        late = decay if min(bound, limit) < np.inf else 0.0
        g = g + decay - late
        if "centralized gradients" in self.plan and g.ndim > 1:
            g = g - g.mean(1, keepdims=True)
        g = np.clip(g, -bound, bound)
        return g * min(1.0, limit / np.linalg.norm(g)) + late

    def _compare(self, what: str, value: Any, right: Any, terms: float = 1.0) -> None:
        difference = np.abs(np.asarray(value, float) - right).max()
        is_right = difference <= terms * max(_TOLERANCES.get(name, 3e-5) for name in self.plan)
        assert is_right, f"{what}: {difference:.2g} off in step {self.k}"

    def _compare_all(self) -> None:
        keys, (table, *dense) = np.array([*self.reference.rows], np.int64), self.opt.parameters
        rows = self.ids.find(keys) if self.has_ids else keys
        self.opt.prepare(table, rows)
        self._compare("table", table.data[rows], self.reference.look_up(keys))
        for p, weight in zip(dense, self.reference.dense.values(), strict=True):
            self._compare(str(p.name), p.data, weight.w)
        assert not (self.has_ids and table.data[0].any()), "the reserved row was written"
        for own in self.opt.copies[: "copies" in self.plan]:
            assert (own[rows] == table.data[rows].astype(BFLOAT16)).all(), "a wrong copy"


def _evict(run: Run) -> None:
    run.ids.evict(unused_for=2)
    run.reference.evict(run.k - 1, 2)


def _grow(run: Run) -> None:
    table = run.opt.grow(run.opt.parameters[0], MORE_IDS + run.has_ids)
    if run.has_ids:
        run.ids.grow(len(table))
    else:
        run.opt.reset_rows(table, np.arange(IDS, MORE_IDS), begin)
        run.reference.rows |= {k: Weight(begin(k)) for k in range(IDS, MORE_IDS)}
    run.n_rows, run.n_ids = len(table), MORE_IDS


def _exchange(run: Run, copied: Callable[[Any], Any]) -> None:
    """Go on with copies; what they were made of stays as it is."""
    before, weights = run.opt, [p.data.copy() for p in run.opt.parameters]
    run.opt, run.ids, run.bags = copied((run.opt, run.ids, run.bags))
    run.join()
    pairs = zip((p.data for p in before.parameters), weights, strict=True)
    run.ends.append(lambda: "right" if all((a == b).all() for a, b in pairs) else "a copy wrote")


def _resume(run: Run, how: str) -> None:
    """Go on with a new optimizer, and what was saved of the old one."""
    shards = {"table": distributed.RowShard(run.n_rows, ALONE)}
    saved: Any = [run.opt.state_dict(flush=how == "flushed")]
    saved += [{p.name: p.data for p in run.opt.parameters}, run.ids.state_dict()]
    if how == "shards":
        distributed.save_checkpoint(f"{run.path}shards", run.stepper, ALONE, shards)
    if how == "files":
        files = [f"{run.path}{name}" for name in ("state", "weights", "ids")]
        for x, file in zip((run.opt, run.opt.parameters, run.ids), files, strict=True):
            nn.save_checkpoint(x, file)
        saved = map(nn.load_checkpoint, files)
    run.make()
    state, weights, ids = saved
    run.ids.load_state_dict(ids)
    if how == "shards":
        distributed.load_checkpoint(f"{run.path}shards", run.stepper, ALONE, shards)
    else:
        for p in run.opt.parameters:
            p.data[...] = weights[p.name]
        run.opt.load_state_dict(state)
    for own in run.opt.copies[: "copies" in run.plan]:
        own[...] = run.opt.parameters[0].data


def _fork(run: Run) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    context.Process(target=lambda: theirs.send(_said(run.go, EVENT))).start()
    theirs.close()  # so that a child that dies is noticed
    run.ends.append(ours.recv)


_EVENTS: dict[str, Callable[[Run], None]] = {
    "growing ids": _evict, "grow": _grow, "deepcopy": lambda run: _exchange(run, copy.deepcopy),
    "pickle": lambda run: _exchange(run, lambda x: pickle.loads(pickle.dumps(x))),
    "checkpoint": lambda run: _resume(run, "files"),
    "flushed state dict": lambda run: _resume(run, "flushed"),
    "sharded checkpoint": lambda run: _resume(run, "shards"), "fork": _fork,
}  # fmt: skip
_ROUNDINGS = {"master weights": 2e-2, "Kahan sums": 2e-2, "stochastic rounding": 0.15}
_TOLERANCES = {**_ROUNDINGS, "states of 16 bits": 3e-2}
_OPTIONS: Plan = {
    "AdamOffload": {}, "dense-equivalent": {"sparse_update": "dense_equivalent"},
    "catch-up": {"sparse_update": "catch_up"},
    "row-wise bias correction": {"rowwise_bias_correction": True},
    "master weights": {"rounding": "master"}, "Kahan sums": {"rounding": "kahan"},
    "stochastic rounding": {"rounding": "stochastic"}, "copies": {}, "states in files": {},
    "states of 16 bits": {"state_dtype": BFLOAT16}, "weight decay": {"weight_decay": 0.05},
    "groups": {}, "centralized gradients": {}, "loss scale": {"loss_scale": 4.0},
    "list of rates": {"learning_rate": [RATE * FADE**k for k in range(2 * STEPS)]},
    "schedule": {"learning_rate": nn.ExponentialDecayLR(RATE, FADE, 1)},
    "clipvalue": {"clipvalue": 1.5}, "clipnorm": {"clipnorm": 2.0}, "bags": {},
    "skip_nonfinite": {"skip_nonfinite": True}, "several gradients": {}, "gradients of None": {},
    "together": {}, "ShardedStates": {}, "locked calls at once": {"use_locking": True},
    "threads": {}, **{name: {} for name in _EVENTS},
}  # fmt: skip
PARTS: dict[str, Callable[[Plan], None]] = {
    name: methodcaller("update", {name: options}) for name, options in _OPTIONS.items()
}
PAIRS = [*combinations(PARTS, 2)]
_IMPOSSIBLE = "sparse_update='catch_up' is impossible"
_ALONE = "expected one of this optimizer alone, in one process, got one that several processes step"
REFUSED: dict[frozenset[str], str] = {
    frozenset((name, other)): text
    for text, name, *others in (
        ("argument 'rowwise_bias_correction' is unknown", "row-wise bias correction",
         "AdamOffload"),
        (f"{_IMPOSSIBLE}: expected a rule whose steps without a gradient can be summed",
         "row-wise bias correction", "catch-up"),
        (f"{_IMPOSSIBLE}: expected a decoupled weight decay", "weight decay", "catch-up"),
        ("sparse_update='catch_up' excludes random bits", "stochastic rounding", "catch-up"),
        (f"{_IMPOSSIBLE} in ShardedStates", "ShardedStates", "catch-up"),
        ("expected float16 or bfloat16 of a float32 parameter", "copies", *_ROUNDINGS),
        ("parameter cannot grow: expected one without copies", "grow", "copies"),
        (f"cannot grow: {_ALONE}", "grow", "together", "ShardedStates"),
        ("optimizer rounds at random: expected one that does not", "together",
         "stochastic rounding"),
        ("optimizer clips by norms: expected one that does not", "together", "clipnorm"),
        ("the folder is another one's: expected the process that made the optimizer",
         "states in files", "fork"),
        ("clipnorm excludes clipvalue: expected at most one of them", "clipnorm", "clipvalue"))
    for other in others
}  # fmt: skip
"""What an error says, by pairs that have no meaning."""
NOT_APPLICABLE: dict[frozenset[str], str] = {
    frozenset(pair): "values of one option"
    for names in (_ROUNDINGS, ("dense-equivalent", "catch-up"), ("list of rates", "schedule"))
    for pair in combinations(names, 2)
}
"""Why others are not tried."""


def plan_of(*names: str) -> Plan:
    """The program of some parts."""
    plan: Plan = {}
    for name in names:
        PARTS[name](plan)
    return plan


def outcome(plan: Plan, folder: Path, seed: int) -> str:
    """Run a program; "right", or an error."""
    run = lambda n: _said(lambda: Run(plan, f"{folder}/{n}-", seed + n).go())  # noqa: E731
    with ThreadPoolExecutor(2) as pool:
        texts = pool.map(run, range(2)) if "threads" in plan else map(run, range(1))
        return next((text for text in texts if text != "right"), "right")
