"""The laws of the structure: imports run one way, and foreign types stay where they belong."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("common", "client", "server", "simulation")
MAY_IMPORT = {
    "common": {"common"},
    "client": {"common", "client"},
    "server": {"common", "server"},
    "simulation": {"common", "client", "server", "simulation"},
}
FLOWER_FILES = {
    "client/app.py",
    "client/flower/request.py",
    "client/flower/between_messages.py",
    "client/flower/node.py",
    "common/flower/grid.py",
    "common/flower/records.py",
    "server/app.py",
    "server/flower/grpc_grid.py",
    "server/flower/registration.py",
    "server/serve.py",
    "server/flower/sum_of_gradients.py",
    "simulation/run.py",
    "simulation/engines/flower_ray.py",
    "simulation/engines/message_grid.py",
    "simulation/engines/grpc_grid.py",
    "simulation/engines/lying.py",
    "simulation/engines/device_app.py",
    "simulation/engines/vanishing.py",
    "simulation/engines/wire.py",
}
GRPC_FILES = {
    "client/transport/connection.py",
    "server/transport/health.py",
    "server/transport/servicer.py",
    "server/transport/listener.py",
    "server/transport/stream.py",
}
# Loaded only where metrics were asked for.
METRICS_FILES = {
    "client/operations/prometheus.py",
    "common/system/metrics_server.py",
    "server/operations/prometheus.py",
}
PRIVATE_FLOWER_FILES = {"common/flower/grid.py", "simulation/engines/flower_ray.py"}


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
    return found


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_imports_run_one_way(path: Path) -> None:
    own = {name.split(".")[1] for name in imports(path) if name.startswith("headwater.")}
    assert own <= MAY_IMPORT[path.relative_to(ROOT).parts[0]]


def test_flower_s_types_stay_in_the_apps_the_grids_and_the_bridge() -> None:
    found = {
        name_of(path)
        for path in sources()
        if any(name.split(".")[0] == "flwr" for name in imports(path))
    }
    assert found == FLOWER_FILES


def test_private_parts_of_flower_are_imported_in_the_adapters_only() -> None:
    public = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}
    found = {
        name_of(path)
        for path in sources()
        if {name for name in imports(path) if name.split(".")[0] == "flwr"} - public
    }
    assert found == PRIVATE_FLOWER_FILES


def test_grpc_stays_in_the_transport_files() -> None:
    found = {
        name_of(path)
        for path in sources()
        if any(name.split(".")[0] == "grpc" for name in imports(path))
    }
    assert found == GRPC_FILES


def test_prometheus_stays_in_the_exporters() -> None:
    found = {
        name_of(path)
        for path in sources()
        if any(name.split(".")[0] == "prometheus_client" for name in imports(path))
    }
    assert found == METRICS_FILES


def test_the_exporters_are_loaded_only_where_metrics_were_asked_for() -> None:
    modules = {"headwater." + name.removesuffix(".py").replace("/", ".") for name in METRICS_FILES}
    for path in sources():
        if name_of(path) not in METRICS_FILES:
            loaded = {
                node.module
                for node in ast.parse(path.read_text()).body
                if isinstance(node, ast.ImportFrom)
            }
            assert not loaded & modules, path


def test_a_device_needs_nothing_heavy() -> None:
    heavy = {"sklearn", "matplotlib", "tensorboard", "ray"}
    for path in sources():
        if path.relative_to(ROOT).parts[0] in ("common", "client"):
            assert not {name.split(".")[0] for name in imports(path)} & heavy, path
