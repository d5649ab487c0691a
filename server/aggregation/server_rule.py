"""A server rule: any function from the cohort's mean gradient and a state to a step.

The parameters move by minus the learning rate times the step, so that schedules, warmup and batch
scaling work as for an optimizer of ``torch.optim``. The state is stored in each checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from headwater.common.errors import SettingsError
from headwater.common.user_code.named_objects import check_arguments

State = dict[str, Any]


class ServerRule(Protocol):
    """A function of the mean gradient [P] and a state, and of ``optimizer.arguments`` by name."""

    def __call__(self, mean_P: Tensor, state: State, /, *_: Any, **arguments: Any) -> Tensor:
        """Return the step [P], float32; the rule may change ``state``, which begins empty.

        The state holds tensors, numbers, texts and lists of these; it is the same after a resume.
        """
        ...


class RuleOptimizer(torch.optim.Optimizer):
    """Steps one flat parameter by a server rule."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        rule: ServerRule,
        *,
        lr: float,
        arguments: Mapping[str, Any],
    ) -> None:
        """Take one parameter, the rule and its arguments.

        Raises:
            SettingsError: the rule has no such argument.
        """
        self.name = getattr(rule, "__name__", type(rule).__name__)
        check_arguments(rule, arguments, what=f"the server rule {self.name}", num_own=2)
        super().__init__(parameters, {"lr": lr})
        self._rule = rule
        self._arguments = dict(arguments)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step.

        Raises:
            SettingsError: the rule returned something else than a float32 step of the same size.
        """
        assert closure is None
        (group,) = self.param_groups
        (parameter,) = group["params"]
        mean_P = parameter.grad.reshape(-1)
        step_P = self._rule(mean_P, self.state[parameter], **self._arguments)
        if not isinstance(step_P, Tensor):
            raise SettingsError(self._wrong(mean_P, type(step_P).__name__))
        if step_P.shape != mean_P.shape or step_P.dtype != torch.float32:
            raise SettingsError(self._wrong(mean_P, f"{step_P.dtype} {tuple(step_P.shape)}"))
        parameter.sub_(step_P.view(parameter.shape), alpha=group["lr"])

    def _wrong(self, mean_P: Tensor, found: str) -> str:
        return (
            f"the server rule {self.name} must return a step like the mean gradient, "
            f"torch.float32 {tuple(mean_P.shape)}, found {found}"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state; torch itself would convert integer tensors to float32."""
        super().load_state_dict(state_dict)
        (parameter,) = self.param_groups[0]["params"]
        self.state[parameter] = dict(state_dict["state"].get(0, {}))
