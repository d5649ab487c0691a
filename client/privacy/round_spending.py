"""Writes down what a device's private updates cost, at the points of a round where it is known.

A plain update counts when it is about to leave, each time. A masked one counts when it is about to
be masked, as if as few devices added noise as the device accepts. When the server asks the device
to help to open the sum, it knows how many did.
"""

from __future__ import annotations

from dataclasses import asdict

from headwater.client.flower.request import DeviceRequest
from headwater.client.privacy.budget import spent_of
from headwater.client.privacy.budget_data import data_of
from headwater.client.privacy.example_spending import EpochPlace, UpdateCost, UsedWindow
from headwater.client.secagg.noise_share import opened_rho
from headwater.client.secagg.session import SecureSession
from headwater.client.secagg.states import SessionFinished
from headwater.client.training.sampler import SamplerState
from headwater.common.messages import Plan
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.secagg.protocol import UnmaskRequest


def spend(
    request: DeviceRequest,
    terms: PrivacyTerms,
    sampler: SamplerState,
    *,
    update_id: str | None = None,
) -> None:
    """Write down what an update costs, before it leaves the device; nothing without a file.

    ``sampler`` has the update's round pending. The same ``update_id`` twice in a row counts once;
    without one, every call counts.

    Raises:
        PrivacyBudgetSpent, StateError: see ``SpentFile.spend``.
    """
    chosen, spent = request.settings.privacy, spent_of(request)
    if spent is not None:
        window = _window(request, sampler)
        cost, data = (
            UpdateCost.of(terms, terms.rho, window),
            data_of(request.trainer, request.identity),
        )
        spent.spend(cost, chosen, update_id=update_id, data=data)


def planned_window(request: DeviceRequest, plan: Plan, order_seed: int | None) -> UsedWindow | None:
    """Return where a plan's examples begin and end, if its noise is for single examples.

    ``order_seed`` is that of the device's own order, in masked rounds.
    """
    if not plan.uses_whole_window:
        return None
    after = request.trainer.skip(request.identity, plan, request.sampler, order_seed)
    return _window(request, after)


def _window(request: DeviceRequest, sampler: SamplerState) -> UsedWindow:
    # The server says what an order follows from: in another one, examples may come again.
    run = f"{request.context.run_id}-{sampler.pending_order}"
    number = len(request.trainer.examples(request.identity))
    start, end = (
        EpochPlace(run=run, num_examples=number, **asdict(place))
        for place in (sampler.place, sampler.pending_place)
    )
    is_of_two = end.epoch > start.epoch and end.is_begun
    return UsedWindow(start=start, end=end, is_of_two_epochs=is_of_two)


def correct_spent(request: DeviceRequest, session: SecureSession, unmask: UnmaskRequest) -> None:
    """Write down what a masked update really costs, with the noise of these survivors.

    In active mode the members have signed this set. In semi-honest mode the server follows the
    protocol, by assumption.

    Raises:
        StateError: see ``SpentFile.lower``.
    """
    state = session.state
    if (spent := spent_of(request)) is not None and isinstance(state, SessionFinished):
        terms, update_id = state.device.privacy, state.device.update_id
        assert terms is not None
        rho = opened_rho(state.session.parameters, unmask, state.device)
        spent.lower(UpdateCost.of(terms, rho), update_id=update_id)
