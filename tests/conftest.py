"""Fixtures of all tests."""

import gc
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from support.ranks import Ranks, without_timing_guards

from sp_compile.lowering.library import tag_programs

# pytest hands its handlers to loggers that do not propagate. To torch's, a handler means that somebody collects traces,
# for whom it prints each graph after each pass: a third of the suite's time.
logging.getLogger("torch.__trace").propagate = True

without_timing_guards()
tag_programs()  # tests give operators to compilers whose caches outlive an edit of these

settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.register_profile("fuzz", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("suite")  # the same programs each time; `make properties` draws others

QUICK = """
tree/test_layers.py capture cost sharding/test_rules.py
canonical/test_eager_attention.py canonical/test_masks.py canonical/loops/test_reroll_graphs.py canonical/test_scan_idioms.py
attention/test_attend.py attention/test_attention_passes.py attention/masks/test_predicate.py
backend/test_explain.py backend/test_pass_form.py backend/test_passes.py
collectives/test_collectives.py collectives/permute/test_permute_all_to_all.py collectives/merge/test_merge_reductions.py
scan/test_scan_graphs.py scan/kernels/test_scan_table.py scan/kernels/test_scan_tree.py windows/test_halo_passes.py
tensor_parallel/test_tensor_parallel_graphs.py
""".split()
"""What `make quick` runs, as far as it needs no processes: each kind of pass and op once."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `sampled(every=k)`, every k-th case runs always and the others are slow; what is quick."""
    for item in items:
        place = item.path.relative_to(Path(__file__).parent).as_posix()
        if place.startswith(tuple(QUICK)) and "ranks" not in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.quick)
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            name = item.nodeid.partition("[")[0]
            if seen[name] % mark.kwargs["every"]:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage need look at it again."""
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
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test can import what is in examples/, whose `models` is no folder of tests."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    monkeypatch.delitem(sys.modules, "models", raising=False)
