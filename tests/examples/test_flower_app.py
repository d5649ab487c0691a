"""The Flower apps that show which lines change, each run by its own server and client app."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from examples.flower_app.advanced.advanced_app import client_app as advanced_client
from examples.flower_app.advanced.advanced_app import server_app as advanced_server
from examples.flower_app.advanced.advanced_app import task as advanced_task
from examples.flower_app.quickstart.digits_app import client_app as quickstart_client
from examples.flower_app.quickstart.digits_app import server_app as quickstart_server
from examples.flower_app.quickstart.digits_app import task as quickstart_task
from examples.flower_app.tabular.tabular_app import client_app as tabular_client
from examples.flower_app.tabular.tabular_app import server_app as tabular_server
from examples.flower_app.tabular.tabular_app import task as tabular_task
from tests.flower_apps import AppGrid

APPS = Path(__file__).parents[2] / "examples" / "flower_app"
NUM_NODES = 5


def run_config(app: str) -> dict[str, float | int]:
    project = tomllib.loads((APPS / app / "pyproject.toml").read_text())
    config: dict[str, float | int] = project["tool"]["flwr"]["app"]["config"]
    return config


def run(app: str, server: ServerApp, client: ClientApp) -> None:
    """Run an app as its own pyproject.toml says."""
    torch.manual_seed(0)
    grid = AppGrid(client, run_config(app), NUM_NODES)
    server(grid, grid.context(0))


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_the_quickstart_learns_the_digits() -> None:
    run("quickstart", quickstart_server.app, quickstart_client.app)
    model = quickstart_task.Net()
    model.load_state_dict(torch.load("final_model.pt"))
    loader = torch.utils.data.DataLoader(quickstart_task.load_examples()[1], batch_size=360)
    assert quickstart_task.test(model, loader)[1] > 0.9


@pytest.mark.slow
def test_the_table_is_learned() -> None:
    run("tabular", tabular_server.app, tabular_client.app)
    model = tabular_task.Classifier()
    model.load_state_dict(torch.load("final_model.pt"))
    accuracies = [
        tabular_task.evaluate(model, tabular_task.load_data(part, NUM_NODES)[1])[1]
        for part in range(NUM_NODES)
    ]
    assert sum(accuracies) / NUM_NODES > 0.9


@pytest.mark.slow
def test_the_advanced_app_saves_its_best_model_and_its_results() -> None:
    run("advanced", advanced_server.app, advanced_client.app)
    rows = json.loads(Path("results.json").read_text())
    assert [row["round"] for row in rows] == list(
        range(run_config("advanced")["num-server-rounds"] + 1)  # type: ignore[arg-type]
    )
    net = advanced_task.Net()
    net.load_state_dict(torch.load("best.pt"))
    accuracy = advanced_task.test(net, advanced_task.load_server_data())[1]
    assert accuracy == max(row["accuracy"] for row in rows) > 0.9
