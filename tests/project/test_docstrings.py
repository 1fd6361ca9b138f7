"""Docstrings: their examples run and print what they say, and none begins in mid-thought."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
import fusestep
from fusestep import nn, ops
from fusestep.kernels.keeping import KEEPINGS
from fusestep.nn.fused import SPARSE_UPDATES
from fusestep.ops.docstrings import completed, entries
from fusestep.ops.primitive import Primitive

LAYERS = ("fusestep.nn", "fusestep.ops")
EXTRAS = ("mindspore", "mpi4py", "torch")
ROOT = Path(fusestep.__file__).resolve().parent
# Words that point at another docstring, or leave open what is described.
OPENINGS = re.compile(
    r"(These|Those|That|It|Its|Of|What|Who|Whoever|Nothing|Their|They|This one"
    r"|Likewise|Others?|Another|Something|The same|As)\b"
)
REFERENCE = re.compile(r"(See|As) `[^`]*`\.?")
FOLDERS = ("kernels", "ops", "nn", "examples", "bench", "docs")
NO_NOUNS = {"Before", "Given", "Together", "Values", "Part", "Choice", "Entry"}


def modules_with_examples() -> Iterator[str]:
    for layer in LAYERS:
        found = pkgutil.walk_packages(importlib.import_module(layer).__path__, f"{layer}.")
        for name in (layer, *(module.name for module in found)):
            spec = find_spec(name)
            text = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
            if re.search(r"^ *>>> |\(Fused, torch\.optim\.", text, re.M):  # which have one anyway
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


def methods(cls: ast.ClassDef) -> list[ast.FunctionDef]:
    return [f for f in cls.body if isinstance(f, ast.FunctionDef)]


def test_public_methods_are_described():
    """A method has a docstring, or a base class or a protocol that its class follows has one."""
    places = [*ROOT.glob("*.py"), *(path for f in FOLDERS for path in (ROOT / f).rglob("*.py"))]
    found = [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node)
        for path in sorted(places)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]
    described, bases = defaultdict(set), {}
    protocols = []
    for _, cls in found:
        texts = {f.name for f in methods(cls) if ast.get_docstring(f)}
        described[cls.name] |= texts  # classes of the same name are taken for one
        own = {ast.unparse(base).split(".")[-1] for base in cls.bases} - {cls.name}
        bases[cls.name] = bases.get(cls.name, set()) | own
        if "Protocol" in own:
            calls = {f.name for f in methods(cls) if not f.decorator_list}
            protocols.append((calls, texts))

    def inherited(cls: ast.ClassDef) -> set[str]:
        names = {f.name for f in methods(cls)}
        texts = {name for calls, own in protocols if calls <= names for name in own}
        new, every = bases[cls.name], set()
        while new := new - every:
            every |= new
            new = {base for name in new for base in bases.get(name, ())}
        return texts.union(*(described[name] for name in every))

    missing = [
        f"{place}: {f.name}"
        for place, cls in found
        for f in methods(cls)
        if not (cls.name.startswith("_") or f.name.startswith("_") or ast.get_docstring(f))
        and f.name not in inherited(cls)
        and not any(ast.unparse(x).endswith(("overload", ".setter")) for x in f.decorator_list)
    ]
    assert missing == []


# The options that classes share


def test_what_a_class_describes_goes_before_what_classes_share():
    common = entries("    a: one.\n    b, c: two\n        lines.\n    d: three.\n")
    assert [*common] == ["a", "b", "c", "d"]
    doc = "Mine.\n\n    Args:\n        d: ... Four.\n        **x: own.\n"
    doc += "        c: own\n            two."
    expected = "        a: one.\n        c: own\n            two.\n        d: three.\n"
    expected = f"Mine.\n\n    Args:\n{expected}            Four.\n        **x: own."
    names = "self", "a", "c", "d", "e"
    for tail in ("", "\n    ", "\n\n    Raises:\n        ValueError: it is.\n    "):
        assert completed(doc + tail, names, common) == expected + tail
        assert completed(inspect.cleandoc(doc + tail), names, common) == inspect.cleandoc(
            expected + tail
        )
    raises = "Raises:\n    ValueError: it is.\n"
    assert (
        completed(f"Mine.\n\n{raises}", "a", common) == f"Mine.\n\nArgs:\n    a: one.\n\n{raises}"
    )
    args = "Mine.\n\nArgs:\n    "
    for other in (
        f"{args}a (int): it.", f"{args[:-2]}a: it\n    is.", f"{args}Words and\n    words.",
    ):  # fmt: skip
        assert completed(other, "abc", common) == other
    for other in ("Mine.", "Mine: no Args:\n", f"Mine.\n\n{raises}"):
        assert completed(other, "x", common) == other
    source = "Mine.\n\nSource: it.\n"
    made = completed(source, "a", common, "Raises")
    assert made == "Mine.\n\nRaises:\n    a: one.\n\nSource: it.\n"
    assert completed(made, "d", common) == made.replace("Raises", "Args:\n    d: three.\n\nRaises")
    assert completed(made, "d", common, "Raises") == made.replace(
        "Raises:", "Raises:\n    d: three."
    )


def option_texts(cls: type, title: str = "Args") -> dict[str, str]:
    """The entries of a section of a class, or of a function, by name."""
    return entries(inspect.getdoc(cls).partition(f"\n{title}:\n")[2].partition("\n\n")[0])


def check_options(cls: type, words: dict[str, tuple[str, ...]]) -> None:
    """Every parameter of a class is described, and with ``words`` in quotes where there are."""
    texts = option_texts(cls)
    kinds = inspect.signature(cls).parameters
    assert not [name for name in texts if texts[name].partition(": ")[2].startswith("...")]
    assert {n for n, p in kinds.items() if p.kind != p.VAR_KEYWORD} - texts.keys() == set()
    for name in words.keys() & kinds.keys():
        assert [word for word in words[name] if f'"{word}"' not in texts[name]] == [], name


@pytest.mark.parametrize("name", nn.__all__)
def test_every_option_is_described(name):
    cls = getattr(nn, name)
    if isinstance(cls, type) and issubclass(cls, nn.Optimizer):
        check_options(cls, {"sparse_update": SPARSE_UPDATES, "rounding": tuple(KEEPINGS)})


@pytest.mark.parametrize("name", [n for n in nn.__all__ if n.endswith(("_lr", "LR"))])
def test_every_argument_of_a_schedule_is_described(name):
    check_options(getattr(nn, name), {})
    assert option_texts(getattr(nn, name), "Raises").keys() == {"TypeError", "ValueError"}


@pytest.mark.parametrize("name", ops.__all__)
def test_every_argument_of_an_operator_is_described(name):
    cls = getattr(ops, name)
    if isinstance(cls, type) and issubclass(cls, Primitive):
        check_options(cls, {})
        called = inspect.signature(cls.__call__).parameters.keys() - {"self"}
        assert called == option_texts(cls, "Call arguments").keys()
        assert "\nReturns:\n" in inspect.getdoc(cls)
        assert {"TypeError", "ValueError"} <= option_texts(cls, "Raises").keys()


def test_every_option_is_described_in_pytorchs_form():
    torch = pytest.importorskip("torch")
    fused = importlib.import_module("fusestep.nn.torch")
    options = importlib.import_module("fusestep.nn.torch.engine.options")
    words = {"sparse": get_args(options.Sparse), "rounding": get_args(options.Rounding)}
    found = [getattr(fused, name) for name in fused.__all__]
    found = [cls for cls in found if isinstance(cls, type) and cls.__module__.startswith("fuse")]
    found = [cls for cls in found if issubclass(cls, torch.optim.Optimizer)]
    assert len(found) > 20
    for cls in found:
        check_options(cls, words)


def test_classes_of_users_are_completed_and_need_no_docstring():
    class Bare(nn.Momentum):
        pass

    class Told(nn.Momentum):
        """Mine.

        Args:
            learning_rate: mine.
        """

    assert Bare.__doc__ is None
    texts = option_texts(Told)
    assert texts["learning_rate"] == "    learning_rate: mine."
    assert texts["params"] == option_texts(nn.Momentum)["params"]
