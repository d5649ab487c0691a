"""Writes down what a device's private updates cost, at the points of a round where it is known.

A plain update counts when it is about to leave, each time. A masked one counts when it is about to
be masked, as if as few devices added noise as the device accepts. When the server asks the device
to help to open the sum, it knows how many did.
"""

from __future__ import annotations

from headwater.client.flower.request import DeviceRequest
from headwater.client.secagg.noise_share import opened_rho
from headwater.client.secagg.session import SecureSession
from headwater.client.secagg.states import SessionFinished
from headwater.common.privacy_terms import PrivacyTerms
from headwater.common.secagg.protocol import UnmaskRequest


def spend(request: DeviceRequest, terms: PrivacyTerms, *, update_id: str | None = None) -> None:
    """Write down what an update costs, before it leaves the device; nothing without a file.

    The same ``update_id`` twice in a row counts once; without one, every call counts.

    Raises:
        PrivacyBudgetSpent, StateError: see ``SpentFile.spend``.
    """
    chosen, spent = request.settings.privacy, request.spent
    if spent is not None:
        spent.spend(terms.device_rho, update_id=update_id, limit=chosen.budget, delta=chosen.delta)


def correct_spent(request: DeviceRequest, session: SecureSession, unmask: UnmaskRequest) -> None:
    """Write down what a masked update really costs, with the noise of these survivors.

    In active mode the members have signed this set. In semi-honest mode the server follows the
    protocol, by assumption.

    Raises:
        StateError: see ``SpentFile.lower``.
    """
    state = session.state
    if request.spent is not None and isinstance(state, SessionFinished):
        rho = opened_rho(state.session.parameters, unmask, state.device)
        request.spent.lower(rho, update_id=state.device.update_id)
