"""The law: however the examples were cut, the server's step is that of one big batch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

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
from headwater.common.messages import Plan
from headwater.common.model.parameters import ModelImage, build_model
from headwater.common.settings import schema as chosen
from headwater.common.settings.training import Precision
from headwater.common.task import Examples, Task, max_weight_per_example
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.aggregation.server_optimizer import ServerOptimizer
from tests import reference
from tests.laws.architectures import ARCHITECTURES

EPS = torch.finfo(torch.float32).eps
RELATIVE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Client:
    """One client's share of a round."""

    quota: int
    micro_batch_size: int
    drops_out: bool
    max_tokens: int | None = None


CLIENTS = st.lists(
    st.builds(
        Client,
        quota=st.integers(1, 40),
        micro_batch_size=st.integers(1, 17),
        drops_out=st.booleans(),
        max_tokens=st.none() | st.integers(1, 60),
    ),
    min_size=1,
    max_size=5,
).filter(lambda clients: not all(client.drops_out for client in clients))


class OneRoundAtATime:
    """The real accumulator and the real sum, without a network between them."""

    def __init__(
        self,
        task: Task,
        seed: int,
        *,
        frozen_dtype: str | None = None,
        precision: Precision = "float32",
    ) -> None:
        self.task, self._precision = task, precision
        self.image: ModelImage = build_model(task, seed=seed, frozen_dtype=frozen_dtype)
        self._accumulator = Accumulator(self.image)
        self._sum = CohortSum(self.image.layout)
        self._memory = ProcessMemory()

    def examples(self, part: int) -> Examples:
        return self.task.train_examples(data=None, part=part, num_parts=5)

    def window(self, part: int, client: Client, round_number: int) -> Window:
        return window(
            SamplerPosition(epoch=round_number),
            quota=client.quota,
            run_seed=0,
            name=str(part),
            num_examples=len(self.examples(part)),
        )

    def mean_gradient(self, clients: list[Client], round_number: int) -> Tensor:
        bound = max_weight_per_example(self.task)
        self._sum.open(
            num_clients=len(clients), planned_weight=bound * sum(c.quota for c in clients)
        )
        for part, client in enumerate(clients):
            if client.drops_out:
                continue
            plan = Plan(
                round=round_number,
                run_seed=0,
                model_version=round_number,
                quota=client.quota,
                micro_batch_size=client.micro_batch_size,
                max_tokens=client.max_tokens,
                precision=self._precision,
            )
            place = TrainingContext(
                task=self.task,
                image=self.image,
                accumulator=self._accumulator,
                examples=self.examples(part),
                name=str(part),
                clock=MonotonicClock(),
                memory=self._memory,
                should_stop=lambda: False,
            )
            update = train_round(plan, self.window(part, client, round_number), place)
            self._sum.check(update.values_P, name=str(part))
            self._sum.fold(update.values_P, update.report.weight)
        return self._sum.close()

    def picked(self, clients: list[Client], round_number: int) -> reference.Picked:
        return [
            (self.examples(part), self.window(part, client, round_number).positions)
            for part, client in enumerate(clients)
            if not client.drops_out
        ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@given(clients=CLIENTS, seed=st.integers(0, 1000))
@settings(max_examples=settings().max_examples // 3)
def test_mean_gradient_is_that_of_one_big_batch_however_it_was_cut(
    architecture: str, clients: list[Client], seed: int
) -> None:
    task = ARCHITECTURES[architecture]
    run = OneRoundAtATime(task, seed)
    expected_P = reference.mean_gradient(task, run.image.model, run.picked(clients, 0))
    found_P = run.mean_gradient(clients, 0).double()
    assert float((found_P - expected_P).norm()) <= RELATIVE * float(expected_P.norm())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@given(cohorts=st.lists(CLIENTS, min_size=1, max_size=4))
@settings(max_examples=settings().max_examples // 5)
def test_trajectory_of_sgd_is_that_of_big_batches(
    architecture: str, momentum: float, cohorts: list[list[Client]]
) -> None:
    task = ARCHITECTURES[architecture]
    run = OneRoundAtATime(task, seed=1)
    start_P = run.image.values_P.double().clone()
    expected = reference.trajectory(
        task,
        run.image.model,
        [run.picked(clients, r) for r, clients in enumerate(cohorts)],
        "SGD",
        lr=0.1,
        momentum=momentum,
    )
    optimizer = ServerOptimizer(
        run.image,
        chosen.OptimizerSettings(name="sgd", learning_rate=0.1, arguments={"momentum": momentum}),
        chosen.ScheduleSettings(),
    )
    for r, clients in enumerate(cohorts):
        optimizer.step(run.mean_gradient(clients, r))
        # Every round rounds the weights once; what came of the gradients is within 1e-6 of itself.
        # The path's length bounds how far an early error has been carried on.
        path = sum(float((b - a).norm()) for a, b in pairwise(expected[: r + 2]))
        bound = RELATIVE * path + EPS * (r + 1) * float(start_P.norm())
        assert float((run.image.values_P.double() - expected[r + 1]).norm()) <= bound


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@given(clients=CLIENTS)
@settings(max_examples=settings().max_examples // 5)
def test_adam_steps_as_far_from_the_reference_as_its_eps_lets_the_gradient_s_rounding(
    architecture: str, clients: list[Client]
) -> None:
    task = ARCHITECTURES[architecture]
    rate, eps = 0.01, 1e-8
    run = OneRoundAtATime(task, seed=2)
    start_P = run.image.values_P.double().clone()
    expected_P = reference.mean_gradient(task, run.image.model, run.picked(clients, 0))
    found_P = run.mean_gradient(clients, 0).clone()
    gap_P = (found_P.double() - expected_P).abs()
    assert float(gap_P.norm()) <= RELATIVE * float(expected_P.norm())
    optimizer = ServerOptimizer(
        run.image,
        chosen.OptimizerSettings(name="adam", learning_rate=rate),
        chosen.ScheduleSettings(),
    )
    optimizer.step(found_P)
    wanted_P = start_P - rate * expected_P / (expected_P.abs() + eps)
    # The first step is rate g / (|g| + eps), whose slope is rate eps / (|g| + eps)^2; g is at least
    # the smaller of the two on the way between them, or 0 if the sign changes.
    both_P = torch.minimum(found_P.double().abs(), expected_P.abs())
    both_P[found_P.double() * expected_P <= 0] = 0.0
    # And float32: the weight is rounded once, the step in about eight operations.
    rounding_P = EPS * start_P.abs() + 8 * EPS * rate
    bound_P = rate * gap_P * eps / (both_P + eps) ** 2 + rounding_P
    moved_P = run.image.values_P.double()
    assert bool(((moved_P - wanted_P).abs() <= bound_P).all())


@pytest.mark.parametrize("sizes", [(32, 32, 32, 5), (1, 40), (7,)])
def test_mean_of_means_would_fail_this_law(sizes: tuple[int, ...]) -> None:
    """The peers' way, to show that the law is no tautology: it is off wherever sizes differ."""
    task = ARCHITECTURES["mlp"]
    image = build_model(task, seed=0)
    examples = task.train_examples(data=None, part=0, num_parts=1)
    starts = [sum(sizes[:i]) % 40 for i in range(len(sizes))]
    picked = [
        (examples, [(start + i) % 40 for i in range(size)])
        for start, size in zip(starts, sizes, strict=True)
    ]
    exact_P = reference.mean_gradient(task, image.model, picked)
    means_P = torch.stack(
        [reference.mean_gradient(task, image.model, [one]) for one in picked]
    ).mean(0)
    is_off = float((means_P - exact_P).norm()) > 0.05 * float(exact_P.norm())
    assert is_off == (len(set(sizes)) > 1)
