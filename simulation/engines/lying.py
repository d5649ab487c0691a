"""A liar's reply: the vector that it sends is another than the one it has summed."""

from __future__ import annotations

from dataclasses import replace

from flwr.app import Message

from headwater.client.training.trainer import resident_of
from headwater.common.flower import records
from headwater.common.settings.schema import Settings
from headwater.simulation.fleet.faults import lie, lies
from headwater.simulation.fleet.profiles import faults_of, moment_of


def as_told(
    message: Message, reply: Message, settings: Settings, part: int, *, run_id: int, number: int
) -> Message:
    """Return a device's reply to its plan as it sends it, in the round of this number.

    An update that is to be masked is changed where this process holds it, as its device would do
    it. What an app of another's sends goes as it is.
    """
    moment = moment_of(settings, part, round_number=number)
    told = lies(faults_of(settings), moment)
    if not told or not reply.has_content() or records.HEAD not in reply.content:
        return reply
    if records.vector(reply.content) is None:
        assert settings.task is not None  # it has been trained on
        resident = resident_of(
            settings.task,
            replace_batch_norm=settings.model.replace_batch_norm,
            check_task=settings.check_task,
        )
        held = resident.held.of(run_id, str(part)).session.trained
        held.values_P.copy_(lie(held.values_P, told, moment))
        return reply
    update = records.read_update(reply.content)
    changed = replace(update, values_P=lie(update.values_P, told, moment))
    return Message(records.update_content(changed, as_view=True), reply_to=message)
