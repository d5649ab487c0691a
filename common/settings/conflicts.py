"""Refuses settings that cannot work together, as soon as they are read.

A conflict is a row: what is wrong, a bar and what to do about it, beside when it is so. The rows
stand by feature. A run with such settings never begins: neither the task nor the data was opened.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from headwater.common.errors import SettingsError
from headwater.common.settings.fields import split_criterion
from headwater.common.settings.machines import ServerSettings
from headwater.common.settings.rounds import (
    MIN_MASKED_FRACTION,
    AggregationSettings,
    AsynchronousSettings,
    CohortSettings,
    CompressionSettings,
    PrivacySettings,
    SecureSettings,
    StatisticsSettings,
)
from headwater.common.settings.simulation import SimulationSettings
from headwater.common.settings.training import (
    MAX_ALGORITHM_CHARACTERS,
    AlgorithmSettings,
    EvaluationSettings,
    LocalScheduleSettings,
    LocalSettings,
    ModelSettings,
    PlanSettings,
    ScheduleSettings,
    VersionSettings,
)

DEFAULT_EXAMPLES = PlanSettings().effective_batch_size
DEFAULT_ASYNCHRONOUS = AsynchronousSettings()


class _Settings(Protocol):
    """The settings that the rows look at; the whole tree stands above this module."""

    @property
    def plan(self) -> PlanSettings: ...

    @property
    def local(self) -> LocalSettings: ...

    @property
    def local_schedule(self) -> LocalScheduleSettings: ...

    @property
    def schedule(self) -> ScheduleSettings: ...

    @property
    def algorithm(self) -> AlgorithmSettings: ...

    @property
    def cohort(self) -> CohortSettings: ...

    @property
    def aggregation(self) -> AggregationSettings: ...

    @property
    def compression(self) -> CompressionSettings: ...

    @property
    def asynchronous(self) -> AsynchronousSettings: ...

    @property
    def secure(self) -> SecureSettings: ...

    @property
    def privacy(self) -> PrivacySettings: ...

    @property
    def model(self) -> ModelSettings: ...

    @property
    def evaluation(self) -> EvaluationSettings: ...

    @property
    def statistics(self) -> StatisticsSettings: ...

    @property
    def versions(self) -> VersionSettings: ...

    @property
    def server(self) -> ServerSettings: ...

    @property
    def simulation(self) -> SimulationSettings: ...

    @property
    def num_rounds(self) -> int | None: ...


def check_together(s: _Settings) -> None:
    """Check the settings that depend on each other; one error has all conflicts.

    Raises:
        SettingsError: some exclude each other.
    """
    rows = {
        **(_of_privacy(s) if s.privacy.is_on else _of_no_privacy(s)),
        **(_of_masks(s) if s.secure.aggregation != "off" else {}),
        **(_of_compression(s) if s.compression.up != "off" else {}),
        **(_of_asynchronous(s) if s.asynchronous.is_on else _of_synchronous(s)),
        **(_of_overlap(s) if s.asynchronous.overlap else {}),
        **(_of_tree(s) if s.simulation.aggregators > 1 else {}),
        **(_of_noise_scale(s) if s.plan.follow_noise_scale else {}),
        **(_of_local_steps(s) if s.local.is_on else _of_no_local_steps(s)),
        **_of_others(s),
    }
    found = [text.split(" | ") for text, is_met in rows.items() if is_met]
    if found:
        raise SettingsError(
            "; ".join(why for why, _ in found),
            remedy="; ".join(dict.fromkeys(remedy for _, remedy in found)),
        )


def check_effective(runs: Sequence[_Settings], given: Collection[str]) -> None:
    """Check that each of the settings in ``given``, by its key, changes something in one of runs.

    For what is typed now alone: the file of a run, or of a fleet, may have more for another day.

    Raises:
        SettingsError: one has an effect only together with another, which no run has.
    """
    rows = [list(_partners(run)) for run in runs]
    effective = {key for row in rows for key, _, _, has_effect in row if has_effect}
    found = {
        flag: other
        for key, flag, other, _ in itertools.chain(*rows)
        if key in given and key not in effective
    }
    if found:
        raise SettingsError(
            "; ".join(f"{flag} has no effect without {other}" for flag, other in found.items()),
            remedy="; ".join(f"leave out {flag}, or set {other}" for flag, other in found.items()),
        )


def _partners(s: _Settings) -> Iterator[tuple[str, str, str, bool]]:
    """Yield keys and flags, what they need beside them, and whether that is set."""
    up, rule = s.compression.up, s.aggregation.rule
    local, versions = s.local.is_on or s.model.local_parameters is not None, s.versions.every
    keeps_versions = versions not in (None, "never") or s.num_rounds is None
    is_private = s.privacy.is_on or s.privacy.budget is not None
    noise = "--privacy-epsilon or --privacy-noise-multiplier"
    steps = "--local-steps, --local-epochs, --algorithm or --local-parameters"
    masks, page = s.secure.aggregation != "off", s.server.page is not None
    yield "compression.rank", "--compress-rank", "--compress low-rank", up == "low-rank"
    chosen = "--compress top-k or --compress random-k"
    yield "compression.fraction", "--compress-fraction", chosen, up in ("top-k", "random-k")
    chosen = "--compress top-k or --compress low-rank"
    yield "compression.values", "--compress-values", chosen, up in ("top-k", "low-rank")
    yield "secure.ring_bits", "--ring-bits", "--secure-aggregation", masks
    chosen = "--aggregation trimmed-mean or --aggregation krum"
    yield "aggregation.attackers", "--attackers", chosen, rule in ("trimmed-mean", "krum")
    follows, most = s.plan.follow_noise_scale, "plan.max_effective_batch_size"
    yield most, "--max-effective-batch-size", "--follow-noise-scale", follows
    yield "local.learning_rate", "--local-learning-rate", steps, local
    yield "privacy.delta", "--privacy-delta", f"{noise}; on a device, --privacy-budget", is_private
    yield "privacy.clip", "--privacy-clip", noise, is_private
    yield "privacy.bands", "--privacy-bands", noise, is_private
    counts = s.statistics.is_on
    yield "statistics.max_examples", "--statistics-examples", "--statistics", counts
    yield "versions.kept", "--versions-kept", "--version-every", keeps_versions
    has_schedule = s.schedule.name is not None
    yield "schedule.arguments", "--schedule-argument", "--schedule", has_schedule
    yield "server.page_stays_seconds", "--page-stays", "--page", page


def why_no_branches(s: _Settings) -> str | None:
    """Return why a run cannot have aggregators, with the remedy after a colon; None if it can."""
    met = (text for text, is_met in _against_branches(s).items() if is_met)
    return next((text.replace(" | ", ": ") for text in met), None)


def _all_set(flags: dict[str, object]) -> str:
    """Return the flags that are set, ``--a, --b``; nothing if none is."""
    return ", ".join(flag for flag, is_set in flags.items() if is_set)


def _of_others(s: _Settings) -> dict[str, bool]:
    """Return what sets a thing twice or half: the target of a round, the last one, an algorithm."""
    plan, forever, one_cycle = s.plan, s.num_rounds is None, s.schedule.name == "OneCycleLR"
    # The default does not count as set: a run's own settings.toml names every setting.
    has_examples = plan.effective_batch_size != DEFAULT_EXAMPLES
    other = _all_set(
        {
            "--follow-noise-scale": plan.follow_noise_scale,
            "--effective-batch-size": has_examples,
        }
    )
    steps = s.schedule.arguments.get("total_steps")  # a wrong one is found when it is made
    num_steps = (s.num_rounds or 0) - s.schedule.warmup_rounds
    label, most = s.algorithm.label or "", MAX_ALGORITHM_CHARACTERS
    return {
        f"--tokens-per-update and {other}: each sets the target of a round | leave out "
        f"--tokens-per-update or {other}": plan.tokens_per_update is not None and bool(other),
        "--accumulation-steps sets the work of each client, so that no number of tokens can be "
        "divided among them | leave out --accumulation-steps or --tokens-per-update": (
            plan.tokens_per_update is not None and plan.accumulation_steps is not None
        ),
        "--privacy-epsilon is divided among all rounds, and --rounds forever has no number of "
        "them | set --rounds N; or --privacy-noise-multiplier, whose epsilon grows with the rounds "
        "and is shown after each": forever and s.privacy.epsilon is not None,
        "OneCycleLR has a last step, and --rounds forever has no last round | set --rounds N, or "
        "choose a --schedule without an end": forever and one_cycle,
        f"OneCycleLR takes {steps} steps, and the run has {s.num_rounds} rounds of one each | set "
        f"--schedule-argument total_steps={num_steps}": (
            one_cycle and isinstance(steps, int) and steps < num_steps
        ),
        f"a plan has room for {most:,} characters of a client algorithm's name and arguments, and "
        f"these take {len(label):,} | give fewer arguments, and let the algorithm read long ones "
        "from a file": len(label) > most,
        "worker processes compute devices for --engine in-process alone | leave out --workers or "
        "--engine": s.simulation.workers != 1 and s.simulation.engine != "in-process",
    }


def _of_noise_scale(s: _Settings) -> dict[str, bool]:
    """Return what leaves no noise scale, or no batch that could follow it."""
    plan, up, rule = s.plan, s.compression.up, s.aggregation.rule
    return {
        "--accumulation-steps sets the work of each client, so that the batch cannot follow the "
        "noise scale | leave out --accumulation-steps or --follow-noise-scale": (
            plan.accumulation_steps is not None
        ),
        f"the target starts at --effective-batch-size {plan.effective_batch_size}, which is above "
        f"--max-effective-batch-size {plan.max_effective_batch_size} | raise "
        "--max-effective-batch-size": plan.effective_batch_size > plan.max_effective_batch_size,
        "with local steps the model moves between the micro-batches, so that their norms show no "
        "noise scale | leave out --follow-noise-scale or the local steps": s.local.is_on,
        "the noise scale is estimated from exact sums, and the client algorithm "
        f"{s.algorithm.label} may send something else | leave out --follow-noise-scale or "
        "--client-algorithm": s.algorithm.name is not None,
        f"the noise scale is estimated from the sum, and --aggregation {rule} is none | leave out "
        "--aggregation or --follow-noise-scale": rule != "sum",
        f"the noise scale is estimated from the sum's norm, and --compress {up} sends few "
        "coordinates of it | leave out --follow-noise-scale, or use --compress int8": (
            s.compression.is_sparse
        ),
        f"the noise scale is estimated from the sum's norm, and --compress {up} sends a rounding "
        "of a third of it or more | leave out --follow-noise-scale, or use --compress int8": (
            up in ("int2", "int1")
        ),
    }


def _own_terms(s: _Settings) -> dict[str, object]:
    """Return the flags of local steps that take a value, and whether they are set."""
    return {
        "--proximal": s.local.proximal is not None,
        "--local-optimizer": s.local.optimizer is not None,
        "--local-optimizer-argument": s.local.arguments,
    }


def _of_no_local_steps(s: _Settings) -> dict[str, bool]:
    """Return what is for local steps, where the devices take none."""
    given = _all_set(
        {
            **_own_terms(s),
            "--step-correction": s.local.step_correction is not None,
            "--local-batch-size": s.local.batch_size is not None,
            "--local-schedule": s.local_schedule.name is not None,
        }
    )
    return {
        **_of_local_numbers(s),
        f"{given}: only for local steps, and the devices take none | leave out {given}, or set "
        "--algorithm, --local-steps or --local-epochs": bool(given),
        f"--algorithm {s.local.algorithm} is for local steps, and --local-steps 1 is none | leave "
        "out --algorithm or --local-steps": s.local.keeps_state,
    }


def _of_local_numbers(s: _Settings) -> dict[str, bool]:
    """Return what sets the number of local steps twice, or no schedule's arguments."""
    return {
        "both --local-steps and --local-epochs set the local steps of a round | leave out "
        "--local-steps or --local-epochs": (
            s.local.steps is not None and s.local.epochs is not None
        ),
        "--local-schedule-argument is for a schedule of the local learning rate, and there is none "
        "| set --local-schedule, or leave out --local-schedule-argument": (
            bool(s.local_schedule.arguments) and s.local_schedule.name is None
        ),
    }


def _of_local_steps(s: _Settings) -> dict[str, bool]:
    """Return what does not go with local steps, or with a state that devices keep."""
    plan, local, name = s.plan, s.local, s.local.algorithm
    is_masked, is_scaffold = s.secure.aggregation != "off", name == "scaffold"
    examples = _all_set(
        {
            "--effective-batch-size": plan.effective_batch_size != DEFAULT_EXAMPLES,
            "--tokens-per-update": plan.tokens_per_update is not None,
        }
    )
    without_effect = _all_set({**_own_terms(s), "--algorithm": name != "exact"})
    not_plain = _all_set(
        {
            "--local-optimizer": local.kind.lower() != "sgd",
            "--local-optimizer-argument": local.arguments,
            "--proximal": local.mu,
        }
    )
    return {
        **_of_local_numbers(s),
        "--accumulation-steps and --local-batch-size both set the examples of a local step | leave "
        "out --local-batch-size or --accumulation-steps": (
            plan.accumulation_steps is not None and local.batch_size is not None
        ),
        f"{examples}: the local steps set the examples of a round too, by their number times "
        f"--local-batch-size, or the devices' own data | leave out {examples}, and set "
        "--local-batch-size": plan.accumulation_steps is None and bool(examples),
        "--batch-scaling scales the rate by the examples of one gradient, and an update of local "
        "steps is none | leave out --batch-scaling or the local steps": (
            s.schedule.batch_scaling != "none"
        ),
        f"the client algorithm {s.algorithm.label} takes the local steps itself, and "
        f"{without_effect} would have no effect on them | leave out {without_effect} or "
        "--client-algorithm": s.algorithm.name is not None and bool(without_effect),
        f"with --algorithm {name} what a device keeps enters its updates, and devices refuse that "
        "under active masks: a server that lies can have one outweigh the rest | leave out "
        "--algorithm, or use --secure-aggregation semi-honest": (
            local.keeps_state and s.secure.aggregation == "active"
        ),
        "an epoch is as long as a device's data, whose size it does not tell under masks | leave "
        "out --secure-aggregation or --local-epochs, and set --local-steps: it wins over the "
        "epochs that --algorithm sets": is_masked and local.num_epochs is not None,
        "SCAFFOLD computes the mean gradient of a round from how far plain SGD has moved, which "
        f"{not_plain} would change | leave out {not_plain}, or take --algorithm fedprox": (
            is_scaffold and bool(not_plain)
        ),
        "SCAFFOLD adds up the devices' control variates, and --aggregation "
        f"{s.aggregation.rule} is for the model's sum alone | leave out --aggregation, or take "
        "--algorithm fedprox": is_scaffold and s.aggregation.rule != "sum",
    }


def _of_compression(s: _Settings) -> dict[str, bool]:
    """Return what a compressed update does not go with (docs/bytes.md)."""
    up, values, is_masked = s.compression.up, s.compression.values, s.secure.aggregation != "off"
    fraction = s.compression.fraction
    return {
        f"--compress {up} carries parts of an update into later rounds, and the epsilon is "
        "computed for updates that count in one round alone | leave out --compress, or the "
        "privacy; --compress-down goes with both": s.privacy.is_on,
        f"--compress {up} encodes each update by itself, and masked updates are added in a ring | "
        "use --ring-bits 16 instead of --compress; or --compress low-rank, or random-k, which send "
        "the same of all": is_masked and up not in ("random-k", "low-rank"),
        f"--compress {up} sends what earlier rounds left with an update, and devices refuse that "
        "under active masks: a server that lies can have it come from one of them alone | use "
        "--ring-bits 16, or compression.feedback = false, with which it is lost": (
            s.secure.aggregation == "active" and s.compression.feedback
        ),
        f"--compress-fraction {fraction:g}: devices mask at least {MIN_MASKED_FRACTION:g} of the "
        f"coordinates | use {MIN_MASKED_FRACTION:g} or more": (
            is_masked and up == "random-k" and fraction < MIN_MASKED_FRACTION
        ),
        "--compress low-rank has columns that all devices of a round share, and in asynchronous "
        "rounds updates of several rounds are added | leave out --asynchronous, or use --compress "
        "int4": up == "low-rank" and s.asynchronous.is_on,
        f"--compress-values is of --compress top-k and low-rank, not of {up} | leave out "
        "--compress-values": values != "bfloat16" and up not in ("top-k", "low-rank"),
        f"--compress-values {values}: under masks values are numbers of the ring | leave out "
        "--compress-values, and use --ring-bits 8": (
            values != "bfloat16" and up == "low-rank" and is_masked
        ),
        f"--aggregation {s.aggregation.rule} compares updates coordinate by coordinate, and "
        f"--compress {up} sends few of them | leave out --aggregation, or use --compress int8": (
            s.compression.is_sparse and s.aggregation.rule != "sum"
        ),
        f"--compress {up} keeps what one update leaves out, and the sum of several windows is sent "
        "whole | leave out --compress, or --offline-windows": (
            s.asynchronous.is_on and s.asynchronous.offline_windows > 1
        ),
    }


def _of_masks(s: _Settings) -> dict[str, bool]:
    """Return what needs a client's own numbers, which masks hide; or a larger ring."""
    secure, k, size = s.secure, s.plan.accumulation_steps, s.cohort.size
    quota = None if k is None else s.plan.set_quota * s.local.num_steps
    most = 127 >> secure.member_bits  # members of an 8-bit ring
    return {
        f"--aggregation {s.aggregation.rule} compares single updates, which secure aggregation "
        "hides | leave out --aggregation or --secure-aggregation": s.aggregation.rule != "sum",
        f"K x micro-batch is {quota} examples, a masked plan has at least {secure.min_quota} | "
        "raise --accumulation-steps or --micro-batch-size, or lower --min-quota on the server and "
        "on every device": quota is not None and quota < secure.min_quota,
        "each device would report its own held-out loss, which secure aggregation should hide | "
        "leave out --evaluate-on-devices: the server tests on examples of its own, and "
        "`headwater-server evaluate --on-devices` tests under masks after the run": (
            s.evaluation.on_devices
        ),
        "with --local-parameters what a device keeps enters its updates, and devices refuse that "
        "under active masks: a server that lies can have one outweigh the rest | use "
        "--secure-aggregation semi-honest, or leave out --local-parameters": (
            secure.aggregation == "active" and s.model.local_parameters is not None
        ),
        f"a device accepts no session in which a member has fewer than 2^{secure.member_bits} "
        f"steps, and 8 bits have 127 for all members: enough for {most} | set --cohort-size to "
        f"{most} or less, or use --ring-bits 16; a lower secure.member_bits must be set on the "
        "server and on every device": secure.ring_bits == 8 and (size is None or size > most),
        "the planner would give slow devices a small part of the 127 steps of an 8-bit ring | set "
        "--accumulation-steps, so that all devices weigh alike, or use --ring-bits 16": (
            secure.ring_bits == 8 and k is None
        ),
        "worker processes compute no masked updates, which are exchanged as messages | leave out "
        "--workers or --secure-aggregation": s.simulation.workers != 1,
        "the engine ray computes what devices send in clear, and masked rounds are made of "
        "messages | take --engine flower-ray, which sends them, or leave --engine out": (
            s.simulation.engine == "ray"
        ),
    }


def _of_synchronous(s: _Settings) -> dict[str, bool]:
    """Return what is for asynchronous rounds, where rounds are synchronous."""
    given = _all_set(
        {
            "--buffer": s.asynchronous.buffer is not None,
            "--max-staleness": s.asynchronous.max_staleness != DEFAULT_ASYNCHRONOUS.max_staleness,
            "--staleness-exponent": s.asynchronous.exponent != DEFAULT_ASYNCHRONOUS.exponent,
        }
    )
    return {
        f"{given}: only for asynchronous rounds, and rounds are synchronous | leave out {given}, "
        "or add --asynchronous": bool(given)
    }


def _of_asynchronous(s: _Settings) -> dict[str, bool]:
    """Return what needs a round's updates to be of one model (docs/asynchronous.md)."""
    buffer, members, engine = s.asynchronous.buffer, s.secure.min_members, s.simulation.engine
    size = math.inf if buffer is None else buffer
    has_windows, is_masked = s.asynchronous.offline_windows > 1, s.secure.aggregation != "off"
    return {
        "in asynchronous rounds an update's part of the sum follows from its staleness, so that "
        "the noise of a sum has no fixed bound to cover | leave out --privacy-epsilon, or "
        "--asynchronous": s.privacy.is_on,
        "in asynchronous rounds the noise scale compares gradients of one model | leave out "
        "--follow-noise-scale, or --asynchronous": s.plan.follow_noise_scale,
        "in asynchronous rounds devices hold models of several versions, and differences are to "
        "the last one | leave out --compress-down, or --asynchronous": s.compression.down != "off",
        "in asynchronous rounds a robust rule compares updates of one model | leave out "
        "--aggregation, or --asynchronous": s.aggregation.rule != "sum",
        "in asynchronous rounds a device would have to interrupt its plan to test the model | "
        "leave out --evaluate-on-devices: the server tests on examples of its own": (
            s.evaluation.on_devices
        ),
        f"in asynchronous rounds --engine {engine} has no virtual clock that orders the answers | "
        "leave out --engine": engine != "in-process",
        f"a step has {buffer} updates (--buffer), and needs {s.cohort.min_clients} (--min-clients) "
        "| raise --buffer, or lower --min-clients": size < s.cohort.min_clients,
        f"--cohort-size {s.cohort.size} is the number of clients at work at a time, and a buffer "
        f"of {buffer} would never be full | lower --buffer, or raise --cohort-size": (
            s.cohort.size is not None and buffer is not None and buffer > s.cohort.size
        ),
        f"a step has {buffer} updates (--buffer), and a secure session needs {members} "
        f"(secure.min_members) | raise --buffer to {members} or more": (
            is_masked and size < members
        ),
        "a device masks one window of a plan, and --offline-windows sums several | leave out "
        "--offline-windows, or --secure-aggregation": has_windows and is_masked,
        "--weighting dataset gives each update the weight of its client's data, however many "
        "windows it has | leave out --weighting, or --offline-windows": (
            has_windows and s.cohort.weighting == "dataset"
        ),
    }


def _of_overlap(s: _Settings) -> dict[str, bool]:
    """Return what is right for one pending round of a device, and would be wrong for two."""
    return {
        "with --overlap the second of two plans is a late one by design, and rounds are "
        "synchronous | leave out --overlap, or add --asynchronous": not s.asynchronous.is_on,
        "with --overlap a masked update waits on its device for a session | leave out --overlap, "
        "or --secure-aggregation": s.secure.aggregation != "off",
        "with --overlap a device without a link goes on with one plan | leave out --overlap, or "
        "--offline-windows": s.asynchronous.offline_windows > 1,
        "with --overlap all connected devices have two plans | leave out --overlap, or "
        "--cohort-size": s.cohort.size is not None,
        "with --overlap what a device keeps is pending for one round | leave out --overlap, or "
        "--local-parameters": s.model.local_parameters is not None,
        "with --overlap what a device keeps of a round enters the next one | leave out --overlap, "
        f"or --algorithm {s.local.algorithm}": s.local.keeps_state,
    }


def _against_branches(s: _Settings) -> dict[str, bool]:
    """Return what needs single updates, where an aggregator sends the sum of its branch."""
    return {
        "masks cancel within a branch, whose aggregator would see the sum of its devices | leave "
        "out --secure-aggregation": s.secure.aggregation != "off",
        "a rule needs single updates, and an aggregator sends a sum | leave out --aggregation": (
            s.aggregation.rule != "sum"
        ),
        "asynchronous steps take single updates | leave out --asynchronous": s.asynchronous.is_on,
    }


def _of_tree(s: _Settings) -> dict[str, bool]:
    """Return what simulated aggregators do not go with."""
    rows = _against_branches(s) | {
        "they are simulated in one process | leave out --engine": (
            s.simulation.engine != "in-process"
        ),
        "devices that are computed together are added before any aggregator | leave out "
        "--compute": s.simulation.compute not in ("auto", "one-by-one"),
        "there are fewer devices than that | lower --aggregators": (
            s.simulation.aggregators > s.simulation.clients
        ),
    }
    begin = f"with --aggregators {s.simulation.aggregators} "
    return {begin + text: is_met for text, is_met in rows.items()}


def _of_no_privacy(s: _Settings) -> dict[str, bool]:
    return {
        "--privacy-unit example says what an epsilon is for, and none is set | leave out "
        "--privacy-unit, or add --privacy-epsilon; on a device, --privacy-budget": (
            s.privacy.unit == "example" and s.privacy.budget is None
        )
    }


def _of_privacy(s: _Settings) -> dict[str, bool]:
    """Return what reveals more than the sums with noise (docs/privacy.md)."""
    privacy, is_masked = s.privacy, s.secure.aggregation != "off"
    by_example, has_bands = privacy.unit == "example", privacy.bands > 1
    criteria = [one for one in (s.evaluation.best, s.evaluation.stop_when) if one is not None]
    rows = {
        "the noise follows from --privacy-epsilon, and --privacy-noise-multiplier sets another | "
        "leave out --privacy-epsilon or --privacy-noise-multiplier": (
            privacy.epsilon is not None and privacy.noise_multiplier is not None
        ),
        "devices would have to take back noise that they added in earlier rounds, and they come "
        "and go; under masks noise is independent | leave out --privacy-bands": (
            has_bands and is_masked
        ),
        "every device would be in each round, where noise is independent (--privacy-bands 1) | set "
        "--cohort-size": has_bands and s.cohort.size is None,
        "the noise of rounds with unlike clip norms cannot be correlated | leave out "
        "--privacy-clip-quantile": has_bands and privacy.clip_quantile is not None,
        "for each example, correlated noise is not offered | leave out --privacy-bands": (
            has_bands and by_example
        ),
        "the planner would choose quotas by what devices report of their data and speed | set "
        "--accumulation-steps": s.plan.accumulation_steps is None,
        "the batch would follow the devices' gradients | leave out --follow-noise-scale": (
            s.plan.follow_noise_scale
        ),
        "updates would be weighed by the devices' numbers of examples | leave out --weighting "
        "dataset": s.cohort.weighting == "dataset",
        "each device would report its own held-out loss | leave out --evaluate-on-devices": (
            s.evaluation.on_devices
        ),
        "the training's own loss and metrics are not released | name a metric of the test": any(
            split_criterion(criterion)[1].startswith("train_") for criterion in criteria
        ),
        "a rule that picks among updates would make one change what others add | leave out "
        "--aggregation": s.aggregation.rule != "sum",
        "16 or 8 bits leave no room for the noise | leave out --ring-bits": (
            is_masked and s.secure.ring_bits != 32
        ),
        "for each example, devices would tell the quantile of another norm | leave out "
        "--privacy-clip-quantile": by_example and privacy.clip_quantile is not None,
        f"what devices keep with --algorithm {s.local.algorithm} would carry a round's examples "
        "into later ones | take --algorithm fedavg": s.local.keeps_state,
        "for each example, local steps would carry one example into the gradients of others | "
        "leave out --local-steps, --local-epochs and --algorithm": by_example and s.local.is_on,
        "an epoch would be as long as a device's data | leave out --local-epochs, and set "
        "--local-steps": s.local.num_epochs is not None,
        "for each example, a client algorithm would get sums without a bound for each example | "
        "leave out --client-algorithm": by_example and s.algorithm.label is not None,
        "for each example, parameters that stay on a device would carry one example into the "
        "gradients of others | leave out --local-parameters": (
            by_example and s.model.local_parameters is not None
        ),
    }
    return {"with differential privacy " + text: is_met for text, is_met in rows.items()}
