"""A device's part of a test: the sums of a model, or of two, over the examples that it holds out.

A masked device tells nothing but the masked sums. The time of its answer shows, as a power of two,
how long the test took (``client.masked_rounds.masked_answers``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headwater.client.evaluation.evaluation_plans import measures_for
from headwater.client.evaluation.other_model import check_kept
from headwater.client.evaluation.tested_sums import Faults, TestedSums, test_models
from headwater.client.trainer.client_examples import held_out_of
from headwater.client.training.round import Feature, Work
from headwater.common.data.example_faults import details, short_summary
from headwater.common.errors import EmptyDataset, ProtocolMismatch, TaskError
from headwater.common.evaluation.terms import (
    COUNTS,
    HIGH,
    LARGEST,
    LOW,
    OTHER,
    EvaluationTerms,
    in_two,
)
from headwater.common.task import LOSS, MAX_METRICS, tell_round
from headwater.common.user_code.failures import running
from headwater.common.wording import counted

log = logging.getLogger(__name__)

MAX_BATCH = 256


class EvaluationRound(Feature):
    """Tests the model that came with the plan, and the one before it."""

    def __init__(self) -> None:
        self._tested: Sequence[TestedSums] = ()
        self._num_left_out = 0

    def prepare(self, work: Work) -> None:
        """Test the model; the parameters are afterwards as they were.

        Raises:
            EmptyDataset: the device holds no examples out.
            HeadwaterError: the plan is not of the server's task or model; see ``test_models``.
        """
        terms, context = work.plan.of(EvaluationTerms), work.context
        assert terms is not None  # see client.features
        measures = measures_for(work.plan, terms, context.task, name=context.name)
        check_kept(context.image, terms, name=context.name)
        if context.image.digest.hex() != terms.model:
            raise ProtocolMismatch(
                f"{context.name}, round {work.plan.round}: the model that came is not the one "
                "that the plan names",
                remedy="use a server of this version",
            )
        positions = _unless_few(_positions(work, terms), work)
        tell_round(context.task, terms.model_round)
        with running("the test of the model"):
            self._tested, faults = test_models(
                context,
                positions,
                measures,
                num_models=terms.num_models,
                batch_size=min(work.plan.micro_batch_size, MAX_BATCH),
            )
        self._num_left_out = len(faults)
        if faults:
            _log_faults(work, faults, len(positions))

    def sums(self, work: Work) -> Mapping[str, Tensor]:
        """Return the sums; a plain report has the device's own figures as well.

        Raises:
            TaskError: a count is too large for float32.
        """
        rows = [one.row(num_left_out=self._num_left_out) for one in self._tested]
        high, low = in_two(np.concatenate(rows))
        counts = np.concatenate([one.counts for one in self._tested])
        if max(counts.max(initial=0), np.abs(high).max()) > LARGEST:
            raise TaskError(
                f"{work.context.name}: a count or a sum is too large: counts up to "
                f"{LARGEST:,.0f} on a device are exact, and no others are sent",
                remedy="test on fewer examples: a smaller --test-fraction",
            )
        if not work.plan.hides_data:
            self._report(work)
        found = {HIGH: torch.from_numpy(high), LOW: torch.from_numpy(low)}
        return found | ({COUNTS: torch.from_numpy(counts)} if len(counts) else {})

    def _report(self, work: Work) -> None:
        """Let the plain report have the first model's figures, and the second's by other names."""
        first, *others = self._tested
        total = work.total
        total.num_examples, total.weight = first.num_examples, first.total.weight
        total.loss_sum, total.metric_sums = first.total.loss_sum, dict(first.total.metric_sums)
        for other in others:
            more = {LOSS: other.total.loss_sum} | other.total.metric_sums
            kept = list(more)[: MAX_METRICS - len(total.metric_sums)]
            total.metric_sums |= {OTHER + name: more[name] for name in kept}


@dataclass(frozen=True, kw_only=True, slots=True)
class _HoldOut:
    run_seed: int
    held_out_fraction: float
    held_out: str


def _positions(work: Work, terms: EvaluationTerms) -> list[int]:
    """Return the examples of the plan that the device holds out.

    Raises:
        EmptyDataset: there is none, in a plan without masks.
    """
    context, window = work.context, work.window.positions[: work.plan.quota]
    if terms.fraction >= 1:
        return sorted(window)
    hold_out = _HoldOut(
        run_seed=work.plan.run_seed, held_out_fraction=terms.fraction, held_out=terms.held_out
    )
    held_out = held_out_of(context.task, context.examples, hold_out, name=context.name)
    positions = sorted({*window}.intersection(held_out))
    if not positions:
        error = EmptyDataset(
            f"{context.name} holds out none of its {counted(len(context.examples), 'example')} "
            f"to test on: the share is {terms.fraction:g}",
            remedy="raise --test-fraction on the server, or leave the device out",
        )
        if not work.plan.hides_data:  # a refusal would tell of the data, and zeros do not
            raise error
        log.warning("%s", error)
    return positions


def _unless_few(positions: list[int], work: Work) -> list[int]:
    """Return the examples; none if they are fewer than a masked device tests.

    A server that chooses the share could otherwise leave one example of one device in the sum.
    """
    if 0 < len(positions) < work.least_tested:
        log.warning(
            "%s, round %d: it would test on %s of its own, and its owner masks at least %d "
            "(secure.min_quota): it gives zeros to the sum",
            work.context.name,
            work.plan.round,
            counted(len(positions), "example"),
            work.least_tested,
        )
        return []
    return positions


def _log_faults(work: Work, faults: Faults, num_examples: int) -> None:
    """Log how many examples are left out, and why; with masks no other place says so."""
    log.warning(
        "%s: %d of %s cannot be evaluated and are left out: %s",
        work.context.name,
        len(faults),
        counted(num_examples, "held-out example"),
        short_summary(faults, work.context.examples),
    )
    for kind, detail in details(faults).items():
        log.warning("%s: %s: %s", work.context.name, kind, detail)
