"""What a run prints before and after its rounds: derived numbers, metrics and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headwater.common.settings.schema import Settings
from headwater.common.task_bundles.signed_bundle import unpacked
from headwater.server.operations.progress import print_result, print_settings
from headwater.server.operations.round_log import ROUNDS, row_to_dict
from tests.round_rows import row
from tests.task_bundles.bundles import new_key, publish_code

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


def test_a_signed_task_is_shown_with_its_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, _ = new_key(tmp_path / "signer.key")
    bundle, _ = publish_code(tmp_path, key, version=7)
    print_settings(Settings(task=unpacked(bundle, tmp_path / "tasks")), where="here")
    shown = capsys.readouterr()
    text = " ".join((shown.out + shown.err).split())
    assert text.startswith(f"Parity 7, {bundle.digest[:16]}, {tmp_path}")


def test_the_metrics_of_a_hostile_task_are_printed_as_they_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name that looks like rich's markup once ended the run with an error, and ESC was sent."""
    metrics = {"train_[/x]": 0.25, "train_a\x1b[2Jb": 0.5}
    fields = row_to_dict(row(2, "pi", metrics=metrics))
    (tmp_path / ROUNDS).write_text(json.dumps(fields) + "\n")
    print_result(Settings(out=tmp_path))
    shown = capsys.readouterr().out
    assert "train [/x] 0.2500" in shown
    assert r"train a\x1b[2Jb 0.5000" in shown
    assert "\x1b" not in shown
