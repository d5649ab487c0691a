"""The fleet of examples/fleets/sixteenfold.toml: a common finish time, within each memory."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.common.task import load_task, open_train_examples
from headwater.server.operations.round_log import read_rows
from headwater.simulation.fleet.fleet_spec import fleet_spec, with_fleet
from headwater.simulation.reports.fleet_summary import SETTLING_ROUNDS, idle_time, peak_memory
from headwater.simulation.run import run_engine

ROOT = Path(__file__).parents[3]
TASK = "examples/synthetic.py:Synthetic"
NUM_DEVICES, SPREAD, FEWEST_EXAMPLES, BATCH = 60, 16, 500, 6000
ROUNDS = 6


def settings_of(out: Path, **overrides: Any) -> Settings:
    chosen = {
        "task": TASK,
        "rounds": ROUNDS,
        "threads": 1,
        "out": out,
        "optimizer.name": "sgd",
        "optimizer.learning_rate": 0.01,
        "evaluation.every_rounds": ROUNDS,
        "simulation.fleet": ROOT / "examples" / "fleets" / "sixteenfold.toml",
        **overrides,
    }
    return with_fleet(load(None, chosen))


@functools.cache
def sixteenfold(folder: Path, kind: str) -> tuple[Settings, list[dict[str, Any]]]:
    plans = {"planned": {"plan.effective_batch_size": BATCH}, "K 6": {"plan.accumulation_steps": 6}}
    settings = settings_of(folder / kind, **plans[kind])
    run_engine(settings, on_round=lambda _: None, resume=False)
    return settings, read_rows(folder / kind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sixteenfold")


def test_the_fleet_spans_a_factor_of_sixteen_in_speed_and_memory() -> None:
    settings = settings_of(Path("unused"))
    devices = [fleet_spec(settings).device(part) for part in range(settings.simulation.clients)]
    speeds = [one.examples_per_second or 0.0 for one in devices]
    memories = [one.memory_bytes for one in devices]
    assert len(devices) == NUM_DEVICES
    assert max(speeds) == SPREAD * min(speeds)
    assert max(memories) == SPREAD * min(memories)
    task = load_task(TASK)
    for part in (0, NUM_DEVICES - 1):
        examples = open_train_examples(task, data=None, part=part, num_parts=NUM_DEVICES)
        assert len(examples) >= FEWEST_EXAMPLES


@pytest.mark.slow
def test_planned_devices_idle_at_most_five_percent_after_the_third_round(folder: Path) -> None:
    _, rows = sixteenfold(folder, "planned")
    for row in rows[SETTLING_ROUNDS:]:
        idle = idle_time(row)
        assert row["num_examples"] == BATCH
        assert idle.share is not None
        assert idle.share <= 0.05
        assert idle.share_of_all <= 0.05
        assert idle.num_free == NUM_DEVICES


@pytest.mark.slow
def test_with_a_fixed_k_the_same_devices_idle_half_of_the_round(folder: Path) -> None:
    _, rows = sixteenfold(folder, "K 6")
    for row in rows[SETTLING_ROUNDS:]:
        assert (idle_time(row).share or 0.0) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["planned", "K 6"])
def test_no_device_ever_exceeds_its_memory(folder: Path, kind: str) -> None:
    settings, rows = sixteenfold(folder, kind)
    found = peak_memory(rows, lambda name: fleet_spec(settings).device(int(name)).memory_bytes)
    assert found is not None
    assert not found.over
    assert not found.too_small
    assert found.peak_bytes <= settings.plan.memory_fraction * found.limit_bytes
    for row in rows:
        assert row["refused"] == {}
        for client in row["clients"]:
            limit = fleet_spec(settings).device(int(client["name"])).memory_bytes
            assert client["peak_bytes"] <= settings.plan.memory_fraction * limit


@pytest.mark.slow
def test_micro_batches_grow_with_the_device_s_memory(folder: Path) -> None:
    settings, rows = sixteenfold(folder, "planned")
    sizes = {
        fleet_spec(settings).device(int(client["name"])).memory_bytes: client["micro_batch_size"]
        for client in rows[-1]["clients"]
        if "memory-bound" in client["plan"]
    }
    smallest = min(fleet_spec(settings).device(part).memory_bytes for part in range(NUM_DEVICES))
    assert 2 <= sizes[smallest] <= 8
    assert len(sizes) >= 3
    assert [sizes[limit] for limit in sorted(sizes)] == sorted(sizes.values())
    fast_and_small = [
        client
        for client in rows[-1]["clients"]
        if client["micro_batch_size"] == sizes[smallest] and client["num_examples"] > 50
    ]
    assert all(client["accumulation_steps"] > 10 for client in fast_and_small)
    assert fast_and_small
