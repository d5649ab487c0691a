"""The command line's view of a run: its settings, a progress bar, then its result and files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headwater.common.settings.schema import Settings
from headwater.common.system.console import console
from headwater.common.task import load_task, max_weight_per_example
from headwater.server.operations.round_log import CURVES, EVENTS, ROUNDS, read_rows
from headwater.server.planning.target_batch import described
from headwater.server.rounds.round_loop import MODEL, OnRound
from headwater.server.rounds.round_row import RoundRow


def print_settings(settings: Settings, *, where: str) -> None:
    """Print the main settings and the numbers derived from them, such as the effective batch."""
    plan, optimizer = settings.plan, settings.optimizer
    if plan.accumulation_steps is not None:
        size = plan.micro_batch_size or plan.set_micro_batch_size
        work = (
            f"K {plan.accumulation_steps} x micro-batch {size} = "
            f"{plan.accumulation_steps * size} examples per client"
        )
    else:
        work = described(plan, max_weight_per_example=_max_weight(settings))
    console.print(f"[bold]{settings.task}[/] on {where}, seed {settings.seed}")
    rate = f"{optimizer.rate:g}{_scaling(settings)}"
    mode = settings.secure.aggregation
    masked = "" if mode == "off" else f"; updates are masked ({mode})"
    console.print(f"{settings.rounds} rounds of {optimizer.name} at {rate}; {work}{masked}")


def _max_weight(settings: Settings) -> int:
    """Return the task's largest weight per example; 1 if it is not needed or there is no task."""
    if settings.plan.tokens_per_update is None or settings.task is None:
        return 1
    return max_weight_per_example(load_task(settings.task))


def _scaling(settings: Settings) -> str:
    """Return the factor by which the learning rate follows the batch, as text."""
    tokens = settings.plan.tokens_per_update
    unit = "tokens" if tokens is not None else "examples"
    ratio = f"{unit} / {tokens or settings.plan.effective_batch_size:,}"
    shown = {"none": "", "linear": f" x ({ratio})", "sqrt": f" x sqrt({ratio})"}
    return shown[settings.schedule.batch_scaling]


@contextmanager
def progress_bar(settings: Settings) -> Iterator[OnRound]:
    """Show a progress bar during the run; without a terminal, print ten lines in all."""
    bar = Progress(
        TextColumn("round"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[line]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        shown = bar.add_task("rounds", total=settings.rounds, line="waiting for clients")

        def on_round(row: RoundRow) -> None:
            bar.update(shown, completed=row.round, line=round_line(row))
            is_due = row.round % max(settings.rounds // 10, 1) == 0 or row.round == settings.rounds
            if not console.is_terminal and is_due:
                console.print(
                    f"round {row.round:>4}/{settings.rounds}  {round_line(row)}", soft_wrap=True
                )

        yield on_round


def round_line(row: RoundRow) -> str:
    """Return a round's key figures in one line."""
    low, high = row.k_range
    accuracy = row.metrics.get("test_accuracy")
    is_shown = row.target_by == "noise scale" and row.noise_scale is not None
    noise = [f"noise scale {row.noise_scale:,.0f}"] if is_shown else []
    parts = [
        f"loss {row.loss:.3f}",
        *([] if accuracy is None else [f"test accuracy {accuracy:.1%}"]),
        f"{row.num_clients}/{row.num_invited} clients",
        *([f"{len(row.left_out)} left out"] if row.left_out else []),
        f"batch {row.weight}",
        *noise,
        f"K {low}" if low == high else f"K {low}-{high}",
        f"up {decimal(row.bytes_up)} down {decimal(row.bytes_down)}",
    ]
    return "  ".join(parts)


def print_result(settings: Settings) -> None:
    """Print the last metrics and the paths of the run's files."""
    folder = settings.out
    if folder is None:
        return
    for last in (row for row in read_rows(folder)[-1:] if row["metrics"]):
        shown = ", ".join(
            f"{name.replace('_', ' ')} [bold]{value:.4f}[/]"
            for name, value in last["metrics"].items()
            if value is not None
        )
        console.print(f"after round {last['round']}: {shown}")
    for title, name in (
        ("model", MODEL),
        ("metrics", ROUNDS),
        ("plot", CURVES),
        ("TensorBoard", EVENTS),
    ):
        if (folder / name).exists():
            console.print(f"  {title:<12}{folder / name}", soft_wrap=True)
