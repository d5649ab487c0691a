"""What a run leaves behind, and whether its numbers are right."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.common.errors import StateError
from headwater.common.messages import Step, UpdateReport
from headwater.common.settings.schema import Settings
from headwater.server.operations.progress import print_settings, round_line
from headwater.server.rounds.round_row import (
    CURVES,
    EVENTS,
    NOISE,
    ROUNDS,
    Journal,
    RoundRow,
    client_row,
    read_rows,
)


def report(norms: list[float], weights: list[int]) -> UpdateReport:
    steps = tuple(
        Step(num_examples=w, weight=w, loss=1.0, gradient_norm=norm, seconds=0.5, peak_bytes=at)
        for at, (norm, w) in enumerate(zip(norms, weights, strict=True))
    )
    return UpdateReport(
        name="pi",
        round=1,
        num_examples=sum(weights),
        weight=sum(weights),
        loss_sum=2.0 * sum(weights),
        micro_batch_size=max(weights),
        seconds=3.0,
        steps=steps,
        reason="quota",
    )


def row(round_number: int, **changes: Any) -> RoundRow:
    plain: dict[str, Any] = {
        "round": round_number,
        "num_clients": 1,
        "num_invited": 2,
        "num_examples": 5,
        "weight": 5,
        "loss": 1.0 / round_number,
        "metrics": {"test_loss": 2.0, "test_accuracy": 0.5},
        "learning_rate": 0.1,
        "seconds": 0.1,
        "seconds_split": {"train": 0.1},
        "slowest_client_seconds": 0.1,
        "updates_per_hour": 36000.0,
        "bytes_up": 1,
        "bytes_down": 2,
        "num_scale_shifts": 0,
        "clients": [client_row(report([1.0, 1.5], [3, 2]), plan_reason="as set", local_steps=1)],
    }
    return RoundRow(**{**plain, **changes})


def written(folder: Path, rounds: int) -> None:
    journal = Journal(folder, resumed_round=0)
    for number in range(1, rounds + 1):
        journal.append(row(number))
    journal.close()


def test_a_row_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    written(tmp_path, 2)
    first, second = read_rows(tmp_path)
    assert (first["round"], second["round"]) == (1, 2)
    assert first["clients"][0]["step_gradient_norm"] == [1.0, 1.5]
    assert first["clients"][0]["loss"] == 2.0
    assert first["clients"][0]["peak_bytes"] == 1


@pytest.mark.parametrize("resumed", [0, 1])
def test_rows_behind_the_resumed_round_are_dropped(tmp_path: Path, resumed: int) -> None:
    written(tmp_path, 3)
    Journal(tmp_path, resumed_round=resumed).close()
    assert [found["round"] for found in read_rows(tmp_path)] == [*range(1, min(resumed, 3) + 1)]


def test_a_line_cut_off_by_a_crash_is_left_out_and_written_anew(tmp_path: Path) -> None:
    written(tmp_path, 2)
    file = tmp_path / ROUNDS
    file.write_text(file.read_text()[:-20])
    journal = Journal(tmp_path, resumed_round=1)
    journal.append(row(2))
    journal.close()
    assert [json.loads(line)["round"] for line in file.read_text().splitlines()] == [1, 2]


def test_reopening_a_journal_never_leaves_fewer_rows_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kept rows are written beside the old ones: a full disk must not cost the history."""
    written(tmp_path, 3)
    before = (tmp_path / ROUNDS).read_text()

    def full(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headwater.server.rounds.round_row.json.dumps", full)
    with pytest.raises(StateError, match="No space left"):
        Journal(tmp_path, resumed_round=2)
    assert (tmp_path / ROUNDS).read_text() == before


def test_a_file_in_the_folders_place_is_a_state_error(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(StateError):
        Journal(tmp_path / "out", resumed_round=0)


def test_the_variance_of_one_examples_gradient_is_estimated_without_bias() -> None:
    """Gradients are drawn from N(G, S): the mean over many devices must meet tr(S)."""
    rng = np.random.default_rng(0)
    deviation_P = np.array([0.5, 1.0, 2.0, 0.1])
    mean_P = np.array([1.0, -2.0, 0.0, 3.0])
    weights = [4, 4, 4, 3]
    estimates = []
    for _ in range(4000):
        draws_BP = rng.normal(mean_P, deviation_P, size=(sum(weights), 4))
        ends = np.cumsum(weights)
        norms = [float(np.linalg.norm(draws_BP[:end].sum(0))) for end in ends]
        found = client_row(report(norms, weights), plan_reason="", local_steps=1).gradient_variance
        assert found[0] is None
        estimates.append([value for value in found[1:] if value is not None])
    trace = float((deviation_P**2).sum())
    error = np.std(estimates, axis=0) / np.sqrt(len(estimates))
    assert (np.abs(np.mean(estimates, axis=0) - trace) <= 4 * error).all()


def test_examples_that_are_all_alike_have_no_variance() -> None:
    found = client_row(report([6.0, 12.0, 18.0], [2, 2, 2]), plan_reason="", local_steps=1)
    assert found.gradient_variance == [None, 0.0, 0.0]


def test_a_step_without_weight_gives_no_variance() -> None:
    found = client_row(report([0.0, 3.0, 3.0, 6.0], [0, 1, 0, 1]), plan_reason="", local_steps=1)
    assert found.gradient_variance == [None, None, None, 0.0]


def test_local_steps_give_no_variance_as_the_model_moves_between_them() -> None:
    found = client_row(report([6.0, 12.0], [2, 2]), plan_reason="", local_steps=2)
    assert found.gradient_variance == [None, None]


def drawn(folder: Path) -> tuple[int, int]:
    """Return width and height of the plot, read from its PNG header."""
    content = (folder / CURVES).read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_the_curves_are_drawn(tmp_path: Path) -> None:
    written(tmp_path, 3)
    width, height = drawn(tmp_path)
    assert width > height > 100


@pytest.mark.parametrize("loss", [-1.0, float("nan")])
def test_the_curves_are_drawn_whatever_the_loss(tmp_path: Path, loss: float) -> None:
    journal = Journal(tmp_path, resumed_round=0)
    for number in (1, 2):
        journal.append(row(number, loss=loss, metrics={}))
    journal.close()
    drawn(tmp_path)


def test_the_batch_has_a_panel_of_its_own_only_where_the_noise_scale_was_followed(
    tmp_path: Path,
) -> None:
    sizes = []
    for name, target_by in (("fixed", "examples"), ("followed", "noise scale")):
        journal = Journal(tmp_path / name, resumed_round=0)
        for number, scale in ((1, None), (2, 40.0), (3, 90.0)):
            journal.append(row(number, target=5, target_by=target_by, noise_scale=scale))
        journal.close()
        sizes.append(drawn(tmp_path / name))
    assert sizes[1][0] > sizes[0][0]


def test_rows_of_before_there_was_a_target_are_drawn_all_the_same(tmp_path: Path) -> None:
    written(tmp_path, 2)
    lines = [json.loads(line) for line in (tmp_path / ROUNDS).read_text().splitlines()]
    for line in lines:
        for name in ("target", "target_by", *NOISE):
            del line[name]
    (tmp_path / ROUNDS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / CURVES).unlink()
    Journal(tmp_path, resumed_round=2).close()
    drawn(tmp_path)


def test_a_plot_that_cannot_be_written_does_not_hide_the_error_before_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path, resumed_round=0)
    journal.append(row(1))
    (tmp_path / CURVES).mkdir()
    journal.close()


def test_a_run_without_a_round_draws_nothing(tmp_path: Path) -> None:
    Journal(tmp_path, resumed_round=0).close()
    assert not (tmp_path / CURVES).exists()


def test_tensorboard_events_are_written(tmp_path: Path) -> None:
    written(tmp_path, 1)
    (events,) = (tmp_path / EVENTS).iterdir()
    content = events.read_bytes()
    assert b"test_accuracy" in content
    assert b"effective_batch_size" in content
    # Nobody could measure the noise: a zero in its place would be a claim.
    assert not [name for name in NOISE if name.encode() in content]


def test_target_and_noise_go_to_tensorboard_where_they_are_known(tmp_path: Path) -> None:
    journal = Journal(tmp_path, resumed_round=0)
    journal.append(
        row(
            1,
            target=5,
            target_by="examples",
            noise_scale=40.0,
            gradient_variance=2.0,
            squared_gradient=0.05,
            heterogeneity=-0.1,
            measured_share=0.5,
        )
    )
    journal.close()
    (events,) = (tmp_path / EVENTS).iterdir()
    content = events.read_bytes()
    assert [name for name in ("target", *NOISE) if name.encode() not in content] == []


def test_the_progress_line_shows_the_noise_scale_where_it_is_followed() -> None:
    known = {"noise_scale": 1234.5, "target": 600}
    assert "noise scale 1,234" in round_line(row(1, target_by="noise scale", **known))
    assert "noise" not in round_line(row(1, target_by="examples", **known))
    assert "noise" not in round_line(row(1, target_by="noise scale", target=600))


ANNOUNCED: dict[str, tuple[dict[str, Any], str]] = {
    "K": (
        {"plan": {"accumulation_steps": 3, "micro_batch_size": 4}},
        "sgd at 0.1; K 3 x micro-batch 4 = 12 examples per client",
    ),
    "examples": ({}, "sgd at 0.1; the planner shares out 512 examples per round"),
    "tokens": (
        {"plan": {"tokens_per_update": 4096, "micro_batch_size": 4}},
        "4,096 tokens / (4 x 64) = 16 micro-batches in round 1",
    ),
    "a rate that follows the batch": (
        {"schedule": {"batch_scaling": "sqrt"}},
        "sgd at 0.1 x sqrt(examples / 512);",
    ),
    "a rate that follows the tokens": (
        {"plan": {"tokens_per_update": 4096}, "schedule": {"batch_scaling": "linear"}},
        "sgd at 0.1 x (tokens / 4,096);",
    ),
}


@pytest.mark.parametrize("case", ANNOUNCED)
def test_the_derived_numbers_are_announced(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes, words = ANNOUNCED[case]
    task = "examples/text_transformer.py:TextTransformer"
    print_settings(Settings.model_validate({"task": task, **changes}), where="here")
    shown = capsys.readouterr()
    assert words in " ".join((shown.out + shown.err).split())
