"""What is foreseen of many devices at once is what each comes to on its walk."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headwater.client.training.micro_batches import SamplerPosition, SamplerState
from headwater.common.messages import Plan
from headwater.common.settings.sources import load
from headwater.simulation.compute.dry_run import rehearse
from headwater.simulation.fleet.devices import ClientPlan, Devices
from headwater.simulation.fleet.fleet_spec import with_fleet
from tests.tasks import TwoLayers

NUM_DEVICES, ROUND = 8, 3
DEVICE = """
[[device]]
examples_per_second = {speed}
memory_bytes = 1_000_000_000
upload_bytes_per_second = {speed}_000
micro_batch_seconds = {dispatch}
on_battery = {on_battery}
"""


@functools.cache
def fleet(folder: Path) -> Path:
    path = folder / "fleet.toml"
    path.write_text(
        "".join(
            DEVICE.format(speed=2 + part, dispatch=part % 3, on_battery=part % 2 / 2)
            for part in range(NUM_DEVICES)
        )
    )
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet")


@functools.cache
def kept(folder: Path, *, walks: bool) -> Devices:
    """Return the fleet's devices, which all walk if it is to be so: as if links could be slow."""
    spec = f"{TwoLayers.__module__.replace('.', '/')}.py:{TwoLayers.__name__}"
    chosen = {"task": spec, "simulation.fleet": fleet(folder), "seed": 5}
    devices = Devices(with_fleet(load(None, chosen)))
    if walks:
        devices.__dict__["has_slow_links"] = True
    return devices


# Seconds by which a finish, or a deadline, is off what the device needs for its quota.
OFF = st.sampled_from([0.0, 0.0, 1e-12, -1e-12, 0.3, -0.3, 2.0, -2.0, 30.0])


@st.composite
def cohorts(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw what each device is asked for, and where it is."""
    return [
        {
            "quota": draw(st.integers(1, 12)),
            "micro_batch_size": draw(st.integers(1, 5)),
            "finish": draw(st.none() | OFF),
            "deadline": draw(st.none() | OFF),
            "share": draw(st.none() | st.sampled_from([1.0, 0.5, 0.2])),
            "offset": draw(st.integers(0, 8)),
        }
        for _ in range(NUM_DEVICES)
    ]


def called_of(asked: list[dict[str, Any]]) -> list[ClientPlan]:
    found = []
    for part, one in enumerate(asked):
        quota, size = one["quota"], one["micro_batch_size"]
        seconds = -(-quota // size) * (part % 3) + quota / (2 + part)
        finish, deadline = one["finish"], one["deadline"]
        plan = Plan(
            round=ROUND,
            run_seed=5,
            model_version=ROUND - 1,
            quota=quota,
            micro_batch_size=size,
            finish_seconds=None if finish is None else max(seconds + finish, 0.1),
            deadline_seconds=None if deadline is None else max(seconds + deadline, 0.1),
            share=one["share"],
        )
        found.append(ClientPlan(str(part), part, plan))
    return found


def seen(devices: Devices, asked: list[dict[str, Any]]) -> dict[str, tuple[object, ...]]:
    """Return all that is foreseen of each device, and its place."""
    called = called_of(asked)
    for part, told in enumerate(asked):
        devices.positions[part] = SamplerState(
            place=SamplerPosition(epoch=1, offset=told["offset"])
        )
    found = rehearse(devices, called)
    assert (found.alone, found.dropouts) == ([], [])
    all_of = found.foreseen
    assert all_of is not None
    foreseen = {}
    for at, device in enumerate(all_of.called):
        one = all_of.some(np.array([at]))
        columns = [one.num_examples, one.num_owned, one.epoch, one.offset, one.micro_batch_size]
        columns += [one.sizes, one.peak_bytes]
        seconds = (one.seconds.tolist(), one.step_seconds.tolist())
        foreseen[device.name] = (
            *(column.tolist() for column in columns),
            *(*seconds, one.reasons, one.vitals, devices.positions[device.part]),
        )
    return foreseen


@given(asked=cohorts())
@hypothesis_settings(deadline=None, max_examples=150)
def test_what_is_foreseen_at_once_is_what_each_comes_to_on_its_walk(
    folder: Path, asked: list[dict[str, Any]]
) -> None:
    assert seen(kept(folder, walks=False), asked) == seen(kept(folder, walks=True), asked)


def test_at_the_pace_that_was_foreseen_nobody_has_to_walk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def walk(*given: object) -> None:
        raise AssertionError

    monkeypatch.setattr("headwater.simulation.compute.dry_run._walk", walk)
    one = {"quota": 7, "micro_batch_size": 2, "finish": 0.0, "deadline": 30.0, "share": 0.2}
    found = seen(kept(folder, walks=False), [one | {"offset": 0}] * NUM_DEVICES)
    assert [told[0] for told in found.values()] == [[7]] * NUM_DEVICES
