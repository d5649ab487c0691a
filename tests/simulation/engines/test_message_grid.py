"""The in-process grid: rounds, looks at the fleet, and apps that are not Headwater's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from headwater.common.errors import SettingsError
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.simulation.engines.message_grid import InProcessGrid
from headwater.simulation.fleet.devices import MAX_LOOKS
from headwater.simulation.fleet.random_events import round_now

NEVER_TOGETHER = """
[[device]]
profile = "laptop"
availability = [1, 0]

[[device]]
profile = "laptop"
availability = [0, 1]
"""


def settings_of(folder: Path) -> Settings:
    (folder / "fleet.toml").write_text(NEVER_TOGETHER)
    return load(None, {"simulation.fleet": folder / "fleet.toml", "cohort.min_clients": 2})


def test_devices_that_are_never_connected_together_end_the_run_with_an_error(
    tmp_path: Path,
) -> None:
    grid = InProcessGrid(ClientApp(), settings_of(tmp_path))
    for look in range(MAX_LOOKS):
        assert len(list(grid.get_node_ids())) == 1, look
    with pytest.raises(SettingsError, match=r"round 1: 1,000 looks .* at least 2 are needed"):
        grid.get_node_ids()


def test_a_flower_strategy_and_a_flower_app_run_on_the_grid_in_numbered_rounds() -> None:
    app = ClientApp()
    rounds: list[int] = []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        (arrays,) = message.content.array_records.values()
        own = arrays["x"].numpy() + float(context.node_config["partition-id"])
        rounds.append(round_now())
        content = RecordDict(
            {
                "arrays": ArrayRecord({"x": Array(own)}),
                "metrics": MetricRecord({"num-examples": 1}),
            }
        )
        return Message(content, reply_to=message)

    grid = InProcessGrid(app, load(None, {"simulation.clients": 3}))
    grid.enter_run(7)
    start = ArrayRecord({"x": Array(np.zeros(2))})
    result = FedAvg(fraction_evaluate=0.0).start(grid, start, num_rounds=2)
    # Each round adds the mean of 0, 1 and 2, in the order in which Flower drew them.
    np.testing.assert_allclose(result.arrays["x"].numpy(), [2.0, 2.0], rtol=1e-15)
    assert rounds == [1, 1, 1, 2, 2, 2]
    sent = 6 * len(start["x"].data)
    assert grid.num_bytes() == (sent, sent)
