"""README and documentation: their Python runs, their commands exist, their figures are measured.

The Python blocks of a page are one program, as a reader sees them. A comment before a block says
otherwise: ``<!-- run: under the simulator -->`` (of CUDA), ``<!-- run: also under the simulator
-->``, ``<!-- run: with torch -->`` (or jax), or ``<!-- not run: ... -->``, which is counted below.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from fusestep import __main__ as main
from fusestep.bench import command, machine
from fusestep.bench.cases import options
from fusestep.bench.cases.steps import select
from fusestep.bench.report import markdown, table
from fusestep.bench.report.result import OURS
from fusestep.examples import word2vec

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
}
README = PAGES["README.md"]
PYTHON = re.compile(
    r"(?:<!-- (run|not run): ([^>\n]+) -->\n)?```(?:python|py)\n(.*?)```", re.DOTALL
)
SIMULATOR, ALSO = "under the simulator", "also under the simulator"
LIBRARIES = {"with torch": "torch", "with jax": "optax"}
NOT_RUN = {"needs a GPU": 3, "MindSpore": 3, "MXNet": 1, "needs transformers and lightning": 1,
           "needs a process group": 1}  # fmt: skip


class Block(NamedTuple):
    """A Python block: its code at the line where it stands, and how it is run."""

    code: str
    how: str


def blocks_of(page: str) -> list[Block]:
    """The blocks that are run."""
    return [
        Block("\n" * PAGES[page].count("\n", 0, found.start(3)) + found[3], found[2] or "")
        for found in PYTHON.finditer(PAGES[page])
        if found[1] != "not run"
    ]


RUNNING = {page: blocks for page in sorted(PAGES) if (blocks := blocks_of(page))}


def run(page: str, blocks: list[Block], folder: Path, before: str = "", **environment: str) -> None:
    """Run blocks as one program, in which errors have the lines of the page."""
    parts = [before, *(f"exec(compile({b.code!r}, {page!r}, 'exec'))" for b in blocks)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(parts)], cwd=folder,
        env={**os.environ, **environment}, capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [p for p in RUNNING if any(not b.how for b in RUNNING[p])])
def test_python_blocks_run(page: str, tmp_path: Path) -> None:
    run(page, [block for block in RUNNING[page] if block.how in ("", ALSO)], tmp_path)


@pytest.mark.parametrize(
    ("page", "how"),
    [(p, how) for p in RUNNING for how in LIBRARIES if any(b.how == how for b in RUNNING[p])],
)
def test_python_blocks_run_with_a_library(page: str, how: str, tmp_path: Path) -> None:
    pytest.importorskip(LIBRARIES[how], reason=f"{LIBRARIES[how]} is not installed")
    run(page, [block for block in RUNNING[page] if block.how in ("", how)], tmp_path)


@pytest.mark.skipif(
    find_spec("numba_cuda") is None, reason='needs numba-cuda: pip install ".[sass]"'
)
@pytest.mark.parametrize(
    "page", [p for p in RUNNING if any(SIMULATOR in b.how for b in RUNNING[p])]
)
def test_python_blocks_run_under_the_simulator(page: str, tmp_path: Path) -> None:
    blocks = [block for block in RUNNING[page] if SIMULATOR in block.how]
    found = find_spec("simulator")
    assert found is not None and found.origin is not None
    before = f"import sys; sys.path.insert(0, {str(Path(found.origin).parent)!r})\n"
    before += "import simulator"
    run(page, blocks, tmp_path, before, NUMBA_ENABLE_CUDASIM="1")


def test_what_is_not_run_is_counted() -> None:
    found = [match for text in PAGES.values() for match in PYTHON.finditer(text)]
    assert Counter(match[2] for match in found if match[1] == "not run") == NOT_RUN
    assert {match[2] for match in found if match[1] == "run"} == {SIMULATOR, ALSO, *LIBRARIES}


def test_the_readme_trains_in_ten_lines() -> None:
    first = RUNNING["README.md"][0].code.strip().splitlines()
    assert len([line for line in first if line and not line.startswith(("import", "from"))]) <= 10


def test_the_readme_is_short() -> None:
    assert len(re.sub(r"```.*?```", "", README, flags=re.DOTALL).split()) <= 900


def test_set_up_is_two_commands() -> None:
    set_up = README.partition("## Install")[2].partition("\n## ")[0]
    commands = re.findall(r"```sh\n(.*?)```", set_up, re.DOTALL)
    assert [c.strip() for c in commands] == [
        'pip install ".[demo]" && fusestep demo', 'pip install ".[test]" && pytest',
    ]  # fmt: skip


OPTIONS = {"bench": command.add_arguments, "demo": word2vec.add_arguments}


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "get_num_threads", lambda: 8)
    for block in re.findall(r"```sh\n(.*?)```", PAGES[page], re.DOTALL):
        for line in re.findall(r"(?:^|&& )fusestep (.*)$", block, re.MULTILINE):
            name, *given = shlex.split(line, comments=True)
            assert name in main._COMMANDS, line
            if name in OPTIONS:
                parser = argparse.ArgumentParser(exit_on_error=False)
                OPTIONS[name](parser)
                cases = vars(parser.parse_intermixed_args(given)).get("cases")
                assert not cases or select(cases), line


@pytest.mark.skipif(
    machine.checkout_at_hand() is None, reason="the documents are in a checkout only"
)
def test_results_are_those_of_the_committed_files() -> None:
    """No figure is typed by hand: python -m fusestep.bench.report.markdown writes these tables."""
    documents = markdown.documents()
    assert ROOT / "README.md" in documents
    for path, expected in documents.items():
        assert path.read_text(encoding="utf-8") == expected, path.name
    assert sum("<!-- bench: " in text for text in documents.values()) > 10


# Case, scenarios and results file of each picture, which is made by
# ``fusestep bench CASE --scenario SCENARIOS --from bench/results/FILE.json --plot PICTURE``.
PICTURES = {
    "lazy-adam": ("rows/nn.LazyAdam", "loop,busy,pause20", "xeon-2-cores-scenarios"),
    "lazy-adam-loop": ("rows/nn.LazyAdam", "loop", "xeon-2-cores-scenarios"),
    "click-log": ("bags/nn.LazyAdam", "loop", "epyc-2-cores-bags"),
    "small-tensors": ("many-small/nn.Adam", "loop", "xeon-2-cores-scenarios"),
    "dense-adam": ("dense/nn.Adam", "loop", "xeon-2-cores"),
}


def test_every_picture_is_checked() -> None:
    assert {path.stem for path in (ROOT / "docs").rglob("*.svg")} == set(PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_the_times_of_the_committed_file(name: str) -> None:
    case, scenarios, file = PICTURES[name]
    document = json.loads((ROOT / "bench" / "results" / f"{file}.json").read_text("utf-8"))
    points = {p["scenario"]: p for p in document["points"] if p["case"] == case}
    picture = (ROOT / "docs" / f"{name}.svg").read_text(encoding="utf-8")
    shown = scenarios.split(",")
    for point in map(points.get, shown):
        assert point is not None
        assert len(shown) == 1 or f"{table.IN_WORDS[point['scenario']]}<" in picture
        for label in (OURS, *(against["label"] for against in point["peers"].values())):
            assert f"{table.seconds(point['times'][label]['median'])}<" in picture, label


@pytest.mark.parametrize("page", PAGES)
def test_no_table_is_cut_off_on_a_screen(page: str) -> None:
    rows = [line for line in PAGES[page].splitlines() if line.startswith("|")]
    assert max((line.count(" | ") + 1 for line in rows), default=0) <= 8


def prose(text: str) -> str:
    """A page without code, comments and tables."""
    text = re.sub(r"```.*?```|<!--.*?-->|`[^`]*`", "", text, flags=re.DOTALL)
    return "\n".join(line for line in text.splitlines() if not line.startswith("|"))


WORDS = {
    "lazy": r"\blazy\b", "dense-equivalent": r"\bdense-equivalent\b",
    "bound": r"\bof (the|its) bound\b|\bbound of\b",
}  # fmt: skip


@pytest.mark.parametrize("page", [p for p in PAGES if p.startswith(("README", "docs/"))])
@pytest.mark.parametrize("word", WORDS)
def test_words_of_the_glossary_are_linked_where_they_are_used(page: str, word: str) -> None:
    if page != "docs/glossary.md" and re.search(WORDS[word], prose(PAGES[page])):
        assert f"glossary.md#{word})" in PAGES[page]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Headings that they name are checked by ``mkdocs build --strict``."""
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", prose(PAGES[page])):
        assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_documents_stand_alone(page: str) -> None:
    """No path of a machine, nothing outside of the repository."""
    assert not re.search(r"/(work|tmp|root|home)/|\.\./shared", PAGES[page])
