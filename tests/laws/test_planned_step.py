"""The law with the planner on: the same examples give the same step, whatever the plan was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwater.client.device.hardware import MonotonicClock
from headwater.client.features import train_round
from headwater.client.memory.peak_model import ProcessMemory
from headwater.client.training.accumulator import Accumulator
from headwater.client.training.context import TrainingContext
from headwater.client.training.sampler import SamplerPosition, Window, window
from headwater.common.estimates.linear_fit import Line
from headwater.common.messages import Plan, Vitals
from headwater.common.model.parameters import ModelImage, build_model
from headwater.common.settings import schema as chosen
from headwater.common.task import Examples, Task, max_weight_per_example
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.planning.cohort import dataset_weights
from headwater.server.planning.device_estimates import DeviceEstimate
from headwater.server.planning.planner import Assignment, TransferCosts
from tests import reference
from tests.laws.architectures import ARCHITECTURES, NUM_EXAMPLES
from tests.server.planning.planned import Candidate, assign, slowness

pytestmark = pytest.mark.slow

RELATIVE = 1e-6  # as for plans that nobody made (test_exact_step)
MIB = 2**20

SECONDS = st.floats(1e-6, 10.0)
RATE = st.none() | st.floats(1e3, 1e8)
ESTIMATES = st.builds(
    DeviceEstimate,
    line=st.builds(Line, base=st.just(0.0) | SECONDS, each=SECONDS),
    fastest_micro_batch_size=st.none() | st.integers(1, 64),
    vitals=st.builds(
        Vitals,
        memory_limit_bytes=st.none() | st.integers(64 * MIB, 1024 * MIB),
        base_bytes=st.integers(0, 128 * MIB),
        bytes_per_example=st.floats(MIB, 64 * MIB),
        upload_bytes_per_second=RATE,
        download_bytes_per_second=RATE,
        share=st.just(1.0) | st.floats(0.05, 1.0),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Clients as a server knows them, and the target of a round."""

    devices: list[Candidate]
    target: int
    deadline_seconds: float | None
    costs: TransferCosts

    def plans(self) -> Mapping[str, Assignment]:
        able = [
            device
            for device in self.devices
            if not slowness(device, deadline_seconds=self.deadline_seconds, costs=self.costs)
        ]
        return assign(
            able,
            chosen.PlanSettings(),
            target=self.target,
            deadline_seconds=self.deadline_seconds,
            costs=self.costs,
        )


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    estimates = draw(st.lists(ESTIMATES, min_size=1, max_size=5))
    return Fleet(
        devices=[
            Candidate(str(part), replace(one, num_examples=NUM_EXAMPLES))
            for part, one in enumerate(estimates)
        ],
        target=draw(st.integers(1, 5 * NUM_EXAMPLES)),
        deadline_seconds=draw(st.none() | st.floats(0.01, 100.0)),
        costs=TransferCosts(
            image_bytes=10_000,
            update_bytes=10_000,
            turn_seconds=draw(st.just(0.0) | st.floats(1e-4, 1.0)),
        ),
    )


class PlannedRound:
    """Plans by the real planner, work by the real client, the real sum; no wire between them."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task = task
        self.image: ModelImage = build_model(task, seed=seed)
        self._accumulator = Accumulator(self.image)
        self._sum = CohortSum(self.image.layout)
        self._memory = ProcessMemory()

    def examples(self, part: int) -> Examples:
        return self.task.train_examples(data=None, part=part, num_parts=5)

    def window(self, name: str, work: Assignment) -> Window:
        """Return the examples that a client takes; all but the first have begun their epoch."""
        return window(
            SamplerPosition(offset=int(name) * NUM_EXAMPLES // 5),
            quota=work.quota,
            run_seed=0,
            name=name,
            num_examples=NUM_EXAMPLES,
        )

    def mean_gradient(
        self,
        plans: Mapping[str, Assignment],
        *,
        in_one: bool = False,
        weights: Mapping[str, int] | None = None,
    ) -> Tensor:
        """Run the round; ``in_one`` gives each device memory for its examples in one go."""
        bound = max_weight_per_example(self.task)
        weigh_as = weights or {}
        self._sum.open(
            num_clients=len(plans),
            planned_weight=sum(weigh_as.get(n, bound * a.quota) for n, a in plans.items()),
        )
        for name, work in plans.items():
            size = work.quota if in_one else work.micro_batch_size
            plan = Plan(
                round=1,
                run_seed=0,
                model_version=0,
                quota=work.quota,
                micro_batch_size=size,
                weigh_as=weigh_as.get(name),
            )
            place = TrainingContext(
                task=self.task,
                image=self.image,
                accumulator=self._accumulator,
                examples=self.examples(int(name)),
                name=name,
                clock=MonotonicClock(),
                memory=self._memory,
                should_stop=lambda: False,
            )
            update = train_round(plan, self.window(name, work), place)
            # No window is cut short: it goes on into the next epoch.
            assert update.report.num_examples == work.quota
            self._sum.check(update.values_P, name=name)
            self._sum.fold(update.values_P, update.report.weight)
        return self._sum.close()

    def picked(self, plans: Mapping[str, Assignment]) -> reference.Picked:
        return [
            (self.examples(int(name)), self.window(name, work).positions)
            for name, work in plans.items()
        ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@given(fleet=fleets().filter(lambda fleet: bool(fleet.plans())), seed=st.integers(0, 1000))
@settings(max_examples=settings().max_examples // 2)
def test_a_planned_step_is_that_of_one_big_batch_of_the_same_examples(
    architecture: str, fleet: Fleet, seed: int
) -> None:
    run = PlannedRound(ARCHITECTURES[architecture], seed)
    plans = fleet.plans()
    expected_P = reference.mean_gradient(run.task, run.image.model, run.picked(plans))
    found_P = run.mean_gradient(plans).double()
    assert float((found_P - expected_P).norm()) <= RELATIVE * float(expected_P.norm())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@given(fleet=fleets().filter(lambda fleet: bool(fleet.plans())))
@settings(max_examples=settings().max_examples // 5)
def test_devices_of_any_memory_give_the_step_that_devices_of_all_memory_give(
    architecture: str, fleet: Fleet
) -> None:
    run = PlannedRound(ARCHITECTURES[architecture], seed=1)
    plans = fleet.plans()
    planned_P = run.mean_gradient(plans).double().clone()
    in_one_P = run.mean_gradient(plans, in_one=True).double()
    # Each is within RELATIVE of the float64 step.
    bound = 2 * RELATIVE * float(in_one_P.norm()) * (1 + RELATIVE)
    assert float((planned_P - in_one_P).norm()) <= bound


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@given(
    fleet=fleets().filter(lambda fleet: bool(fleet.plans())),
    owned=st.lists(st.integers(1, 10**6), min_size=5, max_size=5),
)
@settings(max_examples=settings().max_examples // 5)
def test_with_dataset_weighting_each_device_s_mean_counts_by_what_it_owns(
    architecture: str, fleet: Fleet, owned: list[int]
) -> None:
    """However many examples the plan lets it sum: sum of n_i g_i over sum of n_i."""
    run = PlannedRound(ARCHITECTURES[architecture], seed=2)
    plans = fleet.plans()
    weights = dataset_weights({name: owned[int(name)] for name in plans})
    means = [reference.mean_gradient(run.task, run.image.model, [one]) for one in run.picked(plans)]
    total = sum(weights.values())
    expected_P = torch.stack(
        [mean_P * weights[name] for name, mean_P in zip(plans, means, strict=True)]
    ).sum(0)
    found_P = run.mean_gradient(plans, weights=weights).double() * total
    # Each device's own is within RELATIVE; what cancels in their sum does not shrink that.
    length = sum(float(m.norm()) * weights[n] for n, m in zip(plans, means, strict=True))
    assert float((found_P - expected_P).norm()) <= RELATIVE * length
