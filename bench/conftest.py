"""The benchmark under pytest: one process, as others would disturb it."""

from __future__ import annotations


def pytest_xdist_auto_num_workers() -> int:
    """No processes that share the cases."""
    return 0
