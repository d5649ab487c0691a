"""Suspended updates: sessions continue from process to process, and reveal nothing in between."""

from __future__ import annotations

import base64
import hashlib
import logging
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.client.enrolment.signing_identity import make_identity
from headwater.client.flower.state_file import read_sampler
from headwater.client.masked_rounds.suspended_updates import SUSPENDED
from headwater.client.training.sampler import SamplerPosition
from headwater.common.errors import (
    CohortTooSmall,
    MaskingRequired,
    MaskingTooWeak,
    SettingsError,
    StateError,
    SurvivorsChanged,
    TooFewSurvivors,
    UpdateAlreadyMasked,
    UpdateNotHeld,
)
from headwater.common.flower import records
from headwater.common.secagg.hadamard_rotation import Rotation, first_bounds
from headwater.common.secagg.protocol import MaskRequest, SurvivorsRequest, UnmaskRequest
from headwater.common.secagg.secret import Secret
from tests.client.secagg.cohort import describe
from tests.faults import FaultPlan
from tests.masked import (
    ACTIONS,
    KEYS,
    AppDevice,
    Device,
    DeviceReply,
    FlowerDevice,
    ask,
    is_after,
    opening_of,
    plain_sum,
    plan,
    play,
    ready,
    sum_of,
    train,
    trainer,
)

ALL = ("d0", "d1", "d2")


pytestmark = pytest.mark.usefixtures("a_process_of_its_own")


def devices(folder: Path, count: int) -> list[FlowerDevice]:
    return [FlowerDevice(part, folder / str(part)) for part in range(count)]


def enrolled(folder: Path, count: int) -> list[FlowerDevice]:
    """Return devices that have an identity each, and a list of all."""
    lines = [make_identity(folder / f"d{part}.pem", f"d{part}")[0].line for part in range(count)]
    (folder / "list").write_text("\n".join(lines))
    return [
        FlowerDevice(
            part,
            folder / str(part),
            **{"identity": str(folder / f"d{part}.pem"), "allow-list": str(folder / "list")},
        )
        for part in range(count)
    ]


def trained(cohort: list[FlowerDevice]) -> list[FlowerDevice]:
    """Return devices that hold an update of round 1."""
    for device in cohort:
        ready(device, plan())
    return cohort


def place_of(device: Device) -> SamplerPosition:
    return read_sampler(device.kept()["walk"]).place


class Then:
    """A device to which something happens once it has answered."""

    def __init__(self, device: FlowerDevice, then: Callable[[str, DeviceReply], None]) -> None:
        self.name, self.kept = device.name, device.kept
        self._device = device
        self._then = then

    def send(self, kind: str, head: str, vector: memoryview | bytes | None = None) -> DeviceReply:
        sent = self._device.send(kind, head, vector)
        self._then(kind, sent)
        return sent


# The session continues in the next process.


@pytest.mark.parametrize("mode", ["semi-honest", "active"])
def test_the_opened_sum_is_that_of_the_updates(mode: str, tmp_path: Path) -> None:
    expected = [plain_sum(part, plan())[0] for part in range(5)]
    cohort = trained(enrolled(tmp_path, 5))
    faults = FaultPlan().drop(client="d3", after="check_shares")
    opened = play(cohort, opening_of(cohort, plan(), mode=mode), faults).sum
    assert opened.survived == ("d0", "d1", "d2", "d4")
    np.testing.assert_array_equal(sum_of(opened), sum(expected[part] for part in (0, 1, 2, 4)))


def test_a_suspended_16_bit_session_gives_the_same_numbers(tmp_path: Path) -> None:
    num_values = trainer().image.layout.num_parameters
    rotation = Rotation(seed=bytes(range(32)), num_coordinates=num_values)
    bounds = first_bounds(rotation, bound=64.0).tobytes()
    numbers = []
    cohorts: list[list[Any]] = [devices(tmp_path, 3), [AppDevice(part) for part in range(3)]]
    for cohort in cohorts:
        for device in cohort:
            ready(device, plan())
        chosen = opening_of(
            cohort,
            plan(),
            ring_bits=16,
            rotation_seed=rotation.seed,
            bounds_digest=hashlib.sha256(bounds).digest(),
        )
        numbers.append(play(cohort, chosen, bounds=bounds).sum.numbers)
    assert numbers[0] == numbers[1]


def test_an_unmasked_update_may_join_another_session(tmp_path: Path) -> None:
    expected = sum(plain_sum(part, plan())[0] for part in range(4))
    cohort = trained(devices(tmp_path, 4))
    faults = FaultPlan()
    for device in cohort[1:]:
        faults = faults.drop(client=device.name, after="share_keys")
    with pytest.raises(TooFewSurvivors):
        play(cohort, opening_of(cohort, plan()), faults)
    opened = play(cohort, opening_of(cohort, plan(), attempt=2)).sum
    np.testing.assert_array_equal(sum_of(opened), expected)


# No update is masked twice.


@pytest.mark.parametrize("action", [action for action in ACTIONS if action != "consistency"])
def test_a_restarted_supernode_leaves_the_session_and_uses_no_example_twice(
    action: str, tmp_path: Path
) -> None:
    """Once its masked vector is with the server, the others' shares open the sum with it."""
    sums = [plain_sum(part, plan())[0] for part in range(5)]
    cohort = trained(devices(tmp_path, 5))
    fresh = FlowerDevice(0, tmp_path / "0").context_bytes

    def restart(kind: str, _: DeviceReply) -> None:
        if kind == f"query.{action}":
            cohort[0].context_bytes = fresh  # its memory is gone

    played = play([Then(cohort[0], restart), *cohort[1:]], opening_of(cohort, plan()))
    is_masked = not is_after("masked_update", action)
    np.testing.assert_array_equal(sum_of(played.sum), sum(sums[0 if is_masked else 1 :]))
    if action == "unmask":
        assert not played.refused
    else:
        assert isinstance(played.refused["d0"], UpdateNotHeld)
    ready(cohort[0], plan(2))
    assert place_of(cohort[0]) == SamplerPosition(offset=8 if is_masked else 0)


def test_an_old_context_cannot_mask_the_update_again(tmp_path: Path) -> None:
    cohort = trained(devices(tmp_path, 3))
    play(cohort, opening_of(cohort, plan()), until="check_shares")
    before = cohort[0].context_bytes
    assert ask(cohort[0], MaskRequest(members=ALL)).vector is not None
    after = cohort[0].context_bytes
    cohort[0].context_bytes = before
    with pytest.raises(UpdateAlreadyMasked):
        ask(cohort[0], MaskRequest(members=ALL))
    with pytest.raises(UpdateAlreadyMasked):
        ask(cohort[0], KEYS.model_copy(update={"attempt": 2}))
    cohort[0].context_bytes = after
    ask(cohort[0], UnmaskRequest(survived=ALL, dropped=()))


def test_an_old_context_cannot_sign_a_second_survivor_set(tmp_path: Path) -> None:
    cohort = trained(enrolled(tmp_path, 5))
    names = tuple(device.name for device in cohort)
    play(cohort, opening_of(cohort, plan(), mode="active"), until="masked_update")
    before = cohort[0].context_bytes
    ask(cohort[0], SurvivorsRequest(survived=names, dropped=()))
    cohort[0].context_bytes = before
    ask(cohort[0], SurvivorsRequest(survived=names, dropped=()))
    with pytest.raises(SurvivorsChanged):
        ask(cohort[0], SurvivorsRequest(survived=names[:4], dropped=names[4:]))


def test_nothing_is_masked_before_the_record_is_on_disk(tmp_path: Path) -> None:
    cohort = trained(devices(tmp_path, 3))
    play(cohort, opening_of(cohort, plan()), until="check_shares")
    before = cohort[0].path.read_bytes()
    part = cohort[0].path.with_name(cohort[0].path.name + ".part")
    part.mkdir()  # a disk that takes nothing
    with pytest.raises(StateError):
        ask(cohort[0], MaskRequest(members=ALL))
    assert cohort[0].path.read_bytes() == before
    part.rmdir()
    assert ask(cohort[0], MaskRequest(members=ALL)).vector is not None


# Where the update is stored, and for how long.


def test_only_the_owner_reads_the_key_and_the_session_s_end_erases_it(tmp_path: Path) -> None:
    cohort = trained(devices(tmp_path, 3))
    for device in cohort:
        assert [stat.S_IMODE(key.stat().st_mode) for key in device.keys] == [0o600]
    play(cohort, opening_of(cohort, plan()), until="masked_update")
    assert all(len(device.keys) == 1 for device in cohort)
    for device in cohort:
        ask(device, UnmaskRequest(survived=ALL, dropped=()))
        assert device.keys == []
        assert SUSPENDED not in device.context.state
    with pytest.raises(UpdateNotHeld):
        ask(cohort[0], UnmaskRequest(survived=ALL, dropped=()))


def test_the_next_plan_erases_an_aborted_session_s_key(tmp_path: Path) -> None:
    cohort = trained(devices(tmp_path, 3))
    play(cohort, opening_of(cohort, plan()), until="masked_update")
    device, old = cohort[0], cohort[0].keys[0].read_bytes()
    left = device.context_bytes
    train(device, plan(2))
    assert [key.read_bytes() for key in device.keys if key.read_bytes() == old] == []
    assert len(device.keys) == 1
    device.context_bytes = left  # whoever kept a copy has nothing
    with pytest.raises(UpdateNotHeld):
        ask(device, UnmaskRequest(survived=ALL, dropped=()))


def test_a_changed_or_foreign_suspended_session_does_not_open(tmp_path: Path) -> None:
    cohort = trained(devices(tmp_path, 3))
    contexts = [device.context for device in cohort]
    sealed = records.load_bytes(contexts[0], SUSPENDED)
    assert sealed is not None
    changed = bytes([*sealed[:-1], sealed[-1] ^ 1])
    for context, wrong in ((contexts[0], changed), (contexts[1], sealed)):
        records.save_bytes(context, SUSPENDED, wrong)
    for device, context in zip(cohort, contexts, strict=True):
        device.keep(context)
    for device in cohort[:2]:
        with pytest.raises(UpdateNotHeld):
            ask(device, KEYS)
    ask(cohort[2], KEYS)


def test_a_device_without_a_folder_for_keys_refuses_before_it_trains(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    device = FlowerDevice(0, tmp_path, runtime=str(tmp_path / "file"))
    with pytest.raises(StateError):
        ready(device, plan())
    assert trainer().task.seen == []  # type: ignore[attr-defined]


# Nothing is revealed.


def forms(secret: bytes) -> list[bytes]:
    """Return how a secret might be written down."""
    return [
        secret,
        secret.hex().encode(),
        base64.b64encode(secret).rstrip(b"="),
        base64.urlsafe_b64encode(secret).rstrip(b"="),
        repr(secret)[2:-1].encode(),
        repr(list(secret))[1:-1].encode(),
    ]


@pytest.mark.parametrize("mode", ["semi-honest", "active"])
def test_no_secret_appears_in_the_context_a_file_a_log_or_a_message(
    mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    secrets: set[bytes] = set()
    honest = Secret.__init__

    def spying(self: Secret, value: bytes | bytearray | memoryview) -> None:
        if len(value) == 32:
            secrets.add(bytes(value))
        honest(self, value)

    seen: list[bytes] = []
    updates = [plain_sum(part, plan())[0].astype("<f4").tobytes() for part in range(4)]
    cohort = enrolled(tmp_path, 4)

    def looking(device: FlowerDevice) -> Then:
        def look(kind: str, sent: DeviceReply) -> None:
            seen.extend((device.context_bytes, repr(device.context).encode()))
            files = [path for path in device.folder.glob("**/*") if path.is_file()]
            seen.extend(path.read_bytes() for path in files if path not in device.keys)
            if kind != "query.unmask":  # which tells shares, one kind of each dealer
                seen.extend((sent.head.encode(), bytes(sent.vector or b"")))

        return Then(device, look)

    watched = [looking(device) for device in cohort]
    with monkeypatch.context() as spied:
        spied.setattr(Secret, "__init__", spying)
        for device in watched:
            ready(device, plan())
        keys = [device.keys[0].read_bytes() for device in cohort]
        faults = FaultPlan().drop(client="d3", after="check_shares")
        play(watched, opening_of(cohort, plan(), mode=mode), faults)
    assert secrets >= set(keys)
    # A parking key each; two key pairs' seeds, a self seed; shares of the others besides.
    assert len(secrets) > 4 * (1 + 2 + 1 + 2)
    everything = b"\n".join([*seen, caplog.text.encode()])
    for secret in secrets:
        assert not any(form in everything for form in forms(secret))
    for update in updates:
        assert not any(
            update[at : at + 16] in everything
            for at in range(0, len(update) - 16, 4)
            if update[at : at + 16].count(0) < 8  # whole numbers have zeros everywhere
        )


# What the node requires, whatever the run says.


def test_a_node_can_require_more_than_the_run(tmp_path: Path) -> None:
    strict = FlowerDevice(0, tmp_path / "0", **{"secure-aggregation": "active"})
    with pytest.raises(MaskingRequired):
        train(strict, plan(is_masked=False))
    strict.send("query.describe", describe())
    ready(strict, plan(answer_seconds=0.1))
    with pytest.raises(MaskingTooWeak):
        ask(strict, KEYS)
    cohort = [
        FlowerDevice(0, tmp_path / "1", **{"min-members": 5}),
        *(FlowerDevice(part, tmp_path / f"{part}0") for part in (1, 2, 3)),
    ]
    played = play(trained(cohort), opening_of(cohort, plan()))
    assert {n: type(e) for n, e in played.refused.items()} == {"d0": CohortTooSmall}


@pytest.mark.parametrize("wrong", [{"secure-aggregation": "on"}, {"min-members": "many"}])
def test_an_invalid_value_in_the_node_configuration_is_named(
    wrong: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        ready(FlowerDevice(0, tmp_path, **wrong), plan())
