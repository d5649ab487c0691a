"""The Ray of a simulation listens on all addresses of the machine, and runs what it is sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from headwater.common.errors import SettingsError
from headwater.common.settings.sources import load
from headwater.simulation.cluster import ray_cluster

pytest.importorskip("ray")

# Says where it is, and with which token; ends with its standard input.
CLUSTER = """
import json, os, sys
from pathlib import Path
from headwater.common.settings.sources import load
from headwater.simulation.cluster.ray_cluster import joined

with joined(load(None, {"simulation.clients": 2}), Path(sys.argv[1])):
    import ray
    token = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    address = ray.get_runtime_context().gcs_address
    print(json.dumps({"address": address, "token": token}), flush=True)
    sys.stdin.read()
print("left" if token.keys() & os.environ.keys() else "taken back", flush=True)
"""
JOIN = """
import sys
import ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
print("ran:", ray.get(ray.remote(lambda: "code of a stranger").remote(), timeout=30))
"""


def joining(address: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Let another process send a function to a cluster; what it knows are its own variables."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    return subprocess.run(
        [sys.executable, "-c", JOIN, address],
        env={**own, **variables, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_a_stranger_without_the_token_runs_no_code_on_a_simulation_s_ray() -> None:
    with TemporaryDirectory(dir=ray_cluster.RAY_FOLDER_PARENT) as folder:
        command = [sys.executable, "-c", CLUSTER, folder]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, text=True, **pipes) as cluster:  # type: ignore[call-overload]
            there = json.loads(cluster.stdout.readline())
            address, token = there["address"], there["token"]
            known: tuple[dict[str, str], ...] = ({}, {**token, "RAY_AUTH_TOKEN": "0" * 64}, token)
            with ThreadPoolExecutor() as pool:
                joined = pool.map(lambda variables: joining(address, **variables), known)
                stranger, guesser, owner = joined
            said, _ = cluster.communicate("", timeout=120)
    assert "ran:" not in stranger.stdout + guesser.stdout
    assert "oken" in stranger.stderr
    assert "ran: code of a stranger" in owner.stdout, owner.stderr
    assert said.strip() == "taken back"


def test_a_ray_that_knows_no_tokens_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "version", lambda name: "2.51.1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        pytest.raises(SettingsError, match="lets everybody who reaches this machine"),
        ray_cluster.joined(load(None, {}), tmp_path),
    ):
        pass
