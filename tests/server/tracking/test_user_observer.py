"""An observer of the user's sees each round, and its failure does not end the training."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

import headwater
from headwater.common.errors import SettingsError
from headwater.common.model.trained_model import MODEL
from headwater.common.settings.schema import Settings
from headwater.server.rounds.features import trackers
from headwater.server.rounds.round_row import RoundRow
from headwater.server.tracking.user_observer import UserObserver
from tests.python_tasks import Signs
from tests.round_rows import row


class Diary:
    """Notes each event."""

    def __init__(self) -> None:
        self.notes: list[object] = []

    def started(self, settings: Settings, *, round_number: int, model: nn.Module) -> None:
        self.notes.append(("started", settings.rounds, round_number, model))

    def on_round(self, row: RoundRow) -> None:
        self.notes.append(row.round)

    def ended(self) -> None:
        self.notes.append("ended")


def test_an_observer_and_a_function_see_the_run() -> None:
    diary, rounds = Diary(), []
    run = headwater.simulate(
        Signs,
        clients=2,
        rounds=2,
        progress=False,
        observer=[diary, lambda row: rounds.append(row.round)],
    )
    assert rounds == [1, 2]
    assert diary.notes == [("started", 2, 0, run.model), 1, 2, "ended"]


def test_a_failing_observer_is_logged_once_and_called_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Flaky(Diary):
        def on_round(self, row: RoundRow) -> None:
            super().on_round(row)
            if row.round < 3:
                raise ConnectionError("no network")

    flaky = Flaky()
    with caplog.at_level(logging.WARNING):
        run = headwater.simulate(Signs, clients=2, rounds=3, progress=False, observer=flaky)
    assert len(run.history) == 3
    assert flaky.notes[1:] == [1, 2, 3, "ended"]
    said = [record.message for record in caplog.records if "user_observer" in record.name]
    assert said == [
        "the observer Flaky failed; the training goes on",
        "the observer Flaky failed 2 times in all",
    ]


def test_an_observer_that_cannot_start_ends_the_run_before_its_first_round() -> None:
    class LoggedOut(Diary):
        def started(self, settings: Settings, *, round_number: int, model: nn.Module) -> None:
            raise PermissionError("log in first")

    observer = LoggedOut()
    with pytest.raises(SettingsError, match="LoggedOut cannot start: PermissionError: log in"):
        headwater.simulate(Signs, clients=2, progress=False, observer=observer)
    assert 1 not in observer.notes


def test_track_finds_a_class_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "my_observers.py"
    file.write_text(
        "from pathlib import Path\nclass Count:\n    def on_round(self, row):\n"
        f"        Path({str(tmp_path / 'last')!r}).write_text(str(row.round))\n"
    )
    chosen = {"track": f"{file}:Count"}
    headwater.simulate(Signs, clients=2, rounds=2, progress=False, settings=chosen)
    assert (tmp_path / "last").read_text() == "2"


@pytest.mark.parametrize(
    ("name", "message", "remedy"),
    [
        ("mlfow", "--track knows no 'mlfow'", "choose mlflow, tensorboard, wandb, or name a class"),
        ("mlflow", "--track mlflow needs MLflow", r"pip install 'headwater\[mlflow\]'"),
        ("wandb", "--track wandb needs the package", r"pip install 'headwater\[wandb\]'"),
        ("absent.py:Mine", "the observer absent.py:Mine: there is no", ""),
        (f"{__file__}:Mine", "has no Mine", "correct the name"),
    ],
)
def test_what_track_lacks_is_named(
    name: str, message: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SettingsError, match=message) as caught:
        trackers(Settings(track=name))
    assert remedy.replace("\\", "") in caught.value.remedy


class Service:
    """Stands in for the tracking services: it keeps what MLflow and wandb would send."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.summary: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.sent.append((name, args, kwargs))
            return SimpleNamespace(info=SimpleNamespace(run_id="7"), experiment_id="3")

        return call


def tracked(out: Path, name: str) -> None:
    (out / MODEL).parent.mkdir()
    (out / MODEL).write_bytes(b"")
    _, observer = trackers(Settings(track=name, out=out))
    assert isinstance(observer, UserObserver)
    private = {"ca": out / "private", "key": out / "private"}
    settings = Settings.model_validate(
        {"out": out, "seed": 5, "tls": private, "client": {"data": out / "private"}}
    )
    observer.started(settings, round_number=0, model=nn.Module())
    observer.on_round(row(1, "a"))
    observer.ended()


def test_a_place_that_mlflow_refuses_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses() -> None:
        raise RuntimeError("the file store is in maintenance mode")

    mlflow = ModuleType("mlflow")
    mlflow.__dict__.update(MlflowClient=refuses, entities=None)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    with pytest.raises(SettingsError, match="refuses its place: the file store is in") as refused:
        tracked(tmp_path / "run", "mlflow")
    assert "MLFLOW_TRACKING_URI" in refused.value.remedy


def test_mlflow_gets_the_settings_the_figures_and_the_path_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow, service = ModuleType("mlflow"), Service()
    kinds = SimpleNamespace(Param=lambda *of: of, Metric=lambda *of: of)
    mlflow.__dict__.update(MlflowClient=lambda: service, entities=kinds)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    tracked(tmp_path / "run", "mlflow")
    sent = {name: (args, kwargs) for name, args, kwargs in service.sent if name != "log_batch"}
    batches = [kwargs for name, _, kwargs in service.sent if name == "log_batch"]
    assert {("seed", "5"), ("optimizer.name", "adam")} <= set(batches[0]["params"])
    assert "private" not in str(batches)
    assert "server.listen" not in dict(batches[0]["params"])
    figures = {name: (value, step) for name, value, _, step in batches[-1]["metrics"]}
    assert figures["loss"] == (row(1, "a").loss, 1)
    assert sent["set_tag"][0] == ("7", "headwater.model", str(tmp_path / "run" / MODEL))
    assert sent["set_terminated"][0] == ("7", "FINISHED")


def test_wandb_gets_the_settings_the_figures_and_the_path_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb, service, begun = ModuleType("wandb"), Service(), dict[str, Any]()

    def init(**given: Any) -> Service:
        begun.update(given)
        return service

    wandb.__dict__.update(init=init)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    tracked(tmp_path / "run", "wandb")
    assert begun["config"]["seed"] == 5
    assert begun["config"]["optimizer.name"] == "adam"
    assert "private" not in str(begun["config"])
    assert "server.listen" not in begun["config"]
    (_, figures, step), (_, _, end) = service.sent
    assert (figures[0]["loss"], step) == (row(1, "a").loss, {"step": 1})
    assert service.summary == {"model": str(tmp_path / "run" / MODEL)}
    assert end == {"exit_code": 0}
