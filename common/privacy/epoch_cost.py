"""What a device's rounds cost the example of it that they cost most.

A device's order uses each example once in an epoch. Of an epoch's rounds one contains an example,
and zCDP composes in parallel: the epoch costs the example what the dearest of its rounds costs. The
costs of epochs add up. So an epsilon for examples grows with the epochs, not with the rounds. The
order follows from the number of examples alone: which round has an example tells nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochCost:
    """The zCDP of all epochs so far; and that of the current one, the dearest of its rounds."""

    rho: float = 0.0
    epoch_rho: float = 0.0

    def after(self, rho: float, *, continues: bool, begins: int) -> EpochCost:
        """Return the cost after a round of cost ``rho``.

        ``continues`` says whether its examples are the next ones of the current epoch, and
        ``begins`` how many epochs begin with it. A round whose examples may have been used before
        in the epoch begins one.
        """
        epoch_rho, total = self.epoch_rho, self.rho
        if continues:
            total += max(rho - epoch_rho, 0.0)
            epoch_rho = max(rho, epoch_rho)
        return EpochCost(rho=total + begins * rho, epoch_rho=rho if begins else epoch_rho)
