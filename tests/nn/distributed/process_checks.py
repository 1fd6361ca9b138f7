"""What programs of several processes share."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from fusestep.nn.distributed import Communicator
from fusestep.nn.distributed.agreement import gather_texts


@contextmanager
def communicator(engine: str) -> Iterator[Communicator]:
    """That of all processes, for a program that a launcher has started."""
    from fusestep.nn import distributed

    if engine == "mpi":
        yield distributed.over_mpi()
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    yield distributed.over_torch()
    dist.barrier()  # rank 0 may keep the store that others still ask
    with suppress(RuntimeError):
        dist.destroy_process_group()
    # What PyTorch tears down later, at the end of the process, aborts now and then.
    sys.stdout.flush()
    os._exit(0)


def smaller(engine: str, comm: Communicator, size: int) -> Communicator | None:
    """The first ranks as a group of their own; None for the others. All call this."""
    from fusestep.nn import distributed

    if engine == "mpi":
        from mpi4py import MPI

        group = MPI.COMM_WORLD.Split(int(comm.rank >= size), comm.rank)
        return distributed.over_mpi(group) if comm.rank < size else None
    import torch.distributed as dist

    group = dist.new_group(range(size))
    return distributed.over_torch(group) if comm.rank < size else None


def everywhere(comm: Communicator, value: Any) -> list[str]:
    """A value of each process, as a text."""
    return gather_texts(comm, repr(value))


def refused_everywhere(
    comm: Communicator, kind: type[Exception], match: str, call: Callable[[], Any],
    *watched: np.ndarray,
) -> None:  # fmt: skip
    """The call raises the same error on all processes, and no array changes on any."""
    before, found = [array.tobytes() for array in watched], None
    try:
        call()
    except Exception as error:
        found = error
    said = everywhere(comm, (type(found).__name__, str(found)))
    assert len(set(said)) == 1, said
    assert type(found) is kind, said
    assert re.search(match, str(found)), (match, said)
    after = [array.tobytes() for array in watched]
    changed = [k for k, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert everywhere(comm, changed) == ["[]"] * comm.size, changed


def run_parts(comm: Communicator, parts: Mapping[str, Callable[..., Any]], *given: Any) -> None:
    """Each with what was given, the last of which is the folder that is told when all are done."""
    for name, part in parts.items():
        start = time.perf_counter()
        try:
            part(comm, *given)
        except BaseException:
            report(f"rank {comm.rank} of {comm.size} has failed in {name}")
            raise
        report(f"{name}: {time.perf_counter() - start:.1f} s")
    Path(given[-1], f"done-{comm.rank}").touch()


def report(*said: Any) -> None:
    """For whoever reads why it failed; at once, before anybody is killed."""
    print(*said, file=sys.stderr, flush=True)
