"""The enrolment commands, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certificates import (
    HOSTS,
    files,
)
from tests.enrolment import is_open
from tests.processes import (
    Process,
    Processes,
    assert_tidy,
    free_port,
    port_of,
    until,
    write_task,
)


def assert_named(process: Process, code: str) -> None:
    assert process.wait() in (1, 2), process.text()
    assert f"{code}: " in process.text()
    assert_tidy(process)


class Operator:
    """What an operator and the owners of devices type."""

    def __init__(self, processes: Processes, folder: Path, *, last: str = "90d") -> None:
        self.processes, self.folder, self.certs = processes, folder, folder / "certs"
        self.port = free_port()
        hosts = [part for host in HOSTS for part in ("--host", host)]
        processes.run(
            "server", "init", "--folder", self.certs, *hosts, "--certificates-last", last
        ).succeed()

    def server(self, *, num_rounds: int, task: str) -> Process:
        listen = ("--enrolment-listen", f"127.0.0.1:{self.port}")
        plan = ("--min-clients", 1, "--accumulation-steps", 2, "--micro-batch-size", 8)
        server = self.processes.server(
            *listen,
            *files(self.certs, "server"),
            "--rounds",
            num_rounds,
            *plan,
            task=task,
        )
        server.wait_for("devices join at port")
        return server

    def token(self, name: str) -> str:
        address = f"127.0.0.1:{self.port}"
        made = self.processes.run(
            "server", "enroll", name, "--folder", self.certs, "--address", address
        )
        made.succeed()
        return next(line for line in made.text().splitlines() if line.startswith("headwater-join"))

    def join(self, name: str) -> Path:
        token = self.token(name)
        until(lambda: is_open(self.port), what=lambda: "the enrolment port")
        folder = self.folder / f"device-{name}"
        file = self.folder / f"token-{name}"
        file.write_text(token)
        self.processes.run("client", "join", "--token-file", file, "--folder", folder).succeed()
        return folder / "client.toml"


@pytest.mark.slow
def test_a_run_from_init_to_a_device_revoked_during_a_round(tmp_path: Path) -> None:
    task = write_task(tmp_path, open_for=1)
    with Processes(tmp_path) as processes:
        operator = Operator(processes, tmp_path)
        server = operator.server(num_rounds=2, task=task.spec)
        port = port_of(server)
        stays, goes = operator.join("1"), operator.join("0")
        client = processes.client(port, 0, "--config", goes, task=task.spec)
        task.wait_until_reached()
        revoked = processes.run("server", "revoke", "0", "--folder", operator.certs)
        revoked.succeed()
        server.wait_for("the certificate of 0 was revoked")
        task.open()
        assert_named(client, "CertificateRevoked")
        again = processes.client(port, 0, "--config", goes, "--patience", 2, task=task.spec)
        assert_named(again, "CertificateRevoked")
        other = processes.client(
            port, 1, "--config", stays, "--name", "0", "--patience", 2, task=task.spec
        )
        assert_named(other, "IdentityRefused")
        processes.client(port, 1, "--config", stays, task=task.spec).succeed()
        assert server.wait() == 0, server.text()
        assert_tidy(server)


@pytest.mark.slow
def test_a_run_outlasts_its_devices_certificate(tmp_path: Path) -> None:
    task = write_task(tmp_path, open_for=1)
    with Processes(tmp_path) as processes:
        operator = Operator(processes, tmp_path, last="20s")  # the device connects within it
        server = operator.server(num_rounds=1, task=task.spec)
        config = operator.join("0")
        before = (config.parent / "device.pem").read_bytes()
        client = processes.client(port_of(server), 0, "--config", config, task=task.spec)
        task.wait_until_reached()
        server.wait_for("0: its certificate is renewed")
        client.wait_for("this device's certificate was renewed")
        server.wait_for("0: its certificate has expired, so its stream ends")
        server.wait_for("0 connected with its renewed certificate")
        assert (config.parent / "device.pem").read_bytes() != before
        task.open()
        assert client.wait() == 0, client.text()
        assert server.wait() == 0, server.text()
        assert_tidy(client)
        assert_tidy(server)
