"""The trial of a client algorithm on a device's first examples, before the first round."""

from __future__ import annotations

from torch import Tensor

from headwater.client.local_training.local_training import LocalTraining
from headwater.client.local_training.local_work import ClientAlgorithm
from headwater.client.training.context import TrainingContext
from headwater.client.training.round import Work, sum_round
from headwater.client.training.sampler import SamplerPosition, Window, window
from headwater.common.errors import AlgorithmBroken
from headwater.common.local_training.terms import LocalPlan
from headwater.common.messages import Plan
from headwater.common.terms import named

NUM_EXAMPLES = 4
# Examples that are drawn anew each time, such as flipped images, can be equal by chance.
NUM_SUMS = 8


def try_algorithm(algorithm: ClientAlgorithm, context: TrainingContext) -> None:
    """Let the algorithm make its vector from four examples, in one and in two local steps.

    The accumulator's vector is zero afterwards.

    Raises:
        TaskFailed: it raised an exception; the message shows the user's line.
        AlgorithmBroken: it returned no vector of the model, used no example or one twice, or
            returned another vector from the same examples, whose plain sums are the same each time.
        NonFiniteUpdate: the vector is not finite.
    """
    num_examples = len(context.examples)
    tried = window(
        SamplerPosition(),
        quota=min(NUM_EXAMPLES, num_examples),
        run_seed=0,
        name=context.name,
        num_examples=num_examples,
    )
    for num_steps in (1, 2):
        plan = Plan(
            round=0,
            run_seed=0,
            model_version=0,
            quota=len(tried.positions),
            micro_batch_size=1,
            terms=named(LocalPlan(steps=num_steps, learning_rate=1e-3)),
        )
        try:
            is_same = _is_same(plan, tried, context, algorithm, num_times=2) or not _is_same(
                plan.model_copy(update={"terms": {}}), tried, context, None, num_times=NUM_SUMS
            )
        finally:
            context.accumulator.zero()
        if not is_same:
            raise AlgorithmBroken(
                f"the client algorithm {type(algorithm).__name__} made two vectors from the same "
                "examples and parameters",
                remedy="keep nothing in the object: it serves all clients of a process, and an "
                "aborted round is repeated",
            )


def _is_same(
    plan: Plan,
    tried: Window,
    context: TrainingContext,
    algorithm: ClientAlgorithm | None,
    *,
    num_times: int,
) -> bool:
    """Return whether all vectors of a window, or without an algorithm its plain sums, are equal."""
    features = () if algorithm is None else (LocalTraining(algorithm),)

    def vector() -> Tensor:
        sum_round(work := Work(plan=plan, window=tried, context=context, features=features))
        return work.values_P

    first_P = vector().clone()
    return all(vector().equal(first_P) for _ in range(1, num_times))
