"""CUDA kernels as machine code, compiled without a GPU: ``python cuda_report.py rules every``.

The pipeline is the one that ``cuda.jit`` uses: NVVM to LTO-IR, and nvJitLink to a cubin. Only the
question for the device's compute capability is answered here in its place. What comes before NVVM
does not depend on it but for names, and takes the most time: it is done once for all capabilities.
"""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba.cuda.dispatcher
from numba.cuda import types
from numba.cuda.compiler import _compile_pyfunc_with_fixup
from device_rules import ALIGNED, CENTRED, COUNTED, NOVO
from fusestep.kernels.cpu.warmup import all_rules
from fusestep.kernels.cuda.dense import norm, step, totals
from fusestep.kernels.cuda.dense.row_wise import row_wise_kernel
from fusestep.kernels.cuda.device import arrays
from fusestep.kernels.cuda.rows import bags, gather, keys, sort
from fusestep.kernels.cuda.rows import kernels as rows
from fusestep.kernels.cuda.rows.sources import CHOSEN, SHARED, WEIGHTED
from fusestep.kernels.element import Kernel, kernel
from fusestep.kernels.keeping import MASTER
from fusestep.kernels.rules.adam import ADAM
from fusestep.kernels.rules.gradient import CLIP, COUPLED_DECAY, SCALE
from fusestep.kernels.rules.lamb import LAMB
from fusestep.kernels.rules.mxnet import MXNET_ADAM
from fusestep.kernels.rules.row_wise import ROW_WISE_ADAGRAD, ROW_WISE_ADAM
from fusestep.kernels.storage import BF16, F16, F32, F64, I32, Storage
from fusestep.kernels.tables import LARGEST, MEAN, SUM

# The older one has some kernels, for its instructions on storage types differ.
CAPABILITIES = {"9.0a": (9, 0, "a"), "8.0": (8, 0)}


def tool(name: str) -> str:
    """A program of the CUDA toolkit, out of its package on PyPI or on the PATH."""
    inside = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", name)
    found = str(inside) if inside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name}: pip install nvidia-cuda-{name}")
    return found


def rules(*, every: bool, of_torch: bool = False) -> dict[str, Any]:
    """The dense loop of each rule, of PyTorch's form or of others; some: of the most states."""
    return {
        f"dense {name}": kernel(rule, (), F32, F32, (F32,) * len(rule.states))
        for name, rule in all_rules().items()
        if every or name == "adam" or len(rule.states) > 2
        if name.startswith("torch") == of_torch and not rule.lines and rule.scope == "tensor"
    }


def adam(w: Storage, s: Storage, prologue: Any = ()) -> Any:
    """Adam, of parameters and gradients of one type, and states of another."""
    return kernel(ADAM, prologue, w, w, (s, s))


def mixtures(*, every: bool) -> dict[str, Any]:
    """The dense loop with a prologue, and of other storage types than float32."""
    found = {
        "dense adam, scaled, clipped, decayed": adam(F32, F32, (SCALE, CLIP, COUPLED_DECAY)),
        "dense adam f64": adam(F64, F64), "dense adam f16": adam(F16, F32),
        "dense adam bf16": adam(BF16, F32), "dense adam all bf16": adam(BF16, BF16),
    }  # fmt: skip
    if every:
        with_master = kernel(MXNET_ADAM.kept(MASTER), (), F16, F16, (F32, F32, F32))
        found["dense mxnet_adam_master f16"] = with_master
    return found


def other_loops(*, every: bool) -> dict[str, Any]:
    """The loops of row-sparse steps, of first stages and of checks; some: of float32 alone."""
    lamb, constants = kernel(LAMB, (), F32, F32, (F32, F32)), (step.TensorRow, ())
    novo, aligned = kernel(NOVO, (), F32, F32, (F32, F32, I32)), kernel(ALIGNED, (), F32, F32, ())
    counted = kernel(COUNTED, (), F32, F32, (I32,))
    by_type = {
        s.name: adam(s, F64 if s is F64 else F32) for s in (F32, BF16, F64)[: 3 if every else 1]
    }
    found = {f"rows lazy {name}": rows.touched_kernel(k) for name, k in by_type.items()}
    found |= {f"rows sweep {name}": rows.sweep_kernel(k) for name, k in by_type.items()}
    found |= {f"rows hot {s.name}": rows.hot_kernel(s, F32, 16 // s.itemsize) for s in (F32, BF16)}
    for s in (F32, F64, F16):
        found[f"finite {s.name}"] = step.chunk_sums_kernel(norm.scaling(s, norm.FINITE))
    return found | {
        "rows check": keys.check_kernel, "rows sort one tile": keys.tile_kernel,
        "rows mark": rows.mark_kernel, "sort count": sort.count_kernel,
        "sort scan": sort.scan_kernel, "sort scatter": sort.scatter_kernel,
        "measure lamb": step.chunk_sums_kernel(lamb),
        "totals lamb": totals.totals_kernel(lamb, *constants),
        "measure four values": step.chunk_sums_kernel(aligned),
        "totals of four values": totals.totals_kernel(aligned, *constants),
        "totals of a state": totals.totals_kernel(novo, *constants),
        "states of tensors": totals.states_kernel(novo, step.TensorRow),
        "update beside a state": step.dense_kernel(novo), "counted rows": row_wise_kernel(counted),
        "lazy counted rows": rows.touched_kernel(counted),
        "rows squares": rows.row_squares_kernel(F32, F32, 4), "total": norm.total_kernel,
        "gather": gather.gather_kernel(16), "fill": arrays.fill_kernel,
    }  # fmt: skip


def bag_loops(*, every: bool) -> dict[str, Any]:
    """The loops of bags and of steps on their gradients; some: those of the most registers."""
    f32, bf16, f64 = (adam(s, F64 if s is F64 else F32) for s in (F32, BF16, F64))
    row_wise = kernel(ROW_WISE_ADAGRAD, (), F32, F32, (F32,))
    found: dict[str, Any] = {
        "rows lazy weighted f32": rows.touched_kernel(f32, WEIGHTED),
        "rows lazy chosen bf16": rows.touched_kernel(bf16, CHOSEN),
        "row-wise adagrad lazy chosen f32": rows.touched_kernel(row_wise, CHOSEN),
        "bags sum weighted bf16": bags.pool_kernel(BF16, F32, SUM, True),
        "bags max f16": bags.pool_kernel(F16, F32, LARGEST, False),
    }
    if every:
        found |= {
            "rows lazy shared f32": rows.touched_kernel(f32, SHARED),
            "rows lazy weighted bf16": rows.touched_kernel(bf16, WEIGHTED),
            "rows lazy weighted f64": rows.touched_kernel(f64, WEIGHTED),
            "rows lazy chosen f32": rows.touched_kernel(f32, CHOSEN),
            "rows sweep weighted f32": rows.sweep_kernel(f32, WEIGHTED),
            "rows hot weighted f32": rows.hot_kernel(F32, F32, 4, WEIGHTED),
            "rows hot chosen bf16": rows.hot_kernel(BF16, F32, 8, CHOSEN),
            "row-wise adagrad lazy weighted f32": rows.touched_kernel(row_wise, WEIGHTED),
            "bags sum f32": bags.pool_kernel(F32, F32, SUM, False),
            "bags mean bf16": bags.pool_kernel(BF16, F32, MEAN, False),
            "bags sum weighted f64": bags.pool_kernel(F64, F64, SUM, True),
            "bags max f32": bags.pool_kernel(F32, F32, LARGEST, False),
            "bags max f64": bags.pool_kernel(F64, F64, LARGEST, False),
        }
    return found | {
        "bags bounds": bags.bounds_kernel, "bags ends": bags.ends_kernel,
        "bags lay out": bags.lay_out_kernel, "bags keep": bags.keep_kernel,
        "bags weights of means": bags.mean_weights_kernel(F32),
        "bags products": bags.products_kernel(F32, F32, F32),
    }  # fmt: skip


# Rules that measure rows have about as many registers; storage types differ in instructions.
# Some are the first two.
ROW_WISE: dict[str, Any] = {
    "centred f32": (CENTRED, F32, (F32, F32, I32)), "adam f16": (ROW_WISE_ADAM, F16, (F16, F32)),
    "adam f32": (ROW_WISE_ADAM, F32, (F32, F32)),
    "adam mixed bf16": (ROW_WISE_ADAM, BF16, (F32, F32)),
    "adam f64": (ROW_WISE_ADAM, F64, (F64, F64)), "adagrad f32": (ROW_WISE_ADAGRAD, F32, (F32,)),
}  # fmt: skip


def row_wise_loops(*, every: bool) -> dict[str, Any]:
    """The loops of rules that measure rows; some: those of the most registers."""
    found = {}
    for name, (rule, w, states) in [*ROW_WISE.items()][: None if every else 2]:
        prologue = (SCALE, COUPLED_DECAY) if rule is ROW_WISE_ADAGRAD else ()
        compiled, (of_rule, _, storage) = kernel(rule, prologue, w, w, states), name.partition(" ")
        found |= {
            f"row-wise {of_rule} dense {storage}": row_wise_kernel(compiled),
            f"row-wise {of_rule} lazy {storage}": rows.touched_kernel(compiled),
            f"row-wise {of_rule} sweep {storage}": rows.sweep_kernel(compiled),
        }
    return found


# Rules that do not read their first variable (a step that is not taken) or their gradient, and
# those that leave a state as it is. A master's copy is not read either.
_UNREAD_GRADIENT = {"scaled_in_place"}
_ONLY_WRITTEN = {"adam_delta", "adam_nesterov_delta", "lars_gradient", "scaled"}
_ONLY_READ = {"adagrad_fixed", "lars_gradient"}


def arrays_of(name: str, compiled: Any) -> dict[str, int]:
    """How many arrays a kernel reads and writes."""
    rule, states = name.split()[1].rstrip(","), len(compiled.s)
    unread = (rule in _ONLY_WRITTEN) + (rule in _UNREAD_GRADIENT) + rule.endswith("_master")
    return {"read": 2 + states - unread, "written": 1 + states - (rule in _ONLY_READ)}


def library_of(function: Any) -> Any:
    """A kernel, whose arguments are ``int64``, before it is compiled for a device."""
    arguments = [types.int64] * function.py_func.__code__.co_argcount
    off = ("device", "fastmath", "lto", "debug", "lineinfo", "forceinline")
    bounds = function.targetoptions.get("launch_bounds")
    options = {"cc": CAPABILITIES["9.0a"], "opt": True, "abi": "numba", "abi_info": {}}
    library, _ = _compile_pyfunc_with_fixup(
        function.py_func, types.void(*arguments), launch_bounds=bounds, **options,
        **dict.fromkeys(off, False))  # fmt: skip
    library._lto = True  # as cuda.jit does by default
    return library


def machine_code(library: Any, capability: tuple[Any, ...]) -> dict[str, Any]:
    """Registers, stack, memory instructions and divisions of a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(library.get_cubin(cc=capability).code)
        text, usage = (
            subprocess.run(
                [tool(name), option, cubin], capture_output=True, text=True, check=True
            ).stdout
            for name, option in (("nvdisasm", "-c"), ("cuobjdump", "-res-usage"))
        )
    (registers, stack), *_ = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    memory = Counter(re.findall(r"\b(?:LDG|STG|LDL|STL|ATOM|ATOMG|ATOMS|RED|REDG)\b[.\w]*", text))
    return {
        "registers": int(registers),
        "stack": int(stack),
        "memory": dict(memory),
        "64-bit divisions": len(re.findall(r"__cuda_sm20_(?:div|rem)_[us]64:", text)),  # functions
    }


LOOPS: dict[str, Callable[..., dict[str, Any]]] = {
    "rules": rules, "torch": partial(rules, of_torch=True), "mixtures": mixtures,
    "others": other_loops, "bags": bag_loops, "row-wise": row_wise_loops,
}  # fmt: skip


def main() -> None:
    """Print the report on one part of the kernels as JSON, by compute capability and name."""
    device = SimpleNamespace(compute_capability=CAPABILITIES["9.0a"])
    numba.cuda.dispatcher.get_current_device = lambda: device
    made, every = LOOPS[sys.argv[1]], sys.argv[2] == "every"
    chosen = {"9.0a": made(every=every), "8.0": made(every=False) if every else {}}
    report: dict[str, dict[str, Any]] = {capability: {} for capability in chosen}
    for name, loop in chosen["9.0a"].items():
        moved = arrays_of(name, loop) if isinstance(loop, Kernel) else {}
        library = library_of(step.dense_kernel(loop) if isinstance(loop, Kernel) else loop)
        for capability, loops in chosen.items():
            if name in loops:
                report[capability][name] = machine_code(library, CAPABILITIES[capability]) | moved
    print(json.dumps(report))


if __name__ == "__main__":
    main()
