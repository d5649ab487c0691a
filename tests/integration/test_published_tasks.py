"""Published tasks, in processes: devices without the task's file fetch it, and follow it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.processes import Process, Processes, free_port, rows, until
from tests.task_bundles.bundles import new_key, publish_code, write_code

pytestmark = pytest.mark.slow

PLAN = ("--rounds", 2, "--accumulation-steps", 2, "--micro-batch-size", 10)


def device(processes: Processes, port: int, part: int, trust: str, *more: object) -> Process:
    own = ("--server", f"127.0.0.1:{port}", "--name", part, "--part", part, "--num-parts", 3)
    folder = processes.folder / f"state{part}"
    where = ("--state", folder, "--threads", 1, "--patience", 120)
    return processes.start("client", *own, *where, "--trust", trust, *more)


@pytest.mark.parametrize("masks", [(), ("--secure-aggregation", "semi-honest")], ids=str)
def test_devices_fetch_the_task_and_make_the_simulator_s_model(
    masks: tuple[str, ...], tmp_path: Path
) -> None:
    key, trust = new_key(tmp_path / "signer.key")
    bundle, file = publish_code(tmp_path, key, version=1)
    with Processes(tmp_path) as processes:
        port = free_port()
        listen = ("--listen", f"127.0.0.1:{port}", "--min-clients", 3)
        # The devices ask before there is a server, and wait for one.
        devices = [device(processes, port, part, trust, "--once", *masks) for part in range(3)]
        devices[0].wait_for("trying again")
        server = processes.server(*PLAN, *listen, *masks, task=str(file))
        for process in (server, *devices):
            process.succeed()
        assert f"task Parity 1, {bundle.digest[:16]}, signed" in devices[0].text()
        flat = tmp_path / "flat"
        more = ("--clients", 3, "--threads", 1, "--out", flat, "--task", write_code(tmp_path))
        processes.run("simulation", *PLAN, *more).succeed()
        kept = processes.complete("client", "tasks", "--json", "--state", tmp_path / "state0")
    (row,) = [json.loads(line) for line in kept.stdout.splitlines()]
    assert (row["name"], row["version"], row["digest"]) == ("Parity", 1, bundle.digest)
    losses, flat_losses = ([row["loss"] for row in rows(one)] for one in (tmp_path / "out", flat))
    assert len(losses) == 2
    if not masks:  # under which devices take their examples in an order of their own
        assert losses == flat_losses


def test_a_waiting_device_follows_the_next_version_and_refuses_an_older_one(
    tmp_path: Path,
) -> None:
    key, trust = new_key(tmp_path / "signer.key")
    versions = [publish_code(tmp_path, key, version=v, width=8 * v)[1] for v in (1, 2)]
    port = free_port()
    listen = ("--listen", f"127.0.0.1:{port}", "--min-clients", 1)
    with Processes(tmp_path) as processes:
        waiting = device(processes, port, 0, trust, "--stay")
        for number, file in enumerate(versions):
            out = ("--out", tmp_path / f"run{number}")
            processes.server(*PLAN, *listen, *out, task=str(file)).succeed()
        waiting.wait_for("goes on with the task Parity 2")
        assert len(rows(tmp_path / "run1")) == 2  # a wider model: the second version's code
        out = ("--out", tmp_path / "run2")
        older = processes.server(*PLAN, *listen, *out, task=str(versions[0]))
        waiting.wait_for(
            "TaskBundleRefused: the server's task Parity 1 is older than the version 2"
        )
        older.wait_for("0 takes no part: TaskBundleRefused: 0: the server's task Parity 1 is older")
        older.kill(signal.SIGTERM)
        waiting.kill(signal.SIGTERM)
        assert waiting.wait() == 0


def test_a_device_says_why_it_takes_no_task(tmp_path: Path) -> None:
    key, trust = new_key(tmp_path / "signer.key")
    _, other = new_key(tmp_path / "other.key")
    bundle, file = publish_code(tmp_path, key, version=1)
    port = free_port()
    listen = ("--listen", f"127.0.0.1:{port}", "--min-clients", 1, "--rounds", 1)
    with Processes(tmp_path) as processes:
        server = processes.server(*listen, task=str(file))
        server.wait_for("listening")
        refused = device(processes, port, 0, other, "--once")
        assert refused.wait() != 0
        assert f"signed by {trust}, whom this device does not trust" in refused.text()
        assert f"is signed by {trust}" in refused.text()
        assert "by another way than this server" in refused.text()
        pinned = device(processes, port, 1, trust, "--once", "--pin-task", "0" * 16)
        assert pinned.wait() != 0
        assert f"--pin-task {bundle.digest[:16]}" in pinned.text()
        for name, why in ((0, f"signed by {trust}, whom"), (1, "has the digest")):
            server.wait_for(f"{name} takes no part: TaskBundleRefused: {name}: the server's task")
            assert why in server.text()
        records = tmp_path / "out" / "devices.json"  # written once a second
        until(lambda: records.exists() and "TaskBundleRefused" in records.read_text(), what=str)
        shown = processes.complete("server", "status", "--out", tmp_path / "out")
        assert "0 refused at" in shown.stdout
        server.kill(signal.SIGTERM)
        server.wait()
        plain = processes.server(*listen, "--out", tmp_path / "o", task=write_code(tmp_path / "c"))
        plain.wait_for("listening")
        asked = device(processes, port, 0, trust, "--once")
        assert asked.wait() != 0
        assert "has a task that was not published" in asked.text()


def test_a_device_without_trust_takes_no_code(tmp_path: Path) -> None:
    key, trust = new_key(tmp_path / "signer.key")
    _, file = publish_code(tmp_path, key, version=1)
    own = write_code(tmp_path / "own")
    port = free_port()
    listen = ("--listen", f"127.0.0.1:{port}", "--min-clients", 2, *PLAN)
    with Processes(tmp_path) as processes:
        server = processes.server(*listen, task=str(file))
        devices = [
            processes.client(port, 0, "--state", tmp_path / "state0", task=own),
            device(processes, port, 1, trust, "--once"),
        ]
        for process in (server, *devices):
            process.wait()
    assert not (tmp_path / "state0" / "tasks").exists()
    assert (tmp_path / "state1" / "tasks").exists()


def test_the_commands_make_a_key_and_a_bundle(tmp_path: Path) -> None:
    spec = write_code(tmp_path / "code")
    with Processes(tmp_path) as processes:
        made = processes.complete("server", "signer", tmp_path / "signer.key")
        again = processes.complete("server", "signer", tmp_path / "signer.key")
        assert made.stdout == again.stdout
        assert "keep it secret" in made.stderr
        given = ("--key", tmp_path / "signer.key", "--folder", tmp_path / "code")
        written = processes.complete("server", "publish", spec, *given)
        assert "Parity-1.task: Parity 1, 2 files" in written.stdout
        assert f"--trust {made.stdout.strip()}" in written.stdout
        listed = processes.complete("client", "tasks", "--state", tmp_path / "none")
        assert "has taken no task" in listed.stdout
