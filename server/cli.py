"""``headwater-server``: start the aggregation server, or make its certificates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from headwater.common.settings import flags
from headwater.common.settings.sources import overrides, refuse_before_command

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)

PANEL = "The server"

RunFolder = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="The folder of the run, the server's --out.")
]


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    task: flags.TaskSpec = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="Where devices connect; port 0 takes a free one. [default: 127.0.0.1:8500]",
            rich_help_panel=PANEL,
        ),
    ] = None,
    enrolment_listen: Annotated[
        str | None,
        typer.Option(
            "--enrolment-listen",
            metavar="HOST:PORT",
            help="Where devices join, while a join token is out. [default: the port after that]",
            rich_help_panel=PANEL,
        ),
    ] = None,
    min_clients: flags.MinClients = None,
    rounds: flags.Rounds = None,
    seed: flags.Seed = None,
    optimizer: flags.OptimizerName = None,
    learning_rate: flags.LearningRate = None,
    optimizer_argument: flags.OptimizerArgument = None,
    schedule: flags.ScheduleName = None,
    schedule_argument: flags.ScheduleArgument = None,
    warmup_rounds: flags.WarmupRounds = None,
    batch_scaling: flags.BatchScaling = None,
    accumulation_steps: flags.AccumulationSteps = None,
    micro_batch_size: flags.MicroBatchSize = None,
    effective_batch_size: flags.EffectiveBatchSize = None,
    tokens_per_update: flags.TokensPerUpdate = None,
    follow_noise_scale: flags.FollowNoiseScale = None,
    max_effective_batch_size: flags.MaxEffectiveBatchSize = None,
    local_steps: flags.LocalSteps = None,
    local_learning_rate: flags.LocalLearningRate = None,
    precision: flags.Precision = None,
    cohort_size: flags.CohortSize = None,
    deadline: flags.Deadline = None,
    invite_within: flags.InviteWithin = None,
    weighting: flags.Weighting = None,
    secure_aggregation: flags.SecureAggregation = None,
    ring_bits: flags.RingBits = None,
    min_members: flags.MinMembers = None,
    evaluate_on_devices: flags.HeldOut = None,
    evaluate_every: flags.EvaluateEvery = None,
    initial_model: flags.InitialModel = None,
    replace_batch_norm: flags.ReplaceBatchNorm = None,
    threads: flags.Threads = None,
    tls_ca: flags.TlsCa = None,
    tls_certificate: flags.TlsCertificate = None,
    tls_key: flags.TlsKey = None,
    insecure: flags.Insecure = None,
    out: flags.Out = None,
    resume: flags.Resume = False,
    config: flags.Config = None,
    server_metrics: flags.Metrics = None,
    log_format: flags.LogFormat = None,
    verbose: flags.Verbose = False,
) -> None:
    """Start the aggregation server and train one model on the devices that connect.

    The run starts when `--min-clients` are connected. Devices open the connection, so they may sit
    behind any router. Beyond loopback both sides need certificates: `headwater-server init`.

    Try it: `headwater-server --task examples/digits.py:Digits --min-clients 2 --rounds 20`
    """
    if context.invoked_subcommand is not None:
        refuse_before_command(context)
        return
    from headwater.common.system.console import errors_shown, start_log

    start_log(verbose=verbose, log_format=log_format)
    with errors_shown():
        _serve(resume, config, overrides(context.params))


@app.command()
def init(
    folder: Annotated[Path, typer.Option("--folder", help="Where to write them.")] = Path("certs"),
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="A name or address of the server. May be repeated."),
    ] = None,
    certificates_last: Annotated[
        str | None,
        typer.Option(
            "--certificates-last",
            metavar="TIME",
            help="How long a device's certificate lasts: 90d, 12h, ... [default: 365d]",
        ),
    ] = None,
) -> None:
    """Make an authority, the server's certificate, the registry of devices, and settings.

    What is there is kept; a server's certificate that lacks a host, or is in the last third of its
    life, is made anew. Keep `ca-key.pem` to yourself: whoever has it can make devices. Then start
    the server with `--config FOLDER/server.toml`, and let each device in with `headwater-server
    enroll NAME`.
    """
    from headwater.common.system.console import errors_shown

    with errors_shown():
        from headwater.server.enrolment.commands import make_folder

        make_folder(folder, hosts=host or [], certificates_last=certificates_last)


@app.command()
def enroll(
    name: Annotated[str, typer.Argument(help="The device's name.")],
    folder: Annotated[Path, typer.Option("--folder", help="The folder that `init` made.")] = Path(
        "certs"
    ),
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            help="Where devices reach the enrolment port. [default: the first --host of `init` "
            "and the port that the server had last, or 8501]",
        ),
    ] = None,
    valid: Annotated[
        str, typer.Option("--valid", metavar="TIME", help="For how long the token is good.")
    ] = "1h",
) -> None:
    """Print a one-time join token, by which one device of this name gets its certificate.

    The running server opens its enrolment port while a token is out. Pass the token on as you would
    a password: who has it first becomes the device.

    Try it: `headwater-server enroll kitchen-pi`, and there `headwater-client join TOKEN`
    """
    from headwater.common.system.console import errors_shown

    with errors_shown():
        from headwater.server.enrolment.commands import make_token

        typer.echo(make_token(folder, name, address=address, valid=valid))


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="The device's name.")],
    folder: Annotated[Path, typer.Option("--folder", help="The folder that `init` made.")] = Path(
        "certs"
    ),
) -> None:
    """End a device's certificate; a running server ends its stream within a second.

    The name can be enrolled anew, with another key. The old certificate stays refused.
    """
    from headwater.common.system.console import errors_shown

    with errors_shown():
        from headwater.server.enrolment.commands import revoke_device

        revoke_device(folder, name)


@app.command()
def plan(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The folder of a run, ended or going on.")
    ],
    round_number: Annotated[
        int | None, typer.Option("--round", help="Which round. [default: the last]")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say for each device why it was asked for so much.")
    ] = False,
) -> None:
    """Show what each device was asked for in a round, and how long it took."""
    from headwater.common.system.console import errors_shown

    with errors_shown():
        from headwater.server.operations.plan_table import show_plan

        show_plan(out, round_number=round_number, explain=explain)


@app.command()
def status(
    out: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for machines.")] = False,
) -> None:
    """Show how a run stands, and each device: seen when, K, memory, heat, battery, bytes, refusal.

    Exit status 0: the server is up and its heartbeat is fresh. 1: it is down, or does not answer.
    """
    from headwater.common.system.console import console, errors_shown

    with errors_shown():
        from headwater.server.operations import status as status_table

        found = status_table.read_status(out)
        if as_json:
            typer.echo(status_table.as_json(found))
        else:
            console.print(status_table.as_table(found, out), soft_wrap=False)
    raise typer.Exit(0 if found["is_well"] else 1)


@app.command()
def pause(out: RunFolder) -> None:
    """Hold the rounds back: the one in progress ends, none begins, the devices stay connected.

    `headwater-server resume` undoes it. A restarted server stays paused.
    """
    _order(out, "pause")


@app.command()
def resume(out: RunFolder) -> None:
    """Undo `pause`: the running server begins rounds again.

    This is an order to a server that runs. To start a server that has ended, where it left off, use
    the flag: `headwater-server --resume --out DIR`.
    """
    _order(out, "resume")


@app.command()
def drain(out: RunFolder) -> None:
    """End the server without losing work: its round ends, it says goodbye, and exits with 0.

    `headwater-server --resume --out DIR` goes on with the run later. Devices that were started with
    `--stay` wait for it; the others end.
    """
    _order(out, "drain")


def _order(out: Path, verb: Literal["pause", "resume", "drain"]) -> None:
    from headwater.common.system.console import errors_shown

    with errors_shown():
        from headwater.server.operations.order_commands import give_order

        give_order(out, verb)


def _serve(resume: bool, config: Any, overrides: dict[str, Any]) -> None:
    from headwater.common.settings.schema import load_run
    from headwater.common.system.console import default_out
    from headwater.common.transport.tls import check_address, read_credentials

    settings = load_run(config, overrides, resume=resume)
    settings = settings.model_copy(update={"out": settings.out or default_out(settings)})
    credentials = read_credentials(settings.tls)
    if settings.server.metrics is not None:
        from headwater.common.system.metrics_server import check_metrics_address

        check_metrics_address(settings.server.metrics, is_insecure=settings.insecure)
    check_address(
        settings.server.listen, has_tls=credentials is not None, is_insecure=settings.insecure
    )
    from headwater.server.operations.progress import print_result, print_settings, progress_bar
    from headwater.server.serve import serve_run

    print_settings(settings, where=settings.server.listen)
    with progress_bar(settings) as on_round:
        serve_run(settings, credentials, on_round=on_round, resume=resume)
    print_result(settings)


def main() -> None:
    """Run the command."""
    app()


if __name__ == "__main__":
    main()
