"""What the list of features says by name is what the features' own code says."""

from __future__ import annotations

from headwater.client.plan_features import PHASE_ACTIONS
from headwater.common.secagg.protocol import PHASES


def test_the_phases_of_a_session_are_those_of_the_protocol() -> None:
    assert tuple(phase.action for phase in PHASES) == PHASE_ACTIONS
