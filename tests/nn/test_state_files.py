"""States that functions make, in files and in memory that nobody has touched."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import fusestep
from fusestep import nn
from helpers import BF16, assert_same_bits, more

from optimizers import (  # isort: skip
    FORMS, ONE_OF_EACH, arguments_of, assert_same_run, gradients, make, parameters, rows, states,
)  # fmt: skip

F32 = np.float32
QUICK = "LazyAdam", "SGD", "Prodigy"
EACH_FORM = pytest.mark.parametrize(
    "form", [f if f in QUICK else more(f) for f in ONE_OF_EACH if FORMS[f][0] != "LARS"]
)


def in_files(folder: Any, form: str, params: Any, **options: Any) -> Any:
    with fusestep.states_in(fusestep.MappedFiles(folder, fill=True)):
        return make(form, params, **options)


@EACH_FORM
def test_a_run_in_files_has_the_same_bits_and_goes_on(form: str, tmp_path: Path) -> None:
    """With an optimizer made anew between two steps, and what lies beside weights too."""
    for rounding in ("nearest", "master", "stochastic"):
        if rounding != "nearest" and "rounding" not in arguments_of(form):
            continue
        options = {} if rounding == "nearest" else {"rounding": rounding}
        dtype = F32 if rounding == "nearest" else BF16
        both = [parameters(dtype=dtype, form=form) for _ in range(2)]
        plain = make(form, both[0], **options)
        folder = tmp_path / rounding
        for step in range(4):
            given = gradients(both[0], step)
            if step % 2 == 0:
                mapped = None
                mapped = in_files(folder, form, both[1], **options)
                assert mapped.global_step.tolist() == [step]
            plain(given)
            mapped(given)
        assert_same_run(mapped, plain)
        expected = plain.state_dict()
        del mapped
        # Each file is one of safetensors.
        for file in folder.glob("*.safetensors"):
            for name, array in nn.load_checkpoint(file).items():
                if name in expected and name != "step":
                    assert_same_bits(array.reshape(expected[name].shape), expected[name])


def test_what_is_asked_for() -> None:
    asked = {}

    def note(name: str, shape: tuple[int, ...], dtype: Any, initial: Any) -> Any:
        asked[name] = shape, str(dtype), initial
        return np.full(shape, initial, dtype)

    with fusestep.states_in(note):
        nn.Adagrad([nn.Parameter(np.ones((4, 3), F32), "w")], accum=0.5)
    assert asked == {
        "global_step": ((1,), "int32", 0), "step": ((1,), "int64", 0),
        "accum.w": ((4, 3), "float32", 0.5),
    }  # fmt: skip
    asked.clear()
    nn.Adagrad([np.ones(3, F32)])
    assert not asked  # the context is over


def test_states_that_do_not_begin_at_0(tmp_path: Path) -> None:
    files = fusestep.MappedFiles(tmp_path)
    with fusestep.states_in(files), pytest.raises(ValueError, match=r"state 'accum.*begin at 0"):
        nn.Adagrad([np.ones((4096, 3), F32)])
    with fusestep.states_in(files), pytest.raises(ValueError, match="a copy of the weight"):
        nn.SGD([np.ones((4096, 3), BF16)], rounding="master")
    assert not [*tmp_path.glob("accum*"), *tmp_path.glob("master*")]


@pytest.mark.parametrize("damage", ["cut", "longer", "other dtype", "other shape", "no file"])
def test_files_that_do_not_fit(damage: str, tmp_path: Path) -> None:
    opt = in_files(tmp_path, "LazyAdam", [nn.Parameter(np.ones((64, 32), F32), "w")])
    opt([np.ones((64, 32), F32)])
    del opt
    file = tmp_path / "moment1.w.safetensors"
    before = file.read_bytes()
    shape, dtype = (64, 32), F32
    if damage == "cut":
        file.write_bytes(before[:-1])
    elif damage == "longer":
        file.write_bytes(before + b"0")
    elif damage == "other dtype":
        dtype = np.float64
    elif damage == "other shape":
        shape = (32, 64)
    else:
        file.unlink()
        file.mkdir()
    now = None if damage == "no file" else file.read_bytes()
    with pytest.raises((ValueError, OSError), match=r"is torn or another|is another|is a folder"):
        in_files(tmp_path, "LazyAdam", [nn.Parameter(np.ones(shape, dtype), "w")])
    assert now is None or file.read_bytes() == now


@pytest.mark.parametrize(("found", "error", "text"), [
    (lambda _: [0.0], TypeError, "has a wrong type: expected an array of NumPy"),
    (lambda a: np.zeros((3, *a.shape), a.dtype), ValueError, "has a wrong shape"),
    (lambda a: a.astype(np.int8), ValueError, "has a wrong dtype"),
    (lambda a: np.broadcast_to(a[:1, :1], a.shape), ValueError, "in place"),
    (lambda a: np.zeros(a.shape[::-1], a.dtype).T, ValueError, "in place"),
])  # fmt: skip
def test_arrays_that_cannot_be_states(found: Any, error: Any, text: str) -> None:
    def wrong(name: str, shape: tuple[int, ...], dtype: Any, initial: Any) -> Any:  # noqa: ARG001
        made = np.zeros(shape, dtype)
        return found(made) if name.startswith("moment1") else made

    message = rf"Adam: state 'moment1\.w' .*{text}"
    with fusestep.states_in(wrong), pytest.raises(error, match=message):
        nn.Adam([nn.Parameter(np.ones((4, 3), F32), "w")])


@pytest.mark.parametrize("shared", ["states", "parameter"])
def test_memory_of_two(shared: str) -> None:
    w = np.ones(100, F32)
    one = w if shared == "parameter" else np.zeros(100, F32)

    def same(name: str, shape: tuple[int, ...], dtype: Any, initial: Any) -> Any:  # noqa: ARG001
        return one if name.startswith("moment") else np.zeros(shape, dtype)

    with fusestep.states_in(same), pytest.raises(ValueError, match="shares memory"):
        nn.Adam([w])


def test_what_is_no_maker(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="make has a wrong type"), fusestep.states_in("folder"):  # type: ignore[arg-type]
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        fusestep.MappedFiles(tmp_path / "file")


FULL_DISK = """
import os, resource, sys
import numpy as np
import fusestep
from fusestep import nn
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    with fusestep.states_in(fusestep.MappedFiles(sys.argv[1])):
        nn.LazyAdam([np.zeros((1 << 16, 16), np.float32)])
except OSError as error:
    print("refused", sorted(os.listdir(sys.argv[1])))
"""


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="cannot reserve room")
def test_room_that_is_not_there(tmp_path: Path) -> None:
    """It raises when the optimizer is made, and nothing half-made is taken for a state."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("refused"), done.stderr
    assert "moment1" not in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_the_pages_of_touched_rows_are_used(tmp_path: Path) -> None:
    """Of 256 MB of states, in files and in memory."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def untouched(name: str, shape: tuple[int, ...], dtype: Any, initial: Any) -> Any:  # noqa: ARG001
        return np.zeros(shape, dtype)

    shape = (1 << 19, 64)
    for maker in (fusestep.MappedFiles(tmp_path), untouched):
        table = np.zeros(shape, F32)
        before = resident()
        with fusestep.states_in(maker):
            opt = nn.LazyAdam([table])
        for step in range(3):
            opt([rows(shape, [3, 70_000, 400_000], step)])
        assert resident() - before < 32 << 20
        assert all(a.any() for n, a in states(opt).items() if n.startswith("moment1"))
        del opt, table


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="cannot reserve room")
def test_files_without_reserved_room(tmp_path: Path) -> None:
    shape = 1 << 16, 16
    for reserve in (False, True):
        folder = tmp_path / str(reserve)
        with fusestep.states_in(fusestep.MappedFiles(folder, reserve=reserve)):
            opt = nn.LazyAdam([nn.Parameter(np.zeros(shape, F32), "w")])
        opt([rows(shape, [3, 40_000], 0)])
        opt.moment1[0].base.flush()
        used = (folder / "moment1.w.safetensors").stat().st_blocks * 512
        assert used > 4 << 20 if reserve else 0 < used < 1 << 18


def is_read_at_random(array: np.ndarray) -> bool:
    maps = Path("/proc/self/smaps").read_text()
    for begin, end, flags in re.findall(r"(?ms)^(\w+)-(\w+) .*?^VmFlags:(.*?)$", maps):
        if int(begin, 16) <= array.ctypes.data < int(end, 16):
            return "rr" in flags.split()
    raise AssertionError


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("sparse_update", ["lazy", "catch_up", "dense_equivalent"])
def test_tables_of_which_the_system_reads_single_pages(sparse_update: str, tmp_path: Path) -> None:
    """Those in files, from their first gradient of rows on, where other rows are not stepped."""
    shape, is_sparse = (2048, 16), sparse_update != "dense_equivalent"
    every = np.memmap(tmp_path / "tables", F32, "w+", shape=(4, *shape))
    opt = nn.Adam([*every[:2]], sparse_update=sparse_update)
    opt([np.ones(shape, F32)] * 2)
    assert not is_read_at_random(every[0])
    opt([rows(shape, [3], 1), np.ones(shape, F32)])
    opt.flush()
    opt.parameters[1].data = every[2]
    opt([None, rows(shape, [3], 2)])
    pooled = nn.Adam([every[3]], sparse_update=sparse_update)
    nn.EmbeddingBags(list(pooled.parameters), pooled)
    assert [*map(is_read_at_random, every)] == [is_sparse, False, is_sparse, is_sparse]


def test_thor_keeps_more_than_states(tmp_path: Path) -> None:
    layer, maker = nn.ThorDense(np.ones((3, 2), F32)), fusestep.MappedFiles(tmp_path)
    with fusestep.states_in(maker), pytest.raises(ValueError, match="states_in cannot make"):
        nn.thor(layer, 0.1, 0.1, 0.9)
