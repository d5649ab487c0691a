"""What a command was given, as settings: flags turned into dotted names and values of their types.

A flag that was not given is ``None`` here too, and sets nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from headwater.common.errors import SettingsError

SETTING_OF = {
    "task": "task",
    "partition": "partition.kind",
    "examples_per_device": "partition.examples_per_device",
    "check": "check_task",
    "replace_batch_norm": "model.replace_batch_norm",
    "initial_model": "model.initial",
    "rounds": "rounds",
    "seed": "seed",
    "optimizer": "optimizer.name",
    "learning_rate": "optimizer.learning_rate",
    "optimizer_argument": "optimizer.arguments",
    "schedule": "schedule.name",
    "schedule_argument": "schedule.arguments",
    "warmup_rounds": "schedule.warmup_rounds",
    "batch_scaling": "schedule.batch_scaling",
    "accumulation_steps": "plan.accumulation_steps",
    "micro_batch_size": "plan.micro_batch_size",
    "effective_batch_size": "plan.effective_batch_size",
    "tokens_per_update": "plan.tokens_per_update",
    "follow_noise_scale": "plan.follow_noise_scale",
    "max_effective_batch_size": "plan.max_effective_batch_size",
    "local_steps": "plan.local_steps",
    "local_learning_rate": "plan.local_learning_rate",
    "precision": "plan.precision",
    "cohort_size": "cohort.size",
    "min_clients": "cohort.min_clients",
    "deadline": "cohort.deadline_seconds",
    "invite_within": "cohort.invite_within_rounds",
    "weighting": "cohort.weighting",
    "evaluate_on_devices": "evaluation.on_devices",
    "evaluate_every": "evaluation.every_rounds",
    "secure_aggregation": "secure.aggregation",
    "ring_bits": "secure.ring_bits",
    "min_members": "secure.min_members",
    "identity": "secure.identity",
    "allow_list": "secure.allow_list",
    "threads": "threads",
    "out": "out",
    "tls_ca": "tls.ca",
    "tls_certificate": "tls.certificate",
    "tls_key": "tls.key",
    "insecure": "insecure",
    "listen": "server.listen",
    "enrolment_listen": "server.enrolment_listen",
    "server_metrics": "server.metrics",
    "client_metrics": "client.metrics",
    "clients": "simulation.clients",
    "dropout": "simulation.dropout",
    "fleet": "simulation.fleet",
    "faults": "simulation.faults",
    "compute": "simulation.compute",
    "workers": "simulation.workers",
    "compile_passes": "simulation.compile",
    "wire": "simulation.wire",
    "engine": "simulation.engine",
    "server": "client.server",
    "data": "client.data",
    "name": "client.name",
    "part": "client.part",
    "num_parts": "client.num_parts",
    "memory_limit_bytes": "client.memory_limit_bytes",
    "battery_share": "client.battery_share",
    "upload_window": "client.upload_window",
    "bytes_per_day": "client.bytes_per_day",
    "working_hours": "client.working_hours",
    "state": "client.state",
    "spool": "client.spool",
    "stay": "client.stay",
    "patience": "client.patience_seconds",
}
"""Where each flag lies in the settings."""

REPEATED = ("optimizer_argument", "schedule_argument")


def refuse_before_command(context: typer.Context) -> None:
    """Refuse flags that stand before a subcommand, where they would be lost in silence."""
    given = sorted(name for name, value in context.params.items() if value)
    if given:
        flag = "--" + given[0].replace("_", "-")
        command = context.invoked_subcommand
        raise typer.BadParameter(f"{flag} stands before {command}: put flags behind the command")


def overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a command's parameters into dotted settings; those that are no settings are left out.

    Raises:
        SettingsError: a KEY=VALUE without its ``=``.
    """
    return {
        SETTING_OF[name]: arguments(value) if name in REPEATED else value
        for name, value in given.items()
        if name in SETTING_OF
    }


def arguments(pairs: list[str] | None) -> dict[str, Any] | None:
    """Read repeated KEY=VALUE flags; numbers, true and false are read as such.

    Raises:
        SettingsError: no ``=`` in it.
    """
    if not pairs:
        return None
    read: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator or not key:
            raise SettingsError(f"expected KEY=VALUE, found {pair!r}")
        read[key] = _value(text)
    return read


def numbers(text: str | None) -> tuple[int, ...] | None:
    """Read whole numbers with commas between them.

    Raises:
        SettingsError: one of them is none.
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise SettingsError(f"expected numbers as in 0,1,2, found {text!r}") from None


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if "," in text:
        return [_value(part) for part in text.split(",")]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
