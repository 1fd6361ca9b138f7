"""The cache of compiled kernels: hit when nothing changed, never stale, safe to share."""

import hashlib
import itertools
import os
import shutil
import stat
import textwrap
import types
import warnings

import numpy as np
import pytest
from fusestep.kernels import cache
from fusestep.kernels.cpu.compiler.compile import NativeFunction
from subprocesses import output_of, run_python

NO_FILE = "expected a regular file or a name that is free"
# A user's own rule in a module of its own, with a helper in another one.
RULE = """
    from fusestep.kernels.rule import Rule, rule_helper
    import helper
    def descent(w, g, hp):
        return w - helper.twice(hp.lr * g)
    DESCENT = Rule(descent, (), ("lr",))
"""
HELPER = """
    from fusestep.kernels.rule import rule_helper
    @rule_helper
    def twice(x):
        return x + x
"""
STEP = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import numpy as np
    from fusestep.kernels import cache
    from fusestep.kernels.cpu.blocks import blocks
    from fusestep.kernels.cpu.threads.parallel import commit
    from fusestep.kernels.element import kernel
    from fusestep.kernels.storage import F32
    from fusestep.ops.runtime.step import DenseUpdate, Variables
    from own_rule import DESCENT
    w, g = np.zeros(4, np.float32), np.ones(4, np.float32)
    address = np.array([g.ctypes.data])
    hp = np.ones((1, 1), np.float32)
    given = Variables.of([(w,)]), address, F32, hp, np.zeros(1, np.int64)
    kept = cache.load(blocks(kernel(DESCENT, (), F32, F32, ())).update.identity)
    commit([DenseUpdate(DESCENT, (), *given).prepared()])
    print(w[0], int(kept is not None))
"""


def write_rule(folder, text=RULE):
    (folder / "own_rule.py").write_text(textwrap.dedent(text))
    (folder / "helper.py").write_text(textwrap.dedent(HELPER))


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    """A cache with the package's loops, which take a second to compile, and with another rule."""
    folder = tmp_path_factory.mktemp("loops")
    write_rule(folder, RULE.replace("w - ", "w * "))
    output_of(STEP, folder, FUSESTEP_CACHE_DIR=str(folder / "cache"))
    return folder / "cache"


@pytest.fixture
def own_rule(tmp_path, loops):
    write_rule(tmp_path)
    shutil.copytree(loops, tmp_path / "cache")

    def step():
        value, hits = output_of(STEP, tmp_path, FUSESTEP_CACHE_DIR=str(tmp_path / "cache")).split()
        return float(value), int(hits)

    return tmp_path, step


def test_an_edited_rule_misses_and_the_old_text_hits_again(own_rule):
    """Also where the edit is one of a helper in another module, and where the rule has moved."""
    folder, step = own_rule
    assert [step(), step()] == [(-2.0, 0), (-2.0, 1)]
    for name, old, new, value in (
        ("own_rule.py", "w - ", "w + ", 2.0), ("helper.py", "x + x", "x + x + x", -3.0)
    ):  # fmt: skip
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace(old, new))
        assert step() == (value, 0)
        (folder / name).write_text(text)
    assert step() == (-2.0, 1)
    (folder / "own_rule.py").rename(folder / "moved_rule.py")
    moved = STEP.replace("own_rule", "moved_rule")
    environment = {"FUSESTEP_CACHE_DIR": str(folder / "cache")}
    assert output_of(moved, folder, **environment).split() == ["-2.0", "0"]
    assert all(p.suffix == ".kernel" for p in (folder / "cache").iterdir())


def test_damaged_and_foreign_entries_are_compiled_anew(own_rule):
    folder, step = own_rule
    step()
    for damage in (lambda content: content[:-10], lambda _: b""):
        for path in (folder / "cache").glob("*.kernel"):
            path.write_bytes(damage(path.read_bytes()))
        assert step() == (-2.0, 0)
    assert step() == (-2.0, 1)


def test_processes_can_share_a_cold_cache(own_rule):
    """Several processes fill one folder at once; all get the right code."""
    from concurrent.futures import ThreadPoolExecutor

    folder, step = own_rule
    shutil.rmtree(folder / "cache")
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: step(), range(3)))
    assert {value for value, _ in results} == {-2.0}
    assert step() == (-2.0, 1)


def test_unwritable_folder_is_reported_once_and_does_without(tmp_path):
    (tmp_path / "file").write_text("in the way")
    program = """
        import warnings
        import numpy as np
        from fusestep import nn
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            w = np.ones(3, np.float32)
            nn.Adam([w], 0.5)((np.ones(3, np.float32),))
        print(len(seen), w[0], seen[0].message)
    """
    count, value, text = output_of(program, FUSESTEP_CACHE_DIR=str(tmp_path / "file" / "x")).split(
        maxsplit=2
    )
    assert count == "1"
    assert float(value) == pytest.approx(0.5, rel=1e-6)
    assert "cannot keep compiled kernels" in text


def test_empty_variable_turns_the_cache_off(monkeypatch):
    monkeypatch.setenv("FUSESTEP_CACHE_DIR", "")
    assert cache.cache_directory() is None
    assert cache.cache_entries() == []


def test_folder_follows_numba(monkeypatch, tmp_path):
    monkeypatch.delenv("FUSESTEP_CACHE_DIR", raising=False)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert cache.cache_directory() == tmp_path / "fusestep"


def test_a_third_step_compiles_nothing(monkeypatch):
    from fusestep import nn

    w, table = np.ones(10, np.float32), np.ones((20, 3), np.float32)
    opt = nn.LazyAdam([w, table])
    rows = nn.RowTensor(np.array([1, 2]), np.ones((2, 3), np.float32), (20, 3))
    for _ in range(2):  # the second reads headers of arrays
        opt((np.ones(10, np.float32), rows))
    monkeypatch.setattr(
        NativeFunction, "_compile", lambda self: pytest.fail(f"compiles {self.identity}")
    )
    opt((np.ones(10, np.float32), rows))


def test_a_kernel_that_fails_to_compile_says_so(tmp_path):
    program = """
        import numpy as np
        from fusestep.kernels.cpu.blocks import blocks
        from fusestep.kernels.element import kernel
        from fusestep.kernels.rule import Rule
        from fusestep.kernels.storage import F32
        def wrong(w, g, hp):
            return w + hp.absent
        blocks(kernel(Rule(wrong, (), ("lr",)), (), F32, F32, ())).update.address
    """
    done = run_python(program, FUSESTEP_CACHE_DIR=str(tmp_path))
    assert done.returncode != 0
    assert "absent" in done.stderr


def added(k):
    return lambda x: x + k


def with_constant(k):
    module = types.ModuleType("constants")
    module.K = k
    return lambda x: x * module.K


DIFFERENT = {
    "closures": (added(1), added(2)), "constants": (lambda x: x + 1, lambda x: x + 2),
    "callees": (lambda x: np.sqrt(x), lambda x: np.exp(x)),
    "defaults": (lambda x, k=1: x + k, lambda x, k=2: x + k),
    "constants of modules": (with_constant(1), with_constant(2)),
    "arrays": (with_constant(np.ones(2)), with_constant(np.zeros(2))),
}  # fmt: skip


@pytest.mark.parametrize("of", DIFFERENT)
def test_fingerprint(of):
    one, other = map(cache.fingerprint, DIFFERENT[of])
    assert one != other
    assert cache.fingerprint(added(1)) == cache.fingerprint(added(1))


def test_sources_that_changed_since_the_import_are_not_saved(tmp_path):
    """Which of both texts was compiled is not known, so neither is kept."""
    program = """
        import numpy as np
        from fusestep.kernels import cache
        cache.sources_hash = lambda: "edited"
        from fusestep import nn
        nn.Adam([np.ones(3, np.float32)])((np.ones(3, np.float32),))
        print(len(cache.cache_entries()))
    """
    assert output_of(program, FUSESTEP_CACHE_DIR=str(tmp_path)).strip() == "0"


def test_a_user_without_a_home_goes_without_a_cache(monkeypatch):
    for name in ("FUSESTEP_CACHE_DIR", "NUMBA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cache.Path, "home", homeless)
    assert cache.cache_directory() is None


ONE_STORAGE = """
    import sys
    import numpy as np, ml_dtypes
    from fusestep.kernels.cpu.rows.sums import OWN, accumulate
    from fusestep.kernels.storage import F32, STORAGES
    for name in sys.argv[1:]:
        accumulate(STORAGES[np.dtype(name)], F32, OWN).address
"""
BOTH_STORAGES = """
    import ctypes
    import numpy as np, ml_dtypes
    from fusestep.kernels import cache
    from fusestep.kernels.cpu.rows.sums import OWN, accumulate
    from fusestep.kernels.storage import BF16, F32, STORAGES
    keys = np.zeros(100, np.int64)
    keys[:3] = 0, 1, 2
    for storage in (F32, BF16):
        compiled = accumulate(storage, F32, OWN)
        assert cache.load(compiled.identity)
        values = np.arange(3 * 70).reshape(3, 70).astype(storage.dtype)
        total = np.zeros(70, np.float32)
        source = np.array([values.ctypes.data, values.strides[0], 0, 0])
        call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 8)(compiled.address)
        call(total.ctypes.data, source.ctypes.data, keys.ctypes.data, 0, 3, 70, 3, 0)
        assert (total == values.astype(np.float32).sum(0)).all(), storage.name
    print("right")
"""


def test_entries_of_different_processes_can_be_loaded_together(tmp_path):
    """Numba numbers the functions of a process, and the numbers are in the names of symbols. Two
    processes that both begin at 1 give different functions one name, and of two entries that are
    loaded together the second then calls the functions of the first."""
    folder = {"FUSESTEP_CACHE_DIR": str(tmp_path)}
    for name in ("float32", "bfloat16"):
        output_of(ONE_STORAGE, name, **folder)
    assert output_of(BOTH_STORAGES, **folder) == "right\n"


# A kernel that is compiled in no time, its entry in the cache, and one that somebody planted.
IDENTITY = "a test of the cache"
NOBODY = 65_534
on_posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners and modes as on POSIX")
as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away"
)


def kernel():
    def nothing(n):
        pass

    return NativeFunction(nothing, IDENTITY)


def load():
    """What the cache has for the kernel; or None."""
    return cache.load(IDENTITY)


PLANTED = b"machine code of somebody else"


@pytest.fixture
def entry(tmp_path, monkeypatch):
    """The genuine entry, in a folder of mode 700."""
    monkeypatch.setenv("FUSESTEP_CACHE_DIR", str(tmp_path / "cache"))
    assert kernel().address
    assert load() is not None
    # The first kernel of a process comes with that of a trial.
    return cache._path(cache._key(IDENTITY))


@pytest.fixture
def planted(entry, tmp_path):
    """A file like the entry, but for what is loaded."""
    header = entry.read_bytes()[: len(cache._MAGIC) + 32]
    (tmp_path / "planted").write_bytes(header + hashlib.sha256(PLANTED).digest() + PLANTED)
    (tmp_path / "planted").chmod(0o600)
    return tmp_path / "planted"


def test_what_is_planted_would_run(entry, planted):
    """Where only this user can have put it, it does: the tests below can fail."""
    planted.rename(entry)
    assert load() == PLANTED


def make_link(entry, file):
    entry.unlink()
    entry.symlink_to(file)


REPLACEMENTS = {
    "writable": lambda entry, file: file.rename(entry).chmod(0o666),
    "writable for a group": lambda entry, file: file.rename(entry).chmod(0o620), "link": make_link,
}  # fmt: skip
FOREIGN = {
    "foreign": lambda entry, file: os.chown(file.rename(entry), NOBODY, NOBODY),
    "foreign link": lambda entry, file: (
        make_link(entry, file), os.chown(entry, NOBODY, NOBODY, follow_symlinks=False)),
}  # fmt: skip


@on_posix
@pytest.mark.parametrize("how", [*REPLACEMENTS, *(pytest.param(n, marks=as_root) for n in FOREIGN)])
def test_entries_that_others_may_have_written_are_replaced(entry, planted, how):
    {**REPLACEMENTS, **FOREIGN}[how](entry, planted)
    assert load() is None
    assert kernel().address
    assert load() not in (None, PLANTED)
    status = entry.lstat()
    assert stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.geteuid()


@on_posix
def test_a_pipe_in_the_cache_does_not_hold_up_the_start(entry):
    entry.unlink()
    os.mkfifo(entry, 0o600)
    program = f"""
        import warnings
        warnings.simplefilter("default")
        from fusestep.kernels import cache
        from fusestep.kernels.cpu.compiler.compile import NativeFunction
        def nothing(n):
            pass
        for _ in range(2):
            print(int(cache.load({IDENTITY!r}) is not None))
            NativeFunction(nothing, {IDENTITY!r}).address
    """
    done = run_python(program, timeout=60, FUSESTEP_CACHE_DIR=str(entry.parent))
    assert done.stdout.split() == ["0", "0"], done.stderr
    # It may be somebody's: it stays, and is reported.
    assert stat.S_ISFIFO(entry.stat().st_mode)
    assert done.stderr.count("RuntimeWarning") == 1
    assert f"an entry of the cache is a named pipe: {NO_FILE}" in done.stderr
    assert all(path.suffix == ".kernel" for path in entry.parent.iterdir())


@on_posix
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_a_folder_that_others_may_write_is_reported_once_and_not_used(entry, planted, mode):
    planted.rename(entry)
    content = entry.read_bytes()
    entry.parent.chmod(mode)
    with pytest.warns(RuntimeWarning, match=f"mode {mode:o} .* chmod go-w") as seen:
        assert load() is None
    assert len(seen) == 1
    assert load() is None and kernel().address  # a further warning would be an error
    assert f"mode {mode:o}" in cache.cache_problem()
    assert cache.cache_entries() == []
    cache.clear_cache()
    assert [p.read_bytes() for p in entry.parent.iterdir()] == [content]


@on_posix
def test_a_folder_that_others_may_read_is_used(entry):
    entry.parent.chmod(0o755)
    entry.chmod(0o644)
    assert load() is not None


@on_posix
def test_a_new_folder_is_its_users_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSESTEP_CACHE_DIR", str(tmp_path / "above" / "cache"))
    before = os.umask(0o002)
    try:
        assert load() is None
        assert kernel().address
    finally:
        os.umask(before)
    (entry,) = cache.cache_entries()
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (entry, entry.parent, tmp_path / "above")]
    assert modes == [0o600, 0o700, 0o775]
    assert load() is not None


@on_posix
def test_a_folder_behind_a_link_is_used(entry, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(entry.parent)
    monkeypatch.setenv("FUSESTEP_CACHE_DIR", str(tmp_path / "link"))
    assert load() is not None


@on_posix
def test_what_belongs_to_another_user_is_not_used(entry, monkeypatch):
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    text = f"belongs to user {user}, not to user {user + 1}"
    with pytest.warns(RuntimeWarning, match=text):
        assert load() is None
    assert cache.cache_entries() == []
    assert entry.exists()


@as_root
def test_a_folder_of_another_user_is_not_used(entry):
    os.chown(entry.parent, NOBODY, NOBODY)
    with pytest.warns(RuntimeWarning, match=f"belongs to user {NOBODY}, not to user 0"):
        assert load() is None


def exchange(a, b):
    a.rename(a.parent / "aside")
    b.rename(a)
    (a.parent / "aside").rename(b)


@on_posix
@pytest.mark.parametrize("kind", ["link", "writable", "folder"])
def test_exchanges_while_an_entry_is_loaded(entry, planted, tmp_path, monkeypatch, kind):
    """Before the load and after each call that looks at a path or opens it, another user may
    exchange what is there; all ways to do so are tried."""
    file, good, bad = planted, entry, tmp_path / "bad"
    if kind == "link":
        bad.symlink_to(file)
    elif kind == "writable":
        file.rename(bad)
        bad.chmod(0o666)
    else:
        good = entry.parent
        bad.mkdir()
        bad.chmod(0o777)
        file.rename(bad / entry.name)
        warnings.simplefilter("ignore", RuntimeWarning)
    wanted, found, n_calls = iter(()), [], 0

    def then_exchange(call):
        def instead(*args, **options):
            nonlocal n_calls
            try:
                return call(*args, **options)
            finally:
                n_calls += 1
                if next(wanted, False):
                    exchange(good, bad)

        return instead

    for before, *exchanges in itertools.product([False, True], repeat=6):
        wanted, n_calls = iter(exchanges), 0
        if before:
            exchange(good, bad)
        with monkeypatch.context() as patch:
            for name in ("stat", "lstat", "open", "fstat"):
                patch.setattr(os, name, then_exchange(getattr(os, name)))
            found.append(load())
        assert 0 < n_calls <= len(exchanges)
        assert found[-1] != PLANTED, (before, exchanges)
        if (before + sum(exchanges[:n_calls])) % 2:
            exchange(good, bad)
    assert any(found) and not all(found)


def test_clearing_leaves_what_links_point_to(entry, tmp_path):
    (tmp_path / "outside").mkdir()
    for name in ("kept.kernel", "linked.kernel"):
        (tmp_path / "outside" / name).write_bytes(b"")
    (entry.parent / "file.kernel").symlink_to(tmp_path / "outside" / "linked.kernel")
    (entry.parent / "folder.kernel").symlink_to(tmp_path / "outside")
    cache.clear_cache()
    assert not entry.exists()
    assert len(list((tmp_path / "outside").iterdir())) == 2


def test_an_interrupt_right_after_an_entry_was_renamed(tmp_path, monkeypatch):
    rename = cache._Folder.rename

    def interrupted(self, old, new):
        rename(self, old, new)
        raise KeyboardInterrupt

    monkeypatch.setattr(cache._Folder, "rename", interrupted)
    tmp_path.chmod(0o700)
    with cache._opened(tmp_path) as folder, pytest.raises(KeyboardInterrupt):
        cache._write(folder, "a.kernel", "key", b"payload")
    assert [path.name for path in tmp_path.iterdir()] == ["a.kernel"]
