"""Rounds against answers that lie or fail: refused by name, and the rest counts as if alone."""

from __future__ import annotations

import dataclasses
import math
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from headwater.client.app import client_app
from headwater.common.errors import (
    BuffersChanged,
    ConnectionLost,
    CorruptUpdate,
    CountOutOfRange,
    HeadwaterError,
    NonFiniteUpdate,
    NothingSummed,
    RoundAborted,
    SettingsError,
    TaskError,
    TooFewClients,
    UnexpectedUpdate,
)
from headwater.common.flower import records
from headwater.common.messages import (
    Update,
    UpdateReport,
)
from headwater.common.settings.schema import Settings
from headwater.common.system.stop_signals import StopRequests, at_stop_signals, interrupt
from headwater.server.fleet import Dropout
from headwater.server.flower.grid_fleet import GridFleet
from headwater.server.planning.cohort import ConnectedClients
from headwater.server.rounds import round_loop
from headwater.server.rounds.round_loop import (
    MAX_WAIT_SECONDS,
    run,
    seconds_after_abort,
    wait_after_abort,
)
from headwater.server.rounds.round_row import RoundRow
from headwater.server.rounds.run_state import Training
from headwater.simulation.engines.message_grid import InProcessGrid
from headwater.simulation.fleet.virtual_hardware import virtual_hardware

Answer = Update | Dropout
Tamper = Callable[[Answer], Iterator[Answer]]


class Network(GridFleet):
    """Real devices, and a wire that may change what they say."""

    has_virtual_clock = True

    def __init__(self, settings: Settings, tamper: Tamper) -> None:
        grid = InProcessGrid(client_app(virtual_hardware), settings)
        grid.enter_run(secrets.randbits(62))
        super().__init__(grid)
        self._tamper = tamper

    def train(self, *plans_and_model: Any, **how: Any) -> Iterator[Any]:
        for answer in super().train(*plans_and_model, **how):
            assert isinstance(answer, Update | Dropout)
            yield from self._tamper(answer)


def chosen(**changes: Any) -> Settings:
    return Settings.model_validate(
        {
            "task": "tests/tasks.py:TwoLayers",
            "rounds": 2,
            "simulation": {"clients": 3},
            "plan": {"accumulation_steps": 2, "micro_batch_size": 4},
            "optimizer": {"name": "adam", "learning_rate": 0.01},
            **changes,
        }
    )


def honest(answer: Answer) -> Iterator[Answer]:
    yield answer


def name_of(answer: Answer) -> str:
    return answer.name if isinstance(answer, Dropout) else answer.report.name


def without_one(answer: Answer) -> Iterator[Answer]:
    lost = name_of(answer) == "1"
    yield Dropout(name="1", error=ConnectionLost("pulled the plug")) if lost else answer


def trained(settings: Settings, tamper: Tamper) -> tuple[Training, list[RoundRow]]:
    torch.set_num_threads(1)
    rows: list[RoundRow] = []
    training = Training(settings, run_id=secrets.randbits(62))
    run(training, Network(settings, tamper), on_round=rows.append)
    return training, rows


def replaced(**changes: Any) -> Callable[[Update], Update]:
    return lambda update: dataclasses.replace(
        update, report=update.report.model_copy(update=changes)
    )


def with_values(change: Callable[[Tensor], Tensor]) -> Callable[[Update], Update]:
    return lambda update: dataclasses.replace(update, values_P=change(update.values_P.clone()))


def spoiled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda values_P: torch.cat([values_P[:-1], torch.tensor([value])])


HOSTILE: dict[str, tuple[Callable[[Update], Update], type[HeadwaterError]]] = {
    "one coordinate short": (with_values(lambda v: v[:-1]), CorruptUpdate),
    "one coordinate long": (with_values(lambda v: torch.cat([v, v[:1]])), CorruptUpdate),
    "empty": (with_values(lambda v: v[:0]), CorruptUpdate),
    "NaN": (with_values(spoiled(math.nan)), NonFiniteUpdate),
    "infinity": (with_values(spoiled(-math.inf)), NonFiniteUpdate),
    "above its quota": (replaced(num_examples=9, weight=9), CountOutOfRange),
    "no example": (replaced(num_examples=0, weight=0), CountOutOfRange),
    "negative weight": (replaced(weight=-8), CountOutOfRange),
    "negative examples": (replaced(num_examples=-8, weight=-8), CountOutOfRange),
    "too much weight": (replaced(weight=9), CountOutOfRange),
    "the round before": (replaced(round=0), UnexpectedUpdate),
    "a round to come": (replaced(round=99), UnexpectedUpdate),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_update_is_refused_by_name_and_the_other_updates_count(
    case: str,
) -> None:
    change, error = HOSTILE[case]

    def hostile(answer: Answer) -> Iterator[Answer]:
        is_one = isinstance(answer, Update) and answer.report.name == "1"
        yield change(answer) if is_one and isinstance(answer, Update) else answer

    attacked, rows = trained(chosen(), hostile)
    alone, others = trained(chosen(), without_one)
    assert torch.equal(attacked.image.bytes_U8, alone.image.bytes_U8)
    assert rows[0].refused["1"].startswith(f"{error.__name__}: ")
    for row, other in zip(rows, others, strict=True):
        assert f"{error.__name__}: " in {**row.left_out, **row.refused}["1"]
        assert (row.weight, row.loss, row.num_clients) == (other.weight, other.loss, 2)


def faulty(*names: str, late: str = "") -> Tamper:
    """Let these devices say that the task is at fault, and one be late."""

    def tamper(answer: Answer) -> Iterator[Answer]:
        name = name_of(answer)
        if name in names:
            yield Dropout(name=name, error=TaskError("the device keeps the details"))
        elif name != late:
            yield answer

    return tamper


def test_a_task_s_fault_on_every_device_ends_the_run_with_a_device_s_name() -> None:
    with pytest.raises(TaskError, match="0: the device keeps the details"):
        trained(chosen(), faulty("0", "1", "2"))


@pytest.mark.parametrize("late", ["", "2"], ids=["the other answers", "the other is late"])
def test_one_device_s_word_on_the_task_ends_no_run(late: str) -> None:
    """Who else was asked may answer the next round; a round of nobody counts as aborted."""
    settings = chosen(rounds=1, cohort={"max_aborted_rounds": 1, "min_clients": 1})
    if not late:
        _, rows = trained(settings, faulty("0", "1"))
        assert rows[0].num_clients == 1
        return
    with pytest.raises(TooFewClients, match="TaskError"):
        trained(settings, faulty("0", "1", late=late))


def test_with_dataset_weighting_an_update_has_the_weight_of_its_device_s_examples() -> None:
    def of_samples(answer: Answer) -> Iterator[Answer]:
        is_one = isinstance(answer, Update) and answer.report.name == "1"
        yield replaced(weight=8)(answer) if is_one and isinstance(answer, Update) else answer

    by_dataset = chosen(cohort={"weighting": "dataset"})
    _, rows = trained(by_dataset, honest)
    # Three devices of 24 examples each, of which a round sums 8.
    assert [(row.weight, row.num_examples) for row in rows] == [(72, 24), (72, 24)]
    _, rows = trained(by_dataset, of_samples)
    assert [row.weight for row in rows] == [48, 48]
    assert rows[0].refused["1"] == "CountOutOfRange: 1: weight 8, its plan says 24"


@pytest.mark.parametrize("invited", [None, 2], ids=["all", "a sample"])
def test_a_row_has_the_examples_of_an_epoch_and_the_clients_seconds_by_part(
    invited: int | None,
) -> None:
    _, rows = trained(chosen(cohort={"size": invited}), honest)
    for row in rows:
        assert row.num_epoch_examples == 72, "3 devices own 24 each"
        assert [*row.client_seconds] == ["down", "compute", "up", "wait"]
        assert sum(row.client_seconds.values()) == pytest.approx(row.virtual_seconds)
        mean = math.fsum(client.seconds for client in row.clients) / len(row.clients)
        assert row.client_seconds["wait"] == pytest.approx(row.slowest[1] - mean)


@pytest.mark.parametrize("is_virtual", [False, True])
def test_only_a_real_clock_says_what_a_round_takes(
    monkeypatch: pytest.MonkeyPatch, is_virtual: bool
) -> None:
    """On Ray the time of the workers made the plans of the next round, which then differed."""
    monkeypatch.setattr(Network, "has_virtual_clock", is_virtual)
    training, _ = trained(chosen(), honest)
    assert (training.planner.round_seconds == 0) == is_virtual


def test_devices_that_own_the_same_step_alike_with_either_weighting() -> None:
    """Whole numbers: a sum and a loss of 8 examples become those of 24 without a rounding."""
    one_round = {"rounds": 1, "optimizer": {"name": "sgd", "learning_rate": 0.01}}
    samples, rows = trained(chosen(**one_round), honest)
    dataset, weighed = trained(chosen(cohort={"weighting": "dataset"}, **one_round), honest)
    assert torch.equal(samples.image.bytes_U8, dataset.image.bytes_U8)
    assert rows[0].loss == weighed[0].loss


def test_an_unknown_name_is_refused_and_the_other_updates_count() -> None:
    def stranger(answer: Answer) -> Iterator[Answer]:
        is_one = isinstance(answer, Update) and answer.report.name == "1"
        yield replaced(name="stranger")(answer) if is_one and isinstance(answer, Update) else answer

    attacked, rows = trained(chosen(), stranger)
    alone, _ = trained(chosen(), without_one)
    assert torch.equal(attacked.image.bytes_U8, alone.image.bytes_U8)
    assert rows[0].refused["stranger"].startswith("UnexpectedUpdate: ")


def test_a_replayed_update_counts_once() -> None:
    def replay(answer: Answer) -> Iterator[Answer]:
        yield answer
        yield answer

    attacked, rows = trained(chosen(), replay)
    plain, plain_rows = trained(chosen(), honest)
    assert torch.equal(attacked.image.bytes_U8, plain.image.bytes_U8)
    assert [row.weight for row in rows] == [row.weight for row in plain_rows]


def test_an_update_kept_from_the_last_round_is_refused_in_the_next() -> None:
    kept: list[Update] = []

    def replay(answer: Answer) -> Iterator[Answer]:
        if isinstance(answer, Update) and answer.report.name == "1":
            if kept:
                yield kept[0]
                return
            kept.append(dataclasses.replace(answer, values_P=answer.values_P.clone()))
        yield answer

    _, rows = trained(chosen(), replay)
    assert rows[0].refused == {}
    assert rows[1].refused["1"].startswith("UnexpectedUpdate: 1: an update for round 1 in round 2")


def test_the_order_of_the_answers_does_not_change_the_model() -> None:
    waiting: list[Answer] = []

    def reversed_order(answer: Answer) -> Iterator[Answer]:
        if isinstance(answer, Update):
            answer = dataclasses.replace(answer, values_P=answer.values_P.clone())
        waiting.append(answer)
        if len(waiting) == 3:
            yield from reversed(waiting)
            waiting.clear()

    one, _ = trained(chosen(), reversed_order)
    other, _ = trained(chosen(), honest)
    assert torch.equal(one.image.bytes_U8, other.image.bytes_U8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight", "-1"),
        ("num_examples", "-1"),
        ("weight", "1.5"),
        ("weight", "1e400"),
        ("loss_sum", "NaN"),
        ("loss_sum", "1e400"),
        ("seconds", "-1"),
        ("name", '"../etc"'),
        ("name", '""'),
        ("reason", '"because"'),
        ("metric_sums", '{"a": NaN}'),
        ("extra", "1"),
        ("steps", "[1]"),
    ],
)
def test_a_report_out_of_bounds_is_corrupt_and_names_the_field(field: str, value: str) -> None:
    plain = {
        "name": '"pi"',
        "round": "1",
        "num_examples": "1",
        "weight": "1",
        "loss_sum": "1.0",
        "micro_batch_size": "1",
        "seconds": "1",
        "steps": "[]",
        "reason": '"quota"',
    }

    def text(fields: Mapping[str, str]) -> str:
        return "{" + ", ".join(f'"{name}": {raw}' for name, raw in fields.items()) + "}"

    assert records.parse(text(plain), UpdateReport).name == "pi"
    with pytest.raises(CorruptUpdate, match=rf"UpdateReport\.(json|{field})"):
        records.parse(text({**plain, field: value}), UpdateReport)


def test_too_few_clients_leave_model_optimizer_scales_and_places_as_they_were() -> None:
    settings = chosen(rounds=3, cohort={"min_clients": 3, "max_aborted_rounds": 1})
    states: list[tuple[Any, ...]] = []

    def state(training: Training) -> tuple[Any, ...]:
        tensors, rest = training.optimizer.state()
        plain = {name: t.tolist() for name, t in tensors.items()}
        image = bytes(training.image.buffer())
        return image, plain, rest, training.sum.largest, dict(training.counted), training.round

    training = Training(settings, run_id=secrets.randbits(62))
    network = Network(settings, lambda a: without_one(a) if training.round == 1 else honest(a))
    with pytest.raises(
        TooFewClients, match=r"round 2: 2 of 3 clients .*1: ConnectionLost: pulled the plug"
    ):
        run(training, network, on_round=lambda _: states.append(state(training)))
    assert states == [state(training)]


def test_an_aborted_round_is_done_again_with_the_same_examples() -> None:
    settings = chosen(rounds=3, cohort={"min_clients": 3})
    calls: list[str] = []

    def fails_once(answer: Answer) -> Iterator[Answer]:
        calls.append(name_of(answer))
        yield from without_one(answer) if len(calls) in range(4, 7) else honest(answer)

    one, rows = trained(settings, fails_once)
    other, plain_rows = trained(settings, honest)
    assert len(calls) == 4 * 3
    assert torch.equal(one.image.bytes_U8, other.image.bytes_U8)
    assert [row.loss for row in rows] == [row.loss for row in plain_rows]


def test_a_client_that_was_not_counted_gets_the_same_examples_again() -> None:
    seen: list[float] = []

    def lose_first(answer: Answer) -> Iterator[Answer]:
        assert isinstance(answer, Update)
        seen.append(answer.report.loss_sum)
        yield Dropout(name="0", error=ConnectionLost("lost")) if len(seen) == 1 else answer

    # A rate so small that float32 does not move: equal losses mean equal examples.
    settings = chosen(
        simulation={"clients": 2}, optimizer={"name": "sgd", "learning_rate": 1e-30}, rounds=2
    )
    trained(settings, lose_first)
    (zero_first, one_first), (zero_second, one_second) = seen[:2], seen[2:]
    assert zero_first == zero_second
    assert one_first != one_second


def test_too_many_aborted_rounds_end_the_run_with_their_error() -> None:
    settings = chosen(cohort={"min_clients": 3, "max_aborted_rounds": 4})
    calls: list[str] = []

    def counted(answer: Answer) -> Iterator[Answer]:
        calls.append(name_of(answer))
        yield from without_one(answer)

    with pytest.raises(TooFewClients, match="round 1"):
        trained(settings, counted)
    assert len(calls) == 4 * 3


def test_the_error_that_ends_a_run_names_the_cause_of_the_first_attempt_and_its_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What fails last may only follow: devices mask most of their examples once at one model."""
    settings = chosen(cohort={"min_clients": 3, "max_aborted_rounds": 3})
    errors: list[RoundAborted] = [
        NothingSummed("no example counts"),
        NothingSummed("none again"),
        TooFewClients("nobody is left"),
    ]

    def fails(*_: object) -> RoundRow:
        raise errors.pop(0)

    network = Network(settings, honest)
    with pytest.raises(TooFewClients, match=r"nobody is left; .*NothingSummed: no ex") as found:
        run(Training(settings, run_id=1), network, on_round=lambda _: None, run_round=fails)
    assert found.value.remedy == NothingSummed.remedy


def test_aborted_rounds_are_tried_again_after_waits_that_outlast_a_disk_that_is_full_for_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a real clock; five attempts with four waits are the default."""
    waits: list[int] = []
    monkeypatch.setattr(round_loop, "wait_after_abort", waits.append)
    network = Network(chosen(cohort={"min_clients": 3}), without_one)
    network.has_virtual_clock = False
    training = Training(chosen(cohort={"min_clients": 3}), run_id=1)
    with pytest.raises(TooFewClients):
        run(training, network, on_round=lambda row: None)
    assert waits == [1, 2, 3, 4]
    assert sum(map(seconds_after_abort, waits)) > 5
    assert seconds_after_abort(10) == seconds_after_abort(1000) == MAX_WAIT_SECONDS


def test_a_request_to_stop_ends_the_wait_after_an_aborted_round() -> None:
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    with at_stop_signals(StopRequests(interrupt)):
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            wait_after_abort(10)


def test_a_fault_of_the_task_on_every_client_is_the_runs_own_error() -> None:
    def broken(answer: Answer) -> Iterator[Answer]:
        yield Dropout(name=name_of(answer), error=BuffersChanged("training changed the buffer b"))

    with pytest.raises(BuffersChanged, match="the buffer b"):
        trained(chosen(), broken)


def test_more_clients_asked_for_than_simulated_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match=r"5 clients .* 3"):
        trained(chosen(cohort={"min_clients": 5}), honest)


class Counted(BaseException):
    """Ends a run as soon as its first round is sent."""


class CountingNetwork(Network):
    """Notes how many clients and how many answers a round needs."""

    min_clients = num_needed = 0

    def describe(self, *request: Any, **how: Any) -> ConnectedClients:
        self.min_clients = how["min_clients"]
        return super().describe(*request, **how)

    def train(self, *_: Any, num_needed: int = 0, **how: Any) -> Iterator[Any]:
        self.num_needed = num_needed
        raise Counted


@pytest.mark.parametrize(
    ("secure", "expected"), [({}, 2), ({"aggregation": "semi-honest", "min_members": 4}, 4)]
)
def test_a_masked_round_awaits_as_many_clients_and_answers_as_its_session_has_members_at_least(
    secure: dict[str, Any], expected: int
) -> None:
    settings = chosen(simulation={"clients": 5}, cohort={"min_clients": 2}, secure=secure)
    network = CountingNetwork(settings, honest)
    with pytest.raises(Counted):
        run(Training(settings, run_id=1), network, on_round=lambda row: None)
    assert network.num_needed == network.min_clients == expected
