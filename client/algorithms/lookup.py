"""Looks up the client algorithm that the settings name, and compares it with the plan's."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, cast

from headwater.common.errors import AlgorithmMismatch
from headwater.common.messages import Plan
from headwater.common.parsed_text import json_of
from headwater.common.settings.schema import AlgorithmSettings, Settings
from headwater.common.user_code.named_objects import constructed
from headwater.common.user_code.run_scope import cached_in_scope

if TYPE_CHECKING:
    from headwater.client.local_training.local_work import ClientAlgorithm

log = logging.getLogger(__name__)


def algorithm_of(chosen: AlgorithmSettings) -> ClientAlgorithm | None:
    """Return the run's client algorithm in this process, made at the first call; None if not set.

    Raises:
        SettingsError: it cannot be found or constructed, or has no method ``train``.
    """
    return None if chosen.name is None else _made(chosen.name, json.dumps(chosen.arguments))


def warn_of_untried(settings: Settings) -> None:
    """Log that the run's client algorithm is not tried, if it is the user's and the check is off.

    The trial finds an object that keeps something from one call to the next.
    """
    if settings.algorithm.name is not None and not settings.check_task:
        log.warning(
            "--no-check: the client algorithm %s is not tried. What it keeps in its object is lost "
            "when a run is resumed, and each process of a run (--workers, devices) has its own",
            settings.algorithm.name,
        )


def algorithm_for(plan: Plan, chosen: AlgorithmSettings, *, name: str) -> ClientAlgorithm | None:
    """Return the client algorithm for a plan.

    Raises:
        AlgorithmMismatch: see ``check_algorithm``.
        SettingsError: see ``algorithm_of``.
    """
    asked = None
    if plan.terms:
        from headwater.common.local_training.terms import LocalPlan  # not of a plain plan

        asked = plan.of(LocalPlan)
    check_algorithm(None if asked is None else asked.algorithm, chosen, name=name)
    return algorithm_of(chosen)


def check_algorithm(servers: str | None, chosen: AlgorithmSettings, *, name: str) -> None:
    """Compare the algorithm and arguments of the server's run with those of a device.

    A device runs the algorithm that it was started with, with the arguments that it was started
    with. The server's code and arguments have no effect on the device: they are only compared,
    when the device describes itself and with each plan.

    Raises:
        AlgorithmMismatch: they differ; ``name`` is the device's.
    """
    if servers != chosen.label:
        raise AlgorithmMismatch(
            f"{name}: the server's run has the client algorithm {servers or 'none'}, this device "
            f"has {chosen.label or 'none'}"
        )


@cached_in_scope()
def _made(name: str, arguments_json: str) -> ClientAlgorithm:
    arguments = json_of(arguments_json)
    found = constructed(name, arguments, what="client algorithm", method="train")
    return cast("ClientAlgorithm", found)
