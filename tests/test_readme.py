"""README and parity: their Python blocks run; the set-up commands are the two that CI runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fusestep.bench import machine
from fusestep.bench.report import markdown

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = {
    f"{name}-{k}": block
    for name in ("README.md", "docs/parity.md")
    for k, block in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    )
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_python_blocks_run(block, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        cwd=tmp_path,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_there_are_blocks_for_operators_classes_and_both_origins():
    assert list(BLOCKS) == [f"README.md-{k}" for k in range(3)] + [
        f"docs/parity.md-{k}" for k in range(3)
    ]


def test_set_up_is_two_commands():
    set_up = README.partition("## Set up")[2].partition("\n## ")[0]
    commands = re.findall(r"```sh\n(.*?)```", set_up, re.DOTALL)
    assert [c.strip() for c in commands] == [
        'pip install ".[demo]" && fusestep demo',
        'pip install ".[test]" && pytest',
    ]


@pytest.mark.skipif(
    machine.checkout_at_hand() is None, reason="the documents are in a checkout only"
)
def test_results_are_those_of_the_committed_files():
    """No figure is typed by hand: python -m fusestep.bench.report.markdown writes these tables."""
    documents = markdown.documents()
    assert ROOT / "README.md" in documents
    for path, expected in documents.items():
        assert path.read_text(encoding="utf-8") == expected, path.name
        assert "<!-- bench: " in expected, path.name


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/parity.md", "CHANGELOG.md"])
def test_documents_stand_alone(name):
    """No path of a machine, nothing outside of the repository."""
    text = (ROOT / name).read_text()
    assert not re.search(r"/(work|tmp|root|home)/|\.\./shared", text)
