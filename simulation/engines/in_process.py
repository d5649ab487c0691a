"""The devices of this machine as the rounds see them: no messages, no sockets, one model.

What a device would do over the wire it does here by a call: it tells the same of itself, vanishes
in the same rounds, takes the same seconds of a virtual clock. How its gradients are computed is a
matter of its own (``headwater.simulation.compute.modes.modes``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import compress
from typing import Any

from headwater.client.flower.state_file import WALK, walk_of
from headwater.common.errors import ConnectionLost, HeadwaterError, LateUpdate, SettingsError
from headwater.common.messages import (
    DescribeRequest,
    DeviceReport,
    EvaluateReport,
    Plan,
    Ready,
    Update,
)
from headwater.common.model.parameters import ModelImage
from headwater.common.secagg.protocol import Phase, Request
from headwater.common.settings.schema import Settings
from headwater.server.fleet import Dropout, Reply, Traffic, UpdateOfMany
from headwater.simulation.compute.modes import compute_of
from headwater.simulation.compute.worker_pool import Workers
from headwater.simulation.engines.roster import Roster
from headwater.simulation.fleet.devices import Called, Compute, Devices
from headwater.simulation.fleet.faults import TRAIN
from headwater.simulation.fleet.nodes import FIRST_NODE_ID, GRID, MOST_LOOKS
from headwater.simulation.fleet.random_events import may_vanish, vanishes_at


class LocalFleet:
    """A ``headwater.server.fleet.Fleet`` of simulated devices in this process."""

    def __init__(self, settings: Settings, *, run_id: int) -> None:
        """Take the run's settings, with the fleet's number of devices in them.

        Raises:
            SettingsError: a round would wait for more clients than there are.
        """
        needed, clients = settings.cohort.min_clients, settings.simulation.clients
        if needed > clients:
            raise SettingsError(
                f"a round needs {needed} clients and the simulator has {clients}",
                remedy="lower --min-clients, or raise --clients",
            )
        self._settings = settings
        self._run_id = run_id
        self._devices = Devices(settings)
        self._compute: Compute | None = None
        self._roster = Roster(settings, self._devices)
        self._asked: Counter[int] = Counter()
        """How often each device was asked to train in the round at hand, or the last one."""
        self._last_round = 0
        self._bytes_up = self._bytes_down = 0

    # Who is there.

    def describe(self, request: DescribeRequest, *, min_clients: int) -> Mapping[str, DeviceReport]:
        """See ``Fleet``: look at the fleet until enough are there.

        Raises:
            SettingsError: it was looked at MOST_LOOKS times for the same round.
            HeadwaterError: what kept a device from describing itself, if too few are left.
        """
        number, roster = self._last_round + 1, self._roster
        for look in range(MOST_LOOKS):
            roster.look(request, round_number=number, look=look)
            if roster.has(min_clients):
                return roster
            if roster.refused:
                raise next(iter(roster.refused.values()))
        raise SettingsError(
            f"round {number}: {MOST_LOOKS:,} looks at the fleet found too few clients at once, at "
            f"least {min_clients} are needed",
            remedy="lower --min-clients, or raise availability in the fleet's file",
        )

    def ask_again(self, requests: Mapping[str, DescribeRequest]) -> None:
        self._roster.ask_again(requests)

    def turn_seconds(self) -> float:
        return 0.0

    # What they answer.

    def train(
        self, plans: Mapping[str, Plan], image: ModelImage, *, timeout_seconds: float | None
    ) -> Iterator[Update | UpdateOfMany | Ready | Dropout]:
        if self._compute is None:
            self._compute = compute_of(self._settings, self._devices)
        called = [Called(name, int(name), plan) for name, plan in plans.items()]
        if called:
            self._begin(called[0].plan.round)
        if may_vanish(self._settings):
            vanished = [self._has_vanished(one.part) for one in called]
            for one in compress(called, vanished):
                yield Dropout(
                    name=one.name, error=ConnectionLost(f"device {one.name} has vanished")
                )
            called = [one for one, is_gone in zip(called, vanished, strict=True) if not is_gone]
        self._bytes_down += len(plans) * image.layout.num_bytes
        for answer in self._compute.train(
            called, image, run_id=self._run_id, timeout_seconds=timeout_seconds
        ):
            if isinstance(answer, Dropout):
                yield answer
                continue
            reports = [answer.report] if isinstance(answer, Update) else answer.reports
            self._bytes_up += len(reports) * 4 * image.layout.num_parameters
            if isinstance(answer, Update) and _is_late(answer, timeout_seconds):
                text = f"{answer.name}: {answer.report.seconds:.1f} s of {timeout_seconds:.1f}"
                yield Dropout(name=answer.name, error=LateUpdate(text))
            else:
                yield answer

    def _begin(self, round_number: int) -> None:
        """Count anew how often devices are asked, if this is another round."""
        if round_number != self._last_round:
            self._last_round = round_number
            self._asked.clear()

    def _has_vanished(self, part: int) -> bool:
        """Tell whether a device answers no more in the round that it is asked to train in."""
        self._asked[part] += 1
        return self._vanishes_at(part) == TRAIN

    def _vanishes_at(self, part: int) -> str | None:
        """Return the first message that a device does not answer in the round at hand, if any."""
        attempt = self._asked[part] - 1
        return vanishes_at(self._settings, part, round_number=self._last_round, attempt=attempt)

    def converse(
        self,
        phase: Phase,
        requests: Mapping[str, Request],
        *,
        beside: bytes | None = None,
        reply_bytes: int = 0,
        timeout_seconds: float | None,
    ) -> Iterator[Reply | Dropout]:
        raise SettingsError("masked updates travel as messages", remedy="take --wire")

    def evaluate(
        self, plans: Mapping[str, Plan], image: ModelImage, *, timeout_seconds: float | None
    ) -> Iterator[EvaluateReport | Dropout]:
        resident = self._devices.resident
        for name, plan in plans.items():
            if self._vanishes_at(int(name)) is not None:
                yield Dropout(name=name, error=ConnectionLost(f"device {name} has vanished"))
                continue
            resident.load_model(self._run_id, plan.model_version, image.buffer())
            try:
                yield resident.evaluate(self._devices.identity(int(name)), plan)
            except HeadwaterError as error:
                yield Dropout(name=name, error=error)

    def close(self) -> None:
        """End the processes that compute, if there are any."""
        if isinstance(self._compute, Workers):
            self._compute.close()

    def traffic(self) -> Traffic:
        """Return what models and vectors would take on the wire, without the heads beside them."""
        return Traffic(bytes_up=self._bytes_up, bytes_down=self._bytes_down)

    # What a checkpoint keeps of them: as the in-process grid keeps it.

    def simulated_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            str(FIRST_NODE_ID + part): {WALK: walk} for part, walk in self._devices.walks.plain()
        }
        return state | {GRID: {"last_round": self._last_round}}

    def restore_simulated(self, state: Mapping[str, Any]) -> None:
        for key, kept in state.items():
            if key == GRID:
                self._last_round = kept["last_round"]
            elif WALK in kept:
                self._devices.walks[int(key) - FIRST_NODE_ID] = walk_of(kept[WALK])


def _is_late(update: Update, timeout_seconds: float | None) -> bool:
    return timeout_seconds is not None and update.report.seconds > timeout_seconds
