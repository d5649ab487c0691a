"""Lets a node go on with its last plan while no link can carry its update."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

from headwater.client.flower.state_file import OFFLINE, offline_name
from headwater.client.node_features import NodeAnswer, NodeFeature
from headwater.client.offline.offline_sum import OfflineSumFile
from headwater.common.parsed_text import json_of

log = logging.getLogger(__name__)


class OfflineNode(NodeFeature):
    """The windows without a link of one node."""

    def no_link(self, plan_json: str, answer: NodeAnswer) -> Iterator[NodeAnswer] | None:
        """Return the answers with one more window each; None if no window may be added."""
        return self._windows(plan_json, answer) if self._may_go_on(plan_json, answer) else None

    def delivered(self) -> None:
        """Remove the file of the sum."""
        path = self.node.state_folder / offline_name(self.node.name, self.node.run_id)
        OfflineSumFile(path).remove()

    def _windows(self, plan_json: str, answer: NodeAnswer) -> Iterator[NodeAnswer]:
        """Write the update to a file, and yield it; then yield it after each further window.

        If no further window can be summed, it is as before.
        """
        parts = json.dumps({"plan": plan_json, "report": answer.head_json})
        kept = self._ask_app(answer, parts, answer.vector)
        if kept.error is not None:
            log.warning("%s: %s", kept.error.code, kept.error)
            return
        yield kept
        while self._may_go_on(plan_json, kept):
            before, kept = kept, self._ask_app(kept, "{}", None)
            yield kept
            if kept.head_json == before.head_json:
                return

    def _may_go_on(self, plan_json: str, answer: NodeAnswer) -> bool:
        if answer.error is not None or self.node.trainer.stop_requested.is_set():
            return False
        plan, report = json_of(plan_json), json_of(answer.head_json)
        terms = plan.get("terms", {})
        windows = terms.get("offline", {}).get("windows", 1)
        most = min(self.node.settings.asynchronous.offline_windows, windows)
        # The sum of an earlier plan that answers this one is delivered as it is, and a compressed
        # update is no vector that windows can be added to.
        is_own = "round" in plan and report.get("round") == plan["round"]
        is_own = is_own and "compression" not in terms
        return is_own and "steps" in report and report.get("num_windows", 1) < most

    def _ask_app(
        self, answer: NodeAnswer, head_json: str, payload: memoryview | bytes | None
    ) -> NodeAnswer:
        """Return the app's answer to a query of the device's own; an empty one changes nothing."""
        found = self.node.answer(
            message_id=answer.message_id,
            message_type=f"query.{OFFLINE}",
            head_json=head_json,
            payload=payload,
            is_own=True,
        )
        return found if found.head_json or found.error is not None else answer
