"""Which nodes may be aggregators of a run: those that the operator of the server above names."""

from __future__ import annotations

from collections.abc import Callable

from headwater.common.errors import AggregatorRefused
from headwater.common.settings.conflicts import why_no_branches
from headwater.common.settings.schema import Settings


def refusal_of_branch(settings: Settings) -> Callable[[str], AggregatorRefused | None]:
    """Return which devices may not be aggregators of a run, and why."""
    why = why_no_branches(settings)
    trusted = {name.strip() for name in (settings.server.aggregators or "").split(",")}

    def refusal(name: str) -> AggregatorRefused | None:
        if why is not None:
            return AggregatorRefused(f"this run takes no aggregators: {why}")
        if name not in trusted:
            return AggregatorRefused(
                f"{name} is not among the aggregators that the server above trusts",
                remedy=f"start the server above with --trusted-aggregators {name}",
            )
        return None

    return refusal
