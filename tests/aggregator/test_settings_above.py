"""An aggregator has few settings of its own; what concerns the run is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headwater.aggregator.settings_above import check_own, settings_above
from headwater.common.errors import SettingsError
from headwater.common.settings.schema import Settings
from headwater.server.cli import app

UPSTREAM = {"upstream": "10.0.0.1:8500,10.0.0.2:8500"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rounds": 5}, "--rounds"),
        ({"out": "runs/x"}, "--out"),
        ({"plan": {"accumulation_steps": 2}}, "--accumulation-steps"),
        ({"secure": {"aggregation": "semi-honest"}}, "--secure-aggregation"),
        ({"asynchronous": {"is_on": True}}, "--asynchronous"),
        ({"evaluation": {"on_devices": True}}, "--evaluate-on-devices"),
        ({"compression": {"up": "int8"}}, "--compress"),
        ({"local": {"steps": 4}}, "--local-steps"),
        ({"optimizer": {"arguments": {"momentum": 0.9}}}, "momentum"),
        ({"feature": {"name": "x.py:X", "arguments": {"mu": 0.1}}}, "mu"),
        ({"standby": {"shared_state": "/shared"}}, "--shared-state"),
        ({"server": {**UPSTREAM, "page": "127.0.0.1:8600"}}, "--page"),
    ],
)
def test_a_setting_of_the_run_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    settings = Settings.model_validate({"task": "x.py:X", "server": UPSTREAM, **changes})
    with pytest.raises(SettingsError, match=f"{named}.* no setting of an aggregator"):
        check_own(settings)


def test_what_init_writes_and_the_waits_for_devices_are_an_aggregator_s_own() -> None:
    files = {"ca": "ca.pem", "certificate": "server.pem", "key": "server-key.pem"}
    check_own(
        Settings.model_validate(
            {
                "task": "x.py:X",
                "threads": 2,
                "server": {**UPSTREAM, "listen": "0.0.0.0:8500", "upstream_config": "client.toml"},
                "cohort": {"deadline_seconds": 60.0, "reconnect_seconds": 10.0},
                "tls": files,
                "model": {"batch_norm": "group"},
                "feature": {"name": "x.py:Feature"},
            }
        )
    )


def test_name_and_certificate_for_the_server_above_are_those_that_join_wrote(
    tmp_path: Path,
) -> None:
    config = tmp_path / "client.toml"
    config.write_text(
        '[client]\nserver = "old:1"\nname = "north"\n'
        '[tls]\nca = "above.pem"\ncertificate = "device.pem"\nkey = "device.pem"\n'
    )
    own = {"ca": "below.pem", "certificate": "server.pem", "key": "server.pem"}
    server = {**UPSTREAM, "upstream_config": config}
    above = settings_above(
        Settings.model_validate({"task": "x.py:X", "server": server, "tls": own})
    )
    assert (above.client.server, above.client.name) == (UPSTREAM["upstream"], "north")
    assert (above.tls.ca, above.task) == (Path("above.pem"), "x.py:X")


def test_the_aggregator_s_file_without_a_server_above_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "client.toml"
    config.write_text('[client]\nname = "north"\n')
    command = ["--task", "absent.py:Task", "--upstream-config", str(config)]
    found = CliRunner(env={"COLUMNS": "200"}).invoke(app, command)
    assert found.exit_code == 2
    assert "--upstream-config is for an aggregator" in found.output
