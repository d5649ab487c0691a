"""The node: it writes the state file before it answers, shows no secret and erases old ones."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from headwater.client.enrolment.signing_identity import make_identity
from headwater.client.node_features import NodeAnswer
from headwater.client.secagg.pending import pending_in
from headwater.client.secagg.session import SecureSession
from headwater.common.errors import OlderTerm, SessionReplayed, StateError, UpdateNotHeld
from headwater.common.flower import records
from headwater.common.secagg.protocol import MaskRequest
from tests.attacks.test_secagg_secrets import forms
from tests.client.secagg.cohort import describe
from tests.masked import (
    KEYS,
    RUN,
    TASK,
    AppDevice,
    Device,
    DeviceReply,
    NodeDevice,
    ask,
    opening_of,
    plan,
    play,
    ready,
    train,
    trainer,
)

NAMES = ("d0", "d1", "d2")


pytestmark = pytest.mark.usefixtures("a_process_of_its_own")


class Disk:
    """A state folder that can be taken away, and put back as it was."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def take_away(self) -> None:
        """Put a file in the folder's place: nothing can be written below it, not by root either."""
        if self.folder.exists():
            self.folder.rename(self.folder.with_suffix(".away"))
        self.folder.touch()

    def put_back(self) -> None:
        self.folder.unlink()
        if self.folder.with_suffix(".away").exists():
            self.folder.with_suffix(".away").rename(self.folder)


class Failing:
    """A device whose disk fails whenever a message of some kind comes for the first time."""

    def __init__(self, device: NodeDevice, kinds: set[str], disk: Disk) -> None:
        self.name = device.name
        self.kept = device.kept
        self.num_failed = 0
        self._device = device
        self._kinds = set(kinds)
        self._disk = disk

    def send(self, kind: str, head: str, vector: memoryview | bytes | None = None) -> DeviceReply:
        before = None
        if kind in self._kinds:
            self._kinds.remove(kind)
            self._disk.take_away()
            answer = self._device.answer(kind, head, vector)
            self._disk.put_back()
            assert isinstance(answer.error, StateError)
            assert (answer.head_json, bytes(answer.vector)) == ("", b"")
            assert str(self._disk.folder) not in answer.error.message  # it travels
            self.num_failed += 1
            before = self._device.kept()
        sent = self._device.send(kind, head, vector)
        assert before is None or self._device.kept() != before
        return sent


def test_nothing_is_answered_before_it_is_on_disk(tmp_path: Path) -> None:
    """Each message that changes what the device keeps is refused while the disk fails.

    When there is room again, the same message is answered, and the session goes on.
    """
    kinds = {"train", "query.advertise_keys", "query.masked_update", "query.unmask"}
    disk = Disk(tmp_path / "state")
    device = Failing(NodeDevice(0, disk.folder), kinds, disk)
    cohort: list[Device] = [device, AppDevice(1), AppDevice(2)]
    for one in cohort:
        ready(one, plan())
    played = play(cohort, opening_of(cohort, plan()))
    assert device.num_failed == len(kinds)
    assert not played.refused
    assert played.sum.survived == NAMES


def test_the_state_file_holds_the_state_of_the_last_answer(tmp_path: Path) -> None:
    device = NodeDevice(0, tmp_path)
    assert not device.path.exists()
    cohort: list[Device] = [device, AppDevice(1), AppDevice(2)]
    for one in cohort:
        ready(one, plan())
    walk = device.kept()["walk"]
    assert (walk["place"]["offset"], walk["pending_place"]["offset"]) == (0, 8)
    assert "secure" not in device.kept()
    played = play(cohort, opening_of(cohort, plan()), until="share_keys")
    assert device.kept()["secure"] == {
        "highest": {"round": 1, "attempt": 1},
        "masked": None,
        "answered": None,
    }
    played = play(cohort, opening_of(cohort, plan(), attempt=2))
    kept = device.kept()
    assert kept["secure"]["highest"] == {"round": 1, "attempt": 2}
    assert kept["secure"]["masked"] is not None
    assert kept["secure"]["answered"][0] == played.sum.session.digest.hex()
    assert kept["walk"]["place"]["offset"] == 8


def test_the_next_process_remembers_the_highest_session(tmp_path: Path) -> None:
    device = NodeDevice(0, tmp_path)
    ready(device, plan())
    ask(device, KEYS.model_copy(update={"attempt": 3}))
    again = NodeDevice(0, tmp_path, task=f"././{TASK}")
    ready(again, plan())
    for attempt in (1, 3):
        with pytest.raises(SessionReplayed):
            ask(again, KEYS.model_copy(update={"attempt": attempt}))
    ask(again, KEYS.model_copy(update={"attempt": 4}))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"walk": {}}', '{"other": {}}', '{"secure": {"highest": 1}}']
)
def test_an_unreadable_state_file_stops_the_device(text: str, tmp_path: Path) -> None:
    (tmp_path / f"d0-{RUN}.json").write_text(text)
    with pytest.raises(StateError) as caught:
        NodeDevice(0, tmp_path)
    assert "which of its updates were masked" in caught.value.remedy


def test_an_unchanged_state_is_not_written_again(tmp_path: Path) -> None:
    device = NodeDevice(0, tmp_path)
    train(device, plan(is_masked=False))
    before = device.path.stat().st_ino
    train(device, plan(is_masked=False))
    assert device.path.stat().st_ino == before


# Secrets.


class Watched:
    """A device whose secrets are noted after each message, as a debugger would see them."""

    def __init__(self, device: Device, secrets: dict[str, bytes]) -> None:
        self.name = device.name
        self.kept = device.kept
        self.shown: list[str] = []
        self._device = device
        self._secrets = secrets

    def send(self, kind: str, head: str, vector: memoryview | bytes | None = None) -> DeviceReply:
        sent = self._device.send(kind, head, vector)
        session = session_of(self._device)
        for number, secret in enumerate(session.state.secrets() if session.state else ()):
            if not secret.is_erased:
                key = f"{self.name} {type(session.state).__name__} {number}"
                self._secrets[key] = bytes(secret.reveal())
        self.shown += [repr(session), repr(vars(session)), json.dumps(self.kept())]
        return sent


def session_of(device: Device) -> SecureSession:
    own = device.node.trainer if isinstance(device, NodeDevice) else trainer()
    return pending_in(own.accumulator).get(RUN, device.name)


def test_no_secret_appears_in_a_log_state_file_context_or_repr(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for part in range(4):
        make_identity(tmp_path / f"key{part}", f"d{part}")
    lines = [make_identity(tmp_path / f"key{part}", f"d{part}")[0].line for part in range(4)]
    (tmp_path / "allow-list").write_text("\n".join(lines))
    secrets: dict[str, bytes] = {}
    watched: list[Watched] = []
    for part in range(4):
        secure = {
            "aggregation": "active",
            "identity": tmp_path / f"key{part}",
            "allow_list": tmp_path / "allow-list",
        }
        task = "/".join([".", *["."] * part, TASK])
        node = NodeDevice(part, tmp_path / "state", task=task, secure=secure)
        node.send("query.describe", describe())
        ready(node, plan(answer_seconds=0.1))
        watched.append(Watched(node, secrets))
        secrets[f"{node.name} identity"] = b"".join(
            (tmp_path / f"key{part}").read_bytes().splitlines()[1:-1]
        )
    played = play(watched, opening_of(watched, plan(), mode="active"))
    assert played.sum.survived == ("d0", "d1", "d2", "d3")
    # Keys twice for each device, a self seed, and two shares of each other one.
    assert len(set(secrets.values())) >= 4 * (3 + 2 * 3)
    shown = [text for device in watched for text in device.shown] + [caplog.text]
    shown += [path.read_text() for path in (tmp_path / "state").iterdir()]
    assert len(shown) > 4 * 6
    for secret in secrets.values():
        for form in [*forms(secret), secret.decode("latin-1")]:
            assert not any(form in text for text in shown)


def test_secrets_are_erased_at_a_new_plan_and_on_leaving_the_run(tmp_path: Path) -> None:
    device = NodeDevice(0, tmp_path)
    for end in (
        lambda: ready(device, plan()),
        lambda: train(device, plan(2)),
        device.node.leave,
        lambda: device.node.enter(RUN + 1),
    ):
        ready(device, plan())
        kept = device.kept().get("secure")
        attempt = 1 if kept is None else kept["highest"]["attempt"] + 1
        ask(device, KEYS.model_copy(update={"attempt": attempt}))
        state = session_of(device).state
        assert state is not None
        secrets = list(state.secrets())
        assert secrets
        assert not any(secret.is_erased for secret in secrets)
        end()
        assert all(secret.is_erased for secret in secrets)


def test_leaving_the_run_discards_the_update(tmp_path: Path) -> None:
    device = NodeDevice(0, tmp_path)
    assert not device.node.is_waiting
    ready(device, plan())
    assert device.node.is_waiting
    device.node.leave()
    assert not device.node.is_waiting
    with pytest.raises(UpdateNotHeld):
        ask(device, KEYS)


def test_a_device_awaits_its_session_until_its_last_answer(tmp_path: Path) -> None:
    device = NodeDevice(0, tmp_path)
    cohort: list[Device] = [device, AppDevice(1), AppDevice(2)]
    for one in cohort:
        ready(one, plan())
    play(cohort, opening_of(cohort, plan()), until="masked_update")
    assert device.node.is_waiting
    play(cohort, opening_of(cohort, plan(), attempt=2), until="advertise_keys")
    assert not device.node.is_waiting  # it refused: its update is spent


def test_a_masked_vector_is_sent_as_a_view_of_the_accumulator(
    tmp_path: Path,
) -> None:
    device = NodeDevice(0, tmp_path)
    cohort: list[Device] = [device, AppDevice(1), AppDevice(2)]
    for one in cohort:
        ready(one, plan())
    play(cohort, opening_of(cohort, plan()), until="masked_update")
    sent = ask(device, MaskRequest(members=NAMES))
    memory = device.node.trainer.accumulator.values_P.numpy().data.cast("B")
    assert isinstance(sent.vector, memoryview)
    assert sent.vector == memory
    memory[0] = (memory[0] + 1) % 256
    assert sent.vector == memory


def test_a_record_survives_the_context() -> None:
    device = AppDevice(0)
    ready(device, plan())
    ask(device, KEYS)
    assert records.load_state(device.context, "secure") == {
        "highest": {"round": 1, "attempt": 1},
        "masked": None,
        "answered": None,
    }


def test_a_device_that_has_met_a_later_server_refuses_an_older_one(tmp_path: Path) -> None:
    device = NodeDevice(0, folder=tmp_path)
    device.node.enter(RUN, term=2)
    device.node.enter(RUN, term=2)
    for term in (0, 1):
        with pytest.raises(OlderTerm, match="has met term 2"):
            device.node.enter(RUN, term=term)
    device.node.enter(RUN + 1, term=1)  # another run
    device.node.enter(RUN, term=3)
    with pytest.raises(OlderTerm, match="term 0 of the run, and this device has met term 3"):
        NodeDevice(0, folder=tmp_path)  # the device's process starts again


@pytest.mark.parametrize(
    ("changes", "may"),
    [
        ({}, True),
        ({"round": 6}, False),  # the update is the sum of an earlier plan
        ({"max_windows": 1}, False),
        ({"compression": {"method": "int8"}}, False),
    ],
)
def test_a_device_adds_windows_only_to_a_whole_update_of_its_own_plan(
    tmp_path: Path, changes: dict[str, Any], may: bool
) -> None:
    node = NodeDevice(0, tmp_path, asynchronous={"offline_windows": 5}).node
    answer = NodeAnswer(message_id="m", head_json='{"round": 5, "steps": []}')
    chosen = plan(5, **{"is_masked": False, "max_windows": 5, **changes})
    further = node.no_link(chosen.model_dump_json(exclude_none=True), answer)
    assert (further is not None) == may


def test_a_device_that_loses_its_link_in_a_secure_phase_adds_no_window(tmp_path: Path) -> None:
    node = NodeDevice(0, tmp_path, asynchronous={"offline_windows": 5}).node
    answer = NodeAnswer(message_id="m", head_json='{"name": "0", "scalars": ""}')
    assert node.no_link('{"members": ["0", "1", "2"]}', answer) is None
