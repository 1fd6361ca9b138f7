"""The command line of the benchmark: what it measures, what it writes, what it refuses."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_support import arguments, refused_line
from fusestep import __main__ as main
from fusestep.bench import command, machine, run
from fusestep.bench.cases import options
from fusestep.bench.cases import steps as cases
from fusestep.bench.errors import BenchError
from fusestep.bench.report import document, markdown
from fusestep.bench.report.result import OURS

ROOT = Path(__file__).resolve().parents[2]


def said(capsys: pytest.CaptureFixture[str], *given: str) -> tuple[int, str, str]:
    """Status, output and errors of a command."""
    status = main.main(["bench", *given])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# -- a real run -----------------------------------------------------------------------------------

NAMES = ("dense/nn.Adam", "rows/nn.LazyAdam", "ops.LARSUpdate")


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """The document, the output and the folder of a small run with one peer."""
    folder = tmp_path_factory.mktemp("run")
    given = (
        *("--size", "3K,100x8x50", "--peers", "numpy", "--threads", "1", "--seconds", "0.05"),
        *("--json", str(folder / "x.json"), "--plot", str(folder / "x.svg")),
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "fusestep", "bench", *NAMES, *given],
        cwd=folder,
        env={**os.environ, "PYTHONSAFEPATH": "1"},  # workers must find each other all the same
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    data = json.loads((folder / "x.json").read_text(encoding="utf-8"))
    return data, done.stdout, folder


def test_a_run_writes_a_document(small_run: tuple[dict[str, Any], str, Path]) -> None:
    data, _, folder = small_run
    document.check_schema(data)
    adam, lazy, lars = data["points"]
    assert [(p["case"], p["size"], p["indices"]) for p in data["points"]] == [
        ("dense/nn.Adam", "3K", None), ("rows/nn.LazyAdam", "100x8x50", "zipf1.2"),
        ("dense/ops.LARSUpdate", "3K", None),
    ]  # fmt: skip
    assert adam["bytes"] == 28 * 3 * 1024
    assert adam["sizes"] == {"parameters": 1, "elements": 3072}
    assert lazy["bytes"] == 6 * lazy["sizes"]["different rows"] * 8 * 4 + 50 * 8 * 4 + 50 * 8
    assert {(p["dtype"], p["threads"]) for p in data["points"]} == {("float32", 1)}
    assert data["seconds_per_point"] == 0.05
    assert (data["peers"], data["missing_peers"]) == ({"numpy": np.__version__}, {})
    assert {p.name for p in folder.iterdir()} == {"x.json", "x.svg"}
    assert lars["peers"] == {}


def test_what_it_writes_is_shown_and_drawn(small_run: tuple[dict[str, Any], str, Path]) -> None:
    data, out, folder = small_run
    for point in data["points"]:
        times = point["times"]
        ours = times[OURS]["median"]
        assert all(0 < t["p20"] <= t["median"] <= t["p80"] for t in times.values())
        assert times[OURS]["samples"] >= 7
        bounds = [t["median"] for label, t in times.items() if label.startswith("bound: ")]
        assert len(bounds) == 5
        assert point["bound"]["value"] == pytest.approx(min(bounds) / ours)
        lines = [x for x in out.splitlines() if x.strip().startswith(f"{point['case']} ")]
        first, *others = [x for x in lines if "fp32" not in x]  # what is in doubt
        assert f"{point['bound']['value']:.0%}" in first
        for peer, line in zip(point["peers"].values(), others, strict=True):
            assert peer["value"] == pytest.approx(times["numpy blocks"]["median"] / ours)
            assert f"{peer['value']:.2f}" in line
    assert "<svg" in (folder / "x.svg").read_text(encoding="utf-8")


# -- options --------------------------------------------------------------------------------------


def parsed(*given: str) -> options.Request:
    return options.request(arguments(*given))


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    """All cases or a selection; options stand among them."""
    status, out, err = said(capsys, "--list")
    assert (status, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == [case.name for case in cases.CASES]
    marked = [line.split()[0] for line in out.splitlines() if line.endswith("(when named)")]
    assert marked == [case.name for case in cases.CASES if not case.is_default]
    for given in (
        ("--list", "rows/nn.S*", "first-step"), ("rows/nn.SGD", "--list", "first-step"),
        ("rows/nn.SGD", "--threads", "1", "first-step", "--list"),
    ):  # fmt: skip
        assert said(capsys, *given)[:2] == (0, "rows/nn.SGD\nfirst-step\n")
    assert said(capsys, "--list", "zzz")[0] == 2


def test_threads_are_a_dimension() -> None:
    if options.get_num_threads() < 2:
        pytest.skip("one core")
    request = parsed("dense/nn.SGD", "--threads", "1,2,1", "--size", "1K")
    assert [point.threads for point in request.points] == [1, 2]


def test_what_is_left_out_has_a_default() -> None:
    request = parsed()
    assert {p.dtype for p in request.points} == {"float32"}
    assert {p.scenario for p in request.points} == {"loop"}
    assert {p.threads for p in request.points} == {options.get_num_threads()}
    sizes = {(p.case.name.partition("/")[0], p.size) for p in request.points}
    assert {("rows", "500000x64x65536"), ("dense", "4M")} <= sizes
    assert len([kind for kind, _ in sizes if kind in ("rows", "dense")]) == 2
    assert [special.name for special in request.special] == ["first-step"]
    assert request.seconds == 0.5
    assert list(request.pythons) == [p for p, kind in options.PEERS.items() if kind.is_default]


def test_fbgemm_in_the_process_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is missing a run that names it ends; one that does not is made without it."""
    monkeypatch.setattr(options, "find_python", lambda *_: None)
    assert [case.name for case in parsed("dlrm-programs").special] == ["dlrm-programs"]
    text = r"dlrm-programs: needs fbgemm in this environment: pip install fbgemm-gpu-cpu==1\.8\.0"
    with pytest.raises(BenchError, match=text):
        parsed("dlrm-programs", "--peers", "torch,fbgemm")


def test_options_act() -> None:
    request = parsed(
        *("rows/nn.SGD", "--size", "all", "--indices", "uniform,equal,uniform"),
        *("--dtype", "bfloat16, float16", "--quick", "--peers", "torch,numpy,torch"),
        *("--torch-python", sys.executable),
    )
    assert len(request.points) == 4 * 2 * 2
    assert {p.distribution for p in request.points} == {"uniform", "equal"}
    assert {p.dtype for p in request.points} == {"bfloat16", "float16"}
    assert request.seconds == 0.2
    assert request.pythons == {"torch": sys.executable, "numpy": sys.executable}
    assert len(parsed("rows/nn.SGD", "--indices", "all", "--dtype", "all").points) == 5 * 3
    scenarios = parsed("rows/nn.SGD", "--scenario", "busy, pause20,busy").points
    assert [point.scenario for point in scenarios] == ["busy", "pause20"]
    assert parsed("--peers", "none").pythons == {}


COUNTS = "--processes: expected a whole number from 1 to 64, got "
WRONG: dict[tuple[str, ...], str] = {
    **{("--processes", text): f"{COUNTS}{wrong!r}"
       for text, wrong in (*((one, one) for one in ("0", "a", "65", "1.5", "1e1", "\u00b2", "")),
                           ("1,,2", ""), ("1,2,", ""))},
    **{("--processes", "2", *given): f"--processes: takes no {given[0]}"
       for given in (("--scenario", "busy"), ("--against", "main"), ("--threads", "1"),
                     ("--plot", "x.png"), ("--peers", "none"), ("--from", "x.json"),
                     ("--torch-python", sys.executable), ("--device", "cuda"))},
    ("--processes", "-1"): "--processes",
    ("--processes", "2", "rows/nn.LazyAdam"): "--processes: takes no cases",
    ("rows/nn.LasyAdam",): "no case 'rows/nn.LasyAdam': did you mean 'rows/nn.LazyAdam'?",
    ("nn.Adam", "nn.Adagard"): "no case 'nn.Adagard': did you mean 'nn.Adagrad'?",
    ("zzz",): "no case 'zzz': 'fusestep bench --list' names them",
    ("--size", "1.5M"): "--size: expected a number such as 65536, 64K or 16M, got '1.5M'",
    ("--size", ""): "--size: expected a number such as 65536, 64K or 16M, got ''",
    ("--size", "4x4x4x4x4x4"): "--size: expected N x D x B such as 500000x64x65536, got '4x4x4x",
    ("--size", "4K..1K"): "--size: expected a range that ascends, got '4K..1K'",
    **{
        (case, "--size", size, "--dtype", dtype): f"--size {size}, --dtype {dtype}: fits none of"
        for case, size, dtype in (
            *(("rows/nn.SGD", "1K", "float32"), ("dense/nn.SGD", "9x2x5", "float32")),
            ("rows/ops.FusedSparseAdam", "9x2x5", "float16"))},
    ("--dtype", "int8"): "--dtype: expected names out of float32, bfloat16, float16, or all, got",
    **{
        ("--scenario", text): "--scenario: expected names out of loop, pause20"
        for text in ("pause30", "", "Loop")},
    ("--dtype", ""): "--dtype: expected names out of float32, bfloat16, float16, or all, got ''",
    **{
        ("--indices", text): "--indices: expected uniform, equal or zipf with an exponent above 1"
        for text in ("", "zipf", "zipf1", "zipf1.0", "zipf0.5", "Uniform", "zipf1,2")},
    ("--threads", "0"): "--threads: expected a whole number from 1 to",
    ("--threads", "1,"): "--threads: expected a whole number from 1 to",
    ("--threads", "many"): "got 'many'",
    ("--threads", "100000"): "got '100000'",
    ("--threads", "-1"): "--threads",
    ("--seconds", "0"): "--seconds: expected a number above 0, got '0'",
    ("--seconds", "nan"): "--seconds: expected a number above 0, got 'nan'",
    ("--seconds", "inf"): "--seconds: expected a number above 0, got 'inf'",
    ("--seconds", "soon"): "--seconds: expected a number above 0, got 'soon'",
    ("--quick", "--seconds", "2"): "argument --seconds: not allowed with argument --quick",
    ("--peers", "tensorflow"): "--peers: expected names out of numpy, torch, torch-compile, optax,",
    ("--peers", "torch,none"): "--peers: expected names out of",
    ("--torch-python", "/nowhere/python"): "--torch-python: '/nowhere/python' is no Python inter",
    ("--mindspore-python", "/"): "--mindspore-python: '/' is no Python interpreter",
    ("--optax-python", __file__): "is no Python interpreter",
    ("--json", "/nowhere/x.json"): "--json: cannot write '/nowhere/x.json': No such file or dir",
    ("--json", "/"): "--json is a folder: expected a regular file or a name that is free, got '/'",
    ("--json", ""): "--json is a folder: expected a regular file or a name that is free, got '.'",
    ("--plot", "x.gif"): "--plot: expected a file .png, .svg, .pdf, got 'x.gif'",
    ("--plot", "/nowhere/x.png"): "--plot: cannot write '/nowhere/x.png': No such file",
    ("--nonsense",): "unrecognized arguments: --nonsense",
    ("--threads",): "argument --threads: expected one argument",
    ("--from", "x.json", "--plot", "x.jpg"): "expected a file .png, .svg, .pdf",
}  # fmt: skip


@pytest.mark.parametrize(("given", "text"), WRONG.items(), ids=[" ".join(given) for given in WRONG])
def test_wrong_options_cost_one_line(
    given: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Before anything is measured."""
    monkeypatch.setattr(run, "run", lambda *_: pytest.fail("measured"))
    assert text in refused_line(capsys, *given)


@pytest.mark.skipif(os.name == "nt", reason="no named pipes of this kind")
@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_pipe_in_the_place_of_results(
    option: str, linked: bool, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(run, "run", lambda *_: pytest.fail("measured"))
    os.mkfifo(tmp_path / "x.svg")
    if linked:
        (tmp_path / "link.svg").symlink_to("x.svg")
    path = tmp_path / ("link.svg" if linked else "x.svg")
    expected = f"{option} is a named pipe: expected a regular file or a name that is free, got"
    assert f"{expected} '{path}'" in refused_line(capsys, option, str(path))


@pytest.mark.parametrize("missing", [("rich",), ("jsonschema", "psutil")])
@pytest.mark.parametrize("given", [(), ("--list",), ("nn.Adam", "--size", "1K"), ("--quick",)])
def test_without_its_libraries(
    missing: tuple[str, ...], given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """One line says what to install, whatever was asked for."""
    find: Callable[[str], Any] = command.find_spec
    monkeypatch.setattr(command, "find_spec", lambda n: None if n in missing else find(n))
    status, out, err = said(capsys, *given)
    assert (status, out) == (2, "")
    needed = ", ".join(missing)
    assert err == (f'fusestep bench: the benchmark needs {needed}: pip install "fusestep[bench]"\n')


def test_an_interrupted_run(monkeypatch, capsys) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run", interrupt)
    assert said(capsys, "nn.SGD") == (130, "", "fusestep bench: interrupted\n")


def test_check_is_a_command(monkeypatch, capsys) -> None:
    monkeypatch.setattr(machine, "checkout_at_hand", lambda: None)
    text = "--check: the documents are in a Git checkout only, and this is none"
    assert refused_line(capsys, "--check") == f"fusestep bench: {text}"
    monkeypatch.setattr(markdown, "documents", dict)
    found = said(capsys, "--check")
    assert found == (0, "all tables are those of the committed results\n", "")


def test_an_earlier_run_is_shown_and_drawn(
    small_run: tuple[dict[str, Any], str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    earlier = ("--from", str(small_run[2] / "x.json"))
    status, out, err = said(capsys, "rows/nn.LazyAdam", *earlier, "--plot", str(tmp_path / "x.svg"))
    assert (status, err) == (0, "")
    assert "rows/nn.LazyAdam" in out and "dense/nn.Adam" not in out
    assert "NumPy" in (tmp_path / "x.svg").read_text(encoding="utf-8")
    assert "dense/nn.Adam" in said(capsys, *earlier)[1]
    assert "dense/nn.Adam" in said(capsys, *earlier, "--scenario", "loop,busy")[1]
    for given, text in (
        (("--threads", "1"), "measures nothing, so it takes no --threads"),
        (("nn.SGD",), "holds no results of nn.SGD"),
        (("--scenario", "busy"), "holds no results of busy"),
    ):
        status, out, err = said(capsys, *given, *earlier)
        assert (status, out) == (2, "") and text in err


# -- pytest bench/ --------------------------------------------------------------------------------


def pytest_of_bench(*given: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "bench/", "-q", "-p", "no:cacheprovider", *given],
        cwd=ROOT,
        # It is no worker of the process that shares these tests out.
        env={name: value for name, value in os.environ.items() if "PYTEST_XDIST" not in name},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_same_cases_under_pytest() -> None:
    """Each case, as step and as bound."""
    collected = pytest_of_bench("--collect-only")
    for case in cases.STEPS:
        for what in ("step", "bound"):
            assert f"test_step[{what}-{case.name}]" in collected
    assert collected.count("test_step[") == 2 * len(cases.STEPS)


@pytest.mark.parametrize("given", [(), ("--benchmark-disable",)])
def test_pytest_measures_steps_and_bounds(given: tuple[str, ...]) -> None:
    """A small case, with times and without."""
    assert "2 passed" in pytest_of_bench("-k", "many-small/nn.Lamb", *given)
