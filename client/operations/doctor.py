"""What ``headwater-client doctor`` looks at: all that could keep this device from taking part.

Each check looks at one thing, and says what it found and what to do. Nothing is changed, and no
hello is sent to the server, where a second stream under this device's name would be in the way of
the first. So what the server alone knows (whether the name is revoked, or its model another) is not
found here; it stands in the client's log when it connects.
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

from headwater.client.device.availability import (
    LEAD_SECONDS,
    Availability,
    availability_of,
    clock_text,
    has_hours,
    hours_change,
    is_working_hours,
    utc_now,
)
from headwater.client.device.hardware import ThisMachine
from headwater.client.device.sensors import has_aes
from headwater.client.memory.limits import ROOT, MemoryLimit
from headwater.client.memory.peak_model import resident_bytes
from headwater.client.operations.connectivity import check_connection
from headwater.client.operations.findings import Finding, fault, fault_of, good, note
from headwater.client.operations.task_check import measurements
from headwater.client.training.trainer import Identity, Trainer
from headwater.common.errors import HeadwaterError, MissingData
from headwater.common.model.parameters import ModelLayout
from headwater.common.settings.schema import ClientSettings, Settings
from headwater.common.settings.weekly_hours import wall_of
from headwater.common.transport.limits import PROTOCOL_VERSION

OpenTask = Callable[[Settings], tuple[Trainer, Identity]]

PACKAGES = ("headwater", "torch", "flwr", "grpcio", "cryptography", "numpy", "protobuf")

# Before this the project was not there: a clock that says so was never set.
FIRST_DAY = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
# What a link carries at least that needs no word: 1 Mbit/s.
USUAL_BYTES_PER_SECOND = 125_000.0

# Of Linux' adjtimex(2): the clock is not kept by NTP.
TIME_ERROR = 5
TIMEX_BYTES = 256  # the structure has 208 on 64-bit machines


def examine(settings: Settings, open_task: OpenTask) -> Iterator[Finding]:
    """Yield what is found, in the order in which it is to be mended."""
    machine = ThisMachine(settings.client)
    yield from check_versions()
    yield check_clock(dt.datetime.now(dt.UTC), is_kept=is_clock_kept())
    yield check_memory(
        machine.limits.all(), resident_bytes(), has_controller=has_memory_controller(ROOT)
    )
    yield from check_folders(settings.client)
    yield from check_hours(settings.client, utc_now())
    yield from check_connection(settings)
    yield from check_training(settings, open_task, machine)


def check_versions() -> Iterator[Finding]:
    """Yield what is installed; a torch for CUDA works, and fills the disk for nothing."""
    found = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    yield good(
        "versions",
        f"{found}; Python {platform.python_version()} on {platform.machine()}; "
        f"wire {PROTOCOL_VERSION}",
    )
    if torch.version.cuda is not None:
        yield note(
            "versions",
            "this torch was built for CUDA, which is never used here",
            "install again with deploy/install-client.sh, which takes a build for CPUs",
        )
    if not has_aes():
        yield good("versions", "no instructions for AES: masks are made by the slower ChaCha20")


def check_clock(now: dt.datetime, *, is_kept: bool | None) -> Finding:
    """Judge the clock: certificates count by it, and a wrong one refuses every server."""
    shown = f"{now:%Y-%m-%d %H:%M:%S} UTC"
    if now < FIRST_DAY:
        return fault(
            "clock",
            f"{shown}: the clock was never set",
            "connect to the network and wait for NTP: timedatectl set-ntp true",
        )
    if is_kept is False:
        return note(
            "clock",
            f"{shown}, and nothing keeps it right",
            "timedatectl set-ntp true, or install systemd-timesyncd",
        )
    return good("clock", shown + (", kept by NTP" if is_kept else ""))


def is_clock_kept() -> bool | None:
    """Whether the kernel's clock is kept by NTP; None where the kernel does not say."""
    if not sys.platform.startswith("linux"):
        return None
    measurements = ctypes.create_string_buffer(TIMEX_BYTES)  # modes 0: read only
    state = ctypes.CDLL(None).adjtimex(measurements)
    return None if state < 0 else state != TIME_ERROR


def check_memory(limits: list[MemoryLimit], held_bytes: int, *, has_controller: bool) -> Finding:
    """Judge the memory limits, of which the least counts."""
    least = min(limits, key=lambda limit: limit.num_bytes)
    text = f"up to {decimal(least.num_bytes)}, by {least.source}"
    if least.num_bytes <= held_bytes:
        return fault(
            "memory",
            f"{text}, and {decimal(held_bytes)} are held before any task is loaded",
            "raise that limit, or free memory on the machine",
        )
    if {limit.source for limit in limits} == {"machine"}:
        return note(
            "memory",
            f"{text}: no limit keeps it from taking all that is free",
            "set client.memory_limit_bytes, or MemoryMax= of the service"
            + ("" if has_controller else f"; for that {CONTROLLER_OFF}"),
        )
    if not has_controller:
        return note("memory", text, CONTROLLER_OFF)
    return good("memory", text)


CONTROLLER_OFF = (
    "the kernel must count memory: add cgroup_enable=memory to its command line (on a Raspberry Pi "
    "/boot/firmware/cmdline.txt) and restart, as MemoryMax= has no effect without"
)


def has_memory_controller(root: Path) -> bool:
    """Whether the kernel counts the memory of cgroups; Raspberry Pi OS is delivered without."""
    try:
        rows = (root / "proc/cgroups").read_text().splitlines()
    except OSError:
        return True  # not Linux, or it does not say
    return all(row.split()[-1] == "1" for row in rows if row.startswith("memory\t"))


def check_folders(chosen: ClientSettings) -> Iterator[Finding]:
    """Yield whether the device can keep its place: without it examples would count twice."""
    for folder in (chosen.state_folder, chosen.spool):
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            free = shutil.disk_usage(folder).free
        except OSError as error:
            yield fault(
                "state",
                f"{folder} cannot be written: {error.strerror}",
                "run this as the user of the service, or name a folder with --state",
            )
        else:
            yield good("state", f"{folder}, {decimal(free)} free")


def check_hours(
    chosen: ClientSettings, now: dt.datetime, *, zone: dt.tzinfo | None = None
) -> Iterator[Finding]:
    """Yield what the hours that the owner has set mean now, by the clock on the wall."""
    if chosen.working_hours is not None and chosen.working_share > 0:
        share = f"{chosen.working_share:.0%} of its time"
        what = "now" if is_working_hours(chosen, wall_of(now, zone)) else "not now"
        yield good("hours", f"in working hours it gives {share}: {what}")
    if not has_hours(chosen):
        return
    try:
        away, change = hours_change(chosen, now, zone=zone)
    except HeadwaterError as error:
        yield fault_of("hours", error)
        return
    clock_now = clock_text(now, zone)
    if away is not None:
        yield note(
            "hours",
            f"{away.error}; it is {clock_now}",
            "wait, or change client.upload_window and client.working_hours",
        )
    else:
        until = "always" if change is None else f"until {clock_text(change, zone)}"
        yield good("hours", f"takes part {until}; it is {clock_now}")


def check_room(chosen: ClientSettings, name: str, layout: ModelLayout) -> Iterator[Finding]:
    """Yield whether the owner's settings leave room for a round of this model."""
    try:
        absence = availability_of(chosen, name, layout)
    except HeadwaterError as error:
        yield fault_of("limits", error)
        return
    yield from check_bytes_today(absence, chosen)
    yield from check_rate(absence)


def check_rate(absence: Availability) -> Iterator[Finding]:
    """Yield what the link must carry, so that a round fits into the hours, if that is much."""
    least = absence.least_bytes_per_second()
    longest = f"its hours leave {absence.longest_stay_seconds() / 60:,.3g} min at a time"
    if least == math.inf:
        yield fault(
            "hours",
            f"{longest}, and a device stops {LEAD_SECONDS:.0f} s and more before they end: none is "
            "ever used",
            LONGER_HOURS,
        )
    elif least > USUAL_BYTES_PER_SECOND:
        yield note(
            "hours",
            f"{longest}: a round of {decimal(absence.round_bytes)} fits only where the link "
            f"carries {decimal(int(least))} a second",
            LONGER_HOURS,
        )


LONGER_HOURS = "lengthen client.upload_window, or shorten client.working_hours"


def check_bytes_today(absence: Availability, chosen: ClientSettings) -> Iterator[Finding]:
    """Yield what is left of the bytes of the day."""
    if chosen.bytes_per_day is None:
        return
    round_bytes = decimal(absence.round_bytes)
    away = absence.by_bytes(absence.round_bytes)
    if away is not None:
        yield note("bytes", str(away.error), "wait, or raise client.bytes_per_day")
    else:
        yield good(
            "bytes",
            f"{decimal(absence.used_today())} of today's {decimal(chosen.bytes_per_day)} are "
            f"used, and a round takes up to {round_bytes}",
        )


def check_training(
    settings: Settings, open_task: OpenTask, machine: ThisMachine
) -> Iterator[Finding]:
    """Yield whether the task runs on this device's data, and how fast."""
    try:
        trainer, identity = open_task(settings)
        yield from check_room(settings.client, identity.name, trainer.image.layout)
        examples = trainer.examples(identity)
        trainer.check(examples, identity.name)
        yield good("task", f"{settings.task}, {len(examples)} examples, its loss is a sum")
        for topic, text in measurements(trainer, identity, machine):
            yield good(topic, text)
    except HeadwaterError as error:
        yield fault_of("data" if isinstance(error, MissingData) else "task", error)
