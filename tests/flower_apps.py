"""Runs a Flower app in this process, as Flower's own engines run it: message by message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from headwater.common.flower.gradient_reply import TAG, checksum
from headwater.common.flower.grid import (
    CLIENT_APP_FAILED,
    HeadwaterGrid,
    ensure_message_id,
    enter_run,
)

Spoil = Callable[[RecordDict], None]


class AppGrid(HeadwaterGrid):
    """Runs a ClientApp on a few nodes; an exception becomes an error reply, in Flower's words."""

    def __init__(
        self,
        app: ClientApp,
        run_config: Mapping[str, float | int] | None = None,
        num_nodes: int = 3,
    ) -> None:
        super().__init__()
        self._app = app
        self._run_config = dict(run_config or {})
        self._num_nodes = num_nodes
        self._states = {node_id: RecordDict() for node_id in range(num_nodes)}
        self.spoil: dict[int, Spoil] = {}
        self.is_reversed = False
        self.enter_run(1)

    def num_bytes(self) -> tuple[int, int]:
        return 0, 0

    def get_node_ids(self) -> Iterable[int]:
        return range(self._num_nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def replies_to(self, message_ids: Iterable[str]) -> Iterator[Message]:
        raise NotImplementedError

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        ordered = sorted(
            messages, key=lambda message: message.metadata.dst_node_id, reverse=self.is_reversed
        )
        for message in ordered:
            ensure_message_id(message)
            node_id = message.metadata.dst_node_id
            try:
                reply = self._app(message, self.context(node_id))
            except Exception as error:
                reason = f"{type(error)}:<'{error}'>"
                reply = Message(Error(CLIENT_APP_FAILED, reason), reply_to=message)
            if message.metadata.message_type == "train" and node_id in self.spoil:
                self.spoil[node_id](reply.content)
            yield reply

    def context(self, node_id: int) -> Context:
        return Context(
            run_id=1,
            node_id=node_id,
            node_config={"partition-id": node_id, "num-partitions": self._num_nodes},
            state=self._states[node_id],
            run_config=dict(self._run_config),
        )


def train_message(model: nn.Module) -> Message:
    """Return the message that a strategy sends with a model to train."""
    enter_run(1)
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "config": ConfigRecord()})
    message = Message(content, 0, "train")
    ensure_message_id(message)
    return message


def tagged(change: Spoil) -> Spoil:
    """Let a change of a reply's arrays have the checksum of the changed arrays."""

    def spoil(content: RecordDict) -> None:
        change(content)
        (arrays,) = content.array_records.values()
        content.config_records[TAG]["checksum"] = checksum(arrays)

    return spoil


def metrics_of(content: RecordDict) -> MetricRecord:
    """Return a reply's metrics."""
    (metrics,) = content.metric_records.values()
    return metrics
