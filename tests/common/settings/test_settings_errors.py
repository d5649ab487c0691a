"""What a wrong setting's error says: its source, key, flag, expected and found value, remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.common.errors import SettingsError
from headwater.common.settings import sources
from headwater.common.settings.sources import from_run_config, load

# The text of a file, and the problem that follows its name.
FILES: dict[str, tuple[str, str]] = {
    "wrong type": (
        "rounds = 'many'",
        "rounds (--rounds): expected a whole number, at least 1 or forever, found 'many'",
    ),
    "below the range": (
        "rounds = 0",
        "rounds (--rounds): expected a whole number, at least 1 or forever, found 0",
    ),
    "fraction for a whole number": (
        "rounds = 1.5",
        "rounds (--rounds): expected a whole number, at least 1 or forever, found 1.5",
    ),
    "negative seed": (
        "seed = -1",
        "seed (--seed): expected a whole number, at least 0, found -1",
    ),
    "not above the limit": (
        "[optimizer]\nlearning_rate = -1.0",
        "optimizer.learning_rate (--learning-rate): expected a number, above 0, found -1.0",
    ),
    "not a number": (
        "[optimizer]\nlearning_rate = nan",
        "optimizer.learning_rate (--learning-rate): expected a number, above 0, found nan",
    ),
    "infinite seconds": (
        "[cohort]\ndeadline_seconds = inf",
        "cohort.deadline_seconds (--deadline): expected a number of seconds, above 0, "
        "at most 2,592,000, found inf",
    ),
    "no flag": (
        "[plan]\nmemory_fraction = 2.0",
        "plan.memory_fraction: expected a number, above 0, at most 1, found 2.0",
    ),
    "bytes": (
        "[client]\nmemory_limit_bytes = 0",
        "client.memory_limit_bytes (--memory-limit): expected a whole number of bytes "
        "(or as in 4GB), at least 1, found 0",
    ),
    "bad choice": (
        "[plan]\nprecision = 'float16'",
        "plan.precision (--precision): expected one of float32, bfloat16, auto, found 'float16'",
    ),
    "bad number among choices": (
        "[secure]\nring_bits = 12",
        "secure.ring_bits (--ring-bits): expected one of 8, 16, 32, found 12",
    ),
    "no truth value": (
        "check_task = 'perhaps'",
        "check_task (--check): expected true or false, found 'perhaps'",
    ),
    "no text": ("task = 3", "task (--task): expected text, found 3"),
    "no path": ("out = 3", "out (--out): expected a path, found 3"),
    "union": (
        "[simulation]\nworkers = 'all'",
        "simulation.workers (--workers): expected a whole number, at least 1 or auto, found 'all'",
    ),
    "value of a table": (
        "[optimizer.arguments]\nbetas = {a = 1}",
        "optimizer.arguments.betas: expected a number, true, false, text or a list of numbers, "
        "found {'a': 1}",
    ),
    "no table": ("optimizer = 'adam'", "optimizer: expected a table of settings, found 'adam'"),
    "validator of a partition": (
        "[partition]\nkind = 'by weight'",
        "partition.kind (--partition): expected task, iid, ",
    ),
    "validator across two settings": (
        "[partition]\nexamples_per_device = 3",
        "partition.examples_per_device (--examples-per-device): the task's own split ",
    ),
    "extra key": (
        "rouns = 3",
        "rouns is not a setting; did you mean rounds?",
    ),
    "extra table": ("[plann]\nprecision = 2", "plann is not a setting; did you mean plan?"),
    "extra key in a table": (
        "[plan]\nmicrobatch_size = 3",
        "plan.microbatch_size is not a setting; did you mean plan.micro_batch_size?",
    ),
    "key outside of its table": (
        "micro_batch_size = 3",
        "micro_batch_size is not a setting; did you mean plan.micro_batch_size?",
    ),
    "extra key like no other": ("xyzzy = 1", "xyzzy is not a setting"),
}


def error_of(config: Path | None, overrides: dict[str, Any]) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        load(config, overrides)
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("case", FILES)
def test_a_wrong_setting_in_a_file_is_named_with_what_was_expected_and_found(
    tmp_path: Path, case: str
) -> None:
    text, problem = FILES[case]
    file = tmp_path / "settings.toml"
    file.write_text(text)
    error = error_of(file, {})
    assert error.message.startswith(f"{file}: {problem}"), error.message
    assert "docs/settings.md" in error.remedy


def test_a_wrong_flag_is_named_as_coming_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("rounds = 3")
    error = error_of(file, {"rounds": "x"})
    assert error.message == (
        "the command line: rounds (--rounds): expected a whole number, at least 1 or forever, "
        "found 'x'"
    )
    assert "--help-all" in error.remedy


def test_a_wrong_value_of_the_run_config_is_named_as_such() -> None:
    with pytest.raises(SettingsError, match=r"^run_config: rounds .*found 'x'"):
        from_run_config({"rounds": "x"})


def test_several_wrong_settings_are_all_shown_with_their_sources(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("seed = -1\n[plann]\n")
    lines = error_of(file, {"rounds": "x"}).message.splitlines()
    assert lines[0] == "3 settings are wrong:"
    assert [line.split(": ")[0].strip() for line in lines[1:]] == [
        str(file),
        "the command line",
        str(file),
    ]


@pytest.mark.parametrize("rounds", ["never", "0", 0, 1.5])
def test_rounds_that_are_neither_a_number_nor_forever_are_refused(rounds: object) -> None:
    text = str(error_of(None, {"rounds": rounds}))
    assert "rounds (--rounds): expected a whole number, at least 1 or forever" in text
    assert load(None, {"rounds": "forever"}).num_rounds is None
    assert load(None, {"rounds": "12"}).num_rounds == 12


def test_a_union_s_error_is_shown_once() -> None:
    assert "\n" not in error_of(None, {"simulation.workers": "all"}).message


def test_an_override_below_a_value_of_the_file_is_a_settings_error(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("plan = 3")
    assert "plan: expected a table" in error_of(file, {"plan.micro_batch_size": 2}).message


REMOVED = sorted(sources.REMOVED)


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_setting_says_what_replaced_it(key: str) -> None:
    error = error_of(None, {key: "22:00-06:00"})
    assert error.message == f"the command line: {key} was removed"
    assert error.remedy == sources.REMOVED[key][1]


@pytest.mark.parametrize("key", [key for key in REMOVED if sources.REMOVED[key][0] is not None])
def test_a_removed_setting_without_effect_is_read_as_an_earlier_run_left_it(key: str) -> None:
    assert load(None, {key: sources.REMOVED[key][0]}) == load(None, {})


def test_a_file_with_removed_settings_at_their_defaults_is_read(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        "rounds = 3\n[client]\nworking_share = 0.0\n[simulation]\nwire = false\ncompile = false\n"
    )
    assert load(file, {}) == load(None, {"rounds": 3})
