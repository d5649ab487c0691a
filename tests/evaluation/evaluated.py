"""A task that says what is counted of its predictions, and its test by plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import headwater
from headwater.client.training.sampler import held_out_positions

CLASSES, BINS, SCORES = 3, 10, 20
SEED = 0
# A device's float32 sum over at most 40 examples; all else is in float64 or exact.
ROUNDING = 40 * 2.0**-24


class Three:
    """Which of three numbers is the largest, seen through noise."""

    evaluated: ClassVar[Mapping[str, Any] | None] = {
        "confusion": headwater.ConfusionMatrix(CLASSES),
        "calibration": headwater.Calibration(BINS),
        "roc": headwater.RocHistogram(SCORES, num_classes=CLASSES),
    }

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(part)
        size = 40 + part
        inputs = torch.randn(size, 3, generator=generator)
        noise = torch.randn(size, 3, generator=generator)
        return TensorDataset(inputs, (inputs + noise / 2).argmax(1))

    def test_examples(self) -> TensorDataset:
        return self.train_examples(data=None, part=999, num_parts=1)

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int, dict[str, Any]]:
        inputs, labels = batch
        logits = model(inputs)
        num_right = (logits.argmax(1) == labels).sum()
        return cross_entropy(logits, labels, reduction="sum"), len(labels), {"accuracy": num_right}

    def predictions(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, labels = batch
        return model(inputs).softmax(1), labels


class Unseen(Three):
    """The same without saying anything of its predictions."""

    evaluated: ClassVar = None


class Broken(Three):
    """The same with an example that no model with a large weight can be evaluated on."""

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int, dict[str, Any]]:
        loss, weight, metrics = super().loss_sum(model, batch)
        is_bad = next(model.parameters()).sum() > 100 and bool((batch[0][:, 0] > 1).any())
        return loss * float("nan") if is_bad else loss, weight, metrics


THREE = f"{__file__}:Three"


def held_out(parts: Iterable[int], *, fraction: float) -> tuple[Tensor, Tensor]:
    """Return all examples that these devices hold out."""
    inputs, labels = [], []
    for part in parts:
        own = Three().train_examples(data=None, part=part, num_parts=1).tensors
        at = range(len(own[0]))
        if fraction < 1:
            chosen = held_out_positions(
                len(own[0]), fraction=fraction, run_seed=SEED, name=str(part)
            )
            at = chosen  # type: ignore[assignment]
        inputs.append(own[0][list(at)])
        labels.append(own[1][list(at)])
    return torch.cat(inputs), torch.cat(labels)


def central(model: nn.Module, examples: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Return the test of a model on all examples together, in a few plain lines."""
    inputs, labels = examples
    with torch.no_grad():
        logits = model.eval()(inputs)
    chances, predicted = logits.softmax(1), logits.argmax(1)
    matrix = np.zeros((CLASSES, CLASSES), np.int64)
    for label, guess in zip(labels.tolist(), predicted.tolist(), strict=True):
        matrix[label, guess] += 1
    largest = chances.max(1).values.double().numpy()
    edges = np.linspace(0, 1, BINS + 1)
    bins = np.clip(np.digitize(largest, edges, right=True) - 1, 0, BINS - 1)
    right = (predicted == labels).numpy()
    error = sum(abs(right[bins == b].sum() - largest[bins == b].sum()) for b in range(BINS))
    areas = []
    for label in range(CLASSES):
        rounded = np.floor(chances[:, label].double().numpy() * SCORES)
        is_of = (labels == label).numpy()
        pairs = np.sign(rounded[is_of][:, None] - rounded[~is_of][None, :])
        areas.append(float(((pairs + 1) / 2).mean()))
    return {
        "num": len(labels),
        "loss": float(cross_entropy(logits.double(), labels)),
        "accuracy": float(right.mean()),
        "matrix": matrix.tolist(),
        "bins": np.bincount(bins, minlength=BINS).tolist(),
        "error": error / len(labels),
        "auc": areas,
    }


def assert_is_central(
    found: Mapping[str, Any], model: nn.Module, examples: tuple[Tensor, Tensor], *, at: int = 0
) -> None:
    """Check a result against the test on all examples together."""
    expected, one = central(model, examples), found["results"][at]
    assert found["num_examples"] == one["weight"] == expected["num"]
    assert abs(one["loss"] - expected["loss"]) <= ROUNDING * expected["loss"]
    assert one["metrics"] == {"accuracy": expected["accuracy"]}
    predictions = one["predictions"]
    assert predictions["confusion"]["matrix"] == expected["matrix"]
    assert predictions["calibration"]["counts"] == expected["bins"]
    assert abs(predictions["calibration"]["error"] - expected["error"]) <= ROUNDING
    assert np.allclose(predictions["roc"]["auc"], expected["auc"], rtol=0, atol=1e-12)
