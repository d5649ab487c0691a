"""Local steps taken together give each device's own update, however unlike the devices' plans are.

Each coordinate differs by rounding only. Adam divides a gradient by its own size, so that one which
cancels to its rounding error may step the other way: updates are compared by their norms.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.common.local_training.local_terms import LocalTerms, local_terms
from headwater.common.messages import Update, UpdateReport
from headwater.common.settings.sources import load
from headwater.server.fleet import UpdateBlock
from headwater.simulation.compute.batched import BatchedCompute
from headwater.simulation.compute.one_by_one import OneByOne
from headwater.simulation.fleet.devices import ClientPlan, Devices
from headwater.simulation.fleet.fleet_spec import with_fleet
from tests.plans import plan_of
from tests.simulation.vectorised import weighed_task
from tests.simulation.vectorised.weighed_task import NUM_EXAMPLES

NUM_DEVICES, RATE = 5, 2.0**-5
# Some hundred steps of rounding to 2^-24 in a row, and an update that cancels to a tenth.
TOLERANCE = 1e-4
MOMENTUM: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
TERMS: list[dict[str, Any]] = [
    {},
    {"proximal": 0.5, "step_correction": "normalized"},
    {"arguments": MOMENTUM, "proximal": 0.5},
    {"optimizer": "adam", "step_correction": "normalized"},
    {"optimizer": "adamw", "proximal": 0.5},
]


@functools.cache
def computes(number: int) -> tuple[Devices, BatchedCompute]:
    """Return devices that take local steps by ``TERMS``, and the compute that takes them."""
    chosen = {f"local.{key}": value for key, value in TERMS[number].items()}
    given = {
        "task": f"{weighed_task.__file__}:Weighed",
        "simulation.clients": NUM_DEVICES,
        "local.steps": 2,
        "local.learning_rate": RATE,
        **chosen,
    }
    devices = Devices(with_fleet(load(None, given)))
    return devices, BatchedCompute(devices, first=0, with_norms=True)


@st.composite
def plans(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw the work of each device: quotas, steps and micro-batches that divide nothing evenly."""
    is_weighed = draw(st.booleans())
    return [
        {
            "quota": draw(st.integers(1, 2 * NUM_EXAMPLES)),
            "local_steps": draw(st.integers(1, 7)),
            "micro_batch_size": draw(st.integers(1, 5)),
            "weigh_as": draw(st.integers(1, 50)) if is_weighed else None,
        }
        for _ in range(NUM_DEVICES)
    ]


def clients_of(devices: Devices, work: list[dict[str, Any]]) -> list[ClientPlan]:
    local = devices.settings.local
    terms: LocalTerms = local_terms(local, devices.settings.plan)
    rate = local.rate
    common: dict[str, Any] = {"round": 1, "run_seed": 0, "model_version": 0, "local": terms}
    return [
        ClientPlan(str(part), part, {str(part): plan_of(**common, **own, local_learning_rate=rate)})
        for part, own in enumerate(work)
    ]


@pytest.mark.slow
@settings(max_examples=20)
@given(number=st.integers(0, len(TERMS) - 1), work=plans())
def test_local_steps_in_one_pass_give_each_device_s_own_update(
    number: int, work: list[dict[str, Any]]
) -> None:
    devices, batched = computes(number)
    clients, image = clients_of(devices, work), devices.trainer.image
    alone: dict[str, Update] = {}
    for answer in OneByOne(devices).train(clients, image, run_id=1, timeout_seconds=None):
        assert isinstance(answer, Update)
        alone[answer.name] = Update(values_P=answer.values_P.clone(), report=answer.report)
    total_P = torch.zeros(len(image.values_P), dtype=torch.float64)
    reports: dict[str, UpdateReport] = {}
    for batch in batched.train(clients, image, run_id=1, timeout_seconds=None):
        assert isinstance(batch, UpdateBlock)
        total_P += batch.vectors[0]
        reports |= {report.name: report for report in batch.reports}
        norms = batch.reports.norms_per_weight
        assert norms is not None
        for report, norm in zip(batch.reports, norms, strict=True):
            own = alone[report.name].values_P.norm().item() / report.weight
            assert norm == pytest.approx(own, rel=TOLERANCE)
    expected_P = torch.stack([one.values_P.double() for one in alone.values()])
    error = (total_P - expected_P.sum(0)).norm()
    assert error <= TOLERANCE * expected_P.norm(dim=1).sum()
    for name, one in alone.items():
        assert reports[name].reason == one.report.reason
        assert as_plain(reports[name]) == pytest.approx(as_plain(one.report), rel=1e-4, abs=1e-4)


def as_plain(report: UpdateReport) -> dict[str, Any]:
    """Return a report's numbers by name."""
    plain = {
        name: getattr(report, name)
        for name in (
            *("num_examples", "weight", "loss_sum", "micro_batch_size", "num_refused"),
            *("seconds", "num_steps", "summed_weight", "local_steps"),
        )
    }
    plain |= {f"metric {name}": value for name, value in report.metric_sums.items()}
    for number, step in enumerate(report.steps):
        for name in ("num_examples", "weight", "loss", "seconds", "peak_bytes", "gradient_norm"):
            plain[f"step {number}: {name}"] = getattr(step, name)
    return {name: value for name, value in plain.items() if value is not None}
