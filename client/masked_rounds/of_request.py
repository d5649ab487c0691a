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
    DeviceRequest,
)
from headwater.client.secagg.masked_history import MaskedHistory, NoHistory, history_in


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
