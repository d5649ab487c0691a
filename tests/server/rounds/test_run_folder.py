"""The server refuses a wrong folder for its run before it listens."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import headwater
from headwater.common.errors import PrivacySpent, RunFolderGone, SettingsError
from headwater.server.privacy.spent_budget import PRIVACY_FILE
from tests.tasks import TwoLayers

PRIVATE = {"privacy.epsilon": 8.0, "plan.accumulation_steps": 2, "plan.micro_batch_size": 4}


def private_run(folder: Path) -> Path:
    out = folder / "out"
    headwater.simulate(TwoLayers, clients=2, rounds=2, out=out, settings=PRIVATE, progress=False)
    return out


def serve(out: Path, **given: object) -> None:
    headwater.serve(TwoLayers, listen="127.0.0.1:0", out=out, **given)  # type: ignore[arg-type]


def test_a_resumed_server_says_that_its_epsilon_is_spent_before_it_listens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = private_run(tmp_path)
    file = out / PRIVACY_FILE
    spent = json.loads(file.read_text())
    spent["sums"].append({"noise_multiplier": 0.1, "count": 1})  # a round that a crash undid
    file.write_text(json.dumps(spent))
    with pytest.raises(PrivacySpent):
        serve(out, resume=True, rounds=5)
    assert "listening" not in capsys.readouterr().out


def test_a_server_says_that_its_folder_holds_a_run_before_it_listens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = private_run(tmp_path)
    with pytest.raises(SettingsError, match="already holds a run of 2 rounds"):
        serve(out)
    assert "listening" not in capsys.readouterr().out


@pytest.mark.parametrize("kept", ["rounds.jsonl", "settings.toml", None])
def test_a_file_that_vanishes_as_it_is_written_is_called_a_removal(
    kept: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever removes a folder removes its files one by one, and the folder last."""
    out, sync = tmp_path / "out", os.fsync

    def remove_meanwhile(descriptor: int) -> None:
        sync(descriptor)
        if not list(out.glob("checkpoint*.part")):
            return
        for path in out.iterdir():
            if path.name != kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if kept is None:
            out.rmdir()

    monkeypatch.setattr(os, "fsync", remove_meanwhile)
    with pytest.raises(RunFolderGone, match="out was removed while the run went on"):
        headwater.simulate(TwoLayers, clients=2, rounds=2, out=out, progress=False)
