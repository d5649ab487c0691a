"""Where settings come from, and what a run without --out gets."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import default_out


def test_runs_that_begin_in_the_same_second_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20261123-142312")
    settings = Settings.model_validate({"task": "examples/digits.py:Digits"})
    found = []
    for _ in range(3):
        found.append(default_out(settings))
        found[-1].mkdir(parents=True)
    first = Path("runs/digits-20261123-142312")
    assert found == [first, Path(f"{first}-2"), Path(f"{first}-3")]
