"""What of a run's folder reaches the standby: all that it needs to go on, as it was committed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater.server.privacy.banded_noise import NOISE_FOLDER
from headwater.server.standby.shared_files import MAX_PIECES, SharedFiles
from headwater.server.standby.shared_folder import SharedFolder
from headwater.server.standby.term_record import TermRecord

STATE = ("checkpoint.safetensors", "settings.toml", "privacy.json", f"{NOISE_FOLDER}/7.bin")
OWN = (
    *("server.lock", "order.json", "tensorboard/events", "state.json", "devices.json"),
    *("events.jsonl", "history.sqlite", "history.sqlite-wal"),
)


def folder_with(out: Path, names: tuple[str, ...], text: str) -> None:
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(f"{name} {text}")


def contents(out: Path) -> dict[str, str]:
    files = (path for path in sorted(out.rglob("*")) if path.is_file())
    found = {path.relative_to(out).as_posix(): path.read_text() for path in files}
    return {name: text for name, text in found.items() if text}  # a new lock file is empty


@pytest.fixture
def shared(tmp_path: Path) -> SharedFolder:
    return SharedFolder(tmp_path / "shared")


def test_the_standby_gets_the_run_s_state_and_keeps_what_is_its_own(
    shared: SharedFolder, tmp_path: Path
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    folder_with(out, (*STATE, *OWN, "checkpoint.safetensors.part"), "here")
    folder_with(other, (STATE[0], "best.safetensors", OWN[0]), "of an earlier term")
    (out / "rounds.jsonl").write_text("1\n")
    files = SharedFiles(shared, out)
    record = files.upload(TermRecord(term=1))
    SharedFiles(shared, other).download(record)
    assert contents(other) == {
        **{name: f"{name} here" for name in STATE},
        "rounds.jsonl": "1\n",
        OWN[0]: f"{OWN[0]} of an earlier term",
    }
    assert (other / NOISE_FOLDER / "7.bin").stat().st_mode & 0o077 == 0


def test_only_what_changed_is_stored_again_and_what_it_replaced_is_removed(
    shared: SharedFolder, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    folder_with(out, STATE, "one")
    files = SharedFiles(shared, out)
    first = files.upload(TermRecord(term=1))
    assert files.upload(first) == first
    (out / STATE[0]).unlink()
    folder_with(out, STATE[:1], "another")
    second = files.upload(first)
    files.forget(first, second)
    assert {name for name in STATE if first.files[name] != second.files[name]} == {STATE[0]}
    assert shared.stored() == sorted(second.files.values())


def test_what_was_stored_and_not_committed_is_stored_again(
    shared: SharedFolder, tmp_path: Path
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    folder_with(out, STATE[:1], "committed")
    (out / "rounds.jsonl").write_text("1\n")
    files = SharedFiles(shared, out)
    committed = files.upload(TermRecord(term=1))
    (out / STATE[0]).unlink()
    folder_with(out, STATE[:1], "later")
    with (out / "rounds.jsonl").open("a") as log:
        log.write("2\n")
    files.upload(committed)  # and the commit fails
    again = files.upload(committed)
    SharedFiles(shared, other).download(again)
    assert contents(other) == {STATE[0]: f"{STATE[0]} later", "rounds.jsonl": "1\n2\n"}
    SharedFiles(shared, other).download(committed)
    assert contents(other) == {STATE[0]: f"{STATE[0]} committed", "rounds.jsonl": "1\n"}
    files.forget_strangers(TermRecord(term=2, files=again.files, log_pieces=again.log_pieces))
    assert shared.stored() == sorted([*again.files.values(), *again.log_pieces])


def test_the_log_of_rounds_comes_in_pieces_that_are_joined_now_and_then(
    shared: SharedFolder, tmp_path: Path
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    out.mkdir()
    files, record = SharedFiles(shared, out), TermRecord(term=1)
    for number in range(MAX_PIECES + 3):
        with (out / "rounds.jsonl").open("a") as log:
            log.write(json.dumps(number) + "\n")
        record = files.upload(record)
        assert len(record.log_pieces) == number % MAX_PIECES + 1
    SharedFiles(shared, other).download(record)
    assert contents(other) == contents(out)
    # A log that was rewritten, as when a run is resumed, is another one.
    (out / "rounds.jsonl").write_text("0\n")
    record = files.upload(record)
    SharedFiles(shared, other).download(record)
    assert contents(other) == {"rounds.jsonl": "0\n"}
