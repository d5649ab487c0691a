"""The installer, run as root, executes nothing of the caller's folder or environment.

It runs to its download, which finds no torch, with its places below a temporary folder and the
tools that change the machine replaced by ones that do nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "install-client.sh"
PLANTED = ("venv", "pip", "zipfile", "pathlib", "sitecustomize", "tomllib", "ensurepip")
TOOLS = {
    "id": "echo 0",
    "dpkg": "echo amd64",
    "dpkg-query": "echo install ok installed",
    "getent": "exit 0",
    "df": "printf 'head\\nx 9999999 1 9999999 1%% /\\n'",
    "uname": "echo x86_64",
}


def plant(folder: Path, *, markers: Path) -> None:
    """Write modules that note that they were imported."""
    folder.mkdir()
    markers.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open({str(markers / name)!r}, 'w').close()\n")


def install(room: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    text = SCRIPT.read_text()
    for name in ("PREFIX", "SETTINGS", "STATE", "UNITS"):
        text, count = re.subn(rf"^{name}=.*", f"{name}={room}/{name.lower()}", text, flags=re.M)
        assert count == 1
    text = text.replace("/run/headwater-install.lock", f"{room}/lock")
    (room / "install-client.sh").write_text(text)
    (room / "tools").mkdir()
    for name, body in TOOLS.items():
        (room / "tools" / name).write_text(f"#!/bin/sh\n{body}\n")
        (room / "tools" / name).chmod(0o755)
    return subprocess.run(
        ["sh", room / "install-client.sh", "--source", ROOT],
        cwd=room / "folder",
        env={
            "PATH": f"{room}/tools:{os.environ['PATH']}",
            "HOME": str(room),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_RETRIES": "0",
            "TORCH_INDEX": "http://127.0.0.1:1/none",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


Run = tuple[Path, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Install from a folder with planted modules, with a planted PYTHONPATH and false wheels."""
    room = tmp_path_factory.mktemp("room")
    for kind in ("folder", "path"):
        plant(room / kind, markers=room / f"executed-{kind}")
    wheels = room / "wheels"
    wheels.mkdir()
    for tag in ("cp311", "cp312", "cp313"):
        (wheels / f"torch-2.13.0+cpu-{tag}-{tag}-manylinux_2_28_x86_64.whl").write_bytes(b"false")
    found = install(room, PYTHONPATH=str(room / "path"), PIP_FIND_LINKS=str(wheels))
    return room, found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "path"])
def test_a_module_planted_by_the_caller_is_not_executed(kind: str, run: Run) -> None:
    room, found = run
    assert "NoTorch" in found.stderr, found.stderr  # after it made a venv and ran its pip
    executed = sorted(path.name for path in (room / f"executed-{kind}").iterdir())
    assert executed == []


@pytest.mark.slow
def test_a_torch_with_another_hash_is_not_taken_and_nothing_stays(run: Run) -> None:
    room, found = run
    assert "no torch could be had whose SHA-256 is in deploy/torch.txt" in found.stderr
    assert not (room / "prefix").exists()


@pytest.mark.slow
def test_a_token_among_the_installer_s_arguments_is_refused_and_not_repeated() -> None:
    found = subprocess.run(
        ["sh", SCRIPT, "--join", "headwater-join-1.secret"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1
    assert "TokenInArguments" in found.stderr
    assert "headwater-join-1.secret" not in found.stdout + found.stderr
