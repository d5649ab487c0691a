"""After the end of a run its page stays up as long as a person or a flag wants it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.processes import ROOT, Processes, port_of, write_task

pytestmark = pytest.mark.slow

RUN = ("--rounds", 1, "--accumulation-steps", 1, "--micro-batch-size", 8)
STAYS = r"the run has ended; the page stays at (\S+)"


def assert_is_served(link: str) -> None:
    with urllib.request.urlopen(link, timeout=60) as page:
        assert page.status == 200


def test_a_page_stays_as_long_as_the_flag_says_and_the_devices_are_dismissed(
    tmp_path: Path,
) -> None:
    task = write_task(tmp_path).spec
    with Processes(tmp_path) as processes:
        page = ("--page", "127.0.0.1:0", "--page-stays", 600)
        server = processes.server(*RUN, *page, "--min-clients", 1, task=task)
        client = processes.client(port_of(server), 0, task=task)
        link = server.wait_for(STAYS).group(1)
        client.succeed()
        assert_is_served(link)
        server.kill(signal.SIGINT)
        server.succeed()


def test_a_page_goes_with_the_run_where_there_is_no_terminal(tmp_path: Path) -> None:
    task = write_task(tmp_path).spec
    with Processes(tmp_path) as processes:
        given = ("--clients", 2, "--out", tmp_path / "out", "--task", task)
        run = processes.start("simulation", *RUN, *given, "--page", "127.0.0.1:0")
        run.succeed()
        assert "the page stays" not in run.text()


def test_a_page_stays_in_a_terminal_until_it_is_interrupted(tmp_path: Path) -> None:
    task, out = write_task(tmp_path).spec, tmp_path / "out"
    ours, theirs = pty.openpty()
    given = (*RUN, "--clients", 2, "--out", out, "--task", task, "--page", "127.0.0.1:0")
    with subprocess.Popen(
        [sys.executable, "-m", "headwater.simulation", *map(str, given)],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", "TERM": "dumb"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as run:
        os.close(theirs)
        text = ""
        while "until Ctrl-C" not in text:
            text += os.read(ours, 65_536).decode()
        assert_is_served(text.partition("the page stays at ")[2].split()[0])
        run.send_signal(signal.SIGINT)
        try:
            while more := os.read(ours, 65_536):
                text += more.decode()
        except OSError:  # EIO: the last process of the terminal has ended
            pass
        assert run.wait() == 0
    os.close(ours)
    assert "Traceback" not in text
    assert "model.safetensors" in text
