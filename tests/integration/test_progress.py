"""A simulation in a terminal of 80 columns, at its end and when it is interrupted."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import ROOT, WAIT_SECONDS

pytestmark = pytest.mark.slow

COLUMNS = 80
HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
SLOW_TASK = """
import time

from headwater_digits import Digits


class Slow(Digits):
    def loss_sum(self, model, batch):
        time.sleep(0.05)
        return super().loss_sum(model, batch)
"""


class Terminal:
    """A command in a terminal of its own, and all that it has written there."""

    def __init__(self, *command: object) -> None:
        self.written = b""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, COLUMNS, 0, 0))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(
            [sys.executable, "-m", *map(str, command)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm"},
            process_group=0,
        )
        signal.signal(signal.SIGINT, before)
        os.close(slave)

    def read(self) -> bool:
        """Read what was written since; False if the terminal is closed."""
        try:
            data = os.read(self._master, 65_536)
        except OSError:
            return False
        self.written += data
        return bool(data)

    def read_until(self, pattern: bytes) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while not re.search(pattern, self.written):
            assert self.read(), self.text
            assert time.monotonic() < end, self.text

    def wait(self) -> int:
        """Read to the end, and return the exit status."""
        while self.read():
            pass
        return self.process.wait()

    @property
    def text(self) -> str:
        """All that was written, without the terminal's control sequences."""
        return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", self.written.decode()).replace("\r", "")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def simulation(task: str, out: Path, *more: object) -> Terminal:
    return Terminal(
        *("headwater.simulation", "--task", task, "--clients", 5, "--no-check", "--out", out),
        *("--compute", "one-by-one"),
        *more,
    )


def test_a_finished_simulation_shows_every_figure_within_80_columns(
    tmp_path: Path, terminals: list[Terminal]
) -> None:
    terminal = simulation("examples/digits.py:Digits", tmp_path / "out", "--rounds", 5)
    terminals.append(terminal)
    assert terminal.wait() == 0, terminal.text
    block = terminal.text[terminal.text.rindex("round 5 of 5") :]  # as it was drawn last
    shown = block[: block.index("after round 5")].splitlines()
    assert max(map(len, shown)) <= COLUMNS
    for figure in (
        "a round",
        "loss ",
        "test accuracy ",
        " examples",
        "5 of 5 devices",
        "slowest ",
        "0 left out",
    ):
        assert any(figure in line for line in shown), figure
    assert "…" not in terminal.text
    assert "Traceback" not in terminal.text
    assert terminal.written.rindex(SHOW) > terminal.written.rindex(HIDE)


def test_ctrl_c_leaves_the_terminal_with_its_cursor_and_no_traceback(
    tmp_path: Path, terminals: list[Terminal]
) -> None:
    digits = (ROOT / "examples" / "digits.py").read_text()
    (tmp_path / "headwater_digits.py").write_text(digits)
    (tmp_path / "slow.py").write_text(SLOW_TASK)
    terminal = simulation(f"{tmp_path / 'slow.py'}:Slow", tmp_path / "out", "--rounds", 1000)
    terminals.append(terminal)
    terminal.read_until(rb"loss ")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.wait() == 130, terminal.text
    assert "Traceback" not in terminal.text
    assert "--resume continues" in terminal.text
    assert terminal.written.rindex(SHOW) > terminal.written.rindex(HIDE)
