"""Private rounds: their plans' terms, the noise of a plain sum, and what is not released."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from headwater.common.errors import SettingsError
from headwater.common.task import weight_unit
from headwater.server.aggregation.round_reports import RoundSum
from headwater.server.privacy.round_terms import terms_of
from headwater.server.privacy.run_privacy import RunPrivacy
from headwater.server.rounds.checkpoint import check_space
from headwater.server.rounds.features import Opening, RunFeature, RunState
from headwater.server.rounds.open_round import OpenRound

OVERSPENT = (
    "its examples have spent their part of --privacy-epsilon: it tells another number of them than "
    "before, so that each further round counts for all of them"
)


class PrivateRounds(RunFeature):
    """Spends a run's privacy, round by round."""

    def __init__(self, run: RunState) -> None:
        """Open nothing yet.

        Raises:
            SettingsError: the task's weights are no whole numbers.
        """
        self._run = run
        if (unit := weight_unit(run.task)) != 1:
            raise SettingsError(
                f"the task counts weights in units of {unit:g}, and privacy clips what each "
                "example or device adds to a sum of whole weights",
                remedy="leave weight_unit out of the task and scale the loss, or train without "
                "privacy",
            )
        num_values = run.image.layout.num_parameters
        self.privacy = RunPrivacy(run.settings, num_values=num_values)
        """What the rounds' noise has spent."""
        self._bit_sum: float | None = None
        self.noise_in_sums = 0.0
        """The standard deviation of the noise in a round's sums beside the model's."""

    def share(self, publish: Callable[[], None]) -> None:
        self.privacy.publish = publish

    def begin(self, *, num_rounds: int) -> None:
        self.privacy.open_file(num_rounds=num_rounds)

    def check_left(self, *, round_number: int) -> None:
        self.privacy.check_left(round_number=round_number)

    def to_json(self) -> dict[str, Any]:
        return dict(self.privacy.clip.to_json())

    def restore(self, row: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.privacy.clip = self.privacy.clip.restored(row)

    def awaited(self) -> Callable[[str], bool] | None:
        return self.privacy.awaited()

    def turns(self, names: Collection[str]) -> Sequence[str] | None:
        return self.privacy.due(names)

    def open(self, opening: Opening) -> None:
        """Give the plans the round's terms.

        Raises:
            PrivacySpent: one more sum would exceed the run's epsilon.
            CheckpointFailed: the disk has no room for the step: what the round's noise has spent
                would be lost.
        """
        if self._run.settings.out is not None:
            num_parameters = self._run.image.layout.num_parameters
            check_space(self._run.settings.out, num_parameters=num_parameters)
        plans = self.privacy.private_plans(
            opening.plans,
            max_weight_per_example=self._run.max_weight_per_example,
            owned=opening.owned,
        )
        out = opening.plans.keys() - plans.keys()
        opening.plans = plans
        if out:
            self._run.planner.exclude(
                dict.fromkeys(out, OVERSPENT), round_number=self._run.round + 1, is_by_owner=True
            )
        opening.scale_bits = self.privacy.scale_bits(terms_of(opening.plans.values()))
        # A limit that follows the cohort would let one update change how others are clipped.
        opening.norm_watch = None
        opening.releases_reports = False

    def reveal(self, opened: OpenRound, unmasked: Any = None) -> None:
        terms = terms_of(opened.plans.values())
        if unmasked is not None:
            self.privacy.note_unmasked(unmasked, terms)
            return
        first = next(iter(opened.plans.values()))
        if opened.extra is not None and not first.asks_model:
            self.noise_in_sums = self.privacy.add_noise_to_sums(
                opened.extra,
                terms,
                max_examples=first.quota,
                round_number=self._run.round + 1,
                names=opened.accepted,
            )
            self._bit_sum = None
            return
        self._bit_sum = self.privacy.add_noise(
            self._run.sum,
            terms,
            round_number=self._run.round + 1,
            names=opened.accepted,
            clip_bits=opened.clip_bits,
        )

    def closed(self, done: RoundSum, opened: OpenRound) -> RoundSum:
        """Leave out the metrics, which have no noise; masked ones are zeros."""
        bit_sum = done.bit_sum if opened.ready else self._bit_sum
        return replace(done, metric_sums={}, bit_sum=bit_sum)

    def committed(self, done: RoundSum) -> None:
        self.privacy.follow_clip(done.bit_sum, num_devices=len(done.names))

    def saved(self, folder: Path) -> None:
        self.privacy.note_committed(self._run.round)

    def figures(self, opened: OpenRound) -> dict[str, Any]:
        spent = self.privacy
        return {
            "loss": math.nan,
            "epsilon": spent.epsilon,
            "delta": spent.delta,
            "noise_multiplier": spent.last_multiplier,
            "privacy_unit": spent.unit,
            "clip_norm": spent.clip.last_norm,
            "clip_share": spent.clip.last_share,
        }
