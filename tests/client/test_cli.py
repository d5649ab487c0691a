"""The output of ``headwater-client check`` and ``identity``, and errors before a connection."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from headwater.client.cli import app
from headwater.common.secagg.identity import AllowList

TASK = "tests/tasks.py:TwoLayers"


def test_check_shows_the_memory_limit_the_task_s_cost_and_the_device_s_speed() -> None:
    threads = torch.get_num_threads()
    try:
        found = CliRunner().invoke(
            app, ["check", "--task", TASK, "--threads", "1", "--memory", "8GB"]
        )
    finally:
        torch.set_num_threads(threads)
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    topics = {line[:11].strip() for line in lines if not line.startswith("  ")} - {""}
    assert topics == {
        "task", "examples", "model", "at rest", "loss", "memory", "speed", "sensors", "gives",
        "training", "fits", "precision", "rate", "a round"
    }  # fmt: skip
    assert "up to 8.0 GB, by memory limit as set" in found.output
    assert "per example of a micro-batch" in found.output
    assert "fastest in" in found.output
    assert "of its time" in found.output
    assert "\n  update vector " in found.output
    assert "\n  total at its peak " in found.output
    assert "fits        in micro-batches of up to" in found.output


STOPPED = """
class Stopped:
    def new_model(self):
        raise KeyboardInterrupt
    def train_examples(self, *, data, part, num_parts): ...
    def loss_sum(self, model, batch): ...
"""


@pytest.mark.parametrize(
    ("command", "said"), [([], "stopped before connecting\n"), (["check"], "stopped\n")]
)
def test_a_client_that_is_interrupted_before_it_connects_speaks_of_no_rounds(
    command: list[str], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "stopped_early.py"
    path.write_text(STOPPED)
    found = CliRunner().invoke(app, [*command, "--task", f"{path}:Stopped", "--threads", "1"])
    assert (found.exit_code, found.output) == (130, said)


def test_check_shows_how_many_rows_cannot_be_trained_on_and_why() -> None:
    task = "tests/stranger_tasks/csv_with_gaps.py:Gaps"
    found = CliRunner().invoke(app, ["check", "--task", task, "--threads", "1"])
    assert found.exit_code == 0, found.output
    assert "left out    5 of 40 examples cannot be trained on" in found.output
    assert "\n  4: its input has a NaN (position 0, 10, 20, 30)\n" in found.output


def test_check_forecasts_the_round_that_a_server_would_ask_for() -> None:
    task = ("--task", "tests/laws/architectures.py:Ragged", "--threads", "1")
    more = ("--tokens-per-update", "600", "--devices", "3")
    found = CliRunner().invoke(app, ["check", *task, *more])
    assert found.exit_code == 0, found.output
    assert re.search(r"^rate +[\d,.]+ tokens, [\d,.]+ examples a second", found.output, re.M)
    [number] = re.findall(r"600 tokens on 3 devices like this one, (\d+) examples", found.output)
    assert 200 / 8 <= int(number) <= 200  # an example has 1 to 8 tokens


BROKEN = """
class Broken:
    def new_model(self):
        import torch
        return torch.nn.Linear(1, 1)
    def train_examples(self, *, data, part, num_parts):
        return self
    def __len__(self):
        return self.number
    def __getitem__(self, position): ...
    def loss_sum(self, model, batch): ...
"""


def test_a_fault_anywhere_in_the_user_s_code_shows_their_line_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "broken_length.py"
    path.write_text(BROKEN)
    found = CliRunner().invoke(app, ["check", "--task", f"{path}:Broken", "--threads", "1"])
    assert found.exit_code == 1
    assert "no attribute 'number'" in found.output
    assert "in __len__" in found.output
    assert "return self.number" in found.output
    assert "typer" not in found.output
    assert "client/commands.py" not in found.output


def test_check_refuses_a_memory_limit_of_zero() -> None:
    found = CliRunner().invoke(app, ["check", "--task", TASK, "--memory-limit", "0"])
    assert found.exit_code == 2


def identity(path: Path, name: str = "pi") -> str:
    """Run the command, and return its line for the allow-lists."""
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


def test_an_identity_s_private_key_is_readable_by_its_owner_only_and_never_shown(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pi.pem"
    command = ["identity", "--identity", str(path), "--name", "pi"]
    shown = [CliRunner().invoke(app, command).output for _ in range(2)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = path.read_text().splitlines()[1]
    assert len(key) == 64  # PKCS #8 of an Ed25519 key in base64
    assert not any(key[:16] in text or key[-16:] in text or "PRIVATE" in text for text in shown)


def test_another_file_is_never_overwritten_by_an_identity(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("mine")
    found = CliRunner().invoke(app, ["identity", "--identity", str(path), "--name", "pi"])
    assert found.exit_code == 2
    assert "IdentityProblem" in found.stderr
    assert path.read_text() == "mine"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_an_identity_that_other_users_may_read_is_refused_until_its_mode_is_600(
    mode: int, tmp_path: Path
) -> None:
    path = tmp_path / "pi.pem"
    identity(path)
    path.chmod(mode)
    found = CliRunner().invoke(app, ["identity", "--identity", str(path), "--name", "pi"])
    assert found.exit_code == 2
    said = "".join(found.stderr.split())  # the console breaks lines where it likes
    assert f"IdentityProblem:{path}:othersmay" in said
    assert "chmod" in said
    path.chmod(0o600)
    identity(path)


def test_an_identity_needs_a_file_and_a_valid_name(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["identity"]).exit_code == 2
    path = tmp_path / "pi.pem"
    found = CliRunner().invoke(app, ["identity", "--identity", str(path), "--name", "a pi"])
    assert found.exit_code == 2
    assert not path.exists()


@pytest.mark.parametrize("lacking", ["--identity", "--allow-list", "own line"])
def test_active_mode_without_its_files_ends_before_the_device_connects(
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
