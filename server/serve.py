"""One run of the aggregation server: the ServerApp on the gRPC grid, from first to last round."""

from __future__ import annotations

import contextlib
import secrets
import signal
from types import FrameType

import torch
from flwr.app import Context, RecordDict

from common.console import console
from common.errors import HeadwaterError, SettingsError, StateError
from common.heap import use_one_heap
from common.settings import Settings
from common.tls import Credentials, split_address
from server import checkpoint
from server.app import server_app
from server.grid import GrpcGrid
from server.intake import Intake
from server.rounds import OnRound


def serve_run(
    settings: Settings, credentials: Credentials | None, *, on_round: OnRound, resume: bool
) -> None:
    """Listen, run all rounds with the devices that connect, and tell them when it is over.

    After SIGTERM or Ctrl-C, or an error of settings or disk, the streams are closed without a
    goodbye: the devices keep trying, and go on when the server is back.

    Raises:
        HeadwaterError: see ``common.errors``.
    """
    use_one_heap()  # before gRPC's threads begin
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    settings = settings.model_copy(update={"threads": torch.get_num_threads()})  # to be recorded
    if settings.out is not None:
        with contextlib.suppress(OSError):  # the journal says what is wrong with the folder
            settings.out.mkdir(parents=True, exist_ok=True)
    run_id = _run_id(settings, resume=resume)
    intake = Intake(
        settings.server.listen,
        run_id=run_id,
        credentials=credentials,
        staging_bytes=settings.server.staging_bytes,
        reconnect_seconds=settings.cohort.reconnect_seconds,
        spool_folder=settings.out if settings.out and settings.out.is_dir() else None,
    )
    is_over = False
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        intake.start()
        host, _ = split_address(settings.server.listen)
        protection = "mutual TLS" if credentials else "plain text"
        console.print(f"listening on {host}:{intake.port} ({protection})", soft_wrap=True)
        grid = GrpcGrid(intake)
        grid.enter_run(run_id)
        context = Context(
            run_id=run_id,
            node_id=0,
            node_config={},
            state=RecordDict(),
            run_config=settings.to_run_config(),
        )
        server_app(on_round=on_round, resume=resume)(grid, context)
        is_over = True
    except HeadwaterError as error:
        is_over = not isinstance(error, SettingsError | StateError)
        raise
    finally:
        intake.stop(say_goodbye=is_over)


def _run_id(settings: Settings, *, resume: bool) -> int:
    """Return the resumed run's id, by which the devices know their place, or a new one."""
    if resume and settings.out is not None:
        found = checkpoint.load(settings.out)
        if found is not None:
            return found[0].run_id
    return secrets.randbits(62)


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt
