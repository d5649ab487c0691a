"""The noise scale against its definition, computed in float64 from all per-example gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headwater.common.estimates.gradient_noise import NoiseSums, estimates_after_steps, noise_sums
from headwater.common.messages import Step, UpdateReport
from headwater.common.model.vectors import squared_norm
from headwater.server.planning.noise_scale import DECAY, NoiseScale, RoundNoise, round_noise, total

Array = NDArray[np.float64]

# A mean of many rounds is within this many of its own standard errors of the truth, or biased.
ERRORS = 4.0


@dataclass(frozen=True, kw_only=True)
class Device:
    """Per-example gradients [N, P], how many a round takes, and in what cuts."""

    gradients_NP: Array
    cuts: tuple[int, ...]
    weigh_as: int | None = None

    @property
    def quota(self) -> int:
        return sum(self.cuts)

    @property
    def sent_weight(self) -> int:
        return self.weigh_as or self.quota

    @property
    def mean(self) -> Array:
        mean_P: Array = self.gradients_NP.mean(0)
        return mean_P

    @property
    def variance(self) -> float:
        """tr(Sigma), with divisor N - 1, of an example."""
        return float(((self.gradients_NP - self.mean) ** 2).sum() / (len(self.gradients_NP) - 1))


def told(
    norms: Sequence[float], weights: Sequence[int], *, sent: int | None = None
) -> UpdateReport:
    steps = tuple(
        Step(num_examples=w, weight=w, loss=1.0, gradient_norm=norm, seconds=0.5, peak_bytes=0)
        for norm, w in zip(norms, weights, strict=True)
    )
    return UpdateReport(
        name="pi",
        round=1,
        num_examples=sum(weights),
        weight=sum(weights) if sent is None else sent,
        loss_sum=1.0,
        micro_batch_size=max([*weights, 1]),
        seconds=1.0,
        steps=steps,
        reason="quota",
    )


def trained(device: Device, random: np.random.Generator) -> tuple[Array, UpdateReport]:
    """Draw a device's examples without replacement; return the vector it sends and its report."""
    rows = random.permutation(len(device.gradients_NP))[: device.quota]
    sums_KP = np.cumsum(device.gradients_NP[rows], axis=0)[np.cumsum(device.cuts) - 1]
    report = told(
        [float(np.linalg.norm(sum_P)) for sum_P in sums_KP], device.cuts, sent=device.sent_weight
    )
    return sums_KP[-1] * (device.sent_weight / device.quota), report


def one_round(fleet: Sequence[Device], random: np.random.Generator) -> RoundNoise:
    parts = [trained(device, random) for device in fleet]
    sums = total(
        noise_sums(report, num_owned=len(device.gradients_NP))
        for device, (_, report) in zip(fleet, parts, strict=True)
    )
    mean_P = np.sum([vector_P for vector_P, _ in parts], axis=0) / sums.weight
    noise = round_noise(sums, squared_mean=squared_norm(torch.from_numpy(mean_P)))
    assert noise is not None
    return noise


def truth(fleet: Sequence[Device]) -> Array:
    """Return S, |G|^2 and the heterogeneity, each by the weights that the devices send."""
    weights = np.array([device.sent_weight for device in fleet], dtype=np.float64)
    shares = weights / weights.sum()
    means = np.stack([device.mean for device in fleet])
    mean_P = shares @ means
    variance = sum(
        share * device.variance * device.sent_weight / device.quota
        for share, device in zip(shares, fleet, strict=True)
    )
    return np.array(
        [variance, (mean_P**2).sum(), (shares * ((means - mean_P) ** 2).sum(1)).sum()],
        dtype=np.float64,
    )


def over_rounds(
    fleet: Sequence[Device], *, rounds: int, estimate: Callable[..., RoundNoise] = one_round
) -> tuple[Array, Array]:
    """Return the mean of S, |G|^2 and heterogeneity over independent rounds, and its error."""
    random = np.random.default_rng(0)
    rows = [estimate(fleet, random) for _ in range(rounds)]
    found = np.array([(r.variance, r.squared_gradient, r.heterogeneity) for r in rows])
    error: Array = found.std(axis=0, ddof=1) / math.sqrt(rounds)
    return found.mean(axis=0), error


def made_up(num_examples: int, *, seed: int, place: float = 1.0, spread: float = 1.0) -> Array:
    """Return gradients [N, 12] of a device: around a place of its own, of unequal variances."""
    random = np.random.default_rng([17, seed])
    deviation_P = spread * random.uniform(0.2, 2.0, 12)
    return place * random.standard_normal(12) + deviation_P * random.standard_normal(
        (num_examples, 12)
    )


UNEVEN = [
    Device(gradients_NP=made_up(40, seed=1), cuts=(8, 8, 4)),
    Device(gradients_NP=made_up(25, seed=2, spread=3.0), cuts=(3, 3, 3, 3)),
    Device(gradients_NP=made_up(300, seed=3, spread=0.5), cuts=(1, 6)),
    Device(gradients_NP=made_up(12, seed=4, spread=2.0), cuts=(6, 6)),
]


def linear_gradients(
    random: np.random.Generator, num_examples: int, offset_P: Array, noise: float
) -> Array:
    """Return the gradients of half the squared error of x theta against x theta* + noise z.

    With x and z standard normal and d = theta - theta* that is (x d - noise z) x.
    """
    inputs_NP = random.standard_normal((num_examples, len(offset_P)))
    residual_N = inputs_NP @ offset_P - noise * random.standard_normal(num_examples)
    gradients_NP: Array = residual_N[:, None] * inputs_NP
    return gradients_NP


@pytest.mark.slow
def test_a_linear_model_s_noise_is_what_is_derived_by_hand() -> None:
    """G = d, and E|g|^2 = (P + 2)|d|^2 + P noise^2 by the fourth moments of a normal.

    Every round draws new examples from the distribution itself: no data set is finite here.
    """
    num_parameters, noise = 8, 1.5
    offset_P = np.linspace(-0.5, 1.0, num_parameters)
    squared = float(offset_P @ offset_P)
    variance = (num_parameters + 1) * squared + num_parameters * noise**2
    cuts = [(4, 4, 1), (2, 5), (3, 3, 3, 3)]

    def drawn_anew(_: Sequence[Device], random: np.random.Generator) -> RoundNoise:
        tables = [linear_gradients(random, sum(cut), offset_P, noise) for cut in cuts]
        reports = []
        for table_NP, cut in zip(tables, cuts, strict=True):
            sums = np.cumsum(table_NP, axis=0)[np.cumsum(cut) - 1]
            reports.append(told([float(np.linalg.norm(one)) for one in sums], cut))
        sums = total(noise_sums(report, num_owned=2**53) for report in reports)
        mean_P = np.concatenate(tables).mean(0)
        found = round_noise(sums, squared_mean=float(mean_P @ mean_P))
        assert found is not None
        return found

    found, error = over_rounds([], rounds=4000, estimate=drawn_anew)
    assert (np.abs(found - [variance, squared, 0.0]) <= ERRORS * error).all()
    assert found[0] / found[1] == pytest.approx(variance / squared, rel=0.1)


@pytest.mark.slow
def test_an_uneven_fleet_s_estimates_are_those_of_its_data() -> None:
    """Ragged cuts, unequal quotas, variances and data sets, of which rounds take up to all."""
    found, error = over_rounds(UNEVEN, rounds=6000)
    expected = truth(UNEVEN)
    assert (np.abs(found - expected) <= ERRORS * error).all()
    # What would be wrong without the correction for data that come to an end is far outside.
    weight = sum(device.sent_weight for device in UNEVEN)
    left_out = sum(
        device.quota**2 / weight**2 * device.variance / len(device.gradients_NP)
        for device in UNEVEN
    )
    assert left_out > 3 * ERRORS * error[1]


@pytest.mark.slow
def test_dataset_weighting_scales_vectors_and_not_the_steps_norms() -> None:
    fleet = [
        dataclasses.replace(device, weigh_as=len(device.gradients_NP) // 2) for device in UNEVEN
    ]
    found, error = over_rounds(fleet, rounds=6000)
    assert (np.abs(found - truth(fleet)) <= ERRORS * error).all()


@pytest.mark.slow
def test_other_devices_measure_for_a_device_with_one_micro_batch() -> None:
    """Of like devices two in five measure nothing: the estimate stays without bias."""
    table_NP = made_up(400, seed=9)
    fleet = [
        Device(gradients_NP=table_NP[part * 80 : (part + 1) * 80], cuts=cuts)
        for part, cuts in enumerate([(4, 4), (8,), (8,), (2, 6), (6, 2)])
    ]
    # Devices of one distribution differ a little, by chance; here they are made equal.
    fleet = [dataclasses.replace(device, gradients_NP=table_NP) for device in fleet]
    found, error = over_rounds(fleet, rounds=6000)
    assert (np.abs(found - truth(fleet)) <= ERRORS * error).all()


def test_the_measured_share_of_the_weight_is_returned() -> None:
    parts = [
        noise_sums(told([3.0, 5.0], [2, 4]), num_owned=9),
        noise_sums(told([3.0], [2]), num_owned=9),
    ]
    found = round_noise(total(parts), squared_mean=1.0)
    assert found is not None
    assert found.measured_share == 0.75


def across_devices(fleet: Sequence[Device], random: np.random.Generator) -> RoundNoise:
    """Take the devices' norms for a small batch and the fleet's for a large one: the wrong way."""
    parts = [trained(device, random)[0] for device in fleet]
    small = fleet[0].quota
    large = small * len(fleet)
    at_small = float(np.mean([(part_P @ part_P) / small**2 for part_P in parts]))
    mean_P = np.sum(parts, axis=0) / large
    at_large = float(mean_P @ mean_P)
    variance = (at_small - at_large) / (1 / small - 1 / large)
    return RoundNoise(
        variance=variance,
        squared_gradient=at_large - variance / large,
        heterogeneity=0.0,
        measured_share=1.0,
    )


@pytest.mark.slow
def test_differences_between_devices_are_heterogeneity_and_not_noise() -> None:
    """Ten devices of one kind of data each: their differences are heterogeneity, not noise."""
    fleet = [
        Device(gradients_NP=made_up(64, seed=20 + part, place=2.0), cuts=(8, 8))
        for part in range(10)
    ]
    expected = truth(fleet)
    found, error = over_rounds(fleet, rounds=2000)
    assert (np.abs(found - expected) <= ERRORS * error).all()
    assert expected[2] > expected[0]
    wrong, wrong_error = over_rounds(fleet, rounds=2000, estimate=across_devices)
    # small x heterogeneity x n/(n - 1), n devices, is what norms across devices add to S.
    added = 16 * expected[2]
    assert wrong[0] - expected[0] > added - ERRORS * wrong_error[0]
    assert wrong[0] > 10 * expected[0]


@pytest.mark.slow
def test_examples_that_weigh_differently_are_units_of_weight_each() -> None:
    """Of 1 to 8 tokens, with a part that an example has as a whole and one that each token has."""
    num_parameters, examples, first = 6, 16, 8
    common, own = 0.5, 1.0
    mean_P = np.ones(num_parameters)

    def drawn_anew(_: Sequence[Device], random: np.random.Generator) -> RoundNoise:
        reports, total_P = [], np.zeros(num_parameters)
        for _device in range(4):
            tokens_N = random.integers(1, 9, examples)
            shape = (examples, num_parameters)
            sums_NP = tokens_N[:, None] * (mean_P + common * random.standard_normal(shape))
            sums_NP += np.sqrt(tokens_N)[:, None] * own * random.standard_normal(shape)
            norms = [float(np.linalg.norm(sums_NP[:n].sum(0))) for n in (first, examples)]
            reports.append(told(norms, [int(tokens_N[:first].sum()), int(tokens_N[first:].sum())]))
            total_P += sums_NP.sum(0)
        sums = total(noise_sums(report, num_owned=2**53) for report in reports)
        found = round_noise(sums, squared_mean=float(total_P @ total_P) / sums.weight**2)
        assert found is not None
        return found

    # E[(v c)^2 + v o^2] / E[v] of each coordinate, for v evenly from 1 to 8.
    variance = num_parameters * (common**2 * 25.5 + own**2 * 4.5) / 4.5
    expected = np.array([variance, num_parameters, 0.0])
    found, error = over_rounds([], rounds=4000, estimate=drawn_anew)
    assert (np.abs(found - expected) <= ERRORS * error + expected / first).all()
    assert error[0] < expected[0] / first


def test_examples_that_are_all_alike_have_no_variance() -> None:
    found = [
        part and part.variance
        for part in estimates_after_steps(told([6.0, 12.0, 18.0], [2] * 3).steps)
    ]
    assert found == [None, 0.0, 0.0]


def test_two_sizes_are_solved_exactly_where_the_arithmetic_is() -> None:
    """|A_1|^2 = 4 (4 + 8/2), |A_2|^2 = 16 (4 + 8/4): S = 8 and |G|^2 = 4."""
    _, found = estimates_after_steps(told([math.sqrt(32), math.sqrt(96)], [2, 2]).steps)
    assert found is not None
    assert dataclasses.astuple(found) == pytest.approx((8.0, 4.0), rel=16 * 2.0**-52)


@pytest.mark.parametrize(
    ("norms", "weights"),
    [([], []), ([3.0], [4]), ([3.0, 3.0], [4, 0]), ([0.0, 3.0], [0, 4]), ([0.0, 0.0], [0, 0])],
)
def test_a_device_of_one_batch_size_measures_nothing_and_weighs_all_the_same(
    norms: list[float], weights: list[int]
) -> None:
    assert noise_sums(told(norms, weights, sent=4), num_owned=9) == NoiseSums(weight=4.0)


def test_steps_without_weight_change_nothing() -> None:
    plain = noise_sums(told([3.0, 5.0], [2, 3]), num_owned=50)
    empty = noise_sums(told([0.0, 3.0, 3.0, 5.0, 5.0], [0, 2, 0, 3, 0]), num_owned=50)
    assert plain == empty


def test_a_device_that_gave_all_its_examples_adds_no_variance_to_the_mean() -> None:
    sums = noise_sums(told([3.0, 5.0], [2, 3]), num_owned=5)
    assert sums.variance != 0
    assert sums.sum_variance == 0


def test_a_round_without_measurements_has_no_estimate() -> None:
    assert round_noise(NoiseSums(weight=9.0), squared_mean=1.0) is None


PART = st.builds(
    NoiseSums,
    **dict.fromkeys(
        ("weight", "measured_weight", "variance", "sum_variance", "squared_gradient"),
        st.floats(-1e9, 1e9),
    ),
)


@given(
    st.lists(PART, max_size=8).flatmap(
        lambda parts: st.tuples(st.just(parts), st.permutations(parts))
    )
)
def test_the_order_of_the_devices_cannot_change_a_bit(
    orders: tuple[list[NoiseSums], list[NoiseSums]],
) -> None:
    assert total(orders[0]) == total(orders[1])


@given(st.lists(st.tuples(st.floats(0, 1e100), st.integers(0, 2**53)), max_size=5))
def test_whatever_a_device_claims_the_estimates_are_finite(claims: list[tuple[float, int]]) -> None:
    steps = [
        Step(num_examples=0, weight=weight, loss=0.0, gradient_norm=norm, seconds=0, peak_bytes=0)
        for norm, weight in claims
    ]
    report = told([1.0], [1]).model_copy(update={"num_examples": 2**53, "steps": tuple(steps)})
    sums = total([noise_sums(report, num_owned=1)] * 1000)
    noise = round_noise(sums, squared_mean=1.0)
    if noise is not None:
        assert all(math.isfinite(value) for value in dataclasses.astuple(noise))


def noise(variance: float, squared_gradient: float) -> RoundNoise:
    return RoundNoise(
        variance=variance, squared_gradient=squared_gradient, heterogeneity=0.0, measured_share=1.0
    )


def test_the_ratio_is_taken_last() -> None:
    """Two rounds of ratios 1 and 100; |G|^2 is the same in both, and so the older one fades."""
    scale = NoiseScale().after(noise(1.0, 1.0)).after(noise(100.0, 1.0))
    assert scale.ratio == pytest.approx((DECAY + 100) / (DECAY + 1), rel=1e-15)


def test_the_estimate_follows_a_lasting_change() -> None:
    scale = NoiseScale()
    for _ in range(50):
        scale = scale.after(noise(10.0, 1.0))
    for _ in range(22):
        scale = scale.after(noise(1000.0, 1.0))
    old, new = DECAY**22 * (1 - DECAY**50), 1 - DECAY**22
    assert scale.ratio == pytest.approx((old * 10 + new * 1000) / (old + new), rel=2.0**-40)


@pytest.mark.parametrize(
    ("variance", "squared_gradient"),
    [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, -1.0), (-1.0, -1.0), (1e300, 1e-300)],
)
def test_there_is_no_ratio_while_a_part_is_not_positive(
    variance: float, squared_gradient: float
) -> None:
    assert NoiseScale().ratio is None
    assert NoiseScale().after(noise(variance, squared_gradient)).ratio is None
