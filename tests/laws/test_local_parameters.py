"""The law with parameters that stay on the devices: shared steps are exact under each one's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import TensorDataset

from headwater.client.device.hardware import ThisMachine
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.client.training.sampler import SamplerState
from headwater.common.messages import Update
from headwater.common.model.local_state import LocalStore
from headwater.server.aggregation.cohort_sum import CohortSum
from tests.plans import plan_of
from tests.tasks import gradient_sum

RATE = 2.0**-6
PATTERNS = "1.*"  # the output layer of TwoLayers, whose parameters come last in the whole vector


@dataclass(kw_only=True)
class Device:
    """One device of a trainer that all devices share, as in the simulator."""

    part: int
    home: Trainer
    sampler: SamplerState = field(default_factory=SamplerState)
    kept: list[bytes] = field(default_factory=list)
    counted: int | None = None

    @property
    def store(self) -> LocalStore:
        return LocalStore("a test", lambda: self.kept[-1] if self.kept else None, self.kept.append)

    @property
    def identity(self) -> Identity:
        return Identity(name=str(self.part), data=None, part=self.part, num_parts=4)

    @property
    def own_L(self) -> Tensor:  # noqa: N802 - a dimension
        """The device's own parameters as the next round finds them."""
        plan = plan_of(
            round=99,
            run_seed=0,
            model_version=0,
            quota=1,
            micro_batch_size=1,
            counted_round=self.counted,
        )
        return self.home.load_local(self.identity, plan, self.store).values_L.clone()

    def train(self, number: int, quota: int, size: int, **more: object) -> Update:
        rates = {"own_learning_rate": RATE, "local_learning_rate": RATE}
        plan = plan_of(
            round=number,
            run_seed=0,
            model_version=number - 1,
            quota=quota,
            micro_batch_size=size,
            counted_round=self.counted,
            **rates,
            **more,
        )
        update, self.sampler = self.home.train(
            self.identity, ThisMachine(), plan, self.sampler, store=self.store
        )
        return update

    def positions(self, number: int, quota: int) -> Sequence[int]:
        plan = plan_of(round=number, run_seed=0, model_version=0, quota=quota, micro_batch_size=1)
        settled = self.sampler.settle(self.counted)
        return self.home.numbers(self.identity, plan, settled, plan.run_seed)


def trainer() -> Trainer:
    return Trainer(
        "tests/tasks.py:TwoLayers",
        batch_norm=None,
        check_task=False,
        local_parameters=PATTERNS,
    )


@settings(max_examples=settings().max_examples // 4)
@given(
    work=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 9)), min_size=1, max_size=4),
    lost=st.sets(st.integers(0, 3)),
)
def test_the_shared_step_is_the_exact_gradient_under_each_device_s_own_parameters(
    work: list[tuple[int, int]], lost: set[int]
) -> None:
    """Against gradients by hand in float64; two rounds, of which a device may lose the first."""
    home = trainer()
    num_shared, image = home.image.layout.num_parameters, home.image
    devices = [Device(part=part, home=home) for part in range(len(work))]
    for number in (1, 2):
        total = CohortSum(image.layout)
        total.open(num_clients=len(work), planned_weight=sum(quota for quota, _ in work))
        expected, before = torch.zeros(num_shared, dtype=torch.float64), image.values_P.clone()
        for device, (quota, size) in zip(devices, work, strict=True):
            own_L, positions = device.own_L, device.positions(number, quota)
            data = home.examples(device.identity)
            assert isinstance(data, TensorDataset)
            whole = torch.from_numpy(gradient_sum(torch.cat([before, own_L]), data, positions))
            update = device.train(number, quota, size)
            total.check(update.values_P, name=update.name)
            total.fold(update.values_P, update.report.weight)
            expected += whole[:num_shared]
            if not (number == 1 and device.part in lost):
                device.counted = number
                own_L = own_L - RATE * (whole[num_shared:] / quota).float()
            assert torch.allclose(device.own_L, own_L, rtol=1e-5, atol=1e-6)
        mean_P = total.close().double()
        weight = sum(quota for quota, _ in work)
        bound = 1e-5 * max(float(expected.abs().max()) / weight, 1.0)
        assert float((mean_P - expected / weight).abs().max()) <= bound
        image.values_P.sub_(mean_P.float(), alpha=RATE)


def test_a_round_that_is_repeated_or_lost_takes_no_step() -> None:
    device = Device(part=0, home=trainer())
    start_L = device.own_L
    first = device.train(1, 8, 4).values_P.clone()
    assert torch.equal(device.train(1, 8, 4).values_P, first)  # the same round again
    assert torch.equal(device.own_L, start_L)
    device.train(2, 8, 4)
    device.counted = 2
    once_L = device.own_L
    assert not torch.equal(once_L, start_L)
    device.train(3, 8, 4)  # not counted
    assert torch.equal(device.own_L, once_L)


def test_local_steps_move_both_parts_and_send_the_shared_one() -> None:
    device = Device(part=0, home=trainer())
    home, num_shared = device.home, device.home.image.layout.num_parameters
    data, positions = home.examples(device.identity), device.positions(1, 8)
    assert isinstance(data, TensorDataset)
    start_P = home.image.values_P.clone()
    whole = torch.cat([start_P, device.own_L]).double()
    for part in (positions[:4], positions[4:]):
        gradient = torch.from_numpy(gradient_sum(whole, data, part)) / 4
        whole = whole - RATE * gradient
    update = device.train(1, 8, 4, local_steps=2)
    device.counted = 1
    assert torch.allclose(device.own_L.double(), whole[num_shared:], rtol=1e-5, atol=1e-6)
    sent = 8 * (start_P.double() - whole[:num_shared])
    assert torch.allclose(update.values_P.double(), sent, rtol=1e-4, atol=1e-5)
    assert torch.equal(home.image.values_P, start_P)


def test_a_client_that_was_never_counted_begins_with_the_run_s_own_initial_values() -> None:
    device = Device(part=0, home=trainer())
    built = Trainer(
        "tests/tasks.py:TwoLayers",
        batch_norm=None,
        check_task=False,
        local_parameters=PATTERNS,
    )._built(seed=0)
    assert torch.equal(device.own_L, built.local_L)


def test_lost_local_parameters_are_said(caplog: pytest.LogCaptureFixture) -> None:
    device = Device(part=0, home=trainer(), counted=7)
    _ = device.own_L
    assert "the parameters that stay on this device are not stored, and its last counted round" in (
        caplog.text
    )


@pytest.mark.parametrize("claimed", [None, 7])
def test_a_server_s_false_claim_of_what_was_counted_does_not_reset_them(
    claimed: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(part=0, home=trainer())
    device.train(1, 8, 4)
    device.counted = 1
    own_L = device.own_L
    device.train(2, 8, 4)
    device.counted = claimed
    device.train(3, 8, 4)  # which writes what it has
    device.counted = 1
    assert torch.equal(device.own_L, own_L)
    assert "are of round 1" in caplog.text
