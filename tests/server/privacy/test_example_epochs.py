"""The count of epochs is never below what an example really took part in, and is tight."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import dp_accounting
import pytest
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.training.sampler import SamplerState, window
from headwater.common.privacy.terms import rho_of
from headwater.server.privacy.accountant import epsilon_of
from headwater.server.privacy.example_epochs import NOBODY, ExampleEpochs, Share, from_json


class Device:
    """A device's own walk through its examples, and what each of them has cost."""

    def __init__(self, num_examples: int) -> None:
        self.num_examples = num_examples
        self.state = SamplerState()
        self.counted: int | None = None
        self.costs: Counter[int] = Counter()

    def share(self, quota: int) -> Share:
        return Share(quota=quota, num_owned=self.num_examples)

    def take(self, round_number: int, quota: int) -> tuple[int, ...]:
        self.state = self.state.settle(self.counted)
        taken = window(
            self.state.place,
            quota=min(quota, self.num_examples),
            run_seed=0,
            name="pi",
            num_examples=self.num_examples,
        )
        after = taken.after(len(taken.positions))
        self.state = self.state.pend(round_number, after)
        return taken.positions


def least(epochs: ExampleEpochs, number: int, rounds: int, shares: Mapping[str, Share]) -> float:
    left = rounds - number + 1
    costs = epochs.affordable(5.0, round_number=number, rounds=left, shares=shares)
    return min(costs.values())


ROUND = st.tuples(
    st.integers(1, 9),  # the quota
    st.sampled_from(["counts", "counts", "counts", "misses", "undone"]),
    st.integers(1, 3),  # the cost
)


@given(numbers=st.lists(st.integers(1, 20), min_size=1, max_size=3), rounds=st.lists(ROUND))
def test_no_example_costs_more_than_is_counted(
    numbers: list[int], rounds: list[tuple[int, str, int]]
) -> None:
    devices = {f"d{at}": Device(number) for at, number in enumerate(numbers)}
    epochs, round_number = NOBODY, 1
    for at, (quota, fate, rho) in enumerate(rounds):
        taken = {name: device.take(round_number, quota) for name, device in devices.items()}
        missing = f"d{at % len(devices)}" if fate == "misses" else None
        shares = {name: device.share(quota) for name, device in devices.items() if name != missing}
        if not shares:
            continue
        epochs = epochs.after(round_number, rho, shares)
        for name in shares:
            devices[name].costs.update(dict.fromkeys(taken[name], rho))
        if fate == "undone":  # its sum was opened, and nothing else is left of the round
            continue
        for name in shares:
            devices[name].counted = round_number
        round_number += 1
    for name, device in devices.items():
        worst = max(device.costs.values(), default=0)
        assert worst <= (epochs.places[name].cost.rho if name in epochs.places else 0)
    assert epochs == from_json(json.loads(json.dumps(epochs.as_json())))


@pytest.mark.parametrize(("number", "quota"), [(1000, 16), (96, 16), (100, 16), (7, 16), (16, 16)])
def test_rounds_of_one_cost_count_the_epochs_that_were_begun(number: int, quota: int) -> None:
    epochs, device = NOBODY, Device(number)
    for round_number in range(1, 61):
        epochs = epochs.after(round_number, 2.0, {"pi": device.share(quota)})
        used = round_number * min(quota, number)
        assert epochs.most == 2.0 * math.ceil(used / number)


def test_the_device_with_the_fewest_examples_decides() -> None:
    epochs = NOBODY
    shares = {"few": Share(quota=8, num_owned=8), "many": Share(quota=8, num_owned=800)}
    for round_number in range(1, 11):
        epochs = epochs.after(round_number, 1.0, shares)
    assert epochs.most == epochs.places["few"].cost.rho == 10
    assert epochs.places["many"].cost.rho == 1


@pytest.mark.parametrize("numbers", [[None, None, None], [100, 99, 99], [100, None, 100]])
def test_a_number_of_examples_that_is_unknown_or_changes_makes_every_round_count(
    numbers: list[int | None],
) -> None:
    epochs = NOBODY
    for round_number, number in enumerate(numbers, 1):
        epochs = epochs.after(round_number, 1.0, {"pi": Share(quota=5, num_owned=number)})
    assert epochs.most == 3


def test_a_round_that_is_repeated_after_its_checkpoint_makes_every_round_count() -> None:
    """The devices may have gone on to other examples, so that their places are not known."""
    shares = {"pi": Share(quota=5, num_owned=10)}
    undone = committed = NOBODY
    for number, rho in ((1, 5.0), (2, 1.0)):
        undone = undone.after(number, rho, shares)
        committed = replace(committed.after(number, rho, shares), is_committed=True)
    assert undone.after(2, 5.0, shares).most == 5 + 1
    assert from_json(committed.as_json()).after(2, 5.0, shares).most == 5 + 5


def test_a_checkpoint_of_long_ago_makes_every_round_count() -> None:
    epochs = NOBODY
    shares = {"pi": Share(quota=5, num_owned=100)}
    for round_number in (1, 2, 3, 4, 2, 3, 4):
        epochs = epochs.after(round_number, 1.0, shares)
    assert epochs.most == 1 + 3


@pytest.mark.parametrize("epochs", [1, 3, 40])
@pytest.mark.parametrize("z", [0.8, 4.0, 30.0])
def test_epsilon_is_that_of_an_independent_computation(epochs: int, z: float) -> None:
    accountant = RdpAccountant(orders=[1 + at / 20 for at in range(1, 20_000)])
    accountant.compose(dp_accounting.GaussianDpEvent(z), epochs)
    expected = accountant.get_epsilon(1e-5)
    assert epsilon_of(epochs * rho_of(z), delta=1e-5) == pytest.approx(expected, rel=0.01)


@given(
    numbers=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    quota=st.integers(1, 20),
    rounds=st.integers(1, 40),
)
def test_rounds_as_dear_as_affordable_spend_all_and_no_more(
    numbers: list[int], quota: int, rounds: int
) -> None:
    epochs: ExampleEpochs = NOBODY
    shares = {f"d{at}": Share(quota=quota, num_owned=n) for at, n in enumerate(numbers)}
    dearest = []
    for round_number in range(1, rounds + 1):
        rho = least(epochs, round_number, rounds, shares)
        dearest.append(rho)
        epochs = epochs.after(round_number, rho, shares)
    assert epochs.most == pytest.approx(5.0)
    assert min(dearest) == pytest.approx(max(dearest))  # spent evenly


def test_a_device_that_joins_late_with_few_examples_exceeds_nothing() -> None:
    epochs: ExampleEpochs = NOBODY
    shares = {"many": Share(quota=10, num_owned=1000)}
    for round_number in range(1, 21):
        if round_number == 11:
            shares["few"] = Share(quota=10, num_owned=10)
        rho = least(epochs, round_number, 20, shares)
        epochs = epochs.after(round_number, rho, shares)
    assert epochs.most == pytest.approx(5.0)
