"""``headwater-simulate``: the whole system on one machine, many clients, no sockets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwater.common.settings import flags
from headwater.common.settings.sources import arguments, numbers, overrides, refuse_before_command

if TYPE_CHECKING:
    from headwater.common.settings.schema import Settings

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)

PANEL = "Simulation"


@app.callback(invoke_without_command=True)
def simulate(
    context: typer.Context,
    task: flags.TaskSpec = None,
    clients: Annotated[
        int | None,
        typer.Option(
            "--clients",
            help="Simulated devices, named 0 to N-1. [default: 100]",
            rich_help_panel=PANEL,
        ),
    ] = None,
    fleet: Annotated[
        Path | None,
        typer.Option(
            "--fleet",
            metavar="FLEET.toml",
            help="The devices one by one: speed, memory, link, availability (docs/fleet.md). "
            "Not given: drawn from five profiles by the seed.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            help="in-process. grpc: the real server, and a process for each device that speaks "
            "the real wire to it; for tens to hundreds of devices. flower-ray: the same apps on "
            "Flower's Ray engine. [default: in-process]",
            rich_help_panel=PANEL,
        ),
    ] = None,
    compute: Annotated[
        str | None,
        typer.Option(
            "--compute",
            metavar="WAY",
            help="fused: one pass over all devices' examples, for their sum. vectorised: many "
            "devices in a pass, each with a vector and norms of its own. one-by-one: the same bits "
            "as the wire. auto: the fastest that gives what is asked for. [default: auto]",
            rich_help_panel=PANEL,
        ),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers",
            metavar="N",
            help="Processes that compute devices one by one, with the same bits as one; auto: the "
            "usable cores. [default: 1]",
            rich_help_panel=PANEL,
        ),
    ] = None,
    compile_passes: Annotated[
        bool | None,
        typer.Option(
            "--compile",
            help="Let torch.compile make the passes over many devices: half a minute more at the "
            "start, which seldom pays (docs/simulation.md).",
            rich_help_panel=PANEL,
        ),
    ] = None,
    wire: Annotated[
        bool | None,
        typer.Option(
            "--wire",
            help="One device after another, by Flower's messages; every plan and update goes "
            "through the wire's frames, encoded and decoded.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    dropout: Annotated[
        float | None,
        typer.Option(
            "--dropout",
            metavar="P",
            help="The chance that an invited device vanishes, at a random point of its training or "
            "of a secure session. [default: 0]",
            rich_help_panel=PANEL,
        ),
    ] = None,
    partition: flags.Partition = None,
    examples_per_device: flags.ExamplesPerDevice = None,
    show_partition: Annotated[
        bool,
        typer.Option(
            "--show-partition",
            help="Show which device has what, and train nothing.",
            rich_help_panel=PANEL,
        ),
    ] = False,
    faults: Annotated[
        Path | None,
        typer.Option(
            "--faults",
            metavar="FAULTS.toml",
            help="What goes wrong on purpose: dropouts at a phase, slow links, devices that lie "
            "(docs/fleet.md).",
            rich_help_panel=PANEL,
        ),
    ] = None,
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
    min_clients: flags.MinClients = None,
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
    check: flags.Check = None,
    threads: flags.Threads = None,
    out: flags.Out = None,
    resume: flags.Resume = False,
    config: flags.Config = None,
    verbose: flags.Verbose = False,
) -> None:
    """Simulate many clients on this machine, under a virtual clock.

    The devices have different speed, memory and links; the server's rounds and the devices' code
    are those that run over the network. With K set and one thread they give the same model there,
    bit for bit; of more than 32 devices with `--compute one-by-one`.

    Try it: `headwater-simulate --task examples/digits.py:Digits --optimizer adam
    --learning-rate 0.01`
    """
    if context.invoked_subcommand is not None:
        refuse_before_command(context)
        return
    from headwater.common.system.console import errors_shown, start_log

    start_log(verbose=verbose)
    with errors_shown():
        _simulate(resume, config, overrides(context.params), is_only_shown=show_partition)


@app.command()
def sweep(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SWEEP.toml]", help="A settings file with a table \\[sweep] (docs/sweep.md)."
        ),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="SETTING=V1,V2",
            help="A setting and its values, as optimizer.learning_rate=0.1,0.03. May be repeated: "
            "every combination is run.",
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="0,1,2", help="Each combination's. [default: 0,1,2]"),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            help="What combinations are compared by. [default: test_accuracy, test_loss or loss]",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, help="Runs at a time. [default: the usable cores]"),
    ] = None,
    task: flags.TaskSpec = None,
    clients: Annotated[
        int | None, typer.Option("--clients", help="Simulated devices. [default: 100]")
    ] = None,
    rounds: flags.Rounds = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Folder of the runs. [default: runs/sweep-SWEEP]"
        ),
    ] = None,
    verbose: flags.Verbose = False,
) -> None:
    """Run every combination of some settings with several seeds, and compare them.

    The same command again runs what is not done yet: runs that have ended are kept, and one that
    was cut goes on from its checkpoint.

    Try it: `headwater-simulate sweep --task examples/digits.py:Digits --rounds 20
    --grid optimizer.name=adam --grid optimizer.learning_rate=0.01,0.003`
    """
    from headwater.common.system.console import errors_shown, start_log

    start_log(verbose=verbose)
    with errors_shown():
        from headwater.simulation.sweep.command import run_sweep

        is_done = run_sweep(
            file,
            grid=arguments(grid) or {},
            seeds=numbers(seeds),
            metric=metric,
            jobs=jobs or len(os.sched_getaffinity(0)),
            out=out,
            overrides={
                key: value for key, value in overrides(context.params).items() if key != "out"
            },
        )
    if not is_done:
        raise typer.Exit(1)


def _simulate(resume: bool, config: Any, overrides: dict[str, Any], *, is_only_shown: bool) -> None:
    from headwater.common.settings.schema import load_run
    from headwater.common.system.console import default_out

    settings = load_run(config, overrides, resume=resume)
    from headwater.simulation.fleet.profiles import with_fleet

    settings = with_fleet(settings)
    if is_only_shown:
        from headwater.simulation.reports.partition_table import show

        show(settings)
        return
    settings = settings.model_copy(
        update={
            "threads": settings.threads or 1,
            "out": settings.out or default_out(settings),
        }
    )
    from headwater.server.operations.progress import print_result, print_settings, progress_bar

    fleet = settings.simulation.fleet
    where = f"{settings.simulation.clients} simulated devices"
    print_settings(settings, where=where if fleet is None else f"{where} of {fleet.name}")
    if settings.partition.kind != "task":
        from headwater.simulation.reports.partition_table import announce_partition

        announce_partition(settings)
    from headwater.simulation.run import run_engine

    with progress_bar(settings) as on_round:
        run_engine(settings, on_round=on_round, resume=resume)
    print_result(settings)
    if settings.simulation.dropout and settings.secure.aggregation != "off":
        _conclude_sessions(settings)
    if fleet is not None:
        _conclude_fleet(settings)
    _conclude_faults(settings)


def _conclude_sessions(settings: Settings) -> None:
    """Print how many secure sessions were aborted, beside how many were to be expected."""
    from headwater.common.system.console import console
    from headwater.server.operations.round_log import read_rows
    from headwater.simulation.reports.session_aborts import sessions_line

    if settings.out is not None:
        line = sessions_line(read_rows(settings.out), settings)
        console.print(f"  {'sessions':<12}{line}", soft_wrap=True)


def _conclude_fleet(settings: Settings) -> None:
    """Print how long the devices waited for one another, and how full their memory was."""
    from headwater.common.system.console import console
    from headwater.server.operations.round_log import read_rows
    from headwater.simulation.fleet.profiles import device_of
    from headwater.simulation.reports.fleet_summary import fullest, idle_line, memory_line

    if settings.out is None:
        return
    rows = read_rows(settings.out)
    found = fullest(rows, lambda name: device_of(settings, int(name)).memory_bytes)
    console.print(f"  {'idle':<12}{idle_line(rows)}", soft_wrap=True)
    if found is not None:
        console.print(f"  {'memory':<12}{memory_line(found)}", soft_wrap=True)


def _conclude_faults(settings: Settings) -> None:
    """Print what became of the faults that were injected, if any were."""
    from headwater.common.system.console import console
    from headwater.server.operations.round_log import read_rows
    from headwater.simulation.reports.fault_summary import fault_lines

    if settings.out is not None:
        for title, line in fault_lines(read_rows(settings.out), settings):
            console.print(f"  {title:<12}{line}", soft_wrap=True)


def main() -> None:
    """Run the command."""
    app()


if __name__ == "__main__":
    main()
