"""Which round is the best, when a run stops, and which metric a name means."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.errors import SettingsError, UnknownMetric
from headwater.common.settings.schema import EvaluationSettings
from headwater.server.selection.model_selection import (
    DEFAULT_PATIENCE,
    ModelSelection,
    after_evaluation,
    check_criteria,
    full_name,
    is_minimised,
    restored,
    why_stopped,
)

NAN = math.nan


def chosen(**changes: object) -> EvaluationSettings:
    return EvaluationSettings.model_validate(changes)


def followed(settings: EvaluationSettings, values: Sequence[float]) -> list[ModelSelection]:
    """Return the state after each evaluation of test_accuracy."""
    states = [ModelSelection()]
    for number, value in enumerate(values, start=1):
        metrics = {"test_accuracy": value}
        states.append(after_evaluation(states[-1], settings, metrics, round_number=number))
    return states[1:]


@pytest.mark.parametrize(
    ("criterion", "values", "best"),
    [
        ("accuracy", [0.1, 0.3, 0.2], (2, 0.3)),
        ("min:accuracy", [0.1, 0.3, 0.05], (3, 0.05)),
        ("test_accuracy", [0.3, 0.3, 0.3], (1, 0.3)),
        ("accuracy", [NAN, 0.1, NAN], (2, 0.1)),
        ("accuracy", [NAN, NAN], (None, None)),
        ("accuracy", [-math.inf, -1.0], (2, -1.0)),
    ],
)
def test_the_best_round_is_the_first_with_the_best_number(
    criterion: str, values: list[float], best: tuple[int | None, float | None]
) -> None:
    state = followed(chosen(best=criterion), values)[-1].best
    assert state is not None
    assert (state.round, state.value) == best


@pytest.mark.parametrize(
    ("criterion", "is_lower_better"),
    [
        ("loss", True),
        ("test_loss", True),
        ("perplexity", True),
        ("absolute_error", True),
        ("rmse", True),
        ("accuracy", False),
        ("f1", False),
        ("wer", True),
        ("test_cer", True),
        ("MAE", True),
        ("nll", True),
        ("bits", True),
        ("ppl", True),
        ("fid", True),
        ("mape", True),
        ("Brier", True),
        ("brier_score", True),
        ("wordErrorRate", True),
        ("negative_log_likelihood", True),
        ("log_likelihood", False),
        ("top5_accuracy", False),
        ("recall@10", False),
        ("mAP", False),
        ("R2", False),
        ("macro/f1", False),
        ("accuracy_per_class", False),
        ("loss_per_token", True),
        ("max:loss", False),
        ("min:f1", True),
    ],
)
def test_a_metric_s_direction_is_that_of_its_name_unless_said_otherwise(
    criterion: str, is_lower_better: bool
) -> None:
    assert is_minimised(criterion) == is_lower_better


@pytest.mark.parametrize(
    "name", ["height", "score", "neg_mse", "error_reduction", "win_rate", "entropy", "latency"]
)
def test_a_metric_of_unknown_direction_is_asked_for_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"write min:{name} or max:{name}"):
        chosen(best=name)
    with pytest.raises(ValueError, match=f"write min:{name} or max:{name}"):
        chosen(stop_when=name)


@given(st.lists(st.integers(0, 9).map(float) | st.just(NAN), max_size=30), st.integers(1, 5))
def test_a_run_stops_after_patience_evaluations_without_a_new_maximum(
    values: list[float], patience: int
) -> None:
    settings = chosen(stop_when="accuracy", patience=patience)
    states = followed(settings, values)
    for number, state in enumerate(states, start=1):
        past = values[:number]
        gains = [
            at
            for at, value in enumerate(past)
            if all(not earlier >= value for earlier in past[:at]) and not math.isnan(value)
        ]
        num_since = number - 1 - gains[-1] if gains else number
        assert (why_stopped(state, settings) is not None) == (num_since >= patience)


def test_the_reason_names_the_metric_the_wait_and_the_best_round() -> None:
    settings = chosen(stop_when="accuracy", patience=2)
    reason = why_stopped(followed(settings, [0.5, 0.75, 0.7, 0.75])[-1], settings)
    assert reason == (
        "test_accuracy has not improved in 2 evaluations; its best is 0.75, in round 2"
    )


def test_the_patience_that_is_not_set_is_the_default() -> None:
    settings = chosen(stop_when="accuracy")
    states = followed(settings, [0.5] * (1 + DEFAULT_PATIENCE))
    assert [why_stopped(state, settings) is not None for state in states[-2:]] == [False, True]


def test_a_run_that_follows_nothing_never_stops() -> None:
    assert why_stopped(followed(chosen(), [0.5] * 99)[-1], chosen()) is None


@pytest.mark.parametrize(
    ("name", "metrics", "full"),
    [
        ("loss", ["train_loss", "test_loss", "held_out_loss"], "test_loss"),
        ("loss", ["train_loss", "held_out_loss"], "held_out_loss"),
        ("train_loss", ["train_loss", "test_loss"], "train_loss"),
        ("max:held_out_f1", ["test_f1", "held_out_f1"], "held_out_f1"),
    ],
)
def test_a_short_name_is_that_of_the_server_s_test_else_of_the_held_out_examples(
    name: str, metrics: list[str], full: str
) -> None:
    assert full_name(name, metrics) == full


def test_a_metric_that_never_appears_is_an_error_that_lists_those_that_do() -> None:
    with pytest.raises(UnknownMetric, match="metric f1; this run has test_accuracy, train_loss"):
        after_evaluation(
            ModelSelection(),
            chosen(stop_when="f1"),
            {"train_loss": 1.0, "test_accuracy": 1.0},
            round_number=1,
        )


def test_a_metric_that_is_absent_once_changes_nothing() -> None:
    settings = chosen(best="accuracy", stop_when="accuracy")
    before = followed(settings, [0.5, 0.4])[-1]
    assert after_evaluation(before, settings, {}, round_number=3) == before


def test_a_test_of_the_last_round_alone_may_be_the_best_and_counts_for_no_patience() -> None:
    settings = chosen(best="accuracy", stop_when="accuracy")
    before = followed(settings, [0.5, 0.4])[-1]
    for value in (0.3, 0.7):
        metrics = {"test_accuracy": value}
        after = after_evaluation(before, settings, metrics, round_number=3, is_extra=True)
        assert after.stop == before.stop
        assert after.best is not None
        assert after.best.value == max(value, 0.5)


def test_a_name_is_checked_before_the_first_round() -> None:
    check_criteria(chosen(best="accuracy", stop_when="test_loss"), ["accuracy"])
    check_criteria(chosen(best="train_f1"), None)
    check_criteria(chosen(best="max:anything", on_devices=True), None)
    check_criteria(chosen(), None)
    with pytest.raises(UnknownMetric, match="metric f1; this run has test_accuracy, test_loss"):
        check_criteria(chosen(best="f1"), ["accuracy"])
    with pytest.raises(UnknownMetric, match="held_out_loss"):
        check_criteria(chosen(best="held_out_loss"), ["accuracy"])


def test_a_run_without_evaluation_names_the_flag() -> None:
    with pytest.raises(SettingsError, match="--stop-when loss needs an evaluation"):
        check_criteria(chosen(stop_when="loss"), None)


def test_the_state_survives_a_checkpoint_unless_the_criterion_has_changed() -> None:
    settings = chosen(best="accuracy", stop_when="loss")
    state = after_evaluation(
        ModelSelection(), settings, {"test_accuracy": 0.5, "test_loss": NAN}, round_number=1
    )
    stored = json.loads(json.dumps(state.to_json()))
    assert restored(stored, settings) == state
    assert restored(stored, chosen(best="loss", stop_when="loss")).best is None
    assert restored({}, settings) == ModelSelection()


@pytest.mark.parametrize("text", ["", "a b", "min:", "avg:loss", "-loss", "min:max:loss"])
def test_a_criterion_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="min:NAME"):
        chosen(best=text)


def test_patience_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="--stop-when"):
        chosen(patience=3)
