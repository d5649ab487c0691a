"""The client's replies before it masks: it advertises keys, deals shares and checks shares.

Each function takes the state and the server's request, runs the checks (``client.secagg.checks``),
and returns the next state and the reply. A client that drops out in these phases has shown only
public keys, ciphertexts and commitments, and its update can go into another session.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headwater.client.secagg import checks, roster_checks
from headwater.client.secagg.states import (
    AwaitingMaskRequest,
    AwaitingRoster,
    AwaitingShares,
    DealerShares,
)
from headwater.client.secagg.types import Participant, SessionRecord
from headwater.common.errors import SealBroken
from headwater.common.secagg.keys import agree, commitment, new_key_pair, seal, unseal
from headwater.common.secagg.protocol import (
    MASK_KEY_SHARE,
    SEED_BYTES,
    SELF_SEED,
    SELF_SEED_SHARE,
    CheckReply,
    CheckRequest,
    DealtShare,
    KeysReply,
    KeysRequest,
    Roster,
    SharesReply,
)
from headwater.common.secagg.secret import Secret
from headwater.common.secagg.session import keys_message, session_of
from headwater.common.secagg.shamir import split


def advertise_keys(
    device: Participant, record: SessionRecord, request: KeysRequest
) -> tuple[AwaitingRoster, KeysReply]:
    """Phase 0: make two key pairs for this session alone.

    Raises:
        SessionRefused: see ``client.secagg.checks.CHECKS``.
    """
    roster_checks.check_opening(request, device, record)
    mask_pair, sharing_pair = new_key_pair(device.random), new_key_pair(device.random)
    keys = KeysReply(
        name=device.name,
        mask_key=mask_pair.public,
        sharing_key=sharing_pair.public,
        carried_weight=device.carried_weight or None,
        has_aes=device.has_aes,
    )
    if request.mode == "active" and device.identity is not None:
        signature = device.identity.sign(keys_message(request, keys))
        keys = keys.model_copy(update={"signature": signature})
    state = AwaitingRoster(
        device=device,
        record=replace(record, highest=request.number),
        request=request,
        keys=keys,
        mask_pair=mask_pair,
        sharing_pair=sharing_pair,
    )
    return state, keys


def share_keys(state: AwaitingRoster, roster: Roster) -> tuple[AwaitingShares, SharesReply]:
    """Phase 1: split the mask key and the self seed into shares, one of each for every holder.

    Raises:
        SessionRefused, ModelMismatch: see ``client.secagg.checks.CHECKS``.
    """
    device = state.device
    roster_checks.check_roster(roster, request=state.request, keys=state.keys, device=device)
    session = session_of(roster.parameters, roster.members, model_digest=device.model_digest)
    self_seed = Secret(device.random(SEED_BYTES))
    holders = session.holders(device.name)
    shares = split(
        [state.mask_pair.private.reveal(), self_seed.reveal()],
        threshold=session.parameters.threshold,
        num_holders=len(holders),
        random=device.random,
    )
    next_state = AwaitingShares(
        device=device,
        record=state.record,
        session=session,
        mask_pair=state.mask_pair,
        sharing_pair=state.sharing_pair,
        self_seed=self_seed,
    )
    reply = SharesReply(
        name=device.name,
        session=session.digest,
        seed_commitment=commitment(
            tag=SELF_SEED,
            session=session.digest,
            ends=(device.name, device.name),
            share=self_seed.reveal(),
        ),
        shares=tuple(
            _seal(next_state, holder, pair) for holder, pair in zip(holders, shares, strict=True)
        ),
    )
    shares.fill(0)
    return next_state, reply


def check_shares(
    state: AwaitingShares, request: CheckRequest
) -> tuple[AwaitingMaskRequest, CheckReply]:
    """Between phases 1 and 2: open the received shares, and name the dealers of bad ones.

    Raises:
        RosterRefused, SessionMismatch: see ``client.secagg.checks.CHECKS``.
    """
    device, session = state.device, state.session
    checks.check_delivery(request, session, device)
    opened = {share.dealer: _open(state, share) for share in request.shares}
    good = {dealer: shares for dealer, shares in opened.items() if shares is not None}
    bad = opened.keys() - good.keys()
    checks.check_opened(good, bad, session, device)
    state.sharing_pair.private.erase()
    next_state = AwaitingMaskRequest(
        device=device,
        record=state.record,
        session=session,
        mask_pair=state.mask_pair,
        self_seed=state.self_seed,
        shares=good,
        bad_dealers=frozenset(bad),
    )
    return next_state, CheckReply(name=device.name, bad_dealers=tuple(sorted(bad)))


def _seal(state: AwaitingShares, holder: str, shares: NDArray[np.uint8]) -> DealtShare:
    """Seal one holder's two shares [2, 32], and commit to each."""
    digest, ends = state.session.digest, (state.device.name, holder)
    key = _sealing_key(state, holder, ends)
    sealed = seal(key, shares.tobytes(), session=digest, ends=ends, random=state.device.random)
    key.erase()
    of_key, of_seed = (
        commitment(tag=tag, session=digest, ends=ends, share=share.tobytes())
        for tag, share in zip((MASK_KEY_SHARE, SELF_SEED_SHARE), shares, strict=True)
    )
    return DealtShare(
        dealer=state.device.name,
        holder=holder,
        sealed=sealed,
        key_commitment=of_key,
        seed_commitment=of_seed,
    )


def _open(state: AwaitingShares, dealt: DealtShare) -> DealerShares | None:
    """Open one dealer's sealed shares; None if they do not open or do not match the commitments."""
    digest, ends = state.session.digest, (dealt.dealer, state.device.name)
    key = _sealing_key(state, dealt.dealer, ends)
    try:
        both = unseal(key, dealt.sealed, session=digest, ends=ends)
    except SealBroken:
        return None
    finally:
        key.erase()
    view = both.reveal()
    shares = DealerShares(mask_key=Secret(view[:SEED_BYTES]), self_seed=Secret(view[SEED_BYTES:]))
    both.erase()
    matches = all(
        commitment(tag=tag, session=digest, ends=ends, share=share.reveal()) == expected
        for tag, share, expected in (
            (MASK_KEY_SHARE, shares.mask_key, dealt.key_commitment),
            (SELF_SEED_SHARE, shares.self_seed, dealt.seed_commitment),
        )
    )
    return shares if matches else None


def _sealing_key(state: AwaitingShares, peer: str, ends: tuple[str, str]) -> Secret:
    """Return the key for shares between this client and a peer; ``ends`` is (dealer, holder)."""
    return agree(
        state.sharing_pair.private,
        state.session.members[peer].sharing_key,
        session=state.session.digest,
        purpose="share",
        ends=ends,
    )
