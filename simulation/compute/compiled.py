"""``torch.compile`` for a pass that is repeated, or the pass as it is where that cannot be.

The first call compiles (inductor, through a C++ compiler) and takes half a minute; a second shape
is compiled once more, for all shapes. What fails in that is told once, and all goes on uncompiled.
Nothing of the compiler is imported before.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from headwater.common.system.console import console


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is compiled, as one whole graph, when it is first called.

    One graph has one backward pass, which adds to the gradients at its end: so one that fails in
    compiling has added nothing.
    """
    # No processes beside those that the user has asked for.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    say("passes are compiled: the first ones take a minute")
    whole: Callable[..., Any] = torch.compile(function, fullgraph=True)
    return whole


def say(what: str) -> None:
    """Tell the user what becomes of ``--compile``."""
    console.print(what, soft_wrap=True, markup=False, highlight=False)
