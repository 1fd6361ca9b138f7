"""The machine code of the inner loops is packed: SIMD square root, division and FMA."""

import ast
import inspect
import platform
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import llvmlite.binding as llvm
import pytest
from fusestep.kernels import storage
from fusestep.kernels.cpu.blocks import blocks
from fusestep.kernels.cpu.compiler.compile import NativeFunction
from fusestep.kernels.cpu.matrices.blocks import matrix_blocks
from fusestep.kernels.cpu.rows.sums import OWN, accumulate
from fusestep.kernels.cpu.warmup import all_rules
from fusestep.kernels.element import kernel
from fusestep.kernels.keeping import MASTER
from fusestep.kernels.rules.gradient import CLIP, COUPLED_DECAY, SCALE
from helpers import sampled
from many_states import FIVE, FOUR

RULES = all_rules()
FEATURES = llvm.get_host_cpu_features()
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())

# Instructions for several elements at once, by machine.
_PACKED = {
    "x86_64": {
        "square root": r"v?sqrtps", "division": r"v?divps", "multiplication": r"v?mulps",
        "addition": r"v?addps", "FMA": r"vfn?m(add|sub)\d+ps",
        "float64 FMA": r"vfn?m(add|sub)\d+pd", "float64 addition": r"v?addpd"},
    "aarch64": {
        "square root": r"fsqrt\s+v\d+\.[24]s", "division": r"fdiv\s+v\d+\.[24]s",
        "multiplication": r"fmul\s+v\d+\.[24]s", "addition": r"fadd\s+v\d+\.[24]s",
        "FMA": r"fml[as]\s+v\d+\.[24]s", "float64 FMA": r"fml[as]\s+v\d+\.2d",
        "float64 addition": r"fadd\s+v\d+\.2d"},
}  # fmt: skip

ROOT, DIVISION, FMA, PRODUCT = "square root", "division", "FMA", "multiplication"


def operations(function: Callable[..., Any]) -> set[str]:
    """What the formula of a rule has, and those of the functions that it calls."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(function))):
        if isinstance(node, ast.BinOp):
            sides = [x.op for x in (node.left, node.right) if isinstance(x, ast.BinOp)]
            is_sum = isinstance(node.op, ast.Add | ast.Sub)
            found |= {DIVISION} if isinstance(node.op, ast.Div) else set()
            found |= {PRODUCT} if isinstance(node.op, ast.Mult) else set()
            found |= {FMA} if is_sum and any(isinstance(x, ast.Mult) for x in sides) else set()
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found |= {ROOT} if name == "math.sqrt" else set()
            called = function.__globals__.get(name)
            found |= operations(called) if inspect.isfunction(called) else set()
    return found - {PRODUCT} if FMA in found else found


# They call pow for each element, so their loops are scalar.
POWERS = ["ftrl_power", "ftrl_power_shrunk"]
MUST_HAVE = {
    name: set() if name in POWERS else operations(rule.update) for name, rule in RULES.items()
}
MEASURING = [name for name in sorted(RULES) if RULES[name].measure and not RULES[name].lines]


def assert_packed(text: str, wanted: set[str]) -> None:
    """Each wanted kind of instruction occurs in a packed form."""
    if MACHINE not in _PACKED:
        pytest.skip(f"no list of packed instructions for {MACHINE}")
    has_fma = MACHINE == "aarch64" or FEATURES["fma"]
    for what in wanted if has_fma else wanted - {FMA, "float64 FMA"}:
        assert re.search(rf"\s{_PACKED[MACHINE][what]}\s", text), f"no packed {what}"


def test_operations_are_found():
    assert MUST_HAVE["adam"] == {ROOT, DIVISION, FMA}
    assert MUST_HAVE["mxnet_adam"] == {ROOT, DIVISION, PRODUCT}  # every one is rounded
    assert MUST_HAVE["momentum"] == {FMA}


NAMES = sorted(RULES)
BLOCKS = [*product(NAMES, [False]), *product(NAMES[::5], [True])]


@pytest.mark.parametrize(
    ("name", "conditioned"), sampled(product(NAMES, (False, True)), BLOCKS), ids=str
)
def test_blocks_of_every_rule_are_vectorised(name, conditioned):
    """With the longest prologue too that an optimizer puts before the rule."""
    longest = (SCALE, CLIP, COUPLED_DECAY)
    f32 = storage.F32
    states = (f32,) * len(RULES[name].states)
    compiled = kernel(RULES[name], longest if conditioned else (), f32, f32, states)
    of_rule = matrix_blocks if RULES[name].lines else blocks
    assert_packed(of_rule(compiled).update.assembly(), MUST_HAVE[name])


def test_the_general_power_is_the_only_scalar_operation():
    """The reason for which they are exempt; when it goes, so must the exemption."""
    f32 = storage.F32
    for name in POWERS:
        text = blocks(kernel(RULES[name], (), f32, f32, (f32, f32))).update.assembly()
        assert re.search(r"\b_?powf?\b", text)
    assert sorted(name for name, must in MUST_HAVE.items() if not must) == POWERS


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, storage.F32) for name in MEASURING]
    + [("scaled", kind) for kind in (storage.F64, storage.F16, storage.BF16)],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_sums_of_squares_are_vectorised(name, kind):
    """Products of float64 numbers, or numbers, are added to several partial sums at once. What
    measures rows does so in the block that updates them."""
    rule = RULES[name]
    compiled = blocks(kernel(rule, (), kind, kind, (kind,) * len(rule.states)))
    block = compiled.reduce or compiled.update
    assert_packed(block.assembly(), {"float64 addition" if rule.signed else "float64 FMA"})


@pytest.mark.parametrize("rule", [FOUR, FIVE], ids=["four", "five"])
def test_blocks_of_many_states_are_vectorised(rule):
    f32 = storage.F32
    compiled = kernel(rule, (), f32, f32, (f32,) * len(rule.states))
    assert_packed(blocks(compiled).update.assembly(), operations(rule.update))


@pytest.mark.parametrize("kind", [storage.F16, storage.BF16], ids=lambda s: s.name)
def test_16_bit_blocks_are_vectorised(kind):
    text = blocks(kernel(RULES["adam"], (), kind, kind, (storage.F32,) * 2)).update.assembly()
    assert_packed(text, {ROOT})
    if kind is storage.F16 and MACHINE == "x86_64" and FEATURES["f16c"]:
        assert re.search(r"vcvtph2psx?\s+[^\n]*[yz]mm", text)


@pytest.mark.parametrize("kind", [storage.F16, storage.BF16], ids=lambda s: s.name)
def test_the_copy_of_a_master_is_not_read(kind):
    """Only written: nothing is converted from 16 bit where the gradient is float32."""
    f32 = storage.F32
    compiled = kernel(RULES["mxnet_adam"].kept(MASTER), (), kind, f32, (f32, f32, f32))
    text = blocks(compiled).update.assembly()
    assert_packed(text, MUST_HAVE["mxnet_adam"])
    if MACHINE == "x86_64" and FEATURES["f16c"]:
        assert ("vcvtps2ph" in text) == (kind is storage.F16)
        assert "vcvtph2ps" not in text
        assert "pmovzxwd" not in text  # how bfloat16 is widened


def test_zero_gradient_block_is_vectorised():
    f32 = storage.F32
    compiled = kernel(RULES["adam"], (), f32, f32, (f32, f32))
    assert_packed(blocks(compiled).update_zero.assembly(), {ROOT, DIVISION, FMA})


def test_sums_of_rows_are_vectorised():
    assert_packed(accumulate(storage.F32, storage.F32, OWN).assembly(), {"addition"})


def test_the_check_can_fail():
    """A rule whose loop depends on the element before cannot be packed."""

    def scalar(address, n, step):
        from_address = address
        for _ in range(n):
            from_address = from_address * from_address + step

    text = NativeFunction(scalar, "test").assembly()
    with pytest.raises(AssertionError, match="no packed square root"):
        assert_packed(text, {ROOT})
