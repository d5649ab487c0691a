"""Checks a private run's settings when it is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.common.errors import SettingsError
from headwater.common.settings.schema import PrivacySettings


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
    noise, now = before.get("privacy.noise_multiplier"), chosen.noise_multiplier
    if noise is not None and now is not None and now < noise:
        raise SettingsError(
            f"the rounds of this run had noise of {noise:g} clip norms so far, and the next ones "
            f"would have {now:g}",
            remedy=f"resume with --privacy-noise-multiplier {noise:g} or more; or begin a new run: "
            "another --out",
        )
    if was_on and not chosen.is_on:
        raise SettingsError(
            "the rounds of this run had noise so far, and the next ones would have none",
            remedy="resume with --privacy-epsilon or --privacy-noise-multiplier, as the run was "
            "started; or begin a new run: another --out",
        )


def check_bands(chosen: PrivacySettings, *, has_sums: bool, is_banded: bool) -> None:
    """Check that the noise of a run's rounds stays correlated, or independent.

    ``is_banded`` says whether that of its earlier rounds is correlated, if it ``has_sums``.

    Raises:
        SettingsError: it would change.
    """
    if is_banded != (chosen.bands > 1) and (has_sums or is_banded):
        kinds = ("independent", "correlated")
        raise SettingsError(
            f"the noise of this run's rounds is {kinds[is_banded]} so far, and with "
            f"--privacy-bands {chosen.bands} it would be {kinds[not is_banded]}",
            remedy="resume with the run's own --privacy-bands; or begin a new run: another --out",
        )
