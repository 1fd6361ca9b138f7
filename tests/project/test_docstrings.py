"""Docstrings: their examples run and print what they say, and none begins in mid-thought."""

import ast
import doctest
import importlib
import pkgutil
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import fusestep

LAYERS = ("fusestep.nn", "fusestep.ops")
EXTRAS = ("mindspore", "mpi4py", "torch")
ROOT = Path(fusestep.__file__).resolve().parent
# Words that point at another docstring, or leave open what is described.
OPENINGS = re.compile(
    r"(These|Those|That|It|Its|Of|What|Who|Whoever|Nothing|Their|They|This one"
    r"|Likewise|Others?|Another|Something|The same|As)\b"
)
REFERENCE = re.compile(r"(See|As) `[^`]*`\.?")
# Still to be mended.

NO_NOUNS = {"Before", "Given", "Together", "Values", "Part", "Choice", "Entry"}


def modules_with_examples() -> Iterator[str]:
    for layer in LAYERS:
        found = pkgutil.walk_packages(importlib.import_module(layer).__path__, f"{layer}.")
        for name in (layer, *(module.name for module in found)):
            spec = find_spec(name)
            if spec and spec.origin and ">>> " in Path(spec.origin).read_text(encoding="utf-8"):
                yield name


MODULES = sorted(modules_with_examples())


def test_both_layers_have_examples():
    for layer in LAYERS:
        assert sum(name.startswith(layer) for name in MODULES) > 10


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        pytest.skip(f"needs {error.name}")
    failed, attempted = doctest.testmod(module)
    assert attempted > 0
    assert failed == 0


def described(folder: str) -> Iterator[tuple[str, ast.AST, str]]:
    """The place of every module, class and function of a layer, with its node and docstring."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
                yield place, node, ast.get_docstring(node) or ""


@pytest.mark.parametrize("folder", ["kernels", "ops", "nn"])
def test_a_docstring_is_read_alone(folder):
    every = [*described(folder)]
    assert len(every) > 100
    assert [place for place, _, text in every if OPENINGS.match(text)] == []
    classes = [(place, c, text) for place, c, text in every if isinstance(c, ast.ClassDef)]
    assert [place for place, _, text in classes if REFERENCE.fullmatch(text)] == []
    assert [place for place, c, _ in classes if c.name in NO_NOUNS] == []
