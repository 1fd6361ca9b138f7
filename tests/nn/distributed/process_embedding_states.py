"""Checkpoints of a `ShardedEmbedding` and its optimizer, on each rank."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as dcp
from fusestep.nn.distributed import Communicator
from process_checks import everywhere, refused_everywhere

from process_embedding_training import (  # isort: skip
    MAKE, ORDERS, N, Net, Pair, Whole, assert_bits, batch, part, whole_of)  # fmt: skip

FULL = dcp.StateDictOptions(full_state_dict=True)
CASES = [
    (name, order, (torch.float32, torch.bfloat16)[(k + j) % 2])
    for k, name in enumerate(MAKE)
    for j, order in enumerate(ORDERS)
]
SAVED = 2  # steps before it


def _states(net: Any, optimizer: Any, **options: Any) -> dict[str, Any]:
    return {
        "model": dcp.get_model_state_dict(net, **options),
        "optim": dcp.get_optimizer_state_dict(net, optimizer, **options),
    }


def _set(net: Any, optimizer: Any, states: Any, **options: Any) -> None:
    dcp.set_model_state_dict(net, states["model"], **options)
    dcp.set_optimizer_state_dict(net, optimizer, states["optim"], **options)


def _path(folder: Path, case: Any) -> Path:
    return folder / "-".join(map(str, case))


def saved(comm: Communicator, folder: Path) -> None:
    """Saved after some steps by torch.distributed.checkpoint, and resumed by these processes."""
    for name, order, dtype in CASES:
        pair = Pair(comm, name, order=order, dtype=dtype)
        pair.steps(SAVED)
        path = _path(folder, (name, order, dtype))
        checkpoint.save(_states(pair.own, pair.optimizer), checkpoint_id=path)
    resumed(comm, folder)


def resumed(comm: Communicator, folder: Path) -> None:
    """Read by any number of processes: they go on with the bits of an uninterrupted run."""
    for name, order, dtype in CASES:
        pair = Pair(comm, name, order=order, dtype=dtype, seed=3)
        fresh = Net(comm, order=order, dtype=dtype, seed=8)
        optimizer = MAKE[name](fresh.parameters())
        states = _states(fresh, optimizer)
        checkpoint.load(states, checkpoint_id=_path(folder, (name, order, dtype)))
        _set(fresh, optimizer, states)
        _run_reference(pair, SAVED)
        pair.own, pair.optimizer = fresh, optimizer
        pair.check()
        pair.steps(2)


def _run_reference(pair: Pair, n: int) -> None:
    """The whole table alone: what these processes have not seen."""
    for step in range(n):
        pair.reference.zero_grad()
        pair.whole(batch(step)).backward()
        pair.reference.step()
    pair.done = n


def full(comm: Communicator, *_: Any) -> None:
    """All of the table and its states on each process, and read again."""
    for name, order, dtype in CASES:
        pair = Pair(comm, name, order=order, dtype=dtype)
        pair.steps(2)
        label = f"{name} {order}"
        states = copy.deepcopy(_states(pair.own, pair.optimizer, options=FULL))
        found = states["optim"]["state"]["words.weight"]
        reference = pair.reference.state[pair.whole.words.weight]
        assert found.keys() == reference.keys(), label
        if order == "range":
            assert_bits(states["model"]["words.weight"], pair.whole.words.weight, label)
            for role, state in reference.items():
                assert_bits(found[role], state, f"{label} {role}")
        fresh = Net(comm, order=order, dtype=dtype, seed=8)
        optimizer = MAKE[name](fresh.parameters())
        _set(fresh, optimizer, states, options=FULL)
        again = Net(comm, order=order, dtype=dtype, seed=8)
        again.load_state_dict(states["model"])  # without what PyTorch knows of processes
        assert_bits(whole_of(again.words), pair.whole.words.weight, label)
        pair.own, pair.optimizer = fresh, optimizer
        pair.check()
        pair.steps(1)


def whole_tables(comm: Communicator, *_: Any) -> None:
    """That of a `torch.nn.Embedding` is taken, row by row, strictly."""
    rows = torch.randn(N, 8, generator=torch.Generator().manual_seed(2))
    given = Whole(rows).state_dict()
    assert list(given) == ["words.weight"]
    for order in ORDERS:
        for strict in (True, False):
            net = Net(comm, order=order)
            told = net.load_state_dict(given, strict=strict)
            assert told.missing_keys == [] == told.unexpected_keys
            assert_bits(whole_of(net.words), rows)
        assert list(given) == ["words.weight"] and given["words.weight"].shape == rows.shape
        assert_bits(net(part(batch(0), 0, comm)), Whole(rows)(part(batch(0), 0, comm)))
        for n in (N - 1, N + 1):
            table = Whole(torch.zeros(n, 8)).state_dict()
            with_error = everywhere(comm, _error(net, table))
            assert all("size mismatch" in text for text in with_error), with_error
        missing = everywhere(comm, _error(net, {}))
        assert all("Missing key" in text and "words.weight" in text for text in missing), missing
        assert_bits(whole_of(net.words), rows)


def _error(net: Any, states: Any) -> str:
    try:
        net.load_state_dict(states)
    except RuntimeError as error:
        return str(error)
    return "none"


def other_order(comm: Communicator, *_: Any) -> None:
    """Rows in another order are refused, and nothing is written."""
    for order, other in (ORDERS, ORDERS[::-1]):
        net, states = Net(comm, order=order), Net(comm, order=other, seed=8).state_dict()
        arrays = [net.words.weight.detach().numpy()]
        text = f"another order of rows: expected {order}, got {other}"
        refused_everywhere(
            comm, ValueError, text, lambda net=net, s=states: net.load_state_dict(s), *arrays
        )


def states_of_ranks(comm: Communicator, *_: Any) -> None:
    """A state dict is taken by the module that gave it, and by a copy, also before a forward."""
    for order in ORDERS:
        pair = Pair(comm, "LazyAdam", order=order)
        pair.steps(2)
        net = Net(comm, order=order, seed=8)
        net.load_state_dict(pair.own.state_dict())
        optimizer = MAKE["LazyAdam"](net.parameters())
        optimizer.load_state_dict(pair.optimizer.state_dict())
        pair.own, pair.optimizer = net, optimizer
        pair.check()
        pair.steps(1)
        _copy(comm, pair)


def _copy(comm: Communicator, pair: Pair) -> None:
    other = copy.deepcopy(pair.own)
    assert_bits(other.words.weight, pair.own.words.weight)
    assert other.words.weight is not pair.own.words.weight
    assert other.words.shard.comm.size == comm.size
    optimizer = MAKE["LazyAdam"](other.parameters())
    optimizer.load_state_dict(pair.optimizer.state_dict())
    for mine, its in zip(
        optimizer.state_dict()["state"].values(), pair.optimizer.state_dict()["state"].values(),
        strict=True,
    ):  # fmt: skip
        assert [x.shape for x in mine.values()] == [x.shape for x in its.values()]
    before = pair.own.words.weight.detach().clone()
    mine, reference = (pair.own, pair.optimizer), pair.done
    pair.own, pair.optimizer = other, optimizer
    pair.check()
    pair.steps(1)
    assert pair.done == reference + 1
    assert_bits(mine[0].words.weight, before)  # the copy has a table of its own
