"""The server's step on the mean gradient: an optimizer of torch or of the user, or a server rule.

The optimizer steps the model's own parameters, which are views into the image, so the step changes
the image in place.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwater.common.errors import CheckpointCorrupt, SettingsError
from headwater.common.model.parameters import ModelImage
from headwater.common.optimizers.torch_compiler_stub import without_dynamo
from headwater.common.parsed_text import json_of
from headwater.common.settings import schema as settings
from headwater.common.user_code.failures import running
from headwater.common.wording import bytes_text
from headwater.server.aggregation.optimizer_settings import (
    Kind,
    has_evaluation_weights,
    kind_of,
    new_optimizer,
    new_scheduler,
    split_state,
    to_training,
    try_out,
)
from headwater.server.aggregation.server_rule import RuleOptimizer

if TYPE_CHECKING:
    from headwater.server.aggregation.optimizer_changes import Chosen

log = logging.getLogger(__name__)

# The learning rate is no factor of these optimizers' steps: Rprop uses it in the first step only,
# ASGD in the next one, and Adafactor as an upper bound.
RATE_IS_NO_FACTOR = (torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adafactor)


class ServerOptimizer:
    """An optimizer of a model image's parameters, with warmup and schedule."""

    def __init__(
        self,
        image: ModelImage,
        optimizer: settings.OptimizerSettings,
        schedule: settings.ScheduleSettings,
    ) -> None:
        # Imports a user's module before the compiler's stub is in place, which it may import.
        kind = kind_of(optimizer.kind)
        with without_dynamo():
            self._build(image, kind, optimizer, schedule)

    def _build(
        self,
        image: ModelImage,
        kind: Kind,
        optimizer: settings.OptimizerSettings,
        schedule: settings.ScheduleSettings,
    ) -> None:
        size = image.layout.num_parameters
        num_bytes = size * try_out(kind, optimizer, schedule, num_parameters=size)
        log.info("%s keeps %s of state", optimizer.kind, bytes_text(num_bytes))
        self._is_users = ":" in optimizer.kind
        self._kind, self._chosen = kind, (optimizer, schedule)
        self._image = image
        self._parameters, self._spans = image.trainable(), image.layout.spans
        if not isinstance(kind, type):  # a rule takes the whole vector
            self._parameters = [torch.nn.Parameter(image.values_P)]
            self._spans = ((0, image.layout.num_parameters),)
        self._optimizer = new_optimizer(kind, self._parameters, optimizer, image.model)
        to_training(self._optimizer)
        self._scheduler = new_scheduler(self._optimizer, schedule)
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

    @property
    def is_paused(self) -> bool:
        """Whether the schedule's rate is 0, so that the next step moves no parameter.

        An optimizer or rule of the user's own may move them without a rate.
        """
        rates = [group["lr"] for group in self._optimizer.param_groups]
        return self._scheduler is not None and not self._is_users and not any(rates)

    @property
    def keeps_others(self) -> bool:
        """Whether the weights to keep are not those that are stepped: it has train and eval."""
        return has_evaluation_weights(self._optimizer)

    @contextmanager
    def kept_weights(self) -> Iterator[None]:
        """Put the weights to keep into the model meanwhile, to test or to save it.

        Schedule-free optimizers (Defazio et al. 2024), averages of weights and their kin step some
        weights and keep others. The stepped ones are restored to the bit.
        """
        if not self.keeps_others:
            yield
            return
        stepped = [parameter.detach().clone() for parameter in self._parameters]
        self.keep()
        try:
            yield
        finally:
            to_training(self._optimizer)
            for parameter, value in zip(self._parameters, stepped, strict=True):
                parameter.detach().copy_(value)

    def keep(self) -> None:
        """Put the weights to keep into the model, for good."""
        if self.keeps_others:
            self._optimizer.eval()  # type: ignore[attr-defined] # it has one

    def pass_step(self) -> None:
        """Advance the schedule without a step.

        Raises:
            SettingsError: the schedule is at its end.
        """
        from headwater.server.aggregation.optimizer_changes import advance

        advance(self._scheduler, 1)

    @without_dynamo()
    def step(self, mean_P: Tensor, factor: float = 1.0, *, unused: Sequence[int] = ()) -> float:
        """Take one step along a mean gradient [P], advance the schedule, and return the rate used.

        The tensors ``unused``, by their place, have no gradient: an optimizer of torch leaves them
        as they are, where it would move one with a gradient of zero (weight decay, momentum). A
        server rule sees zeros. The rate used is the schedule's
        times ``factor``, for this step alone: schedules compute their next rate from the last one,
        and must not see it.

        Raises:
            SettingsError: the schedule is at its end (OneCycleLR has a total of steps).
            TaskFailed: the user's own optimizer or rule raised; the message shows its line.
        """
        for parameter, (start, end) in zip(self._parameters, self._spans, strict=True):
            parameter.grad = mean_P[start:end].view(parameter.shape)
        if not isinstance(self._optimizer, RuleOptimizer):
            for at in unused:
                self._parameters[at].grad = None
        with self._rates_times(factor):
            used = self.learning_rate
            with self._running():
                self._optimizer.step()
        self._image.take_back()
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
        tensors, plain = split_state(whole["state"])
        rest = {
            "kinds": self._kinds,
            "groups": whole["param_groups"],
            "plain": plain,
            "scheduler": self._scheduler.state_dict() if self._scheduler else None,
        }
        return tensors, json.dumps(rest)

    @without_dynamo()
    def restore(
        self,
        tensors: Mapping[str, Tensor],
        rest: str,
        *,
        before: Chosen | None = None,
        num_steps: int = 0,
    ) -> None:
        """Restore what ``state`` returned after ``num_steps`` steps with the settings ``before``.

        Settings that have changed since hold from the next step on. The schedule continues at the
        rate that it would have reached by now with the settings of today. None: they are the same.

        Raises:
            SettingsError: the state is of another optimizer, or does not fit a changed setting.
            CheckpointCorrupt: the state cannot be read, or is of another schedule.
        """
        from headwater.server.aggregation.optimizer_changes import (
            OTHER_OPTIMIZER,
            advance,
            carried_over,
            check_change,
            resolved,
        )

        try:
            plain = json_of(rest)
            if plain["kinds"][0] != self._kinds[0]:
                raise SettingsError(
                    f"the run was started with the optimizer {plain['kinds'][0]}, whose state does "
                    f"not fit {self._kinds[0]}",
                    remedy=OTHER_OPTIMIZER,
                )
            is_changed = before is not None and resolved(before) != resolved(self._chosen)
            if not is_changed and plain["kinds"] != self._kinds:
                raise ValueError(f"it belongs to {plain['kinds']}, not to {self._kinds}")
            groups = plain["groups"]
            state: dict[int, dict[str, Any]] = {}
            for name, value in (*tensors.items(), *plain["plain"].items()):
                index, _, key = name.partition(".")
                state.setdefault(int(index), {})[key] = value
            if is_changed:
                assert before is not None
                old = new_optimizer(self._kind, self._parameters, before[0], self._image.model)
                advance(new_scheduler(old, before[1]), num_steps)
                advance(self._scheduler, num_steps)
                check_change(self._kind, before, self._chosen, old=old, new=self._optimizer)
                groups = carried_over(groups, old, self._optimizer)
            self._optimizer.load_state_dict({"state": state, "param_groups": groups})
            if self._scheduler is not None and not is_changed:
                own = self._scheduler.state_dict()
                self._scheduler.load_state_dict(_with_types_of(own, plain["scheduler"]))
        except (KeyError, IndexError, ValueError, TypeError) as error:
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
