"""The Ray cluster of simulated devices: an existing one, or a temporary one on this machine.

Flower uses the cluster that the process has already joined. So this module sets up what every
worker needs: Python's import path, and no look-ups on other machines.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.markup import escape

from headwater.common.errors import SettingsError
from headwater.common.settings.schema import Settings
from headwater.common.system.console import console

# Flower and Ray read these when they are imported or started: no look-up leaves the machine; Ray
# reports no usage statistics, does not warn of missing GPUs and does not restart after a shutdown.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
ADDRESS, PYTHONPATH = "RAY_ADDRESS", "PYTHONPATH"
# A socket's path is limited to 107 characters, of which Ray needs about 70; TMPDIR may be too long.
RAY_FOLDER_PARENT = "/tmp"
# Ray itself would retry for two minutes.
CONNECT_SECONDS = 5.0
FIRST_WITH_TOKENS = (2, 52)
COMMON_OPTIONS: dict[str, Any] = {
    "include_dashboard": False,
    "logging_level": "ERROR",
    "log_to_driver": True,
}


@contextmanager
def joined(settings: Settings, folder: Path) -> Iterator[None]:
    """Join the cluster at RAY_ADDRESS; without that variable, start Ray on this machine.

    A Ray started here keeps its files in ``folder`` and ends with this context. In a cluster only
    the workers of this run end.

    Raises:
        SettingsError: the cluster cannot be joined, or none of its machines has the cores for one
            client.
    """
    address = os.environ.get(ADDRESS, "")
    is_own = address in ("", "local")
    with _own_environment() if is_own else nullcontext():
        import ray

        try:
            if is_own:
                ray.init(**_local_options(settings, folder), **COMMON_OPTIONS)
            else:
                _check_address(address)
                _join(address)
                _check_cores(settings, address)
            yield
        finally:
            ray.shutdown()


def cpus_per_client(settings: Settings) -> int:
    """Return the cores that a worker reserves: as many as it has threads.

    On this machine at most the cores that exist; otherwise no worker would start.
    """
    threads = settings.threads or 1
    is_local = os.environ.get(ADDRESS, "") in ("", "local")
    return min(threads, os.cpu_count() or 1) if is_local else threads


def _local_options(settings: Settings, folder: Path) -> dict[str, Any]:
    # Not "auto", which would join a Ray that another user has started on this machine.
    cpus = min(os.cpu_count() or 1, settings.simulation.clients * cpus_per_client(settings))
    return {"address": "local", "num_cpus": cpus, "_temp_dir": str(folder / "ray")}


@contextmanager
def _own_environment() -> Iterator[None]:
    """Give the Ray that is started here this process's import path, and a token.

    Ray listens on all addresses and runs what it is sent; with a token only by who has it. A
    cluster of the user's own has its own: see Ray's docs.

    Raises:
        SettingsError: this Ray is too old for tokens.
    """
    found = version("ray")
    if tuple(int(part) for part in found.split(".")[:2]) < FIRST_WITH_TOKENS:
        raise SettingsError(
            f"Ray {found} lets everybody who reaches this machine run code in it",
            remedy="pip install --upgrade 'headwater[ray]'; or leave --engine out",
        )
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    variables = {PYTHONPATH: _import_path(), **token}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        _read_environment()
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        _read_environment()


def _read_environment() -> None:
    """Let Ray read its variables again: it does so once, when it is first imported."""
    from ray import _raylet  # flwr pins its version

    raylet: Any = _raylet
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    raylet.Config.initialize("")


def _import_path() -> str:
    return os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)


def _join(address: str) -> None:
    import ray

    quiet = {name: value for name, value in QUIET.items() if name.startswith("FLWR_")}
    environment = {PYTHONPATH: _import_path(), **quiet}
    try:
        ray.init(address=address, runtime_env={"env_vars": environment}, **COMMON_OPTIONS)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _not_joined(address, str(error).partition("\n")[0]) from error


def _check_address(address: str) -> None:
    """Check that a process listens at the address.

    Raises:
        SettingsError: none does, or the address has another form.
    """
    if "://" in address:
        raise _not_joined(address, "it is not HOST:PORT")
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return  # "auto", or an error that Ray reports
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _not_joined(address, str(error)) from error


def _not_joined(address: str, reason: str) -> SettingsError:
    return SettingsError(
        f"the Ray cluster at {ADDRESS}={address} cannot be joined: {reason}",
        remedy="start the simulator on a machine of the cluster (`ray start`, `ray status`), with "
        f"the head's HOST:PORT as {ADDRESS} and the cluster's versions of Python and Ray; or "
        f"unset {ADDRESS}",
    )


def _check_cores(settings: Settings, address: str) -> None:
    """Print how many clients run at once.

    Raises:
        SettingsError: no machine has the cores for one client.
    """
    import ray

    needed = cpus_per_client(settings)
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    cores = [node["Resources"].get("CPU", 0.0) for node in nodes if node["Alive"]]
    at_once = sum(int(number // needed) for number in cores)
    if not at_once:
        raise SettingsError(
            f"no machine of the Ray cluster at {address} has {needed} cores for one client; they "
            f"have {', '.join(f'{number:g}' for number in cores)}",
            remedy="lower --threads, or start them with more: ray start --num-cpus N",
        )
    workers = sum(number >= needed for number in cores)
    console.print(
        f"Ray cluster at {escape(address)}: {at_once} clients at a time on {workers} nodes",
        soft_wrap=True,
    )
