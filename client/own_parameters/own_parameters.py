"""A client's own parameters, which stay on the device: loaded as of its last counted round."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from headwater.common.messages import Plan
from headwater.common.model.local_state import LocalState, LocalStore
from headwater.common.model.parameters import ModelImage

log = logging.getLogger(__name__)


class OwnParameters:
    """Loads the own parameters of the clients of a process into their shared model."""

    def __init__(self, image: ModelImage, built: Callable[[int], ModelImage]) -> None:
        """``built`` returns the model as the task builds it under a seed."""
        self._image = image
        self._built = built
        self._initial: tuple[int, Tensor] | None = None

    def load(self, name: str, plan: Plan, store: LocalStore | None) -> LocalState:
        """Load a client's own parameters, as of its last counted round; empty if it has none.

        Until an update of the client has counted, they are the initial ones of the run's seed, on
        the device as on the server. A server that says later that none has counted cannot reset
        them: steps that were counted once are kept.
        """
        assert store is not None  # a model with such parameters has one
        last = plan.counted_round
        state = store.read(self._image.layout)
        if state is None:
            state = LocalState(values_L=self._initial_of(plan.run_seed))
        state = state.settle(last)
        if last is None and state.round is not None:
            log.warning(
                "%s: the server says that no round has counted this device, whose own parameters "
                "are of round %d: they are kept; to begin anew, delete %s",
                name,
                state.round,
                store.where,
            )
        elif state.round != last:
            log.warning(
                "%s: the parameters that stay on this device %s, and its last counted round is %d: "
                "the steps between are lost",
                name,
                "are not stored" if state.round is None else f"are of round {state.round}",
                last,
            )
        self._image.local_L.copy_(state.values_L)
        return state

    def _initial_of(self, seed: int) -> Tensor:
        if self._initial is None or self._initial[0] != seed:
            with torch.random.fork_rng(devices=[]):
                self._initial = seed, self._built(seed).local_L
        return self._initial[1]
