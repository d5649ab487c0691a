"""Python knows the project as ``headwater`` and nothing else, however it is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import headwater
from tests.venvs import ROOT

ROOMS = ("aggregator", "client", "common", "server", "simulation")
# To read torch's types too takes six times as long.
OUR_TYPES_ALONE = """
[mypy]
follow_imports = skip
[mypy-headwater.*]
follow_imports = normal
[mypy-numpy.*]
follow_imports_for_stubs = true
"""
WITHOUT_BYTECODE = shutil.ignore_patterns("__pycache__")  # another process may be writing it
RUN = ("--rounds", "2", "--clients", "3", "--accumulation-steps", "2", "--threads", "1")

# A user's application whose folders and files have the names of ours.
USER_APP = {
    "common.py": "SCALE = 2.0\n\n\ndef scale(loss):\n    return loss * SCALE\n",
    "simulation.py": "NUM_INPUTS = 3\n",
    "client/__init__.py": "",
    "client/net.py": "from torch import nn\n\nfrom simulation import NUM_INPUTS\n\n\n"
    "def net():\n    return nn.Linear(NUM_INPUTS, 2)\n",
    "server/__init__.py": "",
    "server/data.py": "import torch\nfrom torch.utils.data import TensorDataset\n\n\n"
    "def rows(part):\n    random = torch.Generator().manual_seed(part)\n"
    "    inputs = torch.randn(40, 3, generator=random)\n"
    "    return TensorDataset(inputs, (inputs.sum(1) > 0).long())\n",
    "my_task.py": "from torch.nn.functional import cross_entropy\n\n"
    "from client.net import net\nfrom common import scale\nfrom server.data import rows\n\n\n"
    "class MyTask:\n"
    "    def new_model(self):\n        return net()\n\n"
    "    def train_examples(self, *, data, part, num_parts):\n        return rows(part)\n\n"
    "    def loss_sum(self, model, batch):\n        inputs, labels = batch\n"
    '        loss = cross_entropy(model(inputs), labels, reduction="sum")\n'
    "        return scale(loss), len(labels)\n",
    "client/app.py": "from headwater.client.flower.gradient_sum import GradientSum\n"
    "from server.app import STRATEGY\n\nPARTS = (GradientSum, STRATEGY)\n",
    "server/app.py": "from headwater.server.flower.sum_of_gradients import SumOfGradients\n\n"
    "STRATEGY = SumOfGradients\n",
}


@dataclass(frozen=True, kw_only=True)
class Installed:
    """A wheel, and an environment that has it beside its dependencies."""

    wheel: Path
    bin: Path

    def run(
        self, *command: str, folder: Path, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run one of its commands in a folder; it must succeed."""
        done = subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd=folder,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module")
def installed(wheel_folder: Path) -> Installed:
    [wheel] = wheel_folder.glob("headwater-*.whl")
    return Installed(wheel=wheel, bin=wheel_folder / "venv" / "bin")


@pytest.fixture
def user_app(tmp_path: Path) -> Path:
    for name, text in USER_APP.items():
        path = tmp_path / "app" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "app"


def test_the_version_is_that_of_the_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert headwater.__version__ == project["version"]


def test_no_room_can_be_imported_without_the_project_s_name() -> None:
    """From another folder; in the checkout itself Python finds every folder that lies there."""
    imports = "\n".join(
        f"try: import {room}\nexcept ImportError: pass\nelse: raise SystemExit({room!r})"
        for room in ROOMS
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import headwater.common\n{imports}"], cwd="/", capture_output=True
    )
    assert done.returncode == 0, done


@pytest.mark.parametrize("side", ["client", "server", "simulation"])
def test_each_command_runs_as_a_module_of_the_checkout(side: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"headwater.{side}", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["headwater", headwater.__version__]


@pytest.mark.slow
def test_a_checkout_without_symbolic_links_runs_too(tmp_path: Path) -> None:
    """As git makes it on Windows, where each link is a file that holds the link's target."""
    package = tmp_path / "headwater"
    package.mkdir()
    shutil.copy(ROOT / "headwater" / "__init__.py", package)
    for room in ROOMS:
        (package / room).write_text(f"../{room}")
        shutil.copytree(ROOT / room, tmp_path / room, ignore=WITHOUT_BYTECODE)
    code = f"import headwater.server.cli as it; assert it.__file__.startswith({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("has_project", [True, False])
def test_the_version_is_that_of_the_files_that_run(
    tmp_path: Path, installed: Installed, has_project: bool
) -> None:
    """A Flower bundle has its project file; a wheel has none, or another project's beside it."""
    name, version = ("headwater", "7.8.9") if has_project else ("other", headwater.__version__)
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "{name}"\nversion = "7.8.9"\n')
    (tmp_path / "headwater").mkdir()
    shutil.copy(ROOT / "headwater" / "__init__.py", tmp_path / "headwater")
    done = installed.run(
        "python", "-c", "import headwater as it; print(it.__version__)", folder=tmp_path
    )
    assert done.stdout.split() == [version]


@pytest.mark.slow
def test_the_wheel_adds_one_name_to_site_packages(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = wheel.namelist()
    version = headwater.__version__
    assert {name.split("/")[0] for name in names} == {
        "headwater",
        f"headwater-{version}.dist-info",
    }
    assert {
        "headwater/py.typed",
        "headwater/common/transport/wire_pb2.py",
        "headwater/examples/digits.py",
        *(f"headwater/{room}/__init__.py" for room in ROOMS),
    } <= set(names)
    assert not any(set(Path(name).parts) & {"tests", "benchmarks", "deploy"} for name in names)


@pytest.mark.slow
def test_the_environment_of_the_wheel_has_headwater_from_the_wheel(
    installed: Installed, tmp_path: Path
) -> None:
    """What it does there is in ``test_try_it``."""
    done = installed.run(
        "python", "-c", "import headwater; print(*headwater.__path__)", folder=tmp_path
    )
    assert done.stdout.startswith(str(installed.bin.parent))


@pytest.mark.slow
def test_a_user_s_app_keeps_its_own_client_server_common_and_simulation(
    installed: Installed, user_app: Path
) -> None:
    """The folder is not on the path, on it by PYTHONPATH, and on it as that of a module."""
    task = ("--task", "my_task.py:MyTask", *RUN)
    by_path = {"PYTHONPATH": str(user_app)}
    installed.run("headwater-simulate", *task, "--out", "command", folder=user_app)
    installed.run("headwater-simulate", *task, "--out", "by_path", folder=user_app, **by_path)
    installed.run(
        *("python", "-m", "headwater.simulation", *task, "--out", "module"), folder=user_app
    )
    models = {
        (user_app / out / "model.safetensors").read_bytes()
        for out in ("command", "by_path", "module")
    }
    assert len(models) == 1


@pytest.mark.slow
def test_a_user_s_task_finds_its_neighbours_though_the_checkout_is_the_working_folder(
    user_app: Path,
) -> None:
    """The checkout has folders of these names too, and Python looks there first."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "headwater.simulation"),
            *("--task", f"{user_app / 'my_task.py'}:MyTask", *RUN, "--out", user_app / "out"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_flower_app_keeps_its_own_client_and_server(installed: Installed, user_app: Path) -> None:
    code = "import client.app as it; print(it.__file__, *(part.__name__ for part in it.PARTS))"
    done = installed.run("python", "-c", code, folder=user_app)
    assert done.stdout.split() == [
        str(user_app / "client" / "app.py"),
        "GradientSum",
        "SumOfGradients",
    ]


@pytest.mark.slow
def test_a_type_checker_sees_the_types_of_the_wheel(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import headwater\nfrom headwater.common.estimates.linear_fit import Line\n\n"
        "reveal_type(headwater.__version__)\nreveal_type(Line(base=1.0, each=2.0).at(3))\n"
    )
    (tmp_path / "mypy.ini").write_text(OUR_TYPES_ALONE)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache"),
            *("--python-executable", installed.bin / "python", "mine.py"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    revealed = re.findall(r'Revealed type is "(?:builtins\.)?(\w+)"', done.stdout)
    assert revealed == ["str", "float"], done.stdout + done.stderr
