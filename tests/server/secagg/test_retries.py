"""A failed session is retried without the device at fault, and no honest device is excluded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.client.app import client_app
from headwater.common.errors import (
    DealerCheated,
    HeadwaterError,
    IdentityUnknown,
    LateUpdate,
    MaskingTooWeak,
    RoundAborted,
    SessionReplayed,
    TooFewClients,
    TooFewSurvivors,
    WrongShare,
)
from headwater.common.messages import ReadyReport
from headwater.common.phases import Phase
from headwater.common.secagg.identity import SigningIdentity
from headwater.common.secagg.protocol import (
    CheckReply,
    KeysReply,
    MaskReply,
    SessionNumber,
    SharesReply,
    SurvivorsReply,
    UnmaskReply,
    accusation,
    accused_in,
)
from headwater.common.settings.schema import Settings
from headwater.server.fleet import Dropout, Reply
from headwater.server.flower.grid_fleet import GridFleet
from headwater.server.operations.round_log import RoundLog
from headwater.server.planning.exclusions import FIRST_ROUNDS
from headwater.server.rounds.round_loop import run
from headwater.server.rounds.round_row import RoundRow
from headwater.server.rounds.run_folder import restore
from headwater.server.rounds.run_state import Training
from headwater.server.secagg.blame import Evidence
from headwater.server.secagg.parameters import SessionSetup
from headwater.server.secagg.retries import sum_masked
from headwater.server.secagg.session import ReadyCohort
from headwater.server.secagg.unmask_phase import UnmaskedSum
from headwater.simulation.engines.message_grid import InProcessGrid
from headwater.simulation.fleet.virtual_hardware import virtual_hardware
from tests.secagg import PLAN, Cast

LIAR = "d002"
RUN = 2**61 + 5
Lie = Callable[[Any], Any]


class CastFleet:
    """A cast's devices as a fleet; ``lies`` changes the replies of the devices that it names."""

    def __init__(self, cast: Cast, lies: Mapping[str, Lie]) -> None:
        self.cast, self.lies = cast, lies

    def converse(
        self, phase: Phase, requests: Mapping[str, Any], **_: Any
    ) -> Iterator[Reply | Dropout]:
        for name, request in requests.items():
            session = self.cast.parties[name].session
            try:
                said = self.lies.get(name, lambda said: said)(session.answer(request))
            except HeadwaterError as error:
                yield Dropout(name=name, error=error)
                continue
            vector = session.vector if isinstance(said, MaskReply) else None
            yield Reply(
                name=name, message=said, vector=None if vector is None else vector.tobytes()
            )


class SessionResult:
    """The result of a round's sessions: sum or abort, refused and excluded devices."""

    def __init__(self, cast: Cast, lies: Mapping[str, Lie]) -> None:
        self.refused: dict[str, HeadwaterError] = {}
        self.left_out: dict[str, str] = {}
        self.num_attempts = 0
        self.opened: UnmaskedSum | None = None
        self.aborted: RoundAborted | None = None

        def set_up(cohort: ReadyCohort) -> SessionSetup:
            self.num_attempts += 1
            number = SessionNumber(1, self.num_attempts)
            return replace(cast.setup, number=number, planned_weights=cohort.planned_weights)

        weights = cast.setup.planned_weights
        ready = {n: ReadyReport(name=n, round=1, seconds=1.0) for n in weights}
        try:
            self.opened = sum_masked(
                ReadyCohort(
                    ready=ready,
                    planned_weights=weights,
                    metrics=(),
                    max_examples=1,
                    plan_digest=PLAN,
                ),
                CastFleet(cast, lies),  # type: ignore[arg-type] # it implements converse only
                set_up=set_up,
                bounds=None,
                phase_seconds=1.0,
                refuse=self.refused.__setitem__,
                leave_out=self.left_out.update,
            )
        except RoundAborted as error:
            self.aborted = error


def changing(kind: type, change: Lie) -> Lie:
    return lambda said: change(said) if isinstance(said, kind) else said


def spoiled(share: bytes) -> bytes:
    return bytes([share[0] ^ 1, *share[1:]])


def with_stranger(num_devices: int) -> Cast:
    cast = Cast(num_devices, mode="active")
    device = replace(cast.parties[LIAR].device, name="sybil", identity=SigningIdentity.new("sybil"))
    cast.join(device, weight=1, seed=1)
    weights = {**cast.setup.planned_weights, "sybil": device.planned_weight}
    cast.setup = replace(cast.setup, planned_weights=weights)
    return cast


def holds_sum_of(cast: Cast, result: SessionResult, *names: str) -> None:
    assert result.opened is not None, result.aborted
    assert result.opened.survived == names
    plain_P, _ = cast.plain_sum(names, result.opened)
    np.testing.assert_array_equal(result.opened.vector_P, plain_P)


# -- before anybody has masked: another attempt with the same updates


@pytest.mark.parametrize("kind", [KeysReply, SharesReply, CheckReply, MaskReply, SurvivorsReply])
def test_an_abort_says_the_one_reason_for_which_all_devices_left_and_its_remedy(kind: type) -> None:
    def refuse(said: Any) -> Any:
        raise MaskingTooWeak("d000: active mode needs an identity", remedy="make an identity")

    cast = Cast(4, mode="active")
    result = SessionResult(cast, dict.fromkeys(cast.names, changing(kind, refuse)))
    assert isinstance(result.aborted, TooFewSurvivors)
    reason = "4 devices left for one reason, MaskingTooWeak: d000: active mode needs an identity"
    assert reason in str(result.aborted)
    assert result.aborted.remedy == "make an identity"


def test_an_abort_counts_the_reasons_if_devices_left_for_several() -> None:
    def refuse(said: Any) -> Any:
        raise MaskingTooWeak("active mode needs an identity")

    def replay(said: Any) -> Any:
        raise SessionReplayed("this session is old")

    cast = Cast(4)
    lies = {**dict.fromkeys(cast.names[:3], refuse), cast.names[3]: replay}
    result = SessionResult(cast, {name: changing(KeysReply, lie) for name, lie in lies.items()})
    assert "why devices left: MaskingTooWeak 3, SessionReplayed 1" in str(result.aborted)


@pytest.mark.slow
def test_a_session_whose_size_has_no_graph_goes_on_without_the_surplus() -> None:
    cast = Cast(66, corrupted=0.5, dropout=0.5)
    result = SessionResult(cast, {})
    others = sorted(cast.parties.keys() - result.refused.keys())
    assert len(others) == 64
    holds_sum_of(cast, result, *others)
    assert result.left_out == {}
    for error in result.refused.values():
        assert "66 devices are ready, and there is no mask graph of so many" in str(error)


def test_an_unknown_device_costs_one_attempt_and_no_update() -> None:
    cast = with_stranger(4)
    result = SessionResult(cast, {})
    assert result.num_attempts == 2
    holds_sum_of(cast, result, *cast.names)
    assert set(result.left_out) == set(result.refused) == {"sybil"}
    assert "4 of 5 devices refused its keys" in result.left_out["sybil"]


def test_a_device_with_a_foreign_signature_costs_one_attempt() -> None:
    cast = Cast(5, mode="active")
    device = cast.parties[LIAR].device
    cast.join(replace(device, identity=SigningIdentity.new(LIAR)), weight=1, seed=1)
    result = SessionResult(cast, {})
    holds_sum_of(cast, result, *(name for name in cast.names if name != LIAR))
    assert set(result.left_out) == {LIAR}


def test_a_dealer_whose_shares_are_bad_for_two_of_three_is_excluded() -> None:
    def bad(dealt: SharesReply) -> SharesReply:
        shares = tuple(s.model_copy(update={"sealed": bytes(len(s.sealed))}) for s in dealt.shares)
        return dealt.model_copy(update={"shares": shares})

    result = SessionResult(Cast(3), {LIAR: changing(SharesReply, bad)})
    assert isinstance(result.aborted, TooFewSurvivors)
    assert set(result.left_out) == {LIAR}
    assert isinstance(result.refused[LIAR], HeadwaterError)  # and none of it in silence


def test_a_holder_that_complains_of_all_others_is_excluded_alone() -> None:
    def complaining(checked: CheckReply) -> CheckReply:
        return checked.model_copy(update={"bad_dealers": ("d000", "d001")})

    result = SessionResult(Cast(3), {LIAR: changing(CheckReply, complaining)})
    assert isinstance(result.aborted, TooFewSurvivors)
    assert set(result.left_out) == {LIAR}


def test_a_dealer_of_bad_shares_is_counted_although_the_round_continues() -> None:
    cast = Cast(5)

    def complaining(checked: CheckReply) -> CheckReply:
        return checked.model_copy(update={"bad_dealers": ("d000",)})

    result = SessionResult(cast, {LIAR: changing(CheckReply, complaining)})
    holds_sum_of(cast, result, *cast.names[1:])  # of two that are level, the dealer
    assert isinstance(result.refused["d000"], WrongShare)
    assert LIAR in str(result.refused["d000"])
    assert not result.left_out


# -- after the masks: the round is aborted


def test_a_dealer_whose_shares_do_not_match_its_commitment_is_excluded() -> None:
    def other_seed(dealt: SharesReply) -> SharesReply:
        return dealt.model_copy(update={"seed_commitment": spoiled(dealt.seed_commitment)})

    result = SessionResult(Cast(5, mode="active"), {LIAR: changing(SharesReply, other_seed)})
    assert isinstance(result.aborted, DealerCheated)
    assert result.aborted.__cause__ is not result.aborted, "the chain of causes has an end"
    assert result.num_attempts == 1
    assert set(result.left_out) == {LIAR}


def test_a_holder_of_wrong_shares_that_ends_a_session_of_three_is_excluded() -> None:
    def wrong(reply: UnmaskReply) -> UnmaskReply:
        shares = {name: spoiled(share) for name, share in reply.self_seed_shares.items()}
        return reply.model_copy(update={"self_seed_shares": shares})

    result = SessionResult(Cast(3, mode="active"), {LIAR: changing(UnmaskReply, wrong)})
    assert isinstance(result.aborted, TooFewSurvivors)
    assert set(result.left_out) == {LIAR}
    assert result.left_out[LIAR].startswith("WrongShare")


# -- devices that are not at fault


@pytest.mark.parametrize("accused", ["d000", "d000, d001", "server", ""])
def test_one_accuser_excludes_nobody(accused: str) -> None:
    def lying(said: object) -> object:
        raise IdentityUnknown(f"{accused}: not on the allow-list of {LIAR}")

    result = SessionResult(Cast(3, mode="active"), {LIAR: changing(SharesReply, lying)})
    assert isinstance(result.aborted, TooFewSurvivors)
    assert result.left_out == {}
    assert set(result.refused) == {LIAR}


def test_a_vanished_device_is_not_excluded() -> None:
    def gone(said: object) -> object:
        raise LateUpdate("the phase's time is over")

    for kind in (SharesReply, CheckReply, MaskReply, UnmaskReply):
        result = SessionResult(Cast(3, mode="active"), {LIAR: changing(kind, gone)})
        assert result.aborted is not None
        assert result.left_out == {}


def test_a_late_reply_is_not_a_fault() -> None:
    evidence = Evidence()
    evidence.members = frozenset({"a", "b", "c"})
    evidence.add_rejected("a", LateUpdate("a: too late"))
    assert evidence.at_fault(TooFewSurvivors("too few")) == {}


def test_more_than_a_third_of_the_members_must_accuse() -> None:
    for num_accusers, is_left_out in ((2, False), (3, True)):
        evidence = Evidence()
        evidence.members = frozenset("abcdef")
        for name in "abc"[:num_accusers]:
            evidence.add_client_error(name, IdentityUnknown(accusation(["f"], "not on the list")))
        assert ("f" in evidence.at_fault(TooFewSurvivors("too few"))) is is_left_out


def test_accusations_of_non_members_do_not_count() -> None:
    evidence = Evidence()
    evidence.members = frozenset("abc")
    for name in "wxyz":
        evidence.add_client_error(name, IdentityUnknown(accusation(["a"], "not on the list")))
    assert evidence.at_fault(TooFewSurvivors("too few")) == {}


def test_only_an_accusation_names_accused_devices() -> None:
    assert accused_in(accusation(["a", "b.c-d"], "not on it: e, f")) == {"a", "b.c-d"}
    assert accused_in("nothing of the kind") == {"nothing of the kind"}


# -- how long a device is excluded


class LyingFleet(GridFleet):
    """Simulated devices, one of which deals shares of a self seed that it did not commit to."""

    def converse(self, *requests: Any, **how: Any) -> Iterator[Reply | Dropout]:
        for reply in super().converse(*requests, **how):
            said = reply.message if isinstance(reply, Reply) else None
            if isinstance(reply, Reply) and reply.name == "1" and isinstance(said, SharesReply):
                lie = {"seed_commitment": spoiled(said.seed_commitment)}
                reply = replace(reply, message=said.model_copy(update=lie))
            yield reply


def lying_run(*, rounds: int, out: Path, **cohort: Any) -> tuple[Settings, LyingFleet]:
    settings = Settings.model_validate(
        {
            "task": "tests/tasks.py:TwoLayers",
            "rounds": rounds,
            "out": out,
            "threads": 1,
            "plan": {"accumulation_steps": 2, "micro_batch_size": 4},
            "secure": {"aggregation": "semi-honest"},
            "cohort": cohort,
            "simulation": {"clients": 5},
        }
    )
    grid = InProcessGrid(client_app(virtual_hardware), settings)
    grid.enter_run(RUN)
    return settings, LyingFleet(grid)


@pytest.mark.slow
def test_a_cheating_device_costs_one_attempt_and_is_excluded_from_the_next_rounds(
    tmp_path: Path,
) -> None:
    settings, fleet = lying_run(rounds=2, out=tmp_path / "out")
    rows: list[RoundRow] = []
    run(Training(settings, run_id=RUN), fleet, on_round=rows.append, observer=RoundLog())
    assert [row.num_aborted for row in rows] == [1, 0]
    for row in rows:
        assert row.num_clients == row.num_invited == 4
        assert "DealerCheated" in row.left_out["1"]
        assert "until round 12" in row.left_out["1"]
    again = Training(settings, run_id=RUN)
    assert restore(again, tmp_path / "out", fleet)
    assert again.planner.excluded["1"].through_round == 1 + FIRST_ROUNDS


@pytest.mark.slow
def test_too_few_clients_names_the_excluded_devices_and_the_reasons(tmp_path: Path) -> None:
    settings, fleet = lying_run(rounds=1, out=tmp_path, min_clients=5)
    with pytest.raises(TooFewClients, match="1 is left out until round 12, as DealerCheated"):
        run(Training(settings, run_id=RUN), fleet, on_round=lambda row: None)
