"""Finds classes of ``torch.optim`` by their names, and makes objects of them with settings."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import torch

from headwater.common.errors import SettingsError
from headwater.common.user_code.named_objects import check_arguments

# Arguments of schedules that have no default; a step is a round.
EXAMPLES = {"T_max": "100 (the rounds)", "step_size": "30 (rounds)", "gamma": "0.95"}
NOT_ON_SUMS = (torch.optim.LBFGS, torch.optim.SparseAdam)


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return a class of ``torch.optim`` by its name, ignoring case; of muon, ours.

    Raises:
        SettingsError: torch has none of this name.
    """
    if name.lower() == "muon":
        from headwater.common.optimizers.muon import Muon

        return Muon
    return named_class(torch.optim, name, torch.optim.Optimizer, but=NOT_ON_SUMS)


def in_groups(
    kind: object, parameters: Iterable[torch.nn.Parameter], model: torch.nn.Module | None
) -> list[Any]:
    """Return a model's parameters as an optimizer's class takes them: in its groups, if any."""
    groups = getattr(kind, "parameter_groups", None)
    return list(parameters) if groups is None or model is None else groups(parameters, model)


def named_class(module: Any, name: str, base: type, *, but: Collection[type] = ()) -> type[Any]:
    """Return a class of a torch module by its name, ignoring case.

    An error does not offer the classes ``but``, which the caller refuses.

    Raises:
        SettingsError: the module has no such class that inherits from ``base``.
    """
    classes = {
        key.lower(): value
        for key, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, base)
        and value is not base
        and not key.startswith("_")
    }
    if name.lower() not in classes:
        offered = sorted(kind.__name__ for kind in classes.values() if kind not in but)
        near = get_close_matches(name, offered, n=1)
        question = f"; did you mean {near[0]}?" if near else ""
        raise SettingsError(
            f"{module.__name__} has no {name!r}{question}", remedy=f"one of: {', '.join(offered)}"
        )
    return classes[name.lower()]


def instance_of(kind: type[Any], first: Any, arguments: Mapping[str, Any]) -> Any:
    """Return an object of a torch class, made of its first argument and these by name.

    Raises:
        SettingsError: the class has no such argument, needs another one, or raises.
    """
    check_arguments(kind, arguments, what=kind.__name__, num_own=1)
    needed = [
        name
        for name, one in list(inspect.signature(kind).parameters.items())[1:]
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    if missing := [name for name in needed if name not in arguments]:
        examples = ", ".join(f"{name}={EXAMPLES.get(name, '...')}" for name in missing)
        raise SettingsError(
            f"{kind.__name__} needs {', '.join(missing)}",
            remedy=f"set the argument, as {examples}",
        )
    try:
        return kind(first, **arguments)
    except Exception as error:
        raise SettingsError(
            f"{kind.__name__}: {str(error) or type(error).__name__}",
            remedy=_remedy(kind),
        ) from error


def with_tuples(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of settings with their lists as tuples, as torch has them (``betas``)."""
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()
    }


def check_steps_on_sums(kind: object) -> None:
    """Check that an optimizer steps along a gradient that it is given.

    Raises:
        SettingsError: it needs a closure, or sparse gradients.
    """
    if isinstance(kind, type) and issubclass(kind, NOT_ON_SUMS):
        raise SettingsError(
            f"{kind.__name__} cannot step on a sum of gradients", remedy="choose sgd, adam or adamw"
        )


def _remedy(kind: type[Any]) -> str:
    if kind.__module__.startswith("headwater."):
        return "its arguments stand in docs/local.md"
    if not kind.__module__.startswith("torch."):
        return "correct the class, or its arguments"
    return "see its page in torch's docs for its arguments"
