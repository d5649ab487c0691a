"""What is loaded before it is needed, as that is what one waits for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HELP = """
import json, sys
from headwater.simulation.cli import app
try:
    app({words})
except SystemExit as ended:
    assert ended.code == 0
sys.stderr.write(json.dumps(sorted(sys.modules)))
"""

FIRST_ROUND = """
import json, sys
from headwater.common.settings.sources import load
from headwater.simulation.run import run_engine
chosen = {{
    "task": "examples/digits.py:Digits",
    "rounds": 1,
    "simulation.clients": 10,
    "optimizer.name": "adam",
    "out": {out!r},
}}
def on_round(row):
    sys.stderr.write(json.dumps(sorted(sys.modules)))
run_engine(load(None, chosen), on_round=on_round, resume=False)
"""


def loaded(code: str) -> set[str]:
    """Run code that writes its modules to the standard error stream, and return them."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=560, check=False
    )
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stderr.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help"], ["sweep", "--help"]], ids=["simulate", "sweep"])
def test_help_loads_nothing_that_trains(words: list[str]) -> None:
    heavy = {"torch", "numpy", "flwr", "grpc", "cryptography", "sklearn", "matplotlib"}
    assert not loaded(HELP.format(words=words)) & heavy


@pytest.mark.slow
def test_the_first_round_needs_no_compiler_no_plot_no_flower_and_no_scikit_learn(
    tmp_path: Path,
) -> None:
    heavy = {"torch._dynamo", "torch._inductor", "sklearn", "scipy", "matplotlib", "flwr", "grpc"}
    found = loaded(FIRST_ROUND.format(out=str(tmp_path / "out")))
    assert "torch" in found
    assert not found & heavy
