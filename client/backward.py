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

Run = Callable[[Tensor], None]


def run_backward(loss: Tensor) -> None:
    """Add the gradients of a scalar into the leaves' ``grad``, as ``loss.backward()`` does.

    Raises:
        Exception: what the engine, or an operation's own backward, raises.
    """
    # A subclass may have a backward of its own; a loss of another kind has a gradient of that kind.
    if type(loss) is Tensor and loss.dtype is torch.float32 and loss.is_cpu:
        _run()(loss)
    else:
        plain_backward(loss)


def plain_backward(loss: Tensor) -> None:
    """Do it by torch's public way."""
    loss.backward()  # type: ignore[no-untyped-call]


@functools.cache
def _run() -> Run:
    """Return the engine, or the public way if the engine is not what is expected."""
    try:
        run = _by_engine(torch.autograd.Variable._execution_engine.run_backward)
        leaf = torch.full((2,), 3.0, requires_grad=True)
        leaf.grad = torch.ones(2)
        with torch.enable_grad():
            run((leaf * leaf).sum())
        if leaf.grad.tolist() == [7.0, 7.0]:
            return run
        log.debug("autograd's engine gave another gradient")
    except Exception as error:
        log.debug("autograd's engine: %s: %s", type(error).__name__, error)
    return plain_backward


def _by_engine(engine: Callable[..., Any]) -> Run:
    def run(loss: Tensor) -> None:
        # Made anew each time: an operation may write over the gradient that it is given.
        engine(
            (loss,),
            (torch.ones_like(loss),),
            False,  # the graph is not kept
            False,  # nor is one made of the backward pass
            (),  # into all leaves
            allow_unreachable=True,
            accumulate_grad=True,
        )

    return run
