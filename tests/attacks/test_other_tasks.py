"""Members of one masked session that train two tasks of one layout, so that one update is bare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.common.errors import PlanMismatch, RoundAborted, TaskMismatch
from headwater.common.user_code.task_spec import code_of, find_task_class
from tests.client.secagg.cohort import describe
from tests.masked import NodeDevice, opening_of, plain_sum, plan, play, ready, sum_of
from tests.processes import Processes, port_of, write_task

pytestmark = pytest.mark.usefixtures("a_process_of_its_own")

TASK = """
from tests.tasks import TwoLayers as Base


class TwoLayers(Base):
    def loss_sum(self, model, batch):
        loss, weight = super().loss_sum(model, batch)
        return loss * {factor}, weight
"""


def installed(folder: Path, part: int, *, factor: int, **settings: Any) -> NodeDevice:
    """Return a device with a file of the task of its own."""
    folder.mkdir()
    (folder / "tasks.py").write_text(TASK.format(factor=factor))
    return NodeDevice(part, folder, task=f"{folder}/tasks.py:TwoLayers", **settings)


@pytest.mark.parametrize("victims_session", [True, False])
def test_members_with_another_task_open_no_bare_update(
    tmp_path: Path, victims_session: bool
) -> None:
    """The others' loss is zero: their sum with the victim's update was that update."""
    cohort = [installed(tmp_path / str(part), part, factor=int(not part)) for part in range(4)]
    for device in cohort:
        ready(device, plan())
    named = cohort[0 if victims_session else 1]
    setup = opening_of(cohort, plan(), task=named.node.trainer.task_code)
    refusing = {"d1", "d2", "d3"} if victims_session else {"d0"}
    try:
        played = play(cohort, setup)
    except RoundAborted:
        assert victims_session  # it would be alone
        return
    assert played.refused.keys() == refusing
    assert all(isinstance(error, PlanMismatch) for error in played.refused.values())
    assert not sum_of(played.sum).any()


def test_one_file_in_two_folders_is_one_task(tmp_path: Path) -> None:
    """Also with the line ends of another system."""
    cohort = [installed(tmp_path / str(part), part, factor=1) for part in range(3)]
    texts = TASK.format(factor=1).replace("\n", "\r\n").encode()
    (tmp_path / "windows").mkdir()
    (tmp_path / "windows" / "tasks.py").write_bytes(texts)
    spec = f"{tmp_path}/windows/tasks.py:TwoLayers"
    cohort.append(NodeDevice(3, tmp_path / "windows", task=spec))
    for device in cohort:
        ready(device, plan())
    sums = sum(plain_sum(part, plan())[0] for part in range(4))
    opened = play(cohort, opening_of(cohort, plan(), task=cohort[0].node.trainer.task_code))
    assert np.array_equal(sum_of(opened.sum), sums)


@pytest.mark.parametrize("masks", ["off", "semi-honest"])
def test_a_device_with_another_file_of_the_task_refuses_by_name(tmp_path: Path, masks: str) -> None:
    device = installed(tmp_path / "0", 0, factor=1, secure={"aggregation": masks})
    other = installed(tmp_path / "1", 1, factor=0).node.trainer.task_code
    own = device.node.trainer.task_code
    assert own in device.send("query.describe", describe(task=own)).head
    with pytest.raises(TaskMismatch, match=f"{other[:22]}.*{own[:22]}"):
        device.send("query.describe", describe(task=other))
    device.send("query.describe", describe())  # a plain run's request


def test_the_bases_of_a_task_are_in_its_code(tmp_path: Path) -> None:
    """And its name: two tasks of one file are two."""
    for name, factor in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "base.py").write_text(TASK.format(factor=factor))
        (tmp_path / name / "tasks.py").write_text(
            "from base import TwoLayers\nclass One(TwoLayers): ...\nclass Two(TwoLayers): ...\n"
        )
    found = {
        code_of(type(NodeDevice(0, tmp_path, task=f"{tmp_path}/{place}").node.trainer.task))
        for place in ("a/tasks.py:One", "b/tasks.py:One", "a/tasks.py:Two", "b/tasks.py:Two")
    }
    assert len(found) == 4


@pytest.mark.slow
def test_a_masked_run_goes_on_without_a_device_that_has_another_file(tmp_path: Path) -> None:
    """And `status` says which code each device runs."""
    task, other = write_task(tmp_path / "one").spec, write_task(tmp_path / "other").spec
    masks = ("--secure-aggregation", "semi-honest")
    plan_flags = ("--accumulation-steps", 2, "--micro-batch-size", 4, "--rounds", 2)
    with Processes(tmp_path / "processes") as processes:
        server = processes.server(*plan_flags, *masks, "--min-clients", 3, task=task)
        port = port_of(server)
        own = ("--num-parts", 4, "--patience", 5)
        refused = processes.client(port, 3, *own, *masks, task=other)
        refused.wait_for("TaskMismatch: 3: the run's task is Task .*, this device has Task ")
        devices = [processes.client(port, part, *own, *masks, task=task) for part in range(3)]
        assert [process.wait() for process in (server, *devices)] == [0] * 4
        out = tmp_path / "processes" / "out"
        status = processes.complete("server", "status", "--out", out, "--json")
    codes = {one["name"]: one["task"] for one in json.loads(status.stdout)["devices"]}
    first = devices[0].wait_for(r"examples, task Task (\w{12}), server").group(1)
    assert all(codes[name].startswith(f"Task {first}") for name in ("0", "1", "2"))
    assert codes["3"] is None  # it took part in no round


def test_two_classes_of_one_function_are_two_tasks(tmp_path: Path) -> None:
    """Both had the digest of their file: one with a loss of zero opened the other's update."""
    (tmp_path / "made.py").write_text(
        "def scaled(factor):\n"
        "    class Task:\n"
        "        def new_model(self): ...\n"
        "        def train_examples(self, *, data, part, num_parts): ...\n"
        "        def loss_sum(self, model, batch): return factor\n"
        "    return Task\n"
        "Real, Zero = scaled(1), scaled(0)\n"
    )
    specs = [f"{tmp_path / 'made.py'}:{name}" for name in ("Real", "Zero")]
    kinds: list[type] = [find_task_class(spec) for spec in specs]
    assert len(set(map(code_of, kinds))) == 2
