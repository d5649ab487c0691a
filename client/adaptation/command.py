"""``headwater-client adapt`` and ``predict``: run them, and print what the owner has now."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from headwater.client.adaptation.adapt import Adapted, open_examples
from headwater.client.adaptation.api import adapt_here
from headwater.client.adaptation.comparison import MIN_UNITS
from headwater.client.adaptation.fine_tuning import FineTuning
from headwater.client.adaptation.predictions import Predictor, write_csv, write_json_lines
from headwater.client.adaptation.start_model import start_model
from headwater.client.device.hardware import ThisMachine
from headwater.client.training.context import Identity
from headwater.common.data.example_faults import details, short_summary
from headwater.common.errors import SettingsError, TaskFailed
from headwater.common.settings.schema import Settings
from headwater.common.system.atomic_file import OWNER_ONLY, atomic_writer
from headwater.common.system.console import print_table, print_text, stderr
from headwater.common.system.printable import printable_lines, printable_name
from headwater.common.wording import counted

Format = Literal["csv", "jsonl"]


def show_adaptation(
    settings: Settings,
    identity: Identity,
    chosen: FineTuning,
    *,
    model: Path,
    out: Path,
    local: Path | None,
    as_json: bool,
) -> None:
    """Fine-tune, test, write the better model, and print which it is.

    Raises:
        HeadwaterError: see ``adapt_here``.
    """
    adapted = adapt_here(
        model,
        settings.task,
        identity,
        chosen,
        out=out,
        local=local,
        device=settings.client,
        shows_progress=not as_json,
    )
    if as_json:
        typer.echo(json.dumps(adapted.to_json(), allow_nan=False))
        return
    print_table(_table(adapted))
    for line in report_lines(adapted):
        print_text(line)


def _table(adapted: Adapted) -> Table:
    found = adapted.found
    names = sorted({*found.metrics, *found.other_metrics})
    table = Table(box=SIMPLE_HEAD)
    table.add_column("model")
    for title in ("loss", *(escape(printable_name(name.replace("_", " "))) for name in names)):
        table.add_column(title, justify="right", no_wrap=True)
    for label, loss, metrics in (
        ("common", found.loss, found.metrics),
        ("fine-tuned", found.other_loss, found.other_metrics),
    ):
        table.add_row(
            label, f"{loss:.4f}", *(f"{metrics[n]:.4f}" if n in metrics else "-" for n in names)
        )
    return table


def report_lines(adapted: Adapted) -> list[str]:
    """Return what was kept, by how much it is better, and what the figures are worth."""
    found, training = adapted.found, adapted.training
    number = counted(found.num_examples, "held-out example")
    low, high = found.difference - found.margin, found.difference + found.margin
    if adapted.is_adapted:
        kept = f"kept: the fine-tuned model. Its loss is lower by {found.difference:.4f}"
    else:
        kept = f"kept: the common model. Fine-tuning raised the loss by {-found.difference:.4f}"
    lines = [f"{kept}, on {number}."]
    if not training.best_epoch:
        lines = [
            "kept: the common model. No epoch lowered the loss on the examples that end the "
            f"training. Tested on {number}."
        ]
    elif found.num_examples < MIN_UNITS:
        lines.append("With so few examples the difference may be chance.")
    elif found.is_within_chance:
        lines.append(
            f"The difference is within chance: its 95 % interval, {low:.4f} to {high:.4f}, has 0 "
            "in it."
        )
    else:
        lines.append(f"The difference is beyond chance: 95 % interval {low:.4f} to {high:.4f}.")
    if adapted.is_held_out_by_run:
        lines.append(
            f"If this device was named {adapted.name} in the run, and had the same data, the run "
            "held these examples out: neither model was trained on them."
        )
    else:
        lines.append(
            "The run held no examples out, or its file does not say so. They were split anew: "
            "fine-tuning did not see these, and the common model may have been trained on them."
        )
    lines.append(
        f"Trained on {counted(adapted.num_trained, 'example')}; the best was epoch "
        f"{training.best_epoch} of {training.epoch} (0: as it was). It ended: {training.ended}."
    )
    if adapted.num_unusable:
        number = counted(adapted.num_unusable, "example")
        lines.append(f"Left out, as the common model has no finite loss on them: {number}.")
        lines.append(f"  {adapted.why_unusable}")
    if found.num_left_out:
        number = counted(found.num_left_out, "held-out example")
        lines.append(f"Not compared, as the fine-tuned model has no finite loss on them: {number}.")
    lines.append(f"written to {adapted.file}")
    return lines


def write_predictions(
    settings: Settings,
    identity: Identity,
    *,
    model: Path,
    out: Path | None,
    local: Path | None,
    form: Format | None,
) -> None:
    """Predict the examples, and write a row for each to a private file, or to standard output.

    Raises:
        TaskFailed: the task raised on each example.
        SettingsError: the file cannot be written.
        HeadwaterError: see ``start_model`` and ``Predictor``.
    """
    machine = ThisMachine(settings.client)
    start = start_model(
        model,
        settings.task,
        local=local,
        states=settings.client.state_folder,
        name=identity.name,
        limit=machine.limits.lowest,
    )
    predictor = Predictor(task=start.task, model=start.module)
    examples = open_examples(start, identity)
    is_json = form == "jsonl" or (form is None and out is not None and out.suffix == ".jsonl")
    write = write_json_lines if is_json else write_csv
    try:
        with nullcontext() if out is None else atomic_writer(out, mode=OWNER_ONLY) as part:
            with machine.bounded():
                rows = predictor.rows(examples)
                if part is None:
                    number = write(sys.stdout, rows)
                else:
                    with part.open("w", encoding="utf-8", newline="") as file:
                        number = write(file, rows)
            if not number:
                detail = next(iter(details(predictor.faults).values()), "")
                raise TaskFailed(f"the prediction failed on each example: {detail}")
    except OSError as error:
        raise SettingsError(
            f"--out {out} cannot be written: {error.strerror}",
            remedy="name a file in a folder that this user may write",
        ) from error
    if predictor.faults:
        why = short_summary(predictor.faults, examples)
        left_out = f"{len(predictor.faults):,} of {counted(len(examples), 'example')} left out"
        stderr.print(printable_lines(f"{left_out}: {why}"), soft_wrap=True, markup=False)
    if out is not None:
        print_text(f"{counted(number, 'prediction')} written to {out}")
