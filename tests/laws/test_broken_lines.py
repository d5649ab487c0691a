"""Each law stands in a line; where that line is broken on purpose, a test fails.

``broken_lines.toml`` has for each law the line, what breaks it, and the tests that fail then:
``red`` today, ``before`` in commit 3c2aa2e0, before the core was rebuilt and tests were joined.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LINES: list[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("broken_lines.toml").read_text(encoding="utf-8")
)["line"]
FOLDERS = (
    *("aggregator", "benchmarks", "client", "common", "docs", "examples", "headwater", "server"),
    *("simulation", "tests"),
)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line["law"])
def test_each_line_stands_once_and_its_tests_are_there(line: dict[str, Any]) -> None:
    assert (ROOT / line["file"]).read_text(encoding="utf-8").count(line["text"]) == 1
    assert line["broken"] != line["text"]
    for test in line["red"]:
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The product and its tests, to break."""
    folder = tmp_path_factory.mktemp("copy")
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "node_modules")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("line", LINES, ids=lambda line: line["law"])
def test_a_broken_line_makes_its_tests_fail(line: dict[str, Any], copy: Path) -> None:
    file = copy / line["file"]
    whole = file.read_text(encoding="utf-8")
    file.write_text(whole.replace(line["text"], line["broken"]), encoding="utf-8")
    try:
        done = subprocess.run(
            [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", *line["red"]],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        file.write_text(whole, encoding="utf-8")
    assert done.returncode == 1, done.stdout
    assert " failed" in done.stdout or " error" in done.stdout, done.stdout
