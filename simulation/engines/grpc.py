"""The real server and N real clients on this machine: every byte of a run goes over gRPC.

The server is that of ``headwater-server``, the devices speak the wire of ``headwater-client``, each
in a process of its own. Only what a simulation is about is not real: clock, memory, battery and
link of a device are those of its profile, and chance takes part as the seed says. So the planner
makes the plans that it makes in process, and the model has the bits of ``--compute one-by-one``.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headwater.common.errors import SettingsError, StateError
from headwater.common.settings.schema import Settings
from headwater.server.flower.grpc_grid import GrpcGrid
from headwater.server.rounds.run import OnRound
from headwater.server.serve import serve_run
from headwater.server.transport.servicer import Servicer
from headwater.simulation.engines.client_processes import ROUND, ClientProcesses
from headwater.simulation.engines.grpc_grid import SimulatedGrpcGrid
from headwater.simulation.engines.shared_round import SharedRound
from headwater.simulation.fleet.profiles import with_fleet

CLIENTS = "clients"  # the folder in ``out`` with the devices' logs and places

# Each is a process: beyond, the in-process engine simulates more on the same machine.
MOST_CLIENTS = 1000

# A deadline is held against what devices tell of their virtual clocks, and these have no streams
# that could be revoked.
WAIT_ENDS = (
    "it ends when they have answered, as the clock of --deadline is virtual here; Ctrl-C, and "
    "--resume with the same --out, asks them anew"
)


def run_on_grpc(settings: Settings, *, on_round: OnRound, resume: bool) -> None:
    """Run the settings with ``settings.simulation.clients`` clients over the wire.

    They are named 0 to N-1 and connect to a free port of the loopback, in plain text. When this
    returns or raises, none of their processes is left.

    Raises:
        SettingsError: the settings ask for what cannot be so simulated.
        ConnectionLost: a client's process has ended in mid-run.
        HeadwaterError: see ``headwater.common.errors``.
    """
    settings = with_fleet(settings)
    check_engine(settings)
    listen = settings.server.model_copy(update={"listen": "127.0.0.1:0"})
    settings = settings.model_copy(update={"server": listen, "threads": settings.threads or 1})
    with _folder(settings) as folder, _sigterm_kept():
        world = SharedRound(folder / ROUND, is_new=True)
        with ClientProcesses(settings, folder) as clients:

            def grid_of(intake: Servicer, may_begin: Callable[[], bool]) -> SimulatedGrpcGrid:
                return SimulatedGrpcGrid(
                    GrpcGrid(intake, may_begin=may_begin),
                    settings,
                    clients,
                    world,
                    attendance=intake.attendance,
                    start=lambda: clients.start(intake.port),
                )

            serve_run(
                settings,
                None,
                on_round=on_round,
                resume=resume,
                grid_of=grid_of,
                command="headwater-simulate",
                wait_ends=WAIT_ENDS,
            )


def check_engine(settings: Settings) -> None:
    """Refuse what this engine cannot do, before anything is started.

    Raises:
        SettingsError: saying what to take instead.
    """
    chosen = settings.simulation
    if chosen.clients > MOST_CLIENTS:
        raise SettingsError(
            f"--engine grpc gives each client a process, {MOST_CLIENTS:,} at most, and "
            f"{chosen.clients:,} are asked for",
            remedy="lower --clients, or take --engine in-process",
        )
    if settings.cohort.min_clients > chosen.clients:
        raise SettingsError(
            f"a round needs {settings.cohort.min_clients} clients and there are {chosen.clients}",
            remedy="lower --min-clients, or raise --clients",
        )
    if chosen.compute in ("vectorised", "fused"):
        raise SettingsError(
            f"--compute {chosen.compute} adds devices up that have processes of their own",
            remedy="leave --compute out, or take --engine in-process",
        )
    if settings.tls.ca or settings.tls.certificate or settings.tls.key:
        raise SettingsError(
            "--engine grpc speaks plain text on the loopback, and TLS is set",
            remedy="leave [tls] out: a simulated fleet has no certificates",
        )


@contextmanager
def _folder(settings: Settings) -> Iterator[Path]:
    """Make the folder of the devices' logs and places; where nothing is kept, for this run only."""
    if settings.out is None:
        with tempfile.TemporaryDirectory(prefix="headwater-") as name:
            yield Path(name)
        return
    folder = settings.out / CLIENTS
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(f"cannot write {folder}: {error.strerror}") from error
    yield folder


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Put back how this process takes SIGTERM: the server sets it for itself."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
