"""``make digests`` pins every public image of deploy/, or changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
PROGRAM = DEPLOY / "pin_images.py"
NAMES = ("Dockerfile", "compose.yaml")
# A docker that knows one digest for every image, but for those that its own test forbids.
DOCKER = """#!/bin/sh
case "$4" in
    *"$REFUSED"*) [ -z "$REFUSED" ] || { echo "no such image" >&2; exit 1; } ;;
esac
printf 'sha256:%064d\\n' 7
"""


def run(folder: Path, *, refused: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "docker").write_text(DOCKER)
    (folder / "docker").chmod(0o755)
    return subprocess.run(
        [sys.executable, PROGRAM, *(folder / name for name in NAMES)],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "REFUSED": refused},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).write_text((DEPLOY / name).read_text())
    return tmp_path


@pytest.mark.slow
def test_each_public_image_is_pinned_and_our_own_are_not(folder: Path) -> None:
    assert run(folder).returncode == 0
    first = {name: (folder / name).read_text() for name in NAMES}
    services = yaml.safe_load(first["compose.yaml"])["services"]
    for name, service in services.items():
        assert ("@sha256:" in service["image"]) == (name in {"prometheus", "grafana"})
    bases = [line.split() for line in first["Dockerfile"].splitlines() if line.startswith("FROM")]
    outside = [words[1] for words in bases if ":" in words[1]]
    assert len(outside) == 1
    assert "@sha256:" in outside[0]
    assert run(folder).returncode == 0
    assert {name: (folder / name).read_text() for name in NAMES} == first


@pytest.mark.slow
def test_nothing_is_written_if_one_digest_is_not_known(folder: Path) -> None:
    found = run(folder, refused="grafana")
    assert found.returncode == 1
    assert "docker knows no digest of grafana/grafana" in found.stderr
    assert all((folder / name).read_text() == (DEPLOY / name).read_text() for name in NAMES)
