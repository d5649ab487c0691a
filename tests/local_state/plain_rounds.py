"""Plain loops of PyTorch: SCAFFOLD and kept optimizers, for any cohort of each round."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from headwater.client.training.sampler import SamplerPosition, window
from tests.own_feature.plain import CLIENTS, RATE, SIZE, STEPS, gradient, initial, put, vector
from tests.python_tasks import Signs

Cohorts = Sequence[Collection[int]]


def batches(client: int, number: int, *, num_parts: int) -> Sequence[tuple[Tensor, Tensor]]:
    """Return the batches of a client's round ``number``, counted by those it was in, from 1."""
    data = Signs().train_examples(data=None, part=client, num_parts=num_parts)
    place = SamplerPosition(epoch=number - 1)
    taken = window(place, quota=len(data), run_seed=0, name=str(client), num_examples=len(data))
    inputs, labels = data.tensors
    return [
        (inputs[list(at)], labels[list(at)])
        for at in (taken.positions[step * SIZE :][:SIZE] for step in range(STEPS))
    ]


def scaffold(cohorts: Cohorts) -> Tensor:
    """Algorithm 1 with option II; c is the mean over the clients that have ever taken part."""
    model = initial()
    server_P = vector(model)
    variates: dict[int, Tensor] = {}
    num_rounds = dict.fromkeys({client for cohort in cohorts for client in cohort}, 0)
    for cohort in cohorts:
        known = torch.stack(list(variates.values())) if variates else torch.zeros(1, len(server_P))
        mean_P, moves = known.mean(0), []
        for client in cohort:
            num_rounds[client] += 1
            put(model, server_P)
            own_P = variates.get(client, mean_P)
            for batch in batches(client, num_rounds[client], num_parts=len(num_rounds)):
                put(model, vector(model) - RATE * (gradient(model, batch) + mean_P - own_P))
            moves.append(server_P - vector(model))
            variates[client] = own_P - mean_P + moves[-1] / (STEPS * RATE)
        server_P = server_P - torch.stack(moves).mean(0)
    return server_P


def kept_optimizers(
    cohorts: Cohorts, make: Callable[[Any], torch.optim.Optimizer], *, num_parts: int = CLIENTS
) -> Tensor:
    """FedAvg whose clients' optimizers go on from round to round."""
    server, num_rounds = initial(), dict.fromkeys(range(num_parts), 0)
    states: dict[int, dict[str, Any]] = {}
    for cohort in cohorts:
        moved = []
        for client in cohort:
            num_rounds[client] += 1
            model = copy.deepcopy(server)
            optimizer = make(model.parameters())
            if client in states:
                optimizer.load_state_dict(states[client])
            for batch in batches(client, num_rounds[client], num_parts=num_parts):
                gradient(model, batch)
                optimizer.step()
            states[client] = copy.deepcopy(optimizer.state_dict())
            moved.append(vector(model))
        put(server, torch.stack(moved).mean(0))
    return vector(server)
