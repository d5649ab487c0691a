"""The work of a round where a feature asks for another than a target batch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Demand(Protocol):
    """The work of a round in the place of a target batch, before it is divided by speed."""

    @property
    def step_examples(self) -> int:
        """The examples of which a quota is made up; no micro-batch is larger."""

    @property
    def held_bytes(self) -> int:
        """What a device holds beside model and gradient."""

    @property
    def has_set_shares(self) -> bool:
        """Whether each client's part is set, whatever its speed."""

    def target(self, owned: Collection[int]) -> int:
        """Return the examples of a round of clients that own so many."""

    def most(self, num_examples: Ints) -> Ints:
        """Return the most examples of each client."""

    def set_quotas(self, each: Ints, num_examples: Ints) -> Ints:
        """Return the quotas where K is set, to ``each`` examples."""
