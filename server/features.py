"""What features bring to a server outside its rounds, and the one list of it.

A feature is imported if the settings, or the run's folder, ask for it. ``server.rounds.features``
lists what features do within the rounds.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # ``headwater-server status`` does not load torch
    from headwater.common.settings.schema import Settings
    from headwater.server.flower.grid_fleet import GridFleet
    from headwater.server.rounds.observer import Observer
    from headwater.server.rounds.run_state import Training

Every = Literal["never", "day", "week", "month"]

QUEUE, POINTER = "queue", "successor.json"
"""The files of a run behind which others wait, and of one that another has followed."""

# Modules with ``status_fields`` and ``status_lines``, in the order in which the status has them.
STATUS = (
    "headwater.server.privacy.spent_budget",
    "headwater.server.succession.queue_status",
    "headwater.server.standby.shared_status",
)

RESULT_FILES = (
    ("adapter", "adapter.safetensors"),
    ("statistics", "statistics.json"),
    ("test", "evaluation.json"),
    ("sample", "sample.json"),
)
"""The files of a run's result, with their titles, as ``common.model.trained_model`` names them."""


def grid_fleet(grid: Any, training: Training) -> GridFleet:
    """Return a grid's fleet for a run: with aggregators and asynchronous plans if it has some."""
    settings, intermediaries = training.settings, None
    if settings.server.aggregators:
        intermediaries = import_module("headwater.server.tree.branches").Branches(
            grid,
            order=training.branch_order,
            refusal=import_module("headwater.server.tree.trusted_aggregators").refusal_of_branch(
                settings
            ),
        )
    kind = import_module("headwater.server.flower.grid_fleet").GridFleet
    if settings.asynchronous.is_on:
        place = "headwater.server.asynchronous.dispatching_grid_fleet"
        kind = import_module(place).DispatchingGridFleet
    fleet: GridFleet = kind(grid, intermediaries=intermediaries)
    return fleet


def observers(training: Training) -> list[Observer]:
    """Return the observers that the run's settings turn on."""
    found: list[Observer] = []
    if training.settings.out is not None:
        found.append(import_module("headwater.server.report.report").ReportWriter())
    if versions_every(training.settings) != "never":
        versions = import_module("headwater.server.succession.model_versions")
        found.append(versions.ModelVersions(training))
    return [*found, *samplers(training)]


def samplers(training: Training) -> list[Observer]:
    """Return the observer that shows samples, where the task makes some.

    Where some parameters stay on the devices, the server has no whole model to make one.
    """
    if not hasattr(training.task, "sample") or training.image.layout.local:
        return []
    samples = import_module("headwater.server.samples.task_samples")
    return [samples.TaskSamples(training.task)]


def versions_every(settings: Settings) -> Every:
    """Return how often a run writes a version: as set; else weekly if it has no last round."""
    if settings.versions.every is not None:
        return settings.versions.every
    return "week" if settings.num_rounds is None else "never"


def work_text(settings: Settings) -> tuple[str | None, list[str]]:
    """Return a device's work in words, where it is no plain sum of gradients, and notes on it."""
    own, mode = None, settings.secure.aggregation
    if settings.device_test.model is not None:
        own = f"a test of {settings.device_test.model} on the devices, which trains nothing"
    if settings.local.is_on:
        local_round = import_module("headwater.server.local_training.local_round")
        own = local_round.described_local(settings)
    return own, [] if mode == "off" else [f"updates are masked ({mode})"]


def status_fields(folder: Path) -> dict[str, Any]:
    """Return the fields that the features add to a run's status.

    Raises:
        StateError: a file in the folder cannot be read.
    """
    fields: dict[str, Any] = {}
    for name in STATUS:
        fields |= import_module(name).status_fields(folder)
    return fields


def status_lines(status: dict[str, Any]) -> list[str]:
    """Return these fields as lines for people, with rich's markup."""
    return [line for name in STATUS for line in import_module(name).status_lines(status)]


def report_lines(folder: Path) -> list[str]:
    """Return what page and report say beside the figures: the newest sample, the last test."""
    found = sample_lines(folder)
    if (folder / "evaluation.json").exists():
        tables = import_module("headwater.server.evaluation.result_table")
        found += tables.report_lines(folder)
    return found


def sample_lines(folder: Path) -> list[str]:
    """Return the newest sample of a task that makes some."""
    if not (folder / "sample.json").exists():
        return []
    found: list[str] = import_module("headwater.server.samples.task_samples").sample_lines(folder)
    return found


def run_queue(folder: Path) -> Any:
    """Return the module of the queue; None if no run waits in ``folder``, or has followed."""
    if not any((folder / name).exists() for name in (QUEUE, POINTER)):
        return None
    return import_module("headwater.server.succession.run_queue")
