"""Runs of a model with a frozen part: traffic, checkpoint, resuming and adapter files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import headwater
from headwater.common.errors import FrozenPartMismatch, ModelMismatch
from headwater.common.model.layout import layout_of
from headwater.common.model.trained_model import ADAPTER, MODEL
from headwater.common.settings.schema import Settings
from headwater.server.evaluate_model import evaluate
from headwater.server.rounds import checkpoint
from headwater.simulation.run import run_engine
from tests.adapted import NUM_TOKENS, TASK, Adapted

NUM_DEVICES = 3
TOKENS = torch.arange(NUM_TOKENS)


def chosen(out: Path, **changes: Any) -> Settings:
    return Settings.model_validate(
        {
            "task": TASK,
            "rounds": 2,
            "threads": 1,
            "seed": 5,
            "out": out,
            "plan": {"accumulation_steps": 3, "micro_batch_size": 4},
            "cohort": {"min_clients": NUM_DEVICES},
            "simulation": {"clients": NUM_DEVICES, "workers": 1},
            **changes,
        }
    )


def simulate(settings: Settings, *, resume: bool = False) -> list[Any]:
    rows: list[Any] = []
    run_engine(settings, on_round=rows.append, resume=resume)
    return rows


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder."""
    out = tmp_path_factory.mktemp("run")
    simulate(chosen(out))
    return out


@pytest.fixture(scope="module")
def num_trained() -> int:
    return layout_of(Adapted().new_model()).num_parameters


def training_loss(model: nn.Module) -> float:
    """Return the loss on all examples of all devices, computed at once."""
    parts = [Adapted().train_examples(data=None, part=n, num_parts=3) for n in range(NUM_DEVICES)]
    tokens, following = (torch.cat([part.tensors[at] for part in parts]) for at in (0, 1))
    with torch.no_grad():
        loss, weight = Adapted().loss_sum(model, (tokens, following))
    return float(loss) / weight


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS)
    return found


class OtherBase(Adapted):
    """The same task after its weights were replaced."""

    def new_model(self) -> nn.Module:
        model = super().new_model()
        with torch.no_grad():
            model.get_parameter("down.weight")[0, 0] += 1
        return model


def test_a_round_s_traffic_is_the_trained_part(tmp_path: Path, num_trained: int) -> None:
    rows = simulate(chosen(tmp_path))
    assert [row.bytes_down for row in rows] == [0, NUM_DEVICES * 4 * num_trained]


def test_the_checkpoint_has_no_frozen_tensor_and_the_file_beside_it_all(
    done: Path, num_trained: int
) -> None:
    with safe_open(done / checkpoint.FILE, framework="pt") as file:
        assert file.get_tensor(checkpoint.IMAGE).numel() == 4 * num_trained
    frozen = load_file(done / checkpoint.FROZEN)
    whole = load_file(done / MODEL)
    assert frozen.keys() | load_file(done / ADAPTER).keys() | {"head.weight"} == whole.keys()
    assert all(torch.equal(whole[name], tensor) for name, tensor in frozen.items())


def test_the_file_beside_the_checkpoint_is_written_once(tmp_path: Path) -> None:
    simulate(chosen(tmp_path, rounds=1))
    before = (tmp_path / checkpoint.FROZEN).stat()
    simulate(chosen(tmp_path), resume=True)
    assert (tmp_path / checkpoint.FROZEN).stat().st_ino == before.st_ino


def test_a_resumed_run_ends_with_the_same_bytes(done: Path, tmp_path: Path) -> None:
    simulate(chosen(tmp_path, rounds=1))
    simulate(chosen(tmp_path), resume=True)
    for name in (MODEL, ADAPTER):
        assert (tmp_path / name).read_bytes() == (done / name).read_bytes()


CHANGING = """
from pathlib import Path
import torch
from tests.adapted import Adapted


class Changing(Adapted):
    def new_model(self):
        model = super().new_model()
        with torch.no_grad():
            model.down.weight[0, 0] += float(Path(__file__).with_name("change.txt").read_text())
        return model
"""


def test_a_run_is_not_resumed_with_another_base_and_the_error_names_the_tensor(
    tmp_path: Path,
) -> None:
    task, change = tmp_path / "task.py", tmp_path / "change.txt"
    task.write_text(CHANGING)
    change.write_text("0")
    settings = chosen(tmp_path / "out", task=f"{task}:Changing")
    simulate(settings.model_copy(update={"rounds": 1}))
    change.write_text("1")
    with pytest.raises(FrozenPartMismatch, match=r"down\.weight differs"):
        simulate(settings, resume=True)
    change.write_text("0")
    assert [row.round for row in simulate(settings, resume=True)] == [2]


def test_an_adapter_and_the_task_give_the_whole_model(done: Path, num_trained: int) -> None:
    whole, adapted = (headwater.load_model(done / name, TASK) for name in (MODEL, ADAPTER))
    assert torch.equal(outputs(whole), outputs(adapted))
    tensors = load_file(done / ADAPTER)
    assert sum(tensor.numel() for tensor in tensors.values()) == num_trained
    assert (done / ADAPTER).stat().st_size < (done / MODEL).stat().st_size / 10


def test_an_adapter_does_not_load_on_another_base(done: Path) -> None:
    with pytest.raises(FrozenPartMismatch, match="frozen part"):
        headwater.load_model(done / ADAPTER, OtherBase())


def test_an_adapter_does_not_load_where_other_layers_train(done: Path) -> None:
    class Thawed(Adapted):
        def new_model(self) -> nn.Module:
            model = super().new_model()
            model.get_submodule("up").requires_grad_(True)
            return model

    with pytest.raises(ModelMismatch, match=r"up\.bias is not in the file"):
        headwater.load_model(done / ADAPTER, Thawed())


def test_a_run_begins_with_an_adapter(done: Path, tmp_path: Path) -> None:
    still = {"name": "sgd", "learning_rate": 1e-9}
    simulate(chosen(tmp_path, model={"initial": done / ADAPTER}, optimizer=still))
    first, second = (outputs(headwater.load_model(folder, TASK)) for folder in (done, tmp_path))
    assert torch.allclose(first, second, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="one process"),
        pytest.param({"secure": {"aggregation": "semi-honest"}}, id="messages"),
        pytest.param({"simulation": {"clients": 3, "compute": "fused"}}, id="fused"),
        pytest.param(
            {"simulation": {"clients": 3, "workers": 2}}, id="workers", marks=pytest.mark.slow
        ),
        pytest.param(
            {"simulation": {"clients": 3, "engine": "grpc"}}, id="grpc", marks=pytest.mark.slow
        ),
    ],
)
def test_devices_whose_task_builds_another_base_train_on_the_server_s(
    changes: dict[str, Any], done: Path, tmp_path: Path
) -> None:
    """The base of seed 5 in a run of seed 6: the first loss is that of the first run's model."""
    plan = {"accumulation_steps": 6, "micro_batch_size": 4}
    rows = simulate(
        chosen(tmp_path, seed=6, rounds=1, model={"initial": done}, plan=plan, **changes)
    )
    expected = training_loss(headwater.load_model(done, TASK))
    assert math.isclose(rows[0].loss, expected, rel_tol=1e-4)
    frozen, own = (load_file(folder / checkpoint.FROZEN) for folder in (tmp_path, done))
    assert all(torch.equal(own[name], tensor) for name, tensor in frozen.items())


BFLOAT16 = {"model": {"frozen_dtype": "bfloat16"}}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that stores its frozen weights in bfloat16."""
    out = tmp_path_factory.mktemp("stored")
    simulate(chosen(out, **BFLOAT16))
    return out


def test_frozen_weights_in_bfloat16_halve_the_part_that_is_sent(done: Path, stored: Path) -> None:
    parts = [load_file(folder / checkpoint.FROZEN) for folder in (done, stored)]
    was, now = (sum(tensor.nbytes for tensor in part.values()) for part in parts)
    rounded = ("up.weight", "body.base.weight")
    assert was - now == sum(parts[1][name].nbytes for name in rounded)
    for name, tensor in load_file(stored / MODEL).items():
        is_stored = name in {*rounded, "down.weight", "down.bias"}
        assert tensor.dtype is (torch.bfloat16 if is_stored else torch.float32)


def test_an_adapter_to_bfloat16_weights_and_the_task_give_the_whole_model(stored: Path) -> None:
    whole, adapted = (headwater.load_model(stored / name, TASK) for name in (MODEL, ADAPTER))
    assert torch.equal(outputs(whole), outputs(adapted))
    assert whole.get_parameter("up.weight").dtype is torch.float32  # as the task builds it
    with pytest.raises(FrozenPartMismatch, match="frozen part"):
        headwater.load_model(stored / ADAPTER, OtherBase())


def test_a_resumed_run_with_bfloat16_weights_ends_with_the_same_bytes(
    stored: Path, tmp_path: Path
) -> None:
    simulate(chosen(tmp_path, rounds=1, **BFLOAT16))
    with pytest.raises(ModelMismatch, match=r"is bfloat16 in the checkpoint, float32"):
        simulate(chosen(tmp_path), resume=True)
    simulate(chosen(tmp_path, **BFLOAT16), resume=True)
    assert (tmp_path / MODEL).read_bytes() == (stored / MODEL).read_bytes()


WAYS = pytest.mark.parametrize(
    "simulation",
    [
        pytest.param({"compute": "fused"}, id="fused"),
        pytest.param({"compute": "vectorised"}, id="vectorised"),
        pytest.param({"workers": 2}, id="workers", marks=pytest.mark.slow),
        pytest.param({"engine": "grpc"}, id="grpc", marks=pytest.mark.slow),
    ],
)


def assert_same_model(found: Path, expected: Path, simulation: dict[str, Any]) -> None:
    """Check that two runs' models are the same: to the bit where both sum by the device's code."""
    one, other = load_file(found / MODEL), load_file(expected / MODEL)
    assert all(torch.allclose(one[name], other[name], atol=1e-4) for name in other)
    is_same_code = "compute" not in simulation
    assert not is_same_code or (found / MODEL).read_bytes() == (expected / MODEL).read_bytes()


@WAYS
def test_every_way_of_running_trains_the_same_model_on_bfloat16_weights(
    simulation: dict[str, Any], stored: Path, tmp_path: Path
) -> None:
    simulate(chosen(tmp_path, simulation={"clients": NUM_DEVICES, **simulation}, **BFLOAT16))
    assert_same_model(tmp_path, stored, simulation)


def test_masked_rounds_make_the_model_of_plain_ones(done: Path, tmp_path: Path) -> None:
    simulate(chosen(tmp_path, secure={"aggregation": "semi-honest"}))
    masked, plain = load_file(tmp_path / ADAPTER), load_file(done / ADAPTER)
    assert all(torch.allclose(masked[name], plain[name], atol=1e-4) for name in plain)


@pytest.mark.parametrize("name", [MODEL, ADAPTER])
def test_the_evaluation_takes_either_file(name: str, done: Path) -> None:
    data = [__file__]  # of which the task takes nothing
    found = evaluate(done / name, data=data, task=TASK)
    assert found.results[0].num_examples == 24
