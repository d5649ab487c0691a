"""``headwater-client doctor``: checks everything that could keep this device from taking part.

Each check examines one thing and reports a finding and a remedy. Nothing is changed. No hello is
sent to the server, because a second stream under this device's name could displace the first. So
the doctor does not find what only the server knows, such as a revoked name or another model; the
client's log reports that when it connects.
"""

from __future__ import annotations

import ctypes
import datetime as dt
import importlib.metadata
import math
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.filesize import decimal

from headwater.client.device.hardware import ThisMachine
from headwater.client.device.sensors import has_aes
from headwater.client.energy.availability import (
    LEAD_SECONDS,
    Availability,
    availability_of,
    clock_text,
    has_inactive_hours,
    hours_change,
    utc_now,
)
from headwater.client.energy.time_share import is_active
from headwater.client.memory.peak_model import resident_bytes
from headwater.client.memory.process_limits import ROOT, MemoryLimit
from headwater.client.operations.connectivity import check_connection
from headwater.client.operations.findings import Finding, fault, fault_of, good, note
from headwater.client.operations.task_check import measurements
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.common.errors import HeadwaterError, MissingData, system_remedy
from headwater.common.model.layout import ModelLayout
from headwater.common.settings.schema import ClientSettings, Settings
from headwater.common.settings.weekly_hours import wall_of
from headwater.common.system.atomic_file import make_private_folder
from headwater.common.transport.limits import PROTOCOL_VERSION
from headwater.common.wording import counted

OpenTask = Callable[[Settings], tuple[Trainer, Identity]]

PACKAGES = ("headwater", "torch", "flwr", "grpcio", "cryptography", "numpy", "protobuf")

# Older than this project: a clock that shows an earlier date was never set.
FIRST_DAY = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
# 1 Mbit/s: a round that needs no faster link is not worth a note.
USUAL_BYTES_PER_SECOND = 125_000.0

# Linux adjtimex(2): the return value if NTP does not synchronise the clock.
TIME_ERROR = 5
TIMEX_BYTES = 256  # the structure has 208 on 64-bit machines
TRIED_BYTES = 1 << 20  # written to the state folder; an empty file fits on a full disk


def examine(settings: Settings, open_task: OpenTask) -> Iterator[Finding]:
    """Yield the findings, in the order in which to act on them."""
    machine = ThisMachine(settings.client)
    yield from check_versions()
    yield check_clock(dt.datetime.now(dt.UTC), is_synchronised=is_clock_synchronised())
    yield check_memory(
        machine.limits.all(), resident_bytes(), has_controller=has_memory_controller(ROOT)
    )
    yield from check_folders(settings.client)
    yield from check_hours(settings.client, utc_now())
    yield from check_connection(settings)
    yield from check_training(settings, open_task, machine)


def check_versions() -> Iterator[Finding]:
    """Yield the installed versions; a torch built for CUDA works, but wastes disk space."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    yield good(
        "versions",
        f"{versions}; Python {platform.python_version()} on {platform.machine()}; "
        f"wire {PROTOCOL_VERSION}",
    )
    if torch.version.cuda is not None:
        yield note(
            "versions",
            "this torch was built for CUDA, which Headwater never uses",
            "install again with deploy/install-client.sh, which installs a build for CPUs",
        )
    if not has_aes():
        yield good(
            "versions", "the CPU has no AES instructions: masks use ChaCha20, which is slower"
        )


def check_clock(now: dt.datetime, *, is_synchronised: bool | None) -> Finding:
    """Check the clock: with a wrong one, no server's certificate is valid."""
    shown = f"{now:%Y-%m-%d %H:%M:%S} UTC"
    if now < FIRST_DAY:
        return fault(
            "clock",
            f"{shown}: the clock was never set",
            "connect to the network and wait for NTP: timedatectl set-ntp true",
        )
    if is_synchronised is False:
        return note(
            "clock",
            f"{shown}, and nothing synchronises it",
            "timedatectl set-ntp true, or install systemd-timesyncd",
        )
    return good("clock", shown + (", synchronised by NTP" if is_synchronised else ""))


def is_clock_synchronised() -> bool | None:
    """Whether NTP synchronises the kernel's clock; None if the kernel does not say."""
    if not sys.platform.startswith("linux"):
        return None
    timex = ctypes.create_string_buffer(TIMEX_BYTES)  # modes = 0: read only
    state = ctypes.CDLL(None).adjtimex(timex)
    return None if state < 0 else state != TIME_ERROR


def check_memory(limits: list[MemoryLimit], used_bytes: int, *, has_controller: bool) -> Finding:
    """Check the lowest of the memory limits against the memory already in use."""
    lowest = min(limits, key=lambda limit: limit.num_bytes)
    text = f"up to {decimal(lowest.num_bytes)}, by {lowest.origin}"
    if lowest.num_bytes <= used_bytes:
        return fault(
            "memory",
            f"{text}, and {decimal(used_bytes)} are in use before any task is loaded",
            "raise that limit, or free memory on the machine",
        )
    if {limit.source for limit in limits} == {"machine"}:
        return note(
            "memory",
            f"{text}: no limit keeps it from using all free memory",
            "set client.memory_limit_bytes, or MemoryMax= of the service"
            + ("" if has_controller else f"; for that {CONTROLLER_OFF}"),
        )
    if not has_controller:
        return note("memory", text, CONTROLLER_OFF)
    return good("memory", text)


CONTROLLER_OFF = (
    "the kernel must count memory: add cgroup_enable=memory to its command line (on a Raspberry Pi "
    "/boot/firmware/cmdline.txt) and restart; MemoryMax= has no effect without it"
)


def has_memory_controller(root: Path) -> bool:
    """Whether the kernel counts the memory of cgroups; Raspberry Pi OS does not by default."""
    try:
        rows = (root / "proc/cgroups").read_text(encoding="utf-8").splitlines()
    except OSError:
        return True  # not Linux, or it does not say
    return all(row.split()[-1] == "1" for row in rows if row.startswith("memory\t"))


def check_folders(client: ClientSettings) -> Iterator[Finding]:
    """Yield whether the device can write its state: without it, examples would count twice."""
    for folder in (client.state_folder, client.spool):
        if folder is None:
            continue
        try:
            make_private_folder(folder)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(TRIED_BYTES))
            free = shutil.disk_usage(folder).free
        except OSError as error:
            yield fault(
                "state",
                f"{folder} cannot be written: {error.strerror}",
                system_remedy(str(error)) or "name a folder with --state",
            )
        else:
            yield good("state", f"{folder}, {decimal(free)} free")


def check_hours(
    client: ClientSettings, now: dt.datetime, *, zone: dt.tzinfo | None = None
) -> Iterator[Finding]:
    """Yield whether the owner's hours let the device take part now, by its local time."""
    if client.active_hours is not None and client.inactive_share > 0:
        share = f"{client.inactive_share:.0%} of its time"
        when = "not now" if is_active(client, wall_of(now, zone)) else "now"
        yield good("hours", f"outside its active hours it gives {share}: {when}")
    if not has_inactive_hours(client):
        return
    away, change = hours_change(client, now, zone=zone)
    clock_now = clock_text(now, zone)
    if away is not None:
        yield note(
            "hours",
            f"{away.error}; it is {clock_now}",
            "wait, or change client.active_hours",
        )
    else:
        until = "always" if change is None else f"until {clock_text(change, zone)}"
        yield good("hours", f"takes part {until}; it is {clock_now}")


def check_room(client: ClientSettings, name: str, layout: ModelLayout) -> Iterator[Finding]:
    """Yield whether the owner's byte quota and hours leave room for a round of this model."""
    try:
        availability = availability_of(client, name, layout)
    except HeadwaterError as error:
        yield fault_of("limits", error)
        return
    yield from check_bytes_today(availability, client)
    yield from check_rate(availability)


def check_rate(availability: Availability) -> Iterator[Finding]:
    """Yield the link speed that a round needs to fit into the hours, if it is a high one."""
    least = availability.min_bytes_per_second()
    longest = f"its hours leave {availability.longest_stay_seconds() / 60:,.3g} min at a time"
    if least == math.inf:
        yield fault(
            "hours",
            f"{longest}, and a device stops {LEAD_SECONDS:.0f} s and more before they end: it "
            "would never take part",
            LONGER_HOURS,
        )
    elif least > USUAL_BYTES_PER_SECOND:
        yield note(
            "hours",
            f"{longest}: a round of {decimal(availability.whole_round_bytes)} fits only if the "
            f"link carries {decimal(int(least))} a second",
            LONGER_HOURS,
        )


LONGER_HOURS = "lengthen client.active_hours"


def check_bytes_today(availability: Availability, client: ClientSettings) -> Iterator[Finding]:
    """Yield how many of today's bytes are used, and whether a round still fits."""
    if client.bytes_per_day is None:
        return
    round_bytes = decimal(availability.whole_round_bytes)
    away = availability.by_bytes(availability.round_bytes)
    if away is not None:
        yield note("bytes", str(away.error), "wait, or raise client.bytes_per_day")
    else:
        yield good(
            "bytes",
            f"{decimal(availability.used_today())} of today's {decimal(client.bytes_per_day)} are "
            f"used, and a round takes up to {round_bytes}",
        )


def check_training(
    settings: Settings, open_task: OpenTask, machine: ThisMachine
) -> Iterator[Finding]:
    """Yield whether the task runs on this device's data, and how fast.

    Without a task of its own, a device that trusts a signer is tried with the last that it took.
    """
    try:
        if settings.task is None and settings.client.trust is not None:
            from headwater.client.task_bundles.kept_tasks import last_spec

            spec = last_spec(settings.client)
            if spec is None:
                yield note(
                    "task",
                    "the server hands it out, and this device has taken none yet",
                    "start the client once; then this tries the task on this device's data",
                )
                return
            settings = settings.model_copy(update={"task": spec})
        trainer, identity = open_task(settings)
        yield from check_room(settings.client, identity.name, trainer.image.layout)
        examples = trainer.examples(identity)
        report = trainer.check(examples, identity.name)
        yield good(
            "task", f"{settings.task}, {counted(len(examples), 'example')}, its loss is a sum"
        )
        for text in report.notes:
            yield good("task", text)
        if report.left_out is not None:
            yield note("data", report.left_out, "correct these rows, or leave them to be left out")
        for topic, text in measurements(settings, trainer, identity, machine):
            yield good(topic, text)
    except HeadwaterError as error:
        yield fault_of("data" if isinstance(error, MissingData) else "task", error)
