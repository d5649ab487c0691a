"""The server's step: any optimizer and any schedule of ``torch.optim``, on the mean gradient.

The optimizer steps the model's own parameters, which are views into the image, so the step changes
the image in place.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from common import settings
from common.errors import CheckpointCorrupt, SettingsError
from common.parameters import ModelImage

Scheduler = torch.optim.lr_scheduler.LRScheduler


class ServerOptimizer:
    """An optimizer over an image, with warmup and schedule."""

    def __init__(
        self, image: ModelImage, optimizer: settings.Optimizer, schedule: settings.Schedule
    ) -> None:
        self._parameters = image.trainable()
        self._spans = image.layout.spans
        self._optimizer = _optimizer(self._parameters, optimizer)
        self._scheduler = _scheduler(self._optimizer, schedule)

    @property
    def learning_rate(self) -> float:
        """The rate that the next step will use."""
        return float(self._optimizer.param_groups[0]["lr"])

    def step(self, mean_P: Tensor) -> None:
        """Take one step along a mean gradient [P], and move the schedule on."""
        for parameter, (start, end) in zip(self._parameters, self._spans, strict=True):
            parameter.grad = mean_P[start:end].view(parameter.shape)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._scheduler is not None:
            self._scheduler.step()

    def state(self) -> tuple[dict[str, Tensor], str]:
        """Return the tensors of the state by name, and the rest as JSON."""
        whole = self._optimizer.state_dict()
        tensors: dict[str, Tensor] = {}
        plain: dict[str, Any] = {}
        for index, entries in whole["state"].items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"{index}.{key}"] = value
                elif value is not None:
                    plain[f"{index}.{key}"] = value
        rest = {
            "groups": whole["param_groups"],
            "plain": plain,
            "scheduler": self._scheduler.state_dict() if self._scheduler else None,
        }
        return tensors, json.dumps(rest)

    def restore(self, tensors: Mapping[str, Tensor], rest: str) -> None:
        """Take up the state that ``state`` gave.

        Raises:
            CheckpointCorrupt: it is not that of this optimizer.

        """
        try:
            told = json.loads(rest)
            state: dict[int, dict[str, Any]] = {}
            for name, value in (*tensors.items(), *told["plain"].items()):
                index, _, key = name.partition(".")
                state.setdefault(int(index), {})[key] = value
            self._optimizer.load_state_dict({"state": state, "param_groups": told["groups"]})
            if self._scheduler is not None:
                self._scheduler.load_state_dict(told["scheduler"])
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointCorrupt(
                f"the optimizer's state does not fit: {error}",
                remedy="resume with the optimizer and schedule that the run was started with",
            ) from error


def _named_class(module: Any, name: str, base: type) -> type[Any]:
    """Find a class of a torch module by its name in any case."""
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
    known = inspect.signature(kind).parameters
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise SettingsError(
            f"{kind.__name__} has no argument {', '.join(unknown)}",
            remedy=f"it has: {', '.join(list(known)[1:])}",
        )
    try:
        return kind(first, **arguments)
    except (TypeError, ValueError) as error:
        raise SettingsError(
            f"{kind.__name__}: {error}", remedy="see its page in torch's docs"
        ) from error


def _optimizer(
    parameters: list[torch.nn.Parameter], chosen: settings.Optimizer
) -> torch.optim.Optimizer:
    kind = _named_class(torch.optim, chosen.name, torch.optim.Optimizer)
    if kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
        raise SettingsError(
            f"{kind.__name__} cannot step on a sum of gradients", remedy="choose sgd, adam or adamw"
        )
    arguments = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in chosen.arguments.items()
    }
    optimizer: torch.optim.Optimizer = _made(
        kind, parameters, {**arguments, "lr": chosen.learning_rate}
    )
    return optimizer


def _scheduler(optimizer: torch.optim.Optimizer, chosen: settings.Schedule) -> Scheduler | None:
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
