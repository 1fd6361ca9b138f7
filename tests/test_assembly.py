"""The machine code of the inner loops is packed: SIMD square root, division and FMA."""

import platform
import re

import llvmlite.binding as llvm
import pytest

from fusestep.kernels import storage
from fusestep.kernels.compile import kernel
from fusestep.kernels.cpu.rows import accumulate
from fusestep.kernels.rules.gradient import COUPLED_DECAY, SCALE
from fusestep.kernels.warmup import all_rules

RULES = all_rules()
FEATURES = llvm.get_host_cpu_features()

# Instructions for several elements at once, by machine: (square root, division, FMA).
_PACKED = {
    "x86_64": (r"v?sqrtps", r"v?divps", r"vfn?m(add|sub)\d+ps"),
    "aarch64": (r"fsqrt\s+v\d+\.[24]s", r"fdiv\s+v\d+\.[24]s", r"fml[as]\s+v\d+\.[24]s"),
}
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


@pytest.fixture(scope="module")
def packed():
    if MACHINE not in _PACKED:
        pytest.skip(f"no list of packed instructions for {MACHINE}")
    root, division, fma = _PACKED[MACHINE]
    has_fma = MACHINE == "aarch64" or FEATURES["fma"]
    return {"square root": root, "division": division, **({"FMA": fma} if has_fma else {})}


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("prologue", [(), (COUPLED_DECAY, SCALE)], ids=["plain", "decay+scale"])
def test_blocks_of_every_rule_are_vectorised(name, prologue, packed):
    f32 = storage.F32
    text = kernel(RULES[name], prologue, f32, f32, f32).block.assembly()
    for what, pattern in packed.items():
        assert re.search(rf"\s{pattern}\s", text), f"no packed {what}"


@pytest.mark.parametrize("kind", [storage.F16, storage.BF16], ids=lambda s: s.name)
def test_16_bit_blocks_are_vectorised(kind, packed):
    text = kernel(RULES["adam"], (), kind, kind, storage.F32).block.assembly()
    assert re.search(rf"\s{packed['square root']}\s", text)
    if kind is storage.F16 and MACHINE == "x86_64" and FEATURES["f16c"]:
        assert re.search(r"vcvtph2psx?\s+[^\n]*[yz]mm", text)


def test_zero_gradient_block_is_vectorised(packed):
    f32 = storage.F32
    text = kernel(RULES["adam"], (), f32, f32, f32).block_zero.assembly()
    for what, pattern in packed.items():
        assert re.search(rf"\s{pattern}\s", text), f"no packed {what}"


def test_sums_of_rows_are_vectorised():
    if MACHINE not in _PACKED:
        pytest.skip(f"no list of packed instructions for {MACHINE}")
    add = {"x86_64": r"v?addps", "aarch64": r"fadd\s+v\d+\.[24]s"}[MACHINE]
    assert re.search(rf"\s{add}\s", accumulate(storage.F32, storage.F32).assembly())


def test_the_check_can_fail():
    """A rule whose loop depends on the element before cannot be packed."""
    from fusestep.kernels.compile import NativeFunction

    def scalar(address, n, step):
        from_address = address
        for _ in range(n):
            from_address = from_address * from_address + step

    text = NativeFunction(scalar, 3, "test").assembly()
    assert not re.search(rf"\s{_PACKED['x86_64'][0]}\s", text)
