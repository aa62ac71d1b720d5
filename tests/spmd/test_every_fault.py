"""Each fault of the fuzzer's table on real ranks: error, step and later calls of every living rank."""

from __future__ import annotations

import pytest
from support.fuzz import faults
from support.fuzz.fault_table import FAULTS
from support.fuzz.outcomes import Outcome


@pytest.mark.slow  # of which test_faults.py and test_waits.py have a sample on ranks that are there already
@pytest.mark.parametrize(("seed", "fault"), list(enumerate(FAULTS)), ids=FAULTS)
def test_fault(seed: int, fault: str) -> None:
    result = faults.run(f"faults:{fault}:{seed}")
    assert result.outcome is (Outcome.REFUSED if FAULTS[fault].error else Outcome.EXACT), result
