"""Local steps, or a client algorithm of the user's, in the place of the plain sum."""

from __future__ import annotations

from headwater.client.local_training.local_steps import LocalSteps
from headwater.client.local_training.local_work import ClientAlgorithm, LocalWork
from headwater.client.training.round import Feature, Work
from headwater.common.local_training.local_optimizer import path_length
from headwater.common.local_training.local_terms import LocalTerms
from headwater.common.local_training.terms import LocalPlan
from headwater.common.user_code.failures import running


class LocalTraining(Feature):
    """Lets an algorithm make the vector: the device's own, or the steps of the plan's terms."""

    moves_model = True

    def __init__(self, algorithm: ClientAlgorithm | None) -> None:
        self._algorithm = algorithm

    def train(self, work: Work) -> bool:
        """Make the vector in the accumulator.

        Raises:
            TaskFailed: the algorithm raised.
            AlgorithmBroken, NonFiniteUpdate: see ``LocalWork.keep``.
        """
        asked, local = work.plan.of(LocalPlan), LocalWork(work)
        terms = None if asked is None else asked.how
        if self._algorithm is None:
            steps = LocalSteps(terms or LocalTerms(), work.context)
            _make(steps, local, name="local training")
        else:
            name = f"the client algorithm {type(self._algorithm).__name__}"
            with running(name):
                _make(self._algorithm, local, name=name)
            if terms is not None and terms.is_normalized and local.num_taken:
                length = path_length(terms, local.num_taken, rate=local.learning_rate)
                work.values_P.div_(length)
        work.num_steps = max(local.num_taken, 1)
        return True


def _make(algorithm: ClientAlgorithm, work: LocalWork, *, name: str) -> None:
    """Let an algorithm make its vector in the accumulator; the parameters are as before."""
    try:
        values_P = algorithm.train(work)
    finally:
        work.restore()
    work.keep(values_P, name)
