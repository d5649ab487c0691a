"""A task's samples: of tested rounds, shown where a run is shown, and harmless to the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from headwater.common.errors import TaskError
from headwater.server.features import sample_lines
from headwater.server.page.run_view import RunView
from headwater.server.report.report import write_report
from headwater.server.samples.task_samples import sample_of
from headwater.simulation.api import simulate
from tests.tasks import TwoLayers


class Sampled(TwoLayers):
    """Draws random numbers, and reports the model's mode."""

    def sample(self, model: nn.Module) -> Any:
        return f"{torch.rand(3).sum() > 0} {model.training} {torch.is_grad_enabled()}\x1b[31m"


class Failing(TwoLayers):
    def sample(self, model: nn.Module) -> Any:
        raise RuntimeError("no words")


class Silent(TwoLayers):
    def sample(self, model: nn.Module) -> Any:
        return None


def run(task: Any, folder: Path) -> None:
    simulate(task, clients=2, rounds=5, accumulation_steps=1, evaluate_every=2, out=folder)


def test_a_sample_of_each_tested_round_is_logged_and_the_newest_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO")
    run(Sampled(), tmp_path)
    rounds = [each for each in caplog.messages if each.startswith("sample after round")]
    assert [each.split(":")[0][-1] for each in rounds] == ["2", "4", "5"]
    assert "\x1b" not in "".join(rounds)
    found = json.loads((tmp_path / "sample.json").read_text())
    assert found == {"round": 5, "text": "True False False\x1b[31m"}


def test_a_sample_is_on_the_page_and_in_the_report(tmp_path: Path) -> None:
    run(Sampled(), tmp_path)
    from headwater.common.settings.sources import load

    line = "sample after round 5: True False False\x1b[31m"
    assert sample_lines(tmp_path) == [line]
    assert RunView(load(None, {"out": tmp_path})).notes() == [line]
    write_report(tmp_path)
    assert "sample after round 5: True False False" in (tmp_path / "report.html").read_text()


def test_a_run_with_samples_has_the_same_bits(tmp_path: Path) -> None:
    run(Sampled(), tmp_path / "sampled")
    run(TwoLayers(), tmp_path / "plain")
    found, plain = (
        load_file(tmp_path / name / "model.safetensors") for name in ("sampled", "plain")
    )
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_a_run_outlives_samples_that_fail_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(Failing(), tmp_path)
    failures = [each for each in caplog.messages if "no sample after round" in each]
    assert len(failures) == 1
    assert "no words" in failures[0]
    assert sample_lines(tmp_path) == []


def test_a_task_may_make_no_sample(tmp_path: Path) -> None:
    run(Silent(), tmp_path)
    assert sample_lines(tmp_path) == []


def test_a_sample_that_is_no_text_is_refused_and_leaves_the_mode_of_each_layer() -> None:
    task = TwoLayers()
    task.sample = lambda model: 3  # type: ignore[attr-defined]
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout().eval())
    with pytest.raises(TaskError, match="a text or None, found int"):
        sample_of(task, model)
    assert [module.training for module in model.modules()] == [True, True, False]


def test_a_sample_s_file_that_cannot_be_read_is_no_line(tmp_path: Path) -> None:
    for text in ("no JSON", "[1]", '{"round": null, "text": "a"}'):
        (tmp_path / "sample.json").write_text(text)
        assert sample_lines(tmp_path) == []
