"""Parameters that stay on the device: which tensors of a model a run's patterns name.

A pattern is a shell's, over the names of ``model.named_parameters()`` and ``named_buffers()``:
``head.*`` names ``head.weight`` and ``head.bias``, also within a wrapper of torch's
(``common.model.tensor_file``). What it names is in no vector, on no wire and in
no file of the server. Each device trains its own (Arivazhagan et al. 2019, "Federated learning with
personalization layers"; Collins et al. 2021).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain

from torch import Tensor, nn

from headwater.common.errors import LocalParametersUnusable
from headwater.common.model.tensor_file import without_wrappers

MAX_NAMED = 6  # names in an error


def local_names(model: nn.Module, local_parameters: str | None) -> frozenset[str]:
    """Return all names of the tensors that patterns name, with commas between; empty for None.

    Raises:
        LocalParametersUnusable: a pattern names nothing, a frozen parameter, or one name of two of
            a tied tensor; together they name no trained parameter, or all of them.
    """
    if local_parameters is None:
        return frozenset()
    patterns = local_parameters.split(",")
    tensors = _named_tensors(model)
    known = without_wrappers(model, [name for names, _ in tensors for name in names])
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for pair in known.items() for name in pair):
            raise _unusable(
                f"{pattern!r} names nothing in the model, which has {_some([*known.values()])}"
            )
    local: list[str] = []
    for names, tensor in tensors:
        named = [n for n in names if _is_named(n, patterns) or _is_named(known[n], patterns)]
        if not named:
            continue
        if len(named) < len(names):
            rest = [name for name in names if name not in named]
            raise _unusable(
                f"it names {_some(named)} and not {_some(rest)}, which is the same tensor: tied "
                "weights stay on the device together or not at all"
            )
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            raise _unusable(f"it names {names[0]}, which is frozen: no device would train it")
        local += names
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    if not trained & set(local):
        raise _unusable(f"it names only buffers ({_some(local)}), which nothing trains")
    if trained <= set(local):
        raise _unusable("it names every parameter that is trained: nothing would be shared")
    return frozenset(local)


def by_all_names(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under all names that the model has for them; tied weights have several."""
    return {
        name: values[first]
        for names, _ in _named_tensors(model)
        for first in names
        if first in values
        for name in names
    }


def _named_tensors(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Return each parameter and buffer once, with all of its names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    every: Iterable[tuple[str, Tensor]] = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    for name, tensor in every:
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _some(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _unusable(what: str) -> LocalParametersUnusable:
    return LocalParametersUnusable(f"model.local_parameters (--local-parameters): {what}")
