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
import platform
import shutil
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from cryptography import x509
from rich.filesize import decimal

from client.absence import (
    Absence,
    absence_of,
    clock_text,
    has_hours,
    hours_change,
    is_working_hours,
    utc_now,
)
from client.device import ThisMachine
from client.enrolment import check_enrolment, host_name
from client.limits import ROOT, Limit
from client.memory import resident_bytes
from client.resident import Identity, Resident
from client.self_check import told
from client.sensors import has_aes
from common.certificates import name_in
from common.console import console
from common.errors import HeadwaterError, MissingData
from common.settings import Client, Settings
from common.tls import check_address, read_credentials, split_address
from common.weekly import wall_of
from common.wire import PROTOCOL_VERSION

Grade = Literal["good", "note", "fault"]
OpenTask = Callable[[Settings], tuple[Resident, Identity]]

PACKAGES = ("headwater", "torch", "flwr", "grpcio", "cryptography", "numpy", "protobuf")

# Before this the project was not there: a clock that says so was never set.
FIRST_DAY = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
RENEW_DAYS = 30
LINK_SECONDS = 10.0
SLOW_LINK_SECONDS = 0.5

# Of Linux' adjtimex(2): the clock is not kept by NTP.
TIME_ERROR = 5
TIMEX_BYTES = 256  # the structure has 208 on 64-bit machines

MARKS = {"good": "[green]ok[/]   ", "note": "[yellow]note[/] ", "fault": "[bold red]FAULT[/]"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one check found; with a fault the device cannot take part."""

    topic: str
    text: str
    grade: Grade = "good"
    remedy: str = ""


def examine(settings: Settings, open_task: OpenTask) -> Iterator[Finding]:
    """Yield what is found, in the order in which it is to be mended."""
    machine = ThisMachine(settings.client)
    yield from versions()
    yield clock(dt.datetime.now(dt.UTC), is_kept=clock_is_kept())
    yield memory(machine.limits.all(), resident_bytes(), has_controller=has_memory_controller(ROOT))
    yield from folders(settings.client)
    yield from hours(settings.client, utc_now())
    yield from connection(settings)
    yield from training(settings, open_task, machine)


def show(findings: Iterator[Finding]) -> bool:
    """Print what is found as it is found; return whether the device can take part."""
    num_faults = 0
    for found in findings:
        console.print(f"{MARKS[found.grade]} {found.topic:<8} ", end="")
        console.print(found.text, markup=False, soft_wrap=True)
        if found.remedy and found.grade != "good":
            console.print(f"{'':<15}-> {found.remedy}", markup=False, soft_wrap=True)
        num_faults += found.grade == "fault"
    console.print(
        "this device can take part"
        if num_faults == 0
        else f"what keeps this device from taking part: {num_faults} fault(s)"
    )
    return num_faults == 0


def versions() -> Iterator[Finding]:
    """Yield what is installed; a torch for CUDA works, and fills the disk for nothing."""
    found = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    yield Finding(
        topic="versions",
        text=f"{found}; Python {platform.python_version()} on {platform.machine()}; "
        f"wire {PROTOCOL_VERSION}",
    )
    if torch.version.cuda is not None:
        yield Finding(
            topic="versions",
            grade="note",
            text="this torch was built for CUDA, which is never used here",
            remedy="install again with deploy/install-client.sh, which takes a build for CPUs",
        )
    if not has_aes():
        yield Finding(
            topic="versions",
            text="no instructions for AES: masks are made by the slower ChaCha20",
        )


def clock(now: dt.datetime, *, is_kept: bool | None) -> Finding:
    """Judge the clock: certificates count by it, and a wrong one refuses every server."""
    shown = f"{now:%Y-%m-%d %H:%M:%S} UTC"
    if now < FIRST_DAY:
        return Finding(
            topic="clock",
            grade="fault",
            text=f"{shown}: the clock was never set",
            remedy="connect to the network and wait for NTP: timedatectl set-ntp true",
        )
    if is_kept is False:
        return Finding(
            topic="clock",
            grade="note",
            text=f"{shown}, and nothing keeps it right",
            remedy="timedatectl set-ntp true, or install systemd-timesyncd",
        )
    return Finding(topic="clock", text=shown + (", kept by NTP" if is_kept else ""))


def clock_is_kept() -> bool | None:
    """Whether the kernel's clock is kept by NTP; None where the kernel does not say."""
    if not sys.platform.startswith("linux"):
        return None
    told = ctypes.create_string_buffer(TIMEX_BYTES)  # modes 0: read only
    state = ctypes.CDLL(None).adjtimex(told)
    return None if state < 0 else state != TIME_ERROR


def memory(limits: list[Limit], held_bytes: int, *, has_controller: bool) -> Finding:
    """Judge the memory limits, of which the least counts."""
    least = min(limits, key=lambda limit: limit.num_bytes)
    text = f"up to {decimal(least.num_bytes)}, by {least.source}"
    if least.num_bytes <= held_bytes:
        return Finding(
            topic="memory",
            grade="fault",
            text=f"{text}, and {decimal(held_bytes)} are held before any task is loaded",
            remedy="raise that limit, or free memory on the machine",
        )
    if {limit.source for limit in limits} == {"machine"}:
        return Finding(
            topic="memory",
            grade="note",
            text=f"{text}: no limit keeps it from taking all that is free",
            remedy="set client.memory_limit_bytes, or MemoryMax= of the service"
            + ("" if has_controller else f"; for that {CONTROLLER_OFF}"),
        )
    if not has_controller:
        return Finding(topic="memory", grade="note", text=text, remedy=CONTROLLER_OFF)
    return Finding(topic="memory", text=text)


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


def folders(chosen: Client) -> Iterator[Finding]:
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
            yield Finding(
                topic="state",
                grade="fault",
                text=f"{folder} cannot be written: {error.strerror}",
                remedy="run this as the user of the service, or name a folder with --state",
            )
        else:
            yield Finding(topic="state", text=f"{folder}, {decimal(free)} free")


def hours(chosen: Client, now: dt.datetime, *, zone: dt.tzinfo | None = None) -> Iterator[Finding]:
    """Yield what the hours that the owner has set mean now, by the clock on the wall."""
    if chosen.working_hours is not None and chosen.working_share > 0:
        share = f"{chosen.working_share:.0%} of its time"
        what = "now" if is_working_hours(chosen, wall_of(now, zone)) else "not now"
        yield Finding(topic="hours", text=f"in working hours it gives {share}: {what}")
    if not has_hours(chosen):
        return
    try:
        away, change = hours_change(chosen, now, zone=zone)
    except HeadwaterError as error:
        yield _fault("hours", error)
        return
    clock_now = clock_text(now, zone)
    if away is not None:
        yield Finding(
            topic="hours",
            grade="note",
            text=f"{away.error}; it is {clock_now}",
            remedy="wait, or change client.upload_window and client.working_hours",
        )
    else:
        until = "always" if change is None else f"until {clock_text(change, zone)}"
        yield Finding(topic="hours", text=f"takes part {until}; it is {clock_now}")


def allowance(absence: Absence, chosen: Client) -> Iterator[Finding]:
    """Yield what is left of the bytes of the day."""
    if chosen.bytes_per_day is None:
        return
    round_bytes = decimal(absence.round_bytes)
    away = absence.by_bytes(absence.round_bytes)
    if away is not None:
        yield Finding(
            topic="bytes",
            grade="note",
            text=str(away.error),
            remedy="wait, or raise client.bytes_per_day",
        )
    else:
        yield Finding(
            topic="bytes",
            text=f"{decimal(absence.used_today())} of today's {decimal(chosen.bytes_per_day)} are "
            f"used, and a round takes up to {round_bytes}",
        )


def connection(settings: Settings) -> Iterator[Finding]:
    """Yield what the link and the certificates are good for, as far as a handshake shows."""
    chosen = settings.client
    name = chosen.name or host_name()
    try:
        credentials = read_credentials(settings.tls)
        check_address(chosen.server, has_tls=credentials is not None, is_insecure=settings.insecure)
        check_enrolment(settings.secure, name)
        host, port = split_address(chosen.server)
    except HeadwaterError as error:
        yield _fault("TLS", error)
        return
    if credentials is not None:
        yield certificate(credentials.leaf, name, dt.datetime.now(dt.UTC))
    began = time.monotonic()
    try:
        with socket.create_connection((host, port), LINK_SECONDS) as plain:
            taken = time.monotonic() - began
            yield Finding(
                topic="link",
                grade="note" if taken > SLOW_LINK_SECONDS else "good",
                text=f"{chosen.server} answers in {1e3 * taken:.0f} ms",
                remedy="a slow link: updates take long; see docs/install.md",
            )
            if credentials is not None:
                yield handshake(plain, host, settings)
    except OSError as error:
        yield Finding(
            topic="link",
            grade="fault",
            text=f"{chosen.server} is not to be reached: {error.strerror or error}",
            remedy="check the address, that the server runs, and the firewalls between",
        )


def certificate(leaf: x509.Certificate, name: str, now: dt.datetime) -> Finding:
    """Judge this device's own certificate, whose dates are known to be good today."""
    bears = name_in(leaf.subject)
    if bears != name:
        return Finding(
            topic="TLS",
            grade="fault",
            text=f"the certificate is that of {bears}, and this device is called {name}",
            remedy=f"set client.name to {bears}, or enrol under this name",
        )
    left = (leaf.not_valid_after_utc - now).days
    return Finding(
        topic="TLS",
        grade="note" if left < RENEW_DAYS else "good",
        text=f"certificate of {bears}, good for {left} more days",
        remedy="it is renewed while the client is connected: leave it running, or enrol again",
    )


def handshake(plain: socket.socket, host: str, settings: Settings) -> Finding:
    """Shake hands as the client does, and wait for the server's first bytes: it took us then."""
    tls = settings.tls
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    assert tls.ca is not None  # read_credentials saw them
    assert tls.certificate is not None
    try:
        context.load_verify_locations(cafile=tls.ca)
        context.load_cert_chain(tls.certificate, tls.key)
        with context.wrap_socket(plain, server_hostname=host) as secure:
            version = secure.version()
            # With TLS 1.3 a refusal comes after what looks like success (RFC 8446, section 4.4).
            if secure.recv(1):
                return Finding(topic="TLS", text=f"mutual, {version}; the server took us")
            text = "the server closed the connection after the handshake"
    except ssl.SSLCertVerificationError as error:
        text = f"the server's certificate is not good for {host}: {error.verify_message}"
    except OSError as error:
        text = f"no handshake: {error.strerror or error}"
    return Finding(
        topic="TLS",
        grade="fault",
        text=text,
        remedy="both sides need certificates of one authority, and the server's must name the "
        "address that is used here; enrol again if in doubt",
    )


def training(settings: Settings, open_task: OpenTask, machine: ThisMachine) -> Iterator[Finding]:
    """Yield whether the task runs on this device's data, and how fast."""
    try:
        resident, identity = open_task(settings)
        absence = absence_of(settings.client, identity.name, resident.image.layout)
        yield from allowance(absence, settings.client)
        examples = resident.examples(identity)
        resident.check(examples, identity.name)
        yield Finding(
            topic="task", text=f"{settings.task}, {len(examples)} examples, its loss is a sum"
        )
        for topic, text in told(resident, identity, machine):
            yield Finding(topic=topic, text=text)
    except HeadwaterError as error:
        yield _fault("data" if isinstance(error, MissingData) else "task", error)


def _fault(topic: str, error: HeadwaterError) -> Finding:
    return Finding(
        topic=topic, grade="fault", text=f"{error.code}: {error.message}", remedy=error.remedy
    )
