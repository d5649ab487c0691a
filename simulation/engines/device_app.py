"""The client app as simulated devices run it: virtual hardware, and faults injected on purpose.

The app runs with the hardware of the device's profile in the current round. Two kinds of faults of
``simulation.fleet.faults`` are injected here: a device vanishes by answering with an error for the
rest of an attempt of a round, and a liar sends a falsified vector instead of the one it has summed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from headwater.client.app import client_app
from headwater.client.device.bandwidth import DOWNLOAD, UPLOAD
from headwater.client.flower.request import SIMULATED
from headwater.client.secagg.pending import pending_in
from headwater.client.trainer.run_trainer import run_trainer
from headwater.common.errors import ConnectionLost, SettingsError
from headwater.common.flower import records
from headwater.common.messages import Plan
from headwater.common.secagg.protocol import PHASES
from headwater.common.settings.schema import Settings
from headwater.common.sums.encoded_vector import whole
from headwater.server.flower.registration import DESCRIBE
from headwater.simulation.engines.shared_round import SharedRound
from headwater.simulation.fleet.faults import STAGES, TRAIN, falsifications, falsify
from headwater.simulation.fleet.fleet_spec import FleetSpec, fleet_spec
from headwater.simulation.fleet.identities import identities_of
from headwater.simulation.fleet.random_events import at_round, vanishes_at
from headwater.simulation.fleet.virtual_hardware import virtual_hardware

TRAIN_ATTEMPT = "train_attempt"  # the key of a ``TrainAttempt`` in a node's context

MessageFunction = Callable[[Message, Context], Message]


@dataclass(frozen=True, slots=True)
class TrainAttempt:
    """The last round that a device was invited to, and which attempt of it, from 0."""

    round: int = 0
    attempt: int = 0

    def invited(self, round_number: int) -> TrainAttempt:
        """Return the attempt that follows an invitation to this round."""
        is_same = round_number == self.round
        return TrainAttempt(round_number, self.attempt + 1 if is_same else 0)

    def has_vanished(self, fleet: FleetSpec, part: int, message_type: str) -> bool:
        """Return whether the device leaves a message of this attempt unanswered."""
        first = vanishes_at(fleet, part, round_number=self.round, attempt=self.attempt)
        return first is not None and STAGES.index(message_type) >= STAGES.index(first)


def vanished_reply(name: str, message: Message) -> Message:
    """Return the error that the server receives in place of a vanished device's reply."""
    lost = ConnectionLost(f"device {name} has vanished")
    return Message(records.to_flower_error(lost, is_same_process=True), reply_to=message)


def falsified_reply(
    message: Message, reply: Message, settings: Settings, part: int, *, run_id: int, number: int
) -> Message:
    """Return a device's reply to its plan for round ``number``, falsified if the device lies.

    An update that waits for masking is changed in this process's memory, before it is masked. A
    reply of an app that is not Headwater's is returned unchanged.
    """
    fleet = fleet_spec(settings)
    moment = fleet.moment(part, round_number=number)
    faults = falsifications(fleet.faults, moment)
    if not faults or not reply.has_content() or records.HEAD not in reply.content:
        return reply
    if records.vector(reply.content) is None:
        name = identities_of(settings).name(part)
        pending = pending_in(run_trainer(settings).accumulator).get(run_id, name).update
        pending.values_P.copy_(falsify(pending.values_P, faults, moment))
        return reply
    plan = records.read(message.content, Plan)
    num_values = run_trainer(settings).image.layout.num_parameters
    update = records.read_update(reply.content, plan, num_values=num_values)
    sums = update.joined_sums(plan, num_values=num_values)
    values_P, data = falsify(whole(update.vector), faults, moment), None
    if plan.coding is not None:
        data = plan.coding.encode(values_P, update.name)
    changed = replace(update, values_P=values_P, encoded=None)
    content = records.update_content(changed, data, sums=sums, as_view=True)
    return Message(content, reply_to=message)


def process_app(settings: Settings, part: int, shared_round: SharedRound) -> ClientApp:
    """Return the app of one device with a process of its own (``--engine grpc``)."""
    inner, fleet = client_app(virtual_hardware), fleet_spec(settings)
    own_name = identities_of(settings).name(part)
    attempt = TrainAttempt()
    is_new = True

    def run(message: Message, context: Context, *, number: int) -> Message:
        context.node_config[SIMULATED] = True
        for key in (UPLOAD, DOWNLOAD):  # the loopback's rates are not the simulated link's
            context.node_config.pop(key, None)
        with at_round(number):
            return inner(message, context)

    def describe(message: Message, context: Context) -> Message:
        nonlocal is_new
        number = shared_round.number + 1
        if message.metadata.message_type == DESCRIBE:
            before = shared_round.described(part) if is_new else 0  # of a run that was resumed
            number, is_new = before or number, False
            shared_round.note_described(part, number)
        return run(message, context, number=number)

    def take_part(message: Message, context: Context) -> Message:
        nonlocal attempt
        kind = message.metadata.message_type
        if kind == TRAIN:
            attempt = attempt.invited(records.read(message.content, Plan).round)
        if attempt.has_vanished(fleet, part, kind):
            return vanished_reply(own_name, message)
        reply = run(message, context, number=attempt.round)
        if kind != TRAIN:
            return reply
        return falsified_reply(
            message, reply, settings, part, run_id=context.run_id, number=attempt.round
        )

    return _app_of(describe, take_part)


def ray_app(app: ClientApp, settings: Settings, folder: Path) -> ClientApp:
    """Return an app that runs another as a simulated device of Ray, which keeps only contexts.

    It changes to ``folder`` first: a worker on another machine starts where Ray was started there.
    """
    fleet, identities = fleet_spec(settings), identities_of(settings)

    def run(message: Message, context: Context) -> Message:
        try:
            os.chdir(folder)
        except OSError as error:
            return Message(records.to_flower_error(_no_folder(folder, error)), reply_to=message)
        # Flower keeps the context, whose partition-id is the device's number for all that follows.
        part = int(context.node_config["partition-id"])
        own = Context(
            run_id=context.run_id,
            node_id=context.node_id,
            node_config={**identities.node_config(part), SIMULATED: True},
            state=context.state,
            run_config=context.run_config,
        )
        return app(message, own)

    def take_part(message: Message, context: Context) -> Message:
        kind, part = message.metadata.message_type, int(context.node_config["partition-id"])
        attempt = TrainAttempt(**(records.load_state(context, TRAIN_ATTEMPT) or {}))
        if kind == TRAIN:
            attempt = attempt.invited(int(message.metadata.group_id))
            records.save_state(context, TRAIN_ATTEMPT, attempt)
        if attempt.has_vanished(fleet, part, kind):
            return vanished_reply(identities.name(part), message)
        with at_round(attempt.round):
            return run(message, context)

    return _app_of(run, take_part)


def _app_of(describe: MessageFunction, take_part: MessageFunction) -> ClientApp:
    """Return an app: ``describe`` answers between rounds, ``take_part`` all messages of a round."""
    app = ClientApp()
    app.query("describe")(describe)
    app.query("frozen")(describe)
    app.train()(take_part)
    app.evaluate()(take_part)
    for phase in PHASES:
        app.query(phase.action)(take_part)
    return app


def _no_folder(folder: Path, error: OSError) -> SettingsError:
    return SettingsError(
        f"{socket.gethostname()}, a machine of the Ray cluster, has no folder {folder}, in which "
        f"the simulator was started: {error.strerror}",
        remedy="put the task, its data and the fleet's file at the same paths on every machine",
    )
