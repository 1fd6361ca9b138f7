"""Pages that are made while the site is built: those of the API, and the documents of the root.

``mkdocs.yml`` names this file as a hook. Every name of ``fusestep.nn``, ``fusestep.ops``,
``fusestep.nn.mxnet``, ``fusestep.nn.torch``, ``fusestep.nn.mindspore`` and
``fusestep.nn.distributed`` gets a page of its own; their ``__all__`` is the only list of them. The
last three are read and not imported.
"""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
import fusestep
from fusestep import nn, ops

ROOT = Path(__file__).resolve().parents[2]
FROM_ROOT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "LICENSE",
}
LAYERS = {"nn": nn, "ops": ops, "mxnet": nn.mxnet}
READ = {
    "torch": "PyTorch",
    "mindspore": "MindSpore",
    "distributed": "Many processes",
}  # of nn; they import extras
# Griffe looks for a folder of the package's name, and an editable install has none: a link has it.
_SOURCES = tempfile.TemporaryDirectory()


class Entry(NamedTuple):
    """A public name with a page."""

    section: str
    name: str
    target: Any
    path: str

    @property
    def identifier(self) -> str:
        """Where it is defined: what mkdocstrings looks up."""
        if isinstance(self.target, griffe.Object):
            return self.target.path
        if isinstance(self.target, ModuleType):
            return self.target.__name__
        return f"{self.target.__module__}.{self.target.__qualname__}"

    @property
    def page(self) -> str:
        """The Markdown of its page; the anchor is the name by which users import it."""
        public = f"fusestep.{self.name}"
        return (
            f"---\ntitle: {self.name}\n---\n\n[](){{#{public}}}\n\n"
            f"::: {self.identifier}\n    options:\n      heading: {public}\n"
        )

    @property
    def summary(self) -> str:
        """The first sentence of its docstring."""
        target = self.target
        is_read = isinstance(target, griffe.Object)
        text = target.docstring.value if is_read else inspect.getdoc(target) or ""
        paragraph = text.partition("\n\n")[0]
        return re.split(r"(?<=[.:]) |::?$", " ".join(paragraph.split()))[0].rstrip(":.") + "."


def entries() -> Iterator[Entry]:
    """All public names, each object once."""
    seen = {id(module) for module in LAYERS.values()}
    for layer, module in LAYERS.items():
        for name in sorted(module.__all__, key=str.lower):
            target = getattr(module, name)
            if id(target) not in seen:
                seen.add(id(target))
                public = f"nn.mxnet.{name}" if layer == "mxnet" else f"{layer}.{name}"
                section = "MXNet" if layer == "mxnet" else _section(layer, name, target)
                yield Entry(section, public, target, f"api/{layer}/{name}.md")
    for module, section in READ.items():
        where = f"fusestep.nn.{module}"
        package = griffe.load(where, search_paths=[_SOURCES.name], resolve_aliases=True)
        for name in sorted(package.exports, key=str.lower):
            member = package.members[name]
            if member.is_alias and not member.target_path.startswith("fusestep."):
                continue  # PyTorch's own
            target = member.final_target
            yield Entry(section, f"nn.{module}.{name}", target, f"api/{module}/{name}.md")


def _section(layer: str, name: str, target: Any) -> str:
    is_class = isinstance(target, type)
    if is_class and issubclass(target, Exception):
        return "Errors"
    if layer == "ops":
        return "Operators"
    if is_class and issubclass(target, nn.Optimizer):
        return "Optimizers"
    if (is_class and issubclass(target, nn.LearningRateSchedule)) or name.endswith("_lr"):
        return "Schedules"
    if name.lower().startswith("thor"):
        return "Second order"
    return "Parameters, gradients, files"


def _by_section() -> dict[str, list[Entry]]:
    sections: dict[str, list[Entry]] = {}
    for entry in entries():
        sections.setdefault(entry.section, []).append(entry)
    return sections


def _overview() -> str:
    """The page of all names, a table for each section."""
    parts = ["# API\n\nEvery public name, by what it is for.\n"]
    for section, found in _by_section().items():
        rows = [f"| [`{e.name}`]({e.path.removeprefix('api/')}) | {e.summary} |" for e in found]
        parts.append(
            "\n".join([f"## {section}\n", "| name | what it is |", "| --- | --- |", *rows])
        )
    return "\n\n".join(parts) + "\n"


@event_priority(100)  # before mkdocstrings reads where the sources are
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the API to the navigation, and say where its sources are."""
    package = Path(_SOURCES.name, "fusestep")
    package.symlink_to(Path(fusestep.__file__).parent)
    python = config.plugins["mkdocstrings"].config.handlers["python"]
    python["paths"] = [str(package.parent)]
    sections = [
        {section: [{e.name: e.path} for e in found]} for section, found in _by_section().items()
    ]
    config.nav = [*(config.nav or []), {"API": ["api/index.md", *sections]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    made = {entry.path: entry.page for entry in entries()}
    made["api/index.md"] = _overview()
    for source, path in FROM_ROOT.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        for document, page in FROM_ROOT.items():
            text = text.replace(f"]({document})", f"]({page})")
        made[path] = text
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files
