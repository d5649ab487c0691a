"""The device's half of secure aggregation from the masks on: mask, sign, reveal.

A state for each phase (``client.secagg.states``), and a function between each two: it takes the
state and the server's message, checks it (``client.secagg.checks``), and returns the next state and
the answer; the vector alone is changed, where it lies. Network, clock and disk are the caller's,
and so is the order in which things are made to last: ``state.record`` must be stored before the
answer is sent, and that of ``commit`` before the vector is touched (``client.secagg.session``).

What the server learns from a device that ends here at any phase: public keys, ciphertexts,
commitments, a vector that looks random, and of each other device a share of one of its two secrets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from headwater.client.secagg import checks
from headwater.client.secagg.states import (
    AwaitingMaskRequest,
    AwaitingUnmask,
    ReadyToMask,
    SessionFinished,
)
from headwater.client.secagg.types import UnmaskedUpdate
from headwater.common.errors import OutOfPhase
from headwater.common.secagg.fixed_point import RingVector, encode_in_place
from headwater.common.secagg.keys import agree, pairwise_sign, self_mask_key
from headwater.common.secagg.masking import SCALARS, VECTOR, Stream, mask_in_place
from headwater.common.secagg.protocol import (
    NUM_CLIPPED,
    MaskReply,
    MaskRequest,
    SurvivorsReply,
    SurvivorsRequest,
    UnmaskReply,
    UnmaskRequest,
)
from headwater.common.secagg.rotation import Rotation, rotate_in_place
from headwater.common.secagg.scalars import encode_scalars
from headwater.common.secagg.session import survivors_message

S = TypeVar("S", bound=AwaitingUnmask | SessionFinished)


def commit(
    state: AwaitingMaskRequest,
    wanted: MaskRequest,
    trained: UnmaskedUpdate,
    *,
    bounds: NDArray[np.float32] | None = None,
) -> ReadyToMask:
    """Phase 2, before anything is changed: the update belongs to this session from here on.

    ``bounds`` are the block bounds of a 16-bit ring.

    Raises:
        SessionRefused, ModelMismatch, CountOutOfRange, NonFiniteUpdate: see
            ``client.secagg.checks.CHECKS``.
    """
    device, chosen = state.device, state.session.parameters
    checks.check_members(
        wanted.members,
        session=state.session,
        opened=state.held,
        bad_dealers=state.bad_dealers,
        device=device,
    )
    checks.check_unmasked(device, state.record)
    checks.check_update(trained, chosen, device)
    rotation = None
    if chosen.rotation_seed is not None:
        rotation = Rotation(seed=chosen.rotation_seed, num_coordinates=chosen.num_values)
        bounds = checks.check_bounds(bounds, chosen, device, num_blocks=rotation.num_blocks)
    return ReadyToMask(
        device=device,
        record=replace(state.record, masked=device.update_id),
        holding=state,
        members=wanted.members,
        streams=_streams(state, frozenset(wanted.members)),
        rotation=rotation,
        bounds=bounds,
    )


def mask(
    state: ReadyToMask, trained: UnmaskedUpdate, *, num_threads: int = 1
) -> tuple[AwaitingUnmask, MaskReply, RingVector]:
    """Phase 2: encode the update and mask it, in its own memory; return that memory as the ring's.

    The float32 values are gone afterwards, and so are the secrets that made the masks.
    """
    session = state.holding.session
    vector, scalars = _encoded(state, trained)
    cipher = session.parameters.cipher
    mask_in_place(vector, state.streams, cipher=cipher, part=VECTOR, num_threads=num_threads)
    mask_in_place(scalars, state.streams, cipher=cipher, part=SCALARS)
    for secret in state.mask_secrets():
        secret.erase()
    masked = AwaitingUnmask(
        device=state.device,
        record=state.record,
        session=session,
        members=state.members,
        held=state.holding.held,
    )
    head = MaskReply(
        name=state.device.name, session=session.digest, scalars=scalars.astype("<u8").tobytes()
    )
    return masked, head, vector


def _streams(state: AwaitingMaskRequest, members: frozenset[str]) -> tuple[Stream, ...]:
    """Return the self mask, and the pairwise masks with the neighbours in U2."""
    session, name = state.session, state.device.name
    own = Stream(key=self_mask_key(state.self_seed, session=session.digest, name=name), sign=1)
    pairwise = [
        Stream(
            key=agree(
                state.mask_pair.private,
                session.members[peer].mask_key,
                session=session.digest,
                purpose="pairwise mask",
                ends=(name, peer),
            ),
            sign=pairwise_sign(name, peer),
        )
        for peer in session.neighbours(name)
        if peer in members
    ]
    return (own, *pairwise)


def _encoded(state: ReadyToMask, trained: UnmaskedUpdate) -> tuple[RingVector, NDArray[np.uint64]]:
    """Encode vector and numbers; what was clipped of either is counted among the numbers."""
    chosen, random = state.holding.session.parameters, None
    if state.rotation is not None and state.bounds is not None:
        rotate_in_place(
            trained.values_P,
            rotation=state.rotation,
            bounds=state.bounds,
            max_weight=chosen.encoding.max_weight,
        )
        random = np.random.default_rng(int.from_bytes(state.device.random(32), "little"))
    vector, num_clipped = encode_in_place(
        trained.values_P, weight=trained.weight, encoding=chosen.encoding, random=random
    )
    numbers = {**trained.numbers, NUM_CLIPPED: 0}
    _, num_numbers = encode_scalars(numbers, chosen.scalars)
    numbers[NUM_CLIPPED] = num_clipped + num_numbers
    scalars, _ = encode_scalars(numbers, chosen.scalars)
    return vector, scalars


def sign(
    state: AwaitingUnmask | SessionFinished, told: SurvivorsRequest
) -> tuple[AwaitingUnmask | SessionFinished, SurvivorsReply]:
    """Phase 3, active mode: put the own name under the survivor set.

    Raises:
        SessionRefused: see ``client.secagg.checks.CHECKS``.
    """
    device, identity = state.device, state.device.identity
    if state.session.parameters.mode != "active" or identity is None:
        raise OutOfPhase(f"{device.name}: there is no consistency phase in semi-honest mode")
    digest = _agreed(state, told)
    signature = identity.sign(survivors_message(digest))
    return _answering(state, digest), SurvivorsReply(name=device.name, signature=signature)


def reveal(
    state: AwaitingUnmask | SessionFinished, wanted: UnmaskRequest
) -> tuple[SessionFinished, UnmaskReply]:
    """Phase 4: give one share of each dealer: of the self seed if it survived, else of the key.

    Raises:
        SessionRefused: see ``client.secagg.checks.CHECKS``.
    """
    digest = _agreed(state, wanted)
    if isinstance(state, SessionFinished):  # the same set again
        return state, state.answer
    if state.session.parameters.mode == "active":
        checks.check_signatures(wanted, digest=digest, session=state.session, device=state.device)
    survived, dropped = set(wanted.survived), set(wanted.dropped)
    answer = UnmaskReply(
        name=state.device.name,
        self_seed_shares={
            d: bytes(s.self_seed.reveal()) for d, s in state.held.items() if d in survived
        },
        mask_key_shares={
            d: bytes(s.mask_key.reveal()) for d, s in state.held.items() if d in dropped
        },
    )
    for secret in state.secrets():
        secret.erase()
    revealed = SessionFinished(
        device=state.device,
        record=_answering(state, digest).record,
        session=state.session,
        members=state.members,
        answer=answer,
    )
    return revealed, answer


def _agreed(
    state: AwaitingUnmask | SessionFinished, told: SurvivorsRequest | UnmaskRequest
) -> bytes:
    return checks.check_survivors(
        told,
        session=state.session,
        members=state.members,
        device=state.device,
        record=state.record,
    )


def _answering(state: S, digest: bytes) -> S:
    answered = (state.session.digest.hex(), digest.hex())
    return replace(state, record=replace(state.record, answered=answered))
