"""A round on all examples takes the step of plain PyTorch, whatever form the user's task has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import headwater
from headwater.common.errors import TaskError

NUM_EXAMPLES, NUM_CLASSES, RATE = 8, 3, 0.5
# float32, sums of eight examples in another order: a few units in the last place.
ROUNDING = 8 * 2.0**-23


class Plain:
    """Classifies points of a plane; the other tasks change its form and not its sums."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, NUM_CLASSES))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Any:
        return [(inputs, number % NUM_CLASSES) for number, inputs in enumerate(points())]

    def collate(self, examples: list[Any]) -> Any:
        return torch.stack([one[0] for one in examples]), torch.tensor([one[1] for one in examples])

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        logits_BC = model(batch[0])
        return cross_entropy(logits_BC, batch[1], reduction="sum"), len(batch[1])


def points() -> Tensor:
    return torch.randn(NUM_EXAMPLES, 2, generator=torch.Generator().manual_seed(1))


@dataclass
class Point:
    """One example or a batch of them: its ``==`` compares tensors."""

    inputs: Tensor
    labels: Tensor | int


class OfDataclasses(Plain):
    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Any:
        pairs = super().train_examples(data=data, part=part, num_parts=num_parts)
        return [Point(inputs, label) for inputs, label in pairs]

    def collate(self, examples: list[Any]) -> Any:
        return Point(*super().collate([(one.inputs, one.labels) for one in examples]))

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return super().loss_sum(model, (batch.inputs, batch.labels))


class Sparse(Plain):
    layout = torch.sparse_coo

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Any:
        pairs = super().train_examples(data=data, part=part, num_parts=num_parts)
        return [(inputs[None].to_sparse(layout=self.layout), label) for inputs, label in pairs]

    def collate(self, examples: list[Any]) -> Any:
        rows = [(one[0].to_dense()[0], one[1]) for one in examples]
        inputs_BI, labels_B = super().collate(rows)
        return inputs_BI.to_sparse(layout=self.layout), labels_B

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return super().loss_sum(model, (batch[0].to_dense(), batch[1]))


class SparseRows(Sparse):
    layout = torch.sparse_csr


class WithPenalty(Plain):
    """Adds the squared gradients of the outputs by each input, from ``torch.func``."""

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        loss, weight = super().loss_sum(model, batch)
        slopes_BCI = torch.func.vmap(torch.func.jacrev(model))(batch[0])
        return loss + slopes_BCI.square().sum(), weight


class Exported(Plain):
    """A module of ``torch.export``, which refuses ``train()`` and ``eval()``."""

    def new_model(self) -> nn.Module:
        size = torch.export.Dim("size", min=1, max=NUM_EXAMPLES)
        shapes = ({0: size},)
        program = torch.export.export(super().new_model(), (points(),), dynamic_shapes=shapes)
        return nn.Sequential(program.module())


class FreezesInThePass(Plain):
    """Turns ``requires_grad`` off in the pass, as gradual unfreezing does."""

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        model.get_submodule("0").requires_grad_(False)
        return super().loss_sum(model, batch)


class WritesToItsBatch(Plain):
    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        batch[0].mul_(0.5).add_(1.0)
        return super().loss_sum(model, batch)


class TakesLabelsOut(Plain):
    def collate(self, examples: list[Any]) -> Any:
        return dict(zip(("inputs", "labels"), super().collate(examples), strict=True))

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        labels = batch.pop("labels")
        return super().loss_sum(model, (batch["inputs"], labels))


class WithoutBoxes(Plain):
    """Most examples are negatives, whose loss is a constant without a graph."""

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        is_positive = batch[1] > 1
        constant = 0.5 * (~is_positive).sum()
        if not is_positive.any():
            return constant, len(batch[1])
        loss, _ = super().loss_sum(model, (batch[0][is_positive], batch[1][is_positive]))
        return loss + constant, len(batch[1])


FORMS = [
    *(Plain, OfDataclasses, Sparse, SparseRows, WithPenalty),
    *(FreezesInThePass, WritesToItsBatch, TakesLabelsOut),
    pytest.param(Exported, marks=pytest.mark.slow),  # torch.export takes seconds to import
]


class Pretrained(Plain):
    """A network whose BatchNorm has statistics, as one that was trained before."""

    def new_model(self) -> nn.Module:
        norm = nn.BatchNorm1d(4)
        norm.running_mean, norm.running_var = torch.arange(4.0), torch.arange(1.0, 5.0)
        return nn.Sequential(nn.Linear(2, 4), norm, nn.Tanh(), nn.Linear(4, NUM_CLASSES))


class KeepsItsNorm(Pretrained):
    """Keeps its BatchNorm in evaluation mode by itself."""

    def new_model(self) -> nn.Module:
        return Evaluating(*super().new_model().children())


class Evaluating(nn.Sequential):
    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self[1].eval()
        return self


def plain_step(task: Any, *, model: nn.Module | None = None) -> dict[str, Tensor]:
    """Return the model's tensors after one SGD step on the mean over all examples."""
    torch.manual_seed(0)
    model = task.new_model() if model is None else model
    assert model is not None
    examples = task.train_examples(data=None, part=0, num_parts=1)
    loss, weight = task.loss_sum(model, task.collate(list(examples)))
    (loss / weight).backward()
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    return dict(model.state_dict())


@pytest.mark.parametrize("compute", ["one-by-one", None])
def test_an_example_that_cannot_be_read_is_left_out_wherever_it_is(
    compute: str | None, tmp_path: Path
) -> None:
    class Torn(Plain):
        """Its ``collate`` passes over examples that are None, and fails on nothing else."""

        def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Any:
            every = super().train_examples(data=data, part=part, num_parts=num_parts)
            if num_parts == 1:
                return every[1:5] + every[6:]
            return [None if at in (0, 5) else every[at] for at in (part, part + 4)]

        def collate(self, examples: list[Any]) -> Any:
            return super().collate([one for one in examples if one is not None])

    sizes = {"clients": 4, "micro_batch_size": 1, "accumulation_steps": 2}
    run = simulated(Torn, tmp_path, compute=compute, **sizes)
    assert_same(run.model.state_dict(), plain_step(Torn()))


@pytest.mark.parametrize("clients", [2, NUM_EXAMPLES])
def test_devices_and_micro_batches_without_positives_count_with_their_weight(
    clients: int, tmp_path: Path
) -> None:
    class Divided(WithoutBoxes):
        def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Any:
            every = super().train_examples(data=data, part=part, num_parts=num_parts)
            return sorted(every, key=lambda pair: pair[1])[part::num_parts]

    sizes = {"micro_batch_size": 1, "accumulation_steps": NUM_EXAMPLES // clients}
    run = simulated(Divided, tmp_path, clients=clients, **sizes)
    assert run.history[-1].num_examples == NUM_EXAMPLES
    assert_same(run.model.state_dict(), plain_step(Divided()))


@pytest.mark.parametrize("compute", ["one-by-one", "vectorised"])
@pytest.mark.parametrize(("form", "chosen"), [(Pretrained, "frozen"), (KeepsItsNorm, None)])
def test_a_pretrained_batch_norm_keeps_its_statistics_and_trains_scale_and_shift(
    form: Any, chosen: str | None, compute: str, tmp_path: Path
) -> None:
    run = simulated(form, tmp_path, batch_norm=chosen, compute=compute)
    torch.manual_seed(0)
    model = form().new_model()
    model.train()
    model[1].eval()
    expected = plain_step(form(), model=model)
    assert_same(run.model.state_dict(), expected)
    assert run.model.state_dict()["1.running_mean"].equal(torch.arange(4.0))
    assert not run.model.state_dict()["1.weight"].equal(torch.ones(4))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("form", FORMS)
def test_a_round_takes_the_step_of_plain_torch(form: Any, tmp_path: Path) -> None:
    run = simulated(form, tmp_path)
    assert_same(run.model.state_dict(), plain_step(form()))


class Unfreezes(Plain):
    """Freezes a layer in ``new_model`` and trains it in the pass."""

    def new_model(self) -> nn.Module:
        model = super().new_model()
        model.get_submodule("0").requires_grad_(False)
        return model

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        model.get_submodule("0").requires_grad_(True)
        return super().loss_sum(model, batch)


@pytest.mark.parametrize("changes", [{}, {"check": False}, {"check": False, "clients": 40}])
def test_a_frozen_layer_that_a_pass_trains_is_refused_by_name(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=r"0\.\w+ was frozen when the model was built"):
        simulated(Unfreezes, tmp_path, **changes)


def simulated(form: Any, out: Path, **changes: Any) -> headwater.Run:
    chosen = {
        "clients": 1,
        "accumulation_steps": 2,
        "micro_batch_size": NUM_EXAMPLES // 2,
        "learning_rate": RATE,
    } | changes
    return headwater.simulate(form, rounds=1, optimizer="sgd", out=out, progress=False, **chosen)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=ROUNDING, atol=ROUNDING)
