"""Devices with data of their own: which paths, in which order, under which names."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.client.training.context import Identity
from headwater.common.data.data_paths import find_data
from headwater.common.errors import MissingData, SettingsError
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import from_run_config, load, with_default_task
from headwater.simulation.fleet.fleet_spec import fleet_spec, with_fleet
from headwater.simulation.fleet.identities import device_names, identities_of

LAPTOP = '[[device]]\nprofile = "laptop"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("pi10.csv", "pi2.csv", "kitchen pi.csv", ".hidden.csv", "notes.txt"):
        path = tmp_path / "devices" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    for name in ("ann", "bob.v2"):
        (tmp_path / "people" / name).mkdir(parents=True)
        (tmp_path / "people" / name / "data.csv").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(data: str | tuple[str, ...]) -> tuple[str, ...]:
    return find_data(data, source="--data", folder=Path())


def settings(**overrides: object) -> Settings:
    return with_fleet(load(None, {key.replace("__", "."): it for key, it in overrides.items()}))


def test_a_pattern_gives_a_path_a_device_in_natural_order(folder: Path) -> None:
    assert found("devices/*.csv") == (
        "devices/kitchen pi.csv",
        "devices/pi2.csv",
        "devices/pi10.csv",
    )
    assert found("people/*") == ("people/ann", "people/bob.v2")
    assert found("**/data.csv") == ("people/ann/data.csv", "people/bob.v2/data.csv")
    assert found("*/") == ("devices", "people")
    assert found(f"{folder}/devices/pi?.csv") == (f"{folder}/devices/pi2.csv",)


def test_a_path_in_the_home_folder_is_expanded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert found("~/people/*") == (f"{folder}/people/ann", f"{folder}/people/bob.v2")


def test_a_path_that_exists_is_no_pattern(folder: Path) -> None:
    (folder / "run [1]").mkdir()
    assert found("run [1]") == ("run [1]",)


def test_a_list_is_taken_in_its_own_order(folder: Path) -> None:
    assert found(("people/bob.v2", "people/ann")) == ("people/bob.v2", "people/ann")
    with pytest.raises(MissingData, match="people/cleo does not exist"):
        found(("people/ann", "people/cleo"))


def test_a_missing_path_of_a_list_names_the_folder_in_which_it_was_looked_for(folder: Path) -> None:
    with pytest.raises(MissingData) as failed:
        found(("people/ann", "people/cleo"))
    assert failed.value.remedy.endswith(f"a relative path starts in {folder}")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("devices/*.tsv", r"nothing matches devices/\*\.tsv; .*/devices has .*notes\.txt"),
        ("device/*.csv", r"nothing matches device/\*\.csv; .* has devices, people"),
        ("devices/a.csv", r"devices/a\.csv does not exist; .*/devices has"),
        ("*/nothing", r"nothing matches \*/nothing; .* has devices, people"),
    ],
)
def test_an_error_shows_what_is_there_instead(folder: Path, data: str, message: str) -> None:
    with pytest.raises(MissingData, match=message):
        found(data)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (("devices/pi2.csv", "devices/kitchen pi.csv"), ("pi2", "kitchen-pi")),
        (("people/ann", "people/bob.v2"), ("ann", "bob.v2")),
        (("people/ann/data.csv", "people/bob.v2/data.csv"), ("ann", "bob.v2")),
        (("devices/pi2.csv",), ("pi2",)),
        (("_a.csv", "数据.csv"), ("a", "device-1")),
    ],
)
def test_a_device_is_named_after_its_file_or_folder(
    folder: Path, paths: tuple[str, ...], names: tuple[str, ...]
) -> None:
    assert device_names(paths) == names


@pytest.mark.parametrize(
    "paths", [("a.csv", "a.txt"), ("a b.csv", "a-b.csv"), ("x/a.csv", "y/a.csv", "b.csv")]
)
def test_two_devices_of_one_name_are_refused(paths: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match=f"{paths[0]} and {paths[1]} would both be"):
        device_names(paths)


def test_the_number_of_clients_follows_from_the_data(folder: Path) -> None:
    chosen = settings(simulation__data="devices/*.csv")
    assert chosen.simulation.clients == 3
    identities = identities_of(chosen)
    assert identities.of(1) == Identity(
        name="pi2", data=Path("devices/pi2.csv"), part=0, num_parts=1
    )
    assert [identities.part(name) for name in ("kitchen-pi", "pi2", "pi10")] == [0, 1, 2]


def test_settings_with_data_are_final_and_travel_to_every_engine(folder: Path) -> None:
    chosen = settings(simulation__data="devices/*.csv")
    (folder / "devices" / "new.csv").write_text("")
    assert with_fleet(chosen) == chosen
    assert identities_of(from_run_config(chosen.to_run_config())) == identities_of(chosen)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"simulation__data": "devices/*.csv", "simulation__clients": 4}, "the data of 3 devices"),
        ({"simulation__data": "devices", "simulation__clients": 4}, "names one path, devices"),
        (
            {"simulation__data": "devices/*.csv", "partition__kind": "iid"},
            "matches 3 files and folders, .* --partition iid splits one data set",
        ),
        ({"simulation__data": "devices/*.csv", "cohort__min_clients": 4}, "needs 4 clients"),
        ({"simulation__data": "*/pi2*", "simulation__fleet": "two.toml"}, "the data of 1 device"),
    ],
)
def test_a_setting_that_contradicts_the_data_is_refused(
    folder: Path, overrides: dict[str, object], message: str
) -> None:
    (folder / "two.toml").write_text(f"{LAPTOP}count = 2\n")
    with pytest.raises(SettingsError, match=message) as error:
        settings(**overrides)
    assert error.value.remedy


def test_one_data_set_may_be_partitioned_over_any_number_of_clients(folder: Path) -> None:
    chosen = settings(simulation__data="devices", partition__kind="iid", simulation__clients=7)
    of_five = identities_of(chosen).of(5)
    assert (of_five.name, of_five.data, of_five.part) == ("5", Path("devices"), 5)
    assert of_five.num_parts == 7
    assert of_five.rule is not None


def test_data_without_a_task_is_refused(folder: Path) -> None:
    with pytest.raises(SettingsError, match="no task"):
        with_default_task(load(None, {"simulation.data": "devices/*.csv"}))


def test_a_simulation_without_a_task_trains_the_digits() -> None:
    assert with_default_task(Settings()).task == "headwater.examples.digits:Digits"


# In a fleet's file.


def test_a_fleet_s_tables_name_the_data_of_their_devices(folder: Path) -> None:
    text = f'{LAPTOP}data = "people/*"\n[[device]]\nprofile = "pi4-2gb"\ndata = "devices/*.csv"\n'
    (folder / "fleet.toml").write_text(text)
    chosen = settings(simulation__fleet=str(folder / "fleet.toml"))
    assert chosen.simulation.clients == 5
    identities, fleet = identities_of(chosen), fleet_spec(chosen)
    shown = [(identities.name(part), fleet.device(part).profile) for part in range(5)]
    assert shown[:3] == [("ann", "laptop"), ("bob.v2", "laptop"), ("kitchen-pi", "pi4-2gb")]
    assert identities.of(0).data == folder / "people" / "ann"
    assert with_fleet(chosen) == chosen


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'{LAPTOP}count = 3\ndata = "people/*"', r"people/\* has 2 matches, and count is 3"),
        (f'{LAPTOP}data = "people/x*"', r"device number 1: data: nothing matches people/x\*"),
        (f'{LAPTOP}data = "people/*"\n{LAPTOP}', "device number 2 has no data"),
        (f'{LAPTOP}data = ""', "data: string should have at least 1 character"),
    ],
)
def test_wrong_data_in_a_fleet_s_file_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / "fleet.toml").write_text(text)
    with pytest.raises(SettingsError, match=message):
        settings(simulation__fleet=str(folder / "fleet.toml"))


def test_a_fleet_s_data_and_the_flag_contradict_each_other(folder: Path) -> None:
    (folder / "fleet.toml").write_text(f'{LAPTOP}data = "people/*"')
    fleet = str(folder / "fleet.toml")
    with pytest.raises(SettingsError, match="names the data of its devices"):
        settings(simulation__fleet=fleet, simulation__data="devices/*.csv")


def test_a_fleet_gives_the_devices_and_the_flag_their_data(folder: Path) -> None:
    (folder / "fleet.toml").write_text(f"{LAPTOP}count = 2\n")
    chosen = settings(simulation__fleet=str(folder / "fleet.toml"), simulation__data="people/*")
    assert [identities_of(chosen).name(part) for part in range(2)] == ["ann", "bob.v2"]


def test_a_bundled_fleet_is_found_in_any_folder(folder: Path) -> None:
    assert settings(simulation__fleet="examples/fleets/village.toml").simulation.clients == 20
