"""Checkpoints on each rank: written by these processes, read by these, by fewer, by others."""

from pathlib import Path
from typing import Any

import numpy as np

from fusestep.nn.distributed import (  # isort: skip
    Communicator, ShardedStates, alone, load_checkpoint, save_checkpoint)  # fmt: skip
from helpers import STORAGE_DTYPES, assert_same_arrays, assert_same_bits
from optimizers import make
from process_checks import everywhere, smaller
from process_states import SHAPES, check_states, gradients_of, params_of
from process_training import Tables, Training, assert_part_of, assert_same_training

CASES = [
    (order, form, dtype)
    for k, dtype in enumerate(STORAGE_DTYPES)
    for order, form in zip(("range", "hash"), (("LazyAdam", "FTRL"), ("FTRL", "LazyAdam"))[k % 2],
        strict=True)
]  # fmt: skip
CASES += [("range", "RowWiseAdagrad", np.float32), ("hash", "RowWiseAdam", STORAGE_DTYPES[3])]
OTHER = {"range": "hash", "hash": "range"}
STATES = (("Adam", np.float32), ("AdaFactor", np.float32), ("Lamb", STORAGE_DTYPES[3]))
SAVED = 2  # steps before it


def name_of(order: str, form: str, dtype: Any) -> str:
    return f"{order} {form} {np.dtype(dtype)}"


def saved(comm: Communicator, engine: str, folder: Path) -> None:
    """Saved, by these processes, and read again by them, and by fewer."""
    groups = [smaller(engine, comm, n) for n in range(1, comm.size if engine == "torch" else 1)]
    for case in CASES:
        order, form, dtype = case
        path = folder / name_of(order, form, dtype)
        own = Training(form, dtype, Tables(comm, order))
        own.steps(SAVED)
        own.save(path)
        own.steps(1)  # what comes later is not in it
        assert sorted(p.name for p in path.iterdir())[0] == "index.json"
        for group in [comm, *groups]:
            if group is not None:
                _resume(group, path, case)
        everywhere(comm, "until all have read it")


def resume(comm: Communicator, _: str, folder: Path) -> None:
    """What other processes have written, in either order, and without shards."""
    found = [case for case in CASES if (folder / name_of(*case)).is_dir()]
    assert found
    for case in found:
        _resume(comm, folder / name_of(*case), case)


def _resume(comm: Communicator, path: Path, case: tuple[str, str, Any]) -> None:
    order, form, dtype = case
    whole, everything = Training(form, dtype), Training(form, dtype)
    whole.steps(SAVED)
    load_checkpoint(path, everything.optimizer, alone())
    assert_same_training(everything, whole, path.name)
    again = [Training(form, dtype, Tables(comm, now)) for now in (order, OTHER[order])]
    for one in again:
        one.load(path)
        assert_part_of(one, whole, path.name)
    for one in (whole, everything, *again):
        one.steps(2)
    assert_same_training(everything, whole, path.name)
    for one in again:
        assert_part_of(one, whole, path.name)


def saved_states(comm: Communicator, engine: str, folder: Path) -> None:
    """Of `ShardedStates`, read by others than have written it, and by one alone."""
    for form, dtype in STATES:
        opt = ShardedStates(make(form, params_of(SHAPES, dtype)), comm)
        for step in range(SAVED):
            opt(gradients_of(list(opt.optimizer.parameters), step))
        save_checkpoint(folder / f"states {form}", opt, comm)
    resume_states(comm, engine, folder)


def resume_states(comm: Communicator, _: str, folder: Path) -> None:
    """Of these processes or others."""
    for form, dtype in STATES:
        path, reference = folder / f"states {form}", make(form, params_of(SHAPES, dtype))
        for step in range(SAVED):
            reference(gradients_of(list(reference.parameters), step))
        by_one = make(form, params_of(SHAPES, dtype))
        load_checkpoint(path, by_one, alone())
        again = ShardedStates(make(form, params_of(SHAPES, dtype)), comm)
        load_checkpoint(path, again, comm)
        for one in (again, by_one, reference):
            one(gradients_of(list(reference.parameters), SAVED))
        for one in (again.optimizer, by_one):
            assert_same_arrays(one.parameters, reference.parameters)
        check_states(comm, again, reference, form)
        for name, array in by_one.state_arrays().items():
            assert_same_bits(array, reference.state_arrays()[name], f"{form} {name}")
