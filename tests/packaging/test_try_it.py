"""Each command that the examples and the docs show runs from the wheel, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.venvs import ROOT, build_wheel, install, make_venv

SOURCES = [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "docs").glob("*.md"))]
# Alone on its line, indented as an example. A real client is not here: it waits for a server.
COMMAND = re.compile(
    r"^ {4,}((?:headwater-simulate|headwater-client check|python -m headwater[.]|python -c ).*)$",
    re.M,
)
# The files of a user's own that the docs name, and do not show how to write.
FILES = {
    "my_task.py": "from headwater.examples.digits import Digits as MyTask\n",
    "liars.toml": '[[liar]]\nshare = 0.1\nkind = "nan"\n',
}


def commands_of(source: Path) -> list[str]:
    """Return the commands of a file, each on one line and with few rounds."""
    text = re.sub(r"\\\n\s*", "", source.read_text())
    found = [command.partition("  #")[0].rstrip() for command in COMMAND.findall(text)]
    return [
        f"{command} --rounds 1 --seeds 0"
        if command.startswith("headwater-simulate sweep")
        else f"{command} --rounds 1"
        if command.startswith("headwater-simulate")
        else command
        for command in dict.fromkeys(found)
    ]


def block_of(page: str, language: str) -> str:
    """Return the first block of a page in this language."""
    text = (ROOT / "docs" / page).read_text()
    found = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found is not None, page
    return found.group(1)


def test_every_example_has_a_command() -> None:
    assert [file.name for file in (ROOT / "examples").glob("*.py") if not commands_of(file)] == []


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    found = make_venv(folder / "venv")
    install(build_wheel(folder), found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "source", [file for file in SOURCES if commands_of(file)], ids=lambda file: file.name
)
def test_the_commands_run_in_an_empty_folder(
    source: Path, bin_folder: Path, tmp_path: Path
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "rainfall.py").write_text(block_of("task.md", "python"))
    (tmp_path / "rates.toml").write_text(block_of("sweep.md", "toml"))
    environment = {key: it for key, it in os.environ.items() if key != "PYTHONPATH"}
    environment["PATH"] = f"{bin_folder}{os.pathsep}{environment['PATH']}"
    for command in commands_of(source):
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
