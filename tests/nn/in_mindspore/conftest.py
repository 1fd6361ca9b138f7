"""Fixtures of the tests inside MindSpore."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def synchronous() -> Iterator[None]:
    """MindSpore waits for each operator, which takes a fifth of the time on small ones."""
    import mindspore

    mindspore.set_context(pynative_synchronize=True)
    yield
    mindspore.set_context(pynative_synchronize=False)
