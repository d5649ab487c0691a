"""Micro-batches: as large as the memory, the fastest size and the settings allow."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.settings import schema as settings
from headwater.common.wording import bytes_text
from headwater.server.planning import plan_reasons as reasons
from headwater.server.planning.device_estimates import EstimateColumns
from headwater.server.planning.memory_limit import SIZE_BOUNDS, SizeBound, micro_batch_sizes
from tests.server.planning.planned import MIB, ROWS, Candidate, assign, device, devices_of, plan


def size_of(one: Candidate, chosen: settings.PlanSettings) -> tuple[int, SizeBound]:
    sizes, bounds = micro_batch_sizes(EstimateColumns.of([one.estimate]), chosen)
    return int(sizes[0]), SIZE_BOUNDS[bounds[0]]


@given(
    rows=ROWS.filter(lambda rows: len(rows) > 1),
    target=st.integers(1, 40_000),
    more=st.floats(1, 100),
)
def test_a_device_with_more_memory_has_no_smaller_micro_batch(
    rows: list[dict[str, Any]], target: int, more: float
) -> None:
    before = size_of(devices_of(rows)[0], plan())[0]
    limit = rows[0]["memory_limit_bytes"]
    rows[0] = {**rows[0], "memory_limit_bytes": None if limit is None else int(limit * more)}
    assert size_of(devices_of(rows)[0], plan())[0] >= before


@pytest.mark.parametrize(("limit_mib", "fitting"), [(200, 6), (110, 1), (100, 1), (1, 1)])
def test_memory_bounds_the_micro_batch_and_says_so(limit_mib: int, fitting: int) -> None:
    # base + m x slope <= 0.8 x limit; one example is asked for in any case.
    one = device(
        each=1e-3,
        memory_limit_bytes=limit_mib * MIB,
        base_bytes=100 * MIB,
        bytes_per_example=10 * MIB,
    )
    assert fitting == max((limit_mib * 8 // 10 - 100) // 10, 1)
    assert size_of(one, plan()) == (fitting, SizeBound.MEMORY)
    work = assign([one], plan(), target=90)["pi"]
    examples = "1 example fits" if fitting == 1 else f"{fitting} examples fit"
    said = f"speed-bound: 90 examples; memory-bound: {examples} in {bytes_text(limit_mib * MIB)}"
    assert reasons.of_plan(work) == said


@given(st.integers(1, 4096 * MIB), st.integers(0, 512 * MIB), st.floats(1, 64 * MIB))
def test_what_is_planned_fits_the_memory_unless_it_is_one_example(
    limit: int, base: int, slope: float
) -> None:
    one = device(
        num_examples=10_000, memory_limit_bytes=limit, base_bytes=base, bytes_per_example=slope
    )
    size, _ = size_of(one, plan(max_micro_batch_size=10_000))
    assert size == 1 or base + size * slope <= 0.8 * limit * (1 + 1e-12)


def test_without_a_limit_the_micro_batch_is_the_maximum() -> None:
    assert size_of(device(num_examples=999), plan()) == (256, SizeBound.MAXIMUM)


def test_the_micro_batch_is_not_above_the_fastest_that_was_measured() -> None:
    work = assign([device(each=1e-3, fastest_micro_batch_size=32)], plan(), target=90)["pi"]
    assert (work.quota, work.micro_batch_size) == (90, 32)
    assert reasons.of_plan(work) == "speed-bound: 90 examples; fastest measured: 32"


def test_a_size_that_is_set_is_taken_though_another_is_faster() -> None:
    one = device(each=1e-3, fastest_micro_batch_size=32)
    assert size_of(one, plan(micro_batch_size=64)) == (64, SizeBound.SET)


def test_what_fits_in_one_micro_batch_is_not_accumulated() -> None:
    assigned = assign([device(num_examples=40)], plan(), target=512)["pi"]
    assert (assigned.quota, assigned.micro_batch_size) == (40, 40)
    assert reasons.of_plan(assigned) == "all its 40 examples; in one micro-batch"
