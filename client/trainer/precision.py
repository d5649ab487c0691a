"""What a device computes its passes in: float32, or bfloat16 under autocast, as measured on it.

Autocast computes products in bfloat16 and adds up gradients in float32 either way. A CPU with
instructions for bfloat16 products takes a fraction of float32's time for a large model, and more
for a small one, as every weight is converted in each pass. A CPU without them emulates the
products and may take several times as long. So ``--precision auto`` takes both passes in turn, on
the device's own examples, and ``--precision bfloat16`` warns where it is the slower one.

The choice depends on the clock, so two runs under ``auto`` may differ where two in float32 give the
same bits: ``auto`` is not the default.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.filesize import decimal

from headwater.client.memory.peak_model import PeakMeter, guarded_bytes, resident_bytes
from headwater.client.trainer.task_trial import PLAN, first_examples
from headwater.client.training.context import Identity, TrainingContext
from headwater.client.training.gradient_pass import InvalidGradients, backward, forward
from headwater.client.training.sampler import Window
from headwater.common.messages import Plan
from headwater.common.settings.training import ChosenPrecision, Precision
from headwater.common.system.heap import release_freed_memory
from headwater.common.wording import counted

log = logging.getLogger(__name__)

# Autocast is chosen from a tenth less time on: a smaller gain may be noise, and costs digits.
WORTHWHILE = 0.9
# Pairs of passes are taken up to so many times, while they take no longer than this together.
MAX_PAIRS, PAIRS_SECONDS = 5, 1.0
# Further examples join the micro-batch only if one alone is as short as this.
SHORT_SECONDS = 0.1
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # of x86, and of ARM


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionComparison:
    """Passes of the same micro-batch in both precisions."""

    num_examples: int
    seconds_ratio: float
    """Those of bfloat16 over those of float32: the median of neighbouring passes."""
    float32_bytes: int
    """The peak beyond what the process held before."""
    bfloat16_bytes: int

    @property
    def fastest(self) -> ChosenPrecision:
        """The precision that ``auto`` chooses."""
        return "bfloat16" if self.seconds_ratio <= WORTHWHILE else "float32"

    def __str__(self) -> str:
        time_text = (
            f"a pass of {counted(self.num_examples, 'example')} under bfloat16 autocast takes "
            f"{self.seconds_ratio:.2f} of float32's time"
        )
        if not (self.bfloat16_bytes and self.float32_bytes):  # too few to be seen
            return time_text
        return (
            f"{time_text}, and {decimal(self.bfloat16_bytes)} of memory instead of "
            f"{decimal(self.float32_bytes)}"
        )


class DevicePrecision:
    """The precision that a process computes in, and the comparison that it comes from."""

    def __init__(self, context_of: Callable[[Identity], TrainingContext]) -> None:
        """``context_of`` returns a client's context on this machine; its vector is zeroed."""
        self.comparison: PrecisionComparison | None = None
        """None if it was not made, or no micro-batch could be passed in both."""
        self.is_compared = False
        self.chosen: ChosenPrecision = "float32"
        """What was chosen last."""
        self._context_of = context_of

    def choose(self, wanted: Precision, identity: Identity) -> ChosenPrecision:
        """Return what to compute in; anything but float32 is compared once, and the result logged.

        The device's speed is measured in this precision from now on.
        """
        if wanted != "float32" and not self.is_compared:
            self._compare(wanted, identity)
        found = self.comparison
        fastest: ChosenPrecision = "float32" if found is None else found.fastest
        self.chosen = fastest if wanted == "auto" else wanted
        return self.chosen

    def resolved(self, plan: Plan, identity: Identity) -> Plan:
        """Return a plan with the precision that this device computes in.

        A masked plan is no occasion to compare: the server's model must not decide its time.
        """
        if plan.precision != "auto":
            return plan
        precision: ChosenPrecision = "float32"
        if self.is_compared or not plan.hides_data:
            precision = self.choose(plan.precision, identity)
        return plan.model_copy(update={"precision": precision})

    def _compare(self, wanted: Precision, identity: Identity) -> None:
        name, found = identity.name, self.compare(identity)
        if wanted == "auto":
            chosen = "float32" if found is None else found.fastest
            why = found or "bfloat16 could not be tried in the memory that there is"
            log.info("%s: computes in %s: %s", name, chosen, why)
        elif found is not None and found.seconds_ratio > 1 / WORTHWHILE:
            why = "" if has_bfloat16_instructions() else ", as this CPU has no such instructions"
            log.warning("%s: %s%s; --precision auto would choose float32 here", name, found, why)

    def compare(self, identity: Identity) -> PrecisionComparison | None:
        """Compare both precisions now; None if no micro-batch could be passed in both."""
        context, self.is_compared = self._context_of(identity), True
        try:
            self.comparison = compared(context)
        except (InvalidGradients, MemoryError) as error:
            log.debug("%s: the precisions are not compared: %s", context.name, error)
        context.accumulator.zero()
        release_freed_memory()
        return self.comparison


def compared(context: TrainingContext) -> PrecisionComparison | None:
    """Take passes in both precisions in turn; None if memory has no room, or no example works.

    Raises:
        MemoryError: an allocation failed.
        InvalidGradients: the examples pass alone and not together.
    """
    context.image.model.train()
    tried = first_examples(context)
    good: list[int] = []
    release_freed_memory()
    rest, meter = resident_bytes(), PeakMeter()
    first_seconds = each = 0.0
    for position in tried.positions:
        try:
            seconds = _seconds(context, tried, (position,), "float32")
        except InvalidGradients:
            continue
        if not good:
            first_seconds, each = seconds, max(meter.peak_bytes() - rest, 0)
        good.append(position)
        if seconds > SHORT_SECONDS:
            break
    # Autocast keeps the trained weights in bfloat16 from the forward to the backward pass.
    copies = context.image.layout.num_bytes // 2
    limit = context.memory.limit_bytes()
    room = None if limit is None else guarded_bytes(limit, rest) - rest - copies
    num_examples = len(good) if room is None else min(len(good), int(room / max(each, 1)))
    if num_examples < 1:
        return None
    positions = tuple(good[:num_examples])
    meter.reset()
    warm_seconds = _seconds(context, tried, positions, "bfloat16")
    peaks = {"bfloat16": max(meter.peak_bytes() - rest, 0), "float32": int(each)}
    if num_examples == 1 and warm_seconds > PAIRS_SECONDS:
        ratios = [warm_seconds / first_seconds]
    else:
        ratios = []
        begun = time.perf_counter()
        while len(ratios) < MAX_PAIRS and time.perf_counter() - begun < PAIRS_SECONDS:
            meter.reset()
            float32_seconds = _seconds(context, tried, positions, "float32")
            peaks["float32"] = max(peaks["float32"], meter.peak_bytes() - rest)
            ratios.append(_seconds(context, tried, positions, "bfloat16") / float32_seconds)
    return PrecisionComparison(
        num_examples=num_examples,
        seconds_ratio=statistics.median(ratios),
        float32_bytes=peaks["float32"],
        bfloat16_bytes=peaks["bfloat16"],
    )


def _seconds(
    context: TrainingContext, tried: Window, positions: tuple[int, ...], precision: ChosenPrecision
) -> float:
    start = time.perf_counter()
    loss, _, _ = forward(PLAN, tried, positions, replace(context, precision=precision))
    backward(loss)
    return time.perf_counter() - start


def has_bfloat16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the CPU says so; True where the system does not tell (outside of Linux)."""
    try:
        words = set(cpuinfo.read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return True
    return bool(words & BFLOAT16_FLAGS)
