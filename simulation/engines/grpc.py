"""The engine grpc: the real server and N client processes on this machine, connected by gRPC.

The server is that of ``headwater-server``, and each device is a process that speaks the protocol of
``headwater-client``. Clock, memory, battery and link of a device are simulated from its profile,
and random events follow from the seed. So the planner makes the same plans as in process, and the
model has the same bits as with ``--compute one-by-one``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headwater.common.errors import SettingsError, StateError
from headwater.common.settings.schema import CohortSettings, Settings
from headwater.common.system.atomic_file import make_private_folder
from headwater.server.flower.grpc_grid import GrpcGrid
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.round_loop import NO_OBSERVER, OnRound
from headwater.server.serve import serve_run
from headwater.server.transport.listener import check_descriptors
from headwater.server.transport.servicer import Servicer
from headwater.simulation.engines.client_processes import ROUND, ClientProcesses
from headwater.simulation.engines.grpc_grid import SimulatedGrpcGrid
from headwater.simulation.engines.shared_round import SharedRound
from headwater.simulation.fleet.fleet_spec import with_fleet

CLIENTS = "clients"  # the folder in ``out`` with the devices' logs and state files

# Each client is a process; on the same machine the in-process engine simulates more.
MAX_CLIENTS = 1000

# The deadline is compared with the devices' virtual seconds, and simulated devices have no
# certificate that could be revoked.
LONG_WAIT_ADVICE = (
    "it ends when they have answered, as the clock of --deadline is virtual here; Ctrl-C, and "
    "--resume with the same --out, repeats the round"
)


def run_on_grpc(
    settings: Settings, *, on_round: OnRound, resume: bool, observer: Observer = NO_OBSERVER
) -> None:
    """Run the settings with ``settings.simulation.clients`` client processes.

    They are named 0 to N-1 and connect to a free port of the loopback interface without TLS. When
    this returns or raises, none of the processes is left.

    Raises:
        SettingsError: this engine cannot simulate the settings.
        ConnectionLost: a client's process has ended in mid-run.
        HeadwaterError: see ``headwater.common.errors``.
    """
    settings = with_fleet(settings)
    check_engine(settings)
    listen = settings.server.model_copy(update={"listen": "127.0.0.1:0"})
    settings = settings.model_copy(update={"server": listen, "threads": settings.threads or 1})
    with _client_folder(settings) as folder:
        shared_round = SharedRound(folder / ROUND, new_for=settings.simulation.clients)
        with ClientProcesses(settings, folder) as clients:

            def make_grid(servicer: Servicer, may_begin: Callable[[], bool]) -> SimulatedGrpcGrid:
                return SimulatedGrpcGrid(
                    GrpcGrid(servicer, may_begin=may_begin),
                    settings,
                    clients,
                    shared_round,
                    device_records=servicer.device_records,
                    start=lambda: clients.start(servicer.port),
                )

            serve_run(
                settings,
                None,
                on_round=on_round,
                resume=resume,
                observer=observer,
                make_grid=make_grid,
                command="headwater-simulate",
                long_wait_advice=LONG_WAIT_ADVICE,
            )


def check_engine(settings: Settings) -> None:
    """Refuse settings that this engine cannot simulate, before any process is started.

    Raises:
        SettingsError: with the setting to use instead.
    """
    chosen = settings.simulation
    if chosen.clients > MAX_CLIENTS:
        raise SettingsError(
            f"--engine grpc gives each client a process and allows {MAX_CLIENTS:,}; --clients is "
            f"{chosen.clients:,}",
            remedy="lower --clients, or take --engine in-process",
        )
    check_descriptors(chosen.clients)
    if chosen.compute in ("vectorised", "fused"):
        raise SettingsError(
            f"--compute {chosen.compute} computes many devices in one pass, and here each device "
            "is a process",
            remedy="leave --compute out, or take --engine in-process",
        )
    if settings.cohort.return_seconds != CohortSettings().return_seconds:
        raise SettingsError(
            "cohort.return_seconds has no effect with --engine grpc: a round awaits every device, "
            "and a device's process that ends, ends the run",
            remedy="leave it out; to simulate devices that vanish, take --dropout or --faults",
        )
    if settings.tls.ca or settings.tls.certificate or settings.tls.key:
        raise SettingsError(
            "--engine grpc connects over the loopback without TLS, and TLS is set",
            remedy="leave [tls] out: a simulated fleet has no certificates",
        )


@contextmanager
def _client_folder(settings: Settings) -> Iterator[Path]:
    """Create the folder of the devices' logs and state; without ``out``, a temporary one."""
    if settings.out is None:
        with tempfile.TemporaryDirectory(prefix="headwater-") as name:
            yield Path(name)
        return
    folder = settings.out / CLIENTS
    try:
        make_private_folder(folder)
    except OSError as error:
        raise StateError(f"cannot write {folder}: {error.strerror}") from error
    yield folder
