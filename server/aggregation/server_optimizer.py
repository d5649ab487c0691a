"""The server's step on the mean gradient: an optimizer of torch or of the user, or a server rule.

The optimizer steps the model's own parameters, which are views into the image, so the step changes
the image in place.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from headwater.common.errors import CheckpointCorrupt, SettingsError
from headwater.common.model.parameters import ModelImage
from headwater.common.named_objects import check_arguments, find_named
from headwater.common.settings import schema as settings
from headwater.common.user_code import described, running
from headwater.server.aggregation.server_rule import RuleOptimizer, ServerRule
from headwater.server.aggregation.torch_compiler_stub import without_dynamo

log = logging.getLogger(__name__)

Scheduler = torch.optim.lr_scheduler.LRScheduler
Kind = type[torch.optim.Optimizer] | ServerRule

# The learning rate is no factor of these optimizers' steps: Rprop uses it in the first step only,
# ASGD in the next one, and Adafactor as an upper bound.
RATE_IS_NO_FACTOR = (torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adafactor)


def rate_factor(scaling: Literal["none", "linear", "sqrt"], batch_ratio: float) -> float:
    """Return the factor of the learning rate for a batch of ``batch_ratio`` times its reference.

    Linear: Goyal et al. 2017, for SGD while the batch is below the noise scale. Square root:
    Malladi et al. 2022, for Adam and its kin, whose steps do not grow with the gradient.
    """
    if scaling == "none":
        return 1.0
    return batch_ratio if scaling == "linear" else math.sqrt(batch_ratio)


class ServerOptimizer:
    """An optimizer of a model image's parameters, with warmup and schedule."""

    def __init__(
        self,
        image: ModelImage,
        optimizer: settings.OptimizerSettings,
        schedule: settings.ScheduleSettings,
    ) -> None:
        # Imports a user's module before the compiler's stub is in place, which it may import.
        kind = _kind(optimizer.name)
        with without_dynamo():
            self._build(image, kind, optimizer, schedule)

    def _build(
        self,
        image: ModelImage,
        kind: Kind,
        optimizer: settings.OptimizerSettings,
        schedule: settings.ScheduleSettings,
    ) -> None:
        num_bytes = _try_out(kind, optimizer, schedule) * image.layout.num_parameters
        log.info("%s keeps %.1f MiB of state", optimizer.name, num_bytes / 2**20)
        self._is_users = ":" in optimizer.name
        self._parameters, self._spans = image.trainable(), image.layout.spans
        if not isinstance(kind, type):  # a rule takes the whole vector
            self._parameters = [torch.nn.Parameter(image.values_P)]
            self._spans = ((0, image.layout.num_parameters),)
        self._optimizer = _optimizer(kind, self._parameters, optimizer)
        self._scheduler = _scheduler(self._optimizer, schedule)
        if schedule.batch_scaling != "none" and isinstance(self._optimizer, RATE_IS_NO_FACTOR):
            raise SettingsError(
                f"the steps of {type(self._optimizer).__name__} are not proportional to its rate, "
                f"so that it cannot scale with the batch",
                remedy="leave out --batch-scaling, or choose sgd, adam or adamw",
            )

    @property
    def learning_rate(self) -> float:
        """The schedule's rate for the next step."""
        return float(self._optimizer.param_groups[0]["lr"])

    @without_dynamo()
    def step(self, mean_P: Tensor, factor: float = 1.0) -> float:
        """Take one step along a mean gradient [P], advance the schedule, and return the rate used.

        That is the schedule's rate times ``factor``, for this step alone: schedules compute their
        next rate from the last one, and must not see it.

        Raises:
            SettingsError: the schedule is at its end (OneCycleLR has a total of steps).
            TaskFailed: the user's own optimizer or rule raised; the message shows its line.
        """
        for parameter, (start, end) in zip(self._parameters, self._spans, strict=True):
            parameter.grad = mean_P[start:end].view(parameter.shape)
        with self._rates_times(factor):
            used = self.learning_rate
            with self._running():
                self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._copy_kept(mean_P)
        if self._scheduler is not None:
            try:
                self._scheduler.step()
            except ValueError as error:
                raise SettingsError(
                    f"{self._kinds[-1]}: {error}", remedy="let the schedule last for all --rounds"
                ) from error
        return used

    @contextmanager
    def _rates_times(self, factor: float) -> Iterator[None]:
        """Multiply each group's rate by ``factor``, and restore the exact rates afterwards."""
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] *= factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _running(self) -> AbstractContextManager[None]:
        """Name the user's optimizer or rule, if it is one, in the error of a step."""
        if not self._is_users:
            return nullcontext()
        kind = "server rule" if isinstance(self._optimizer, RuleOptimizer) else "optimizer"
        remedy = "correct the line that is shown, and resume the run"
        return running(f"the {kind} {self._kinds[0]}", remedy=remedy)

    def _copy_kept(self, mean_P: Tensor) -> None:
        """Copy the state's tensors that lie in the memory of the mean, which the next sum takes."""
        memory = mean_P.untyped_storage().data_ptr()
        for entries in self._optimizer.state.values():
            for key, value in entries.items():
                if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == memory:
                    entries[key] = value.detach().clone()

    @property
    def _kinds(self) -> list[str]:
        """The names of the classes that the state belongs to."""
        parts = getattr(self._scheduler, "_schedulers", [self._scheduler])
        names = [type(part).__name__ for part in (self._optimizer, *parts) if part is not None]
        if isinstance(self._optimizer, RuleOptimizer):
            names[0] = self._optimizer.name
        return names

    @without_dynamo()
    def state(self) -> tuple[dict[str, Tensor], str]:
        """Return the tensors of the state by name, and the rest as JSON."""
        whole = self._optimizer.state_dict()
        tensors, plain = _split_state(whole["state"])
        rest = {
            "kinds": self._kinds,
            "groups": whole["param_groups"],
            "plain": plain,
            "scheduler": self._scheduler.state_dict() if self._scheduler else None,
        }
        return tensors, json.dumps(rest)

    @without_dynamo()
    def restore(self, tensors: Mapping[str, Tensor], rest: str) -> None:
        """Restore what ``state`` returned.

        Raises:
            CheckpointCorrupt: the state belongs to another optimizer or schedule.
        """
        try:
            plain = json.loads(rest)
            if plain["kinds"] != self._kinds:
                raise ValueError(f"it belongs to {plain['kinds']}, not to {self._kinds}")
            state: dict[int, dict[str, Any]] = {}
            for name, value in (*tensors.items(), *plain["plain"].items()):
                index, _, key = name.partition(".")
                state.setdefault(int(index), {})[key] = value
            self._optimizer.load_state_dict({"state": state, "param_groups": plain["groups"]})
            if self._scheduler is not None:
                own = self._scheduler.state_dict()
                self._scheduler.load_state_dict(_with_types_of(own, plain["scheduler"]))
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointCorrupt(
                f"the optimizer's state does not fit: {error}",
                remedy="resume with the optimizer and schedule that the run was started with",
            ) from error


def _with_types_of(own: Any, read: Any) -> Any:
    """Restore the types that JSON changes in a scheduler's state: numeric keys become text."""
    if isinstance(own, dict):
        keys = {str(key): key for key in own}
        return type(own)(
            {keys.get(key, key): _with_types_of(own.get(key), read[key]) for key in read}
        )
    if isinstance(own, list) and len(own) == len(read):
        return [_with_types_of(*pair) for pair in zip(own, read, strict=True)]
    return read


def _split_state(
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


def _try_out(
    kind: Kind, optimizer: settings.OptimizerSettings, schedule: settings.ScheduleSettings
) -> float:
    """Take two steps on a parameter made for it; return the bytes of state per parameter.

    Some classes refuse their arguments only in a step; the run should not begin then.

    Raises:
        SettingsError: the optimizer or the schedule cannot be created, cannot step, or keeps what
            no checkpoint can hold.
    """
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    made = _optimizer(kind, [parameter], optimizer)
    scheduler = _scheduler(made, schedule)
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
    tensors, plain = _split_state(made.state_dict()["state"])
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


def _kind(name: str) -> Kind:
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


def _optimizer(
    kind: Kind, parameters: list[torch.nn.Parameter], chosen: settings.OptimizerSettings
) -> torch.optim.Optimizer:
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


def _scheduler(
    optimizer: torch.optim.Optimizer, chosen: settings.ScheduleSettings
) -> Scheduler | None:
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
