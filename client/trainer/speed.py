"""Measures how fast a device trains a client's examples, with what memory allows."""

from __future__ import annotations

import gc
import logging

from headwater.client.device.interfaces import Hardware, Speed
from headwater.client.memory.activation_checkpointing import is_all_recomputed, switch_on
from headwater.client.trainer.checkpointed_clients import CheckpointedClients
from headwater.client.trainer.probe import ExampleProbe
from headwater.client.training.context import TrainingContext
from headwater.common.errors import OutOfMemory

log = logging.getLogger(__name__)


def measure_speed(
    context: TrainingContext, hardware: Hardware, checkpointed: CheckpointedClients
) -> Speed:
    """Measure a client's speed, with activation checkpointing if it needs that; the sum is zeroed.

    Raises:
        OutOfMemory: one example alone does not fit, even with activation checkpointing.
    """
    checkpointed.measure(context)
    context.accumulator.zero()
    probe = ExampleProbe(context)
    try:
        speed = _measured(probe, context, hardware)
        if speed is None:  # what the failed pass held is freed with its exception
            gc.collect()
            context.memory.use_checkpointing(checkpointed.bytes_per_example)
            log.warning("%s: one example fits only with activation checkpointing", context.name)
            context.accumulator.zero()
            speed = hardware.speed(probe)
    finally:
        checkpointed.remember(context.name)
        context.accumulator.zero()
    return speed


def _measured(probe: ExampleProbe, context: TrainingContext, hardware: Hardware) -> Speed | None:
    """Return the speed; None if an example does not fit yet, and all is recomputed from now on.

    Raises:
        OutOfMemory: one example alone does not fit, and there is nothing more to recompute.
    """
    model = context.image.model
    try:
        return hardware.speed(probe)
    except OutOfMemory:
        if is_all_recomputed(model) or not switch_on(model):
            raise
        return None
