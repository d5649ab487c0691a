"""The settings tree: to TOML and back, to Flower's flat run_config and back."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headwater.common.errors import SettingsError
from headwater.common.settings.schema import ClientSettings, Settings
from headwater.common.settings.sources import default_out, from_run_config, load

NAME = st.text(st.characters(codec="ascii", categories=["Ll", "Nd"]), min_size=1).filter(
    lambda text: text[0].isalpha()
)
NUMBER = st.floats(allow_nan=False, allow_infinity=False, width=64)
ARGUMENT = (
    st.booleans()
    | st.integers(-(2**53), 2**53)
    | NUMBER
    | st.text(st.characters(codec="utf-8"), min_size=1)
    | st.lists(NUMBER, min_size=1, max_size=4)
)
TREES = st.builds(
    lambda **given: Settings.model_validate(given),
    task=st.none() | st.text(st.characters(codec="utf-8"), min_size=1),
    seed=st.integers(0, 2**53),
    rounds=st.integers(1, 2**31 - 1),
    out=st.none() | NAME.map(Path),
    check_task=st.booleans(),
    optimizer=st.fixed_dictionaries(
        {
            "name": NAME,
            "learning_rate": st.floats(5e-324, 1e300),
            "arguments": st.dictionaries(NAME, ARGUMENT, max_size=4),
        }
    ),
    schedule=st.fixed_dictionaries(
        {
            "name": st.none() | NAME,
            "arguments": st.dictionaries(
                NAME, st.lists(st.integers(0, 2**40), min_size=1, max_size=12), max_size=2
            ),
        }
    ),
    plan=st.fixed_dictionaries({"accumulation_steps": st.none() | st.integers(1, 99)}),
    cohort=st.fixed_dictionaries(
        {"deadline_seconds": st.none() | st.floats(0, 1e6, exclude_min=True)}
    ),
)


@given(TREES)
def test_a_tree_written_as_toml_is_read_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, tree: Settings
) -> None:
    file = tmp_path_factory.getbasetemp() / "round_trip.toml"
    file.write_text(tree.to_toml(), encoding="utf-8", newline="")
    assert load(file, {}) == tree


@given(TREES)
def test_a_tree_flattened_for_flower_is_rebuilt_the_same(tree: Settings) -> None:
    flat = tree.to_run_config()
    assert all(isinstance(value, (bool, int, float, str)) for value in flat.values())
    assert from_run_config(flat) == tree


def test_lists_keep_their_order_beyond_ten_items() -> None:
    tree = Settings.model_validate(
        {"schedule": {"name": "multisteplr", "arguments": {"milestones": list(range(12))}}}
    )
    assert from_run_config(tree.to_run_config()).schedule.arguments["milestones"] == [*range(12)]


def test_an_empty_string_in_the_run_config_means_not_set() -> None:
    assert from_run_config({"out": "", "cohort.deadline_seconds": ""}) == Settings()


@pytest.mark.parametrize("key", ["out", "tls.ca", "client.state"])
def test_an_empty_path_is_refused_and_is_not_the_working_folder(key: str) -> None:
    with pytest.raises(SettingsError, match="expected a path, found ''"):
        load(None, {key: ""})


def test_the_default_tree_survives_both_ways(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(Settings().to_toml())
    assert load(file, {}) == from_run_config(Settings().to_run_config()) == Settings()


def test_an_override_beats_the_file_and_none_leaves_it(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("rounds = 3\nseed = 4\n")
    tree = load(file, {"rounds": 9, "seed": None})
    assert (tree.rounds, tree.seed) == (9, 4)


@pytest.mark.parametrize("content", [b"rounds = ", b"= 3", b"\xff\xfe", b"a = 1\na = 2"])
def test_a_file_that_is_not_toml_is_a_settings_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "settings.toml"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match="is not a TOML file"):
        load(file, {})


def test_a_missing_settings_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.toml: No such file"):
        load(tmp_path / "nowhere.toml", {})


def test_a_folder_as_settings_file_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read"):
        load(tmp_path, {})


def test_an_override_below_a_value_of_the_file_is_a_settings_error(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("plan = 3")
    with pytest.raises(SettingsError, match="plan"):
        load(file, {"plan.micro_batch_size": 2})


def test_settings_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValidationError):
        Settings().rounds = 3  # type: ignore[misc]


@given(st.floats(allow_nan=False))
def test_a_learning_rate_is_accepted_if_and_only_if_it_is_positive_and_finite(rate: float) -> None:
    is_possible = rate > 0 and math.isfinite(rate)
    try:
        load(None, {"optimizer.learning_rate": rate})
    except SettingsError:
        assert not is_possible
    else:
        assert is_possible


def test_a_run_without_a_folder_gets_one_named_after_its_task() -> None:
    folder = default_out(Settings(task="a/digits.py:Digits"))
    assert folder.parent.name == "runs"
    assert folder.name.startswith("digits-")


@pytest.mark.parametrize(
    ("text", "number"),
    [("4GB", 4 * 10**9), ("512 MiB", 2**29), ("1.5gb", 1_500_000_000), ("2TiB", 2**41)],
)
def test_a_number_of_bytes_may_have_a_unit(text: str, number: int) -> None:
    assert ClientSettings.model_validate({"memory_limit_bytes": text}).memory_limit_bytes == number


def test_bytes_beyond_any_number_are_refused_as_too_many() -> None:
    with pytest.raises(ValidationError, match="less than or equal to"):
        ClientSettings.model_validate({"memory_limit_bytes": "9" * 400 + "GB"})
