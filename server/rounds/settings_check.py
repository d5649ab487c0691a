"""Checks that the settings of a run can work together, before the user's code is loaded."""

from __future__ import annotations

from headwater.common.errors import SettingsError
from headwater.common.messages import MAX_ALGORITHM_CHARACTERS
from headwater.common.settings.schema import Settings
from headwater.server.aggregation.held_updates import check_rule


def check_together(settings: Settings) -> None:
    """Check the settings that depend on each other.

    Raises:
        SettingsError: two of them exclude each other; the message names both.
    """
    _check_masked(settings)
    check_rule(settings)
    _check_algorithm(settings)


def _check_algorithm(settings: Settings) -> None:
    """Check that nothing needs exact sums where clients send what their algorithm makes of them.

    Raises:
        SettingsError: the batch should follow the noise scale; or name and arguments are too long
            for a plan.
    """
    if len(settings.algorithm.label or "") > MAX_ALGORITHM_CHARACTERS:
        raise SettingsError(
            f"a plan has room for {MAX_ALGORITHM_CHARACTERS:,} characters of a client algorithm's "
            f"name and arguments, and these take {len(settings.algorithm.label or ''):,}",
            remedy="give fewer arguments, and let the algorithm read long ones from a file",
        )
    if settings.algorithm.name is not None and settings.plan.follow_noise_scale:
        raise SettingsError(
            f"the noise scale is estimated from exact sums, and the client algorithm "
            f"{settings.algorithm.label} may send something else",
            remedy="leave out --follow-noise-scale or --client-algorithm",
        )


def _check_masked(settings: Settings) -> None:
    """Check that clients report nothing of their own that the masks should hide.

    Raises:
        SettingsError: devices would report the loss on the examples that they hold out, or refuse
            plans of so few examples.
    """
    if settings.secure.aggregation == "off":
        return
    plan, least = settings.plan, settings.secure.min_quota
    if plan.accumulation_steps is not None:
        quota = plan.accumulation_steps * (plan.micro_batch_size or plan.set_micro_batch_size)
        if quota < least:
            raise SettingsError(
                f"K x micro-batch is {quota} examples, a masked plan has at least {least}",
                remedy="raise --accumulation-steps or --micro-batch-size, or lower --min-quota on "
                "the server and on every device",
            )
    if settings.evaluation.on_devices:
        raise SettingsError(
            "each device would report its own held-out loss, which secure aggregation should hide",
            remedy="leave out --evaluate-on-devices: the server tests on examples of its own",
        )
