"""A run's folder, or a submitted file, that names code from beyond the working folder."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import headwater
from headwater.common.errors import CheckpointCorrupt, CodeChanged, SettingsError, StateError
from headwater.common.settings.changes import changes, named_code, values_of
from headwater.common.settings.introspection import all_settings
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load, load_run
from headwater.server.features import POINTER
from headwater.server.rounds import checkpoint
from headwater.server.rounds.run_state import Training
from headwater.server.succession.run_queue import last_run, successor
from headwater.server.succession.submission import read_submission
from headwater.server.succession.submitted_code import check_submitted
from tests.processes import Processes, work_in
from tests.python_tasks import Signs

REFUSED = "does not choose the code"
OWN_TASK = "mine.py:Mine"
OF_DEVICES = {"client.tasks"}


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file beside the working folder, which leaves a mark if it is run."""
    mark, file = tmp_path / "mark", tmp_path / "evil.py"
    file.write_text(f"open({str(mark)!r}, 'w')\nfrom tests.python_tasks import Signs as Evil\n")
    working = tmp_path / "working"
    working.mkdir()
    (working / "mine.py").write_text("from tests.python_tasks import Signs as Mine\n")
    monkeypatch.chdir(working)
    yield file
    assert not mark.exists()


def left_by(stranger: Path, **values: str) -> Path:
    """Return a run's folder whose settings name this code."""
    out = stranger.parent / "out"
    out.mkdir()
    tree = load(None, {"task": OWN_TASK, "rounds": 1, **values})
    (out / "settings.toml").write_text(tree.to_toml())
    return out


def keys() -> list[str]:
    return [
        key
        for key, setting in all_settings().items()
        if "FILE.py" in f"{setting.value.units} {setting.meaning}" and key not in OF_DEVICES
    ]


def test_every_setting_that_names_code_is_looked_at() -> None:
    chosen = load(None, dict.fromkeys(keys(), "a.py:A"))
    assert [key for key, _ in named_code(chosen)] == keys()


@pytest.mark.parametrize("key", keys())
@pytest.mark.parametrize("place", ["runs/sent/evil.py:Evil", "runs.sent.evil:Evil"])
def test_a_resumed_run_s_folder_does_not_bring_code(evil: Path, key: str, place: str) -> None:
    """Runs lie below the working folder; what came with one is not the user's for that."""
    out = Path("runs/sent")
    out.mkdir(parents=True)
    (out / "evil.py").write_text(evil.read_text())
    (out / "settings.toml").write_text(
        load(None, {"task": OWN_TASK, "rounds": 1, key: place}).to_toml()
    )
    with pytest.raises(SettingsError, match="does not bring the code") as found:
        Training(load_run(None, {"out": out}, resume=True), run_id=0).check()
    assert key in str(found.value)
    given = load_run(None, {"out": out, key: "mine.py:Mine"}, resume=True)
    assert "evil" not in dict(named_code(given)).get(key, "")


@pytest.mark.parametrize("key", keys())
def test_a_resumed_run_s_folder_does_not_choose_code(evil: Path, key: str) -> None:
    out = left_by(evil, **{key: f"{evil}:Evil"})
    with pytest.raises(SettingsError, match=REFUSED) as found:
        Training(load_run(None, {"out": out}, resume=True), run_id=0).check()
    assert key in str(found.value)


@pytest.mark.parametrize("place", ["{evil}", "../evil.py", "~/evil.py", "linked.py", "a.py,{evil}"])
def test_no_way_of_writing_a_place_leads_beyond_the_working_folder(
    evil: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(evil.parent))
    Path("linked.py").symlink_to(evil)
    out = left_by(evil, **{"feature.name": f"{place.format(evil=evil)}:Evil"})
    with pytest.raises(SettingsError, match=REFUSED):
        headwater.simulate(OWN_TASK, clients=2, out=out, resume=True, progress=False)


@pytest.mark.parametrize("key", keys())
def test_a_submitted_file_does_not_choose_code(evil: Path, key: str) -> None:
    (left_by(evil, **{key: f"{evil}:Evil"}) / "settings.toml").rename("next.toml")
    for server in (Path.cwd(), evil.parent, None):
        with pytest.raises(SettingsError, match=REFUSED):
            read_submission(Path("next.toml"), server_folder=server)


def test_a_server_elsewhere_gets_no_code_that_it_would_refuse(evil: Path, tmp_path: Path) -> None:
    (left_by(evil) / "settings.toml").rename("next.toml")
    (tmp_path / "server").mkdir()
    with pytest.raises(SettingsError, match=REFUSED):
        read_submission(Path("next.toml"), server_folder=tmp_path / "server")
    assert read_submission(Path("next.toml"), server_folder=tmp_path).task == str(
        f"{Path('mine.py').absolute()}:Mine"
    )


def test_code_that_the_caller_names_is_run_wherever_it_is(evil: Path) -> None:
    other = evil.with_name("other.py")
    other.write_text("from tests.python_tasks import Signs as Other\n")
    out = left_by(evil, task=f"{other}:Other")
    found = load_run(None, {"out": out, "task": f"{other}:Other"}, resume=True)
    assert Settings.model_validate(found).task == f"{other}:Other"
    config = evil.with_name("config.toml")
    config.write_text(f'task = "{other}:Other"')
    assert load_run(config, {"out": out}, resume=True).task == f"{other}:Other"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["server", "simulation"])
def test_a_command_refuses_the_code_of_a_folder(evil: Path, command: str) -> None:
    out = left_by(evil, task=f"{evil}:Evil")
    with Processes(evil.parent / "processes") as processes:
        prepare = partial(work_in, Path.cwd())
        ended = processes.complete(command, "--resume", "--out", out, status=2, prepare=prepare)
    assert REFUSED in " ".join(ended.stderr.split())


def sent(tmp_path: Path, **values: str) -> Path:
    """Return a run's folder that somebody sent."""
    out = tmp_path / "sent"
    out.mkdir()
    chosen = load(None, {"task": OWN_TASK, "rounds": 1, **values})
    (out / "settings.toml").write_text(chosen.to_toml())
    return out


@pytest.mark.parametrize("key", ["model.initial", "standby.shared_state"])
def test_a_folder_names_no_model_and_no_place_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """The private model would go to the sender's devices, and files into any folder."""
    working, private = tmp_path / "working", tmp_path / "private"
    working.mkdir()
    private.mkdir()
    monkeypatch.chdir(working)
    out = sent(tmp_path, **{key: str(private)})
    with pytest.raises(SettingsError, match="a run's folder does not decide that"):
        load_run(None, {"out": out}, resume=True)
    own = load_run(None, {"out": out, key: str(private)}, resume=True)
    assert private in (own.model.initial, Path(own.standby.shared_state or ""))


def test_a_folder_leads_to_no_run_that_did_not_follow_it_here(tmp_path: Path) -> None:
    """The user's own run elsewhere would go on, on the sender's port and certificates."""
    private, got = tmp_path / "private", tmp_path / "got"
    private.mkdir()
    got.mkdir()
    (private / "settings.toml").write_text("rounds = 9\n")
    pointer = {"out": str(private), "file": "500000.toml"}
    (got / POINTER).write_text(json.dumps(pointer))
    for follow in (last_run, successor):
        with pytest.raises(StateError, match="no run there followed the one in"):
            follow(got)


@pytest.mark.parametrize("place", ["/dev/zero", "/dev"])
def test_a_folder_has_no_endless_file_read(place: str) -> None:
    chosen = load(None, {"submitted_code": f"{'0' * 64}  {place}"})
    with pytest.raises(CodeChanged, match=r"no file of up to 67.1 MB"):
        check_submitted(chosen, remedy="")


@pytest.mark.parametrize("field", ["ca", "certificate", "key"])
def test_a_resumed_run_s_folder_brings_no_certificates(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose authority is trusted is the server's word: the sender's own devices would join."""
    monkeypatch.chdir(tmp_path)
    out = Path("runs/sent")
    out.mkdir(parents=True)
    tls = {f"tls.{name}": f"{name}.pem" for name in ("ca", "certificate", "key")}
    chosen = load(None, {"task": "mine.py:Mine", **tls, f"tls.{field}": str(out / "evil.pem")})
    (out / "settings.toml").write_text(chosen.to_toml())
    with pytest.raises(SettingsError, match="does not say whom this server trusts") as found:
        load_run(None, {"out": out}, resume=True)
    assert f"tls.{field}" in str(found.value)
    load_run(None, {"out": out, f"tls.{field}": f"{field}.pem"}, resume=True)


def test_whom_a_run_trusts_is_among_what_a_resumed_run_changes() -> None:
    before = values_of(load(None, {"server.aggregators": "north"}))
    after = values_of(load(None, {"server.aggregators": "north,mallory"}))
    assert list(changes(before, after)) == ["server.aggregators"]


def test_a_fifo_in_a_run_s_folder_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "checkpoint.safetensors")
    with pytest.raises(SettingsError, match="no file and no folder"):
        load_run(None, {"out": tmp_path, "task": "mine.py:Mine"}, resume=True)


ODD: dict[str, list[Any]] = {
    "run_id": ["x", -1, 2**64],
    "round": [-1, "2", 1.5],
    "counted": [{"0": "x"}, []],
    "learned": [{"0": None}, [], {"0": {"line": "x"}}],
    "largest": [["x"], {}],
    "largest_median_norm": ["x", -1, float("nan"), float("inf")],
    "held_back": [{"0": {}}, []],
    "target": [[]],
    "features": [[]],
    "settings": [[]],
    "optimizer": [5, "{"],
}


@pytest.mark.parametrize(("key", "value"), [(key, one) for key in ODD for one in ODD[key]])
def test_a_checkpoint_with_a_field_of_another_form_is_named(
    key: str, value: Any, tmp_path: Path
) -> None:
    """Its digest is right: anybody can compute that."""
    how: dict[str, Any] = {"clients": 2, "threads": 1, "progress": False, "accumulation_steps": 2}
    headwater.simulate(Signs, rounds=1, out=tmp_path, **how)
    saved = checkpoint.load(tmp_path)
    assert saved is not None
    checkpoint.save(
        tmp_path,
        dataclasses.replace(saved.progress, **{key: value}),
        image_U8=saved.image_U8,
        optimizer=saved.optimizer,
    )
    with pytest.raises((CheckpointCorrupt, SettingsError)):
        headwater.simulate(Signs, rounds=2, out=tmp_path, resume=True, **how)
