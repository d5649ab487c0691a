"""Runs that end early: divergence, a changed seed, unreadable test examples."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from headwater.common.errors import Diverged, SettingsError
from headwater.common.model.trained_model import MODEL
from headwater.common.settings.sources import load
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.run import run_engine

CHOSEN = {"task": "examples/digits.py:Digits", "simulation.clients": 3}


def test_a_diverged_run_ends_with_an_error_and_keeps_the_last_finite_model(tmp_path: Path) -> None:
    growing = {
        "optimizer.name": "sgd",
        "optimizer.learning_rate": 1e10,
        "optimizer.arguments": {"weight_decay": 1e30},
    }
    settings = load(None, CHOSEN | growing | {"rounds": 9, "out": tmp_path})
    with pytest.raises(Diverged, match="not finite"):
        run_engine(settings, on_round=lambda row: None, resume=False)
    for model in tmp_path.glob(MODEL):
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(model).values())


def test_a_resumed_run_with_another_seed_is_refused(tmp_path: Path) -> None:
    first = load(None, CHOSEN | {"rounds": 1, "out": tmp_path})
    run_engine(first, on_round=lambda row: None, resume=False)
    other = load(None, CHOSEN | {"rounds": 2, "seed": 5, "out": tmp_path})
    with pytest.raises(SettingsError, match="seed = 0, not 5"):
        run_engine(other, on_round=lambda row: None, resume=True)


def test_unreadable_test_examples_are_refused_before_the_first_round(tmp_path: Path) -> None:
    file = tmp_path / "blind.py"
    file.write_text(
        "from examples.digits import Digits\n\n"
        "class Blind(Digits):\n"
        "    def test_examples(self):\n"
        "        return open('/nowhere/test.csv')\n"
    )
    settings = load(None, {"task": f"{file}:Blind", "simulation.clients": 3, "out": tmp_path / "o"})
    with pytest.raises(SettingsError, match="test_examples found no data") as raised:
        run_engine(settings, on_round=lambda row: None, resume=False)
    assert "publish --with PATH" in str(raised.value.remedy)
    assert not (tmp_path / "o" / MODEL).exists()


@pytest.mark.slow
@pytest.mark.parametrize("clients", [20, 100])
def test_the_defaults_train_the_digits_to_above_95_percent(tmp_path: Path, clients: int) -> None:
    rows: list[RoundRow] = []
    settings = load(None, CHOSEN | {"simulation.clients": clients, "out": tmp_path})
    run_engine(settings, on_round=rows.append, resume=False)
    assert rows[-1].metrics["test_accuracy"] > 0.95
