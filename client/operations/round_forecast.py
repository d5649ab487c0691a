"""What a round takes of this device, as ``headwater-client check`` prints it: time and bytes.

The time follows from the measured speed, the device's share of a round's examples, and the share of
its time that it gives. Where the loss is summed over tokens, examples are counted in them. Whoever
runs the server sets a round's size; the settings are those of the command, or of its file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import mean

from rich.filesize import decimal
from torch.utils.data import Subset

from headwater.client.device.hardware import ThisMachine
from headwater.client.device.interfaces import Speed
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.common.compression.planned_bytes import download_bytes, upload_bytes
from headwater.common.data.evaluation import evaluate_sums
from headwater.common.model.layout import ModelLayout
from headwater.common.settings.schema import Settings
from headwater.common.system.live_status import duration
from headwater.common.task import Examples, weight_unit
from headwater.common.wording import counted

NUM_WEIGHED = 4  # examples whose weight is computed, which takes a forward pass each


def forecast(
    settings: Settings, trainer: Trainer, identity: Identity, hardware: ThisMachine, speed: Speed
) -> Iterator[tuple[str, str]]:
    """Yield the device's rate, its time for a round and a round's bytes, as topics and texts.

    Local steps have no time: they follow from the device's own number of examples.
    """
    tokens = tokens_per_example(trainer, identity)
    num_owned = len(trainer.examples(identity))
    size = _micro_batch_size(settings, speed, hardware, num_owned)
    number, text = examples_of_round(settings, size, tokens)
    if number > num_owned and settings.plan.accumulation_steps is None:
        number, text = num_owned, f"{text}, of which it has {num_owned:,}"
    seconds = speed.seconds_per_micro_batch * math.ceil(number / size)
    seconds = (seconds + speed.seconds_per_example * number) / hardware.time_share().share
    rate = number / seconds
    examples = f"{_figure(rate)} examples a second in micro-batches of {min(size, number):,}"
    yield "rate", examples if tokens is None else f"{_figure(tokens * rate)} tokens, {examples}"
    if not settings.local.is_on:
        yield "a round", f"{text}: {duration(seconds)} of computing"
    yield "", round_bytes_text(settings, trainer.image.layout)


def tokens_per_example(trainer: Trainer, identity: Identity) -> float | None:
    """Return the mean weight of this device's examples; None where a weight is no token.

    The weight per token of a few examples of the usual length, times the mean length: of a text all
    tokens count, of a conversation its answers.
    """
    lengths = trainer.lengths(identity)
    if lengths is None or weight_unit(trainer.task) != 1:
        return None
    positions = lengths.sample[:NUM_WEIGHED]
    some: Examples = Subset(trainer.examples(identity), positions)  # type: ignore[arg-type]
    try:
        found = evaluate_sums(trainer.task, trainer.image.model, some, 1)
    except Exception:  # all of these few fail; the check has said why
        return None
    known = [lengths[position] for at, position in enumerate(positions) if at not in found.faults]
    if found.weight in (0, len(known)):  # a weight of one for each example counts these
        return None
    return found.weight / sum(known) * mean(lengths[position] for position in lengths.sample)


def examples_of_round(settings: Settings, size: int, tokens: float | None) -> tuple[int, str]:
    """Return how many examples a round asks of this device, and the arithmetic.

    Equal devices share a round equally; there are as many as it needs at least.
    """
    plan, num_devices = settings.plan, settings.num_clients_needed
    if plan.accumulation_steps is not None:
        number = plan.accumulation_steps * size
        return number, f"K {plan.accumulation_steps:,} x {size:,} = {counted(number, 'example')}"
    if plan.tokens_per_update is not None:
        whole = f"{plan.tokens_per_update:,} tokens"
        number = math.ceil(plan.tokens_per_update / num_devices / (tokens or 1))
    else:
        whole = counted(plan.effective_batch_size, "example")
        number = math.ceil(plan.effective_batch_size / num_devices)
    if num_devices == 1:
        these = "" if plan.tokens_per_update is None else f", {counted(number, 'example')}"
        return number, f"{whole} on this device alone{these}"
    return number, f"{whole} on {num_devices:,} devices like this one, {number:,} examples each"


def round_bytes_text(settings: Settings, layout: ModelLayout) -> str:
    """Return what a round moves, as the settings compress it, and what comes once."""
    down, up = download_bytes(settings, layout), upload_bytes(settings, layout)
    text = f"{decimal(down)} down and {decimal(up)} up"
    if layout.frozen:
        text += f", and before the first one {decimal(layout.num_frozen_bytes)} of frozen tensors"
    return text


def _micro_batch_size(
    settings: Settings, speed: Speed, hardware: ThisMachine, num_examples: int
) -> int:
    """Return the size that the planner would choose: set, or the fastest that fits."""
    plan = settings.plan
    if plan.micro_batch_size is not None:
        return plan.micro_batch_size
    if plan.accumulation_steps is not None:
        return plan.set_micro_batch_size
    fitting = hardware.memory.fitting(1)
    most = (plan.max_micro_batch_size, speed.fastest_micro_batch_size, num_examples, fitting)
    return max(int(min(each for each in most if each is not None)), 1)


def _figure(number: float) -> str:
    """Return a number with three figures, without an exponent."""
    return f"{float(f'{number:.3g}'):,.10g}"
