"""Runs the aggregation server: the ServerApp on the gRPC grid, from the first round to the last."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headwater.common.errors import HeadwaterError, SettingsError, StateError
from headwater.common.flower.grid import HeadwaterGrid
from headwater.common.settings.schema import Settings
from headwater.common.system.atomic_file import make_private_folder
from headwater.common.system.console import console
from headwater.common.system.heap import freeze_loaded_objects, use_one_heap
from headwater.common.transport.tls import Credentials, split_address
from headwater.common.user_code.task_spec import bundle_folder, name_of
from headwater.common.wording import in_shell
from headwater.server.app import load_run, server_app, server_context
from headwater.server.features import run_queue
from headwater.server.flower.grpc_grid import GrpcGrid
from headwater.server.operations.control import LONG_WAIT_ADVICE, RunControl
from headwater.server.operations.orders import Order
from headwater.server.operations.run_lock import SERVER
from headwater.server.rounds import checkpoint
from headwater.server.rounds.observer import Observer, Observers
from headwater.server.rounds.round_loop import NO_OBSERVER, OnRound
from headwater.server.transport.admission import OfferedTask
from headwater.server.transport.peer_certificates import CertificateVerifier
from headwater.server.transport.servicer import Servicer

if TYPE_CHECKING:
    from headwater.server.page.run_view import RunView
    from headwater.server.standby.takeover import SharedRun


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """How a run ended without an error, and where its devices connect."""

    goes_on: bool
    """Whether the next run of the queue follows; the devices have got no goodbye."""
    address: str


MakeGrid = Callable[[Servicer, Callable[[], bool]], HeadwaterGrid]


def grpc_grid(servicer: Servicer, may_begin: Callable[[], bool]) -> HeadwaterGrid:
    """Return the grid of the devices that connect to a servicer."""
    return GrpcGrid(servicer, may_begin=may_begin)


def serve_run(
    settings: Settings,
    credentials: Credentials | None,
    *,
    on_round: OnRound,
    resume: bool,
    observer: Observer = NO_OBSERVER,
    make_grid: MakeGrid = grpc_grid,
    command: str = SERVER,
    long_wait_advice: str = LONG_WAIT_ADVICE,
    shared: SharedRun | None = None,
    follows_queue: bool = False,
) -> RunEnd:
    """Load the run, listen, run all rounds with the connected devices, then dismiss the devices.

    ``command`` is the one that continues the run if it is drained; ``long_wait_advice`` ends the
    warning about a round that waits long for a device. ``shared`` is the run's term if a standby
    follows it. ``follows_queue`` says that the caller serves the runs of the queue after this one;
    a run in whose queue others wait is refused without it.

    After a KeyboardInterrupt or an error of settings or disk, the streams are closed without a
    goodbye: the devices keep trying to connect and continue when the server is back. A finished or
    drained run sends a goodbye, unless the next run of the queue follows at once.

    Raises:
        HeadwaterError: see ``headwater.common.errors``.
    """
    use_one_heap()  # before gRPC starts its threads
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    settings = settings.model_copy(update={"threads": torch.get_num_threads()})  # for the log
    folder = settings.out
    if folder is not None:
        with contextlib.suppress(OSError):  # the round log reports what is wrong with the folder
            make_private_folder(folder)
        folder = folder if folder.is_dir() else None
    run_id, round_number = checkpoint.run_position(settings.out, resume=resume)
    servicer = Servicer(
        settings.server.listen,
        run_id=run_id,
        term=0 if shared is None else shared.term,
        task="" if settings.task is None else name_of(settings.task),
        offered=None if settings.task is None else _offered(settings.task),
        credentials=credentials,
        staging_bytes=settings.server.staging_bytes,
        reconnect_seconds=settings.cohort.reconnect_seconds,
        return_seconds=settings.cohort.return_seconds,
        spool_folder=folder,
        verifier=_verifier(settings, credentials),
    )
    with ExitStack() as stack:
        if shared is not None:
            stack.enter_context(shared.serving())
        stack.callback(servicer.close)
        # Before all else, as the page outlives the devices' streams and the control of the run.
        page = stack.enter_context(_page(settings, credentials, servicer))
        control = None
        if folder is not None:
            if not follows_queue and (queue := run_queue(folder)) is not None:
                queue.refuse_queue(folder)
            control = stack.enter_context(
                _control(
                    *(settings.rounds, folder, servicer, round_number, long_wait_advice),
                    is_next_due=partial(_is_next_due, folder) if follows_queue else None,
                )
            )
        # What is wrong comes before any client connects.
        loaded = load_run(settings, run_id=run_id, resume=resume)
        farewell = stack.enter_context(_open(servicer))
        host, _ = split_address(settings.server.listen)
        address = f"{host}:{servicer.port}"
        protection = "mutual TLS" if credentials else "plain text"
        console.print(f"listening on {address} ({protection})", soft_wrap=True)
        if settings.tls.ca is not None:
            from headwater.server.enrolment.enrolment_port import enrolment_port

            stack.enter_context(enrolment_port(settings, stream_port=servicer.port))
        own_observer = stack.enter_context(
            _observer(settings, servicer, control, page, credentials)
        )
        if control is not None:
            info = {"pid": os.getpid(), "address": address, "run_id": run_id, "command": command}
            control.start({**info, "working_folder": str(Path.cwd())})
        observers = Observers(own_observer, observer)
        grid = make_grid(servicer, _gate(control, observers))
        grid.enter_run(run_id)
        if shared is not None:
            grid.check_term = shared.check
            loaded.training.share(shared.publish)
        app = server_app(on_round=on_round, resume=resume, observer=observers, loaded=loaded)
        freeze_loaded_objects()
        app(grid, server_context(settings, run_id=run_id))
        is_drained = control is not None and control.is_draining
        queue = None if is_drained or not follows_queue or folder is None else run_queue(folder)
        goes_on = queue is not None and queue.has_queue(folder)
        farewell.is_due = not goes_on
        if page is not None:
            page.may_stay = not (goes_on or is_drained)
        if control is not None and control.is_draining and settings.has_round_after(control.round):
            if shared is not None:
                shared.is_drained = True
            of = "" if settings.num_rounds is None else f" of {settings.rounds}"
            console.print(
                f"drained after round {control.round}{of}; continue with: "
                f"{command} --resume --out {in_shell(str(settings.out))}",
                soft_wrap=True,
            )
    return RunEnd(goes_on=goes_on, address=address)


def _gate(control: RunControl | None, observer: Observer) -> Callable[[], bool]:
    """Return what says whether the next round may begin, and tells the observer of a pause."""
    if control is None:
        return lambda: True
    was_paused = False

    def may_begin() -> bool:
        nonlocal was_paused
        is_paused = not control.may_begin()
        if is_paused != was_paused:
            was_paused = is_paused
            observer.paused(is_paused)
        return not is_paused

    return may_begin


def _verifier(settings: Settings, credentials: Credentials | None) -> CertificateVerifier | None:
    """Return what checks the devices' certificates; None if they have none."""
    if credentials is None:
        return None
    from headwater.server.enrolment.registry_verifier import RegistryVerifier

    return RegistryVerifier.of(settings.tls, credentials)


@dataclass(slots=True)
class _Farewell:
    """Whether the devices get a goodbye when the run is over."""

    is_due: bool = True


@contextmanager
def _open(servicer: Servicer) -> Iterator[_Farewell]:
    """Serve the devices; send them a goodbye if the run is over and no other follows."""
    farewell, is_over = _Farewell(), False
    try:
        servicer.start()
        yield farewell
        is_over = farewell.is_due
    except HeadwaterError as error:
        is_over = not isinstance(error, SettingsError | StateError)
        raise
    finally:
        servicer.stop(say_goodbye=is_over)


def _is_next_due(folder: Path) -> bool:
    queue = run_queue(folder)
    return queue is not None and queue.is_next_due(folder)


@contextmanager
def _control(
    rounds: int | str,
    folder: Path,
    servicer: Servicer,
    round_number: int,
    long_wait_advice: str,
    *,
    is_next_due: Callable[[], bool] | None,
) -> Iterator[RunControl]:
    """Follow orders and write the history, until the devices have been dismissed."""

    def on_order(order: Order | None) -> None:
        servicer.pause(order is not None and order.verb == "pause")
        if order is not None and order.verb == "drain":
            servicer.drain()

    control = RunControl(
        folder,
        round_number=round_number,
        rounds=rounds,
        device_records=servicer.device_records,
        on_order=on_order,
        is_alive=servicer.is_alive,
        long_wait_advice=long_wait_advice,
        is_next_due=is_next_due,
    )
    reason = "stopped"
    try:
        yield control
        reason = "drained" if control.is_draining else "done"
    except HeadwaterError as error:
        reason = f"{error.code}: {error}"
        raise
    finally:
        control.stop(reason)


@contextmanager
def _page(
    settings: Settings, credentials: Credentials | None, servicer: Servicer
) -> Iterator[RunView | None]:
    """Serve the page if it is enabled."""
    if settings.server.page is None:
        yield None
        return
    from headwater.server.page.run_page import run_page

    with run_page(
        settings,
        credentials=credentials,
        records=servicer.device_records,
        stages=servicer.stages,
        watch=servicer.watch,
    ) as page:
        yield page


@contextmanager
def _observer(
    settings: Settings,
    servicer: Servicer,
    control: RunControl | None,
    page: RunView | None,
    credentials: Credentials | None,
) -> Iterator[Observer]:
    """Serve metrics and send alerts if they are enabled; yield the observer of the rounds."""
    observers: list[Observer] = [each for each in (control, page) if each is not None]
    with ExitStack() as stack:
        if settings.server.metrics is not None:
            observers.append(
                stack.enter_context(_metrics(settings.server.metrics, servicer, control))
            )
        if settings.alerts.notify is not None:
            observers.append(stack.enter_context(_alerts(settings, servicer, control, credentials)))
        yield Observers(*observers)


@contextmanager
def _alerts(
    settings: Settings,
    servicer: Servicer,
    control: RunControl | None,
    credentials: Credentials | None,
) -> Iterator[Observer]:
    """Tell the operator of trouble, and of the end of the run."""
    from headwater.server.alerts.watch import Alerts

    ends = {} if credentials is None else {"the server": credentials.leaf.not_valid_after_utc}
    alerts = Alerts(
        settings,
        servicer.device_records,
        certificates={name: end.timestamp() for name, end in ends.items()},
        is_paused=lambda: control is not None and control.is_paused,
        note=lambda text: None if control is None else control.note("alert", text),
    )
    reason = "stopped"
    try:
        yield alerts
        reason = "drained" if control is not None and control.is_draining else "done"
    except HeadwaterError as error:
        reason = f"{error.code}: {error}"
        raise
    finally:
        alerts.stop(reason)


@contextmanager
def _metrics(address: str, servicer: Servicer, control: RunControl | None) -> Iterator[Observer]:
    """Serve the metrics; yield the observer that counts the rounds."""
    from headwater.common.system.metrics_server import MetricsServer
    from headwater.server.operations.prometheus import ServerGauges, ServerMetrics

    def gauges() -> ServerGauges:
        return ServerGauges(
            num_connected=len(servicer.connected()),
            bytes_up=servicer.bytes_up,
            bytes_down=servicer.bytes_down,
            staged_bytes=servicer.staged_bytes,
            is_paused=control is not None and control.is_paused,
            refusals=servicer.refusals.copy(),
            num_history_failures=0 if control is None else control.num_failures,
            num_devices_not_noted=servicer.device_records.num_unrecorded,
        )

    metrics = ServerMetrics(gauges)
    port = MetricsServer(address, metrics.registry)
    try:
        console.print(f"metrics at {port.url}", soft_wrap=True)
        yield metrics
    finally:
        port.close()


def _offered(task: str) -> OfferedTask | None:
    """Return the signed bundle of the run's task; None if it is in none."""
    if bundle_folder(task) is None:
        return None
    from headwater.common.task_bundles.signed_bundle import bundle_of  # few tasks are published

    found = bundle_of(task)
    if found is None:
        return None
    return OfferedTask(name=found.content.name, digest=found.digest, data=found.data)
