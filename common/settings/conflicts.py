"""Refuses settings that cannot work together, as soon as they are read.

Each conflict names two settings and the one to leave out. A run with such settings never begins:
neither the task nor the data has been opened.
"""

from __future__ import annotations

from collections.abc import Iterator

from headwater.common.errors import SettingsError
from headwater.common.settings.fields import split_criterion
from headwater.common.settings.rounds import (
    MIN_MASKED_FRACTION,
    AggregationSettings,
    AsynchronousSettings,
    CohortSettings,
    CompressionSettings,
    PrivacySettings,
    SecureSettings,
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
)

DEFAULT_EXAMPLES = PlanSettings().effective_batch_size
DEFAULT_ASYNCHRONOUS = AsynchronousSettings()


def check_together(
    *,
    plan: PlanSettings,
    local: LocalSettings,
    local_schedule: LocalScheduleSettings,
    schedule: ScheduleSettings,
    algorithm: AlgorithmSettings,
    cohort: CohortSettings,
    aggregation: AggregationSettings,
    compression: CompressionSettings,
    asynchronous: AsynchronousSettings,
    secure: SecureSettings,
    privacy: PrivacySettings,
    model: ModelSettings,
    evaluation: EvaluationSettings,
    simulation: SimulationSettings,
) -> None:
    """Check the settings that depend on each other.

    Raises:
        SettingsError: two of them exclude each other.
    """
    found: list[SettingsError] = []
    if privacy.is_on:
        found += _of_privacy(
            privacy, plan, local, algorithm, model, cohort, aggregation, secure, evaluation
        )
    elif privacy.unit == "example" and privacy.budget is None:
        found.append(
            SettingsError(
                "--privacy-unit example says what an epsilon is for, and none is set",
                remedy="leave out --privacy-unit, or add --privacy-epsilon; on a device, "
                "--privacy-budget",
            )
        )
    if secure.aggregation != "off":
        found += _of_masks(secure, plan, local, aggregation, evaluation, simulation)
        found += _of_small_ring(secure, plan, cohort)
    if secure.aggregation == "active" and model.local_parameters is not None:
        found.append(
            SettingsError(
                "with --local-parameters what a device keeps enters its updates, and devices "
                "refuse that under active masks: a server that lies can have one outweigh the rest",
                remedy="use --secure-aggregation semi-honest, or leave out --local-parameters",
            )
        )
    if compression.up != "off":
        found += _of_compression(compression, plan, aggregation, secure, privacy, asynchronous)
    found += _of_asynchronous(
        *(asynchronous, plan, cohort, aggregation, compression, secure, privacy),
        *(evaluation, simulation),
    )
    if asynchronous.overlap:
        found += _of_overlap(asynchronous, cohort, local, model, secure)
    found += _of_workers(simulation, secure)
    if simulation.aggregators > 1:
        found += _of_tree(simulation, secure, aggregation, asynchronous)
    found += [
        *_of_algorithm(algorithm, plan),
        *_of_rule(aggregation, plan, local),
        *_of_target(plan),
    ]
    found += _of_local(local, plan, schedule, algorithm, secure)
    found += _of_local_schedule(local_schedule, local)
    if found:
        raise _all_of(found)


def _all_of(found: list[SettingsError]) -> SettingsError:
    """Return one error with all conflicts and their remedies, so that one more run is enough."""
    if len(found) == 1:
        return found[0]
    return SettingsError(
        "; ".join(error.message for error in found),
        remedy="; ".join(dict.fromkeys(error.remedy for error in found)),
    )


def check_endless(schedule: ScheduleSettings, privacy: PrivacySettings) -> None:
    """Check the settings of a run of ``--rounds forever``: none of them may need a last round.

    Raises:
        SettingsError: one of them does.
    """
    if privacy.epsilon is not None:
        raise SettingsError(
            "--privacy-epsilon is divided among all rounds, and --rounds forever has no number of "
            "them",
            remedy="set --rounds N; or --privacy-noise-multiplier, whose epsilon grows with the "
            "rounds and is shown after each",
        )
    if schedule.name == "OneCycleLR":
        raise SettingsError(
            "OneCycleLR has a last step, and --rounds forever has no last round",
            remedy="set --rounds N, or choose a --schedule without an end",
        )


def check_end(schedule: ScheduleSettings, num_rounds: int) -> None:
    """Check that a schedule with a last step, OneCycleLR, lasts for all rounds.

    Raises:
        SettingsError: it does not.
    """
    total = schedule.arguments.get("total_steps")
    if schedule.name != "OneCycleLR" or not isinstance(total, int):
        return  # it is tried out when the server makes it
    if total + schedule.warmup_rounds < num_rounds:
        raise SettingsError(
            f"OneCycleLR takes {total} steps, and the run has {num_rounds} rounds of one each",
            remedy=f"set --schedule-argument total_steps={num_rounds - schedule.warmup_rounds}",
        )


def _of_target(plan: PlanSettings) -> Iterator[SettingsError]:
    """Yield what is wrong with the target of a round: there is one, and K leaves none.

    The number of examples counts as set if it is not the default, because a run's own settings.toml
    names every setting.
    """
    is_k_set = plan.accumulation_steps is not None
    has_examples = plan.effective_batch_size != DEFAULT_EXAMPLES
    if plan.tokens_per_update is not None:
        if plan.follow_noise_scale or has_examples:
            other = "--follow-noise-scale" if plan.follow_noise_scale else "--effective-batch-size"
            yield SettingsError(
                f"both --tokens-per-update and {other} set the target of a round",
                remedy=f"leave out --tokens-per-update or {other}",
            )
        if is_k_set:
            yield SettingsError(
                "--accumulation-steps sets the work of each client, so that no number of tokens "
                "can be divided among them",
                remedy="leave out --accumulation-steps or --tokens-per-update",
            )
    if not plan.follow_noise_scale:
        return
    if is_k_set:
        yield SettingsError(
            "--accumulation-steps sets the work of each client, so that the batch cannot follow "
            "the noise scale",
            remedy="leave out --accumulation-steps or --follow-noise-scale",
        )
    if plan.effective_batch_size > plan.max_effective_batch_size:
        yield SettingsError(
            f"the target starts at --effective-batch-size {plan.effective_batch_size}, "
            f"which is above --max-effective-batch-size {plan.max_effective_batch_size}",
            remedy="raise --max-effective-batch-size",
        )


def _of_local(
    local: LocalSettings,
    plan: PlanSettings,
    schedule: ScheduleSettings,
    algorithm: AlgorithmSettings,
    secure: SecureSettings,
) -> Iterator[SettingsError]:
    """Yield what does not go with local steps, or with the way in which their number is set."""
    own = {
        "--proximal": local.proximal,
        "--step-correction": local.step_correction,
        "--local-optimizer": local.optimizer,
        "--local-optimizer-argument": local.arguments or None,
    }
    given = [flag for flag, value in own.items() if value is not None]
    if local.steps is not None and local.epochs is not None:
        yield SettingsError(
            "both --local-steps and --local-epochs set the local steps of a round",
            remedy="leave out --local-steps or --local-epochs",
        )
    if not local.is_on:
        given += [] if local.batch_size is None else ["--local-batch-size"]
        if given:
            yield SettingsError(
                f"{given[0]} is for local steps, and the devices take none",
                remedy=f"leave out {given[0]}, or set --algorithm, --local-steps or --local-epochs",
            )
        if local.keeps_state:
            yield SettingsError(
                f"--algorithm {local.algorithm} is for local steps, and --local-steps 1 is none",
                remedy="leave out --algorithm or --local-steps",
            )
        return
    yield from _of_local_examples(local, plan)
    if plan.follow_noise_scale:
        yield SettingsError(
            "with local steps the model moves between the micro-batches, so that their norms show "
            "no noise scale",
            remedy="leave out --follow-noise-scale or the local steps",
        )
    if schedule.batch_scaling != "none":
        yield SettingsError(
            "--batch-scaling scales the rate by the examples of one gradient, and an update of "
            "local steps is none",
            remedy="leave out --batch-scaling or the local steps",
        )
    given = [flag for flag in given if flag != "--step-correction"]  # it corrects their number
    if algorithm.name is not None and (given or local.algorithm != "exact"):
        first = given[0] if given else "--algorithm"
        yield SettingsError(
            f"the client algorithm {algorithm.label} takes the local steps itself, and {first} "
            "would have no effect on them",
            remedy=f"leave out {first} or --client-algorithm",
        )
    yield from _of_state(local, secure)
    if secure.aggregation != "off" and local.num_epochs is not None:
        yield SettingsError(
            "an epoch is as long as a device's data, whose size it does not tell under masks",
            remedy="leave out --secure-aggregation or --local-epochs, and set --local-steps: it "
            "wins over the epochs that --algorithm sets",
        )


def _of_local_schedule(
    schedule: LocalScheduleSettings, local: LocalSettings
) -> Iterator[SettingsError]:
    """Yield a schedule of local steps that are none, and arguments of no schedule."""
    if schedule.name is not None and not local.is_on:
        yield SettingsError(
            "--local-schedule is for local steps, and the devices take none",
            remedy="leave out --local-schedule, or set --algorithm, --local-steps or "
            "--local-epochs",
        )
    if schedule.arguments and schedule.name is None:
        yield SettingsError(
            "--local-schedule-argument is for a schedule of the local learning rate, and there is "
            "none",
            remedy="set --local-schedule, or leave out --local-schedule-argument",
        )


def _of_state(local: LocalSettings, secure: SecureSettings) -> Iterator[SettingsError]:
    """Yield what does not go with a state that devices keep between rounds."""
    name, is_scaffold = local.algorithm, local.algorithm == "scaffold"
    if local.keeps_state and secure.aggregation == "active":
        yield SettingsError(
            f"with --algorithm {name} what a device keeps enters its updates, and devices refuse "
            "that under active masks: a server that lies can have one outweigh the rest",
            remedy="leave out --algorithm, or use --secure-aggregation semi-honest",
        )
    plain = {
        "--local-optimizer": local.kind.lower() != "sgd",
        "--local-optimizer-argument": bool(local.arguments),
        "--proximal": bool(local.mu),
    }
    for flag in (flag for flag, is_set in plain.items() if is_scaffold and is_set):
        yield SettingsError(
            "SCAFFOLD computes the mean gradient of a round from how far plain SGD has moved, and "
            f"{flag} moves otherwise",
            remedy=f"leave out {flag}, or take --algorithm fedprox",
        )


def _of_local_examples(local: LocalSettings, plan: PlanSettings) -> Iterator[SettingsError]:
    """Yield what sets the examples of local steps a second time."""
    if plan.accumulation_steps is not None and local.batch_size is not None:
        yield SettingsError(
            "--accumulation-steps and --local-batch-size both set the examples of a local step",
            remedy="leave out --local-batch-size or --accumulation-steps",
        )
    targets = {
        "--effective-batch-size": plan.effective_batch_size != DEFAULT_EXAMPLES,
        "--tokens-per-update": plan.tokens_per_update is not None,
    }
    for flag, is_set in targets.items():
        if is_set and plan.accumulation_steps is None:
            yield SettingsError(
                f"{flag} sets the examples of a round, and so do the local steps: their number "
                "times --local-batch-size, or the devices' own data",
                remedy=f"leave out {flag}, and set --local-batch-size",
            )


def _of_algorithm(algorithm: AlgorithmSettings, plan: PlanSettings) -> Iterator[SettingsError]:
    """Yield what needs exact sums where clients send what their algorithm makes of them."""
    label = algorithm.label or ""
    if len(label) > MAX_ALGORITHM_CHARACTERS:
        yield SettingsError(
            f"a plan has room for {MAX_ALGORITHM_CHARACTERS:,} characters of a client algorithm's "
            f"name and arguments, and these take {len(label):,}",
            remedy="give fewer arguments, and let the algorithm read long ones from a file",
        )
    if algorithm.name is not None and plan.follow_noise_scale:
        yield SettingsError(
            f"the noise scale is estimated from exact sums, and the client algorithm {label} may "
            "send something else",
            remedy="leave out --follow-noise-scale or --client-algorithm",
        )


def _of_rule(
    aggregation: AggregationSettings, plan: PlanSettings, local: LocalSettings
) -> Iterator[SettingsError]:
    """Yield what needs the sum where a robust rule replaces it."""
    if aggregation.rule != "sum" and local.algorithm == "scaffold":
        yield SettingsError(
            "SCAFFOLD adds up the devices' control variates, and --aggregation "
            f"{aggregation.rule} is for the model's sum alone",
            remedy="leave out --aggregation, or take --algorithm fedprox",
        )
    if aggregation.rule != "sum" and plan.follow_noise_scale:
        yield SettingsError(
            f"the noise scale is estimated from the sum, and --aggregation {aggregation.rule} is "
            "none",
            remedy="leave out --aggregation or --follow-noise-scale",
        )


def _of_compression(
    compression: CompressionSettings,
    plan: PlanSettings,
    aggregation: AggregationSettings,
    secure: SecureSettings,
    privacy: PrivacySettings,
    asynchronous: AsynchronousSettings,
) -> Iterator[SettingsError]:
    """Yield what a compressed update does not go with (docs/bytes.md)."""
    up = compression.up
    if privacy.is_on:
        yield SettingsError(
            f"--compress {up} carries parts of an update into later rounds, and the epsilon is "
            "computed for updates that count in one round alone",
            remedy="leave out --compress, or the privacy; --compress-down goes with both",
        )
    if secure.aggregation != "off" and up not in ("random-k", "low-rank"):
        yield SettingsError(
            f"--compress {up} encodes each update by itself, and masked updates are added in a "
            "ring",
            remedy="use --ring-bits 16 instead of --compress; or --compress low-rank, or random-k, "
            "which send the same of all",
        )
    if secure.aggregation == "active" and compression.feedback:
        yield SettingsError(
            f"--compress {up} sends what earlier rounds left with an update, and devices refuse "
            "that under active masks: a server that lies can have it come from one of them alone",
            remedy="use --ring-bits 16, or compression.feedback = false, with which it is lost",
        )
    is_few = up == "random-k" and compression.fraction < MIN_MASKED_FRACTION
    if secure.aggregation != "off" and is_few:
        yield SettingsError(
            f"--compress-fraction {compression.fraction:g}: devices mask at least "
            f"{MIN_MASKED_FRACTION:g} of the coordinates",
            remedy=f"use {MIN_MASKED_FRACTION:g} or more",
        )
    if up == "low-rank" and asynchronous.is_on:
        yield SettingsError(
            "--compress low-rank has columns that all devices of a round share, and in "
            "asynchronous rounds updates of several rounds are added",
            remedy="leave out --asynchronous, or use --compress int4",
        )
    if compression.values != "bfloat16" and up not in ("top-k", "low-rank"):
        yield SettingsError(
            f"--compress-values is of --compress top-k and low-rank, not of {up}",
            remedy="leave out --compress-values",
        )
    if compression.values != "bfloat16" and secure.aggregation != "off" and up == "low-rank":
        yield SettingsError(
            f"--compress-values {compression.values}: under masks values are numbers of the ring",
            remedy="leave out --compress-values, and use --ring-bits 8",
        )
    is_sparse = up in ("top-k", "random-k", "low-rank")
    if is_sparse and aggregation.rule != "sum":
        yield SettingsError(
            f"--aggregation {aggregation.rule} compares updates coordinate by coordinate, and "
            f"--compress {up} sends few of them",
            remedy="leave out --aggregation, or use --compress int8",
        )
    if plan.follow_noise_scale and (is_sparse or up in ("int2", "int1")):
        sends = "few coordinates of it" if is_sparse else "a rounding of a third of it or more"
        yield SettingsError(
            f"the noise scale is estimated from the sum's norm, and --compress {up} sends {sends}",
            remedy="leave out --follow-noise-scale, or use --compress int8",
        )


def _of_masks(
    secure: SecureSettings,
    plan: PlanSettings,
    local: LocalSettings,
    aggregation: AggregationSettings,
    evaluation: EvaluationSettings,
    simulation: SimulationSettings,
) -> Iterator[SettingsError]:
    """Yield what needs a client's own numbers, which the masks should hide."""
    if aggregation.rule != "sum":
        yield SettingsError(
            f"--aggregation {aggregation.rule} compares single updates, which secure aggregation "
            "hides",
            remedy="leave out --aggregation or --secure-aggregation",
        )
    if plan.accumulation_steps is not None:
        quota = plan.set_quota * local.num_steps
        if quota < secure.min_quota:
            yield SettingsError(
                f"K x micro-batch is {quota} examples, a masked plan has at least "
                f"{secure.min_quota}",
                remedy="raise --accumulation-steps or --micro-batch-size, or lower --min-quota on "
                "the server and on every device",
            )
    if evaluation.on_devices:
        yield SettingsError(
            "each device would report its own held-out loss, which secure aggregation should hide",
            remedy="leave out --evaluate-on-devices: the server tests on examples of its own, and "
            "`headwater-server evaluate --on-devices` tests under masks after the run",
        )
    if simulation.workers != 1:
        yield SettingsError(
            "worker processes compute no masked updates, which are exchanged as messages",
            remedy="leave out --workers or --secure-aggregation",
        )


def _of_asynchronous(
    asynchronous: AsynchronousSettings,
    plan: PlanSettings,
    cohort: CohortSettings,
    aggregation: AggregationSettings,
    compression: CompressionSettings,
    secure: SecureSettings,
    privacy: PrivacySettings,
    evaluation: EvaluationSettings,
    simulation: SimulationSettings,
) -> Iterator[SettingsError]:
    """Yield what needs a round's updates to be of one model (docs/asynchronous.md)."""
    size = asynchronous.buffer
    if not asynchronous.is_on:
        given = {
            "--buffer": size is not None,
            "--max-staleness": asynchronous.max_staleness != DEFAULT_ASYNCHRONOUS.max_staleness,
            "--staleness-exponent": asynchronous.exponent != DEFAULT_ASYNCHRONOUS.exponent,
        }
        for flag in [flag for flag, is_set in given.items() if is_set]:
            yield SettingsError(
                f"{flag} is for asynchronous rounds, and rounds are synchronous",
                remedy=f"leave out {flag}, or add --asynchronous",
            )
        return
    if size is not None:
        yield from _of_buffer(size, cohort, secure)
    if asynchronous.offline_windows > 1:
        yield from _of_offline_windows(cohort, compression, secure)
    refused = {
        "an update's part of the sum follows from its staleness, so that the noise of a sum has no "
        "fixed bound to cover: leave out --privacy-epsilon, or --asynchronous": privacy.is_on,
        "the noise scale compares gradients of one model: leave out --follow-noise-scale, or "
        "--asynchronous": plan.follow_noise_scale,
        "devices hold models of several versions, and differences are to the last one: leave out "
        "--compress-down, or --asynchronous": compression.down != "off",
        "a robust rule compares updates of one model: leave out --aggregation, or "
        "--asynchronous": aggregation.rule != "sum",
        "a device would have to interrupt its plan to test the model: leave out "
        "--evaluate-on-devices: the server tests on examples of its own": evaluation.on_devices,
        f"--engine {simulation.engine} has no virtual clock that orders the answers: leave out "
        "--engine": simulation.engine != "in-process",
    }
    for text, is_refused in refused.items():
        if is_refused:
            what, _, remedy = text.partition(": ")
            yield SettingsError(f"in asynchronous rounds {what}", remedy=remedy)


def _of_buffer(
    size: int, cohort: CohortSettings, secure: SecureSettings
) -> Iterator[SettingsError]:
    """Yield what makes a buffer of this size too small, or never full."""
    if size < cohort.min_clients:
        yield SettingsError(
            f"a step has {size} updates (--buffer), and needs {cohort.min_clients} (--min-clients)",
            remedy="raise --buffer, or lower --min-clients",
        )
    if cohort.size is not None and size > cohort.size:
        yield SettingsError(
            f"--cohort-size {cohort.size} is the number of clients at work at a time, and a buffer "
            f"of {size} would never be full",
            remedy="lower --buffer, or raise --cohort-size",
        )
    if secure.aggregation != "off" and size < secure.min_members:
        yield SettingsError(
            f"a step has {size} updates (--buffer), and a secure session needs "
            f"{secure.min_members} (secure.min_members)",
            remedy=f"raise --buffer to {secure.min_members} or more",
        )


def _of_offline_windows(
    cohort: CohortSettings, compression: CompressionSettings, secure: SecureSettings
) -> Iterator[SettingsError]:
    """Yield what does not go with updates that sum several windows."""
    if secure.aggregation != "off":
        yield SettingsError(
            "a device masks one window of a plan, and --offline-windows sums several",
            remedy="leave out --offline-windows, or --secure-aggregation",
        )
    if cohort.weighting == "dataset":
        yield SettingsError(
            "--weighting dataset gives each update the weight of its client's data, however many "
            "windows it has",
            remedy="leave out --weighting, or --offline-windows",
        )
    if compression.up != "off":
        yield SettingsError(
            f"--compress {compression.up} keeps what one update leaves out, and the sum of several "
            "windows is sent whole",
            remedy="leave out --compress, or --offline-windows",
        )


def _of_overlap(
    asynchronous: AsynchronousSettings,
    cohort: CohortSettings,
    local: LocalSettings,
    model: ModelSettings,
    secure: SecureSettings,
) -> Iterator[SettingsError]:
    """Yield what is right for one pending round of a device, and would be wrong for two."""
    refused = {
        "the second of two plans is a late one by design, and rounds are synchronous: leave out "
        "--overlap, or add --asynchronous": not asynchronous.is_on,
        "a masked update waits on its device for a session: leave out --overlap, or "
        "--secure-aggregation": secure.aggregation != "off",
        "a device without a link goes on with one plan: leave out --overlap, or "
        "--offline-windows": asynchronous.offline_windows > 1,
        "all connected devices have two plans: leave out --overlap, or --cohort-size": cohort.size
        is not None,
        "what a device keeps is pending for one round: leave out --overlap, or "
        "--local-parameters": model.local_parameters is not None,
        "what a device keeps of a round enters the next one: leave out --overlap, or "
        f"--algorithm {local.algorithm}": local.keeps_state,
    }
    for text, is_refused in refused.items():
        if is_refused:
            what, _, remedy = text.partition(": ")
            yield SettingsError(f"with --overlap {what}", remedy=remedy)


def why_no_branches(
    secure: SecureSettings,
    aggregation: AggregationSettings,
    asynchronous: AsynchronousSettings,
) -> str | None:
    """Return why a run cannot have aggregators, with the remedy after a colon; None if it can."""
    refused = _against_branches(secure, aggregation, asynchronous)
    return next((text for text, is_refused in refused.items() if is_refused), None)


def _against_branches(
    secure: SecureSettings,
    aggregation: AggregationSettings,
    asynchronous: AsynchronousSettings,
) -> dict[str, bool]:
    """Return what speaks against aggregators, and whether it is set."""
    return {
        "masks cancel within a branch, whose aggregator would see the sum of its devices: leave "
        "out --secure-aggregation": secure.aggregation != "off",
        "a rule needs single updates, and an aggregator sends a sum: leave out --aggregation": (
            aggregation.rule != "sum"
        ),
        "asynchronous steps take single updates: leave out --asynchronous": asynchronous.is_on,
    }


def _of_tree(
    simulation: SimulationSettings,
    secure: SecureSettings,
    aggregation: AggregationSettings,
    asynchronous: AsynchronousSettings,
) -> Iterator[SettingsError]:
    """Yield what needs single updates, or other sums than those of aggregators."""
    refused = _against_branches(secure, aggregation, asynchronous) | {
        "they are simulated in one process: leave out --engine": simulation.engine != "in-process",
        "devices that are computed together are added before any aggregator: leave out --compute": (
            simulation.compute not in ("auto", "one-by-one")
        ),
        "there are fewer devices than that: lower --aggregators": (
            simulation.aggregators > simulation.clients
        ),
    }
    for text, is_refused in refused.items():
        if is_refused:
            what, _, remedy = text.rpartition(": ")
            yield SettingsError(
                f"with --aggregators {simulation.aggregators} {what}", remedy=remedy
            )


def _of_small_ring(
    secure: SecureSettings, plan: PlanSettings, cohort: CohortSettings
) -> Iterator[SettingsError]:
    """Yield what leaves a member of a session too few of the 127 steps of an 8-bit ring."""
    if secure.ring_bits != 8:
        return
    most = 127 >> secure.member_bits
    if cohort.size is None or cohort.size > most:
        yield SettingsError(
            f"a device accepts no session in which a member has fewer than 2^{secure.member_bits} "
            f"steps, and 8 bits have 127 for all members: enough for {most}",
            remedy=f"set --cohort-size to {most} or less, or use --ring-bits 16; a lower "
            "secure.member_bits must be set on the server and on every device",
        )
    if plan.accumulation_steps is None:
        yield SettingsError(
            "the planner would give slow devices a small part of the 127 steps of an 8-bit ring",
            remedy="set --accumulation-steps, so that all devices weigh alike, or use "
            "--ring-bits 16",
        )


def _of_workers(simulation: SimulationSettings, secure: SecureSettings) -> Iterator[SettingsError]:
    if simulation.engine == "ray" and secure.aggregation != "off":
        yield SettingsError(
            "the engine ray computes what devices send in clear, and masked rounds are made of "
            "messages",
            remedy="take --engine flower-ray, which sends them, or leave --engine out",
        )
    if simulation.workers != 1 and simulation.engine != "in-process":
        yield SettingsError(
            "worker processes compute devices for --engine in-process alone",
            remedy="leave out --workers or --engine",
        )


def _of_privacy(
    privacy: PrivacySettings,
    plan: PlanSettings,
    local: LocalSettings,
    algorithm: AlgorithmSettings,
    model: ModelSettings,
    cohort: CohortSettings,
    aggregation: AggregationSettings,
    secure: SecureSettings,
    evaluation: EvaluationSettings,
) -> Iterator[SettingsError]:
    """Yield what reveals more than the sums with noise (docs/privacy.md)."""
    if privacy.epsilon is not None and privacy.noise_multiplier is not None:
        yield SettingsError(
            "the noise follows from --privacy-epsilon, and --privacy-noise-multiplier sets another",
            remedy="leave out --privacy-epsilon or --privacy-noise-multiplier",
        )
    is_by_example, has_bands = privacy.unit == "example", privacy.bands > 1
    refused = {
        "devices would have to take back noise that they added in earlier rounds, and they come "
        "and go; under masks noise is independent: leave out --privacy-bands": (
            has_bands and secure.aggregation != "off"
        ),
        "every device would be in each round, where noise is independent (--privacy-bands 1): set "
        "--cohort-size": has_bands and cohort.size is None,
        "the noise of rounds with unlike clip norms cannot be correlated: leave out "
        "--privacy-clip-quantile": has_bands and privacy.clip_quantile is not None,
        "for each example, correlated noise is not offered: leave out --privacy-bands": (
            has_bands and is_by_example
        ),
        "the planner would choose quotas by what devices report of their data and speed: set "
        "--accumulation-steps": plan.accumulation_steps is None,
        "the batch would follow the devices' gradients: leave out --follow-noise-scale": (
            plan.follow_noise_scale
        ),
        "updates would be weighed by the devices' numbers of examples: leave out --weighting "
        "dataset": cohort.weighting == "dataset",
        "each device would report its own held-out loss: leave out --evaluate-on-devices": (
            evaluation.on_devices
        ),
        "the training's own loss and metrics are not released: name a metric of the test": any(
            criterion is not None and split_criterion(criterion)[1].startswith("train_")
            for criterion in (evaluation.best, evaluation.stop_when)
        ),
        "a rule that picks among updates would make one change what others add: leave out "
        "--aggregation": aggregation.rule != "sum",
        "16 or 8 bits leave no room for the noise: leave out --ring-bits": (
            secure.aggregation != "off" and secure.ring_bits != 32
        ),
        "for each example, devices would tell the quantile of another norm: leave out "
        "--privacy-clip-quantile": is_by_example and privacy.clip_quantile is not None,
        f"what devices keep with --algorithm {local.algorithm} would carry a round's examples into "
        "later ones: take --algorithm fedavg": local.keeps_state,
        "for each example, local steps would carry one example into the gradients of others: leave "
        "out --local-steps, --local-epochs and --algorithm": is_by_example and local.is_on,
        "an epoch would be as long as a device's data: leave out --local-epochs, and set "
        "--local-steps": local.num_epochs is not None,
        "for each example, a client algorithm would get sums without a bound for each example: "
        "leave out --client-algorithm": is_by_example and algorithm.label is not None,
        "for each example, parameters that stay on a device would carry one example into the "
        "gradients of others: leave out --local-parameters": (
            is_by_example and model.local_parameters is not None
        ),
    }
    for text, is_refused in refused.items():
        if is_refused:
            what, _, remedy = text.rpartition(": ")
            yield SettingsError(f"with differential privacy {what}", remedy=remedy)
