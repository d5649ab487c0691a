"""The core knows no feature, and loads none that is off; how much it loads may only fall."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.laws.features import ALWAYS, KNOWS, LIMITS, OUTER, ROOMS
from tests.laws.test_structure import ROOT, imports, sources
from tests.processes import free_port

# The settings of features, as fields of ``Settings``.
OF_FEATURES = frozenset(
    ("secure", "privacy", "compression", "local", "asynchronous", "algorithm", "rule", "attackers")
)
AT_TEXT = {
    *("client/flower/request.py", "client/flower/state_file.py", "common/model/trained_model.py"),
    *("common/model/bfloat16_weights.py", "common/terms.py", "server/rounds/admission.py"),
}
"""The files of the core that name a feature's place, for what they may meet: an entry of a state
file, an adapter, a dtype of frozen weights, a plan's terms."""
COUNT = """
import atexit, json, sys
def write():
    names = sorted(name for name in sys.modules if name.startswith("headwater."))
    open(sys.argv.pop(), "w").write(json.dumps(names))
atexit.register(write)
from headwater.{module} import main
keep, sys.argv = sys.argv[-1], sys.argv[:-1]
try:
    main()
finally:
    sys.argv.append(keep)
"""


def feature_of(name: str) -> str | None:
    return next((one for one, rooms in ROOMS.items() if name.startswith(rooms)), None)


def core_files() -> list[str]:
    return [
        name
        for name in sources()
        if name.startswith(("common/", "client/", "server/"))
        and feature_of(name) is None
        and not name.startswith(OUTER)
    ]


def found_imports() -> dict[str, list[str]]:
    """Return, by package, the imports of features in files of the core."""
    found: dict[str, list[str]] = {"client": [], "common": [], "server": []}
    for name in core_files():
        for imported in sorted(imports(name)):
            if (feature := feature_of(imported)) is not None:
                found[name.split("/")[0]].append(f"{name} imports {imported} ({feature})")
    return found


def found_reads() -> list[str]:
    """Return the reads of a feature's settings in central files of the server."""
    found = []
    for name in core_files():
        if not name.startswith("server/"):
            continue
        for node in ast.walk(sources()[name]):
            if isinstance(node, ast.Attribute) and node.attr in OF_FEATURES:
                holder = node.value
                last = holder.attr if isinstance(holder, ast.Attribute) else ""
                last = holder.id if isinstance(holder, ast.Name) else last
                if last.lstrip("_") in ("settings", "chosen", "aggregation"):
                    found.append(f"{name}:{node.lineno} reads settings.{node.attr}")
    return found


def check(what: str, found: Sequence[str]) -> None:
    """Compare a number with its limit, and list what was found if it grew."""
    limit = LIMITS[what]
    assert len(found) <= limit, f"{what}: {len(found)} of at most {limit}:\n" + "\n".join(found)
    assert len(found) > limit - 3, f"{what} fell to {len(found)}: write it into LIMITS"


def test_the_core_imports_no_feature() -> None:
    assert found_imports() == {"client": [], "common": [], "server": []}


def test_the_server_s_core_reads_no_feature_s_settings() -> None:
    assert found_reads() == []


def test_features_import_the_core_and_few_others() -> None:
    found: dict[str, set[str]] = {}
    for name in sources():
        for imported in imports(name):
            feature, other = feature_of(name), feature_of(imported)
            if feature and other and feature != other:
                found.setdefault(feature, set()).add(other)
    assert found == KNOWS
    both = {(a, b) for a, others in KNOWS.items() for b in others if a in KNOWS.get(b, ())}
    assert both == {("privacy", "secagg"), ("secagg", "privacy")}


def test_features_are_imported_by_the_core_where_it_says_so_alone() -> None:
    """A place in a text, as ``part_of`` and ``import_module`` take, stands in few files."""
    found = {
        name
        for name, tree in sources().items()
        if name in core_files()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if feature_of(node.value.partition(":")[0].removeprefix("headwater.").replace(".", "/"))
        and node.value.startswith("headwater.")
    }
    assert found == AT_TEXT


def test_each_room_of_a_feature_is_there() -> None:
    for feature, rooms in ROOMS.items():
        for room in rooms:
            assert (ROOT / room).exists(), f"{feature}: {room}"


def modules_of(module: str, arguments: Sequence[object], out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", COUNT.format(module=module), *map(str, arguments), str(out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def modules_in(path: Path) -> list[str]:
    names: list[str] = json.loads(path.read_text())
    loaded = {feature for name in names if (feature := feature_of(file_of(name))) is not None}
    assert loaded <= ALWAYS, "a plain run loads what is off"
    return [name for name in names if has_code(name)]


def has_code(module: str) -> bool:
    """Whether there is anything to read in a module: not in the empty file of a package."""
    name = file_of(module)
    tree = ast.parse((ROOT / (f"{name}__init__.py" if name.endswith("/") else name)).read_text())
    return ast.get_docstring(tree) is None or len(tree.body) > 1


def file_of(module: str) -> str:
    path = module.removeprefix("headwater.").replace(".", "/")
    return f"{path}/" if (ROOT / path).is_dir() else f"{path}.py"


DIGITS = ("--task", ROOT / "examples" / "digits.py:Digits", "--threads", 1)
PLAN = ("--rounds", 2, "--accumulation-steps", 2, "--micro-batch-size", 4)


@pytest.mark.slow
def test_modules_of_a_plain_simulation_only_fall(tmp_path: Path) -> None:
    arguments = (*DIGITS, *PLAN, "--clients", 5, "--out", tmp_path / "out")
    assert modules_of("simulation.cli", arguments, tmp_path / "found").wait(60) == 0
    check("modules, simulation", modules_in(tmp_path / "found"))


@pytest.mark.slow
def test_modules_of_a_server_with_two_clients_only_fall(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    served = ("--listen", address, "--min-clients", 2, "--out", tmp_path / "out")
    running = [modules_of("server.cli", (*DIGITS, *PLAN, *served), tmp_path / "server")]
    for part in range(2):
        where = ("--server", address, "--name", part, "--part", part, "--num-parts", 2)
        state = ("--state", tmp_path / f"state{part}")
        running.append(
            modules_of("client.cli", (*DIGITS, *where, *state, "--once"), tmp_path / f"{part}")
        )
    assert [process.wait(60) for process in running] == [0, 0, 0]
    check("modules, server", modules_in(tmp_path / "server"))
    check("modules, client", modules_in(tmp_path / "0"))
