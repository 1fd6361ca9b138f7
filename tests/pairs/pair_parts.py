"""The parts of programs, one for each feature, and what is known of pairs of them."""

import copy
import os
import pickle
import random
import signal
import threading
from collections.abc import Callable, Iterable
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from pair_programs import EVENT, STEPS, Plan, Run
from subprocesses import TORCH

PARTS: dict[str, Callable[[Plan], None]] = {}


def _options(tolerance: float = 3e-5, dtype: Any = None, **options: Any) -> Callable[[Plan], None]:
    def part(plan: Plan) -> None:
        plan.options.update(options)
        plan.tolerance = max(plan.tolerance, tolerance)
        plan.dtype = dtype or plan.dtype

    return part


def _sets(**values: Any) -> Callable[[Plan], None]:
    def part(plan: Plan) -> None:
        for name, value in values.items():
            setattr(plan, name, value)

    return part


def _adds(name: str, value: str) -> Callable[[Plan], None]:
    return lambda plan: setattr(plan, name, (*getattr(plan, name), value))


def _event(event: Callable[[Run], None]) -> Callable[[Plan], None]:
    return lambda plan: plan.events.append(event)


# Events


def _evict(run: Run) -> None:
    model: Any = run.model
    model.lookup.ids.evict(unused_for=2)
    run.reference.evict(run.uses, 2)


def _exchange(run: Run, copied: Callable[[Any], Any]) -> None:
    """Go on with copies; what they were made of stays as it is."""
    before = run.model
    weights = [p.detach().clone() for p in before.parameters()]
    parts = run.model, run.optimizers, run.schedulers, run.scaler, run.average, run.copy
    (run.model, run.optimizers, run.schedulers, run.scaler, run.average, run.copy) = copied(parts)
    run.join()

    def is_left_alone() -> None:
        pairs = zip(before.parameters(), weights, strict=True)
        assert all(torch.equal(p.detach(), w) for p, w in pairs), "a copy wrote to its original"

    run.ends.append(is_left_alone)


def _rest(run: Run) -> list[Any]:
    """What has a state dict beside model and optimizers."""
    return [x for x in (run.scaler, run.average, *run.schedulers) if x is not None]


def _resume(run: Run, rest: list[Any]) -> None:
    for one, state in zip(_rest(run), rest, strict=True):
        one.load_state_dict(state)
    run.copy.copy_(run.model.lookup.weight.detach())


def _through_file(run: Run) -> None:
    file = run.folder / f"saved{run.rank}"
    states = run.model.state_dict(), [x.state_dict() for x in run.optimizers]
    torch.save((*states, [x.state_dict() for x in _rest(run)]), file)
    run.make()
    model, optimizers, rest = torch.load(file, weights_only=True)
    run.model.load_state_dict(model)
    for optimizer, state in zip(run.optimizers, optimizers, strict=True):
        optimizer.load_state_dict(state)
    _resume(run, rest)


def _through_dcp(run: Run, **options: Any) -> None:
    kinds, folder = StateDictOptions(**options), run.folder / "dcp"
    rest = copy.deepcopy([x.state_dict() for x in _rest(run)])
    model, optimizers = get_state_dict(run.model, run.optimizers, options=kinds)
    alone: Any = {"no_dist": run.plan.processes == 1} if TORCH >= (2, 7) else {}
    dcp.save({"model": model, "optimizers": optimizers}, checkpoint_id=folder, **alone)
    run.make()
    # Its states of parameters that are frozen, and steps of an optimizer, are none of PyTorch's.
    for parameter in run.model.parameters():
        parameter.requires_grad_()
    if run.plan.bags:
        run.model.table.update_in_backward(None)
    model, optimizers = get_state_dict(run.model, run.optimizers, options=kinds)
    if run.plan.table == "growing":  # its tensors are of the size that they were saved with
        for name, known in FileSystemReader(folder).read_metadata().state_dict_metadata.items():
            key = name.removeprefix("model.")
            if (key != name and key.startswith(("table.ids.", "table.0.ids."))) or (
                key in ("table.weight", "table.0.weight")
            ):
                model[key] = torch.empty(known.size, dtype=known.properties.dtype)
    box = {"model": model, "optimizers": optimizers}
    dcp.load(box, checkpoint_id=folder, **alone)
    set_state_dict(
        run.model, run.optimizers, model_state_dict=box["model"],
        optim_state_dict=box["optimizers"], options=kinds)  # fmt: skip
    _resume(run, rest)
    run.join()


def _fork(run: Run) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        torch.set_num_threads(1)  # those of OpenMP are not in the child
        try:
            for k in range(EVENT, STEPS + 1):
                run.k = k
                run.step()
            run.compare_all()
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)

    def is_well() -> None:
        assert os.waitpid(child, 0)[1] == 0, "the child of a fork did not end"
        with os.fdopen(read) as told:
            if text := told.read():
                raise (AssertionError if text.startswith("Assert") else RuntimeError)(text)

    run.ends.append(is_well)


def _grows(plan: Plan) -> None:
    plan.table = "growing"
    plan.events.insert(0, _evict)


def _full(plan: Plan, **options: Any) -> None:
    plan.events.append(partial(_through_dcp, **options))


PARTS |= {
    "master weights": _options(2e-2, torch.bfloat16, rounding="master"),
    "Kahan sums": _options(2e-2, torch.bfloat16, rounding="kahan"),
    "stochastic rounding": _options(0.15, torch.bfloat16, rounding="stochastic"),
    "copies": _sets(copies=True), "states of 16 bits": _options(3e-2, state_dtype=torch.bfloat16),
    "states in files": _sets(files=True), "catch-up": _options(sparse="catch_up"),
    "row-wise bias correction": _sets(kind="LazyAdam", by_row=True), "growing ids": _grows,
    "bags, step in backward": _sets(bags=True), "shared features": _sets(features=2),
    "accumulation": _sets(batches=2), "clipping by norm": _adds("clips", "norm"),
    "clipping by value": _adds("clips", "value"),
    "skip_nonfinite": lambda plan: (_options(skip_nonfinite=True)(plan), _sets(is_bad=True)(plan)),
    "GradScaler": _sets(scaler=True, is_bad=True), "schedule": _sets(schedule=True),
    "add_param_group": _sets(is_late=True), "frozen table": _adds("frozen", "table"),
    "frozen layer": _adds("frozen", "dense"),
    "deepcopy": _event(partial(_exchange, copied=copy.deepcopy)),
    "pickle": _event(partial(_exchange, copied=lambda parts: pickle.loads(pickle.dumps(parts)))),
    "state dict in a file": _event(_through_file), "DCP": partial(_full),
    "DCP, full": partial(_full, full_state_dict=True),
    "DCP, flat": partial(_full, flatten_optimizer_state_dict=True),
    "DDP": _sets(wrap="ddp", processes=2), "FSDP2": _sets(wrap="fsdp", processes=2),
    "ShardedEmbedding": _sets(table="sharded", processes=2), "averaged model": _sets(average=True),
    "torch.compile": _sets(compiles=True), "threads": _sets(threads=2), "fork": _event(_fork),
}  # fmt: skip
PAIRS = [*combinations(PARTS, 2)]
_ROUNDINGS = "master weights", "Kahan sums", "stochastic rounding"
_EXCHANGES = "DDP", "FSDP2", "ShardedEmbedding"
_DCP = "DCP", "DCP, full", "DCP, flat"


def _each(names: Iterable[str], others: Iterable[str], text: str) -> dict[frozenset[str], str]:
    return {frozenset(pair): text for pair in product(names, others)}


REFUSED: dict[frozenset[str], str] = {
    **_each(_ROUNDINGS, ["copies"], "expected float16 or bfloat16 of a float32 parameter"),
    **_each(["stochastic rounding"], ["catch-up"], "sparse='catch_up' excludes random bits"),
    **_each(["catch-up"], ["row-wise bias correction"], "sparse='catch_up' is impossible"),
    **_each(
        ["states in files"], ["fork"],
        "the folder is another one's: expected the process that made the optimizer"),
    **_each(
        ["states in files"], _EXCHANGES[1:],
        "is elsewhere: expected whole parameters on the host, as states_in needs them"),
    **_each(
        ["bags, step in backward"],
        ["ShardedEmbedding"],
        "has a wrong type: expected a "
        "module, or (num_embeddings, embedding_dim), got ShardedEmbedding"),
    **_each(
        ["clipping by norm"], ["ShardedEmbedding"],
        "is distributed: expected a tensor of one process"),
    **_each(["skip_nonfinite"], ["ShardedEmbedding"], "skip_nonfinite takes no part of a table"),
    **_each(["pickle"], ["ShardedEmbedding"], "the communicator is of these processes alone"),
}  # fmt: skip
"""What an error says, by pairs that have no meaning."""
NOT_APPLICABLE: dict[frozenset[str], str] = {
    **{frozenset(pair): "values of one option" for pair in combinations(_ROUNDINGS, 2)},
    **_each(["growing ids"], ["ShardedEmbedding"], "two kinds of table"),
    **_each(["DDP"], ["FSDP2"], "two wrappers of one model"),
    **_each(["bags, step in backward"], ["accumulation"], "each backward is a step"),
    **_each(["bags, step in backward"], ["GradScaler"], "gradients act as they come, so no loss "
            "may be scaled"),
    **_each(["FSDP2"], ["deepcopy", "pickle", "averaged model"], "PyTorch refuses to copy such "
            "models"),
    **_each(["FSDP2"], ["GradScaler"], "PyTorch's scaler takes no mixture of tensors and DTensors"),
    **_each(["threads"], _EXCHANGES, "exchanges of two threads have no common order"),
    **_each(["fork"], _EXCHANGES, "a child has no threads of the process group"),
    **_each(["fork"], ["threads"], "a child may wait for locks of PyTorch that other threads held"),
}  # fmt: skip
"""Why others are not tried."""
OF_THREE: dict[frozenset[str], str] = {
    frozenset(("growing ids", "DDP", other)): text
    for other, text in (
        *((name, "ids of several processes share names in a state dict") for name in _DCP),
        ("clipping by norm", "is distributed: expected a tensor of one process"),
        ("skip_nonfinite", "skip_nonfinite takes no part of a table"),
        ("states in files", "is elsewhere: expected whole parameters on the host"),
        ("pickle", "the communicator is of these processes alone"))
} | {
    frozenset(("bags, step in backward", "clipping by norm", "clipping by value")):
        "clip_value is beside max_norm",
    frozenset(("bags, step in backward", "DDP", "frozen table")):
        "Expected sparse gradient to be defined",  # PyTorch's
}  # fmt: skip
"""What an error says of three, each pair of which is right."""


def programs(n: int, seed: int) -> list[list[str]]:
    """Programs of three to five parts that have a meaning."""
    draw, made = random.Random(seed), list[list[str]]()
    known = NOT_APPLICABLE.keys() | REFUSED.keys() | OF_THREE.keys()
    while len(made) < n:
        names = draw.sample([*PARTS], draw.randint(3, 5))
        if not any(names_of <= {*names} for names_of in known):
            made.append(names)
    return made


def plan_of(*names: str) -> Plan:
    """The program of some parts."""
    plan = Plan()
    for name in names:
        PARTS[name](plan)
    return plan


def outcome(plan: Plan, folder: Path, seed: int, rank: int = 0) -> str:
    """Run a program; "right", or the first error."""
    errors: list[BaseException] = []

    def run(n: int) -> None:
        (own := folder / str(n)).mkdir(exist_ok=True)
        try:
            Run(plan, own, seed + n, rank).run()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(1, plan.threads)]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    return f"{type(errors[0]).__name__}: {errors[0]}" if errors else "right"
