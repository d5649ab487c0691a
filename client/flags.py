"""The flags of ``headwater-client`` alone; as in ``headwater.common.settings.schema.flags``, nothing heavy is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwater.common.settings.flags import SECURE

PANEL = "This device"

Data = Annotated[
    Path | None,
    typer.Option("--data", help="This device's own file or folder.", rich_help_panel=PANEL),
]
Name = Annotated[
    str | None,
    typer.Option(
        "--name", help="The device's name, its own. [default: the host's]", rich_help_panel=PANEL
    ),
]
Part = Annotated[
    int | None,
    typer.Option(
        "--part",
        help="Which part, of a task that splits bundled data. [default: 0]",
        rich_help_panel=PANEL,
    ),
]
NumParts = Annotated[
    int | None,
    typer.Option("--num-parts", help="Of how many parts. [default: 1]", rich_help_panel=PANEL),
]
MemoryLimitBytes = Annotated[
    int | None,
    typer.Option(
        "--memory-limit",
        metavar="BYTES",
        help="Use no more than this, below what machine and cgroup allow.",
        rich_help_panel=PANEL,
    ),
]
BatteryShare = Annotated[
    float | None,
    typer.Option(
        "--battery-share",
        metavar="0 TO 1",
        help="On battery, do so much of what is asked; 1 takes no notice of it. [default: 0.5]",
        rich_help_panel=PANEL,
    ),
]

UploadWindow = Annotated[
    str | None,
    typer.Option(
        "--upload-window",
        metavar="HH:MM-HH:MM",
        help="Use the link then only, by this machine's clock; also Mon-Fri 18:00-08:00, Sat-Sun "
        "00:00-24:00. Not given: always.",
        rich_help_panel=PANEL,
    ),
]
BytesPerDay = Annotated[
    int | None,
    typer.Option(
        "--bytes-per-day",
        metavar="BYTES",
        help="Send and receive no more from midnight to midnight, and stay away for the rest of "
        "the day.",
        rich_help_panel=PANEL,
    ),
]
WorkingHours = Annotated[
    str | None,
    typer.Option(
        "--working-hours",
        metavar="HH:MM-HH:MM",
        help="Stay away then (docs/install.md), written as the upload window is.",
        rich_help_panel=PANEL,
    ),
]

Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="HOST:PORT",
        help="The aggregation server. [default: 127.0.0.1:8500]",
        rich_help_panel=PANEL,
    ),
]
State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        help="Where the device keeps its place in its examples. "
        "[default: ~/.local/state/headwater]",
        rich_help_panel=PANEL,
    ),
]
Spool = Annotated[
    Path | None,
    typer.Option(
        "--spool",
        metavar="DIR",
        help="Where a half-summed update outlives a power cut. Not given: it does not.",
        rich_help_panel=PANEL,
    ),
]
Stay = Annotated[
    bool | None,
    typer.Option(
        "--stay/--leave",
        help="Wait for the next run when one has ended.",
        rich_help_panel=PANEL,
    ),
]
Patience = Annotated[
    float | None,
    typer.Option(
        "--patience",
        metavar="SECONDS",
        help="Give up when the server was not to be reached for so long. [default: 600]",
        rich_help_panel=PANEL,
    ),
]
IdentityFile = Annotated[
    Path | None,
    typer.Option(
        "--identity",
        metavar="FILE",
        help="This device's signing identity, made by `headwater-client identity`.",
        rich_help_panel=SECURE,
    ),
]
AllowListFile = Annotated[
    Path | None,
    typer.Option(
        "--allow-list",
        metavar="FILE",
        help="Lines NAME KEY of the identities that this device trusts; bring it by other ways "
        "than through the server.",
        rich_help_panel=SECURE,
    ),
]
