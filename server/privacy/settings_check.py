"""What a private run's settings may be: checks at its beginning, and when it is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.common.errors import SettingsError
from headwater.common.settings.fields import split_criterion
from headwater.common.settings.schema import PrivacySettings, Settings


def check_resumed(before: Mapping[str, Any], chosen: PrivacySettings) -> None:
    """Check that all rounds of a resumed run have noise, or none; ``before`` are its settings.

    Raises:
        SettingsError: they do not: an epsilon would be shown that does not bound the run.
    """
    keys = ("privacy.epsilon", "privacy.noise_multiplier")
    was_on = any(before.get(key) is not None for key in keys)
    unit = before.get("privacy.unit", "device")
    if chosen.is_on and was_on and unit != chosen.unit:
        raise SettingsError(
            f"the run has spent privacy for each {unit} so far, and would now count for each "
            f"{chosen.unit}",
            remedy=f"resume with --privacy-unit {unit}; or begin a new run: another --out",
        )
    if chosen.is_on and not was_on:
        raise SettingsError(
            "the rounds of this run had no noise so far: no epsilon bounds what they have shown",
            remedy="leave out --privacy-epsilon and --privacy-noise-multiplier; or begin a new run "
            "with them: another --out",
        )
    if was_on and not chosen.is_on:
        raise SettingsError(
            "the rounds of this run had noise so far, and the next ones would have none",
            remedy="resume with --privacy-epsilon or --privacy-noise-multiplier, as the run was "
            "started; or begin a new run: another --out",
        )


def check_settings(settings: Settings) -> None:
    """Check that nothing in the settings reveals more than the sums with noise.

    Raises:
        SettingsError: it does; see docs/privacy.md.
    """
    plan, evaluation = settings.plan, settings.evaluation
    is_by_example = settings.privacy.unit == "example"
    refused = {
        "the planner would choose quotas by what devices report of their data and speed: set "
        "--accumulation-steps": plan.accumulation_steps is None,
        "the batch would follow the devices' gradients: leave out --follow-noise-scale": (
            plan.follow_noise_scale
        ),
        "updates would be weighed by the devices' numbers of examples: leave out --weighting "
        "dataset": settings.cohort.weighting == "dataset",
        "each device would report its own held-out loss: leave out --evaluate-on-devices": (
            evaluation.on_devices
        ),
        "the training's own loss and metrics are not released: name a metric of the test": any(
            criterion is not None and split_criterion(criterion)[1].startswith("train_")
            for criterion in (evaluation.best, evaluation.stop_when)
        ),
        "a rule that picks among updates would make one change what others add: leave out "
        "--aggregation": settings.aggregation.rule != "sum",
        "16 bits leave no room for the noise: leave out --ring-bits 16": (
            settings.secure.aggregation != "off" and settings.secure.ring_bits != 32
        ),
        "for each example, devices would tell the quantile of another norm: leave out "
        "--privacy-clip-quantile": is_by_example and settings.privacy.clip_quantile is not None,
        "for each example, local steps would carry one example into the gradients of others: leave "
        "out --local-steps": is_by_example and plan.local_steps > 1,
        "for each example, a client algorithm would get sums without a bound for each example: "
        "leave out --client-algorithm": is_by_example and settings.algorithm.label is not None,
        "for each example, parameters that stay on a device would carry one example into the "
        "gradients of others: leave out --local-parameters": (
            is_by_example and settings.model.local_parameters is not None
        ),
    }
    for text, is_refused in refused.items():
        if is_refused:
            what, _, remedy = text.rpartition(": ")
            raise SettingsError(f"with differential privacy {what}", remedy=remedy)
