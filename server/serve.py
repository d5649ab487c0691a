"""One run of the aggregation server: the ServerApp on the gRPC grid, from first to last round."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import torch
from flwr.app import Context, RecordDict

from headwater.common.errors import HeadwaterError, SettingsError, StateError
from headwater.common.flower.grid import OwnGrid
from headwater.common.settings.schema import Settings
from headwater.common.system.console import console
from headwater.common.system.heap import collect_only_what_is_new, use_one_heap
from headwater.common.transport.tls import Credentials, split_address
from headwater.server.app import server_app
from headwater.server.enrolment.peer_certificates import CertificateVerifier
from headwater.server.flower.grpc_grid import GrpcGrid
from headwater.server.operations.control import REVOKE, RunControl
from headwater.server.operations.orders import Order
from headwater.server.operations.run_lock import SERVER
from headwater.server.rounds import checkpoint
from headwater.server.rounds.observer import Observer, Observers
from headwater.server.rounds.run import OnRound
from headwater.server.transport.device_records import DeviceRecords
from headwater.server.transport.enrolment_port import enrolling
from headwater.server.transport.servicer import Servicer

GridOf = Callable[[Servicer, Callable[[], bool]], OwnGrid]


def grpc_grid(intake: Servicer, may_begin: Callable[[], bool]) -> OwnGrid:
    """Return the grid of the devices that connect to an intake."""
    return GrpcGrid(intake, may_begin=may_begin)


def serve_run(
    settings: Settings,
    credentials: Credentials | None,
    *,
    on_round: OnRound,
    resume: bool,
    grid_of: GridOf = grpc_grid,
    command: str = SERVER,
    wait_ends: str = REVOKE,
) -> None:
    """Listen, run all rounds with the devices that connect, and tell them when it is over.

    ``command`` is what goes on with the run if it is drained, ``wait_ends`` what ends a round's
    long wait for a device.

    After SIGTERM or Ctrl-C, or an error of settings or disk, the streams are closed without a
    goodbye: the devices keep trying, and go on when the server is back. A drained run ends with
    one.

    Raises:
        HeadwaterError: see ``headwater.common.errors``.
    """
    use_one_heap()  # before gRPC's threads begin
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    settings = settings.model_copy(update={"threads": torch.get_num_threads()})  # to be recorded
    if settings.out is not None:
        with contextlib.suppress(OSError):  # the journal says what is wrong with the folder
            settings.out.mkdir(parents=True, exist_ok=True)
    run_id, round_number = _place(settings, resume=resume)
    attendance = DeviceRecords()
    intake = Servicer(
        settings.server.listen,
        run_id=run_id,
        credentials=credentials,
        staging_bytes=settings.server.staging_bytes,
        reconnect_seconds=settings.cohort.reconnect_seconds,
        spool_folder=settings.out if settings.out and settings.out.is_dir() else None,
        attendance=attendance,
        identities=CertificateVerifier.of(settings.tls, credentials),
    )
    signal.signal(signal.SIGTERM, _interrupt)
    with ExitStack() as stack:
        operation = None
        if settings.out is not None and settings.out.is_dir():
            operation = stack.enter_context(
                _operated(settings, settings.out, intake, attendance, round_number, wait_ends)
            )
        stack.enter_context(_open(intake))
        host, _ = split_address(settings.server.listen)
        protection = "mutual TLS" if credentials else "plain text"
        console.print(f"listening on {host}:{intake.port} ({protection})", soft_wrap=True)
        stack.enter_context(enrolling(settings, stream_port=intake.port))
        observer = stack.enter_context(_measured(settings, intake, operation))
        if operation is not None:
            operation.start(
                {
                    "pid": os.getpid(),
                    "address": f"{host}:{intake.port}",
                    "run_id": run_id,
                    "command": command,
                }
            )
        grid = grid_of(intake, _always if operation is None else operation.may_begin)
        grid.enter_run(run_id)
        context = Context(
            run_id=run_id,
            node_id=0,
            node_config={},
            state=RecordDict(),
            run_config=settings.to_run_config(),
        )
        app = server_app(on_round=on_round, resume=resume, observer=observer)
        collect_only_what_is_new()
        app(grid, context)
        if operation is not None and operation.is_draining and operation.round < settings.rounds:
            console.print(
                f"drained behind round {operation.round} of {settings.rounds}; go on with: "
                f"{command} --resume --out {settings.out}",
                soft_wrap=True,
            )


@contextmanager
def _open(intake: Servicer) -> Iterator[None]:
    """Serve the devices; say goodbye to them if the run is over."""
    is_over = False
    try:
        intake.start()
        yield
        is_over = True
    except HeadwaterError as error:
        is_over = not isinstance(error, SettingsError | StateError)
        raise
    finally:
        intake.stop(say_goodbye=is_over)


@contextmanager
def _operated(
    settings: Settings,
    folder: Path,
    intake: Servicer,
    attendance: DeviceRecords,
    round_number: int,
    wait_ends: str,
) -> Iterator[RunControl]:
    """Look for orders and write the history, until the devices are gone."""

    def on_order(order: Order | None) -> None:
        intake.pause(order is not None and order.verb == "pause")
        if order is not None and order.verb == "drain":
            intake.drain()

    operation = RunControl(
        folder,
        round_number=round_number,
        rounds=settings.rounds,
        attendance=attendance,
        on_order=on_order,
        is_alive=intake.is_alive,
        wait_ends=wait_ends,
    )
    how = "stopped"
    try:
        yield operation
        how = "drained" if operation.is_draining else "done"
    except HeadwaterError as error:
        how = f"{error.code}: {error}"
        raise
    finally:
        operation.stop(how)


@contextmanager
def _measured(
    settings: Settings, intake: Servicer, operation: RunControl | None
) -> Iterator[Observer]:
    """Show metrics where they were asked for."""
    looking: Observer = Observers() if operation is None else operation
    if settings.server.metrics is None:
        yield looking
        return
    from headwater.common.system.metrics_server import MetricsPort
    from headwater.server.operations.prometheus import ServerGauges, ServerMetrics

    def now() -> ServerGauges:
        return ServerGauges(
            num_connected=len(intake.connected()),
            bytes_up=intake.bytes_up,
            bytes_down=intake.bytes_down,
            staged_bytes=intake.staged_bytes,
            is_paused=operation is not None and operation.is_paused,
            refusals=intake.refusals.copy(),
            num_history_failures=0 if operation is None else operation.num_failures,
            num_devices_not_noted=intake.attendance.num_not_noted,
        )

    metrics = ServerMetrics(now)
    port = MetricsPort(settings.server.metrics, metrics.registry)
    try:
        console.print(f"metrics at {port.url}", soft_wrap=True)
        yield Observers(looking, metrics)
    finally:
        port.close()


def _place(settings: Settings, *, resume: bool) -> tuple[int, int]:
    """Return the resumed run's id, by which the devices know their place, and its round.

    Of a new run a new id, and 0.
    """
    if resume and settings.out is not None:
        found = checkpoint.load(settings.out)
        if found is not None:
            return found[0].run_id, found[0].round
    return secrets.randbits(62), 0


def _always() -> bool:
    return True


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt
