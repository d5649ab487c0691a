"""A device's share of a private session's noise: whether the session has room for it, and its draw.

Each session draws new noise from the operating system's randomness; it is added to the
encoded integers before the masks: nothing but the masked vector ever leaves the device. How much it
is follows from the plan's terms and from U2 alone (``common.privacy.noise_shares``), so every
member adds the same.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headwater.client.secagg.types import Participant
from headwater.common.errors import MaskingTooWeak
from headwater.common.privacy.clip_bit import bit_scalar
from headwater.common.privacy.discrete_gaussian import CHUNK, RandomBits, draw
from headwater.common.privacy.noise_shares import (
    bit_share_sigma,
    check_room,
    opened_multiplier,
    share_sigma,
)
from headwater.common.privacy.terms import PrivacyTerms, rho_of
from headwater.common.secagg.fixed_point import RingVector
from headwater.common.secagg.masked_numbers import CLIP_BIT
from headwater.common.secagg.protocol import Parameters, UnmaskRequest


def check_noise(parameters: Parameters, num_members: int, device: Participant) -> None:
    """Check that a private plan's noise fits the session, and is enough by the device's settings.

    Raises:
        MaskingTooWeak: the noise counts on more survivors, or fewer colluding members, than the
            device does; or the session has the bits on the clip norm in other steps than they are
            due, or leaves them out.
        RingCanWrap: vectors and noise do not fit the ring.
        CohortTooSmall, MaskingTooWeak: see ``share_sigma``.
    """
    terms, floor = device.privacy, device.floor
    if terms is None:
        return
    if terms.min_survivors > floor.min_survivors or terms.corrupted < floor.corrupted:
        raise MaskingTooWeak(
            f"{device.name}: the noise counts on {terms.min_survivors:g} of the members to survive "
            f"and {terms.corrupted:g} to collude; this device on {floor.min_survivors:g} and "
            f"{floor.corrupted:g}"
        )
    num_values, encoding = parameters.num_values, parameters.encoding
    check_room(terms, encoding, num_values=num_values, num_members=num_members)
    bits = [scalar for scalar in parameters.scalars if scalar.name == CLIP_BIT]
    due = []
    if terms.bit_multiplier is not None:
        bit_share_sigma(terms, num_members=num_members)
        due = [bit_scalar(terms, num_devices=one.num_devices) for one in bits[:1]]
    if bits != due or (terms.bit_multiplier is not None and not bits):
        raise MaskingTooWeak(
            f"{device.name}: the session masks the bits on the clip norm as {bits}, expected {due}"
        )


def noise_sigma(terms: PrivacyTerms | None, parameters: Parameters, num_members: int) -> int | None:
    """Return the parameter of a device's share; None if the session needs no noise.

    ``num_members`` counts U2.

    Raises:
        CohortTooSmall, MaskingTooWeak: see ``share_sigma``.
    """
    if terms is None:
        return None
    return share_sigma(
        terms,
        scale_bits=parameters.encoding.scale_bits,
        num_values=parameters.num_values,
        num_members=num_members,
    )


def opened_rho(parameters: Parameters, request: UnmaskRequest, device: Participant) -> float:
    """Return what the session's sum costs, as zCDP, with the noise of these survivors."""
    assert device.privacy is not None
    return rho_of(
        opened_multiplier(
            device.privacy,
            scale_bits=parameters.encoding.scale_bits,
            num_values=parameters.num_values,
            num_members=len(request.survived) + len(request.dropped),
            num_survivors=len(request.survived),
        )
    )


def add_noise(vector: RingVector, sigma: int, random: Callable[[int], bytes]) -> None:
    """Add independent discrete Gaussian noise to the ring's elements, in place."""
    bits = RandomBits(random)
    for start in range(0, len(vector), CHUNK):
        part = vector[start : start + CHUNK]
        part += draw(sigma, len(part), bits).astype(part.dtype)  # modulo 2^32


def add_bit_noise(
    scalars: NDArray[np.uint64],
    terms: PrivacyTerms,
    parameters: Parameters,
    *,
    num_members: int,
    random: Callable[[int], bytes],
) -> None:
    """Add the device's share of the noise on the bits' sum to its masked numbers, in place.

    ``num_members`` counts U2. Nothing changes if the clip norm does not follow the bits.
    """
    if terms.bit_multiplier is None:
        return
    at = [scalar.name for scalar in parameters.scalars].index(CLIP_BIT)
    sigma = bit_share_sigma(terms, num_members=num_members)
    scalars[at : at + 1] += draw(sigma, 1, RandomBits(random)).astype(np.uint64)  # modulo 2^64
