"""The digest of the plan fields that all members of a secure session must have in common.

The sum hides an update only among others of its kind. With a local learning rate of 1e-30 for all
devices but one, the sum is that one's update; with less noise from all but one, it shows that one's
more clearly. With a task whose loss is zero for all but one it is that one's too: so each side adds
the name and the code of the task that it has loaded (``user_code.task_spec.code_of``). The digest
is one of the session's parameters: each device compares it with its own, and a server that shows it
otherwise to one device has another session there, in which no share opens
(``common.secagg.session``).

Every feature's terms are in it, by name, with all that they do not leave out
(``Terms.shared_text``). Not in it is what may differ between devices (``OF_EACH``): the quota,
whose share of the session a device checks in the roster; micro-batch size and times, which each
checks against its own speed (``client.secagg.plan_policy.check_time``).
"""

from __future__ import annotations

import hashlib

from headwater.common.messages import Plan
from headwater.common.secagg.session import framed
from headwater.common.terms import shared_texts

OF_EACH = {
    "quota": "each device's own; its planned weight is in the roster",
    "micro_batch_size": "each device's own; a sum is the same however it is cut",
    "deadline_seconds": "a device refuses a time in which it cannot do its quota",
    "finish_seconds": "as the deadline",
    "counted_round": "each device's own; it settles which examples come next",
    "share": "each device's own; a device refuses more than the share of its time that it told",
    "weigh_as": "each device's own; that there is one is in the digest, and it is in the roster",
    "frozen": "the model's; what is masked is of the model whose digest the session has",
    "reason": "a text for people",
}
"""The fields of a plan that members need not have in common, and why none of them starves one."""


def plan_digest(plan: Plan, task: str) -> bytes:
    """Return SHA-256 over the task and what a round's plans have in common, 32 bytes."""
    return hashlib.sha256(
        framed(
            "headwater plan",
            task,
            plan.round,
            plan.run_seed,
            plan.model_version,
            plan.precision,
            "any tokens" if plan.max_tokens is None else plan.max_tokens,
            float(plan.held_out_fraction).hex(),
            f"holds out {plan.held_out}",
            "weighed by data" if plan.weigh_as is not None else "weighed by what is summed",
            len(plan.terms),
            *shared_texts(plan.terms),
        )
    ).digest()
