"""The aggregator as a Flower ClientApp: to the server above it is one node with one answer.

``client.flower.node.Node`` runs it as it runs a device's app, so the aggregator has a device's
stream: enrolment, TLS and its renewal, reconnecting, several addresses, resumed uploads, terms.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from headwater.aggregator.branch import Branch
from headwater.client.device.bandwidth import read_bandwidth
from headwater.client.device.hardware import this_machine
from headwater.client.flower.request import read_request
from headwater.client.frozen.frozen_parts import holds_frozen, take_frozen
from headwater.common.errors import HeadwaterError
from headwater.common.flower import records
from headwater.common.messages import DescribeRequest
from headwater.common.tree.branch_messages import MEMBERS, BranchHead, BranchPlans, MembersRequest
from headwater.server.tree.branch_wire import evaluation_payload, members_payload, sum_payload

log = logging.getLogger(__name__)

Handle = Callable[[Message, Context], RecordDict]


def branch_app(branch: Branch) -> ClientApp:
    """Return the ClientApp of an aggregator."""

    def describe(message: Message, context: Context) -> RecordDict:
        request = records.read(message.content, DescribeRequest)
        report = branch.describe(request)
        lacks = not holds_frozen(read_request(message, context, this_machine), request.frozen)
        return records.content_of(report.model_copy(update={"lacks_frozen": lacks}))

    def take_part_of_model(message: Message, context: Context) -> RecordDict:
        return records.content_of(take_frozen(read_request(message, context, this_machine)))

    def members(message: Message, _: Context) -> RecordDict:
        listed = branch.members(records.read(message.content, MembersRequest))
        return _content(*members_payload(branch.name, listed))

    def train(message: Message, context: Context) -> RecordDict:
        plans = records.read(message.content, BranchPlans)
        return _content(*sum_payload(branch.train(plans, link=read_bandwidth(context.node_config))))

    def evaluate(message: Message, context: Context) -> RecordDict:
        plans = records.read(message.content, BranchPlans)
        found = branch.evaluate(plans, link=read_bandwidth(context.node_config))
        return _content(*evaluation_payload(branch.name, found))

    app = ClientApp()
    app.query("describe")(_answering(branch, describe))
    app.query("frozen")(_answering(branch, take_part_of_model))
    app.query(MEMBERS)(_answering(branch, members))
    app.train("branch")(_answering(branch, train))
    app.evaluate("branch")(_answering(branch, evaluate))
    return app


def _content(head: BranchHead, vector: bytes) -> RecordDict:
    return records.content_of(head, records.flat_array(vector, dtype="uint8"))


def _answering(branch: Branch, handle: Handle) -> Callable[[Message, Context], Message]:
    """Return a handler in the branch's run, which answers with an error where one is raised."""

    def reply(message: Message, context: Context) -> Message:
        try:
            branch.enter(context.run_id)
            return Message(handle(message, context), reply_to=message)
        except Exception as error:
            if not isinstance(error, HeadwaterError):
                log.exception("the aggregator failed")
            elif error.is_private:  # else the server above shows it
                log.warning("%s: %s", error.code, error)
            return Message(records.to_flower_error(error), reply_to=message)

    return reply
