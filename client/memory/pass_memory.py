"""The memory of a pass by block, and what to compute again of each block under a limit.

Less memory has a price in time, so the cheapest measures come first: the outputs of cheap
operations, which cost about 1 % (``headwater.client.memory.cheap_outputs``), then whole blocks, of
which those come first that drop the most bytes for each second that was measured. At the end what
turned out not to be needed is taken back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headwater.client.memory.activation_checkpointing import Choice, Recomputed

LEAST_SECONDS = 1e-6

# Tensors from glibc's heap leave gaps: about this share of what a pass takes that recomputes
# nothing. 24 decoder blocks of width 1,024 took 834 MiB, and from the heap 122 more; with 5, 14 and
# all of them run again 178, 186 and 156 more (benchmarks/RESULTS.md).
HEAP_GAPS = 0.22

# Of 250 MiB that the cheap outputs of 24 decoder blocks of width 1,024 took, dropping them lowered
# the peak by 132 where tensors came from the heap, in steps of 42 (12 blocks) and 90.
HEAP_CHEAP = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """The part of a pass between two blocks: its peak, and the blocks that came back before it."""

    peak_bytes: int
    num_done: int
    """How many of ``PassMemory.order`` have been run again when it ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassMemory:
    """What a pass of one example takes, for any choice of what is computed again."""

    rest_bytes: int
    """Resident before the pass."""
    inner_bytes: Mapping[int, int]
    """The activations of each block that recomputing all of it drops."""
    order: tuple[int, ...]
    """The blocks in the order in which the backward pass came to them."""
    stretches: tuple[Stretch, ...]
    cheap_bytes: Mapping[int, int] = field(default_factory=dict)
    """The part of ``inner_bytes`` that cheap operations computed; 0 where it is missing."""
    seconds: Mapping[int, float] = field(default_factory=dict)
    """The CPU seconds that each block took when it ran again."""

    @property
    def nothing(self) -> Choice:
        """The choice to recompute nothing."""
        return dict.fromkeys(self.inner_bytes, Recomputed.NOTHING)

    def peak_bytes(self, choice: Choice | None = None) -> int:
        """Return the peak of a pass with this choice; all is recomputed of blocks without one."""
        kept = {block: self._kept_bytes(block, extent) for block, extent in (choice or {}).items()}
        peaks, left = [], sum(kept.values())
        done = 0
        for stretch in sorted(self.stretches, key=lambda one: one.num_done):
            left -= sum(kept.get(block, 0) for block in self.order[done : stretch.num_done])
            done = stretch.num_done
            peaks.append(stretch.peak_bytes + left)
        return max(peaks)

    def slowdown(self, choice: Choice) -> float:
        """Return the share of a plain pass that running the whole blocks of a choice again takes.

        A backward pass takes twice the time of a forward pass.
        """
        again = math.fsum(self.seconds.get(b, 0.0) for b in choice if choice[b] is Recomputed.ALL)
        return again / max(3 * math.fsum(self.seconds.values()), LEAST_SECONDS)

    def cheapest(self, limit_bytes: float) -> Choice:
        """Return what to recompute so that the peak stays within the limit; all if none can.

        Of equal blocks the model's first are recomputed first, which stay in memory longest.
        """
        choice = dict(self.nothing)
        taken: list[tuple[int, Recomputed]] = []
        for block, extent in self._measures():
            if self.peak_bytes(choice) <= limit_bytes:
                break
            taken.append((block, choice[block]))
            choice[block] = extent
        else:
            if self.peak_bytes(choice) > limit_bytes:
                return dict.fromkeys(choice, Recomputed.ALL)
        for block, before in reversed(taken):
            if self.peak_bytes({**choice, block: before}) <= limit_bytes:
                choice[block] = before
        return choice

    def in_heap(self) -> PassMemory:
        """Return the same pass with its tensors from glibc's heap, and the heap's gaps.

        Between the tensors that stay, the heap cannot use all of what cheap outputs leave.
        """
        gaps = int(HEAP_GAPS * (self.peak_bytes(self.nothing) - self.rest_bytes))
        return replace(
            self,
            stretches=tuple(replace(s, peak_bytes=s.peak_bytes + gaps) for s in self.stretches),
            cheap_bytes={b: int(HEAP_CHEAP * number) for b, number in self.cheap_bytes.items()},
        )

    def _measures(self) -> list[tuple[int, Recomputed]]:
        """Return all measures, the cheapest first."""
        cheap = [block for block, num_bytes in self.cheap_bytes.items() if num_bytes > 0]
        whole = [b for b in self.inner_bytes if self._kept_bytes(b, Recomputed.CHEAP) > 0]
        cheap.sort(key=lambda block: (-self.cheap_bytes[block], block))
        whole.sort(key=lambda block: (-self._gain(block), block))
        return [
            *((block, Recomputed.CHEAP) for block in cheap),
            *((block, Recomputed.ALL) for block in whole),
        ]

    def _gain(self, block: int) -> int:
        """Return the bytes for each second that recomputing all of a block drops, logarithmically.

        In steps of half an octave, so that equal blocks stay equal in spite of other work.
        """
        seconds = max(self.seconds.get(block, 1.0), LEAST_SECONDS)
        return round(2 * math.log2(self._kept_bytes(block, Recomputed.CHEAP) / seconds))

    def _kept_bytes(self, block: int, extent: Recomputed) -> int:
        if extent is Recomputed.ALL:
            return 0
        cheap = self.cheap_bytes.get(block, 0) if extent is Recomputed.CHEAP else 0
        return self.inner_bytes.get(block, 0) - cheap
