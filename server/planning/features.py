"""The features of a round's plans: the moments at which they act on them, and the one list of them.

A feature is imported if the run's settings turn it on, or if its model needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from headwater.common.messages import DescribeRequest, DeviceReport
from headwater.common.model.layout import ModelLayout
from headwater.common.settings.schema import Settings
from headwater.common.terms import Terms, named
from headwater.common.user_code.named_objects import part_of
from headwater.server.planning.planner import Assigned
from headwater.server.planning.target_batch import Demand
from headwater.server.planning.vitals_columns import Floats, Ints

Weights = Mapping[str, int]


class DraftPlans:
    """A round's plans that are being written, in columns of the clients that are assigned work."""

    def __init__(self, assigned: Assigned, micro_batch_size: Ints, *, round_number: int) -> None:
        self.assigned = assigned
        self.round_number = round_number
        self.micro_batch_size = micro_batch_size
        self.finish_seconds: Floats = assigned.finish_seconds(micro_batch_size)
        self.quota_words: Mapping[str, str] = {}
        """What bound a client's quota, in the place of the planner's own words."""
        self.more_words: Mapping[str, str] = {}
        """What is said behind that."""
        self.is_evened = True
        """Whether a smaller micro-batch than assigned is one that tells the noise."""
        self.terms: Sequence[Mapping[str, Terms]] = [{}] * len(assigned)

    def ask(self, terms: Terms) -> None:
        """Add a feature's terms to all plans."""
        self.ask_each([terms] * len(self.assigned))

    def ask_each(self, terms: Sequence[Terms]) -> None:
        """Add a feature's terms to each plan."""
        made: dict[tuple[int, int], Mapping[str, Terms]] = {}
        pairs = list(zip(self.terms, terms, strict=True))
        for before, one in pairs:
            made.setdefault((id(before), id(one)), {**before, **named(one)})
        self.terms = [made[id(before), id(one)] for before, one in pairs]


class PlanningMoments:
    """The moments of a round's planning; a feature overrides those that it needs."""

    chooses_clients = False
    """Whether ``admits`` says no to some."""

    def admits(self, report: DeviceReport) -> bool:
        """Return whether the run is for this client; the others stay connected, and wait."""
        return True

    def describe(self, request: DescribeRequest) -> DescribeRequest:
        """Change the request for a client's description."""
        return request

    def metrics(self, reports: Sequence[DeviceReport]) -> tuple[str, ...]:
        """Return the names of the metrics that each client reports; the first feature's count."""
        return ()

    def limit(
        self, assigned: Assigned, weights: Weights, *, round_number: int
    ) -> tuple[Assigned, Weights]:
        """Change the assignments, and the weights of dataset weighting, before the plans."""
        return assigned, weights

    def write(self, drafts: DraftPlans) -> None:
        """Add terms to the plans."""

    def transfer_bytes(self, down: int, up: int, *, num_values: int) -> tuple[int, int]:
        """Return the bytes of the model and of an update, as planned; given those without this."""
        return down, up

    def to_measure(self, quotas: Mapping[str, int]) -> Collection[str]:
        """Return the clients that are to measure their speed again, by the quotas that they had."""
        return ()


class PlanningFeature(PlanningMoments):
    """A feature of the plans that the settings and the model's layout say all of."""

    def __init__(self, settings: Settings, layout: ModelLayout) -> None:
        self.settings = settings
        self.layout = layout

    def demand(self) -> Demand | None:
        """Return the work of a round; None: the target batch.

        Raises:
            SettingsError: it cannot be done.
        """
        return None


def _has_local_work(settings: Settings, layout: ModelLayout) -> bool:
    return settings.local.is_on or settings.algorithm.name is not None


# By name: whether it is on, and its class. In the order in which they act.
FEATURES: dict[str, tuple[Callable[[Settings, ModelLayout], bool], str]] = {
    "device_labels": (
        lambda settings, layout: settings.cohort.devices is not None,
        "headwater.server.device_labels.labelled_devices:LabelledDevices",
    ),
    "compression": (
        lambda settings, layout: (
            settings.compression.up != "off" or settings.compression.down != "off"
        ),
        "headwater.server.compression.compressed_plans:CompressedPlans",
    ),
    "offline": (
        lambda settings, layout: settings.asynchronous.is_on,
        "headwater.server.asynchronous.offline_plans:OfflinePlans",
    ),
    "own_parameters": (
        lambda settings, layout: bool(layout.local),
        "headwater.server.own_parameters.own_step_plans:OwnStepPlans",
    ),
    "local_training": (
        _has_local_work,
        "headwater.server.local_training.local_plans:LocalPlans",
    ),
    "secagg": (
        lambda settings, layout: settings.secure.aggregation != "off",
        "headwater.server.secagg.planning.masked_plans:MaskedPlans",
    ),
}


def planning_features(settings: Settings, layout: ModelLayout) -> list[PlanningFeature]:
    """Return the features of the plans that are on, in their order."""
    found: list[PlanningFeature] = []
    for is_on, place in FEATURES.values():
        if is_on(settings, layout):
            found.append(part_of(place)(settings, layout))
    return found


def demand_in(features: Sequence[PlanningFeature]) -> Demand | None:
    """Return the work of a round in the place of the target batch; None: that.

    Raises:
        SettingsError: it cannot be done.
    """
    found = (feature.demand() for feature in features)
    return next((demand for demand in found if demand is not None), None)
