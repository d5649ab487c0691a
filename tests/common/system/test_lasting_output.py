"""A run goes on when its own output cannot be written."""

from __future__ import annotations

import errno
import io
import logging
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from headwater.common.system.lasting_output import LastingStream, lasting_output
from tests.processes import Processes


class FullDisk(io.StringIO):
    """A text stream whose disk is full while ``is_full``."""

    is_full = True

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


def test_a_full_disk_loses_lines_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    disk = FullDisk()
    stream = LastingStream(disk, "the standard output")
    for line in ("one\n", "two\n", "three\n"):
        assert stream.write(line) == len(line)
    assert [record.message for record in caplog.records] == [
        "the standard output cannot be written (No space left on device); the run goes on without "
        "it"
    ]
    disk.is_full = False
    stream.write("four\n")
    stream.flush()
    stream.flush()
    assert disk.getvalue() == "four\n"
    assert [record.message for record in caplog.records[1:]] == [
        "the standard output failed 3 times: lines of it may be missing"
    ]


def test_a_pipe_without_a_reader_is_told_once_and_written_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        stream = LastingStream(pipe, "the standard output")
        for _ in range(3):
            stream.write("a line\n")
            stream.flush()
        stream.settle()  # or closing the pipe would raise
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "Broken pipe" in caplog.text


def test_the_streams_are_as_before_after_the_last_of_several_runs() -> None:
    before = sys.stdout, sys.stderr
    first, second = lasting_output(), lasting_output()
    first.__enter__()
    second.__enter__()
    assert isinstance(sys.stdout, LastingStream)
    assert sys.stdout.encoding == before[0].encoding
    first.__exit__(None, None, None)
    assert isinstance(sys.stderr, LastingStream)
    second.__exit__(None, None, None)
    assert (sys.stdout, sys.stderr) == before


FLAGS = ("--clients", "1", "--rounds", "2", "-v")
ENGINES = pytest.mark.parametrize("engine", ["in-process", "grpc"])


def write_to(output: str) -> None:
    """Replace what this process writes to."""
    reader, descriptor = os.pipe()
    os.close(reader)
    if output == "/dev/full":
        descriptor = os.open(output, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", closefd=False) for stream in (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("output", ["/dev/full", "a pipe without a reader"])
@ENGINES
def test_a_simulation_ends_well_whose_output_fails(
    output: str, engine: str, tmp_path: Path
) -> None:
    if output == "/dev/full" and not Path(output).exists():
        pytest.skip("this system has no /dev/full")
    flags = (*FLAGS, "--engine", engine, "--out", tmp_path / "run")
    with Processes(tmp_path) as processes:
        process = processes.start("simulation", *flags, prepare=partial(write_to, output))
        assert process.wait() == 0


@pytest.mark.slow
@ENGINES
def test_a_simulation_ends_well_without_an_output(engine: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headwater.simulation.cli", "--out", str(tmp_path / "run")]
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command, *FLAGS, "--engine", engine]
    assert subprocess.run(command, timeout=200, check=False).returncode == 0
