"""A device in masked rounds: what leaves it, what it insists on, and which examples are spent."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.app import client_app
from client.device import ThisMachine
from client.enrolment import make_identity
from client.growth import Speed
from client.kept import pace_of
from client.micro_batches import Place, Walk, Window
from client.resident import resident_of
from client.secure_work import floor_of, update_id
from client.workplace import Workplace
from common import pace, settings
from common.errors import (
    CohortTooSmall,
    CorruptUpdate,
    CountOutOfRange,
    EmptyUpdate,
    HeadwaterError,
    IdentityUnknown,
    MaskingRequired,
    MaskingTooWeak,
    NonFiniteUpdate,
    OutOfPhase,
    SessionMismatch,
    TaskError,
    TooFewSurvivors,
    UpdateAlreadyMasked,
    UpdateNotHeld,
)
from common.fixed_point import decode_mean
from common.line import Line
from common.masked_numbers import LOSS, NUM_EXAMPLES
from common.rotation import STEPS, Rotation, first_bounds, unrotate_in_place
from common.secagg import (
    NUM_CLIPPED,
    WEIGHT,
    KeysWanted,
    MaskWanted,
    SharesDelivered,
    SurvivorsTold,
    UnmaskWanted,
)
from common.update import DescribeRequest, Plan, Ready, Step
from server.secure_opening import Opening
from tests.faults import FaultPlan
from tests.masked import (
    ACTIONS,
    RUN,
    TASK,
    AppDevice,
    Device,
    NodeDevice,
    Told,
    ask,
    is_behind,
    model,
    opening_of,
    plain_sum,
    plan,
    play,
    ready,
    resident,
    sum_of,
    train,
)
from tests.workplaces import FakeClock

SEMI_HONEST = {"aggregation": "semi-honest"}
ACTIVE = {"aggregation": "active"}


@pytest.fixture(autouse=True)
def a_process_of_its_own() -> Iterator[None]:
    """Each test begins without updates, and without what another learned of the task."""
    resident_of.cache_clear()
    yield
    resident_of.cache_clear()


def devices(count: int = 4, **chosen: Any) -> list[AppDevice]:
    return [AppDevice(part, **chosen) for part in range(count)]


def trained(count: int = 4, **chosen: Any) -> list[AppDevice]:
    """Return devices that hold an update of round 1."""
    found = devices(count, **chosen)
    for device in found:
        ready(device, plan())
    return found


def opening(cohort: list[AppDevice], **chosen: Any) -> Opening:
    return opening_of(cohort, plan(), **chosen)


# What leaves the device.


def test_a_masked_plan_is_answered_with_readiness_alone() -> None:
    told = train(AppDevice(0), plan())
    assert told.vector is None
    assert json.loads(told.head).keys() <= set(Ready.model_fields)
    clear = train(AppDevice(0), plan(is_masked=False))
    assert clear.vector is not None
    hidden = {"num_examples", "weight", "loss_sum", "metric_sums", "steps", "num_left"}
    assert hidden & json.loads(clear.head).keys()
    assert not hidden & json.loads(told.head).keys()


@pytest.mark.parametrize("mode", ["semi-honest", "active"])
def test_the_opened_sum_is_that_of_the_updates(mode: str) -> None:
    expected = [plain_sum(part, plan()) for part in range(5)]
    cohort = trained(5)
    faults = FaultPlan().drop(client="d3", after="check_shares")
    opened = play(cohort, opening(cohort, mode=mode), faults).sum
    assert opened.survived == ("d0", "d1", "d2", "d4")
    there = [expected[part] for part in (0, 1, 2, 4)]
    np.testing.assert_array_equal(sum_of(opened), sum(values for values, _ in there))
    assert opened.numbers[WEIGHT] == sum(report.weight for _, report in there)
    assert opened.numbers[NUM_EXAMPLES] == sum(report.num_examples for _, report in there)
    assert opened.numbers[LOSS] == sum(report.loss_sum for _, report in there)
    assert opened.numbers[NUM_CLIPPED] == 0


def test_the_norm_and_the_noise_ride_masked() -> None:
    expected = [plain_sum(part, plan()) for part in range(3)]
    cohort = trained(3)
    numbers = play(cohort, opening(cohort)).sum.numbers
    squared = sum(float(values @ values) for values, _ in expected)
    # The norms are float64 sums of float32 products, each rounded to float32 at the end.
    assert numbers["squared_norm"] == pytest.approx(squared, rel=2.0**-21)
    assert numbers["noise.measured_weight"] == 24
    local = plan(local_steps=2)
    for device in cohort:
        ready(device, local)
    again = play(cohort, opening(cohort, attempt=2)).sum.numbers
    assert {value for name, value in again.items() if name.startswith("noise.")} == {0.0}


def test_a_sum_scaled_to_what_a_device_owns_is_masked_as_such() -> None:
    asked = plan(weigh_as=24)
    expected = [plain_sum(part, asked)[0] for part in range(3)]
    cohort = devices(3)
    for device in cohort:
        ready(device, asked)
    opened = play(cohort, opening_of(cohort, asked)).sum
    np.testing.assert_array_equal(sum_of(opened), sum(expected))
    assert (opened.numbers[WEIGHT], opened.numbers["summed_weight"]) == (72, 24)


def test_a_ring_of_sixteen_bits_takes_its_bounds_from_beside_the_message() -> None:
    expected = sum(plain_sum(part, plan())[0] for part in range(3))
    num_values = resident().image.layout.num_parameters
    rotation = Rotation(seed=bytes(range(32)), num_coordinates=num_values)
    bounds = first_bounds(rotation, bound=64.0)
    cohort = trained(3)
    chosen = opening(
        cohort, ring_bits=16, rotation_seed=rotation.seed, bounds_digest=_digest(bounds.tobytes())
    )
    opened = play(cohort, chosen, bounds=bounds.tobytes()).sum
    assert opened.numbers[NUM_CLIPPED] == 0
    mean_P = decode_mean(opened.vector_P, encoding=opened.session.parameters.encoding, weight=24)
    unrotate_in_place(mean_P, rotation=rotation, bounds=bounds, max_weight=24)
    # Each of 3 devices is off by less than a step of its 32,767 in each rotated coordinate.
    step = 64.0 / STEPS
    assert np.linalg.norm(mean_P - expected / 24) < 3 * step * math.sqrt(num_values) * 1.001


@pytest.mark.parametrize(
    ("beside", "error"),
    [(None, SessionMismatch), (bytes(8), SessionMismatch), (b"abc", CorruptUpdate)],
)
def test_bounds_that_are_not_those_agreed_on_mask_nothing(
    beside: bytes | None, error: type[Exception]
) -> None:
    num_values = resident().image.layout.num_parameters
    bounds = first_bounds(Rotation(seed=bytes(32), num_coordinates=num_values))
    cohort = trained(3)
    chosen = opening(
        cohort, ring_bits=16, rotation_seed=bytes(32), bounds_digest=_digest(bounds.tobytes())
    )
    played = play(cohort, chosen, bounds=beside, until="masked_update")
    assert {type(found) for found in played.refused.values()} == {error}
    assert all(place_of(device) == Place() for device in cohort)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def place_of(device: Device) -> Place:
    """Return where the device's next window begins, if its pending round does not count."""
    return Place(**device.kept()["walk"]["place"])


# Whose memory it lies in.


class Between:
    """A device to which something happens once it has answered an action."""

    def __init__(self, device: Device, action: str, then: Callable[[Told], object]) -> None:
        self.name = device.name
        self.device = device
        self.kept = device.kept
        self._kind = f"query.{action}"
        self._then = then

    def send(self, kind: str, head: str, vector: memoryview | bytes | None = None) -> Told:
        told = self.device.send(kind, head, vector)
        if kind == self._kind:
            self._then(told)
        return told


def test_an_update_is_masked_where_it_was_summed_unless_another_device_needs_the_memory() -> None:
    seen: list[bool] = []

    def look(told: Told) -> None:
        assert told.vector is not None
        masked = np.frombuffer(told.vector, np.uint8)
        seen.append(np.shares_memory(masked, resident().accumulator.values_P.numpy()))

    cohort = [Between(device, "masked_update", look) for device in trained(3)]
    play(cohort, opening_of(cohort, plan()))
    assert seen == [False, False, True]


def test_a_probe_in_mid_session_leaves_the_update_as_it_was() -> None:
    expected = sum(plain_sum(part, plan())[0] for part in range(3))
    cohort = trained(3)
    last = Between(
        cohort[2], "check_shares", lambda told: cohort[2].send("query.describe", describe())
    )
    played = play([*cohort[:2], last], opening(cohort))
    np.testing.assert_array_equal(sum_of(played.sum), expected)


def test_a_probe_behind_the_masks_leaves_the_masked_vector_as_it_was() -> None:
    cohort = trained(3)
    play(cohort, opening(cohort), until="masked_update")
    wanted = MaskWanted(members=("d0", "d1", "d2"))
    before = bytes(ask(cohort[2], wanted).vector or b"")
    cohort[2].send("query.describe", describe())
    assert bytes(ask(cohort[2], wanted).vector or b"") == before


def describe(**changes: Any) -> str:
    layout = resident().image.layout
    return DescribeRequest(
        run_seed=0,
        wants_speed=True,
        layout_digest=layout.digest,
        num_parameters=layout.num_parameters,
        **changes,
    ).model_dump_json()


def test_a_survivor_lets_its_vector_go_when_the_server_says_that_it_has_it() -> None:
    cohort = trained(3)
    held = resident().held.of(RUN, "d0")
    play(cohort, opening(cohort), until="masked_update")
    wanted = MaskWanted(members=("d0", "d1", "d2"))
    assert ask(cohort[0], wanted).vector is not None
    ask(cohort[0], UnmaskWanted(survived=("d0", "d1", "d2"), dropped=()))
    assert held.is_over
    with pytest.raises(UpdateNotHeld):
        ask(cohort[0], wanted)


# Order, and processes that were started anew.


def test_a_phase_out_of_order_is_refused() -> None:
    cohort = trained(3)
    with pytest.raises(OutOfPhase):
        ask(cohort[0], SharesDelivered(shares=()))
    play(cohort, opening(cohort), until="share_keys")
    for request in (
        MaskWanted(members=("d0", "d1", "d2")),
        SurvivorsTold(survived=("d0", "d1", "d2"), dropped=()),
        UnmaskWanted(survived=("d0", "d1", "d2"), dropped=()),
    ):
        with pytest.raises(OutOfPhase):
            ask(cohort[0], request)


KEYS = KeysWanted(run=RUN, round=1, attempt=1, mode="semi-honest")


def test_a_device_without_an_update_says_so() -> None:
    device = AppDevice(0)
    with pytest.raises(UpdateNotHeld):
        ask(device, KEYS)
    train(device, plan(is_masked=False))
    with pytest.raises(UpdateNotHeld):
        ask(device, KEYS)


def test_the_next_round_s_plan_to_anybody_ends_the_sessions_of_the_last_one() -> None:
    cohort = trained(3)
    ready(cohort[0], plan(2))
    with pytest.raises(UpdateNotHeld):
        ask(cohort[1], KEYS)
    ask(cohort[0], KEYS.model_copy(update={"round": 2}))


@pytest.mark.parametrize("action", [action for action in ACTIONS if action != "consistency"])
def test_a_process_that_was_started_anew_is_out_of_the_session_and_spends_nothing_twice(
    action: str, tmp_path: Path
) -> None:
    """Once its masked vector is with the server, the others' shares open the sum with it."""
    sums = [plain_sum(part, plan())[0] for part in range(5)]
    others = [AppDevice(part) for part in range(1, 5)]
    killed = NodeDevice(0, tmp_path)
    cohort: list[Device] = [killed, *others]
    for device in cohort:
        ready(device, plan())

    def restart(_: Told) -> None:
        between.device = NodeDevice(0, tmp_path, task=f"././{TASK}")

    between = Between(killed, action, restart)
    played = play([between, *others], opening_of(cohort, plan()))
    is_masked = not is_behind("masked_update", action)
    np.testing.assert_array_equal(sum_of(played.sum), sum(sums[0 if is_masked else 1 :]))
    if action == "unmask":
        assert not played.refused
    else:
        assert isinstance(played.refused["d0"], UpdateNotHeld)
    ready(between.device, plan(2))
    assert place_of(between.device) == Place(offset=8 if is_masked else 0)


# Which examples are spent.


def test_an_update_that_was_masked_is_spent_though_its_round_fails() -> None:
    behind = plain_sum(0, plan(), place=Place(offset=8))[0]
    expected = [behind, *(plain_sum(part, plan())[0] for part in range(1, 4))]
    cohort = trained(4)
    faults = FaultPlan()
    for name in ("d1", "d2", "d3"):
        faults = faults.drop(client=name, after="check_shares")
    with pytest.raises(TooFewSurvivors):
        play(cohort, opening(cohort), faults)
    assert [place_of(device).offset for device in cohort] == [8, 0, 0, 0]
    with pytest.raises(UpdateAlreadyMasked):
        ask(cohort[0], KEYS.model_copy(update={"attempt": 2}))
    for device in cohort:  # the round is tried again
        ready(device, plan())
    again = play(cohort, opening(cohort, attempt=2)).sum
    np.testing.assert_array_equal(sum_of(again), sum(expected))


def test_an_update_that_was_not_masked_may_go_into_another_session() -> None:
    expected = sum(plain_sum(part, plan())[0] for part in range(4))
    cohort = trained(4)
    faults = FaultPlan()
    for device in cohort[1:]:
        faults = faults.drop(client=device.name, after="share_keys")
    with pytest.raises(TooFewSurvivors):
        play(cohort, opening(cohort), faults)
    opened = play(cohort, opening(cohort, attempt=2)).sum
    np.testing.assert_array_equal(sum_of(opened), expected)
    assert [place_of(device).offset for device in cohort] == [8, 8, 8, 8]


def test_what_the_server_says_of_the_round_moves_a_spent_place_no_further() -> None:
    cohort = trained(3)
    play(cohort, opening(cohort))
    for counted in (None, 1):
        ready(cohort[0], plan(2, counted_round=counted))
        assert place_of(cohort[0]) == Place(offset=8)


@given(
    first=st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 10), st.integers(0, 2)),
    second=st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 10), st.integers(0, 2)),
)
def test_two_updates_have_one_name_if_and_only_if_they_are_of_the_same_model_and_examples(
    first: tuple[int, int, int, int], second: tuple[int, int, int, int]
) -> None:
    def named(epoch: int, offset: int, num_taken: int, version: int) -> tuple[str, object]:
        window = Window(positions=(), epoch=epoch, offset=offset, ends_epoch=False)
        num_taken = min(num_taken, 10 - offset)  # a window ends with its epoch
        walk = Walk(place=Place(epoch=epoch, offset=offset)).pend(
            version + 1, window.after(num_taken, 10)
        )
        identity = (epoch, offset, num_taken, version)
        return update_id(RUN, plan(version + 1), walk), identity

    (name, what), (other_name, other) = named(*first), named(*second)
    assert (name == other_name) == (what == other)


# What the device insists on.


@pytest.mark.parametrize("chosen", [SEMI_HONEST, ACTIVE])
def test_a_device_that_insists_on_masks_sends_nothing_in_clear(chosen: dict[str, str]) -> None:
    device = AppDevice(0, secure=chosen)
    before = len(resident().task.seen)  # type: ignore[attr-defined]
    with pytest.raises(MaskingRequired, match="an update is asked for in clear"):
        train(device, plan(is_masked=False))
    held_out = plan(is_masked=False, held_out_fraction=0.25)
    with pytest.raises(MaskingRequired, match="holds out"):
        device.send("evaluate", held_out.model_dump_json(), memoryview(model()))
    assert len(resident().task.seen) == before  # type: ignore[attr-defined]
    assert device.kept() == {}


def test_a_device_that_insists_on_active_mode_takes_part_in_no_other() -> None:
    cohort = [AppDevice(0, secure=ACTIVE), *(AppDevice(part) for part in (1, 2, 3))]
    for device in cohort:
        ready(device, plan())
    played = play(cohort, opening(cohort))
    assert isinstance(played.refused["d0"], MaskingTooWeak)
    assert played.sum.survived == ("d1", "d2", "d3")


def test_a_device_holds_a_session_to_its_own_least_number_of_members() -> None:
    cohort = [AppDevice(0, secure={"min_members": 5}), *(AppDevice(part) for part in (1, 2, 3))]
    for device in cohort:
        ready(device, plan())
    played = play(cohort, opening(cohort))
    assert isinstance(played.refused["d0"], CohortTooSmall)


def test_the_floor_is_the_device_s_own_settings() -> None:
    chosen = settings.Secure(
        aggregation="active", min_members=7, min_survivors=0.5, corrupted=0.2, dropout=0.3
    )
    floor = floor_of(chosen)
    assert (floor.mode, floor.min_members, floor.min_survivors) == ("active", 7, 0.5)
    assert (floor.corrupted, floor.dropout) == (0.2, 0.3)
    assert floor_of(settings.Secure()).mode == "semi-honest"


def test_identities_come_from_the_files_that_the_node_is_configured_with(tmp_path: Path) -> None:
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
        ready(device, plan())
        cohort.append(device)
    played = play(cohort, opening_of(cohort, plan(), mode="active"))
    assert {name: type(error) for name, error in played.refused.items()} == {"d0": IdentityUnknown}
    assert played.sum.survived == ("d1", "d2", "d3")


def test_a_device_without_an_identity_takes_no_part_in_active_sessions(tmp_path: Path) -> None:
    device = NodeDevice(0, tmp_path, task=TASK)
    ready(device, plan())
    with pytest.raises(MaskingTooWeak, match="identity"):
        ask(device, KEYS.model_copy(update={"mode": "active"}))


# What is wrong with an update is said before a session opens, and not how large it is.

BAD_TASK = """
import torch
from tests.tasks import NAN_LOSS, TwoLayers, examples

class AllBad(TwoLayers):
    def train_examples(self, *, data, part, num_parts):
        return examples(8, kinds=[NAN_LOSS] * 8)

class Heavy(TwoLayers):
    def loss_sum(self, model, batch):
        loss, weight = super().loss_sum(model, batch)
        return loss, 977 * weight

class Steep(TwoLayers):
    def loss_sum(self, model, batch):
        loss, weight = super().loss_sum(model, batch)
        return loss + (model[1].bias.sum() - model[1].bias.sum().detach()) * 1e38, weight

class Talkative(TwoLayers):
    def loss_sum(self, model, batch):
        loss, weight = super().loss_sum(model, batch)
        return loss, weight, {f"m{number}": 1.0 for number in range(49)}
"""


@pytest.mark.parametrize(
    ("task", "asked", "error"),
    [
        ("AllBad", plan(), EmptyUpdate),
        ("Heavy", plan(), CountOutOfRange),
        ("Steep", plan(weigh_as=977), NonFiniteUpdate),
        ("Talkative", plan(), TaskError),
    ],
)
def test_an_update_that_no_session_can_take_is_refused_without_a_number_of_it(
    task: str,
    asked: Plan,
    error: type[HeadwaterError],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "bad_masked.py").write_text(BAD_TASK)
    device = NodeDevice(0, tmp_path, task=f"{tmp_path}/bad_masked.py:{task}")
    image = bytes(device.node.resident.image.buffer())
    with pytest.raises(error) as caught:
        train(device, asked, image)
    told = caught.value.message
    assert "own log" in told
    for number in ("8", "977", "49"):
        assert number not in told
    assert any(record.levelname == "WARNING" for record in caplog.records)
    with pytest.raises(UpdateNotHeld):
        ask(device, KEYS)


# The device's own pace.


class Steady(ThisMachine):
    """A machine that was found to take 2 s an example, and takes 1."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()

    def speed(self, place: Workplace) -> Speed:
        return Speed(
            seconds_per_micro_batch=0.0, seconds_per_example=2.0, fastest_micro_batch_size=None
        )


def test_a_device_follows_its_own_pace_and_tells_it() -> None:
    machine = Steady()
    device = AppDevice(0, app=client_app(lambda identity, settings, layout: machine))
    unasked = ready(device, plan())
    assert (unasked.seconds_per_micro_batch, unasked.seconds_per_example) == (None, None)
    device.send("query.describe", describe())
    told = Line(base=0.0, each=2.0)
    assert pace_of(device.kept()["pace"]) == told
    step = Step(num_examples=4, weight=4, loss=0, gradient_norm=0, seconds=4, peak_bytes=0)
    expected = pace.followed(told, [step, step])
    found = ready(device, plan())
    assert found.seconds == 8.0
    assert (
        Line(base=found.seconds_per_micro_batch or 0.0, each=found.seconds_per_example or 0.0)
        == expected
    )
    # Asked again it keeps to what was seen, unless it was left out as too slow.
    device.send("query.describe", describe())
    assert pace_of(device.kept()["pace"]) == expected
    device.send("query.describe", describe(left_out="too slow"))
    assert pace_of(device.kept()["pace"]) == told
