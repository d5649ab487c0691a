"""Rounds with a common finish: with jitter, devices stop together and sum the planned examples."""

from __future__ import annotations

import functools
import statistics
from pathlib import Path
from typing import Any

import pytest

from headwater.common.settings.sources import load
from headwater.server.operations.round_log import read_rows
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.reports.fleet_summary import SETTLING_ROUNDS, idle_time
from headwater.simulation.run import run_engine

BATCH, ROUNDS, JITTER = 240, 7, 0.3
SPEEDS = (2, 4, 6, 8, 10, 10)
FAST = 1000  # times: a round is then too short to be bound by time
DEVICE = """
[[device]]
examples_per_second = {speed}
memory_bytes = 1_000_000_000
upload_bytes_per_second = 1_000_000_000_000
micro_batch_seconds = 0
jitter = {jitter}
"""


@functools.cache
def rows_of(folder: Path, kind: str, faster: int = 1, jitter: float = JITTER) -> list[Any]:
    """Run a fleet that takes six virtual seconds a round, or so many times less."""
    out = folder / f"{kind} {faster} {jitter}"
    fleet = folder / f"{faster} {jitter}.toml"
    fleet.write_text("".join(DEVICE.format(speed=s * faster, jitter=jitter) for s in SPEEDS))
    settings = load(
        None,
        {
            "task": "examples/synthetic.py:Synthetic",
            "rounds": ROUNDS,
            "threads": 1,
            "out": out,
            "plan.effective_batch_size": BATCH,
            "plan.micro_batch_size": 1,
            "secure.aggregation": kind,
            "evaluation.every_rounds": ROUNDS,
            "simulation.fleet": fleet,
        },
    )
    run_engine(with_fleet(settings), on_round=lambda _: None, resume=False)
    return read_rows(out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("finish")


def idle_of(rows: list[Any]) -> float:
    return statistics.fmean(idle_time(row).share or 0.0 for row in rows[SETTLING_ROUNDS:])


@pytest.mark.slow
def test_with_jitter_devices_idle_half_as_long_as_with_fixed_quotas(
    folder: Path,
) -> None:
    """The same devices a thousand times as fast draw the same jitter, and have fixed quotas."""
    bound, fixed = rows_of(folder, "off"), rows_of(folder, "off", FAST)
    assert all(" until " in client["plan"] for row in bound for client in row["clients"])
    assert not any(" until " in client["plan"] for row in fixed for client in row["clients"])
    assert idle_of(bound) <= 0.5 * idle_of(fixed)


@pytest.mark.slow
def test_rounds_sum_the_planned_examples_on_average_and_within_bounds(folder: Path) -> None:
    """Of k steps of deviation JITTER the sum deviates by JITTER sqrt(k): of all of them, here."""
    numbers = [row["num_examples"] for row in rows_of(folder, "off")]
    assert all(abs(number / BATCH - 1) <= 4 * JITTER / BATCH**0.5 for number in numbers[1:])
    all_told = BATCH * len(numbers)
    assert abs(sum(numbers) / all_told - 1) <= 4 * JITTER / all_told**0.5


@pytest.mark.slow
def test_at_the_predicted_speed_each_device_computes_its_quota(folder: Path) -> None:
    for row in rows_of(folder, "off", jitter=0.0):
        assert row["num_examples"] == BATCH
        assert {client["reason"] for client in row["clients"]} == {"quota"}


@pytest.mark.slow
def test_masked_devices_stop_by_time_too_and_none_is_refused(folder: Path) -> None:
    plain, masked = rows_of(folder, "off"), rows_of(folder, "semi-honest")
    assert [row["refused"] for row in masked] == [{}] * ROUNDS
    # In the first round only the reported speed is known, so both are planned alike.
    assert masked[0]["num_examples"] == plain[0]["num_examples"] != BATCH
    assert idle_of(masked) <= 2 * idle_of(plain)
