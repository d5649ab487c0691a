"""Uses optimizers of ``torch.optim`` without loading torch's compiler, which they do not need.

The first optimizer of a process imports ``torch._dynamo``, which takes over a second and 73 MB
(torch 2.13), only to mark functions that should not be compiled (``torch/_compile.py``;
``torch/optim/optimizer.py``, ``_use_grad_for_differentiable``). Optimizers call two functions of
it: ``disable``, which returns the function to call, and ``graph_break``, which does nothing outside
of a compiled function. While an optimizer is in use here, a stub provides both. Any other attribute
of the stub loads the real module; if that is loaded already, no stub is used.
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


class _Stub(ModuleType):
    """The two functions of ``torch._dynamo`` that optimizers call, without effect."""

    @staticmethod
    def disable(fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        return fn

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system looks these up
            raise AttributeError(name)
        _remove(self)
        return getattr(importlib.import_module(NAME), name)


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Create optimizers and take steps without loading torch's compiler; may be nested."""
    with _lock:
        if NAME in sys.modules:
            yield
            return
        stub = _Stub(NAME)
        sys.modules[NAME] = stub
        torch._dynamo = stub
        try:
            yield
        finally:
            _remove(stub)


def _remove(stub: ModuleType) -> None:
    """Remove the stub, unless the real module has replaced it."""
    if sys.modules.get(NAME) is stub:
        del sys.modules[NAME]
        del torch._dynamo
