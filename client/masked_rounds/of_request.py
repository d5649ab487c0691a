"""What a masked round needs of a request: the owner's settings, the history, the identity."""

from __future__ import annotations

from pathlib import Path

from headwater.client.enrolment.signing_identity import (
    Enrolment,
    read_enrolment,
    simulated_enrolment,
)
from headwater.client.flower.request import (
    ALLOW_LIST,
    IDENTITY,
    MIN_MEMBERS,
    ORDER_SEED,
    SECURE_MODE,
    DeviceRequest,
)
from headwater.client.secagg.masked_history import MaskedHistory, NoHistory, history_in
from headwater.client.secagg.prepare import strictest_settings
from headwater.common.settings.schema import SecureSettings


def secure_of(request: DeviceRequest) -> SecureSettings:
    """Return the stricter of the run's and the node's secure aggregation settings.

    With our own stream the settings are the device's own. On Flower's engines they arrive with the
    run, from the user who submits it.
    """
    node_config, secure = request.context.node_config, request.settings.secure
    mode, least = node_config.get(SECURE_MODE), node_config.get(MIN_MEMBERS)
    if mode is not None or least is not None:
        secure = strictest_settings(secure, mode=mode, min_members=least)
    seed = node_config.get(ORDER_SEED)
    return secure if seed is None else secure.model_copy(update={"order_seed": seed})


def history_of(request: DeviceRequest) -> MaskedHistory:
    """Return what a device has masked in all of its runs.

    Raises:
        StateError: its file cannot be read or written.
    """
    if request.is_simulated:
        return NoHistory()
    return history_in(request.state_folder / f"{request.identity.name}-masked.jsonl")


def enrolment_of(request: DeviceRequest) -> Enrolment:
    """Return a device's identity and allow-list, from the files in the node's configuration.

    Raises:
        IdentityProblem: a file is not what it should be.
    """
    name, node_config = request.identity.name, request.context.node_config
    if request.is_simulated:
        return simulated_enrolment(name)
    identity, allow_list = (node_config.get(key) for key in (IDENTITY, ALLOW_LIST))
    return read_enrolment(
        name,
        identity=None if identity is None else Path(str(identity)),
        allow_list=None if allow_list is None else Path(str(allow_list)),
    )
