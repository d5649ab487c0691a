"""Whoever can write in the folder that two servers share: what a standby does with it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.common.errors import (
    CheckpointCorrupt,
    MaskingRequired,
    SettingsError,
    TermEnded,
)
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.rounds.features import check_resumed
from headwater.server.standby.lease import Lease
from headwater.server.standby.shared_files import SharedFiles
from headwater.server.standby.shared_folder import FILES, SharedFolder
from headwater.server.standby.takeover import _later, open_run
from headwater.server.standby.term_record import NAME, TermRecord
from tests.masked import FlowerDevice, NodeDevice, opening_of, plan, play, ready, train
from tests.processes import until
from tests.server.standby.test_takeover import begun, end, opened, record, settings

GOOD = TermRecord(term=3, holder="a:1-2", files={"x": "1-1-x"}, log_pieces=("1-2-log",))


def test_a_link_in_place_of_the_stored_files_is_followed_nowhere(tmp_path: Path) -> None:
    """Each takeover removes what earlier terms have left: names that begin with a number."""
    elsewhere = tmp_path / "photos"
    elsewhere.mkdir()
    names = ("2024-07-holiday.jpg", "1-tax.pdf", "7")
    for name in names:
        (elsewhere / name).write_text("mine")
    share = tmp_path / "share"
    share.mkdir()
    (share / FILES).symlink_to(elsewhere)
    files = SharedFiles(SharedFolder(share), tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "settings.toml").write_text("")
    with pytest.raises(OSError, match="symbolic links"):
        files.forget_strangers(replace(GOOD, term=10**6))
    with pytest.raises(OSError, match="symbolic links"):
        files.upload(GOOD)
    with pytest.raises(OSError, match="symbolic links"):
        files.download(GOOD)
    assert sorted(path.name for path in elsewhere.iterdir()) == sorted(names)


def test_only_what_a_server_has_stored_is_removed(tmp_path: Path) -> None:
    share = tmp_path / "share" / FILES
    share.mkdir(parents=True)
    for name in ("2024-07-holiday.jpg", "notes", "1-tax.pdf", "1-5-model", "9-1-later"):
        (share / name).write_text("")
    SharedFiles(SharedFolder(tmp_path / "share"), tmp_path).forget_strangers(replace(GOOD, term=5))
    assert {path.name for path in share.iterdir()} >= {"notes", "1-tax.pdf", "9-1-later"}
    assert not (share / "1-5-model").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"term": 2**64 - 1},
        {"term": 2**53},
        {"term": -7},
        {"term": "5"},
        {"term": 1.5},
        {"term": True},
        {"beat": "1"},
        {"term_seconds": "x"},
        {"term_seconds": None},
        {"term_seconds": 1e400},
        {"term_seconds": -1},
        {"stands": "odd"},
        {"holder": 7},
        {"holder": "x" * 3000},
        {"files": []},
        {"files": {"x": 1}},
        {"files": {"evil.py": "1-900-evil.py"}},
        {"files": {"a/evil.PY/x": "1-1-x"}},
        {"files": {"__pycache__/x": "1-1-x"}},
        {"other": 1},
    ],
)
def test_a_record_that_no_server_writes_is_named(changes: dict[str, Any]) -> None:
    plain = json.loads(GOOD.to_bytes()) | changes
    with pytest.raises(CheckpointCorrupt, match="record of terms cannot be read"):
        TermRecord.of(json.dumps(plain).encode())


@pytest.mark.parametrize(
    "own", ["devices.json", "history.sqlite", "server.lock", "order.json", "shared-state"]
)
def test_a_record_replaces_no_file_that_is_a_server_s_own(own: str, tmp_path: Path) -> None:
    share = SharedFolder(tmp_path / "share")
    (tmp_path / "file").write_text("")
    share.upload("1-1-x", tmp_path / "file")
    with pytest.raises(CheckpointCorrupt, match="a server's own"):
        SharedFiles(share, tmp_path / "out").download(TermRecord(term=1, files={own: "1-1-x"}))


def fifo(path: Path) -> None:
    os.mkfifo(path)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def holes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)


@pytest.mark.parametrize("make", [fifo, zeros, holes])
def test_a_record_that_never_ends_is_not_waited_for(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    share = SharedFolder(tmp_path)
    share.write_if_unchanged(NAME, GOOD.to_bytes(), None)
    make(tmp_path / f"{NAME}.{2:012}")
    with pytest.raises(OSError, match=r"links|regular|large"):
        share.read(NAME)


def test_a_stored_file_that_becomes_a_link_is_not_copied(tmp_path: Path) -> None:
    """It is opened once: what was looked at is what is read."""
    (tmp_path / FILES).mkdir()
    secret, stored = tmp_path / "ca-key.pem", tmp_path / FILES / "1-1-b"
    secret.write_text("secret")
    stop = threading.Event()

    def flip() -> None:
        while not stop.is_set():
            new = tmp_path / "new"
            new.write_text("b")
            new.replace(stored)
            new.symlink_to(secret)
            new.replace(stored)

    thread = threading.Thread(target=flip)
    stored.write_text("b")
    thread.start()
    try:
        for _ in range(3000):
            try:
                SharedFolder(tmp_path).download("1-1-b", tmp_path / "copy")
            except OSError:
                continue
            assert (tmp_path / "copy").read_text() in ("b", "")
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("name", [f"term.{chr(0xFF19) * 12}", "term.1", "term.0000000000001"])
def test_other_names_are_no_records(name: str, tmp_path: Path) -> None:
    share = SharedFolder(tmp_path)
    share.write_if_unchanged(NAME, GOOD.to_bytes(), None)
    (tmp_path / name).write_text("")
    found = share.read(NAME)
    assert found is not None
    assert TermRecord.of(found[0]) == GOOD


def test_a_record_that_cannot_be_read_ends_a_term_by_its_name(tmp_path: Path) -> None:
    share = SharedFolder(tmp_path)
    lease = Lease.take(share, TermRecord(), None, term_seconds=0.2)
    assert lease is not None
    lease.start()
    (tmp_path / f"{NAME}.{999_999_999_999}").write_text("")

    until(lambda: lease._ended is not None, what=lambda: "the term's end")
    with pytest.raises(TermEnded, match="cannot be read"):
        lease.check()
    lease.release(lambda record: record)


@pytest.mark.parametrize("text", ["see [/nobody]", "[link=http://x]", "\x1b[2J\x1b]0;owned\x07"])
def test_a_text_of_the_record_is_shown_as_text(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device chooses the words of the error that its plan fails with."""
    shared = begun(tmp_path)
    end(shared)
    share = SharedFolder(tmp_path / "shared")
    found = share.read(NAME)
    assert found is not None
    before = TermRecord.of(found[0])
    forged = replace(before, stands="finished", holder=text, beat=before.beat + 1)
    share.write_if_unchanged(NAME, forged.to_bytes(), found[1])
    forged = replace(forged, stands="failed", reason=text, beat=forged.beat + 1)
    waiting = threading.Thread(
        target=opened, args=(settings(tmp_path, "b"),), kwargs={"is_standby": True}, daemon=True
    )
    found = share.read(NAME)
    assert found is not None
    share.write_if_unchanged(NAME, forged.to_bytes(), found[1])
    waiting.start()
    out = ""

    def is_shown() -> bool:
        nonlocal out
        out += capsys.readouterr().out
        return "has failed" in out

    until(is_shown, what=lambda: out)
    assert "\x1b" not in out
    assert text.replace("\x1b", "\\x1b").replace("\x07", "\\x07") in out
    found = share.read(NAME)
    assert found is not None
    finished = replace(forged, stands="finished", beat=forged.beat + 1)
    share.write_if_unchanged(NAME, finished.to_bytes(), found[1])
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_shared_folder_that_others_may_write_in_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    end(begun(tmp_path))
    assert "others may change it (777)" in caplog.text


def test_a_shared_state_that_goes_back_is_not_followed() -> None:
    now = replace(GOOD, beat=9, round=4)
    assert _later(now, GOOD) == now
    with pytest.raises(CheckpointCorrupt, match="went back: it was at term 3, round 4"):
        _later(GOOD, now)


@pytest.mark.parametrize(("share", "out"), [("a", "a"), ("a/share", "a"), ("b", "b/out")])
def test_a_run_is_not_stored_in_itself(share: str, out: str, tmp_path: Path) -> None:
    standby = {"shared_state": str(tmp_path / share)}
    chosen = settings(tmp_path, out).model_copy(
        update={"standby": settings(tmp_path).standby.model_copy(update=standby)}
    )
    with pytest.raises(SettingsError, match="one in the other"):
        opened(chosen)


@pytest.mark.slow
@pytest.mark.usefixtures("a_process_of_its_own")
def test_a_device_sends_nothing_in_clear_in_a_run_that_had_masks(tmp_path: Path) -> None:
    """Whoever may write a run's settings could take the masks off at a takeover.

    The owners have set nothing: they rely on the run's masks.
    """
    own = {"aggregation": "off"}
    cohorts: list[list[Any]] = [
        [NodeDevice(part, tmp_path, secure=own) for part in range(5)],
        [FlowerDevice(part, tmp_path / f"flower{part}") for part in range(5)],
    ]
    for cohort in cohorts:
        for device in cohort:
            train(device, plan(1, is_masked=False))
        for device in cohort:
            ready(device, plan(2))
        assert play(cohort, opening_of(cohort, plan(2))).opened is not None
        for device in cohort:
            with pytest.raises(MaskingRequired, match="has masked its updates in this run"):
                train(device, plan(3, is_masked=False))
            ready(device, plan(3))


@pytest.mark.parametrize(
    ("before", "chosen", "says"),
    [
        ({"secure.aggregation": "active"}, {"secure.aggregation": "semi-honest"}, "had active"),
        ({"secure.aggregation": "semi-honest"}, {}, "would have none"),
        (
            {"privacy.noise_multiplier": 1.0},
            {"privacy.noise_multiplier": 0.01},
            "noise of 1 clip norms so far",
        ),
    ],
)
def test_a_run_s_settings_take_no_masks_and_no_noise_away(
    before: dict[str, Any], chosen: dict[str, Any], says: str
) -> None:
    planned = {"plan.accumulation_steps": 4, "plan.micro_batch_size": 4}
    with pytest.raises(SettingsError, match=says):
        check_resumed(before, load(None, {**planned, **chosen}))
    check_resumed(before, load(None, {**planned, **before}))


@pytest.mark.parametrize(
    ("now", "says"),
    [
        ({"privacy": {"epsilon": 1000}}, "privacy epsilon 8 → 1000"),
        ({}, "privacy epsilon 8 → not set"),
        ({"privacy": {"epsilon": 8}}, None),
    ],
)
def test_noise_that_changed_since_a_standby_s_first_look_is_not_taken_over(
    now: dict[str, Any], says: str | None, tmp_path: Path
) -> None:
    """Settings and checkpoint may have been changed alike, so that neither shows it."""
    with suppress(SettingsError):
        end(begun(tmp_path), SettingsError("a disk is full"))
    plan_of_all = {"accumulation_steps": 4, "micro_batch_size": 4}

    def read(**chosen: Any) -> Settings:
        return settings(tmp_path, "b", plan=plan_of_all, **chosen)

    looks = iter([read(privacy={"epsilon": 8}), read(**now)])

    def take_over() -> None:
        shared = open_run(read(), lambda *, resume: next(looks), is_standby=True, resume=False)
        assert shared is not None
        end(shared)

    if says is None:
        take_over()
        return
    with pytest.raises(SettingsError, match=says):
        take_over()
    assert record(tmp_path).stands == "free"
