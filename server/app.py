"""The server as a Flower ServerApp: a ``Fleet`` made of messages on a Grid.

The same app runs on the simulator's grid, on our gRPC grid and on Flower's own. Flower's types stop
here. On a grid of ours an update is folded straight from the memory in which it arrived; on
Flower's own it is folded reply by reply.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from headwater.common.errors import ConnectionLost, HeadwaterError, LateUpdate
from headwater.common.flower import records
from headwater.common.flower.grid import OwnGrid
from headwater.common.messages import (
    DescribeRequest,
    DeviceReport,
    EvaluateReport,
    Plan,
    ReadyReport,
    Update,
    UpdateReport,
)
from headwater.common.model.parameters import ModelImage
from headwater.common.secagg.protocol import Phase, Request
from headwater.common.settings.schema import from_run_config
from headwater.server.fleet import Dropout, Reply, Traffic
from headwater.server.flower.registration import Registration, check_name
from headwater.server.operations.round_log import RoundLog
from headwater.server.rounds.observer import Observer, Observers
from headwater.server.rounds.round_row import RoundRow
from headwater.server.rounds.run import OnRound, run
from headwater.server.rounds.training import Training

log = logging.getLogger(__name__)
# Of all loggers, Flower's engines show their own alone, with what descends from it.
flower_log = logging.getLogger("flwr.headwater")

Answer = TypeVar("Answer", bound=Update | ReadyReport | EvaluateReport | Reply)

JOIN_POLL_SECONDS = 0.05
FIRST_NOTICE_SECONDS, WAITING_NOTICE_SECONDS = 10.0, 60.0
REPLY_POLL_SECONDS = 0.2


def server_app(
    *, on_round: OnRound, resume: bool = False, observer: Observer | None = None
) -> ServerApp:
    """Return a ServerApp that reports each committed round to ``on_round``, and all to another."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings = from_run_config(context.run_config)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        training = Training(settings, run_id=context.run_id)
        fleet = GridFleet(grid)
        observers = Observers(RoundLog(), *([observer] if observer is not None else []))
        run(training, fleet, on_round=on_round, resume=resume, observer=observers)

    return app


def log_round(row: RoundRow) -> None:
    """Write a round's line to the log."""
    flower_log.info(
        "round %d: loss %.4f, weight %d from %d clients, K %d to %d, %.2f s %s",
        row.round,
        row.loss,
        row.weight,
        row.num_clients,
        *row.k_range,
        row.seconds,
        {name: round(value, 4) for name, value in row.metrics.items()},
    )


app = server_app(on_round=log_round)


class GridFleet:
    """The devices behind a Grid, by name."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._own = grid if isinstance(grid, OwnGrid) else None
        self._roll = Registration(grid)
        self._flower_bytes = [0, 0]  # up, down

    def describe(self, request: DescribeRequest, *, min_clients: int) -> Mapping[str, DeviceReport]:
        if self._own is not None:
            self._own.expect(request)
        next_notice = time.monotonic() + FIRST_NOTICE_SECONDS
        while True:
            self._roll.call(request)
            reports, refused = self._roll.reports, self._roll.refused
            may_begin = self._own is None or self._own.may_begin()
            if may_begin and len(reports) >= min_clients and self._roll.is_settled:
                return {report.name: report for report in reports.values()}
            nobody_else = not getattr(self._grid, "awaits_more", True)
            if refused and (nobody_else or (self._own is None and not reports)):
                raise next(iter(refused.values()))
            if may_begin and time.monotonic() >= next_notice:
                log.warning("waiting: %d of %d clients are here", len(reports), min_clients)
                next_notice = time.monotonic() + WAITING_NOTICE_SECONDS
            time.sleep(JOIN_POLL_SECONDS)

    def ask_again(self, requests: Mapping[str, DescribeRequest]) -> None:
        self._roll.ask_again(requests)

    def turn_seconds(self) -> float:
        return 0.0 if self._own is None else self._own.turn_seconds()

    def train(
        self, plans: Mapping[str, Plan], image: ModelImage, *, timeout_seconds: float | None
    ) -> Iterator[Update | ReadyReport | Dropout]:
        def read(name: str, content: RecordDict) -> Update | ReadyReport:
            if plans[name].is_masked:
                ready = records.read(content, ReadyReport)
                _check_in_time(ready, timeout_seconds)
                return ready
            update = records.read_update(content)
            _check_in_time(update.report, timeout_seconds)
            return update

        return self._send_model("train", plans, image, timeout_seconds, read)

    def converse(
        self,
        phase: Phase,
        requests: Mapping[str, Request],
        *,
        beside: bytes | None = None,
        reply_bytes: int = 0,
        timeout_seconds: float | None,
    ) -> Iterator[Reply | Dropout]:
        def read(_: str, content: RecordDict) -> Reply:
            said = records.read(content, phase.reply)
            return Reply(name=said.name, said=said, beside=records.vector(content))

        if self._own is not None:
            self._own.expect_beside(f"query.{phase.action}", reply_bytes)
        array = None if beside is None else records.flat_array(beside, dtype="float32")
        contents = {name: records.content_of(request, array) for name, request in requests.items()}
        return self._ask(f"query.{phase.action}", contents, phase.action, timeout_seconds, read)

    def evaluate(
        self, plans: Mapping[str, Plan], image: ModelImage, *, timeout_seconds: float | None
    ) -> Iterator[EvaluateReport | Dropout]:
        def read(_: str, content: RecordDict) -> EvaluateReport:
            return records.read(content, EvaluateReport)

        return self._send_model("evaluate", plans, image, timeout_seconds, read)

    def _send_model(
        self,
        message_type: str,
        plans: Mapping[str, Plan],
        image: ModelImage,
        timeout_seconds: float | None,
        read: Callable[[str, RecordDict], Answer],
    ) -> Iterator[Answer | Dropout]:
        """Send each plan with the model."""
        memory = image.buffer().toreadonly()
        array = records.flat_array(memory if self._own else bytes(memory), dtype="uint8")
        contents = {name: records.content_of(plan, array) for name, plan in plans.items()}
        round_number = next((plan.round for plan in plans.values()), 0)
        return self._ask(message_type, contents, str(round_number), timeout_seconds, read)

    def _ask(
        self,
        message_type: str,
        contents: Mapping[str, RecordDict],
        group_id: str,
        timeout_seconds: float | None,
        read: Callable[[str, RecordDict], Answer],
    ) -> Iterator[Answer | Dropout]:
        """Send each device its message; yield what came back, and a Dropout for who did not."""
        nodes = {report.name: node for node, report in self._roll.reports.items()}
        for left in [name for name in contents if name not in nodes]:
            yield Dropout(name=left, error=ConnectionLost(f"{left} left in mid-round"))
        awaited = {nodes[name]: name for name in contents if name in nodes}
        answered: set[int] = set()
        messages = [
            Message(content, nodes[name], message_type, group_id=group_id, ttl=timeout_seconds)
            for name, content in contents.items()
            if name in nodes
        ]
        for node, reply in self._exchange(messages, timeout_seconds):
            if self._roll.take(reply):
                continue  # a newcomer that was slow to describe itself: it joins the next round
            name = awaited.pop(node, None)
            if name is None:
                continue
            answered.add(node)
            try:
                answer = read(name, records.answered(reply))
                check_name(answer.name, name)
                yield answer
            except HeadwaterError as error:
                if isinstance(error, ConnectionLost):
                    self._roll.reports.pop(node, None)
                yield Dropout(name=name, error=error)
        self._roll.forget_questions(answered)
        for name in awaited.values():
            within = "" if timeout_seconds is None else f" within {timeout_seconds} s"
            yield Dropout(name=name, error=LateUpdate(f"{name} did not answer{within}"))

    def _exchange(
        self, messages: list[Message], timeout: float | None
    ) -> Iterable[tuple[int, Message]]:
        """Send messages and yield each reply with the node that the message went to."""
        if self._own is None:
            return self._exchange_by_polling(messages, timeout)
        replies = self._own.send_and_receive(messages, timeout=timeout)
        return ((reply.metadata.src_node_id, reply) for reply in replies)

    def _exchange_by_polling(
        self, messages: list[Message], timeout: float | None
    ) -> Iterator[tuple[int, Message]]:
        """Pull replies from Flower's own grid as they come, rather than all at once.

        An error of the SuperLink comes from the SuperLink's node: only the id that a reply answers
        tells whom it is about. What could not be pushed has no id, and is not waited for.
        """
        self._flower_bytes[1] += sum(_num_bytes(message.content) for message in messages)
        awaited = {message_id for message_id in self._grid.push_messages(messages) if message_id}
        node_of = {
            message.metadata.message_id: message.metadata.dst_node_id for message in messages
        }
        end = None if timeout is None else time.monotonic() + timeout
        while awaited and (end is None or time.monotonic() < end):
            replies = list(self._grid.pull_messages(awaited))
            for reply in replies:
                asked = reply.metadata.reply_to_message_id
                awaited.discard(asked)
                if reply.has_content():
                    self._flower_bytes[0] += _num_bytes(reply.content)
                yield node_of[asked], reply
            if not replies:
                time.sleep(REPLY_POLL_SECONDS)

    def traffic(self) -> Traffic:
        if self._own is not None:
            up, down = self._own.num_bytes()
            return Traffic(bytes_up=up, bytes_down=down)
        return Traffic(bytes_up=self._flower_bytes[0], bytes_down=self._flower_bytes[1])

    def simulated_state(self) -> dict[str, Any]:
        state = getattr(self._grid, "simulated_state", None)
        return state() if state is not None else {}

    def restore_simulated(self, state: Mapping[str, Any]) -> None:
        restore = getattr(self._grid, "restore_simulated", None)
        if restore is not None:
            restore(state)


def _check_in_time(report: ReadyReport | UpdateReport, timeout_seconds: float | None) -> None:
    """Hold a virtual clock's seconds against the deadline, as the grid does the real ones.

    Raises:
        LateUpdate: they are more.
    """
    if timeout_seconds is not None and report.seconds > timeout_seconds:
        raise LateUpdate(f"{report.name}: {report.seconds:.1f} s of {timeout_seconds:.1f}")


def _num_bytes(content: RecordDict) -> int:
    return len(records.head_json(content)) + len(records.vector(content) or b"")
