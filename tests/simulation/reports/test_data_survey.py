"""Before the first round the simulator looks over the examples of all devices, and sums up."""

from __future__ import annotations

import logging
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from headwater.client.trainer.run_trainer import run_trainer
from headwater.common.additivity.trial_state import random_state
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.common.user_code.run_scope import run_scope
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.fleet.identities import identities_of
from headwater.simulation.reports.data_survey import DeviceSurvey, survey_devices
from headwater.simulation.run import run_engine
from tests.tasks import NAN_LOSS, TwoLayers, examples

NUM_BAD = {1: 2, 3: 5, 4: 1}


class SomeBad(TwoLayers):
    """Of 12 examples, devices 1, 3 and 4 have some with a NaN; device 2 has no disk."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        if part == 2:
            raise FileNotFoundError("no disk")
        return examples(12, kinds=[NAN_LOSS] * NUM_BAD.get(part, 0))


class Drawing(Dataset[Any]):
    """Each example is drawn anew, from all generators."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, position: int) -> tuple[torch.Tensor, ...]:
        random_state_moves()
        inputs, target, kind = examples(6)[position]
        return inputs, target, kind


def random_state_moves() -> None:
    import random

    import numpy as np

    random.random()
    np.random.rand()
    torch.rand(1)


class Augmented(TwoLayers):
    """A device whose examples draw random numbers."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Any:
        return Drawing()


def settings(task: type[TwoLayers], **changes: Any) -> Settings:
    chosen = {
        "task": f"{__file__}:{task.__name__}",
        "rounds": 1,
        "threads": 1,
        "simulation.clients": 6,
        "plan.accumulation_steps": 3,
        "plan.micro_batch_size": 4,
        "optimizer.learning_rate": 1e-4,
    }
    given = {key.replace("__", "."): value for key, value in changes.items()}
    return with_fleet(load(None, chosen | given))


def surveyed(chosen: Settings, **how: Any) -> DeviceSurvey:
    with run_scope({}):
        trainer = run_trainer(chosen.model_copy(update={"check_task": False}))
        return survey_devices(trainer, identities_of(chosen), batch_size=5, **how)


def test_the_summary_says_how_many_examples_are_left_out_where_and_why() -> None:
    text = surveyed(settings(SomeBad)).summary()
    assert text is not None
    head, why = text.splitlines()
    assert head == (
        "8 of 60 examples looked at on 5 of 6 devices cannot be trained on and will be left out: "
        "5 on 3, 2 on 1, 1 on 4"
    )
    assert why.startswith("  8: its loss is NaN or infinite")
    assert why.endswith("(first on 1: position 0)")


def test_when_the_time_is_over_the_summary_says_how_many_were_looked_at() -> None:
    ticks = count(step=0.3)
    found = surveyed(settings(SomeBad), seconds=lambda: next(ticks))
    assert (found.num_looked_at, found.num_devices) == (2, 6)
    assert "on 2 of 6 devices cannot" in str(found.summary())


def test_many_devices_are_counted_and_a_fleet_without_faults_has_no_summary() -> None:
    found = DeviceSurvey(num_devices=9, num_looked_at=9, num_examples=90, num_seen=90)
    assert found.summary() is None
    found.left_out.update({str(part): 9 - part for part in range(9)})
    assert str(found.summary()).endswith(
        "9 on 0, 8 on 1, 7 on 2, 6 on 3, 5 on 4, 10 on 4 other devices"
    )


def test_the_survey_leaves_all_generators_as_they_were() -> None:
    chosen = settings(Augmented)
    before = random_state()
    assert surveyed(chosen).num_seen == 36
    assert random_state() == before


@pytest.mark.parametrize("masks", [{}, {"secure__aggregation": "semi-honest"}])
def test_a_run_begins_with_one_summary_of_all_devices(
    masks: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), run_scope({}):
        run_engine(settings(SomeBad, **masks), on_round=lambda row: None, resume=False)
    lines = [line for line in caplog.messages if "will be left out" in line]
    assert len(lines) == 1
    assert lines[0].startswith("8 of 60 examples looked at on 5 of 6 devices")
