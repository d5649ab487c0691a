"""Files and lines of any origin: what is too deep or too long for Python is a wrong text."""

from __future__ import annotations

import ast
import json
import tomllib
from pathlib import Path

import pytest

from headwater.client.privacy.budget import SpentFile
from headwater.client.secagg.masked_history import from_ranges, history_in
from headwater.common.errors import CheckpointCorrupt, SettingsError, StateError
from headwater.common.parsed_text import MAX_DEPTH, json_of, toml_of
from headwater.common.settings.sources import load
from headwater.server.privacy.spent_budget import read_events
from tests.laws.test_structure import sources

DEEP_JSON = "[" * 100_000 + "]" * 100_000
LONG_NUMBER = "9" * 100_000
FAR = "1" + "0" * 400  # more than a float holds
TOMLS = {
    "lists": "task = " + "[" * 50_000 + "]" * 50_000,
    "tables": "seed = " + "{a=" * 20_000 + "1" + "}" * 20_000,
    "dotted": ".".join(["a"] * 20_000) + " = 1",
    "number": f"rounds = {LONG_NUMBER}",
}


@pytest.mark.parametrize("text", [DEEP_JSON, '{"a":' * 100_000, LONG_NUMBER])
def test_json_that_python_cannot_read_is_a_wrong_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested|digits"):
        json_of(text)


@pytest.mark.parametrize("name", TOMLS)
def test_toml_that_python_cannot_read_is_a_wrong_text(name: str, tmp_path: Path) -> None:
    with pytest.raises(tomllib.TOMLDecodeError):
        toml_of(TOMLS[name])
    file = tmp_path / "settings.toml"
    file.write_text(TOMLS[name])
    with pytest.raises(SettingsError, match="is not a TOML file"):
        load(file, {})


def test_a_text_of_usual_depth_is_read() -> None:
    assert toml_of(".".join(["a"] * (MAX_DEPTH - 1)) + " = 1")
    assert json_of("[[[1]]]") == [[[1]]]
    assert json_of(b'{"a": 1}') == {"a": 1}


def test_texts_are_read_in_one_place() -> None:
    """But for those of our own processes, which the simulator's engines exchange."""
    found = {
        name
        for name, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "loads"
        if isinstance(node.value, ast.Name) and node.value.id in ("json", "tomllib")
        if not name.startswith("simulation/engines/")
    }
    assert found == {"common/parsed_text.py"}


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"rho": -1}',
        '{"rho": 1, "data": 3}',
        '{"rho": 1, "num_updates": -3}',
        "[]",
        DEEP_JSON,
        '{"rho": NaN}',
        f'{{"rho": {FAR}}}',
        f'{{"rho": 1, "num_updates": {FAR}}}',
        '{"rho": 0, "examples": {"cost": {}, "before": {}, "place": null, "continues": 1, '
        '"begins": -5}}',
        "3",
    ],
    ids=lambda text: text[:24],
)
def test_a_file_of_spent_privacy_says_what_is_spent(text: str, tmp_path: Path) -> None:
    """One that says nothing, or less than nothing, would give the whole budget anew."""
    (tmp_path / "spent.json").write_text(text)
    with pytest.raises(StateError, match="cannot be read"):
        SpentFile(tmp_path / "spent.json").read()


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "null",
        DEEP_JSON,
        '{"sums": [{"noise_multiplier": -1, "count": 3}]}',
        '{"sums": [{"noise_multiplier": Infinity, "count": 3}]}',
        '{"sums": [{"noise_multiplier": 1, "count": Infinity}]}',
        f'{{"sums": [{{"noise_multiplier": {FAR}, "count": 3}}]}}',
    ],
    ids=lambda text: text[:48],
)
def test_a_run_s_file_of_its_sums_says_what_was_opened(text: str, tmp_path: Path) -> None:
    """Noise without end would cost nothing."""
    (tmp_path / "privacy.json").write_text(text)
    with pytest.raises(CheckpointCorrupt, match="what the run has spent"):
        read_events(tmp_path, num_rounds=1)


@pytest.mark.parametrize("ends", [[0, 10**9], [0, 10**400], [0, 2**24], [-5, 3]])
def test_a_range_of_a_history_takes_no_more_memory_than_a_device_s_examples(
    ends: list[int], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="ranges of more than"):
        from_ranges(ends)
    file = tmp_path / "pi-masked.jsonl"
    line = {"model": "0" * 32, "examples": ends}
    file.write_text(json.dumps({"secret": "00" * 32}) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(StateError, match="cannot be read"):
        history_in(file)
