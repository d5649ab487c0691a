"""A device that returns after days with fifty windows: its update counts for what it is."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import Tensor, nn

from headwater.client.node_features import NodeAnswer
from headwater.common.errors import ConnectionLost, StateError
from headwater.common.flower import records
from headwater.common.flower.grid import ensure_message_id
from headwater.common.messages import Plan, UpdateReport
from headwater.common.offline.terms import OfflineTerms
from headwater.common.settings.schema import Settings
from headwater.server.asynchronous.buffered_rounds import BufferedRounds
from headwater.server.asynchronous.dispatching_grid_fleet import DispatchingGridFleet
from headwater.server.asynchronous.plans_out import FILE, PlansOut
from headwater.server.asynchronous.staleness import TIMES_OF_FRESH, times_of
from headwater.server.rounds.checkpoint import run_position
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.round_loop import run
from headwater.server.rounds.round_row import RoundRow
from headwater.server.rounds.run_state import Training
from headwater.server.standby.shared_files import SharedFiles
from headwater.server.standby.shared_folder import SharedFolder
from headwater.server.standby.takeover import open_run
from headwater.server.standby.term_record import NAME, TermRecord
from tests.masked import RUN, NodeDevice, settings_of
from tests.server.flower.test_registration import Wire
from tests.tasks import TwoLayers, gradient_sum

NUM_WINDOWS, NUM_EXAMPLES, QUOTA = 50, 24, 12  # two windows are an epoch of the device's data
RATE = 0.001
TRAVELLER = 1


class Link(Wire):
    """A network of real devices; one of them loses its link in its first plan."""

    def __init__(self, folder: Path, *, is_lost_in: str = "1") -> None:
        super().__init__(TRAVELLER, 2)
        self._is_lost_in = is_lost_in
        offline = {"offline_windows": NUM_WINDOWS}
        self.enter_run(RUN)
        self.devices = {node: NodeDevice(node, folder, asynchronous=offline) for node in self.nodes}
        self.replies: list[Message] = []
        self.plans: list[Plan] = []
        """What the traveller was sent."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = list(messages)
        self._answers += map(self._delivered, pushed)
        return [ensure_message_id(message) for message in pushed]

    def dispatch(self, messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        for message in sent:
            if message.metadata.dst_node_id == TRAVELLER:
                self.plans.append(records.read(message.content, Plan))
            reply = self._delivered(message)
            is_lost = message.metadata.group_id == self._is_lost_in
            if message.metadata.dst_node_id == TRAVELLER and is_lost:
                self._travel(message, reply)
                lost = records.to_flower_error(ConnectionLost("no link"), is_same_process=True)
                reply = Message(lost, reply_to=message)
            self.replies.append(reply)
        return [ensure_message_id(message) for message in sent]

    def next_reply(self, *, timeout: float) -> Message | None:
        return self.replies.pop(0) if self.replies else next(self.replies_to(()), None)

    def _travel(self, message: Message, reply: Message) -> None:
        """Sum as many windows as the device may, with the calls that its transport makes."""
        self.nodes.remove(TRAVELLER)
        node, plan_json = self.devices[TRAVELLER].node, records.head_json(message.content)
        vector = records.vector(reply.content) or b""
        head = records.head_json(reply.content)
        answer = NodeAnswer(message_id="m", head_json=head, vector=vector)
        for _ in node.no_link(plan_json, answer) or ():
            pass

    def _delivered(self, message: Message) -> Message:
        content, metadata = message.content, message.metadata
        answer = self.devices[metadata.dst_node_id].node.answer(
            message_id=ensure_message_id(message),
            message_type=metadata.message_type,
            head_json=records.head_json(content),
            payload=records.vector(content),
        )
        assert answer.error is None
        vector = bytes(answer.vector)  # all devices sum in the memory of one trainer
        array = records.flat_array(vector, dtype="float32") if vector else None
        return Message(records.content_with_head(answer.head_json, array), reply_to=message)


class Boasting(Link):
    """A network where the traveller's first update claims more examples than its plan has."""

    def _delivered(self, message: Message) -> Message:
        reply, to = super()._delivered(message), message.metadata
        if (to.message_type, to.dst_node_id, to.group_id) != ("train", TRAVELLER, "1"):
            return reply
        head = json.loads(records.head_json(reply.content))
        head["num_examples"] *= 100
        array = records.flat_array(records.vector(reply.content) or b"", dtype="float32")
        return Message(records.content_with_head(json.dumps(head), array), reply_to=message)


class Models(Observer):
    """Keeps the parameters before the first step and after each; lets the traveller come back."""

    def __init__(self, link: Link, *, back_after: int) -> None:
        self.models: list[Tensor] = []
        self._link, self._back_after = link, back_after

    def started(self, settings: Settings, *, round_number: int, model: nn.Module) -> None:
        self._model = model
        self._keep()

    def stepped(self, row: RoundRow) -> None:
        self._keep()
        if row.round == self._back_after:
            self._link.nodes.append(TRAVELLER)

    def _keep(self) -> None:
        flat_P = torch.nn.utils.parameters_to_vector(self._model.parameters())
        self.models.append(flat_P.detach().clone())


def asynchronous(
    *, num_windows: int = NUM_WINDOWS, max_staleness: int = 20, **changes: Any
) -> Settings:
    """Return settings of steps that each take one update."""
    return settings_of(
        cohort={"min_clients": 1},
        plan={"accumulation_steps": 3, "micro_batch_size": QUOTA // 3},
        optimizer={"name": "sgd", "learning_rate": RATE},
        asynchronous={
            "is_on": True,
            "buffer": 1,
            "max_staleness": max_staleness,
            "offline_windows": num_windows,
        },
        **changes,
    )


def refused_in(plan: Plan) -> int | None:
    terms = plan.of(OfflineTerms)
    return None if terms is None else terms.refused_round


@pytest.mark.slow
def test_a_device_that_returns_with_fifty_windows_counts_for_what_it_is(tmp_path: Path) -> None:
    settings = asynchronous(rounds=12)
    link, rows = Link(tmp_path), list[RoundRow]()
    fleet, seen = DispatchingGridFleet(link), Models(link, back_after=6)
    rounds = BufferedRounds(fleet, settings)
    training = Training(settings, run_id=RUN)
    run(training, fleet, on_round=rows.append, observer=seen, run_round=rounds)
    late = next(row for row in rows if row.num_windows)
    staleness = late.round - 1
    assert (late.num_windows, late.model_versions) == ({"d1": NUM_WINDOWS}, {"d1": 0})
    assert (late.num_examples, late.weight) == (NUM_WINDOWS * QUOTA, NUM_WINDOWS * QUOTA)
    assert late.staleness_max == staleness >= 6
    assert late.discounted_weight == late.weight * times_of(staleness, 0.5) / TIMES_OF_FRESH
    own = TwoLayers().train_examples(data=None, part=TRAVELLER, num_parts=8)
    epoch_P = gradient_sum(seen.models[0], own, range(NUM_EXAMPLES))
    mean_P = NUM_WINDOWS * QUOTA // NUM_EXAMPLES * epoch_P / late.weight
    before_P, after_P = (seen.models[late.round - back].double().numpy() for back in (1, 0))
    # The sums are whole numbers; the mean, the rate and the difference are each rounded once.
    assert after_P == pytest.approx(before_P - RATE * mean_P, rel=2**-21, abs=2**-21)
    again = next(row for row in rows[late.round :] if "d1" in row.model_versions)
    assert (again.model_versions["d1"], again.num_windows) == (late.round, {})


@pytest.mark.slow
def test_a_stale_sum_is_refused_once_though_the_device_does_not_hear_of_it(tmp_path: Path) -> None:
    """No receipt reaches a device of this network, so it keeps its sum until a plan tells it."""
    settings = asynchronous(rounds=12, max_staleness=3)
    link, rows = Link(tmp_path), list[RoundRow]()
    fleet, seen = DispatchingGridFleet(link), Models(link, back_after=6)
    rounds, training = BufferedRounds(fleet, settings), Training(settings, run_id=RUN)
    run(training, fleet, on_round=rows.append, observer=seen, run_round=rounds)
    refusing = [row for row in rows if "d1" in row.refused]
    assert [row.num_stale for row in rows if row.num_stale] == [1]
    assert [row.refused["d1"].split(":")[0] for row in refusing] == [
        "ConnectionLost",
        "StaleUpdate",
    ]
    again = next(row for row in rows[refusing[-1].round :] if "d1" in row.model_versions)
    assert not again.refused
    assert not again.num_windows
    # The plan after the refusal says it once; that plan's update is accepted.
    refused = [refused_in(plan) for plan in link.plans]
    assert [at for at in refused if at is not None] == [1]
    assert refused[-1] is None


def test_a_plan_without_offline_windows_says_nothing_of_a_refusal(tmp_path: Path) -> None:
    """A device of an earlier version refuses a plan with a field that it does not know."""
    settings = asynchronous(num_windows=1, rounds=6)
    link, rows = Boasting(tmp_path, is_lost_in="none"), list[RoundRow]()
    fleet, training = DispatchingGridFleet(link), Training(settings, run_id=RUN)
    rounds = BufferedRounds(fleet, settings)
    run(training, fleet, on_round=rows.append, run_round=rounds)
    assert [list(row.refused) for row in rows if row.refused] == [["d1"]]
    assert len(link.plans) > 1
    assert all(refused_in(plan) is None for plan in link.plans)


class Stopped(Exception):
    """The first server's end."""


class Stopping(Link):
    """A network whose server is killed when the traveller's plan is out."""

    def next_reply(self, *, timeout: float) -> Message | None:
        raise Stopped


@pytest.mark.parametrize("quota_after", [QUOTA, QUOTA // 3])
def test_a_sum_counts_though_its_server_is_killed_before_the_first_step(
    tmp_path: Path, quota_after: int
) -> None:
    """The next server plans round 1 too, and its plan may have fewer examples."""
    out, rows = tmp_path / "out", list[RoundRow]()
    out.mkdir()
    before = asynchronous(rounds=3, out=out)
    fleet = DispatchingGridFleet(Stopping(tmp_path))
    with pytest.raises(Stopped):
        run(
            Training(before, run_id=RUN),
            fleet,
            on_round=rows.append,
            run_round=BufferedRounds(fleet, before),
        )
    assert rows == []
    assert run_position(out, resume=True) == (RUN, 0)
    plan = before.plan.model_copy(update={"micro_batch_size": quota_after // 3})
    after = before.model_copy(update={"plan": plan})
    fleet = DispatchingGridFleet(Link(tmp_path, is_lost_in="none"))
    run(
        Training(after, run_id=RUN),
        fleet,
        on_round=rows.append,
        resume=True,
        run_round=BufferedRounds(fleet, after),
    )
    first = next(row for row in rows if "d1" in row.model_versions)
    assert (first.num_windows, first.model_versions) == ({"d1": NUM_WINDOWS}, {"d1": 0})
    assert first.clients[0].num_examples == NUM_WINDOWS * QUOTA


def test_a_run_that_begins_ignores_the_plans_of_another_run_in_its_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    settings = asynchronous(rounds=3, out=out)
    other = Plan(round=1, run_seed=0, model_version=0, quota=QUOTA // 3, micro_batch_size=1)
    PlansOut(settings).add({"d1": other, "d9": other}, version=0)
    fleet = DispatchingGridFleet(Stopping(tmp_path))
    training = Training(settings, run_id=RUN)
    with pytest.raises(Stopped):
        run(
            training,
            fleet,
            on_round=lambda _: None,
            run_round=BufferedRounds(fleet, settings),
        )
    after = PlansOut(settings)
    after.restore(version=0, counted={})
    found = [after.answered_by(report_of(other, name)) for name in ("d1", "d2", "d9")]
    assert [None if plan is None else plan.quota for plan in found] == [QUOTA, QUOTA, None]


class KilledBeforePlans(Observer):
    """The server's end after its first checkpoint, before its plans are written."""

    def asked(self, _: object) -> None:
        raise Stopped


def test_a_run_killed_before_its_first_plans_resumes_without_those_of_another_run(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    settings = asynchronous(rounds=3, out=out)
    other = Plan(round=1, run_seed=0, model_version=0, quota=QUOTA // 3, micro_batch_size=1)
    PlansOut(settings).add({"d1": other}, version=0)
    fleet = DispatchingGridFleet(Link(tmp_path))
    with pytest.raises(Stopped):
        run(
            Training(settings, run_id=RUN),
            fleet,
            on_round=lambda _: None,
            observer=KilledBeforePlans(),
            run_round=BufferedRounds(fleet, settings),
        )
    after = PlansOut(settings)
    after.restore(version=0, counted={})
    assert after.answered_by(report_of(other, "d1")) is None


def test_plans_are_written_after_the_checkpoint_of_their_model(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / FILE).mkdir(parents=True)  # plans cannot be written there
    settings = asynchronous(rounds=3, out=out)
    fleet = DispatchingGridFleet(Link(tmp_path))
    with pytest.raises(StateError, match=FILE):
        run(
            Training(settings, run_id=RUN),
            fleet,
            on_round=lambda _: None,
            run_round=BufferedRounds(fleet, settings),
        )
    assert run_position(out, resume=True) == (RUN, 0)


def report_of(plan: Plan, name: str) -> UpdateReport:
    return UpdateReport(
        name=name,
        round=plan.round,
        num_examples=plan.quota,
        weight=plan.quota,
        loss_sum=1.0,
        micro_batch_size=plan.micro_batch_size,
        seconds=1.0,
        steps=(),
        reason="quota",
    )


class Followed(Link):
    """A network where, whenever plans are sent, the test reads what a standby would have."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        super().__init__(folder)
        self.sent: list[tuple[str, Plan]] = []
        self.known: list[Plan | None] = []
        self._store = SharedFolder(Path(str(settings.standby.shared_state)))
        self._standby = settings.model_copy(update={"out": folder / "standby"})

    def dispatch(self, messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        found = self._store.read(NAME)
        assert found is not None
        assert self._standby.out is not None
        SharedFiles(self._store, self._standby.out).download(TermRecord.of(found[0]))
        for message in sent:
            name, plan = f"d{message.metadata.dst_node_id}", records.read(message.content, Plan)
            plans = PlansOut(self._standby)
            plans.restore(version=plan.model_version, counted={})
            self.sent.append((name, plan))
            self.known.append(plans.answered_by(report_of(plan, name)))
        return super().dispatch(sent)


def test_a_standby_has_each_plan_before_a_device_gets_it(tmp_path: Path) -> None:
    """Or else it would refuse what a device has summed under the plan without a link."""
    standby = {"shared_state": str(tmp_path / "shared")}
    chosen = asynchronous(num_windows=2, rounds=2, out=tmp_path / "out", standby=standby)
    shared = open_run(chosen, lambda *, resume: chosen, is_standby=False, resume=False)
    assert shared is not None
    link = Followed(tmp_path, chosen)
    fleet, training = DispatchingGridFleet(link), Training(chosen, run_id=RUN)
    training.share(shared.publish)
    with shared.serving():
        run(training, fleet, on_round=lambda _: None, run_round=BufferedRounds(fleet, chosen))
    assert {name for name, _ in link.sent} == {"d1", "d2"}
    assert link.known == [plan for _, plan in link.sent]
