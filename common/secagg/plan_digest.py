"""The digest of the plan fields that all members of a secure session must have in common.

The sum hides an update only among others of its kind. With a local learning rate of 1e-30 for all
devices but one, the sum is that one's update; with less noise from all but one, it shows that one's
more clearly. The digest is one of the session's parameters: each device compares it with its own
plan's, and a server that shows it otherwise to one device has another session there, in which no
share opens (``common.secagg.session``).

Not in it: the quota, whose share of the session a device checks in the roster; the micro-batch
size, which changes no sum; and the times, which may differ between devices of unlike speed. A
server that gives some devices no time to train makes their part of the sum small: the least quota
counts planned examples, not summed ones.
"""

from __future__ import annotations

import hashlib

from headwater.common.messages import Plan
from headwater.common.secagg.session import framed


def plan_digest(plan: Plan) -> bytes:
    """Return SHA-256 over what a round's plans have in common, 32 bytes."""
    return hashlib.sha256(
        framed(
            "headwater plan",
            plan.round,
            plan.run_seed,
            plan.model_version,
            plan.local_steps,
            plan.local_learning_rate.hex(),
            "plain steps" if plan.local is None else f"local {plan.local.text}",
            plan.precision,
            "none" if plan.algorithm is None else f"algorithm {plan.algorithm}",
            float(plan.held_out_fraction).hex(),
            f"holds out {plan.held_out}",
            "no noise" if plan.privacy is None else f"noise {plan.privacy.text}",
            "all coordinates" if plan.compression is None else f"sends {plan.compression.text}",
            "weighed by data" if plan.weigh_as is not None else "weighed by what is summed",
        )
    ).digest()
