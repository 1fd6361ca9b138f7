"""The exception classes of this package, and the form of error messages."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

# The names of other libraries for arguments of this one.
_SYNONYMS = {"lr": "learning_rate", "params": "parameters", "eps": "epsilon"}
_ALIASES = {**_SYNONYMS, **{name: other for other, name in _SYNONYMS.items()}}
_ALIASES |= {"betas": "beta1", "amsgrad": "use_amsgrad", "nesterov": "use_nesterov"}


class ConversionError(TypeError, RuntimeError):
    """A variable would have to be converted to another dtype, but is updated in place.

    It is both a `TypeError` and a `RuntimeError`: the original systems document either.
    """


class RejectedTypeError(TypeError, RuntimeError):
    """A wrong kind for which the original systems raise `RuntimeError`."""


class RejectedValueError(ValueError, RuntimeError):
    """A bad value or shape for which the original systems raise `RuntimeError`."""


class UnknownArgumentError(TypeError, KeyError):
    """An unknown keyword argument or group key.

    It is both a `TypeError` (as Python raises) and a `KeyError` (as MindSpore raises).
    """

    def __str__(self) -> str:
        # KeyError would print the repr of the message.
        return str(self.args[0])


def message(where: str, argument: str, wrong: str, expected: object, got: object) -> str:
    """``<where>: <argument> <what is wrong>: expected <x>, got <y>``."""
    return f"{where}: {argument} {wrong}: expected {expected}, got {got}"


def reject(
    kind: type[Exception], where: str, argument: str, wrong: str, expected: object, got: object,
    fix: str = "",
) -> NoReturn:  # fmt: skip
    """Raise ``kind`` with `message`, followed by ``fix``: what the caller can do."""
    raise kind(message(where, argument, wrong, expected, got) + fix)


def reject_unknown(
    where: str, unknown: Mapping[str, Any], allowed: Callable[..., Any] | Iterable[str]
) -> None:
    """Raise for the first name that is not known and suggest the nearest known one.

    ``allowed`` are names, or the class or function whose signature ends with ``**unknown``.
    """
    if not unknown:
        return
    names = list(inspect.signature(allowed).parameters)[:-1] if callable(allowed) else list(allowed)
    for name in (name for name in unknown if callable(allowed) or name not in names):
        near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
        near = [_ALIASES[name]] if _ALIASES.get(name) in names else near
        hint = f"; did you mean {near[0]!r}?" if near else ""
        one_of = "one of " + ", ".join(names)
        reject(UnknownArgumentError, where, f"argument {name!r}", "is unknown", one_of, name, hint)
