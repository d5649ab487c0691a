"""What a person sees who tries a task on a device."""

from __future__ import annotations

import torch
from typer.testing import CliRunner

from client.cli import app

TASK = "tests/tasks.py:TwoLayers"


def test_check_shows_what_limits_the_device_what_a_task_takes_and_what_it_gives() -> None:
    threads = torch.get_num_threads()
    try:
        found = CliRunner().invoke(
            app, ["check", "--task", TASK, "--threads", "1", "--memory-limit", "1000000000"]
        )
    finally:
        torch.set_num_threads(threads)
    assert found.exit_code == 0, found.output
    topics = {line[:11].strip() for line in found.output.splitlines()} - {""}
    assert topics == {
        "task", "examples", "model", "loss", "memory", "speed", "sensors", "gives"
    }  # fmt: skip
    assert "up to 1.0 GB, by memory limit as set" in found.output
    assert "per example of a micro-batch" in found.output
    assert "fastest in" in found.output
    assert "of its time" in found.output


def test_check_takes_no_memory_limit_of_nothing() -> None:
    found = CliRunner().invoke(app, ["check", "--task", TASK, "--memory-limit", "0"])
    assert found.exit_code == 2
