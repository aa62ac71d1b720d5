"""Select a few tests of every folder: `pytest -p measuring.sampling --of-each-folder 5`. PYTHONPATH=benchmarks."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--of-each-folder", type=int, default=1, help="number of tests of each folder; first cases")


@pytest.hookimpl(trylast=True)  # when -m has left out what it leaves out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    folders: dict[Path, dict[str, pytest.Item]] = {}
    for item in items:
        folders.setdefault(item.path.parent, {}).setdefault(item.nodeid.partition("[")[0], item)
    count = config.getoption("--of-each-folder")
    chosen = {item.nodeid for tests in folders.values() for item in evenly(list(tests.values()), count)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def evenly(tests: list[pytest.Item], count: int) -> list[pytest.Item]:
    """Return `count` tests at even distances, from the first to the last."""
    if len(tests) <= count:
        return tests
    return [tests[i * (len(tests) - 1) // max(count - 1, 1)] for i in range(count)]
