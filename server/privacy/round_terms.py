"""The terms of one private round: what its devices' vectors are clipped to, and the noise."""

from __future__ import annotations

from collections.abc import Collection

from headwater.common.messages import Plan
from headwater.common.privacy.noise_shares import FLOAT32_ROUNDING
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.secagg.graph import ceil_fraction
from headwater.common.settings.schema import Settings
from headwater.server.privacy.clip_norm import ClipNorm


def round_terms(
    plans: Collection[Plan],
    settings: Settings,
    clip: ClipNorm,
    *,
    noise_multiplier: float,
    max_weight_per_example: int,
) -> PrivacyTerms:
    """Return the terms of a round with these plans.

    The bound of a device's sum is the clip norm of a mean gradient times the largest planned weight
    of the round; of all rounds, if their noise is correlated. Bits on the clip norm, if it follows
    a quantile, are paid for by more noise on the vectors: the round costs the same.
    """
    chosen, secure = settings.privacy, settings.secure
    is_masked = secure.aggregation != "off"
    quota = settings.plan.set_quota if chosen.bands > 1 else max(plan.quota for plan in plans)
    bound, example_bound = clip.norm * max_weight_per_example * quota, None
    if chosen.unit == "example":
        example_bound = clip.norm * max_weight_per_example
        # Sums of float32 round: none of so many clipped gradients may be cut again.
        bound *= 1 + FLOAT32_ROUNDING * quota
    return PrivacyTerms(
        norm_bound=bound,
        example_bound=example_bound,
        noise_multiplier=noise_multiplier,
        bit_multiplier=clip.bit_multiplier(noise_multiplier, num_devices=len(plans)),
        min_survivors=secure.min_survivors if is_masked else 1.0,
        corrupted=secure.corrupted if is_masked else 0.0,
        min_colluding=max(1, ceil_fraction(secure.corrupted, len(plans))) if is_masked else 1,
    )


def terms_of(plans: Collection[Plan]) -> PrivacyTerms:
    """Return the terms that a private round's plans share."""
    terms = {plan.of(PrivacyTerms) for plan in plans}
    assert len(terms) == 1
    found = terms.pop()
    assert found is not None
    return found
