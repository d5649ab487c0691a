"""What a device does when its run has ended, or its server was drained."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from headwater.server.operations import orders
from tests.processes import Processes, assert_tidy, free_port, port_of, rows, until, write_task
from tests.statistics.measured import HOUSES

pytestmark = pytest.mark.slow

PLAN = ("--accumulation-steps", 1, "--micro-batch-size", 8, "--min-clients", 1)


def test_a_device_waits_for_the_server_that_was_drained(tmp_path: Path) -> None:
    task, out = write_task(tmp_path).spec, tmp_path / "out"
    port = free_port()
    listen = ("--listen", f"127.0.0.1:{port}")
    with Processes(tmp_path) as processes:
        server = processes.server("--rounds", 100_000, *PLAN, *listen, task=task)
        server.wait_for("listening")
        device = processes.client(port, 0, task=task, waits=True)
        until(lambda: (out / "rounds.jsonl").exists() and len(rows(out)) > 1, what=server.text)
        orders.write_order(out, "drain")
        assert server.wait() == 0
        device.wait_for("this device waits for the next one, 10 min")
        done = len(rows(out))
        processes.server("--resume", "--rounds", done + 2, *listen, task=task).succeed()
        assert len(rows(out)) == done + 2
        device.kill(signal.SIGTERM)
        assert device.wait() == 0
        assert_tidy(device)
        assert "0: done" in device.text()
        assert "trying again" not in device.text()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--secure-aggregation", "semi-honest"), "did not count: MaskingRequired"),
        (("--label", "site=elsewhere"), "this device was in no round"),
    ],
)
def test_a_device_that_no_round_counted_learns_why_at_the_end(
    tmp_path: Path, flags: tuple[str, ...], told: str
) -> None:
    task = write_task(tmp_path).spec
    with Processes(tmp_path) as processes:
        given = ("--devices", "site=here") if "--label" in flags else ()
        server = processes.server("--rounds", 200, *PLAN, *given, task=task)
        port = port_of(server)
        without = processes.client(port, 1, *flags, task=task)
        without.wait_for(f"server 127.0.0.1:{port}")
        trained = processes.client(port, 0, *("--label", "site=here"), task=task)
        server.succeed()
        assert trained.wait() == without.wait() == 0
        assert told in without.text()
        assert "did not count" not in trained.text()
        assert "in no round" not in trained.text()


def test_a_device_that_waited_takes_no_statistics_into_the_next_run(tmp_path: Path) -> None:
    port = free_port()
    given = ("--listen", f"127.0.0.1:{port}", "--optimizer", "sgd", "--learning-rate", 1e-9, *PLAN)
    with Processes(tmp_path) as processes:
        losses = []
        device = processes.client(port, 0, task=HOUSES, waits=True)
        for number, more in enumerate(((), ("--statistics",), ())):
            out = tmp_path / f"run{number}"
            rounds = ("--rounds", 1 + len(more), "--out", out)
            processes.server(*given, *rounds, *more, task=HOUSES).succeed()
            losses.append(rows(out)[-1]["loss"])
        device.kill(signal.SIGTERM)
        assert device.wait() == 0
    assert losses[0] == losses[2] > 3 * losses[1]


def test_a_device_whose_patience_for_the_next_run_ends_has_done_its_work(tmp_path: Path) -> None:
    task, port = write_task(tmp_path).spec, free_port()
    with Processes(tmp_path) as processes:
        listen = ("--listen", f"127.0.0.1:{port}")
        server = processes.server("--rounds", 1, *PLAN, *listen, task=task)
        server.wait_for("listening")
        device = processes.client(port, 0, "--patience", 1, task=task, waits=True)
        device.succeed()
        server.succeed()
        assert "waits for the next one, 1 s" in device.text()
        assert "0: done" in device.text()
        assert "ConnectionLost" not in device.text()
        late = processes.client(port, 0, "--patience", 1, task=task, waits=True)
        assert late.wait() == 1
        assert "could not be reached for 1 s" in late.text()
