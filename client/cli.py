"""The command line of ``headwater-client``: take part in a run, or check this device alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import click
import typer

from headwater.client import commands
from headwater.common.settings.flags import PlainCommand, SettingsCommand
from headwater.common.system.command_line import Config, LogFormat, Verbose, new_app, read_settings
from headwater.common.system.stop_signals import interrupt_at_stop_signals

DEVICE_FOLDER = Path("headwater-device")  # the default of ``join``

app = new_app("headwater-client")


@app.callback(invoke_without_command=True)
def take_part(
    context: typer.Context,
    config: Config = None,
    log_format: LogFormat = None,
    verbose: Verbose = False,
) -> None:
    r"""Take part in a run: sum the gradients of this device's examples and send the sum.

    The data stays on this device. The task is checked before the device connects. The connection is
    outbound and is kept open. On SIGTERM or Ctrl-C the finished part of the sum is still sent. With
    --secure-aggregation the device sends no update that the server could read.

    Try it: headwater-client --server 127.0.0.1:8500 \
        --task examples/digits.py:Digits --name 0 --part 0 --num-parts 2 --once
    """
    if context.invoked_subcommand is None:
        commands.take_part(read_settings(context, config, verbose=verbose, log_format=log_format))


@app.command(cls=SettingsCommand)
def check(
    context: typer.Context,
    tokens_per_update: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Forecast a round of so many tokens, as the server"),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Forecast a round that so many devices share"),
    ] = None,
    config: Config = None,
) -> None:
    """Run a task on this device's data alone: its loss must be a sum, and it must fit in memory.

    Prints the device's memory and what limits it, its speed, its time and bytes for a round, its
    sensors, and whether they would slow it down now.
    """
    given = {"plan.tokens_per_update": tokens_per_update, "cohort.min_clients": devices}
    chosen: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    commands.check_task(read_settings(context, config, check_task=False, **chosen))


@app.command(cls=SettingsCommand)
def doctor(context: typer.Context, config: Config = None) -> None:
    """Look for everything that could keep this device from taking part, and print what to do.

    Examines versions, clock, memory limit, state folder, certificates, connection to the server,
    task, data, speed and sensors. Exits with 1 if there is a fault. It connects to the server
    without joining the run.
    """
    commands.run_doctor(read_settings(context, config, check_task=False))


@app.command(cls=SettingsCommand)
def tasks(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    config: Config = None,
) -> None:
    """List the tasks that servers have handed to this device.

    Each has a name, a version, a digest, a signer, and the day since when it is here. The files are
    in the folder `tasks` of the device's state folder, each in a folder that its digest names.
    """
    commands.show_tasks(read_settings(context, config), as_json=as_json)


@app.command(cls=SettingsCommand)
def identity(context: typer.Context, config: Config = None) -> None:
    """Print this device's line for the allow-lists; make its identity first if it has none.

    The identity is for active secure aggregation. The private key stays in the file, which only its
    owner may read; an existing file is never overwritten.

    Try it: headwater-client identity --identity pi.key --name pi >> allow-list
    """
    commands.show_identity(read_settings(context, config))


ReleasedModel = Annotated[
    Path,
    typer.Option(
        "--model",
        metavar="PATH",
        help="The model: its file, a run's folder, or one that adapt wrote.",
    ),
]


OwnParameters = Annotated[
    Path | None,
    typer.Option(
        "--local",
        metavar="FILE",
        help="After --local-parameters: the file in which this device kept its own. "
        "[default: the one in --state]",
    ),
]


@app.command(cls=SettingsCommand)
def adapt(
    context: typer.Context,
    model: ReleasedModel,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the better model.")],
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="PATTERNS",
            help="Train these parameters alone, as in 'head.*'. May be repeated. [default: all]",
        ),
    ] = None,
    local: OwnParameters = None,
    optimizer: Annotated[
        str, typer.Option("--optimizer", metavar="NAME", help="One of torch.optim.")
    ] = "adamw",
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", "--lr", metavar="RATE", help="Its learning rate.")
    ] = 1e-3,
    epochs: Annotated[int, typer.Option("--epochs", metavar="N", help="Epochs at most.")] = 20,
    patience: Annotated[
        int,
        typer.Option(
            "--patience", metavar="N", help="End after so many epochs without a better loss."
        ),
    ] = 3,
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", help="Examples of a step.")
    ] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config: Config = None,
    log_format: LogFormat = None,
    verbose: Verbose = False,
) -> None:
    r"""Fine-tune a released model on this device's own data, and keep the better of the two.

    Nothing is sent. Both models are tested on examples that the run held out on this device, so
    give its name and data as in the run. Ctrl-C ends the training, and the best so far is tested.

    Try it: headwater-client adapt --model model.safetensors --name pi \
        --task my_task.py:MyTask --data my_rows.csv --out mine
    """
    training = {
        "only": ",".join(only) if only else None,
        "optimizer": optimizer,
        "learning_rate": learning_rate,
        "epochs": epochs,
        "patience": patience,
        "batch_size": batch_size,
    }
    settings = read_settings(context, config, verbose=verbose, log_format=log_format)
    commands.adapt(settings, training, model=model, out=out, local=local, as_json=as_json)


@app.command(cls=SettingsCommand)
def predict(
    context: typer.Context,
    model: ReleasedModel,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="File to write. [default: standard output]"),
    ] = None,
    local: OwnParameters = None,
    form: Annotated[
        Literal["csv", "jsonl"] | None,
        typer.Option(
            "--format",
            click_type=click.Choice(["csv", "jsonl"]),
            metavar="csv|jsonl",
            help="Rows with commas, or a JSON object a line. [default: by the file's name, or csv]",
        ),
    ] = None,
    config: Config = None,
    log_format: LogFormat = None,
    verbose: Verbose = False,
) -> None:
    r"""Write what a model predicts of each example of this device's data.

    The task says what that is, in predict(model, batch) or predictions(model, batch). Nothing is
    sent.

    Try it: headwater-client predict --model mine --out predictions.csv \
        --task my_task.py:MyTask --data new_rows.csv
    """
    settings = read_settings(context, config, verbose=verbose, log_format=log_format)
    commands.predict(settings, model=model, out=out, local=local, form=form)


@app.command(cls=PlainCommand, context_settings={"allow_extra_args": True})
def join(
    context: typer.Context,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="File with the join token; - or not set: the standard input.",
        ),
    ] = None,
    folder: Annotated[
        Path,
        typer.Option("--folder", metavar="DIR", help="Where to keep the key and certificate."),
    ] = DEVICE_FOLDER,
    trust: Annotated[
        str | None,
        typer.Option(
            "--trust",
            metavar="KEY",
            help="The operator's key: the device takes from its server what it signs, and runs it.",
        ),
    ] = None,
) -> None:
    """Make this device's key, and get its certificate for a join token.

    `headwater-server enroll NAME` prints the token. Without --token-file this asks for it. The key
    never leaves the device. The device trusts only the authority that the token names. The token
    cannot be an argument: every user of this machine could read it while the command runs, and the
    shell keeps it.
    """
    from headwater.common.system.console import start_log

    start_log(verbose=False)
    commands.join_with(token_file, folder, trust=trust, has_argument=bool(context.args))


def main() -> None:
    """Run the command."""
    interrupt_at_stop_signals()
    app()


if __name__ == "__main__":
    main()
