"""One text fifty times as long as the others kills no device.

Before lengths were known the device was killed in its check, or in training.
"""

from __future__ import annotations

import json

import pytest

from benchmarks.confine import Confinement, caged, can_make_cgroups
from tests.client.trainer.long_text import NUM_TEXTS
from tests.commands import python

LIMIT_BYTES = 400_000_000


@pytest.mark.slow
def test_a_device_leaves_out_by_name_the_text_that_its_memory_does_not_hold_and_trains() -> None:
    by = "cgroup" if can_make_cgroups() else "rlimit"
    with caged(Confinement(memory_bytes=LIMIT_BYTES, by=by)) as cage:  # type: ignore[arg-type]
        done = python("-m", "tests.client.trainer.long_text", preexec_fn=cage.enter)
        assert cage.num_kills() == 0
    found = json.loads(done.stdout)
    assert (found["num_examples"], found["num_refused"]) == (NUM_TEXTS - 1, 1)
    assert "it is too long for the memory of the device (position 0)" in done.stderr
    assert "position 0 has length 3,000" in done.stderr
