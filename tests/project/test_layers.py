"""Who imports whom: layers downwards only, no circles, nothing hidden inside a function."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import fusestep

ROOT = Path(fusestep.__file__).parent
# Each folder, and what its files may import beside it; a folder stands for those in it too.
MAY_IMPORT = {
    "kernels/rules": ("kernels",), "kernels/cpu": ("kernels",), "kernels/cuda": ("kernels",),
    "kernels": ("kernels/rules",), "ops/runtime": ("kernels",), "ops": ("kernels", "ops/runtime"),
    "nn/base": ("kernels", "ops"), "nn/schedules": ("kernels", "ops", "nn/base"),
    "nn/engine": ("kernels", "ops", "nn/base"), "nn/thor": ("kernels", "ops", "nn"),
    "nn/mxnet": ("kernels", "ops", "nn"), "nn/distributed": ("kernels", "ops", "nn"),
    "nn/torch/engine": ("kernels", "ops", "nn/base", "nn/engine", "nn/distributed"),
    "nn/torch": ("kernels", "ops", "nn"), "nn/mindspore": ("kernels", "ops", "nn"),
    "nn": ("kernels", "ops"),
}  # fmt: skip
# Rooms of kernels/cpu: each may import those before it. The drivers are behind all of them.
ROOMS = ("process", "compiler", "headers", "threads")
APART = {("kernels/cpu", "kernels/cuda"), ("kernels/cuda", "kernels/cpu")}
NEUTRAL = ("kernels", "kernels/rules")
FROM_OUTSIDE = ("nn",)  # it imports what a user does
OPTIONAL = ("kernels.cuda", "kernels/cuda")


class Import(NamedTuple):
    """An import of a module of the package by another one."""

    source: str
    target: str
    in_function: bool
    for_annotations: bool
    line: int


def modules(*layers: str) -> dict[str, Path]:
    """The modules of some layers by name, such as ``nn.engine.plan``."""
    found = {}
    for layer in layers:
        for path in (ROOT / layer).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules("kernels", "ops", "nn")


def imports_of(name: str, modules: dict[str, Path] = MODULES) -> Iterator[Import]:
    """Every import of these modules in one of them, those for annotations too."""
    path = modules[name]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node, in_function, for_annotations in _imports(tree, False, False):
        base = package[: len(package) - node.level + 1]
        target = ".".join(base + (node.module.split(".") if node.module else []))
        for alias in node.names:
            of_module = f"{target}.{alias.name}".removeprefix(".")
            found = of_module if of_module in modules else target
            if found in modules and found != name:
                yield Import(name, found, in_function, for_annotations, node.lineno)


def _imports(
    node: ast.AST, in_function: bool, for_annotations: bool
) -> Iterator[tuple[ast.ImportFrom, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and child.level:
            yield child, in_function, for_annotations
        else:
            is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _imports(
                child, in_function or isinstance(child, ast.FunctionDef),
                for_annotations or is_typing)  # fmt: skip


IMPORTS = [found for name in MODULES for found in imports_of(name)]


def folder_of(name: str) -> str:
    """The longest folder of `MAY_IMPORT` in which a module lies."""
    path = "/".join(name.split(".") if MODULES[name].name == "__init__.py" else
                    name.split(".")[:-1])  # fmt: skip
    return max((f for f in MAY_IMPORT if path == f or path.startswith(f + "/")), key=len)


def test_imports_point_downwards() -> None:
    wrong = []
    for found in IMPORTS:
        source, target = folder_of(found.source), folder_of(found.target)
        allowed = (source, *MAY_IMPORT[source])
        is_allowed = any(f"{target}/".startswith(f"{place}/") for place in allowed)
        fits = is_allowed and (source, target) not in APART
        if source in NEUTRAL and target not in NEUTRAL:
            fits = False
        is_face = MODULES[found.target].name == "__init__.py" and target != source
        if is_face and source not in FROM_OUTSIDE:
            fits = fits and found.target in ("kernels.rules",)  # a package's face is for users
        if not fits:
            wrong.append(found)
    assert wrong == []


def test_rooms_of_the_cpu_stand_on_those_before_them() -> None:
    places = {name: name.split(".")[2] for name in MODULES if name.startswith("kernels.cpu.")}
    order = {room: k for k, room in enumerate(ROOMS)}
    wrong = [
        found
        for found in IMPORTS
        if places.get(found.source) in order and found.target in places
        if order.get(places[found.target], len(ROOMS)) > order[places[found.source]]
    ]
    assert wrong == []
    assert set(ROOMS) <= set(places.values())


def test_there_is_no_circle() -> None:
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for found in IMPORTS:
        if not any(MODULES[name].name == "__init__.py" for name in (found.source, found.target)):
            graph[found.source].add(found.target)
    left = dict(graph)
    while left:
        leaves = [name for name, targets in left.items() if not targets & left.keys()]
        assert leaves, f"each of these imports another one of them: {sorted(left)}"
        for name in leaves:
            del left[name]


def needs_cuda() -> set[str]:
    """Modules that cannot be imported without numba-cuda."""
    found = {name for name in MODULES if name.startswith("kernels.cuda.")}
    while True:
        more = {
            i.source
            for i in IMPORTS
            if i.target in found and not (i.in_function or i.for_annotations)
        } - found
        if not more:
            return found
        found |= more


def test_imports_inside_of_functions_are_of_what_is_optional() -> None:
    """Nothing is imported inside a function to hide a circle: only what needs numba-cuda."""
    optional = needs_cuda() | {"nn.thor.torch", "nn.mindspore.binding"}
    # `fusestep info` also says what is wrong where nothing can be compiled.
    hidden = [
        found
        for found in IMPORTS
        if found.in_function and found.target not in optional
        if found.source != "kernels.cpu.info"
    ]
    assert hidden == []


def test_older_versions_in_the_benchmark_are_asked_for_public_names_only() -> None:
    """Today's benchmark runs on them, and what is inside of the package moves."""
    ours = "bench"
    every, seen, waiting = {**MODULES, **modules("bench")}, set(), {"bench.version_worker"}
    while waiting:
        seen |= waiting
        waiting = {i.target for name in waiting for i in imports_of(name, every)
                   if i.source.startswith(ours)} - seen  # fmt: skip
    inside = {name for name in seen if not name.startswith(ours)}
    assert "bench.cases.steps" in seen
    assert inside == {"ops", "nn", "nn.mxnet"}


@pytest.mark.parametrize("name", ["ops", "nn", "nn.mxnet", "nn.thor"])
def test_faces_export_what_they_say(name: str) -> None:
    module = __import__(f"fusestep.{name}", fromlist=["x"])
    if name == "nn.thor":  # `nn.thor` is the function
        import sys

        module = sys.modules["fusestep.nn.thor"]
    assert all(hasattr(module, public) for public in module.__all__)
