"""What releases a version: the target that builds it, and the workflows that call targets."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import headwater

ROOT = Path(__file__).parents[2]
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in (ROOT / ".github" / "workflows").glob("*.yml")
}
JOBS = [(name, job) for name, workflow in WORKFLOWS.items() for job in workflow["jobs"].values()]
PROJECT = ("Makefile", "pyproject.toml", "CHANGELOG.md", "CITATION.cff")


def steps(key: str) -> list[tuple[dict[str, Any], str]]:
    """Return what the steps of all workflows have of a key, each with its job."""
    return [(job, step[key]) for _, job in JOBS for step in job["steps"] if key in step]


def test_each_workflow_calls_targets_that_the_makefile_has() -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    called = set()
    for job, command in steps("run"):
        for target in re.findall(r"\bmake (?:--\S+ )*(\$\{\{.*?\}\}|[a-z-]+)", command):
            is_matrix = "matrix.target" in target
            called |= {*job["strategy"]["matrix"]["target"]} if is_matrix else {target}
    assert {"test", "test-slow", "test-long", "release", "notes", "site"} <= called <= known


def test_each_action_is_of_a_version() -> None:
    for _, action in steps("uses"):
        assert re.fullmatch(r"[\w./-]+@v[0-9.]+", action), action


def test_a_workflow_has_no_secret_and_writes_only_where_a_job_says_so() -> None:
    for path in (ROOT / ".github" / "workflows").iterdir():
        assert "secrets." not in path.read_text()
        assert WORKFLOWS[path.stem]["permissions"] == {"contents": "read"}
    publish = WORKFLOWS["release"]["jobs"]["pypi"]
    assert publish["environment"] == "pypi"
    assert publish["permissions"] == {"id-token": "write"}


def test_only_a_tag_of_a_version_releases() -> None:
    triggers = WORKFLOWS["release"][True]  # YAML 1.1 reads the key `on` as true
    assert triggers == {"push": {"tags": ["v*"]}}


def test_an_image_is_built_of_each_stage_that_devices_and_servers_run() -> None:
    sides = WORKFLOWS["release"]["jobs"]["images"]["strategy"]["matrix"]["side"]
    stages = re.findall(r"^FROM side AS (\w+)$", (ROOT / "deploy/Dockerfile").read_text(), re.M)
    assert sorted(sides) == sorted(stages)


def git(folder: Path, *words: str) -> None:
    own = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
    subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in PROJECT:
        shutil.copy(ROOT / name, tmp_path)
    git(tmp_path, "init")
    return tmp_path


def released(folder: Path, *words: str) -> str:
    """Commit the folder and return why no release is made of it; python would make its venv."""
    git(folder, "add", ".")
    git(folder, "commit", "--message", "all")
    return refusal(folder, *words)


def refusal(folder: Path, *words: str) -> str:
    command = ["make", "release", "PYTHON=no-such-python", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    found = re.search(r"make release: (\w+): ", done.stderr)
    return found[1] if found else ""


def change(path: Path, before: str, since: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, since))


def test_a_clean_tree_with_a_heading_is_built(project: Path) -> None:
    assert released(project) == ""
    assert refusal(project, f"TAG=v{headwater.__version__}") == ""


def test_what_is_not_committed_is_not_released(project: Path) -> None:
    assert released(project) == ""
    (project / "new.py").touch()
    assert refusal(project) == "UncommittedChanges"


def test_a_tag_of_another_version_is_not_released(project: Path) -> None:
    assert released(project, "TAG=v9.9.9") == "OtherTag"


def test_a_version_that_the_changelog_does_not_know_is_not_released(project: Path) -> None:
    change(project / "CHANGELOG.md", f"## {headwater.__version__} (", "## Unreleased (")
    assert released(project) == "NoHeading"


def test_a_version_that_is_cited_otherwise_is_not_released(project: Path) -> None:
    change(project / "CITATION.cff", f"version: {headwater.__version__}", "version: 0.0.1")
    assert released(project) == "OtherCitation"


def test_the_notes_of_a_release_are_its_part_of_the_changelog(project: Path) -> None:
    (project / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## 99.0 (date)\n\nlater\n\n## {headwater.__version__} (date)\n\nours\n\n"
        "### Part\n\n## 0.0.1 (date)\n\nearlier\n"
    )
    done = subprocess.run(
        ["make", "--silent", "notes"], cwd=project, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n\n")[1:] == ["ours", "### Part", ""]
