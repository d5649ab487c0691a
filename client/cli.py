"""``headwater-client``: put this device to work, or try a task on its data alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common import flags

if TYPE_CHECKING:
    from client.resident import Identity, Resident
    from client.tally import Tally
    from common.settings import Settings

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)

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


@app.callback(invoke_without_command=True)
def take_part(
    context: typer.Context,
    server: Server = None,
    task: flags.TaskSpec = None,
    data: Data = None,
    name: Name = None,
    part: Part = None,
    num_parts: NumParts = None,
    partition: flags.Partition = None,
    examples_per_device: flags.ExamplesPerDevice = None,
    seed: flags.Seed = None,
    memory_limit_bytes: MemoryLimitBytes = None,
    battery_share: BatteryShare = None,
    upload_window: UploadWindow = None,
    bytes_per_day: BytesPerDay = None,
    working_hours: WorkingHours = None,
    state: State = None,
    spool: Annotated[
        Path | None,
        typer.Option(
            "--spool",
            metavar="DIR",
            help="Where a half-summed update outlives a power cut. Not given: it does not.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    stay: Annotated[
        bool | None,
        typer.Option(
            "--stay/--leave",
            help="Wait for the next run when one has ended.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(
            "--patience",
            metavar="SECONDS",
            help="Give up when the server was not to be reached for so long. [default: 600]",
            rich_help_panel=PANEL,
        ),
    ] = None,
    replace_batch_norm: flags.ReplaceBatchNorm = None,
    check: flags.Check = None,
    threads: flags.Threads = None,
    secure_aggregation: flags.SecureAggregation = None,
    identity: flags.IdentityFile = None,
    allow_list: flags.AllowListFile = None,
    min_members: flags.MinMembers = None,
    tls_ca: flags.TlsCa = None,
    tls_certificate: flags.TlsCertificate = None,
    tls_key: flags.TlsKey = None,
    insecure: flags.Insecure = None,
    config: flags.Config = None,
    client_metrics: flags.ClientMetrics = None,
    log_format: flags.LogFormat = None,
    verbose: flags.Verbose = False,
) -> None:
    """Put this device to work: sum the gradients of its own examples, and send the sum.

    The data stays here. The task is checked on it before the device connects. The connection is
    outbound and is kept up; on SIGTERM or Ctrl-C the part that is done is still sent. With
    --secure-aggregation the device insists on masks: it sends no update that the server could read.

    Try it: `headwater-client --server 127.0.0.1:8500 --task examples/digits.py:Digits --name 0
    --part 0 --num-parts 2`
    """
    if context.invoked_subcommand is not None:
        flags.refuse_before_command(context)
        return
    from common.console import errors_shown, start_log

    start_log(verbose=verbose, log_format=log_format)
    with errors_shown():
        _take_part(config, flags.overrides(context.params))


@app.command()
def check(
    context: typer.Context,
    task: flags.TaskSpec = None,
    data: Data = None,
    name: Name = None,
    part: Part = None,
    num_parts: NumParts = None,
    partition: flags.Partition = None,
    examples_per_device: flags.ExamplesPerDevice = None,
    seed: flags.Seed = None,
    memory_limit_bytes: MemoryLimitBytes = None,
    battery_share: BatteryShare = None,
    replace_batch_norm: flags.ReplaceBatchNorm = None,
    threads: flags.Threads = None,
    config: flags.Config = None,
) -> None:
    """Try a task on this device's data alone: it must run, its loss must be a sum, it must fit.

    Says what the device knows of itself: its memory and what limits it, its speed, its sensors, and
    what it would hold back now.
    """
    from common.console import errors_shown, start_log

    start_log(verbose=False)
    with errors_shown():
        _check(config, {**flags.overrides(context.params), "check_task": False})


@app.command()
def doctor(
    context: typer.Context,
    server: Server = None,
    task: flags.TaskSpec = None,
    data: Data = None,
    name: Name = None,
    part: Part = None,
    num_parts: NumParts = None,
    partition: flags.Partition = None,
    examples_per_device: flags.ExamplesPerDevice = None,
    seed: flags.Seed = None,
    memory_limit_bytes: MemoryLimitBytes = None,
    upload_window: UploadWindow = None,
    bytes_per_day: BytesPerDay = None,
    working_hours: WorkingHours = None,
    state: State = None,
    replace_batch_norm: flags.ReplaceBatchNorm = None,
    threads: flags.Threads = None,
    secure_aggregation: flags.SecureAggregation = None,
    identity: flags.IdentityFile = None,
    allow_list: flags.AllowListFile = None,
    tls_ca: flags.TlsCa = None,
    tls_certificate: flags.TlsCertificate = None,
    tls_key: flags.TlsKey = None,
    insecure: flags.Insecure = None,
    config: flags.Config = None,
) -> None:
    """Look for all that could keep this device from taking part, and say what to do about it.

    Its versions, clock, memory limit, state folder, certificates, link to the server, task, data,
    speed and sensors. Exits with 1 if there is a fault. The server is connected to, and not told.
    """
    from common.console import errors_shown, start_log

    start_log(verbose=False)
    with errors_shown():
        _doctor(config, {**flags.overrides(context.params), "check_task": False})


@app.command()
def identity(
    identity: flags.IdentityFile = None,
    name: Name = None,
    config: flags.Config = None,
) -> None:
    """Make this device's identity for active secure aggregation, if it has none, and show its line.

    The line is for the allow-list of every device. The private key stays in the file, which only
    its owner may read; a file that is there is never overwritten.

    Try it: `headwater-client identity --identity pi.key --name pi >> allow-list`
    """
    from common.console import errors_shown, start_log

    start_log(verbose=False)
    with errors_shown():
        _show_identity(config, {"secure.identity": identity, "client.name": name})


@app.command()
def join(
    token: Annotated[
        str, typer.Argument(help="What `headwater-server enroll NAME` printed; - reads it.")
    ],
    folder: Annotated[
        Path, typer.Option("--folder", help="Where this device's key and certificate are kept.")
    ] = Path("headwater"),
) -> None:
    """Make this device's key, and get its certificate for a one-time join token.

    The key never leaves the device. What is trusted is the authority that the token names, and
    nothing that answers on the way to it. A token on the command line is seen by whoever may list
    this machine's processes: `-` reads it from the standard input.
    """
    from common.console import errors_shown, start_log

    start_log(verbose=False)
    with errors_shown():
        _join(token, folder)


def _join(text: str, folder: Path) -> None:
    import sys

    from client.join import CLOCK_SECONDS, SETTINGS_FILE
    from client.join import join as join_by
    from common.console import console, stderr
    from common.join_token import JoinToken

    token = JoinToken.parse(sys.stdin.read(4096) if text == "-" else text)
    joined = join_by(token, folder)
    console.print(
        f"{joined.name} has joined: its certificate ends on {joined.expires_at:%Y-%m-%d}, and is "
        "renewed before then while the device takes part",
        soft_wrap=True,
    )
    for path in joined.files:
        console.print(f"  {path}", soft_wrap=True)
    off = joined.clock_off_seconds
    if abs(off) > CLOCK_SECONDS:
        where = "ahead of" if off > 0 else "behind"
        stderr.print(f"this machine's clock is {abs(off):.0f} s {where} the server's: set it")
    console.print("Start it with:")
    config = folder / SETTINGS_FILE
    console.print(
        f"  headwater-client --config {config} --task my_task.py:MyTask --data ...", soft_wrap=True
    )


def _show_identity(config: Path | None, overrides: dict[str, Any]) -> None:
    from client.enrolment import host_name, make_identity
    from common.console import stderr
    from common.errors import SettingsError
    from common.settings import load

    settings = load(config, overrides)
    path = settings.secure.identity
    if path is None:
        raise SettingsError("no file is named", remedy="say where it lies: --identity FILE")
    found, is_new = make_identity(path, settings.client.name or host_name())
    if is_new:
        stderr.print(f"made {path}: keep it on this device, and bring the line to all others")
    typer.echo(found.line)


def _check(config: Path | None, overrides: dict[str, Any]) -> None:
    from client.self_check import show
    from common.settings import load

    settings = load(config, overrides)
    resident, identity = _open(settings)
    show(settings, resident, identity)


def _doctor(config: Path | None, overrides: dict[str, Any]) -> None:
    from client.doctor import examine
    from client.findings import show
    from common.settings import load

    if not show(examine(load(config, overrides), _open)):
        raise typer.Exit(1)


def _open(settings: Settings) -> tuple[Resident, Identity]:
    """Load the task and this device's data, before anything is connected."""
    import torch

    from client.device import ThisMachine
    from client.enrolment import host_name
    from client.resident import Identity, resident_of
    from common.errors import MissingData, SettingsError
    from common.heap import use_one_heap

    use_one_heap()  # before the thread that trains begins
    torch.set_num_threads(settings.threads or max(int(ThisMachine().cores()), 1))
    if settings.task is None:
        raise SettingsError("no task is set", remedy="name it with --task FILE.py:Class")
    chosen = settings.client
    if chosen.data is not None and not chosen.data.exists():
        raise MissingData(f"there is no {chosen.data}")
    if chosen.part >= chosen.num_parts:
        raise SettingsError(f"part {chosen.part} of {chosen.num_parts}: parts count from 0")
    identity = Identity(
        name=chosen.name or host_name(),
        data=chosen.data,
        part=chosen.part,
        num_parts=chosen.num_parts,
        rule=settings.partition.rule(seed=settings.seed),
    )
    resident = resident_of(
        settings.task,
        replace_batch_norm=settings.model.replace_batch_norm,
        check_task=settings.check_task,
    )
    return resident, identity


def _take_part(config: Path | None, overrides: dict[str, Any]) -> None:
    import asyncio
    import math

    from client.enrolment import check_enrolment
    from common.settings import load
    from common.tls import check_address, read_credentials

    settings = load(config, overrides)
    credentials = read_credentials(settings.tls)
    check_address(
        settings.client.server, has_tls=credentials is not None, is_insecure=settings.insecure
    )
    if settings.client.metrics is not None:
        from common.metrics_port import check_metrics_address

        check_metrics_address(settings.client.metrics, is_insecure=settings.insecure)
    resident, identity = _open(settings)
    check_enrolment(settings.secure, identity.name)
    resident.examples(identity)
    from client.absence import absence_of
    from client.app import app as own_app
    from client.node import Node
    from client.uplink import Uplink, keep_up
    from common.console import console

    renewal = None
    if credentials is not None:
        from client.renewal import Renewal

        renewal = Renewal(settings.tls, credentials)
    node = Node(own_app, resident, identity, settings, settings.client.state_folder)
    uplink = Uplink(
        node,
        settings.client.server,
        renewal=renewal,
        absence=absence_of(settings.client, identity.name, resident.image.layout),
        patience_seconds=math.inf if settings.client.stay else settings.client.patience_seconds,
    )
    console.print(
        f"{identity.name}: {len(resident.examples(identity))} examples, "
        f"server {settings.client.server}",
        soft_wrap=True,
    )
    _show_metrics(settings, node.tally)
    asyncio.run(keep_up(uplink, stay=settings.client.stay))
    console.print(f"{identity.name}: done")


def _show_metrics(settings: Settings, tally: Tally) -> None:
    """Open the port of the metrics, if it was asked for; it ends with the process."""
    if settings.client.metrics is None:
        return
    from client.exporter import ClientMetrics
    from client.limits import MemoryLimits
    from client.sensors import Sensors
    from common.console import console
    from common.metrics_port import MetricsPort

    limits = MemoryLimits(settings.client.memory_limit_bytes)
    # Sensors of its own: those of the device are looked at from the thread that trains.
    metrics = ClientMetrics(tally, Sensors().vitals, limits.least_bytes)
    port = MetricsPort(settings.client.metrics, metrics.registry)
    console.print(f"metrics at {port.url}", soft_wrap=True)


def main() -> None:
    """Run the command."""
    app()


if __name__ == "__main__":
    main()
