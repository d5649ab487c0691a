"""Optimizers of ``torch.optim`` without torch's compiler, which they load and do not need.

The first optimizer of a process imports ``torch._dynamo``: over a second and 73 MB (torch 2.13), to
tell a compiler that is not there where not to compile (``torch/_compile.py``; ``torch/optim/
optimizer.py``, ``_use_grad_for_differentiable``). Of it they call ``disable``, which returns the
function to be called, and ``graph_break``, which does nothing outside of a compiled function. While
an optimizer is at work here a stand-in does both. Whatever else is asked of the stand-in, the real
module is loaded for; and where that is loaded already there is no stand-in.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"

_lock = threading.RLock()


class _StandIn(ModuleType):
    """What optimizers use of ``torch._dynamo``, where nothing is compiled."""

    @staticmethod
    def disable(fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        return fn

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system looks for those
            raise AttributeError(name)
        _remove(self)
        return getattr(importlib.import_module(NAME), name)


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Let optimizers be made and step without loading torch's compiler. May be nested."""
    with _lock:
        if NAME in sys.modules:
            yield
            return
        stand_in = _StandIn(NAME)
        sys.modules[NAME] = stand_in
        torch._dynamo = stand_in
        try:
            yield
        finally:
            _remove(stand_in)


def _remove(stand_in: ModuleType) -> None:
    """Leave things as they were, unless the real module is there by now."""
    if sys.modules.get(NAME) is stand_in:
        del sys.modules[NAME]
        del torch._dynamo
