"""What becomes of results: the JSON document, the terminal, the picture, the documents' tables."""

import copy
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from bench_support import made_up, point, result, summary
from fusestep.bench import machine
from fusestep.bench.cases.workloads import DEFAULTS, PUBLISHED_DENSE
from fusestep.bench.errors import BenchError
from fusestep.bench.peer import PEERS
from fusestep.bench.report import document, markdown, plot, table, tables, terminal
from fusestep.bench.report.result import OURS, PointResult, SpecialResult

USUAL = {"bound_fast": 0.0095, "bound_slow": 0.0200, "torch_fused": 0.0125}
SPECIAL = SpecialResult(
    "first-step", "import and first step", {"import": summary(0.3), "nn.Adam cold": summary(3.0)},
    {"import": 0.6, "nn.Adam cold": 2.5})  # fmt: skip
PARTS = {"step": 0.004, "grouping alone": 0.001, "update alone": 0.003, "plain loop": 0.002}
FAR = SpecialResult(
    "far-rows", "parts", {f"9x2x4: {part}": summary(seconds) for part, seconds in PARTS.items()},
    {"9x2x4: update alone": 0.0023})  # fmt: skip


@pytest.fixture(scope="module")
def full() -> dict[str, Any]:
    """A document with one of everything."""
    lost = point("rows/nn.LazyAdam", DEFAULTS["rows"], threads=2)
    return made_up(
        result(point(size=PUBLISHED_DENSE, threads=2), **USUAL),
        result(lost, bound_fast=0.0080, torch_fused=0.0025), SPECIAL, FAR,
        versions={"torch": "2.0"}, missing={"mxnet": "not installed here"})  # fmt: skip


# -- the document ---------------------------------------------------------------------------------


def test_a_document_has_the_figures_of_its_results(full: dict[str, Any]) -> None:
    first, second = full["points"]
    assert first["case"] == "dense/nn.Adam"
    assert (first["size"], first["indices"], first["dtype"], first["threads"]) == (
        *(PUBLISHED_DENSE, None, "float32", 2),
    )
    assert second["indices"] == "zipf1.2"
    near = pytest.approx
    assert first["times"][OURS] == {
        "median": 0.010, "p20": near(0.009), "p80": near(0.011), "samples": 9,
    }  # fmt: skip
    assert first["bound"]["label"] == "bound: fast"
    assert first["bound"]["value"] == pytest.approx(0.95)
    assert first["peers"]["torch"]["value"] == pytest.approx(1.25)
    assert first["losses"] == []
    assert second["losses"] == ["80.0% of the bound", "0.25 x torch fused"]
    assert full["peers"] == {"torch": "2.0"}
    assert full["missing_peers"] == {"mxnet": "not installed here"}
    assert [s["name"] for s in full["special"]] == ["first-step", "far-rows"]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda d: d.update(schema=1), "expected results of schema 3, got 1"),
        (lambda d: d.pop("schema"), "expected results of schema 3, got None"),
        (lambda d: d.pop("seconds_per_point"), "$: 'seconds_per_point' is a required"),
        (lambda d: d.update(extra=1), "$: Additional properties"),
        (lambda d: d.update(points={}), "$.points: {} is not of type 'array'"),
        (lambda d: d["points"][0].pop("bytes"), "$.points[0]: 'bytes' is a required"),
        (lambda d: d["points"][1].update(threads=0), "$.points[1].threads: 0 is less"),
        (lambda d: d["points"][1].update(dtype="int8"), "$.points[1].dtype: 'int8' is not"),
        (lambda d: d["points"][0].update(losses=[1]), "$.points[0].losses[0]: 1 is not"),
        (
            lambda d: d["points"][0]["times"][OURS].update(median="1"),
            "$.points[0].times.fusestep.median: '1' is not of type 'number'"),
        (lambda d: d["points"][0]["times"][OURS].update(p20=0), "p20: 0 is less than or equal"),
        (lambda d: d["points"][0]["bound"].pop("low"), "$.points[0].bound: "),
        (lambda d: d["points"][0]["peers"].update(torch=2.0), "$.points[0].peers.torch: 2.0 is"),
        (lambda d: d["machine"].update(cores=True), "$.machine.cores: True is not of type"),
        (lambda d: d["special"][0].pop("limits"), "$.special[0]: 'limits' is a required")],
)  # fmt: skip
def test_a_document_of_another_form_is_refused(
    full: dict[str, Any], damage: Callable[[dict[str, Any]], object], text: str
) -> None:
    data = copy.deepcopy(full)
    document.check_schema(data)
    damage(data)
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the text is checked below
        document.check_schema(data)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_a_document_is_read_as_it_was_written(full: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    document.write(path, full)
    assert document.read(path, "--against") == json.loads(json.dumps(full))
    assert list(tmp_path.iterdir()) == [path]
    joined = document.joined(full, made_up(result(), versions={"numpy": "3.0"}))
    document.check_schema(joined)
    assert joined["points"][:2] == full["points"] and len(joined["points"]) == 3
    assert joined["peers"] == {"torch": "2.0", "numpy": "3.0"}


@pytest.mark.parametrize(("content", "text"), [
    (None, "--against: cannot read 'FILE': No such file or directory"),
    (b"{", "--against: 'FILE' holds no results: Expecting property name"),
    (b"\xff\xfe\xfa", "--against: 'FILE' holds no results: "),
    (b"[]", "--against: 'FILE' holds no results: expected results of schema 3, got None"),
])  # fmt: skip
def test_what_is_no_document(content: bytes | None, text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BenchError) as error:
        document.read(path, "--against")
    assert str(error.value).startswith(text.replace("FILE", str(path)))


# -- the terminal ---------------------------------------------------------------------------------


def shown(data: dict[str, Any], width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    terminal.show(data, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines_of(name: str, text: str) -> list[list[str]]:
    """The words of the lines that begin so."""
    return [line.split() for line in text.splitlines() if line.strip().startswith(name)]


def test_the_report_of_a_run(full: dict[str, Any]) -> None:
    text = shown(full)
    for figures in ("16M 10.00 ms 9.00 ms 11.00 ms 4 KB 45.0 95%", "16M 1.25"):  # peers are below
        assert ["dense/nn.Adam", *figures.split()] in lines_of("dense/nn.Adam", text)
    name = "rows/nn.LazyAdam 500000x64x65536 zipf1.2 fp32 x2"
    for expected in (
        *("peers: torch 2.0", "float32, 2 threads", "1 of 2 points lose:"),
        f"{name}: 80.0% of the bound; 0.25 x torch fused",
        "mxnet: n/a: not installed here",
        *("3.00 s", "2.50 s", "9x2x4: grouping alone"),  # the first step and its limit; parts
    ):
        assert expected in text
    assert "was the machine busy" not in text and "No losses." not in text


WIDE = result(bound_x=0.0120)
WIDE.times[OURS] = summary(0.010, spread=0.3)
NOTHING = PointResult(point(), 0, {}, False, 0, {}, unavailable={OURS: "needs 9 GB of 1 GB"})
SHOWN: dict[str, tuple[Callable[[], dict[str, Any]], list[str]]] = {
    "no losses": (lambda: made_up(result(**USUAL)), ["No losses."]),
    "not available": (
        lambda: made_up(result(**USUAL), result(point("dense/nn.SGD")), NOTHING),
        ["dense/nn.Adam 900 fp32 x1, fusestep: n/a: needs 9 GB of 1 GB"]),
    "from the cache": (lambda: made_up(result(from_memory=False, **USUAL)), ["(95%)"]),
    "doubts": (
        lambda: made_up(WIDE, load=3.25),
        [
            "the machine was busy before the run: load 3.2",
            "dense/nn.Adam 900 fp32 x1: p80 is 1.9 x p20: was the machine busy?",
            "dense/nn.Adam 900 fp32 x1: faster than its bound"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_said(name: str) -> None:
    make, expected = SHOWN[name]
    text = shown(make())
    for words in expected:
        assert words in text
    if name == "not available":
        (line,) = lines_of("dense/nn.SGD", text)  # peers have not been asked
        assert line.count("n/a") == 1


def test_scaling() -> None:
    """Of what was measured with one thread too."""
    one, two = (result(point(threads=n), **USUAL, **{OURS: 0.03 / n**0.5}) for n in (1, 2))
    data = made_up(one, two, result(point("dense/nn.SGD", threads=2)))
    figures = ["900", "2", "30.00 ms", "21.21 ms", "1.41", "**32%**", "**45%**"]
    assert tables.scaling(data["points"]).rows == [["`dense/nn.Adam`", *figures]]
    assert ["dense/nn.Adam", *" ".join(figures).replace("*", "").split()] in [
        line.split() for line in shown(data).splitlines()
    ]


def test_scenarios() -> None:
    """A row for each below its case; beside other work a step is compared with peers only."""
    points = [result(point(scenario=name), bound_x=0.001, torch_fused=0.009, **{OURS: seconds})
              for name, seconds in (("loop", 0.01), ("busy", 0.015))]  # fmt: skip
    assert [len(one.losses) for one in points] == [2, 1]
    text = shown(made_up(*points)).partition("dense/nn.Adam, 900 numbers:")[2]
    lines = [line.split() for line in text.splitlines() if line.strip()]
    assert [line for line in lines if line[0] in (OURS, "in", "beside")] == [
        [OURS, "bound", "torch"], ["in", "a", "loop", "10.00", "ms", "1.00", "ms", "9.00", "ms"],
        ["beside", "a", "busy", "process", "15.00", "ms", "1.00", "ms", "9.00", "ms"],
    ]  # fmt: skip


@pytest.mark.parametrize("width", [70, 80, 120, 200])
def test_no_letter_vanishes(width: int) -> None:
    """With every peer, and dtype and threads as columns, whatever the width."""
    peers = {f"{peer}_form": 0.02 for peer in PEERS}
    long = point("rows/ops.SparseApplyProximalAdagrad", DEFAULTS["rows"], threads=2)
    data = made_up(
        result(point(size=PUBLISHED_DENSE), **USUAL, **peers), result(long, bound_x=0.009, **peers),
        result(point(dtype="bfloat16", threads=2), **peers))  # fmt: skip
    text = shown(data, width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    folded = sorted(re.sub(r"\W|_", "", text.partition("No losses")[0]))
    assert folded == sorted(re.sub(r"\W|_", "", shown(data, 400).partition("No losses")[0]))
    heads = [word for line in lines_of("case", shown(data, 400)) for word in line]
    assert {"dtype", "threads", "time", "p20", "p80", "GB/s", "bound", *PEERS, "memory"} <= {*heads}


@pytest.mark.parametrize(("is_terminal", "width"), [(True, 77), (False, 200)])
def test_output_that_is_no_terminal_is_wide(is_terminal: bool, width: int, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "77")
    monkeypatch.setenv("FORCE_COLOR" if is_terminal else "NO_COLOR", "1")
    monkeypatch.delenv("NO_COLOR" if is_terminal else "FORCE_COLOR", raising=False)
    assert terminal.console().width == width


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.5, "2.50 s"), (0.25, "250 ms"), (0.0123, "12.30 ms"), (2e-4, "200 us"), (2e-5, "20.0 us")],
)
def test_times_have_three_digits_or_so(value: float, text: str) -> None:
    assert table.seconds(value) == text


# -- the picture ----------------------------------------------------------------------------------


DRAWN: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": made_up,
    "several cases": lambda: made_up(result(**USUAL), result(point("dense/nn.SGD"), **USUAL)),
    "no peers and no bound": lambda: made_up(result()),
    "not available": lambda: made_up(PointResult(point(), 0, {}, False, 0, {}), SPECIAL),
}


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures(name: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{suffix}"
    plot.draw(DRAWN[name](), path)
    begin = path.read_bytes()[:1000]
    assert begin.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in begin


def test_one_point_is_drawn_as_bars_with_its_times(tmp_path: Path) -> None:
    path = tmp_path / "x.svg"
    data = made_up(result(point(threads=2), torch_fused=0.0125, torch_loop=0.02, numpy_x=0.5))
    plot.draw(data, path)
    text = path.read_text(encoding="utf-8")
    times = {OURS: "10.00 ms", "PyTorch": "12.50 ms", "NumPy": "500 ms"}
    for words in (*times, *times.values()):
        assert f"{words}<" in text, words
    assert "nn.Adam: 900 numbers<" in text and "float32, 2 threads, in a loop<" in text
    assert "20.00 ms" not in text
    plot.draw(data, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == text


def test_scenarios_of_one_case_are_panels_of_bars(tmp_path: Path) -> None:
    path = tmp_path / "x.svg"
    loop = result(point(), torch_Fast=0.02, numpy_x=0.5)
    busy = result(point(scenario="busy"), torch_foreach=0.03, bound_x=0.001)
    plot.draw(made_up(loop, busy), path)
    text = path.read_text(encoding="utf-8")
    for words in (OURS, "PyTorch Fast", "NumPy", "in a loop", "beside a busy process"):
        assert f"{words}<" in text, words
    for time in ("20.00 ms", "500 ms", "30.00 ms", "n/a"):  # a peer's fastest form in each
        assert f"{time}<" in text, time


# -- the tables of the documents ------------------------------------------------------------------

DOCUMENT = """# Speed
<!-- bench: {} -->
old
<!-- end of bench -->
and so on
"""


@pytest.fixture
def checkout(tmp_path: Path, full: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one document and one results file."""
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    document.write(results / "x.json", full)
    (tmp_path / "README.md").write_text(DOCUMENT.format("usual x.json"), encoding="utf-8")
    monkeypatch.setattr(machine, "checkout_at_hand", lambda: tmp_path)
    return tmp_path


def region(name: str, checkout: Path) -> str:
    text = markdown.rewritten(DOCUMENT.format(name), checkout / "bench" / "results")
    before, _, rest = text.partition(f"<!-- bench: {name} -->\n")
    found, _, after = rest.partition("\n<!-- end of bench -->\n")
    assert (before, after) == ("# Speed\n", "and so on\n")
    return found


def save(checkout: Path, *results: PointResult | SpecialResult, **options: Any) -> None:
    document.write(checkout / "bench" / "results" / "y.json", made_up(*results, **options))


POOLED = replace(
    result(point("pooled/ops.EmbeddingBags", "4x20x8x10x5"), memory=2**20),
    sizes={"parameters": 4, "occurrences": 200},
)
DLRM = SpecialResult("dlrm-training", "iterations", {
    f"{scenario} {name}": summary(time)
    for scenario in ("loop", "busy")
    for name, time in (("torch", 0.1), ("nn.torch", 0.05), ("layers alone", 0.02))
}, {"loop nn.torch": 0.06, "busy nn.torch": 0.04})  # fmt: skip
PROGRAMS = SpecialResult("dlrm-programs", "programs", {
    f"one id, none new: {name}: {part}": summary(time)
    for name, time in (("torch", 0.1), ("layers alone", 0.02))
    for part, time in (("iteration", time), ("processor", 2 * time))
}, scores={"torch": [0.7, 0.8]})  # fmt: skip
PEERS_OF = ("numpy", "torch", "optax", "mindspore", "mxnet")
WITH_PEERS = result(point(size=PUBLISHED_DENSE), **{f"{peer}_x": 0.02 for peer in PEERS_OF})
HEAD = "| case | size | in a loop | beside a busy process |"
# By name of the table, the results, and lines of it.
TABLES: list[tuple[str, list[Any], list[str]]] = [
    ("far-rows", [FAR], ["| 9x2x4 | 4.00 ms | 1.00 ms | 3.00 ms | 2.00 ms | **1.50** |"]),
    ("dlrm-training", [DLRM],
     ["| in a loop | 100 ms | 50.00 ms | 2.00 | 20.00 ms |",
      "| beside a busy process | 100 ms | 50.00 ms | **2.00** | 20.00 ms |"]),
    ("dlrm-programs", [PROGRAMS],
     ["| one id, none new | torch | 100 ms | 200 ms | 80% |",
      "| one id, none new | layers alone | 20.00 ms | 40.00 ms | 0% |",
      "| torch | 0.7500 | 0.7000 to 0.8000 |"]),
    ("growth", [POOLED, replace(POOLED, memory={OURS: None})],
     ["| case | size | tables | ids | time | of an id | memory | bytes of an id |",
      "| `pooled/ops.EmbeddingBags` | 4x20x8x10x5 zipf1.2 | 4 | 200 | 10.00 ms | 50000.0 ns |"
      " 1.0 MB | 5243 |",
      "| `pooled/ops.EmbeddingBags` | 4x20x8x10x5 zipf1.2 | 4 | 200 | 10.00 ms | 50000.0 ns |"
      " n/a | n/a |"]),
    ("beside-torch", [result(torch_x=0.0125), result(point(scenario="busy"), torch_x=0.0025)],
     [HEAD, "| `dense/nn.Adam` | 900 | 10.00 ms (1.25) | 10.00 ms (**0.25**) |"]),
    ("scenarios", [result(point(), torch_fast=0.02, numpy_x=0.5),
                   result(point(scenario="busy"), torch_slow=0.03, bound_x=0.001)],
     ["`dense/nn.Adam`, 900 numbers:", "|  | fusestep | torch | numpy | bound |",
      "| in a loop | 10.00 ms | 20.00 ms | 500 ms | n/a |",
      "| beside a busy process | 10.00 ms | 30.00 ms | n/a | 1.00 ms |"]),
    ("scenarios", [result(point(scenario=name), bound_x=0.005) for name in ("loop", "busy")],
     [HEAD, "| `dense/nn.Adam` | 900 | 10.00 ms (50%) | 10.00 ms (50%) |"]),
    ("sizes", [result(point(size="900"), from_memory=False, bound_x=0.005, torch_x=0.005),
               result(point(size="4K"), bound_x=0.01, numpy_x=0.02)],
     ["| case | 900 | 4K |", "| `dense/nn.Adam` | 10.00 ms, (50%) | 10.00 ms, 100% |",
      "| x torch | 900 | 4K |", "| `dense/nn.Adam` | **0.50** | n/a |",
      "| x numpy | 900 | 4K |", "| `dense/nn.Adam` | n/a | 2.00 |"]),
    ("usual", [WITH_PEERS, result(point("dense/nn.SGD", size=PUBLISHED_DENSE))],
     ["| case | time | GB/s | of bound |", "| `dense/nn.SGD` | 10.00 ms | 45.0 | n/a |",
      "| case | x numpy | x torch | x optax | x mindspore | x mxnet |",
      "| `dense/nn.Adam` | 2.00 | 2.00 | 2.00 | 2.00 | 2.00 |"]),
    ("usual", [result(point(size=PUBLISHED_DENSE), torch_x=0.0125, bound_x=0.0095)],
     ["| case | time | GB/s | of bound | x torch |",  # few peers are beside ours
      "| `dense/nn.Adam` | 10.00 ms | 45.0 | 95% | 1.25 |"]),
    ("rows", [result(point("rows/nn.SGD"), bound_x=0.008, torch_x=0.0025)],
     ["| case | size | time | GB/s | of bound | x torch |",
      "| `rows/nn.SGD` | 100x8x50 zipf1.2 | 10.00 ms | 45.0 | **80%** | **0.25** |"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "results", "lines"), TABLES, ids=[one[0] for one in TABLES])
def test_tables(name: str, results: list[Any], lines: list[str], checkout: Path) -> None:
    peers = any(one.peers for one in results if isinstance(one, PointResult))
    save(checkout, *results, versions={"torch": "2.0"} if peers else {})
    found = region(f"{name} y.json", checkout).splitlines()
    shown = [line for line in found if line and "---" not in line]
    assert [line for line in shown if line in lines] == lines


@pytest.mark.parametrize(("size", "words"), [
    ("4x20x8x10x5", "4 tables of 20 rows, 8 wide, 10 bags of 5 ids"),
    ("1Kx8x10x5", "1,024 rows, 8 wide, 10 bags of 5 ids"),
    ("click-logx64x10x5", "the tables of a click log, 64 wide, 10 bags of 5 ids"),
])  # fmt: skip
def test_sizes_of_pooled_tables_in_words(size: str, words: str) -> None:
    assert table.size_in_words({"size": size, "indices": "zipf1.2"}) == words


@pytest.mark.parametrize(("name", "text"), [
    ("usuall x.json", "no table 'usuall': there are summary"),
    ("usual y.json", "--check: cannot read"),
])  # fmt: skip
def test_a_region_that_cannot_be_made(name: str, text: str, checkout: Path) -> None:
    with pytest.raises(BenchError, match=text):
        region(name, checkout)


def test_check_finds_a_figure_changed_by_hand(checkout: Path, capsys) -> None:
    path = checkout / "README.md"
    assert markdown.check() == 1
    assert "-old" in capsys.readouterr().out.splitlines()
    assert markdown.main() == 0
    assert markdown.check() == 0
    assert capsys.readouterr().out == "all tables are those of the committed results\n"
    text = path.read_text(encoding="utf-8")
    assert text.count("**0.25**") == 1
    path.write_text(text.replace("**0.25**", "0.95"), encoding="utf-8")
    assert markdown.check() == 1
    out = capsys.readouterr().out.splitlines()
    assert len([line for line in out if line.startswith("-|") and "| 0.95 |" in line]) == 1
    assert len([line for line in out if line.startswith("+|") and "**0.25**" in line]) == 1
    assert out[-1].startswith("README.md: write anew with ")
    assert path.read_text(encoding="utf-8").count("| 0.95 |") == 1  # check writes nothing
