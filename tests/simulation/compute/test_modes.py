"""Three ways to compute a round: the same devices do the same, and the model comes out the same.

One by one gives the wire's bits. The others add the same float32 terms in another order: each
coordinate of a sum of n terms may differ by n 2^-24 of the sum of the terms' sizes, and after a
few steps of plain SGD the models by as much of what moved them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from headwater.common.errors import SettingsError
from headwater.common.settings.sources import load
from headwater.server.operations.round_log import read_rows
from headwater.server.rounds.run import MODEL
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.run import run_engine

TASKS = {
    "mlp": f"{__file__}:Spread",
    "cnn": "tests/laws/architectures.py:Cnn",
    "ragged": "tests/laws/architectures.py:Ragged",
}
FLEET = """
[[device]]
profile = "laptop"
count = 3
examples_per_second = 400
jitter = 0.2

[[device]]
count = 4
examples_per_second = 50
memory_bytes = 400_000_000
upload_bytes_per_second = 1_000_000
availability = 0.8
"""
# What a device tells of its work, whichever way it is computed.
SAME = (
    *("name", "accumulation_steps", "micro_batch_size", "num_examples", "num_refused", "weight"),
    *("seconds", "step_seconds", "peak_bytes", "reason", "plan"),
)
ROUNDS = 3


class Spread:
    """Vectors in, one of five classes out; devices own 5 to 40 examples."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = torch.Generator().manual_seed(part)
        number = 5 + 5 * (part % 8)
        inputs = torch.randn(number, 6, generator=random)
        return TensorDataset(inputs, torch.randint(5, (number,), generator=random))

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
        inputs, labels = batch
        logits = model(inputs)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        return loss, len(labels), {"accuracy": (logits.argmax(1) == labels).sum()}


class Spoiled(Spread):
    """Of device 2 one example has no finite loss."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        inputs, labels = super().train_examples(data=data, part=part, num_parts=num_parts).tensors
        if part == 2:
            inputs[1, 0] = torch.nan
        return TensorDataset(inputs, labels)


class Random(Spread):
    """A model that draws random numbers as it trains."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 5))


class Unfit(Spread):
    """A loss that looks at values, which no pass over many devices can."""

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
        loss, weight, sums = super().loss_sum(model, batch)
        return (loss if loss.item() >= 0 else -loss), weight, sums


def run(out: Path, compute: str, **overrides: Any) -> list[dict[str, Any]]:
    chosen = {
        "task": TASKS["mlp"],
        "rounds": ROUNDS,
        "threads": 1,
        "out": out,
        "simulation.clients": 12,
        "simulation.compute": compute,
        "optimizer.learning_rate": 0.1,
        "plan.accumulation_steps": 3,
        "plan.micro_batch_size": 4,
    }
    settings = with_fleet(load(None, chosen | overrides))
    run_engine(settings, on_round=lambda _: None, resume=False)
    return read_rows(out)


def model_in(out: Path) -> Tensor:
    return torch.cat([tensor.flatten() for _, tensor in sorted(load_file(out / MODEL).items())])


def told(rows: list[dict[str, Any]]) -> list[Any]:
    return [[{key: client[key] for key in SAME} for client in row["clients"]] for row in rows]


def assert_alike(folder: Path, one: str, other: str, rows: list[list[dict[str, Any]]]) -> None:
    """Check two runs: the same work to the figure, the same sums and model to rounding."""
    first, second = rows
    assert told(first) == told(second)
    for row, twin in zip(first, second, strict=True):
        assert (row["weight"], row["refused"]) == (twin["weight"], twin["refused"])
        assert row["loss"] == pytest.approx(twin["loss"], rel=1e-5)
        assert row["metrics"] == pytest.approx(twin["metrics"], rel=1e-6)
        for client, same in zip(row["clients"], twin["clients"], strict=True):
            assert client["loss"] == pytest.approx(same["loss"], rel=1e-5, abs=1e-6)
            assert client["step_loss"] == pytest.approx(same["step_loss"], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(model_in(folder / one), model_in(folder / other), rtol=0, atol=2e-6)


def assert_norms_alike(rows: list[dict[str, Any]], twins: list[dict[str, Any]]) -> None:
    for row, twin in zip(rows, twins, strict=True):
        assert twin["noise_scale"] == pytest.approx(row["noise_scale"], rel=1e-3)
        for client, same in zip(row["clients"], twin["clients"], strict=True):
            norms = client["step_gradient_norm"]
            assert same["step_gradient_norm"] == pytest.approx(norms, rel=1e-5)


def by_name(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**row, "clients": sorted(row["clients"], key=lambda client: str(client["name"]))}
        for row in rows
    ]


@pytest.mark.parametrize("weighting", ["samples", "dataset"])
def test_all_ways_do_the_same(tmp_path: Path, weighting: str) -> None:
    ways = ("one-by-one", "vectorised", "fused")
    rows = {way: run(tmp_path / way, way, **{"cohort.weighting": weighting}) for way in ways}
    for way in ways[1:]:
        assert_alike(tmp_path, "one-by-one", way, [rows["one-by-one"], rows[way]])
    # Vectorised, each device has its own vector, and its norms tell the noise.
    assert_norms_alike(rows["one-by-one"], rows["vectorised"])
    assert {row["noise_scale"] for row in rows["fused"]} == {None}


@pytest.mark.parametrize("fewest", [0, 1 << 40])
def test_vectors_side_by_side_or_in_turn_are_the_same_where_layers_do_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fewest: int
) -> None:
    monkeypatch.setattr("headwater.simulation.compute.linear_hooks.MOST_ELSEWHERE", -1.0)
    monkeypatch.setattr("headwater.simulation.compute.batched.FEWEST_VECTORS", fewest)
    ways = ("one-by-one", "vectorised")
    rows = [run(tmp_path / way, way, **{"cohort.weighting": "dataset"}) for way in ways]
    assert_alike(tmp_path, *ways, rows)
    assert_norms_alike(*rows)


def test_devices_with_more_than_a_pass_have_vectors_beside_those_whose_layers_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.simulation.compute.batched.MOST_AT_ONCE", 24)
    ways = ("one-by-one", "vectorised")
    longer = {"plan.accumulation_steps": 8}  # devices have 5 to 40 examples, and take 32
    rows = [by_name(run(tmp_path / way, way, **longer)) for way in ways]
    assert_alike(tmp_path, *ways, rows)
    assert_norms_alike(*rows)


def test_who_has_more_than_a_pass_is_computed_alone_where_vectors_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def grad(function: Callable[..., Any], *, has_aux: bool) -> Callable[..., Any]:
        def fail(*tensors: Tensor) -> Any:
            raise RuntimeError("there is no rule for this operator. See the manual")

        return fail

    monkeypatch.setattr("headwater.simulation.compute.batched.MOST_AT_ONCE", 24)
    monkeypatch.setattr("headwater.simulation.compute.per_example.grad", grad)
    caplog.set_level("INFO", logger="headwater.simulation.compute.batched")
    longer = {"plan.accumulation_steps": 8}
    ways = ("one-by-one", "vectorised")
    rows = [by_name(run(tmp_path / way, way, **longer)) for way in ways]
    assert_alike(tmp_path, *ways, rows)
    assert_norms_alike(*rows)
    num_large = sum(client["num_examples"] > 24 for row in rows[0] for client in row["clients"])
    said = re.findall(r"(\d+) devices are computed one by one: RuntimeError: there is", caplog.text)
    assert sum(map(int, said)) == num_large > 0


def test_half_precision_has_vectors(tmp_path: Path) -> None:
    # Each of a dozen operators in a row rounds by 2^-9.
    rows = run(tmp_path / "half", "vectorised", **{"plan.precision": "bfloat16"})
    whole = run(tmp_path / "whole", "vectorised")
    for row, twin in zip(rows, whole, strict=True):
        assert row["loss"] == pytest.approx(twin["loss"], rel=2**-6)
        for client, same in zip(row["clients"], twin["clients"], strict=True):
            norms = same["step_gradient_norm"]
            assert client["step_gradient_norm"] == pytest.approx(norms, rel=2**-4)


def test_what_cannot_be_compiled_is_named_and_computed_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compiling(function: Callable[..., Any], *, fullgraph: bool) -> Callable[..., Any]:
        def fail(*tensors: Tensor) -> Any:
            raise RuntimeError("there is no compiler. See the manual")

        return fail

    run(tmp_path / "plain", "fused")
    assert "compiled:" not in capsys.readouterr().out
    monkeypatch.setattr("torch.compile", compiling)
    run(tmp_path / "tried", "fused", **{"simulation.compile": True})
    said = "passes are not compiled: RuntimeError: there is no compiler\n"
    assert capsys.readouterr().out.count(said) == 1
    assert torch.equal(model_in(tmp_path / "plain"), model_in(tmp_path / "tried"))


def test_convolutions_with_group_norm_do_too(tmp_path: Path) -> None:
    rows = [run(tmp_path / way, way, task=TASKS["cnn"]) for way in ("one-by-one", "fused")]
    assert_alike(tmp_path, "one-by-one", "fused", rows)


def test_one_by_one_is_the_wire_bit_for_bit(tmp_path: Path) -> None:
    direct = run(tmp_path / "direct", "one-by-one")
    wired = run(tmp_path / "wired", "auto", **{"simulation.wire": True})
    assert torch.equal(model_in(tmp_path / "direct"), model_in(tmp_path / "wired"))
    assert [row["clients"] for row in direct] == [row["clients"] for row in wired]


def test_planned_fleets_with_jitter_and_absence_do_the_same(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET)
    chosen: dict[str, Any] = {
        "simulation.fleet": path,
        "simulation.clients": 7,
        "plan.accumulation_steps": None,
        "plan.micro_batch_size": None,
        "plan.effective_batch_size": 60,
        "cohort.deadline_seconds": 5.0,
    }
    ways = ("one-by-one", "vectorised", "fused")
    rows = [run(tmp_path / way, way, **chosen) for way in ways]
    for way, of_way in zip(ways[1:], rows[1:], strict=True):
        assert_alike(tmp_path, "one-by-one", way, [rows[0], of_way])


@pytest.mark.parametrize("way", ["vectorised", "fused"])
def test_who_spoils_a_pass_is_computed_alone(tmp_path: Path, way: str) -> None:
    task = f"{__file__}:Spoiled"
    rows = [by_name(run(tmp_path / one, one, task=task)) for one in ("one-by-one", way)]
    assert_alike(tmp_path, "one-by-one", way, rows)
    refused = [client["num_refused"] for client in rows[1][0]["clients"]]
    assert sum(refused) == 1


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (f"{__file__}:Random", "draws random numbers"),
        (f"{__file__}:Unfit", "RuntimeError"),
        (TASKS["ragged"], "looks different alone"),
    ],
)
def test_what_cannot_be_computed_together_is_computed_one_by_one_and_says_so(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    why: str,
) -> None:
    monkeypatch.setattr("headwater.simulation.compute.modes.FEW", 2)
    run(tmp_path / "auto", "auto", task=task)
    said = capsys.readouterr().out
    assert "devices are computed one by one: " in said
    assert why in said
    run(tmp_path / "alone", "one-by-one", task=task)
    assert torch.equal(model_in(tmp_path / "auto"), model_in(tmp_path / "alone"))
    with pytest.raises(SettingsError, match="--compute fused cannot be"):
        run(tmp_path / "fused", "fused", task=task)


def test_few_devices_have_the_wire_s_bits_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "few", "auto")
    run(tmp_path / "alone", "one-by-one")
    assert torch.equal(model_in(tmp_path / "few"), model_in(tmp_path / "alone"))
    run(tmp_path / "many", "auto", **{"simulation.clients": 33, "rounds": 1})
    assert "devices are computed fused" in capsys.readouterr().out


def test_the_noise_scale_is_followed_with_vectors_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.simulation.compute.modes.FEW", 2)
    chosen: dict[str, Any] = {
        "plan.accumulation_steps": None,
        "plan.follow_noise_scale": True,
        "plan.effective_batch_size": 48,
    }
    rows = run(tmp_path / "auto", "auto", **chosen)
    assert all(row["measured_share"] for row in rows)
    with pytest.raises(SettingsError, match="each device's own norms"):
        run(tmp_path / "fused", "fused", **chosen)
