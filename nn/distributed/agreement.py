"""Rounds in which processes agree: an error that one of them has found is raised by all.

Every exchange begins with one. So processes that call different things, or with different
tables, find that out before anything is exchanged or written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...ops.runtime.errors import message
from .communicator import Communicator

_RAISED = TypeError, ValueError, IndexError, KeyError, OSError, OverflowError, RuntimeError
_KINDS: dict[str, type[Exception]] = {kind.__name__: kind for kind in _RAISED}
_NOTHING = (0, 0)


def attempted(check: Callable[..., Any], *arguments: Any) -> tuple[Any, Exception | None]:
    """The result of a check, or None, and the error that it has raised, or None."""
    try:
        return check(*arguments), None
    except Exception as error:  # whatever it is, the others have to hear of it
        return None, error


def agree(
    comm: Communicator, where: str, subject: Mapping[str, Any], error: Exception | None = None,
    numbers: Any = _NOTHING,
) -> np.ndarray:  # fmt: skip
    """One round: the numbers that each process has sent this one, int64 ``[P, 2]``.

    Args:
        comm: the processes.
        where: what they call, as errors name it.
        subject: names and values (of JSON) that have to be the same for all of them.
        error: what this process has found wrong.
        numbers: int64 ``[P, 2]``, two numbers for each process.

    Raises:
        TypeError, ValueError, IndexError, KeyError, OSError, OverflowError, RuntimeError: a
            process has found such an error; RuntimeError also for others. They name its rank; all
            processes raise the same.
        ValueError: a subject, or what is called, differs from that of rank 0.
    """
    if comm.size == 1:
        if error is not None:
            raise error
        return np.broadcast_to(np.asarray(numbers, np.int64), (1, 2))
    # Where all agree, as in nearly every step, four numbers for each process are enough: an error,
    # a hash of the subject, and the numbers. Texts go round only to say what is wrong.
    text_of_call = json.dumps([where, dict(subject)])
    sent, received = np.empty((2, comm.size, 4), np.int64)
    digest = hashlib.sha256(text_of_call.encode()).digest()
    sent[:, 0], sent[:, 1] = error is not None, int.from_bytes(digest[:8], signed=True)
    sent[:, 2:] = numbers
    ones = [1] * comm.size
    comm.all_to_all(sent, ones, received, ones).wait()
    if received[:, 0].any() or (received[:, 1] != sent[0, 1]).any():
        failure = None
        if error is not None:
            kind, text = _kind_and_text(error)
            failure = [kind, f"{where}: rank {comm.rank}: {text.removeprefix(f'{where}: ')}"]
        raise _disagreement(gather_texts(comm, json.dumps([text_of_call, failure])))
    return received[:, 2:]


def jointly(comm: Communicator, where: str, check: Callable[..., Any], *arguments: Any) -> Any:
    """The result of what all processes attempt; an error that one has found is raised by all."""
    result, error = attempted(check, *arguments)
    agree(comm, where, {}, error)
    return result


def gather_texts(comm: Communicator, text: str) -> list[str]:
    """The texts of all processes."""
    if comm.size == 1:
        return [text]
    content = np.frombuffer(text.encode(), np.uint8)
    lengths = np.empty((comm.size, 1), np.int64)
    comm.all_gather(np.array([len(content)]), lengths).wait()
    longest = int(lengths.max())
    sent, received = np.zeros(longest, np.uint8), np.empty((comm.size, longest), np.uint8)
    sent[: len(content)] = content
    comm.all_gather(sent, received).wait()
    ends = lengths[:, 0].tolist()
    return [bytes(row[:end]).decode() for row, end in zip(received, ends, strict=True)]


def _kind_and_text(error: Exception) -> tuple[str, str]:
    is_text = len(error.args) == 1 and isinstance(error.args[0], str)
    text = error.args[0] if is_text else str(error)  # a KeyError would put it in quotes
    for name, kind in _KINDS.items():
        if isinstance(error, kind):
            return name, text
    return "RuntimeError", f"{type(error).__name__}: {text}"


def _disagreement(texts: list[str]) -> Exception:
    """The error of all processes, from what each has said."""
    said = [json.loads(text) for text in texts]
    errors = [error for _, error in said if error is not None]
    if errors:
        return _KINDS[errors[0][0]]("\n".join(text for _, text in errors))
    (called, first), *others = [json.loads(text) for text, _ in said]
    for rank, (other, subject) in enumerate(others, 1):
        if other != called:
            wrong, expected, got = "calls something else", f"{called} as rank 0", other
            return ValueError(message(called, f"rank {rank}", wrong, expected, got))
        for name, value in subject.items():
            if value != first[name]:
                place, expected, got = _difference(name, first[name], value)
                what, expected = f"rank {rank}: {place}", f"{expected} as on rank 0"
                return ValueError(message(called, what, "differs", expected, got))
    raise AssertionError("texts that agree")


def _difference(place: str, one: Any, other: Any) -> tuple[str, Any, Any]:
    """The first place at which two values differ, and what is there."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        k = next(k for k, value in enumerate(one) if other[k] != value)
        return _difference(f"{place}[{k}]", one[k], other[k])
    if isinstance(one, dict) and isinstance(other, dict):
        of_both = {n: (one.get(n, "none"), other.get(n, "none")) for n in {**one, **other}}
        name = next(name for name, (first, second) in of_both.items() if first != second)
        return _difference(f"{place}[{name!r}]", *of_both[name])
    return place, one, other
