"""What features do with a plan on a device, from its arrival to the reply: the one list of them.

A feature's code is imported if the plan, the device's owner or what lies in its state folder asks
for it. The order of the list is the order in which they act, and a security property: the owner's
word comes first, and no model of the server's is loaded before all of them have allowed the plan
(a feature of the user's is asked after that).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from flwr.app import RecordDict

from headwater.client.flower.request import DeviceRequest
from headwater.client.flower.state_file import SECURE, offline_name
from headwater.client.training.sampler import SamplerState
from headwater.common.errors import CorruptUpdate
from headwater.common.flower import records
from headwater.common.messages import DescribeRequest, Plan, Update
from headwater.common.user_code.named_objects import part_of


class PlanFeature:
    """The moments of a plan on a device, in this order; a feature overrides those that it needs."""

    def check(self, request: DeviceRequest, plan: Plan) -> RecordDict | None:
        """Check a plan by what the owner allows; return an answer that exists already, if any.

        Raises:
            HeadwaterError: the owner does not allow it.
        """
        return None

    def prepare(self, request: DeviceRequest, plan: Plan) -> None:
        """Settle what is left of other rounds, and what has changed since, before the window."""

    def allow(self, request: DeviceRequest, plan: Plan) -> None:
        """Check a plan by the examples that it would use.

        Raises:
            HeadwaterError: the owner does not allow it, or the plan breaks the protocol.
        """

    def train(self, request: DeviceRequest, plan: Plan) -> RecordDict | None:
        """Answer the plan in the place of a plain round; None: that one."""
        return None

    def finish(self, request: DeviceRequest, plan: Plan, update: Update) -> Update:
        """Change the update's report."""
        return update

    def encode(
        self, request: DeviceRequest, plan: Plan, update: Update
    ) -> tuple[Update, bytearray | None]:
        """Return the update, and its vector as bytes if it is sent encoded."""
        return update, None

    def sent(self, request: DeviceRequest, plan: Plan, sampler: SamplerState) -> None:
        """Note that the update is about to leave; ``sampler`` has its round pending."""

    def check_test(self, request: DeviceRequest) -> None:
        """Check that the owner allows to report the loss on examples that are held out.

        Raises:
            HeadwaterError: the owner does not.
        """


def own_order_seed(request: DeviceRequest, plan: Plan) -> int | None:
    """Return the seed of the device's own order of its examples; None in a plan without masks."""
    if not plan.keeps_update:
        return None
    seed: int | None = _loaded("masked_rounds.masked_answers:order_seed_of")(request, plan)
    return seed


def plan_features(request: DeviceRequest, plan: Plan) -> Sequence[PlanFeature]:
    """Return the features that have something to do with a plan, in their order."""
    settings, identity = request.settings, request.identity
    is_view = records.is_view(request.message.content)
    found: list[PlanFeature] = []
    # On an engine where no process stays, the node may hold an update of a masked round before.
    is_masked = "secagg" in plan.terms or _has_masked() or had_masks(request)
    if requires_masks(request) or is_masked or not is_view:
        found.append(_loaded("masked_rounds.masked_plans:MaskedPlans")())
    if plan.overlaps:
        found.append(_loaded("overlap.overlapping_plans:OverlappingPlans")())
    if is_view and _has_offline_sum(request):
        found.append(_loaded("offline.offline_plans:OfflineSums")())
    if not request.is_simulated and identity.data is not None and identity.rule is None:
        found.append(_loaded("growing_data.growing_plans:GrowingData")())
    if "privacy" in plan.terms or settings.privacy.budget is not None:
        found.append(_loaded("privacy.private_plans:PrivatePlans")())
    if "statistics" in plan.terms:
        found.append(_loaded("statistics.statistics_plans:StatisticsPlans")())
    if "evaluation" in plan.terms:
        found.append(_loaded("evaluation.evaluation_plans:EvaluationPlans")())
    if "compression" in plan.terms:
        found.append(_loaded("compression.compressed_plans:CompressedPlans")())
    return found


def owner_features(request: DeviceRequest) -> Sequence[PlanFeature]:
    """Return the features by which the owner limits what the device tells outside of a plan."""
    found: list[PlanFeature] = []
    if requires_masks(request) or had_masks(request):
        found.append(_loaded("masked_rounds.masked_plans:MaskedPlans")())
    if request.settings.privacy.budget is not None:
        found.append(_loaded("privacy.private_plans:PrivatePlans")())
    return found


def requires_masks(request: DeviceRequest) -> bool:
    """Whether the owner, or the run, requires that updates are masked."""
    return request.settings.secure.aggregation != "off"


def had_masks(request: DeviceRequest) -> bool:
    """Whether the device was in a secure session of the run, as far as this process knows."""
    return records.load_state(request.context, SECURE) is not None


def _has_masked() -> bool:
    """Whether this process has masked an update, which may wait for its session."""
    return "headwater.client.secagg.session" in sys.modules


def _has_offline_sum(request: DeviceRequest) -> bool:
    name = offline_name(request.identity.name, request.context.run_id)
    return (request.state_folder / name).exists()


def describe_masked(request: DeviceRequest, wanted: DescribeRequest) -> RecordDict:
    """Describe a device that requires masks; see ``client.masked_rounds.masked_description``."""
    describe = _loaded("masked_rounds.masked_description:describe_masked")
    content: RecordDict = describe(request, wanted)
    return content


def load_model(request: DeviceRequest, plan: Plan) -> None:
    """Load the model that came with a plan, and the frozen part that it names.

    Raises:
        CorruptUpdate: the plan came without a model.
        FrozenPartMissing: the device does not have the frozen part.
    """
    image = records.vector(request.message.content)
    if image is None:
        raise CorruptUpdate(f"round {plan.round}: the plan came without a model")
    if plan.frozen is not None or request.trainer.image.frozen_digest:
        _loaded("frozen.frozen_parts:require_frozen")(request, plan.frozen)
    request.trainer.loaded_model.load(request.context.run_id, plan.model_version, image)


def lacks_frozen(request: DeviceRequest, wanted: DescribeRequest) -> bool:
    """Return whether the device has not the frozen part that the server's model has."""
    if wanted.frozen is None and not request.trainer.image.frozen_digest:
        return False
    return not _loaded("frozen.frozen_parts:holds_frozen")(request, wanted.frozen)


# The phases of a secure session, by the names of their queries (``common.secagg.protocol``).
PHASE_ACTIONS = (
    *("advertise_keys", "share_keys", "check_shares", "masked_update", "consistency", "unmask"),
)


def answer_phase(action: str, request: DeviceRequest) -> RecordDict:
    """Answer a phase of a secure session."""
    answer = _loaded("masked_rounds.session_phases:answer_phase")
    content: RecordDict = answer(action, request)
    return content


def take_frozen(request: DeviceRequest) -> RecordDict:
    """Take a frozen part that the server sent."""
    return records.content_of(_loaded("frozen.frozen_parts:take_frozen")(request))


def go_on_offline(request: DeviceRequest) -> RecordDict:
    """Keep an update that waits for a link, or add a window to it."""
    summed: Update | None = _loaded("offline.offline_windows:go_on_offline")(request)
    if summed is None:
        return records.content_with_head("", None)
    return records.update_content(summed, as_view=True)


def _loaded(place: str) -> Any:
    """Return what a room of the client holds: the arrows from a feature run to the core alone."""
    return part_of(f"headwater.client.{place}")
