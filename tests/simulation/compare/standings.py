"""Curves and standings for the tests, with as few figures as a claim needs."""

from __future__ import annotations

from headwater.simulation.compare.candidates import Candidate
from headwater.simulation.compare.standing import Standing
from headwater.simulation.compare.trajectory import Trajectory, summed

RATE = 0.1


def curve(
    *values: float,
    bytes_each: float = 1.0,
    examples_each: float = 1.0,
    is_smaller_better: bool = False,
) -> Trajectory:
    """Return a run that was evaluated after each round; a round takes a second."""
    spent = tuple(
        {
            "rounds": float(number),
            "bytes": bytes_each * number,
            "examples": examples_each * number,
            "seconds": float(number),
        }
        for number in range(1, len(values) + 1)
    )
    return Trajectory(
        spent=spent,  # type: ignore[arg-type] # the four resources
        values=values,
        total=spent[-1],  # type: ignore[arg-type]
        is_smaller_better=is_smaller_better,
    )


def standing(name: str, *runs: Trajectory, num_diverged: int = 0) -> Standing:
    """Return a candidate that ended these runs with the rate ``RATE``."""
    return Standing(
        candidate=Candidate(
            name=name,
            point={"local.algorithm": name},
            rate_key="local.learning_rate",
            first_rate=RATE,
            other_branch="",
        ),
        tried={RATE: 0.5},
        search_cost=summed([]),
        rate=RATE,
        runs=runs,
        num_diverged=num_diverged,
    )
