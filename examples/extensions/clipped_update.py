"""One exact gradient per client, clipped to a norm before it is sent.

Clipping bounds what one client can do to the model. It is not differential privacy: no noise is
added, and the norm bounds a client's mean, not an example's gradient.

Try it: headwater-simulate --client-algorithm examples/extensions/clipped_update.py:ClippedUpdate
"""

from __future__ import annotations

from torch import Tensor

from headwater.client.local_training.local_work import LocalWork


class ClippedUpdate:
    """Clips a client's mean gradient to ``max_norm``; the sum that is sent is weight x that."""

    def __init__(self, max_norm: float = 1.0) -> None:
        self.max_norm = max_norm

    def train(self, work: LocalWork) -> Tensor:
        sum_P = work.sum()
        norm = float(sum_P.norm()) / max(work.weight, 1)
        return sum_P.mul_(min(1.0, self.max_norm / (norm or 1.0)))
