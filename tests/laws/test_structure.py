"""The laws of the structure: which room may import which, and where foreign types stay."""

from __future__ import annotations

import ast
import graphlib
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("common", "client", "server", "aggregator", "simulation")
MAX_FILES = 14

# A folder, and the folders that no file in it may import; "server" alone is the files at its top.
MUST_NOT_IMPORT = {
    "common": ("client", "server", "aggregator", "simulation"),
    "client": ("server", "aggregator", "simulation"),
    "aggregator": ("simulation",),
    "server": ("client", "simulation"),
    "server/planning": (
        *("server", "server/aggregation", "server/enrolment", "server/flower"),
        *("server/operations", "server/rounds", "server/secagg", "server/transport"),
    ),
    "server/aggregation": (
        *("server", "server/enrolment", "server/flower", "server/operations"),
        *("server/rounds", "server/secagg", "server/transport"),
    ),
    "server/rounds": (
        *("server/transport", "server/flower", "server/operations", "server/secagg"),
        *("server/robust", "server/local_training"),
    ),
    "server/transport": (
        *("server/rounds", "server/planning", "server/secagg", "server/operations"),
    ),
    "client/device": ("client/training",),
    "client/memory": ("client/training",),
    "client/training": (
        *("client/secagg", "client/flower", "client/transport", "client/operations"),
        "client/trainer",
    ),
    "client/trainer": (
        *("client/secagg", "client/flower", "client/transport", "client/operations"),
    ),
    "client/secagg": ("client/flower", "client/transport"),
    "client/adaptation": (
        *("client", "client/secagg", "client/flower", "client/transport", "client/operations"),
    ),
    "simulation/fleet": ("simulation/compute", "simulation/engines", "simulation/cluster"),
    "simulation/compute": ("simulation/engines",),
    "simulation/vectorised": ("simulation/compute", "simulation/engines", "simulation/cluster"),
}
MAY_IMPORT_FLOWER = (
    *("client/app.py", "client/plan_features.py", "client/flower/", "common/flower/"),
    *("client/masked_rounds/", "client/offline/offline_plans.py"),
    *("server/app.py", "server/flower/", "aggregator/answers_above.py", "simulation/engines/"),
    "simulation/cluster/flower_ray.py",
    "simulation/cluster/ray_grid.py",
    *("server/asynchronous/dispatched_plans.py", "server/asynchronous/dispatching_grid_fleet.py"),
    "server/tree/branches.py",
)
MAY_IMPORT_GRPC = ("client/transport/", "server/transport/")
PUBLIC_FLOWER = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}
PRIVATE_FLOWER_FILES = {"common/flower/grid.py"}
# Loaded only where metrics were requested.
METRICS_FILES = {
    "client/operations/prometheus.py",
    "common/system/metrics_server.py",
    "server/operations/prometheus.py",
}
# Web servers and what they are made of: only the page and the guide have one.
PAGE_PACKAGES, PAGE_FOLDERS = ("starlette", "uvicorn"), ("server/page/", "simulation/guide/")


@cache
def sources() -> dict[str, ast.Module]:
    """Return each source file's tree by its path, generated code apart."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
        for path in paths
        if "wire_pb2" not in path.name
    }


@cache
def imports(name: str) -> frozenset[str]:
    """Return the modules that a file imports anywhere; ours as paths, such as server/fleet.py."""
    found = set()
    for node in ast.walk(sources()[name]):
        if isinstance(node, ast.Import):
            found |= {path_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                within = path_of(f"{node.module}.{alias.name}")
                found.add(within if within in sources() else path_of(node.module))
    return frozenset(found)


def path_of(module: str) -> str:
    """Return the file of a module of ours, and another's name as it is."""
    first, *rest = module.split(".")
    if first != "headwater" or not rest:
        return module
    path = "/".join(rest)
    return f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"


def room_of(name: str) -> str:
    return name.rpartition("/")[0]


def importing(package: str) -> set[str]:
    return {
        name
        for name in sources()
        if any(imported.split(".")[0] == package for imported in imports(name))
    }


def circle_in(edges: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("folder", MUST_NOT_IMPORT)
def test_imports_run_one_way(folder: str) -> None:
    refused = [
        f"{name} imports {imported}"
        for name in sources()
        if name.startswith(f"{folder}/")
        for imported in imports(name)
        for other in MUST_NOT_IMPORT[folder]
        if room_of(imported) == other
        or (other != room_of(folder) and imported.startswith(f"{other}/"))
    ]
    assert not refused


def test_every_import_of_ours_names_the_package() -> None:
    assert not {
        f"{name} imports {imported}"
        for name in sources()
        for imported in imports(name)
        if imported.split(".")[0] in PACKAGES
    }


def test_only_the_command_and_comparisons_import_sweeps() -> None:
    found = {name for name in sources() for it in imports(name) if "simulation/sweep/" in it}
    rooms = ("simulation/sweep/", "simulation/compare/")
    outside = {name for name in found if not name.startswith(rooms)}
    assert outside == {"simulation/cli.py"}


def test_only_the_server_s_command_imports_the_aggregator() -> None:
    found = {name for name in sources() for it in imports(name) if it.startswith("aggregator/")}
    assert {name for name in found if not name.startswith("aggregator/")} == {"server/cli.py"}


@pytest.mark.parametrize("package", PAGE_PACKAGES)
def test_only_the_page_and_the_guide_are_web_servers(package: str) -> None:
    found = importing(package)
    assert found
    assert all(name.startswith(PAGE_FOLDERS) for name in found)


def test_no_file_is_in_a_circle_of_imports() -> None:
    assert not circle_in({name: {*imports(name)} - {name} for name in sources()})


def test_no_room_is_in_a_circle_of_imports() -> None:
    """A file at the top of a package (app, cli, serve) is a room of its own."""

    def room(name: str) -> str:
        return room_of(name) if name.count("/") > 1 else name

    edges: defaultdict[str, set[str]] = defaultdict(set)
    for name in sources():
        edges[room(name)] |= {room(imported) for imported in imports(name)} - {room(name)}
    assert not circle_in(dict(edges))


def test_no_public_class_name_stands_twice_in_a_package() -> None:
    found = defaultdict(list)
    for name, tree in sources().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[name.split("/")[0], node.name].append(name)
    assert not {key: names for key, names in found.items() if len(names) > 1}


def test_every_folder_says_what_it_holds_and_holds_few_files() -> None:
    files = defaultdict(list)
    for name in sources():
        files[room_of(name)].append(name.rpartition("/")[2])
    for folder, names in files.items():
        assert "__init__.py" in names, folder
        assert ast.get_docstring(sources()[f"{folder}/__init__.py"]), folder
        assert len({*names} - {"__init__.py", "__main__.py"}) <= MAX_FILES, folder


def test_every_file_says_what_it_is() -> None:
    for name, tree in sources().items():
        first_line = (ast.get_docstring(tree) or "").partition("\n")[0]
        assert first_line.endswith((".", ":")), name


def test_flower_s_types_stay_in_the_apps_the_grids_and_the_bridge() -> None:
    assert {name for name in importing("flwr") if not name.startswith(MAY_IMPORT_FLOWER)} == set()


def test_private_parts_of_flower_are_imported_in_the_adapters_only() -> None:
    found = {
        name
        for name in importing("flwr")
        if {it for it in imports(name) if it.split(".")[0] == "flwr"} - PUBLIC_FLOWER
    }
    assert found == PRIVATE_FLOWER_FILES


def test_grpc_stays_in_the_transport_folders() -> None:
    assert {name for name in importing("grpc") if not name.startswith(MAY_IMPORT_GRPC)} == set()


def test_prometheus_stays_in_the_exporters() -> None:
    assert importing("prometheus_client") <= METRICS_FILES


def test_the_exporters_are_loaded_only_where_metrics_were_requested() -> None:
    for name, tree in sources().items():
        if name not in METRICS_FILES:
            loaded = {
                path_of(node.module)
                for node in tree.body
                if isinstance(node, ast.ImportFrom) and node.module is not None
            }
            assert not loaded & METRICS_FILES, name


def test_a_device_needs_nothing_heavy() -> None:
    heavy = {"sklearn", "matplotlib", "tensorboard", "ray"}
    for name in sources():
        if name.startswith(("common/", "client/")):
            assert not {imported.split(".")[0] for imported in imports(name)} & heavy, name
