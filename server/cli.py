"""The command line of ``headwater-server``: serve a run, enrol devices, watch and control a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click
import typer
from typer.core import TyperOption

from headwater.common.errors import SettingsError
from headwater.common.settings.fields import SERVER
from headwater.common.settings.flags import OWN_PANEL, PlainCommand, SettingsCommand, overrides
from headwater.common.system.command_line import (
    Config,
    LogFormat,
    Resume,
    Verbose,
    check_addresses,
    new_app,
    read_settings,
)
from headwater.common.system.stop_signals import interrupt_at_stop_signals

if TYPE_CHECKING:
    from headwater.common.settings.schema import Settings
    from headwater.common.transport.tls import Credentials

app = new_app("headwater-server")

RunFolder = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="The folder of the run, the server's --out.")
]
CertificateFolder = Annotated[
    Path, typer.Option("--folder", metavar="DIR", help="The folder that `init` makes.")
]
Standby = Annotated[
    bool,
    typer.Option(
        "--standby",
        help="Wait until no other server serves the run in --shared-state, then continue it.",
        rich_help_panel=SERVER,
    ),
]
DeviceName = Annotated[str, typer.Argument(metavar="NAME")]
CERTIFICATES = Path("certs")


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    config: Config = None,
    resume: Resume = False,
    standby: Standby = False,
    log_format: LogFormat = None,
    verbose: Verbose = False,
) -> None:
    r"""Start the aggregation server and train one model on the devices that connect.

    The run starts when --min-clients are connected. Devices open the connection, so they may be
    behind any router. Beyond loopback both sides need certificates: headwater-server init.

    Try it: headwater-server --task examples/digits.py:Digits \
        --min-clients 2 --rounds 20 --page
    """
    if context.invoked_subcommand is not None:
        return
    given = partial(read_settings, context, config, verbose=verbose, log_format=log_format)
    settings, shared = given(resume=resume and not standby), None
    if standby or settings.standby.shared_state is not None:
        from headwater.server.standby.takeover import open_run

        shared = open_run(settings, given, is_standby=standby, resume=resume)
        if shared is None:
            return
        if shared.holds_run:
            settings, resume = given(resume=True), True
    if settings.server.upstream is not None:
        if resume or shared is not None:
            raise SettingsError(
                "an aggregator keeps no run: --resume, --standby and --shared-state are for the "
                "server above",
                remedy="leave them out; an aggregator that starts again continues by itself",
            )
        from headwater.aggregator.serve import serve_branch

        serve_branch(settings)
        return
    if settings.server.upstream_config is not None:
        raise SettingsError(
            "--upstream-config is for an aggregator, and --upstream is not set",
            remedy="leave out --upstream-config, or add --upstream with the address of the server "
            "above",
        )
    credentials = _credentials(settings)
    from headwater.common.settings.sources import default_out
    from headwater.server.run_sequence import serve_runs

    if settings.has_task_bundle:
        from headwater.common.task_bundles.signed_bundle import with_opened_task

        settings = with_opened_task(settings)
    settings = settings.model_copy(update={"out": settings.out or default_out(settings)})
    serve_runs(settings, credentials, resume=resume, shared=shared)


def _credentials(settings: Settings) -> Credentials | None:
    """Return the server's TLS files; check that what is in plain text stays on loopback."""
    listen = settings.server.listen
    credentials = check_addresses(settings, listen, metrics=settings.server.metrics)
    if settings.server.page is not None:
        from headwater.server.page.page_server import check_page_address

        check_page_address(settings.server.page, has_tls=credentials is not None)
    return credentials


class StatisticsCommand(SettingsCommand):
    """A command with the flags of ``headwater-server`` itself, but what it sets."""

    flags_of = "server"
    hidden_flags = ("rounds", "statistics.is_on")


@app.command(cls=StatisticsCommand)
def statistics(
    context: typer.Context,
    config: Config = None,
    log_format: LogFormat = None,
    verbose: Verbose = False,
) -> None:
    r"""Measure the devices' examples, and print a table; train nothing.

    The task says what is measured (docs/task.md). It is one round, with the flags of the server:
    with --secure-aggregation the server sees the sums over all devices alone. The result is in
    statistics.json of --out, and `headwater-server --resume --out DIR --rounds N` trains with it.
    Devices wait for that as long as their --patience; those that were started with --once end.

    Try it: headwater-server statistics --min-clients 2 \
        --task examples/unscaled_table.py:UnscaledTable
    """
    from headwater.server.statistics.command import measure

    fixed: dict[str, Any] = {"rounds": 1, "statistics.is_on": True}
    given = read_settings(context, config, verbose=verbose, log_format=log_format, **fixed)
    measure(given, _credentials(given))


@app.command(cls=PlainCommand)
def init(
    folder: CertificateFolder = CERTIFICATES,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="A name or address of the server. May be repeated."),
    ] = None,
    certificates_last: Annotated[
        str | None,
        typer.Option(
            "--certificates-last",
            metavar="TIME",
            help="How long a device's certificate is valid: 90d, 12h, ... [default: 365d]",
        ),
    ] = None,
) -> None:
    """Make an authority, certificates, a registry and a settings file.

    Existing files are kept, except for a server certificate that lacks a host or is in the last
    third of its life: it is renewed. Keep `ca-key.pem` secret: it can sign certificates for any
    device. Then start the server with `--config FOLDER/server.toml`, and enrol each device with
    `headwater-server enroll NAME`.
    """
    from headwater.server.enrolment.commands import make_folder

    make_folder(folder, hosts=host or [], certificates_last=certificates_last)


SignerKey = Annotated[
    Path, typer.Option("--key", metavar="FILE", help="The signer's key, from `signer`.")
]


@app.command(cls=PlainCommand)
def signer(
    key: Annotated[Path, typer.Argument(metavar="FILE", help="Where the key is kept.")],
) -> None:
    """Make the key that signs your tasks, or print its public part.

    Devices take tasks that are signed with it if their owners start them with `--trust` and what
    this prints. Keep the file on your own machine, and off the server: who has it runs code on
    those devices.
    """
    from headwater.common.system.console import stderr
    from headwater.server.task_bundles.publish import public_key, signer_key

    found, is_new = signer_key(key)
    if is_new:
        stderr.print(f"made {key}: keep it secret, and off the server", soft_wrap=True)
    typer.echo(public_key(found))


@app.command(cls=PlainCommand)
def publish(
    task: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:CLASS",
            help="The task; or an earlier FILE.task, whose files become the next version.",
        ),
    ],
    key: SignerKey,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            metavar="DIR",
            help="All files below it go along. [default: the task's file]",
        ),
    ] = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option(
            "--with",
            metavar="PATH",
            help="A file beside the task that it reads or imports, or a folder of such: the test "
            "that the server reads too. May be repeated.",
        ),
    ] = None,
    requires: Annotated[
        list[str] | None,
        typer.Option(
            "--requires",
            metavar="PACKAGE",
            help="What must be installed on a device, as in 'pandas>=2'. May be repeated.",
        ),
    ] = None,
    version: Annotated[
        int | None,
        typer.Option(
            "--version", metavar="N", min=1, help="[default: one more than the last beside it]"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="PATH", help="Where to write it. [default: beside the task]"),
    ] = None,
) -> None:
    """Sign a task, for the server to hand to devices that trust you.

    Start the server with the file as its --task. Devices that were started with --trust and the
    signer's key fetch it, keep it, and go on with it; a device that has another version changes to
    this one before its next round. Code alone: data and weights reach a device by other ways.

    Try it: headwater-server signer my.key;
    headwater-server publish my_task.py:MyTask --key my.key
    """
    from headwater.common.system.console import console
    from headwater.common.wording import counted
    from headwater.server.task_bundles.publish import publish as write
    from headwater.server.task_bundles.publish import publish_again, saved_signer_key

    found = saved_signer_key(key)
    if task.endswith(".task"):
        if folder is not None or beside or requires:
            raise SettingsError(
                f"{task} has its files and requirements",
                remedy="leave out --folder, --with and --requires",
            )
        bundle, path = publish_again(Path(task), key=found, version=version, out=out)
    else:
        bundle, path = write(
            task,
            key=found,
            folder=folder,
            beside=beside or (),
            requires=requires or (),
            version=version,
            out=out,
        )
    number = counted(len(bundle.content.files), "file")
    console.print(
        f"{path}: {bundle.title}, {number}, {len(bundle.data):,} bytes",
        soft_wrap=True,
        markup=False,
    )
    console.print(f"digest {bundle.digest}", soft_wrap=True, markup=False)
    console.print(f"devices take it with --trust {bundle.signer}", soft_wrap=True, markup=False)


@app.command(cls=PlainCommand)
def enroll(
    name: DeviceName,
    folder: CertificateFolder = CERTIFICATES,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            help="Where devices reach the enrolment port. [default: the first --host of `init` "
            "and the port that the server had last, or will have by FOLDER/server.toml]",
        ),
    ] = None,
    valid: Annotated[
        str, typer.Option("--valid", metavar="TIME", help="How long the token is valid.")
    ] = "1h",
) -> None:
    """Print a one-time join token, for a device's certificate.

    The running server opens its enrolment port while a token is valid. Keep the token as secret as
    a password: the first device of this name that presents it gets the certificate.

    Try it: headwater-server enroll kitchen-pi
        (then on that device: headwater-client join, which asks for the token)
    """
    from headwater.server.enrolment.commands import make_token

    typer.echo(make_token(folder, name, address=address, valid=valid))


@app.command(cls=PlainCommand)
def revoke(name: DeviceName, folder: CertificateFolder = CERTIFICATES) -> None:
    """Revoke a device's certificate, and close its stream.

    A running server does so within a second. The name can be enrolled again, with a new key. The
    old certificate stays refused.
    """
    from headwater.server.enrolment.commands import revoke_device

    revoke_device(folder, name)


@app.command(cls=PlainCommand)
def plan(
    out: RunFolder,
    round_number: Annotated[
        int | None, typer.Option("--round", metavar="N", help="The round. [default: the last]")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Explain each device's quota.")
    ] = False,
) -> None:
    """Show each device's plan in a round, and how long it took."""
    from headwater.server.operations.plan_table import show_plan

    show_plan(out, round_number=round_number, explain=explain)


@app.command(cls=PlainCommand)
def status(
    out: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    devices: Annotated[
        str | None,
        typer.Option(metavar="LABEL=VALUE", help="Only the devices of these labels: site=lab."),
    ] = None,
) -> None:
    """Show the state of a run and of each of its devices.

    For each device: when it was last seen, K, memory, temperature, battery, bytes, and why it was
    refused. Exit status 0: the server runs and its heartbeat is fresh, or the run is finished. 1:
    the server has ended before the last round, or it does not answer. 2: there is no run.
    """
    from headwater.common.system.console import print_table
    from headwater.server.operations import status as status_table

    state = status_table.read_status(out)
    if devices is not None:
        state = status_table.of_labels(state, devices)
    if as_json:
        typer.echo(status_table.as_json(state))
    else:
        print_table(status_table.as_table(state, out))
    raise typer.Exit(status_table.exit_status(state))


@app.command(cls=PlainCommand)
def report(
    out: RunFolder,
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="How long a period is: 30d, 12h, ...")
    ] = "7d",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    as_html: Annotated[
        bool, typer.Option("--html", help="Write the run's page, report.html, into its folder.")
    ] = False,
) -> None:
    """Show a run's last week beside the week before.

    Rounds, examples, bytes, loss and metrics, the privacy spent, each device's rounds and refusals,
    and the alerts. It reads the run's folder, so it works whether or not the server runs.
    """
    from headwater.common.parsed_text import parse_duration
    from headwater.common.system.console import print_table, print_text
    from headwater.server.report import period_summary

    if as_html:
        from headwater.server.report.report import write_report

        print_text(f"written to {write_report(out)}")
        return
    found = period_summary.summary(out, seconds=parse_duration(since))
    if as_json:
        typer.echo(period_summary.as_json(found))
    else:
        print_table(period_summary.as_table(found, out))


class EvaluateCommand(SettingsCommand):
    """A command with the flags of ``headwater-server`` that a test on the devices may need."""

    flags_of = "server"

    def settings_options(self, ctx: click.Context) -> dict[str, TyperOption]:
        """Return the flags of the server, its protection and the test; none of a training's."""
        found = {k: one for k, one in super().settings_options(ctx).items() if is_of_test(k)}
        for key in ("device_test.fraction", "device_test.compare_with"):
            found[key].rich_help_panel = OWN_PANEL
        return found


def is_of_test(key: str) -> bool:
    """Whether a setting by its dotted key is one of a test on the devices."""
    branch, _, leaf = key.rpartition(".")
    if branch == "device_test":
        return leaf != "model"
    if branch in ("server", "tls", "secure", "cohort"):
        return leaf not in ("upstream", "upstream_config", "size", "weighting", "answer_factor")
    is_of_pass = key in ("plan.precision", "plan.micro_batch_size")
    return is_of_pass or key in ("set", "threads", "plain_text", "public_metrics", "seed")


@app.command(cls=EvaluateCommand)
def evaluate(
    context: typer.Context,
    out: RunFolder,
    on_devices: Annotated[
        bool,
        typer.Option(
            "--on-devices",
            help="Test on the devices' own held-out examples: serve one round that trains nothing. "
            "The run's own address, certificates and masks, or flags as of the server itself.",
        ),
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="PATH",
            help="With --on-devices: another model than the run's own: a run's folder, a "
            "checkpoint, or a file of weights.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="PATH",
            help="Examples to test on, as a device's --data, or in quotes a pattern of such paths: "
            "'devices/*.csv'. May be repeated. [default: the task's test_examples]",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            "--task", metavar="FILE.py:Class", help="The task. [default: the one in the model file]"
        ),
    ] = None,
    is_best: Annotated[
        bool, typer.Option("--best", help="Test best.safetensors, which --best METRIC keeps.")
    ] = False,
    local: Annotated[
        Path | None,
        typer.Option(
            "--local",
            metavar="FILE",
            help="After --local-parameters: the file in which a device kept its own.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config: Config = None,
    log_format: LogFormat = None,
    verbose: Verbose = False,
) -> None:
    r"""Test a run's model on examples of this machine, or with --on-devices on those of devices.

    On the devices nothing is trained and no model changes: they send sums, and with
    --secure-aggregation the server sees the sums over all devices alone. The result is in
    evaluation.json of --out. Devices that were started with --once end after it.

    Try it: headwater-server evaluate --out runs/DIR --data rows.csv
    """
    from headwater.common.system.console import print_table, start_log
    from headwater.server import evaluate_model

    given = overrides(context)
    if on_devices:
        if data or local is not None:
            raise SettingsError(
                "--data and --local are examples and parameters of this machine, and --on-devices "
                "tests on the devices",
                remedy="leave out --data and --local, or --on-devices",
            )
        from headwater.server.evaluation.command import TestOrder, test_on_devices

        # With --json the result is alone on the standard output.
        start_log(verbose=verbose, log_format="json" if as_json else log_format)
        order = TestOrder(out=out, model=model, task=task, is_best=is_best, as_json=as_json)
        test_on_devices(order, config, given, _credentials)
        return
    if given or config is not None or model is not None:
        raise SettingsError(
            "flags of the server, --config and --model are for a test on the devices",
            remedy="add --on-devices, or leave them out",
        )
    tested = evaluate_model.evaluate(out, data=data or [], task=task, is_best=is_best, local=local)
    if as_json:
        typer.echo(evaluate_model.as_json(tested))
    else:
        print_table(evaluate_model.as_table(tested))


@app.command(cls=PlainCommand)
def pause(out: RunFolder) -> None:
    """Start no more rounds; the current one ends, the devices stay.

    `headwater-server unpause` undoes it. A restarted server stays paused.
    """
    _order(out, "pause")


@app.command(cls=PlainCommand)
def unpause(out: RunFolder) -> None:
    """Undo `pause`: the running server starts rounds again.

    To start a server again that has ended, use the flag: `headwater-server --resume --out DIR`.
    """
    _order(out, "resume")


@app.command(cls=PlainCommand, hidden=True)
def resume(out: RunFolder) -> None:
    """Do as `unpause`, the name of this command since the flag --resume does something else."""
    from headwater.common.system.console import stderr

    stderr.print(
        "`headwater-server resume` is now `headwater-server unpause`; the flag --resume starts a "
        "server again that has ended",
        soft_wrap=True,
        markup=False,
    )
    unpause(out)


@app.command(cls=PlainCommand)
def drain(out: RunFolder) -> None:
    """End the server without losing work: it completes its round and exits with 0.

    `headwater-server --resume --out DIR` continues the run later. Devices wait for it as long as
    their --patience, or with --stay without limit; those that were started with --once end.
    """
    _order(out, "drain")


@app.command(cls=PlainCommand)
def submit(
    config: Annotated[Path, typer.Argument(metavar="SETTINGS.toml")],
    out: RunFolder,
    is_next: Annotated[
        bool,
        typer.Option("--next", help="End the current run after its round, and begin this one."),
    ] = False,
) -> None:
    """Queue a run, which follows on the same devices.

    It begins when the run in DIR and those that wait before it have ended, or with --next after the
    current round. The file is a settings file as for --config. The server's address and
    certificates stay. A device takes part if the run's task is installed on it
    (docs/operation.md). To take a run back, delete its file in DIR/queue.
    """
    from headwater.server.succession.commands import submit_run

    submit_run(config, out, is_next=is_next)


def _order(out: Path, verb: Literal["pause", "resume", "drain"]) -> None:
    from headwater.server.operations.orders import give_order

    give_order(out, verb)


def main() -> None:
    """Run the command."""
    interrupt_at_stop_signals()
    app()


if __name__ == "__main__":
    main()
