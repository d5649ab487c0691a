"""A test on the devices is the central test on all that they hold out, on every way of running."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import headwater
from headwater.client.evaluation.tested_sums import TestedSums
from headwater.common.errors import (
    CorruptUpdate,
    EmptyDataset,
    FrozenPartMismatch,
    ModelMismatch,
    SettingsError,
    TaskError,
)
from headwater.common.evaluation.measures import Measures
from headwater.common.evaluation.terms import FIRST_METRIC, LOW
from headwater.server.aggregation.cohort_sum import PartialSum
from headwater.server.aggregation.extra_sums import ExtraSums
from headwater.server.evaluation import command
from headwater.server.evaluation.command import TestOrder
from headwater.server.evaluation.result_table import as_table, read_result, summary
from tests.evaluation.evaluated import (
    THREE,
    Broken,
    Three,
    Unseen,
    assert_is_central,
    central,
    held_out,
)

CLIENTS, FRACTION = 6, 0.4
GIVEN: dict[str, Any] = {
    "clients": CLIENTS,
    "accumulation_steps": 1,
    "micro_batch_size": 16,
    "rounds": 1,
    "progress": False,
}
MASKED = {"secure_aggregation": "semi-honest"}
ALL = range(CLIENTS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs: ``early`` of one round, ``late`` of four."""
    folder = tmp_path_factory.mktemp("runs")
    for name, rounds in (("early", 1), ("late", 4)):
        headwater.simulate(THREE, **GIVEN | {"rounds": rounds}, out=folder / name)
    return folder


def model_in(folder: Path) -> nn.Module:
    return headwater.load_model(folder, Three())


def loss_of(folder: Path, *, part: int) -> float:
    """Return a model's mean loss on what one device holds out."""
    return float(central(model_in(folder), held_out([part], fraction=FRACTION))["loss"])


def result_of(out: Path, model: Path, task: Any = THREE, **more: Any) -> dict[str, Any]:
    given = {**GIVEN, "test_fraction": FRACTION, "test_model": model, **more}
    headwater.simulate(task, **given, out=out)
    return read_result(out)


@pytest.mark.parametrize(
    "way",
    [
        {},
        MASKED,
        {"settings": {"secure.ring_bits": 16}, **MASKED},
        {"settings": {"simulation.aggregators": 2}},
        {"weighting": "dataset"},
        {"test_fraction": 1.0},
        {"test_fraction": 1.0, **MASKED},
    ],
    ids=str,
)
def test_a_test_on_the_devices_is_the_central_one(
    tmp_path: Path, runs: Path, way: dict[str, Any]
) -> None:
    found = result_of(tmp_path, runs / "late", **way)
    examples = held_out(ALL, fraction=way.get("test_fraction", FRACTION))
    assert_is_central(found, model_in(runs / "late"), examples)
    assert found["is_masked"] == ("secure_aggregation" in way)
    assert found["results"][0]["round"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        {"settings": {"simulation.engine": "grpc"}},
        {"settings": {"simulation.engine": "grpc"}, **MASKED},
        {"settings": {"simulation.workers": 2}},
    ],
    ids=str,
)
def test_a_test_is_the_same_in_other_processes(
    tmp_path: Path, runs: Path, way: dict[str, Any]
) -> None:
    found = result_of(tmp_path, runs / "late", **way)
    assert_is_central(found, model_in(runs / "late"), held_out(ALL, fraction=FRACTION))


@pytest.mark.parametrize("masks", [{}, MASKED], ids=["plain", "masked"])
def test_devices_that_drop_out_are_in_no_sum(
    tmp_path: Path, runs: Path, masks: dict[str, Any]
) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text("[[dropout]]\ndevices = [1, 4]\nlast_round = 1\n")
    more = {**masks, "settings": {"simulation.faults": str(faults)}}
    for at, compared in enumerate(({}, {"compare_with": runs / "early"})):
        found = result_of(tmp_path / str(at), runs / "late", **more, **compared)
        examples = held_out([0, 2, 3, 5], fraction=FRACTION)
        assert_is_central(found, model_in(runs / "late"), examples)
        assert found["num_devices"] == 4
        assert found["not_evaluated"].keys() == {"1", "4"}


@pytest.mark.parametrize("masks", [{}, MASKED], ids=["plain", "masked"])
def test_two_models_are_compared_on_the_same_examples(
    tmp_path: Path, runs: Path, masks: dict[str, Any]
) -> None:
    found = result_of(tmp_path, runs / "late", compare_with=runs / "early", **masks)
    examples = held_out(ALL, fraction=FRACTION)
    for at, name in enumerate(("late", "early")):
        assert_is_central(found, model_in(runs / name), examples, at=at)
    if masks:
        assert found["devices"] is None
        return
    better = sum(
        loss_of(runs / "late", part=part) < loss_of(runs / "early", part=part) for part in ALL
    )
    assert found["devices"] == {
        "num_better": better,
        "num_worse": CLIENTS - better,
        "num_equal": 0,
    }


def test_a_device_whose_figures_are_far_off_is_named(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = TestedSums.row

    def row(self: TestedSums, *, num_left_out: int) -> Any:
        if self.num_examples == 18:  # of the device with part 5
            self.total.loss_sum = 1e12
        return honest(self, num_left_out=num_left_out)

    monkeypatch.setattr(TestedSums, "row", row)
    found = result_of(tmp_path, runs / "late")
    assert found["far_off"] == ["5"]
    assert "the figures of 5 are far from the others'" in "\n".join(summary(found))


def test_a_model_equals_itself_on_every_device(tmp_path: Path, runs: Path) -> None:
    found = result_of(tmp_path, runs / "late", compare_with=runs / "late")
    assert found["devices"] == {"num_better": 0, "num_worse": 0, "num_equal": CLIENTS}


def test_an_example_that_one_model_cannot_be_tested_on_is_left_out_for_both(
    tmp_path: Path, runs: Path
) -> None:
    large = {name: value + 100 for name, value in model_in(runs / "late").state_dict().items()}
    save_file(large, tmp_path / "large.safetensors")
    found = result_of(
        tmp_path / "out", runs / "late", Broken, compare_with=tmp_path / "large.safetensors"
    )
    inputs, labels = held_out(ALL, fraction=FRACTION)
    is_good = inputs[:, 0] <= 1
    assert found["num_left_out"] == int((~is_good).sum()) > 0
    assert_is_central(found, model_in(runs / "late"), (inputs[is_good], labels[is_good]))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "checkpoint.safetensors", "weights.pt", "", "still running"]
)
def test_a_file_a_checkpoint_and_a_folder_are_the_same_model(
    tmp_path: Path, runs: Path, name: str
) -> None:
    model = runs / "late" / name
    if name == "weights.pt":
        model = tmp_path / name
        torch.save(model_in(runs / "late").state_dict(), model)
    if name == "still running":  # a run writes its model at its end
        model = tmp_path / name
        model.mkdir()
        shutil.copy(runs / "late" / "checkpoint.safetensors", model)
    found = result_of(tmp_path / "out", model)
    assert_is_central(found, model_in(runs / "late"), held_out(ALL, fraction=FRACTION))
    assert found["results"][0]["round"] == (None if name == "weights.pt" else 4)


def test_a_test_takes_no_step(tmp_path: Path, runs: Path) -> None:
    before = (runs / "late" / "model.safetensors").read_bytes()
    given = {**GIVEN, "test_fraction": FRACTION, "test_model": runs / "late"}
    run = headwater.simulate(THREE, **given, out=tmp_path)
    assert [row.learning_rate for row in run.history] == [0.0]
    for one, two in zip(run.model.parameters(), model_in(runs / "late").parameters(), strict=True):
        assert torch.equal(one, two)
    assert (runs / "late" / "model.safetensors").read_bytes() == before
    found = read_result(tmp_path)
    assert run.metrics["held_out_loss"] == found["results"][0]["loss"]


def test_a_test_and_a_run_that_holds_out_agree_on_the_examples(tmp_path: Path) -> None:
    given = GIVEN | {"rounds": 2, "settings": {"evaluation.held_out_fraction": FRACTION}}
    run = headwater.simulate(THREE, **given, evaluate_on_devices=True, out=tmp_path / "run")
    found = result_of(tmp_path / "test", tmp_path / "run")
    assert found["results"][0]["metrics"]["accuracy"] == run.metrics["held_out_accuracy"]
    assert found["results"][0]["loss"] == pytest.approx(run.metrics["held_out_loss"], rel=2e-6)


def test_a_task_without_predictions_is_tested_by_loss_and_metrics(
    tmp_path: Path, runs: Path
) -> None:
    found = result_of(tmp_path, runs / "late", Unseen)
    (one,) = found["results"]
    assert one["predictions"] == {}
    assert one["metrics"].keys() == {"accuracy"}


def test_the_spread_is_shown_of_enough_devices_and_never_with_masks(
    tmp_path: Path, runs: Path
) -> None:
    few = result_of(tmp_path / "few", runs / "late")
    assert few["spread"] is None
    assert "6 devices are fewer than 20" in few["why_no_spread"]
    enough = {"clients": 12, "settings": {"device_test.spread_devices": 12}}
    found = result_of(tmp_path / "enough", runs / "late", **enough)
    losses = [loss_of(runs / "late", part=part) for part in range(12)]
    losses.sort()
    assert found["spread"]["loss"]["median"] == pytest.approx(sum(losses[5:7]) / 2, rel=1e-5)
    assert found["spread"]["loss"]["worst_tenth"] == pytest.approx(losses[-2], rel=1e-5)
    assert found["spread"].keys() == {"loss", "accuracy"}
    masked = result_of(tmp_path / "masked", runs / "late", **enough, **MASKED)
    assert masked["spread"] is None
    assert "masks hide" in masked["why_no_spread"]


def test_what_was_found_is_said_in_a_table_a_summary_and_the_report(
    tmp_path: Path, runs: Path
) -> None:
    found = result_of(tmp_path, runs / "late", compare_with=runs / "early")
    assert as_table(found)
    first, *lines = summary(found)
    assert first == f"tested on {found['num_examples']} examples of 6 devices"
    assert lines[0].startswith(f"{runs / 'late' / 'model.safetensors'}: loss ")
    page = (tmp_path / "report.html").read_text()
    assert (
        first
        in json.loads(page.partition("state-of-run")[2].partition(">")[2].partition("<")[0])[
            "diagnosis"
        ]
    )


class Halves(Three):
    """A task of another model."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))


class Mute(Three):
    """A task that says what to count, and gives no predictions."""

    predictions: Any = None


class Logits(Three):
    """A task that gives no probabilities."""

    def predictions(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0]) * 100, batch[1]


def refused() -> Iterator[Any]:
    yield Halves, {}, ModelMismatch, "does not fit the task's model"
    yield Mute, {}, TaskError, "what to count of its predictions, and gives none"
    yield Logits, {}, TaskError, "a probability beyond 0..1"
    yield Three, {"test_fraction": 0.01}, EmptyDataset, "none of 6 devices holds examples out"
    yield Three, {"test_model": "nowhere"}, SettingsError, "there is no model at nowhere"
    yield Three, {"rounds": 2}, SettingsError, "a test is one round"
    yield Three, {"local_steps": 2}, SettingsError, "a test takes no steps"
    yield Three, {"statistics": True}, SettingsError, "nothing is measured before a test"
    yield Three, {"aggregation": "median"}, SettingsError, "a robust rule compares gradients"
    yield Three, {"local_parameters": "2.*"}, SettingsError, "parameters of their own"


@pytest.mark.parametrize(("task", "more", "error", "text"), [*refused()])
def test_what_cannot_be_tested_is_refused_by_name(
    tmp_path: Path, runs: Path, task: Any, more: Any, error: Any, text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        result_of(tmp_path, **{"model": runs / "late", "task": task} | _renamed(more))
    assert caught.value.remedy


def _renamed(more: dict[str, Any]) -> dict[str, Any]:
    return {"model" if key == "test_model" else key: value for key, value in more.items()}


def test_masked_devices_without_held_out_examples_are_refused_by_name(
    tmp_path: Path, runs: Path
) -> None:
    with pytest.raises(EmptyDataset, match="none of 6 devices holds examples out"):
        result_of(tmp_path, runs / "late", test_fraction=0.01, **MASKED)


@pytest.mark.slow
def test_a_masked_device_tests_on_at_least_as_many_examples_as_its_owner_masks(
    tmp_path: Path, runs: Path
) -> None:
    """Or a server that chooses the share would have one example of one device in the sum."""
    found = result_of(tmp_path / "one", runs / "late", test_fraction=8 / 45, **MASKED)
    assert found["num_examples"] == 8, "only the last device has 45 examples, and the others 7"
    with pytest.raises(EmptyDataset, match="none of 6 devices holds examples out"):
        result_of(tmp_path / "none", runs / "late", test_fraction=0.17, **MASKED)
    few = {"settings": {"secure.min_quota": 7}}
    found = result_of(tmp_path / "few", runs / "late", test_fraction=8 / 45, **MASKED, **few)
    assert found["num_examples"] == 5 * 7 + 8


def test_a_comparison_needs_a_model_to_test(tmp_path: Path, runs: Path) -> None:
    with pytest.raises(SettingsError, match="--compare-with is for --test-model"):
        headwater.simulate(THREE, **GIVEN, compare_with=runs / "late", out=tmp_path)


def test_models_of_unlike_shapes_are_not_compared(tmp_path: Path, runs: Path) -> None:
    save_file(Halves().new_model().state_dict(), tmp_path / "halves.safetensors")
    with pytest.raises(ModelMismatch, match="does not fit the task's model") as caught:
        result_of(tmp_path / "out", runs / "late", compare_with=tmp_path / "halves.safetensors")
    assert "name the task" in caught.value.remedy


def test_models_with_unlike_frozen_parts_are_not_compared(tmp_path: Path, runs: Path) -> None:
    class Frozen(Three):
        def new_model(self) -> nn.Module:
            model = super().new_model()
            for parameter in model[0].parameters():  # type: ignore[index]
                parameter.requires_grad_(False)
            return model

    with pytest.raises(FrozenPartMismatch, match="unlike frozen parts"):
        result_of(tmp_path, runs / "late", Frozen, compare_with=runs / "early")


@pytest.mark.parametrize("masks", [{}, MASKED], ids=["plain", "masked"])
def test_a_device_that_lies_ends_the_test_by_name(
    tmp_path: Path, runs: Path, masks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Measures.add

    def add(self: Measures, task: Any, model: Any, batch: Any, counts: Any, reals: Any) -> None:
        honest(self, task, model, batch, counts, reals)
        counts[0] += 1

    monkeypatch.setattr(Measures, "add", add)
    with pytest.raises(CorruptUpdate, match="no predictions have such sums"):
        result_of(tmp_path, runs / "late", **masks)


def test_an_aggregator_that_lies_about_a_test_ends_it(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = ExtraSums.parts

    def more_right(self: ExtraSums) -> dict[str, PartialSum]:
        parts = honest(self)
        parts[LOW].integers_P[FIRST_METRIC] += 3 << 32
        return parts

    monkeypatch.setattr(ExtraSums, "parts", more_right)
    with pytest.raises(CorruptUpdate, match="not those of the devices' reports"):
        result_of(tmp_path, runs / "late", settings={"simulation.aggregators": 2})


@pytest.mark.parametrize(
    ("task", "found"), [(None, "does not choose the code"), (THREE, "held out no examples")]
)
def test_a_run_s_folder_chooses_no_code_from_elsewhere_but_its_user_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str | None, found: str
) -> None:
    out = tmp_path / "run"
    headwater.simulate(THREE, clients=2, rounds=1, accumulation_steps=1, out=out, progress=False)
    monkeypatch.chdir(tmp_path)
    order = TestOrder(out=out, model=None, task=task, is_best=False, as_json=False)
    with pytest.raises(SettingsError, match=found):
        command.test_on_devices(order, None, {}, lambda _: None)


def test_a_misspelt_folder_is_answered_with_the_one_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    order = TestOrder(out=tmp_path / "frist", model=None, task=THREE, is_best=False, as_json=False)
    with pytest.raises(SettingsError, match=r"there is no .*frist") as found:
        command.test_on_devices(order, None, {}, lambda _: None)
    assert str(tmp_path / "first") in str(found.value.remedy)
