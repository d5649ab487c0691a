"""A new head on a frozen backbone: only the head is trained, sent and changed."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.common.errors import TaskFailed
from headwater.common.model.parameters import ModelImage, build_model
from headwater.simulation.api import simulate
from tests.additivity import check_additive

pytestmark = pytest.mark.slow  # to import transformers takes seconds


@pytest.fixture(scope="module")
def heads() -> Any:
    """Return the example's module."""
    return import_module("examples.image_head")


@pytest.fixture
def backbone(heads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, with a backbone of one epoch in it."""
    monkeypatch.chdir(tmp_path)
    heads.write_backbone(heads.BACKBONE, num_epochs=1)
    return tmp_path


def test_the_task_is_additive(heads: Any, backbone: Path) -> None:
    task = heads.ImageHead()
    examples = task.train_examples(data=None, part=1, num_parts=3)
    check_additive(task, ModelImage(task.new_model()).model, examples)


def test_only_the_head_is_trained_and_the_backbone_stays_as_it_was(
    heads: Any, backbone: Path
) -> None:
    task = heads.ImageHead()
    start = build_model(task, seed=0)
    assert [slot.name for slot in start.layout.trainable] == ["head.weight", "head.bias"]
    run = simulate(
        task, clients=3, rounds=4, optimizer="adam", learning_rate=0.05, seed=0, threads=1
    )
    before, after = start.model.state_dict(), run.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.weight", "head.bias"}
    assert run.history[-1].loss < run.history[0].loss


def test_a_missing_backbone_is_named_with_the_command_that_writes_it(
    heads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskFailed, match=r"python -m headwater\.examples\.image_head"):
        build_model(heads.ImageHead(), seed=0)


def test_no_digit_is_in_two_shares(heads: Any) -> None:
    sizes = [len(heads.digits(share)[1]) for share in ("pretrain", "train", "test")]
    assert sum(sizes) == 1797
    assert sizes[0] == 1797 // 2
