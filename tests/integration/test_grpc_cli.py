"""What a person sees who gave a command that cannot work."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from tests.processes import Process, Processes, assert_tidy, free_port, port_of, write_task

pytestmark = pytest.mark.slow

TASK = "examples/digits.py:Digits"
NOBODY = ("--server", "127.0.0.1:1", "--patience", 0.2)


def assert_refused(process: Process, code: str, *, status: int) -> None:
    """Hold that the command ended by a named error with its remedy, and nothing else."""
    assert process.wait() == status, process.text()
    assert f"{code}: " in process.text()
    assert "remedy: " in process.text()
    assert_tidy(process)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    task = write_task(tmp_path).spec
    with socket.create_server(("127.0.0.1", 0)) as taken, Processes(tmp_path) as processes:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        server = processes.server("--listen", address, task=task)
        assert_refused(server, "PortInUse", status=2)
        assert address in server.text()


def test_a_second_server_does_not_share_the_port_of_the_first(tmp_path: Path) -> None:
    task = write_task(tmp_path).spec
    with Processes(tmp_path) as processes:
        port = port_of(processes.server(task=task))
        second = processes.server("--listen", f"127.0.0.1:{port}", "--out", tmp_path, task=task)
        assert_refused(second, "PortInUse", status=2)


@pytest.mark.parametrize("spec", ["nowhere.py:Task", "examples/digits.py:Letters", "digits"])
def test_an_unknown_task_is_named_on_both_sides(spec: str, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        server = processes.server(task=spec)
        client = processes.client(1, 0, task=spec)
        assert_refused(server, "UnknownTask", status=2)
        assert_refused(client, "UnknownTask", status=2)


def test_data_that_is_not_there_is_named_before_anything_is_connected(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        gone = ("--data", tmp_path / "nowhere")
        client = processes.client(1, 0, *NOBODY, *gone, task=write_task(tmp_path).spec)
        assert_refused(client, "MissingData", status=2)
        assert "127.0.0.1:1" not in client.text()


def test_an_empty_dataset_is_named_before_anything_is_connected(tmp_path: Path) -> None:
    spec = write_task(tmp_path).spec
    path = Path(spec.removesuffix(":Task"))
    path.write_text(path.read_text().replace("50 + 7 * part", "0"))
    with Processes(tmp_path) as processes:
        client = processes.client(1, 0, *NOBODY, task=spec)
        assert_refused(client, "EmptyDataset", status=2)
        assert "127.0.0.1:1" not in client.text()


def test_a_server_that_is_not_there_is_given_up_after_the_patience(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        client = processes.client(free_port(), 0, "--patience", 1, task=write_task(tmp_path).spec)
        assert_refused(client, "ConnectionLost", status=1)
        assert "could not be reached for 1 s" in client.text()


def test_a_client_that_is_stopped_before_it_has_connected_says_so(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        client = processes.client(free_port(), 0, task=write_task(tmp_path).spec)
        client.wait_for("trying again")
        client.kill(signal.SIGTERM)
        assert client.wait() == 0
        assert "0: stopped before connecting" in client.text()
        assert "done" not in client.text()


def test_a_device_with_another_model_is_refused_and_the_server_waits_on(tmp_path: Path) -> None:
    task = write_task(tmp_path).spec
    other = write_task(tmp_path / "other", hidden=17).spec
    with Processes(tmp_path) as processes:
        server = processes.server("--rounds", 2, "--verbose", task=task)
        wrong = processes.client(port_of(server), 0, task=other)
        assert_refused(wrong, "ModelMismatch", status=1)
        assert "in the server's model" in wrong.text()
        assert server.poll() is None
        late = processes.client(port_of(server), 0, task=other)
        assert_refused(late, "ModelMismatch", status=1)
        assert "in the server's model" in late.text()
        right = processes.client(port_of(server), 1, task=task)
        right.succeed()
        assert server.wait() == 0
        assert "ModelMismatch" in server.text()


def test_an_out_folder_with_another_runs_checkpoint_is_left_alone(tmp_path: Path) -> None:
    task = write_task(tmp_path).spec
    with Processes(tmp_path) as processes:
        server = processes.server("--rounds", 1, task=task)
        processes.client(port_of(server), 0, task=task).succeed()
        server.succeed()
        before = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
        again = processes.server("--rounds", 1, task=task)
        assert_refused(again, "SettingsError", status=2)
        assert "--resume" in again.text()
        assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("address", ["0.0.0.0:0", "192.168.3.4:8500", "[::]:0", "example.org:1"])
def test_plain_text_beyond_this_machine_is_refused(address: str, tmp_path: Path) -> None:
    task = write_task(tmp_path).spec
    with Processes(tmp_path) as processes:
        server = processes.server("--listen", address, task=task)
        client = processes.client(1, 0, "--server", address, task=task)
        assert_refused(server, "InsecureAddress", status=2)
        assert_refused(client, "InsecureAddress", status=2)


def test_plain_text_beyond_this_machine_is_allowed_when_it_is_said_aloud(tmp_path: Path) -> None:
    task = write_task(tmp_path).spec
    with Processes(tmp_path) as processes:
        server = processes.server("--rounds", 1, "--listen", "0.0.0.0:0", "--plain-text", task=task)
        client = processes.client(port_of(server), 0, task=task)
        for process in (client, server):
            process.succeed()


def test_a_server_that_cannot_start_keeps_the_devices_that_wait_for_it(tmp_path: Path) -> None:
    task = write_task(tmp_path).spec
    port = free_port()
    listen = ("--listen", f"127.0.0.1:{port}", "--rounds", 1)
    with Processes(tmp_path) as processes:
        client = processes.client(port, 0, task=task)
        client.wait_for("trying again")
        for wrong in (
            processes.server(*listen, task="nowhere.py:Task"),
            processes.server(*listen, "--optimizer", "nonsense", task=task),
            processes.server(*listen, "--track", "nonsense", task=task),
        ):
            assert wrong.wait() == 2
            assert "listening" not in wrong.text()
        assert client.poll() is None
        server = processes.server(*listen, "--out", tmp_path / "third", task=task)
        for process in (client, server):
            process.succeed()


ALGORITHM = """
class Scaled:
    def __init__(self, by=1.0):
        self.by = by

    def train(self, work):
        return work.sum() * self.by
"""


def test_a_device_with_other_arguments_of_the_algorithm_ends_and_the_server_waits_on(
    tmp_path: Path,
) -> None:
    task = write_task(tmp_path).spec
    (tmp_path / "mine.py").write_text(ALGORITHM)
    algorithm = ("--client-algorithm", f"{tmp_path}/mine.py:Scaled", "--algorithm-argument")
    with Processes(tmp_path) as processes:
        server = processes.server("--rounds", 1, *algorithm, "by=0.5", task=task)
        wrong = processes.client(port_of(server), 0, *algorithm, "by=0.25", task=task)
        assert_refused(wrong, "AlgorithmMismatch", status=1)
        assert (
            "the client algorithm Scaled(by=0.5), this device has Scaled(by=0.25)" in wrong.text()
        )
        assert server.poll() is None
        processes.client(port_of(server), 1, *algorithm, "by=0.50", task=task).succeed()
        assert server.wait() == 0
