"""Looks up the client algorithm that the settings name, and compares it with the plan's."""

from __future__ import annotations

import json
from typing import cast

from headwater.client.training.local_update import ClientAlgorithm
from headwater.common.errors import AlgorithmMismatch, SettingsError
from headwater.common.messages import Plan
from headwater.common.named_objects import constructed
from headwater.common.run_scope import cached_in_scope
from headwater.common.settings.schema import AlgorithmSettings


def algorithm_of(chosen: AlgorithmSettings) -> ClientAlgorithm | None:
    """Return the run's client algorithm in this process, made at the first call; None if not set.

    Raises:
        SettingsError: it cannot be found or constructed, or has no method ``train``.
    """
    return None if chosen.name is None else _made(chosen.name, json.dumps(chosen.arguments))


def algorithm_for(plan: Plan, chosen: AlgorithmSettings, *, name: str) -> ClientAlgorithm | None:
    """Return the client algorithm for a plan.

    A device runs the algorithm that it was started with, with the arguments that it was started
    with. The server's code and arguments have no effect on the device: they are only compared.

    Raises:
        AlgorithmMismatch: the plan is for another algorithm than the device ``name`` has, or for
            other arguments.
    """
    if plan.algorithm != chosen.label:
        raise AlgorithmMismatch(
            f"{name}: the plan is for the client algorithm {plan.algorithm}, this device has "
            f"{chosen.label}"
        )
    return algorithm_of(chosen)


@cached_in_scope()
def _made(name: str, arguments_json: str) -> ClientAlgorithm:
    found = constructed(name, json.loads(arguments_json), what="client algorithm")
    if not callable(getattr(found, "train", None)):
        raise SettingsError(
            f"the client algorithm {name} has no method train(work)",
            remedy="see docs/extend.md for a client algorithm",
        )
    return cast(ClientAlgorithm, found)
