"""States of nn.torch that functions make, in files."""

import copy
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fusestep
from fusestep.nn import torch as fused
from helpers import more
from test_options import mixed
from torch_training import EVERY, TABLES, assert_same_bits, everything

WHOLE = "Adagrad", "Prodigy"  # states that are made at once, and an estimate of all parameters
SAMPLE = "SGD", "SparseAdam"
MAPPED = [name for name in EVERY if name not in WHOLE]


@pytest.mark.parametrize("name", [n if n in SAMPLE else more(n) for n in MAPPED])
@pytest.mark.parametrize("rounding", ["nearest", "master", more("kahan"), more("stochastic")])
def test_a_run_in_files_has_the_same_bits_and_goes_on(name: str, rounding: str, tmp_path) -> None:
    """With an optimizer made anew between two steps, by the files alone."""
    if name == "Adafactor" and rounding != "nearest":
        pytest.skip("its rule is one on matrices")
    dtype = torch.float32 if rounding == "nearest" else torch.bfloat16
    runs = []
    for folder in (None, tmp_path):
        parameters = [p for p in mixed(dtype) if p.dim() == 2][: None if name in TABLES else 1]
        options: dict[str, Any] = {"lr": 0.1, "rounding": rounding}
        if rounding == "nearest":
            del options["rounding"]
        if name in TABLES:
            options["sparse"] = "touched"
        if name == "SGD":
            options["momentum"] = 0.9
        if name == "SparseAdam":
            parameters = parameters[1:]
        for step in range(4):
            if folder is None and step == 0:
                optimizer = getattr(fused, name)(parameters, **options)
            elif folder is not None and step % 2 == 0:
                optimizer = None
                with fusestep.states_in(fusestep.MappedFiles(folder, fill=True)):
                    optimizer = getattr(fused, name)(parameters, **options)
            optimizer.step()
        runs.append(optimizer)
    plain, mapped = (list(optimizer.state.values()) for optimizer in runs)
    for one, other in zip(plain, mapped, strict=True):
        assert float(other["step"]) == 4.0
        for role, tensor in one.items():
            assert_same_bits(
                [torch.as_tensor(other[role]).float()], [torch.as_tensor(tensor).float()]
            )
    assert_same_bits(
        *([p for group in o.param_groups for p in group["params"]] for o in runs))  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="cannot reserve room")
def test_files_without_reserved_room(tmp_path: Path) -> None:
    w = torch.nn.Parameter(torch.zeros(1 << 16, 16))
    with fusestep.states_in(fusestep.MappedFiles(tmp_path, reserve=False)):
        optimizer = fused.SparseAdam([w])
    torch.nn.functional.embedding(torch.tensor([3]), w, sparse=True).sum().backward()
    optimizer.step()
    (file,) = tmp_path.glob("exp_avg.*")
    assert file.stat().st_blocks * 512 < 1 << 18 < file.stat().st_size


def test_names_and_lifetimes(tmp_path: Path) -> None:
    """States are made at the first gradient, by the function of the constructor."""
    asked = []

    def note(name: str, shape: Any, dtype: Any, initial: Any) -> Any:
        asked.append(name)
        return fusestep.MappedFiles(tmp_path)(name, shape, dtype, initial)

    w = torch.nn.Parameter(torch.ones(4, 3))
    with fusestep.states_in(note):
        optimizer = fused.AdamW([("table", w)], lr=0.1)
    assert not asked
    w.grad = torch.ones(4, 3)
    optimizer.step()
    assert asked == [
        "step.parameter table", "exp_avg.parameter table", "exp_avg_sq.parameter table",
    ]  # fmt: skip
    assert not fused.AdamW([w]).state  # after the context


def test_what_is_loaded_goes_to_the_files(tmp_path: Path) -> None:
    runs = []
    for mapped in (False, True):
        w = torch.nn.Parameter(torch.ones(64, 32, dtype=torch.bfloat16))
        first = fused.AdamW([w], lr=0.1, rounding="master")
        for step in range(4):
            w.grad = torch.full_like(w, step + 1.0)
            if mapped and step == 2:
                with fusestep.states_in(fusestep.MappedFiles(tmp_path, fill=True)):
                    other = fused.AdamW([w], lr=0.1, rounding="master")
                other.load_state_dict(first.state_dict())
                first = other
                del other
            first.step()
        runs.append(everything(first))
    assert_same_bits(*runs)
    del first
    with fusestep.states_in(fusestep.MappedFiles(tmp_path, fill=True)):
        again = fused.AdamW([w], lr=0.1, rounding="master")
    w.grad = torch.zeros_like(w)
    again.step()
    assert again.state[w]["step"] == 5.0


@pytest.mark.parametrize("name", WHOLE)
def test_classes_that_cannot(name: str, tmp_path: Path) -> None:
    maker = fusestep.MappedFiles(tmp_path)
    with fusestep.states_in(maker), pytest.raises(ValueError, match=f"{name}: states_in cannot"):
        getattr(fused, name)(mixed()[:1])
    module = torch.nn.Linear(2, 2)
    with fusestep.states_in(maker), pytest.raises(ValueError, match="states_in cannot make"):
        fused.Thor(module, lr=0.1)


def test_a_state_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    files = fusestep.MappedFiles(tmp_path)
    parameters = [torch.nn.Parameter(torch.ones(64, 64)) for _ in range(2)]
    with fusestep.states_in(files):
        optimizer = fused.AdamW(parameters, lr=0.1)
    (tmp_path / "exp_avg.parameter 1.safetensors").write_bytes(b"0" * 100)
    for p in parameters:
        p.grad = torch.ones_like(p)
    before = everything(optimizer)
    with pytest.raises(ValueError, match=r"exp_avg\.parameter 1' is torn or another one"):
        optimizer.step()
    assert all(map(torch.equal, before, everything(optimizer)))
    assert not optimizer.state


# Sets of files


def table_step(optimizer: Any, table: Any, k: int) -> None:
    """A lookup and a step; rows that the lookup does not read sleep."""
    draw = torch.Generator().manual_seed(k)
    ids = torch.randint(len(table.weight), (4,), generator=draw)
    optimizer.zero_grad()
    (table(ids) * torch.randn(4, 3, generator=draw)).square().sum().backward()
    optimizer.step()


PART = """
import os, signal, sys
sys.path[:0] = sys.argv[4:]
import numpy as np, torch, fusestep
from fusestep.nn import torch as fused
from test_torch_state_files import table_step
folder, begin, end = sys.argv[1], *map(int, sys.argv[2:4])
table = torch.nn.Embedding(30, 3, sparse=True)
weights = np.memmap(folder + "/w", np.float32, "r+", shape=(30, 3))
table.weight.data = torch.from_numpy(weights)
with fusestep.states_in(fusestep.MappedFiles(folder + "/states")):
    optimizer = fused.AdamW(table.parameters(), lr=0.1, sparse="catch_up")
optimizer.watch(table)
for k in range(begin, end):
    table_step(optimizer, table, k)
if end == 20:
    optimizer.flush()
os._exit(0) if end % 2 else os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_rows_that_sleep_go_on_in_another_process(tmp_path: Path) -> None:
    for name, ends in (("whole", [20]), ("parts", [3, 8, 20])):
        (tmp_path / name).mkdir()
        np.ones((30, 3), np.float32).tofile(tmp_path / name / "w")
        for begin, end in zip([0, *ends], ends, strict=False):
            numbers, paths = (str(begin), str(end)), (str(Path(__file__).parent), *sys.path)
            command = [sys.executable, "-c", PART, str(tmp_path / name), *numbers, *paths]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode in (0, -9), done.stderr
    whole, parts = ((tmp_path / name / "w").read_bytes() for name in ("whole", "parts"))
    assert whole == parts


class Program:
    """A program of random steps, in which groups change, states are deleted, and it ends."""

    def __init__(self, seed: int, folder: Path | None) -> None:
        self.random, self.folder = np.random.default_rng(seed), folder
        self.named, self.sparse = self.random.random(2) < 0.5
        self.pool = [torch.nn.Parameter(torch.zeros(6, 3)) for _ in range(8)]
        self.groups, self.free, self.optimizer = [[0, 1], [2]], 3, None
        self.build()

    def group(self, numbers: list[int]) -> dict[str, Any]:
        tables = [self.pool[i] for i in numbers]
        named = [(f"p{i}", table) for i, table in zip(numbers, tables, strict=True)]
        return {"params": named if self.named else tables}

    def build(self) -> None:
        state = None
        if self.optimizer is not None and self.folder is None:
            state = copy.deepcopy(self.optimizer.state_dict())
        self.optimizer = None
        files = self.folder and fusestep.states_in(fusestep.MappedFiles(self.folder))
        with files or nullcontext():
            sparse = "catch_up" if self.sparse else "touched"
            self.optimizer = fused.Adam(map(self.group, self.groups), lr=0.1, sparse=sparse)
        if state is not None:
            self.optimizer.load_state_dict(state)

    def step(self) -> None:
        action, used, optimizer = self.random.integers(12), self.groups[0][0], self.optimizer
        place = self.groups[self.random.integers(len(self.groups))]
        assert optimizer is not None
        if action == 0 and self.free < 8:
            self.groups.append([self.free])
            optimizer.add_param_group(self.group([self.free]))
        elif action == 1 and self.free < 8 and not self.named:
            optimizer.param_groups[self.groups.index(place)]["params"].append(self.pool[self.free])
            place.append(self.free)
        elif action == 2:
            optimizer.flush()
            optimizer.state.clear()
        elif action == 3:
            used = place[-1]
            optimizer.flush()
            optimizer.state.pop(self.pool[used], None)
        elif action == 4:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif action in (5, 6, 7):
            del optimizer
            self.build()
        self.free += action <= 1 and self.free < 8 and not (action == 1 and self.named)
        for i, table in enumerate(self.pool):
            table.grad = None
            if any(i in group for group in self.groups) and (
                self.random.random() < 0.6 or i == used
            ):
                rows, values = self.random.integers(0, 6, (1, 2)), self.random.random((2, 3))
                parts = torch.from_numpy(rows), torch.from_numpy(values).float()
                table.grad = torch.sparse_coo_tensor(*parts, (6, 3), check_invariants=False)
        self.optimizer.step()


@pytest.mark.parametrize("seeds", [range(12), more(range(12, 150))])
@pytest.mark.filterwarnings("ignore:.* follows from rows that slept:RuntimeWarning")
def test_random_programs(seeds: range, tmp_path: Path) -> None:
    """As the same without files; where numbers of parameters have changed, none goes on."""
    ends = []
    for seed in seeds:
        plain, mapped = Program(seed, None), Program(seed, tmp_path / str(seed))
        for _ in range(25):
            plain.step()
            try:
                mapped.step()
            except ValueError as error:
                assert "parameters whose numbers have changed" in str(error)  # noqa: PT017
                break
            assert_same_bits(mapped.pool, plain.pool)
        ends.append(mapped.optimizer is None)
    assert 0 < sum(ends) < len(ends)
