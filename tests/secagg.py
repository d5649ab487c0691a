"""A secure session without a network: real devices, the real server, and faults as data."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from headwater.client.secagg.session import SecureSession
from headwater.client.secagg.types import Floor, Participant, SessionRecord, UnmaskedUpdate
from headwater.common.errors import HeadwaterError
from headwater.common.flower import records
from headwater.common.messages import WireMessage
from headwater.common.secagg.fixed_point import RingVector, encode_in_place
from headwater.common.secagg.identity import AllowList, SigningIdentity
from headwater.common.secagg.masked_numbers import CLIP_BIT
from headwater.common.secagg.protocol import (
    NUM_CLIPPED,
    PHASES,
    WEIGHT,
    MaskReply,
    Reply,
    Request,
    SessionNumber,
)
from headwater.common.secagg.scalar_encoding import encode_scalars
from headwater.server.secagg.key_phases import CheckPhase, DealPhase, KeysPhase, open_session
from headwater.server.secagg.mask_phases import MaskPhase, SignPhase
from headwater.server.secagg.parameters import SessionSetup
from headwater.server.secagg.unmask_phase import UnmaskedSum, UnmaskPhase
from tests.faults import FaultPlan

Phase = KeysPhase | DealPhase | CheckPhase | MaskPhase | SignPhase | UnmaskPhase

PLAN = hashlib.sha256(b"what all plans have in common").digest()
MODEL = hashlib.sha256(b"the model that everybody has").digest()
RUN = 4711
ACTIONS = tuple(phase.action for phase in PHASES)
PLANNED = 8


def name_of(number: int) -> str:
    return f"d{number:03d}"


class Answering(Protocol):
    """A device's side of a session, honest (``SecureSession``) or not."""

    vector: RingVector | None
    sums_S: NDArray[np.uint64]

    def answer(self, request: Request, bounds: bytes | None = None) -> Reply: ...


@dataclass(kw_only=True)
class Party:
    """A device, what it would send unmasked, and what it stored."""

    device: Participant
    session: Answering
    values_P: NDArray[np.float32]
    numbers: Mapping[str, float | int]
    stored: list[SessionRecord] = field(default_factory=list)
    bounds: NDArray[np.float32] | None = None

    @property
    def record(self) -> SessionRecord:
        """What the device stored last, the first being what it began with."""
        return self.stored[-1]

    @property
    def is_spent(self) -> bool:
        """Whether its update was masked."""
        return self.record.masked == self.device.update_id


@dataclass(kw_only=True)
class Played:
    """How a session went: what was opened, which devices refused the server's messages and
    whose answers the server rejected, and all that travelled."""

    phase: Phase | None = None
    opened: UnmaskedSum | None = None
    aborted: bool = False
    refused: dict[str, HeadwaterError] = field(default_factory=dict)
    rejected: dict[str, HeadwaterError] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)
    vectors: dict[str, bytes] = field(default_factory=dict)
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    replies: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def sum(self) -> UnmaskedSum:
        assert self.opened is not None, self.refused
        return self.opened


class Cast:
    """The devices of a cohort and the server's choices, for one session after another."""

    def __init__(
        self,
        num_devices: int,
        *,
        mode: str = "semi-honest",
        num_values: int = 3,
        seed: int = 0,
        floor: Floor | None = None,
        random: Callable[[str], Callable[[int], bytes]] | None = None,
        device: Mapping[str, Mapping[str, Any]] | None = None,
        rotation_bounds: NDArray[np.float32] | None = None,
        **chosen: Any,
    ) -> None:
        """Make the devices; ``device`` overrides fields of single ones by name."""
        self.bounds = rotation_bounds
        if rotation_bounds is not None:
            chosen["bounds_digest"] = hashlib.sha256(rotation_bounds.tobytes()).digest()
        self.names = [name_of(number) for number in range(num_devices)]
        self.identities = {n: SigningIdentity.new(n) for n in self.names if mode == "active"}
        allow_list = AllowList.parse("\n".join(i.line for i in self.identities.values()))
        weights = np.random.default_rng(seed).integers(1, PLANNED + 1, num_devices)
        self.setup = SessionSetup(
            **{
                "run": RUN,
                "number": SessionNumber(1, 1),
                "mode": mode,
                "model_digest": MODEL,
                "plan_digest": PLAN,
                "num_values": num_values,
                "planned_weights": dict.fromkeys(self.names, PLANNED),
                "clip": 4.0,
                "bounds": {"loss_sum": 100.0},
                **chosen,
            }
        )
        self.parties: dict[str, Party] = {}
        for number, name in enumerate(self.names):
            fields: dict[str, Any] = {
                "name": name,
                "run": RUN,
                "round": self.setup.number.round,
                "model_digest": MODEL,
                "plan_digest": PLAN,
                "num_values": num_values,
                "planned_weight": PLANNED,
                "update_id": f"{name} 0",
                "floor": floor or Floor(mode=self.setup.mode),
                "identity": self.identities.get(name),
                "allow_list": allow_list if self.identities else None,
            }
            if random is not None:
                fields["random"] = random(name)
            fields |= (device or {}).get(name, {})
            self.join(
                Participant(**fields), weight=int(weights[number]), seed=seed * 10_000 + number
            )

    def join(
        self, device: Participant, *, weight: int, seed: int, record: SessionRecord | None = None
    ) -> Party:
        """Give a device an update of its own, beyond the clip bound in one coordinate of twenty."""
        random = np.random.default_rng(seed)
        values = random.normal(0, 2.0 * weight, device.num_values).astype(np.float32)
        numbers = {WEIGHT: weight, "loss_sum": float(random.normal(0, 30))}
        if device.privacy is not None and device.privacy.bit_multiplier is not None:
            numbers[CLIP_BIT] = 1 if seed % 3 else -1
        return self._join(device, values, numbers, record or SessionRecord())

    def give(self, name: str, values_P: NDArray[np.float32]) -> Party:
        """Give a device another vector before it takes part."""
        party = self.parties[name]
        return self._join(party.device, values_P, party.numbers, party.record)

    def _join(
        self,
        device: Participant,
        values: NDArray[np.float32],
        numbers: Mapping[str, float | int],
        record: SessionRecord,
    ) -> Party:
        stored = [record]
        session = SecureSession(
            device,
            record,
            store=stored.append,
            update=UnmaskedUpdate(values_P=torch.from_numpy(values.copy()), numbers=numbers),
        )
        party = Party(
            device=device,
            session=session,
            values_P=values,
            numbers=numbers,
            stored=stored,
            bounds=self.bounds,
        )
        self.parties[device.name] = party
        return party

    def play(self, plan: FaultPlan | None = None) -> Played:
        """Run a session to its end.

        Raises:
            RoundAborted: it was aborted.
        """
        played = Played()
        self.play_into(played, plan or FaultPlan())
        return played

    def play_into(self, played: Played, plan: FaultPlan) -> None:
        """Run a session, and keep what happens for those who look at it after an abort."""
        gone = {drop.client: drop.after for drop in plan.drops}
        phase: Phase | UnmaskedSum = open_session(self.setup)
        while not isinstance(phase, UnmaskedSum):
            played.phase = phase
            for name, request in phase.requests().items():
                action = _action(request)
                if name in gone and _is_after(action, gone[name]):
                    continue
                phase = self._exchange(phase, name, request, played, plan)
            phase = phase.close()
        played.opened = phase

    def _exchange(
        self, phase: Phase, name: str, request: WireMessage, played: Played, plan: FaultPlan
    ) -> Phase:
        action, party = _action(request), self.parties[name]
        try:
            for told in _changed(request, plan, action=action, client=name, by_server=True):
                played.requests.setdefault(action, {})[name] = told
                bounds = party.bounds if action == "masked_update" else None
                reply: Any = (
                    party.session.answer(_wired(told, played))
                    if bounds is None
                    else party.session.answer(_wired(told, played), bounds.tobytes())
                )
                played.replies.setdefault(action, {})[name] = reply
        except HeadwaterError as error:
            played.refused[name] = error
            return phase
        vector = None
        if isinstance(reply, MaskReply):
            assert party.session.vector is not None
            vector = party.session.vector.tobytes() + party.session.sums_S.tobytes()
            played.vectors[name] = vector
        said = _changed((reply, vector), plan, action=action, client=name, by_server=False)
        for reply, vector in said:
            reply = _wired(reply, played)
            try:
                if isinstance(phase, MaskPhase):
                    phase = phase.take(name, reply, vector)
                else:
                    phase = phase.take(name, reply)
            except HeadwaterError as error:
                played.rejected[name] = error
        return phase

    def plain_sum(
        self, names: Iterable[str], opened: UnmaskedSum
    ) -> tuple[RingVector, NDArray[np.uint64]]:
        """Return the sums of the encoded, unmasked updates and numbers of these devices."""
        chosen = opened.session.parameters
        total_P = np.zeros_like(opened.vector_P)
        scalars = np.zeros(len(chosen.scalars), np.uint64)
        for name in names:
            party = self.parties[name]
            encoded_P, num_clipped = encode_in_place(
                torch.from_numpy(party.values_P.copy()),
                weight=max(one.planned_weight for one in opened.session.members.values()),
                encoding=chosen.encoding,
            )
            total_P += encoded_P
            numbers = {**party.numbers, NUM_CLIPPED: num_clipped}
            encoded, num_numbers = encode_scalars(numbers, chosen.scalars)
            encoded[[s.name for s in chosen.scalars].index(NUM_CLIPPED)] += np.uint64(num_numbers)
            scalars += encoded
        return total_P, scalars


def _action(request: WireMessage) -> str:
    return next(phase.action for phase in PHASES if phase.request is type(request))


def _is_after(action: str, last: str | None) -> bool:
    return last is None or ACTIONS.index(action) > ACTIONS.index(last)


def _changed(
    message: Any, plan: FaultPlan, *, action: str, client: str, by_server: bool
) -> list[Any]:
    """Return what really travels: a change may give one message, or a list of them."""
    for lie in plan.lies:
        if (lie.action, lie.by_server) == (action, by_server) and lie.client in (None, client):
            message = lie.change(message)
    return message if isinstance(message, list) else [message]


def _wired(message: Any, played: Played) -> Any:
    """Send a head through JSON, as the wire does."""
    text = message.model_dump_json(exclude_none=True)
    played.heads.append(text)
    kind: Any = type(message)
    return _parsed(text, kind)


# The roster is the same text for every device; what is read of it is frozen.
_parsed = functools.lru_cache(maxsize=4)(records.parse)
