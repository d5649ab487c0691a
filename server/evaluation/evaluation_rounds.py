"""The only round of a run with ``--test-model``: it tests a model, and takes no step.

A test is sums, so it obeys the law of all rounds: devices add up their examples, the server adds
the devices, and a mean is divided once. So it is the test of the model on all of these examples
together, with masks too.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from headwater.common.errors import (
    CorruptUpdate,
    EmptyDataset,
    SettingsError,
    StateError,
    UpdateAlreadyMasked,
)
from headwater.common.evaluation.measures import measures_of
from headwater.common.evaluation.terms import (
    MAX_COUNTS,
    OTHER,
    EvaluationTerms,
)
from headwater.common.messages import MAX_STEPS, Plan, UpdateReport
from headwater.common.system.atomic_file import atomic_writer
from headwater.common.wording import counted, names_text
from headwater.server.aggregation.round_reports import RoundSum
from headwater.server.evaluation.admission import check_told
from headwater.server.evaluation.device_spread import compared, spread_of, why_none
from headwater.server.evaluation.result_table import FILE, summary
from headwater.server.evaluation.settings_check import check_settings
from headwater.server.evaluation.summed_result import num_metrics, result_of
from headwater.server.evaluation.tested_models import TestedModel, check_same_frozen, load_tested
from headwater.server.rounds.evaluation import test_metric_names
from headwater.server.rounds.features import Opening, RunFeature, RunState
from headwater.server.rounds.open_round import OpenRound

MAX_NAMED = 5  # devices in one error
log = logging.getLogger(__name__)


class EvaluationRounds(RunFeature):
    """Tests one model, or two on the same examples."""

    def __init__(self, run: RunState) -> None:
        """Load the models, and what the task counts of its predictions.

        Raises:
            TaskError: the task says something wrong of its predictions.
            SettingsError: it counts too much, or another setting does not go with a test.
            HeadwaterError: a model cannot be loaded, see ``load_tested``.
        """
        check_settings(run)
        chosen = run.settings.device_test
        assert chosen.model is not None  # see server.rounds.features
        self._run, self._chosen = run, chosen
        self._measures = measures_of(run.task)
        if self._measures.num_counts > MAX_COUNTS:
            raise SettingsError(
                f"the task counts {self._measures.num_counts:,} numbers of its predictions, and a "
                f"test has room for {MAX_COUNTS:,}",
                remedy="use fewer bins, or a RocHistogram of fewer classes",
            )
        self.other: TestedModel | None = None
        """The model that is compared with."""
        if chosen.compare_with is not None:
            self.other = load_tested(run.image, chosen.compare_with)
        self.model = load_tested(run.image, chosen.model)
        if self.other is not None:
            check_same_frozen(self.model, self.other)
        self.result: dict[str, Any] | None = None
        """What was found, as it is written."""
        self._is_masked = run.settings.secure.aggregation != "off"
        # Those of the server are tested by ``headwater-server evaluate`` without the devices.
        self._test_examples, run.test_examples = run.test_examples, None

    def open(self, opening: Opening) -> None:
        """Let the plans ask for a test of all examples, and for nothing else."""
        terms, most = self._terms(), self._chosen.max_examples
        plans = {}
        for name, plan in opening.plans.items():
            masks = {key: one for key, one in plan.terms.items() if one.keeps_update}
            # Of a member of a session nothing may follow from how many examples it has.
            quota = most if plan.keeps_update else opening.owned[name]
            plans[name] = _testing(plan, quota).model_copy(
                update={"terms": {**masks, terms.NAME: terms}}
            )
        opening.plans = plans

    def answered(self, opened: OpenRound) -> None:
        """End the run if another attempt would meet the same.

        Raises:
            EmptyDataset: no device holds examples out.
            UpdateAlreadyMasked: too few devices are left that have not tested this model before.
        """
        refused = [*opened.refused.values()]
        has_none = not opened.accepted and not opened.ready
        if has_none and refused and all(isinstance(one, EmptyDataset) for one in refused):
            raise EmptyDataset(
                f"none of {counted(len(refused), 'device')} holds examples out: {refused[0]}",
                remedy="raise --test-fraction; 1 tests on all examples of the devices",
            )
        again = [n for n, e in opened.refused.items() if isinstance(e, UpdateAlreadyMasked)]
        if again and len(opened.ready) < self._run.settings.num_clients_needed:
            raise UpdateAlreadyMasked(
                f"{counted(len(again), 'device')} masked these examples before, in a test of this "
                "model: two sums of them would show the devices that are in only one ("
                f"{names_text(again, len(again))})",
                remedy="use the result of that test, or test another model",
            )

    def closed(self, done: RoundSum, opened: OpenRound) -> RoundSum:
        """Read the sums; what is left is a round without a loss or a metric of training.

        Raises:
            EmptyDataset: no device holds examples out.
            CorruptUpdate: no examples have such sums, or they are not those that were reported.
        """
        models = [self.model, *([] if self.other is None else [self.other])]
        if not self._is_masked:  # an aggregator's sums come beside its devices' reports
            check_told(done.sums, [*opened.accepted.values()], num_models=len(models))
        tested = result_of(
            done.sums,
            models,
            self._measures,
            names=self._metric_names(opened, done),
            num_devices=len(done.names),
        )
        self.result = {
            **tested,
            "fraction": self._chosen.fraction,
            "is_masked": self._is_masked,
            "far_off": [*opened.outliers],
            **self._of_devices([*opened.accepted.values()], len(done.names)),
            "not_evaluated": {n: f"{e.code}: {e}" for n, e in opened.refused.items()},
        }
        return replace(
            done,
            mean_P=torch.zeros(0),
            loss_sum=math.nan,
            metric_sums={},
            noise=None,
            weight=tested["results"][0]["weight"] or done.weight,
            num_examples=tested["num_examples"],
            num_refused=tested["num_left_out"],
        )

    def committed(self, done: RoundSum) -> None:
        assert self.result is not None
        for line in summary(self.result):
            log.info("%s", line)

    def figures(self, opened: OpenRound) -> dict[str, Any]:
        """Return the metrics, as those of tests on devices are named, and who is not in them."""
        assert self.result is not None
        metrics: dict[str, float] = {}
        for prefix, one in zip(("held_out", "compared"), self.result["results"], strict=False):
            found = {"loss": one["loss"], **one["metrics"]}
            metrics |= {f"{prefix}_{n}": math.nan if v is None else v for n, v in found.items()}
        return {
            "metrics": metrics,
            "num_held_out_clients": self.result["num_devices"],
            "not_evaluated": self.result["not_evaluated"],
        }

    @property
    def needs_checkpoint(self) -> bool:
        return True

    def saved(self, folder: Path) -> None:
        """Write the result into the run's folder.

        Raises:
            StateError: the disk is full or not writable.
        """
        if self.result is None:
            return
        text = json.dumps(self.result, indent=1, allow_nan=False)
        try:
            with atomic_writer(folder / FILE) as part:
                part.write_text(text + "\n")
        except OSError as error:
            raise StateError(f"{folder / FILE} cannot be written: {error}") from error

    def _terms(self) -> EvaluationTerms:
        return EvaluationTerms(
            model=self.model.digest.hex(),
            other=None if self.other is None else self.other.digest.hex(),
            model_round=max(self.model.round or 1, 1),
            measures=self._measures.digest,
            num_counts=self._measures.num_counts,
            num_reals=self._measures.num_reals,
            fraction=self._chosen.fraction,
            held_out=self._chosen.held_out,
        )

    def _of_devices(self, reports: Sequence[UpdateReport], num_devices: int) -> dict[str, Any]:
        """Return what is said of single devices' figures, and why it is not more."""
        least = self._chosen.spread_devices
        why = why_none(num_devices, least=least, is_masked=self._is_masked)
        has_both = self.other is not None and not self._is_masked
        return {
            "spread": {name: asdict(one) for name, one in spread_of(reports).items()}
            if why is None
            else None,
            "why_no_spread": why,
            "devices": asdict(compared(reports)) if has_both else None,
        }

    def _metric_names(self, opened: OpenRound, done: RoundSum) -> Sequence[str]:
        """Return the names of the task's metrics, in the order in which they are sent.

        Raises:
            CorruptUpdate: two devices have unlike ones.
        """
        if self._is_masked:
            return self._masked_names(opened, done)
        found: dict[tuple[str, ...], list[str]] = {}
        for name, one in opened.accepted.items():
            own = tuple(sorted(n for n in one.metric_sums if not n.startswith(OTHER)))
            found.setdefault(own, []).append(name)
        if len(found) > 1:
            rare = min(found, key=lambda own: len(found[own]))
            raise CorruptUpdate(
                f"the devices' tasks have unlike metrics: {', '.join(rare) or 'none'} on "
                f"{counted(len(found[rare]), 'device')} ({', '.join(found[rare][:MAX_NAMED])})",
                remedy="start all devices with the same file of the task, or leave these out",
            )
        return next(iter(found), ())

    def _masked_names(self, opened: OpenRound, done: RoundSum) -> Sequence[str]:
        """Return the names that devices told, or the server's own; else numbers in their place.

        A device that does not require masks tells none.
        """
        run = self._run
        names = sorted(opened.metrics)
        if not names:
            examples = self._test_examples
            names = sorted(test_metric_names(run.task, run.image.model, examples) or ())
        if not names:
            number = 1 if self.other is None else 2
            names = [f"metric_{at + 1}" for at in range(num_metrics(done.sums, number))]
        return names


def _testing(plan: Plan, quota: int) -> Plan:
    """Return a plan of all examples; a window has at most ``MAX_STEPS`` micro-batches."""
    return plan.model_copy(
        update={
            "quota": quota,
            "micro_batch_size": max(plan.micro_batch_size, -(-quota // MAX_STEPS)),
            "finish_seconds": None,
            "share": None,
            "weigh_as": None,
            "reason": "a test of the model, which trains nothing",
        }
    )
