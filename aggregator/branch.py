"""One branch of a tree: serves the aggregator's devices by the orders of the server above.

The devices see a server like any other. It plans nothing, takes no step and keeps no state: plans
come from above, with the round that last counted each device, and only the sum goes up. So an
aggregator that is killed costs its devices' windows of one round, which they use again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from headwater.client.device.bandwidth import Bandwidth
from headwater.common.errors import HeadwaterError, LateUpdate, ModelMismatch
from headwater.common.messages import DescribeRequest, DeviceReport, Plan
from headwater.common.model.parameters import ModelImage
from headwater.common.settings.schema import Settings
from headwater.common.system.console import console
from headwater.common.transport.tls import Credentials, split_address
from headwater.common.tree.branch_messages import (
    MAX_MEMBERS,
    BranchEvaluation,
    BranchPlans,
    Members,
    MembersRequest,
    Refusal,
)
from headwater.common.user_code.task_spec import name_of
from headwater.common.wording import counted
from headwater.server.aggregation.extra_sums import sums_of
from headwater.server.enrolment.enrolment_port import enrolment_port
from headwater.server.enrolment.registry_verifier import RegistryVerifier
from headwater.server.fleet import BranchSum, Dropout
from headwater.server.flower.grid_fleet import GridFleet
from headwater.server.flower.grpc_grid import GrpcGrid
from headwater.server.transport.servicer import Servicer
from headwater.server.tree.aggregator import Aggregator
from headwater.server.tree.branch_wire import check_report, order_in

log = logging.getLogger(__name__)

# The part of a deadline that is the devices'; the rest is for the way of the sum to the server
# above. The lower one holds for a slow link, the upper one for a fast one.
LEAST_SHARE, MOST_SHARE, UNKNOWN_SHARE = 0.5, 0.95, 0.8
UPLOAD_FACTOR = 1.5  # a link is rarely as fast as in its last measurement


def devices_share(
    timeout_seconds: float, *, upload_bytes: int, bytes_per_second: float | None
) -> float:
    """Return which part of the deadline above is the devices', so that their sum arrives in time.

    >>> devices_share(100.0, upload_bytes=8_000_000, bytes_per_second=1e6)
    0.88
    """
    if bytes_per_second is None:
        return UNKNOWN_SHARE
    upload_seconds = UPLOAD_FACTOR * upload_bytes / bytes_per_second
    return min(max(1 - upload_seconds / timeout_seconds, LEAST_SHARE), MOST_SHARE)


@dataclass(frozen=True, kw_only=True, slots=True)
class _OpenPort:
    """The port of one run, and the fleet of the devices that connect to it."""

    run_id: int
    servicer: Servicer
    fleet: GridFleet
    closing: ExitStack


class Branch:
    """The devices of an aggregator; one thread at a time carries out the orders."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        credentials: Credentials | None,
        image: ModelImage,
        *,
        must_end: threading.Event,
    ) -> None:
        """``image`` holds the model from above. ``must_end`` is set when an order must end early.

        It is then awaited no longer, or this process is to stop.
        """
        self.name = name
        self._settings = settings
        self._credentials = credentials
        self._image = image
        self._must_end = must_end
        self._port: _OpenPort | None = None
        self._listen = settings.server.listen
        self.term_above: Callable[[], int] = lambda: 0
        """Returns the term of the server above: a device may have met that server."""

    def enter(self, run_id: int) -> None:
        """Open the devices' port for a run, if it is not open.

        The server above knows an aggregator that was restarted: any message may be the first.

        Raises:
            PortInUse: another process has the port.
        """
        if self._port is None or self._port.run_id != run_id:
            self.close(say_goodbye=False)  # the devices connect again, to the new run
            self._port = self._open(run_id)
        self._port.servicer.follow_term(self.term_above())

    def describe(self, request: DescribeRequest) -> DeviceReport:
        """Return the description of this aggregator.

        Raises:
            ModelMismatch: the run's model is another one.
        """
        own = self._image.layout.digest
        if request.layout_digest != own:
            raise ModelMismatch(
                f"{self.name}: its model's layout is {own[:12]}, the server's "
                f"{request.layout_digest[:12]}"
            )
        return DeviceReport(
            name=self.name, num_examples=None, layout_digest=own, is_aggregator=True
        )

    def members(self, request: MembersRequest) -> Members:
        """Return the devices that are connected and have described themselves; ask the others."""
        fleet = self._fleet
        fleet.share_frozen(self._image)
        found = fleet.describe(request.describe, min_clients=0).reports
        if len(found) > MAX_MEMBERS:
            log.warning(
                "%d devices are too many for an aggregator: the first %d take part",
                len(found),
                MAX_MEMBERS,
            )
        again = {
            name: request.describe.model_copy(update={"left_out": why or None})
            for name, why in request.left_out.items()
            if name in found
        }
        fleet.ask_again(again)
        return Members(devices=tuple(found.values())[:MAX_MEMBERS])

    def train(self, message: BranchPlans, *, link: Bandwidth) -> BranchSum:
        """Let the devices train, and return their sum; ``link`` leads to the server above."""
        plans, timeout_seconds = self._in_time(message, link)
        order = order_in(message, plans)
        done = Aggregator(self.name, self._fleet, self._image).train(
            order,
            self._image,
            num_needed=message.num_needed,
            timeout_seconds=timeout_seconds,
        )
        number = next((plan.round for plan in plans.values()), 0)
        console.print(
            f"round {number}: the sum of {len(done.reports)} of {counted(len(plans), 'device')}",
            soft_wrap=True,
        )
        return done

    def evaluate(self, message: BranchPlans, *, link: Bandwidth) -> BranchEvaluation:
        """Let the devices test the model, and return their reports."""
        plans, timeout_seconds = self._in_time(message, link)
        reports, refused = [], {}
        answers = self._fleet.evaluate(plans, self._image, timeout_seconds=timeout_seconds)
        try:
            for answer in answers:
                try:
                    if isinstance(answer, Dropout):
                        raise answer.error
                    if (plan := plans.get(answer.name)) is not None:
                        check_report(answer, plan)
                    reports.append(answer)
                except HeadwaterError as error:
                    refused[answer.name] = Refusal.of(error)
        except LateUpdate as late:
            log.info("the evaluation ended early: %s", late)
        return BranchEvaluation(reports=tuple(reports), refused=refused)

    def close(self, *, say_goodbye: bool) -> None:
        """Close the devices' port; without a goodbye they keep trying to connect."""
        port, self._port = self._port, None
        if port is not None:
            port.closing.close()
            port.servicer.stop(say_goodbye=say_goodbye)

    @property
    def _fleet(self) -> GridFleet:
        assert self._port is not None  # ``enter`` comes before any order
        return self._port.fleet

    def _in_time(
        self, message: BranchPlans, link: Bandwidth
    ) -> tuple[dict[str, Plan], float | None]:
        """Return the plans, with earlier deadlines, and the seconds until this branch closes."""
        plans, own = message.plans, self._settings.cohort.deadline_seconds
        seconds = message.timeout_seconds
        if seconds is not None:
            num_values = self._image.layout.num_parameters
            sums = sums_of(plans.values(), num_values)
            share = devices_share(
                seconds,
                upload_bytes=8 * (num_values + sum(one.length for one in sums.values())),
                bytes_per_second=link.upload_bytes_per_second,
            )
            seconds *= share
            plans = {name: _sooner(plan, share) for name, plan in plans.items()}
        limits = [limit for limit in (seconds, own) if limit is not None]
        return plans, min(limits, default=None)

    def _open(self, run_id: int) -> _OpenPort:
        settings, task = self._settings, self._settings.task
        servicer = Servicer(
            self._listen,
            run_id=run_id,
            task="" if task is None else name_of(task),
            credentials=self._credentials,
            staging_bytes=settings.server.staging_bytes,
            reconnect_seconds=settings.cohort.reconnect_seconds,
            return_seconds=settings.cohort.return_seconds,
            verifier=RegistryVerifier.of(settings.tls, self._credentials),
        )
        closing = ExitStack()
        try:
            servicer.start()
            closing.enter_context(enrolment_port(settings, stream_port=servicer.port))
        except BaseException:  # a port that stayed open would be in the way of the next attempt
            servicer.stop(say_goodbye=False)
            raise
        host, _ = split_address(self._listen)
        self._listen = f"{host}:{servicer.port}"  # the next run's port is the same
        protection = "mutual TLS" if self._credentials else "plain text"
        console.print(f"listening on {self._listen} ({protection})", soft_wrap=True)
        grid = GrpcGrid(servicer)
        grid.enter_run(run_id)
        grid.check_term = self._check_awaited
        return _OpenPort(run_id=run_id, servicer=servicer, fleet=GridFleet(grid), closing=closing)

    def _check_awaited(self) -> None:
        """Check while devices work that their answers are still awaited.

        Raises:
            LateUpdate: they are not, or this process is to stop.
        """
        if self._must_end.is_set():
            raise LateUpdate(f"{self.name} ended the round: the server above waits no longer")


def _sooner(plan: Plan, share: float) -> Plan:
    deadline = plan.deadline_seconds
    if deadline is None:
        return plan
    return plan.model_copy(update={"deadline_seconds": share * deadline})
