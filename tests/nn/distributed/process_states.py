"""`ShardedStates` on each rank."""

from pathlib import Path
from typing import Any

import numpy as np
from fusestep import nn
from fusestep.nn.distributed import Communicator, ShardedStates, all_reduce, save_checkpoint
from fusestep.nn.distributed.agreement import agree, gather_texts
from helpers import BF16, STORAGE_DTYPES, assert_same_arrays, assert_same_bits
from optimizers import make, states
from process_checks import everywhere, refused_everywhere

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding": (3_000,),
    **{f"matrix{k}": (9, 4) for k in range(10)}, "vector": (7,), "number": (), "cube": (2, 3, 4),
}  # fmt: skip
LARGE = {**SHAPES, "embedding": (300_000,), "head": (2, 200_000)}
"""Of those that travel alone, two owners have one each."""
EVEN = {f"layer{k}": (64, 5) for k in range(24)}  # divided evenly among 1, 2, 3 or 4
FORMS = (
    "Adam", "Adam-amsgrad", "AdamWeightDecay", "Momentum", "FTRL", "ASGD", "Adan", "Lamb",
    "LARS", "AdaFactor", "AdaFactor-compressed")  # fmt: skip


class Descent(nn.Optimizer):
    """One of a user, which sends the parameters itself, as MindSpore's do."""

    def __init__(self, params: Any) -> None:
        super().__init__(0.1, params, weight_decay=0.01)
        self.moments = [np.zeros_like(p.data) for p in self.parameters]
        self.updated: set[int] = set()
        self.sent: list[np.ndarray] = []  # as they are when that has returned

    def construct(self, gradients: tuple[Any, ...]) -> Any:
        for i, p in enumerate(self.parameters):
            if gradients[i] is not None:
                self.updated.add(i)
                self.moments[i] += gradients[i] + np.asarray(0.01 * p.data, p.dtype)
                p.data[...] -= np.asarray(0.1 * self.moments[i], p.dtype)
        assert self.broadcast_params((True,) * len(gradients)) is True
        self.sent = [p.data.copy() for p in self.parameters]
        return (True,) * len(gradients)


def params_of(shapes: dict[str, tuple[int, ...]], dtype: Any) -> list[nn.Parameter]:
    rng = np.random.default_rng(3)
    return [
        nn.Parameter(np.array(rng.standard_normal(s)).astype(dtype), n) for n, s in shapes.items()
    ]


def gradients_of(params: list[nn.Parameter], step: int) -> tuple[Any, ...]:
    """The same on all processes; each step leaves out another parameter."""
    rng = np.random.default_rng([7, step])
    given = [np.array(rng.standard_normal(p.shape)).astype(p.dtype) for p in params]
    return tuple(None if i == step else g for i, g in enumerate(given))


def sharded(comm: Communicator, *_: Any) -> None:
    """The bits of one process: parameters on all, states with their owners."""
    cases = [(form, (np.float32, STORAGE_DTYPES[1 + k % 3])) for k, form in enumerate(FORMS)]
    for form, dtypes in cases:
        for dtype in dtypes:
            one, own = params_of(SHAPES, dtype), params_of(SHAPES, dtype)
            reference, opt = make(form, one), ShardedStates(make(form, own), comm)
            for step in range(3):
                assert opt(gradients_of(own, step)) == reference(gradients_of(one, step))
            assert_same_arrays(own, one)
            if form != "LARS":  # its optimizer is inside of it, and keeps all
                check_states(comm, opt, reference, f"{form} {dtype}")


def sharded_rows(comm: Communicator, *_: Any) -> None:
    """Row-sparse gradients of all processes, of tables that one of them owns."""
    tables = {"first": (30, 2), "second": (30, 3), "third": (9, 2)}  # two of them with one owner
    shapes = {**tables, "dense": (5,)}
    rng = np.random.default_rng(comm.rank)
    one, own = params_of(shapes, np.float32), params_of(shapes, np.float32)
    options = {"sparse_update": "lazy"}
    reference, opt = make("Adam", one, **options), ShardedStates(make("Adam", own, **options), comm)
    for step in range(3):
        rows = []
        for k, shape in enumerate(tables.values()):
            n = 7 * (comm.rank + step + k) % 5
            values = rng.standard_normal((n, *shape[1:])).astype(np.float32)
            rows.append(nn.RowTensor(rng.integers(0, shape[0], n), values, shape))
        gradients = all_reduce((*rows, np.ones(5, np.float32)), comm)
        opt(gradients)
        reference(gradients)
    assert_same_arrays(own, one)


def large(comm: Communicator, *_: Any) -> None:
    """Parameters that travel alone."""
    one, own = params_of(LARGE, np.float32), params_of(LARGE, np.float32)
    reference, opt = make("Momentum", one), ShardedStates(make("Momentum", own), comm)
    for step in range(2):
        for each, params in ((opt, own), (reference, one)):
            each(gradients_of(params, step))
    assert_same_arrays(own, one)


def check_states(comm: Communicator, opt: ShardedStates, reference: Any, label: str) -> None:
    """This process has those of its parameters, with the right bits, and no others."""
    found, expected = states(opt.optimizer), states(reference)
    names = gather_texts(comm, ",".join(found))
    everyones = [name for of_rank in names for name in of_rank.split(",") if name]
    assert sorted(everyones) == sorted(expected), label
    for name, array in found.items():
        assert_same_bits(array, expected[name], f"{label} {name}")


def custom(comm: Communicator, *_: Any) -> None:
    """A subclass of `Optimizer` that is none of this package."""
    one, own = params_of(SHAPES, np.float32), params_of(SHAPES, np.float32)
    reference, opt = Descent(one), ShardedStates(Descent(own), comm)
    for step in range(3):
        reference(gradients_of(one, step))
        assert opt(gradients_of(own, step)) == (True,) * len(own)
        for p, q, sent in zip(own, one, opt.optimizer.sent, strict=True):
            assert_same_bits(p.data, q.data, str(p.name))
            assert_same_bits(sent, q.data, str(p.name))
    mine = {i for i, owner in enumerate(opt.owners) if owner == comm.rank}
    assert opt.optimizer.updated == mine
    assert reference.broadcast_params(True) is True


def memory(comm: Communicator, *_: Any) -> None:
    """A P-th of the states, of each process."""
    for form in ("Adam", "Lamb", "Adan"):
        whole = sum(a.nbytes for a in states(make(form, params_of(EVEN, np.float32))).values())
        opt = ShardedStates(make(form, params_of(EVEN, np.float32)), comm)
        own = sum(a.nbytes for a in states(opt.optimizer).values())
        assert own * comm.size == whole, (form, own, whole)


def skipped(comm: Communicator, *_: Any) -> None:
    """A gradient that only its owner looks at is not finite: no process takes the step."""
    params = params_of(SHAPES, np.float32)
    opt = ShardedStates(nn.Adam(params, skip_nonfinite=True), comm)
    opt(gradients_of(params, 0))
    for i in range(len(params)):
        before = [p.data.tobytes() for p in params], opt.optimizer.state_dict()
        gradients = list(gradients_of(params, 99))
        gradients[i][...] = np.inf
        opt(gradients)
        assert [p.data.tobytes() for p in params] == before[0]
        for name, array in opt.optimizer.state_dict().items():
            assert_same_bits(array, before[1][name], name)
        assert everywhere(comm, opt.optimizer.skipped_steps) == [str(i + 1)] * comm.size


def sharded_errors(comm: Communicator, _: str, folder: Path) -> None:
    """Of one rank, on all."""
    if comm.size == 1:
        return
    bad = comm.size - 1

    def on_bad(wrong: Any, usual: Any) -> Any:
        return wrong if comm.rank == bad else usual

    def new(shapes: Any, dtype: Any = np.float32, cls: Any = nn.Adam) -> Any:
        return ShardedStates(cls(params_of(shapes, dtype)), comm)

    fewer = {n: s for n, s in SHAPES.items() if n != "vector"}
    text = f"rank {bad}: "
    refused = refused_everywhere
    refused(comm, ValueError, text + "parameters", lambda: new(on_bad(fewer, SHAPES)))
    wrong = {**SHAPES, "vector": (8,)}
    refused(comm, ValueError, text + "shapes", lambda: new(on_bad(wrong, SHAPES)))
    refused(comm, ValueError, text + r"dtypes\[0\] differs",
        lambda: new(SHAPES, on_bad(BF16, np.float32)))  # fmt: skip
    refused(comm, ValueError, text + r"dtypes\[0\] differs",
        lambda: new(SHAPES, on_bad(BF16, np.float32), Descent))  # fmt: skip
    refused(comm, ValueError, text, lambda: new(SHAPES, cls=on_bad(nn.AdaMax, nn.Adam)))
    refused(comm, TypeError, text + "optimizer", lambda: ShardedStates(
        on_bad(3, nn.Adam(params_of(SHAPES, np.float32))), comm))  # fmt: skip
    params = params_of(SHAPES, np.float32)
    opt = ShardedStates(nn.Adam(params), comm)
    opt(gradients_of(params, 0))
    watched = [*(p.data for p in params), *opt.optimizer.state_arrays().values()]
    owned = opt.owners.index(bad)
    gradients = list(gradients_of(params, 99))
    gradients[owned] = np.ones((1, 1, 1), np.float32)
    refused(comm, ValueError, text, lambda: opt(gradients), *watched)
    given = on_bad(gradients[:1], list(gradients_of(params, 99)))
    refused(comm, ValueError, text + ".*wrong length", lambda: opt(given), *watched)
    text = "Adam: rank 0: the gradient of '.*' is for another process: .*; call the ShardedStates"
    refused(comm, ValueError, text, lambda: opt.optimizer(gradients_of(params, 99)), *watched)
    folder = folder / "inner"
    text = "arrays without a shard.* differs: expected"
    refused(comm, ValueError, text, lambda: save_checkpoint(folder, opt.optimizer, comm), *watched)
    custom = new(SHAPES, cls=Descent)
    text = f"ShardedStates: rank {bad}: non-broadcastable output"
    refused(comm, ValueError, text, lambda: custom(gradients))
    calls = custom.optimizer.broadcast_params, lambda _: agree(comm, "another", {})
    refused(comm, ValueError, "calls something else", lambda: on_bad(*calls)(None))
