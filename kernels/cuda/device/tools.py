"""NVVM and nvJitLink, which compile and link loops: whether they fit each other and the driver."""

from __future__ import annotations

import re
from functools import cache

from cuda.bindings import driver, nvjitlink, nvvm

# An empty module: what is made of it begins with the release of the compiler.
_EMPTY = """target triple = "nvptx64-nvidia-cuda"
target datalayout = "e-p:64:64:64-i1:8:8-i8:8:8-i16:16:16-i32:32:32-i64:64:64-f32:32:32-f64:64:64-\
v16:16:16-v32:32:32-v64:64:64-v128:128:128-n16:32:64"
!nvvmir.version = !{{!0}}
!0 = !{{i32 {}, i32 {}, i32 {}, i32 {}}}
"""


@cache
def check_tools() -> None:
    """Refuse versions that do not fit, before Numba fails at its first loop.

    Raises:
        RuntimeError: nvJitLink is older than NVVM, whose code it cannot read then, or makes code
            for later drivers than this one.
    """
    linker, compiler = nvjitlink.version(), _release_of_nvvm()
    _, number = driver.cuDriverGetVersion()
    newest = number // 1_000, number % 1_000 // 10
    wrong = ""
    if compiler and linker < compiler:
        wrong, least, got = "nvJitLink is older than NVVM", compiler, linker
        fix = "install nvidia-nvvm and nvidia-nvjitlink of one version"
    elif linker[0] > newest[0]:
        wrong, least, got = "the driver is older than nvJitLink", linker[:1], newest
        fix = "install a newer driver, or fusestep[cuda12]"
    if wrong:
        expected, actual = (".".join(map(str, version)) for version in (least, got))
        raise RuntimeError(f"CUDA: {wrong}: expected at least {expected}, got {actual}; {fix}")


def _release_of_nvvm() -> tuple[int, ...]:
    """The release of the toolkit that NVVM is of; () where it does not say so."""
    text, program = _EMPTY.format(*nvvm.ir_version()).encode(), nvvm.create_program()
    try:
        nvvm.add_module_to_program(program, text, len(text), "empty")
        nvvm.compile_program(program, 0, [])
        made = bytearray(nvvm.get_compiled_result_size(program))
        nvvm.get_compiled_result(program, made)
    finally:
        nvvm.destroy_program(program)
    release = re.search(rb"release (\d+)\.(\d+)", made)
    return tuple(map(int, release.groups())) if release else ()
