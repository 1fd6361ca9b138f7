"""Exchanges of torch.distributed that end late, fail, or come after the group has ended."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fusestep.nn import distributed
from fusestep.nn.distributed import LostProcessError, RowShard
from process_starts import needs_torch

pytestmark = needs_torch


@pytest.fixture
def comm() -> Iterator[Any]:
    """One process, which has a group of its own."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield distributed.over_torch()
    if dist.is_initialized():
        dist.destroy_process_group()


class Late:
    """An exchange that is done just after somebody has stopped waiting for it."""

    def __init__(self, error: str = "") -> None:
        self.calls, self.error = 0, error

    def is_completed(self) -> bool:
        return self.calls > 0

    def wait(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)


def test_an_exchange_that_is_done_when_the_time_is_over(comm: Any) -> None:
    work = Late()
    comm.finish(work, [np.ones(1)])
    assert work.calls == 2
    with pytest.raises(LostProcessError, match=r"an exchange failed \(Connection closed\)"):
        comm.finish(Late("Connection closed"), [np.ones(1)])


def test_the_group_ends_although_a_communicator_is_left(comm: Any) -> None:
    """Its threads do, too: one that lets go of an array while Python ends would abort it."""
    import torch.distributed as dist

    shard = RowShard(3, comm)
    assert comm.group is dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(LostProcessError, match="the process group has been destroyed"):
        _ = comm.group
    with pytest.raises(LostProcessError, match="the process group has been destroyed"):
        comm.broadcast(np.ones(1), 0)
    assert len(shard) == 3
