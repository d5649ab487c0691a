"""A device's security floor: what it requires of a session, and what it refuses before."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from headwater.client.enrolment.signing_identity import make_identity
from headwater.client.secagg.prepare import checked_metrics, floor_of
from headwater.common.errors import (
    CohortTooSmall,
    IdentityUnknown,
    MaskingRequired,
    MaskingTooWeak,
    TaskError,
)
from headwater.common.settings import schema as settings
from tests.client.secagg.cohort import describe, make_setup
from tests.masked import (
    KEYS,
    TASK,
    AppDevice,
    NodeDevice,
    ask,
    model,
    opening_of,
    plan,
    play,
    ready,
    train,
    trainer,
)

SEMI_HONEST = {"aggregation": "semi-honest"}
ACTIVE = {"aggregation": "active"}
DECLARED = {**SEMI_HONEST, "declared_examples": 24}
pytestmark = pytest.mark.usefixtures("a_process_of_its_own")


# What the device requires.


@pytest.mark.parametrize("chosen", [SEMI_HONEST, ACTIVE])
def test_a_device_that_requires_masking_sends_nothing_in_clear(chosen: dict[str, str]) -> None:
    device = AppDevice(0, secure=chosen)
    before = len(trainer().task.seen)  # type: ignore[attr-defined]
    with pytest.raises(MaskingRequired, match="an update in clear"):
        train(device, plan(is_masked=False))
    held_out = plan(is_masked=False, held_out_fraction=0.25)
    with pytest.raises(MaskingRequired, match="held-out loss"):
        device.send("evaluate", held_out.model_dump_json(), memoryview(model()))
    assert len(trainer().task.seen) == before  # type: ignore[attr-defined]
    assert device.kept() == {}


def test_a_device_that_requires_active_mode_refuses_semi_honest_sessions() -> None:
    cohort = [AppDevice(0, secure=ACTIVE), *(AppDevice(part) for part in (1, 2, 3))]
    for device in cohort:
        ready(device, plan(answer_seconds=0.1))
    played = play(cohort, make_setup(cohort))
    assert isinstance(played.refused["d0"], MaskingTooWeak)
    assert played.sum.survived == ("d1", "d2", "d3")


def test_a_device_refuses_a_session_below_its_own_minimum_of_members() -> None:
    cohort = [AppDevice(0, secure={"min_members": 5}), *(AppDevice(part) for part in (1, 2, 3))]
    for device in cohort:
        ready(device, plan(answer_seconds=0.1))
    played = play(cohort, make_setup(cohort))
    assert isinstance(played.refused["d0"], CohortTooSmall)


def test_the_floor_follows_from_the_device_s_own_settings() -> None:
    chosen = settings.SecureSettings(
        aggregation="active", min_members=7, min_survivors=0.5, corrupted=0.2, dropout=0.3
    )
    floor = floor_of(chosen)
    assert (floor.mode, floor.min_members, floor.min_survivors) == ("active", 7, 0.5)
    assert (floor.corrupted, floor.dropout) == (0.2, 0.3)
    assert floor_of(settings.SecureSettings()).mode == "semi-honest"


def test_identities_come_from_the_files_in_the_node_s_configuration(tmp_path: Path) -> None:
    """Of four devices one has a list that lacks another: it alone refuses the session."""
    identities = {
        f"d{part}": make_identity(tmp_path / f"d{part}", f"d{part}")[0] for part in range(4)
    }
    lines = [identity.line for identity in identities.values()]
    (tmp_path / "whole").write_text("\n".join(lines))
    (tmp_path / "lacking").write_text("\n".join(lines[:3]))
    cohort = []
    for part in range(4):
        allow_list = tmp_path / ("lacking" if part == 0 else "whole")
        secure = {**ACTIVE, "identity": tmp_path / f"d{part}", "allow_list": allow_list}
        device = NodeDevice(part, tmp_path / f"state{part}", task=TASK, secure=secure)
        device.send("query.describe", describe())
        ready(device, plan(answer_seconds=0.1))
        cohort.append(device)
    played = play(cohort, opening_of(cohort, plan(), mode="active"))
    assert {name: type(error) for name, error in played.refused.items()} == {"d0": IdentityUnknown}
    assert played.sum.survived == ("d1", "d2", "d3")


def test_a_device_without_an_identity_takes_no_part_in_active_sessions(tmp_path: Path) -> None:
    device = NodeDevice(0, tmp_path, task=TASK)
    ready(device, plan(answer_seconds=0.1))
    with pytest.raises(MaskingTooWeak, match="identity"):
        ask(device, KEYS.model_copy(update={"mode": "active"}))


# A faulty update is answered as any other, and rides as one of weight 0.


BAD_TASK = """
from tests.tasks import NAN_LOSS, TwoLayers, examples

class Faulty(TwoLayers):
    '''Is faulty on the device of part 0.'''

    def train_examples(self, *, data, part, num_parts):
        self.is_faulty = part == 0
        return super().train_examples(data=data, part=part, num_parts=num_parts)

    def loss_sum(self, model, batch):
        loss, weight = super().loss_sum(model, batch)
        return self.faulty(model, loss, weight) if self.is_faulty else (loss, weight)

class AllBad(TwoLayers):
    def train_examples(self, *, data, part, num_parts):
        return examples(8 if part == 0 else 24, kinds=[NAN_LOSS] * 8 if part == 0 else [])

class Heavy(Faulty):
    def faulty(self, model, loss, weight):
        return loss, 977 * weight

class Steep(Faulty):
    def faulty(self, model, loss, weight):
        return loss + (model[1].bias.sum() - model[1].bias.sum().detach()) * 1e38, weight

class Raising(Faulty):
    def faulty(self, model, loss, weight):
        raise ValueError("a value that must stay on the device")
"""


@pytest.mark.parametrize("task", ["AllBad", "Heavy", "Steep", "Raising"])
def test_a_faulty_update_is_answered_as_any_other_and_adds_nothing(
    task: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cohort = []
    for part in range(4):
        folder = tmp_path / str(part)
        folder.mkdir()
        (folder / "bad_masked.py").write_text(BAD_TASK)
        spec = f"{folder}/bad_masked.py:{task}"
        cohort.append(NodeDevice(part, folder, task=spec, secure=DECLARED))
    trainer = cohort[0].node.trainer
    image = bytes(trainer.image.buffer())
    weight = 24 if task == "Steep" else 8
    more = {"weigh_as": 24} if task == "Steep" else {}
    round_plan = plan(answer_seconds=0.15, **more)
    heads = [json.loads(train(device, round_plan, image).head) for device in cohort]
    assert {tuple(sorted(head.keys() - {"seconds"})) for head in heads} == {
        ("name", "round", "vitals")
    }
    assert "a value that must" not in json.dumps(heads)
    digest = hashlib.sha256(image).digest()
    setup = opening_of(cohort, round_plan, model_digest=digest, task=trainer.task_code)
    played = play(cohort, setup)
    assert not played.refused
    if task == "Steep":  # its coordinates are cut to what can be masked
        assert played.sum.numbers["weight"] == 4 * weight
        return
    assert any("weight 0" in record.getMessage() for record in caplog.records)
    assert played.sum.numbers["weight"] == 3 * weight


def test_a_task_with_more_metrics_than_a_session_has_room_for_is_named() -> None:
    assert checked_metrics({"b": 1.0, "a": 2.0}) == ("a", "b")
    with pytest.raises(TaskError, match="49 metrics"):
        checked_metrics(f"m{number}" for number in range(49))
