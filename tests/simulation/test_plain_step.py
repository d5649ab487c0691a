"""A round on all examples takes the step of plain PyTorch, whatever form the user's task has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import headwater

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


FORMS = [
    *(Plain, OfDataclasses, Sparse, SparseRows, WithPenalty),
    pytest.param(Exported, marks=pytest.mark.slow),  # torch.export takes seconds to import
]


def plain_step(task: Any, *, seed: int = 0) -> dict[str, Tensor]:
    """Return the model's tensors after one SGD step on the mean over all examples."""
    torch.manual_seed(seed)
    model = task.new_model()
    examples = task.train_examples(data=None, part=0, num_parts=1)
    loss, weight = task.loss_sum(model, task.collate(list(examples)))
    (loss / weight).backward()
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    return dict(model.state_dict())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("form", FORMS)
def test_a_round_takes_the_step_of_plain_torch(form: Any, tmp_path: Path) -> None:
    run = headwater.simulate(
        form,
        clients=1,
        rounds=1,
        accumulation_steps=2,
        micro_batch_size=NUM_EXAMPLES // 2,
        optimizer="sgd",
        learning_rate=RATE,
        out=tmp_path,
        progress=False,
    )
    expected = plain_step(form())
    assert run.model.state_dict().keys() == expected.keys()
    for name, tensor in run.model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=ROUNDING, atol=ROUNDING)
