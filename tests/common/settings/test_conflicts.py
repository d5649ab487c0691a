"""Settings that cannot work together are refused by name, before task and data are opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headwater
from headwater.common.errors import SettingsError
from headwater.common.settings.conflicts import check_effective
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load, load_run

MASKS = {"secure": {"aggregation": "semi-honest"}}
PRIVATE = {"privacy": {"noise_multiplier": 1.0}, "plan": {"accumulation_steps": 2}}
BY_EXAMPLE = {"noise_multiplier": 1.0, "unit": "example"}
BANDED = {"noise_multiplier": 1.0, "bands": 4}


def plan(**values: Any) -> dict[str, Any]:
    return {"plan": values}


ASYNCHRONOUS = {"is_on": True}
OVERLAP = {"asynchronous": {"is_on": True, "overlap": True}}
CONFLICTS: dict[str, tuple[dict[str, Any], str]] = {
    "an overlap of synchronous rounds": (
        {"asynchronous": {"overlap": True}},
        "a late one by design",
    ),
    "an overlap and masks": ({**OVERLAP, **MASKS}, "waits on its device"),
    "an overlap and noise": ({**OVERLAP, **PRIVATE}, "no fixed bound"),
    "an overlap and offline windows": (
        {"asynchronous": {"is_on": True, "overlap": True, "offline_windows": 2}},
        "goes on with one plan",
    ),
    "an overlap and a cohort": ({**OVERLAP, "cohort": {"size": 2}}, "two plans"),
    "an overlap and own parameters": (
        {**OVERLAP, "model": {"local_parameters": "head.*"}},
        "pending for one round",
    ),
    "an overlap and a state on each device": (
        {**OVERLAP, "local": {"algorithm": "scaffold"}},
        "enters the next one",
    ),
    "tokens and examples": (
        plan(tokens_per_update=4096, effective_batch_size=64),
        "--tokens-per-update and --effective-batch-size",
    ),
    "tokens and the noise scale": (
        plan(tokens_per_update=4096, follow_noise_scale=True),
        "--tokens-per-update and --follow-noise-scale",
    ),
    "tokens and K": (plan(tokens_per_update=4096, accumulation_steps=2), "--accumulation-steps"),
    "the noise scale and K": (
        plan(follow_noise_scale=True, accumulation_steps=2),
        "--accumulation-steps",
    ),
    "the noise scale and local steps": (
        {**plan(follow_noise_scale=True), "local": {"steps": 2}},
        "no noise scale",
    ),
    "local steps and epochs": ({"local": {"steps": 2, "epochs": 2}}, "both --local-steps and"),
    "one local step and epochs": ({"local": {"steps": 1, "epochs": 2}}, "both --local-steps and"),
    "local steps of K micro-batches and of B examples": (
        {**plan(accumulation_steps=2), "local": {"steps": 2, "batch_size": 4}},
        "examples of a local step",
    ),
    "local steps and a number of examples": (
        {**plan(effective_batch_size=64), "local": {"steps": 2}},
        "--effective-batch-size",
    ),
    "an epoch and a number of tokens": (
        {**plan(tokens_per_update=4096), "local": {"algorithm": "fedavg"}},
        "--tokens-per-update",
    ),
    "a proximal term without local steps": ({"local": {"proximal": 0.1}}, "devices take none"),
    "a step's examples without local steps": ({"local": {"batch_size": 8}}, "devices take none"),
    "a scaled rate and local steps": (
        {"schedule": {"batch_scaling": "sqrt"}, "local": {"algorithm": "diloco"}},
        "--batch-scaling",
    ),
    "a client algorithm and a proximal term": (
        {"algorithm": {"name": "mine.py:Mine"}, "local": {"steps": 2, "proximal": 0.1}},
        "takes the local steps itself",
    ),
    "a client algorithm and a preset": (
        {"algorithm": {"name": "mine.py:Mine"}, "local": {"algorithm": "fedprox"}},
        "takes the local steps itself",
    ),
    "masks and epochs": ({**MASKS, "local": {"algorithm": "fedavg"}}, "does not tell under masks"),
    "active masks and a kept optimizer": (
        {
            "secure": {"aggregation": "active"},
            "local": {"algorithm": "client-momentum", "steps": 2},
        },
        "under active masks",
    ),
    "SCAFFOLD and momentum": (
        {"local": {"algorithm": "scaffold", "arguments": {"momentum": 0.9}}},
        "which --local-optimizer-argument would change",
    ),
    "SCAFFOLD and AdamW": (
        {"local": {"algorithm": "scaffold", "optimizer": "adamw"}},
        "which --local-optimizer would change",
    ),
    "SCAFFOLD and a proximal term": (
        {"local": {"algorithm": "scaffold", "proximal": 0.1}},
        "which --proximal would change",
    ),
    "SCAFFOLD and a robust rule": (
        {"local": {"algorithm": "scaffold"}, "aggregation": {"rule": "median"}},
        "adds up the devices' control variates",
    ),
    "SCAFFOLD without local steps": (
        {"local": {"algorithm": "scaffold", "steps": 1}},
        "--local-steps 1 is none",
    ),
    "a start above the maximum": (
        plan(follow_noise_scale=True, max_effective_batch_size=511),
        "--max-effective-batch-size 511",
    ),
    "an algorithm and the noise scale": (
        {**plan(follow_noise_scale=True), "algorithm": {"name": "mine.py:Mine"}},
        "client algorithm Mine",
    ),
    "an algorithm with long arguments": (
        {"algorithm": {"name": "mine.py:Mine", "arguments": {"text": "x" * 1024}}},
        "1,024 characters",
    ),
    "a robust rule and the noise scale": (
        {**plan(follow_noise_scale=True), "aggregation": {"rule": "krum"}},
        "--aggregation krum",
    ),
    "few bits of values of another method": (
        {"compression": {"up": "random-k", "values": "int2"}},
        "--compress-values",
    ),
    "few bits of factors under masks": (
        {**MASKS, "compression": {"up": "low-rank", "values": "int4"}},
        "--compress-values int4",
    ),
    "few bits and the noise scale": (
        {**plan(follow_noise_scale=True), "compression": {"up": "int2"}},
        "--compress int2",
    ),
    "masks and a robust rule": ({**MASKS, "aggregation": {"rule": "median"}}, "--aggregation"),
    "masks and a small quota": (
        {**MASKS, **plan(accumulation_steps=1, micro_batch_size=2)},
        "K x micro-batch is 2 examples",
    ),
    "masks and evaluation on devices": (
        {**MASKS, "evaluation": {"on_devices": True}},
        "held-out loss",
    ),
    "a unit of privacy without noise": ({"privacy": {"unit": "example"}}, "none is set"),
    "an epsilon and a noise multiplier": (
        {"privacy": {"epsilon": 1.0, "noise_multiplier": 1.0}, **plan(accumulation_steps=2)},
        "--privacy-noise-multiplier",
    ),
    "a buffer without asynchronous rounds": ({"asynchronous": {"buffer": 2}}, "--buffer"),
    "a largest staleness without asynchronous rounds": (
        {"asynchronous": {"max_staleness": 5}},
        "--max-staleness: only for asynchronous rounds",
    ),
    "a staleness exponent without asynchronous rounds": (
        {"asynchronous": {"exponent": 1.0}},
        "--staleness-exponent: only for asynchronous rounds",
    ),
    "a buffer below the quorum": (
        {"asynchronous": {"is_on": True, "buffer": 2}, "cohort": {"min_clients": 3}},
        "2 updates",
    ),
    "a buffer above the cohort": (
        {"asynchronous": {"is_on": True, "buffer": 9}, "cohort": {"size": 8}},
        "--cohort-size 8",
    ),
    "asynchronous rounds and privacy": (
        {
            "asynchronous": ASYNCHRONOUS,
            "privacy": {"epsilon": 4.0},
            **plan(accumulation_steps=2),
        },
        "its staleness",
    ),
    "a buffer below a secure session's members": (
        {**MASKS, "asynchronous": {"is_on": True, "buffer": 2}},
        "a secure session needs 3",
    ),
    "masks and offline windows": (
        {**MASKS, "asynchronous": {"is_on": True, "offline_windows": 5}},
        "a device masks one window",
    ),
    "asynchronous rounds and the noise scale": (
        {"asynchronous": ASYNCHRONOUS, **plan(follow_noise_scale=True)},
        "one model",
    ),
    "asynchronous rounds and differences of models": (
        {"asynchronous": ASYNCHRONOUS, "compression": {"down": "bfloat16"}},
        "several versions",
    ),
    "asynchronous rounds and a robust rule": (
        {"asynchronous": ASYNCHRONOUS, "aggregation": {"rule": "median"}},
        "one model",
    ),
    "asynchronous rounds and evaluation on devices": (
        {"asynchronous": ASYNCHRONOUS, "evaluation": {"on_devices": True}},
        "interrupt its plan",
    ),
    "asynchronous rounds and other engines": (
        {"asynchronous": ASYNCHRONOUS, "simulation": {"engine": "grpc"}},
        "virtual clock",
    ),
    "offline windows and weights of data": (
        {
            "asynchronous": {"is_on": True, "offline_windows": 5},
            "cohort": {"weighting": "dataset"},
        },
        "--weighting dataset",
    ),
    "offline windows and compression": (
        {"asynchronous": {"is_on": True, "offline_windows": 5}, "compression": {"up": "int8"}},
        "--compress int8",
    ),
    "masks and workers": ({**MASKS, "simulation": {"workers": 2}}, "worker processes"),
    "workers and other processes": (
        {"simulation": {"workers": 2, "engine": "grpc"}},
        "worker processes",
    ),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_settings_that_contradict_each_other_are_named_with_a_remedy(case: str) -> None:
    changes, words = CONFLICTS[case]
    with pytest.raises(SettingsError, match=words) as caught:
        Settings.model_validate(changes)
    assert caught.value.remedy.startswith(("leave out --", "raise --", "lower --", "give fewer"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulation_steps": 2, "effective_batch_size": 64},
        {"tokens_per_update": 4096},
        {"follow_noise_scale": True, "effective_batch_size": 512, "max_effective_batch_size": 512},
    ],
)
def test_settings_that_choose_one_target_or_none_are_taken(changes: dict[str, Any]) -> None:
    chosen = Settings.model_validate(plan(**changes))
    # A run's settings.toml and Flower's run_config name every setting, also those left as they are.
    Settings.model_validate(chosen.model_dump())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"plan": {}}, "--accumulation-steps"),
        ({"plan": {"accumulation_steps": 2, "follow_noise_scale": True}}, "--follow-noise-scale"),
        ({"cohort": {"weighting": "dataset"}}, "--weighting"),
        ({"evaluation": {"on_devices": True}}, "--evaluate-on-devices"),
        ({"aggregation": {"rule": "median"}}, "--aggregation"),
        ({"evaluation": {"best": "train_accuracy"}}, "a metric of the test"),
        ({"evaluation": {"stop_when": "train_loss"}}, "a metric of the test"),
        ({"secure": {"aggregation": "active", "ring_bits": 16}}, "--ring-bits"),
        ({"privacy": {**BY_EXAMPLE, "clip_quantile": 0.5}}, "--privacy-clip-quantile"),
        (
            {"privacy": BY_EXAMPLE, "plan": {"accumulation_steps": 2}, "local": {"steps": 2}},
            "--local-steps",
        ),
        ({"local": {"algorithm": "fedavg"}}, "--local-epochs, and set --local-steps"),
        ({"local": {"algorithm": "scaffold", "steps": 2}}, "take --algorithm fedavg"),
        ({"local": {"algorithm": "client-momentum", "steps": 2}}, "take --algorithm fedavg"),
        ({"privacy": BY_EXAMPLE, "algorithm": {"name": "fedprox"}}, "--client-algorithm"),
        ({"privacy": BY_EXAMPLE, "model": {"local_parameters": "head.*"}}, "--local-parameters"),
        ({"privacy": BANDED, "secure": {"aggregation": "active"}}, "--privacy-bands"),
        ({"privacy": BANDED, "cohort": {"size": None}}, "--cohort-size"),
        (
            {"privacy": {**BANDED, "clip_quantile": 0.5}, "cohort": {"size": 5}},
            "--privacy-clip-quantile",
        ),
        ({"privacy": {**BANDED, "unit": "example"}, "cohort": {"size": 5}}, "--privacy-bands"),
    ],
)
def test_settings_that_would_void_the_promise_of_privacy_are_refused_by_name(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.model_validate(PRIVATE | changes)
    assert says in caught.value.remedy
    assert caught.value.message.startswith("with differential privacy")


def test_a_conflict_is_told_before_the_task_and_the_data_are_looked_for() -> None:
    with pytest.raises(SettingsError, match="--aggregation median compares single updates"):
        headwater.simulate(
            "no_such_file.py:Task",
            data="no_such_folder/*.csv",
            secure_aggregation="active",
            settings={"aggregation.rule": "median"},
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"privacy": {"epsilon": 8}, "plan": {"accumulation_steps": 2}},
        {"schedule": {"name": "OneCycleLR", "arguments": {"max_lr": 0.1, "total_steps": 10}}},
    ],
)
def test_what_needs_a_last_round_is_refused_with_rounds_forever(changes: dict[str, Any]) -> None:
    assert Settings.model_validate({"rounds": 10, **changes}).num_rounds == 10
    with pytest.raises(SettingsError, match="--rounds forever") as caught:
        Settings.model_validate({"rounds": "forever", **changes})
    assert "--rounds N" in caught.value.remedy


def test_a_schedule_that_ends_before_the_run_is_refused_with_its_number_of_steps() -> None:
    schedule = {"name": "OneCycleLR", "arguments": {"max_lr": 0.1, "total_steps": 10}}
    with pytest.raises(SettingsError, match="takes 10 steps, and the run has 12 rounds") as caught:
        Settings.model_validate({"rounds": 12, "schedule": schedule})
    assert "total_steps=12" in caught.value.remedy


def test_all_conflicts_are_told_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.model_validate({"privacy": {"epsilon": 8}, "cohort": {"weighting": "dataset"}})
    assert "--accumulation-steps" in caught.value.remedy
    assert "leave out --weighting dataset" in caught.value.remedy


WITHOUT_EFFECT = {
    "compression.rank": 8,
    "compression.fraction": 0.5,
    "compression.values": "int4",
    "secure.ring_bits": 16,
    "aggregation.attackers": 0.3,
    "plan.max_effective_batch_size": 999,
    "local.learning_rate": 0.5,
    "privacy.delta": 1e-6,
    "privacy.clip": 2.0,
    "privacy.bands": 4,
    "statistics.max_examples": 10,
    "versions.kept": 3,
    "schedule.arguments": {"gamma": 0.5},
    "server.page_stays_seconds": 5,
}


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_what_is_typed_and_changes_nothing_is_refused(key: str) -> None:
    """Whoever forgets --compress low-rank beside --compress-rank would send every update whole."""
    with pytest.raises(SettingsError, match=r"^--[a-z-]+ has no effect without --") as caught:
        load_run(None, {key: WITHOUT_EFFECT[key]}, resume=False)
    assert caught.value.remedy.startswith(f"leave out {str(caught.value).split()[0]}, or set --")


def test_what_a_file_has_for_another_day_is_taken(tmp_path: Path) -> None:
    """As of a run that goes on with other bits: its file names the rank that it had."""
    (tmp_path / "run.toml").write_text("[compression]\nrank = 8\n")
    file, bits = tmp_path / "run.toml", {"compression.up": "int4"}
    assert load_run(file, bits, resume=False).compression.rank == 8
    factors = {"compression.up": "low-rank", "compression.rank": 3}
    assert load_run(file, factors, resume=False).compression.rank == 3


def test_what_changes_one_of_several_runs_has_an_effect() -> None:
    float32, factors = load(None, {}), load(None, {"compression.up": "low-rank"})
    check_effective([float32, factors], ["compression.rank"])
    with pytest.raises(SettingsError, match="--compress-rank has no effect"):
        check_effective([float32, float32], ["compression.rank"])
