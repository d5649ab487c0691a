"""``headwater.simulate`` trains from Python, and leaves the caller's process as it was."""

from __future__ import annotations

import asyncio
import gc
import inspect
import keyword
import logging
import os
import random
import signal
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import TensorDataset

import headwater
from headwater.common.errors import SettingsError, TaskError, UnknownTask
from headwater.common.model.trained_model import MODEL
from headwater.common.settings.keywords import COMMANDS, FLAGS, keyword_keys
from headwater.common.settings.sources import load
from headwater.common.task_of_parts.task_of_parts import PARTS
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.run import run_engine
from tests.python_tasks import SIGNS, Signs

SMALL: dict[str, Any] = {"clients": 3, "rounds": 3, "accumulation_steps": 2, "micro_batch_size": 4}
OWN = {"task", "settings", "observer", "resume", "progress", FLAGS}
OF_COMPARISONS = {"budget", "seeds", "quick", "metric", "target", "jobs"}


@pytest.fixture(autouse=True)
def no_plot() -> None:
    """Draw plots, as these tests look at them."""


def simulated(task: Any = Signs, **changes: Any) -> headwater.Run:
    return headwater.simulate(task, **{**SMALL, "progress": False, **changes})


def bytes_of(run: headwater.Run) -> list[bytes]:
    return [tensor.detach().numpy().tobytes() for tensor in run.model.parameters()]


def state() -> list[object]:
    return [
        torch.get_num_threads(),
        torch.get_rng_state().tolist(),
        [str(part) for part in np.random.get_state()],
        random.getstate(),
        signal.getsignal(signal.SIGINT),
        signal.getsignal(signal.SIGTERM),
        Path.cwd(),
        (logging.getLogger().level, list(logging.getLogger().handlers)),
        {name: value for name, value in os.environ.items() if name.startswith(("FLWR", "GRPC"))},
        gc.get_threshold(),
        gc.get_freeze_count() > 0,
    ]


@pytest.mark.parametrize(
    ("function", "command"),
    [
        (headwater.simulate, "simulate"),
        (headwater.compare, "simulate"),
        (headwater.serve, "server"),
        (headwater.take_part, "client"),
    ],
)
def test_each_keyword_is_a_flag_of_the_command(function: Any, command: str) -> None:
    names = set(inspect.signature(function).parameters) - OWN - {*PARTS} - OF_COMPARISONS
    assert names <= keyword_keys(command).keys()


@pytest.mark.parametrize("command", COMMANDS.values())
def test_every_flag_can_be_a_keyword(command: str) -> None:
    names = keyword_keys(command).keys()
    assert all(name.isidentifier() and not keyword.iskeyword(name) for name in names)
    assert names & OWN <= {"task"}


def test_a_flag_that_no_signature_names_is_a_keyword_too() -> None:
    run = simulated(aggregation="median", check=False, norm_multiple=None)
    assert run.settings.aggregation.rule == "median"
    assert not run.settings.check_task
    with pytest.raises(SettingsError, match="expected"):
        simulated(privacy_epsilon=-1)


def test_an_object_a_class_and_a_file_train_the_command_s_model(tmp_path: Path) -> None:
    keys = keyword_keys("simulate")
    given = {keys[name]: value for name, value in SMALL.items()} | {"task": SIGNS}
    settings = load(None, given | {"out": tmp_path / "command"})
    run_engine(settings, on_round=lambda _: None, resume=False)
    simulated(out=tmp_path / "python")
    by_command, by_python = (
        {name: tensor.tolist() for name, tensor in load_file(tmp_path / way / MODEL).items()}
        for way in ("command", "python")
    )
    assert by_python == by_command
    first, *others = (bytes_of(simulated(task)) for task in (Signs, Signs(), SIGNS))
    assert others == [first, first]


def test_masked_rounds_take_an_object() -> None:
    run = simulated(secure_aggregation="semi-honest")
    assert [row.num_clients for row in run.history] == [3, 3, 3]


def test_masked_rounds_reach_their_batch_over_slow_links(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    figures = ("examples_per_second = 2000", "memory_bytes = 1_000_000_000")
    device = "\n".join(("[[device]]", *figures, "upload_bytes_per_second = 130\n"))
    fleet.write_text(4 * device)
    given: dict[str, Any] = {
        "fleet": fleet,
        "effective_batch_size": 40,
        "secure_aggregation": "semi-honest",
    }
    given |= {"settings": {"plan.max_micro_batch_size": 2}}
    run = headwater.simulate(Signs, rounds=2, progress=False, **given)
    assert [row.num_examples for row in run.history] == [40, 40]


def test_settings_go_by_dotted_keys_nested_tables_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("seed = 7\n[optimizer]\nname = 'sgd'\narguments = {momentum = 0.5}\n")
    dotted = {"seed": 7, "optimizer.name": "sgd", "optimizer.arguments.momentum": 0.5}
    nested = {"seed": 7, "optimizer": {"name": "sgd", "arguments": {"momentum": 0.5}}}
    trees = [simulated(settings=given).settings for given in (file, dotted, nested)]
    assert trees[0] == trees[1] == trees[2]
    assert simulated(settings=file, seed=8).settings.seed == 8


def test_the_run_has_its_rounds_and_the_trained_model() -> None:
    run = simulated()
    assert [row.round for row in run.history] == [1, 2, 3]
    assert run.metrics == run.history[-1].metrics
    assert run.metrics.keys() == {"train_accuracy", "test_loss", "test_accuracy"}
    assert [row["test_loss"] for row in run.table()] == [
        row.metrics["test_loss"] for row in run.history
    ]
    assert all(type(value) in (int, float) for row in run.table() for value in row.values())
    assert not run.model.training
    assert run.model(torch.zeros(2, 3)).shape == (2, 2)
    assert repr(run).startswith("<Run of Signs: 3 rounds, loss 0.")


def test_plot_draws_each_panel_and_a_notebook_shows_it() -> None:
    figure = simulated().plot()
    assert {axes.get_title() for axes in figure.axes} >= {"metrics"}
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_plot_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulated()
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SettingsError) as caught:
        run.plot()
    assert "headwater[server]" in caught.value.remedy


@pytest.mark.slow
@pytest.mark.parametrize("masked", ["off", "semi-honest"])
def test_the_process_is_as_before(masked: Any) -> None:
    before = state()
    simulated(secure_aggregation=masked, threads=2)
    assert state() == before


def test_the_process_is_as_before_after_an_error() -> None:
    before = state()
    with pytest.raises(SettingsError) as caught:
        simulated(optimizer="sdg")
    assert state() == before
    assert caught.value.__notes__[0].startswith("remedy: one of: ASGD, Adadelta")


@pytest.mark.slow
def test_ctrl_c_returns_control_and_resume_reaches_the_same_model(tmp_path: Path) -> None:
    def interrupt(row: RoundRow) -> None:
        if row.round == 2:
            raise KeyboardInterrupt

    before = state()
    with pytest.raises(KeyboardInterrupt):
        simulated(out=tmp_path / "a", observer=interrupt)
    assert state() == before
    rest = simulated(out=tmp_path / "a", resume=True)
    assert [row.round for row in rest.history] == [1, 2, 3]
    assert bytes_of(rest) == bytes_of(simulated())


def test_nothing_of_a_run_stays_in_memory() -> None:
    task = Signs()
    reference = weakref.ref(task)
    run = simulated(task)
    del task, run
    gc.collect()
    assert reference() is None


def test_two_objects_of_one_name_are_two_tasks() -> None:
    class Other(Signs):
        def new_model(self) -> torch.nn.Module:
            return torch.nn.Linear(3, 2)

    Other.__name__ = "Signs"
    assert len(bytes_of(simulated(Signs()))) == 4
    assert len(bytes_of(simulated(Other()))) == 2


def test_it_runs_where_an_event_loop_runs_already() -> None:
    async def cell() -> headwater.Run:
        return simulated()

    assert len(asyncio.run(cell()).history) == 3


def test_without_progress_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    simulated()
    assert capsys.readouterr().out == ""
    simulated(progress=True)
    assert "round 3 of 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("task", "given", "message"),
    [
        (Signs, {"clients": "many"}, r"headwater.simulate\(\): simulation.clients \(--clients\)"),
        (Signs, {"settings": {"local.stepz": 2}}, "did you mean local.steps"),
        (Signs, {"settings": {"local": {"steps": 0}}}, "at least 1"),
        (Signs, {"cohort_size": 4}, "a cohort of 4 clients is set, and the simulator has 3"),
        (Signs, {"settings": "absent.toml"}, "cannot read the settings file absent.toml"),
        (Signs, {"engine": "grpc"}, "the task is a Python object, and engine='grpc'"),
        (Signs, {"engine": "flower-ray"}, "the task is a Python object, and engine='flower-ray'"),
        (SIGNS, {"engine": "flower-ray", "optimizer": torch.optim.SGD}, "the optimizer is a"),
        (Signs, {"settings": {"simulation.workers": 2}}, "simulation.workers computes in other"),
        (Signs, {"observer": 3}, r"must have a method on_round\(row\)"),
        (Signs, {"observer": RoundRow}, "found the class RoundRow"),
    ],
)
def test_what_is_wrong_is_named(task: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        simulated(task, **given)


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"local_parameters": 5}, "local_parameters=... in headwater.simulate()"),
        ({"settings": {"algorithm.name": Signs}}, "by the keyword client_algorithm=..."),
        ({"settings": {"optimizer.name": torch.optim.SGD}}, "by the keyword optimizer=..."),
        ({"settings": {"track": print}}, "by the keyword observer=..."),
        ({"settings": {"observer": print}}, "pass it as observer=..."),
        ({"settings": {"cohort.size": "many"}}, "cohort_size=... in headwater.simulate()"),
    ],
)
def test_the_remedy_of_a_wrong_value_names_the_keyword(given: dict[str, Any], remedy: str) -> None:
    with pytest.raises(SettingsError) as caught:
        simulated(**given)
    assert remedy in caught.value.remedy


def test_the_history_of_a_resumed_run_has_the_figures_of_its_first_rounds(tmp_path: Path) -> None:
    whole = simulated(out=tmp_path / "run")
    rest = simulated(out=tmp_path / "run", resume=True, rounds=4)
    assert [row.figures() for row in rest.history[:3]] == [row.figures() for row in whole.history]
    assert rest.history[0].clients[0].name == whole.history[0].clients[0].name
    assert rest.history[0].slowest == whole.history[0].slowest


@pytest.mark.parametrize(
    ("function", "word", "meant"),
    [
        (headwater.simulate, "learning_rat", "did you mean learning_rate?"),
        (headwater.simulate, "lr", "did you mean learning_rate?"),
        (headwater.serve, "rule", "did you mean aggregation?"),
        (headwater.serve, "max_plans", "set it by its key: settings={'secure.max_plans': ...}"),
        (headwater.simulate, "privacy_epsilom", "did you mean privacy_epsilon?"),
        (headwater.take_part, "sever", "did you mean server?"),
        (headwater.take_part, "rounds", "has no keyword rounds"),
    ],
)
def test_an_unknown_keyword_is_answered_by_the_nearest_one_or_its_key(
    function: Any, word: str, meant: str
) -> None:
    with pytest.raises(TypeError) as refused:
        function(Signs, **{word: 1})
    assert str(refused.value).startswith(f"headwater.{function.__name__}() has no keyword {word}")
    assert str(refused.value).endswith(meant)


def test_a_path_may_stand_for_each_text_that_is_one(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text('[[device]]\nprofile = "pi4-4gb"\ncount = 3\n')
    first = simulated(Path(SIGNS), fleet=fleet, out=tmp_path / "out")
    assert bytes_of(simulated(SIGNS, settings={"simulation.fleet": fleet})) == bytes_of(first)
    plain = headwater.load_model(tmp_path / "out", Path(SIGNS))
    tested = headwater.evaluate(tmp_path / "out", task=Path(SIGNS))
    assert tested.loss == headwater.evaluate(plain, task=SIGNS).loss


def test_a_task_without_its_methods_is_named() -> None:
    with pytest.raises(TaskError, match="no method new_model, train_examples, loss_sum"):
        simulated(object())
    with pytest.raises(UnknownTask):
        simulated("absent.py:Task")


def test_each_client_gets_its_own_file(tmp_path: Path) -> None:
    class OwnFiles(Signs):
        def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
            own = part if data is None else int(data.read_text())
            return super().train_examples(data=None, part=own, num_parts=1)

    for part in range(3):
        (tmp_path / f"{part}.txt").write_text(str(part))
    small = {name: value for name, value in SMALL.items() if name != "clients"}
    for pattern in (f"{tmp_path}/*.txt", tmp_path / "*.txt"):
        run = headwater.simulate(OwnFiles, data=pattern, progress=False, **small)
        assert [row.num_clients for row in run.history] == [3, 3, 3]
