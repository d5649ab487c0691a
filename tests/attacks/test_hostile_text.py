"""Hostile names and texts in every place that shows them: nothing crashes, and nothing escapes."""

from __future__ import annotations

import io
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import generate_latest
from rich.console import Console, RenderableType
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from headwater.common.errors import SettingsError
from headwater.common.model.trained_model import ModelRecord
from headwater.common.settings.schema import Settings
from headwater.common.system import console as terminal
from headwater.common.system.json_logs import JsonFormatter
from headwater.server.evaluate_model import DataResult, EvaluatedModel, as_table
from headwater.server.operations import plan_table, status
from headwater.server.operations.curves import curves
from headwater.server.operations.prometheus import ServerGauges, ServerMetrics
from headwater.server.operations.round_display import RoundDisplay
from headwater.server.operations.round_log import EVENTS, row_to_dict
from headwater.server.report.period_summary import Period, _device
from headwater.server.report.period_summary import as_table as as_table_of_period
from headwater.server.rounds.round_row import RoundRow
from headwater.server.tracking.mlflow_tracker import metric_key
from headwater.server.tracking.tensorboard_tracker import TensorboardTracker
from headwater.server.transport.device_records import DeviceRecord
from headwater.simulation.sweep.command import table_of
from headwater.simulation.sweep.results import Summary
from tests.round_rows import client, row

HOSTILE = {
    "closing markup": "[/x]",
    "bold markup": "[/bold]",
    "link markup": "[link=file:///etc/passwd]x[/link]",
    "clear the screen": "\x1b[2J\x1b]0;title\x07",
    "C1 control": "\x9b2J",
    "another line": "x\nround 9\r",
    "line separator": "x\u2028y\x85z",
    "reversed": "\u202egnp.exe\u2066",
    "formula": "$\\frac{1}{$",
    "no name": "",
    "long": "n" * 10_000,
    "long and escaped": "\x1b" * 10_000,
}
MAX_CHARACTERS = 6500  # of what one name leads to, as escapes of JSON in two places


def hostile_row(text: str) -> RoundRow:
    return row(
        1,
        clients=[client(text), client(f"{text}2", reason=text[:500], plan=text[:500])],
        num_clients=2,
        metrics={f"test_{text}": 0.5, f"train_{text}": 0.25},
    )


def rendered(shown: RenderableType) -> str:
    file = io.StringIO()
    Console(file=file, width=300, highlight=False, emoji=False).print(shown)
    return file.getvalue()


def plans(text: str) -> str:
    return rendered(plan_table.plan_table(row_to_dict(hostile_row(text)), explain=True))


def progress(text: str) -> str:
    display = RoundDisplay(Settings(task="x"), clock=time.monotonic)
    display.on_round(hostile_row(text))
    return display.round_line(hostile_row(text)) + "".join(map(rendered, display.block(400)))


def table_of_devices(text: str) -> str:
    unknown = dict.fromkeys(
        ("accumulation_steps", "micro_batch_size", "peak_bytes", "memory_limit_bytes"), None
    )
    unknown |= dict.fromkeys(("temperature_celsius", "battery", "is_on_battery"), None)
    device: dict[str, Any] = {"name": text, "is_connected": True, "bytes_up": 0, "bytes_down": 0}
    device["labels"] = text
    return rendered(status._fleet([device | unknown]))


def summary(text: str) -> str:
    latest, before = Period(), Period()
    latest.add(row_to_dict(hostile_row(text)) | {"refused": {text: f"{text}: late"}})
    found = {
        "seconds": 60.0,
        "until": "now",
        "latest": latest.figures(),
        "before": before.figures(),
        "devices": [_device(text, DeviceRecord(name=text), latest, before, 0.0, is_up=True)],
        "lost": [text[:500]],
        "alerts": [{"at": "now", "text": text[:500]}],
        "events": {},
        "num_untimed": 0,
        "is_cut": False,
    }
    return rendered(as_table_of_period(found, Path("out")))


def refusal(text: str) -> str:
    device = {"name": "a", "refused_at": "now", "refusal_code": "E", "refusal_text": text[:500]}
    return rendered(status._refusal(device))


def evaluation(text: str) -> str:
    result = DataResult(
        data=text[:100], num_examples=1, loss_sum=1.0, weight=1, metric_sums={text: 1.0}
    )
    record = ModelRecord(task=None, rounds=1)
    return rendered(as_table(EvaluatedModel(file=Path("m"), record=record, results=[result])))


def sweep(text: str) -> str:
    one = Summary(point={"seed": 1}, num_runs=1, results=(), values=(1.0,))
    return rendered(table_of([one], text))


def drawing(text: str) -> str:
    figure = curves([row_to_dict(hostile_row(text))])
    figure.canvas.draw()  # a formula is parsed only here
    shown = [found.get_text() for axes in figure.axes for found in axes.texts]
    for axes in figure.axes:
        legend = axes.get_legend()
        shown += [found.get_text() for found in legend.get_texts()] if legend else []
    return "".join(shown)


def scrape(text: str) -> str:
    gauges = ServerGauges(
        num_connected=0,
        bytes_up=0,
        bytes_down=0,
        staged_bytes=0,
        is_paused=False,
        refusals=Counter({text: 1}),
        num_history_failures=0,
        num_devices_not_noted=0,
    )
    metrics = ServerMetrics(lambda: gauges)
    metrics.on_round(hostile_row(text))
    return generate_latest(metrics.registry).decode()


def log_text(text: str) -> str:
    record = logging.makeLogRecord({"msg": "%s left", "args": (text[:500],)})
    return terminal.PrintableFormatter("%(message)s").format(record).replace("\n    ", " ")


def log_json(text: str) -> str:
    record = logging.makeLogRecord({"msg": "%s left", "args": (text[:500],)})
    record.fields = {"name": text[:500]}
    line = JsonFormatter().format(record)
    assert json.loads(line)["name"] == text[:500]
    return line


SINKS: list[Callable[[str], str]] = [
    plans,
    progress,
    table_of_devices,
    summary,
    refusal,
    evaluation,
    sweep,
    drawing,
    scrape,
    log_text,
    log_json,
    metric_key,
]


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("sink", SINKS)
def test_a_hostile_text_is_shown_as_text(sink: Callable[[str], str], text: str) -> None:
    shown, harmless = sink(text).split("\n"), sink("harmless").split("\n")
    assert all(line.isprintable() for line in shown)
    assert len(shown) == len(harmless) or len(text) > 20  # a long name may wrap
    assert len("".join(shown)) - len("".join(harmless)) < MAX_CHARACTERS * len(shown)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_metric_is_a_harmless_tag_of_tensorboard(text: str, tmp_path: Path) -> None:
    tracker = TensorboardTracker()
    tracker.started(Settings(out=tmp_path), round_number=0, model=torch.nn.Linear(1, 1))
    tracker.on_round(hostile_row(text))
    tracker.ended()
    (file,) = (tmp_path / EVENTS).iterdir()
    tags = [v.tag for event in EventFileLoader(str(file)).Load() for v in event.summary.value]
    assert len(tags) > 2
    assert all(tag.isprintable() and len(tag) <= 64 for tag in tags)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_error_is_printed_as_text(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.show_error(SettingsError(text, remedy=text))
    terminal.print_titled([("faults", text)])
    terminal.print_text(text)
    written = capsys.readouterr()
    assert all(line.isprintable() for line in (written.out + written.err).split("\n"))
