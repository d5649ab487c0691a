"""The command line of ``headwater-simulate``: one run, sweeps of runs, comparisons."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwater.common.settings.flags import (
    PlainCommand,
    SettingsCommand,
    key_values,
    numbers,
    overrides,
)
from headwater.common.system.command_line import Config, Resume, Verbose, new_app, read_settings
from headwater.common.system.portability import num_usable_cores
from headwater.common.system.stop_signals import interrupt_at_stop_signals
from headwater.common.wording import counted
from headwater.simulation.compare.flags import CompareCommand

if TYPE_CHECKING:
    from headwater.common.settings.schema import Settings

app = new_app("headwater-simulate")

Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="NAME",
        help="The metric to compare by; min:NAME or max:NAME where the name does not tell which is "
        "better. [default: test_accuracy, test_loss or loss]",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", metavar="N", min=1, help="Runs at a time. [default: the usable cores]"),
]
Page = Annotated[
    str, typer.Option("--page", metavar="HOST:PORT", help="Where to show it, on loopback.")
]


@app.callback(invoke_without_command=True)
def simulate(
    context: typer.Context,
    config: Config = None,
    resume: Resume = False,
    show_partition: Annotated[
        bool,
        typer.Option(
            "--show-partition",
            help="Print the examples of each device, and train nothing.",
            rich_help_panel="Simulation",
        ),
    ] = False,
    advise: Annotated[
        bool,
        typer.Option(
            "--advise",
            help="First compare exact steps with local ones, as compare --quick does; then train "
            "with the best.",
            rich_help_panel="Simulation",
        ),
    ] = False,
    verbose: Verbose = False,
) -> None:
    r"""Simulate many clients on this machine, under a virtual clock.

    The server's rounds and the devices' code are those of a real run. With K set and one thread the
    model is the same too, bit for bit; for more than 32 devices use --compute one-by-one.

    Try it: headwater-simulate --learning-rate 0.01 --page
    """
    if context.invoked_subcommand is None:
        settings = read_settings(context, config, resume=resume, verbose=verbose)
        if settings.has_task_bundle:
            from headwater.common.task_bundles.signed_bundle import with_opened_task

            settings = with_opened_task(settings)
        if advise and not resume:
            settings = _advised(context, settings, config)
        _simulate(settings, resume=resume, is_only_shown=show_partition)


@app.command(cls=SettingsCommand)
def sweep(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[SWEEP.toml]"),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="SETTING=V1,V2",
            help="A setting and its values, e.g. optimizer.learning_rate=0.1,0.03. May be "
            "repeated: every combination is run.",
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            "--seeds", metavar="0,1,2", help="The seeds of each combination. [default: 0,1,2]"
        ),
    ] = None,
    metric: Metric = None,
    jobs: Jobs = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Folder of the runs. [default: runs/sweep-SWEEP]"
        ),
    ] = None,
    verbose: Verbose = False,
) -> None:
    r"""Run every combination of some settings with several seeds.

    SWEEP.toml is a settings file with a table [sweep] (docs/sweep.md). The same command again runs
    only what is missing: completed runs are kept, and an interrupted run continues from its
    checkpoint.

    Try it: headwater-simulate sweep --task examples/digits.py:Digits \
        --rounds 20 --grid optimizer.name=adam \
        --grid optimizer.learning_rate=0.01,0.003
    """
    from headwater.common.system.console import start_log
    from headwater.simulation.sweep.command import run_sweep

    start_log(verbose=verbose)
    is_done = run_sweep(
        file,
        grid=key_values(grid or []),
        seeds=numbers(seeds) if seeds is not None else None,
        metric=metric,
        jobs=jobs or num_usable_cores(),
        out=out,
        overrides=overrides(context),
    )
    if not is_done:
        raise typer.Exit(1)


@app.command(cls=PlainCommand)
def replay(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    page: Page = "127.0.0.1:8600",
) -> None:
    r"""Show a finished run, DIR, in a browser, until Ctrl-C.

    The file report.html in the same folder shows the same without a server.

    Try it: headwater-simulate replay runs/DIR
    """
    from headwater.server.page.page_server import page_of
    from headwater.server.report.replay import FinishedRun

    with page_of(FinishedRun(folder), page) as link:
        _show_until_stopped(f"page at {link}")


@app.command(cls=PlainCommand)
def guide(
    page: Page = "127.0.0.1:8601",
) -> None:
    r"""Open a guide in a browser: accumulation, planner and masks.

    It has sliders, and ends with Ctrl-C. Everything in it is computed by this installation, on this
    machine.

    Try it: headwater-simulate guide
    """
    from headwater.simulation.guide.open_guide import open_guide

    with open_guide(page) as link:
        _show_until_stopped(f"guide at {link}")


@app.command(cls=PlainCommand)
def new(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help="table (a class), regression (a number), series, images or text."
        ),
    ],
    folder: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="A new folder. [default: my_KIND]")
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            "--csv", metavar="FILE", help="Your own file with a header row, for tables and series."
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            "--label", metavar="COLUMN", help="What to predict. [default: the last column]"
        ),
    ] = None,
    devices: Annotated[
        int, typer.Option("--devices", metavar="N", min=2, help="Devices to make data for.")
    ] = 5,
) -> None:
    r"""Write a task for your data, which runs at once.

    It gets a folder with a README, and with data of some devices and a test to try it on.
    KIND is what comes in: table (and a class comes out), regression (a table, and a number), series
    (the next value), images (a class), text (the next byte).

    Without --csv the data are made up. With it your rows are dealt out to the devices, and a fifth
    is kept for the test; the columns are read from the file.

    Try it: headwater-simulate new table
    """
    from headwater.simulation.new.command import new_task

    new_task(kind, folder or Path(f"my_{kind}"), data=csv, label=label, num_devices=devices)


@app.command(cls=CompareCommand)
def compare(
    context: typer.Context,
    config: Config = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="X=N",
            help="What each algorithm may use: rounds=N, bytes=N, examples=N or seconds=N. "
            "[default: rounds=50, with --quick rounds=24]",
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            "--seeds",
            metavar="0,1,2",
            help="The seeds of each algorithm. [default: 0,1,2, with --quick 0]",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Answer soon: three rates each, then runs of exact steps and of the best others.",
        ),
    ] = False,
    metric: Metric = None,
    target: Annotated[
        float | None,
        typer.Option(
            "--target",
            metavar="VALUE",
            help="The value of the metric whose cost counts. [default: nearly the best]",
        ),
    ] = None,
    jobs: Jobs = None,
    verbose: Verbose = False,
) -> None:
    r"""Compare exact steps and local training on your task and fleet.

    Exact steps, FedAvg, FedProx and DiLoCo each get a short search for the learning rate, then a
    run for each seed. Tables, a plot and a sentence of advice say which needs the fewest rounds,
    bytes, examples and seconds. The same command again runs only what is missing.

    Try it: headwater-simulate compare --task examples/digits.py:Digits \
        --clients 20 --budget rounds=30
    """
    from headwater.common.system.console import start_log
    from headwater.simulation.compare.command import run_comparison

    start_log(verbose=verbose)
    given = overrides(context)
    out = given.pop("out", None)
    is_done = run_comparison(
        config,
        overrides=given,
        budget=budget,
        seeds=None if seeds is None else numbers(seeds),
        is_quick=quick,
        metric=metric,
        target=target,
        jobs=jobs or num_usable_cores(),
        out=None if out is None else Path(out),
    )
    if not is_done:
        raise typer.Exit(1)


def _show_until_stopped(what: str) -> None:
    from headwater.common.system.console import print_text

    print_text(f"{what}; Ctrl-C ends it")
    with suppress(KeyboardInterrupt):
        threading.Event().wait()


def _advised(context: typer.Context, settings: Settings, config: Path | None) -> Settings:
    """Compare ways to train, and return the settings of the best, in which flags win.

    Raises:
        SettingsError: a setting is one that the comparison chooses.
        HeadwaterError: see ``run_comparison``.
    """
    from headwater.common.settings.sources import default_out, load_run, with_default_task
    from headwater.simulation.compare.command import SETTINGS, run_comparison
    from headwater.simulation.compare.flags import CHOSEN

    settings = with_default_task(settings)
    out = settings.out or default_out(settings)
    given, own = overrides(context), {"rounds": settings.rounds, "out": out}
    run_comparison(
        config,
        overrides={key: value for key, value in given.items() if key not in (*CHOSEN, "out")},
        budget=None,
        seeds=None,
        metric=None,
        target=None,
        jobs=num_usable_cores(),
        out=out / "compare",
        is_quick=True,
    )
    best = out / "compare" / SETTINGS
    return (
        load_run(best, given | own, resume=False)
        if best.exists()
        else settings.model_copy(update={"out": out})
    )


def _simulate(settings: Settings, *, resume: bool, is_only_shown: bool) -> None:
    from headwater.common.settings.sources import default_out, with_default_task
    from headwater.common.user_code.task_spec import find_task_class
    from headwater.simulation.fleet.fleet_spec import with_fleet

    settings = with_fleet(with_default_task(settings))
    find_task_class(str(settings.task))  # an error in it comes before anything else
    if is_only_shown:
        from headwater.simulation.reports.partition_table import show_partition

        show_partition(settings)
        return
    settings = settings.model_copy(
        update={"threads": settings.threads or 1, "out": settings.out or default_out(settings)}
    )
    from headwater.server.operations.progress import print_result, print_settings, show_progress

    fleet = settings.simulation.fleet
    where = counted(settings.simulation.clients, "simulated device")
    print_settings(settings, where=where if fleet is None else f"{where}, fleet {fleet.name}")
    if settings.partition.kind != "task" or settings.simulation.data is not None:
        from headwater.simulation.reports.partition_table import announce_partition

        announce_partition(settings)
    from headwater.simulation.run import run_engine

    with show_progress(settings) as (on_round, observer):
        run_engine(settings, on_round=on_round, resume=resume, observer=observer)
    print_result(settings)
    _print_summary(settings)


def _print_summary(settings: Settings) -> None:
    """Print aborted sessions, waiting times, memory and injected faults, if the run had any."""
    from headwater.common.system.console import print_titled
    from headwater.server.operations.round_log import read_rows
    from headwater.simulation.fleet.fleet_spec import fleet_spec
    from headwater.simulation.fleet.identities import identities_of
    from headwater.simulation.reports.fault_summary import fault_lines
    from headwater.simulation.reports.fleet_summary import idle_line, memory_line, peak_memory

    assert settings.out is not None
    rows, lines = read_rows(settings.out), []
    if settings.simulation.dropout and settings.secure.aggregation != "off":
        from headwater.simulation.reports.session_aborts import sessions_line

        lines.append(("sessions", sessions_line(rows, settings)))
    if settings.simulation.fleet is not None:
        devices, part_of = fleet_spec(settings), identities_of(settings).part

        def memory_of(name: str) -> int:
            return devices.device(part_of(name)).memory_bytes

        peak = peak_memory(rows, memory_of)
        lines.append(("idle", idle_line(rows)))
        lines += [] if peak is None else [("memory", memory_line(peak))]
    print_titled([*lines, *fault_lines(rows, settings)])


def main() -> None:
    """Run the command."""
    interrupt_at_stop_signals()
    app()


if __name__ == "__main__":
    main()
