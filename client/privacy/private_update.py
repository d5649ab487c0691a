"""A device's update in a private round: a clipped vector, and numbers that the plan fixes.

Everything that depends on the device's examples is bounded (the vector, by its L2 norm) or left out
(loss, metrics, norms, the numbers of examples summed and refused, why the window ended). What
remains is the plan's: its quota and the largest weight that the quota can have. Seconds and vitals
describe the machine; docs/privacy.md says that they are outside the promise.
"""

from __future__ import annotations

from torch import Tensor

from headwater.common.messages import Plan, Step, Update, UpdateReport, Vitals
from headwater.common.privacy.clipping import clip_to_norm
from headwater.common.privacy.terms import PrivacyTerms

NO_VITALS = Vitals()


def private_update(
    plan: Plan,
    terms: PrivacyTerms,
    values_P: Tensor,
    *,
    name: str,
    weight: int,
    seconds: float = 0.0,
    vitals: Vitals = NO_VITALS,
) -> Update:
    """Clip the vector in place and return it with the plan's own numbers.

    ``weight`` is the largest that the plan's quota can have. A vector that is not finite, or that
    no example added to, is sent as zeros: a refusal would depend on the data. The bit on the clip
    norm is that of the vector that is sent, 1 for zeros.
    """
    was_longer = clip_to_norm(values_P, terms.norm_bound)
    step = Step(num_examples=plan.quota, weight=weight, loss=0.0, seconds=seconds, peak_bytes=0)
    report = UpdateReport(
        name=name,
        round=plan.round,
        num_examples=plan.quota,
        weight=weight,
        loss_sum=0.0,
        micro_batch_size=plan.micro_batch_size,
        seconds=seconds,
        steps=(step,),
        reason="quota",
        vitals=vitals,
        # In digits, as true and false differ in length.
        clip_bit=None if terms.bit_multiplier is None else (0 if was_longer else 1),
    )
    return Update(values_P=values_P, report=report)
