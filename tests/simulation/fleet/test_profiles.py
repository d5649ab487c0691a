"""A fleet's file: the simulated devices have its figures, and errors name table and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.common.errors import SettingsError
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import from_run_config, load
from headwater.simulation.fleet.fleet_file import MAX_DEVICES, DeviceTable, read_fleet
from headwater.simulation.fleet.fleet_spec import fleet_spec, with_fleet
from headwater.simulation.fleet.profiles import PROFILES, draw_device
from headwater.simulation.fleet.random_events import (
    Jitter,
    are_on_battery,
    battery_seed,
    is_connected,
    is_on_battery,
)
from headwater.simulation.fleet.virtual_hardware import VirtualHardware

ROOT = Path(__file__).parents[3]
OWN = "examples_per_second = 10\nmemory_bytes = 1000\nupload_bytes_per_second = 500\n"
SEED = 3


def fleet(folder: Path, text: str, **overrides: Any) -> Settings:
    path = folder / "fleet.toml"
    path.write_text(text)
    return load(None, {"seed": SEED, "simulation.fleet": path, **overrides})


def test_the_number_of_clients_is_the_sum_of_the_counts_in_the_file_s_order(
    tmp_path: Path,
) -> None:
    text = f'[[device]]\nprofile = "laptop"\ncount = 2\n[[device]]\n{OWN}'
    settings = with_fleet(fleet(tmp_path, text))
    assert settings.simulation.clients == 3
    kinds = [fleet_spec(settings).device(part).profile for part in range(3)]
    assert kinds == ["laptop", "laptop", "own figures"]


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.profile)
def test_a_profile_in_a_file_has_its_figures_without_spread(tmp_path: Path, profile: Any) -> None:
    settings = fleet(tmp_path, f'[[device]]\nprofile = "{profile.profile}"\n')
    drawn = fleet_spec(settings).device(0)
    assert (drawn.relative_speed, drawn.memory_bytes) == (
        profile.relative_speed,
        profile.memory_bytes,
    )
    assert drawn.upload_bytes_per_second == profile.upload_bytes_per_second


def test_own_figures_override_the_profile_s(tmp_path: Path) -> None:
    settings = fleet(tmp_path, f'[[device]]\nprofile = "laptop"\ncores = 2\n{OWN}')
    drawn = fleet_spec(settings).device(0)
    assert (drawn.memory_bytes, drawn.upload_bytes_per_second, drawn.cores) == (1000, 500.0, 2.0)
    assert drawn.relative_speed == 1.0  # still decides the dispatch


@pytest.mark.parametrize("num_parameters", [10, 10_000_000])
def test_examples_per_second_do_not_depend_on_the_model_s_size(
    tmp_path: Path, num_parameters: int
) -> None:
    settings = fleet(tmp_path, f"[[device]]\nmicro_batch_seconds = 0.25\n{OWN}")
    clock = VirtualHardware(fleet_spec(settings).device(0), num_parameters).clock
    clock.seconds()  # the first call adds the transfer
    start = clock.seconds()
    clock.worked(5)
    assert clock.seconds() - start == pytest.approx(0.25 + 5 / 10, rel=1e-9)


def test_without_a_file_the_fleet_is_drawn_by_the_seed() -> None:
    settings = load(None, {"seed": SEED})
    assert [fleet_spec(settings).device(part) for part in range(9)] == [
        draw_device(SEED, p) for p in range(9)
    ]
    assert with_fleet(settings) == settings
    assert all(
        is_connected(fleet_spec(settings), part, round_number=1, look=0) for part in range(9)
    )


def test_settings_with_a_fleet_survive_toml_and_flower_s_run_config(tmp_path: Path) -> None:
    settings = with_fleet(fleet(tmp_path, f"[[device]]\ncount = 4\n{OWN}"))
    left = tmp_path / "settings.toml"
    left.write_text(settings.to_toml())
    assert with_fleet(load(left, {})) == settings == from_run_config(settings.to_run_config())


def test_jitter_has_mean_one_and_the_set_deviation() -> None:
    jitter = Jitter(0.1, seed=1)
    factors = [jitter.next_factor() for _ in range(10_000)]
    mean = sum(factors) / len(factors)
    deviation = (sum((f - mean) ** 2 for f in factors) / len(factors)) ** 0.5
    # Four standard errors: of the mean 0.1 / 100, of the deviation 0.1 / sqrt(20,000).
    assert abs(mean - 1) <= 4 * 0.1 / 100
    assert abs(deviation - 0.1) <= 4 * 0.1 / 20_000**0.5 + 0.1**2 / 20


def test_no_jitter_is_a_factor_of_exactly_one() -> None:
    jitter = Jitter(0.0, seed=1)
    assert [jitter.next_factor() for _ in range(3)] == [1.0, 1.0, 1.0]


def test_a_device_is_connected_in_the_set_fraction_of_rounds(tmp_path: Path) -> None:
    settings = fleet(tmp_path, f"[[device]]\navailability = 0.3\n{OWN}")
    there = sum(is_connected(fleet_spec(settings), 0, round_number=n, look=0) for n in range(4000))
    # Four standard deviations of a binomial count.
    assert abs(there - 1200) <= 4 * (4000 * 0.3 * 0.7) ** 0.5


def test_a_list_of_availability_has_an_entry_per_round_and_repeats(tmp_path: Path) -> None:
    settings = fleet(tmp_path, f"[[device]]\navailability = [1, 0, 0.5]\n{OWN}")
    there = [is_connected(fleet_spec(settings), 0, round_number=n, look=0) for n in range(1, 1201)]
    assert all(there[0::3])
    assert not any(there[1::3])
    # Four standard deviations of a binomial count.
    assert abs(sum(there[2::3]) - 200) <= 4 * (400 * 0.25) ** 0.5


def test_each_further_look_uses_the_next_entry_of_the_trace(tmp_path: Path) -> None:
    settings = fleet(tmp_path, f"[[device]]\navailability = [0, 0, 1]\n{OWN}")
    looks = [is_connected(fleet_spec(settings), 0, round_number=1, look=look) for look in range(6)]
    assert looks == [False, False, True, False, False, True]


def test_a_device_is_on_battery_in_the_set_fraction_of_rounds(tmp_path: Path) -> None:
    settings = fleet(tmp_path, f"[[device]]\non_battery = 0.3\ncount = 2\n{OWN}")
    drawn = [
        [is_on_battery(fleet_spec(settings), p, round_number=n) for n in range(4000)]
        for p in (0, 1)
    ]
    assert drawn[0] != drawn[1]
    for one in drawn:
        assert abs(sum(one) - 1200) <= 4 * (4000 * 0.3 * 0.7) ** 0.5


def test_the_column_of_batteries_equals_each_device_s_battery(tmp_path: Path) -> None:
    text = "".join(f"[[device]]\non_battery = {share}\n{OWN}" for share in (0, 0.5, 0.01, 0.99, 1))
    settings = fleet(tmp_path, text)
    parts = range(5)
    seeds = np.array([battery_seed(SEED, part) for part in parts], dtype=np.uint64)
    shares = np.array([fleet_spec(settings).device(part).on_battery for part in parts])
    for number in range(1, 400):
        drawn = are_on_battery(seeds, shares, round_number=number).tolist()
        assert drawn == [
            is_on_battery(fleet_spec(settings), part, round_number=number) for part in parts
        ]


@pytest.mark.parametrize(("share", "is_on"), [(0, False), (1, True)])
def test_a_battery_share_of_zero_or_one_is_certain(tmp_path: Path, share: int, is_on: bool) -> None:
    settings = fleet(tmp_path, f"[[device]]\non_battery = {share}\n{OWN}")
    assert all(is_on_battery(fleet_spec(settings), 0, round_number=n) == is_on for n in range(100))


def test_a_laptop_has_a_battery_unless_the_file_sets_none(tmp_path: Path) -> None:
    text = '[[device]]\nprofile = "laptop"\n[[device]]\nprofile = "laptop"\non_battery = 0\n'
    settings = fleet(tmp_path, text)
    assert fleet_spec(settings).device(0).on_battery > 0
    assert fleet_spec(settings).device(1).on_battery == 0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "device: field required"),
        ("device = 3", "device: "),
        ("device = []", "device: "),
        ("[[devices]]", "device: field required"),
        (f"speed = 2\n[[device]]\n{OWN}", "speed: extra inputs"),
        ("[[device]]", "device number 1: expected a profile, or all of examples_per_second"),
        ("[[device]]\nexamples_per_second = 3", "found no memory_bytes, upload_bytes_per_second"),
        (
            '[[device]]\nprofile = "laptop"\n[[device]]\nprofile = "cray"',
            "number 2: profile: .*cray",
        ),
        (f"[[device]]\nbattery = true\n{OWN}", "device number 1: battery: extra inputs"),
        (f"[[device]]\ncount = 0\n{OWN}", "device number 1: count: .*found 0"),
        (f"[[device]]\njitter = 1.5\n{OWN}", "device number 1: jitter: .*found 1.5"),
        (f"[[device]]\njitter = nan\n{OWN}", "device number 1: jitter: "),
        (f"[[device]]\navailability = 0\n{OWN}", "device number 1: availability: "),
        (f"[[device]]\navailability = true\n{OWN}", "number 1: availability: .*found True"),
        (f"[[device]]\navailability = []\n{OWN}", "number 1: availability: .*expected 1 to 10,000"),
        (f"[[device]]\navailability = [0, 0]\n{OWN}", "availability: .*never available"),
        (f"[[device]]\navailability = [1, 2]\n{OWN}", "availability: .*entry 2 .*0 to 1"),
        (f"[[device]]\navailability = ['x']\n{OWN}", "availability: .*entry 1 must be a number"),
        (f"[[device]]\navailability = nan\n{OWN}", "number 1: availability: .*from 0 to 1"),
        (f"[[device]]\non_battery = 1.1\n{OWN}", "number 1: on_battery: .*found 1.1"),
        (f"[[device]]\non_battery = nan\n{OWN}", "number 1: on_battery: "),
        (f"[[device]]\ncores = -1\n{OWN}", "device number 1: cores: "),
        (f"[[device]]\nmicro_batch_seconds = inf\n{OWN}", "number 1: micro_batch_seconds: "),
        (f"[[device]]\ncount = {MAX_DEVICES}\n{OWN}\n[[device]]\n{OWN}", "count: 100,001"),
    ],
)
def test_an_error_in_a_fleet_file_names_table_and_key(
    tmp_path: Path, text: str, named: str
) -> None:
    with pytest.raises(SettingsError, match=rf"fleet\.toml: .*{named}") as caught:
        with_fleet(fleet(tmp_path, text))
    assert "docs/fleet.md" in caught.value.remedy


@pytest.mark.parametrize("content", [b"device = ", b"\xff\xfe"])
def test_a_fleet_file_that_is_not_toml_is_a_settings_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "fleet.toml").write_bytes(content)
    with pytest.raises(SettingsError, match=r"fleet\.toml is not a TOML file"):
        read_fleet(tmp_path / "fleet.toml")


def test_a_missing_fleet_file_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.toml: No such file"):
        read_fleet(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    "chosen", [{"cohort.min_clients": 3}, {"secure.aggregation": "semi-honest"}]
)
def test_a_round_that_needs_more_clients_than_there_are_is_refused(chosen: dict[str, Any]) -> None:
    """A session of masked updates needs three; two would train, and their sum never opens."""
    with pytest.raises(SettingsError, match="needs 3 clients and the simulator has 2"):
        with_fleet(load(None, {"simulation.clients": 2, **chosen}))


def test_another_number_of_clients_than_the_file_has_is_refused(tmp_path: Path) -> None:
    text = f"[[device]]\ncount = 4\n{OWN}"
    assert with_fleet(fleet(tmp_path, text, **{"simulation.clients": 4})).simulation.clients == 4
    with pytest.raises(SettingsError, match=r"has 4 devices, and .* is set to 100"):
        with_fleet(fleet(tmp_path, text, **{"simulation.clients": 100}))


@pytest.mark.parametrize("trace", ["0.5", "[1, 1, 0.9]"])
def test_availability_is_refused_on_ray(tmp_path: Path, trace: str) -> None:
    text = f"[[device]]\navailability = {trace}\n{OWN}"
    with pytest.raises(SettingsError, match="availability, which the engine flower-ray does not"):
        with_fleet(fleet(tmp_path, text, **{"simulation.engine": "flower-ray"}))


def test_jitter_and_batteries_are_simulated_on_ray(tmp_path: Path) -> None:
    text = f"[[device]]\njitter = 0.1\non_battery = 0.5\n{OWN}"
    assert with_fleet(fleet(tmp_path, text, **{"simulation.engine": "flower-ray"}))


def test_the_docs_show_the_example_as_it_is() -> None:
    example = ROOT / "examples" / "fleets" / "village.toml"
    assert f"```toml\n{example.read_text()}```" in (ROOT / "docs" / "fleet.md").read_text()
    assert len(read_fleet(example)) == 20


def test_the_docs_table_has_every_key_of_the_file() -> None:
    text = (ROOT / "docs" / "fleet.md").read_text()
    assert [key for key in DeviceTable.model_fields if f"| `{key}` |" not in text] == []


def test_a_table_may_name_every_profile() -> None:
    for name in [profile.profile for profile in PROFILES]:
        assert DeviceTable.model_validate({"profile": name}).profile == name
