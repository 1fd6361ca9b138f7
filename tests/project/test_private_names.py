"""Private names of Numba, llvmlite and PyTorch that a new version lacks, and versions not tried.

Names are taken away in a fresh process after the import of Numba and PyTorch: the package is
imported, optimizers take their steps with the same bits, and each name has one warning.
"""

import ast
import json
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import fusestep
from fusestep.kernels import private
from fusestep.kernels.cpu.headers import arrays
from fusestep.kernels.private import NAMES, NEEDED, TRIED
from subprocesses import output_of, run_python

ROOT = Path(fusestep.__file__).parent
HAS_TORCH = find_spec("torch") is not None
AS_TRIED = {"FUSESTEP_READ_HEADERS": "1"}
TAKE_AWAY = """
import ctypes, sys, types
from importlib import import_module
from importlib.metadata import files
from operator import attrgetter

class Gone:
    def __get__(self, instance, owner):
        raise AttributeError

class Without:
    def __init__(self, whole, name):
        self._of = whole, name

    def __getattr__(self, name):
        if name == self._of[1]:
            raise AttributeError
        return getattr(self._of[0], name)

    def __call__(self, function):
        return self._of[0](function)

# Their owners look for them as globals.
KEEPS = "numba.", "llvmlite.", "torch._C", "torch.optim", "torch.autograd"

def take_away(place):
    module, _, path = place.partition(":")
    if module.endswith("tbbpool"):
        (file,) = [f for f in files("tbb") if f.name == "libtbb.so.12"]
        ctypes.CDLL(str(file.locate().resolve()), mode=ctypes.RTLD_GLOBAL)
    owner = import_module(module)
    *way, last = path.split(".")
    if not path:  # Numba has it as an attribute of its package
        sys.modules[module] = None
    elif module.startswith(KEEPS) and not (way and way[0] == "Optimizer"):
        names = dict(vars(owner))
        first = names.pop((way or [last])[0])
        if way:
            names[way[0]] = Without(first, (way + [last])[1])
        sys.modules[module] = types.ModuleType(module)
        vars(sys.modules[module]).update(names)
    else:
        target = attrgetter(".".join(way))(owner) if way else owner
        if last in vars(target):
            delattr(target, last)
        else:  # of a base that is written in C
            setattr(target, last, Gone())
"""
STEPS = """
import hashlib, json, warnings
import llvmlite.binding, numba, numpy as np
if has_torch:
    import torch, torch._dynamo  # which uses them itself
for place in json.loads(sys.argv[1]):
    take_away(place)

digest = hashlib.sha256()

def step_of_nn():
    from fusestep import nn
    from fusestep.kernels.cpu.threads.parallel import start_threads
    start_threads()
    w, table = np.ones(5, np.float32), np.ones((7, 3), np.float32)
    opt = nn.LazyAdam([w, table], 0.1)
    for k in range(3):
        rows = nn.RowTensor(np.array([k, 5, k]), np.full((3, 3), 0.5 + k, np.float32), (7, 3))
        opt((np.arange(5, dtype=np.float32) - k, rows))
    digest.update(w.tobytes() + table.tobytes())

def step_of_nn_torch():
    import fusestep.nn.torch as optim
    import torch.distributed as dist
    from fusestep.nn.distributed import over_torch
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    over_torch()
    w, whole = torch.nn.Parameter(torch.ones(5)), torch.ones(4, 2)
    shared = torch.nn.Parameter(distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)]))
    tables = [torch.nn.Parameter(torch.ones(7, 3)) for _ in range(2)]
    torch.manual_seed(0)
    bags = optim.EmbeddingBags([optim.GrowingEmbedding(7, 3), (7, 3)])
    dense, sparse = optim.AdamW([w, shared], 0.1), optim.SparseAdam(tables[:1], 0.1)
    lazy = optim.LazyAdam([tables[1], *bags.parameters()], 0.1)
    for k in range(4):
        w.grad, shared.grad = torch.arange(5.0) - k, shared.detach() + k
        rows = torch.tensor([[5, k, 5]])
        known = {"is_coalesced": False, "check_invariants": False}
        for table in tables:
            values = torch.full((3, 3), 0.5 + k)
            table.grad = torch.sparse_coo_tensor(rows, values, (7, 3), **known)
        bags([rows, rows.flip(1)]).sum().backward()
        for optimizer in (dense, sparse, lazy):
            optimizer.step()
        bags.zero_grad()
    for tensor in (w, shared.to_local(), *tables, *bags.parameters()):
        digest.update(tensor.detach().numpy().tobytes())
    assert (w._version, tables[1]._version) == (4, 4) if hasattr(w, "_version") else True
    dist.destroy_process_group()

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    step_of_nn()
    if has_torch:
        step_of_nn_torch()
print(json.dumps([digest.hexdigest(), [str(w.message) for w in caught]]))
"""


def steps_without(places: Iterable[str], change: str = "", **environment: str) -> tuple[str, Any]:
    """A digest of all numbers after some steps, and the warnings."""
    program = f"has_torch = {HAS_TORCH}\n{TAKE_AWAY}\n{change}\n{STEPS}"
    environment = AS_TRIED | environment
    digest, warned = json.loads(output_of(program, json.dumps([*places]), **environment))
    return digest, warned


@cache
def whole() -> str:
    digest, warned = steps_without(())
    assert warned == []
    return digest


def dotted(place: str) -> str:
    return place.replace(":", ".")


def assert_only_slower(names: list[str], **environment: str) -> None:
    digest, warned = steps_without([NAMES[name].place for name in names], **environment)
    assert digest == whole()
    assert len(warned) == len(names), warned
    for name in names:
        of_name = [text for text in warned if f" has no {dotted(NAMES[name].place)}: " in text]
        assert len(of_name) == 1, (name, warned)
        assert of_name[0].endswith(f": {NAMES[name].without}")


# One is looked up where another layer runs.
ALONE = {"omp": {"NUMBA_THREADING_LAYER": "omp"}}
# Of objects, whose class has none of them.
OF_OBJECTS: dict[str, Callable[[Any], bool]] = {
    "hooks of one": lambda other: private.watching()(other) is True,
    "compiled backward": lambda _: private.is_backward_compiled() is False,
    "modules": lambda other: private.modules_of(other) == [other],
    "parameters of modules": lambda other: private.weights_of([other]) == [1.0],
    "hooks of modules": lambda other: private.hooks_of_modules()(other) == (),
}
ON_DEVICES = "cubin"  # `tests/cuda/test_driver.py` does without it
APART = {*ALONE, *OF_OBJECTS, ON_DEVICES}
TORCH = [name for name, (place, _) in NAMES.items() if place.startswith("torch")]
NUMBA = [name for name in NAMES if name not in TORCH]
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs PyTorch")


def test_without_all_names_of_numba() -> None:
    assert_only_slower([name for name in NUMBA if name not in APART])


@needs_torch
def test_without_all_names_of_torch() -> None:
    assert_only_slower([name for name in TORCH if name not in APART])


@needs_torch
@pytest.mark.parametrize("name", OF_OBJECTS)
def test_without_a_name_of_objects(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(weight=1.0, children=lambda: [other])
    torch = SimpleNamespace(nn=SimpleNamespace(Module=SimpleNamespace))
    monkeypatch.setattr(private, "_found", {})
    if name == "hooks of modules":
        monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._dynamo.compiled_autograd", other)
    place, without = NAMES[name]
    with pytest.warns(RuntimeWarning, match=f" has no {dotted(place)}: {without}"):
        assert OF_OBJECTS[name](other)
    assert OF_OBJECTS[name](other)


@pytest.mark.parametrize("name", ALONE)
def test_without_a_name_that_is_looked_up_alone(name: str) -> None:
    assert_only_slower([name], **ALONE[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in (*NUMBA, *TORCH) if name not in APART])
def test_without_one_name(name: str) -> None:
    if name in TORCH and not HAS_TORCH:
        pytest.skip("needs PyTorch")
    assert_only_slower([name])


@pytest.mark.parametrize("place", NEEDED)
def test_what_nothing_compiles_without(place: str) -> None:
    done = run_python(f"{TAKE_AWAY}\nimport numba\ntake_away({place!r})\nimport fusestep.nn")
    *_, last = done.stderr.strip().splitlines()
    assert done.returncode == 1
    numba, llvmlite = TRIED["Numba"], TRIED["llvmlite"]
    assert last.startswith(
        f"ImportError: fusestep: {dotted(place)} is missing: expected Numba {numba[0]} to "
        f"{numba[-1]} and llvmlite {llvmlite[0]} to {llvmlite[-1]}, which were tried, got "
    )


# Versions that were not tried

NEW_NUMPY = "import numba, numpy; numpy.__version__ = '2.99.1'"
NEW_PYTHON = "import platform; platform.python_version = lambda: '3.99.0rc1'"
OFF = {"FUSESTEP_READ_HEADERS": "0"}


@pytest.mark.parametrize(("change", "text"), [
    (f"{NEW_PYTHON}\n{NEW_NUMPY}", "arrays .*: not tried with Python 3.99 and NumPy 2.99"),
])  # fmt: skip
def test_a_version_that_was_not_tried(change: str, text: str) -> None:
    digest, (warned,) = steps_without((), change, FUSESTEP_READ_HEADERS="")
    assert digest == whole()
    assert re.match(f"fusestep reads {text} ", warned)


@pytest.mark.parametrize("setting", [OFF, AS_TRIED], ids=["off", "on"])
def test_the_variable_decides_without_a_warning(setting: dict[str, str]) -> None:
    assert steps_without((), f"{NEW_NUMPY}\n{NEW_PYTHON}", **setting) == (whole(), [])


def test_a_wrong_value_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSESTEP_READ_HEADERS", "no")
    text = "FUSESTEP_READ_HEADERS has a wrong value: expected 0, 1 or nothing, got 'no'"
    with pytest.raises(ValueError, match=f"^fusestep: {text}$"):
        arrays.is_switched_off()


# Sources and documents


INSIDE = "numba.core", "numba.np", "llvmlite.binding."


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@cache
def names_of_torch() -> set[str]:
    """Private names that objects of PyTorch have; of `NAMES`, those of each version."""
    found = {dotted(NAMES[name].place).split(".")[-1] for name in TORCH}
    if HAS_TORCH:
        import torch
        from torch.distributed.tensor import DTensor

        module, optimizer = torch.nn.Module(), torch.optim.SGD([torch.zeros(1)])
        every = {name for of in (module, optimizer, torch.Tensor, DTensor) for name in dir(of)}
        found |= {*filter(is_private, every)}
    return found


def private_uses(path: Path) -> set[str]:
    """Private names of PyTorch, and imports from inside of it, of Numba and of llvmlite."""
    found, of_torch = set(), {"torch"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{name}" for name in modules if not node.level]
            inside = [m for m in modules if m.startswith("torch.")]
            found |= {m for m in inside if any(map(is_private, m.split(".")))}
            found |= {m for m in modules if m.startswith(INSIDE)}
            if inside:
                of_torch |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and (owner := ast.unparse(node.value)) != "self":
            is_inside = is_private(node.attr) and owner.split(".")[0] in of_torch
            found |= {node.attr} if is_inside or node.attr in names_of_torch() else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # of getattr
            found |= {node.value} & names_of_torch()
    return found


# Files that use names after `find` has found them.
GUARDED = {"kernels/private.py"}


def test_no_other_file_uses_a_private_name() -> None:
    for layer in ("kernels", "ops", "nn"):
        for path in (ROOT / layer).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            assert name in GUARDED or private_uses(path) == set(), name


def test_the_page_on_new_versions_lists_every_name() -> None:
    page = ROOT / "docs" / "new-versions.md"
    if not page.exists():
        pytest.skip("an installed package has no documents")
    text = page.read_text(encoding="utf-8")
    for place in (*NEEDED, *(place for place, _ in NAMES.values())):
        assert f"`{dotted(place)}`" in text, place
    for package, versions in TRIED.items():
        assert f"| {package} | {', '.join(versions)} |" in text, package
