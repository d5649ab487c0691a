"""``--resume`` after a kill at any byte of a checkpoint, and between any two of its system calls.

The kernel itself ends the writer: a process that writes beyond RLIMIT_FSIZE gets SIGXFSZ, which
ends it there and then (setrlimit(2)), so the file has as many bytes as were allowed, and nothing is
cleaned up. Between system calls a process sends itself SIGKILL.
"""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest
import torch

from headwater.common.model.trained_model import MODEL
from headwater.common.settings.schema import Settings
from headwater.server.operations.round_log import read_rows
from headwater.server.rounds import checkpoint, round_loop
from headwater.server.rounds.checkpoint import FILE, Progress
from headwater.simulation.run import run_engine
from tests.chaos.deaths import Point, arm_at
from tests.processes import ended

pytestmark = pytest.mark.slow

NUM_BYTES = 3_000  # of the image
PART = FILE + ".part"
ROUNDS, KILLED_IN_ROUND = 4, 3
NUM_KILLS = 4
SHORTEST = 2_000  # no checkpoint of the run is shorter
# What the machine was measured at: the only things that may differ.
MEASURED = {"seconds", "seconds_split", "updates_per_hour", "ended_at", "bytes_up"}


# One checkpoint behind another.


def save(folder: Path, number: int) -> None:
    progress = Progress(
        run_id=1, round=number, layout_digest="", optimizer="{}", largest=[0.5], counted={"0": 1}
    )
    image_U8 = torch.full((NUM_BYTES,), number, dtype=torch.uint8)
    checkpoint.save(folder, progress, image_U8=image_U8, optimizer={"0.x": torch.arange(9.0)})


def let_the_kernel_kill(after_bytes: int) -> None:
    """End this process, without a core, when it writes more into a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which Python ignores
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (after_bytes, after_bytes))


def save_and_die(folder: Path, after_bytes: int) -> int:
    """Save the second checkpoint in a child that may write so many bytes; return its signal."""
    child = os.fork()
    if child == 0:
        let_the_kernel_kill(after_bytes)
        save(folder, 2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at_bytes(folder: Path, places: list[int], size: int) -> None:
    """Hold for each place that a writer killed there leaves the first checkpoint as it was."""
    whole = (folder / FILE).read_bytes()
    for place in places:
        status = save_and_die(folder, place)
        if place < size:
            assert status == -signal.SIGXFSZ, (place, status)
            assert (folder / PART).stat().st_size == place
            assert sorted(path.name for path in folder.iterdir()) == [FILE, PART]
            assert (folder / FILE).read_bytes() == whole
            found = checkpoint.load(folder)
            assert found is not None
            assert found.progress.round == 1
        else:
            assert status == 0
            found = checkpoint.load(folder)
            assert found is not None
            assert found.progress.round == 2
            save(folder, 1)
        assert (folder / PART).exists() == (place < size)


def test_a_writer_killed_at_any_byte_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    size = (tmp_path / FILE).stat().st_size
    places = sorted({*range(0, size, 101), 1, 7, 8, 9, size - 1, size})
    assert ended(kill_at_bytes, tmp_path, places, size) == 0


# A run that goes on.


def simulate(out: Path, *, resume: bool = False) -> None:
    settings = Settings.model_validate(
        {
            "task": "tests/tasks.py:TwoLayers",
            "rounds": ROUNDS,
            "threads": 1,
            "out": out,
            "simulation": {"clients": 2},
            "plan": {"accumulation_steps": 2, "micro_batch_size": 4},
            "optimizer": {"name": "adam", "learning_rate": 0.01},
        }
    )
    run_engine(settings, on_round=lambda _: None, resume=resume)


def simulate_and_die(out: Path, prepare: Callable[[], None]) -> None:
    """Run, and call ``prepare`` when the third round's checkpoint is about to be written."""
    whole = checkpoint.save

    def dying(folder: Path, progress: Progress, **tensors: Any) -> None:
        if progress.round == KILLED_IN_ROUND:
            prepare()
        whole(folder, progress, **tensors)

    checkpoint.save, round_loop.CHECKPOINT_SECONDS = dying, 0.0  # in a process of its own
    simulate(out)


def told(out: Path) -> list[dict[str, Any]]:
    """Return the rows without what the machine was measured at."""
    return [
        {name: value for name, value in json.loads(json.dumps(row)).items() if name not in MEASURED}
        for row in read_rows(out)
    ]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody kills."""
    out = tmp_path_factory.mktemp("unbroken")
    simulate(out)
    return out


def check_goes_on(broken: Path, unbroken: Path) -> None:
    """Resume a run, and hold that it ends as the one that nobody killed."""
    simulate(broken, resume=True)
    assert (broken / MODEL).read_bytes() == (unbroken / MODEL).read_bytes()
    assert told(broken) == told(unbroken)
    assert not list(broken.glob("*.part"))


def places_in_a_checkpoint(number: int) -> list[int]:
    """Return seeded places, of which each is in another part of the file."""
    random = Random(number)
    return [
        random.randrange(SHORTEST * at // number, SHORTEST * (at + 1) // number)
        for at in range(number)
    ]


@pytest.mark.parametrize("place", places_in_a_checkpoint(NUM_KILLS))
def test_a_run_killed_at_any_byte_of_a_checkpoint_goes_on_exactly(
    place: int, unbroken: Path, tmp_path: Path
) -> None:
    point = Point(
        side="server", target="headwater.server.rounds.checkpoint:write_tensors", when="in"
    )
    prepare = partial(arm_at, point, tmp_path, after_bytes=place)
    broken = tmp_path / "broken"
    assert ended(simulate_and_die, broken, prepare) == -signal.SIGKILL
    assert (broken / PART).stat().st_size == place
    check_goes_on(broken, unbroken)


CALLS: dict[str, tuple[str, int, Literal["before", "behind"]]] = {
    "before it is forced to disk": ("os:fsync", 1, "before"),
    "before it is renamed": ("pathlib:Path.replace", 1, "before"),
    "behind its renaming": ("pathlib:Path.replace", 1, "behind"),
    "behind the last call": ("os:fsync", 2, "behind"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_run_killed_between_the_system_calls_of_a_checkpoint_goes_on_exactly(
    call: str, unbroken: Path, tmp_path: Path
) -> None:
    target, number, when = CALLS[call]
    prepare = partial(arm_at, Point(side="server", target=target, when=when), tmp_path, call=number)
    broken = tmp_path / "broken"
    assert ended(simulate_and_die, broken, prepare) == -signal.SIGKILL
    check_goes_on(broken, unbroken)
