"""Holds a round's updates one by one, for the rules that need every single vector.

The vectors take cohort x model bytes: in RAM up to ``server.staging_bytes``, else in an unlinked
file in the run's folder, whose blocks are allocated before the round begins.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np
from torch import Tensor

from headwater.common.errors import StateError, TooFewClients
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.robust import robust_rules
from headwater.server.robust.robust_rules import Rows, Rule


class HeldUpdates:
    """The updates of one round at a time."""

    def __init__(
        self, rule: Rule, *, num_parameters: int, share: float, ram_bytes: int, folder: Path | None
    ) -> None:
        self.rule = rule
        self.weight = 0
        self._share = share
        self._num_parameters = num_parameters
        self._ram_bytes = ram_bytes
        self._folder = folder
        self._rows: Rows = np.empty((0, num_parameters), dtype=np.float32)
        self._weights: list[int] = []

    def open(self, *, num_clients: int) -> None:
        """Forget the last round's updates, and make room for so many.

        Raises:
            StateError: the disk has no room for them.
        """
        self._weights, self.weight = [], 0
        shape = (num_clients, self._num_parameters)
        if self._rows.shape != shape:
            self._rows = self._room_for(shape)

    def _room_for(self, shape: tuple[int, int]) -> Rows:
        num_bytes = 4 * shape[0] * shape[1]
        if num_bytes <= self._ram_bytes:
            return np.empty(shape, dtype=np.float32)
        try:
            with tempfile.TemporaryFile(prefix="headwater-", dir=self._folder) as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                return np.memmap(file, dtype=np.float32, mode="w+", shape=shape)
        except OSError as error:
            raise StateError(
                f"no room for the {shape[0]:,} updates that the rule {self.rule} compares, "
                f"{num_bytes:,} bytes: {error.strerror}",
                remedy="free space, lower --cohort-size, or leave out --aggregation",
            ) from error

    def hold(self, values_P: Tensor, weight: int) -> None:
        """Hold a checked update."""
        self._rows[len(self._weights)] = values_P.numpy()
        self._weights.append(weight)
        self.weight += weight

    def held_mean(self, total: CohortSum) -> tuple[Tensor, int]:
        """Return the rule's mean, and the weight of all updates; see ``mean``."""
        return self.mean(total), self.weight

    def mean(self, total: CohortSum) -> Tensor:
        """Return the rule's mean gradient [P]; it does not depend on the order of arrival.

        ``total`` is the round's open sum, to which ``clipped`` adds.

        Raises:
            TooFewClients: the rule needs more updates to withstand the share of false ones.
        """
        number = len(self._weights)
        needed = robust_rules.num_needed(self.rule, number, share=self._share)
        if number < needed:
            raise TooFewClients(
                f"{self.rule} withstands {self._share:g} of {number} updates being false only "
                f"with {needed} or more",
                remedy="raise --min-clients, or lower --attackers",
            )
        if self.rule == "clipped":
            for values_P, weight in robust_rules.clipped(self._rows[:number], self._weights):
                total.fold(values_P, weight)
            return total.close()
        if self.rule == "median":
            return robust_rules.median(self._rows[:number], self._weights)
        if self.rule == "trimmed-mean":
            return robust_rules.trimmed_mean(self._rows[:number], self._weights, share=self._share)
        self._sort()
        return robust_rules.krum(self._rows[:number], self._weights, share=self._share)[0]

    def _sort(self) -> None:
        """Order the updates by their content, in place: one row is copied at a time."""
        number = len(self._weights)
        keys = [
            (hashlib.sha256(self._rows[at].data).digest(), weight)
            for at, weight in enumerate(self._weights)
        ]
        for at in range(number):  # selection sort on few keys; each row moves once
            first = min(range(at, number), key=keys.__getitem__)
            if first != at:
                self._rows[[at, first]] = self._rows[[first, at]]
                keys[at], keys[first] = keys[first], keys[at]
        self._weights = [weight for _, weight in keys]
