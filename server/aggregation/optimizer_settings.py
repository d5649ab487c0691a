"""Makes the optimizer and the schedule that the settings name, and tries them out.

An optimizer is a class of ``torch.optim``, a class of the user's, or a server rule.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headwater.common.errors import SettingsError
from headwater.common.optimizers.named_optimizer import (
    check_steps_on_sums,
    in_groups,
    instance_of,
    named_class,
    optimizer_class,
    with_tuples,
)
from headwater.common.settings import schema as settings
from headwater.common.user_code.failures import described
from headwater.common.user_code.named_objects import find_named
from headwater.server.aggregation.server_rule import RuleOptimizer, ServerRule

Scheduler = torch.optim.lr_scheduler.LRScheduler
schedules = torch.optim.lr_scheduler
OF_OBJECTS: dict[type, str] = {
    schedules.LambdaLR: "a function",
    schedules.MultiplicativeLR: "a function",
    schedules.ChainedScheduler: "schedules",
    schedules.SequentialLR: "schedules",
}
"""The schedules that no settings file can name, and what they take."""
REFUSED_SCHEDULES = (*OF_OBJECTS, schedules.ReduceLROnPlateau)
Kind = type[torch.optim.Optimizer] | ServerRule


def try_out(
    kind: Kind,
    optimizer: settings.OptimizerSettings,
    schedule: settings.ScheduleSettings,
    *,
    num_parameters: int,
) -> float:
    """Take two steps on a parameter made for it; return the bytes of state per parameter.

    Some classes refuse their arguments only in a step; the run should not begin then. A server rule
    is tried on a vector [P] of the model's size, an optimizer on a small matrix.

    Raises:
        SettingsError: the optimizer or the schedule cannot be created, cannot step, or keeps what
            no checkpoint can hold.
    """
    shape = (2, 2) if isinstance(kind, type) else (num_parameters,)
    parameter = torch.nn.Parameter(torch.zeros(shape))
    made = new_optimizer(kind, [parameter], optimizer)
    to_training(made)
    scheduler = new_scheduler(made, schedule)
    try:
        for _ in range(2):
            parameter.grad = torch.zeros(shape)
            made.step()
            if scheduler is not None:
                scheduler.step()
    except SettingsError:
        raise
    except Exception as error:
        own, named = ":" in optimizer.kind, schedule.name
        raise SettingsError(
            f"{optimizer.kind}{f' with the schedule {named}' if named else ''} cannot step: "
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
            f"{optimizer.kind} keeps a state that no checkpoint can hold: {error}",
            remedy="keep tensors, numbers, texts and lists of these",
        ) from error
    sizes = [tensor.nbytes for tensor in tensors.values() if tensor.numel() >= parameter.numel()]
    return sum(sizes) / parameter.numel()


def has_evaluation_weights(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer steps some weights and keeps others: it has train and eval."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def to_training(optimizer: torch.optim.Optimizer) -> None:
    """Let such an optimizer step; it may refuse to after ``eval``, and before the first train."""
    if has_evaluation_weights(optimizer):
        optimizer.train()  # type: ignore[attr-defined] # it has one


def kind_of(name: str) -> Kind:
    """Return torch's or the user's optimizer class of this name, or the user's server rule.

    Raises:
        SettingsError: there is none, or it is neither.
    """
    if ":" not in name:
        return optimizer_class(name)
    found = find_named(name, what="optimizer")
    if isinstance(found, torch.optim.Optimizer):
        kind_name, rate = type(found).__name__, found.defaults.get("lr")
        raise SettingsError(
            f"the optimizer is an object of {kind_name}, which holds another model's parameters",
            remedy=f"give its class and its rate: optimizer={kind_name!r}, learning_rate={rate}; "
            "other arguments by optimizer_argument={...}",
        )
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
    if not _takes_two(found):
        raise SettingsError(
            f"the optimizer {name} takes no two arguments: a function gets a mean gradient and a "
            "state, and returns the step",
            remedy="of a class of torch.optim: optimizer='SGD', learning_rate=0.1, "
            "optimizer_argument={'momentum': 0.9}; a server rule is in docs/extend.md",
        )
    rule: ServerRule = found
    return rule


def _takes_two(function: Any) -> bool:
    """Return whether a function takes two arguments by position; True if it does not tell."""
    try:
        inspect.signature(function).bind_partial(None, None)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def new_optimizer(
    kind: Kind,
    parameters: list[torch.nn.Parameter],
    chosen: settings.OptimizerSettings,
    model: torch.nn.Module | None = None,
) -> torch.optim.Optimizer:
    """Return a new optimizer of the parameters, which are the model's.

    Raises:
        SettingsError: its arguments are wrong, or it cannot step on a sum of gradients.
    """
    check_steps_on_sums(kind)
    if "lr" in chosen.arguments:
        raise SettingsError(
            "lr is among the optimizer's arguments", remedy="set it by --learning-rate"
        )
    arguments = with_tuples(chosen.arguments)
    if not isinstance(kind, type):
        return RuleOptimizer(parameters, kind, lr=chosen.rate, arguments=arguments)
    given = {**arguments, "lr": chosen.rate}
    optimizer: torch.optim.Optimizer = instance_of(kind, in_groups(kind, parameters, model), given)
    return optimizer


def new_scheduler(
    optimizer: torch.optim.Optimizer, chosen: settings.ScheduleSettings
) -> Scheduler | None:
    """Return a new schedule, warmup included; None if none is set.

    Raises:
        SettingsError: there is none of this name, or its arguments are wrong.
    """
    parts: list[Scheduler] = []
    if chosen.warmup_rounds:
        parts.append(
            schedules.LinearLR(
                optimizer,
                start_factor=1 / (chosen.warmup_rounds + 1),
                total_iters=chosen.warmup_rounds,
            )
        )
    if chosen.name is not None:
        kind = named_class(schedules, chosen.name, Scheduler, but=REFUSED_SCHEDULES)
        if kind in OF_OBJECTS:
            raise SettingsError(
                f"{kind.__name__} takes {OF_OBJECTS[kind]}, which a settings file cannot hold",
                remedy="choose CosineAnnealingLR, StepLR or another that takes numbers",
            )
        if kind is schedules.ReduceLROnPlateau:
            raise SettingsError(
                "ReduceLROnPlateau needs a metric at each step, and the server's schedule has none",
                remedy="choose CosineAnnealingLR, StepLR or another that follows the rounds; "
                "--stop-when ends a run that no longer improves",
            )
        parts.append(instance_of(kind, optimizer, chosen.arguments))
    if len(parts) < 2:
        return parts[0] if parts else None
    return schedules.SequentialLR(optimizer, parts, milestones=[chosen.warmup_rounds])


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
