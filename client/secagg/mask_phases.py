"""The client's replies from masking on: it masks its update, signs survivors and reveals shares.

Each function takes the state and the server's request, runs the checks (``client.secagg.checks``),
and returns the next state and the reply. Only the vector is changed in place. The caller
(``client.secagg.session``) owns network, clock and disk. It must store ``state.record`` before it
sends the reply, and the record of ``commit_update`` before ``mask_update`` changes the vector.

What the server learns from a client that drops out in any of these phases: public keys,
ciphertexts, commitments, a vector that looks random, and of each other member a share of one of its
two secrets.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from headwater.client.secagg import checks
from headwater.client.secagg.noise_share import add_bit_noise, add_noise, noise_sigma
from headwater.client.secagg.states import (
    AwaitingMaskRequest,
    AwaitingUnmask,
    ReadyToMask,
    SessionFinished,
)
from headwater.client.secagg.types import Participant, UnmaskedUpdate
from headwater.common.errors import OutOfPhase
from headwater.common.model.vectors import LARGEST, all_finite, saturate
from headwater.common.secagg.fixed_point import RingVector, encode_in_place, is_coarse
from headwater.common.secagg.hadamard_rotation import Rotation, rotate_in_place
from headwater.common.secagg.keys import agree, pairwise_sign, self_mask_key
from headwater.common.secagg.masked_numbers import NUM_EXAMPLES, NUM_REFUSED, in_names_of, widest
from headwater.common.secagg.masking import SCALARS, SUMS, VECTOR, Stream, mask_in_place
from headwater.common.secagg.protocol import (
    NUM_CLIPPED,
    MaskReply,
    MaskRequest,
    SurvivorsReply,
    SurvivorsRequest,
    UnmaskReply,
    UnmaskRequest,
)
from headwater.common.secagg.scalar_encoding import cut_to_limits, encode_scalars, encode_sums
from headwater.common.secagg.session import survivors_message

log = logging.getLogger(__name__)

MaskedState = TypeVar("MaskedState", bound=AwaitingUnmask | SessionFinished)


def commit_update(
    state: AwaitingMaskRequest,
    request: MaskRequest,
    update: UnmaskedUpdate,
    *,
    bounds: NDArray[np.float32] | None = None,
) -> ReadyToMask:
    """Phase 2, before anything is changed: bind the update to this session.

    ``bounds`` are the block bounds of a 16-bit or 8-bit ring.

    Raises:
        SessionRefused, ModelMismatch: see ``client.secagg.checks.CHECKS``.
    """
    device, parameters = state.device, state.session.parameters
    checks.check_members(request.members, state)
    checks.check_unmasked(device, state.record)
    checks.check_update(update, parameters, device)
    rotation = None
    if parameters.rotation_seed is not None:
        rotation = Rotation(seed=parameters.rotation_seed, num_coordinates=parameters.num_values)
        bounds = checks.check_bounds(bounds, parameters, device, num_blocks=rotation.num_blocks)
    return ReadyToMask(
        device=device,
        record=replace(state.record, masked=device.update_id),
        previous=state,
        members=request.members,
        streams=_mask_streams(state, frozenset(request.members)),
        rotation=rotation,
        bounds=bounds,
        noise_sigma=noise_sigma(device.privacy, parameters, len(request.members)),
    )


def mask_update(
    state: ReadyToMask, update: UnmaskedUpdate, *, num_threads: int = 1
) -> tuple[AwaitingUnmask, MaskReply, RingVector, NDArray[np.uint64]]:
    """Phase 2: encode and mask the update in its own memory; return that memory as ring elements.

    The last are the masked sums beside the model's. Afterwards the float32 values are overwritten
    and the secrets behind the masks are erased.
    """
    session = state.previous.session
    vector, scalars, sums_S = _encode(state, update)
    cipher = session.parameters.cipher
    mask_in_place(vector, state.streams, cipher=cipher, part=VECTOR, num_threads=num_threads)
    mask_in_place(scalars, state.streams, cipher=cipher, part=SCALARS)
    mask_in_place(sums_S, state.streams, cipher=cipher, part=SUMS)
    for secret in state.mask_secrets():
        secret.erase()
    next_state = AwaitingUnmask(
        device=state.device,
        record=state.record,
        session=session,
        members=state.members,
        shares=state.previous.shares,
    )
    reply = MaskReply(
        name=state.device.name, session=session.digest, scalars=scalars.astype("<u8").tobytes()
    )
    return next_state, reply, vector, sums_S


def sign_survivors(
    state: MaskedState, request: SurvivorsRequest
) -> tuple[MaskedState, SurvivorsReply]:
    """Phase 3, active mode only: sign the survivor set.

    Raises:
        SessionRefused: see ``client.secagg.checks.CHECKS``.
    """
    device, identity = state.device, state.device.identity
    if state.session.parameters.mode != "active" or identity is None:
        raise OutOfPhase(f"{device.name}: semi-honest mode has no consistency phase")
    digest = checks.check_survivors(request, state)
    reply = SurvivorsReply(name=device.name, signature=identity.sign(survivors_message(digest)))
    return _with_answered_set(state, digest), reply


def reveal_shares(
    state: AwaitingUnmask | SessionFinished, request: UnmaskRequest
) -> tuple[SessionFinished, UnmaskReply]:
    """Phase 4: reveal one share per dealer: of its self seed if it survived, else of its mask key.

    Raises:
        SessionRefused: see ``client.secagg.checks.CHECKS``.
    """
    digest = checks.check_survivors(request, state)
    if isinstance(state, SessionFinished):  # the same set again: repeat the reply
        return state, state.reply
    if state.session.parameters.mode == "active":
        checks.check_signatures(request, digest=digest, session=state.session, device=state.device)
    survived, dropped = set(request.survived), set(request.dropped)
    reply = UnmaskReply(
        name=state.device.name,
        self_seed_shares={
            d: bytes(s.self_seed.reveal()) for d, s in state.shares.items() if d in survived
        },
        mask_key_shares={
            d: bytes(s.mask_key.reveal()) for d, s in state.shares.items() if d in dropped
        },
    )
    for secret in state.secrets():
        secret.erase()
    finished = SessionFinished(
        device=state.device,
        record=_with_answered_set(state, digest).record,
        session=state.session,
        members=state.members,
        reply=reply,
    )
    return finished, reply


def _mask_streams(state: AwaitingMaskRequest, members: frozenset[str]) -> tuple[Stream, ...]:
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


def _encode(
    state: ReadyToMask, update: UnmaskedUpdate
) -> tuple[RingVector, NDArray[np.uint64], NDArray[np.uint64]]:
    """Encode vector, numbers and sums; clipped entries of the first two are in ``num_clipped``.

    What cannot be encoded is cut to what can (``with_usable_values``): a refusal would tell the
    server that some example has no finite gradient under a model of the server's choice. In a ring
    of few steps for this vector the rounding is stochastic: to nearest it would be zeros, and the
    sum another member's alone.

    A private session's vector gets its share of the noise, as does the bit on the clip norm. Its
    clipped entries stay uncounted: their number depends on the data.
    """
    parameters, random = state.previous.session.parameters, None
    update = with_usable_values(update, state.device)
    if state.rotation is not None and state.bounds is not None:
        rotate_in_place(
            update.values_P,
            rotation=state.rotation,
            bounds=state.bounds,
            max_weight=parameters.encoding.max_weight,
            ring_bits=parameters.encoding.ring_bits,
        )
        random = _random_of(state.device)
        # A rotation adds up coordinates, which may overflow.
        update = with_usable_values(update, state.device)
    elif state.noise_sigma is None and is_coarse(update.values_P, parameters.encoding):
        random = _random_of(state.device)
    # The ring has room for each member's planned weight, of which a sum of weight 0 needs some. All
    # have the bound of the largest: else a small one would show who was clipped, by its quota.
    members = state.previous.session.members.values()
    weight = max(member.planned_weight for member in members)
    vector, num_clipped = encode_in_place(
        update.values_P,
        weight=weight if state.device.privacy is None else state.device.planned_weight,
        encoding=parameters.encoding,
        random=random,
    )
    numbers = {**in_names_of(parameters.scalars, update.numbers), NUM_CLIPPED: 0}
    last = widest(parameters.scalars)
    _, num_clipped_numbers = encode_scalars({one.name: numbers[one.name] for one in last}, last)
    if state.noise_sigma is None:
        numbers[NUM_CLIPPED] = num_clipped + num_clipped_numbers
    else:
        add_noise(vector, state.noise_sigma, state.device.random)
    scalars, _ = encode_scalars(numbers, parameters.scalars)
    if (terms := state.device.privacy) is not None:
        random_of, num_members = state.device.random, len(state.members)
        add_bit_noise(scalars, terms, parameters, num_members=num_members, random=random_of)
    return vector, scalars, encode_sums(update.sums_S, parameters.sums)


def _random_of(device: Participant) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(device.random(32), "little"))


def with_usable_values(update: UnmaskedUpdate, device: Participant) -> UnmaskedUpdate:
    """Return the update with all that is beyond a limit cut to it, in place; a NaN counts as 0.

    Nothing that a server's model can lead to clears an update: the others' sum would be one
    member's. Only a weight beyond the plan's does, as of a task whose examples weigh more than it
    says: that is set to zeros of weight 0, and its examples count as left out. So is a private
    vector that is not finite: it was not clipped, and noise hides that the others are more.
    """
    is_private = device.privacy is not None
    is_usable = 0 <= update.weight <= device.planned_weight
    is_usable = is_usable and (not is_private or all_finite(update.values_P))
    saturate(update.values_P)
    cut_to_limits(update.sums_S, device.sums)
    numbers = {name: _usable(value) for name, value in update.numbers.items()}
    if is_usable:
        return replace(update, numbers=numbers)
    log.warning("an update that is too heavy, or not clipped, is masked as one of weight 0")
    update.values_P.zero_()
    update.sums_S.zero_()
    num_left_out = sum(int(numbers.get(name, 0)) for name in (NUM_EXAMPLES, NUM_REFUSED))
    cleared: dict[str, float | int] = dict.fromkeys(numbers, 0)
    if NUM_REFUSED in numbers:
        cleared[NUM_REFUSED] = num_left_out
    return replace(update, numbers=cleared)


def _usable(number: float) -> float:
    """Return a finite number; its ring cuts it to its own range."""
    return 0.0 if math.isnan(number) else min(max(number, -LARGEST), LARGEST)


def _with_answered_set(state: MaskedState, digest: bytes) -> MaskedState:
    """Return the state with a record of the survivor set that the client answered."""
    answered = (state.session.digest.hex(), digest.hex())
    return replace(state, record=replace(state.record, answered=answered))
