"""Docstrings as Markdown: formulas, sections, examples and references of this project's form.

``mkdocs.yml`` names this file as an extension of Griffe, which reads the docstrings.
"""

from __future__ import annotations

import ast
import html
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import fusestep
from fusestep import nn, ops
from fusestep.nn.base.docstrings import TORCH

_SECTIONS = {
    "Args": "Arguments",
    "Call arguments": "Arguments of a call",
    "Attributes": "Attributes",
    "Returns": "Returns",
    "Raises": "Raises",
}
_HEAD = re.compile(rf"({'|'.join(_SECTIONS)}):")
_ITEM = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): ")
_REFERENCE = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)")
_SIGNS = (
    (r"<-", "← "),
    (r"\bbeta1\b", "β₁"),
    (r"\bbeta2\b", "β₂"),
    (r"\b(epsilon|eps)\b", "ε"),
    (r"\blambda\b", "λ"),
    (r"\bpi\b", "π"),
    (r"\bsqrt\(", "√("),
    (r"\^-(\w+)", r"<sup>−\1</sup>"),  # noqa: RUF001  (a minus sign)
    (r"(?:\*\*|\^)(\w+)", r"<sup>\1</sup>"),
    (r"\*", "·"),
    (r"(?<=[\w)'|>] )-(?= )|(?<=[ (])-(?=\w)", "−"),  # noqa: RUF001
)


# Read and not imported: it imports an extra.
_TORCH = Path(fusestep.__file__).parent / "nn" / "torch" / "__init__.py"
_OF_TORCH = set(re.findall(r'"(\w+)"', _TORCH.read_text(encoding="utf-8").partition("if TYPE")[0]))


class Markdown(griffe.Extension):
    """Rewrites every docstring that Griffe has read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """One module, class, function or attribute has been read."""
        value = str(obj.value) if isinstance(obj, griffe.Attribute) else ""
        if value.startswith("StateOfEach("):
            *_, text = ast.literal_eval(value.removeprefix("StateOfEach"))
            obj.docstring = griffe.Docstring(text, parent=obj)
        if obj.docstring:
            text = obj.docstring.value
            if obj.path.startswith("fusestep.nn.torch."):  # is not imported
                if isinstance(obj, griffe.Class) and "Fused" in map(str, obj.bases):
                    text = TORCH.completed(text, obj.name, [p.name for p in obj.parameters])
            elif obj.parent is obj.module:
                made = getattr(sys.modules.get(obj.module.path), obj.name, None)
                text = (not obj.is_attribute and inspect.getdoc(made)) or text
            text = "\n".join(_lines(text.splitlines()))
            if ".nn.torch" in obj.path:  # some names are those of `nn` too
                text = re.sub(r"\]\[fusestep\.nn\.(\w+)\]", _to_torch, text)
            obj.docstring.value = text


def _lines(lines: list[str]) -> Iterator[str]:
    rest = lines
    while rest:
        line, rest = rest[0], rest[1:]
        if head := _HEAD.fullmatch(line):
            block, rest = _indented(rest)
            yield from ("", f"**{_SECTIONS[head[1]]}**", "", *_items(block), "")
        elif line.endswith("::"):
            block, rest = _indented(rest)
            yield from (_linked(line[:-1]), "", _formula(block), "")
        elif line.startswith(">>>"):
            end = next((k for k, other in enumerate(rest) if not other), len(rest))
            yield from ("", "```pycon", line, *rest[:end], "```", "")
            rest = rest[end:]
        else:
            yield _linked(line)


def _indented(lines: list[str]) -> tuple[list[str], list[str]]:
    """The lines up to the first that is not indented, without their indentation; and the rest."""
    end = next((k for k, line in enumerate(lines) if line and line[0] != " "), len(lines))
    return [line[4:] for line in lines[:end]], lines[end:]


def _items(lines: list[str]) -> Iterator[str]:
    """A list of what begins with names, a paragraph of what does not."""
    joined: list[str] = []
    for line in lines:
        if line.startswith(" "):
            joined[-1] += f" {line.strip()}"
        elif line:
            joined.append(line)
    for text in joined:
        if names := _ITEM.match(text):
            marked = ", ".join(f"`{name}`" for name in names[1].split(", "))
            yield f"- {_linked(marked)}: {_linked(text[names.end() :])}"
        else:
            yield from ("", _linked(text))


def _formula(lines: list[str]) -> str:
    """The block with the signs of mathematics; its columns stay columns."""
    text = html.escape("\n".join(lines).strip("\n"), quote=False).replace("&lt;-", "<-")
    for pattern, sign in _SIGNS:
        text = re.sub(pattern, sign, text)
    return f'<pre class="formula">{text}</pre>'


def _linked(text: str) -> str:
    """Names in single backticks as links to their pages, papers to arXiv, and arrows."""
    text = text.replace("<-", "←")
    text = re.sub(r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    return _REFERENCE.sub(_link, text)


def _link(found: re.Match[str]) -> str:
    name = found[1]
    for layer, module in (("nn", nn), ("ops", ops), ("nn.mxnet", nn.mxnet)):
        if name in module.__all__ and getattr(module, name) is not nn.mxnet:
            return f"[`{name}`][fusestep.{layer}.{name}]"
    return f"[`{name}`][fusestep.nn.torch.{name}]" if name in _OF_TORCH else found[0]


def _to_torch(found: re.Match[str]) -> str:
    return f"][fusestep.nn.torch.{found[1]}]" if found[1] in _OF_TORCH else found[0]
