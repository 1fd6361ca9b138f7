"""How many processes share the tests."""

import gc
import os

import pytest
from subprocesses import IGNORED

MOST_WORKERS = 8  # each has several threads and compiles


def pytest_configure(config: pytest.Config) -> None:
    """Nothing is an error that an older PyTorch warns of."""
    for text in IGNORED:
        config.addinivalue_line("filterwarnings", text)


def pytest_xdist_auto_num_workers() -> int:
    """How many processes share the tests."""
    if hasattr(os, "sched_getaffinity"):
        return min(MOST_WORKERS, len(os.sched_getaffinity(0)))
    return min(MOST_WORKERS, os.cpu_count() or 1)


def pytest_collection_finish() -> None:
    """Objects of the tests themselves stay until the end: whatever compiles would look at each."""
    gc.freeze()
