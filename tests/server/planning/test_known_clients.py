"""Each event changes what it should of what a run knows of its clients, in all rows alike."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.errors import LateUpdate
from headwater.common.estimates import training_speed
from headwater.common.estimates.linear_fit import Line
from headwater.common.messages import DeviceReport, ReadyReport, Step, UpdateReport, Vitals
from headwater.server.planning.cohort import ConnectedClients, Selection
from headwater.server.planning.device_estimates import DEADLINE_SHARE, DeviceEstimate
from headwater.server.planning.known_clients import MIN_SHARE, KnownClients, Told
from tests.server.rounds.test_open_round import Reports

VITALS = Vitals(memory_limit_bytes=10**9)
NAMES = "abcd"
LATE = LateUpdate("it was late")


def described(name: str = "pi", **changes: Any) -> DeviceReport:
    return DeviceReport.model_validate(
        {
            "name": name,
            "num_examples": 100,
            "layout_digest": "same",
            "seconds_per_micro_batch": 0.5,
            "seconds_per_example": 0.25,
            "fastest_micro_batch_size": 32,
            **changes,
        }
    )


def update(
    name: str = "pi",
    pace: float = 0.375,
    vitals: Vitals = VITALS,
    sizes: tuple[int, ...] = (4,),
) -> UpdateReport:
    steps = tuple(
        Step(num_examples=size, weight=size, loss=0.0, seconds=pace * size, peak_bytes=0)
        for size in sizes
    )
    return UpdateReport(
        name=name, round=1, num_examples=10, weight=10, loss_sum=0.0, metric_sums={},
        micro_batch_size=4, num_refused=0, seconds=1.0, steps=steps, reason="quota", vitals=vitals,
    )  # fmt: skip


class Clients:
    """The clients of a run, of which "pi" is one, and the events of a round."""

    def __init__(self, *, is_by_data: bool = False, **first: Any) -> None:
        self.known = KnownClients(is_by_data=is_by_data)
        self.describe(**first)

    def describe(self, name: str = "pi", **changes: Any) -> list[str]:
        """Let a client describe itself, and read it in its turn."""
        reports = {name: described(name, **changes)}
        self.note(reports, told=[name])
        return self.known.describable([name], reports, ())

    def note(
        self,
        reports: dict[str, DeviceReport],
        told: Collection[str] = (),
        left: Collection[str] = (),
        counted: Collection[str] = ("pi",),
    ) -> None:
        clients = ConnectedClients(reports=reports, described=told, disconnected=left)
        self.known.note_changes(clients, counted=counted, busy=())

    def leave_out(self, round_number: int) -> None:
        waiting = self.known.waiting_since(["pi"])
        chosen = Selection(names=[], left_out={"pi": "slow"})
        self.known.note_selection(chosen, waiting, round_number)

    def invite(self, round_number: int) -> None:
        waiting = self.known.waiting_since(["pi"])
        self.known.note_selection(Selection(names=["pi"]), waiting, round_number)

    def late(self, *, was_expected: bool = False) -> None:
        exceptions = ["pi"] if was_expected else []
        self.known.learn(["pi"], told=[], refused={"pi": LATE}, exceptions=exceptions)

    def answer(self, **changes: Any) -> None:
        self.known.learn(["pi"], told=[Told.by([update(**changes)])], refused={})

    @property
    def pi(self) -> DeviceEstimate:
        return self.known["pi"]


def test_a_new_client_is_believed() -> None:
    pi = Clients(vitals={"memory_limit_bytes": 2**30}).pi
    assert pi.line == Line(base=0.5, each=0.25)
    assert pi.fastest_micro_batch_size == 32
    assert pi.vitals.memory_limit_bytes == 2**30
    assert not pi.is_outdated


def test_a_description_counts_only_if_the_estimate_is_outdated() -> None:
    """A resumed run asks all clients, and must plan as the unbroken run does."""
    clients = Clients()
    before = clients.pi
    clients.describe(seconds_per_example=9.0, num_examples=70)
    assert clients.pi == replace(before, num_examples=70)


def test_a_client_that_was_disconnected_has_new_vitals_and_keeps_its_speed() -> None:
    clients = Clients(vitals={"base_bytes": 9})
    clients.answer(pace=0.75)
    followed = clients.pi.line
    clients.note({}, left=["pi"])
    clients.describe(vitals={"base_bytes": 4})
    assert clients.pi.vitals.base_bytes == 4
    assert clients.pi.line == followed != Line(base=0.5, each=0.25)


def test_a_client_that_left_before_a_sum_counted_it_is_forgotten_and_its_row_used_again() -> None:
    clients = Clients()
    clients.describe("stranger", num_examples=3)
    clients.note({"pi": described()}, left=["stranger"])
    assert list(clients.known) == ["pi"]
    clients.describe("other")
    assert clients.known["other"] == clients.pi


def test_a_client_that_was_left_out_has_a_new_speed() -> None:
    clients = Clients()
    clients.late()
    clients.leave_out(3)
    assert clients.describe(seconds_per_example=0.01, fastest_micro_batch_size=64) == ["pi"]
    assert clients.pi.line == Line(base=0.5, each=0.01)
    assert clients.pi.fastest_micro_batch_size == 64
    assert clients.pi.deadline_share == DEADLINE_SHARE
    assert clients.pi.waiting_since == 3


def test_a_client_that_was_left_out_keeps_its_estimate_until_it_describes_itself_again() -> None:
    clients = Clients()
    clients.leave_out(3)
    reports = {"pi": described(seconds_per_example=9.0)}  # the one that was read
    assert clients.known.describable(["pi"], reports, ()) == ["pi"]
    assert clients.pi.line == Line(base=0.5, each=0.25)


def test_a_client_waits_since_the_first_round_that_it_was_left_out_of() -> None:
    clients = Clients()
    clients.leave_out(3)
    clients.leave_out(4)
    assert clients.known.waiting_since(["pi"]) == {"pi": 3}
    assert clients.known.waiting_since(["other"]) == {}
    clients.invite(5)
    assert clients.known.waiting_since(["pi"]) == {}
    clients.leave_out(9)
    assert clients.pi.waiting_since == 9


def test_the_vitals_of_an_update_replace_the_known_ones() -> None:
    clients = Clients(vitals={"memory_limit_bytes": 2**30, "share": 0.5})
    clients.answer(vitals=Vitals(upload_bytes_per_second=1e6))
    assert clients.pi.vitals == Vitals(
        memory_limit_bytes=2**30, upload_bytes_per_second=1e6, share=1.0
    )


def test_an_update_of_data_that_have_grown_tells_the_planner_how_many_they_are() -> None:
    clients = Clients(num_examples=10)
    grown = update().model_copy(update={"num_joined": 90, "num_owned": 100})
    clients.known.learn(["pi"], told=[Told.by([grown])], refused={})
    assert clients.pi.num_examples == 100
    clients.answer()
    assert clients.pi.num_examples == 100


def test_a_masked_answer_tells_its_vitals_and_no_speed() -> None:
    clients = Clients()
    ready = ReadyReport(name="pi", round=1, seconds=99.0, vitals=Vitals(base_bytes=7))
    clients.known.learn(["pi"], told=[Told.by_ready([ready])], refused={})
    assert clients.pi.vitals.base_bytes == 7
    assert clients.pi.line == Line(base=0.5, each=0.25)


def test_a_run_without_speeds_keeps_none() -> None:
    clients = Clients(seconds_per_micro_batch=None, seconds_per_example=None)
    clients.answer()
    assert clients.pi.line is None


def test_a_late_client_trains_for_less_time_and_gets_it_back_slowly() -> None:
    clients = Clients()
    clients.late()
    assert clients.pi.deadline_share < DEADLINE_SHARE
    for _ in range(20):
        clients.late()
    assert clients.pi.deadline_share == MIN_SHARE
    clients.answer()
    assert MIN_SHARE < clients.pi.deadline_share < 1.1 * MIN_SHARE
    for _ in range(200):
        clients.answer()
    assert clients.pi.deadline_share == DEADLINE_SHARE


def test_times_late_are_counted_in_a_row_and_not_where_it_was_expected() -> None:
    clients = Clients()
    clients.late()
    clients.late()
    clients.late(was_expected=True)
    assert clients.pi.times_late == 2
    clients.leave_out(3)
    clients.describe()
    assert clients.pi.times_late == 2
    clients.answer()
    assert clients.pi.times_late == 0
    clients.late()
    assert clients.pi.times_late == 1


def test_a_client_that_cannot_describe_itself_has_no_estimate() -> None:
    clients = Clients()
    assert clients.known.describable(["pi", "silent"], {"pi": described()}, ()) == ["pi"]
    assert "silent" not in clients.known


def test_where_updates_are_weighed_by_data_one_that_does_not_tell_its_number_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clients = Clients(is_by_data=True)
    with caplog.at_level(logging.WARNING):
        found = [clients.describe("shy", num_examples=None) for _ in range(2)]
    assert found == [[], []]
    assert caplog.text.count("shy: it does not tell its number of examples") == 1


@given(
    paces=st.lists(st.sampled_from([0.5, 0.5, 0.6]), min_size=4, max_size=4),
    others=st.sets(st.sampled_from(NAMES)),
    late=st.sets(st.sampled_from(NAMES)),
    unknown=st.sets(st.sampled_from(NAMES)),
    refused=st.sets(st.sampled_from(NAMES)),
    cut=st.integers(0, 4),
)
def test_a_row_follows_its_own_report_however_the_reports_come(
    paces: list[float],
    others: set[str],
    late: set[str],
    unknown: set[str],
    refused: set[str],
    cut: int,
) -> None:
    changed = Vitals(memory_limit_bytes=10**8)
    reports = [
        update(name, pace, changed if name in others else VITALS, (4, 4, 2))
        for name, pace in zip(NAMES, paces, strict=True)
    ]
    before = {
        name: DeviceEstimate(
            num_examples=50,
            line=None if name in unknown else Line(base=0.0, each=0.5),
            vitals=VITALS,
            is_outdated=False,
            times_late=int(name in late),
            deadline_share=0.5 if name in late else DEADLINE_SHARE,
        )
        for name in NAMES
    }
    known = KnownClients()
    known.restore(before)
    alone, block = reports[:cut], Reports(*reports[cut:])
    told = [Told.by(alone)]
    if block:
        told.append(Told(block.columns.names, block.columns.vitals, *block.timing))
    known.learn(NAMES, told=told, refused=dict.fromkeys(refused, LATE))
    for name, report in zip(NAMES, reports, strict=True):
        was = before[name]
        line = was.line and training_speed.updated_line(was.line, report.measured)
        share = was.deadline_share * 0.6 if name in refused else was.deadline_share * 1.02
        assert known[name] == replace(
            was,
            line=line,
            vitals=report.vitals,
            times_late=was.times_late + 1 if name in refused else 0,
            deadline_share=min(share, DEADLINE_SHARE),
        )


def test_a_table_grows_and_keeps_its_rows() -> None:
    clients = Clients()
    names = [f"d{at}" for at in range(100)]
    reports = {name: described(name, num_examples=at + 1) for at, name in enumerate(names)}
    for start in range(0, 100, 7):
        some = names[start : start + 7]
        assert clients.known.describable(some, reports, ()) == some
    assert clients.known.columns(names).num_examples.tolist() == list(range(1, 101))
    assert list(clients.known) == ["pi", *names]
