"""``headwater-server evaluate --on-devices``: serves the round of a test, and prints its result.

What devices hold out follows from the seed and the share of the run that they trained in, so a test
takes both from the run's folder. So it does with the server's address, certificates and masks.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from headwater.common.errors import HeadwaterError, SettingsError
from headwater.common.model.trained_model import BEST, MODEL
from headwater.common.settings.schema import SETTINGS_FILE, Settings, flattened
from headwater.common.settings.sources import load, load_run, numbered, read_tree
from headwater.common.system.console import print_table, print_text
from headwater.common.transport.tls import Credentials
from headwater.server.evaluation.result_table import FILE, as_table, read_result
from headwater.server.operations.progress import show_progress
from headwater.server.report.report import write_report
from headwater.server.rounds import checkpoint
from headwater.server.serve import serve_run

FOLDER = "evaluations"
"""The folder in a run's folder with the folders of its tests."""
KEPT = ("task", "seed", "threads", "plain_text", "public_metrics")
KEPT_BRANCHES = ("plan", "server", "tls", "secure", "model")
KEPT_KEYS = ("cohort.min_clients", "cohort.deadline_seconds")
"""What a test takes from its run: the rest is of training."""
LEFT_OUT = ("model.initial", "plan.follow_noise_scale", "server.upstream", "server.upstream_config")
FRACTION = "device_test.fraction"

ReadCredentials = Callable[[Settings], Credentials | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TestOrder:
    """What the command's own flags say."""

    __test__ = False  # pytest, it is no test

    out: Path
    model: Path | None
    task: str | None
    is_best: bool
    as_json: bool


def test_on_devices(
    order: TestOrder,
    config: Path | None,
    given: Mapping[str, Any],
    credentials_of: ReadCredentials,
) -> None:
    """Serve one round that tests a model, print what it found, and write it into the run's folder.

    ``given`` are the flags by dotted keys, which override the file ``config`` and the run.

    Raises:
        SettingsError: there is no model, or the run has held out no examples.
        HeadwaterError: see ``serve_run``.
    """
    if order.model is None and not order.out.exists():
        names = [one.name for one in order.out.parent.glob("*") if one.is_dir()]
        near = get_close_matches(order.out.name, names, n=1)
        raise SettingsError(
            f"there is no {order.out}",
            remedy=f"did you mean {order.out.parent / near[0]}?" if near else "name a run's --out",
        )
    named = {} if order.task is None else {"task": order.task}
    run = load_run(None, {"out": order.out, **named}, resume=True) if _is_run(order.out) else None
    own = set() if config is None else {key for key, _ in flattened(read_tree(config))}
    kept = {key: value for key, value in _kept(run).items() if key not in own}
    if FRACTION not in {*kept, *own, *given}:
        raise SettingsError(
            "the devices of the run held out no examples: they may have trained on each"
            if run is not None
            else f"{order.out} is no run's folder, so what devices held out is not known",
            remedy="say which share of their examples to test on with --test-fraction (1: all, for "
            "a model that was trained on others); runs with --evaluate-on-devices hold some out",
        )
    folder = next(one for one in numbered(order.out / FOLDER / "test") if not one.exists())
    fixed = {"out": folder, "rounds": 1, "device_test.model": _model_of(order)}
    settings = load(config, kept | dict(given) | fixed | named)
    if settings.task is None:
        raise SettingsError(
            f"{order.out} is no run's folder, so no task is known",
            remedy="name it with --task FILE.py:Class, or the folder of the run with --out",
        )
    _serve(settings, credentials_of(settings))
    found = read_result(folder)
    for copy in (MODEL, checkpoint.FILE, checkpoint.FROZEN):  # the tested model is where it was
        (folder / copy).unlink(missing_ok=True)
    shutil.copyfile(folder / FILE, order.out / FILE)
    with contextlib.suppress(HeadwaterError, OSError):  # a folder without rounds has no report
        write_report(order.out)
    if order.as_json:
        typer.echo((folder / FILE).read_text(), nl=False)
    else:
        print_table(as_table(found))
        print_text(f"written to {order.out / FILE}")


test_on_devices.__test__ = False  # type: ignore[attr-defined] # pytest, it is no test


def _serve(settings: Settings, credentials: Credentials | None) -> None:
    """Serve the round, and show it."""
    chosen = settings.device_test
    both = "" if chosen.compare_with is None else f", beside {chosen.compare_with}"
    print_text(f"a test of {chosen.model} on the devices{both}: nothing is trained")
    with show_progress(settings) as (on_round, observer):
        serve_run(
            settings,
            credentials,
            on_round=on_round,
            resume=False,
            observer=observer,
        )


def _is_run(folder: Path) -> bool:
    return (folder / SETTINGS_FILE).exists()


def _model_of(order: TestOrder) -> Path:
    """Return the path of the model that is tested.

    Raises:
        SettingsError: there is none.
    """
    if order.model is not None and order.is_best:
        raise SettingsError("--model and --best name a model each", remedy="leave out one of them")
    if order.is_best and not (order.out / BEST).exists():
        raise SettingsError(
            f"there is no {BEST} in {order.out}", remedy="the run keeps it with --best METRIC"
        )
    return order.model or (order.out / BEST if order.is_best else order.out)


def _kept(run: Settings | None) -> dict[str, Any]:
    """Return the settings of a run that a test takes, by their dotted keys."""
    if run is None:
        return {}
    plain = dict(flattened(run.model_dump(mode="json", exclude_none=True)))
    kept = {
        key: value
        for key, value in plain.items()
        if key not in LEFT_OUT
        and (key in (*KEPT, *KEPT_KEYS) or key.partition(".")[0] in KEPT_BRANCHES)
    }
    if run.evaluation.on_devices:
        kept[FRACTION] = run.evaluation.held_out_fraction
        kept["device_test.held_out"] = run.evaluation.held_out
    return kept
