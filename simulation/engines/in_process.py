"""The in-process engine's fleet: simulated devices by calls, without messages or sockets.

Each device does by a call what it would do over the wire: it reports the same about itself,
vanishes in the same rounds, and takes the same seconds of a virtual clock.
``headwater.simulation.compute.modes`` chooses how the gradients are computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np

from headwater.client.flower.state_file import SAMPLER, read_sampler
from headwater.client.trainer.loaded_model import FirstModel
from headwater.common.errors import ConnectionLost, HeadwaterError, LateUpdate, SettingsError
from headwater.common.messages import DescribeRequest, EvaluateReport, Plan, Update, WireMessage
from headwater.common.model.parameters import ModelImage
from headwater.common.settings.schema import Settings
from headwater.common.terms import Terms
from headwater.server.fleet import Answer, Counts, Dropout, Reply, Traffic, everyone
from headwater.server.planning.cohort import ConnectedClients
from headwater.server.planning.plan_table import PlanTable
from headwater.simulation.compute.modes import StartPool, compute_of
from headwater.simulation.engines.roster import FleetRoster
from headwater.simulation.fleet.devices import (
    FIRST_NODE_ID,
    FLEET_STATE,
    MAX_LOOKS,
    ClientPlans,
    Compute,
    Devices,
)
from headwater.simulation.fleet.faults import TRAIN
from headwater.simulation.fleet.fleet_spec import too_few_simulated
from headwater.simulation.fleet.random_events import may_vanish, vanishes_at
from headwater.simulation.fleet.virtual_hardware import moved_bytes
from headwater.simulation.reports.data_survey import report_left_out

if TYPE_CHECKING:
    from headwater.common.flower.sent_model import SentModel
    from headwater.common.phases import Phase
    from headwater.server.transport.device_records import Stage, Stages
    from headwater.simulation.engines.held_models import HeldModels
    from headwater.simulation.engines.pending_answers import PendingAnswers


class LocalFleet:
    """A ``headwater.server.fleet.Fleet`` of simulated devices in this process."""

    has_virtual_clock = True

    def __init__(
        self,
        settings: Settings,
        *,
        run_id: int,
        stages: Stages | None = None,
        start_pool: StartPool | None = None,
    ) -> None:
        """Take the run's settings, with the fleet's number of devices in them.

        The fleet keeps in ``stages`` where devices are with their plans. On the virtual clock all
        compute at once; an update is on its way while the server adds it. See ``compute_of`` for
        ``start_pool``.

        Raises:
            SettingsError: a round would wait for more clients than there are.
        """
        if settings.num_clients_needed > settings.simulation.clients:
            raise too_few_simulated(settings)
        self._settings = settings
        self._run_id = run_id
        self._devices = Devices(settings)
        self._compute: Compute | None = None
        self._start_pool = start_pool
        self._roster = FleetRoster(settings, self._devices)
        self._attempts: Counter[int] = Counter()
        """How often each device was sent a plan in the current round, or the last one."""
        self._last_round = 0
        self._bytes_up = self._bytes_down = 0
        self._stages = stages

    @cached_property
    def _pending(self) -> PendingAnswers:
        """The answers of asynchronous rounds that are under way."""
        from headwater.simulation.engines.pending_answers import PendingAnswers

        return PendingAnswers()

    @cached_property
    def _held(self) -> HeldModels:
        """What devices were last sent, where differences go down."""
        from headwater.simulation.engines.held_models import HeldModels

        return HeldModels(self._devices.trainer.loaded_model.built_id)

    @cached_property
    def _first(self) -> FirstModel:
        return FirstModel(self._devices.trainer.loaded_model.built_id)

    @property
    def can_repeat_rounds(self) -> bool:
        return not self._settings.keeps_device_files  # they would be of later rounds

    def part(self, name: str) -> int:
        """Return a device's number."""
        return self._devices.identities.part(name)

    def report_left_out(self) -> None:
        """Log which devices have examples that cannot be trained on, if the task is checked."""
        if self._settings.check_task:
            report_left_out(self._devices.trainer, self._devices.identities)

    def share_frozen(self, image: ModelImage) -> None:
        if image.layout.num_frozen_bytes:
            self._devices.trainer.loaded_model.share_frozen(image)

    def describe(
        self, request: DescribeRequest, *, min_clients: int, counts: Counts = everyone
    ) -> ConnectedClients:
        """See ``Fleet``; looks at the simulated fleet until enough devices are connected.

        Raises:
            SettingsError: MAX_LOOKS looks for the same round found too few.
            HeadwaterError: too few are left, because devices could not describe themselves.
        """
        number, roster = self._last_round + 1, self._roster
        for look in range(MAX_LOOKS):
            roster.look(request, round_number=number, look=look)
            if roster.has(min_clients, counts):
                roster.log_refusals()
                return roster.clients()
            if (error := roster.take_error()) is not None:
                raise error
        raise SettingsError(
            f"round {number}: {MAX_LOOKS:,} looks at the fleet found too few clients at once, at "
            f"least {min_clients} are needed",
            remedy="lower --min-clients, or raise availability in the fleet's file",
        )

    def ask_again(self, requests: Mapping[str, DescribeRequest]) -> None:
        self._roster.ask_again(requests)

    def turn_seconds(self) -> float:
        return 0.0

    def train(
        self,
        plans: Mapping[str, Plan],
        image: SentModel,
        *,
        num_needed: int = 0,
        timeout_seconds: float | None,
    ) -> Iterator[Answer]:
        self._roster.log_refusals()  # of devices that the plans needed
        called = self._called(plans)
        if not called:
            return
        if self._compute is None:
            self._compute = compute_of(
                self._settings, self._devices, called, start_pool=self._start_pool
            )
        self._begin(called[0].plan.round)
        if may_vanish(self._devices.fleet):
            vanished = np.array([self._has_vanished(one.part) for one in called], dtype=np.bool_)
            for one in compress(called, vanished.tolist()):
                yield Dropout(
                    name=one.name, error=ConnectionLost(f"device {one.name} has vanished")
                )
            called = called.some(np.flatnonzero(~vanished))
        is_whole = self._settings.compression.down == "off"
        if is_whole:
            self._bytes_down += len(plans) * self._first.num_bytes(image.buffer())
        else:
            self._bytes_down += self._held.sent(plans, image)
        self._bytes_down += sum(PlanTable.of(plans).of_each(_tensor_bytes))
        self._note(called.names, "computing")
        for answer in self._compute.train(
            called, image, run_id=self._run_id, timeout_seconds=timeout_seconds
        ):
            if isinstance(answer, Dropout):
                yield answer
                continue
            names = [answer.name] if isinstance(answer, Update) else answer.reports.columns.names
            self._note(names, "uploading")
            num_updates = 1 if isinstance(answer, Update) else len(answer.reports)
            num_values = image.layout.num_parameters
            if isinstance(answer, Update):  # with the sums beside the model's, or without its own
                self._bytes_up += plans[answer.name].update_bytes(num_values)
            else:
                self._bytes_up += num_updates * moved_bytes(self._settings, image.layout)[1]
            if isinstance(answer, Update):
                answer = self._after_absence(answer)
            if isinstance(answer, Update) and _is_late(answer, timeout_seconds):
                text = (
                    f"{answer.name} took {answer.report.seconds:.1f} s, "
                    f"the deadline is {timeout_seconds:.1f} s"
                )
                yield Dropout(name=answer.name, error=LateUpdate(text))
            else:
                yield answer

    def _note(self, names: Iterable[str], stage: Stage) -> None:
        if self._stages is not None:
            self._stages.update(dict.fromkeys(names, stage))

    def _after_absence(self, update: Update) -> Update:
        """Return an update as it arrives; later, if its device is away before it answers."""
        part, report = self._devices.identities.part(update.name), update.report
        seconds = self._devices.absent_seconds(part, round_number=report.round)
        if not seconds:
            return update
        return replace(
            update, report=report.model_copy(update={"seconds": report.seconds + seconds})
        )

    def dispatch(self, plans: Mapping[str, Plan], image: ModelImage, *, round_number: int) -> None:
        self._begin(round_number)
        sent_at = self._pending.now_seconds
        for answer in self.train(plans, image, timeout_seconds=None):
            # Asynchronous rounds compute one device after another, without masks.
            assert isinstance(answer, Update | Dropout)
            self._pending.add(answer, sent_at=sent_at)
        self._note(plans, "computing")

    def next_answer(self) -> Update | Dropout | None:
        if not len(self._pending):
            return None
        answer = self._pending.pop()
        self._note([answer.name], "uploading")
        return answer

    def give_up(self, errors: Mapping[str, HeadwaterError]) -> None:
        """See ``DispatchingFleet``: a device that is away learns nothing of it."""

    @property
    def takes_two_plans(self) -> bool:
        return False

    def hold_back(self, names: Collection[str]) -> None:
        raise NotImplementedError("a simulated device has one plan at a time")

    def drop(self, names: Collection[str]) -> None:
        raise NotImplementedError("a simulated device has one plan at a time")

    def virtual_now(self) -> float:
        return self._pending.now_seconds

    def _begin(self, round_number: int) -> None:
        """Reset the attempts if this is another round."""
        if round_number != self._last_round:
            self._last_round = round_number
            self._attempts.clear()

    def _called(self, plans: Mapping[str, Plan]) -> ClientPlans:
        devices, precision = self._devices, self._devices.trainer.precision
        parts = np.fromiter(devices.identities.parts(plans), np.int64, len(plans))
        called = ClientPlans([*plans], parts, plans)
        if not called or called[0].plan.precision != "auto":  # the same in all plans of a round
            return called
        # All devices compute in this process, or its workers.
        resolved = {
            one.name: precision.resolved(one.plan, devices.identity(one.part)) for one in called
        }
        return ClientPlans(called.names, parts, resolved)

    def _has_vanished(self, part: int) -> bool:
        """Whether a device that is sent a plan vanishes before it answers; counts the attempt."""
        self._attempts[part] += 1
        return self._vanishes_at(part) == TRAIN

    def _vanishes_at(self, part: int) -> str | None:
        """Return the first message that a device does not answer in the current round, if any."""
        attempt = self._attempts[part] - 1
        return vanishes_at(
            self._devices.fleet, part, round_number=self._last_round, attempt=attempt
        )

    def converse(
        self,
        phase: Phase,
        requests: Mapping[str, WireMessage],
        *,
        vector: bytes | None = None,
        reply_bytes: int = 0,
        num_needed: int = 0,
        timeout_seconds: float | None,
    ) -> Iterator[Reply | Dropout]:
        raise NotImplementedError("masked rounds run on messages (headwater.simulation.run)")

    def evaluate(
        self, plans: Mapping[str, Plan], image: SentModel, *, timeout_seconds: float | None
    ) -> Iterator[EvaluateReport | Dropout]:
        trainer = self._devices.trainer
        for name, plan in plans.items():
            part = self._devices.identities.part(name)
            if self._vanishes_at(part) is not None:
                yield Dropout(name=name, error=ConnectionLost(f"device {name} has vanished"))
                continue
            trainer.loaded_model.load(self._run_id, plan.model_version, image.buffer())
            try:
                yield trainer.evaluate(
                    self._devices.identity(part), plan, self._devices.local_store(part)
                )
            except HeadwaterError as error:
                yield Dropout(name=name, error=error)

    def close(self) -> None:
        """End the worker processes, if there are any."""
        if self._compute is not None:
            self._compute.close()

    def traffic(self) -> Traffic:
        """Return the bytes of models and vectors on the wire, without their headers."""
        num_nodes = None if self._compute is None else self._compute.num_nodes
        return Traffic(bytes_up=self._bytes_up, bytes_down=self._bytes_down, num_nodes=num_nodes)

    def simulated_state(self) -> dict[str, Any]:
        """Return the devices' places in their data, as the in-process grid stores them."""
        state: dict[str, Any] = {
            str(FIRST_NODE_ID + part): {SAMPLER: walk}
            for part, walk in self._devices.positions.to_plain()
        }
        return state | {FLEET_STATE: {"last_round": self._last_round, **self._roster.state()}}

    def restore_simulated(self, state: Mapping[str, Any]) -> None:
        for key, kept in state.items():
            if key == FLEET_STATE:
                self._last_round = kept["last_round"]
                self._roster.restore(kept)
            elif SAMPLER in kept:
                self._devices.positions[int(key) - FIRST_NODE_ID] = read_sampler(kept[SAMPLER])


def _tensor_bytes(terms: Mapping[str, Terms]) -> int:
    """Return the bytes of tensors that a plan with these terms brings beside the model."""
    return sum(one.tensor_bytes for one in terms.values())


def _is_late(update: Update, timeout_seconds: float | None) -> bool:
    return timeout_seconds is not None and update.report.seconds > timeout_seconds
