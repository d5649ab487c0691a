"""Evaluates a model on a client's held-out examples, as sums."""

from __future__ import annotations

import logging
import math

from torch import nn

from headwater.client.training.sampler import seed_of
from headwater.common.data.evaluation import EvaluationSums, evaluate_sums
from headwater.common.data.example_faults import details, short_summary
from headwater.common.data.example_lengths import ExampleLengths
from headwater.common.errors import NonFiniteUpdate
from headwater.common.messages import EvaluateReport
from headwater.common.task import Examples, Task
from headwater.common.user_code.failures import running
from headwater.common.wording import counted

log = logging.getLogger(__name__)


def seed_of_tests(name: str) -> int:
    """Return the seed of what a client's tests draw: the same in each round, on each machine."""
    return seed_of("test", name)


class HeldOutEvaluation:
    """Evaluates clients, and logs of each, once a run, what it leaves out."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self._task = task
        self._model = model
        self._left_out: dict[str, tuple[int | None, int]] = {}
        """The run, and how many held-out examples each client left out in its last evaluation."""

    def report(
        self,
        name: str,
        held_out: Examples,
        *,
        batch_size: int,
        run_id: int | None,
        lengths: ExampleLengths | None = None,
    ) -> EvaluateReport:
        """Sum loss and metrics over the held-out examples that can be evaluated.

        Raises:
            NonFiniteUpdate: one of the sums is not finite, though each example's loss is.
            TaskFailed: every example raised an exception.
        """
        with running("the evaluation on held-out examples"):
            total = evaluate_sums(
                self._task, self._model, held_out, batch_size, lengths, seed=seed_of_tests(name)
            )
        self._log_left_out(name, total, held_out, run_id)
        if not all(math.isfinite(value) for value in (total.loss_sum, *total.metric_sums.values())):
            raise NonFiniteUpdate(f"{name}: the held-out loss or a metric is not finite")
        return EvaluateReport(
            name=name,
            weight=total.weight,
            loss_sum=total.loss_sum,
            metric_sums=total.metric_sums,
            num_refused=len(total.faults),
        )

    def _log_left_out(
        self, name: str, total: EvaluationSums, held_out: Examples, run_id: int | None
    ) -> None:
        """Log how many held-out examples are left out, and why, whenever their number changes."""
        number = len(total.faults)
        if not number or self._left_out.get(name) == (run_id, number):
            return
        self._left_out[name] = run_id, number
        log.warning(
            "%s: %d of %s cannot be evaluated and are left out: %s",
            name,
            number,
            counted(len(held_out), "held-out example"),
            short_summary(total.faults, held_out),
        )
        for kind, detail in details(total.faults).items():
            log.warning("%s: %s: %s", name, kind, detail)
