"""Masked rounds in the simulator: the plain run's model up to rounding, and dropouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headwater.common.errors import SettingsError, TooFewSurvivors
from headwater.common.model.trained_model import MODEL
from headwater.common.settings.schema import Settings
from headwater.server.operations.round_log import read_rows
from headwater.server.rounds.run_state import Training
from headwater.server.secagg.masked_rounds import MaskedRounds
from headwater.simulation.run import run_engine

DEVICES = 8


def settings_of(out: Path, **changes: Any) -> Settings:
    return Settings.model_validate(
        {
            "task": "examples/digits.py:Digits",
            "rounds": 3,
            "threads": 1,
            "out": out,
            "plan": {"accumulation_steps": 2, "micro_batch_size": 4},
            "optimizer": {"name": "sgd", "learning_rate": 0.5},
            "simulation": {"clients": DEVICES},
            **changes,
        }
    )


def run(out: Path, **changes: Any) -> list[dict[str, Any]]:
    run_engine(settings_of(out, **changes), on_round=lambda row: None, resume=False)
    return read_rows(out)


def model_of(out: Path) -> torch.Tensor:
    return torch.cat([t.flatten() for _, t in sorted(load_file(out / MODEL).items())])


def test_masks_change_no_plan_of_few_unlike_devices_and_hardly_their_model(tmp_path: Path) -> None:
    """Without the counts of examples the planner plans the same; the bound is that of below."""
    unlike: dict[str, Any] = {"plan": {}, "simulation": {"clients": 6}, "rounds": 4}
    plain = run(tmp_path / "plain", **unlike)
    masked = run(tmp_path / "masked", secure={"aggregation": "semi-honest"}, **unlike)
    for row, other in zip(plain, masked, strict=True):
        quotas = {client["name"]: client["planned_examples"] for client in other["masked_clients"]}
        assert {client["name"]: client["num_examples"] for client in row["clients"]} == quotas
        assert sum(quotas.values()) == other["num_examples"] == 512
        assert min(quotas.values()) > 1
    gap = (model_of(tmp_path / "plain") - model_of(tmp_path / "masked")).abs().max()
    assert float(gap) <= 10 * len(plain) * 0.5 * (6 * 2.0**8 * 2.0**-31 + 2.0**-23)


@pytest.mark.parametrize("mode", ["semi-honest", "active"])
def test_a_masked_run_equals_the_plain_run_up_to_fixed_point_rounding(
    mode: str, tmp_path: Path
) -> None:
    """A mean of n devices is off by at most n c 2^-31 a coordinate; a step moves by the rate of it.

    c is the first clip bound, 2^8, at most: from then on it falls. Later steps see gradients of a
    model that is off already, which a few rounds of a smooth loss do not magnify tenfold.
    """
    plain, masked = run(tmp_path / "plain"), run(tmp_path / mode, secure={"aggregation": mode})
    for row in masked:  # what the server saw: noise, and a sum around zero
        total = sum(row["ring_masked"])
        assert max(row["ring_masked"]) < 2 * total / len(row["ring_masked"])
        assert row["ring_opened"][0] + row["ring_opened"][-1] == total
    error = DEVICES * 2.0**8 * 2.0**-31
    rounding = 2.0**-23  # of float32, in a step of a parameter below 1
    bound = 10 * len(plain) * 0.5 * (error + rounding)
    gap = (model_of(tmp_path / "plain") - model_of(tmp_path / mode)).abs().max()
    assert float(gap) <= bound
    for before, after in zip(plain, masked, strict=True):
        assert after["weight"] == before["weight"]
        assert after["num_examples"] == before["num_examples"]
        assert after["num_clipped"] == 0
        assert after["loss"] == pytest.approx(before["loss"], rel=1e-5)
        train = "train_accuracy"
        assert after["metrics"].get(train) == pytest.approx(before["metrics"].get(train), abs=1e-6)


def test_rows_of_a_masked_round_contain_no_value_of_a_single_device(tmp_path: Path) -> None:
    rows = run(tmp_path, secure={"aggregation": "semi-honest"})
    for row in rows:
        assert row["clients"] == []
        assert {key for client in row["masked_clients"] for key in client} == {
            "name",
            "planned_steps",
            "planned_micro_batch_size",
            "planned_examples",
            "seconds",
            "plan",
        }


@pytest.mark.slow
def test_a_sixteen_bit_ring_trains_to_about_the_same_loss(tmp_path: Path) -> None:
    rounds = {"rounds": 20}
    plain = run(tmp_path / "plain", **rounds)
    half = run(tmp_path / "half", secure={"aggregation": "semi-honest", "ring_bits": 16}, **rounds)
    first, last = plain[0]["loss"], plain[-1]["loss"]
    # Most of the way that the plain run went; in its last rounds rounding is part of the noise.
    assert half[-1]["loss"] < last + 0.2 * (first - last)
    assert half[-1]["bytes_up"] < 0.7 * plain[-1]["bytes_up"]


@pytest.mark.parametrize(("mode", "dropout"), [("semi-honest", 0.3), ("active", 0.15)])
@pytest.mark.slow
def test_masked_rounds_count_although_devices_vanish(
    mode: str, dropout: float, tmp_path: Path
) -> None:
    rows = run(
        tmp_path,
        rounds=6,
        secure={"aggregation": mode, "min_survivors": 0.5},
        cohort={"max_aborted_rounds": 50},
        simulation={"clients": 16, "dropout": dropout},
    )
    assert [row["round"] for row in rows] == list(range(1, 7))
    assert any(row["refused"] for row in rows)
    assert all(row["num_clients"] + len(row["refused"]) >= 16 for row in rows)


def test_too_many_dropouts_abort_the_round_and_finally_the_run(tmp_path: Path) -> None:
    with pytest.raises(TooFewSurvivors):
        run(
            tmp_path,
            secure={"aggregation": "semi-honest", "min_survivors": 1.0},
            cohort={"max_aborted_rounds": 3},
            simulation={"clients": 6, "dropout": 0.9},
        )


def test_an_aborted_session_is_followed_by_one_with_a_higher_number(tmp_path: Path) -> None:
    with pytest.raises(TooFewSurvivors):
        run(
            tmp_path,
            secure={"aggregation": "semi-honest", "min_survivors": 1.0},
            cohort={"max_aborted_rounds": 3},
            simulation={"clients": 6, "dropout": 0.9},
        )
    session = json.loads((tmp_path / "session.json").read_text())
    assert (session["round"], session["attempt"]) == (1, 3)


def test_settings_that_would_reveal_masked_updates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        run(tmp_path, secure={"aggregation": "semi-honest"}, evaluation={"on_devices": True})


def test_masked_rounds_at_a_learning_rate_of_0_are_left_out_and_the_schedule_goes_on(
    tmp_path: Path,
) -> None:
    """With T_max = 1 the rates are 0.5, 0, 0.5, 0: a plain run takes the same two steps."""
    cosine = {"name": "CosineAnnealingLR", "arguments": {"T_max": 1}}
    changes: dict[str, Any] = {"schedule": cosine, "rounds": 4}
    masked = run(tmp_path / "masked", secure={"aggregation": "semi-honest"}, **changes)
    assert [(row["round"], row["learning_rate"]) for row in masked] == [(1, 0.5), (3, 0.5)]
    plain = run(tmp_path / "plain", **changes)
    assert [row["learning_rate"] for row in plain] == [0.5, 0, 0.5, 0]


def test_a_masked_run_knows_that_its_model_is_at_rest_when_it_is_resumed(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, secure={"aggregation": "semi-honest"})
    first, second = (Training(settings, run_id=1) for _ in range(2))
    masked, again = first.features["secagg"], second.features["secagg"]
    assert isinstance(masked, MaskedRounds)
    assert isinstance(again, MaskedRounds)
    assert not masked.is_at_rest
    masked.summed_at = first.image.digest
    again.restore(json.loads(json.dumps(masked.to_json())), {})
    assert again.is_at_rest
    second.image.values_P.add_(1.0)
    assert not again.is_at_rest
