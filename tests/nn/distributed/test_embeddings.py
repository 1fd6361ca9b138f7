"""`ShardedEmbedding`: in real processes, by the modules ``process_embedding*``, and alone."""

import copy
import pickle
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import torch as fused
from fusestep.nn.distributed import alone
from helpers import more
from process_embedding_training import MAKE, ORDERS, Net, Pair, assert_bits, batch, whole_of
from process_starts import needs_torch, start

PROGRAM = Path(__file__).with_name("process_embeddings.py")
PARTS = (
    "training", "initial", "ids", "average", "two_tables", "several_uses",
    "one_backward_again", "beside_ddp", "hidden", "handed_out_by_each",
    "errors", "arguments", "needs_all", "scaler",
    "full", "whole_tables", "other_order", "states_of_ranks")  # fmt: skip


def run(size: int, folder: Path, *parts: str) -> None:
    done = start("torch", size, PROGRAM, folder, *parts, cwd=folder)
    assert done.returncode == 0, done.stdout
    ended = sorted(path.name for path in folder.glob("done-*"))
    assert ended == [f"done-{rank}" for rank in range(size)], done.stdout
    for path in folder.glob("done-*"):
        path.unlink()


@needs_torch
@pytest.mark.parametrize("sizes", [(2, 3), more((3, 2)), more((3, 1)), more((1, 2))])
def test_processes(sizes: tuple[int, int], tmp_path: Path) -> None:
    """Saved by some, and read by them and by others: in one test, as each start costs seconds."""
    run(sizes[0], tmp_path, "saved", *PARTS)
    run(sizes[1], tmp_path, "resumed")


# -- one process without any engine ---------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MAKE)
def test_alone(name: str, order: str) -> None:
    """The same program: the numbers, and the state dicts, of PyTorch's own table."""
    pair = Pair(alone(), name, order=order)
    pair.steps(2)
    assert_bits(pair.own.state_dict()["words.weight"], pair.whole.words.weight)
    of_own, of_whole = pair.optimizer.state_dict(), pair.reference.state_dict()
    for role, state in of_whole["state"][0].items():
        assert_bits(of_own["state"][0][role], state, role)
    # From PyTorch's table and its optimizer, and back to them.
    fresh = Net(alone(), order=order, seed=8)
    optimizer = MAKE[name](fresh.parameters())
    fresh.load_state_dict(pair.whole.state_dict())
    optimizer.load_state_dict(copy.deepcopy(of_whole))  # PyTorch shares counts
    other = Net(alone(), order=order, seed=8)
    other.load_state_dict(fresh.state_dict())
    pair.own, pair.optimizer = other, MAKE[name](other.parameters())
    pair.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    pair.check()
    pair.steps(1)


def test_alone_takes_either_order() -> None:
    """Its state dict has the rows by their numbers."""
    one, other = (Net(alone(), order=order, seed=k) for k, order in enumerate(ORDERS))
    other.load_state_dict(one.state_dict())
    assert_bits(whole_of(other.words), whole_of(one.words))


def test_alone_all_gradients_are_here() -> None:
    """So their norm is known, and a step can be skipped."""
    pair = Pair(alone(), "LazyAdam")
    for net in (pair.own, pair.whole):
        net(batch(0)).backward()
    norms = [
        fused.clip_grad_norm_(net.parameters(), 1.0, optimizer=optimizer)
        for net, optimizer in ((pair.own, pair.optimizer), (pair.whole, pair.reference))
    ]
    torch.testing.assert_close(*norms)
    pair.optimizer.step()
    pair.reference.step()
    pair.check()
    optimizer = fused.LazyAdam(pair.own.parameters(), skip_nonfinite=True)
    pair.own.words.weight.grad._values()[0, 0] = torch.nan
    before = pair.own.words.weight.detach().clone()
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert_bits(pair.own.words.weight, before)


def test_a_copy_knows_its_rows_at_once() -> None:
    """Before it has looked anything up."""
    net = Net(alone(), order="hash")
    for found in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert found.words.weight.row_shard is found.words.shard
        assert_bits(found.words.weight, net.words.weight)
        found(batch(0)).backward()
        assert net.words.weight.grad is None


def test_derivatives_that_do_not_lie_in_memory() -> None:
    """Negatives of what lies there and zeros are the numbers that they are; what is gone raises."""
    table, ids = fused.ShardedEmbedding(10, 4, alone()), torch.tensor([1, 3, 1])
    for derivative in (torch._neg_view(torch.ones(3, 4)), torch._efficientzerotensor((3, 4))):
        table.zero_grad()
        table(ids).backward(derivative)
        found, expected = table.weight.grad.to_dense(), torch.zeros(10, 4)
        assert torch.equal(found, expected.index_add(0, ids, derivative.clone()))
    gone = torch.ones(4, 3)
    turned = gone.t()
    gone.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has no memory: expected 48 bytes, got 0"):
        table(ids).backward(turned)


def test_it_is_shown() -> None:
    text = repr(fused.ShardedEmbedding(10, 4, alone(), order="hash"))
    assert text.startswith("ShardedEmbedding(10, 4, shard=RowShard(10 rows, 0:10, rank 0 of 1")


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        fused.ShardedEmbedding(10, 4)
