"""The Ray that simulated devices run on: somebody's cluster, or one of our own on this machine.

Flower takes a Ray that is joined already as it is. So what every worker needs is said here, once:
where Python looks for modules, and that nothing is looked up on other machines.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.markup import escape

from headwater.common.errors import SettingsError
from headwater.common.settings.schema import Settings
from headwater.common.system.console import console

# Read by Flower and Ray when they are imported or started: no look-up leaves the machine, and Ray
# neither counts its users, nor warns of GPUs that nobody has, nor starts anew behind a shutdown.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
ADDRESS, PYTHONPATH = "RAY_ADDRESS", "PYTHONPATH"
# A socket's path may have 107 characters and Ray needs some 70 of them: no long TMPDIR will do.
RAY_FOLDER_PARENT = "/tmp"
# Ray itself would try for two minutes.
ANSWER_SECONDS = 5.0


@contextmanager
def joined(settings: Settings, folder: Path) -> Iterator[None]:
    """Be joined to the cluster that RAY_ADDRESS names; without one to a Ray of our own.

    One of our own keeps its files in ``folder`` and ends with this context. Of a cluster nothing
    ends but our own workers.

    Raises:
        SettingsError: the cluster cannot be joined, or none of its machines has the cores for one
            client.
    """
    import ray

    address = os.environ.get(ADDRESS, "")
    try:
        if address in ("", "local"):
            with _found_here():
                ray.init(**_own(settings, folder), **_alike())
        else:
            _check_address(address)
            _join(address)
            _check_room(settings, address)
        yield
    finally:
        ray.shutdown()


def cpus_per_client(settings: Settings) -> int:
    """Return the cores that a worker reserves: its threads.

    Of a Ray of our own no more than there are, or there would be no worker at all.
    """
    threads = settings.threads or 1
    is_own = os.environ.get(ADDRESS, "") in ("", "local")
    return min(threads, os.cpu_count() or 1) if is_own else threads


def _alike() -> dict[str, Any]:
    return {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": True}


def _own(settings: Settings, folder: Path) -> dict[str, Any]:
    # Not "auto": a Ray that somebody else has started on this machine is none of our business.
    cpus = min(os.cpu_count() or 1, settings.simulation.clients * cpus_per_client(settings))
    return {"address": "local", "num_cpus": cpus, "_temp_dir": str(folder / "ray")}


@contextmanager
def _found_here() -> Iterator[None]:
    """Let the processes that are started here find what this one finds."""
    before = os.environ.get(PYTHONPATH)
    os.environ[PYTHONPATH] = _path()
    try:
        yield
    finally:
        if before is None:
            del os.environ[PYTHONPATH]
        else:
            os.environ[PYTHONPATH] = before


def _path() -> str:
    return os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)


def _join(address: str) -> None:
    import ray

    environment = {PYTHONPATH: _path()}
    environment |= {name: value for name, value in QUIET.items() if name.startswith("FLWR_")}
    try:
        ray.init(address=address, runtime_env={"env_vars": environment}, **_alike())
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _not_joined(address, str(error).partition("\n")[0]) from error


def _check_address(address: str) -> None:
    """Hold that somebody listens there.

    Raises:
        SettingsError: nobody does, or it is an address of another kind.
    """
    if "://" in address:
        raise _not_joined(address, "it is no HOST:PORT")
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return  # "auto", or what Ray says of it
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _not_joined(address, str(error)) from error


def _not_joined(address: str, why: str) -> SettingsError:
    return SettingsError(
        f"the Ray cluster at {ADDRESS}={address} cannot be joined: {why}",
        remedy="start the simulator on a machine of the cluster (`ray start`, `ray status`), with "
        f"the head's HOST:PORT as {ADDRESS} and the cluster's versions of Python and Ray; or "
        f"unset {ADDRESS}",
    )


def _check_room(settings: Settings, address: str) -> None:
    """Say how many clients run at once.

    Raises:
        SettingsError: not even one does.
    """
    import ray

    wanted = cpus_per_client(settings)
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    cores = [node["Resources"].get("CPU", 0.0) for node in nodes if node["Alive"]]
    at_once = sum(int(number // wanted) for number in cores)
    if not at_once:
        raise SettingsError(
            f"no machine of the Ray cluster at {address} has {wanted} cores for one client; they "
            f"have {', '.join(f'{number:g}' for number in cores)}",
            remedy="lower --threads, or start them with more: ray start --num-cpus N",
        )
    workers = sum(number >= wanted for number in cores)
    console.print(
        f"Ray cluster at {escape(address)}: {at_once} clients at a time on {workers} nodes",
        soft_wrap=True,
    )
