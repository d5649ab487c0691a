"""Makes the optimizer and the schedule that the settings name, and tries them out.

An optimizer is a class of ``torch.optim``, a class of the user's, or a server rule.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headwater.common.errors import SettingsError
from headwater.common.named_objects import check_arguments, find_named
from headwater.common.settings import schema as settings
from headwater.common.user_code import described
from headwater.server.aggregation.server_rule import RuleOptimizer, ServerRule

Scheduler = torch.optim.lr_scheduler.LRScheduler
Kind = type[torch.optim.Optimizer] | ServerRule


def try_out(
    kind: Kind, optimizer: settings.OptimizerSettings, schedule: settings.ScheduleSettings
) -> float:
    """Take two steps on a parameter made for it; return the bytes of state per parameter.

    Some classes refuse their arguments only in a step; the run should not begin then.

    Raises:
        SettingsError: the optimizer or the schedule cannot be created, cannot step, or keeps what
            no checkpoint can hold.
    """
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    made = new_optimizer(kind, [parameter], optimizer)
    scheduler = new_scheduler(made, schedule)
    try:
        for _ in range(2):
            parameter.grad = torch.zeros(2, 2)
            made.step()
            if scheduler is not None:
                scheduler.step()
    except SettingsError:
        raise
    except Exception as error:
        own, named = ":" in optimizer.name, schedule.name
        raise SettingsError(
            f"{optimizer.name}{f' with the schedule {named}' if named else ''} cannot step: "
            f"{described(error) if own else error}",
            remedy="correct the line that is shown"
            if own
            else "see its page in torch's docs for its arguments",
        ) from error
    tensors, plain = split_state(made.state_dict()["state"])
    try:
        json.dumps(plain)
    except TypeError as error:
        raise SettingsError(
            f"{optimizer.name} keeps a state that no checkpoint can hold: {error}",
            remedy="keep tensors, numbers, texts and lists of these",
        ) from error
    sizes = [tensor.nbytes for tensor in tensors.values() if tensor.numel() >= parameter.numel()]
    return sum(sizes) / parameter.numel()


def _named_class(module: Any, name: str, base: type) -> type[Any]:
    """Return a class of a torch module by its name, ignoring case."""
    classes = {
        key.lower(): value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }
    if name.lower() not in classes:
        raise SettingsError(
            f"{module.__name__} has no {name!r}", remedy=f"one of: {', '.join(sorted(classes))}"
        )
    return classes[name.lower()]


def _made(kind: type[Any], first: Any, arguments: Mapping[str, Any]) -> Any:
    check_arguments(kind, arguments, what=kind.__name__, num_own=1)
    try:
        return kind(first, **arguments)
    except Exception as error:
        raise SettingsError(
            f"{kind.__name__}: {str(error) or type(error).__name__}",
            remedy="see its page in torch's docs",
        ) from error


def kind_of(name: str) -> Kind:
    """Return torch's or the user's optimizer class of this name, or the user's server rule.

    Raises:
        SettingsError: there is none, or it is neither.
    """
    if ":" not in name:
        return _named_class(torch.optim, name, torch.optim.Optimizer)
    found = find_named(name, what="optimizer")
    is_class = isinstance(found, type)
    if is_class and issubclass(found, torch.optim.Optimizer):
        kind: Kind = found
        return kind
    if is_class or not callable(found):
        raise SettingsError(
            f"{name} is neither a class of optimizers nor a function of a mean gradient and a "
            "state",
            remedy="inherit from torch.optim.Optimizer, or write a function (docs/extend.md)",
        )
    rule: ServerRule = found
    return rule


def new_optimizer(
    kind: Kind, parameters: list[torch.nn.Parameter], chosen: settings.OptimizerSettings
) -> torch.optim.Optimizer:
    """Return a new optimizer of the parameters.

    Raises:
        SettingsError: its arguments are wrong, or it cannot step on a sum of gradients.
    """
    if isinstance(kind, type) and issubclass(kind, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise SettingsError(
            f"{kind.__name__} cannot step on a sum of gradients", remedy="choose sgd, adam or adamw"
        )
    if "lr" in chosen.arguments:
        raise SettingsError(
            "lr is among the optimizer's arguments", remedy="set it by --learning-rate"
        )
    arguments = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in chosen.arguments.items()
    }
    if not isinstance(kind, type):
        return RuleOptimizer(parameters, kind, lr=chosen.rate, arguments=arguments)
    optimizer: torch.optim.Optimizer = _made(kind, parameters, {**arguments, "lr": chosen.rate})
    return optimizer


def new_scheduler(
    optimizer: torch.optim.Optimizer, chosen: settings.ScheduleSettings
) -> Scheduler | None:
    """Return a new schedule, warmup included; None if none is set.

    Raises:
        SettingsError: there is none of this name, or its arguments are wrong.
    """
    schedulers = torch.optim.lr_scheduler
    parts: list[Scheduler] = []
    if chosen.warmup_rounds:
        parts.append(
            schedulers.LinearLR(
                optimizer,
                start_factor=1 / (chosen.warmup_rounds + 1),
                total_iters=chosen.warmup_rounds,
            )
        )
    if chosen.name is not None:
        kind = _named_class(schedulers, chosen.name, Scheduler)
        if kind in (schedulers.LambdaLR, schedulers.MultiplicativeLR):
            raise SettingsError(
                f"{kind.__name__} takes a function, which a settings file cannot hold",
                remedy="choose CosineAnnealingLR, StepLR or another that takes numbers",
            )
        parts.append(_made(kind, optimizer, chosen.arguments))
    if len(parts) < 2:
        return parts[0] if parts else None
    return schedulers.SequentialLR(optimizer, parts, milestones=[chosen.warmup_rounds])


def split_state(
    state: Mapping[int, Mapping[str, Any]],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an optimizer's state by name, and its other values."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for index, entries in state.items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value
            elif value is not None:
                plain[f"{index}.{key}"] = value
    return tensors, plain
