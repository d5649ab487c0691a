"""Two servers of one run, as the command line opens it: who serves, who waits, who is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from headwater.common.errors import Diverged, SettingsError, StateError, TermEnded
from headwater.common.settings.schema import Settings
from headwater.server.operations.run_lock import RunLock
from headwater.server.rounds.run_folder import write_settings
from headwater.server.standby.shared_folder import SharedFolder
from headwater.server.standby.takeover import SharedRun, open_run
from headwater.server.standby.term_record import NAME, TermRecord

TASK = "tests/tasks.py:TwoLayers"
# Longer than a busy machine keeps a thread from renewing a term; and what is waited for in vain.
SECONDS, SHORT_SECONDS = 8.0, 0.2


def settings(
    tmp_path: Path, folder: str = "a", term_seconds: float = SECONDS, **changes: Any
) -> Settings:
    standby = {"shared_state": str(tmp_path / "shared"), "term_seconds": term_seconds}
    plain = {"task": TASK, "out": tmp_path / folder, "standby": standby, **changes}
    return Settings.model_validate(plain)


def opened(chosen: Settings, *, is_standby: bool = False, resume: bool = False) -> SharedRun | None:
    return open_run(chosen, lambda *, resume: chosen, is_standby=is_standby, resume=resume)


def begun(tmp_path: Path, *, term_seconds: float = SECONDS) -> SharedRun:
    """Return a run that has published its settings, from folder a."""
    chosen = settings(tmp_path, term_seconds=term_seconds)
    shared = opened(chosen)
    assert shared is not None
    assert not shared.holds_run
    assert chosen.out is not None
    write_settings(chosen.out, chosen)
    shared.publish()
    return shared


def record(tmp_path: Path) -> TermRecord:
    found = SharedFolder(tmp_path / "shared").read(NAME)
    assert found is not None
    return TermRecord.of(found[0])


def end(shared: SharedRun, error: BaseException | None = None) -> None:
    with shared.serving():
        if error is not None:
            raise error


def test_a_standby_takes_over_what_the_other_server_published_and_ends_its_term(
    tmp_path: Path,
) -> None:
    first = begun(tmp_path, term_seconds=SHORT_SECONDS)
    first._lease._has_stopped.set()  # as SIGSTOP would: the term is not renewed
    second = opened(settings(tmp_path, "b"), is_standby=True)
    assert second is not None
    assert (first.term, second.term, second.holds_run) == (1, 2, True)
    assert (tmp_path / "b/settings.toml").read_text() == (tmp_path / "a/settings.toml").read_text()
    (tmp_path / "a/settings.toml").write_text("a round that nobody knows of")
    with pytest.raises(TermEnded):
        first.publish()
    with pytest.raises(TermEnded):
        first.check()
    end(second)
    third = opened(settings(tmp_path, "a"), resume=True)  # on what the ended term left behind
    assert third is not None
    assert "nobody knows" not in (tmp_path / "a/settings.toml").read_text()
    end(third)


def test_a_server_that_is_no_standby_is_refused_while_another_one_serves(tmp_path: Path) -> None:
    first = begun(tmp_path)
    with pytest.raises(SettingsError, match="already holds a run of 0 rounds"):
        opened(settings(tmp_path, "b"))
    with pytest.raises(SettingsError, match="serves the run in"):
        opened(settings(tmp_path, "b"), resume=True)
    first.publish()
    end(first)


def test_a_standby_waits_for_a_drained_run_and_ends_with_a_finished_one(tmp_path: Path) -> None:
    first = begun(tmp_path)
    first.is_drained = True
    end(first)
    assert record(tmp_path).stands == "drained"
    found: list[SharedRun | None] = []
    waiting = threading.Thread(
        target=lambda: found.append(opened(settings(tmp_path, "b"), is_standby=True))
    )
    waiting.start()
    again = opened(settings(tmp_path), resume=True)
    assert again is not None
    end(again)
    waiting.join()
    assert found == [None]
    assert (tmp_path / "b/settings.toml").exists()


@pytest.mark.parametrize(
    ("error", "stands"),
    [
        (KeyboardInterrupt(), "free"),
        (StateError("the disk is full"), "free"),
        (RuntimeError("a bug"), "free"),
        (Diverged("not finite"), "failed"),
    ],
)
def test_a_standby_continues_where_the_error_was_that_server_s_own(
    error: BaseException, stands: str, tmp_path: Path
) -> None:
    first = begun(tmp_path)
    with pytest.raises(type(error)):
        end(first, error)
    assert record(tmp_path).stands == stands


@pytest.mark.parametrize(
    "changes", [{"out": None}, {"standby": {}}], ids=["no --out", "no --shared-state"]
)
def test_a_shared_run_needs_a_shared_state_and_a_folder_of_the_server_s_own(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="a run with a standby needs"):
        opened(settings(tmp_path, **changes), is_standby=True)


def test_what_would_keep_a_standby_from_taking_over_is_an_error_at_once(tmp_path: Path) -> None:
    first = begun(tmp_path)
    exposed = settings(tmp_path, "b", server={"listen": "192.0.2.1:8500"})
    with pytest.raises(SettingsError, match="not a loopback address"):
        opened(exposed, is_standby=True)
    end(first)


@pytest.mark.parametrize("is_standby", [True, False], ids=["standby", "resumed"])
def test_a_folder_with_other_files_is_no_copy_of_the_run_and_keeps_them(
    is_standby: bool, tmp_path: Path
) -> None:
    end(begun(tmp_path))
    thesis = tmp_path / "b" / "thesis" / "chapter.txt"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("the only copy")
    with pytest.raises(SettingsError, match=r"would be replaced .* it holds thesis"):
        opened(settings(tmp_path, "b"), is_standby=is_standby, resume=not is_standby)
    assert thesis.read_text() == "the only copy"


def test_a_standby_does_not_take_the_folder_of_the_server_that_serves(tmp_path: Path) -> None:
    first = begun(tmp_path)
    serving = RunLock(tmp_path / "a")
    stray = tmp_path / "a" / "model.safetensors"
    stray.write_text("written since the last round")
    with pytest.raises(SettingsError, match="another process writes here"):
        opened(settings(tmp_path), is_standby=True)
    assert stray.exists()
    serving.release()
    end(first)
