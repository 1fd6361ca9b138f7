"""The command line, the import of the package, and what a wrong command says."""

import argparse
import os
import subprocess
import sys

import numpy as np
import pytest
import fusestep
from fusestep import nn
from fusestep.kernels import cache
from fusestep.kernels.cpu import info, warmup
from fusestep.kernels.cpu.compiler.compile import NativeFunction
from fusestep.kernels.storage import STORAGES
from fusestep.ops.runtime.step import _free_steps
from subprocesses import output_of, run_python


def command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "fusestep", *arguments],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False)  # fmt: skip


@pytest.mark.parametrize("name", ["demo", "bench", "warmup", "info"])
def test_help(name):
    done = command(name, "--help")
    assert done.returncode == 0
    assert f"usage: fusestep {name}" in done.stdout


def test_info():
    done = command("info")
    assert done.returncode == 0, done.stderr
    assert fusestep.__version__ in done.stdout
    assert "threads:" in done.stdout
    assert "array headers:   read directly" in done.stdout


def test_info_of_fields_that_are_not_read():
    done = command("info", FUSESTEP_READ_HEADERS="0")
    assert done.stderr == ""
    assert "array headers:   read through Python (slower): FUSESTEP_READ_HEADERS=0" in done.stdout


def test_info_of_a_pytorch_that_was_not_tried(monkeypatch):
    monkeypatch.setattr(info, "version", lambda _: "2.99.1+cpu")
    assert info.facts()["PyTorch"] == "2.99.1+cpu: not tried with PyTorch 2.99"


def test_info_of_a_layer_that_cannot_be_loaded():
    done = command("info", NUMBA_THREADING_LAYER="nonsense", FUSESTEP_CACHE_DIR="")
    assert done.returncode == 0, done.stderr
    assert "layer requested 'nonsense' is unknown" in done.stdout
    assert "kernel cache:    off" in done.stdout


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no modes as on POSIX")
def test_info_and_warmup_say_that_a_folder_is_not_used(tmp_path, monkeypatch, capsys):
    tmp_path.chmod(0o777)
    done = command("info", FUSESTEP_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"kernel cache:    {tmp_path}: not used, its mode 777 lets others" in done.stdout

    monkeypatch.setenv("FUSESTEP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(warmup, "functions", lambda *_, **__: warmup.PARTS[:1])
    parser = argparse.ArgumentParser()
    warmup.add_arguments(parser)
    assert warmup.main(parser.parse_args(["--clear"])) == 0
    assert f"not kept in {tmp_path}: its mode 777 lets others" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_without_the_compiler_there_is_one_clear_error():
    text = "RuntimeError: fusestep: NUMBA_DISABLE_JIT switches off the compiler"
    for program in ("import fusestep.nn", "from fusestep import get_num_threads"):
        done = run_python(f"import fusestep; {program}", NUMBA_DISABLE_JIT="1")
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(text), done.stderr
    assert command("--version", NUMBA_DISABLE_JIT="1").returncode == 0
    done = command("info", NUMBA_DISABLE_JIT="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("kernels:         none: fusestep: NUMBA_DISABLE")


def test_warmup_fills_the_cache(tmp_path):
    """All that it looked for is in the cache, and steps look for nothing else. In the cache of
    these tests: all loops of the package take long to compile."""
    program = """
        from fusestep.kernels import cache
        load, names = cache.load, []
        def recorded(identity):
            names.append(identity)
            return load(identity)
        cache.load = recorded
        from fusestep.__main__ import main
        main(["warmup", "--rule", "adam", "--plain"])
        n = len(names)
        assert n > 10 and all(map(load, names))
        import numpy as np
        from fusestep import nn
        table = np.ones((900, 8), np.float32)
        for n_rows in (5, 20_000):
            rows = nn.RowTensor(np.arange(n_rows) % 900, np.ones((n_rows, 8), np.float32), (900, 8))
            nn.Adam([table])((rows,)), nn.LazyAdam([table])((rows,))
        nn.Adam([table])((np.ones_like(table),))
        assert len(names) == n, names[n:]
    """
    folder = cache.cache_directory() or tmp_path
    assert "kernels ready in" in output_of(program, FUSESTEP_CACHE_DIR=str(folder))


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"loss_scale": 2.0},
                                     {"weight_decay": 0.1, "loss_scale": 2.0}])  # fmt: skip
@pytest.mark.parametrize("make", ["LARS", "thor"])
def test_warmup_compiles_what_steps_with_factors_need(make, options, monkeypatch):
    """LARS around Momentum, and thor with clipped gradients, which needs norms of its own."""
    _free_steps.cache_clear()  # which tests before have made
    rules = warmup.all_rules()
    chosen = [rules["momentum"], *([rules["scaled"]] if make == "thor" else [])]
    f32 = STORAGES[np.dtype(np.float32)]
    every = bool(options)
    wanted = {f.identity for f in warmup.functions(chosen, [f32], every_prologue=every)}
    original, used = vars(NativeFunction)["address"], set()

    def address(self):
        used.add(self.identity)
        return original.__get__(self, NativeFunction)

    monkeypatch.setattr(NativeFunction, "address", property(address))
    w = nn.Parameter(np.ones((2, 3), np.float32), "w")
    if make == "LARS":
        opt = nn.LARS(nn.Momentum([w], 0.1, 0.9, **options))
    else:
        layer = nn.ThorDense(w)
        opt = nn.thor({"fc": layer}, 0.1, 0.1, 0.9, enable_clip_grad=True, **options)
        layer.capture(np.ones((4, 3), np.float32), np.ones((4, 2), np.float32))
    opt([np.ones((2, 3), np.float32)])
    assert any("trust" in identity for identity in used)
    assert used <= wanted


def test_clear(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSESTEP_CACHE_DIR", str(tmp_path))
    (tmp_path / "old.kernel").write_bytes(b"")
    cache.clear_cache()
    assert cache.cache_entries() == []


@pytest.mark.parametrize(("arguments", "text"), [
    ((), "required: COMMAND"), (("nonsense",), "invalid choice: 'nonsense'"),
    (("warmup", "--dtype", "int8"), "invalid choice: 'int8'"),
    (("info", "--nonsense"), "unrecognized arguments"),
])  # fmt: skip
def test_wrong_commands(arguments, text):
    done = command(*arguments)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_import_is_light():
    program = """
        import sys
        import numba  # takes SciPy along where it is installed
        before = set(sys.modules)
        import fusestep, fusestep.nn
        heavy = {"matplotlib", "tqdm", "rich", "torch", "numba.cuda", "scipy", "hypothesis"}
        print(sorted(heavy & (set(sys.modules) - before)))
    """
    assert output_of(program).strip() == "[]"


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        fusestep.nonsense  # noqa: B018


def test_public_names_exist():
    for name in fusestep.__all__:
        assert getattr(fusestep, name) is not None
    assert set(fusestep.__all__) <= set(dir(fusestep))


def test_help_needs_no_demo_libraries():
    program = """
        import sys
        sys.modules["matplotlib"] = sys.modules["tqdm"] = sys.modules["rich"] = None
        from fusestep.__main__ import main
        main(["--help"])
    """
    done = run_python(program)
    assert done.returncode == 0, done.stderr
