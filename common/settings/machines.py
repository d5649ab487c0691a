"""Settings that belong to one machine: its TLS files, the server's addresses, a device's limits."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from headwater.common.errors import SettingsError
from headwater.common.settings.fields import (
    DEVICE,
    OWNER,
    RUN,
    Address,
    Addresses,
    Branch,
    Bytes,
    Count,
    File,
    Folder,
    Fraction,
    Hours,
    Keys,
    Name,
    OwnLabels,
    Pairs,
    Part,
    Seconds,
    Unit,
    WaitSeconds,
    pairs_of,
    setting,
)
from headwater.common.user_code.bundled_examples import expanded


def check_signers(joined: str | None) -> None:
    """Check that signers' keys, joined by commas, are keys.

    Raises:
        SettingsError: one is none.
    """
    for one in [] if joined is None else joined.split(","):
        if not re.fullmatch(r"hw[A-Za-z0-9_-]{43}", one):
            raise SettingsError(
                f"{one[:80]!r} is no signer's key",
                remedy="copy what `headwater-server signer FILE` prints, hw and 43 letters",
            )


Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$"), Unit("DIGEST")]


class TlsSettings(Branch):
    """Three PEM files; all or none."""

    ca: File | None = setting(None, "the authority's certificate", "--tls-ca")
    certificate: File | None = setting(None, "this side's certificate", "--tls-certificate")
    key: File | None = setting(None, "this side's private key", "--tls-key")


METRICS = (
    "where to serve Prometheus metrics, in plain text (not only on loopback: --public-metrics)"
)


class ServerSettings(Branch):
    """The aggregation server's own settings."""

    listen: Address = setting(
        "127.0.0.1:8500", "where clients connect; port 0 takes a free port", short=True
    )
    enrolment_listen: Address | None = setting(
        None, "where devices join while a join token is valid; not set: the port after `listen`"
    )
    metrics: Address | None = setting(None, METRICS)
    page: Address | None = setting(
        None,
        "show the run in a browser; without an address at 127.0.0.1:8600 (docs/page.md)",
        on="server simulate",
        panel=RUN,
        bare="127.0.0.1:8600",
    )
    page_stays_seconds: WaitSeconds | None = setting(
        None,
        "how long the page stays up after the end of the run; not set: until Ctrl-C in a terminal, "
        "and elsewhere not at all",
        "--page-stays",
        on="server simulate",
        panel=RUN,
    )
    upstream: Addresses | None = setting(
        None,
        "the server above: this server adds the updates of its own devices, and sends it their sum "
        "(docs/scale.md); with a standby A:PORT,B:PORT",
    )
    upstream_config: File | None = setting(
        None,
        "this server's name and certificate for the server above: the client.toml that "
        "`headwater-client join` wrote",
    )
    aggregators: Annotated[str, Unit("NAME[,...]")] | None = setting(
        None,
        "the devices that may be aggregators: what they say of devices of their own is believed; "
        "not set: none",
        "--trusted-aggregators",
    )
    staging_bytes: Bytes = setting(
        64 * 2**20, "memory for uploads in progress; the rest goes to a spool file", on=""
    )


class AlertSettings(Branch):
    """The troubles that the server reports by itself (docs/operation.md)."""

    notify: Annotated[str, Unit("URL|COMMAND")] | None = setting(
        None,
        "tell of trouble: post it to this URL as JSON, or start this command with it on its "
        "standard input; $NAME: what that environment variable says",
    )
    silent_seconds: Seconds = setting(1800.0, "no round for so long", on="")
    lost_seconds: Seconds = setting(86_400.0, "a device is away for so long", on="")
    certificate_seconds: Seconds = setting(1_209_600.0, "a certificate ends within", on="")
    free_bytes: Bytes = setting(10**9, "the disk of the run's folder has less than", on="")
    budget_share: Fraction = setting(0.9, "the share of the epsilon that is spent", on="")
    loss_factor: float = setting(
        1.5, "the loss of the latest rounds is so many times the lowest", on="", ge=1, le=1e6
    )
    largest_share: Fraction = setting(
        0.5, "one device's share of the weight of the latest rounds", on=""
    )


class StandbySettings(Branch):
    """A second server that continues the run if the first one fails (docs/operation.md)."""

    shared_state: Annotated[str, Unit("DIR|FILE.py:CLASS")] | None = setting(
        None,
        "where this server and its standby share the run's state: a folder that both reach, or "
        "your own store of files; each server has an --out of its own (docs/operation.md)",
    )
    term_seconds: Seconds = setting(
        10.0, "a standby takes over when the serving server has not renewed its term for so long"
    )


class ClientSettings(Branch):
    """A device's own settings."""

    server: Addresses = setting(
        "127.0.0.1:8500",
        "address of the server; with a standby A:PORT,B:PORT, which are tried in turn",
        short=True,
    )
    name: Name | None = setting(
        None,
        "the device's unique name; not set: the host's",
        on=f"{DEVICE} identity {OWNER}",
        short=True,
    )
    data: Path | None = setting(
        None, "this device's own file or folder of examples", on=f"{DEVICE} {OWNER}", short=True
    )
    part: int = setting(
        0, "this device's part of bundled data, from 0", on=f"{DEVICE} {OWNER}", ge=0, short=True
    )
    num_parts: Count = setting(
        1, "parts that the task splits bundled data into", on=f"{DEVICE} {OWNER}", short=True
    )
    labels: OwnLabels | None = setting(
        None,
        "what the operator may choose this device by, as site=lab,kind=pi (docs/operation.md)",
        "--label",
    )
    tasks: Pairs | None = setting(
        None,
        "another task that is installed on this device, by the name of its class, as "
        "Texts=texts.py:Texts: it takes part in a run of it that follows (docs/operation.md)",
        "--also-task",
    )
    task_data: Pairs | None = setting(
        None,
        "the file or folder of examples for such a task, as Texts=PATH; not set: --data",
        "--also-data",
    )
    trust: Keys | None = setting(
        None,
        "the key of a signer, from `headwater-server signer`, whose tasks this device takes from "
        "its server and runs (docs/operation.md)",
        on=f"{DEVICE} tasks",
    )
    pin_task: Digest | None = setting(
        None, "take the task of this digest alone; its first 16 digits are enough"
    )
    state: Folder | None = setting(
        None,
        "folder for the device's position in its examples; not set: ~/.local/state/headwater",
        on=f"{DEVICE} {OWNER} tasks",
    )
    memory_limit_bytes: Bytes | None = setting(
        None,
        "use no more memory, as in 4GB; not set: what machine and cgroup allow",
        "--memory-limit",
        alias="--memory",
        on=f"{DEVICE} {OWNER}",
        short=True,
    )
    spool: Folder | None = setting(
        None, "folder that keeps a half-summed update through a power cut"
    )
    frozen_bytes: Bytes = setting(
        10 * 2**30,
        "disk for the frozen parts of models in the state folder, beside the one in use; the least "
        "recently used is deleted first",
        on="",
    )
    battery_share: Part = setting(
        0.5, "share of the time that the planner may count on, on battery"
    )
    hot_celsius: float = setting(80.0, "temperature above which it is hot", on="", ge=0, le=200)
    hot_share: Part = setting(0.5, "share of its time when hot, or throttled", on="")
    busy_above: Fraction = setting(
        0.75, "share of the cores taken by other programs that makes the device busy", on=""
    )
    busy_share: Part = setting(
        1.0, "share of its time when busy; its speed, and so its quota, falls in any case", on=""
    )
    active_hours: Hours | None = setting(
        None,
        "when the device takes part, by this machine's clock: 22:00-06:00, or Mon-Fri "
        "18:00-08:00, Sat-Sun 00:00-24:00; outside these hours it disconnects; not set: always "
        "(docs/install.md)",
        short=True,
    )
    inactive_share: Fraction = setting(
        0.0, "share of its time outside the active hours; 0: it disconnects", on=""
    )
    bytes_per_day: Bytes | None = setting(
        None,
        "send and receive no more from midnight to midnight, by this machine's clock; then stay "
        "away until the next day",
    )
    metrics: Address | None = setting(None, METRICS)
    stay: bool | None = setting(
        None,
        "when a run has ended, wait for the next one without limit (--stay), or end too (--once); "
        "not set: wait as long as --patience",
        "--stay/--once",
        short=True,
    )
    patience_seconds: Seconds = setting(
        600.0, "give up after so long without contact", "--patience"
    )

    @field_validator("trust")
    @classmethod
    def _check_trust(cls, given: str | None) -> str | None:
        try:
            check_signers(given)
        except SettingsError as error:
            raise ValueError(error.message) from error
        return given

    @field_validator("task_data")
    @classmethod
    def _check_task_data(cls, given: str | None, info: ValidationInfo) -> str | None:
        missing = pairs_of(given).keys() - pairs_of(info.data.get("tasks")).keys()
        if missing:
            raise ValueError(f"{min(missing)} is none of the tasks: name it with --also-task")
        return given

    @property
    def trusted_signers(self) -> tuple[str, ...]:
        """The keys of those whose tasks the device takes from a server."""
        return () if self.trust is None else tuple(self.trust.split(","))

    @property
    def state_folder(self) -> Path:
        """The folder for the device's position; by default where XDG puts state."""
        if self.state is not None:
            return self.state
        base = os.environ.get("XDG_STATE_HOME") or expanded("~/.local/state")
        return Path(base) / "headwater"
