"""Runs the settings on their engine: in this process, as gRPC processes, or on Flower's Ray.

The server's rounds and the devices' code are the same on each engine.
"""

from __future__ import annotations

import contextlib
import secrets
from functools import partial
from typing import TYPE_CHECKING

import torch

from headwater.client.features import warn_of_untried
from headwater.common.errors import SettingsError
from headwater.common.settings.schema import Settings
from headwater.common.system.heap import keep_freed_memory, rare_collections
from headwater.server.features import samplers
from headwater.server.fleet import Fleet
from headwater.server.operations.round_log import RoundLog
from headwater.server.operations.run_lock import locked_without_server
from headwater.server.report.report import ReportWriter
from headwater.server.rounds.checkpoint import run_position
from headwater.server.rounds.features import round_runner, trackers
from headwater.server.rounds.observer import Observer, Observers
from headwater.server.rounds.round_loop import NO_OBSERVER, OnRound, run
from headwater.server.rounds.run_state import Training
from headwater.server.same_data.same_data import SameData
from headwater.simulation.compute.modes import StartPool
from headwater.simulation.engines.in_process import LocalFleet
from headwater.simulation.engines.planning_cache import CachedOrder
from headwater.simulation.fleet.fleet_spec import with_fleet

if TYPE_CHECKING:
    from headwater.server.transport.device_records import Stages


def run_engine(
    settings: Settings,
    *,
    on_round: OnRound,
    resume: bool,
    observer: Observer = NO_OBSERVER,
    has_report: bool = True,
) -> None:
    """Run the settings on the engine that they name.

    Without ``has_report`` a run in this process leaves no curves.png and no report.html.

    Raises:
        SettingsError: the engine does not support ``resume``, or another process runs in the
            folder.
        HeadwaterError: see ``headwater.common.errors``.
    """
    torch.set_num_threads(settings.threads or 1)
    warn_of_untried(settings)
    if settings.simulation.engine == "grpc":  # its server locks the folder
        lock: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    else:
        lock = locked_without_server(settings.out)
    with lock:
        _run_with_page(
            settings, on_round=on_round, resume=resume, observer=observer, has_report=has_report
        )


def _run_with_page(
    settings: Settings, *, on_round: OnRound, resume: bool, observer: Observer, has_report: bool
) -> None:
    run_rounds = partial(_run, settings, on_round=on_round, resume=resume, has_report=has_report)
    if settings.server.page is not None and settings.simulation.engine != "grpc":
        # The server of the engine grpc opens the page itself: it knows the devices' connections.
        from headwater.common.transport.tls import read_credentials
        from headwater.server.page.run_page import run_page

        stages: Stages | None = None if settings.simulation.engine == "flower-ray" else {}
        credentials = read_credentials(settings.tls)
        with run_page(
            settings, credentials=credentials, stages=None if stages is None else stages.copy
        ) as page:
            both = Observers(observer, page)
            run_rounds(observer=both, stages=stages)
    else:
        run_rounds(observer=observer)


def _run(
    settings: Settings,
    *,
    on_round: OnRound,
    resume: bool,
    observer: Observer,
    has_report: bool,
    stages: Stages | None = None,
) -> None:
    engine, is_masked = settings.simulation.engine, settings.secure.aggregation != "off"
    run_here = partial(
        _run_in_process,
        settings,
        on_round=on_round,
        resume=resume,
        has_report=has_report,
        observer=observer,
        stages=stages,
    )
    if engine == "flower-ray":
        if resume:
            raise SettingsError(
                "Flower's Ray engine keeps the devices' positions in its own memory",
                remedy="resume with --engine in-process",
            )
        from headwater.simulation.cluster.flower_ray import run_on_ray

        run_on_ray(settings, on_round=on_round, observer=observer)
    elif engine == "ray":
        from headwater.simulation.cluster.ray_workers import cluster, ray_pool

        with cluster(settings):
            run_here(start_pool=ray_pool)
    elif engine == "grpc":
        from headwater.simulation.engines.grpc import run_on_grpc

        run_on_grpc(settings, on_round=on_round, resume=resume, observer=observer)
    elif is_masked:
        run_on_messages(
            settings, on_round=on_round, resume=resume, observer=observer, stages=stages
        )
    else:
        run_here()


def _run_in_process(
    settings: Settings,
    *,
    on_round: OnRound,
    resume: bool,
    has_report: bool,
    observer: Observer,
    stages: Stages | None,
    start_pool: StartPool | None = None,
) -> None:
    """Run the rounds with direct calls to the devices; Flower is not loaded."""
    settings, run_id = with_fleet(settings), secrets.randbits(62)
    tracking = trackers(settings)
    training = Training(settings, run_id=run_id, order=CachedOrder())
    fleet = LocalFleet(settings, run_id=run_id, stages=stages, start_pool=start_pool)
    keep_freed_memory()
    with contextlib.closing(fleet), rare_collections():
        fleet.report_left_out()
        shown = [ReportWriter(), *samplers(training)] if has_report else []
        reports = [RoundLog(draws_curves=has_report), *shown]
        observers = Observers(*reports, SameData(settings.task), *tracking, observer)
        run(
            training,
            fleet if settings.simulation.aggregators == 1 else tree_of(fleet, training),
            on_round=on_round,
            resume=resume,
            observer=observers,
            run_round=round_runner(settings, fleet),
        )


def tree_of(fleet: LocalFleet, training: Training) -> Fleet:
    """Return the fleet with its devices divided evenly among the aggregators of the settings."""
    from headwater.server.tree.aggregator import Aggregator  # most runs have one server alone
    from headwater.server.tree.tree_fleet import TreeFleet

    chosen = training.settings.simulation
    return TreeFleet(
        fleet,
        [
            Aggregator(f"aggregator {number}", fleet, training.image)
            for number in range(chosen.aggregators)
        ],
        branch_of=lambda name: fleet.part(name) * chosen.aggregators // chosen.clients,
        order=training.branch_order,
    )


def run_on_messages(
    settings: Settings,
    *,
    on_round: OnRound,
    resume: bool,
    observer: Observer = NO_OBSERVER,
    stages: Stages | None = None,
) -> None:
    """Run Flower's ServerApp and ClientApp on a grid that delivers messages in this process."""
    from headwater.client.app import client_app
    from headwater.server.app import server_app, server_context
    from headwater.simulation.engines.message_grid import InProcessGrid
    from headwater.simulation.fleet.virtual_hardware import virtual_hardware

    run_id, _ = run_position(settings.out, resume=resume)
    grid = InProcessGrid(client_app(virtual_hardware), settings, stages=stages)
    grid.enter_run(run_id)
    grid.report_left_out()
    app = server_app(on_round=on_round, resume=resume, observer=observer)
    app(grid, server_context(settings, run_id=run_id))
