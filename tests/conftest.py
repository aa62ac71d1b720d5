"""Fixtures of all tests."""

from collections import Counter
from collections.abc import Iterator

import pytest
from support.ranks import Ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `sampled(every=k)`, every k-th case runs always and the others are slow."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            name = item.nodeid.partition("[")[0]
            if seen[name] % mark.kwargs["every"]:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Real Gloo ranks, started when first used: see ``ranks.py``."""
    pool = Ranks()
    yield pool
    pool.close()
