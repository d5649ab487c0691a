"""``headwater-client``: put this device to work, or try a task on its data alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwater.client import commands
from headwater.client.flags import (
    AllowListFile,
    BatteryShare,
    BytesPerDay,
    Data,
    IdentityFile,
    MemoryLimitBytes,
    Name,
    NumParts,
    Part,
    Patience,
    Server,
    Spool,
    State,
    Stay,
    UploadWindow,
    WorkingHours,
)
from headwater.common.settings import flags
from headwater.common.settings.sources import overrides, refuse_before_command

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


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
    spool: Spool = None,
    stay: Stay = None,
    patience: Patience = None,
    replace_batch_norm: flags.ReplaceBatchNorm = None,
    check: flags.Check = None,
    threads: flags.Threads = None,
    secure_aggregation: flags.SecureAggregation = None,
    identity: IdentityFile = None,
    allow_list: AllowListFile = None,
    min_members: flags.MinMembers = None,
    tls_ca: flags.TlsCa = None,
    tls_certificate: flags.TlsCertificate = None,
    tls_key: flags.TlsKey = None,
    insecure: flags.Insecure = None,
    config: flags.Config = None,
    client_metrics: flags.Metrics = None,
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
        refuse_before_command(context)
        return
    from headwater.common.system.console import errors_shown, start_log

    start_log(verbose=verbose, log_format=log_format)
    with errors_shown():
        commands.take_part(config, overrides(context.params))


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
    from headwater.common.system.console import errors_shown, start_log

    start_log(verbose=False)
    with errors_shown():
        commands.check_task(config, {**overrides(context.params), "check_task": False})


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
    identity: IdentityFile = None,
    allow_list: AllowListFile = None,
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
    from headwater.common.system.console import errors_shown, start_log

    start_log(verbose=False)
    with errors_shown():
        commands.see_doctor(config, {**overrides(context.params), "check_task": False})


@app.command()
def identity(
    identity: IdentityFile = None,
    name: Name = None,
    config: flags.Config = None,
) -> None:
    """Make this device's identity for active secure aggregation, if it has none, and show its line.

    The line is for the allow-list of every device. The private key stays in the file, which only
    its owner may read; a file that is there is never overwritten.

    Try it: `headwater-client identity --identity pi.key --name pi >> allow-list`
    """
    from headwater.common.system.console import errors_shown, start_log

    start_log(verbose=False)
    with errors_shown():
        commands.show_identity(config, {"secure.identity": identity, "client.name": name})


@app.command()
def join(
    token: Annotated[
        str, typer.Argument(help="What `headwater-server enroll NAME` printed; - reads it.")
    ],
    folder: Annotated[
        Path, typer.Option("--folder", help="Where this device's key and certificate are kept.")
    ] = Path("headwater-device"),
) -> None:
    """Make this device's key, and get its certificate for a one-time join token.

    The key never leaves the device. What is trusted is the authority that the token names, and
    nothing that answers on the way to it. A token on the command line is seen by whoever may list
    this machine's processes: `-` reads it from the standard input.
    """
    from headwater.common.system.console import errors_shown, start_log

    start_log(verbose=False)
    with errors_shown():
        commands.join_with(token, folder)


def main() -> None:
    """Run the command."""
    app()


if __name__ == "__main__":
    main()
