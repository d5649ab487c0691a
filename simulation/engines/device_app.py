"""The device's app as a simulated device runs it, in a process of its own behind the real wire.

What chance and the faults' file decide of a device happens here: it vanishes by refusing to answer,
and lies by changing the vector that it sends. Its clock, memory and link are those of its profile,
so what the process sees of the loopback is not told.
"""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from headwater.client.app import client_app
from headwater.client.device.bandwidth import DOWNLOAD, UPLOAD
from headwater.client.flower.request import SIMULATED
from headwater.common.flower import records
from headwater.common.messages import Plan
from headwater.common.settings.schema import Settings
from headwater.simulation.engines.lying import as_told
from headwater.simulation.engines.shared_round import SharedRound
from headwater.simulation.engines.vanishing import LastAsked, app_of, refusal_of
from headwater.simulation.fleet.faults import TRAIN
from headwater.simulation.fleet.random_events import at_round
from headwater.simulation.fleet.virtual_hardware import simulated_machine


def simulated_app(settings: Settings, part: int, world: SharedRound) -> ClientApp:
    """Return the app of one device of a simulated fleet."""
    inner = client_app(simulated_machine)
    asked = LastAsked()

    def as_simulated(message: Message, context: Context, *, number: int) -> Message:
        context.node_config[SIMULATED] = True
        for key in (UPLOAD, DOWNLOAD):
            context.node_config.pop(key, None)
        with at_round(number):
            return inner(message, context)

    def describe(message: Message, context: Context) -> Message:
        return as_simulated(message, context, number=world.number + 1)

    def unless_vanished(message: Message, context: Context) -> Message:
        nonlocal asked
        kind = message.metadata.message_type
        if kind == TRAIN:
            asked = asked.again(records.read(message.content, Plan).round)
        if asked.has_vanished(settings, part, kind):
            return refusal_of(part, message)
        reply = as_simulated(message, context, number=asked.round)
        if kind != TRAIN:
            return reply
        run_id = context.run_id
        return as_told(message, reply, settings, part, run_id=run_id, number=asked.round)

    return app_of(describe=describe, unless_vanished=unless_vanished)
