"""The device's half of secure aggregation before anything is masked: keys, shares, complaints.

Each function takes the state and the server's message, checks it (``client.secagg.checks``), and
returns the next state and the answer. Who leaves here has shown public keys, ciphertexts and
commitments, and its update can go into another session.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headwater.client.secagg import checks as secure_checks
from headwater.client.secagg import roster_checks
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


def advertise(
    device: Participant, record: SessionRecord, wanted: KeysRequest
) -> tuple[AwaitingRoster, KeysReply]:
    """Phase 0: make two key pairs for this session alone.

    Raises:
        SessionRefused: see ``client.secagg.checks.CHECKS``.
    """
    roster_checks.check_opening(wanted, device, record)
    mask_pair, sharing_pair = new_key_pair(device.random), new_key_pair(device.random)
    keys = KeysReply(
        name=device.name,
        mask_key=mask_pair.public,
        sharing_key=sharing_pair.public,
        has_aes=device.has_aes,
    )
    if wanted.mode == "active" and device.identity is not None:
        signature = device.identity.sign(keys_message(wanted, keys))
        keys = keys.model_copy(update={"signature": signature})
    state = AwaitingRoster(
        device=device,
        record=replace(record, highest=wanted.number),
        wanted=wanted,
        keys=keys,
        mask_pair=mask_pair,
        sharing_pair=sharing_pair,
    )
    return state, keys


def deal(state: AwaitingRoster, roster: Roster) -> tuple[AwaitingShares, SharesReply]:
    """Phase 1: share the mask key and the self seed among the holders.

    Raises:
        SessionRefused, ModelMismatch: see ``client.secagg.checks.CHECKS``.
    """
    device = state.device
    roster_checks.check_roster(roster, wanted=state.wanted, keys=state.keys, device=device)
    session = session_of(roster.parameters, roster.members, model_digest=device.model_digest)
    self_seed = Secret(device.random(SEED_BYTES))
    holders = session.holders(device.name)
    shares = split(
        [state.mask_pair.private.reveal(), self_seed.reveal()],
        threshold=session.parameters.threshold,
        num_holders=len(holders),
        random=device.random,
    )
    dealt = AwaitingShares(
        device=device,
        record=state.record,
        session=session,
        mask_pair=state.mask_pair,
        sharing_pair=state.sharing_pair,
        self_seed=self_seed,
    )
    answer = SharesReply(
        name=device.name,
        session=session.digest,
        seed_commitment=commitment(
            tag=SELF_SEED,
            session=session.digest,
            ends=(device.name, device.name),
            share=self_seed.reveal(),
        ),
        shares=tuple(
            _sealed(dealt, holder, pair) for holder, pair in zip(holders, shares, strict=True)
        ),
    )
    shares.fill(0)
    return dealt, answer


def _sealed(state: AwaitingShares, holder: str, shares: NDArray[np.uint8]) -> DealtShare:
    """Seal one holder's two shares [2, 32], and commit to each."""
    session, ends = state.session, (state.device.name, holder)
    key = agree(
        state.sharing_pair.private,
        session.members[holder].sharing_key,
        session=session.digest,
        purpose="share",
        ends=ends,
    )
    sealed = seal(
        key, shares.tobytes(), session=session.digest, ends=ends, random=state.device.random
    )
    key.erase()
    of_key, of_seed = (
        commitment(tag=tag, session=session.digest, ends=ends, share=share.tobytes())
        for tag, share in zip((MASK_KEY_SHARE, SELF_SEED_SHARE), shares, strict=True)
    )
    return DealtShare(
        dealer=state.device.name,
        holder=holder,
        sealed=sealed,
        key_commitment=of_key,
        seed_commitment=of_seed,
    )


def check(state: AwaitingShares, delivered: CheckRequest) -> tuple[AwaitingMaskRequest, CheckReply]:
    """Between the phases: open the shares, and name the dealers of those that are bad.

    Raises:
        RosterRefused, SessionMismatch: see ``client.secagg.checks.CHECKS``.
    """
    device, session = state.device, state.session
    secure_checks.check_delivery(delivered, session, device)
    opened = {share.dealer: _opened(state, share) for share in delivered.shares}
    held = {dealer: share for dealer, share in opened.items() if share is not None}
    bad = opened.keys() - held.keys()
    secure_checks.check_opened(held, bad, session, device)
    state.sharing_pair.private.erase()
    holding = AwaitingMaskRequest(
        device=device,
        record=state.record,
        session=session,
        mask_pair=state.mask_pair,
        self_seed=state.self_seed,
        held=held,
        bad_dealers=frozenset(bad),
    )
    return holding, CheckReply(name=device.name, bad_dealers=tuple(sorted(bad)))


def _opened(state: AwaitingShares, dealt: DealtShare) -> DealerShares | None:
    """Open one dealer's box; None if it does not open, or holds what was not committed to."""
    session, ends = state.session, (dealt.dealer, state.device.name)
    key = agree(
        state.sharing_pair.private,
        session.members[dealt.dealer].sharing_key,
        session=session.digest,
        purpose="share",
        ends=ends,
    )
    try:
        both = unseal(key, dealt.sealed, session=session.digest, ends=ends)
    except SealBroken:
        return None
    finally:
        key.erase()
    view = both.reveal()
    share = DealerShares(mask_key=Secret(view[:SEED_BYTES]), self_seed=Secret(view[SEED_BYTES:]))
    both.erase()
    matches = all(
        commitment(tag=tag, session=session.digest, ends=ends, share=found.reveal()) == told
        for tag, found, told in (
            (MASK_KEY_SHARE, share.mask_key, dealt.key_commitment),
            (SELF_SEED_SHARE, share.self_seed, dealt.seed_commitment),
        )
    )
    return share if matches else None
