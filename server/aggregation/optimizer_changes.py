"""Settings of the optimizer that change when a run is resumed: applied to its state, or refused."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from headwater.common.errors import SettingsError
from headwater.common.settings import schema as settings
from headwater.server.aggregation.optimizer_settings import (
    Kind,
    Scheduler,
    new_optimizer,
)

Chosen = tuple[settings.OptimizerSettings, settings.ScheduleSettings]

OTHER_OPTIMIZER = (
    "resume without this change; or begin a new run from the trained model: --initial-model DIR of "
    "this run, with another --out"
)


def resolved(chosen: Chosen) -> Chosen:
    """Return the settings with the learning rate that holds if none is set."""
    optimizer, schedule = chosen
    return optimizer.model_copy(update={"learning_rate": optimizer.rate}), schedule


def advance(scheduler: Scheduler | None, num_steps: int) -> None:
    """Advance a new schedule by this number of steps.

    Raises:
        SettingsError: it ends before.
    """
    if scheduler is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the steps were taken before it was made
        try:
            for _ in range(num_steps):
                scheduler.step()
        except ValueError as error:
            raise SettingsError(
                f"{type(scheduler).__name__}: {error}",
                remedy="let the schedule last for all rounds",
            ) from error


def carried_over(
    saved: list[dict[str, Any]], old: torch.optim.Optimizer, new: torch.optim.Optimizer
) -> list[dict[str, Any]]:
    """Return the saved groups with those options that the new settings change.

    What an optimizer itself has noted in its groups stays.
    """
    carried = []
    for group, was, now in zip(saved, old.param_groups, new.param_groups, strict=True):
        changed = {
            key: value
            for key, value in now.items()
            if key != "params" and (key not in was or was[key] != value)
        }
        dropped = was.keys() - now.keys()
        kept = {key: value for key, value in group.items() if key not in dropped}
        carried.append(kept | changed)
    return carried


def check_change(
    kind: Kind,
    before: Chosen,
    now: Chosen,
    *,
    old: torch.optim.Optimizer,
    new: torch.optim.Optimizer,
) -> None:
    """Check that changed settings fit the state, and have an effect.

    ``old`` and ``new`` are optimizers with the two settings, at the same step.

    Raises:
        SettingsError: see ``_try_change`` and ``_check_rate``.
    """
    _try_change(kind, before, now)
    _check_rate(old, new, before, now)


def _try_change(kind: Kind, before: Chosen, now: Chosen) -> None:
    """Take a step with the new settings on a state that the old ones led to.

    Raises:
        SettingsError: the state lacks what the new settings need, as with amsgrad.
    """
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    old, new = (new_optimizer(kind, [parameter], chosen[0]) for chosen in (before, now))
    parameter.grad = torch.zeros(2, 2)
    old.step()
    saved = old.state_dict()
    groups = carried_over(saved["param_groups"], old, new)
    try:
        new.load_state_dict({"state": saved["state"], "param_groups": groups})
        new.step()
    except Exception as error:
        raise SettingsError(
            f"{now[0].name} cannot go on with other arguments: the state of the rounds so far does "
            f"not fit them ({type(error).__name__}: {error})",
            remedy=OTHER_OPTIMIZER,
        ) from error


def _check_rate(
    old: torch.optim.Optimizer, new: torch.optim.Optimizer, before: Chosen, now: Chosen
) -> None:
    """Check that another learning rate has an effect.

    Raises:
        SettingsError: the schedule sets the rate, or the optimizer used it in its first step only.
    """
    if before[0].rate == now[0].rate:
        return
    rates = [
        [(group["lr"], group.get("initial_lr")) for group in each.param_groups]
        for each in (old, new)
    ]
    what = type(new).__name__ if isinstance(new, torch.optim.Rprop) else now[1].name
    if rates[0] == rates[1] or isinstance(new, torch.optim.Rprop):
        raise SettingsError(
            f"another learning rate has no effect on this run: {what} sets the rates itself",
            remedy="leave --learning-rate out",
        )
