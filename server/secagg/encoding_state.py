"""State of the fixed-point encoding from round to round, and the decoding of a round's sum.

With 32-bit values the clip bound follows the largest mean of the last rounds; with 16-bit values
each block's bound follows the block's root mean square.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headwater.common.errors import NothingSummed
from headwater.common.secagg import masked_numbers
from headwater.common.secagg.fixed_point import (
    MAX_WIDE_VALUES,
    WIDE_RING,
    ClipState,
    RingBits,
    after_wide,
    decode_mean,
    follow_clip,
)
from headwater.common.secagg.hadamard_rotation import (
    Rotation,
    block_rms,
    device_spread,
    first_bounds,
    follow_bounds,
    unrotate_in_place,
)
from headwater.common.secagg.masked_numbers import (
    CLIP_BIT,
    check_sums,
    merged_sums,
    metric_sums_in,
    noise_sums_in,
    out_of_range_error,
)
from headwater.common.secagg.protocol import NUM_CLIPPED, WEIGHT
from headwater.common.secagg.scalar_encoding import decode_sums, out_of_range
from headwater.server.aggregation.round_reports import RoundSum
from headwater.server.secagg.unmask_phase import UnmaskedSum

FIRST_ROOM = 4.0
"""The gradient may be so many times larger after the first step than before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingState:
    """The clip bound of 32-bit values and the block bounds of 16-bit values."""

    clip: ClipState = field(default_factory=ClipState)
    bounds: NDArray[np.float32] | None = field(default=None, repr=False)
    """None before the first round with 16-bit values."""

    @property
    def is_blind(self) -> bool:
        """Whether no sum is known yet from which bounds could follow."""
        return self.clip.is_blind and self.bounds is None

    def ring_bits(self, chosen: RingBits, num_values: int, *, is_private: bool) -> RingBits:
        """Return the ring of the next sum: the wide one as long as no sum is known.

        A private sum's bound follows from its clip norm, whatever the sums are.
        """
        is_wide = self.is_blind and not is_private and num_values <= MAX_WIDE_VALUES
        return WIDE_RING if is_wide else chosen

    def block_bounds(self, num_values: int) -> NDArray[np.float32]:
        """Return the bounds of a 16-bit encoding's blocks; initial ones before the first round.

        So are those of another number of values than before, as of another fraction of them.
        """
        initial = first_bounds(Rotation(seed=bytes(32), num_coordinates=num_values))
        return initial if self.bounds is None or len(self.bounds) != len(initial) else self.bounds

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the checkpoint."""
        return {
            "clip": self.clip.clip,
            "largest_mean": self.clip.largest_mean,
            "bounds": None if self.bounds is None else self.bounds.tolist(),
        }

    @staticmethod
    def of_json(row: Mapping[str, Any]) -> EncodingState:
        """Return the state that ``to_json`` gave; the initial state from an empty row."""
        if not row:
            return EncodingState()
        bounds = row["bounds"]
        return EncodingState(
            clip=ClipState(clip=row["clip"], largest_mean=row["largest_mean"]),
            bounds=None if bounds is None else np.array(bounds, dtype=np.float32),
        )


def check_numbers(unmasked: UnmaskedSum) -> None:
    """Check the sums of the masked numbers, and those beside the model's.

    Raises:
        SumOutOfRange: they are impossible for clients that followed their plans.
    """
    members, parameters = unmasked.session.members, unmasked.session.parameters
    num_devices = len(unmasked.survived)
    if wrong := out_of_range(unmasked.sums_S, parameters.sums, num_devices=num_devices):
        raise out_of_range_error(wrong, num_devices)
    check_sums(
        unmasked.numbers,
        parameters.scalars,
        num_devices=num_devices,
        planned_weight=sum(members[name].planned_weight for name in unmasked.survived),
    )


def decode_sum(
    unmasked: UnmaskedSum, state: EncodingState, *, room: float = 1.0
) -> tuple[RoundSum, EncodingState]:
    """Divide an unmasked sum by its weight; return it and the next round's encoding state.

    ``room`` is how many times larger the next sum may be, for the blocks of a 16-bit encoding.

    Raises:
        NothingSummed: the weights add up to 0.
        SumOutOfRange: see ``check_numbers``.
    """
    check_numbers(unmasked)
    parameters = unmasked.session.parameters
    numbers = merged_sums(unmasked.numbers, parameters.scalars, num_devices=len(unmasked.survived))
    num_devices = len(unmasked.survived)
    if numbers[WEIGHT] == 0:
        raise NothingSummed(
            f"{parameters.number}: none of {num_devices} devices has a usable example"
        )
    weight, num_clipped = round(numbers[WEIGHT]), round(numbers[NUM_CLIPPED])
    mean_P = decode_mean(unmasked.vector_P, encoding=parameters.encoding, weight=weight)
    largest = float(np.abs(mean_P).max(initial=0.0))

    def spread() -> float:
        return device_spread(
            num_devices=num_devices,
            squared_norms=numbers[masked_numbers.SQUARED_NORM],
            weight=weight,
            mean_norm=float(np.linalg.norm(mean_P)),
        )

    if parameters.encoding.ring_bits == WIDE_RING:
        clip = after_wide(state.clip, largest_mean=largest)
        rotation = Rotation(seed=bytes(32), num_coordinates=parameters.num_values)
        bounds = follow_bounds(
            first_bounds(rotation),
            block_rms=block_rms(mean_P, rotation),
            spread=spread(),
            clipped=0.0,
            room=FIRST_ROOM * room,
        )
        after = EncodingState(clip=clip, bounds=bounds if largest else None)
    elif parameters.rotation_seed is None:
        clip = follow_clip(state.clip, largest_mean=largest, num_clipped=num_clipped)
        after = EncodingState(clip=clip, bounds=state.bounds)
    else:
        rotation = Rotation(seed=parameters.rotation_seed, num_coordinates=parameters.num_values)
        bounds = state.block_bounds(parameters.num_values)
        rms = unrotate_in_place(
            mean_P,
            rotation=rotation,
            bounds=bounds,
            max_weight=parameters.encoding.max_weight,
            ring_bits=parameters.encoding.ring_bits,
        )
        share = num_clipped / (num_devices * parameters.num_values)
        after = EncodingState(
            clip=state.clip,
            bounds=follow_bounds(bounds, block_rms=rms, spread=spread(), clipped=share, room=room),
        )
    round_sum = RoundSum(
        names=unmasked.survived,
        mean_P=torch.from_numpy(mean_P),
        weight=weight,
        loss_sum=numbers[masked_numbers.LOSS],
        metric_sums=metric_sums_in(numbers),
        num_examples=numbers[masked_numbers.NUM_EXAMPLES],
        num_refused=numbers[masked_numbers.NUM_REFUSED],
        summed_weight=numbers[masked_numbers.SUMMED_WEIGHT],
        noise=noise_sums_in(numbers),
        num_clipped=num_clipped,
        bit_sum=numbers.get(CLIP_BIT),
        sums=decode_sums(unmasked.sums_S, parameters.sums),
    )
    return round_sum, after
