"""The notebook runs from its first cell to its last, and says what it claims."""

from __future__ import annotations

import json
from typing import Any

import matplotlib.figure
import pytest

import headwater
from tests.processes import ROOT

NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_its_model_is_good() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells), "it is kept without its output"
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)  # as a kernel does
    run, masked = names["run"], names["masked"]
    assert isinstance(run, headwater.Run)
    assert isinstance(run.plot(), matplotlib.figure.Figure)
    assert run.metrics["test_accuracy"] > 0.9
    assert masked.history[-1].loss < masked.history[0].loss
