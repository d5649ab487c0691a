"""One committed round's figures, as rows: of the round and of each of its clients.

``headwater.server.operations.round_log`` writes them to rounds.jsonl. Every example, update or
client that is skipped, refused, clipped or left out is counted here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from headwater.common.estimates.gradient_noise import estimates_after_steps
from headwater.common.messages import Plan, ReadyReport, UpdateReport
from headwater.server.aggregation.round_reports import AcceptedReports, mean_loss
from headwater.server.planning.plan_table import PlanTable
from headwater.server.planning.target_batch import TargetBy


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientRow:
    """One client's figures in a round."""

    name: str
    accumulation_steps: int
    micro_batch_size: int
    num_examples: int
    num_refused: int
    weight: int
    seconds: float
    loss: float
    step_seconds: list[float]
    step_loss: list[float]
    step_gradient_norm: list[float | None]
    gradient_variance: list[float | None]
    peak_bytes: int
    reason: str
    plan: str
    # The examples by which the device's data have changed (docs/data.md).
    num_joined: int = 0
    num_left: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedClientRow:
    """One client's figures in a masked or private round: its plan, and its seconds until ready.

    Only the client knows how much of the plan it summed, the result, and the memory that it took.
    """

    name: str
    planned_steps: int
    planned_micro_batch_size: int
    planned_examples: int
    seconds: float
    plan: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRow:
    """One committed round, as it is written to rounds.jsonl."""

    round: int
    num_clients: int
    num_invited: int
    num_examples: int
    weight: int
    loss: float
    metrics: dict[str, float]
    learning_rate: float
    seconds: float
    # Of the server's parts: wait, plan, train, fold, unmask or divide, step, evaluate.
    seconds_split: dict[str, float]
    slowest_client_seconds: float
    updates_per_hour: float
    bytes_up: int
    bytes_down: int
    num_scale_shifts: int
    # The round's target in examples, and the setting that gives it; None where K is set.
    target: int | None = None
    target_by: TargetBy | None = None
    # S, |G|^2 and heterogeneity are this round's own, the noise scale S/|G|^2 is that of the rounds
    # so far, all per unit of weight (server/planning/noise_scale.py). ``measured_share`` is the
    # share of the weight that was sent by clients with measurements. None where no client measured.
    noise_scale: float | None = None
    gradient_variance: float | None = None
    squared_gradient: float | None = None
    heterogeneity: float | None = None
    measured_share: float | None = None
    # Examples that the clients left out: an exception, or a loss or gradient that is not finite.
    num_examples_left_out: int = 0
    # What the evaluation could not use, of the server's test examples and of those that devices
    # hold out; the devices in its metrics (None without --evaluate-on-devices), and why not others.
    num_test_left_out: int = 0
    num_held_out_left_out: int = 0
    num_held_out_clients: int | None = None
    not_evaluated: dict[str, str] = field(default_factory=dict)
    # The metrics of the devices of each label, where that betrays no few of them
    # (server/rounds/evaluation.py), and how many they are.
    metrics_by_label: dict[str, dict[str, float]] = field(default_factory=dict)
    # Mean seconds of the clients that answered, from the plans' departure to the last answer: down,
    # compute, up and wait (server/aggregation/round_seconds.py). Empty in asynchronous rounds.
    client_seconds: dict[str, float] = field(default_factory=dict)
    # An epoch: the examples of all connected clients, by those of the invited where not all are.
    # None where a client does not tell its number.
    num_epoch_examples: int | None = None
    # The slowest client's seconds if the clients' clock is virtual; None where the clock is real.
    virtual_seconds: float | None = None
    # The rate of the local steps, where it changes from round to round.
    local_learning_rate: float | None = None
    # The machines that computed the clients, where these are simulated on a cluster.
    num_nodes: int | None = None
    # Of asynchronous rounds: the staleness of the accepted updates, the model of each, the windows
    # of those that have more than one, the weight of all after the discount, how many updates were
    # refused as too stale, and how many devices still work on plans of this model or of an older
    # one. None and empty in synchronous rounds.
    staleness_mean: float | None = None
    staleness_max: int | None = None
    model_versions: dict[str, int] = field(default_factory=dict)
    num_windows: dict[str, int] = field(default_factory=dict)
    discounted_weight: float | None = None
    num_stale: int | None = None
    num_at_work: int | None = None
    # The settings that a resumed run changed before this round: the values before and since.
    settings_changed: dict[str, list[Any]] = field(default_factory=dict)
    # The number of earlier attempts at this round, which were aborted.
    num_aborted: int = 0
    # Coordinates and numbers that a masked round's fixed-point ranges cut off; None without masks.
    num_clipped: int | None = None
    # What the server sees of a masked round: how many coordinates of one device's vector, and of
    # the opened sum, lie in each 32nd part of the ring (common/estimates/ring_histogram.py).
    ring_masked: Sequence[int] | None = None
    ring_opened: Sequence[int] | None = None
    # Privacy spent so far, and this round's noise; None without differential privacy. With it the
    # loss is NaN, because it is not released, and all counts are those of the plans.
    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None = None
    privacy_unit: str | None = None
    # The clip norm of a private round. If it follows a quantile: the share of updates within it,
    # under noise, which may lead out of 0..1.
    clip_norm: float | None = None
    clip_share: float | None = None
    # Clients that claimed more than was believed, and those that were left out.
    num_bounded: int = 0
    # Plain updates whose norm was beyond the limit (clipped, refused or kept, as set), or whose
    # figures were far beyond the others' (in no mean).
    num_outliers: int = 0
    # Clients whose quotas were below plan.least_share of an even share.
    below_share: Sequence[str] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    clients: Sequence[ClientRow] = ()
    masked_clients: list[MaskedClientRow] = field(default_factory=list)

    def loss_text(self, form: str = ".4g") -> str:
        """Return the loss as a person reads it."""
        if self.epsilon is None and math.isnan(self.loss):
            return "no loss"
        return "loss hidden" if self.epsilon is not None else f"loss {self.loss:{form}}"

    @property
    def k_range(self) -> tuple[int, int]:
        """The smallest and the largest K of the cohort; of its plans in a masked round."""
        steps = figure_of(self, "accumulation_steps")
        return min(steps), max(steps)

    @property
    def slowest(self) -> tuple[str, float]:
        """The name of the client that took longest, and its seconds."""
        seconds = figure_of(self, "seconds")
        longest = max(seconds)
        return figure_of(self, "name")[seconds.index(longest)], longest

    @property
    def stop_reasons(self) -> list[str]:
        """Why each client's window ended; none of a masked round."""
        return [reason for reason in figure_of(self, "reason") if reason is not None]

    def figures(self) -> dict[str, float]:
        """Return the round's own numbers and metrics by name, without those that are None.

        The loss of a private round is hidden, and is left out; a round without gradients has none.
        """
        own = {
            one.name: value
            for one in fields(self)
            if isinstance(value := getattr(self, one.name), int | float)
        }
        if self.epsilon is not None or math.isnan(self.loss):
            del own["loss"]
        return own | self.metrics


def client_row(report: UpdateReport, *, plan_reason: str, moves_model: bool = False) -> ClientRow:
    """Return the row of a client's report."""
    steps = report.steps
    return ClientRow(
        name=report.name,
        accumulation_steps=report.num_steps,
        micro_batch_size=report.micro_batch_size,
        num_examples=report.num_examples,
        num_refused=report.num_refused,
        num_joined=report.num_joined,
        num_left=report.num_left,
        weight=report.weight,
        seconds=report.seconds,
        loss=mean_loss(report.loss_sum, report.weight),
        step_seconds=[step.seconds for step in steps],
        step_loss=[step.loss for step in steps],
        step_gradient_norm=[step.gradient_norm for step in steps],
        # Local steps move the model, so their gradients are not of two batch sizes at one model.
        gradient_variance=(
            [None] * len(steps)
            if moves_model
            else [found.variance if found else None for found in estimates_after_steps(steps)]
        ),
        peak_bytes=report.peak_bytes,
        reason=report.reason,
        plan=plan_reason,
    )


Figure = Sequence[Any] | NDArray[Any]
"""One figure of all clients: an array if they came as columns."""


class ClientRows(Sequence[ClientRow]):
    """The rows of a round's clients; each is made when it is read, as often none is."""

    def __init__(self, accepted: AcceptedReports, plans: Mapping[str, Plan]) -> None:
        is_whole = len(accepted) == len(plans)  # no other client's report is accepted
        self.names = [*plans] if is_whole else [name for name in plans if name in accepted]
        self.plans = plans
        self._accepted = accepted
        self._told: Mapping[str, Figure] | None = None

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, at: int) -> ClientRow: ...
    @overload
    def __getitem__(self, at: slice) -> list[ClientRow]: ...
    def __getitem__(self, at: int | slice) -> ClientRow | list[ClientRow]:
        if isinstance(at, slice):
            return [self._row(name) for name in self.names[at]]
        return self._row(self.names[at])

    @property
    def told(self) -> Mapping[str, Figure]:
        """Each figure of all clients but those of their plans and their steps."""
        if self._told is None:
            self._told = self._accepted.figures(self.names)
        return self._told

    def columns(self) -> dict[str, Figure]:
        """Return each figure of all clients, without making their rows.

        The steps' figures are lists of all clients' steps, ``num_steps`` of each.
        """
        return {**self.told, "plan": self.column("plan")} | self._steps()

    def column(self, name: str) -> Sequence[Any]:
        """Return one figure of all clients, none of their steps' lists, as Python has it."""
        if name == "plan":
            return list(map(PlanTable.of(self.plans).reason, self.names))
        figure = self.told[name]
        return figure.tolist() if isinstance(figure, np.ndarray) else [*figure]

    def _steps(self) -> dict[str, Figure]:
        plain = self._accepted.plain_steps(self.names)
        if plain is not None:
            numbers, seconds, losses = plain
            none = np.full(len(seconds), np.nan)
            return {
                "num_steps": numbers,
                "step_seconds": seconds,
                "step_loss": losses,
                "step_gradient_norm": none,
                "gradient_variance": none,
            }
        rows = [*self]
        lists = ("step_seconds", "step_loss", "step_gradient_norm", "gradient_variance")
        flat = {name: [x for row in rows for x in getattr(row, name)] for name in lists}
        return {"num_steps": [len(row.step_seconds) for row in rows], **flat}

    def _row(self, name: str) -> ClientRow:
        plan = self.plans[name]
        report = self._accepted[name]
        return client_row(report, plan_reason=plan.reason, moves_model=plan.moves_model)


Row = RoundRow | Mapping[str, Any]
"""A round's row, or its line in rounds.jsonl."""
PLANNED = {
    "accumulation_steps": "planned_steps",
    "micro_batch_size": "planned_micro_batch_size",
    "num_examples": "planned_examples",
    "weight": "planned_examples",
}
"""The plan's figures, shown for a masked client whose own figures only the client knows."""


def figure_of(row: Row, name: str) -> list[Any]:
    """Return one figure of all clients of a round, a masked client's by its plan; None if unknown.

    ``name`` is a field of ``ClientRow`` other than the steps' lists. The plain clients come first.
    """
    plain = column_of(field_of(row, "clients"), name)
    masked = field_of(row, "masked_clients") or ()
    return [*plain, *(field_of(client, PLANNED.get(name, name)) for client in masked)]


def column_of(clients: Sequence[Any], name: str) -> Sequence[Any]:
    """Return one figure of clients of one kind, however they are stored."""
    column: Callable[[str], Sequence[Any]] | None = getattr(clients, "column", None)
    return [field_of(client, name) for client in clients] if column is None else column(name)


def field_of(row: Row | ClientRow | MaskedClientRow, name: str) -> Any:
    """Return a field of a row; None in a row that lacks it, as one of an earlier version may."""
    return row.get(name) if isinstance(row, Mapping) else getattr(row, name, None)


def masked_client_row(answer: ReadyReport | UpdateReport, plan: Plan) -> MaskedClientRow:
    """Return the row of a client in a masked round, or in a private one."""
    return MaskedClientRow(
        name=answer.name,
        planned_steps=plan.accumulation_steps,
        planned_micro_batch_size=plan.micro_batch_size,
        planned_examples=plan.quota,
        seconds=answer.seconds or 0.0,
        plan=plan.reason,
    )
