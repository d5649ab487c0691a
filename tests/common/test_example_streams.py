"""A stream of examples is read into a bounded list; what is neither is refused in two lines."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.common import example_streams
from headwater.common.errors import TaskError
from headwater.common.settings.sources import load
from headwater.common.task import load_task, open_train_examples
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.run import run_engine

STREAMS = "tests/stranger_tasks/streams.py"


@pytest.fixture(autouse=True)
def _logged_again() -> None:
    example_streams._log_stream.cache_clear()


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
