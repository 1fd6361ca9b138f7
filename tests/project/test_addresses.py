"""Every place that takes an address of memory, with what makes sure that the memory is there."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import fusestep
from fusestep import nn, ops

ROOT = Path(fusestep.__file__).parent
TAKES = {"data_ptr", "ctypes", "ptr", "__array_interface__", "__cuda_array_interface__", "_cdata",
         "from_address", "from_dlpack", "numpy", "device_ctypes_pointer"}  # fmt: skip
"""Attributes by which an address or a view is taken; ``numpy`` where PyTorch is imported."""
GETTERS = {"attrgetter", "methodcaller"}
"""Functions that are given attributes by their names."""
READS = {"place_of", "header_at", "read_array"}
"""Functions by which compiled code reads the headers of tensors and arrays."""

CHECKED = {
    "check_there of ops.runtime.frameworks, before PyTorch or a loop reads": {
        "ops/runtime/frameworks.py": "check_there, _Torch.place",
        "nn/torch/engine/memory.py": "_Memory.of (by array_of)",
        "nn/torch/engine/tensors.py": "rows_of (by in_memory), form_of",
        "nn/torch/engine/chosen.py": "Chosen.read_each (by Record.dense), Chosen.copied (made "
                                     "there)",
        "nn/torch/engine/step.py": "_run (of numbers: by check_written and each look)",
        "nn/torch/engine/clipping.py": "_euclidean (by in_memory)",
        "nn/thor/torch.py": "_view",
        "ops/runtime/measured_step.py": "number_at (of states that a step writes)"},
    "adopt of ops.runtime.arrays: what exports it holds it; tensors by check_there": {
        "ops/runtime/arrays.py": "adopt"},
    "what exports it holds it; where that is not known, it is not 0": {
        "ops/runtime/frameworks.py": "Framework.place, Framework.signature, _CuPy.place, "
                                     "_CuPy.stream",
        "nn/base/parameter.py": "Parameter.__cuda_array_interface__"},
    "it is an array of NumPy, which holds its memory, or owns what it is a view of": {
        "kernels/cpu/headers/arrays.py": "address_of, addresses_of, read_array, _read_expected "
                                         "(where it writes addresses), _read_alike_arrays, "
                                         "_lies_as_expected",
        "kernels/cpu/headers/id_lists.py": "_read_header",
        "kernels/cuda/device/driver.py": "address_of, copy_in, start_copy_out"},
    "the size of the storage is compared with that of the array": {
        "nn/mindspore/binding.py": "_scanned, check_memory, places_of, shared_array"},
    "it is made here, and nobody else has it": {
        "kernels/cpu/headers/id_lists.py": "_read_lists", "kernels/cpu/rows/sort.py": "_finish",
        "kernels/tables.py": "RowTable.bounds", "kernels/cuda/device/memory.py": "_Pinned.begin",
        "nn/torch/engine/state.py": "full_like", "nn/torch/engine/clipping.py": "_of_order",
        "ops/runtime/frameworks.py": "_Torch.empty, _CuPy.empty",
        "examples/click_model/training.py": "Training.measure",
        "examples/click_model/programs.py": "learned, hashed_batch",
        "examples/click_model/sharded_training.py": "ShardedTraining._sums"},
    "nothing is read there: addresses are compared": {
        "kernels/private.py": "zero_tensors.has_only_a_size",
        "nn/base/parameter.py": "Parameter.is_of",
        "nn/torch/bags.py": "EmbeddingBags._now",
        "nn/torch/engine/bags/gradients.py": "versions_of",
        "nn/torch/engine/memory.py": "Span.of, _Memory.__init__, tensor_of",
        "ops/runtime/frameworks.py": "Framework.address, _Numba, _Torch, _CuPy (each "
                                     "by a form that its place has seen)"},
}  # fmt: skip


def places_in(path: Path) -> set[str]:
    """The functions of a file that take an address, by their qualified names."""
    found = set()
    text = path.read_text("utf-8")
    names = TAKES if "import torch" in text else TAKES - {"numpy"}

    def walk(node: ast.AST, within: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            is_read = path.parent.name == "headers" and getattr(child, "id", "") in READS
            taken = {getattr(child, "attr", "")}
            if isinstance(child, ast.Call) and getattr(child.func, "id", "") in GETTERS:
                paths = (a.value for a in child.args if isinstance(a, ast.Constant))
                taken |= {part for path in paths for part in str(path).split(".")}
            if within and (is_read or taken & names):
                found.add(".".join(within))
            is_scope = isinstance(child, ast.FunctionDef | ast.ClassDef)
            walk(child, (*within, child.name) if is_scope else within)

    walk(ast.parse(text), ())
    return found


def test_each_place_that_takes_an_address_has_its_check() -> None:
    listed: dict[str, set[str]] = {}
    for files in CHECKED.values():
        for file, functions in files.items():
            names = {name.partition(" (")[0] for name in functions.split(", ")}
            assert not names & listed.setdefault(file, set()), file
            listed[file] |= names
    found = {
        path.relative_to(ROOT).as_posix(): places
        for folder in ("kernels", "ops", "nn", "examples")
        for path in (ROOT / folder).rglob("*.py")
        if (places := places_in(path))
    }
    assert found == listed


def momentum(gradient: Any) -> None:
    w = nn.Parameter(np.ones(6, np.float32), "w")
    nn.Momentum([w], 0.1, 0.9)((gradient,))


def of_rows(values: Any) -> None:
    ops.global_norm([nn.RowTensor(np.arange(6), values, (9,))])


TAKERS: dict[str, Callable[[Any], Any]] = {
    "parameter": lambda t: nn.Parameter(t, "w"), "gradient": momentum,
    "operand": lambda t: ops.global_norm([t]), "values of rows": of_rows,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["freed", "shrunk", "end of a shrunk one", "functional"])
@pytest.mark.parametrize("taker", TAKERS)
def test_tensors_without_memory_are_no_arrays(taker: str, kind: str) -> None:
    """NumPy would look beyond their memory, or make some of its own in its place."""
    torch = pytest.importorskip("torch")
    whole, given = torch.ones(12), torch.ones(6)
    if kind == "end of a shrunk one":
        given = whole[6:]
        whole.untyped_storage().resize_(40)
    elif kind == "functional":
        given = torch._to_functional_tensor(given)
    else:
        given.untyped_storage().resize_(8 if kind == "shrunk" else 0)
    with pytest.raises(RuntimeError, match=r"has no memory: expected \d+ bytes, got \d+"):
        TAKERS[taker](given)
