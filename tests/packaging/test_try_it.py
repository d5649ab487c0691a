"""Each command that the examples and the docs show runs from the wheel, in an empty folder."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.installed_commands import InstalledCommands
from tests.venvs import ROOT

SOURCES = [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "docs").glob("*.md"))]
# Alone on its line, indented as an example. A real client is not here: it waits for a server.
COMMAND = re.compile(
    r"^ {4,}((?:headwater-simulate|headwater-client check|python -m headwater[.]|python -c ).*)$",
    re.M,
)
# What is added to the commands that match, so that each does little: a later flag holds.
SHORTER = {
    r"headwater-simulate(?! compare)": "--rounds 1",
    r"headwater-simulate compare": "--budget rounds=1",
    r"headwater-simulate (sweep|compare)": "--seeds 0 --jobs 1",
    r"headwater-simulate(?!.*--tokens-per).*(causal_lm|image_|text_)": "--effective-batch-size 32",
    r"python -m headwater[.]examples[.]inversion": "--steps 3",
}
# The files of a user's own that the docs name, and do not show how to write.
FILES = {
    "my_task.py": "from headwater.examples.digits import Digits as MyTask\n",
}


def commands_of(source: Path) -> list[str]:
    """Return the commands of a file, each on one line and with little to do."""
    text = re.sub(r"\\\n\s*", "", source.read_text())
    found = [command.partition("  #")[0].rstrip() for command in COMMAND.findall(text)]
    return [
        " ".join([command, *(more for kind, more in SHORTER.items() if re.match(kind, command))])
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
def bin_folder(wheel_folder: Path) -> Path:
    return wheel_folder / "venv" / "bin"


@pytest.fixture(scope="module")
def commands(
    bin_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InstalledCommands]:
    log = tmp_path_factory.mktemp("commands") / "log"
    with InstalledCommands(bin_folder, log) as found:
        yield found


LONG = {"bytes.md", "causal_lm.py", "page.md"}
"""Half a minute each of commands that other pages have too."""


@pytest.mark.slow
@pytest.mark.parametrize("side", ["client", "server", "simulate"])
def test_each_command_is_a_script_of_the_environment(side: str, bin_folder: Path) -> None:
    done = subprocess.run([bin_folder / f"headwater-{side}", "--version"], stdout=subprocess.PIPE)
    assert done.stdout.startswith(b"headwater ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(file, marks=pytest.mark.long if file.name in LONG else ())
        for file in SOURCES
        if commands_of(file)
    ],
    ids=lambda file: file.name,
)
def test_the_commands_run_in_an_empty_folder(
    source: Path, commands: InstalledCommands, tmp_path: Path
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "rainfall.py").write_text(block_of("task.md", "python"))
    (tmp_path / "rates.toml").write_text(block_of("sweep.md", "toml"))
    for command in commands_of(source):
        ended = commands.run(command, tmp_path)
        assert ended.status == 0, f"{command}\n{ended.text}"
