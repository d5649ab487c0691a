"""The settings that a test on the devices does not go with."""

from __future__ import annotations

from headwater.common.errors import SettingsError
from headwater.server.rounds.features import RunState


def check_settings(run: RunState) -> None:
    """Check that nothing else is set that needs training, or noise in each sum.

    Raises:
        SettingsError: something is.
    """
    settings = run.settings
    refused = {
        "a test is one round: set --rounds 1": settings.num_rounds != 1,
        "the sums of a test have no noise, and a private run tells nothing without: leave out "
        "--privacy-epsilon": settings.privacy.is_on,
        "a test has one round, which all devices are in: leave out "
        "--asynchronous": settings.asynchronous.is_on,
        "nothing is measured before a test: leave out --statistics": settings.statistics.is_on,
        "a robust rule compares gradients, and a test is a sum: leave out "
        "--aggregation": settings.aggregation.rule != "sum",
        "a feature of your own may act on each round: leave out --feature": (
            settings.feature.name is not None
        ),
        "a client algorithm acts on each round: leave out --client-algorithm": (
            settings.algorithm.name is not None
        ),
        "a test takes no steps: leave out --local-steps": settings.local.is_on,
        "the model is sent whole, and no update comes: leave out --compress and "
        "--compress-down": settings.compression.up != "off" or settings.compression.down != "off",
        "devices test in the round itself: leave out --evaluate-on-devices": (
            settings.evaluation.on_devices
        ),
        "devices have parameters of their own in their own run alone: test there with "
        "--evaluate-on-devices, and leave out --local-parameters": (
            settings.model.local_parameters is not None
        ),
        "the tested model is sent, and no other begins: leave out --initial-model": (
            settings.model.initial is not None
        ),
    }
    compares = settings.device_test.compare_with is not None
    has_branches = settings.simulation.aggregators > 1 or bool(settings.server.aggregators)
    refused |= {
        "two models are compared in one process for each device: leave out --workers": (
            compares and settings.simulation.workers != 1
        ),
        "two models are compared without aggregators: leave out --aggregators": (
            compares and has_branches
        ),
    }
    for text, is_refused in refused.items():
        if is_refused:
            why, _, remedy = text.partition(": ")
            raise SettingsError(f"with --test-model {why}", remedy=f"{remedy}, or --test-model")
