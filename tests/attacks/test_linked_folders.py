"""A run's folder from a stranger, with links in it: what is written there stays there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import headwater
from headwater.common.errors import CheckpointCorrupt, SettingsError, StateError
from headwater.common.model.trained_model import read_model
from headwater.common.settings.sources import load_run
from headwater.server.operations.run_lock import FILE, RunLock
from headwater.server.report.period_summary import summary
from headwater.server.standby.shared_files import SharedFiles
from headwater.server.standby.shared_folder import FILES, SharedFolder
from headwater.server.standby.term_record import TermRecord
from headwater.server.succession.run_queue import submit, take_next
from tests.python_tasks import Signs


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of one round, beside a file that is none of its own."""
    out = tmp_path / "got"
    headwater.simulate(Signs, clients=2, rounds=1, out=out, progress=False)
    (tmp_path / "precious").write_text("mine")
    return out


@pytest.mark.parametrize("name", ["rounds.tables", "curves.png", "tensorboard", "sub/deep"])
def test_a_run_whose_folder_has_a_link_is_not_resumed(run: Path, name: str) -> None:
    link = run / name
    link.parent.mkdir(exist_ok=True)
    if link.is_dir():
        link.rename(run / "moved")
    link.unlink(missing_ok=True)
    link.symlink_to(run.parent / "precious")
    with pytest.raises(SettingsError, match="is a link to"):
        load_run(None, {"out": run}, resume=True)
    (run / "checkpoint.safetensors").unlink()
    with pytest.raises(SettingsError, match="is a link to"):
        headwater.simulate(Signs, clients=2, rounds=1, out=run, progress=False)
    assert (run.parent / "precious").read_text() == "mine"


@pytest.mark.parametrize("kind", ["a FIFO", "no end"])
def test_what_is_no_file_is_neither_waited_for_nor_read_for_ever(run: Path, kind: str) -> None:
    for name in ("rounds.jsonl", "model.safetensors"):
        (run / name).unlink()
        if kind == "a FIFO":
            os.mkfifo(run / name)
        else:
            (run / name).symlink_to("/dev/zero")
    with pytest.raises(StateError, match="no regular file"):
        headwater.load_rounds(run)
    with pytest.raises(StateError, match="no regular file"):
        summary(run, seconds=60)
    with pytest.raises(SettingsError, match="no regular file"):
        read_model(run / "model.safetensors")


def test_a_row_that_no_run_has_written_is_named(run: Path) -> None:
    row = json.loads((run / "rounds.jsonl").read_text())
    (run / "rounds.jsonl").write_text(json.dumps({**row, "metrics": [1]}) + "\n")
    with pytest.raises(StateError, match="a line that no run has written"):
        headwater.load_rounds(run)


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / FILE).symlink_to(tmp_path / "precious")
    with pytest.raises(StateError):
        RunLock(tmp_path)


def test_a_shared_record_writes_through_no_link(tmp_path: Path) -> None:
    """Its names have no "..", and a folder of the copy leads elsewhere."""
    store, out = tmp_path / "shared", tmp_path / "out"
    (store / FILES).mkdir(parents=True)
    (store / FILES / "1-1-b").write_text("echo owned")
    out.mkdir()
    (out / "sub").symlink_to(tmp_path)
    record = TermRecord(term=1, files={"sub/precious": "1-1-b"})
    with pytest.raises(CheckpointCorrupt, match="is a link"):
        SharedFiles(SharedFolder(store), out).download(record)
    assert not (tmp_path / "precious").exists()


def test_a_shared_file_that_is_a_link_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    (tmp_path / FILES).mkdir()
    (tmp_path / FILES / "1-1-b").symlink_to(tmp_path / "key")
    with pytest.raises(OSError, match="symbolic links"):
        SharedFolder(tmp_path).download("1-1-b", tmp_path / "copy")


@pytest.mark.parametrize("switch", ["plain_text", "public_metrics"])
def test_a_run_s_folder_switches_no_protection_off(run: Path, switch: str) -> None:
    settings = run / "settings.toml"
    settings.write_text(settings.read_text().replace(f"{switch} = false", f"{switch} = true"))
    with pytest.raises(SettingsError, match=f"{switch} switches protection off"):
        load_run(None, {"out": run}, resume=True)
    assert load_run(None, {"out": run, switch: True}, resume=True)


def test_a_run_in_the_queue_goes_into_no_folder_that_holds_something(run: Path) -> None:
    other = run.parent / "config"
    other.mkdir()
    (other / "settings.toml").write_text("# of another program")
    given = load_run(None, {"out": run, "task": "tests/python_tasks.py:Signs"}, resume=True)
    submit(run, given.model_copy(update={"out": other}), is_next=False)
    taken = take_next(run, default_out=run.parent / "next")
    assert taken == run.parent / "config-2"
    assert (other / "settings.toml").read_text() == "# of another program"


def test_a_line_that_says_too_much_makes_no_file_longer(tmp_path: Path) -> None:
    out = tmp_path / "run"
    given: dict[str, Any] = {"clients": 40, "accumulation_steps": 2, "progress": False}
    headwater.simulate(Signs, rounds=1, out=out, **given)
    lines = (out / "rounds.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    before = (out / "rounds.tables").stat().st_size
    row["clients"] |= {"num_bytes": 10**12}
    (out / "rounds.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(StateError, match="it has no table"):
        headwater.simulate(Signs, rounds=2, out=out, resume=True, **given)
    assert (out / "rounds.tables").stat().st_size < 10 * before
