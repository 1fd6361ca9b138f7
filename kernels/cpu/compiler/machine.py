"""Machine code of single functions: made from LLVM's IR, kept as bytes, called by an address.

Numba is not needed to load it: starting its compiler takes longer than loading all functions of a
step. Each function has an engine of its own, so equal symbols of two functions never conflict.

The loops of the package do not depend on a rule, and their IR does not depend on a processor of an
architecture. So their IR is made when the package is built (`write_portable`, `PORTABLE`), and
machine code is made from it at first use.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numba
from llvmlite import binding as llvm

from ...cache import IMPORTED_SOURCES, processor, sealed, unsealed
from ...files import check_target
from ...private import find

PORTABLE = Path(__file__).parents[1] / "portable"
"""LLVM's IR of loops, `sealed` as `_name`, if the package was built and not edited since."""


class PythonEntry(NamedTuple):
    """The way from Python to a function of ``int64``: ints in, an int out (0 for no result)."""

    returns: bool = False
    holds_gil: bool = False  # then no other thread can change the objects that it reads

    def ir(self, symbol: str, n_arguments: int) -> str:
        """A function with the signature of ``METH_FASTCALL``."""
        numbers, kind = range(n_arguments), "i64" if self.returns else "ptr"
        types, values = ", ".join("i64" for _ in numbers), ", ".join(f"i64 %v{k}" for k in numbers)
        read = [
            f"%p{k} = getelementptr ptr, ptr %arguments, i64 {k}\n%o{k} = load ptr, ptr %p{k}\n"
            f"%v{k} = call i64 @PyLong_AsLongLong(ptr %o{k})"
            for k in numbers
        ]
        call = [f'%result = call {kind} @"{symbol}"({values})']
        if not self.holds_gil:
            call.insert(0, "%thread = call ptr @PyEval_SaveThread()")
            call.append("call void @PyEval_RestoreThread(ptr %thread)")
        return "\n".join((
            f'declare {kind} @"{symbol}"({types})',
            "declare i64 @PyLong_AsLongLong(ptr)",
            "declare ptr @PyLong_FromLongLong(i64)",
            "declare ptr @PyEval_SaveThread()",
            "declare void @PyEval_RestoreThread(ptr)",
            f"define ptr @{_ENTRY}(ptr %self, ptr %arguments, i64 %n) {{",
            *read,
            *call,
            f"%int = call ptr @PyLong_FromLongLong(i64 {'%result' if self.returns else 0})",
            "ret ptr %int",
            "}",
        ))  # fmt: skip


class Code(NamedTuple):
    """Machine code of one function for one kind of processor."""

    symbol: str
    called: tuple[str, ...]  # functions of other libraries
    object_file: bytes

    def to_bytes(self) -> bytes:
        """One line about it, then the object file."""
        return json.dumps((self.symbol, self.called)).encode() + b"\n" + self.object_file

    @classmethod
    def from_bytes(cls, content: bytes) -> Code:
        """The code that `to_bytes` wrote."""
        line, object_file = content.split(b"\n", 1)
        symbol, called = json.loads(line)
        return cls(symbol, tuple(called), object_file)


def _target_machine(**options: Any) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    # MCJIT does not link position-independent code on x86.
    reloc = "static" if target.name.startswith("x86") else "default"
    return target.create_target_machine(
        opt=3, reloc=reloc, codemodel="jitdefault", jit=True, **options
    )


def made(symbol: str, ir: str, entry: PythonEntry | None) -> Code:
    """Machine code for this processor of a module that Numba has finished."""
    module = _alone(symbol, ir, entry)
    passes = llvm.create_new_module_pass_manager()
    # Drop Python's error reporting, which cannot be reached, and functions that are inlined.
    passes.add_ipsccp_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, _pass_builder())
    return _code(symbol, module)


def finished(bitcode: bytes) -> Code:
    """Machine code for this processor from the bitcode that `portable` returns."""
    module = llvm.parse_bitcode(bitcode)
    visible = [f.name for f in module.functions
               if f.linkage == llvm.Linkage.external and not f.is_declaration]  # fmt: skip
    (symbol,) = {*visible} - {_ENTRY}
    return _code(symbol, module)


def _alone(symbol: str, ir: str, entry: PythonEntry | None) -> Any:
    """A module whose only visible functions are ``symbol`` and its entry for Python."""
    module = llvm.parse_assembly(ir)
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != symbol:
            # Internal functions can be inlined and dropped, and need no symbols that differ.
            value.linkage = llvm.Linkage.internal
    if entry:
        n_arguments = len([*module.get_function(symbol).arguments])
        module.link_in(llvm.parse_assembly(entry.ir(symbol, n_arguments)))
    return module


def _pass_builder() -> Any:
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    # No vectors: their width depends on the processor for which this IR is finished.
    tuning.loop_vectorization = tuning.slp_vectorization = False
    return llvm.create_pass_builder(_target_machine(), tuning)


def _code(symbol: str, module: Any) -> Code:
    object_file = _target_machine(**processor()).emit_object(module)
    return Code(symbol, _called_by(module), object_file)


def assembly(ir: str) -> str:
    """The assembly for this processor of a module that Numba has finished."""
    return str(_target_machine(**processor()).emit_assembly(llvm.parse_assembly(ir)))


def _called_by(module: Any) -> tuple[str, ...]:
    """Functions of other libraries that the code of a module calls."""
    declared = {f.name for f in module.functions if f.is_declaration}
    calls = (
        [*instruction.operands][-1].name
        for function in module.functions
        for block in function.blocks
        for instruction in block.instructions
        if instruction.opcode == "call"
    )
    # LLVM itself lowers its intrinsics.
    return tuple(sorted({name for name in calls if name in declared and name[:5] != "llvm."}))


def _nothing() -> None:
    return


class Loaded:
    """A function in memory, which can be called as long as the process lives."""

    def __init__(self, code: Code) -> None:
        for name in code.called:
            # Numba registers these functions when its compiler starts, which takes a third of a
            # second.
            helper = (find("helpers") or {}).get(name.removeprefix("NRT_"))
            if helper and not _is_known(name):
                llvm.add_symbol(name, helper)
        if not all(map(_is_known, code.called)):
            numba.cfunc("void()")(_nothing)
        unknown = [name for name in code.called if not _is_known(name)]
        if unknown:  # LLVM would end the process
            names = ", ".join(unknown)
            raise ImportError(f"fusestep: compiled code calls {names}: there is no such function")
        self._engine = llvm.create_mcjit_compiler(
            # An engine begins with a module; the code comes as an object file.
            llvm.parse_assembly(""),
            _target_machine(**processor()),
            use_lmm=numba.config.USE_LLVMLITE_MEMORY_MANAGER,
        )
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code.object_file))
        self._engine.finalize_object()
        self.address: int = self._engine.get_function_address(code.symbol)
        self._function: Callable[..., int] | None = None
        _LOADED.append(self)  # callers hold a raw address, which does not keep the engine alive

    def entry(self) -> Callable[..., int]:
        """The function for Python, if the code has a `PythonEntry`."""
        if self._function is None:
            address = self._engine.get_function_address(_ENTRY)
            # An attribute: Python keeps a pointer to it.
            self._method = _Method(b"compiled", address, _METH_FASTCALL, None)
            self._function = _new_function(ctypes.byref(self._method), None, None)
        return self._function


_LOADED: list[Loaded] = []


class _Method(ctypes.Structure):
    """``PyMethodDef``."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


_METH_FASTCALL = 0x80
_ENTRY = "python"  # the symbol of entries
_new_function = ctypes.pythonapi.PyCFunction_NewEx
_new_function.restype = ctypes.py_object
_new_function.argtypes = ctypes.POINTER(_Method), ctypes.c_void_p, ctypes.c_void_p


def _is_known(function: str) -> bool:
    return llvm.address_of_symbol(function) is not None


def portable(identity: str) -> bytes | None:
    """The IR of a function, if the package was built from its present sources, with this LLVM."""
    name = _name(identity)
    try:
        return unsealed(name, (PORTABLE / name).read_bytes())
    except OSError:
        return None


def _name(identity: str) -> str:
    # Part of the name: LLVM may be unable to read the IR of another version.
    llvm_version, *_ = llvm.llvm_version_info
    decisive = IMPORTED_SOURCES, platform.machine(), platform.system(), str(llvm_version), identity
    return hashlib.sha256("\n".join(decisive).encode()).hexdigest()


# Functions of the C library, of Python's stable ABI, and of a started threading layer.
_PORTABLE_CALLS = {
    "usleep", "Sleep", "PyLong_AsLongLong", "PyLong_FromLongLong", "PyEval_SaveThread",
    "PyEval_RestoreThread", "PyDict_Next", "PyList_SetItem", "Py_IncRef", "get_num_threads",
    "set_num_threads", "pthread_self", "pthread_getcpuclockid",
}  # fmt: skip


def write_portable(
    folder: Path, functions: Iterable[tuple[str, str, str, PythonEntry | None]]
) -> None:
    """Write the files that `portable` reads, for an identity and the arguments of `made` each.

    Functions that call Numba's are left out, unless their identity names the version of Numba.
    """
    folder.mkdir(exist_ok=True)
    for identity, symbol, ir, entry in functions:
        module, builder = _alone(symbol, ir, entry), _pass_builder()
        builder.getModulePassManager().run(module, builder)
        if numba.__version__ in identity or _PORTABLE_CALLS.issuperset(_called_by(module)):
            name = _name(identity)
            check_target("portable code", folder / name)
            (folder / name).write_bytes(sealed(name, module.as_bitcode()))
