"""Masked plans on a device: what its owner requires, and updates that wait for a session."""

from __future__ import annotations

from flwr.app import RecordDict

from headwater.client.flower.request import DeviceRequest
from headwater.client.flower.state_file import SECURE, SHARE, read_share
from headwater.client.masked_rounds.masked_answers import train_masked
from headwater.client.masked_rounds.masked_description import told_examples
from headwater.client.masked_rounds.suspended_updates import suspended_of
from headwater.client.plan_features import PlanFeature, load_model
from headwater.client.secagg.pending import pending_in
from headwater.client.secagg.plan_policy import check_plan, check_share, check_time
from headwater.client.secagg.prepare import check_masking
from headwater.client.secagg.types import read_record
from headwater.common.errors import MaskingRequired
from headwater.common.flower import records
from headwater.common.messages import Plan


class MaskedPlans(PlanFeature):
    """Secure aggregation: what the owner requires, and updates that wait for a session."""

    def check(self, request: DeviceRequest, plan: Plan) -> None:
        name, is_masked = request.identity.name, "secagg" in plan.terms
        check_masking(request.settings.secure, is_masked=is_masked, name=name, what="an update")
        if not is_masked:
            _check_run(request, what="an update")

    def prepare(self, request: DeviceRequest, plan: Plan) -> None:
        """Erase the sessions of other rounds."""
        pending, name = pending_in(request.trainer.accumulator), request.identity.name
        if request.settings.asynchronous.is_on:  # simulated devices wait with other rounds' updates
            pending.discard(name)
        else:
            run_id = request.context.run_id
            pending.start_plan(run_id=run_id, round_number=plan.round, name=name)
        if not records.is_view(request.message.content):  # an engine where no process stays
            suspended = suspended_of(request)
            suspended.discard()
            if "secagg" in plan.terms:
                suspended.prepare()

    def allow(self, request: DeviceRequest, plan: Plan) -> None:
        if "secagg" in plan.terms:
            told, name = told_examples(request, plan), request.identity.name
            has_own = request.local_store is not None
            check_plan(
                plan,
                request.settings.secure,
                name=name,
                told_examples=told,
                has_own_parameters=has_own,
            )
            if not request.is_simulated:  # whose hardware changes from round to round
                is_active = request.settings.secure.aggregation == "active"
                check_time(plan, request.speed, name=name, needs_pace=is_active)
                if is_active:
                    told_share = read_share(records.load_state(request.context, SHARE))
                    now = request.hardware.time_share().share
                    check_share(plan, max(told_share or 0.0, now), name=name)

    def train(self, request: DeviceRequest, plan: Plan) -> RecordDict | None:
        if "secagg" not in plan.terms:
            return None
        # Checks the task, not under a model of the server's choice.
        request.trainer.examples(request.identity)
        load_model(request, plan)
        if request.settings.secure.aggregation == "active" and not request.is_simulated:
            # A share that falls in the round cuts no window: the next plan counts on the new one.
            plan = plan.model_copy(update={"share": None})
        return train_masked(request, plan)

    def check_test(self, request: DeviceRequest) -> None:
        name = request.identity.name
        check_masking(request.settings.secure, is_masked=False, name=name, what="the held-out loss")
        _check_run(request, what="the held-out loss")


def _check_run(request: DeviceRequest, *, what: str) -> None:
    """Check that the device has masked nothing in this run: a run that has masks keeps them.

    Whoever may change a run's settings, as in a folder that two servers share, could take the masks
    away from devices whose owners rely on the run's.

    Raises:
        MaskingRequired: it has.
        StateError: the state file cannot be read.
    """
    if request.is_simulated:
        return
    if not records.is_view(request.message.content):
        suspended_of(request).load()
    if read_record(records.load_state(request.context, SECURE)).masked is not None:
        raise MaskingRequired(
            f"{request.identity.name}: the server requests {what} in clear, and this device has "
            "masked its updates in this run so far",
            remedy="resume the run with its --secure-aggregation, or begin a new one",
        )
