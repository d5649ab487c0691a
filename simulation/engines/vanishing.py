"""Which device answers no more in a round, on an engine that keeps a device's context alone.

A device that is invited vanishes for the rest of that attempt of the round (``headwater.simulation.fleet.virtual_hardware.random_events``):
it is there again when it is next asked to train.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from headwater.common.errors import ConnectionLost
from headwater.common.flower import records
from headwater.common.secagg.protocol import PHASES
from headwater.common.settings.schema import Settings
from headwater.simulation.fleet.faults import STAGES
from headwater.simulation.fleet.random_events import vanishes_at

Answering = Callable[[Message, Context], Message]


@dataclass(frozen=True, slots=True)
class LastAsked:
    """The round in which a device was last asked to train, and how often before in it."""

    round: int = 0
    attempt: int = 0

    def again(self, round_number: int) -> LastAsked:
        """Return the same once it is asked in a round."""
        is_same = round_number == self.round
        return LastAsked(round_number, self.attempt + 1 if is_same else 0)

    def has_vanished(self, settings: Settings, part: int, message_type: str) -> bool:
        """Tell whether the device does not answer a message of this round any more."""
        last = vanishes_at(settings, part, round_number=self.round, attempt=self.attempt)
        return last is not None and STAGES.index(message_type) >= STAGES.index(last)


def refusal_of(part: int, message: Message) -> Message:
    """Return what the server sees of a device that has vanished, in place of a reply."""
    lost = ConnectionLost(f"device {part} has vanished")
    return Message(records.refusal(lost, stays_here=True), reply_to=message)


def app_of(*, describe: Answering, unless_vanished: Answering) -> ClientApp:
    """Return an app that answers with the second of these all that belongs to a round."""
    app = ClientApp()
    app.query("describe")(describe)
    app.train()(unless_vanished)
    app.evaluate()(unless_vanished)
    for phase in PHASES:
        app.query(phase.action)(unless_vanished)
    return app
