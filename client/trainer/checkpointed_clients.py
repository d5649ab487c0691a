"""The clients of a process that train with activation checkpointing, on one shared model."""

from __future__ import annotations

import logging

from headwater.client.memory import activation_checkpointing as checkpointing
from headwater.client.memory.activation_checkpointing import Footprint
from headwater.client.trainer.task_trial import predicted_footprint
from headwater.client.training.context import TrainingContext
from headwater.common.model.parameters import ModelImage

log = logging.getLogger(__name__)


class CheckpointedClients:
    """Names of the clients with activation checkpointing on; it is never switched off again."""

    def __init__(self, image: ModelImage) -> None:
        self.footprint: Footprint | None = None
        """The bytes of one example; None before ``measure``, or if there is nothing to checkpoint.
        """
        self._image = image
        self._names: set[str] = set()
        self._is_measured = False

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> None:
        """Note that a client trains with checkpointing."""
        self._names.add(name)

    def set_up(self, name: str) -> None:
        """Switch checkpointing on or off in the model, as this client trains."""
        if name in self._names:
            checkpointing.switch_on(self._image.model)
        elif self._names:
            checkpointing.switch_off(self._image.model)

    def remember(self, name: str) -> None:
        """Add the client for which the model was used last, if checkpointing is on now."""
        if checkpointing.is_on_in(self._image.modules):
            self._names.add(name)

    def measure(self, context: TrainingContext) -> None:
        """Measure, once, how many bytes an example takes with activation checkpointing.

        This comes before any measurement without checkpointing, which takes more memory, and long
        before memory is short.
        """
        if self._is_measured:
            return
        self._image.model.train()
        self.footprint = found = predicted_footprint(context)
        self._is_measured = True
        if found is None:
            log.info("the model has no blocks for activation checkpointing, or no example works")
        else:
            log.info(
                "an example keeps %.1f MiB, and takes %.1f with activation checkpointing",
                found.plain / 2**20,
                found.checkpointed / 2**20,
            )

    @property
    def bytes_per_example(self) -> float | None:
        """The bytes of an example with checkpointing; None as ``footprint``."""
        return None if self.footprint is None else self.footprint.checkpointed
