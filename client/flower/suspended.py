"""A secure session as bytes, for the time between two messages.

Behind our own grids a session stays in the memory of one process. On Flower's own engines the next
message may be answered by another process, and what the last one knew has to be handed to it: the
update as long as it is not masked, and of the secrets those that later phases need. It is sealed
whole (ChaCha20-Poly1305, fresh nonce, run and name authenticated beside it) under a key that lies
elsewhere (``client.flower.suspended_keys``): who holds the bytes alone holds nothing, and once the key is
erased nobody can open any copy of them.

The record of what was masked and answered is not taken from these bytes: whoever brought old ones
back would have an update masked twice. It comes from the device's state file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch
from pydantic import ConfigDict, Field

from headwater.client.enrolment.signing_identity import Enrolment
from headwater.client.secagg.session import SecureSession
from headwater.client.secagg.states import (
    AwaitingMaskRequest,
    AwaitingRoster,
    AwaitingShares,
    AwaitingUnmask,
    DealerShares,
    SessionState,
)
from headwater.client.secagg.types import Floor, Participant, SessionRecord, UnmaskedUpdate
from headwater.common.errors import SealBroken, UpdateNotHeld
from headwater.common.messages import Name, Natural
from headwater.common.secagg.keys import SESSION_BYTES, KeyPair, public_key_of, seal, unseal
from headwater.common.secagg.protocol import (
    Digest,
    Key,
    KeysReply,
    KeysRequest,
    Roster,
    RunId,
    SecureMessage,
    Share,
    Weight,
)
from headwater.common.secagg.secret import Secret
from headwater.common.secagg.session import SessionView, session_of

T = TypeVar("T")

LENGTH_BYTES = 4  # of the head, before it; the update's values lie behind it


class Parked(SecureMessage):
    """Where a session stands, and what is left of its secrets."""

    model_config = ConfigDict(**{**SecureMessage.model_config, "ser_json_inf_nan": "constants"})

    name: Name
    run: RunId
    round: Natural
    model_digest: Digest
    num_values: Natural
    planned_weight: Weight
    update_id: str
    has_aes: bool
    numbers: dict[str, int | float] = Field(repr=False)
    state: str = "NoneType"
    wanted: KeysRequest | None = None
    keys: KeysReply | None = None
    roster: Roster | None = None
    mask_key: Key | None = Field(None, repr=False)
    sharing_key: Key | None = Field(None, repr=False)
    self_seed: Key | None = Field(None, repr=False)
    held: dict[Name, tuple[Share, Share]] = Field(default_factory=dict, repr=False)
    bad_dealers: tuple[Name, ...] = ()
    members: tuple[Name, ...] = ()


# To bytes.


def park(session: SecureSession, key: Secret) -> bytes:
    """Return a session that awaits its next message, sealed.

    The session itself is left as it is.
    """
    device, trained = session.device, session.trained
    parked = Parked.model_validate(
        {
            "name": device.name,
            "run": device.run,
            "round": device.round,
            "model_digest": device.model_digest,
            "num_values": device.num_values,
            "planned_weight": device.planned_weight,
            "update_id": device.update_id,
            "has_aes": device.has_aes,
            "numbers": dict(trained.numbers),
            "state": type(session.state).__name__,
            **_fields(session.state),
        }
    )
    head = parked.model_dump_json(exclude_none=True).encode()
    values = trained.values_P.numpy().astype("<f4", copy=False).data.cast("B")
    whole = bytearray().join((len(head).to_bytes(LENGTH_BYTES, "little"), head, values))
    try:
        return seal(key, whole, session=_salt(device.run), ends=(device.name, device.name))
    finally:
        whole[:] = bytes(len(whole))


def _fields(state: SessionState | None) -> Mapping[str, object]:
    """Return what only this state has."""
    match state:
        case None:
            return {}
        case AwaitingRoster():
            return {
                "wanted": state.wanted,
                "keys": state.keys,
                "mask_key": _bytes(state.mask_pair.private),
                "sharing_key": _bytes(state.sharing_pair.private),
            }
        case AwaitingShares():
            return {
                "roster": _roster(state.session),
                "mask_key": _bytes(state.mask_pair.private),
                "sharing_key": _bytes(state.sharing_pair.private),
                "self_seed": _bytes(state.self_seed),
            }
        case AwaitingMaskRequest():
            return {
                "roster": _roster(state.session),
                "mask_key": _bytes(state.mask_pair.private),
                "self_seed": _bytes(state.self_seed),
                "held": _shares(state.held),
                "bad_dealers": tuple(sorted(state.bad_dealers)),
            }
        case AwaitingUnmask():
            return {
                "roster": _roster(state.session),
                "held": _shares(state.held),
                "members": state.members,
            }
    raise AssertionError(f"a session never rests as {type(state).__name__}")


def _bytes(secret: Secret) -> bytes:
    return bytes(secret.reveal())


def _shares(held: Mapping[str, DealerShares]) -> dict[str, tuple[bytes, bytes]]:
    return {
        dealer: (_bytes(share.mask_key), _bytes(share.self_seed)) for dealer, share in held.items()
    }


def _roster(session: SessionView) -> Roster:
    return Roster(parameters=session.parameters, members=tuple(session.members.values()))


def _salt(run: int) -> bytes:
    return run.to_bytes(SESSION_BYTES, "big")


# And back.


def unpark(
    sealed: bytes, key: Secret, *, name: str, run: int, floor: Floor, enrolment: Enrolment
) -> tuple[Participant, UnmaskedUpdate, Parked]:
    """Open what ``park`` closed: whose session it is, and the update in memory of its own.

    Raises:
        UpdateNotHeld: it is another run's or device's, was changed, or its key is gone.
    """
    try:
        opened = unseal(key, sealed, session=_salt(run), ends=(name, name))
    except SealBroken as error:
        raise UpdateNotHeld(
            f"{name}: what was kept of its update for the next phase does not open"
        ) from error
    whole = opened.reveal()
    end = LENGTH_BYTES + int.from_bytes(whole[:LENGTH_BYTES], "little")
    parked = Parked.model_validate_json(bytes(whole[LENGTH_BYTES:end]))
    values_P = torch.from_numpy(np.frombuffer(whole[end:], "<f4").astype(np.float32))
    opened.erase()
    device = Participant(
        name=name,
        run=run,
        round=parked.round,
        model_digest=parked.model_digest,
        num_values=parked.num_values,
        planned_weight=parked.planned_weight,
        update_id=parked.update_id,
        floor=floor,
        identity=enrolment.identity,
        allow_list=enrolment.allow_list,
        has_aes=parked.has_aes,
    )
    return device, UnmaskedUpdate(values_P=values_P, numbers=parked.numbers), parked


def state_of(parked: Parked, device: Participant, record: SessionRecord) -> SessionState | None:
    """Return where the session stands, with the record of what the device answered since."""
    match parked.state:
        case "Advertised":
            return AwaitingRoster(
                device=device,
                record=record,
                wanted=_there(parked.wanted),
                keys=_there(parked.keys),
                mask_pair=_pair(parked.mask_key),
                sharing_pair=_pair(parked.sharing_key),
            )
        case "Dealt":
            return AwaitingShares(
                device=device,
                record=record,
                session=_session(parked, device),
                mask_pair=_pair(parked.mask_key),
                sharing_pair=_pair(parked.sharing_key),
                self_seed=Secret(_there(parked.self_seed)),
            )
        case "Holding":
            return AwaitingMaskRequest(
                device=device,
                record=record,
                session=_session(parked, device),
                mask_pair=_pair(parked.mask_key),
                self_seed=Secret(_there(parked.self_seed)),
                held=_held(parked),
                bad_dealers=frozenset(parked.bad_dealers),
            )
        case "Masked":
            return AwaitingUnmask(
                device=device,
                record=record,
                session=_session(parked, device),
                members=parked.members,
                held=_held(parked),
            )
    return None


def _pair(private: bytes | None) -> KeyPair:
    secret = Secret(_there(private))
    return KeyPair(private=secret, public=public_key_of(secret))


def _session(parked: Parked, device: Participant) -> SessionView:
    roster = _there(parked.roster)
    return session_of(roster.parameters, roster.members, model_digest=device.model_digest)


def _held(parked: Parked) -> dict[str, DealerShares]:
    return {
        dealer: DealerShares(mask_key=Secret(of_key), self_seed=Secret(of_seed))
        for dealer, (of_key, of_seed) in parked.held.items()
    }


def _there(value: T | None) -> T:
    assert value is not None, "the seal holds, and so does what park wrote"
    return value
