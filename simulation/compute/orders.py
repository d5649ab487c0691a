"""What goes between the simulator and the processes that compute devices for it.

An order names some devices, their plans and their positions; the result has the reports and the new
positions. Nothing else about a device depends on the process that computes it, and an order that
was lost with its process has changed nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.common.messages import Plan, Step, UpdateReport
from headwater.common.model.frozen_part import Fingerprint
from headwater.common.settings.schema import Settings
from headwater.simulation.compute.report_columns import BlockSums, CohortReports
from headwater.simulation.fleet.devices import ClientPlan, ClientPlans
from headwater.simulation.fleet.position_columns import Ints, StateColumns
from headwater.simulation.vectorised.round_columns import RoundColumns


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """What a worker starts with."""

    settings: Settings
    is_verbose: bool
    frozen: Fingerprint | None = None
    """Of the frozen part, which the worker is given; None if its own is the server's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOrder:
    """A piece of a round: devices to compute one by one; their vectors go into ``slots``."""

    clients: list[ClientPlan]
    slots: Sequence[int]
    run_id: int
    timeout_seconds: float | None
    states: StateColumns
    checkpointed: list[str]
    """Those of the devices that recompute activations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SumOrder:
    """A block of devices whose examples go through the model together."""

    columns: RoundColumns
    """Without the devices; see ``planned``."""
    names: list[str]
    plan: Plan
    """The first device's. What the passes read of a plan is the same in all."""
    run_id: int
    first: int
    """The number of the device that the passes are tried on."""
    with_norms: bool

    @staticmethod
    def of(columns: RoundColumns, *, run_id: int, first: int, with_norms: bool) -> SumOrder:
        """Return the order to compute a block, in which each device has a plan of its own."""
        return SumOrder(
            columns=replace(columns, clients=ClientPlans.of([])),
            names=[*columns.clients.names],
            plan=columns.clients[0].plan,
            run_id=run_id,
            first=first,
            with_norms=with_norms,
        )

    @property
    def planned(self) -> RoundColumns:
        """The block with its devices, all of which have the first one's plan."""
        plans: defaultdict[str, Plan] = defaultdict(lambda: self.plan)
        clients = ClientPlans(self.names, self.columns.parts, plans)
        return replace(self.columns, clients=clients)


Order = TrainOrder | SumOrder


def parts_of(clients: Sequence[ClientPlan]) -> Ints:
    """Return the devices' numbers."""
    return np.array([client.part for client in clients], dtype=np.int64)


PlainReport = dict[str, Any]
"""The fields of an ``UpdateReport``, with tuples for its steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """A computed piece: of each device its report, or the name and message of an error.

    The reports of foreseen devices are in ``blocks``, without the devices; ``replies`` has None for
    each of them, in the order of the blocks. Their vectors were summed in their slots. ``seconds``
    is what the piece took.
    """

    states: StateColumns
    checkpointed: list[str]
    blocks: list[CohortReports]
    replies: list[PlainReport | tuple[str, str] | None]
    sums: dict[int, dict[str, NDArray[np.float32]]]
    """The sums beside the model's, by the reply's place; none of most plans."""
    seconds: float


SumResult = BlockSums | str
"""The sums of a block; or why its examples cannot go through the model together."""
Result = TrainResult | SumResult

STEP_FIELDS = tuple(one.name for one in fields(Step))
_values_of_step = attrgetter(*STEP_FIELDS)


def plain_report(report: UpdateReport) -> PlainReport:
    """Return a report in a form that takes a tenth of the time to pickle."""
    return {**dict(report), "steps": [_values_of_step(step) for step in report.steps]}


def report_of(plain: PlainReport) -> UpdateReport:
    """Return the report that was made plain."""
    steps = tuple(Step(**dict(zip(STEP_FIELDS, values, strict=True))) for values in plain["steps"])
    return UpdateReport(**{**plain, "steps": steps})
