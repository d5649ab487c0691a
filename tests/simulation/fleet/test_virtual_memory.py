"""Virtual memory: linear peaks, a limit, and the margin that a device keeps below it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.client.device.interfaces import Hardware
from headwater.client.memory.peak_model import GUARD_SHARE
from headwater.client.trainer.run_trainer import run_trainer
from headwater.client.training.context import Identity
from headwater.common.estimates.linear_fit import Line
from headwater.common.model.layout import ModelLayout
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.operations.round_log import read_rows
from headwater.simulation.fleet.profiles import SimulatedDevice
from headwater.simulation.fleet.virtual_hardware import (
    IDLE_BYTES,
    VirtualHardware,
    virtual_hardware,
)
from headwater.simulation.fleet.virtual_memory import VirtualMemory
from headwater.simulation.reports.fleet_summary import memory_line, peak_memory
from headwater.simulation.run import run_engine

TASK = "examples/synthetic.py:Synthetic"
KEPT_BYTES = 4 * (32 * 512 + 32 * 4 + 512)  # the hidden layer, the readings and the hidden mean


def memory(
    limit_bytes: int, *, base_bytes: int = 1000, each: float | None = 100.0
) -> VirtualMemory:
    made = VirtualMemory(limit_bytes=limit_bytes, base_bytes=base_bytes)
    made.bytes_per_example = each
    return made


def test_peaks_are_linear_and_the_limit_is_the_device_s() -> None:
    one = memory(2000)
    assert one.line == Line(base=1000.0, each=100.0)
    assert one.limit_bytes() == 2000
    for size in (1, 7, 10):
        one.begin(size)
        assert one.end(size) == 1000 + 100 * size


def test_a_micro_batch_over_the_limit_fails_and_counts_in_the_next_peak() -> None:
    one = memory(2000)
    with pytest.raises(MemoryError, match="11 examples"):
        one.begin(11)
    one.begin(5)
    assert one.end(5) == 2100
    one.begin(5)
    assert one.end(5) == 1500


@pytest.mark.parametrize(
    ("limit_bytes", "fitting"),
    [(2000, int((2000 * GUARD_SHARE - 1000) / 100)), (1100, 0), (1000, 0), (10, 0)],
)
def test_the_fitting_size_has_the_margin_of_a_real_process(limit_bytes: int, fitting: int) -> None:
    one = memory(limit_bytes)
    assert int(one.fitting(1) or 0.0) == fitting
    if fitting:
        one.begin(fitting)


def test_without_a_measured_example_every_micro_batch_fits() -> None:
    one = memory(2000, each=None)
    assert (one.line, one.fitting(1)) == (None, None)
    one.begin(10**6)
    assert one.end(10**6) == 1000


def test_checkpointing_lowers_the_line_and_slows_the_clock_by_a_third() -> None:
    device = SimulatedDevice(
        profile="one",
        cores=1,
        relative_speed=1,
        memory_bytes=IDLE_BYTES + 1000,
        upload_bytes_per_second=1e6,
        examples_per_second=1,
        micro_batch_seconds=0,
    )
    machine = VirtualHardware(device, 0)
    machine.memory.bytes_per_example = 100.0
    machine.clock.worked(3)
    assert machine.clock.seconds() == 3
    machine.memory.use_checkpointing(40.0)
    assert machine.memory.line == Line(base=float(IDLE_BYTES), each=40.0)
    machine.clock.worked(3)
    assert machine.clock.seconds() == 3 + 3 * 4 / 3


def machine_of(part: int, settings: Settings) -> tuple[Identity, Hardware]:
    layout: ModelLayout = run_trainer(settings).image.layout
    identity = Identity(name=str(part), data=None, part=part, num_parts=3)
    return identity, virtual_hardware(identity, settings, layout)


def test_hardware_built_for_a_plan_has_the_memory_of_hardware_built_for_a_description() -> None:
    settings = load(None, {"task": TASK, "simulation.clients": 3})
    _, measured_late = machine_of(1, settings)
    identity, measured = machine_of(1, settings)
    trainer = run_trainer(settings)
    trainer.measure(identity, measured)
    assert measured_late.vitals() == measured.vitals()
    line = measured_late.memory.line
    assert line is not None
    num_bytes = 2 * 4 * trainer.image.layout.num_parameters
    assert line.base == IDLE_BYTES + num_bytes
    # Beside the three there are views, losses and labels of some bytes an example.
    assert KEPT_BYTES <= line.each / 2 <= 1.02 * KEPT_BYTES


def run(folder: Path, memory_mib: float, **overrides: Any) -> tuple[Settings, list[dict[str, Any]]]:
    text = "[[device]]\nexamples_per_second = 100\nupload_bytes_per_second = 1e6\n"
    (folder / "fleet.toml").write_text(f"{text}memory_bytes = {int(memory_mib * 2**20)}\n")
    chosen = {
        "task": TASK,
        "rounds": 2,
        "threads": 1,
        "out": folder / "out",
        "simulation.fleet": folder / "fleet.toml",
        "simulation.clients": 1,
        **overrides,
    }
    settings = load(None, chosen)
    run_engine(settings, on_round=lambda _: None, resume=False)
    return settings, read_rows(folder / "out")


def test_rows_contain_virtual_peaks_and_the_planner_keeps_its_margin(tmp_path: Path) -> None:
    settings, rows = run(tmp_path, 320, **{"plan.effective_batch_size": 100})
    for row in rows:
        (client,) = row["clients"]
        assert "memory-bound" in client["plan"]
        assert IDLE_BYTES < client["peak_bytes"] <= 320 * 2**20 * settings.plan.memory_fraction


def test_a_device_reduces_a_micro_batch_size_that_would_exceed_its_limit(
    tmp_path: Path,
) -> None:
    chosen = {"plan.micro_batch_size": 400, "plan.effective_batch_size": 400}
    _, rows = run(tmp_path, 282, **chosen, **{"plan.memory_fraction": 1.0})
    found = peak_memory(rows, lambda name: 282 * 2**20)
    assert found is not None
    assert (found.name, found.over, found.too_small) == ("0", frozenset(), frozenset())
    assert found.peak_bytes <= GUARD_SHARE * 282 * 2**20
    assert all(row["clients"][0]["micro_batch_size"] < 100 for row in rows)
    assert all(row["num_examples"] == 400 for row in rows)
    assert memory_line(found) == "device 0 was the fullest, at 90% of 296 MB; 0 ever over the limit"


def test_a_device_whose_memory_fits_no_example_is_refused(tmp_path: Path) -> None:
    text = "[[device]]\nexamples_per_second = 100\nupload_bytes_per_second = 1e6\n"
    limits = [240 * 2**20, 400 * 2**20]
    tables = [f"{text}memory_bytes = {limit}\n" for limit in limits]
    (tmp_path / "fleet.toml").write_text("".join(tables))
    chosen = {
        "task": TASK,
        "rounds": 2,
        "threads": 1,
        "out": tmp_path / "out",
        "simulation.fleet": tmp_path / "fleet.toml",
        "simulation.clients": 2,
    }
    run_engine(load(None, chosen), on_round=lambda _: None, resume=False)
    rows = read_rows(tmp_path / "out")
    assert all(row["refused"]["0"].startswith("OutOfMemory: ") for row in rows)
    found = peak_memory(rows, lambda name: limits[int(name)])
    assert found is not None
    assert (found.name, found.over, found.too_small) == ("1", frozenset(), frozenset({"0"}))
    assert "1 (0) too small for a single example" in memory_line(found)
