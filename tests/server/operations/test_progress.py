"""What a run prints: its settings with the derived numbers, and a line for each round."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.common.settings.schema import Settings
from headwater.server.operations.progress import print_settings, round_line
from tests.round_rows import row


def test_the_progress_line_shows_a_noise_scale_that_is_followed() -> None:
    known = {"noise_scale": 1234.5, "target": 600}
    assert "noise scale 1,234" in round_line(row(1, "pi", target_by="noise scale", **known))
    assert "noise" not in round_line(row(1, "pi", target_by="examples", **known))
    assert "noise" not in round_line(row(1, "pi", target_by="noise scale", target=600))


ANNOUNCED: dict[str, tuple[dict[str, Any], str]] = {
    "K": (
        {"plan": {"accumulation_steps": 3, "micro_batch_size": 4}},
        "adam at 0.01; K 3 x micro-batch 4 = 12 examples per client",
    ),
    "examples": ({}, "adam at 0.01; the planner shares out 512 examples per round"),
    "tokens": (
        {"plan": {"tokens_per_update": 4096, "micro_batch_size": 4}},
        "4,096 tokens / (4 x 64) = 16 micro-batches in round 1",
    ),
    "a rate that follows the batch": (
        {"schedule": {"batch_scaling": "sqrt"}},
        "adam at 0.01 x sqrt(examples / 512);",
    ),
    "a rate that follows the tokens": (
        {"plan": {"tokens_per_update": 4096}, "schedule": {"batch_scaling": "linear"}},
        "adam at 0.01 x (tokens / 4,096);",
    ),
}


@pytest.mark.parametrize("case", ANNOUNCED)
def test_the_derived_numbers_are_printed(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes, words = ANNOUNCED[case]
    task = "examples/text_transformer.py:TextTransformer"
    print_settings(Settings.model_validate({"task": task, **changes}), where="here")
    shown = capsys.readouterr()
    assert words in " ".join((shown.out + shown.err).split())
