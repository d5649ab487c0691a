"""Real devices in little memory: the planner sees what each has, and nobody is killed."""

import pytest

from benchmarks.confine import Confinement, can_make_cgroups
from benchmarks.confined import run

MB = 1_000_000
CAGES = pytest.mark.skipif(not can_make_cgroups(), reason="cgroups need root and controllers")
PLAN = {"plan.effective_batch_size": 300}


def kinds() -> list[object]:
    """Limits by the kernel's groups; where there are none, and by ``make test-long``, by rlimit."""
    is_second = pytest.mark.long if can_make_cgroups() else ()
    return [pytest.param("rlimit", marks=is_second), pytest.param("cgroup", marks=CAGES)]


@pytest.mark.slow
@pytest.mark.parametrize("by", kinds())
def test_a_device_in_little_memory_loses_nothing(by: str) -> None:
    """``run`` itself raises if a device was killed, or ended with an error."""
    fleet = [Confinement(memory_bytes=450 * MB, by=by), Confinement()]  # type: ignore[arg-type]
    figures = run(fleet, num_rounds=3, plan=PLAN)
    assert figures["dropouts"] == 0
    assert figures["lost_micro_batches"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("by", kinds())
def test_a_device_whose_limit_is_lowered_while_it_works_recovers(by: str) -> None:
    fleet = [Confinement(memory_bytes=900 * MB, by=by), Confinement()]  # type: ignore[arg-type]
    figures = run(fleet, num_rounds=6, plan=PLAN, lower=(0, 500 * MB))
    assert figures["dropouts"] == 0
    assert figures["lost_micro_batches"] == 0
