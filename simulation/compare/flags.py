"""The flags of ``headwater-simulate compare``: a simulation's, without those that it chooses."""

from __future__ import annotations

from headwater.common.settings.flags import SettingsCommand

# The settings that differ between the algorithms, or between a comparison's runs.
CHOSEN = (
    *("rounds", "seed", "optimizer.learning_rate", "algorithm.name", "algorithm.arguments"),
    *("local.algorithm", "local.steps", "local.epochs", "local.learning_rate"),
    *("local.optimizer", "local.arguments", "local.proximal"),
    *("server.page", "server.page_stays_seconds"),
)


class CompareCommand(SettingsCommand):
    """The subcommand; a flag that it chooses is understood, to be refused with a remedy."""

    flags_of = "simulate"
    hidden_flags = CHOSEN
