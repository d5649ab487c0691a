"""The command ``headwater`` and its subcommands, as a user types them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import headwater
from headwater.__main__ import COMMANDS, SHORT
from tests.processes import ROOT, until


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headwater", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_help_opens_with_three_examples_and_fits_on_a_screen() -> None:
    alone, asked = run(), run("--help")
    assert (alone.returncode, asked.returncode) == (2, 0)
    lines = asked.stdout.splitlines()
    assert len(lines) <= 40
    examples = [line.split()[1] for line in lines[:12] if line.startswith("    headwater ")]
    assert examples == [*COMMANDS]
    for name in (*COMMANDS, *SHORT):
        assert any(line.startswith(f"  {name} ") for line in lines)


@pytest.mark.parametrize("name", [*COMMANDS, *SHORT])
def test_each_subcommand_has_the_help_of_its_own_command(name: str) -> None:
    found = run(name, "--help")
    assert found.returncode == 0, found.stderr
    usage = found.stdout.splitlines()[0]
    assert usage.startswith("Usage: headwater ")
    assert name in usage


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version").stdout == f"headwater {headwater.__version__}\n"


def test_a_misspelt_subcommand_is_told_which_is_near() -> None:
    found = run("simulat", "--rounds", "1")
    assert found.returncode == 2
    assert "Did you mean 'simulate'?" in found.stderr


def test_an_error_has_its_remedy_and_its_status(tmp_path: Path) -> None:
    found = run("simulate", "--task", "nothing.py:Mine", "--out", tmp_path)
    assert found.returncode == 2
    assert "UnknownTask" in found.stderr
    assert "remedy:" in found.stderr


@pytest.mark.slow
def test_a_run_until_ctrl_c_and_its_continuation(tmp_path: Path) -> None:
    out = tmp_path / "run"
    few = ("--clients", "3", "--threads", "1", "--out", str(out))
    with subprocess.Popen(
        [sys.executable, "-m", "headwater", "simulate", *few, "--rounds", "100000"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        lines = out / "rounds.jsonl"
        until(lambda: lines.exists() and lines.stat().st_size > 0, what=lambda: "a round")
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    number = len(lines.read_text().splitlines())
    again = run("simulate", "--resume", "--out", out, "--rounds", str(number + 1))
    assert again.returncode == 0, again.stderr
    assert len(lines.read_text().splitlines()) == number + 1


SHELLS = {
    "bash": {"COMP_WORDS": "{}", "COMP_CWORD": "{last}"},
    "zsh": {"_TYPER_COMPLETE_ARGS": "{}"},
    "fish": {"_TYPER_COMPLETE_ARGS": "{}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
}


@pytest.mark.parametrize(
    ("shell", "typed", "meant"),
    [
        ("bash", "headwater sim", "simulate"),
        ("bash", "headwater server dr", "drain"),
        ("bash", "headwater simulate --accumulation", "--accumulation-steps"),
        ("bash", "headwater compare --bud", "--budget"),
        ("zsh", "headwater server dr", "drain"),
        ("fish", "headwater compare --bud", "--budget"),
    ],
)
def test_a_shell_completes_subcommands_and_flags(shell: str, typed: str, meant: str) -> None:
    last = str(len(typed.split()) - 1)
    given = {key: value.format(typed, last=last) for key, value in SHELLS[shell].items()}
    found = run(_HEADWATER_COMPLETE=f"complete_{shell}", **given)
    assert meant in found.stdout


def test_a_completion_is_installed_for_the_shell_that_asks(tmp_path: Path) -> None:
    asked = f"{sys.executable} -m headwater --install-completion; exit $?"  # not in bash's place
    found = subprocess.run(
        ["bash", "--norc", "-c", asked],
        cwd=ROOT,
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert any("_HEADWATER_COMPLETE" in text for text in texts)
