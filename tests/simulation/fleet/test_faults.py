"""Faults as data: affected devices and rounds, their effects, and errors in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.common.errors import SettingsError
from headwater.common.secagg.protocol import PHASES
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.simulation.fleet.faults import (
    NO_FAULTS,
    STAGES,
    DropoutFault,
    Fault,
    FleetFaults,
    LiarFault,
    Moment,
    SlowLinkFault,
    falsifications,
    falsify,
    link_slowdown,
    read_faults,
    unanswered_stage,
)
from headwater.simulation.fleet.fleet_spec import fleet_spec, with_fleet
from headwater.simulation.fleet.random_events import vanishes_at

VALUES_P = torch.tensor([3.0, -4.0, 0.0, 12.0])  # of norm 13


def moment(part: int = 0, round_number: int = 1, *, seed: int = 0, num: int = 100) -> Moment:
    return Moment(seed=seed, num_devices=num, part=part, round=round_number)


def struck(fault: Fault, *, seed: int = 0, num: int = 100, round_number: int = 1) -> set[int]:
    return {
        part for part in range(num) if fault.applies(moment(part, round_number, seed=seed, num=num))
    }


def lied(**fault: Any) -> torch.Tensor:
    return falsify(VALUES_P, [LiarFault(devices=(0,), **fault)], moment())


def test_a_fault_affects_named_devices_in_its_rounds_both_inclusive() -> None:
    fault = DropoutFault(devices=(3, 5), first_round=2, last_round=4)
    assert [struck(fault, round_number=n) for n in range(1, 6)] == [
        set(), {3, 5}, {3, 5}, {3, 5}, set(),
    ]  # fmt: skip


@pytest.mark.parametrize(("share", "count"), [(0.1, 10), (0.25, 25), (1.0, 100), (0.001, 1)])
def test_a_share_affects_the_same_rounded_number_of_devices_in_every_round(
    share: float, count: int
) -> None:
    fault = LiarFault(share=share, kind="nan")
    first = struck(fault)
    assert len(first) == count
    assert struck(fault, round_number=7) == first
    assert (struck(fault, seed=1) == first) == (share == 1)


def test_two_different_shares_affect_different_devices() -> None:
    one, other = LiarFault(share=0.3, kind="nan"), LiarFault(share=0.3, kind="sign-flipped")
    assert struck(one) != struck(other)


def test_a_chance_is_drawn_for_each_device_and_round_and_is_repeatable() -> None:
    fault = SlowLinkFault(devices=tuple(range(100)), factor=2, chance=0.3)
    rounds = [struck(fault, round_number=n) for n in range(1, 41)]
    assert rounds == [struck(fault, round_number=n) for n in range(1, 41)]
    assert len({frozenset(found) for found in rounds}) == 40
    # Four standard deviations of a binomial count.
    assert abs(sum(map(len, rounds)) - 1200) <= 4 * (4000 * 0.3 * 0.7) ** 0.5


def test_another_attempt_draws_the_chance_of_a_dropout_again() -> None:
    faults = FleetFaults(dropout=(DropoutFault(devices=(0,), chance=0.5),))
    drawn = {unanswered_stage(faults, moment(), attempt=attempt) for attempt in range(20)}
    assert drawn == {None, "train"}


def test_of_several_dropouts_the_earliest_phase_counts() -> None:
    faults = FleetFaults(
        dropout=(
            DropoutFault(devices=(0,), phase="unmask"),
            DropoutFault(devices=(0, 1), phase="evaluate"),
            DropoutFault(devices=(0,), phase="share_keys"),
        )
    )
    assert unanswered_stage(faults, moment(0)) == "query.share_keys"
    assert unanswered_stage(faults, moment(1)) == "evaluate"
    assert unanswered_stage(faults, moment(2)) is None


def test_the_stages_of_a_round_are_those_of_a_secure_session_between_training_and_test() -> None:
    assert ("train", *(f"query.{phase.action}" for phase in PHASES), "evaluate") == STAGES


def test_slow_links_of_one_device_multiply() -> None:
    faults = FleetFaults(
        slow_link=(
            SlowLinkFault(devices=(0,), factor=3),
            SlowLinkFault(share=1.0, factor=2, last_round=1),
        )
    )
    assert (link_slowdown(faults, moment(0)), link_slowdown(faults, moment(1))) == (6.0, 2.0)
    assert (link_slowdown(faults, moment(0, 2)), link_slowdown(faults, moment(1, 2))) == (3.0, 1.0)


def test_a_flipped_sign_and_a_factor_are_exact() -> None:
    assert torch.equal(lied(kind="sign-flipped"), torch.tensor([-3.0, 4.0, -0.0, -12.0]))
    assert torch.equal(lied(kind="scaled", factor=-0.5), torch.tensor([-1.5, 2.0, 0.0, -6.0]))


@pytest.mark.parametrize("kind", ["nan", "infinite"])
def test_a_non_finite_fault_changes_one_value(kind: str) -> None:
    changed = lied(kind=kind)
    assert int((changed != VALUES_P).sum()) == int((~changed.isfinite()).sum()) == 1
    assert bool(changed.isnan().any()) == (kind == "nan")


def test_random_vectors_have_the_norm_of_the_update_and_differ_by_device_and_round() -> None:
    honest_P = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    noise = [LiarFault(share=1.0, kind="random")]
    found = [falsify(honest_P, noise, moment(part, n)) for part, n in ((0, 1), (1, 1), (0, 2))]
    for told_P in found:
        assert float(told_P.norm()) == pytest.approx(float(honest_P.norm()), rel=1e-5)
        # The cosine of two independent directions has a deviation of 1 / sqrt(P).
        cosine = float(told_P @ honest_P / honest_P.norm() ** 2)
        assert abs(cosine) <= 5 / 1000**0.5
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(found[0], falsify(honest_P, noise, moment(0, 1)))


def test_the_random_vector_for_a_zero_update_is_zero() -> None:
    noise = [LiarFault(share=1.0, kind="random")]
    assert torch.equal(falsify(torch.zeros(5), noise, moment()), torch.zeros(5))
    assert len(falsify(torch.zeros(0), noise, moment())) == 0


def test_faults_act_in_sequence_and_leave_the_honest_vector_unchanged() -> None:
    twice = LiarFault(devices=(0,), kind="scaled", factor=2)
    flipped = LiarFault(devices=(0,), kind="sign-flipped")
    faults = FleetFaults(liar=(twice, flipped, LiarFault(devices=(1,), kind="nan")))
    honest_P = VALUES_P.clone()
    assert torch.equal(falsify(honest_P, falsifications(faults, moment()), moment()), -2 * VALUES_P)
    assert torch.equal(honest_P, VALUES_P)
    assert falsify(honest_P, falsifications(faults, moment(2)), moment(2)) is honest_P


def test_without_faults_no_device_is_affected() -> None:
    assert not NO_FAULTS
    assert unanswered_stage(NO_FAULTS, moment()) is None
    assert link_slowdown(NO_FAULTS, moment()) == 1.0
    assert falsifications(NO_FAULTS, moment()) == ()


# The file.


def settings_with(folder: Path, faults: str, **chosen: Any) -> Settings:
    path = folder / "faults.toml"
    path.write_text(faults)
    return with_fleet(load(None, {"simulation.faults": path, **chosen}))


def test_faults_of_the_fleet_s_file_and_of_the_faults_file_add_up(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(
        '[[device]]\nprofile = "laptop"\ncount = 4\n[[slow_link]]\ndevices = [1]\nfactor = 2\n'
    )
    text = '[[slow_link]]\nshare = 1\nfactor = 3\n[[liar]]\ndevices = [2]\nkind = "random"\n'
    settings = settings_with(tmp_path, text, **{"simulation.fleet": fleet})
    faults = fleet_spec(settings).faults
    assert [link_slowdown(faults, moment(part, num=4)) for part in range(4)] == [3, 6, 3, 3]
    assert [bool(falsifications(faults, moment(part, num=4))) for part in range(4)] == [0, 0, 1, 0]


def test_dropouts_of_the_file_add_to_random_dropouts(tmp_path: Path) -> None:
    text = "[[dropout]]\ndevices = [7]\nlast_round = 2\n"
    settings = settings_with(tmp_path, text, **{"simulation.dropout": 0.2})
    found = [vanishes_at(fleet_spec(settings), 7, round_number=n, attempt=0) for n in range(1, 200)]
    assert found[:2] == ["train", "train"]
    assert 0 < sum(stage is not None for stage in found[2:]) < 100


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", r"expected a table \[\[dropout\]\], .* found none"),
        ("[[dropouts]]\nshare = 1", "dropouts: extra inputs"),
        ("[[dropout]]", "dropout number 1: expected devices or share"),
        ("[[dropout]]\nshare = 0.1\ndevices = [1]", "dropout number 1: expected devices or share"),
        ("[[dropout]]\nshare = 0", "dropout number 1: share: .*found 0"),
        ("[[dropout]]\ndevices = []", "dropout number 1: devices: "),
        ("[[dropout]]\ndevices = [-1]", "dropout number 1: devices: 0: .*found -1"),
        ("[[dropout]]\nshare = 1\nphase = 'lunch'", "dropout number 1: phase: .*found 'lunch'"),
        ("[[dropout]]\nshare = 1\nchance = 2", "dropout number 1: chance: .*found 2"),
        ("[[dropout]]\nshare = 1\nfirst_round = 0", "dropout number 1: first_round: .*found 0"),
        ("[[dropout]]\nshare = 1\nfirst_round = 3\nlast_round = 2", "last_round 2 is before"),
        ("[[slow_link]]\nshare = 1", "slow_link number 1: factor: field required"),
        ("[[slow_link]]\nshare = 1\nfactor = 1", "slow_link number 1: factor: .*found 1"),
        ("[[slow_link]]\nshare = 1\nfactor = inf", "slow_link number 1: factor: "),
        (
            "[[liar]]\nshare = 1\nkind = 'nan'\n[[liar]]\nshare = 1\nkind = 'fib'",
            "liar number 2: kind: .*found 'fib'",
        ),
        ("[[liar]]\nshare = 1\nkind = 'scaled'", "liar number 1: factor goes with .* scaled"),
        ("[[liar]]\nshare = 1\nkind = 'nan'\nfactor = 2", "liar number 1: factor goes with"),
        ("[[liar]]\nshare = 1\nkind = 'scaled'\nfactor = nan", "liar number 1: factor: "),
        ("dropout = 3", "dropout: "),
    ],
)
def test_an_error_in_a_faults_file_names_table_and_key(
    tmp_path: Path, text: str, named: str
) -> None:
    with pytest.raises(SettingsError, match=rf"faults\.toml: .*{named}") as caught:
        settings_with(tmp_path, text)
    assert "docs/fleet.md" in caught.value.remedy


def test_a_missing_or_malformed_faults_file_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read the faults file .*nowhere\.toml: No su"):
        read_faults(tmp_path / "nowhere.toml")
    with pytest.raises(SettingsError, match=r"faults\.toml is not a TOML file"):
        settings_with(tmp_path, "[[dropout")


SECURE = {"secure.aggregation": "semi-honest"}


@pytest.mark.parametrize(
    ("text", "chosen", "named"),
    [
        ("[[liar]]\ndevices = [100]\nkind = 'nan'", {}, "names device 100, and there are 100, 0 "),
        ("[[dropout]]\nshare = 1\nphase = 'unmask'", {}, "at unmask, .* which is off"),
        ("[[dropout]]\nshare = 1\nphase = 'evaluate'", SECURE, "nothing is evaluated on devices"),
        (
            "[[liar]]\nshare = 1\nkind = 'nan'",
            {"simulation.engine": "flower-ray"},
            "there are liars, which the engine flower-ray",
        ),
    ],
)
def test_faults_that_cannot_affect_any_device_are_refused(
    tmp_path: Path, text: str, chosen: dict[str, Any], named: str
) -> None:
    with pytest.raises(SettingsError, match=named):
        settings_with(tmp_path, text, **chosen)


def test_faults_that_fit_the_run_s_phases_and_engine_are_accepted(tmp_path: Path) -> None:
    assert settings_with(tmp_path, "[[dropout]]\nshare = 1\nphase = 'unmask'", **SECURE)
    on_ray = {"simulation.engine": "flower-ray"}
    read_faults.cache_clear()
    assert settings_with(tmp_path, "[[slow_link]]\nshare = 1\nfactor = 2", **on_ray)


def test_settings_with_faults_survive_toml(tmp_path: Path) -> None:
    settings = settings_with(tmp_path, "[[dropout]]\nshare = 1")
    left = tmp_path / "settings.toml"
    left.write_text(settings.to_toml())
    assert with_fleet(load(left, {})) == settings
