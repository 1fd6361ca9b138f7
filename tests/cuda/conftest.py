"""The set of device tests is there where a device of any kind is."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from zlib import crc32

import pytest
import devices

if devices.LACKS:
    collect_ignore_glob = ["test_device_*.py"]
elif devices.KIND == devices.STUB:
    import watch

    watch.install()
    if find_spec("torch"):
        import tensors

        tensors.pretend()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test has the arrays of each framework; where nothing is computed, of one in turn. A test
    of ``torch`` has its arrays alone."""
    if "framework" in metafunc.fixturenames:
        turn = crc32(metafunc.definition.nodeid.encode())
        chosen = ("torch",) if "torch" in metafunc.fixturenames else devices.FRAMEWORKS
        if devices.KIND == devices.STUB:
            chosen = (chosen[turn % len(chosen)],)
        metafunc.parametrize("framework", chosen, indirect=True)


@pytest.fixture
def framework(request: pytest.FixtureRequest) -> Iterator[devices.Maker]:
    """Makes the arrays of the test."""
    with devices.using_framework(request.param) as maker:
        yield maker
    if devices.KIND == devices.STUB:
        found, watch.violations[:] = [*watch.violations], []
        assert not found


@pytest.fixture
def torch(framework: devices.Maker) -> Any:
    """PyTorch, whose arrays the test has."""
    del framework
    return pytest.importorskip("torch", reason="torch is not installed")
