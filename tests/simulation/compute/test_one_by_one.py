"""One by one in a fleet: whose examples cannot be opened any more drops out, and nobody else."""

from __future__ import annotations

import torch

from headwater.common.errors import MissingData
from headwater.common.messages import Plan, Update
from headwater.common.settings.sources import load
from headwater.common.task import Examples
from headwater.server.fleet import Dropout
from headwater.simulation.compute.one_by_one import MOST_TOGETHER, OneByOne
from headwater.simulation.fleet.devices import ClientPlan, Devices
from headwater.simulation.fleet.fleet_spec import with_fleet
from tests.tasks import TwoLayers

NUM_DEVICES = MOST_TOGETHER + 3
GONE = 2


class CardTakenOut(Devices):
    """Devices of which one had its examples on a card."""

    def training_examples(self, part: int, plan: Plan) -> Examples:
        if part == GONE:
            raise MissingData("the card was taken out")
        return super().training_examples(part, plan)


def made(kind: type[Devices]) -> Devices:
    spec = f"{TwoLayers.__module__.replace('.', '/')}.py:{TwoLayers.__name__}"
    return kind(with_fleet(load(None, {"task": spec, "simulation.clients": NUM_DEVICES})))


def answers(one_by_one: OneByOne, devices: Devices) -> list[Update | Dropout]:
    plan = Plan(round=1, run_seed=0, model_version=0, quota=4, micro_batch_size=2)
    called = [ClientPlan(str(part), part, plan) for part in range(NUM_DEVICES)]
    found: list[Update | Dropout] = []
    image = devices.trainer.image
    for answer in one_by_one.train(called, image, run_id=1, timeout_seconds=None):
        assert isinstance(answer, Update | Dropout)
        if isinstance(answer, Update):  # the vector is another's soon
            answer = Update(values_P=answer.values_P.clone(), report=answer.report)
        found.append(answer)
    return found


def test_whose_examples_are_gone_drops_out_and_the_others_send_what_they_would() -> None:
    whole, broken = made(Devices), made(CardTakenOut)
    expected = answers(OneByOne(whole), whole)
    found = answers(OneByOne(broken), broken)
    assert [answer.name for answer in found] == [str(part) for part in range(NUM_DEVICES)]
    for part, (one, other) in enumerate(zip(found, expected, strict=True)):
        if part == GONE:
            assert isinstance(one, Dropout)
            assert isinstance(one.error, MissingData)
            continue
        assert isinstance(one, Update)
        assert isinstance(other, Update)
        assert torch.equal(one.values_P, other.values_P)
        assert one.report == other.report
