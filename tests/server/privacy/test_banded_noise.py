"""Correlated noise in a run: the record of devices, its file, and what ends or refuses a run."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.common.errors import (
    CheckpointCorrupt,
    PrivacySpent,
    SettingsError,
    StateError,
    TooFewClients,
)
from headwater.common.messages import Plan
from headwater.common.privacy.spending import epsilon_of
from headwater.common.privacy.terms import rho_of
from headwater.common.settings.schema import Settings
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.privacy.accountant import largest_rho
from headwater.server.privacy.banded_noise import NOISE_FOLDER
from headwater.server.privacy.participation import Participation
from headwater.server.privacy.round_terms import terms_of
from headwater.server.privacy.run_privacy import RunPrivacy
from headwater.server.privacy.spent_budget import PRIVACY_FILE
from tests.server.privacy.test_run_privacy import layout

FLEET = [f"d{at}" for at in range(8)]
NUM_VALUES = layout().num_parameters


def settings(folder: Path | None = None, **privacy: Any) -> Settings:
    chosen = {"noise_multiplier": 2.0, "bands": 4, **privacy}
    return Settings.model_validate(
        {
            "task": "x.py:X",
            "rounds": 12,
            "out": folder,
            "cohort": {"size": 2},
            "plan": {"accumulation_steps": 2, "micro_batch_size": 8},
            "privacy": chosen,
        }
    )


def stream(seed: int = 0) -> Callable[[int], bytes]:
    generator = np.random.default_rng(seed)
    return lambda size: generator.bytes(size)


def opened(folder: Path | None, random: Callable[[int], bytes], **privacy: Any) -> RunPrivacy:
    return RunPrivacy(settings(folder, **privacy), num_values=NUM_VALUES, random=random)


def one_round(privacy: RunPrivacy, number: int, names: list[str]) -> Any:
    """Open a sum of zeros of these devices; return its mean: the noise."""
    plan = Plan(round=number, run_seed=0, model_version=0, quota=16, micro_batch_size=8)
    owned = dict.fromkeys(names, 100)
    plans = privacy.private_plans(dict.fromkeys(names, plan), max_weight_per_example=1, owned=owned)
    terms = terms_of(plans.values())
    total = CohortSum(layout())
    total.open(num_clients=2, planned_weight=32, scale_bits=privacy.scale_bits(terms))
    privacy.add_noise(total, terms, round_number=number, names=names)
    total.weight = 32
    return total.close().numpy().copy()


def turns(privacy: RunPrivacy, first: int, last: int) -> list[tuple[list[str], Any]]:
    found = []
    for number in range(first, last + 1):
        due = privacy.due(FLEET)
        assert due is not None
        names = list(due[:2])
        found.append((names, one_round(privacy, number, names)))
    return found


def test_no_device_is_in_two_sums_that_are_fewer_rounds_apart_than_there_are_bands() -> None:
    last: dict[str, int] = {}
    for number, (names, _) in enumerate(turns(opened(None, stream()), 1, 12), start=1):
        assert all(number - last.get(name, -9) >= 4 for name in names)
        last |= dict.fromkeys(names, number)
    assert set(last) == set(FLEET)


def test_the_epsilon_is_that_of_the_device_in_most_sums() -> None:
    privacy, found = opened(None, stream()), []
    for number in range(1, 10):
        turns(privacy, number, number)
        found.append(privacy.epsilon)
    times = [1] * 4 + [2] * 4 + [3]
    expected = [epsilon_of(k * rho_of(2.0), delta=1e-5) for k in times]
    assert found == pytest.approx(expected, rel=0.01)


def test_an_epsilon_is_divided_by_the_times_that_a_device_can_take_part() -> None:
    privacy = opened(None, stream(), noise_multiplier=None, epsilon=4.0)
    rho = largest_rho(4.0, delta=1e-5)
    assert privacy.noise_multiplier(round_number=1) == pytest.approx(math.sqrt(3 / (2 * rho)))
    turns(privacy, 1, 12)
    assert privacy.epsilon == pytest.approx(4.0, rel=0.01)
    assert privacy.epsilon <= 4.0
    with pytest.raises(PrivacySpent, match="3 times: as often as the run's epsilon allows"):
        turns(privacy, 13, 16)


def test_a_fleet_that_is_too_small_for_its_bands_is_told_so() -> None:
    privacy = opened(None, stream())
    one_round(privacy, 1, FLEET[:2])
    with pytest.raises(TooFewClients, match="one of the last 3 rounds"):
        privacy.due(FLEET[:2])


def test_a_round_waits_for_devices_that_are_away_if_it_is_their_turn() -> None:
    privacy = opened(None, stream())
    assert privacy.awaited() is None, "no device has had a turn"
    due, *_ = [names for names, _ in turns(privacy, 1, 4)]
    counts = privacy.awaited()
    assert counts is not None
    assert {name for name in (*FLEET, "new") if counts(name)} == {*due, "new"}


def test_a_resumed_run_goes_on_with_the_same_stream_of_noise(tmp_path: Path) -> None:
    whole = turns(opened(None, stream()), 1, 9)
    random = stream()
    parts = turns(opened(tmp_path, random), 1, 5)
    second = opened(tmp_path, random)
    second.open_file(num_rounds=5)
    parts += turns(second, 6, 9)
    for (names, noise), (same_names, same_noise) in zip(whole, parts, strict=True):
        assert names == same_names
        np.testing.assert_array_equal(noise, same_noise)


def test_the_noise_is_on_disk_for_its_owner_alone_and_no_longer_than_it_is_used(
    tmp_path: Path,
) -> None:
    turns(opened(tmp_path, stream()), 1, 6)
    folder = tmp_path / NOISE_FOLDER
    assert sorted(file.name for file in folder.iterdir()) == ["4.bin", "5.bin", "6.bin"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in folder.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.stat().st_size == 4 * NUM_VALUES


def test_old_noise_that_cannot_be_removed_ends_the_run_with_a_named_error(tmp_path: Path) -> None:
    privacy = opened(tmp_path, stream())
    turns(privacy, 1, 5)
    (tmp_path / NOISE_FOLDER / "2.bin").mkdir()
    with pytest.raises(StateError, match=r"cannot remove old noise: .*2\.bin"):
        turns(privacy, 6, 6)


def test_noise_that_a_crash_left_on_disk_goes_with_the_next_round(tmp_path: Path) -> None:
    privacy, folder = opened(tmp_path, stream()), tmp_path / NOISE_FOLDER
    turns(privacy, 1, 5)
    (folder / "2.bin").write_bytes(bytes(4 * NUM_VALUES))  # its server died before it removed it
    turns(privacy, 6, 6)
    assert sorted(file.name for file in folder.iterdir()) == ["4.bin", "5.bin", "6.bin"]


def test_a_round_that_a_crash_undid_keeps_its_devices_away(tmp_path: Path) -> None:
    """Its sum was opened: the record has it, and the checkpoint not."""
    ((names, _),) = turns(opened(tmp_path, stream()), 1, 1)
    again = opened(tmp_path, stream(1))
    again.open_file(num_rounds=0)
    due = again.due(FLEET)
    assert due is not None
    assert not set(due) & set(names)


@pytest.mark.parametrize("what", ["missing", "changed", "earlier", "rows"])
def test_a_record_or_noise_that_is_not_the_last_is_refused(tmp_path: Path, what: str) -> None:
    privacy = opened(tmp_path, stream())
    turns(privacy, 1, 4)
    file, before = tmp_path / PRIVACY_FILE, (tmp_path / PRIVACY_FILE).read_text()
    turns(privacy, 5, 5)
    newest = tmp_path / NOISE_FOLDER / "5.bin"
    if what == "missing":
        newest.unlink()
    elif what == "changed":
        newest.write_bytes(bytes(len(newest.read_bytes())))
    elif what == "earlier":
        file.write_text(before)
    else:
        plain = json.loads(before)
        plain["banded"]["devices"] = {"d0": 1}
        file.write_text(json.dumps(plain))
    with pytest.raises(CheckpointCorrupt):
        opened(tmp_path, stream()).open_file(num_rounds=5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"bands": 3}, "4 bands"), ({"bands": 1}, "correlated so far"), ({"clip": 0.5}, "no longer")],
)
def test_the_noise_of_a_run_stays_as_it_began(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    turns(opened(tmp_path, stream()), 1, 2)
    again = opened(tmp_path, stream(), **changes)

    def go_on() -> None:
        again.open_file(num_rounds=2)
        turns(again, 3, 3)

    with pytest.raises(SettingsError, match=says):
        go_on()


def test_independent_noise_does_not_become_correlated(tmp_path: Path) -> None:
    one_round(opened(tmp_path, stream(), bands=1), 1, FLEET[:2])
    with pytest.raises(SettingsError, match="independent so far"):
        opened(tmp_path, stream()).open_file(num_rounds=1)


def test_the_devices_that_were_in_the_fewest_sums_come_first() -> None:
    record = Participation().after(["a", "b"]).after(["c"]).after(["a"])
    assert record.due("abcd", bands=1, most=None, seed=0)[0] == "d"
    assert record.due("abcd", bands=1, most=None, seed=0)[-1] == "a"
    assert record.due("abcd", bands=2, most=None, seed=0)[-1] != "a"
    assert set(record.due("abcd", bands=2, most=None, seed=0)) == {"b", "c", "d"}
    assert set(record.due("abcd", bands=3, most=None, seed=0)) == {"b", "d"}
    assert set(record.due("abcd", bands=1, most=1, seed=0)) == {"d"}
    assert Participation.of_json(json.loads(json.dumps(record.to_json()))) == record
