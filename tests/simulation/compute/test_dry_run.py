"""The prediction of many devices at once equals the simulation of each one, step by step."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.training.sampler import SamplerPosition, SamplerState
from headwater.common.local_training.local_terms import LocalTerms
from headwater.common.settings.sources import load
from headwater.simulation.compute.dry_run import predict_round
from headwater.simulation.fleet.devices import ClientPlan, Devices
from headwater.simulation.fleet.fleet_spec import with_fleet
from tests.plans import plan_of
from tests.tasks import TwoLayers

NUM_DEVICES, ROUND = 8, 3
NUM_EXAMPLES = 24  # of each device
DEVICE = """
[[device]]
examples_per_second = {speed}
memory_bytes = 1_000_000_000
upload_bytes_per_second = {speed}_000
micro_batch_seconds = {dispatch}
on_battery = {on_battery}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "fleet.toml").write_text(
        "".join(
            DEVICE.format(speed=2 + part, dispatch=part % 3, on_battery=part % 2 / 2)
            for part in range(NUM_DEVICES)
        )
    )
    return folder


@functools.cache
def devices_of(folder: Path, *, step_by_step: bool, is_local: bool = False) -> Devices:
    """Return the fleet's devices; with slow links each is simulated step by step.

    What local steps hold in memory is the same in all rounds of a run.
    """
    spec = f"{TwoLayers.__module__.replace('.', '/')}.py:{TwoLayers.__name__}"
    chosen = {"task": spec, "simulation.fleet": folder / "fleet.toml", "seed": 5}
    devices = Devices(with_fleet(load(None, chosen)))
    if step_by_step:
        devices.__dict__["has_slow_links"] = True
    return devices


# Seconds by which a finish time or a deadline differs from what the device needs for its quota.
OFF = st.sampled_from([0.0, 0.0, 1e-12, -1e-12, 0.3, -0.3, 2.0, -2.0, 30.0])


# Where a device is in its epoch, and the places before that which it skipped.
PLACES = st.integers(0, NUM_EXAMPLES).flatmap(
    lambda offset: st.fixed_dictionaries(
        {
            "offset": st.just(offset),
            "skipped": st.sets(st.integers(0, NUM_EXAMPLES - 1)).map(
                lambda places: tuple(sorted(place for place in places if place < offset))
            ),
        }
    )
)


@st.composite
def cohorts(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw each device's plan and position; all plans of a round sum exactly, or none does."""
    is_local = draw(st.booleans())
    return [
        {
            "quota": draw(st.integers(1, 12) | st.integers(1, 3 * NUM_EXAMPLES)),
            "micro_batch_size": draw(st.integers(1, 5)),
            "finish": None if is_local else draw(st.none() | OFF),
            "local_steps": draw(st.integers(1, 20)) if is_local else None,
            "deadline": draw(st.none() | OFF),
            "share": draw(st.none() | st.sampled_from([1.0, 0.5, 0.2])),
            **draw(PLACES),
        }
        for _ in range(NUM_DEVICES)
    ]


def clients_of(cohort: list[dict[str, Any]]) -> list[ClientPlan]:
    clients = []
    for part, one in enumerate(cohort):
        quota, size = one["quota"], one["micro_batch_size"]
        seconds = -(-quota // size) * (part % 3) + quota / (2 + part)
        finish, deadline = one["finish"], one["deadline"]
        plan = plan_of(
            round=ROUND,
            run_seed=5,
            model_version=ROUND - 1,
            quota=quota,
            micro_batch_size=size,
            finish_seconds=None if finish is None else max(seconds + finish, 0.1),
            deadline_seconds=None if deadline is None else max(seconds + deadline, 0.1),
            share=one["share"],
            local_steps=one["local_steps"] or 1,
            local=LocalTerms() if one["local_steps"] else None,
        )
        clients.append(ClientPlan(str(part), part, {str(part): plan}))
    return clients


def predicted(devices: Devices, cohort: list[dict[str, Any]]) -> dict[str, tuple[object, ...]]:
    """Return all that is predicted of each device, and its position after the round."""
    for part, one in enumerate(cohort):
        place = SamplerPosition(epoch=1, offset=one["offset"], skipped=one["skipped"])
        devices.positions[part] = SamplerState(place=place)
    prediction = predict_round(devices, clients_of(cohort))
    assert (prediction.alone, prediction.dropouts) == ([], [])
    all_of = {}
    for at, client in enumerate(prediction.columns.clients):
        one_of = prediction.columns.some(np.array([at]))
        columns = [one_of.num_examples, one_of.num_owned]
        columns += [one_of.micro_batch_size, one_of.sizes, one_of.peak_bytes, one_of.local_step]
        columns += [one_of.positions(np.array([0]))]
        seconds = (one_of.seconds.tolist(), one_of.step_seconds.tolist())
        all_of[client.name] = (
            *(column.tolist() for column in columns),
            *(*seconds, one_of.reasons, list(one_of.vitals)),
            *(*one_of.places, devices.positions[client.part]),
        )
    return all_of


@pytest.mark.slow
@given(cohort=cohorts())
def test_the_prediction_of_many_devices_equals_that_of_each_step_by_step(
    folder: Path, cohort: list[dict[str, Any]]
) -> None:
    is_local = cohort[0]["local_steps"] is not None
    at_once, step_by_step = (
        predicted(devices_of(folder, step_by_step=is_one, is_local=is_local), cohort)
        for is_one in (False, True)
    )
    assert at_once == step_by_step


def test_a_round_without_clients_predicts_nothing(folder: Path) -> None:
    prediction = predict_round(devices_of(folder, step_by_step=False), [])
    assert len(prediction.columns) == 0
