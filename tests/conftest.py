"""Fixtures of all tests."""

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Real Gloo ranks, started when first used: see ``ranks.py``."""
    pool = Ranks()
    yield pool
    pool.close()
