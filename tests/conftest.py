"""Fixtures of several test files."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator

import pytest

import fusestep

import gpu_arrays
from gpu_arrays import FRAMEWORKS, Maker

MOST_WORKERS = 8  # each has several threads and compiles


def pytest_xdist_auto_num_workers() -> int:
    """How many processes share the tests."""
    if hasattr(os, "sched_getaffinity"):
        return min(MOST_WORKERS, len(os.sched_getaffinity(0)))
    return min(MOST_WORKERS, os.cpu_count() or 1)


def pytest_collection_finish() -> None:
    """Objects of the tests themselves stay until the end: whatever compiles would look at each."""
    gc.freeze()


@pytest.fixture(params=FRAMEWORKS)
def maker(request: pytest.FixtureRequest) -> Iterator[Maker]:
    """Makes arrays of each framework; what a failed test has left pending is dropped."""
    yield gpu_arrays.maker(request.param)
    gpu_arrays.wait()
    try:
        fusestep.synchronize()
    except IndexError:
        warnings.warn("a test has left an index error pending", stacklevel=1)


@pytest.fixture
def numba_maker() -> Maker:
    """Where the framework does not matter."""
    return gpu_arrays.maker("numba")
