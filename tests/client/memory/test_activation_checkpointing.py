"""Recomputed activations give the same gradient to the bit, in less memory, for any model."""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwater.client.memory import recompute
from headwater.client.memory.activation_checkpointing import (
    Recomputed,
    is_on,
    switch_off,
    switch_on,
)
from headwater.client.memory.recompute import RecomputedPass
from headwater.common.errors import TaskError
from headwater.common.system import heap
from tests.processes import ROOT


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x_BI: Tensor, scale: float = 1.0) -> Tensor:
        out: Tensor = x_BI + scale * self.drop(self.down(torch.tanh(self.up(self.norm(x_BI)))))
        return out


class Residual(nn.Module):
    """Blocks in a list, between an input and an output layer."""

    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.input = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.output = nn.Linear(width, 1)

    def forward(self, x_BI: Tensor) -> Tensor:
        hidden = self.input(x_BI)
        for block in self.blocks:
            hidden = block(hidden, scale=0.5)
        out: Tensor = self.output(hidden)
        return out


class Plain(nn.Module):
    """Compound children, and no container anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.output = Block(6), Block(6), nn.Linear(6, 1)

    def forward(self, x_BI: Tensor) -> Tensor:
        out: Tensor = self.output(self.second(self.first(x_BI)))
        return out


class SumOfAll(nn.Module):
    """Takes the sum of a list's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(6)

    def forward(self, features: list[Tensor]) -> Tensor:
        out: Tensor = self.block(sum(features))
        return out


class Dense(nn.Module):
    """Each layer takes the outputs of all before it, in a list that grows, as in a DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SumOfAll(), SumOfAll(), SumOfAll()])

    def forward(self, x_BI: Tensor) -> Tensor:
        features = [x_BI]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features)


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(6)

    def forward(self, state: dict[str, list[Tensor]], x_BI: Tensor) -> Tensor:
        state["skipped"].append(x_BI)
        out: Tensor = self.block(x_BI)
        return out


class Up(Down):
    def forward(self, state: dict[str, list[Tensor]], x_BI: Tensor) -> Tensor:
        out: Tensor = self.block(x_BI + state["skipped"].pop())
        return out


class Hourglass(nn.Module):
    """Its blocks change a list in a dict that they are given, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Down(), Down(), Up(), Up()])

    def forward(self, x_BI: Tensor) -> Tensor:
        state: dict[str, list[Tensor]] = {"skipped": []}
        for layer in self.layers:
            x_BI = layer(state, x_BI=x_BI)
        return x_BI


def mlp() -> nn.Module:
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)] * 4
    return nn.Sequential(*(copy.deepcopy(layer) for layer in layers))


def mlp_in_place() -> nn.Module:
    layers = [nn.ReLU(inplace=True), nn.Linear(6, 6)] * 5
    return nn.Sequential(nn.Linear(6, 6), *(copy.deepcopy(layer) for layer in layers))


def cnn() -> nn.Module:
    layers = [nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Dropout2d(0.2)] * 3
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 1),
        *(copy.deepcopy(layer) for layer in layers),
        nn.Flatten(),
        nn.Linear(24, 2),
    )


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def nested() -> nn.Module:
    stages = [nn.Sequential(Block(6), Block(6)), mlp(), nn.Sequential(nn.Linear(6, 6), nn.Tanh())]
    return nn.Sequential(*stages, nn.Linear(6, 1))


def shared() -> nn.Module:
    block = Block(6)
    return nn.Sequential(block, nn.Tanh(), block, nn.Linear(6, 1))


def shared_operations(depth: int) -> nn.Module:
    operations = [nn.Linear(6, 6), nn.Tanh()]
    return nn.Sequential(*operations * depth, nn.Linear(6, 1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "mlp in context": mlp_in_place,
    "cnn": cnn,
    "transformer": transformer,
    "residual": Residual,
    "no container": Plain,
    "a list that grows": Dense,
    "a list that blocks change": Hourglass,
    "nested": nested,
    "a block twice": shared,
    "operations twice": lambda: shared_operations(2),
    "operations nine times": lambda: shared_operations(9),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(5)
    model = MODELS[name]().train()
    inputs = torch.randn(4, 7, 6) if name == "transformer" else torch.randn(4, 6)
    return model, inputs


def gradients(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(7)
    model(inputs).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def are_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_the_same_to_the_bit(name: str, dtype: torch.dtype) -> None:
    model, inputs = made(name)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        kept = gradients(model, inputs)
        assert switch_on(model)
        assert are_equal(gradients(model, inputs), kept)
        switch_off(model)
        assert are_equal(gradients(model, inputs), kept)
    assert kept


def test_checkpointing_does_not_change_later_random_numbers() -> None:
    model, inputs = made("residual")
    gradients(model, inputs)
    expected = torch.rand(3)
    switch_on(model)
    gradients(model, inputs)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", MODELS)
def test_checkpointing_keeps_parameters_and_their_names(name: str) -> None:
    model, _ = made(name)
    before, modules = dict(model.state_dict(keep_vars=True)), [*model.modules()]
    switch_on(model)
    now = model.state_dict(keep_vars=True)
    assert [*now] == [*before]
    assert all(now[key] is before[key] for key in before)
    assert [*model.modules()] == modules


@pytest.mark.parametrize("name", MODELS)
def test_one_switch_off_undoes_two_switch_on(name: str) -> None:
    model, _ = made(name)
    assert not is_on(model)
    assert switch_on(model)
    assert switch_on(model)
    assert is_on(model)
    switch_off(model)
    switch_off(model)
    assert not is_on(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_replaced_forward_is_run_and_restored() -> None:
    model, inputs = made("no container")
    assert isinstance(model, Plain)
    replaced = torch.tanh
    setattr(model.second, "forward", replaced)  # noqa: B010 - mypy holds methods fixed
    kept = gradients(model, inputs)
    switch_on(model)
    assert are_equal(gradients(model, inputs), kept)
    switch_off(model)
    assert vars(model.second)["forward"] is replaced


@pytest.mark.parametrize("name", MODELS)
def test_a_deep_copy_computes_with_its_own_parameters(name: str) -> None:
    model, inputs = made(name)
    kept = [gradient.clone() for gradient in gradients(model, inputs)]
    switch_on(model)
    model.zero_grad()
    assert are_equal(gradients(copy.deepcopy(model), inputs), kept)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("mlp", ["Sequential"]),
        ("transformer", ["TransformerEncoderLayer"] * 3),
        ("residual", ["Linear", *["Block"] * 4, "Linear"]),
        ("no container", ["Block", "Block", "Linear"]),
        ("nested", ["Block", "Block", "Sequential", "Sequential"]),
    ],
)
def test_the_repeated_blocks_are_checkpointed(name: str, kinds: list[str]) -> None:
    model, _ = made(name)
    switch_on(model)
    found = [type(module).__name__ for module in model.modules() if "forward" in vars(module)]
    assert found == kinds


@pytest.mark.parametrize("model", [nn.Linear(3, 2), nn.Identity(), nn.Sequential()])
def test_a_model_without_blocks_is_left_unchanged(model: nn.Module) -> None:
    assert not switch_on(model)
    assert not is_on(model)


def test_without_gradients_a_block_runs_once() -> None:
    num_runs = []

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x_BI: Tensor) -> Tensor:
            num_runs.append(1)
            out: Tensor = self.linear(x_BI).tanh()
            return out

    model = nn.Sequential(Counting(), Counting())
    switch_on(model)
    with torch.no_grad():
        model(torch.randn(4, 6))
    assert len(num_runs) == 2
    gradients(model, torch.randn(4, 6))
    assert len(num_runs) == 2 + 2 * 2


def test_a_gradient_of_a_gradient_is_the_same() -> None:
    def penalty(model: nn.Module, inputs: Tensor) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(7)
        inputs = inputs.clone().requires_grad_()
        loss = model(inputs).square().sum()
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (loss + slope.square().sum()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    model, inputs = made("residual")
    kept = penalty(model, inputs)
    switch_on(model)
    assert are_equal(penalty(model, inputs), kept)


class InPlaceBehind(nn.Module):
    """Changes the input of its first block once the block has run."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(6, 6)
        # A plain backward pass needs the tanh's output alone.
        self.blocks = nn.ModuleList([nn.Sequential(nn.Tanh(), nn.Tanh()) for _ in range(2)])

    def forward(self, x_BI: Tensor) -> Tensor:
        hidden = self.input(x_BI)
        change = self.blocks[0](hidden)
        hidden += change
        out: Tensor = self.blocks[1](hidden)
        return out


class OtherShapes(nn.Module):
    """Takes more of its input each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.num_runs = nn.Linear(6, 6), 0

    def forward(self, x_BI: Tensor) -> Tensor:
        self.num_runs += 1
        out: Tensor = self.linear(x_BI)[: self.num_runs].square()
        return out


class FewerTheSecondTime(OtherShapes):
    def forward(self, x_BI: Tensor) -> Tensor:
        self.num_runs += 1
        out: Tensor = self.linear(x_BI)
        return out.square().tanh() if self.num_runs == 1 else out


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (InPlaceBehind(), "changed in place after the block"),
        (nn.ModuleDict({"a": OtherShapes()}), "other shapes than the first"),
        (nn.ModuleDict({"a": FewerTheSecondTime()}), "differs from the first"),
    ],
)
def test_a_block_that_cannot_run_again_is_a_task_error_with_the_reason(
    model: nn.Module, text: str
) -> None:
    if isinstance(model, nn.ModuleDict):
        model.forward = model["a"].__call__
    assert switch_on(model)
    with pytest.raises(TaskError, match=text):
        gradients(model, torch.randn(4, 6))


@pytest.mark.parametrize("name", MODELS)
def test_the_passes_of_a_block_are_freed_after_the_backward_pass(name: str) -> None:
    def passes() -> int:
        return sum(type(one) is RecomputedPass for one in gc.get_objects())

    model, inputs = made(name)
    switch_on(model)
    gc.collect()
    before = passes()  # exceptions of other tests may hold some
    gc.disable()
    try:
        gradients(model, inputs)
        assert passes() == before
    finally:
        gc.enable()


MEASURED = """
import json, sys
import torch
from torch import nn
from headwater.client.memory.activation_checkpointing import switch_on
from headwater.client.memory.peak_model import PeakMeter
from headwater.common.system.heap import keep_mmap_threshold

torch.set_num_threads(1)
torch.manual_seed(0)
keep_mmap_threshold()
layer = nn.TransformerEncoderLayer(64, 2, 256, batch_first=True)
model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).train()
inputs = torch.randn(8, 128, 64)
model(inputs[:1]).sum().backward()
model.zero_grad()
if sys.argv[1] == "on":
    switch_on(model)
peak = PeakMeter()
before = peak.peak_bytes()
model(inputs).square().sum().backward()
has_dynamo = "torch._dynamo" in sys.modules
print(json.dumps([peak.peak_bytes() - before, has_dynamo]))
"""


def measured(state: str) -> Any:
    command = [sys.executable, "-c", MEASURED, state]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak cannot be reset elsewhere")
def test_checkpointing_halves_the_peak_of_six_layers_without_importing_dynamo() -> None:
    kept, _ = measured("off")
    twice, has_dynamo = measured("on")
    # Five sixths of the activations are those of layers that are not at work.
    assert twice < kept / 2
    assert not has_dynamo


def test_freed_memory_goes_back_between_blocks_unless_they_come_from_the_heap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = 0

    def release() -> None:
        nonlocal times
        times += 1

    monkeypatch.setattr(recompute, "release_freed_memory", release)
    monkeypatch.setattr(heap, "_mallopt", lambda *_: None)
    monkeypatch.setattr(heap, "_keeps_freed_blocks", False)
    model = Residual(width=64)
    switch_on(model)
    heap.raise_mmap_threshold()
    model(torch.ones(2048, 6)).sum().backward()
    assert times == 0
    heap.keep_mmap_threshold()
    model(torch.ones(2048, 6)).sum().backward()
    assert times >= 2 * len(model.blocks), "forward and backward"


class InnerGradient(nn.Module):
    """A block that takes a gradient itself, as the force of a learned energy."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, x_BI: Tensor) -> Tensor:
        noisy_BI = nn.functional.dropout(x_BI, 0.5)
        force_BI: Tensor = torch.func.grad(lambda inner_BI: self.energy(inner_BI).sum())(noisy_BI)
        return force_BI


def penalty(model: nn.Module, inputs: Tensor) -> Tensor:
    slopes = torch.func.vmap(torch.func.grad(lambda one: model(one).sum()))(inputs)
    total: Tensor = slopes.square().sum() + model(inputs).sum()
    return total


@pytest.mark.parametrize("extent", [Recomputed.CHEAP, Recomputed.ALL])
@pytest.mark.parametrize("is_inside", [True, False])
def test_a_block_inside_or_around_torch_func_has_the_same_gradient(
    is_inside: bool, extent: Recomputed
) -> None:
    layers = [InnerGradient(), InnerGradient()] if is_inside else [nn.Linear(6, 6), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(6, 1))
    inputs = torch.randn(5, 6)
    gradients = []
    for choice in (None, dict.fromkeys(range(3), extent)):
        if choice is not None:
            switch_on(model, choice)
        model.zero_grad()
        torch.manual_seed(3)
        (model(inputs).sum() if is_inside else penalty(model, inputs)).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
