"""What a device checks of a session before it deals shares: number, members, keys, parameters.

The list of all checks is ``client.secagg.checks.CHECKS``.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence

from headwater.client.secagg.checks import check_unmasked
from headwater.client.secagg.types import Participant, SessionRecord
from headwater.common.errors import (
    CohortTooSmall,
    IdentityUnknown,
    MaskingTooWeak,
    ModelMismatch,
    RingCanWrap,
    RosterRefused,
    SessionReplayed,
    SignatureRefused,
    ThresholdTooHigh,
    ThresholdTooLow,
)
from headwater.common.secagg.fixed_point import plan_encoding
from headwater.common.secagg.graph import GraphSize, Mode, check_graph_size
from headwater.common.secagg.protocol import (
    LEAST_MEMBERS,
    NUM_CLIPPED,
    WEIGHT,
    KeysReply,
    KeysRequest,
    Member,
    Parameters,
    Roster,
    accusation,
    complete_threshold,
    most_clipped,
)
from headwater.common.secagg.rotation import rotated_encoding
from headwater.common.secagg.session import keys_message


def check_opening(wanted: KeysRequest, device: Participant, record: SessionRecord) -> None:
    """Check what opens a session."""
    if (wanted.run, wanted.round) != (device.run, device.round):
        raise SessionReplayed(
            f"{device.name}: a session of run {wanted.run}, round {wanted.round}, for an update of "
            f"run {device.run}, round {device.round}"
        )
    if record.highest is not None and wanted.number <= record.highest:
        raise SessionReplayed(
            f"{device.name}: a session of {wanted.number}, after one of {record.highest}"
        )
    check_unmasked(device, record)
    if device.floor.mode == "active" and wanted.mode != "active":
        raise MaskingTooWeak(f"{device.name}: a {wanted.mode} session, it insists on active mode")
    if wanted.mode == "active" and (device.identity is None or device.allow_list is None):
        raise MaskingTooWeak(
            f"{device.name}: active mode without an identity and an allow-list: start this device "
            "with --identity and --allow-list",
            remedy="make the identity with `headwater-client identity`; the client needs both",
        )


def check_roster(
    roster: Roster, *, wanted: KeysRequest, keys: KeysReply, device: Participant
) -> None:
    """Check U1 and the parameters, before anything is derived from them."""
    chosen = roster.parameters
    for found, expected in (
        ((chosen.run, chosen.round, chosen.attempt), (wanted.run, wanted.round, wanted.attempt)),
        (chosen.mode, wanted.mode),
    ):
        if found != expected:
            raise SessionReplayed(
                f"{device.name}: a roster for {found}, its keys were made for {expected}"
            )
    _check_members(roster.members, keys=keys, device=device)
    if chosen.mode == "active":
        _check_identities(roster.members, wanted, device)
    num_members = len(roster.members)
    check_thresholds(chosen, num_members, device)
    _check_ring(chosen, roster.members, device)
    _check_numbers(chosen, num_members, device)


def _check_members(members: Sequence[Member], *, keys: KeysReply, device: Participant) -> None:
    least = max(LEAST_MEMBERS, device.floor.min_members)
    if len(members) < least:
        raise CohortTooSmall(
            f"{device.name}: a session of {len(members)}, at least {least} are needed"
        )
    public = (key for member in members for key in (member.mask_key, member.sharing_key))
    names = (member.name for member in members)
    for kind, things in (("name", names), ("key", (key.hex() for key in public))):
        twice = [thing for thing, count in Counter(things).items() if count > 1]
        if twice:
            raise RosterRefused(f"{device.name}: the {kind} {twice[0]} stands twice in the roster")
    own = [member for member in members if member.name == device.name]
    expected = Member(
        name=device.name,
        mask_key=keys.mask_key,
        sharing_key=keys.sharing_key,
        has_aes=keys.has_aes,
        signature=keys.signature,
        planned_weight=device.planned_weight,
    )
    if own != [expected]:
        raise RosterRefused(
            f"{device.name}: its entry in the roster is not what it advertised, or not its plan"
            if own
            else f"{device.name}: it is not in the roster itself"
        )


def _check_identities(members: Iterable[Member], wanted: KeysRequest, device: Participant) -> None:
    if device.allow_list is None:
        raise MaskingTooWeak(f"{device.name}: active mode without an allow-list")
    unknown, unsigned = [], []
    for member in members:
        try:
            device.allow_list.verify(member.name, keys_message(wanted, member), member.signature)
        except IdentityUnknown:
            unknown.append(member.name)
        except SignatureRefused:
            unsigned.append(member.name)
    if unknown:
        raise IdentityUnknown(accusation(unknown, f"not on the allow-list of {device.name}"))
    if unsigned:
        raise SignatureRefused(
            accusation(unsigned, f"not signed by whom the allow-list of {device.name} has there")
        )


def check_thresholds(chosen: Parameters, num_members: int, device: Participant) -> None:
    """Check t, and k if the graph is sparse, against n."""
    t, k = chosen.threshold, chosen.num_neighbours
    if k is not None:
        if k % 2:
            raise MaskingTooWeak(f"{device.name}: no graph has {k} neighbours, an odd number")
        floor = device.floor
        _check_graph(k, t, num_members, floor.corrupted, floor.dropout, chosen.mode, floor.bits)
        return
    least = complete_threshold(num_members, chosen.mode)
    if t < least:
        raise ThresholdTooLow(
            f"{device.name}: {t} shares would open a secret of {num_members} members, at least "
            f"{least} must be needed in {chosen.mode} mode"
        )
    if t > num_members:
        raise ThresholdTooHigh(f"{device.name}: {t} shares are needed, of {num_members} members")


@functools.lru_cache(maxsize=8)
def _check_graph(
    k: int, t: int, num_members: int, corrupted: float, dropout: float, mode: Mode, bits: int
) -> None:
    """Check a sparse graph's sizes; kept for the devices of a process that plays many."""
    check_graph_size(
        GraphSize(num_neighbours=k, threshold=t),
        num_devices=num_members,
        corrupted=corrupted,
        dropout=dropout,
        mode=mode,
        security_bits=bits,
    )


def _check_ring(chosen: Parameters, members: Sequence[Member], device: Participant) -> None:
    floor, encoding = device.floor, chosen.encoding
    if chosen.num_values != device.num_values:
        raise ModelMismatch(
            f"{device.name}: a session for {chosen.num_values:,} coordinates, the update has "
            f"{device.num_values:,}"
        )
    if encoding.ring_bits not in floor.ring_bits:
        raise MaskingTooWeak(f"{device.name}: a ring of {encoding.ring_bits} bits")
    is_rotated = encoding.ring_bits == 16
    if is_rotated != (chosen.rotation_seed is not None and chosen.bounds_digest is not None):
        raise MaskingTooWeak(
            f"{device.name}: 16 bits go with a rotation and its bounds, 32 without"
        )
    if not is_rotated and not floor.min_clip <= encoding.clip <= floor.max_clip:
        raise MaskingTooWeak(
            f"{device.name}: a clip bound of {encoding.clip:g}, expected "
            f"{floor.min_clip:g} to {floor.max_clip:g}"
        )
    planned = sum(member.planned_weight for member in members)
    if encoding.max_weight < planned:
        raise RingCanWrap(
            f"{device.name}: the ring is made for a weight of {encoding.max_weight:,}, the roster "
            f"plans {planned:,}"
        )
    finest = (
        rotated_encoding(max_weight=encoding.max_weight)
        if is_rotated
        else plan_encoding(max_weight=encoding.max_weight, clip=encoding.clip)
    )
    if encoding != finest:
        raise MaskingTooWeak(f"{device.name}: {encoding}, the finest that cannot wrap is {finest}")
    if chosen.cipher != "chacha20" and not all(member.has_aes for member in members):
        raise MaskingTooWeak(f"{device.name}: {chosen.cipher}, though not all members have it")


def _check_numbers(chosen: Parameters, num_members: int, device: Participant) -> None:
    by_name = {scalar.name: scalar for scalar in chosen.scalars}
    if len(by_name) != len(chosen.scalars):
        raise MaskingTooWeak(f"{device.name}: a masked number stands twice")
    num_clips = most_clipped(device.num_values, len(by_name))
    for name, largest in ((WEIGHT, device.planned_weight), (NUM_CLIPPED, num_clips)):
        scalar = by_name.get(name)
        if scalar is None or not scalar.is_count or scalar.bound < largest:
            raise MaskingTooWeak(f"{device.name}: no masked count {name} of up to {largest:,}")
    for scalar in chosen.scalars:
        if scalar.is_count and scalar.name not in (WEIGHT, NUM_CLIPPED):
            # A count out of its range is refused, which would tell the loss bit by bit.
            raise MaskingTooWeak(f"{device.name}: {scalar.name} is no count, and asked for as one")
        if scalar.num_devices < num_members:
            raise RingCanWrap(
                f"{device.name}: {scalar.name} is made for {scalar.num_devices} devices, the "
                f"roster has {num_members}"
            )
