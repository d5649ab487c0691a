"""What features check or change in one update as it arrives, by the terms of its plan alone.

An aggregator has no settings of the run, and takes its devices' updates by the same list.
"""

from __future__ import annotations

from collections.abc import Callable

from headwater.common.messages import Plan, Update
from headwater.common.sums.encoded_vector import Vector
from headwater.common.terms import Terms
from headwater.common.user_code.named_objects import part_of

Admit = Callable[[Update, Terms], Vector]
"""Checks an update by a feature's terms, and returns its vector.

Raises:
    UpdateRefused: it does not keep to them.
"""

ADMISSIONS: dict[str, str] = {
    "evaluation": "headwater.server.evaluation.admission:admit",
    "privacy": "headwater.server.privacy.admission:admit",
    "statistics": "headwater.server.statistics.admission:admit",
}
"""By the name of the terms; imported when a plan has them. In the order in which they act."""


def admitted(update: Update, plan: Plan) -> Vector:
    """Return the vector of an update that keeps to its plan's terms.

    Raises:
        UpdateRefused: it does not.
    """
    vector = update.vector
    for name, place in ADMISSIONS.items():
        if name in plan.terms:
            admit: Admit = part_of(place)
            vector = admit(update, plan.terms[name])
    return vector
