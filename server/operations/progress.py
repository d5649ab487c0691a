"""The command line's view of a run: its settings, its progress, then its result and files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.text import Text

from headwater.common.model.trained_model import BEST, MODEL, read_record
from headwater.common.settings.changes import Changes, changes_text
from headwater.common.settings.fields import direction
from headwater.common.settings.schema import Settings
from headwater.common.system.console import console, print_text
from headwater.common.system.live_status import LiveStatus, pack
from headwater.common.system.printable import printable, printable_name
from headwater.common.task import load_task, max_weight_per_example, weight_unit
from headwater.common.user_code.task_spec import bundle_folder
from headwater.common.wording import counted, figure_text
from headwater.server.features import RESULT_FILES, sample_lines, work_text
from headwater.server.operations.curves import weight_shares
from headwater.server.operations.round_display import RoundDisplay, evaluation_figures
from headwater.server.operations.round_log import CURVES, EVENTS, REPORT, ROUNDS, read_rows
from headwater.server.planning.target_batch import described
from headwater.server.rounds.observer import Observer, Observers
from headwater.server.rounds.round_loop import OnRound
from headwater.server.rounds.round_row import RoundRow

MAX_NAMES = 3


def print_settings(settings: Settings, *, where: str) -> None:
    """Print the main settings and the numbers derived from them, such as the effective batch."""
    plan, optimizer = settings.plan, settings.server_optimizer
    own, notes = work_text(settings)
    if own is not None:
        work = own
    elif plan.accumulation_steps is not None:
        size = plan.micro_batch_size or plan.set_micro_batch_size
        work = (
            f"K {plan.accumulation_steps} x micro-batch {size} = "
            f"{counted(plan.accumulation_steps * size, 'example')} per client"
        )
    else:
        work = described(plan, max_weight_per_example=_max_weight(settings))
    task = escape(printable(_task_text(settings.task)))
    head = f"[bold]{task}[/] on {where}, seed {settings.seed}"
    console.print(head, soft_wrap=not console.is_terminal)
    rate = f"{optimizer.rate:g}{_scaling(settings)}"
    rounds = settings.num_rounds
    number = "rounds without end" if rounds is None else counted(rounds, "round")
    print_text("; ".join((f"{number} of {optimizer.name} at {rate}", work, *notes)))


def _task_text(task: str | None) -> str | None:
    """Return a task's place, after the name and version of the signed bundle that it is of."""
    if task is None or bundle_folder(task) is None:
        return task
    from headwater.common.task_bundles.signed_bundle import bundle_of  # few tasks are published

    bundle = bundle_of(task)
    return task if bundle is None else f"{bundle.title}, {bundle.digest[:16]}, {task}"


def _max_weight(settings: Settings) -> float:
    """Return the task's largest weight per example; 1 if it is not needed or there is no task."""
    if settings.plan.tokens_per_update is None or settings.task is None:
        return 1
    task = load_task(settings.task)
    most = max_weight_per_example(task) * weight_unit(task)
    return int(most) if most.is_integer() else most


def _scaling(settings: Settings) -> str:
    """Return the factor by which the learning rate follows the batch, as text."""
    tokens = settings.plan.tokens_per_update
    unit = "tokens" if tokens is not None else "examples"
    ratio = f"{unit} / {tokens or settings.plan.effective_batch_size:,}"
    shown = {"none": "", "linear": f" x ({ratio})", "sqrt": f" x sqrt({ratio})"}
    return shown[settings.schedule.batch_scaling]


@contextmanager
def show_progress(settings: Settings) -> Iterator[tuple[OnRound, Observer]]:
    """Show a run's progress: a block in a terminal, elsewhere lines as ``LineSchedule`` allows.

    Yields what prints a committed round's line, and the observer from which it is composed.
    """
    display = RoundDisplay(settings, clock=time.monotonic, is_ascii=console.options.ascii_only)
    with LiveStatus(console, block=display.block, wait_line=display.wait_line) as status:

        def on_round(row: RoundRow) -> None:
            status.event(lambda: display.round_line(row))

        yield on_round, Observers(display, _RunLines(status, settings))


class _RunLines(Observer):
    """Prints lines about the whole run."""

    def __init__(self, status: LiveStatus, settings: Settings) -> None:
        self._status = status
        self._settings = settings

    def resumed(self, round_number: int, changed: Changes) -> None:
        if not round_number:
            print_text(f"{self._settings.out} has no checkpoint yet: the run begins with round 1")
        elif not self._settings.has_round_after(round_number):
            changed = {key: pair for key, pair in changed.items() if key != "rounds"}
            print_text(
                f"already done: the run has {counted(round_number, 'round')}, and --rounds is "
                f"{self._settings.rounds}; train on with --resume --rounds N, which is above "
                f"{round_number}"
            )
        else:
            print_text(f"continues after round {round_number}")
        if changed:
            arrow = "->" if console.options.ascii_only else "→"
            print_text(f"changed: {changes_text(changed, arrow=arrow)}")

    def ended(self) -> None:
        self._status.print_skipped()  # the last round's, before anything that is said of the end


def print_result(settings: Settings) -> None:
    """Print the last metrics and the paths of the run's files."""
    folder = settings.out
    if folder is None:
        return
    rows = read_rows(folder)
    for last in (row for row in rows[-1:] if row["metrics"]):
        parts: list[Text | str] = [f"after round {last['round']}:"]
        for name, value in last["metrics"].items():
            shown = "not finite" if value is None else figure_text(value)
            title = printable_name(name.replace("_", " "))
            parts.append(Text.assemble(title, " ", (shown, "bold")))
        # A row of an earlier version lacks these.
        num_left_out = last.get("num_test_left_out", 0) + last.get("num_held_out_left_out", 0)
        missing = last.get("not_evaluated", {})
        parts += evaluation_figures(last.get("num_held_out_clients"), len(missing), num_left_out)
        for line in pack(parts, console.width):
            console.print(line)
        if last.get("loss") is not None or last.get("epsilon") is not None:  # it trained
            print_weights(rows)
            _print_shares(last.get("below_share") or [])
    for sample in sample_lines(folder):
        print_text(sample)
    for title, name in (
        ("model", MODEL),
        *RESULT_FILES,
        ("best model", BEST),
        ("metrics", ROUNDS),
        ("plot", CURVES),
        ("report", REPORT),
        ("TensorBoard", EVENTS),
    ):
        if (folder / name).exists():
            note = _best_round(settings, folder) if name == BEST else ""
            console.print(f"  {title:<12}{folder / name}{note}", soft_wrap=True, markup=False)


def print_weights(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print which devices had the largest and the smallest shares of all weight."""
    shares = weight_shares(rows)
    texts = [f"{printable_name(name)} {100 * share:.3g} %" for name, share in shares]
    if len(texts) < 2:
        return
    by = "plans" if any(row.get("masked_clients") for row in rows) else "weight"
    if len(texts) <= 2 * MAX_NAMES:
        print_text(f"shares by {by}: {', '.join(texts)}")
    else:
        print_text(
            f"shares by {by}, of {len(texts):,} devices: most {', '.join(texts[:MAX_NAMES])}; "
            f"least {', '.join(texts[-MAX_NAMES:])}"
        )


def _print_shares(names: list[str]) -> None:
    """Say which clients had hardly a share of the last round, and what gives them more."""
    if not names:
        return
    some = ", ".join(map(printable_name, names[:MAX_NAMES]))
    print_text(
        f"{counted(len(names), 'client')} had hardly a share of the examples ({some}"
        f"{', ...' if len(names) > MAX_NAMES else ''}): --accumulation-steps K gives equal shares, "
        "--weighting dataset equal weight to all data"
    )


def _best_round(settings: Settings, folder: Path) -> str:
    """Return which round best.safetensors holds, and why, as text behind its path."""
    criterion, best = settings.evaluation.best, read_record(folder / BEST).best
    if criterion is None or best is None:
        return ""
    word = "lowest" if direction(criterion) == "min" else "highest"
    name = printable_name(best["metric"])
    return f" (round {best['round']}: the {word} {name}, {best['value']:.6g})"
