"""The bytes of an encoded update, which count against the owner's limit before a plan begins."""

from __future__ import annotations

from headwater.client.node_features import NodeFeature
from headwater.common.compression_terms import num_masked, update_bytes
from headwater.common.messages import Plan


class EncodedUpdate(NodeFeature):
    """An update that is sent as the plan's compression has it."""

    def update_bytes(self, plan: Plan) -> int:
        """See ``NodeFeature``; a masked vector may take less, by the session's ring."""
        num_values = self.node.trainer.image.layout.num_parameters
        if plan.is_masked:
            return 4 * num_masked(plan.compression, num_values)
        return update_bytes(plan.compression, num_values)
