"""Fixtures of all tests."""

import gc
import logging
import os
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from support.ranks import CPP_FLAGS_OF_TESTS, Ranks, configure_torch

from sp_compile.lowering.base.library import tag_programs

# pytest adds its handlers to loggers that do not propagate. With a handler, torch's trace logger prints each graph after
# each pass, which takes a third of the suite's time.
logging.getLogger("torch.__trace").propagate = True

configure_torch()
tag_programs()  # caches of compilers must not outlive an edit of the operators

settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.register_profile("fuzz", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("suite")  # fixed programs; `make properties` draws others

QUICK = """
tree/test_layers.py capture cost sharding/test_rules.py
canonical/attention/test_eager_attention.py canonical/attention/test_masks.py canonical/loops/test_reroll_graphs.py canonical/test_scan_idioms.py
attention/test_attend.py attention/test_attention_passes.py attention/masks/test_predicate.py
backend/test_explain.py backend/test_pass_form.py backend/test_passes.py
collectives/test_collectives.py collectives/permute/test_permute_all_to_all.py collectives/merge/test_merge_reductions.py
scan/test_scan_graphs.py scan/kernels/test_scan_table.py scan/kernels/test_scan_blocked.py windows/test_halo_passes.py
tensor_parallel/test_tensor_parallel_graphs.py
""".split()
"""Tests of `make quick`, if they need no processes: each kind of pass and op once."""


def pytest_configure(config: pytest.Config) -> None:
    """Compile kernels of scans without vectorization, in half of the time, unless slow tests run."""
    if "not slow" in config.option.markexpr:
        os.environ[CPP_FLAGS_OF_TESTS] = "-O1"
        configure_torch()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `make test-slow`."""
    parser.addoption("--slow-cases", type=int, help="run at most this many slow cases of each test (default: all)")
    parser.addoption("--slow-seed", type=int, default=0, help="seed of the choice of `--slow-cases`")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Add a second variant, `[inductor...]`, to tests marked `as_users_run`: models are compiled as users do."""
    if metafunc.definition.get_closest_marker("as_users_run"):
        if "as_users_run" not in metafunc.fixturenames:
            metafunc.fixturenames.append("as_users_run")
        metafunc.parametrize("as_users_run", [False, True], indirect=True, ids=["aot_eager", "inductor"])


def is_as_users_run(item: pytest.Item) -> bool:
    """Return True if the item is such a variant."""
    return bool(getattr(item, "callspec", None) and item.callspec.params.get("as_users_run"))


def keep_chosen(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep those inductor variants that the mark of their test names; they are slow only if the mark says so."""
    deselected: list[pytest.Item] = []
    for item in items[:]:
        if not is_as_users_run(item):
            continue
        chosen = item.get_closest_marker("as_users_run")
        if all(item.callspec.params[name] == value for name, value in chosen.kwargs.items()):
            item.own_markers = [mark for mark in item.own_markers if mark.name not in ("slow", "sampled")]
            if "slow" in chosen.args:
                item.add_marker(pytest.mark.slow)
        else:
            items.remove(item)
            deselected.append(item)
    config.hook.pytest_deselected(items=deselected)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases of a test marked `sampled(every=k)` as slow, but one of 6 * k; mark tests of `make quick`.

    A case of one rank, which exchanges nothing, is slow: the case after it is not, in its place.
    """
    keep_chosen(config, items)
    for item in items:
        place = item.path.relative_to(Path(__file__).parent).as_posix()
        if place.startswith(tuple(QUICK)) and "ranks" not in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.quick)
    seen: Counter[str] = Counter()
    postponed: Counter[str] = Counter()  # 1 if the next case of a test replaces one of one rank
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            name = item.nodeid.partition("[")[0]
            is_chosen = seen[name] % (6 * mark.kwargs["every"]) == 0 or postponed[name]  # so that it takes 10 minutes
            has_one_rank = 1 in [item.callspec.params.get(argument) for argument in ("n", "ranks")]
            if not is_chosen or has_one_rank:
                item.add_marker(pytest.mark.slow)
            postponed[name] = int(is_chosen and has_one_rank)
            seen[name] += 1
    drop_slow_cases(config, items)


def drop_slow_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep at most `--slow-cases` random slow cases of each test, the same ones for the same `--slow-seed`."""
    limit = config.getoption("--slow-cases")
    if limit is None:
        return
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    dropped: list[pytest.Item] = []
    for name, of_test in cases.items():
        rng = random.Random(f"{config.getoption('--slow-seed')} {name}")
        dropped += rng.sample(of_test, max(len(of_test) - limit, 0))
    ids = {item.nodeid for item in dropped}
    items[:] = [item for item in items if item.nodeid not in ids]
    config.hook.pytest_deselected(items=dropped)


def pytest_collection_finish() -> None:
    """Exclude everything imported so far from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Real Gloo ranks, started when first used: see ``ranks.py``."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture
def as_users_run(request: pytest.FixtureRequest, ranks: Ranks) -> Iterator[bool]:
    """Let ranks compile models with Inductor and all default options, except options that a test sets itself."""
    ranks.as_users_run = request.param
    yield request.param
    ranks.as_users_run = False


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make examples/ importable; its `models` takes the place of the tests' folder."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    monkeypatch.delitem(sys.modules, "models", raising=False)
