"""headwater-client doctor: it finds what would keep a device from taking part, with a remedy."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import Result
from rich.filesize import decimal
from typer.testing import CliRunner

from headwater.client.cli import app
from headwater.client.energy.availability import ROUND_SLACK_BYTES
from headwater.client.memory.process_limits import MemoryLimit
from headwater.client.operations.connectivity import check_connection
from headwater.client.operations.doctor import (
    FIRST_DAY,
    check_clock,
    check_folders,
    check_hours,
    check_memory,
    check_room,
    has_memory_controller,
)
from headwater.client.operations.findings import Finding
from headwater.client.task_bundles.kept_tasks import taken
from headwater.common.model.parameters import ModelImage
from headwater.common.settings.schema import ClientSettings, Settings
from headwater.server.transport import listener
from tests.attacks.raw import serving
from tests.certificates import credentials_of, make_folder, tls_of
from tests.task_bundles.bundles import new_key, publish_code

TASK = "tests/tasks.py:TwoLayers"
GIB = 2**30
TODAY = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)


def doctor(tmp_path: Path, *flags: str) -> Result:
    """Run the command for a device of its own state folder."""
    threads = torch.get_num_threads()
    command = ["doctor", "--task", TASK, "--threads", "1", "--state", str(tmp_path / "state")]
    try:
        return CliRunner().invoke(app, [*command, *flags])
    finally:
        torch.set_num_threads(threads)


def faults(found: Result) -> set[str]:
    return {line.split()[1] for line in found.output.splitlines() if line.startswith("FAULT")}


@pytest.fixture
def listening() -> Iterator[str]:
    """Return an address at which somebody listens, who says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_device_without_faults_can_take_part(tmp_path: Path, listening: str) -> None:
    found = doctor(tmp_path, "--server", listening)
    assert found.exit_code == 0, found.output
    assert faults(found) == set()
    assert "this device can take part" in found.output
    topics = {line[6:].split()[0] for line in found.output.splitlines() if line.startswith("ok")}
    assert topics >= {"versions", "state", "link", "task", "speed", "sensors", "gives"}


def test_an_unreachable_server_is_a_fault(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = doctor(tmp_path, "--server", f"127.0.0.1:{port}")
    assert found.exit_code == 1
    assert faults(found) == {"link"}
    assert "firewalls" in found.output


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    found = doctor(tmp_path, "--server", "river.example.org:8500", "--data", "/nowhere")
    assert found.exit_code == 1
    assert faults(found) == {"state", "TLS", "data"}  # no TLS beyond loopback: not connected to
    assert "InsecureAddress" in found.output


def test_a_device_without_a_task_cannot_take_part(tmp_path: Path, listening: str) -> None:
    found = CliRunner().invoke(
        app, ["doctor", "--server", listening, "--state", str(tmp_path / "state")]
    )
    assert found.exit_code == 1
    assert faults(found) == {"task"}


def test_a_device_that_takes_its_task_from_the_server_is_tried_with_the_last_one(
    tmp_path: Path, listening: str
) -> None:
    key, trust = new_key(tmp_path / "signer.key")
    state = tmp_path / "state"
    command = ["doctor", "--server", listening, "--state", str(state), "--threads", "1"]
    command += ["--trust", trust]
    before = CliRunner().invoke(app, command)
    assert before.exit_code == 0, before.output
    assert "the server hands it out, and this device has taken none yet" in before.output
    bundle, _ = publish_code(tmp_path, key, version=1)
    taken(bundle.data, ClientSettings.model_validate({"state": state, "trust": [trust]}))
    after = CliRunner().invoke(app, command)
    assert after.exit_code == 0, after.output
    assert "parity.py:Parity, 60 examples, its loss is a sum" in " ".join(after.output.split())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists() or os.geteuid() != 0, reason="it mounts a disk")
def test_a_full_state_disk_is_a_fault(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    made = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(made, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount")
    try:
        (found,) = check_folders(ClientSettings(state=disk))
    finally:
        subprocess.run(["umount", disk], check=True)
    assert found.grade == "fault"
    assert "free space" in found.remedy


def test_an_unset_clock_is_a_fault_and_an_unsynchronised_one_a_note() -> None:
    epoch = dt.datetime.fromtimestamp(0, dt.UTC)
    assert check_clock(epoch, is_synchronised=None).grade == "fault"
    assert check_clock(FIRST_DAY, is_synchronised=None).grade == "good"
    assert check_clock(TODAY, is_synchronised=False).grade == "note"
    assert check_clock(TODAY, is_synchronised=True).grade == "good"


def test_memory_without_a_limit_is_a_note_and_a_reached_limit_a_fault() -> None:
    machine = MemoryLimit(num_bytes=8 * GIB, source="machine")
    cgroup = MemoryLimit(num_bytes=GIB, source="cgroup's memory.max")
    assert check_memory([machine], GIB // 2, has_controller=True).grade == "note"
    assert check_memory([machine, cgroup], GIB // 2, has_controller=True).grade == "good"
    assert check_memory([machine, cgroup], GIB, has_controller=True).grade == "fault"
    unlimited = check_memory([machine], GIB // 2, has_controller=False)
    assert "cgroup_enable=memory" in unlimited.remedy


@pytest.mark.parametrize(("enabled", "counts"), [("1", True), ("0", False)])
def test_a_kernel_without_the_memory_controller_is_detected(
    tmp_path: Path, enabled: str, counts: bool
) -> None:
    assert has_memory_controller(tmp_path)  # it does not say
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cgroups").write_text(
        f"#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t0\t70\t1\nmemory\t0\t70\t{enabled}\n"
    )
    assert has_memory_controller(tmp_path) is counts


NIGHTS = ClientSettings(active_hours="22:00-06:00")


@pytest.mark.parametrize(
    ("chosen", "hour", "grade", "text"),
    [
        (NIGHTS, 12, "note", "outside its active hours until 2026-11-21T22:00+00:00"),
        (NIGHTS, 22, "good", "takes part until 2026-11-22T06:00+00:00"),
        (ClientSettings(active_hours="00:00-24:00"), 12, "good", "takes part always"),
        (
            ClientSettings(active_hours="17:00-09:00", inactive_share=0.5),
            12,
            "good",
            "50% of its time: now",
        ),
    ],
)
def test_the_hours_are_reported_for_the_present_time(
    chosen: ClientSettings, hour: int, grade: str, text: str
) -> None:
    (found,) = check_hours(chosen, TODAY.replace(hour=hour), zone=dt.UTC)
    assert found.grade == grade
    assert text in found.text


def test_without_hours_there_is_no_finding() -> None:
    assert list(check_hours(ClientSettings(), TODAY)) == []


def test_the_day_s_bytes_are_reported_and_too_few_for_a_round_are_a_fault(
    tmp_path: Path, listening: str
) -> None:
    enough = doctor(tmp_path, "--server", listening, "--bytes-per-day", "1000000")
    assert enough.exit_code == 0, enough.output
    assert "0 bytes of today's 1.0 MB are used, and a round takes up to" in enough.output
    few = doctor(tmp_path, "--server", listening, "--bytes-per-day", "1000")
    assert "SettingsError: client.bytes_per_day is 1,000" in few.output
    assert few.exit_code == 1


def told_of(chosen: ClientSettings, tmp_path: Path, *, num_parameters: int = 10) -> list[Finding]:
    layout = ModelImage(torch.nn.Linear(num_parameters - 1, 1)).layout
    return list(check_room(chosen.model_copy(update={"state": tmp_path}), "pi", layout))


def test_too_few_bytes_a_day_for_one_round_are_a_fault(tmp_path: Path) -> None:
    (found,) = told_of(ClientSettings(bytes_per_day=1000), tmp_path)
    assert (found.topic, found.grade) == ("limits", "fault")
    assert "one round of this model takes at least" in found.text


def test_hours_too_short_to_send_an_update_are_a_fault(tmp_path: Path) -> None:
    (found,) = told_of(ClientSettings(active_hours="22:00-22:01"), tmp_path)
    assert (found.topic, found.grade) == ("hours", "fault")
    assert found.text.startswith("its hours leave 1 min at a time")


def test_hours_that_need_a_fast_link_are_a_note_with_its_speed(tmp_path: Path) -> None:
    million = 1_000_000
    window = ClientSettings(active_hours="22:00-22:01:40")
    (found,) = told_of(window, tmp_path, num_parameters=million)
    # The model down and twice the vector up, in the 40 s before a minute's lead.
    least = (4 * million + 2 * (4 * million + ROUND_SLACK_BYTES)) // 40
    assert (found.topic, found.grade) == ("hours", "note")
    assert f"only if the link carries {decimal(least)} a second" in found.text


@pytest.mark.parametrize("window", ["22:00-06:00", "00:00-24:00", None])
def test_hours_with_room_for_a_round_give_no_finding(window: str | None, tmp_path: Path) -> None:
    assert told_of(ClientSettings(active_hours=window), tmp_path, num_parameters=1_000_000) == []


def looked_at(certs: Path, name: str, *, authority: Path | None = None) -> list[Finding]:
    """Return what a device with a certificate finds of a server that has those of ``authority``."""

    async def play() -> list[Finding]:
        credentials = credentials_of(authority or certs, "server")
        async with serving(credentials=credentials) as run:
            settings = Settings(
                client=ClientSettings(server=f"localhost:{run.port}", name="pi"),
                tls=tls_of(certs, name),
            )
            return await asyncio.to_thread(lambda: list(check_connection(settings)))

    return asyncio.run(play())


def test_an_enrolled_device_completes_the_handshake(tmp_path: Path) -> None:
    make_folder(tmp_path, "pi")
    found = looked_at(tmp_path, "pi")
    assert [finding.grade for finding in found] == ["good"] * 3, found
    assert "TLSv1.3; the server accepted this device" in found[-1].text


async def refused_after_doctor(certs: Path) -> int:
    """Return how many strangers a server counts after a device's look and one silent connection."""
    async with serving(credentials=credentials_of(certs, "server")) as run:
        client = ClientSettings(server=f"localhost:{run.port}", name="pi")
        settings = Settings(client=client, tls=tls_of(certs, "pi"))
        found = await asyncio.to_thread(lambda: list(check_connection(settings)))
        assert {finding.grade for finding in found} == {"good"}
        _, silent = await asyncio.open_connection("127.0.0.1", run.port)
        while not (number := run.refusals["NoStream"]):
            await asyncio.sleep(0.05)
        silent.close()
        return number


def test_the_server_does_not_count_the_device_that_looks_among_the_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 1)
    make_folder(tmp_path, "pi")
    assert asyncio.run(refused_after_doctor(tmp_path)) == 1


def test_another_authority_on_either_side_is_a_fault(tmp_path: Path) -> None:
    certs, others = tmp_path / "certs", tmp_path / "others"
    make_folder(certs, "pi")
    make_folder(others, "pi")
    assert "not valid for localhost" in looked_at(certs, "pi", authority=others)[-1].text
    (others / "ca.pem").write_bytes((certs / "ca.pem").read_bytes())
    refused = looked_at(others, "pi", authority=certs)[-1]
    assert (refused.topic, refused.grade) == ("TLS", "fault")


def test_a_server_certificate_made_for_other_names_is_a_fault_that_lists_them(
    tmp_path: Path,
) -> None:
    make_folder(tmp_path, "pi", hosts=("river.example.org", "192.0.2.7"))
    found = looked_at(tmp_path, "pi")[-1]
    assert found.text == (
        "the server's certificate is for river.example.org, 192.0.2.7, not for localhost"
    )
    assert "init --host localhost" in found.remedy


def test_a_certificate_for_another_name_is_a_fault(tmp_path: Path) -> None:
    make_folder(tmp_path, "laptop")
    found = looked_at(tmp_path, "laptop")
    assert "the certificate is for laptop, and this device's name is pi" in found[0].text
    assert found[0].grade == "fault"
