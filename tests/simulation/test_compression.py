"""Runs with compressed updates: each way of running, restarts, settings that do not go together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headwater.common.compression.terms import few_bits_bytes
from headwater.common.errors import SettingsError
from headwater.common.model.parameters import build_model
from headwater.common.model.trained_model import MODEL
from headwater.common.settings.sources import load
from headwater.common.task import load_task
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.run import run_engine

CHOSEN: dict[str, Any] = {
    "task": "examples/digits.py:Digits",
    "simulation.clients": 4,
    "plan.accumulation_steps": 2,
    "plan.micro_batch_size": 8,
    "rounds": 3,
    "threads": 1,
}


def simulate(out: Path, *, resume: bool = False, **changes: Any) -> list[RoundRow]:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    rows: list[RoundRow] = []
    settings = load(None, CHOSEN | {"out": out} | keys)
    run_engine(settings, on_round=rows.append, resume=resume)
    return rows


def model(out: Path) -> torch.Tensor:
    tensors = load_file(next(out.glob(MODEL)))
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def initial() -> torch.Tensor:
    built = build_model(load_task(CHOSEN["task"]), seed=0).model.state_dict()
    return torch.cat([built[name].flatten() for name in sorted(built)])


def test_a_resumed_run_sends_what_was_left_out_before_up_and_down(tmp_path: Path) -> None:
    both: dict[str, Any] = {"compression__up": "top-k", "compression__down": "int8"}
    simulate(tmp_path / "whole", **both)
    simulate(tmp_path / "halves", **both, rounds=2)
    simulate(tmp_path / "halves", **both, resume=True)
    assert torch.equal(model(tmp_path / "whole"), model(tmp_path / "halves"))


def test_without_feedback_the_model_is_another(tmp_path: Path) -> None:
    simulate(tmp_path / "with", compression__up="top-k", rounds=2)
    simulate(tmp_path / "without", compression__up="top-k", compression__feedback=False, rounds=2)
    assert not torch.equal(model(tmp_path / "with"), model(tmp_path / "without"))


def test_update_and_model_in_int8_take_a_fraction_of_the_bytes_from_the_first_round(
    tmp_path: Path,
) -> None:
    plain = simulate(tmp_path / "plain", rounds=2)[1]  # the first model is not sent
    small = simulate(tmp_path / "small", rounds=2, compression__up="int8", compression__down="int8")
    assert small[0].bytes_down < 0.4 * plain.bytes_down  # 9 bits of 32
    assert small[1].bytes_down < 0.4 * plain.bytes_down  # the first steps are coarse
    assert {row.bytes_up < 0.26 * plain.bytes_up for row in small} == {True}


def test_devices_that_missed_rounds_are_sent_little_more_than_one_difference(
    tmp_path: Path,
) -> None:
    """Six devices, two in a round: most of them hold a model that is some rounds old."""
    chosen: dict[str, Any] = {"simulation__clients": 6, "cohort__size": 2, "rounds": 12}
    plain = simulate(tmp_path / "plain", **chosen | {"rounds": 2})[1]
    rows = simulate(tmp_path / "down", **chosen, compression__down="int8")
    assert {row.num_clients for row in rows} == {2}
    late = rows[6:]
    assert sum(row.bytes_down for row in late) < 0.33 * len(late) * plain.bytes_down


def test_a_model_sent_as_differences_stays_close_to_the_servers_own(tmp_path: Path) -> None:
    """SGD: the model moves by gradients, which differ by bfloat16's rounding of the model."""
    plain: dict[str, Any] = {"optimizer__name": "sgd"}
    simulate(tmp_path / "plain", **plain)
    simulate(tmp_path / "down", **plain, compression__down="bfloat16")
    before, after = model(tmp_path / "plain"), model(tmp_path / "down")
    assert not torch.equal(before, after)
    assert (after - before).norm() < 0.01 * before.norm()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"privacy__noise_multiplier": 1.0}, "the epsilon is computed for updates that count in"),
        ({"secure__aggregation": "semi-honest"}, "masked updates are added in a ring"),
        (
            {
                "secure__aggregation": "semi-honest",
                "compression__up": "random-k",
                "compression__fraction": 0.001,
            },
            "devices mask at least 0.01 of the coordinates",
        ),
        ({"aggregation__rule": "median"}, "compares updates coordinate by coordinate"),
        (
            {"plan__follow_noise_scale": True, "plan__accumulation_steps": None},
            "the noise scale is estimated from the sum's norm",
        ),
        ({"simulation__compute": "fused"}, "each device encodes its own vector"),
    ],
)
def test_settings_that_compression_does_not_go_with_are_refused(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(SettingsError, match=text):
        simulate(tmp_path / "out", **{"compression__up": "top-k"} | changes)


MASKED: dict[str, Any] = {"secure__aggregation": "semi-honest", "secure__ring_bits": 8}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "8 bits have 127 for all members: enough for 7"),
        ({"cohort__size": 8}, "8 bits have 127 for all members: enough for 7"),
        ({"cohort__size": 4, "plan__accumulation_steps": None}, "a small part of the 127 steps"),
    ],
)
def test_a_masked_run_in_8_bits_is_refused_where_members_have_too_few_steps(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(SettingsError, match=text):
        simulate(tmp_path / "out", **MASKED, **changes)


def test_a_masked_run_in_8_bits_sums_its_cohort(tmp_path: Path) -> None:
    rows = simulate(tmp_path / "out", **MASKED, cohort__size=4, rounds=1)
    assert [row.num_clients for row in rows] == [4]


RANDOM: dict[str, Any] = {"compression__up": "random-k", "compression__fraction": 0.05}
SEMI_HONEST: dict[str, Any] = {"secure__aggregation": "semi-honest"}


@pytest.mark.parametrize("masked", [{}, SEMI_HONEST])
@pytest.mark.parametrize("down", ["off", "int4"])
def test_a_first_model_that_devices_cannot_build_is_sent(
    tmp_path: Path, masked: dict[str, Any], down: str
) -> None:
    chosen: dict[str, Any] = masked | {"rounds": 1, "compression__down": down}
    (built,) = simulate(tmp_path / "built", **chosen)
    file = str(tmp_path / "built" / MODEL)
    (loaded,) = simulate(tmp_path / "loaded", **chosen, model__initial=file)
    difference = loaded.bytes_down - built.bytes_down
    assert difference == pytest.approx(4 * 38_440, abs=100)


def test_masked_rounds_send_the_model_as_a_difference(tmp_path: Path) -> None:
    chosen: dict[str, Any] = SEMI_HONEST | {"rounds": 3}
    plain = simulate(tmp_path / "plain", **chosen)
    rows = simulate(tmp_path / "down", **chosen, compression__down="int4")
    saved = [whole.bytes_down - row.bytes_down for whole, row in zip(plain, rows, strict=True)]
    num_values = 9_610
    # Of the first model nothing is sent; a run's random number is some digits longer in one run.
    assert abs(saved[0]) < 100
    for each in saved[1:]:  # of four devices; the texts of plans differ by some bytes
        assert each == pytest.approx(
            4 * (4 * num_values - few_bits_bytes("int4", num_values)), 0.01
        )


@pytest.mark.parametrize("ring_bits", [32, 16])
def test_random_coordinates_under_masks_train_as_in_clear(tmp_path: Path, ring_bits: int) -> None:
    """In clear they travel in bfloat16, whose rounding is fed back."""
    chosen = RANDOM | {"optimizer__name": "sgd"}
    simulate(tmp_path / "clear", **chosen)
    masked = simulate(tmp_path / "masked", **chosen, **SEMI_HONEST, secure__ring_bits=ring_bits)
    before, after = model(tmp_path / "clear"), model(tmp_path / "masked")
    assert (after - before).norm() < 0.1 * (before - initial()).norm()
    num_sent = math.ceil(0.05 * len(before))
    vectors = 4 * num_sent * ring_bits // 8
    # Keys, shares and masked numbers of four devices take some more, as they do without.
    assert vectors <= masked[-1].bytes_up < vectors + 40_000


@pytest.mark.slow
def test_a_resumed_masked_run_sends_what_was_left_out_before(tmp_path: Path) -> None:
    chosen = RANDOM | SEMI_HONEST
    simulate(tmp_path / "whole", **chosen)
    simulate(tmp_path / "halves", **chosen, rounds=2)
    simulate(tmp_path / "halves", **chosen, resume=True)
    assert torch.equal(model(tmp_path / "whole"), model(tmp_path / "halves"))
    simulate(tmp_path / "without", **chosen, compression__feedback=False)
    assert not torch.equal(model(tmp_path / "whole"), model(tmp_path / "without"))


LOW_RANK: dict[str, Any] = {"compression__up": "low-rank", "compression__rank": 8}


@pytest.mark.parametrize("more", [{}, {"compression__values": "int4"}, SEMI_HONEST])
def test_a_resumed_low_rank_run_goes_on_with_the_columns_of_its_last_sum(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    chosen = LOW_RANK | more
    simulate(tmp_path / "whole", **chosen)
    simulate(tmp_path / "halves", **chosen, rounds=2)
    simulate(tmp_path / "halves", **chosen, resume=True)
    assert torch.equal(model(tmp_path / "whole"), model(tmp_path / "halves"))
    simulate(tmp_path / "other", **chosen, rounds=2)
    simulate(tmp_path / "other", **chosen | {"compression__rank": 6}, resume=True)
    assert not torch.equal(model(tmp_path / "whole"), model(tmp_path / "other"))


@pytest.mark.slow
def test_worker_processes_send_the_same_factors(tmp_path: Path) -> None:
    simulate(tmp_path / "one", **LOW_RANK, simulation__compute="one-by-one")
    workers: dict[str, Any] = {"simulation__workers": 2, "simulation__compute": "one-by-one"}
    simulate(tmp_path / "two", **LOW_RANK, **workers)
    assert torch.equal(model(tmp_path / "one"), model(tmp_path / "two"))


def test_masked_factors_have_the_sum_of_plain_ones(tmp_path: Path) -> None:
    """In the first round; later columns follow from sums that differ by a rounding."""
    sgd: dict[str, Any] = LOW_RANK | {"optimizer__name": "sgd", "plan__accumulation_steps": 2}
    sgd |= {"rounds": 1}
    simulate(tmp_path / "plain", **sgd)
    simulate(tmp_path / "masked", **sgd | SEMI_HONEST)
    plain, masked = model(tmp_path / "plain"), model(tmp_path / "masked")
    moved = (plain - initial()).norm()
    assert (plain - masked).norm() < 2.0**-7 * moved  # plain factors are rounded to bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_each_side_s_factors_have_the_steps_of_the_small_ring_that_suit_them(
    tmp_path: Path, scale: float
) -> None:
    """The sides have unlike numbers of values, and their sizes take turns."""
    task = tmp_path / "scaled.py"
    task.write_text(SCALED.format(scale=scale))
    chosen: dict[str, Any] = LOW_RANK | SEMI_HONEST | {"rounds": 6, "compression__feedback": False}
    chosen |= {"task": f"{task}:Scaled", "optimizer__name": "sgd"}
    chosen |= {"optimizer__learning_rate": 1e-3 / scale, "compression__rank": 24}
    simulate(tmp_path / "wide", **chosen)
    simulate(tmp_path / "small", **chosen, secure__ring_bits=16)
    wide, small = (load_file(tmp_path / name / MODEL)["0.weight"] for name in ("wide", "small"))
    begun = build_model(load_task(f"{task}:Scaled"), seed=0).model.state_dict()["0.weight"]
    assert (wide - small).norm() < 0.08 * (wide - begun).norm()  # 0.3 with steps in common


SCALED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Scaled:
    def new_model(self):
        return nn.Sequential(nn.Linear(2000, 100), nn.ReLU(), nn.Linear(100, 4))

    def train_examples(self, *, data, part, num_parts):
        random = torch.Generator().manual_seed(part)
        inputs = torch.randn(32, 2000, generator=random)
        return TensorDataset(inputs, inputs[:, :4].argmax(1))

    def loss_sum(self, model, batch):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return {scale} * loss, len(batch[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("values", "share"), [("bfloat16", 0.15), ("int4", 0.04)])
def test_low_rank_updates_train_in_few_bytes(tmp_path: Path, values: str, share: float) -> None:
    rounds: dict[str, Any] = {"rounds": 20, "optimizer__name": "adam"}
    plain = simulate(tmp_path / "plain", **rounds)
    small = simulate(tmp_path / "small", **rounds, **LOW_RANK, compression__values=values)
    assert small[-1].metrics["test_accuracy"] > plain[-1].metrics["test_accuracy"] - 0.04
    assert sum(row.bytes_up for row in small) < share * sum(row.bytes_up for row in plain)
    # Of four devices; the first model they have built.
    columns = [small[0].bytes_down, small[1].bytes_down - 4 * 38_440]
    assert columns == [4 * 8 * 64 // 2, 4 * 8 * 128 // 2]


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ({"compression__rank": 40}, "shortens no parameter"),
        (SEMI_HONEST | {"compression__rank": 1}, "mask at least"),
        ({"asynchronous__is_on": True}, "asynchronous rounds"),
        ({"aggregation__rule": "median"}, "--aggregation"),
        ({"secure__aggregation": "active"}, "active masks"),
    ],
)
def test_what_does_not_go_with_low_rank_is_refused(
    tmp_path: Path, chosen: dict[str, Any], text: str
) -> None:
    with pytest.raises(SettingsError, match=text):
        simulate(tmp_path, **LOW_RANK | chosen)


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        {"compression__up": "int8", "cohort__size": 2, "rounds": 4},
        {"compression__up": "int2", "compression__down": "int4", "cohort__size": 2, "rounds": 4},
        LOW_RANK | {"cohort__size": 2, "rounds": 4},
        LOW_RANK | SEMI_HONEST | {"cohort__size": 3, "rounds": 4},
        {"compression__up": "top-k", "cohort__size": 2, "rounds": 4},
        RANDOM | SEMI_HONEST | {"cohort__size": 3, "rounds": 4},
    ],
)
def test_devices_over_grpc_send_the_bits_that_simulated_devices_send(
    tmp_path: Path, chosen: dict[str, Any]
) -> None:
    """Some of four devices are in a round, so that others miss one and hold an older model."""
    chosen = {"compression__down": "int8", **chosen}
    calls = simulate(tmp_path / "calls", **chosen)
    wire = simulate(tmp_path / "wire", **chosen, simulation__engine="grpc")
    assert torch.equal(model(tmp_path / "calls"), model(tmp_path / "wire"))
    # A model has 38,440 bytes; the texts of plans and of masks have fewer.
    down = [abs(one.bytes_down - other.bytes_down) for one, other in zip(calls, wire, strict=True)]
    assert max(down) < 20_000
