"""Devices with the same part are named over the network, and never if they require masks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import Processes, port_of, write_task

pytestmark = pytest.mark.slow

SEMI_HONEST = ("--secure-aggregation", "semi-honest")


@pytest.mark.parametrize("masks", [(), SEMI_HONEST])
def test_two_devices_with_one_part_and_one_of_another_division(
    tmp_path: Path, masks: tuple[str, ...]
) -> None:
    task = write_task(tmp_path).spec
    how = ("--rounds", 2, "--accumulation-steps", 1, "--micro-batch-size", 8, *masks)
    with Processes(tmp_path) as processes:
        server = processes.server(*how, "--min-clients", 3, task=task)
        parts = {"left": ("0", "2"), "right": ("0", "2"), "third": ("2", "3")}
        clients = [
            processes.client(
                port_of(server), 0, "--name", name, "--part", part, "--num-parts", number, *masks,
                task=task,
            )
            for name, (part, number) in parts.items()
        ]  # fmt: skip
        for process in (server, *clients):
            process.succeed()
        said = server.text()
    both = "left and right have the same examples" in said or "right and left have" in said
    assert both == (not masks)
    assert ("Start all devices with the same --num-parts" in said) == (not masks)
