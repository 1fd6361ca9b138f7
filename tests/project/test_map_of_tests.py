"""The map of the tests, tests/README.md: complete, without repetition, and nothing that is gone."""

import re
import runpy
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
NAMED = re.findall(r"^\| `([\w/*]+\.py)` \|", (TESTS / "README.md").read_text("utf-8"), re.M)


def test_every_file_is_in_the_map_once() -> None:
    found = Counter(path for name in NAMED for path in TESTS.glob(name))
    assert set(found) == set(TESTS.rglob("*.py"))
    assert [str(path) for path, n in found.items() if n > 1] == []


def test_every_name_in_the_map_is_a_file() -> None:
    assert [name for name in NAMED if not any(TESTS.glob(name))] == []


def test_tests_are_named_one_by_one() -> None:
    groups = [path for name in NAMED if "*" in name for path in TESTS.glob(name)]
    assert not [path for path in groups if path.name.startswith(("test_", "device_"))]


def test_mutants_fit_the_code_and_the_tests() -> None:
    """Code and tests are found by their texts, which nobody runs in each change."""
    program, root = runpy.run_path(str(TESTS / "project/mutants.py")), TESTS.parent
    assert program["files_of"]([test for *_, test in program["MUTANTS"]], root)
    for text, part, other, _ in program["MUTANTS"]:
        assert program["only_file"](text, root) and part in text and part != other
