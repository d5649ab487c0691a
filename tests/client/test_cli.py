"""What a person sees who tries a task on a device."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from headwater.client.cli import app
from headwater.common.secagg.identity import AllowList

TASK = "tests/tasks.py:TwoLayers"


def test_check_shows_what_limits_the_device_what_a_task_takes_and_what_it_gives() -> None:
    threads = torch.get_num_threads()
    try:
        found = CliRunner().invoke(
            app, ["check", "--task", TASK, "--threads", "1", "--memory-limit", "1000000000"]
        )
    finally:
        torch.set_num_threads(threads)
    assert found.exit_code == 0, found.output
    topics = {line[:11].strip() for line in found.output.splitlines()} - {""}
    assert topics == {
        "task", "examples", "model", "loss", "memory", "speed", "sensors", "gives"
    }  # fmt: skip
    assert "up to 1.0 GB, by memory limit as set" in found.output
    assert "per example of a micro-batch" in found.output
    assert "fastest in" in found.output
    assert "of its time" in found.output


def test_check_takes_no_memory_limit_of_nothing() -> None:
    found = CliRunner().invoke(app, ["check", "--task", TASK, "--memory-limit", "0"])
    assert found.exit_code == 2


def identity(path: Path, name: str = "pi") -> str:
    """Run the command, and return what it printed for others to use."""
    found = CliRunner().invoke(app, ["identity", "--identity", str(path), "--name", name])
    assert found.exit_code == 0, found.output
    return found.stdout


def test_an_identity_is_made_once_and_shown_again(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "pi.pem"
    line = identity(path)
    pem = path.read_bytes()
    assert identity(path) == line
    assert path.read_bytes() == pem
    assert AllowList.parse(line).keys.keys() == {"pi"}
    assert line != identity(tmp_path / "other.pem")


def test_an_identity_s_private_key_is_its_owner_s_alone_and_is_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "pi.pem"
    command = ["identity", "--identity", str(path), "--name", "pi"]
    shown = [CliRunner().invoke(app, command).output for _ in range(2)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = path.read_text().splitlines()[1]
    assert len(key) == 64  # PKCS #8 of an Ed25519 key in base64
    assert not any(key[:16] in text or key[-16:] in text or "PRIVATE" in text for text in shown)


def test_what_is_no_identity_is_not_overwritten_by_one(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("mine")
    found = CliRunner().invoke(app, ["identity", "--identity", str(path), "--name", "pi"])
    assert found.exit_code == 2
    assert "IdentityProblem" in found.stderr
    assert path.read_text() == "mine"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_an_identity_that_is_open_to_others_is_refused_until_it_is_not(
    mode: int, tmp_path: Path
) -> None:
    path = tmp_path / "pi.pem"
    identity(path)
    path.chmod(mode)
    found = CliRunner().invoke(app, ["identity", "--identity", str(path), "--name", "pi"])
    assert found.exit_code == 2
    said = "".join(found.stderr.split())  # the console breaks lines where it likes
    assert f"IdentityProblem:{path}isopentoothers" in said
    assert f"chmod600{path}" in said
    path.chmod(0o600)
    identity(path)


def test_an_identity_needs_a_file_and_a_name_that_can_be_one(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["identity"]).exit_code == 2
    path = tmp_path / "pi.pem"
    found = CliRunner().invoke(app, ["identity", "--identity", str(path), "--name", "a pi"])
    assert found.exit_code == 2
    assert not path.exists()


@pytest.mark.parametrize("lacking", ["--identity", "--allow-list", "own line"])
def test_active_mode_without_its_files_ends_before_anything_is_connected(
    lacking: str, tmp_path: Path
) -> None:
    mine, others, allow_list = (tmp_path / name for name in ("mine", "others", "allow-list"))
    lines = [identity(mine), identity(others, "other")]
    allow_list.write_text("".join(lines[1:] if lacking == "own line" else lines))
    files = {"--identity": mine, "--allow-list": allow_list}
    given = [str(part) for flag, path in files.items() if flag != lacking for part in (flag, path)]
    chosen = ["--secure-aggregation", "active", "--name", "pi", "--task", TASK, "--threads", "1"]
    threads = torch.get_num_threads()
    try:
        found = CliRunner().invoke(app, [*chosen, *given])
    finally:
        torch.set_num_threads(threads)
    assert found.exit_code == 2
    assert "IdentityProblem" in found.stderr
