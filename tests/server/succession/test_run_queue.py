"""Runs follow one another in the order of their queue, whenever the server is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import headwater
from headwater.common.errors import SettingsError, StateError
from headwater.common.settings.schema import SETTINGS_FILE, Settings
from headwater.common.settings.sources import load
from headwater.common.task_bundles.signed_bundle import bundle_of
from headwater.server.features import POINTER, QUEUE
from headwater.server.rounds import checkpoint
from headwater.server.serve import serve_run
from headwater.server.succession import run_queue
from headwater.server.succession.run_queue import (
    BEFORE,
    is_next_due,
    last_run,
    queued_runs,
    submit,
    successor,
    take_next,
)
from headwater.server.succession.submission import of_this_server, read_submission
from tests.task_bundles.bundles import new_key, publish_code

TASK = "tests/tasks.py:TwoLayers"


def run(rounds: int, out: Path | None = None) -> Settings:
    return Settings(task=TASK, rounds=rounds, out=out)


def waiting(folder: Path) -> list[int | str]:
    return [one.settings.rounds for one in queued_runs(folder)]


@pytest.fixture
def first(tmp_path: Path) -> Path:
    folder = tmp_path / "first"
    folder.mkdir()
    return folder


def test_the_name_of_the_settings_file_is_that_of_a_run() -> None:
    assert run_queue.SETTINGS == SETTINGS_FILE


def test_runs_wait_in_the_order_of_their_submission_and_the_next_one_first(first: Path) -> None:
    for rounds in (1, 2):
        submit(first, run(rounds), is_next=False)
    assert not is_next_due(first)
    for rounds in (3, 4):
        submit(first, run(rounds), is_next=True)
    assert waiting(first) == [4, 3, 1, 2]
    assert is_next_due(first)


def test_the_next_run_gets_its_settings_and_the_rest_of_the_queue(first: Path) -> None:
    for rounds in (1, 2, 3):
        submit(first, run(rounds), is_next=False)
    out = take_next(first, default_out=first.with_name("second"))
    assert out == first.with_name("second")
    assert load(out / SETTINGS_FILE, {}) == run(1, out)
    assert (waiting(first), waiting(out)) == ([], [2, 3])
    assert successor(first) == last_run(first) == out


def test_an_empty_queue_leaves_the_run_open(first: Path) -> None:
    assert take_next(first, default_out=first.with_name("second")) is None
    assert successor(first) is None
    assert last_run(first) == first


def test_a_run_before_its_first_round_is_not_its_own_successor(first: Path) -> None:
    submit(first, run(1, out=first), is_next=True)
    out = take_next(first, default_out=first.with_name("second"))
    assert out == last_run(first) == first.with_name("first-2")


def test_a_run_is_submitted_behind_the_last_one_that_has_followed(first: Path) -> None:
    submit(first, run(1), is_next=False)
    second = take_next(first, default_out=first.with_name("second"))
    assert second is not None
    assert submit(first, run(2), is_next=False) == second
    assert waiting(second) == [2]


def test_a_server_killed_in_the_middle_of_a_change_loses_no_run_and_repeats_none(
    first: Path,
) -> None:
    for rounds in (1, 2, 3):
        submit(first, run(rounds), is_next=False)
    files = [one.file.name for one in queued_runs(first)]
    second = first.with_name("second")
    second.mkdir()
    (second / BEFORE).write_text(json.dumps({"folder": str(first)}))
    (first / POINTER).write_text(json.dumps({"out": str(second), "file": files[0]}))
    (second / QUEUE).mkdir()
    (first / QUEUE / files[1]).rename(second / QUEUE / files[1])  # killed here
    assert successor(first) == second
    assert (waiting(first), waiting(second)) == ([], [2, 3])


def test_two_runs_with_one_number_are_both_kept(first: Path) -> None:
    second = first.with_name("second")
    submit(first, run(1), is_next=False)
    taken = queued_runs(first)[0].file.name
    second.mkdir()
    submit(second, run(2), is_next=False)
    (first / QUEUE / "400000.toml").write_text(run(3).to_toml())
    (second / QUEUE / "400000.toml").write_text(run(4).to_toml())
    (second / BEFORE).write_text(json.dumps({"folder": str(first)}))
    (first / POINTER).write_text(json.dumps({"out": str(second), "file": taken}))
    successor(first)
    assert waiting(second) == [4, 3, 2]


def test_a_folder_that_holds_a_run_is_not_overwritten(first: Path) -> None:
    second = first.with_name("second")
    second.mkdir()
    (second / checkpoint.FILE).write_bytes(b"a run of another time")
    submit(first, run(1, second), is_next=False)
    assert take_next(first, default_out=first) == first.with_name("second-2")


@pytest.mark.parametrize(
    "text", ["", "{}", '{"out": 3, "file": "a"}', '{"out": "a", "file": "../../settings.toml"}']
)
def test_a_damaged_pointer_is_named_with_a_remedy(first: Path, text: str) -> None:
    (first / POINTER).write_text(text)
    for read in (successor, last_run):
        with pytest.raises(StateError, match=r"successor\.json") as caught:
            read(first)
        assert caught.value.remedy


def test_runs_that_follow_in_a_circle_are_refused(first: Path) -> None:
    (first / BEFORE).write_text(json.dumps({"folder": str(first)}))
    (first / POINTER).write_text(json.dumps({"out": str(first), "file": "000001.toml"}))
    with pytest.raises(StateError, match="leads back"):
        last_run(first)


def test_a_queued_file_that_is_no_settings_file_is_named(first: Path) -> None:
    (first / QUEUE).mkdir()
    (first / QUEUE / "000001.toml").write_text("rounds = 'many'")
    (first / QUEUE / "notes.txt").write_text("left alone")
    with pytest.raises(StateError, match=r"000001\.toml cannot be read"):
        queued_runs(first)


def submitted(folder: Path, text: str, *, server_folder: Path | None = None) -> Settings:
    file = folder / "next.toml"
    file.write_text(text)
    return read_submission(file, server_folder=server_folder)


def test_a_submission_has_absolute_paths_for_a_server_that_runs_elsewhere(tmp_path: Path) -> None:
    text = f'task = "{TASK}"\nrounds = "forever"\nout = "runs/next"'
    here = submitted(tmp_path, text, server_folder=Path.cwd())
    assert (here.task, here.out) == (TASK, Path("runs/next"))
    settings = submitted(tmp_path, text)
    assert settings.task == f"{Path('tests/tasks.py').absolute()}:TwoLayers"
    assert settings.out == Path("runs/next").absolute()
    assert (settings.num_rounds, settings.optimizer.name) == (None, Settings().optimizer.name)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rounds = 3", "names no task"),
        ('task = "tests/tasks.py:Missing"', "Missing"),
        (f'task = "{TASK}"\n[optimizer]\nname = "none"', "none"),
        (f'task = "{TASK}"\n[evaluation]\nbest = "sharpness"', "sharpness"),
    ],
)
def test_a_run_that_could_not_begin_is_refused_when_it_is_submitted(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(SettingsError, match=says):
        submitted(tmp_path, text)


def test_a_submission_into_the_folder_of_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / checkpoint.FILE).touch()
    with pytest.raises(SettingsError, match="already holds a run"):
        submitted(tmp_path, f'task = "{TASK}"\nout = "{tmp_path}"')


def test_a_run_of_the_queue_keeps_the_server_s_address_and_certificates(tmp_path: Path) -> None:
    server = load(
        None,
        {"server.listen": "0.0.0.0:0", "tls.ca": "ca.pem", "plain_text": True, "threads": 2},
    )
    own = load(None, {"server.listen": "127.0.0.1:1", "tls.ca": "other.pem", "rounds": 7})
    found = of_this_server(own, server, address="0.0.0.0:4711")
    assert (found.server.listen, found.tls, found.rounds) == ("0.0.0.0:4711", server.tls, 7)
    assert (found.plain_text, found.threads) == (True, 2)


def test_a_run_of_the_queue_has_the_server_s_alerts_unless_it_has_its_own() -> None:
    server, own = (load(None, {"alerts.notify": name}) for name in ("./tell", "./other"))
    assert of_this_server(load(None, {}), server, address=None).alerts.notify == "./tell"
    assert of_this_server(own, server, address=None).alerts.notify == "./other"


def test_a_signed_task_is_submitted_as_the_task_that_it_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    key, _ = new_key(tmp_path / "signer.pem")
    _, bundle = publish_code(tmp_path, key, version=1)
    (tmp_path / "next.toml").write_text(f'task = "{bundle.name}"\nrounds = 1')
    settings = read_submission(tmp_path / "next.toml", server_folder=tmp_path)
    assert settings.task is not None
    assert settings.task.endswith("parity.py:Parity")
    assert bundle_of(settings.task) is not None


def test_a_server_that_would_not_take_the_queue_refuses_a_run_with_one(tmp_path: Path) -> None:
    submit(tmp_path, run(1), is_next=True)
    settings = run(1, tmp_path)
    with pytest.raises(SettingsError, match="which this server would not take"):
        serve_run(settings, None, on_round=lambda _: None, resume=False)
    with pytest.raises(SettingsError, match="would not take"):
        headwater.serve(TASK, out=tmp_path, progress=False)


def test_the_python_api_is_no_aggregator(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no aggregator"):
        headwater.serve("x.py:X", out=tmp_path, upstream="127.0.0.1:1", progress=False)
