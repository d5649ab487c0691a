"""The backward pass of a summed loss, without what ``Tensor.backward`` asks of its arguments.

``torch.autograd.backward`` takes many outputs, gradients and inputs of many kinds. Looking through
them takes Python 40 us with torch 2.13, for a small model a third of the pass. Here there is one
scalar, and its gradient is 1: autograd's engine is called at once, as ``Tensor.backward`` calls it
in the end, so the gradients are the same to the bit.

The engine's name is not part of torch's public interface (it has been the same since 2017). So it
is tried once a process, and where it is gone or does otherwise, ``Tensor.backward`` does the work.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Engine = Callable[..., Any]


def run_backward(loss: Tensor) -> None:
    """Add the gradients of a scalar into the leaves' ``grad``, as ``loss.backward()`` does.

    Raises:
        Exception: what the engine, or an operation's own backward, raises.
    """
    engine = _engine()
    # A subclass may have a backward of its own; a loss of another kind has a gradient of that kind.
    if engine is None or type(loss) is not Tensor or loss.dtype is not torch.float32:
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        _call(engine, loss)


def _call(engine: Engine, loss: Tensor) -> None:
    engine(
        (loss,),
        # Made anew each time: an operation may write over the gradient that it is given.
        (torch.ones_like(loss),),
        False,  # the graph is not kept
        False,  # nor is one made of the backward pass
        (),  # into all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )


@functools.cache
def _engine() -> Engine | None:
    """Return the engine's backward pass; None if it is not what is expected."""
    try:
        engine: Engine = torch.autograd.Variable._execution_engine.run_backward
        leaf = torch.full((2,), 3.0, dtype=torch.float32, requires_grad=True)
        leaf.grad = torch.ones_like(leaf)
        with torch.enable_grad():
            _call(engine, (leaf * leaf).sum())
        if leaf.grad.tolist() == [7.0, 7.0]:
            return engine
        log.debug("autograd's engine gave another gradient")
    except Exception as error:
        log.debug("autograd's engine: %s: %s", type(error).__name__, error)
    return None
