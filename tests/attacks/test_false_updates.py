"""Finite but false updates in plain rounds: they neither end a model nor stop its rounds."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.errors import SettingsError
from headwater.common.messages import Plan, Update, UpdateReport
from headwater.common.model.parameters import build_model
from headwater.common.settings.sources import load
from headwater.common.task import MAX_METRICS, load_task
from headwater.common.transport.wire_pb2 import Instruction
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.aggregation.norm_watch import NormWatch
from headwater.server.fleet import BeyondNorm, UpdateRules
from headwater.server.rounds.open_round import OpenRound
from headwater.server.rounds.run_state import Training
from tests.attacks.raw import TASK, VECTOR, RawDevice, Run, cohort, head_of

HONEST = ("first", "second", "third", "fourth")
HEAD = Instruction(message_id="m", head_json=json.dumps({"round": 1}))
HUGE = torch.full((11,), 3e38).numpy().tobytes()
LARGE = (1000 * torch.arange(11, dtype=torch.float32)).numpy().tobytes()


async def attempt(run: Run, devices: dict[str, RawDevice], vectors: dict[str, bytes]) -> None:
    """Answer one attempt at a round by all devices, each with its vector."""
    for name, device in devices.items():
        plan = await device.plan()
        await device.reply(plan, head_of(plan, name), vectors.get(name, VECTOR))


def play(vector: bytes, *, rounds: int, attempts: int, **how: Any) -> Run:
    """Run rounds of four honest devices and one that sends ``vector`` in all of them."""

    async def all_rounds() -> Run:
        names = (*HONEST, "attacker")
        async with cohort(*names, rounds=rounds, min_clients=3, **how) as (run, *found):
            devices = dict(zip(names, found, strict=True))
            for device in devices.values():
                await device.describe()
            for _ in range(attempts):
                await attempt(run, devices, {"attacker": vector})
            await run.end()
            done: Run = run
            return done

    return asyncio.run(all_rounds())


@pytest.mark.parametrize("vector", [HUGE, LARGE], ids=["3e38", "1000 times the honest norm"])
def test_one_finite_vector_does_not_end_a_model(vector: bytes) -> None:
    is_huge = vector == HUGE  # refused at once, before any median is known
    run = play(vector, rounds=2, attempts=2 if is_huge else 3)
    honest = play(VECTOR, rounds=2, attempts=2)
    found, expected = (
        torch.frombuffer(bytearray(one.model()), dtype=torch.float32) for one in (run, honest)
    )
    assert bool(found.isfinite().all())
    assert [row.num_outliers for row in run.rows] == [1, 1]
    assert run.rows[0].num_aborted == (0 if is_huge else 1)
    assert float((found - expected).abs().max()) < 10.0
    assert math.isfinite(run.rows[-1].loss)


@pytest.mark.parametrize(("beyond", "num_clients"), [("refuse", 4), ("clip", 5)])
def test_an_outlier_is_refused_or_clipped_as_set(beyond: str, num_clients: int) -> None:
    run = play(LARGE, rounds=2, attempts=3, settings={"aggregation.beyond_norm": beyond})
    assert [row.num_clients for row in run.rows] == [num_clients] * 2
    assert [row.num_outliers for row in run.rows] == [1, 1]
    if beyond == "refuse":
        assert run.rows[1].refused["attacker"].startswith("OutlierUpdate")


def test_a_vector_of_3e38_ends_a_model_if_it_is_kept() -> None:
    keep = {"aggregation.beyond_norm": "keep", "optimizer.name": "sgd"}
    run = play(HUGE, rounds=2, attempts=2, settings=keep)
    assert float(torch.frombuffer(bytearray(run.model()), dtype=torch.float32).abs().max()) > 1e30


def test_an_outlier_is_kept_and_counted_if_the_settings_say_so() -> None:
    run = play(LARGE, rounds=2, attempts=2, settings={"aggregation.beyond_norm": "keep"})
    assert [row.num_outliers for row in run.rows] == [0, 1]
    assert [row.num_aborted for row in run.rows] == [0, 0]


@pytest.mark.parametrize("rule", ["clipped", "trimmed-mean", "median", "krum"])
def test_a_robust_rule_gives_the_honest_model(rule: str) -> None:
    how: dict[str, Any] = {
        "settings": {"aggregation.rule": rule, "aggregation.beyond_norm": "keep"}
    }
    run, honest = (play(one, rounds=2, attempts=2, **how) for one in (HUGE, VECTOR))
    found, expected = (
        torch.frombuffer(bytearray(one.model()), dtype=torch.float32) for one in (run, honest)
    )
    limit = 1.0 if rule == "clipped" else 0.0  # its direction counts, by the median norm
    assert float((found - expected).abs().max()) <= limit


def test_robust_rules_are_refused_with_masks_and_with_the_noise_scale() -> None:
    robust = {"task": "tests/tasks.py:TwoLayers", "aggregation.rule": "krum"}
    for other in ({"secure.aggregation": "active"}, {"plan.follow_noise_scale": True}):
        with pytest.raises(SettingsError, match="--aggregation krum"):
            Training(load(None, robust | other), run_id=1)


@pytest.mark.parametrize(
    "metrics",
    [
        {"m" * 65: 1.0},
        {f"m{number}": 1.0 for number in range(MAX_METRICS + 1)},
        {"m": 1e101},
        {"m": math.nan},
        {"m": -math.inf},
    ],
    ids=["a long name", "many names", "a large number", "not a number", "infinite"],
)
async def test_metrics_out_of_bounds_are_refused(metrics: dict[str, float], model: bytes) -> None:
    async with cohort("attacker", "honest") as (run, attacker, honest):
        await attacker.describe()
        await honest.describe()
        plan = await attacker.plan()
        await attacker.update(plan, metric_sums=metrics)
        await attacker.next_of("receipt")
        await honest.update(await honest.plan())
        await run.end()
        assert "attacker" in run.rows[0].refused
        assert run.model() == model


async def test_metrics_that_few_devices_report_leave_no_room_to_none_of_the_tasks() -> None:
    names = ("attacker", "first", "second")
    async with cohort(*names) as (run, *devices):
        for device in devices:
            await device.describe()
        for device in devices:
            own = {"accuracy": 4.0}
            junk = {f"a{number}": 1.0 for number in range(MAX_METRICS)}
            metrics = junk if device.name == "attacker" else own
            await device.update(await device.plan(), metric_sums=metrics)
        await run.end()
        found = run.rows[0].metrics
        assert "train_accuracy" in found
        assert sum(name.startswith("train_") for name in found) <= MAX_METRICS


@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=11, max_size=11),
    weight=st.integers(1, 8),
    beyond=st.sampled_from(("clip", "refuse")),
)
def test_no_bits_of_a_vector_move_the_mean_beyond_the_limit(
    bits: list[int], weight: int, beyond: BeyondNorm
) -> None:
    image = build_model(load_task(TASK), seed=0)
    total = CohortSum(image.layout)
    total.open(num_clients=2, planned_weight=16)
    plan = Plan(round=1, run_seed=0, model_version=0, quota=8, micro_batch_size=8)
    opened = OpenRound(
        plans={"honest": plan, "attacker": plan},
        total=total,
        rules=UpdateRules(
            norm_watch=NormWatch(multiple=10.0, largest_median=1.0), beyond_norm=beyond
        ),
        owned={"honest": 24, "attacker": 24},
    )
    values_P = torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32).copy())
    for name, vector_P, sent in (("honest", torch.ones(11), 8), ("attacker", values_P, weight)):
        head = json.loads(head_of(HEAD, name, num_examples=8, weight=sent))
        opened.take(Update(values_P=vector_P, report=UpdateReport.model_validate(head)))
    assert "honest" in opened.accepted
    mean_P = total.close()
    # Weighted by its share, the attacker's mean gradient has at most the norm of 10.
    assert float(mean_P.double().norm()) <= 11**0.5 + 10.0 + 1e-3
