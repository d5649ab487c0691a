"""The cohort sum: adds updates as 64-bit integers, so that their order cannot change a bit.

Each tensor has a power-of-two scale 2^f. An update's coordinate x is added as the integer nearest
to x 2^f, and integer addition is associative: the sum is the same for every order of the updates
and on every engine. The scale leaves HEADROOM_BITS and log2(cohort) above the largest sum of the
last round, so overflow is rare. If a sum could overflow, it is shifted down together with its
scale; the shift is counted, and no update is refused for it. Updates added before a shift are
rounded once more: only then may the order change the sum, by a step of the coarser scale a shift.

Error: n updates of a tensor whose largest sum last round was M < 2^e are summed with an absolute
error of at most n 2^-(f+1), where f = 61 - 10 - ceil(log2 n) - e. For n = 100 and M = 1 (e = 1) it
is 100 x 2^-44 = 5.7e-12; float32 itself resolves 1.2e-7 there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.common.errors import CorruptUpdate, NonFiniteUpdate
from headwater.common.model.vectors import CHUNK
from headwater.common.sums.encoded_vector import EncodedVector, Vector

HEADROOM_BITS = 10
SUM_BITS = 62
Floats = NDArray[np.float32] | NDArray[np.float64]

# Before the first round no sum is known: a gradient of up to 2^10 per unit of weight fits.
FIRST_LARGEST_MEAN = 1.0

# float32 is below 2^128 and resolves 2^-149: scales beyond these bounds have no advantage.
MIN_SCALE_BITS, MAX_SCALE_BITS = -100, 200
LARGEST_VALUE = float(np.finfo(np.float32).max)
EPSILON = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialSum:
    """A part of a cohort's sum as integers, from an aggregator: a branch of a tree.

    Per tensor: the integers count 2^-``scale_bits``; ``peaks`` has the largest magnitude in an
    update, and ``bounds`` the sum of all updates' magnitudes, which the sum cannot exceed.
    """

    integers_P: NDArray[np.int64] = field(repr=False)
    scale_bits: tuple[int, ...]
    peaks: tuple[float, ...]
    bounds: tuple[float, ...]
    num_shifts: int


class SumLayout(Protocol):
    """What is added up: so many values, of which each span has a scale of its own."""

    @property
    def num_parameters(self) -> int: ...
    @property
    def spans(self) -> tuple[tuple[int, int], ...]: ...


class CohortSum:
    """The sum of a round's updates, in twice the bytes of the model."""

    def __init__(self, layout: SumLayout) -> None:
        self._layout = layout
        # Written, not only reserved: for a large model the kernel takes seconds to find the pages,
        # here while the first devices still check their tasks.
        self._sum_P: NDArray[np.int64] = np.full(layout.num_parameters, 0, dtype=np.int64)
        self._is_new = True
        self._scale_bits = [0] * len(layout.spans)
        self._opened_bits = (0,) * len(layout.spans)
        self._largest = [FIRST_LARGEST_MEAN] * len(layout.spans)
        self._is_first = True
        self._bounds: list[float] = []
        self._peaks: list[float] = []
        starts = [start for start, end in layout.spans if end > start]
        self._starts = np.array(starts, dtype=np.intp)
        self._runs: list[_Run] = []
        self.num_shifts = 0
        self.weight = 0

    @property
    def largest(self) -> list[float] | None:
        """The largest absolute sum of each tensor in the last round; the checkpoint stores it."""
        return None if self._is_first else list(self._largest)

    def restore(self, largest: Sequence[float] | None) -> None:
        """Restore the state that ``largest`` returned."""
        if largest is not None:
            self._largest, self._is_first = list(largest), False

    def open(self, *, num_clients: int, planned_weight: int, scale_bits: int | None = None) -> None:
        """Empty the sum and fix the round's scales.

        ``planned_weight`` scales the guess for the first round only, when no sum is known yet.
        ``scale_bits`` fixes f for all tensors: a sum with noise must not depend on earlier sums.
        """
        if not self._is_new:
            self._sum_P.fill(0)
        self._is_new = False
        self.weight = 0
        self.num_shifts = 0
        self._bounds = [0.0] * len(self._largest)
        self._peaks = [0.0] * len(self._largest)
        room = SUM_BITS - 1 - HEADROOM_BITS - math.ceil(math.log2(max(num_clients, 1)))
        for t, largest in enumerate(self._largest):
            expected = largest * planned_weight if self._is_first else largest
            exponent = math.frexp(expected)[1] if expected > 0 else 0
            bits = room - exponent if scale_bits is None else scale_bits
            self._scale_bits[t] = min(max(bits, MIN_SCALE_BITS), MAX_SCALE_BITS)
        self._opened_bits = tuple(self._scale_bits)
        self._runs = _runs_of(self._layout, self._scale_bits)

    @property
    def scale_bits(self) -> tuple[int, ...]:
        """The scales that the round was opened with, one for each tensor."""
        return self._opened_bits

    def open_part(self, scale_bits: Sequence[int]) -> None:
        """Empty the sum, and take the scales of the sum that this one will be a part of."""
        self.open(num_clients=1, planned_weight=1)
        self._scale_bits, self._opened_bits = list(scale_bits), tuple(scale_bits)
        self._runs = _runs_of(self._layout, self._scale_bits)

    def part(self) -> PartialSum:
        """Return what was added so far; its integers are this sum's own memory."""
        return PartialSum(
            integers_P=self._sum_P,
            scale_bits=tuple(self._scale_bits),
            peaks=tuple(self._peaks),
            bounds=tuple(self._bounds),
            num_shifts=self.num_shifts,
        )

    def check_part(self, part: PartialSum, *, name: str, limits: Sequence[float]) -> None:
        """Check a part before any of it is added; ``limits`` are its updates' largest values.

        Raises:
            CorruptUpdate: it is not of this model, or no updates with these limits have such a sum.
        """
        num_updates, largest_value = len(limits), max(limits, default=0.0)
        most = math.fsum(limits)
        found = len(part.integers_P), *map(len, (part.scale_bits, part.peaks, part.bounds))
        num_tensors = len(self._scale_bits)
        expected = (self._layout.num_parameters, num_tensors, num_tensors, num_tensors)
        if found != expected:
            raise CorruptUpdate(
                f"{name}: a sum of {found} integers, scales, peaks and bounds, the model has "
                f"{expected}"
            )
        for t, (start, end) in enumerate(self._layout.spans):
            bound, bits, own = part.bounds[t], part.scale_bits[t], self._opened_bits[t]
            # A coarser scale than these updates need would round all others to zero.
            needed = min(own, SUM_BITS - math.frexp(bound)[1]) if bound else own
            is_right = 0 <= part.peaks[t] <= min(bound, largest_value) and bound <= most
            if not is_right or bits != needed:
                raise CorruptUpdate(
                    f"{name}: tensor {t} has the peak {part.peaks[t]}, the bound {bound} and the "
                    f"scale {bits}; expected 0 <= peak <= bound <= {most:.4g}, a peak of at most "
                    f"{largest_value:.4g}, and the scale {needed}"
                )
            integers = part.integers_P[start:end]
            largest = max(int(integers.max()), -int(integers.min())) if len(integers) else 0
            # Each update is rounded by at most 1/2, and each shift of the sum by 1/2 once more; the
            # bound is a sum of float64, which the integers' 62 bits resolve better.
            room = math.ldexp(bound, bits) * (1 + num_updates * EPSILON)
            if largest > room + num_updates + (own - bits):
                raise CorruptUpdate(f"{name}: the sum of tensor {t} is larger than its updates")

    def check_norm(self, part: PartialSum, *, name: str, limits: Sequence[float]) -> None:
        """Check a part by the L2 norms that its updates have at most: its own is not more.

        Raises:
            CorruptUpdate: it is.
        """
        square = rounding = 0.0
        for t, (start, end) in enumerate(self._layout.spans):
            step, shifts = 2.0 ** -part.scale_bits[t], self._opened_bits[t] - part.scale_bits[t]
            for low in range(start, end, CHUNK):
                wide = part.integers_P[low : min(low + CHUNK, end)].astype(np.float64) * step
                square += float(wide @ wide)
            rounding += (end - start) * ((len(limits) + shifts) * step) ** 2
        most = math.fsum(limits) * (1 + 1e-6) + math.sqrt(rounding)
        if not math.sqrt(square) <= most:
            raise CorruptUpdate(
                f"{name}: the norm of its sum is {math.sqrt(square):.4g}, and that of its updates "
                f"is at most {most:.4g} together"
            )

    def add_part(self, part: PartialSum, weight: int) -> None:
        """Add a checked part: the result is the same integers as if its updates had been added.

        That holds to the bit as long as no sum had to be shifted, in the part or here.
        """
        for t, (start, end) in enumerate(self._layout.spans):
            self._peaks[t] = max(self._peaks[t], part.peaks[t])
            self._bounds[t] += part.bounds[t]
            exponent = math.frexp(self._bounds[t])[1] if self._bounds[t] else 0
            bits = min(self._scale_bits[t], part.scale_bits[t], SUM_BITS - exponent)
            own = self._sum_P[start:end]
            if bits < self._scale_bits[t]:
                _shift(own, self._scale_bits[t] - bits, out=own)
                self._scale_bits[t] = bits
                self.num_shifts += 1
            own += _shift(part.integers_P[start:end], part.scale_bits[t] - bits)
        self._runs = _runs_of(self._layout, self._scale_bits)
        self.weight += weight

    def check(self, values_P: Vector, *, name: str) -> list[float]:
        """Check an update's vector before any of it is added; return the peaks for ``fold``.

        Raises:
            CorruptUpdate: its length is not the model's.
            NonFiniteUpdate: it contains a NaN or an infinity.
        """
        if len(values_P) != self._layout.num_parameters:
            raise CorruptUpdate(
                f"{name}: the update has {len(values_P):,} coordinates, the model "
                f"{self._layout.num_parameters:,}"
            )
        peaks = self._peaks_of(_source_of(values_P))
        if not all(map(math.isfinite, peaks)):
            raise NonFiniteUpdate(f"{name}: the update contains a NaN or an infinity")
        return peaks

    def fold(
        self,
        values_P: Vector,
        weight: int,
        peaks: Sequence[float] | None = None,
        *,
        times: int = 1,
    ) -> None:
        """Add one checked update, or a sum of many in float64; an encoded one chunk by chunk.

        ``peaks`` is what ``check`` returned; it is computed if it is not given. Vector and weight
        count ``times`` times: below 2^29 the product with a float32 is exact.
        """
        source = _source_of(values_P)
        num_shifts = self.num_shifts
        for t, peak in enumerate(self._peaks_of(source) if peaks is None else peaks):
            self._make_room(t, times * peak)
        if self.num_shifts != num_shifts:
            self._runs = _runs_of(self._layout, self._scale_bits)
        for low, high, factor in self._runs:
            # Multiplying a float32 by a power of two is exact, and the product fits in SUM_BITS.
            # Rounding below 2^-126 is far below 1/2.
            part = source[low:high]
            if times != 1:
                part = part.astype(np.float64) * times
            scaled = part * factor
            self._sum_P[low:high] += np.rint(scaled, out=scaled).astype(np.int64)
        self.weight += times * weight

    def _peaks_of(self, source: Floats | EncodedVector) -> list[float]:
        """Return each tensor's largest magnitude: 0 in an empty one, NaN if it contains one."""
        spans = self._layout.spans
        if len(source) > CHUNK or len(self._starts) < len(spans):
            if isinstance(source, EncodedVector):
                return [_peak_of_parts(source, start, end) for start, end in spans]
            return [_peak(source[start:end]) for start, end in spans]
        peaks: list[float] = np.maximum.reduceat(np.abs(source[:]), self._starts).tolist()
        return peaks

    def _make_room(self, t: int, peak: float) -> None:
        """Shift a tensor's sum and scale down if an update of this peak could overflow it."""
        self._peaks[t] = max(self._peaks[t], peak)
        self._bounds[t] += peak
        if not self._bounds[t]:
            return
        excess = math.frexp(self._bounds[t])[1] + self._scale_bits[t] - SUM_BITS
        if excess > 0:
            start, end = self._layout.spans[t]
            part = self._sum_P[start:end]
            _shift(part, excess, out=part)
            self._scale_bits[t] -= excess
            self.num_shifts += 1

    def add_integers(self, draw: Callable[[int], NDArray[np.int64]]) -> None:
        """Add noise to the sum's integers: ``draw`` returns so many of them."""
        for start in range(0, len(self._sum_P), CHUNK):
            part = self._sum_P[start : start + CHUNK]
            part += draw(len(part))

    def close(self) -> Tensor:
        """Divide once, by the cohort's weight, and return the mean gradient [P] in float32.

        The mean overwrites the sum's memory: the sum is lost afterwards.
        """
        mean_P = self._sum_P.view(np.float32)[: self._layout.num_parameters]
        for t, (start, end) in enumerate(self._layout.spans):
            largest = 0.0
            for low in range(start, end, CHUNK):
                high = min(low + CHUNK, end)
                wide = self._sum_P[low:high].astype(np.float64)
                wide *= 2.0 ** -self._scale_bits[t]
                largest = max(largest, float(np.abs(wide).max()))
                # Coordinate i of the mean is in bytes 4i..4i+3, before every sum still to be read.
                mean_P[low:high] = wide / self.weight
            # If a sum rounded to zero, or cancelled, its largest update sets the scale.
            if largest or self._peaks[t]:
                self._largest[t] = largest or self._peaks[t]
            elif self._is_first:
                self._largest[t] = float(self.weight)
        self._is_first = False
        return torch.from_numpy(mean_P)


def _source_of(values_P: Vector) -> Floats | EncodedVector:
    """Return what can be cut into arrays: an encoded vector is decoded where it is cut."""
    return values_P if isinstance(values_P, EncodedVector) else values_P.numpy()


def _peak(part: Floats) -> float:
    return max(float(part.max()), -float(part.min())) if len(part) else 0.0


def _peak_of_parts(source: EncodedVector, start: int, end: int) -> float:
    starts = range(start, end, CHUNK)
    peaks = [_peak(source[low : min(low + CHUNK, end)]) for low in starts]
    return float(np.max(peaks)) if peaks else 0.0  # NaN propagates, unlike with ``max``


def _shift(
    integers: NDArray[np.int64], bits: int, *, out: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return integers divided by 2^bits, rounded to the nearest; themselves if bits is 0."""
    if not bits:
        return integers
    shift = min(bits, 63)
    return np.right_shift(integers + (1 << (shift - 1)), shift, out=out)


# Coordinates ``low`` (inclusive) to ``high`` (exclusive), and their factors or common factor.
_Run = tuple[int, int, "Floats | np.floating[Any]"]


def _runs_of(layout: SumLayout, scale_bits: Sequence[int]) -> list[_Run]:
    """Divide a vector into runs of up to CHUNK coordinates; a smaller model is one run.

    Each numpy call has a fixed cost: for the four tensors of a small model, the calls took longer
    than their coordinates.
    """
    spans = layout.spans
    is_narrow = all(-126 <= bits <= 127 for bits in scale_bits)  # as float32 has exponents
    factors = np.array([2.0**bits for bits in scale_bits], np.float32 if is_narrow else np.float64)
    if layout.num_parameters <= CHUNK:
        lengths = [end - start for start, end in spans]
        return [(0, layout.num_parameters, np.repeat(factors, lengths))]
    return [
        (low, min(low + CHUNK, end), factor)
        for (start, end), factor in zip(spans, factors, strict=True)
        for low in range(start, end, CHUNK)
    ]
