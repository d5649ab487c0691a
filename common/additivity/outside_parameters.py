"""Finds parameters that a loss trains and no update holds, as they are not in the model.

A criterion with weights of its own (an ArcFace, a center loss, weights of several tasks) is an
attribute of the task, and a layer in a plain list is no submodule. In a plain loop the user gives
their parameters to the optimizer; here only the model's are in the update, and the others would
stay at their first, random values, on each device at its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from headwater.common.errors import TaskError

MAX_NODES = 100_000  # of a graph: a long recurrent one is looked at in part


def check_parameters_are_inside(task: object, model: nn.Module, loss: Tensor) -> None:
    """Check that every parameter that a loss depends on is one of the model's.

    A leaf that is no ``nn.Parameter`` may be an input, which a gradient penalty needs; it counts if
    an attribute holds it.

    Raises:
        TaskError: one is not; names the attribute that holds it, where it is found.
    """
    own = {id(parameter) for parameter in model.parameters()}
    for leaf in _leaves(loss):
        where = "" if id(leaf) in own else _place_of(leaf, task, model)
        if where or (isinstance(leaf, nn.Parameter) and id(leaf) not in own):
            raise TaskError(
                f"the loss depends on a parameter of shape {tuple(leaf.shape)} that is not in the "
                f"model{f': it is in {where}' if where else ''}; no update holds it, and it would "
                "never be trained",
                remedy="make it a part of the model in new_model, as model.criterion = ..., and "
                "hold layers in nn.ModuleList or nn.ModuleDict instead of a list or dict; or turn "
                "its requires_grad off if it should stay as it is",
            )


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of a loss's graph, to which autograd adds gradients."""
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting and len(seen) < MAX_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            yield variable
        waiting += [following for following, _ in node.next_functions]


def _place_of(parameter: Tensor, task: object, model: nn.Module) -> str:
    """Return the attribute of the task or of a module that holds a parameter; "" if none is."""
    holders: list[tuple[str, Any]] = [(type(task).__name__, task)]
    holders += [(f"model.{name}".rstrip("."), module) for name, module in model.named_modules()]
    for prefix, holder in holders:
        for name, value in getattr(holder, "__dict__", {}).items():
            items = value.values() if isinstance(value, dict) else value
            held = [*items] if isinstance(value, list | tuple | dict) else [value]
            for one in held if not name.startswith("_") else ():
                parameters = one.parameters() if isinstance(one, nn.Module) else [one]
                if any(inner is parameter for inner in parameters):
                    return f"{prefix}.{name}"
    return ""
