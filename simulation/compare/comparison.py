"""Decides which runs a comparison needs next, and how the candidates stand after those that ended.

Each candidate goes through a search for its rate, with short runs of a seed that is not compared,
and then through a run for each seed. Both are functions of the results so far: a comparison that
was interrupted continues where it was, and the results may come in any order.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headwater.common.errors import SettingsError
from headwater.common.settings.conflicts import check_effective
from headwater.common.settings.rounds import CompressionSettings
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.simulation.compare.budget import Budget
from headwater.simulation.compare.candidates import LOCAL, Candidate, Shared, candidates
from headwater.simulation.compare.rate_search import best_rate, first_rates, next_rate, score
from headwater.simulation.compare.standing import Standing
from headwater.simulation.compare.trajectory import Trajectory, summed, trajectory_of
from headwater.simulation.sweep.grid import Point, SweepRun, run_of
from headwater.simulation.sweep.results import (
    LOSS,
    Result,
    check_metric,
    choose_metric,
    is_smaller_better,
    read_result,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What is compared, and where its runs are."""

    shared: Shared
    candidates: tuple[Candidate, ...]
    seeds: tuple[int, ...]
    budget: Budget
    metric: str | None
    """The metric that the user names; None: the first of test_accuracy, test_loss and loss."""
    folder: Path
    is_quick: bool = False
    """Whether no search goes beyond its first rates, and the worse half of the algorithms has no
    runs after it."""

    @property
    def num_finalists(self) -> int:
        """How many algorithms have a run for each seed."""
        number = len(self.candidates)
        return max(math.ceil(number / 2), min(number, 2)) if self.is_quick else number

    @property
    def num_expected(self) -> int:
        """The number of runs, if no search goes beyond its first rates."""
        searches = len(self.candidates) * len(first_rates(1.0))
        return searches + self.num_finalists * len(self.seeds)

    @property
    def num_expected_rounds(self) -> int | None:
        """The rounds of these runs; None if they follow from what a round costs."""
        if self.budget.resource != "rounds":
            return None
        searches = len(self.candidates) * len(first_rates(1.0)) * self.budget.search_rounds
        return searches + self.num_finalists * len(self.seeds) * int(self.budget.amount)

    @property
    def first_run(self) -> SweepRun:
        """A run of the first search, whose settings all runs share but for the algorithm's."""
        candidate = self.candidates[0]
        return self._search_run(candidate, first_rates(candidate.first_rate)[0])[0]

    def due(self) -> list[SweepRun]:
        """Return the runs that have no result and can be started now."""
        return [run for one in self.candidates for run in self._due(one)]

    def results(self) -> list[Result]:
        """Return the results of all runs that have ended."""
        found = []
        for candidate in self.candidates:
            searched, rate = self._search(candidate)
            found += [result for _, result in searched if result is not None]
            if rate is not None:
                found += _ended(self._runs(candidate, rate, searched))
        return found

    def chosen_metric(self) -> str:
        """Return the metric that is compared.

        Raises:
            SettingsError: no run has the metric that the user names.
        """
        return choose_metric(self.results(), self.metric)

    def is_smaller_better(self, metric: str) -> bool:
        """Return whether smaller values of a metric are better."""
        return is_smaller_better(metric, self.metric)

    def curve(self, result: Result, metric: str) -> Trajectory:
        """Return what a run reached, and at which cost."""
        is_smaller = self.is_smaller_better(metric)
        return trajectory_of(result, metric, is_smaller_better=is_smaller)

    def standings(self) -> list[Standing]:
        """Return how each candidate stands."""
        metric = self.chosen_metric()
        found = []
        for candidate in self.candidates:
            searched, rate = self._search(candidate)
            ended = [] if rate is None else _ended(self._runs(candidate, rate, searched))
            tried = [result for _, result in searched if result is not None]
            found.append(
                Standing(
                    candidate=candidate,
                    tried={
                        run.point[candidate.rate_key]: self._score(result)
                        for run, result in searched
                        if result is not None
                    },
                    search_cost=summed(self.curve(result, metric).total for result in tried),
                    rate=rate,
                    runs=tuple(self.curve(one, metric) for one in ended if not one.has_diverged),
                    num_diverged=sum(one.has_diverged for one in ended),
                )
            )
        return found

    def advised(self, standing: Standing) -> Settings:
        """Return the settings of a run of an algorithm that stands, in no folder."""
        assert standing.rate is not None
        rounds = len(standing.runs[0].values) if self.budget.resource != "rounds" else None
        rounds = rounds or int(self.budget.amount)
        run = self._run(standing.candidate, standing.rate, self.seeds[0], rounds)
        return run.settings.model_copy(update={"out": None})

    def _due(self, candidate: Candidate) -> list[SweepRun]:
        searched, rate = self._search(candidate)
        missing = [run for run, result in searched if result is None]
        if missing or rate is None or candidate.name not in self._finalists():
            return missing
        runs = self._runs(candidate, rate, searched)
        return [run for run in runs if read_result(run) is None]

    def _search(
        self, candidate: Candidate
    ) -> tuple[list[tuple[SweepRun, Result | None]], float | None]:
        """Return the runs of the search, and the best rate; None while one is missing."""
        searched = [self._search_run(candidate, rate) for rate in first_rates(candidate.first_rate)]
        while True:
            ended = {run.point[candidate.rate_key]: it for run, it in searched if it is not None}
            if len(ended) < len(searched):
                return searched, None
            scores = {rate: self._score(result) for rate, result in ended.items()}
            rate = None if self.is_quick else next_rate(scores)
            if rate is None:
                return searched, best_rate(scores)
            searched.append(self._search_run(candidate, rate))

    def _finalists(self) -> list[str]:
        """Return the names of the algorithms that have runs after their search.

        Of a quick comparison these are exact steps and those with the best scores in the searches,
        of as much of the budget's resource as all had spent; none before all searches are done.
        """
        if not self.is_quick:
            return [one.name for one in self.candidates]
        curves: dict[str, Trajectory] = {}
        for candidate in self.candidates:
            searched, rate = self._search(candidate)
            if any(result is None for _, result in searched):
                return []
            best = [
                result
                for run, result in searched
                if result is not None and run.point[candidate.rate_key] == rate
            ]
            metric = choose_metric(best, self.metric) if best else LOSS
            for one in best:
                curves[candidate.name] = self.curve(one, metric)
        resource = self.budget.resource
        amount = min((one.total[resource] for one in curves.values()), default=0.0)

        def key(name: str) -> float:
            curve = curves[name]
            pairs = zip(curve.values, curve.spent, strict=True)
            paid = [value for value, cost in pairs if cost[resource] <= amount]
            found = score(paid, is_smaller_better=curve.is_smaller_better)
            return math.inf if found is None else -found

        first = self.candidates[0].name  # exact steps, with which advice compares the rest
        others = [name for name in sorted(curves, key=key) if name != first]
        return [*(name for name in curves if name == first), *others][: self.num_finalists]

    def _search_run(self, candidate: Candidate, rate: float) -> tuple[SweepRun, Result | None]:
        # The seed is none of those that are compared: their results choose nothing.
        run = self._run(candidate, rate, max(self.seeds) + 1, self.budget.search_rounds)
        return run, read_result(run)

    def _runs(
        self,
        candidate: Candidate,
        rate: float,
        searched: Iterable[tuple[SweepRun, Result | None]],
    ) -> list[SweepRun]:
        (best,) = (
            result for run, result in searched if result and run.point[candidate.rate_key] == rate
        )
        rounds = self.budget.rounds_within(self.curve(best, LOSS).total)
        return [self._run(candidate, rate, seed, rounds) for seed in self.seeds]

    def _run(self, candidate: Candidate, rate: float, seed: int, rounds: int) -> SweepRun:
        shared = self.shared.without(candidate.other_branch)
        overrides = {**shared.overrides, "rounds": rounds}
        run = run_of(
            shared.tree,
            overrides,
            candidate.at(rate),
            seed,
            out=self.folder,
            what="comparison",
        )
        return replace(run, is_trial=True)

    def _score(self, result: Result) -> float | None:
        if result.has_diverged:
            return None
        metric = choose_metric([result], self.metric)
        curve = self.curve(result, metric)
        return score(curve.values, is_smaller_better=curve.is_smaller_better)


def plan_comparison(
    shared: Shared,
    *,
    seeds: Sequence[int],
    budget: Budget,
    metric: str | None,
    folder: Path,
    is_quick: bool = False,
) -> Comparison:
    """Return the comparison of the algorithms with these settings.

    Raises:
        SettingsError: a setting is wrong, or changes nothing, or the comparison chooses it; a seed
            is named twice.
    """
    shared.check()
    check_metric(metric)
    if len(set(seeds)) < len(seeds):
        raise SettingsError("--seeds names a seed twice", remedy="name each seed once")
    exact = shared.without(LOCAL)
    settings = _load(exact, {})
    is_in_float32 = settings.compression == CompressionSettings()
    tried = candidates(
        settings.optimizer,
        few_bytes=is_in_float32 and budget.resource in ("bytes", "seconds"),
    )
    possible = [(one, run) for one in tried if (run := _settings_if_possible(one, shared))]
    check_effective([run for _, run in possible], shared.overrides)
    return Comparison(
        shared=shared,
        candidates=tuple(one for one, _ in possible),
        seeds=tuple(seeds),
        budget=budget,
        metric=metric,
        folder=folder,
        is_quick=is_quick,
    )


def _settings_if_possible(candidate: Candidate, shared: Shared) -> Settings | None:
    """Return an algorithm's settings; None, and log why, if it does not go with the shared ones."""
    try:
        return _load(shared.without(candidate.other_branch), candidate.at(candidate.first_rate))
    except SettingsError as error:
        log.warning("%s is not compared: %s", candidate.name, error.message)
        return None


def _load(shared: Shared, point: Point) -> Settings:
    return load(None, {**copy.deepcopy(dict(shared.tree)), **shared.overrides, **point})


def _ended(runs: Iterable[SweepRun]) -> list[Result]:
    return [result for run in runs if (result := read_result(run)) is not None]
