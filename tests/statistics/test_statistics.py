"""Statistics before training are those of all examples together, on every way of running."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import headwater
from examples.unscaled_table import UnscaledTable, houses
from headwater.common.errors import (
    CorruptUpdate,
    RoundAborted,
    SettingsError,
    TaskError,
    UpdateAlreadyMasked,
)
from headwater.common.statistics.columns import Columns, columns_of, give_recorded
from headwater.server.evaluate_model import evaluate
from headwater.server.rounds import checkpoint
from headwater.server.secagg.masked_rounds import MaskedRounds
from tests.statistics.measured import HOUSES, Houses, WideHouses

CLIENTS = 6
GIVEN: dict[str, Any] = {
    "clients": CLIENTS,
    "accumulation_steps": 2,
    "micro_batch_size": 10,
    "learning_rate": 0.1,
    "optimizer": "sgd",
    "statistics": True,
    "progress": False,
}
MASKED = {"secure_aggregation": "semi-honest"}
GRPC = {"settings": {"simulation.engine": "grpc"}}
# What columns.py states, in units of the bounds' width; and a unit in the last place of float64.
MEAN, VARIANCE = 2.0**-24, 2.0**-22


def measured_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "statistics.json").read_text())
    return found


def assert_of(found: dict[str, Any], parts: list[int]) -> None:
    """Compare what a run has measured with numpy's of the examples of these devices."""
    data = [Houses().train_examples(data=None, part=part, num_parts=1).tensors for part in parts]
    inputs = np.concatenate([inputs.double().numpy() for inputs, _ in data])
    prices = np.concatenate([prices.double().numpy() for _, prices in data])
    widths = np.array([4000, 2, 0.1])
    own = found["inputs"]
    assert own["num"] == [len(inputs)] * 3
    assert own["num_below"] == own["num_above"] == own["num_missing"] == [0, 0, 0]
    assert (np.abs(own["means"] - inputs.mean(0)) <= MEAN * widths).all()
    assert (np.abs(own["variances"] - inputs.var(0)) <= VARIANCE * widths**2).all()
    step = widths / 16
    least, largest = inputs.min(0), inputs.max(0)
    assert ((own["lowest"] <= least) & (least < own["lowest"] + step)).all()
    assert ((own["highest"] - step <= largest) & (largest <= own["highest"])).all()
    edges = [-4.0, 0.0, 4.0, 12.0]
    within = prices[(prices >= edges[0]) & (prices <= edges[-1])]
    assert found["price"]["counts"] == np.histogram(within, edges)[0].tolist()
    assert found["price"]["num_above"] == int((prices > 12).sum())
    large = int((inputs[:, 0] > 2400).sum())
    assert found["kind"]["counts"] == [len(inputs) - large, large]


@pytest.mark.parametrize(
    "way",
    [
        {},
        MASKED,
        {"settings": {"secure.ring_bits": 16}, **MASKED},
        {"settings": {"simulation.aggregators": 2}},
        {"settings": {"compression.up": "int8"}},
        {"weighting": "dataset"},
        {"local_steps": 2},
    ],
    ids=str,
)
def test_statistics_are_numpy_s_over_all_examples(tmp_path: Path, way: dict[str, Any]) -> None:
    headwater.simulate(HOUSES, **GIVEN, **way, rounds=1, out=tmp_path)
    assert_of(measured_in(tmp_path), [*range(CLIENTS)])


def test_the_round_that_measures_sends_no_factors_and_the_next_one_does(tmp_path: Path) -> None:
    low_rank = {"compression.up": "low-rank", "compression.rank": 1}
    run = headwater.simulate(
        HOUSES.replace("Houses", "WideHouses"),
        **GIVEN,
        rounds=3,
        out=tmp_path,
        settings=low_rank,
    )
    assert_of(measured_in(tmp_path), [*range(CLIENTS)])
    assert run.history[1].bytes_up == 2 * (64 + 64 + 64 + 1) * CLIENTS


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [GRPC, {**GRPC, **MASKED}, {"settings": {"simulation.workers": 2}}], ids=str
)
def test_statistics_and_model_are_the_same_in_other_processes(
    tmp_path: Path, way: dict[str, Any]
) -> None:
    plain = headwater.simulate(HOUSES, **GIVEN, rounds=3, out=tmp_path / "plain")
    other = headwater.simulate(HOUSES, **GIVEN, **way, rounds=3, out=tmp_path / "other")
    assert measured_in(tmp_path / "plain") == measured_in(tmp_path / "other")
    tolerance = 1e-5 if "secure_aggregation" in way else 0.0
    for one, two in zip(plain.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("masks", [{}, MASKED], ids=["plain", "masked"])
def test_devices_that_drop_out_are_in_no_sum(tmp_path: Path, masks: dict[str, Any]) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text("[[dropout]]\ndevices = [1, 4]\nlast_round = 1\n")
    given = {**GIVEN, **masks, "settings": {"simulation.faults": str(faults)}}
    run = headwater.simulate(HOUSES, **given, rounds=2, out=tmp_path / "run")
    assert [row.num_clients for row in run.history] == [4, 6]
    assert_of(measured_in(tmp_path / "run"), [0, 2, 3, 5])


def test_the_first_round_takes_no_step(tmp_path: Path) -> None:
    run = headwater.simulate(HOUSES, **GIVEN, rounds=2, out=tmp_path)
    assert [row.learning_rate for row in run.history] == [0.0, 0.1]
    assert np.isnan(run.history[0].loss)
    assert run.history[1].loss > 0
    assert run.history[0].num_examples == sum(20 + part for part in range(CLIENTS))


@pytest.mark.parametrize("masks", [{}, MASKED], ids=["plain", "masked"])
def test_a_resumed_run_measures_once_and_trains_on_with_the_same_result(
    tmp_path: Path, masks: dict[str, Any]
) -> None:
    given = {**GIVEN, **masks}
    whole = headwater.simulate(HOUSES, **given, rounds=4, out=tmp_path / "whole")
    headwater.simulate(HOUSES, **given, rounds=1, out=tmp_path / "parts")
    rest = headwater.simulate(HOUSES, **given, rounds=4, out=tmp_path / "parts", resume=True)
    assert [row.round for row in rest.history if np.isnan(row.loss)] in ([], [1])
    for one, two in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_run_is_not_resumed_with_a_task_that_measures_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Houses()
    headwater.simulate(task, **GIVEN, rounds=1, out=tmp_path)
    saved = checkpoint.load(tmp_path)
    assert saved is not None
    assert saved.progress.features["statistics"]["columns"]
    monkeypatch.setattr(Houses, "measured", {**Houses.measured, "price": headwater.Moments(0, 1)})
    with pytest.raises(SettingsError, match="other statistics"):
        headwater.simulate(task, **GIVEN, rounds=2, out=tmp_path, resume=True)


@pytest.mark.parametrize("had", [True, False])
def test_a_run_is_not_resumed_with_or_without_what_it_was_trained_without_or_with(
    tmp_path: Path, had: bool
) -> None:
    headwater.simulate(HOUSES, **GIVEN | {"statistics": had}, rounds=2, out=tmp_path)
    with pytest.raises(SettingsError, match="statistics of the examples"):
        headwater.simulate(
            HOUSES, **GIVEN | {"statistics": not had}, rounds=3, out=tmp_path, resume=True
        )


def test_a_model_that_needs_statistics_begins_no_run_without(tmp_path: Path) -> None:
    headwater.simulate(HOUSES, **GIVEN, rounds=2, out=tmp_path)
    given: dict[str, Any] = {**GIVEN, "rounds": 2, "settings": {"model.initial": tmp_path}}
    with pytest.raises(SettingsError, match="was trained with statistics"):
        headwater.simulate(HOUSES, **given | {"statistics": False})
    assert headwater.simulate(HOUSES, **given).history[1].loss > 0


def test_the_next_run_of_a_task_does_not_meet_the_statistics_of_the_last(tmp_path: Path) -> None:
    task, without = Houses(), {**GIVEN, "statistics": False}
    headwater.simulate(task, **GIVEN, rounds=2)
    assert task.std.tolist() != [1.0, 1.0, 1.0]  # for whoever uses the model
    second = headwater.simulate(task, **without, rounds=2)
    assert (
        second.history[-1].loss == headwater.simulate(HOUSES, **without, rounds=2).history[-1].loss
    )


def test_examples_that_are_drawn_as_they_are_read_are_measured_alike_each_time(
    tmp_path: Path,
) -> None:
    """Whatever the process drew before: the check of the task reads them, too."""
    for name, checked in (("one", True), ("other", False)):
        given = {**GIVEN, "out": tmp_path / name, "settings": {"check_task": checked}}
        headwater.simulate(f"{HOUSES.rpartition(':')[0]}:JitteredHouses", **given, rounds=1)
    assert measured_in(tmp_path / "one") == measured_in(tmp_path / "other")


def test_the_round_that_measures_says_nothing_of_tokens() -> None:
    given: dict[str, Any] = {**GIVEN, "accumulation_steps": None, "tokens_per_update": 64}
    runs = [headwater.simulate(HOUSES, **given | {"statistics": it}, rounds=3) for it in (0, 1)]
    counts = [[row.num_examples for row in run.history] for run in runs]
    assert counts[0][1:] == counts[1][1:]


@pytest.mark.parametrize(
    ("changed", "masks", "error"),
    [
        (lambda counts, moments: (counts - 1000, moments), {}, None),
        (lambda counts, moments: (counts, moments + 1e6), {}, None),
        (lambda counts, moments: (counts - 1000, moments), MASKED, CorruptUpdate),
        (lambda counts, moments: (counts, moments + 1e6), MASKED, CorruptUpdate),
    ],
)
def test_a_device_that_lies_is_left_out_or_under_masks_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    changed: Any,
    masks: dict[str, Any],
    error: type[Exception] | None,
) -> None:
    honest = Columns.sums

    def sums(self: Columns, task: Any, examples: Any) -> Any:
        rows = honest(self, task, listed := list(examples))
        return changed(*rows) if len(listed) == 23 else rows  # of the device with part 3

    monkeypatch.setattr(Columns, "sums", sums)
    if error is not None:
        with pytest.raises(error, match="no examples have such sums"):
            headwater.simulate(HOUSES, **GIVEN, **masks, rounds=1, out=tmp_path)
        return
    headwater.simulate(HOUSES, **GIVEN, **masks, rounds=1, out=tmp_path)
    assert_of(measured_in(tmp_path), [0, 1, 2, 4, 5])


def test_a_session_that_is_aborted_ends_a_masked_measure_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Devices mask their statistics once, and the rest alone would be no measure of all."""
    honest, calls = MaskedRounds._sum_of_model, list[int]()

    def sum_of_model(self: MaskedRounds, *arguments: Any) -> Any:
        found = honest(self, *arguments)
        calls.append(1)
        if len(calls) == 1:
            raise RoundAborted("the server's disk is full")
        return found

    monkeypatch.setattr(MaskedRounds, "_sum_of_model", sum_of_model)
    with pytest.raises(
        UpdateAlreadyMasked,
        match=r"6 devices masked these statistics before.* \(0, 1, 2, 3, 4 and 1 more\)",
    ):
        headwater.simulate(HOUSES, **GIVEN | MASKED, rounds=2)


def test_a_spread_that_the_bounds_hide_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Late(Houses):
        measured: ClassVar = {"inputs": headwater.Moments([0, -1, 0], [4e6, 1, 1e4], size=3)}

        def statistics(self, example: Any) -> dict[str, Any]:
            return {"inputs": example[0]}

    with caplog.at_level("WARNING"):
        headwater.simulate(Late, **GIVEN, rounds=1)
    (line,) = [one.getMessage() for one in caplog.records if "narrower" in one.getMessage()]
    assert line.startswith("inputs[0, 2]: ")
    kind = headwater.Moments(0, 1)
    counts, moments = np.zeros(kind.num_counts, np.int64), np.zeros(2)
    kind.add([np.float32(0.3)] * 1000, counts, moments)
    found = kind.found(counts, moments.astype(np.float32).astype(float))
    assert found.scaled(torch.tensor([0.35])).tolist() == [0.0]  # the same in all examples


def test_training_with_them_reaches_what_central_standardisation_reaches() -> None:
    parts = range(10)
    run = headwater.simulate(
        UnscaledTable,
        clients=len(parts),
        rounds=61,
        optimizer="sgd",
        learning_rate=0.2,
        accumulation_steps=1,
        micro_batch_size=200,
        statistics=True,
        progress=False,
    )
    inputs, prices = (
        torch.cat(both).double()
        for both in zip(*(houses(seed=part, num_houses=200).tensors for part in parts), strict=True)
    )
    scaled = (inputs - inputs.mean(0)) / inputs.std(0, correction=0)
    wanted = ((prices - prices.mean()) / prices.std(correction=0))[:, None]
    weight, bias = (one.detach().double() for one in start_of(run))
    for _ in range(60):  # gradient descent on the whole table
        error = scaled @ weight.T + bias - wanted
        weight = weight - 0.2 * 2 * (error * scaled).mean(0)[None]
        bias = bias - 0.2 * 2 * error.mean()
    found = torch.cat([one.detach().flatten() for one in run.model.parameters()]).double()
    torch.testing.assert_close(found, torch.cat([weight.flatten(), bias]), rtol=1e-4, atol=1e-5)
    assert run.history[-1].loss < 0.05


def start_of(run: Any) -> Any:
    torch.manual_seed(run.settings.seed)
    return UnscaledTable().new_model().parameters()


def test_the_file_of_a_model_has_them_for_whoever_tests_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = headwater.simulate(HOUSES, **GIVEN, rounds=30, out=tmp_path)
    wanted = run.history[-1].metrics["test_loss"]
    task = Houses()
    headwater.load_model(tmp_path, task)
    assert task.mean[0] > 1000
    (found,) = evaluate(tmp_path, data=[], task=HOUSES).results
    assert found.loss == pytest.approx(wanted, rel=1e-6)
    monkeypatch.setattr(Houses, "measured", {**Houses.measured, "price": headwater.Moments(0, 1)})
    with pytest.raises(TaskError, match="other statistics"):
        headwater.load_model(tmp_path, Houses())


class Short(Houses):
    def statistics(self, example: Any) -> Any:
        return {**super().statistics(example), "inputs": [1.0]}


@pytest.mark.parametrize("masks", [{}, MASKED], ids=["plain", "masked"])
def test_a_task_s_statistics_are_tried_before_anything_is_masked(masks: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match="size=3"):
        headwater.simulate(Short, **{**GIVEN, **masks}, rounds=1)


class Worse(Houses):
    """Returns what the test wants."""

    values: Any = None

    def statistics(self, example: Any) -> Any:
        return {**super().statistics(example), **self.values}


def test_what_lies_beyond_the_bounds_is_cut_and_counted_and_nan_is_left_out() -> None:
    task = Worse()
    columns = columns_of(task)
    nan, inf = float("nan"), float("inf")
    rows = ([1000.0, 0.0, 0.05], [9000.0, nan, -inf], [2000.0, 1.0, 0.1])
    counts, moments = np.zeros(columns.num_counts, np.int64), np.zeros(columns.num_moments)
    for row in rows:
        task.values = {"inputs": row, "price": [nan, -5.0, 13.0, 1.0], "kind": ["small", "x"]}
        one = columns.sums(task, [Houses().train_examples(data=None, part=0, num_parts=1)[0]])
        counts, moments = counts + one[0], moments + one[1]
    found = columns.found(counts.tolist(), moments.tolist())
    own = found["inputs"]
    assert (own.num, own.num_missing) == ([3, 2, 3], [0, 1, 0])
    assert (own.num_below, own.num_above) == ([0, 0, 1], [1, 0, 0])
    cut = np.array([[1000, 0, 0.05], [4000, nan, 0.0], [2000, 1.0, 0.1]])
    np.testing.assert_allclose(own.means, np.nanmean(cut, 0), rtol=1e-12)
    np.testing.assert_allclose(own.variances, np.nanvar(cut, 0), rtol=1e-9)
    assert found["price"].counts == [0, 3, 0]
    assert (found["price"].num_missing, found["price"].num_below) == (3, 3)
    assert (found["kind"].counts, found["kind"].num_other) == ([3, 0], 3)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"inputs": [1.0, 2.0]}, "inputs: .*2 numbers, .* size=3"),
        ({"inputs": "abc"}, "inputs: .*expected a number"),
        ({"kind": 0.5}, "kind: .*label of type float"),
        ({"more": 1}, "a value for each of inputs, kind, price"),
    ],
)
def test_values_that_cannot_be_measured_are_named(values: dict[str, Any], text: str) -> None:
    task = Worse()
    task.values = values
    with pytest.raises(TaskError, match=text):
        columns_of(task).sums(task, [task.train_examples(data=None, part=0, num_parts=1)[0]])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: headwater.Moments(1, 1), "low must be below high"),
        (lambda: headwater.Moments(0, float("inf")), "finite"),
        (lambda: headwater.Moments([0, 0], 1, size=3), "3 of them"),
        (lambda: headwater.Histogram([1]), "rising edges"),
        (lambda: headwater.Histogram("abc"), "rising edges"),  # type: ignore[arg-type]
        (lambda: headwater.Moments(-1e308, 1e308), "finite"),
        (lambda: headwater.Moments(0, 1, num_bins=2.5), "whole numbers"),  # type: ignore[arg-type]
        (lambda: headwater.Counts("ab"), "unlike labels"),
        (lambda: headwater.Histogram([1, 1]), "rising edges"),
        (lambda: headwater.Counts(0), "unlike labels"),
        (lambda: headwater.Counts(["a", "a"]), "unlike labels"),
    ],
)
def test_bounds_that_cannot_be_are_named(make: Any, text: str) -> None:
    with pytest.raises(TaskError, match=text):
        make()


def test_a_task_that_measures_nothing_is_refused_before_the_run() -> None:
    class Silent(Houses):
        statistics = None  # type: ignore[assignment]

    with pytest.raises(TaskError, match="needs a method statistics"):
        headwater.simulate(Silent, **GIVEN, rounds=1)
    with pytest.raises(TaskError, match="not so: kind"):
        columns_of(type("Odd", (Houses,), {"measured": {"kind": 3}})())


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"privacy_epsilon": 5.0}, "as many examples as one may have"),
        ({"aggregation": "median"}, "a robust rule"),
        ({"evaluate_on_devices": True}, "devices are tested"),
        ({"settings": {"asynchronous.is_on": True}}, "asynchronous"),
        ({"compute": "fused"}, "measures its examples by itself"),
    ],
)
def test_what_does_not_go_with_statistics_is_refused_by_name(
    more: dict[str, Any], text: str
) -> None:
    with pytest.raises(SettingsError, match=text):
        headwater.simulate(HOUSES, **GIVEN, **more, rounds=1)


def test_rare_labels_are_named_with_weights(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        headwater.simulate(HOUSES, **GIVEN, rounds=1)
    (line,) = [one.getMessage() for one in caplog.records if "kind" in one.getMessage()]
    assert "'large' is 12.6% of all" in line
    assert "weights" in line


def test_weights_let_all_labels_weigh_alike() -> None:
    counts = headwater.Counts(3)
    found = counts.found(np.array([10, 0, 90, 5]), np.zeros(0))
    torch.testing.assert_close(found.weights, torch.tensor([5.0, 0.0, 100 / 180]))


@pytest.mark.parametrize(
    "changed",
    [{"counts": None}, {"counts": [-1]}, {"moments": [float("nan")]}, {"moments": "abc"}, {}],
)
def test_a_model_s_file_with_other_sums_is_named(changed: dict[str, Any]) -> None:
    columns = columns_of(Houses())
    counts, moments = columns.sums(Houses(), [Houses().test_examples()[0]])
    row = {"columns": columns.digest, "counts": counts.tolist(), "moments": moments.tolist()}
    if not changed:
        give_recorded(Houses(), row)
        changed = {"counts": row["counts"][1:]}
    with pytest.raises(TaskError):
        give_recorded(Houses(), {**row, **changed})


def test_another_task_s_columns_are_others() -> None:
    assert columns_of(Houses()).digest != columns_of(WideHouses()).digest
