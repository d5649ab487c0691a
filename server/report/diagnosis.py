"""What a run's figures say, in words: the batch, the micro-batches, how unlike the devices are."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from headwater.server.report.round_points import Point

WINDOW = 20  # rounds that a diagnosis looks at
MIN_ROUNDS = 3
FAR_BELOW, FAR_ABOVE = 0.5, 4.0
UNLIKE = 1.0
UNSETTLED = 4.0  # the noise scale's largest over its least


def diagnose(points: Sequence[Point]) -> list[str]:
    """Return what the last rounds show, as sentences; nothing before ``MIN_ROUNDS`` rounds.

    The gradient noise scale S/|G|^2 is the batch beyond which more examples hardly improve a step
    (McCandlish et al. 2018). The heterogeneity is the variance of the devices' expected gradients:
    beside |G|^2 it says how unlike their data are. Batch and noise scale are those of the last
    round, in units of weight, which tiles and charts show, too.
    """
    recent = points[-WINDOW:]
    if len(recent) < MIN_ROUNDS:
        return []
    found = [
        *_of_batch(recent),
        *_of_shares(recent[-1]),
        *_of_unlikeness(recent),
        *_of_accumulation(recent),
    ]
    return found or ["Nothing stands out in the last rounds."]


def _of_batch(recent: Sequence[Point]) -> list[str]:
    scales = [p["noise_scale"] for p in recent if p["noise_scale"]]
    if len(scales) < MIN_ROUNDS:
        if all(p["is_masked"] for p in recent):
            return ["Rounds are masked: the server cannot measure the noise of gradients."]
        return []
    scale, batch = _rounded(scales[-1]), _rounded(recent[-1]["weight"])
    if max(scales) > UNSETTLED * min(scales):
        return [
            f"The gradient's noise scale is {scale:,.0f} after the last round and not settled: it "
            f"was between {_rounded(min(scales)):,.0f} and {_rounded(max(scales)):,.0f} in the "
            f"last {len(recent)} rounds. The effective batch is {batch:,.0f}."
        ]
    if batch < FAR_BELOW * scale:
        return [
            f"The gradient is mostly noise: the effective batch of {batch:,.0f} is far below the "
            f"noise scale of {scale:,.0f}. More examples a round (--effective-batch-size) would "
            "make each step better."
        ]
    if batch > FAR_ABOVE * scale:
        return [
            f"The effective batch of {batch:,.0f} is far above the noise scale of {scale:,.0f}: "
            "half of it would give nearly the same step in half the time, or a higher learning "
            "rate may hold (docs/batch.md)."
        ]
    return [
        f"The effective batch of {batch:,.0f} suits the gradient's noise scale of {scale:,.0f}."
    ]


def _rounded(value: float) -> float:
    """Return a number with three digits, as the page's tiles and legends show it."""
    return float(f"{value:.3g}")


def _of_shares(last: Point) -> list[str]:
    number, names = last.get("num_below_share"), last.get("below_share")
    if not number or not names:
        return []
    more = "" if number <= len(names) else ", ..."
    return [
        f"{number} of the devices ({', '.join(names)}{more}) have hardly a share of the examples: "
        "as slow as they are, more would make the round longer. --accumulation-steps gives equal "
        "shares, --weighting dataset equal weight to all data."
    ]


def _of_unlikeness(recent: Sequence[Point]) -> list[str]:
    pairs = [
        (p["heterogeneity"], p["squared_gradient"])
        for p in recent
        if p["heterogeneity"] is not None and p["squared_gradient"]
    ]
    if len(pairs) < MIN_ROUNDS:
        return []
    ratio = median(h / g for h, g in pairs if g > 0) if any(g > 0 for _, g in pairs) else 0.0
    if ratio <= UNLIKE:
        return []
    return [
        f"The devices' data are unlike: their gradients differ {ratio:.1f} times as much as the "
        "mean gradient is long (squared). Exact rounds hold here; with local training take few "
        "local steps."
    ]


def _of_accumulation(recent: Sequence[Point]) -> list[str]:
    highest = [p["k_max"] for p in recent if p["k_max"]]
    if highest and max(highest) == 1:
        return ["Every device's quota fits in one micro-batch: nothing needs to be accumulated."]
    return []
