"""The checks that a client runs before it deals shares: session number, members, keys, parameters.

``client.secagg.checks.CHECKS`` lists all checks.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence

from headwater.client.secagg.checks import check_share, check_unmasked
from headwater.client.secagg.noise_share import check_noise
from headwater.client.secagg.types import Participant, SessionRecord
from headwater.common import errors
from headwater.common.secagg.fixed_point import plan_encoding
from headwater.common.secagg.graph import GraphSize, Mode, check_graph_size
from headwater.common.secagg.hadamard_rotation import rotated_encoding
from headwater.common.secagg.protocol import (
    MAX_COMPLETE,
    NUM_CLIPPED,
    WEIGHT,
    KeysReply,
    KeysRequest,
    Member,
    Parameters,
    Roster,
    accusation,
    complete_threshold,
    max_clipped,
)
from headwater.common.secagg.scalar_encoding import plan_sums
from headwater.common.secagg.session import keys_message
from headwater.common.settings.rounds import MIN_MEMBERS


def check_opening(request: KeysRequest, device: Participant, record: SessionRecord) -> None:
    """Check the request that opens a session."""
    if (request.run, request.round) != (device.run, device.round):
        raise errors.SessionReplayed(
            f"{device.name}: the session is of run {request.run}, round {request.round}, the "
            f"update of run {device.run}, round {device.round}"
        )
    if record.highest is not None and request.number <= record.highest:
        raise errors.SessionReplayed(
            f"{device.name}: session {request.number} is not newer than {record.highest}"
        )
    check_unmasked(device, record)
    if device.floor.mode == "active" and request.mode != "active":
        raise errors.MaskingTooWeak(
            f"{device.name}: the session is {request.mode}, this device requires active mode"
        )
    if request.mode == "active" and (device.identity is None or device.allow_list is None):
        raise errors.MaskingTooWeak(
            f"{device.name}: active mode needs an identity and an allow-list: start this device "
            "with --identity and --allow-list",
            remedy="make the identity with `headwater-client identity`; the client needs both",
        )


def check_roster(
    roster: Roster, *, request: KeysRequest, keys: KeysReply, device: Participant
) -> None:
    """Check U1 and the parameters, before anything is derived from them."""
    parameters = roster.parameters
    for actual, expected in (
        (
            (parameters.run, parameters.round, parameters.attempt),
            (request.run, request.round, request.attempt),
        ),
        (parameters.mode, request.mode),
    ):
        if actual != expected:
            raise errors.SessionReplayed(
                f"{device.name}: the roster is for {actual}, the keys were made for {expected}"
            )
    if parameters.plan != device.plan_digest:
        raise errors.PlanMismatch(
            f"{device.name}: the session is for plans with digest {parameters.plan.hex()[:16]}, "
            f"its own plan has {device.plan_digest.hex()[:16]}"
        )
    _check_members(roster.members, keys=keys, device=device)
    if parameters.mode == "active":
        _check_identities(roster.members, request, device)
    num_members = len(roster.members)
    check_thresholds(parameters, num_members, device)
    check_share(roster.members, device)
    _check_ring(parameters, roster.members, device)
    check_noise(parameters, num_members, device)
    _check_numbers(parameters, num_members, device)
    _check_sums(parameters, num_members, device)


def _check_members(members: Sequence[Member], *, keys: KeysReply, device: Participant) -> None:
    least = max(MIN_MEMBERS, device.floor.min_members)
    if len(members) < least:
        raise errors.CohortTooSmall(
            f"{device.name}: the session has {len(members)} members, at least {least} are required"
        )
    names = [member.name for member in members]
    public_keys = [key.hex() for member in members for key in (member.mask_key, member.sharing_key)]
    for kind, entries in (("name", names), ("key", public_keys)):
        repeated = [entry for entry, count in Counter(entries).items() if count > 1]
        if repeated:
            raise errors.RosterRefused(
                f"{device.name}: the {kind} {repeated[0]} appears twice in the roster"
            )
    own = [member for member in members if member.name == device.name]
    expected = Member(
        name=device.name,
        mask_key=keys.mask_key,
        sharing_key=keys.sharing_key,
        has_aes=keys.has_aes,
        signature=keys.signature,
        planned_weight=device.planned_weight,
        carried_weight=device.carried_weight or None,
    )
    if own != [expected]:
        raise errors.RosterRefused(
            f"{device.name}: its roster entry differs from the keys that it advertised or from its "
            "plan"
            if own
            else f"{device.name}: it is not in the roster"
        )


def _check_identities(members: Iterable[Member], request: KeysRequest, device: Participant) -> None:
    if device.allow_list is None:
        raise errors.MaskingTooWeak(f"{device.name}: active mode needs an allow-list")
    unknown, unsigned = [], []
    for member in members:
        try:
            device.allow_list.verify(member.name, keys_message(request, member), member.signature)
        except errors.IdentityUnknown:
            unknown.append(member.name)
        except errors.SignatureRefused:
            unsigned.append(member.name)
    if unknown:
        raise errors.IdentityUnknown(accusation(unknown, f"not on the allow-list of {device.name}"))
    if unsigned:
        raise errors.SignatureRefused(
            accusation(unsigned, f"not signed by its identity on the allow-list of {device.name}")
        )


def check_thresholds(parameters: Parameters, num_members: int, device: Participant) -> None:
    """Check t against n, and k; a graph of up to ``MAX_COMPLETE`` members must be complete."""
    t, k, mode = parameters.threshold, parameters.num_neighbours, parameters.mode
    if k is not None:
        if num_members <= MAX_COMPLETE:
            raise errors.MaskingTooWeak(
                f"{device.name}: the session has a sparse graph of {k} neighbours each; up to "
                f"{MAX_COMPLETE} members, all of {num_members} members must be neighbours"
            )
        if k % 2:
            raise errors.MaskingTooWeak(
                f"{device.name}: {k} neighbours is odd; a graph needs an even k"
            )
        floor = device.floor
        _check_graph(k, t, num_members, floor.corrupted, floor.dropout, mode, floor.bits)
        return
    least = complete_threshold(num_members, mode)
    if t < least:
        raise errors.ThresholdTooLow(
            f"{device.name}: {t} shares of {num_members} members would open a secret; {mode} mode "
            f"requires at least {least}"
        )
    if t > num_members:
        raise errors.ThresholdTooHigh(
            f"{device.name}: {t} shares are needed, of {num_members} members"
        )


@functools.lru_cache(maxsize=8)
def _check_graph(
    k: int, t: int, num_members: int, corrupted: float, dropout: float, mode: Mode, bits: int
) -> None:
    """Check a sparse graph's sizes; cached for a process that runs many clients."""
    check_graph_size(
        GraphSize(num_neighbours=k, threshold=t),
        num_devices=num_members,
        corrupted=corrupted,
        dropout=dropout,
        mode=mode,
        security_bits=bits,
    )


def _check_ring(parameters: Parameters, members: Sequence[Member], device: Participant) -> None:
    floor, encoding = device.floor, parameters.encoding
    if parameters.num_values != device.num_values:
        raise errors.ModelMismatch(
            f"{device.name}: the session masks {parameters.num_values:,} coordinates, the update "
            f"has {device.num_values:,}"
        )
    if encoding.ring_bits not in floor.ring_bits:
        raise errors.MaskingTooWeak(
            f"{device.name}: it accepts no ring of {encoding.ring_bits} bits"
        )
    is_rotated = encoding.ring_bits < 32
    has_rotation = parameters.rotation_seed is not None and parameters.bounds_digest is not None
    if is_rotated != has_rotation:
        raise errors.MaskingTooWeak(
            f"{device.name}: a ring of 16 or 8 bits needs a rotation and its bounds, a wider one "
            "none"
        )
    if not is_rotated and not floor.min_clip <= encoding.clip <= floor.max_clip:
        raise errors.MaskingTooWeak(
            f"{device.name}: the clip bound is {encoding.clip:g}, expected "
            f"{floor.min_clip:g} to {floor.max_clip:g}"
        )
    weights = [member.planned_weight for member in members]
    each, planned = max(weights), len(weights) * max(weights)
    if device.privacy is not None:  # each has the bound of its own weight, and noise beside it
        each, planned = min(weights), sum(weights)
    if encoding.max_weight < planned:
        raise errors.RingCanWrap(
            f"{device.name}: the ring holds a weight of {encoding.max_weight:,}, the roster needs "
            f"{planned:,}"
        )
    finest = (
        rotated_encoding(max_weight=encoding.max_weight, ring_bits=encoding.ring_bits)
        if is_rotated
        else plan_encoding(
            max_weight=encoding.max_weight, clip=encoding.clip, ring_bits=encoding.ring_bits
        )
    )
    if encoding != finest:
        raise errors.MaskingTooWeak(
            f"{device.name}: the encoding is {encoding}; the finest that cannot wrap is {finest}"
        )
    if encoding.bound(each) < 2**floor.member_bits:
        raise errors.MaskingTooWeak(
            f"{device.name}: a member has {encoding.bound(each):,} steps of the ring for a "
            f"coordinate, at least {2**floor.member_bits:,} are required"
        )
    if parameters.cipher != "chacha20" and not all(member.has_aes for member in members):
        raise errors.MaskingTooWeak(
            f"{device.name}: the cipher is {parameters.cipher}, but not all members have AES"
        )


def _check_numbers(parameters: Parameters, num_members: int, device: Participant) -> None:
    by_name = {scalar.name: scalar for scalar in parameters.scalars}
    if len(by_name) != len(parameters.scalars):
        raise errors.MaskingTooWeak(f"{device.name}: a masked number appears twice")
    num_clips = max_clipped(device.num_values, len(by_name))
    for name, largest in ((WEIGHT, device.planned_weight), (NUM_CLIPPED, num_clips)):
        scalar = by_name.get(name)
        if scalar is None or not scalar.is_count or scalar.bound < largest:
            raise errors.MaskingTooWeak(
                f"{device.name}: no masked count {name} of up to {largest:,}"
            )
    for scalar in parameters.scalars:
        if scalar.is_count and scalar.name not in (WEIGHT, NUM_CLIPPED):
            # A count out of its range is refused, so refusals would reveal the loss bit by bit.
            raise errors.MaskingTooWeak(
                f"{device.name}: {scalar.name} must not be masked as a count"
            )
        if scalar.num_devices < num_members:
            raise errors.RingCanWrap(
                f"{device.name}: {scalar.name} has room for {scalar.num_devices} devices, the "
                f"roster has {num_members}"
            )


def _check_sums(parameters: Parameters, num_members: int, device: Participant) -> None:
    """Check that the sums beside the model's are the plan's, and that none can wrap."""
    num_devices = min((one.value.num_devices for one in parameters.sums), default=num_members)
    if num_devices < num_members:
        raise errors.RingCanWrap(
            f"{device.name}: the sums beside the model's have room for {num_devices} devices, the "
            f"roster has {num_members}"
        )
    if parameters.sums != plan_sums(device.sums, num_devices=num_devices):
        raise errors.MaskingTooWeak(
            f"{device.name}: the sums beside the model's are not those of its plan, in the finest "
            "encoding that cannot wrap"
        )
