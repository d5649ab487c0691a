"""The cost of clipping each example's gradient by itself, in CPU seconds of a device's window.

Three ways, by turns, over the same examples (``train_round``, one thread of torch):

* ``device``: micro-batches, and the device's vector is clipped (``--privacy-unit device``).
* ``ones``: the same in micro-batches of one: what the passes alone cost.
* ``example``: each example's gradient is clipped, then added (``--privacy-unit example``).

The figures are the medians of the ratios to ``device``, turn by turn, and their quartiles.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.accumulation import CASES, Bench, bench_of
from benchmarks.measure import Figures, arguments, ratio, report, spread, take_turns
from headwater.client.features import train_round
from headwater.common.messages import Plan
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.terms import named

TERMS = PrivacyTerms(norm_bound=200.0, noise_multiplier=1.0)
BY_EXAMPLE = PrivacyTerms(norm_bound=200.0, noise_multiplier=1.0, example_bound=1.0)


def window_of(bench: Bench, terms: PrivacyTerms, *, size: int | None = None) -> Callable[[], None]:
    """Return a loop that trains on one window under these terms."""
    case = bench.case
    plan = Plan(
        round=1,
        run_seed=0,
        model_version=0,
        quota=case.micro_batch_size * case.accumulation_steps,
        micro_batch_size=size or case.micro_batch_size,
        terms=named(terms),
    )
    context = bench.context()

    def loop() -> None:
        context.accumulator.zero()
        train_round(plan, bench.window, context)

    return loop


def main() -> None:
    given = arguments(__doc__)
    torch.set_num_threads(1)
    figures: Figures = {}
    for name in ("mlp",) if given.quick else CASES:
        case = CASES[name]
        loops = {
            "device": window_of(bench_of(case), TERMS),
            "ones": window_of(bench_of(case), TERMS, size=1),
            "example": window_of(bench_of(case), BY_EXAMPLE),
        }
        turns = 3 if given.quick else case.turns
        _, cpu = take_turns(loops, turns=turns, seconds_each=0.05)
        figures[name] = {
            way: {
                "time_ratio": ratio(cpu[way], cpu["device"]),
                "quartiles": spread(cpu[way], cpu["device"]),
            }
            for way in ("ones", "example")
        }
    report(figures, as_json=given.json, doc=__doc__)


if __name__ == "__main__":
    main()
