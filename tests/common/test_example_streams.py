"""A stream of examples is read into a bounded list; what is neither is refused in two lines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import StackDataset, TensorDataset

from headwater.common import example_streams
from headwater.common.errors import TaskError
from headwater.common.example_streams import as_examples
from headwater.common.settings.sources import load
from headwater.common.task import load_task, open_train_examples
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.run import run_engine

STREAMS = "tests/stranger_tasks/streams.py"


@pytest.fixture(autouse=True)
def _logged_again() -> None:
    example_streams._log_stream.cache_clear()


INPUTS, TARGETS = torch.zeros(9, 3), torch.zeros(9, dtype=torch.int64)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ((INPUTS, TARGETS), "2 columns of 9 rows each"),
        ([INPUTS, TARGETS], "2 columns of 9 rows each"),
        ((INPUTS, INPUTS), "2 columns of 9 rows each"),
        ((INPUTS.numpy(), TARGETS.numpy(), INPUTS.numpy()), "3 columns of 9 rows each"),
        ({"inputs": INPUTS, "targets": TARGETS}, "a dict of 2 entries"),
    ],
)
def test_columns_are_refused_which_would_be_read_as_so_many_examples(
    columns: Any, text: str
) -> None:
    with pytest.raises(TaskError, match=text) as caught:
        as_examples(columns, "train_examples")
    assert "TensorDataset(inputs, targets)" in caught.value.remedy


@pytest.mark.parametrize(
    "examples",
    [
        [torch.zeros(64), torch.ones(64)],  # two texts of one length
        (torch.zeros(2), torch.zeros(2)),
        [(torch.zeros(3), 1), (torch.zeros(3), 2)],
        {0: "a", 1: "b"},
        [],
        {},
        TARGETS,
    ],
)
def test_a_few_examples_are_no_columns(examples: Any) -> None:
    assert as_examples(examples, "train_examples") is examples


def opened(kind: str) -> Any:
    task = load_task(f"{STREAMS}:{kind}")
    return open_train_examples(task, data=None, part=0, num_parts=1)


def test_a_finite_stream_is_read_whole_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    examples = opened("Finite")
    assert len(examples) == 30
    assert examples[7][0].tolist() == [1, 1, 2, 0, 1]
    assert "its 30 examples are read into memory" in caplog.text


def test_a_method_that_is_not_called_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Doubled(StackDataset[Any]):
        def __getitem__(self, position: int) -> Any:
            return position

    for _ in range(2):
        as_examples(Doubled(TensorDataset(torch.ones(3))), "train_examples")
    assert caplog.text.count("Doubled.__getitem__ is not called") == 1
    as_examples(TensorDataset(torch.ones(3)), "train_examples")
    assert "TensorDataset" not in caplog.text


def test_what_is_read_of_a_stream_stays_as_it_was() -> None:
    """A collate that writes in place would else change it at each epoch."""
    examples = as_examples((torch.ones(2) for _ in range(3)), "stream")
    examples[0].mul_(0.5)
    assert examples[0].tolist() == [1, 1]


def test_an_endless_stream_is_cut_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert len(opened("Endless")) == example_streams.MAX_EXAMPLES
    assert "its first 10,000 examples are read into memory" in caplog.text
    assert "the rest of the stream is not used" in caplog.text


def test_a_stream_of_large_examples_is_cut_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_streams, "MAX_BYTES", 240)  # an example has 5 + 1 float32
    assert len(opened("Endless")) == 10


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("Loader", "train_examples returned a DataLoader"),
        ("Nothing", "train_examples returned NoneType, which has no len"),
    ],
)
def test_what_holds_no_examples_is_refused_in_two_lines(kind: str, text: str) -> None:
    with pytest.raises(TaskError, match=text) as caught:
        opened(kind)
    assert "\n" not in caught.value.message
    assert caught.value.remedy.startswith("return ")


def test_a_task_with_a_stream_trains_in_the_simulator() -> None:
    rows: list[RoundRow] = []
    overrides = {
        "task": f"{STREAMS}:Finite",
        "rounds": 3,
        "threads": 1,
        "simulation.clients": 2,
        "plan.accumulation_steps": 2,
        "optimizer.learning_rate": 0.01,
    }
    run_engine(load(None, overrides), on_round=rows.append, resume=False)
    assert [row.num_clients for row in rows] == [2, 2, 2]
