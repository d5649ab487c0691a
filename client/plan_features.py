"""What features do with a plan on a device, from its arrival to the reply: the one list of them.

A feature's code is imported if the plan, the device's owner or what lies in its state folder asks
for it. The order of the list is the order in which they act, and a security property: the owner's
word comes first, and no model of the server's is loaded before all have allowed the plan.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from flwr.app import RecordDict

from headwater.client.flower.request import SECURE_MODE, DeviceRequest
from headwater.client.flower.state_file import EXAMPLES, SAMPLER, offline_name
from headwater.client.training.sampler import SamplerState
from headwater.common.flower import records
from headwater.common.messages import DescribeRequest, Plan, Update


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


class MaskedPlans(PlanFeature):
    """Secure aggregation: what the owner requires, and updates that wait for a session."""

    def check(self, request: DeviceRequest, plan: Plan) -> None:
        from headwater.client.masked_rounds.of_request import secure_of
        from headwater.client.secagg.prepare import check_masking

        name, is_masked = request.identity.name, "secagg" in plan.terms
        check_masking(secure_of(request), is_masked=is_masked, name=name, what="an update")

    def prepare(self, request: DeviceRequest, plan: Plan) -> None:
        """Erase the sessions of other rounds."""
        from headwater.client.secagg.pending import pending_in

        pending, name = pending_in(request.trainer.accumulator), request.identity.name
        if request.settings.asynchronous.is_on:  # simulated devices wait with other rounds' updates
            pending.discard(name)
        else:
            run_id = request.context.run_id
            pending.start_plan(run_id=run_id, round_number=plan.round, name=name)
        if not records.is_view(request.message.content):  # an engine where no process stays
            from headwater.client.masked_rounds.suspended_updates import suspended_of

            suspended = suspended_of(request)
            suspended.discard()
            if "secagg" in plan.terms:
                suspended.prepare()

    def allow(self, request: DeviceRequest, plan: Plan) -> None:
        from headwater.client.masked_rounds.masked_description import told_examples
        from headwater.client.masked_rounds.of_request import secure_of
        from headwater.client.secagg.plan_policy import check_plan

        if "secagg" in plan.terms:
            told, name = told_examples(request, plan), request.identity.name
            check_plan(plan, secure_of(request), name=name, told_examples=told)

    def train(self, request: DeviceRequest, plan: Plan) -> RecordDict | None:
        from headwater.client.masked_rounds.masked_answers import train_masked

        if "secagg" not in plan.terms:
            return None
        # Checks the task, not under a model of the server's choice.
        request.trainer.examples(request.identity)
        load_model(request, plan)
        return train_masked(request, plan)

    def check_test(self, request: DeviceRequest) -> None:
        from headwater.client.masked_rounds.of_request import secure_of
        from headwater.client.secagg.prepare import check_masking

        name = request.identity.name
        check_masking(secure_of(request), is_masked=False, name=name, what="the held-out loss")


class OfflineSums(PlanFeature):
    """Windows that were summed without a link, whose sum answers the next plan."""

    def check(self, request: DeviceRequest, plan: Plan) -> RecordDict | None:
        from headwater.client.offline.offline_windows import deliverable

        late = deliverable(request, plan)
        return None if late is None else records.update_content(late, as_view=True)


class GrowingData(PlanFeature):
    """A device's data that change from one epoch to the next."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def prepare(self, request: DeviceRequest, plan: Plan) -> None:
        """Follow what changed in the data at an epoch's end."""
        from headwater.client.growing_data.known_examples import known_examples_of
        from headwater.client.growing_data.refresh import watch_of

        found = watch_of(request.trainer).refreshed(
            request.trainer, request.identity, plan, request.sampler, known_examples_of(request)
        )
        if found is None:
            return
        records.save_state(request.context, SAMPLER, found.sampler)
        records.save_state(request.context, EXAMPLES, found.known.to_json())
        if found.change is not None:
            self._counts = dataclasses.asdict(found.change)

    def finish(self, request: DeviceRequest, plan: Plan, update: Update) -> Update:
        """Count the examples that joined and left; a private update tells of none."""
        if not self._counts or "privacy" in plan.terms:
            return update
        report = update.report.model_copy(update=self._counts)
        return dataclasses.replace(update, report=report)


class PrivatePlans(PlanFeature):
    """Privacy: what noise for single examples excludes, the owner's limit, and what is spent."""

    def allow(self, request: DeviceRequest, plan: Plan) -> None:
        from headwater.client.privacy.budget import check_budget, spent_of

        name, window = request.identity.name, None
        if plan.uses_whole_window:
            from headwater.client.privacy.example_unit import check_example_unit
            from headwater.client.privacy.private_rounds import planned_window

            has_local = request.local_store is not None
            check_example_unit(plan, request.sampler, name=name, has_local=has_local)
            window = planned_window(request, plan, own_order_seed(request, plan))
        chosen = request.settings.privacy
        check_budget(plan, chosen, name=name, spent=spent_of(request), window=window)

    def sent(self, request: DeviceRequest, plan: Plan, sampler: SamplerState) -> None:
        from headwater.client.privacy.private_rounds import spend
        from headwater.common.privacy_terms import PrivacyTerms

        if (terms := plan.of(PrivacyTerms)) is not None:
            spend(request, terms, sampler)

    def check_test(self, request: DeviceRequest) -> None:
        from headwater.client.privacy.budget import check_test

        check_test(request.settings.privacy, name=request.identity.name)


class CompressedPlans(PlanFeature):
    """Updates that are sent encoded, and what they left out."""

    def encode(
        self, request: DeviceRequest, plan: Plan, update: Update
    ) -> tuple[Update, bytearray | None]:
        from headwater.client.compression.error_feedback import encoded_update, error_feedback_of

        return encoded_update(update, plan, error_feedback_of(request))


def own_order_seed(request: DeviceRequest, plan: Plan) -> int | None:
    """Return the seed of the device's own order of its examples; None in a plan without masks."""
    if not plan.keeps_update:
        return None
    from headwater.client.masked_rounds.masked_answers import order_seed_of

    return order_seed_of(request, plan)


def plan_features(request: DeviceRequest, plan: Plan) -> Sequence[PlanFeature]:
    """Return the features that have something to do with a plan, in their order."""
    settings, identity = request.settings, request.identity
    is_view = records.is_view(request.message.content)
    found: list[PlanFeature] = []
    # On an engine where no process stays, the node may hold an update of a masked round before.
    if requires_masks(request) or "secagg" in plan.terms or _has_masked() or not is_view:
        found.append(MaskedPlans())
    if is_view and _has_offline_sum(request):
        found.append(OfflineSums())
    if not request.is_simulated and identity.data is not None and identity.rule is None:
        found.append(GrowingData())
    if "privacy" in plan.terms or settings.privacy.budget is not None:
        found.append(PrivatePlans())
    if "compression" in plan.terms:
        found.append(CompressedPlans())
    return found


def owner_features(request: DeviceRequest) -> Sequence[PlanFeature]:
    """Return the features by which the owner limits what the device tells outside of a plan."""
    found: list[PlanFeature] = []
    if requires_masks(request):
        found.append(MaskedPlans())
    if request.settings.privacy.budget is not None:
        found.append(PrivatePlans())
    return found


def requires_masks(request: DeviceRequest) -> bool:
    """Whether the owner, or the run, requires that updates are masked."""
    if request.settings.secure.aggregation != "off":
        return True
    if SECURE_MODE not in request.context.node_config:
        return False
    from headwater.client.masked_rounds.of_request import secure_of

    return secure_of(request).aggregation != "off"


def _has_masked() -> bool:
    """Whether this process has masked an update, which may wait for its session."""
    return "headwater.client.secagg.session" in sys.modules


def _has_offline_sum(request: DeviceRequest) -> bool:
    name = offline_name(request.identity.name, request.context.run_id)
    return (request.state_folder / name).exists()


def describe_masked(request: DeviceRequest, wanted: DescribeRequest) -> RecordDict:
    """Describe a device that requires masks; see ``client.masked_rounds.masked_description``."""
    from headwater.client.masked_rounds import masked_description

    return masked_description.describe_masked(request, wanted)


def load_model(request: DeviceRequest, plan: Plan) -> None:
    """Load the model that came with a plan, and the frozen part that it names.

    Raises:
        CorruptUpdate: the plan came without a model.
        FrozenPartMissing: the device does not have the frozen part.
    """
    from headwater.common.errors import CorruptUpdate

    image = records.vector(request.message.content)
    if image is None:
        raise CorruptUpdate(f"round {plan.round}: the plan came without a model")
    if plan.frozen is not None or request.trainer.image.frozen_digest:
        from headwater.client.frozen.frozen_parts import require_frozen

        require_frozen(request, plan.frozen)
    request.trainer.loaded_model.load(request.context.run_id, plan.model_version, image)


def lacks_frozen(request: DeviceRequest, wanted: DescribeRequest) -> bool:
    """Return whether the device has not the frozen part that the server's model has."""
    if wanted.frozen is None and not request.trainer.image.frozen_digest:
        return False
    from headwater.client.frozen.frozen_parts import holds_frozen

    return not holds_frozen(request, wanted.frozen)


# The phases of a secure session, by the names of their queries (``common.secagg.protocol``).
PHASE_ACTIONS = (
    *("advertise_keys", "share_keys", "check_shares", "masked_update", "consistency", "unmask"),
)


def answer_phase(action: str, request: DeviceRequest) -> RecordDict:
    """Answer a phase of a secure session."""
    from headwater.client.masked_rounds import session_phases

    return session_phases.answer_phase(action, request)


def take_frozen(request: DeviceRequest) -> RecordDict:
    """Take a frozen part that the server sent."""
    from headwater.client.frozen import frozen_parts

    return records.content_of(frozen_parts.take_frozen(request))


def go_on_offline(request: DeviceRequest) -> RecordDict:
    """Keep an update that waits for a link, or add a window to it."""
    from headwater.client.offline import offline_windows

    summed = offline_windows.go_on_offline(request)
    if summed is None:
        return records.content_with_head("", None)
    return records.update_content(summed, as_view=True)
