"""docs/extend.md is held to its word: its blocks run in their order, as in a notebook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import headwater

DOC = Path(__file__).parents[2] / "docs" / "extend.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", DOC.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_notebook_of_the_doc_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    cells: dict[str, Any] = {}
    runs = []
    for block in BLOCKS:
        exec(block, cells)
        runs.append(cells["run"])
    first, _, _, by_rule, by_algorithm, by_feature, by_two, own = runs
    assert len(first.history) == 40
    assert first.metrics["test_accuracy"] > 0.9
    assert 0.3 < cells["best"].accuracy <= 1
    for run in (by_rule, by_algorithm):
        assert isinstance(run, headwater.Run)
        assert run.history[-1].loss < run.history[0].loss
    assert cells["common"].metrics["train_accuracy"] < 0.65
    assert own.metrics["train_accuracy"] > 0.9
    assert torch.is_tensor(cells["model"](torch.zeros(1, 3)))
    assert torch.is_tensor(first.model(torch.zeros(1, 3)))
    out = capsys.readouterr().out
    assert "<Run of Signs: 40 rounds" in out
    counts = re.findall(r"^\d+ tensor\(\[ ?([\d.]+), ?([\d.]+)\]", out, re.MULTILINE)
    used = [row.num_examples for row in by_feature.history]
    used += [
        sum(one.num_examples for one in row.clients if one.name in ("3", "7"))
        for row in by_two.history
    ]
    assert [float(zeros) + float(ones) for zeros, ones in counts] == used[:3]
