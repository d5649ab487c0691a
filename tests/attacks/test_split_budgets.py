"""One data set under several names, or without its file: a budget belongs to the data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headwater.client.flower.owners_word import as_owner_requires
from headwater.client.privacy.budget import SpentFile
from headwater.common.errors import PrivacyBudgetElsewhere, PrivacyBudgetSpent, StateError
from headwater.common.privacy.spending import epsilon_of
from headwater.common.privacy.terms import rho_of
from headwater.common.settings.sources import load
from tests.client.secagg.cohort import describe
from tests.masked import NodeDevice, plan, train
from tests.processes import Processes

pytestmark = pytest.mark.usefixtures("a_process_of_its_own")

Z, ALLOWED = 2.0, 2
BUDGET = epsilon_of((ALLOWED + 0.5) * rho_of(Z), delta=1e-5)
TASK = """
from tests.tasks import TwoLayers, examples

class Rows(TwoLayers):
    def train_examples(self, *, data, part, num_parts):
        return examples(24, seed=int((data / "rows.csv").read_text()))
"""


def private(round_number: int) -> Any:
    terms = {"norm_bound": 1.0, "noise_multiplier": Z}
    return plan(round_number, privacy=terms, is_masked=False)


def started(folder: Path, name: str, data: str = "data", **privacy: Any) -> NodeDevice:
    """Return a device of this name, with a budget and a state folder that all names share."""
    (folder / "rows.py").write_text(TASK)
    where = folder / data
    where.mkdir(exist_ok=True)
    if not (where / "rows.csv").exists():
        (where / "rows.csv").write_text("1" if data == "data" else "2")
    return NodeDevice(
        0,
        folder / "state",
        task=f"{folder}/rows.py:Rows",
        name=name,
        data=where,
        privacy={"budget": BUDGET, **privacy},
    )


def updates_of(device: NodeDevice) -> int:
    """Return how many updates a device sends until it refuses."""
    for number in range(1, 9):
        try:
            train(device, private(number))
        except PrivacyBudgetSpent:
            return number - 1
    raise AssertionError("it never refuses")


def test_a_budget_is_not_spent_again_under_another_name(tmp_path: Path) -> None:
    assert updates_of(started(tmp_path, "a")) == ALLOWED
    assert updates_of(started(tmp_path, "a")) == 0
    for name in ("b", "c"):
        with pytest.raises(PrivacyBudgetElsewhere, match="in its own log"):
            updates_of(started(tmp_path, name))
    assert updates_of(started(tmp_path, "b", data="other")) == ALLOWED


def test_a_copy_of_the_data_elsewhere_is_the_same_data(tmp_path: Path) -> None:
    assert updates_of(started(tmp_path, "a")) == ALLOWED
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    with pytest.raises(PrivacyBudgetElsewhere):
        updates_of(started(tmp_path, "b", data="copy"))


def test_data_that_have_grown_are_the_same_data(tmp_path: Path) -> None:
    assert updates_of(started(tmp_path, "a")) == ALLOWED
    (tmp_path / "data" / "rows.csv").write_text("3")
    with pytest.raises(PrivacyBudgetElsewhere):
        updates_of(started(tmp_path, "b"))


def test_a_lost_file_needs_the_owner_s_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert updates_of(started(tmp_path, "a")) == ALLOWED
    file = tmp_path / "state" / "a.privacy.json"
    file.unlink()
    with pytest.raises(StateError):
        updates_of(started(tmp_path, "a"))
    with pytest.raises(StateError, match="is lost"):
        SpentFile(file).read()
    assert updates_of(started(tmp_path, "a", new_budget=True)) == ALLOWED
    assert "its owner says that nothing was spent" in caplog.text
    assert updates_of(started(tmp_path, "a", new_budget=True)) == 0


def test_a_lost_file_is_not_escaped_by_another_name(tmp_path: Path) -> None:
    assert updates_of(started(tmp_path, "a")) == ALLOWED
    (tmp_path / "state" / "a.privacy.json").unlink()
    with pytest.raises(StateError):
        updates_of(started(tmp_path, "b"))


def test_a_run_on_supernodes_does_not_give_the_owner_s_word() -> None:
    run = load(None, {"privacy.new_budget": True})
    assert not as_owner_requires(run, {}).privacy.new_budget
    assert as_owner_requires(run, {"new-privacy-budget": True}).privacy.new_budget


def test_a_file_of_an_earlier_version_counts_on(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    file = tmp_path / "state" / "a.privacy.json"
    file.write_text(json.dumps({"rho": rho_of(Z), "num_updates": 1}))
    assert updates_of(started(tmp_path, "a")) == ALLOWED - 1
    assert len(SpentFile(file).read().data) == 2


@pytest.mark.slow
def test_a_client_does_not_start_beside_another_name_s_budget(tmp_path: Path) -> None:
    """Three starts on one folder gave 34 updates where the owner allows eleven."""
    first = started(tmp_path, "a")
    assert updates_of(first) == ALLOWED
    own = ("--data", tmp_path / "data", "--state", tmp_path / "state", "--num-parts", 8)
    flags = ("--privacy-budget", BUDGET, "--server", "127.0.0.1:9", "--no-check")
    task = ("--task", f"{tmp_path}/rows.py:Rows")
    with Processes(tmp_path / "processes") as processes:
        beside = processes.run("client", *own, *flags, *task, "--name", "b")
        (tmp_path / "state" / "a.privacy.json").unlink()
        lost = processes.run("client", *own, *flags, *task, "--name", "a")
    assert "PrivacyBudgetElsewhere" in beside.text()
    assert "start the device with --name a" in " ".join(beside.text().split())
    assert "--new-privacy-budget" in " ".join(lost.text().split())
    assert beside.poll() not in (0, None)
    assert lost.poll() not in (0, None)


def test_a_device_with_a_budget_tells_no_digest_and_holds_nothing_out_by_groups(
    tmp_path: Path,
) -> None:
    """With another group held out each time, the number of the rest was a histogram of a column."""
    device = started(tmp_path, "pi")
    asked = json.loads(describe()) | {"held_out_fraction": 0.5, "held_out": "last"}
    told = json.loads(device.send("query.describe", json.dumps(asked)).head)
    assert (told["num_examples"], told.get("data")) == (24, None)
