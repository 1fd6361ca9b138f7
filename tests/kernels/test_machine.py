"""Machine code without Numba: made of portable IR, kept as bytes, called by ints."""

import ctypes
import threading
from pathlib import Path

import numpy as np
import pytest
from fusestep.kernels import cache
from fusestep.kernels.cpu import warmup
from fusestep.kernels.cpu.compiler import machine
from fusestep.kernels.cpu.compiler.compile import NativeFunction
from fusestep.kernels.cpu.compiler.intrinsics import load_acquire
from fusestep.kernels.cpu.compiler.machine import Code, Loaded, PythonEntry
from fusestep.kernels.cpu.compiler.records import int64s
from fusestep.kernels.cpu.gather import gather_part
from fusestep.kernels.cpu.rows import sort, sums
from fusestep.kernels.cpu.threads.layers import add_atomically
from fusestep.kernels.storage import F32, STORAGES
from subprocesses import output_of

# Steps through every loop that depends on no rule: what they leave, and what Numba compiled.
STEPS = """
    import hashlib, sys
    from pathlib import Path
    import numpy as np
    from fusestep import nn, ops, set_num_threads
    from fusestep.kernels.cpu.compiler import machine
    from fusestep.kernels.cpu.compiler.compile import NativeFunction

    machine.PORTABLE = Path(sys.argv[1])
    compiled, by_numba = [], NativeFunction._compile
    def recorded(self):
        compiled.append(self.identity)
        return by_numba(self)
    NativeFunction._compile = recorded

    rng, digest = np.random.default_rng(0), hashlib.sha256()
    def numbers(*shape):
        return rng.normal(size=shape).astype(np.float32)
    for n_threads in (1, 2):
        set_num_threads(n_threads)
        for width, n in ((1, 30), (7, 20_000), (64, 40_000)):
            table, dense = numbers(500, width), numbers(140_000)
            indices = (rng.zipf(1.3, n) % 500).astype(np.int64)
            rows = nn.RowTensor(indices, numbers(n, width), table.shape)
            for make in (nn.LazyAdam, nn.Adam):
                opt = make([table, dense])
                opt((rows, numbers(140_000)))
                opt((rows, numbers(140_000)))
                for array in opt.state_dict().values():
                    digest.update(array.tobytes())
            found = ops.SparseGatherV2()(table, indices, 0), ops.global_norm([rows])
            for array in (table, dense, *map(np.asarray, found)):
                digest.update(array.tobytes())
    print(digest.hexdigest(), *compiled, sep="\\n")
"""


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a build of the package makes; of the loops for float32 where there is none."""
    if machine.PORTABLE.exists():
        return machine.PORTABLE
    path = tmp_path_factory.mktemp("portable")
    output_of(
        """
        import sys
        from pathlib import Path
        from fusestep.kernels.cpu import warmup
        from fusestep.kernels.storage import F32, STORAGES
        STORAGES.clear()
        STORAGES[F32.dtype] = F32
        warmup.write_portable(Path(sys.argv[1]))
        """,
        path,
    )
    return path


@pytest.fixture(scope="module")
def compiled_anew(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The digest of `STEPS` without loops that a build has made, and what was compiled for it."""
    absent = tmp_path_factory.mktemp("portable") / "absent"
    return output_of(STEPS, absent, FUSESTEP_CACHE_DIR="").split("\n")


def test_portable_loops_do_what_numbas_do(portable: Path, compiled_anew: list[str]) -> None:
    """To the last bit; and they are used: Numba compiles what gains from vectors alone."""
    wanted, *by_numba = compiled_anew
    found, *compiled = output_of(STEPS, portable, FUSESTEP_CACHE_DIR="").split("\n")
    assert found == wanted
    assert len(by_numba) > 20
    compiled.remove(gather_part.identity)  # which gains from vectors, as the blocks do
    assert all(name.split(" ")[0] in ("block", "zero", "measure", "") for name in compiled)
    assert 3 <= len(compiled) < len(by_numba) / 2


BROKEN = """
    from fusestep.kernels.cpu.compiler import machine as broken
    def gone(**_):
        raise AttributeError("a new llvmlite has no such function")
    broken._target_machine = gone
    import warnings
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        from fusestep.kernels.cpu.compiler.compile import engine_works
        assert not engine_works()
    assert "machine code cannot be kept: AttributeError" in str(said[0].message), said
"""


def test_without_an_engine_functions_are_numbas_own(compiled_anew: list[str], tmp_path) -> None:
    """With the same results, and nothing is kept."""
    folder = tmp_path / "kernels"
    found, *compiled = output_of(
        BROKEN + STEPS, tmp_path / "absent", FUSESTEP_CACHE_DIR=str(folder)
    ).split("\n")
    assert found == compiled_anew[0]
    assert len(compiled) > 20
    assert not any(folder.glob("*"))


def test_a_package_that_was_built_has_its_loops() -> None:
    if not machine.PORTABLE.exists():
        pytest.skip("this package runs where it is edited")
    loops = list(warmup.loops(list(STORAGES.values())))
    missing = [f.identity for f in loops if machine.portable(f.identity) is None]
    # These two allocate, with Numba's functions.
    assert {name.split(".")[-1] for name in missing} <= {"make_factors", "store_states"}


def test_loops_of_other_sources_are_not_used(portable: Path, monkeypatch) -> None:
    identity = sort.group_serial.identity
    monkeypatch.setattr(machine, "PORTABLE", portable)
    assert machine.portable(identity)
    assert machine.portable(f"{identity}, edited") is None
    with monkeypatch.context() as patch:
        patch.setattr(machine, "IMPORTED_SOURCES", "edited")
        assert machine.portable(identity) is None
    with monkeypatch.context() as patch:
        patch.setattr(machine.llvm, "llvm_version_info", (99, 0, 0))
        assert machine.portable(identity) is None
    monkeypatch.setattr(machine.platform, "machine", lambda: "another")
    assert machine.portable(identity) is None


def test_a_damaged_file_is_as_none(portable: Path, monkeypatch, tmp_path) -> None:
    identity = sort.group_serial.identity
    name = machine._name(identity)
    content = (portable / name).read_bytes()
    torn = content[:100] + bytes(50) + content[150:]
    monkeypatch.setattr(machine, "PORTABLE", tmp_path)
    for damaged in (b"", content[:-100], content[: len(content) // 2], torn):
        (tmp_path / name).write_bytes(damaged)
        assert machine.portable(identity) is None


def test_loops_that_have_exchanged_their_places_are_not_used(
    portable: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor is what is no loop at all: such functions are compiled."""
    members = {path.name: path.read_bytes() for path in portable.iterdir()}
    is_built = portable == machine.PORTABLE
    functions = list(warmup.loops(list(STORAGES.values()) if is_built else [F32]))
    monkeypatch.setattr(machine, "PORTABLE", portable)
    wanted = [f for f in functions if machine.portable(f.identity)]
    assert {machine._name(f.identity) for f in wanted} == {*members} and len(members) > 20
    names = [*members]
    exchanged = dict(zip(names, [*names[1:], names[0]], strict=True))
    monkeypatch.setattr(machine, "PORTABLE", tmp_path)
    for content_of in (lambda name: members[exchanged[name]], lambda name: members[name][:-8]):
        for name in names:
            (tmp_path / name).write_bytes(content_of(name))
        assert [machine.portable(f.identity) for f in wanted] == [None] * len(wanted)
    monkeypatch.setattr(machine, "finished", lambda _: pytest.fail("was used"))
    monkeypatch.setenv("FUSESTEP_CACHE_DIR", "")
    compiled = NativeFunction(
        add_atomically._function, add_atomically.identity, PythonEntry(True)
    ).call
    word = ctypes.c_int64(5)
    assert (compiled(ctypes.addressof(word), 2), word.value) == (5, 7)


def test_code_is_kept_whole() -> None:
    code = Code("name", ("malloc", "free"), b"\n\0machine\n code")
    assert Code.from_bytes(code.to_bytes()) == code


def test_a_call_of_nothing_that_exists_is_an_error() -> None:
    with pytest.raises(ImportError, match="compiled code calls no_such_function_of_mine"):
        Loaded(Code("name", ("no_such_function_of_mine",), b""))


def a_function(function: object, entry: PythonEntry) -> NativeFunction:
    return NativeFunction(function, f"a test: {function.__name__} {entry}", entry)  # type: ignore[attr-defined]


def test_an_entry_takes_and_returns_any_int64() -> None:
    def combine(a, b, c):  # type: ignore[no-untyped-def]
        return a * 3 - b * 5 + c

    call = a_function(combine, PythonEntry(returns=True)).call
    for a, b, c in ((1, 2, 3), (-(2**60), 2**59, -7), (2**61 - 1, -1, 0), (True, False, True)):
        assert call(a, b, c) == a * 3 - b * 5 + c
    with pytest.raises(SystemError) as caught:
        call("1", 2, 3)
    assert isinstance(caught.value.__cause__, TypeError)


def test_an_entry_without_a_result() -> None:
    def write(place, value):  # type: ignore[no-untyped-def]
        int64s(place, 1)[0] = value

    words = np.zeros(1, np.int64)
    assert a_function(write, PythonEntry()).call(words.ctypes.data, 7) == 0
    assert words.tolist() == [7]


def test_other_threads_run_meanwhile_unless_the_gil_is_held() -> None:
    def wait(place, looks):  # type: ignore[no-untyped-def]
        for _ in range(looks):
            if load_acquire(place) != 0:
                return 1
        return 0

    word = ctypes.c_int64(0)
    place = ctypes.addressof(word)

    def tell() -> None:
        word.value = 1

    def told(entry: PythonEntry, looks: int) -> bool:
        word.value = 0
        call = a_function(wait, entry).call
        thread = threading.Timer(0.01, tell)
        thread.start()
        found = call(place, looks)
        thread.join()
        return bool(found)

    assert told(PythonEntry(returns=True), 1 << 40)
    assert not told(PythonEntry(returns=True, holds_gil=True), 1 << 26)


def test_what_is_kept_is_what_was_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSESTEP_CACHE_DIR", str(tmp_path / "kernels"))
    function = sums.accumulate(F32, F32, sums.OWN)
    fresh = NativeFunction(function._function, function.identity)
    assert fresh.address
    kept = cache.load(function.identity)
    assert kept is not None and Code.from_bytes(kept) == fresh._code()
