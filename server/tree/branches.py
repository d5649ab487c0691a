"""The aggregators among a grid's nodes, and the devices that each of them has.

An aggregator is a node that describes itself as one. Before each round the server requests the list
of its devices, because they come and go below it. A device is in one branch at a time: one that has
moved is counted where it was seen first, until that aggregator lists it no more.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from headwater.common.errors import AggregatorRefused, HeadwaterError
from headwater.common.flower import records
from headwater.common.flower.grid import OTHER_HEAD_BYTES, MessageKind
from headwater.common.flower.records import MAX_HEAD_CHARACTERS
from headwater.common.messages import DescribeRequest, DeviceReport, Plan, WireMessage
from headwater.common.model.layout import ModelLayout
from headwater.common.tree.branch_messages import (
    EVALUATE_BRANCH,
    MAX_MEMBERS,
    MAX_MEMBERS_BYTES,
    MEMBERS,
    TRAIN_BRANCH,
    BranchHead,
    BranchPlans,
    Members,
    MembersRequest,
)
from headwater.common.wording import counted
from headwater.server.fleet import BranchSum, Dropout
from headwater.server.flower.intermediaries import Intermediaries, SentPlans
from headwater.server.tree.branch_wire import (
    BranchOrders,
    BranchReports,
    branch_plans,
    of_device,
    parse,
    read_evaluation,
    read_sum,
    replies_needed,
)

log = logging.getLogger(__name__)

AGAIN_SECONDS = 1.0  # between two requests, while a round waits for devices
# An aggregator that does not answer for so long is in no round until it does.
SILENT_BRANCH_SECONDS = 30.0
# Of one aggregator in a run: all its devices may be replaced three times.
MAX_NAMES = 4 * MAX_MEMBERS
MAX_NAME_CHARACTERS = MAX_HEAD_CHARACTERS // 2
MAX_MEMBERS_KEYS = 64 * MAX_MEMBERS
MAX_DOUBLINGS = 9


@dataclass(kw_only=True, slots=True)
class Branch:
    """One aggregator: its devices as it listed them last."""

    name: str
    devices: dict[str, DeviceReport] = field(default_factory=dict)
    is_fresh: bool = False
    """Whether the list is of the round that is being planned."""
    asked_at: float | None = None
    """When a request was sent that has not been answered."""
    answered_at: float = float("-inf")
    is_silent: bool = False
    """Whether it let a round wait in vain, and has not answered since."""
    complaint: str = ""
    """Why the last answer had no list; empty if it had."""
    num_complaints: int = 0
    """How many answers in a row had none. To read them costs, so the next is asked for later."""
    asked_from: float = float("-inf")


class DividedPlans(SentPlans):
    """A round's plans: those of the server's own devices, and each aggregator's by its name."""

    def __init__(
        self,
        *,
        direct: Mapping[str, Plan],
        branches: Mapping[str, Mapping[str, Plan]],
        order: BranchOrders,
    ) -> None:
        """``order`` makes an aggregator's order of its plans."""
        super().__init__(direct)
        self.branches = branches
        self._order = order

    @property
    def sizes(self) -> list[int]:
        """The devices that each reply may count for."""
        return [1] * len(self.direct) + [len(plans) for plans in self.branches.values()]

    def replies_needed(self, num_needed: int) -> int:
        return replies_needed(self.sizes, num_needed)

    def heads(
        self, *, trains: bool, layout: ModelLayout, num_needed: int, timeout_seconds: float | None
    ) -> Mapping[str, WireMessage]:
        num_plans = sum(self.sizes)
        return {
            name: branch_plans(
                own,
                self._order(own) if trains else None,
                layout=layout,
                num_needed=max(num_needed - (num_plans - len(own)), 0),
                timeout_seconds=timeout_seconds,
            )
            for name, own in self.branches.items()
        }

    def kind(self, message_type: str) -> str:
        return f"{message_type}.branch"

    def read_sum(self, name: str, content: RecordDict, layout: ModelLayout) -> BranchSum:
        return read_sum(*_parts(content), self.branches[name], layout)

    def read_tests(self, name: str, content: RecordDict) -> BranchReports:
        return read_evaluation(*_parts(content), self.branches[name])

    def of_clients(self, answers: Iterable[Any]) -> Iterator[Any]:
        """Yield the answers; a lost aggregator's is one for each of its devices."""
        for answer in answers:
            if isinstance(answer, Dropout) and answer.name in self.branches:
                error = of_device(answer.name, answer.error)
                for name in self.branches[answer.name]:
                    yield Dropout(name=name, error=error)
            elif isinstance(answer, BranchReports):
                yield from answer.answers
            else:
                yield answer


def _parts(content: RecordDict) -> tuple[BranchHead, memoryview | bytes]:
    """Return the head and the vector of an aggregator's answer."""
    return records.read(content, BranchHead), records.vector(content) or b""


def _members_bytes(message: Message, num_parameters: int) -> tuple[int, int]:
    return MAX_MEMBERS_BYTES, OTHER_HEAD_BYTES


def _tests_bytes(message: Message, num_parameters: int) -> tuple[int, int]:
    return records.read(message.content, BranchPlans).answer_bytes, OTHER_HEAD_BYTES


def _sum_bytes(message: Message, num_parameters: int) -> tuple[int, int]:
    num_bytes, head_bytes = _tests_bytes(message, num_parameters)
    return 8 * num_parameters + num_bytes, head_bytes


class Branches(Intermediaries):
    """The aggregators of a grid, by node."""

    kinds: ClassVar[Mapping[str, MessageKind]] = {
        f"query.{MEMBERS}": MessageKind(reply_bytes=_members_bytes, is_length_exact=False),
        TRAIN_BRANCH: MessageKind(has_model=True, reply_bytes=_sum_bytes, is_length_exact=False),
        EVALUATE_BRANCH: MessageKind(
            has_model=True, reply_bytes=_tests_bytes, is_length_exact=False
        ),
    }

    def __init__(
        self,
        grid: Grid,
        *,
        order: BranchOrders,
        refusal: Callable[[str], AggregatorRefused | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``order`` makes their orders; ``refusal`` says why a node may be none; None: it may."""
        self._order = order
        self._refusal = refusal
        self._grid = grid
        self._clock = clock
        self._branches: dict[int, Branch] = {}
        self._pending: dict[str, int] = {}
        """The nodes of the requests that have not been answered, by the message."""
        self._names: defaultdict[str, set[str]] = defaultdict(set)
        """All devices that each aggregator, by its name, has listed in this run."""
        self._left_out: dict[str, str] = {}
        """The devices to be described again, and why; taken by the next request for their list."""
        self._twice: set[str] = set()
        """Devices that were listed by two nodes; each is logged once."""

    def admit(self, name: str) -> None:
        if (refusal := self._refusal(name)) is not None:
            raise refusal

    def begin_round(self) -> None:
        """Request every list again before the round is planned.

        A request of the last round may be unanswered: its plans have replaced it.
        """
        self._pending.clear()
        for branch in self._branches.values():
            branch.is_fresh, branch.asked_at = False, None

    def follow(self, aggregators: Mapping[int, str]) -> None:
        """Take the aggregators that are connected now, by node, with their names."""
        for node in self._branches.keys() - aggregators.keys():
            self._forget(node)
        for node in aggregators.keys() - self._branches.keys():
            self._branches[node] = Branch(name=aggregators[node])

    def ask(self, request: DescribeRequest) -> None:
        """Request the lists that are out of date, and again each second what a round waits for."""
        now = self._clock()
        due = [
            node
            for node, branch in self._branches.items()
            if branch.asked_at is None
            and branch.asked_from <= now
            and not (branch.is_fresh and now - branch.answered_at < AGAIN_SECONDS)
        ]
        if not due:
            return
        messages = [self._request(node, request) for node in due]
        pushed = set(self._grid.push_messages(messages))
        for node, message in zip(due, messages, strict=True):
            if message.metadata.message_id in pushed:
                self._pending[message.metadata.message_id] = node
                self._branches[node].asked_at = now

    def _request(self, node: int, request: DescribeRequest) -> Message:
        """Return the request for an aggregator's list, which names its own devices alone."""
        own = self._left_out.keys() & self._branches[node].devices.keys()
        content = MembersRequest(
            describe=request, left_out={name: self._left_out.pop(name) for name in sorted(own)}
        )
        return Message(records.content_of(content), node, f"query.{MEMBERS}", group_id="describe")

    @property
    def pending(self) -> list[str]:
        """The messages whose answers are awaited."""
        return [*self._pending]

    def awaited(self) -> list[str]:
        """Return the aggregators for whose lists the round's plan has to wait."""
        now, names = self._clock(), list[str]()
        for branch in self._branches.values():
            if branch.is_fresh or branch.is_silent or branch.asked_from > now:
                continue
            if branch.asked_at is None or now - branch.asked_at < SILENT_BRANCH_SECONDS:
                names.append(branch.name)
                continue
            branch.is_silent, branch.devices = True, {}
            log.warning(
                "%s has not listed its devices for %g s: the rounds go on without them",
                branch.name,
                SILENT_BRANCH_SECONDS,
            )
        return names

    def take(self, reply: Message) -> bool:
        """Take an aggregator's list; return False for any other reply."""
        node = self._pending.pop(reply.metadata.reply_to_message_id, None)
        if node is None:
            return False
        branch = self._branches.get(node)
        if branch is None:
            return True
        branch.asked_at, branch.is_fresh, branch.is_silent = None, True, False
        branch.answered_at = self._clock()
        before = branch.devices
        try:
            content = records.reply_content(reply)
            head = records.read(content, BranchHead)
            listed = parse(
                head.name, records.vector(content) or b"", Members, most_keys=MAX_MEMBERS_KEYS
            ).devices
            self._check_names(branch.name, {report.name for report in listed})
        except HeadwaterError as error:
            told = f"{branch.name} did not list its devices: {error.code}: {error}"
            if told != branch.complaint:
                log.warning("%s", told)
            branch.devices, branch.complaint = {}, told
            seconds = AGAIN_SECONDS * 2 ** min(branch.num_complaints, MAX_DOUBLINGS)
            branch.num_complaints += 1
            branch.asked_from = branch.answered_at + seconds
            return True
        branch.complaint, branch.num_complaints = "", 0
        # An equal description is kept as it is: a new one would replace what was measured since.
        branch.devices = {
            report.name: before[report.name] if before.get(report.name) == report else report
            for report in listed
        }
        for name in branch.devices.keys() - before.keys():
            number = branch.devices[name].num_examples
            told = "requires masks" if number is None else counted(number, "example")
            log.info("%s joined: %s, by %s", name, told, branch.name)
        return True

    def _check_names(self, aggregator: str, names: set[str]) -> None:
        """Check that an aggregator has not listed too many devices in this run; note their names.

        Raises:
            AggregatorRefused: it has. A list without new names is taken all the same.
        """
        if (length := sum(map(len, names))) > MAX_NAME_CHARACTERS:
            raise AggregatorRefused(
                f"{counted(len(names), 'name')} of {length:,} characters, expected at most "
                f"{MAX_NAME_CHARACTERS:,}: their plans fit in no message",
                remedy="give the devices shorter names, or have another aggregator for some",
            )
        if len(all_names := self._names[aggregator] | names) > MAX_NAMES:
            raise AggregatorRefused(
                f"{len(all_names)} names in this run, expected at most {MAX_NAMES}",
                remedy=f"look into {aggregator}; `--resume` counts its names anew",
            )
        self._names[aggregator] = all_names

    def describe_again(self, requests: Mapping[str, DescribeRequest]) -> None:
        """Let the aggregators ask these devices again, with the next request for their lists."""
        own = self.clients().keys()
        asked = {name: request.left_out or "" for name, request in requests.items()}
        self._left_out |= {name: why for name, why in asked.items() if name in own}

    def clients(self, taken: Iterable[str] = ()) -> dict[str, DeviceReport]:
        """Return all devices of the aggregators, without those whose names are ``taken``."""
        found: dict[str, DeviceReport] = {}
        taken = set(taken)
        for branch in self._branches.values():
            for name, report in branch.devices.items():
                if name in taken or name in found:
                    self._log_twice(name, branch.name)
                else:
                    found[name] = report
        return found

    def divide(self, plans: Mapping[str, Plan], direct: Iterable[str]) -> DividedPlans:
        """Divide a round's plans; ``direct`` are the names of the nodes themselves."""
        own, branches = dict(plans), dict[str, dict[str, Plan]]()
        taken = set(direct)
        for branch in self._branches.values():
            names = [name for name in branch.devices if name in own and name not in taken]
            if names:
                branches[branch.name] = {name: own.pop(name) for name in names}
        return DividedPlans(direct=own, branches=branches, order=self._order)

    def _forget(self, node: int) -> None:
        self._branches.pop(node, None)
        self._pending = {id_: one for id_, one in self._pending.items() if one != node}

    def _log_twice(self, name: str, branch: str) -> None:
        if name not in self._twice:
            self._twice.add(name)
            others = (one.name for one in self._branches.values() if name in one.devices)
            first = next((one for one in others if one != branch), "this server")
            log.warning(
                "%s is listed by %s, and was first at %s, where it counts: one of the two may say "
                "what is not so",
                *(name, branch, first),
            )
