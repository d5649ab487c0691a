"""The statistics that a run gave a device's task, which the next run must not meet."""

from __future__ import annotations

from headwater.client.node_features import NodeFeature
from headwater.common.statistics.columns import take_back


class GivenStatistics(NodeFeature):
    """Takes back what the run gave the task: the plans of the next one say what that gives."""

    def left(self) -> None:
        """Leave the task as it was before the run."""
        take_back(self.node.trainer.task)
