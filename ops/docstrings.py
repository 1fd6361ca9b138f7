"""Docstrings that are completed with descriptions which many classes or functions share.

A docstring describes what is its own; the rest is put in when the class or function is made. What
operators share is here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from inspect import CO_VARARGS, CO_VARKEYWORDS
from textwrap import fill
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

# The sections in their order, as they begin.
_SECTIONS = (
    "Args:", "Call arguments:", "Attributes:", "Returns:", "Raises:", "Differs from ",
    "``torch.optim`` has none", "Source: ",
)  # fmt: skip
_BESIDE = "\n        "  # between the lines of an entry


def entries(text: str) -> dict[str, str]:
    """The entries of a section, by name; names before one colon share an entry."""
    blocks: list[str] = []
    for line in text.splitlines():
        if blocks and line[4:5] == " ":
            blocks[-1] += f"\n{line}"
        else:
            blocks.append(line)
    named = ((block.partition(":")[0].replace("\n", " "), block) for block in blocks)
    return {name.strip(): block for names, block in named for name in names.split(",")}


def completed(
    doc: str, names: Iterable[str], common: Mapping[str, str], title: str = "Args"
) -> str:
    """``doc`` with entries for all ``names`` that it or ``common`` describes, in their order.

    An entry of its own that begins with ``...`` goes on where the common one ends. A section that
    is missing is put before the next one, the last before ``Source``; a text that has none of
    them, or has entries of another form, stays as it is.
    """
    later = "|".join(_SECTIONS[_SECTIONS.index(f"{title}:") + 1 :])
    heading = re.search(rf"^( *){title}:\n", doc, re.M)
    place = heading or re.search(rf"^( *)(?:{later})", doc, re.M)
    if not place:
        return doc
    head, margin, tail = doc[: place.start()], place[1], f"\n\n{doc[place.start() :]}"
    section = ""
    if heading:
        section = doc[heading.end() :].partition("\n\n")[0].rstrip()
        tail = doc[heading.end() + len(section) :]
        section = f"\n{section}".replace(f"\n{margin}", "\n")[1:]
    described = entries(section)
    has_names = all(name.lstrip("*").isidentifier() for name in described)
    if not (has_names and all(line.startswith("    ") for line in section.splitlines())):
        return doc
    blocks: dict[str, None] = {}  # each once, in order
    for name in [*names, *described]:
        block, shared = described.get(name, ""), common.get(name, "")
        more = block.removeprefix(f"    {name}: ... ")
        blocks[shared + _BESIDE + more if more != block else block or shared] = None
    added = "".join(f"\n{block}" for block in blocks if block).replace("\n", f"\n{margin}")
    return f"{head}{margin}{title}:{added}{tail}" if added else doc


class Shared(NamedTuple):
    """Descriptions that docstrings of one kind share, each an entry of a section.

    ``errors`` are by the name of the argument that can lead to them; those by ``""`` can always be.
    """

    arguments: Mapping[str, str]
    errors: Mapping[str, str]
    of_call: Mapping[str, str] = MappingProxyType({})  # arguments of ``__call__``

    def completed(
        self, doc: str, _name: str, names: Iterable[str], of_call: Iterable[str] = ()
    ) -> str:
        """The docstring ``doc`` of a class or function with arguments of these names."""
        names = ["", *names]
        errors = entries("\n".join(self.errors[name] for name in names if name in self.errors))
        doc = completed(doc, errors, errors, "Raises")
        doc = completed(doc, of_call, self.of_call, "Call arguments")
        return completed(doc, names, self.arguments)

    def complete(self, described: T) -> T:
        """Complete the docstring of a class or function, if it has one.

        In those of users only arguments of the constructor are described.
        """
        if (doc := described.__doc__) is None:
            return described
        name, is_class = described.__name__, isinstance(described, type)  # type: ignore[attr-defined]
        names = parameters(getattr(described, "__init__") if is_class else described)  # noqa: B009
        if _is_ours(described):
            of_call = parameters(described.__call__) if self.of_call else ()  # type: ignore[operator]
            described.__doc__ = self.completed(doc, name, names, of_call)
        else:
            described.__doc__ = completed(doc, names, self.arguments)
        return described


def _is_ours(described: Any) -> bool:
    """Whether a class or function is one of this package, not a user's."""
    return bool(described.__module__.partition(".")[0] == __name__.partition(".")[0])


def parameters(function: Any) -> Iterable[str]:
    """The names of the parameters of a function, without stars."""
    if hasattr(function, "__signature__"):
        return [*function.__signature__.parameters]
    code = getattr(function, "__code__", None)  # faster than `inspect.signature`
    if code is None:
        return ()
    stars = bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + stars]  # type: ignore[no-any-return]


_VARIABLES = {
    "var", "m", "v", "vhat", "accum", "linear", "mean_gradient", "mean_square", "moment",
    "variable", "accumulation", "parameters",
}  # fmt: skip
_OPTIONS = entries("""\
    use_locking: concurrent calls act like some serial order of them.
    use_nesterov: Nesterov's step.
    out_of_range: ``"raise"`` an `IndexError` for indices outside of ``[0, N)``, or ``"drop"`` them.
""")
_OF_CALL = entries("""\
    beta1_power, beta2_power: ``beta1**t`` and ``beta2**t`` at update t = 1, 2, ...
    lr: a scalar.
    learning_rate: a scalar.
    momentum: a scalar.
    decay: a scalar.
    beta1, beta2: scalars.
    epsilon: a scalar. With 0, an element whose moments are 0 becomes NaN; what is 0 only in the
        type of the arithmetic (1e-46 in float32) raises.
    l1, l2: scalars >= 0: strengths of the regularisation.
    indices: int32 or int64 ``[B]``; duplicates are summed, B may be 0.
""")
_ERRORS = {
    "": """\
    TypeError: a kind or dtype does not fit (`fusestep.ConversionError` where a variable would
        have to be converted).
    ValueError: a shape, a value or the memory of a variable does not fit.""",
    "out_of_range": "    IndexError: an index is out of range.",
    "unknown": """\
    KeyError: an unknown keyword (also `TypeError`).
    Nothing has been written when an error is raised.""",
}


def complete_operator(operator: Any, *, only_float32: bool) -> None:
    """Complete the docstring of an operator with variables: what it takes, returns and raises."""
    called = parameters(operator.__call__)
    variables = [name for name in called if name in _VARIABLES]
    if operator.__doc__ is None or not (variables and _is_ours(operator)):
        return
    names, has_rows = ", ".join(variables), "indices" in called
    dtypes = "float32" if only_float32 else "float32, float64, float16 or bfloat16"
    shape = "``[N, ...]``, at least 1-d" if has_rows else "0-d and empty ones too"
    text = f"{names}: {dtypes}, {shape}, of one dtype and shape; updated in place."
    text += "" if only_float32 else " 16-bit variables are computed in float32."
    text = fill(text, 94, initial_indent="    ", subsequent_indent=_BESIDE[1:])
    gradient = f"of the shape of ``{variables[0]}`` and at most its precision."
    if has_rows:
        gradient = f"``[B, ...]``, of at most the precision of ``{variables[0]}``."
    of_call = dict.fromkeys(variables, text)
    of_call |= {name: f"    {name}: {gradient}" for name in ("grad", "gradient")}
    returned = {"": f"    ``({names})``, the updated arrays."}
    operator.__doc__ = completed(operator.__doc__, returned, returned, "Returns")
    Shared(_OPTIONS, _ERRORS, of_call | _OF_CALL).complete(operator)
