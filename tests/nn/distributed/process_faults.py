"""A training with checkpoints that goes on until a process is killed; see `test_faults`."""

import json
import os
import sys
from pathlib import Path

import numpy as np
from fusestep.nn.distributed import LostProcessError
from process_checks import communicator, report
from process_training import Tables, Training, assert_part_of

FORM, EVERY = "LazyAdam", 2  # steps between checkpoints


def train(engine: str, folder: Path) -> None:
    """What the others say of it is left in the folder, by rank."""
    with communicator(engine) as comm:
        one = Training(FORM, np.float32, Tables(comm, "hash"))
        folder.joinpath(f"pid-{comm.rank}").write_text(f"{os.getpid()}")
        try:
            while True:
                one.steps(1)
                if one.done % EVERY == 0:
                    one.save(folder / "checkpoint")
        except LostProcessError as error:
            said = json.dumps({"ranks": error.ranks, "text": str(error), "steps": one.done})
            folder.joinpath(f"said-{comm.rank}").write_text(said)
            report(said)
            os._exit(0)  # at once: others may still be waiting for the store


def resume(engine: str, folder: Path) -> None:
    """Other processes go on; their tables are compared by `check`."""
    with communicator(engine) as comm:
        check(Tables(comm, "range"), folder)
        folder.joinpath(f"resumed-{comm.rank}").touch()


def check(tables: Tables, folder: Path) -> int:
    """The checkpoint is that of an undisturbed process; after how many steps."""
    again, whole = (Training(FORM, np.float32, of) for of in (tables, None))
    again.load(folder / "checkpoint")
    found = again.done
    assert found % EVERY == 0
    whole.steps(found)
    assert_part_of(again, whole, f"after {found} steps")
    for one in (again, whole):
        one.steps(EVERY)
    assert_part_of(again, whole, f"{found} steps, and {EVERY}")
    return found


if __name__ == "__main__":
    {"train": train, "resume": resume}[sys.argv[2]](sys.argv[1], Path(sys.argv[3]))
