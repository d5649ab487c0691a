"""Where simulated devices are with their plans, as the page of a simulation shows it."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from flwr.app import Message

from headwater.client.app import client_app
from headwater.common.settings.schema import Settings
from headwater.server.flower.grid_fleet import GridFleet
from headwater.server.rounds.round_loop import run
from headwater.server.rounds.run_state import Training
from headwater.server.transport.device_records import Stages
from headwater.simulation.engines.in_process import LocalFleet
from headwater.simulation.engines.message_grid import InProcessGrid
from headwater.simulation.fleet.virtual_hardware import virtual_hardware

SETTINGS = Settings.model_validate(
    {
        "task": "tests/tasks.py:TwoLayers",
        "rounds": 2,
        "threads": 1,
        "simulation": {"clients": 3},
        "plan": {"accumulation_steps": 2, "micro_batch_size": 4},
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
    }
)


def seen_in_process(settings: Settings) -> list[Stages]:
    """The stages whenever updates arrive."""
    seen: list[Stages] = []
    stages: Stages = {}

    class Seen(LocalFleet):
        def train(self, *given: Any, **named: Any) -> Iterator[Any]:
            for answer in super().train(*given, **named):
                seen.append(stages.copy())
                yield answer

    fleet = Seen(settings, run_id=1, stages=stages)
    run(Training(settings, run_id=1), fleet, on_round=lambda row: None)
    return seen


def test_in_process_all_compute_at_once_and_an_update_is_on_its_way_until_it_is_added() -> None:
    local = Settings.model_validate({**SETTINGS.model_dump(), "local": {"steps": 2}})
    first = {"0": "uploading", "1": "computing", "2": "computing"}
    assert seen_in_process(local) == 2 * [
        first,
        first | {"1": "uploading"},
        dict.fromkeys("012", "uploading"),
    ]


def test_devices_that_are_summed_in_one_block_are_on_their_way_together() -> None:
    assert seen_in_process(SETTINGS) == 2 * [dict.fromkeys("012", "uploading")]


def test_on_messages_a_device_computes_in_its_turn() -> None:
    seen: list[Stages] = []
    stages: Stages = {}

    class Seen(InProcessGrid):
        def _deliver(self, message: Message) -> Message:
            seen.append(stages.copy())
            return super()._deliver(message)

        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> Iterator[Message]:
            for reply in super().send_and_receive(messages, timeout=timeout):
                seen.append(stages.copy())
                yield reply

    grid = Seen(client_app(virtual_hardware), SETTINGS, stages=stages)
    grid.enter_run(secrets.randbits(62))
    run(Training(SETTINGS, run_id=1), GridFleet(grid), on_round=lambda row: None)
    turns: list[dict[str, str]] = []
    for name in "012":
        turns += [{name: "computing"}, {name: "uploading"}]
    assert [one for one in seen if one] == 2 * turns
    assert stages == {}
