"""A feature whose folders are gone: a plain run has the same bits, and its flag is refused by name.

What says its settings stays: its flags are known, and refused by name.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.laws.bare_process import BareProcess
from tests.laws.features import ALWAYS, ROOMS
from tests.laws.test_structure import ROOT

PACKAGES = ("common", "client", "server", "simulation", "aggregator")
PLAIN = (
    *("--task", "examples/digits.py:Digits", "--clients", "3", "--rounds", "2", "--threads", "1"),
    *("--accumulation-steps", "2", "--micro-batch-size", "8", "--optimizer", "sgd"),
)
# The features that can be taken out, with flags that turn them on in the simulator. All but what a
# device gives less on battery (``energy``), which acts in each run as its settings are by default.
FLAGS: dict[str, tuple[str, ...]] = {
    "robust": ("--aggregation", "median"),
    "selection": ("--best", "accuracy"),
    "tracking": ("--track", "mlflow"),
    "privacy": ("--privacy-noise-multiplier", "1"),
    "secagg": ("--secure-aggregation", "semi-honest"),
    "asynchronous": ("--asynchronous",),
    "succession": (),
    "tree": ("--aggregators", "2"),
    "growing_data": (),
    "offline": (),
    "overlap": (),
    "standby": (),
    "enrolment": (),
    "page": (),
    "frozen": (),
    "compression": ("--compress", "int8"),
    "local_training": ("--local-steps", "2"),
    "batch_scaling": ("--batch-scaling", "sqrt"),
    "local_state": ("--algorithm", "scaffold"),
    "own_parameters": ("--local-parameters", "*.bias"),
    "own_feature": ("--feature", "examples/extensions/scaffold.py:Scaffold"),
    "adaptation": (),
    "alerts": (),
    "device_labels": (
        *("--devices", "site=lab"),
        *("--fleet", str(ROOT / "tests" / "laws" / "labelled_fleet.toml")),
    ),
    "task_bundles": (),
    "samples": (),
    "statistics": ("--statistics",),
    "evaluation": ("--test-model", "out"),
}


def test_every_feature_can_be_taken_out() -> None:
    assert ROOMS.keys() - FLAGS.keys() <= ALWAYS


def copy_without(gone: tuple[str, ...], target: Path) -> Path:
    """Copy the packages but for some rooms, with links to the files and their bytecode."""
    for package in (*PACKAGES, "examples"):
        for path in (ROOT / package).rglob("*"):
            name = str(path.relative_to(ROOT))
            is_being_written = path.suffix[1:].isdigit()  # bytecode, by another process
            if path.is_dir() or name.startswith(gone) or is_being_written:
                continue
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target / name)
    shutil.copytree(ROOT / "headwater", target / "headwater", symlinks=True)
    return target


@pytest.mark.slow
@pytest.mark.parametrize("feature", FLAGS)
def test_a_plain_run_does_without_a_feature_s_folders(
    feature: str, tmp_path: Path, whole: Path, bare: BareProcess
) -> None:
    plain = (*PLAIN, "--out", str(tmp_path / "out"))
    done = bare.simulate(copy_without(ROOMS[feature], tmp_path), plain)
    assert done.returncode == 0, done.stderr
    found, expected = (load_file(one / "out" / "model.safetensors") for one in (tmp_path, whole))
    assert all((found[name] == expected[name]).all() for name in expected)
    if FLAGS[feature]:
        shutil.rmtree(tmp_path / "out")
        refused = bare.simulate(tmp_path, (*plain, *FLAGS[feature]))
        assert refused.returncode != 0
        assert "FeatureMissing" in refused.stderr
        assert "Traceback" not in refused.stderr
        assert f".{feature}" in refused.stderr


@pytest.fixture(scope="module")
def bare() -> Iterator[BareProcess]:
    with BareProcess() as process:
        yield process


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, bare: BareProcess) -> Path:
    """The folder of the plain run with everything."""
    folder = tmp_path_factory.mktemp("whole")
    done = bare.simulate(copy_without((), folder), (*PLAIN, "--out", str(folder / "out")))
    assert done.returncode == 0, done.stderr
    return folder
