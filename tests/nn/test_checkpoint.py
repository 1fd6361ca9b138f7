"""Files of checkpoints: names, dtypes, permissions, links, and what a killed save leaves behind."""

import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from adam_family import parameters
from fusestep import nn
from helpers import assert_same_bits

POSIX = pytest.mark.skipif(os.name == "nt", reason="permissions, links and locks of POSIX")
NUMBER = "bool, an integer, float16, bfloat16, float32 or float64"


@pytest.fixture
def umask() -> Any:
    """A usual mask, whatever that of the test run is."""
    old = os.umask(0o022)
    yield
    os.umask(old)


def ones() -> dict[str, np.ndarray]:
    return {"a": np.ones(3, np.float32)}


def write(path: Path, **dtypes: str) -> None:
    """A file with an array of 8 elements of each of these dtypes of safetensors."""
    header, end = {}, 0
    for name, dtype in dtypes.items():
        bits = int("".join(c for c in dtype.split("_")[0] if c.isdigit()) or 8)
        begin, end = end, end + bits
        header[name] = {"dtype": dtype, "shape": [8], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


# Names and dtypes


@pytest.mark.parametrize("dtype", [
    *(np.longdouble, np.complex64, np.complex128, object, "S3", "U2", "V4", "M8[s]"),
    np.dtype([("x", np.float32)]),
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn, ml_dtypes.int4),
], ids=str)  # fmt: skip
def test_dtype_that_cannot_be_saved(dtype: Any, tmp_path: Any) -> None:
    text = f"^save_checkpoint: bad has a wrong dtype: expected {NUMBER}, got "
    with pytest.raises(TypeError, match=text):
        nn.save_checkpoint({**ones(), "bad": np.zeros(2, dtype)}, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


LOADED = {
    "BOOL": "?", "U8": "B", "I8": "b", "U16": "H", "I16": "h", "U32": "I", "I32": "i", "U64": "L",
    "I64": "l", "F16": "e", "F32": "f", "F64": "d", "C64": "F", "BF16": ml_dtypes.bfloat16,
}  # fmt: skip


@pytest.mark.parametrize("dtype", LOADED)
def test_dtype_that_is_loaded(dtype: str, tmp_path: Any) -> None:
    write(tmp_path / "x", a=dtype)
    assert_same_bits(nn.load_checkpoint(tmp_path / "x")["a"], np.zeros(8, np.dtype(LOADED[dtype])))


@pytest.mark.parametrize("dtype", ["F8_E5M2", "F8_E4M3", "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4"])
def test_dtype_that_numpy_does_not_have(dtype: str, tmp_path: Any) -> None:
    path = tmp_path / "x"
    write(path, a="F32", small=dtype)
    text = rf"^load_checkpoint: small has a wrong dtype: expected one of BOOL.*, got {dtype} in "
    with pytest.raises(TypeError, match=text) as caught:
        nn.load_checkpoint(path)
    assert str(caught.value).endswith(str(path))


# Permissions, links, names of files


@POSIX
@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o400, 0o444])
def test_permissions_are_kept(mode: int, tmp_path: Any) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"")
    path.chmod(mode)
    nn.save_checkpoint(ones(), path)
    assert path.stat().st_mode & 0o7777 == mode
    assert_same_bits(nn.load_checkpoint(path)["a"], ones()["a"])


@POSIX
@pytest.mark.usefixtures("umask")
def test_permissions_are_never_wider(tmp_path: Any, monkeypatch: Any) -> None:
    """Neither while the file is written nor when it takes its place."""
    path = tmp_path / "x"
    path.write_bytes(b"")
    path.chmod(0o640)
    seen = []
    for name in ("fsync", "fchown", "fchmod", "replace"):
        original = getattr(os, name)

        def look(*arguments: Any, _original: Any = original) -> Any:
            seen.extend(p.stat().st_mode & 0o777 for p in tmp_path.iterdir())
            return _original(*arguments)

        monkeypatch.setattr(os, name, look)
    nn.save_checkpoint(ones(), path)
    assert len(seen) > 4
    assert all(mode & ~0o640 == 0 for mode in seen)


@POSIX
@pytest.mark.usefixtures("umask")
def test_group_that_cannot_be_kept_has_no_permissions(tmp_path: Any, monkeypatch: Any) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"")
    path.chmod(0o664)
    real = os.stat

    def of_another_group(place: Any, **options: Any) -> Any:
        found = real(place, **options)
        if Path(place) != path:
            return found
        return os.stat_result((*found[:5], found.st_gid + 1, *found[6:10]))

    def refuse(*_: Any) -> None:
        raise PermissionError("not yours")

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", of_another_group)
        patched.setattr(os, "fchown", refuse)
        nn.save_checkpoint(ones(), path)
    assert path.stat().st_mode & 0o7777 == 0o604


@POSIX
@pytest.mark.parametrize("exists", [True, False])
def test_link_is_written_through(exists: bool, tmp_path: Any) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "x", tmp_path / "link"
    if exists:
        target.write_bytes(b"old")
    link.symlink_to(target)
    nn.save_checkpoint(ones(), link)
    assert link.is_symlink()
    assert not target.is_symlink()
    for path in (target, link):
        assert_same_bits(nn.load_checkpoint(path)["a"], ones()["a"])
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["far", "link", "x"]


def place_node(kind: str, path: Path) -> None:
    """Put something that is no regular file at a path."""
    if kind == "a folder":
        path.mkdir()
    elif kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(os.path.relpath(path))  # a name of a socket may have 107 characters
    else:
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        except OSError:
            pytest.skip("only root makes devices")


NODES = "a folder", "a named pipe", "a socket", "a device"


@POSIX
@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", NODES)
def test_what_is_no_regular_file_stays(kind: str, linked: bool, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    place_node(kind, tmp_path / "node")
    path, before = tmp_path / "node", os.lstat(tmp_path / "node")
    if linked:
        (path := tmp_path / "link").symlink_to("node")
    with pytest.raises(OSError, match=f"^save_checkpoint: path is {kind}: expected") as found:
        nn.save_checkpoint(ones(), path)
    assert str(found.value).endswith(f"got {os.fspath(path)!r}")
    with pytest.raises(OSError, match=f"^load_checkpoint: path is {kind}: expected"):
        nn.load_checkpoint(path)
    after = os.lstat(tmp_path / "node")
    assert (after.st_mode, after.st_ino, after.st_mtime) == (
        before.st_mode, before.st_ino, before.st_mtime)  # fmt: skip
    assert sorted(os.listdir()) == ["link"] * linked + ["node"]
    assert path.is_symlink() == linked


@POSIX
def test_pipe_that_has_no_name() -> None:
    """As /dev/stdout leads to one where a shell has made a pipe."""
    reading, writing = os.pipe()
    try:
        with pytest.raises(OSError, match=r"^save_checkpoint: path is a named pipe: "):
            nn.save_checkpoint(ones(), f"/dev/fd/{writing}")
    finally:
        os.close(reading)
        os.close(writing)


def test_name_as_long_as_they_may_be(tmp_path: Any) -> None:
    path = tmp_path / ("x" * 250)
    nn.save_checkpoint(ones(), path)
    nn.save_checkpoint(ones(), path)
    assert list(tmp_path.iterdir()) == [path]


# Saves that were killed, and saves at the same time

SAVE = """
    import os, signal, sys, time
    import numpy as np
    from pathlib import Path
    from fusestep import nn

    path, name, place = sys.argv[1:]
    original = getattr(os, place) if place else None

    def killed(*arguments):
        os.kill(os.getpid(), signal.SIGKILL)

    def waiting(*arguments):
        print("inside", flush=True)
        sys.stdin.readline()
        return original(*arguments)

    if place:
        setattr(os, place, {"killed": killed, "waiting": waiting}[name])
    for k in range(1 if place else 200):
        nn.save_checkpoint({name: np.full(1000, k, np.float32)}, path)
"""


def saving(path: Path, name: str, place: str = "") -> subprocess.Popen[str]:
    """A process that saves to `path`, and is killed or waits in a function of os."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(SAVE), str(path), name, place],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip


@POSIX
@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_what_a_killed_save_left_is_removed(place: str, tmp_path: Any) -> None:
    path, other = tmp_path / "x", tmp_path / "y"
    for target in (path, other):
        with saving(target, "killed", place) as child:
            assert child.wait(60) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    nn.save_checkpoint(ones(), path)
    left = [p for p in tmp_path.iterdir() if p != path]
    assert len(left) == 1, "only what belongs to this path is removed"
    nn.save_checkpoint(ones(), other)
    assert sorted(tmp_path.iterdir()) == [path, other]


@POSIX
@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_what_another_process_is_writing_stays(place: str, tmp_path: Any) -> None:
    path = tmp_path / "x"
    with saving(path, "waiting", place) as child:
        assert child.stdout.readline() == "inside\n"
        nn.save_checkpoint(ones(), path)
        assert list(nn.load_checkpoint(path)) == ["a"]
        assert len(list(tmp_path.iterdir())) == 2
        child.communicate("\n", 60)
    assert child.returncode == 0
    assert list(nn.load_checkpoint(path)) == ["waiting"]
    assert list(tmp_path.iterdir()) == [path]


@POSIX
def test_two_processes_save_to_one_path(tmp_path: Any) -> None:
    path = tmp_path / "x"
    with saving(path, "one") as one, saving(path, "two") as two:
        assert [one.wait(120), two.wait(120)] == [0, 0]
    ((name, array),) = nn.load_checkpoint(path).items()
    assert name in ("one", "two")
    assert_same_bits(array, np.full(1000, 199, np.float32))
    assert list(tmp_path.iterdir()) == [path]


@POSIX
def test_what_is_no_abandoned_file_stays(tmp_path: Any, monkeypatch: Any) -> None:
    """Links, folders and pipes with the name of a temporary file, files with another one. Nor is a
    file of another user removed."""
    path = tmp_path / "x"
    with saving(path, "killed", "fsync") as child:
        child.wait(60)
    (abandoned,) = tmp_path.iterdir()
    (tmp_path / f"{abandoned.name[:-16]}folder").mkdir()
    (tmp_path / f"{abandoned.name[:-16]}link").symlink_to(tmp_path / ".fusestep.other")
    os.mkfifo(tmp_path / f"{abandoned.name[:-16]}pipe")
    (tmp_path / ".fusestep.other").write_bytes(b"")
    before, own = set(tmp_path.iterdir()), os.geteuid()
    with monkeypatch.context() as patched:  # it is another user's
        patched.setattr(os, "geteuid", lambda: own + 1)
        nn.save_checkpoint(ones(), path)
    assert set(tmp_path.iterdir()) == before | {path}
    nn.save_checkpoint(ones(), path)
    assert set(tmp_path.iterdir()) == before - {abandoned} | {path}


@POSIX
def test_file_that_was_taken_for_abandoned_is_made_anew(tmp_path: Any, monkeypatch: Any) -> None:
    """Another save may come between the making of the file and its lock."""
    import fcntl

    path, original, taken = tmp_path / "x", fcntl.flock, []

    def after_another_save(*arguments: Any) -> None:
        if not taken:
            taken.extend(tmp_path.iterdir())
            taken[0].unlink()
        original(*arguments)

    monkeypatch.setattr(fcntl, "flock", after_another_save)
    nn.save_checkpoint(ones(), path)
    assert len(taken) == 1
    assert list(tmp_path.iterdir()) == [path]


# What can be saved


@pytest.mark.parametrize("dtype", [*"?bhilqBHILQefd", ml_dtypes.bfloat16, ">f4", ">i8"], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 2), (2, 3, 4)])
def test_checkpoint_keeps_every_bit(dtype: Any, shape: tuple[int, ...], tmp_path: Any) -> None:
    """In the order of bytes of this machine."""
    most, n_bytes = 2 if dtype == "?" else 256, np.dtype(dtype).itemsize
    bits = np.random.default_rng(6).integers(0, most, (*shape, n_bytes), np.uint8)
    array = bits.view(dtype).reshape(shape)
    path = tmp_path / "file.safetensors"
    nn.save_checkpoint(
        {"a.b": array, "strided": np.repeat(np.ones(3, np.float32), 2)[::2]}, str(path)
    )
    loaded = nn.load_checkpoint(path)
    assert_same_bits(loaded["a.b"], array.astype(array.dtype.newbyteorder("=")))
    assert_same_bits(loaded["strided"], np.ones(3, np.float32))


def test_checkpoint_of_parameters(tmp_path: Any) -> None:
    nn.save_checkpoint(iter(parameters("a", "b")), tmp_path / "x")
    loaded = nn.load_checkpoint(tmp_path / "x")
    for p in parameters("a", "b"):
        assert_same_bits(loaded[p.name], p.data)


@pytest.mark.parametrize(("given", "error", "text"), [
    (3, TypeError, "save_obj has a wrong type: expected an optimizer, a mapping or parameters"),
    (parameters("a")[0], TypeError, "save_obj has a wrong type"),
    ([np.ones(2, np.float32)], TypeError,
        "save_obj holds a wrong type: expected Parameters, got ndarray"),
    ([nn.Parameter(np.ones(2))], ValueError, "parameter name is missing or repeats"),
    (parameters("a", "a"), ValueError, "parameter name is missing or repeats: .*got a"),
    ({"a": "text"}, TypeError, "a is no array"),
    ({"__metadata__": np.ones(2)}, ValueError, "name is reserved: .*, got '__metadata__'$"),
    ([nn.Parameter(np.ones(2), "__metadata__")], ValueError,
        "name is reserved: expected another one, got '__metadata__'$"),
    ({1: np.ones(2), "1": np.zeros(2)}, TypeError, "name 1 is no str: expected a str, got int$"),
    ({None: np.ones(2)}, TypeError, "name None is no str: expected a str, got NoneType$"),
])  # fmt: skip
def test_what_cannot_be_saved(given: Any, error: Any, text: str, tmp_path: Any) -> None:
    with pytest.raises(error, match=f"^save_checkpoint: {text}"):
        nn.save_checkpoint(given, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_failing_write_leaves_the_old_file(broken: str, tmp_path: Any, monkeypatch: Any) -> None:
    path = tmp_path / "state"
    nn.save_checkpoint(ones(), path)
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="disk full"):
        nn.save_checkpoint({"a": 2 * np.ones(3, np.float32)}, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_missing_folder_and_broken_file(tmp_path: Any) -> None:
    with pytest.raises(FileNotFoundError):
        nn.save_checkpoint(ones(), tmp_path / "nowhere" / "x")
    with pytest.raises(FileNotFoundError):
        nn.load_checkpoint(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"no tensors")
    with pytest.raises(Exception, match=r"(?i)header|deserializ"):
        nn.load_checkpoint(tmp_path / "x")


def test_checkpoint_has_the_permissions_of_any_new_file(tmp_path: Any) -> None:
    """A temporary file is private; the checkpoint that it becomes is for those who share it."""
    (tmp_path / "plain").write_bytes(b"")
    nn.save_checkpoint(ones(), tmp_path / "state")
    modes = [(tmp_path / name).stat().st_mode for name in ("plain", "state")]
    assert modes[0] == modes[1]
