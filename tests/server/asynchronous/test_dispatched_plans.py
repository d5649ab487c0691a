"""The fleet of asynchronous rounds: one copy of a step's model, and clients that are at work."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from flwr.app import Message
from torch import nn

from headwater.common.flower import records
from headwater.common.flower.grid import ensure_message_id
from headwater.common.messages import Plan
from headwater.common.model.parameters import ModelImage
from headwater.server.asynchronous import dispatched_plans
from headwater.server.asynchronous.dispatching_grid_fleet import DispatchingGridFleet
from tests.common.system.test_bounded_memory import is_in_file
from tests.server.flower.test_registration import REQUEST, Wire


class Answering(Wire):
    """A grid whose nodes describe themselves at once, and work on their plans."""

    def __init__(self, *nodes: int) -> None:
        super().__init__(*nodes)
        self.plans: list[Message] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = super().push_messages(messages)
        for node, _ in self.new_requests():
            self.answer(node)
        return pushed

    def dispatch(self, messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        self.plans += sent
        return [ensure_message_id(message) for message in sent]

    def models(self) -> list[memoryview]:
        found = [records.vector(message.content) for message in self.plans]
        return [memoryview(model) for model in found if model is not None]


def test_clients_that_join_while_a_buffer_fills_share_one_copy_of_its_model() -> None:
    wire, image = Answering(1, 2, 3), ModelImage(nn.Linear(2, 1))
    fleet = DispatchingGridFleet(wire)
    fleet.describe(REQUEST, min_clients=3)
    for name, step in (("d1", 1), ("d2", 1), ("d3", 2)):
        chosen = Plan(round=step, run_seed=0, model_version=step - 1, quota=1, micro_batch_size=1)
        image.values_P.fill_(step)
        fleet.dispatch({name: chosen}, image, round_number=step)
    first, second, third = wire.models()
    assert first.obj is second.obj
    assert (bytes(first) == bytes(third), bytes(third)) == (False, bytes(image.buffer()))


def test_a_client_that_loses_its_link_before_any_answer_is_not_asked_again() -> None:
    wire, image = Answering(1, 2), ModelImage(nn.Linear(2, 1))
    fleet = DispatchingGridFleet(wire)
    fleet.describe(REQUEST, min_clients=2)
    chosen = Plan(round=1, run_seed=0, model_version=0, quota=1, micro_batch_size=1)
    fleet.dispatch({"d1": chosen}, image, round_number=1)
    wire.nodes = [2, 3]
    clients = fleet.describe(REQUEST, min_clients=0)
    assert (set(clients.reports), clients.disconnected) == ({"d1", "d2", "d3"}, [])


def test_the_models_of_many_steps_with_plans_out_take_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond the bound they are in files, and each client still gets the model of its own step."""
    image = ModelImage(nn.Linear(2, 1))
    monkeypatch.setattr(dispatched_plans, "MODELS_RAM_BYTES", 2 * image.layout.num_bytes)
    wire = Answering(*range(1, 6))
    fleet = DispatchingGridFleet(wire)
    fleet.describe(REQUEST, min_clients=5)
    for step in range(1, 6):
        chosen = Plan(round=step, run_seed=0, model_version=step - 1, quota=1, micro_batch_size=1)
        image.values_P.fill_(step)
        fleet.dispatch({f"d{step}": chosen}, image, round_number=step)
    models = [np.frombuffer(model, np.float32) for model in wire.models()]
    assert [set(model.tolist()) for model in models] == [{step} for step in range(1, 6)]
    found = [is_in_file(model.obj) for model in wire.models()]  # type: ignore[arg-type]
    assert found == [False, False, True, True, True]
