"""Stores an update between two Flower messages, sealed, until its secure session has ended.

A SuperNode starts a new process for each message, and Ray uses any of its workers, so no process
keeps an update from one phase to the next. Only the node's context goes from process to process; a
SuperNode keeps it in its memory and sends it nowhere. This module therefore writes the session into
the context: the update until it is masked, and the secrets that later phases need. The bytes are
sealed as a whole (ChaCha20-Poly1305, fresh nonce, run and client name authenticated) under a key
that is stored elsewhere (``masked_rounds.suspended_keys``). The bytes alone reveal nothing, and
once the key is erased nobody can open any copy of them.

The record of masked and answered sessions and the sampler state are not taken from these bytes:
an old copy of them could make the client mask an update twice. They are forced to the state file
before a reply leaves, as ``headwater-client`` does, and read from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import Context
from pydantic import ConfigDict, Field, ValidationError

from headwater.client.enrolment.signing_identity import Enrolment
from headwater.client.flower.request import DeviceRequest
from headwater.client.flower.state_file import READERS, SECURE, STATE, StateFile
from headwater.client.masked_rounds.suspended_keys import KeyFile, SimulatedKey
from headwater.client.secagg.session import SecureSession
from headwater.client.secagg.states import (
    AwaitingMaskRequest,
    AwaitingRoster,
    AwaitingShares,
    AwaitingUnmask,
    DealerShares,
    SessionState,
)
from headwater.client.secagg.types import (
    Floor,
    Participant,
    SessionRecord,
    UnmaskedUpdate,
    read_record,
)
from headwater.common.errors import SealBroken, UpdateNotHeld
from headwater.common.flower import records
from headwater.common.messages import Name, Natural
from headwater.common.privacy.terms import PrivacyTerms
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
from headwater.common.settings.schema import ClientSettings
from headwater.common.terms import SumOf

SUSPENDED = "parked"
"""The name of the context's entry."""

RUNTIME = "runtime"
"""The key of a SuperNode's configuration with the folder of its sealing keys."""

LENGTH_BYTES = 4  # the length of the JSON head, before it; the update's values follow the head


class SuspendedUpdate:
    """One client's update in its node's context, from one message to the next."""

    def __init__(self, context: Context, name: str, *, is_simulated: bool) -> None:
        """``is_simulated``: clients and server are one simulation, and no file is written."""
        self._context = context
        self._name = name
        self._file: StateFile | None = None
        self._key: KeyFile | SimulatedKey
        if is_simulated:
            self._key = SimulatedKey(name=name, run_id=context.run_id)
            return
        state, runtime = (context.node_config.get(key) for key in (STATE, RUNTIME))
        folder = ClientSettings().state_folder if state is None else Path(str(state))
        self._file = StateFile(folder / f"{name}-{context.run_id}.json")
        key_folder = None if runtime is None else Path(str(runtime))
        self._key = KeyFile(name=name, run_id=context.run_id, folder=key_folder)

    @property
    def exists(self) -> bool:
        """Whether the context holds an update."""
        return records.load_bytes(self._context, SUSPENDED) is not None

    def prepare(self) -> None:
        """Load the state file and check, before hours of training, that all files can be written.

        Raises:
            StateError: the state file cannot be read or written, or there is no folder for keys.
        """
        self.load()
        self.write_state_file()
        self._key.check()

    def load(self) -> None:
        """Copy the state file into the context: the file is never older than the context."""
        if self._file is not None:
            for name, plain in self._file.read().items():
                records.save_state(self._context, name, plain)

    def write_state_file(self) -> None:
        """Force the context's entries to the state file.

        Raises:
            StateError: it could not be written.
        """
        if self._file is not None:
            entries = {name: records.load_state(self._context, name) for name in READERS}
            self._file.write({name: plain for name, plain in entries.items() if plain is not None})

    def discard(self) -> None:
        """Remove the update, if there is one, and erase its key."""
        if records.delete_state(self._context, SUSPENDED):
            self._key.erase()

    def add(self, session: SecureSession) -> None:
        """Suspend a new update before its session, under a new key.

        Raises:
            StateError: the key or the state file could not be written.
        """
        self._write(session, self._key.make())
        self.write_state_file()

    def resume(self, *, floor: Floor, enrolment: Enrolment) -> SecureSession:
        """Return the session of the suspended update, whose ``store`` the caller must set.

        Raises:
            UpdateNotHeld: there is none, or its key is erased.
            StateError: the state file cannot be read.
        """
        self.load()
        sealed = records.load_bytes(self._context, SUSPENDED) or b""
        stored, values = unseal_session(
            sealed, self._key.read(), name=self._name, run=self._context.run_id
        )
        described = {name: getattr(stored, name) for name in DESCRIPTION}
        device = Participant(
            **described, floor=floor, identity=enrolment.identity, allow_list=enrolment.allow_list
        )
        record = read_record(records.load_state(self._context, SECURE))
        return SecureSession(
            device,
            record,
            update=unmasked_of(stored, values),
            state=_decode_state(stored, device, record),
            num_threads=torch.get_num_threads(),
        )

    def suspend(self, session: SecureSession) -> None:
        """Store an update until the next phase, or remove it if its session is over."""
        if session.is_over:
            self.discard()
        else:
            self._write(session, self._key.read())
        session.close()

    def _write(self, session: SecureSession, key: Secret) -> None:
        records.save_bytes(self._context, SUSPENDED, seal_session(session, key))


class SuspendedSession(SecureMessage):
    """The JSON head of the sealed bytes: the update's description and the session's state."""

    model_config = ConfigDict(**{**SecureMessage.model_config, "ser_json_inf_nan": "constants"})

    name: Name
    run: RunId
    round: Natural
    model_digest: Digest
    other_subjects: tuple[Digest, ...] = ()
    plan_digest: Digest
    num_values: Natural
    planned_weight: Weight
    carried_weight: Natural = 0
    update_id: str
    examples: tuple[Natural, ...] = Field((), repr=False)
    num_planned: Natural = 0
    has_aes: bool
    privacy: PrivacyTerms | None = None
    sums: dict[str, SumOf] = Field(default_factory=dict)
    numbers: dict[str, int | float] = Field(repr=False)
    state: Literal["NoneType", "Advertised", "Dealt", "Holding", "Masked"] = "NoneType"
    wanted: KeysRequest | None = None
    keys: KeysReply | None = None
    roster: Roster | None = None
    mask_key: Key | None = Field(None, repr=False)
    sharing_key: Key | None = Field(None, repr=False)
    self_seed: Key | None = Field(None, repr=False)
    held: dict[Name, tuple[Share, Share]] = Field(default_factory=dict, repr=False)
    bad_dealers: tuple[Name, ...] = ()
    members: tuple[Name, ...] = ()


DESCRIPTION = [n for n in Participant.__dataclass_fields__ if n in SuspendedSession.model_fields]
"""The fields of ``Participant`` in the JSON head; the others are the device's own settings."""


def seal_session(session: SecureSession, key: Secret) -> bytes:
    """Return a session between two requests as sealed bytes. The session itself is unchanged."""
    device, update = session.device, session.update
    stored = SuspendedSession.model_validate(
        {
            **{name: getattr(device, name) for name in DESCRIPTION},
            "numbers": dict(update.numbers),
            **_encode_state(session.state),
        }
    )
    head = stored.model_dump_json(exclude_none=True).encode()
    values, sums = (
        part.numpy().astype("<f4", copy=False).data.cast("B")
        for part in (update.values_P, update.sums_S)
    )
    plain = bytearray().join((len(head).to_bytes(LENGTH_BYTES, "little"), head, values, sums))
    try:
        return seal(key, plain, session=_salt(device.run), ends=(device.name, device.name))
    finally:
        plain[:] = bytes(len(plain))


def unseal_session(
    sealed: bytes, key: Secret, *, name: str, run: int
) -> tuple[SuspendedSession, torch.Tensor]:
    """Open the bytes of ``seal_session``; return the head, and a copy of the values behind it.

    Raises:
        UpdateNotHeld: the bytes are of another run, client or version, were changed, or their key
            is erased.
    """
    try:
        opened = unseal(key, sealed, session=_salt(run), ends=(name, name))
        plain = opened.reveal()
        end = LENGTH_BYTES + int.from_bytes(plain[:LENGTH_BYTES], "little")
        stored = SuspendedSession.model_validate_json(bytes(plain[LENGTH_BYTES:end]))
    except (SealBroken, ValidationError):  # the latter quotes what it found: not chained
        raise UpdateNotHeld(f"{name}: the update stored for the next phase does not open") from None
    values = torch.from_numpy(np.frombuffer(plain[end:], "<f4").astype(np.float32))
    opened.erase()
    return stored, values


def unmasked_of(stored: SuspendedSession, values: torch.Tensor) -> UnmaskedUpdate:
    """Return a suspended update: its vector, and the sums behind it; of a masked one neither."""
    num_sums = sum(one.length for one in stored.sums.values()) if len(values) else 0
    end = len(values) - num_sums
    return UnmaskedUpdate(values_P=values[:end], numbers=stored.numbers, sums_S=values[end:])


def _salt(run: int) -> bytes:
    return run.to_bytes(SESSION_BYTES, "big")


# A session's state. Each field has a name in the JSON head and a decoder of its stored value.

STATES: Mapping[str, type[SessionState]] = {
    "Advertised": AwaitingRoster,
    "Dealt": AwaitingShares,
    "Holding": AwaitingMaskRequest,
    "Masked": AwaitingUnmask,
}


def _encode_state(state: SessionState | None) -> dict[str, object]:
    if state is None:
        return {}
    state_name = next(name for name, kind in STATES.items() if kind is type(state))
    fields = {
        key: _encode(getattr(state, field))
        for field, (key, _) in FIELDS.items()
        if hasattr(state, field)
    }
    return {"state": state_name, **fields}


def _encode(value: object) -> object:
    match value:
        case Secret():
            return bytes(value.reveal())
        case KeyPair():
            return bytes(value.private.reveal())
        case DealerShares():
            return _encode(value.mask_key), _encode(value.self_seed)
        case SessionView():
            return Roster(parameters=value.parameters, members=tuple(value.members.values()))
        case frozenset():
            return tuple(sorted(value))
        case dict():
            return {name: _encode(shares) for name, shares in value.items()}
    return value


def _decode_state(
    stored: SuspendedSession, device: Participant, record: SessionRecord
) -> SessionState | None:
    kind = STATES.get(stored.state)
    if kind is None:
        return None
    fields = {
        field: decode(getattr(stored, key), device)
        for field, (key, decode) in FIELDS.items()
        if field in kind.__dataclass_fields__
    }
    return kind(device=device, record=record, **fields)


def _decode_pair(private: bytes) -> KeyPair:
    secret = Secret(private)
    return KeyPair(private=secret, public=public_key_of(secret))


def _decode_session(roster: Roster, device: Participant) -> SessionView:
    return session_of(roster.parameters, roster.members, model_digest=device.model_digest)


def _decode_shares(stored: Mapping[str, tuple[bytes, bytes]]) -> dict[str, DealerShares]:
    return {
        dealer: DealerShares(mask_key=Secret(mask_key), self_seed=Secret(self_seed))
        for dealer, (mask_key, self_seed) in stored.items()
    }


FIELDS: Mapping[str, tuple[str, Callable[[Any, Participant], Any]]] = {
    "request": ("wanted", lambda request, _: request),
    "keys": ("keys", lambda keys, _: keys),
    "session": ("roster", _decode_session),
    "mask_pair": ("mask_key", lambda private, _: _decode_pair(private)),
    "sharing_pair": ("sharing_key", lambda private, _: _decode_pair(private)),
    "self_seed": ("self_seed", lambda seed, _: Secret(seed)),
    "shares": ("held", lambda shares, _: _decode_shares(shares)),
    "bad_dealers": ("bad_dealers", lambda names, _: frozenset(names)),
    "members": ("members", lambda names, _: names),
}


def suspended_of(request: DeviceRequest) -> SuspendedUpdate:
    """Return a device's update in its context, for engines where no process stays."""
    name = request.identity.name
    return SuspendedUpdate(request.context, name, is_simulated=request.is_simulated)
