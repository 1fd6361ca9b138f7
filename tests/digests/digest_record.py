"""What a case of `digests.py` leaves, as a hash; and calls with wrong arguments."""

import copy
import hashlib
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
from digest_inputs import unusual
from fusestep import nn, ops
from helpers import arrays_of

MODULES = {
    "nn": nn, "nn.mxnet": nn.mxnet, "nn.mxnet.lr_scheduler": nn.mxnet.lr_scheduler, "ops": ops,
}  # fmt: skip
# What a text may hold of the run and of the place of a file, which is not looked at.
_ADDRESS, _MODULE = re.compile(r"\b0x[0-9a-f]+"), re.compile(r"\bfusestep(?:\.\w+)*\.(?=\w)")


@cache
def public_names() -> dict[str, Any]:
    """All public names with what they stand for."""
    return {
        f"{place}.{name}": getattr(module, name)
        for place, module in MODULES.items()
        for name in module.__all__
    }


class Record:
    """What a case has left, added value by value."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=12)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def add(self, *values: Any) -> None:
        """Values by type and content: of an array all bytes, of an error its types and text."""
        for value in values:
            if isinstance(value, np.ndarray):
                self._add(f"array {value.dtype} {value.shape}", value.tobytes())
            elif isinstance(value, np.generic):
                self._add(f"scalar {value.dtype}", value.tobytes())
            elif value is None or isinstance(value, bool | int | float | bytes):
                self._add(type(value).__name__, repr(value).encode())
            elif isinstance(value, str):
                self._add("str", _MODULE.sub("fusestep.", _ADDRESS.sub("0x", value)).encode())
            elif isinstance(value, tuple | list):
                self._add(f"{type(value).__name__} of {len(value)}")
                self.add(*value)
            elif isinstance(value, Mapping):
                self.add(sorted(value.items(), key=lambda pair: str(pair[0])))
            elif isinstance(value, nn.RowTensor):
                self.add(value.indices, value.values, value.dense_shape)
            elif isinstance(value, nn.Parameter):
                self.add(value.name, value.requires_grad, np.asarray(value.data))
            elif isinstance(value, BaseException):
                # What can be written after ``except`` to catch it.
                public, kinds = [*public_names().values()], type(value).__mro__
                own = [c for c in kinds if c in public or "fusestep" not in c.__module__]
                self.add([c.__name__ for c in own], str(value))
            else:
                self.add(repr(value))

    def _add(self, kind: str, content: bytes = b"") -> None:
        self._hash.update(f"{kind} {len(content)}:".encode() + content)

    def attempt(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Add what a call returns, or the error that it raises; the result, or None."""
        try:
            result = function(*given, **named)
        except Exception as error:
            self.add(error)
            return None
        self.add(result)
        return result

    def try_wrongly(self, function: Callable[..., Any], *given: Any, **named: Any) -> None:
        """Nothing, but in `WrongCalls`."""


class WrongCalls(Record):
    """Before the first call of each kind: what such calls leave with one wrong argument."""

    def __init__(self, record: Record) -> None:
        self._hash, self._seen = record._hash, set[str]()

    def attempt(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        self.try_wrongly(function, *given, **named)
        return super().attempt(function, *given, **named)

    def try_wrongly(self, function: Callable[..., Any], *given: Any, **named: Any) -> None:
        """Add what is left by a call with each unusual value for each of the named arguments. A
        call is made on copies, of the object too whose method it is, so that none shows in the next
        one."""
        kind = f"{type(function).__name__} {getattr(function, '__qualname__', '')} {[*named]}"
        names = (*named, "learning_rat") if named and kind not in self._seen else ()
        self._seen.add(kind)
        arrays = {other for other, x in named.items() if isinstance(x, np.ndarray)}
        for name in names:
            for value in (*unusual(copy.deepcopy(named.get(name))), *sorted(arrays)):
                call, placed, others = copy.deepcopy((function, given, named))
                others[name] = (
                    others[value] if isinstance(value, str) and value in arrays else value
                )
                super().attempt(call, *placed, **others)
                self.add(arrays_of(others), arrays_of(getattr(call, "__self__", call)))


def wrongly(record: Record, case: Callable[[Record], object]) -> None:
    """A case with wrong arguments in all of its calls."""
    case(WrongCalls(record))
