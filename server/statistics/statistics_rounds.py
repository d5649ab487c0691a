"""The first round of a run with ``--statistics``: it measures all examples, and takes no step.

Statistics are sums, so they obey the law of all rounds: devices add up their examples, the server
adds the devices, and a mean is divided once. The result is in the run's folder and its checkpoint,
the task gets it on both sides, and the plans of all later rounds have it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.common.errors import SettingsError, StateError, UpdateAlreadyMasked
from headwater.common.messages import MAX_STEPS, Plan
from headwater.common.privacy.noise_shares import plain_scale_bits
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.settings.rounds import StatisticsSettings
from headwater.common.settings.schema import Settings
from headwater.common.statistics.columns import Statistics, columns_of, give
from headwater.common.statistics.terms import (
    COUNTS,
    MAX_VALUES,
    MOMENTS,
    FoundSums,
    StatisticsTerms,
)
from headwater.common.system.atomic_file import atomic_writer
from headwater.common.terms import Terms, named
from headwater.common.wording import counted, names_text
from headwater.server.aggregation.round_reports import RoundSum
from headwater.server.planning.features import DraftPlans
from headwater.server.rounds.features import Opening, RunFeature, RunState
from headwater.server.rounds.open_round import OpenRound
from headwater.server.statistics.admission import MEASURED
from headwater.server.statistics.advice import FILE, advice

log = logging.getLogger(__name__)


class StatisticsRounds(RunFeature):
    """Measures all examples once, and hands on what was found."""

    def __init__(self, run: RunState) -> None:
        """Take the columns of the run's task.

        Raises:
            TaskError: the task measures nothing.
            SettingsError: it measures too much, or another setting does not go with it.
        """
        _check_settings(run.settings)
        self._run = run
        self._columns = columns_of(run.task)
        MEASURED[self._columns.digest] = self._columns
        self._found: FoundSums | None = None
        self._measured_round: int | None = None
        """The number of the round that this process has measured in."""
        self._asked: OpenRound | None = None
        """The last attempt to measure."""
        number = self._columns.num_counts + self._columns.num_moments
        if number > MAX_VALUES:
            raise SettingsError(
                f"the statistics of the task are {number:,} numbers, and each plan has room for "
                f"{MAX_VALUES:,}",
                remedy="measure fewer columns, or set a smaller num_bins of Moments",
            )

    @property
    def _private(self) -> Any:
        """The feature that adds the run's noise; None where statistics are exact."""
        return self._run.features.get("privacy")

    def write(self, drafts: DraftPlans) -> None:
        if self._found is not None:
            drafts.ask(self._terms())

    def transfer_bytes(self, down: int, up: int, *, num_values: int) -> tuple[int, int]:
        return down + (self._terms().tensor_bytes if self._found is not None else 0), up

    def open(self, opening: Opening) -> None:
        """Let the plans of the first round ask for statistics of all examples, and nothing else."""
        if self._found is not None:
            return
        self._check_masked_before()
        terms, noise = self._terms(), self._noise(opening)
        if noise:
            terms = terms.model_copy(update={"scale_bits": plain_scale_bits(*noise)})
        made: dict[int, dict[str, Terms]] = {}
        most = self._run.settings.statistics.max_examples
        plans = {}
        for name, plan in opening.plans.items():
            own = made.get(id(plan.terms))
            if own is None:
                masks = [one for one in plan.terms.values() if one.keeps_update]
                own = made[id(plan.terms)] = named(*masks, *noise, terms)
            # Under masks or noise nothing may follow from how many examples a device has.
            quota = most if plan.keeps_update or noise else opening.owned[name]
            plans[name] = _measuring(plan, own, quota)
        opening.plans = plans

    def _noise(self, opening: Opening) -> list[PrivacyTerms]:
        """Return the terms of a private run's noise in statistics, in a list; else none."""
        if self._private is None or not opening.plans:
            return []
        return [
            self._private.privacy.measuring_terms(
                opening.plans,
                example_bound=self._columns.example_bound,
                max_examples=self._run.settings.statistics.max_examples,
                owned=opening.owned,
            )
        ]

    def answered(self, opened: OpenRound) -> None:
        self._asked = opened

    def closed(self, done: RoundSum, opened: OpenRound) -> RoundSum:
        if self._found is not None:
            return done
        self._check_masked_before()
        if self._private is None:
            self._columns.check(*_rows_of(done))
        return replace(done, mean_P=torch.zeros(0), loss_sum=math.nan, noise=None)

    def _check_masked_before(self) -> None:
        """End the run if devices have refused, as they masked these statistics before.

        What the others have is no measure of all, and those measure the same columns once.

        Raises:
            UpdateAlreadyMasked: some have refused the last plans.
        """
        asked = {} if self._asked is None else self._asked.refused
        names = [n for n, error in asked.items() if isinstance(error, UpdateAlreadyMasked)]
        if names:
            raise UpdateAlreadyMasked(
                f"{counted(len(names), 'device')} masked these statistics before, in a session "
                "of this run that was aborted, or in another run; two sums of them would show the "
                f"devices that are in only one ({names_text(names, len(names))})",
                remedy="go on with the run that has them (--resume); or measure other columns, as "
                "with another num_bins of a Moments in the task's file on both sides; or train "
                "without --statistics; a device that says so in a new run lies: revoke it",
            )

    def committed(self, done: RoundSum) -> None:
        if self._found is not None:
            return
        counts, moments = _rows_of(done)
        noise = 0.0
        if self._private is not None:
            noise = self._private.noise_in_sums
            counts, moments = ([max(one, 0.0) for one in row] for row in (counts, moments))
        self._found = FoundSums(
            noise=noise, counts=tuple(map(round, counts)), moments=tuple(moments)
        )
        self._measured_round = self._run.round
        found = self._given()
        devices = counted(len(done.names), "device")
        if noise:
            log.warning(
                "round %d measured the examples of %s, up to %s of each; each count has noise "
                "with a standard deviation of %.3g; no step was taken",
                self._run.round,
                devices,
                f"{self._run.settings.statistics.max_examples:,}",
                noise,
            )
        else:
            log.info(
                "round %d measured %s of %s; no step was taken",
                self._run.round,
                counted(round(done.num_examples), "example"),
                devices,
            )
        for line in advice(found):
            log.warning("%s", line)

    def to_json(self) -> dict[str, Any]:
        if self._found is None:
            return {}
        found = self._found.model_dump(mode="json", exclude_defaults=True)
        return {"columns": self._columns.digest, **found}

    def restore(self, row: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take what was measured before.

        Raises:
            SettingsError: the task measures something else now.
        """
        self._found = None
        if not row:
            return
        if row["columns"] != self._columns.digest:
            raise SettingsError(
                "the task measures other statistics than this run has: other names, bounds or "
                "labels",
                remedy="resume with the task that the run was started with, or begin a new run",
            )
        rows = {"counts": (), "moments": (), **row}
        self._found = FoundSums.model_validate({key: rows[key] for key in rows if key != "columns"})
        self._given()

    @property
    def needs_checkpoint(self) -> bool:
        """Whether the last round has measured: devices that mask measure only once."""
        return self._measured_round == self._run.round

    def saved(self, folder: Path) -> None:
        """Write the result into the run's folder, once.

        Raises:
            StateError: the disk is full or not writable.
        """
        if self._found is None or (folder / FILE).exists():
            return
        text = json.dumps(self._statistics().to_json(), indent=1, allow_nan=False)
        try:
            with atomic_writer(folder / FILE) as part:
                part.write_text(text + "\n")
        except OSError as error:
            raise StateError(f"{folder / FILE} cannot be written: {error}") from error

    def _terms(self) -> StatisticsTerms:
        return StatisticsTerms(
            columns=self._columns.digest,
            num_counts=self._columns.num_counts,
            num_moments=self._columns.num_moments,
            found=self._found,
        )

    def _statistics(self) -> Statistics:
        assert self._found is not None
        return self._columns.found(self._found.counts, self._found.moments, self._found.noise)

    def _given(self) -> Statistics:
        found = self._statistics()
        self._run.image.recorded[StatisticsTerms.NAME] = self.to_json()
        give(self._run.task, found)
        return found


def _rows_of(done: RoundSum) -> tuple[list[float], list[float]]:
    """Return the sums of the counts and of the moments."""
    counts, moments = (
        done.sums[name].tolist() if name in done.sums else [] for name in (COUNTS, MOMENTS)
    )
    return counts, moments


def _measuring(plan: Plan, terms: Mapping[str, Terms], quota: int) -> Plan:
    """Return a plan of all examples; a window has at most ``MAX_STEPS`` micro-batches."""
    return plan.model_copy(
        update={
            "terms": terms,
            "quota": quota,
            "micro_batch_size": max(plan.micro_batch_size, -(-quota // MAX_STEPS)),
            "finish_seconds": None,
            "share": None,
            "weigh_as": None,
            "reason": "all examples, for statistics",
        }
    )


def _check_settings(settings: Settings) -> None:
    """Check that nothing else is set that needs updates of gradients, or noise in masked sums.

    Raises:
        SettingsError: something is.
    """
    is_private = settings.privacy.is_on
    is_most_set = settings.statistics.max_examples != StatisticsSettings().max_examples
    refused = {
        "the server adds the noise, and sees masked sums without any: leave out --privacy-epsilon, "
        "or --secure-aggregation": is_private and settings.secure.aggregation != "off",
        "noise that is correlated over rounds is of one kind of sums: leave out "
        "--privacy-bands": is_private and settings.privacy.bands > 1,
        "noise for a whole device covers as many examples as one may have: set "
        "--statistics-examples to what most devices have": (
            is_private and settings.privacy.unit == "device" and not is_most_set
        ),
        "asynchronous rounds have no first one that all devices are in: leave out "
        "--asynchronous": settings.asynchronous.is_on,
        "a robust rule compares gradients, and statistics are a sum: leave out "
        "--aggregation": settings.aggregation.rule != "sum",
        "a feature of your own may act on each round: leave out --feature": (
            settings.feature.name is not None
        ),
        "a client algorithm acts on each round: leave out --client-algorithm": (
            settings.algorithm.name is not None
        ),
        "devices are tested before they have the result: leave out --evaluate-on-devices": (
            settings.evaluation.on_devices
        ),
    }
    for text, is_refused in refused.items():
        if is_refused:
            why, _, remedy = text.partition(": ")
            raise SettingsError(f"with --statistics {why}", remedy=f"{remedy}, or --statistics")
