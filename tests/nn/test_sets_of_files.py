"""Mapped files of an optimizer belong together: they are taken over as a whole, or not at all."""

import copy
import gc
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import fusestep
from fusestep import nn
from fusestep.nn.base import file_set
from fusestep.nn.base.checkpoint import replace_file
from helpers import more

SHAPE = (20, 4)
FORMS = {
    "LazyAdam": {}, "Adam": {"sparse_update": "catch_up"},
    "AdamWeightDecay": {"sparse_update": "catch_up", "weight_decay": 0.01},
}  # fmt: skip
POSIX = pytest.mark.skipif(os.name == "nt", reason="pipes, links and forks")
MAPS = fusestep.MappedFiles


def made(folder: Any, w: Any, name: str = "Adam", make: Any = MAPS, **options: Any) -> Any:
    options = options or FORMS.get(name, {})
    with fusestep.states_in(make(folder)):
        return getattr(nn, name)([nn.Parameter(w, "w")], learning_rate=0.1, **options)


def stepped(optimizer: Any, w: Any, begin: int, end: int) -> Any:
    for k in range(begin, end):
        rng = np.random.default_rng(k)
        gradient = nn.RowTensor(
            rng.integers(0, len(w), 3), rng.standard_normal((3, 4)).astype("f"), SHAPE
        )
        optimizer((gradient,))
    return optimizer


def trained(folder: Any, name: str = "Adam", n: int = 7) -> Any:
    w = np.ones(SHAPE, np.float32)
    stepped(made(folder, w, name), w, 0, n)
    return w


def contents(folder: Path) -> dict[str, Any]:
    files = [p for p in folder.iterdir() if p.name != "manifest.lock"]
    return {p.name: p.read_bytes() if p.is_file() else None for p in files}


def assert_refused(folder: Path, w: Any, name: str, error: Any = (ValueError, OSError)) -> str:
    before, now = contents(folder), w.copy()
    with pytest.raises(error) as found:
        made(folder, now, name)
    assert contents(folder) == before
    assert np.array_equal(now, w)
    return str(found.value)


def pipe(file: Path, _: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def link(file: Path, other: Path) -> None:
    file.unlink()
    file.symlink_to(other)


def swapped(file: Path, _: Path) -> None:
    beside = next(p for p in sorted(file.parent.glob("m*.safetensors")) if p != file)
    content = file.read_bytes()
    file.write_bytes(beside.read_bytes())
    beside.write_bytes(content)


DAMAGE: dict[str, Callable[[Path, Path], Any]] = {
    "deleted": lambda file, _: file.unlink(), "empty": lambda file, _: file.write_bytes(b""),
    "cut": lambda file, _: file.write_bytes(file.read_bytes()[:-1]),
    "no file of states": lambda file, _: file.write_bytes(b"\x08" + b"[" * 9000),
    "another one's": lambda file, other: shutil.copy(other, file),
    "swapped": swapped, "pipe": pipe, "link": link,
    "hard link": lambda file, _: os.link(file, file.parent / "backup"),
}  # fmt: skip


@POSIX
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", [*FORMS][:2])
def test_any_one_file_is_damaged(name: str, damage: str, tmp_path: Path) -> None:
    w = trained(tmp_path / "set", name)
    trained(tmp_path / "other", name)
    files = sorted(p.name for p in (tmp_path / "set").iterdir())
    assert "manifest.json" in files
    for k, file in enumerate(f for f in files if f != "manifest.lock"):
        folder = tmp_path / str(k)
        shutil.copytree(tmp_path / "set", folder)
        if file == "manifest.json" and (damage == "swapped" or name == "LazyAdam"):
            continue  # a folder without one may be taken over
        DAMAGE[damage](folder / file, tmp_path / "other" / file)
        said = assert_refused(folder, w, name)
        is_of_many = damage == "swapped" or file == "manifest.json"
        assert is_of_many or file.split(".")[0] in said


@POSIX
def test_a_pipe_that_somebody_writes(tmp_path: Path) -> None:
    """It is none of the set, and nobody waits for what may come."""
    os.mkfifo(tmp_path / "other.safetensors")
    handle = os.open(tmp_path / "other.safetensors", os.O_RDWR)
    assert made(tmp_path, np.ones(SHAPE, np.float32)).global_step == 0
    os.close(handle)


@pytest.mark.parametrize(("file", "dtype", "values"), [
    ("global_step", "i4", [-1, 3]), ("step", "i8", [-1, 8, 1 << 40]),
    ("last_step.w", "i4", [-1, 8, 1 << 30]), ("idle_scalars.w", "f4", [np.nan, np.inf]),
])  # fmt: skip
def test_values_that_cannot_be(file: str, dtype: str, values: list[Any], tmp_path: Path) -> None:
    w = trained(tmp_path)
    for value in values:
        numbers = np.memmap(tmp_path / f"{file}.safetensors", dtype, "r+", offset=4096)
        before = numbers.copy()
        numbers[:] = value
        assert file.split(".")[0] in assert_refused(tmp_path, w, "Adam", ValueError)
        numbers[:] = before
    stepped(made(tmp_path, w), w, 7, 9)


@pytest.mark.parametrize("name", ["LazyAdam", "AdamWeightDecay", "SGD"])
def test_another_optimizer(name: str, tmp_path: Path) -> None:
    w = trained(tmp_path)
    assert "another one" in assert_refused(tmp_path, w, name)
    for options in ({"sparse_update": "lazy"}, {"sparse_update": "catch_up", "use_amsgrad": True}):
        with pytest.raises(ValueError, match="another one's"):
            made(tmp_path, w, **options)
    with pytest.raises(ValueError, match="another one"):
        made(tmp_path, w.reshape(4, 20).copy())


def test_folders_without_a_manifest(tmp_path: Path) -> None:
    """Those of older versions have neither it nor scalars of missed steps."""
    w, older = np.ones(SHAPE, np.float32), lambda folder: MAPS(folder).__call__
    stepped(made(tmp_path, w, "LazyAdam", older), w, 0, 7)
    expected = trained(tmp_path / "set", "LazyAdam", 9)
    stepped(made(tmp_path, w, "LazyAdam"), w, 7, 9)
    assert np.array_equal(w, expected)
    assert (tmp_path / "manifest.json").exists()
    asleep = tmp_path / "asleep"
    stepped(made(asleep, w, "Adam", older), w, 0, 7)
    (asleep / "idle_scalars.w.safetensors").unlink()
    assert "has rows that sleep" in assert_refused(asleep, w, "Adam")
    shutil.rmtree(asleep)
    stepped(made(asleep, w, "Adam", older), w, 0, 7).flush()
    (asleep / "idle_scalars.w.safetensors").unlink()
    stepped(made(asleep, w, "Adam"), w, 7, 9)
    stepped(made(asleep, w, "Adam"), w, 9, 10)


SECOND = """
import sys, numpy as np, fusestep
from fusestep import nn
with fusestep.states_in(fusestep.MappedFiles(sys.argv[1])):
    nn.Adam([nn.Parameter(np.ones((20, 4), np.float32), "w")], sparse_update="catch_up")
"""


@POSIX
def test_one_optimizer_has_a_folder(tmp_path: Path) -> None:
    w = np.ones(SHAPE, np.float32)
    first = stepped(made(tmp_path, w), w, 0, 3)
    command = [sys.executable, "-c", SECOND, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "RuntimeError: Adam: the folder is in use" in done.stderr
    child = os.fork()
    if not child:
        try:
            with pytest.raises(RuntimeError, match="in use"):
                made(tmp_path, w)
            del first
            gc.collect()
            with pytest.raises(RuntimeError, match="in use"):
                made(tmp_path, w)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert_refused(tmp_path, w, "Adam", RuntimeError)
    copies = copy.deepcopy(first), pickle.loads(pickle.dumps(first))
    del first
    again = made(tmp_path, w)
    assert [o.global_step[0] for o in (again, *copies)] == [3, 3, 3]


def test_an_error_lets_go_of_the_folder(tmp_path: Path) -> None:
    """Also while its traceback keeps what was made."""
    large = np.ones((4096, 3), np.float32)
    with pytest.raises(ValueError, match="begin at 0") as kept:
        made(tmp_path, large, "Adagrad")
    optimizer = made(tmp_path, large, "Adagrad", lambda folder: MAPS(folder, fill=True))
    assert kept.value
    assert optimizer.accum[0][0, 0] > 0


def test_what_leaves_parts_of_a_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = trained(tmp_path / "grown")
    optimizer = made(tmp_path / "grown", w)
    optimizer.grow(optimizer.parameters[0], 30)
    del optimizer
    assert "moved into memory" in assert_refused(tmp_path / "grown", w, "Adam")
    w = trained(tmp_path / "loaded")
    optimizer = made(tmp_path / "loaded", w)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    monkeypatch.setattr(file_set, "replace_file", lambda *_: calls.append(_) or replace(*_))
    calls: list[Any] = []

    def replace(*arguments: Any) -> None:
        if len(calls) > 1:
            raise KeyboardInterrupt
        replace_file(*arguments)

    with pytest.raises(KeyboardInterrupt):
        optimizer.load_state_dict(state)
    monkeypatch.undo()
    del optimizer
    assert "being loaded" in assert_refused(tmp_path / "loaded", w, "Adam")


KILLED = """
import os, signal, sys
import numpy as np
sys.path[:0] = sys.argv[6:]
import test_sets_of_files as sets
folder, name, begin, end, place = *sys.argv[1:3], *map(int, sys.argv[3:6])
w = np.memmap(folder + "/w", np.float32, "r+", shape=sets.SHAPE)
seen = 0
def count(frame, event, argument):
    global seen
    if "/nn/" in frame.f_code.co_filename:
        seen += 1
        if seen == place:
            os.kill(os.getpid(), signal.SIGKILL)
    return count
sys.settrace(count if place else None)
optimizer = sets.made(folder + "/states", w, name)
sys.settrace(None)
assert optimizer.global_step[0] == begin
sets.stepped(optimizer, w, begin, end)
os.kill(os.getpid(), signal.SIGKILL)
"""


@POSIX
@pytest.mark.parametrize("name", ["LazyAdam", more("Adam"), "AdamWeightDecay"])
def test_processes_that_are_killed(name: str, tmp_path: Path) -> None:
    """While they make an optimizer, at any place, and between steps: the next one goes on."""

    def run(begin: int, end: int, place: int = 0) -> None:
        numbers = map(str, (begin, end, place))
        paths = str(Path(__file__).parent), *sys.path
        command = [sys.executable, "-c", KILLED, str(tmp_path), name, *numbers, *paths]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr

    np.ones(SHAPE, np.float32).tofile(tmp_path / "w")
    rng = np.random.default_rng(5)
    for begin, end in ((0, 4), (4, 9)):
        for place in rng.integers(1, 2500, 6).tolist():
            run(begin, begin, place)
        run(begin, end)
    w = np.fromfile(tmp_path / "w", np.float32).reshape(SHAPE)
    optimizer, expected = made(tmp_path / "states", w, name), trained(tmp_path / "whole", name, 9)
    for resumed, x in ((optimizer, w), (made(tmp_path / "whole", expected, name), expected)):
        resumed.flush()
        assert np.isfinite(x).all()
    assert np.array_equal(w, expected)
